"""Write files whole or not at all.

This is the one module that opens a file to write, and the one that knows where files are cached. It imports nothing of
autoplan, so that the runtime and the cost models can use it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

CACHE_VARIABLE = "AUTOPLAN_CACHE"  # the environment variable that names the folder of all cached files
_MODE = 0o644  # of a new file; temporary files are private


def json_of(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the data of a JSON text. Raises ValueError for everything that cannot be read, also what nests too deep.

    Args:
        parse_constant: What to make of NaN and Infinity, as `json.loads` takes it.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


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
    with _replacing(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def _replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the context ends; an error inside leaves nothing behind."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            os.unlink(name)
        _name_file(exc, path)
        raise


def _name_file(error: BaseException, path: Path) -> None:
    """Give an OSError of a file that is open the file's name: of a full disk Python does not say it."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


class WrittenFile(NamedTuple):
    """The fingerprint of a file: its size in bytes, and the SHA-256 of its content in hexadecimal digits."""

    num_bytes: int
    sha256: str


def write_pieces(path: Path | str, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write a file piece by piece, whole or not at all, and wait until it is on the disk. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with _replacing(Path(path), _MODE) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(size, digest.hexdigest())


def digest_of(path: Path | str) -> WrittenFile:
    """Return the size and digest of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with Path(path).open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return WrittenFile(size, digest.hexdigest())


_PIECE_BYTES = 1 << 24


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of cached files: in `CACHE_VARIABLE`, or in `autoplan` of the user's cache folder.

    It need not exist, and cannot for a user without a home, as in some containers: then nothing is kept. `kind`: what
    the files are, `graphs`.
    """
    given, caches = (os.environ.get(name) for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"))
    if given:
        return Path(given) / kind
    try:
        base = Path(caches) if caches else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry of the user
        base = Path(os.devnull)
    return base / "autoplan" / kind


def read_cached(path: Path) -> str | None:
    """Return the text of a cached file; None if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def keep_cached(path: Path, text: str) -> bool:
    """Write a cached file, with its folders. Return False if it cannot be kept: what needs it makes it again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return False
    return True


@functools.cache
def code_hash(*places: str) -> str:
    """Return the SHA-256 of sources and data of autoplan, as a checkout changes without its version.

    Args:
        places: subpackages, of which all Python files count, folders of `profiles`, of which all JSON files count, and
            files.
    """
    found, root = hashlib.sha256(), Path(__file__).parent
    for place in places:
        pattern = "*.json" if place.startswith("profiles") else "*.py"
        for path in [root / place] if place.endswith(".py") else sorted((root / place).rglob(pattern)):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def fresh_folder(path: Path | str) -> Path:
    """Make an empty folder; whatever had its name is removed. Raises OSError."""
    path = Path(path)
    remove_folder(path)
    path.mkdir(parents=True)
    return path


def move_folder(path: Path | str, to: Path | str) -> None:
    """Give a folder beside it another name, in one step if no folder has that name yet. Raises OSError."""
    path, to = Path(path), Path(to)
    for changed in (path, path.parent):
        _wait_for_disk(changed)
    old = to.with_name(f".{to.name}.old")
    remove_folder(old)
    if to.exists():
        os.rename(to, old)
    os.rename(path, to)
    _wait_for_disk(to.parent)
    remove_folder(old)


def remove_folder(path: Path | str) -> None:
    """Remove a folder with its content, if there is one. It loses its name first. Raises OSError."""
    path = Path(path)
    if not path.exists():
        return
    gone = path
    if not path.name.startswith("."):
        gone = path.with_name(f".{path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
    shutil.rmtree(gone)


def _wait_for_disk(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
