"""A line on stderr that says what a person waits for."""

from __future__ import annotations

import sys
from typing import Any


class _Quiet:
    """Stands for a status line where nobody looks."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, text: str) -> None:
        """Nothing to show."""


def waiting(what: str, quiet: bool) -> Any:
    """A context: a line on stderr while a person waits, changed by its `update(text)`; nothing in files and pipes."""
    if quiet or not sys.stderr.isatty():
        return _Quiet()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} (Ctrl-C: best so far)")
