"""What the machine says of itself: commands and files of the kernel, behind one door that tests replace."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

_COMMAND_TIMEOUT_S = 20.0  # nvidia-smi takes seconds where the driver has to be loaded first


class Unreadable(Exception):
    """Something this machine does not say, and why. Caught where the answer is optional, and noted there."""


class System(Protocol):
    """A machine that can be asked."""

    def run(self, *command: str) -> str:
        """Standard output of a command. Unreadable if it is missing, fails or hangs."""
        ...

    def read(self, path: str) -> str:
        """A text file without the white space around it. Unreadable if there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        ...


class ThisMachine:
    """The machine that this process runs on."""

    def run(self, *command: str) -> str:
        """Standard output of a command."""
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
        """A text file."""
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise Unreadable(f"{path}: {exc}") from exc

    def names(self, folder: str) -> list[str]:
        """Names in a folder."""
        try:
            return sorted(p.name for p in Path(folder).iterdir())
        except OSError:
            return []


def number_in(system: System, path: str) -> int | None:
    """A whole number in a file; None where there is none, or -1, which the kernel writes for "not known"."""
    try:
        value = int(system.read(path))
    except (Unreadable, ValueError):
        return None
    return None if value < 0 else value
