"""Explain why pins leave no legal plan, and name the nearest pins that do, each checked by the same enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.program.facts import Facts
from autoplan.search.degrees import Limits, fault, legal
from autoplan.search.nearest import Changes, explained


def refusal(limits: Limits, pins: Mapping[str, Any]) -> PinError | None:
    """Return the error for pins that are invalid or leave no legal candidate, with the nearest pins; else None.

    Args:
        pins: pins as they were given.
    """

    def attempt(changes: Changes, facts: Facts) -> Changes | None:
        made = {name: value for name, value in {**pins, **changes}.items() if value is not None or name not in changes}
        return changes if _fault(replace(limits, facts=facts), made, whole=False) is None else None

    error = _fault(limits, pins, whole=True)
    return None if error is None else explained(error, pins, attempt, limits.facts, "pin ")


def _fault(limits: Limits, pins: Mapping[str, Any], whole: bool) -> PinError | None:
    """Return the error of pins, or None.

    Args:
        whole: find the reason as well, not only whether there is an error.
    """
    try:
        known = Pins(pins)
    except PinError as error:
        return error
    if whole:
        return fault(limits, known)
    return None if next(legal(limits, known), None) is not None else PinError("")
