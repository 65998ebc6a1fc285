"""Numbers that only the device knows and the host needs: copied once, also where a forward runs again.

A copy of a tensor to the host waits until the device has made it. Where a block is computed again for its backward the
numbers are those of the first time: :func:`kept_copies` keeps them.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

import torch

__all__ = ["kept_copies", "to_host"]


class _Kept:
    """Copies of one forward, in order; each time it is entered they are given out from the first one on."""

    def __init__(self) -> None:
        self._copies: list[list[int]] = []
        self._next = 0

    def copy(self, x: torch.Tensor) -> list[int]:
        if self._next == len(self._copies):
            self._copies.append(x.tolist())
        self._next += 1
        return self._copies[self._next - 1]


class _Entered:
    """A context in which copies are those of `kept`. Backwards of parts of a graph enter it several times."""

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
    """Contexts of a forward and of its repetition: `context_fn` of `torch.utils.checkpoint`. In the second, `to_host`
    returns what it returned in the first, call by call."""
    kept = _Kept()
    return _Entered(kept), _Entered(kept)


def to_host(x: torch.Tensor) -> list[int]:
    """The integers of `x`, [n]; the host waits for them, but for those that a forward that runs again had before."""
    kept = _current.get()
    return x.tolist() if kept is None else kept.copy(x)
