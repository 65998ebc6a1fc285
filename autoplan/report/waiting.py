"""A line on stderr that says what a person is waiting for."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any


def waiting(what: str, quiet: bool) -> Any:
    """Return a context that shows a line on stderr, changed by its `update(text)`; nothing in files and pipes."""
    if quiet or not sys.stderr.isatty():
        return nullcontext(SimpleNamespace(update=lambda text: None))
    from rich.console import Console

    return Console(stderr=True).status(f"{what} (Ctrl-C: best so far)")
