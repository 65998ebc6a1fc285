"""Dropout inside attention: refused for a model that is executed, left out and reported for one that is only priced.

A mask inside a fused attention kernel cannot be reproduced across plans. Its cost is small beside the kernel's, so a
price without it is useful if it says what is missing (`ModelGraph.left_out`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from autoplan.errors import CaptureError

_FOUND: ContextVar[set[float] | None] = ContextVar("probabilities_left_out", default=None)


@contextmanager
def attention_dropout_left_out() -> Iterator[set[float]]:
    """Drop dropout in attention instead of refusing it, and yield the set of its probabilities."""
    found: set[float] = set()
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def check_attention_dropout(p: float, where: str, hint: str) -> None:
    """Raise CaptureError for dropout in attention, unless the context leaves it out."""
    if not p:
        return
    found = _FOUND.get()
    if found is None:
        raise CaptureError(f"dropout_p={p} inside {where} cannot be reproduced across plans; {hint}")
    found.add(p)
