"""Files that commands write, whole or row by row; unwritable paths are refused before the work, not after it."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from autoplan.errors import PinError
from autoplan.files import AppendedFile, write_whole


def check_writable(path: Path | str) -> None:
    """Raise PinError if a path is a folder, or if its folder is missing or not writable. Writes nothing."""
    path = Path(path)
    if os.path.isdir(path):  # like the tests below False, not an error, for paths that may not be looked at
        raise PinError(f"cannot write {path}: it is a folder; name a file in it, for example {path / 'out'}")
    if not os.path.isdir(path.parent):
        raise PinError(f"cannot write {path}: there is no folder {path.parent}; make it, or name another")
    if not os.path.exists(path) and not os.access(path.parent, os.W_OK):
        raise PinError(f"cannot write {path}: folder {path.parent} may not be written in; name another")


def write_text(path: Path | str, text: str) -> None:
    """Write `text` as `autoplan.files.write_whole` does. Raises PinError if it cannot be written."""
    check_writable(path)
    with _writing(path):
        write_whole(path, text)


@contextlib.contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    """Turn an OSError into a PinError that names `path`."""
    try:
        yield
    except OSError as error:
        raise PinError(f"cannot write {path}: {error.strerror or error}") from error


class CsvFile:
    """A CSV file of rows with the same columns, written row by row: killed at any time, it holds the rows so far.

    Until the first row it holds the line of column names. Raises PinError if it cannot be written.
    """

    def __init__(self, path: Path | str, columns: Sequence[str]) -> None:
        self._path, self._columns = path, list(columns)
        check_writable(path)
        with _writing(path):
            self._file = AppendedFile(path, _line(self._columns))

    def add(self, row: Mapping[str, object]) -> None:
        """Append one row. Raises ValueError if it has other columns."""
        if list(row) != self._columns:
            raise ValueError(f"columns {list(row)} are not those of {self._path}: {self._columns}")
        with _writing(self._path):
            self._file.append(_line(list(row.values())))

    def __enter__(self) -> CsvFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@contextlib.contextmanager
def csv_rows(path: Path | None, columns: Sequence[str]) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """Yield a function that appends a row to a CsvFile; it does nothing if there is no path."""
    if path is None:
        yield lambda row: None
        return
    with CsvFile(path, columns) as file:
        yield file.add


def _line(values: Sequence[object]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(values)
    return text.getvalue()
