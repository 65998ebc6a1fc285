"""Memory of the host that the C library keeps for later although it is free."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    """Return glibc's malloc_trim; None if the C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed_memory() -> None:
    """Give freed memory back to the system.

    glibc serves tensors up to 32 MiB from a heap once one of that size was freed (M_MMAP_THRESHOLD of mallopt(3)), and
    keeps what is freed in the midst of it. Blocks that are filled and sharded in turn would leave holes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
