"""Hugging Face models: classes untouched, attention captured as one op.

Tracing HF attention as it is builds an explicit S x S mask. Registering an attention function and a mask function for
the time of the capture (both: without padding the mask is plain `is_causal`, which flash attention and context
parallelism need) keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import windows  # noqa: F401  registers the op
from autoplan.cost_models.errors import CaptureError

_NAME = "autoplan_capture"


def is_hf_model(model: nn.Module) -> bool:
    """True for a transformers PreTrainedModel, without importing transformers."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def refuse_padding(example_inputs: Mapping[str, torch.Tensor]) -> None:
    """Padding masks are not captured: CaptureError says what to pass instead."""
    if "attention_mask" in example_inputs:
        raise CaptureError(
            "attention_mask is not supported: pass unpadded or packed sequences and mark tokens that do not count with "
            "label -100"
        )


def refuse_router_loss(model: nn.Module) -> None:
    """A loss of the routers is a product of means over the tokens of all layers, which the capture does not carry: the
    routers of layers that are captured once are not run. CaptureError says what to set, instead of leaving it out.
    """
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "output_router_logits", False):
        raise CaptureError(
            f"{type(model).__name__} has output_router_logits=True: its auxiliary loss (router_aux_loss_coef="
            f"{getattr(config, 'router_aux_loss_coef', None)}) needs the router logits of every layer at the end of "
            "the model, and layers hand over only what the next one takes; set "
            "model.config.output_router_logits=False and train without it"
        )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if kwargs.get("softcap") is not None:
        raise CaptureError("attention with logit soft-capping is not supported")
    if kwargs.get("s_aux") is not None:
        raise CaptureError("attention with sinks (a learned logit per head) is not supported")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = kwargs.get("sliding_window")
    if window is not None:
        if not causal or attention_mask is not None:
            raise CaptureError("attention over a sliding window is captured where it is causal and has no other mask")
        windowed = torch.ops.autoplan.windowed_attention(query, key, value, int(window), scaling)
        return windowed.transpose(1, 2).contiguous(), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal and attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, config: Any = None, local_size: int | None = None, **kwargs: Any) -> None:
    """The mask of the layers that ask for one: none, as their attention knows that it is causal, or its window.

    Raises: CaptureError for a mask that this would lose.
    """
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise CaptureError(f"attention in chunks of {local_size} tokens is not supported")


@contextmanager
def configured(model: nn.Module, attribute: str, value: str) -> Iterator[None]:
    """Every config of the model that has the attribute has this value inside."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(c, getattr(c, attribute)) for c in configs if hasattr(c, attribute)]
    try:
        for config, _ in before:
            setattr(config, attribute, value)
        yield
    finally:
        for config, old in before:
            setattr(config, attribute, old)


@contextmanager
def capture_attention(model: nn.Module) -> Iterator[None]:
    """Use the captured form of attention inside; the model's own choice is restored."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)
    with configured(model, "_attn_implementation", _NAME):
        yield


def default_example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Shapes to capture a causal language model with when the caller gives none: batch 2, up to 2,048 tokens."""
    limit = getattr(model.config, "max_position_embeddings", None) or 2048
    ids = torch.zeros(2, min(int(limit), 2048), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}
