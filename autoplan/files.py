"""Write files whole or not at all.

This is the one module that opens a file to write. It imports nothing of autoplan, so that the runtime and the cost
models can use it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_MODE = 0o644  # of a new file; temporary files are private


def write_whole(path: Path | str, data: str | bytes) -> None:
    """Write `data` (text in UTF-8). Readers see the old file or the new one, and a failure leaves no file behind.

    A file keeps its permissions, and a link its target. A path that is not a file (a pipe, /dev/stdout) is written to
    directly. Several processes may write the same path at once: one of them wins. Raises OSError.
    """
    path = Path(path)
    content = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    mode = path.stat().st_mode & 0o777 if path.exists() else _MODE
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


class AppendedFile:
    """A file that grows by whole pieces: every appended piece stays in it, whatever ends the process.

    It begins with `head`, which replaces earlier contents. Raises OSError.
    """

    def __init__(self, path: Path | str, head: str) -> None:
        write_whole(path, head)
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  closed by close()

    def append(self, text: str) -> None:
        """Append `text`, or nothing of it if it cannot be written whole."""
        data = memoryview(text.encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe cannot be truncated
                os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def temporary_folder(owner: object) -> Path:
    """Return a new folder that is removed with `owner`, or at the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="autoplan_"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder
