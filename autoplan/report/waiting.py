"""A line on stderr that says what a person is waiting for, and how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autoplan.config import numbers

if TYPE_CHECKING:
    from autoplan.search.progress import Progress

_HINT = "Ctrl-C: best so far"
INCOMPLETE = "interrupted: the answer is not complete"


def waiting(what: str, quiet: bool, hint: str = _HINT) -> Any:
    """Return a context that shows a line on stderr, changed by its `update(text)`; nothing in files and pipes.

    While it is shown, nothing else may be printed: `stop()` takes it away, and `start()` brings it back.

    Args:
        hint: what Ctrl-C does; "": it only ends the command.
    """
    if quiet or not sys.stderr.isatty():
        return nullcontext(SimpleNamespace(update=lambda text: None, stop=lambda: None, start=lambda: None))
    from rich.console import Console

    return Console(stderr=True).status(f"{what} ({hint})" if hint else what)


def telling(status: Any) -> Callable[[Progress], None]:
    """Return a function that shows the progress of a search in such a line."""
    return lambda progress: status.update(f"searching: {progress_text(progress)} ({_HINT})")


def progress_text(p: Progress) -> str:
    """Return the progress of a search in words: `12,345 candidates left, best 3.41 s, at most 4.2 % shorter`."""
    words = [f"{p.num_left:,} candidates left"]
    if p.best_s is not None:
        words.append(f"best {numbers.digits(p.best_s)} s")
    if p.gap is not None:
        words.append(f"the best of the space is at most {numbers.percent(p.gap)} shorter")
    return ", ".join(words)


class Countdown:
    """The time that is left of several pieces of work, if those to come take as long as those that are done."""

    def __init__(self, num: int, of: str) -> None:
        """Start to count. `of`: what the pieces are, in words, for example `points`."""
        self.num = num
        self.of = of
        self._start_s = time.perf_counter()

    def text(self, done: int) -> str:
        """Return `3 of 12 points, about 40 s left`."""
        words = f"{done} of {self.num} {self.of}"
        if not 0 < done < self.num:
            return words
        left_s = (time.perf_counter() - self._start_s) / done * (self.num - done)
        return f"{words}, about {left_s:.0f} s left" if left_s < 120 else f"{words}, about {left_s / 60:.0f} min left"
