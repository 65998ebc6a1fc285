"""Dropout inside attention: refused where a model is to be executed, left out and said where it is only priced.

A mask inside a fused kernel of attention cannot be reproduced across plans. Its cost is small beside the kernel's, so a
price without it is of use, as long as it says what is missing (`ModelGraph.left_out`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from autoplan.errors import CaptureError

_FOUND: ContextVar[set[float] | None] = ContextVar("probabilities_left_out", default=None)


@contextmanager
def attention_dropout_left_out() -> Iterator[set[float]]:
    """Inside, capture drops dropout in attention instead of refusing it; yields the probabilities it met."""
    found: set[float] = set()
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def check_attention_dropout(p: float, where: str, hint: str) -> None:
    """Raise CaptureError for dropout in attention, unless it is left out here."""
    if not p:
        return
    found = _FOUND.get()
    if found is None:
        raise CaptureError(f"dropout_p={p} inside {where} cannot be reproduced across plans; {hint}")
    found.add(p)
