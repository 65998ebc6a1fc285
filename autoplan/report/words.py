"""Choices and their values in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config import numbers

MFU_OF_ADAPTERS = "; counted as full training, of which frozen weights need about two thirds"

_NAMES = {
    "zero_stage": "ZeRO",
    "micro_batch_size": "micro-batch",
    "virtual_stages": "stages per rank",
    "context_method": "context method",
    "zero_replicas": "ZeRO replicas",
    "etp": "etp",
}


def choice_text(name: str, value: Any) -> str:
    """Return a choice with its value in words: `tp 4`, `ZeRO 1`, `offload none`."""
    return f"{_NAMES.get(name, name)} {value_text(value, name)}"


_OPEN = {"stages": "even", "etp": "as tp", "context_method": "none"}  # what None means


def value_text(value: Any, name: str = "") -> str:
    """Return the value of a choice in words."""
    if value is None:
        return _OPEN.get(name, "default")
    if isinstance(value, (tuple, list, frozenset)):
        return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value)) or "none"
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return numbers.digits(value) if isinstance(value, float) else str(value)
