"""The rows of a sweep, planned and written one by one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from autoplan.report.files import csv_rows
from autoplan.report.waiting import Countdown, waiting

_Found = TypeVar("_Found")
_Row = dict[str, object]


def planned_rows(
    pairs: Iterable[tuple[_Found, _Row]], columns: Sequence[str], left: Countdown, csv: Path | None, quiet: bool
) -> tuple[list[tuple[_Found, _Row]], bool]:
    """Plan row by row, and write each row when it is there. Return the rows, and True if they were interrupted.

    Args:
        pairs: What was found and its row; made one by one, which takes long.
        left: Counts the rows.
    """
    done: list[tuple[_Found, _Row]] = []
    with csv_rows(csv, columns) as add, waiting("planning", quiet) as status:
        try:
            for pair in pairs:
                with _ctrl_c_later():  # a row is in the file and counted, or neither
                    add(pair[1])
                    done.append(pair)
                status.update(f"planning: {left.text(len(done))}")
        except KeyboardInterrupt:  # between two searches; during a search, its last point says so
            return done, True
    return done, False


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block; threads other than the main one never see it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if pressed and callable(before):
        before(signal.SIGINT, None)
