"""Attention over a sliding window, inside documents, and with a bias besides being causal, each as one op: torch has no
operation for them that capture could keep whole."""

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
    """The marker of attention in which a token sees those of its own document ([b, s]), and of them only as many as the
    window."""
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
    """The marker that capture leaves in the graph. `bias`: added to the scores, broadcastable to them."""
    raise RuntimeError("autoplan::biased_attention is a capture marker and cannot be run")


@biased_attention_op.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
