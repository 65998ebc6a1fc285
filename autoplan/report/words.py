"""Choices and their values in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config import numbers
from autoplan.config.choice import Choice
from autoplan.config.choices import CHOICES

_RECORDS = {record.name: record for record in CHOICES}


def choice_text(name: str, value: Any) -> str:
    """Return a choice with its value in words: `tp 4`, `ZeRO 1`, `offload none`."""
    return f"{_RECORDS[name].word or name} {value_text(value, name)}"


def value_text(value: Any, name: str = "") -> str:
    """Return the value of a choice in words."""
    if value is None:
        return _RECORDS.get(name, Choice()).open_word
    if isinstance(value, (tuple, list, frozenset)):
        return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value)) or "none"
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return numbers.digits(value) if isinstance(value, float) else str(value)
