"""Attention written out in ops that have records."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def written_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `F.scaled_dot_product_attention` with its dropout as an op: the mask is then that of `nn.Dropout`.

    As in torch, the scores are computed in the dtype of the queries, and a query that sees no key gets zeros.

    Args:
        query: [..., heads, s, d]; key [..., kv, t, d] and value [..., kv, t, e], with kv = heads without `enable_gqa`.
        attn_mask: bool (True takes part) or added to the scores, broadcastable to [..., heads, s, t].

    Returns:
        [..., heads, s, e].
    """
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (_repeated(x, repeats) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        length, num_keys = query.shape[-2], key.shape[-2]
        rows = torch.arange(length, device=query.device)[:, None]
        scores = scores.masked_fill(rows < torch.arange(num_keys, device=query.device), float("-inf"))
    if attn_mask is None:
        return F.dropout(scores.softmax(-1), dropout_p) @ value
    if attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    else:
        hidden, scores = attn_mask == float("-inf"), scores + attn_mask
    shares = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
    return F.dropout(shares, dropout_p) @ value


def attention_of_four_dims(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `F.scaled_dot_product_attention` of [s, d], [b, s, d] or [..., b, heads, s, d] on [b, heads, s, d].

    Args:
        query, key, value: with the same leading dims but that of heads; attn_mask: as for `written_attention`.

    Returns:
        What torch returns, of as many dims as the query.
    """
    dims = query.dim()
    if dims < 4:
        before = (1,) * (4 - dims)
        q, k, v = (x.reshape(*x.shape[: dims - 2], *before, *x.shape[dims - 2 :]) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 3:  # one for each sample
            attn_mask = attn_mask.unsqueeze(1)
    else:
        q, k, v = (x.flatten(0, -4) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return found.reshape(*query.shape[:-1], value.shape[-1])


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Return [..., kv, t, d] as [..., kv * times, t, d], every head `times` times in a row."""
    *batch, heads, length, width = x.shape
    wide = x.unsqueeze(-3).expand(*batch, heads, times, length, width)
    return wide.reshape(*batch, heads * times, length, width)
