"""Strides of a tensor after an operation, and so whether torch returns a view or a copy. Torch-free, on numbers.

A view keeps its whole base alive, a copy does not: activation memory depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Ints = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Ints:
    """Return row-major strides."""
    out, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        out[i] = step
        step *= max(shape[i], 1)
    return tuple(out)


def is_contiguous(shape: Ints, strides: Ints) -> bool:
    """Return the value of `Tensor.is_contiguous`: strides of dims of size 1 do not count."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def reshaped(shape: Ints, strides: Ints, new: Ints) -> Ints | None:
    """Return the strides of a view of another shape with as many elements, or None if torch has to copy.

    `at::detail::computeStride`: dims that are adjacent in memory are merged, and each chunk is split again.
    """
    out = [0] * len(new)
    at = len(new) - 1
    base, chunk, view = (strides[-1] if strides else 1), 1, 1
    for d in range(len(shape) - 1, -1, -1):
        chunk *= shape[d]
        if d == 0 or (shape[d - 1] != 1 and strides[d - 1] != chunk * base):
            while at >= 0 and (view < chunk or new[at] == 1):
                out[at] = view * base
                view *= new[at]
                at -= 1
            if view != chunk:
                return None
            if d > 0:
                base, chunk, view = strides[d - 1], 1, 1
    if not shape:
        return contiguous(new)
    return tuple(out) if at == -1 else None


def broadcast(shape: Ints, strides: Ints, new: Ints) -> Ints:
    """Return the strides of `expand(new)`."""
    skip = len(new) - len(shape)
    inside = (0 if size == 1 != want else stride for size, stride, want in zip(shape, strides, new[skip:], strict=True))
    return (0,) * skip + tuple(inside)


def elementwise(operands: Sequence[tuple[Ints, Ints]], out: Ints) -> Ints:
    """Return the strides of the result of an element-wise operation on operands (shape, strides).

    `TensorIteratorBase::reorder_dimensions`: dims are ordered by the strides of the first operand that tells them
    apart; the result is dense in that order.
    """
    if all(shape == out and is_contiguous(shape, strides) for shape, strides in operands):
        return contiguous(out)
    wide = [broadcast(shape, strides, out) for shape, strides in operands]
    order = list(range(len(out)))[::-1]  # fastest first

    def compare(a: int, b: int) -> int:
        for strides in wide:
            x, y = strides[a], strides[b]
            if x == 0 or y == 0:
                continue
            if x != y:
                return 1 if x > y else -1
            if out[a] > out[b]:
                return 1
        return 0

    for i in range(1, len(order)):
        right = i
        for left in range(i - 1, -1, -1):
            found = compare(order[left], order[right])
            if found > 0:
                order[left], order[right] = order[right], order[left]
                right = left
            elif found < 0:
                break
    result, step = [0] * len(out), 1
    for d in order:
        result[d] = step
        step *= max(out[d], 1)
    return tuple(result)


ViewStrides = Callable[[Mapping[str, Any], Ints, Ints, Sequence[Ints]], list[Ints | None]]  # None if torch copies
