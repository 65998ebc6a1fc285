"""Attention over a sliding window or inside documents, and attention with a bias, each as one op.

All of them may also be causal. torch has no operation for them that capture could keep whole.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("autoplan::masked_attention", mutates_args=())
def masked_attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Mark attention in which a token sees only its own document ([b, s]) and the last `window` tokens of it."""
    raise RuntimeError("autoplan::masked_attention is a capture marker and cannot be run")


@masked_attention_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("autoplan::biased_attention", mutates_args=())
def biased_attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    """Mark attention with a `bias` that is added to the scores and broadcastable to them."""
    raise RuntimeError("autoplan::biased_attention is a capture marker and cannot be run")


@biased_attention_op.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
