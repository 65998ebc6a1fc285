"""The choices of a configuration that people make: which there are, and which values could be legal anywhere.

One record per choice. `plan --pin`, `whatif --vary`, capacity files, `estimate` and calibration files take exactly
these. Whether a value is legal for a model, a cluster and a run is said by `autoplan.program.legality`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoplan.config.offload import read_offload
from autoplan.config.recompute import read_recompute
from autoplan.errors import PinError
from autoplan.schedules.schedule import SCHEDULES

ZERO_STAGES = (0, 1, 2, 3)


class Written(Enum):
    """How a value is written in text."""

    COUNT = "a whole number"
    NUMBER = "a number"
    WORD = "a word"
    LIST = "whole numbers with commas"


@dataclass(frozen=True)
class Choice:
    """One choice.

    Attributes:
        name: of the pin, and of the field of `ParallelConfig`.
        obstacle: why a value is legal for no model and no cluster, or None; it begins with `name=value`.
        written: how a value is written in text.
    """

    name: str
    obstacle: Callable[[object], str | None]
    written: Written = Written.COUNT


def is_count(value: object, least: int = 1) -> bool:
    """True for a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(name: str) -> Choice:
    return Choice(name, lambda v: None if is_count(v) else f"{name}={v!r}: must be a whole number of at least 1")


def _zero_stage(value: object) -> str | None:
    if is_count(value, 0) and value in ZERO_STAGES:
        return None
    return f"zero_stage={value!r} does not exist; use 0, 1, 2 or 3"


def _schedule(value: object) -> str | None:
    return None if value in SCHEDULES else f"schedule={value!r} is not known; use {', '.join(SCHEDULES)}"


def _stages(value: object) -> str | None:
    if isinstance(value, (list, tuple)) and value and all(is_count(n, 0) for n in value):
        return None
    return f"stages={value!r}: must be positive numbers, the layers of every stage, e.g. [3, 5]"


def _recompute(value: object) -> str | None:
    if isinstance(value, tuple) and value and all(is_count(n, 0) for n in value):
        return None  # layers per stage, see `legality`
    try:
        read_recompute(value)
    except PinError as error:
        return str(error)
    return None


def _offload(value: object) -> str | None:
    try:
        read_offload(value)
    except PinError as error:
        return str(error)
    return None


def _state_slack(value: object) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf:
        return None
    return f"state_slack={value!r}: must be a number of at least 1"


CHOICES: tuple[Choice, ...] = (
    *map(_count, ("pp", "dp", "tp", "ep", "etp", "cp")),
    Choice("zero_stage", _zero_stage),
    *map(_count, ("micro_batch_size", "num_micro_batches")),
    Choice("stages", _stages, Written.LIST),
    Choice("recompute", _recompute, Written.WORD),
    Choice("schedule", _schedule, Written.WORD),
    _count("virtual_stages"),
    Choice("state_slack", _state_slack, Written.NUMBER),
    Choice("context_method", lambda _: None, Written.WORD),  # depends on cp and on the model
    _count("zero_replicas"),
    Choice("offload", _offload, Written.WORD),
)
_MAY_BE_OPEN = ("stages", "context_method")  # None is no pin of it
PINS: tuple[str, ...] = tuple(choice.name for choice in CHOICES)


def check_values(values: Mapping[str, Any], known: Sequence[str] = PINS, what: str = "pin") -> None:
    """Raise PinError for names and values that no cluster or model could make legal.

    Args:
        values: by name.
        known: the names that are taken, of PINS.
        what: the word for one of them in messages.
    """
    for name in values:
        if name not in known:
            near = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PinError(f"unknown {what} {name!r}; {hint}known {what}s: {', '.join(known)}")
    for choice in CHOICES:
        value = values.get(choice.name)
        left_open = choice.name not in values or (value is None and choice.name in _MAY_BE_OPEN)
        reason = None if left_open else choice.obstacle(value)
        if reason is not None:
            raise PinError(reason, (choice.name,))
