"""Indexing with the numbers of the samples: `x[torch.arange(batch), last]`, as classifiers take the last token.

Such numbers count the samples of one process. As tensors they would have to be the same however the batch is split, so
the batch could not be split. An index that goes through a dim from first to last selects nothing: without it the op is
a view, or a gather along the next dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_WHOLE = (torch.int64, torch.int32)
_COUNTS = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
_MOVES = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default", "aten.alias.default")
# ops that keep the elements of a tensor in their order; a slice may leave some out, which its size shows
_KEEPS_ORDER = frozenset(
    "aten.unsqueeze.default aten.view.default aten.reshape.default aten._unsafe_view.default aten.to.dtype "
    "aten.to.dtype_layout aten.to.device aten._to_copy.default aten.clone.default aten.alias.default "
    "aten.slice.Tensor".split()
)


def one_copy(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a slice takes one copy of, where the slice's argument is that tensor for every sample.

    A row of prompt tokens, expanded over the batch and cut to its first sample again, is the row.
    """
    given = node.args[0] if str(node.target) == "aten.slice.Tensor" else None
    while isinstance(given, fx.Node) and str(given.target) in _MOVES:
        given = given.args[0]
    if not isinstance(given, fx.Node) or str(given.target) != "aten.expand.default":
        return None
    single = given.args[0]
    if not isinstance(single, fx.Node) or single.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return single if [*map(str, single.meta["val"].shape)] == [*map(str, node.meta["val"].shape)] else None


def _numbers(index: object, size: Any) -> bool:
    """Return True for an index with the numbers 0, 1, ... below `size`, in one dim of its own."""
    while isinstance(index, fx.Node):
        value = index.meta["val"]
        if [str(n) for n in value.shape if not _is_one(n)] != [str(size)] or value.dtype not in _WHOLE:
            return False
        if str(index.target) not in _KEEPS_ORDER:
            first, step = (*index.args, 1)[:3:2] if len(index.args) > 1 else (0, 1)
            return str(index.target) in _COUNTS and (first, step) == (0, 1)
        index = index.args[0]
    return False


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _indices(node: fx.Node) -> tuple[torch.Tensor, list[Any]]:
    tensor, indices = node.args
    assert isinstance(tensor, fx.Node) and isinstance(indices, (list, tuple))
    return tensor.meta["val"], list(indices)


def _place(index: torch.Tensor, num_dims: int) -> int:
    """Return the dim of the result that an index of numbers goes along."""
    (own,) = (d for d, n in enumerate(index.shape) if not _is_one(n))
    return own + num_dims - index.dim()


def is_view(node: fx.Node) -> bool:
    """Return True for indices that are all numbers, along dims of the result that are in order."""
    tensor, indices = _indices(node)
    if not all(_numbers(i, n) for i, n in zip(indices, tensor.shape, strict=False)):
        return False
    values = [i.meta["val"] for i in indices]
    places = [_place(v, max(v.dim() for v in values)) for v in values]
    return places == sorted(set(places))


def viewed(self: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Write indices for which `is_view` holds as a view."""
    num_dims = max(i.dim() for i in indices)
    shape: list[Any] = [1] * num_dims
    for index, size in zip(indices, self.shape, strict=False):
        shape[_place(index, num_dims)] = size
    return self.reshape(*shape, *self.shape[len(indices) :])


def is_gather(node: fx.Node) -> bool:
    """Return True for the numbers of dim 0 along dim 0 of the result, and any places in dim 1."""
    tensor, indices = _indices(node)
    if len(indices) != 2 or not isinstance(indices[1], fx.Node) or not _numbers(indices[0], tensor.shape[0]):
        return False
    first, second = (i.meta["val"] for i in indices)
    num_dims = max(first.dim(), second.dim())
    return second.dtype in _WHOLE and _place(first, num_dims) == 0


def written_gather(self: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Write indices for which `is_gather` holds as a gather along dim 1. Places below 0 count from its end."""
    first, second = indices
    places = torch.where(second < 0, second + self.shape[1], second).long()
    shape = (first + places).shape
    places = places.expand(shape).reshape(shape[0], -1)
    rest = self.shape[2:]
    flat = places.reshape(*places.shape, *[1] * len(rest)).expand(*places.shape, *rest)
    return self.gather(1, flat).reshape(*shape, *rest)
