"""The tested versions of Python and of the packages that autoplan needs (docs/versions.md), and a warning about others.

pyproject.toml allows the same ranges (tests/house); the warning is for users who installed a version outside them.
"""

import logging
import os
import sys
from collections.abc import Mapping
from importlib import metadata

__version__ = "0.1.0"  # of autoplan

Version = tuple[int, ...]

# The oldest and the newest tested release, compared to as many places as are written here.
TRIED: Mapping[str, tuple[Version, Version]] = {
    "Python": ((3, 11), (3, 13)),
    "torch": ((2, 13), (2, 15)),
    "transformers": ((5, 12), (5, 23)),
    "spmd_types": ((0, 3, 1), (0, 3, 1)),
}


def _release(version: str) -> Version:
    """Return the numbers of a version: (2, 15, 0) for 2.15.0+cu132, (2, 16, 0) for 2.16.0.dev20261101."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            numbers += [int(part[: len(part) - len(part.lstrip("0123456789"))])] if part[:1].isdecimal() else []
            break
        numbers.append(int(part))
    return tuple(numbers)


def _written(version: Version) -> str:
    return ".".join(map(str, version))


def installed() -> dict[str, str]:
    """Return the versions of the installed packages of TRIED. Loads none of them."""
    found = {"Python": _written(sys.version_info[:3])}
    for name in TRIED:
        if name != "Python":
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def not_tried(versions: Mapping[str, str]) -> str | None:
    """Return one line about the versions outside the tested ranges; None if all are inside."""
    outside = []
    for name, version in versions.items():
        least, most = TRIED[name]
        release = _release(version)
        if not least <= release[: len(least)] or not release[: len(most)] <= most:
            tried = _written(least) if least == most else f"{_written(least)} to {_written(most)}"
            outside.append(f"{name} {version} (tried: {tried})")
    return f"autoplan was not tried with {', '.join(outside)}" if outside else None


def warn_if_not_tried() -> None:
    """Log the line of `not_tried`, in one process of a job."""
    line = not_tried(installed())
    if line is not None and os.environ.get("RANK", "0") == "0":
        logging.getLogger("autoplan").warning(line)
