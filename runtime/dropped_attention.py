"""Attention with dropout of its probabilities by kernels of our own on a GPU: the mask is drawn inside them.

The kernels (triton_attention.py) need Triton. Without it, on the CPU, and for what they do not take,
`autoplan.runtime.parts` computes the same in blocks of queries.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from autoplan.runtime.dropout import Drops, kept_below
from autoplan.runtime.fused import one_kernel
from autoplan.runtime.sdpa import HALVES
from autoplan.torch_kernels import LARGEST_DROPPED_HEAD

_Documents = tuple[torch.Tensor, torch.Tensor]
_Distances = tuple[int, int, int]  # `distances` of autoplan.runtime.parts


def takes_dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if the kernels take these queries, keys and values."""
    if q.device.type != "cuda" or q.dtype not in HALVES or max(k.shape[3], v.shape[3]) > LARGEST_DROPPED_HEAD:
        return False
    found: bool = one_kernel(q.device)
    return found


def adds_up(for_mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if the kernels add up the gradient of this mask: not of one alike for several queries or keys."""
    return for_mask is None or for_mask.shape[2:] == (q.shape[2], k.shape[2])


def _kernels() -> Any:
    return importlib.import_module("autoplan.runtime.triton_attention")  # imports triton


def _given(drops: Drops, documents: _Documents | None, mask: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """Return documents, mask and counters as the kernels read them: contiguous but for the mask."""
    ids = None if documents is None else tuple(x.to(torch.int64).contiguous() for x in documents)
    return ids, mask, tuple(x.contiguous() for x in (drops.counters, drops.queries, drops.keys))


def dropped_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    drops: Drops,
    distances: _Distances | None,
    scale: float,
    documents: _Documents | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `attend` of autoplan.runtime.parts returns."""
    b, heads, length, _ = q.shape
    out = q.new_empty(b, length, heads, v.shape[3]).transpose(1, 2)  # as the product behind it reads it
    beside = (*_given(drops, documents, mask), distances, scale, kept_below(drops.p), drops.scale)
    lse: torch.Tensor = _kernels().forward_kernel(q, k, v, out, *beside)
    return out, lse


def dropped_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    drops: Drops,
    distances: _Distances | None,
    scale: float,
    documents: _Documents | None,
    mask: torch.Tensor | None,
    for_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `attend_backward` of autoplan.runtime.parts returns."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    beside = (*_given(drops, documents, mask), distances, scale, kept_below(drops.p), drops.scale)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = _kernels().backward_kernels(grad, q, k, v, lse, delta, *beside, for_mask)
    return found
