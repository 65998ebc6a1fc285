"""Capture `x.split(y.shape[0])`, `x.chunk(2)` and `x[:n]`, where they make a fixed number of equal parts of any batch.

Heads of attention that are joined along the batch, and taken apart again (the Set Transformer), and pairs of answers
that are compared (DPO) are written so. PyTorch would count the parts at the size of the example, and fix the batch size
by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_SPLITS = (torch.split, torch.Tensor.split)
_CHUNKS = (torch.chunk, torch.Tensor.chunk)


def _arguments(tensor: Any, size: Any = None, dim: int = 0, **named: Any) -> tuple[Any, Any, int]:
    return tensor, named.get("split_size", named.get("split_size_or_sections", size)), dim


def _chunk_arguments(input: Any, chunks: Any = None, dim: int = 0) -> tuple[Any, Any, int]:
    return input, chunks, dim


class CaptureParts(TorchFunctionMode):
    """Replace splits into parts of a symbolic size that divides the dim by a number, splits into a number of parts that
    divides a symbolic dim, and slices that are such parts of dim 0."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _SPLITS:
            x, size, dim = _arguments(*args, **(kwargs or {}))
            number = _number_of(x.shape[dim], size)
            if number is not None:
                return x.unflatten(dim, (number, size)).unbind(dim % x.dim())
        if function in _CHUNKS:
            x, number, dim = _chunk_arguments(*args, **(kwargs or {}))
            size = x.shape[dim] // number if isinstance(x.shape[dim], torch.SymInt) else None
            if size is not None and _number_of(x.shape[dim], size) == number:
                return x.unflatten(dim, (number, size)).unbind(dim % x.dim())
        if function is torch.Tensor.__getitem__:
            part = _part_of(*args)
            return function(*args) if part is None else part
        return function(*args, **(kwargs or {}))


def _number_of(whole: Any, size: Any) -> int | None:
    """Return how many parts of a symbolic size a dim has, if that is a number for every size; else None."""
    if not isinstance(size, torch.SymInt) or not isinstance(whole, torch.SymInt):
        return None
    try:
        count = whole // size
    except ZeroDivisionError:  # a size that may be 0 makes no parts
        return None
    number = count if isinstance(count, int) else count.node.maybe_as_int()
    known = number is not None and statically_known_true(number * size == whole)
    return number if known else None


def _part_of(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return `x[:n]` or `x[n:]` if that is the first or last of several parts of n; None for another index."""
    if not isinstance(index, slice) or index.step is not None or not x.dim():
        return None
    first = index.start is None
    size = index.stop if first else index.start
    if not (first or index.stop is None) or (number := _number_of(x.shape[0], size)) is None or number < 2:
        return None
    if not first and number > 2:
        return None
    parts: tuple[torch.Tensor, ...] = x.unflatten(0, (number, size)).unbind(0)  # type: ignore[no-untyped-call]
    return parts[0] if first else parts[1]
