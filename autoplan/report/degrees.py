"""The configuration for given degrees, with the omitted ones derived from the rest. PinError says what would work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.choices import PINS, check_values
from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.program.facts import Facts
from autoplan.program.legality import Scope, check_legal
from autoplan.search.nearest import Changes, explained
from autoplan.search.planner import PlanRequest

DEGREES = tuple(name for name in PINS if name != "num_micro_batches")  # choices that may be given


def checked_config(request: PlanRequest, given: Mapping[str, Any]) -> ParallelConfig:
    """Return `config_of` for a task. PinError for an illegal configuration names the nearest legal one."""
    values = {name: value for name, value in given.items() if value is not None}

    def attempt(changes: Changes, facts: Facts) -> Changes | None:
        made = {name: value for name, value in {**values, **changes}.items() if value is not None}
        try:
            _legal(made, facts)
        except PinError:
            return None
        return changes

    try:
        return _legal(values, request.facts)
    except PinError as error:
        raise explained(error, values, attempt, request.facts) from None


def _legal(given: Mapping[str, Any], facts: Facts) -> ParallelConfig:
    made = config_of(facts.devices, facts.batch or 1, given)
    check_legal(made, facts, Scope.PRICED)
    return made


def config_of(num_devices: int, global_batch_size: int, given: Mapping[str, Any]) -> ParallelConfig:
    """Return the configuration for degrees; omitted ones (None) follow from the rest (`Pins.completed`).

    It may still be illegal: `checked_config` looks at that.

    Raises:
        PinError: for an unknown name or an impossible value.
    """
    values = {name: value for name, value in given.items() if value is not None or name not in DEGREES}
    values |= {name: tuple(v) for name in ("recompute", "stages") if isinstance(v := values.get(name), list)}
    check_values(values, DEGREES, "degree")
    return Pins(values).completed(num_devices, global_batch_size)
