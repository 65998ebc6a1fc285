"""Context parallelism: every rank has a part of each sequence, and gathers keys and values for attention.

A sequence of s tokens is cut into 2 c equal chunks over c ranks; rank i has chunks i and 2 c - 1 - i, so that all ranks
have the same work under a causal mask (Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from autoplan.runtime.mesh import current_mesh


def context_length(s: int, axis: str) -> int:
    """Tokens of this rank's part of a sequence of ``s``."""
    return s // current_mesh().size(axis)


def context_part(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """This rank's two chunks of ``x`` along ``dim``, one behind the other.

    Raises:
        ValueError: the size of ``dim`` is not a multiple of twice the ranks.
    """
    mesh = current_mesh()
    ranks, index = mesh.size(axis), mesh.coordinate(axis)
    if ranks == 1:
        return x
    if x.shape[dim] % (2 * ranks):
        raise ValueError(
            f"a sequence of {x.shape[dim]} cannot be cut into {2 * ranks} equal chunks over {ranks} ranks of {axis}"
        )
    return _part(x.chunk(2 * ranks, dim), index, dim)


def _part(chunks: Sequence[torch.Tensor], index: int, dim: int) -> torch.Tensor:
    return torch.cat((chunks[index], chunks[-1 - index]), dim)


class _Gather(torch.autograd.Function):
    """[b, h, 2 l, d] of every rank -> [b, h, 2 l c, d] in the order of the sequence; gradients summed back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])  # gloo wants the ranks inside the first dim
        dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
        first, second = parts.view(ranks, *x.shape).chunk(2, dim=3)
        return torch.cat((*first.unbind(0), *second.flip(0).unbind(0)), dim=2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        chunks = grad.chunk(2 * ctx.ranks, dim=2)
        mine = [_part(chunks, i, 2) for i in range(ctx.ranks)]
        out = torch.empty_like(mine[0])
        dist.reduce_scatter_tensor(out, torch.cat(mine), group=ctx.group)
        return out, None, None


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    axis: str,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys of the whole sequence.

    Args:
        q: [b, h, 2 l, d]: two chunks of l tokens, as ``context_part`` cuts them; k, v alike.
        causal, scale, window: of ``autoplan.runtime.attention.attention``; a window needs ``causal``.

    Returns:
        [b, h, 2 l, e].
    """
    mesh = current_mesh()
    ranks, index, grouped = mesh.size(axis), mesh.coordinate(axis), q.shape[1] != k.shape[1]
    keys, values = (_Gather.apply(x, mesh.group(axis), ranks) for x in (k, v))  # type: ignore[no-untyped-call]
    if not causal:
        return functional.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=grouped)
    length = q.shape[2] // 2
    out = []
    for chunk, place in zip(q.chunk(2, dim=2), (index, 2 * ranks - 1 - index), strict=True):
        first, end = place * length, (place + 1) * length
        low = 0 if window is None else max(0, first - window + 1)  # no query of the chunk sees further back
        query = torch.arange(first, end, device=q.device)[:, None]
        distance = query - torch.arange(low, end, device=q.device)[None]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        part = functional.scaled_dot_product_attention(
            chunk, keys[:, :, low:end], values[:, :, low:end], attn_mask=seen, scale=scale, enable_gqa=grouped
        )
        out.append(part)
    return torch.cat(out, dim=2)
