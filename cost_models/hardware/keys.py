"""Checked keys of mappings that people write: unknown keys and illegal values raise errors that name legal ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.numbers import Range
from autoplan.errors import PinError


def as_mapping(data: object, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Return `data` as a mapping with keys of `known`. PinError calls it `where`."""
    if not isinstance(data, Mapping):
        raise PinError(f"{where} must be a mapping with the keys {', '.join(known)}; got {data!r}")
    for key in data:
        if key not in known:
            raise PinError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
    return data


def as_number(data: Mapping[str, Any], key: str, where: str, legal: Range) -> float:
    """Return the number under a key. Raises PinError if it is not in the range."""
    return float(legal.check(data[key], f"{where}: {key}"))
