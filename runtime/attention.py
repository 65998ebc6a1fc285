"""Scaled-dot-product attention on local heads."""

from __future__ import annotations

import torch
from torch.nn import functional


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` with grouped heads when there are fewer k/v heads than q heads.

    Heads and batch may be sharded (V); the sequence and the head dim must be whole. Not linear: P is refused.

    Args:
        q: [b, h, s, d].
        k: [b, kv, t, d], kv a divisor of h; head i of q reads head ``i * kv // h``.
        v: [b, kv, t, e].
        causal: query i sees keys ``0..i`` (aligned at the start, as torch does when s != t).
        scale: of the scores; None is ``1 / sqrt(d)``.
        mask: bool (True takes part) or additive, broadcastable to [b, h, s, t]; applied besides ``causal``.
        dropout_p: must be 0.

    Returns:
        [b, h, s, e].

    Raises:
        ValueError: wrong number of dims, head counts that do not divide, or dropout.
    """
    if dropout_p != 0.0:
        raise ValueError(
            f"attention: dropout_p is {dropout_p}; the fused kernels draw their own masks, which differ between plans: "
            "set the attention dropout of the model to 0"
        )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"attention: q, k, v need 4 dims; they have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups != 0 or v.shape[1] != groups:
        raise ValueError(f"attention: {heads} query heads over {groups} key and {v.shape[1]} value heads")
    if causal and mask is not None:
        # SDPA takes one or the other.
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        causal = False
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=causal, scale=scale, enable_gqa=heads != groups
    )
