"""Files that commands write: whole or not at all, and refused before hours of work rather than after them."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoplan.cost_models.errors import PinError

_MODE = 0o644  # of a new file; a temporary one is private


def check_writable(path: Path | str) -> None:
    """PinError for a path that is a folder, or whose folder is missing or not to be written in; nothing is written."""
    path = Path(path)
    if os.path.isdir(path):  # as those below False, not an error, for what may not be looked at
        raise PinError(f"cannot write {path}: it is a folder; name a file in it, for example {path / 'out'}")
    if not os.path.isdir(path.parent):
        raise PinError(f"cannot write {path}: there is no folder {path.parent}; make it, or name another")
    if not os.path.exists(path) and not os.access(path.parent, os.W_OK):
        raise PinError(f"cannot write {path}: folder {path.parent} may not be written in; name another")


def write_text(path: Path | str, text: str) -> None:
    """Write `text` in UTF-8: readers see the old file or the new one, and a failure leaves no other file behind.

    A file keeps its permissions, and a link goes on pointing where it did. What is no file (a pipe, /dev/stdout) is
    written to. Raises: PinError if it cannot be written.
    """
    path = Path(path)
    check_writable(path)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise PinError(f"cannot write {path}: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else _MODE
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_csv(path: Path | str, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with the same columns, as CSV with a line of their names. Raises: PinError if it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
