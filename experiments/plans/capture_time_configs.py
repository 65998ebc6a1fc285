"""Configs of models of real size that are not in the catalog.

ViT-22B was never published; its sizes are in arXiv 2302.05442, table 1 (transformers' ViT computes attention and MLP
one after the other, and has no norms of queries and keys).
"""

from __future__ import annotations

from typing import Any

_VIT: dict[str, Any] = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 48, "intermediate_size": 24576, "image_size": 224, "patch_size": 14, "num_channels": 3,
    "qkv_bias": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "num_labels": 1000,
}  # fmt: skip

NOT_IN_THE_CATALOG: dict[str, dict[str, Any]] = {"vit-22b": _VIT}
