"""The clock that every time limit of a search reads.

Tests replace `now_s` by one that counts its readings. What is found in time then depends on the work done between two
readings, and not on the machine.
"""

from __future__ import annotations

import time


def now_s() -> float:
    """Return seconds since some fixed moment."""
    return time.perf_counter()
