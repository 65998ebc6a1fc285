"""Keys of mappings that people write: an unknown key or an impossible value is an error that names what works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.numbers import Range
from autoplan.errors import PinError


def as_mapping(data: object, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """`data` as a mapping with keys of `known`; PinError calls it `where`."""
    if not isinstance(data, Mapping):
        raise PinError(f"{where} must be a mapping with the keys {', '.join(known)}; got {data!r}")
    for key in data:
        if key not in known:
            raise PinError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
    return data


def as_number(data: Mapping[str, Any], key: str, where: str, legal: Range) -> float:
    """The number under a key. PinError if it is not in the range."""
    return float(legal.check(data[key], f"{where}: {key}"))
