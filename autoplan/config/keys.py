"""Checked keys of mappings that people write: unknown keys and illegal values raise errors that name legal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoplan.config.choice import is_count
from autoplan.config.numbers import Range
from autoplan.errors import PinError
from autoplan.names import did_you_mean


def check_names(given: Iterable[object], known: Iterable[str], where: str = "", what: str = "key") -> None:
    """Raise PinError for a name that is not known. The message says the nearest known one, and all of them.

    Args:
        where: The place of the names, such as a file, with which the message begins.
        what: The word for one name in the message.
    """
    names = tuple(known)
    for name in given:
        if name not in names:
            raise PinError(f"{where}{': ' * bool(where)}unknown {what} {name!r}; {did_you_mean(name, names)}")


def check_keys(data: Mapping[str, Any], needed: Sequence[str], optional: Sequence[str], where: str = "") -> None:
    """Raise PinError for an unknown key, and for a needed one that is missing or None."""
    check_names(data, (*needed, *optional), where)
    for key in needed:
        if data.get(key) is None:
            raise PinError(f"{where}{': ' * bool(where)}{key} is missing; needed are {', '.join(needed)}")


def as_mapping(data: object, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Return `data` as a mapping with keys of `known`. PinError calls it `where`."""
    if not isinstance(data, Mapping):
        raise PinError(f"{where} must be a mapping with the keys {', '.join(known)}; got {data!r}")
    check_names(data, known, where)
    return data


def check_kind(name: str, value: object, kind: Any, instead: str) -> None:
    """Raise PinError for an argument of another type; `kind`: a class or a union, `instead`: what makes one."""
    if not isinstance(value, kind):
        raise PinError(f"{name}={value!r:.80} is of type {type(value).__name__}; give {instead}")


def check_count(name: str, value: object) -> None:
    """Raise PinError unless `value` is a whole number of at least 1."""
    if not is_count(value):
        raise PinError(f"{name}={value!r} must be a whole number of at least 1")


def as_number(data: Mapping[str, Any], key: str, where: str, legal: Range) -> float:
    """Return the number under a key. Raises PinError if it is not in the range."""
    return float(legal.check(data[key], f"{where}: {key}"))
