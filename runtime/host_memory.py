"""Memory of this process on the host: its peak, and free memory that the C library keeps."""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from collections.abc import Callable
from typing import Any


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had, in bytes (getrusage(2); macOS counts bytes too)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
