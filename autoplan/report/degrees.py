"""The configuration for given degrees, with the omitted ones derived from the rest. PinError says what would work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.choices import PINS, check_values
from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.program.facts import Facts, layer_calls, num_mtp_layers
from autoplan.program.legality import Scope, check_legal
from autoplan.schedules.schedule import num_copies
from autoplan.search.nearest import Changes, explained
from autoplan.search.planner import PlanRequest
from autoplan.stacks.like import Like, equal_stages

DEGREES = tuple(name for name in PINS if name != "num_micro_batches")  # choices that may be given


def checked_config(request: PlanRequest, given: Mapping[str, Any]) -> ParallelConfig:
    """Return `config_of` for a task. PinError for an illegal configuration names the nearest legal one."""
    values = {name: value for name, value in given.items() if value is not None}
    if request.facts.like is not None:
        values = _like(request.facts.like, request.facts, values)
    elif given.get("zero_stage", 0) is None:  # left open on the command line
        values["zero_stage"] = ParallelConfig().zero_stage

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


def _like(like: Like, facts: Facts, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices with the defaults of a stack."""
    model = facts.model
    if model is None:
        return dict(given)
    out = like.degrees(
        given, model.num_experts, facts.devices // int(given.get("pp") or 1), tuple(layer_calls(model.graph))
    )
    schedule, virtual = Pins({n: out[n] for n in ("schedule", "virtual_stages") if n in out}).schedule
    pp = int(out.get("pp") or 1)
    if "stages" not in out and like.stack.equal_stages and num_copies(schedule) == 1:
        stages = equal_stages(model.num_layers, pp, virtual, num_mtp_layers(model.graph))
        out |= {} if stages is None else {"stages": stages}
    return out


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
