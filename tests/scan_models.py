"""Small models of transformers with state-space and linear attention layers, and a job that trains one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import torch
from one_step import errors_of_a_step

import autoplan

_TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION = {
    **_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 512, "num_hidden_layers": 2,
}  # fmt: skip
_SCAN = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mamba": {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
    "mamba2": {
        **_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "expand": 2, "chunk_size": 16,
    },
    "bamba": {**_ATTENTION, **_SCAN, "attn_layer_indices": [1]},
    "qwen3_next": {**_ATTENTION, **_DELTA, "mlp_only_layers": [0, 1]},
    "rwkv": {
        **_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 48,
        "context_length": 512,
    },
    "minimax": {**_ATTENTION, "num_local_experts": 4, "block_size": 16, "layer_types": ["linear_attention"] * 2},
}  # fmt: skip


def made(kind: str) -> torch.nn.Module:
    """Return a model with values that make every part of it matter."""
    import transformers

    torch.manual_seed(0)
    settings: Any = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    settings._experts_implementation = "eager"
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "A_log" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)
            elif "A_log" not in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def errors(rank: int, world: int, kind: str, pins: dict[str, Any]) -> tuple[float, float, str]:
    """Relative error of the loss, and the worst of a gradient; the program."""
    model, batch = made(kind), models.token_batch(4, 40)
    pm = autoplan.parallelize(
        model, "local", example_inputs={n: x[:2] for n, x in batch.items()}, pins=pins, global_batch_size=4
    )
    loss, gradient, _ = errors_of_a_step(pm, model, batch, lambda: model(**batch).loss)
    return loss, gradient, "".join(pm.source.values())
