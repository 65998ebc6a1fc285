"""Numbers that only the device knows and the host needs: copied once, even if a forward is recomputed.

A copy of a tensor to the host waits until the device has made it. A recomputed block uses the numbers of its first
forward, which :func:`kept_copies` keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

import torch


class _Kept:
    """Copies made in one forward, in order; each time it is entered they are returned from the first one on."""

    def __init__(self) -> None:
        self._copies: list[list[int]] = []
        self._next = 0

    def copy(self, x: torch.Tensor) -> list[int]:
        if self._next == len(self._copies):
            self._copies.append(x.tolist())
        self._next += 1
        return self._copies[self._next - 1]


class _Entered:
    """A context that takes copies from `kept`. Backwards of parts of a graph enter it several times."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._before: list[Token[_Kept | None]] = []

    def __enter__(self) -> None:
        self._kept._next = 0
        self._before.append(_current.set(self._kept))

    def __exit__(self, *_: object) -> None:
        _current.reset(self._before.pop())


_current: ContextVar[_Kept | None] = ContextVar("kept copies", default=None)


def kept_copies() -> tuple[_Entered, _Entered]:
    """Return contexts for a forward and for its recompute: the `context_fn` of `torch.utils.checkpoint`.

    In the second context `to_host` returns its results of the first, call by call.
    """
    kept = _Kept()
    return _Entered(kept), _Entered(kept)


_balanced: ContextVar[bool] = ContextVar("balanced rows", default=False)


@contextmanager
def balanced_rows() -> Iterator[None]:
    """Give every expert its equal share of the rows, whatever the tensors say: a rehearsal has tensors without values.

    It holds for the thread that enters it.
    """
    token = _balanced.set(True)
    try:
        yield
    finally:
        _balanced.reset(token)


def to_host(x: torch.Tensor, num_rows: int, num_experts: int) -> list[int]:
    """Return the integers of `x`, [n]. The host waits for them; a recomputed forward reuses the first forward's.

    Args:
        x: numbers of rows per expert; further ones follow after those of `num_experts` experts.
        num_rows: the rows that `num_experts` experts share, which only `balanced_rows` needs.
    """
    if _balanced.get():
        ends = [num_rows * i // num_experts for i in range(num_experts + 1)]
        shares = [end - begin for begin, end in itertools.pairwise(ends)]
        return [shares[i % num_experts] for i in range(x.shape[0])]
    kept = _current.get()
    return x.tolist() if kept is None else kept.copy(x)
