"""The clock that every time limit of a search reads.

On a busy machine a search gets less of a core, and would have found less at its limit: plans up to 37 % slower where
13 processes shared two cores. So of the time in which the thread could run and had no core, most does not count; a
search takes at most `1 / (1 - _NOT_COUNTED)` times its limit.

Tests replace `now_s` by one that counts its readings. What is found in time then depends on the work done between two
readings, and not on the machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Linux: nanoseconds that this thread has run, nanoseconds that it has waited for a core, turns
# (Documentation/scheduler/sched-stats.rst)
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_ENOUGH = 128  # bytes: three numbers
_NOT_COUNTED = 2 / 3


def now_s() -> float:
    """Return seconds since some fixed moment, without most of those in which other processes had the core."""
    return time.perf_counter() - _NOT_COUNTED * _waited_s()


def _waited_s() -> float:
    """Return how long this thread has waited for a core since its start; 0 where that is not known."""
    try:  # a search asks thousands of times: Path.read_text takes twice as long
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
        try:
            return int(os.read(file, _ENOUGH).split()[1]) * 1e-9
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0.0
