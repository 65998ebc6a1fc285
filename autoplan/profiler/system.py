"""The machine's commands and kernel files, behind one interface that tests replace."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

_COMMAND_TIMEOUT_S = 20.0  # nvidia-smi takes seconds if the driver has to be loaded first


class Unreadable(Exception):
    """A fact that this machine does not give, and why. Caught, and noted, where the fact is optional."""


class System(Protocol):
    """A machine that answers questions."""

    def run(self, *command: str) -> str:
        """Return the standard output of a command. Raises Unreadable if it is missing, fails or hangs."""
        ...

    def read(self, path: str) -> str:
        """Return a text file without the white space around it. Raises Unreadable if there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        ...


class ThisMachine:
    """The machine that this process runs on."""

    def run(self, *command: str) -> str:
        """Return the standard output of a command."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise Unreadable(f"{command[0]} is not installed") from None
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise Unreadable(f"{' '.join(command)}: {exc}") from exc
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise Unreadable(f"{' '.join(command)}: exit code {done.returncode}{': ' + said[0] if said else ''}")
        return done.stdout

    def read(self, path: str) -> str:
        """Return the contents of a text file."""
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise Unreadable(f"{path}: {exc}") from exc

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return sorted(p.name for p in Path(folder).iterdir())
        except OSError:
            return []


def number_in(system: System, path: str) -> int | None:
    """Return the whole number in a file; None without one, or for -1, which the kernel writes for "not known"."""
    try:
        value = int(system.read(path))
    except (Unreadable, ValueError):
        return None
    return None if value < 0 else value


def rows_of(text: str, columns: int, what: str) -> list[list[str]]:
    """Return the rows of a table of nvidia-smi whose first column is an index. Raises Unreadable for other lines."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) != columns or not row[0].isdigit():
            raise Unreadable(f"nvidia-smi: {', '.join(row)!r} is not {what}")
    return rows
