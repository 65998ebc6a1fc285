"""A line on stderr that says what a person is waiting for."""

from __future__ import annotations

import sys
from typing import Any


class _Quiet:
    """The stand-in for a status line where nobody looks."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, text: str) -> None:
        """Show nothing."""


def waiting(what: str, quiet: bool) -> Any:
    """Return a context that shows a line on stderr, changed by its `update(text)`; nothing in files and pipes."""
    if quiet or not sys.stderr.isatty():
        return _Quiet()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} (Ctrl-C: best so far)")
