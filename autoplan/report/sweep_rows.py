"""The rows of a sweep, planned and written one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
                done.append(pair)
                add(pair[1])
                status.update(f"planning: {left.text(len(done))}")
        except KeyboardInterrupt:  # between two searches; during a search, its last point says so
            return done, True
    return done, False
