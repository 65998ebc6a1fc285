"""Standard output of a command: a loss is an error, so that a command never ends with exit code 0 and no output.

Python itself ignores a closed standard output, and meets a full disk only at its end, with a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

EXIT_LOST_OUTPUT = 4
EXIT_INTERRUPTED = 130  # by Ctrl-C: 128 + SIGINT
TOO_EARLY = "interrupted before there was an answer"
EXIT_BROKEN_PIPE = 141  # the reader has gone (`| head -1`): 128 + SIGPIPE, as a shell reports it


class LostOutput(Exception):
    """Standard output cannot be written. Not an OSError: terminal libraries swallow those."""


class _Checked:
    """A text stream whose failures are LostOutput."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        with _lost():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        with _lost():
            self._stream.flush()


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LostOutput(error) from error


def say_error(message: str) -> None:
    """Print one line on stderr; if stderr cannot be written, the exit code stays."""
    _say("error", message)


def say_note(message: str) -> None:
    """Print on stderr, in one line, what the user may not expect of the answer."""
    _say("note", message)


def _say(kind: str, message: str) -> None:
    with suppress(OSError, ValueError):
        print(f"{kind}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def put(answer: Mapping[str, Any], as_json: bool, show: Callable[[Console], object]) -> None:
    """Print the answer of a command: as JSON, or as the text that `show` prints."""
    from autoplan.report.data import to_text
    from autoplan.report.text import console

    if as_json:
        print(to_text(answer))
    else:
        show(console())


@contextmanager
def written_output() -> Iterator[None]:
    """Guard standard output: if it cannot be written, the command ends with one line on stderr and EXIT_LOST_OUTPUT.

    A closed standard output is refused before any work. A pipe whose reader is gone ends the command silently, with
    EXIT_BROKEN_PIPE.
    """
    stream = cast(TextIO | None, sys.stdout)
    if stream is None:  # it was closed when Python started
        say_error("standard output is closed: nothing could be shown; redirect it to a file or /dev/null")
        raise SystemExit(EXIT_LOST_OUTPUT)
    checked = _Checked(stream)
    sys.stdout = cast(TextIO, checked)
    try:
        try:
            yield
        finally:
            checked.flush()
    except LostOutput as lost:
        _discard(stream)
        error = lost.args[0]
        if error.errno == errno.EPIPE:
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        say_error(f"standard output cannot be written: {error.strerror or error}; what was to be shown is lost")
        raise SystemExit(EXIT_LOST_OUTPUT) from None
    finally:
        sys.stdout = stream


def _discard(stream: TextIO) -> None:
    """Drop the rest of the stream's buffer, which Python would try to write at its end."""
    with suppress(OSError, ValueError):  # a stream without a file, or a closed one
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
