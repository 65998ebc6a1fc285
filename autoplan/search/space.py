"""The space of degrees: every way to spread the devices over pp, dp and tp, cut the batch, and choose a ZeRO stage."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import RECOMPUTE as PRICED_RECOMPUTE
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.rules.batch import batch_obstacle
from autoplan.search.pins import RECOMPUTE, SCHEDULES, check_degrees, head_counts, pipeline_units, read_pins

SEARCHED = ("pp", "dp", "tp", "zero_stage", "micro_batch_size", "num_micro_batches", "stages", "recompute")
KNOWN_PINS = (*SEARCHED, "schedule", "state_slack")


@dataclass(frozen=True, order=True)
class Candidate:
    """Degrees of one plan. What is left open is where the pipeline is cut and what is computed again."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True)
class Space:
    """All legal candidates, and how many others each rule excluded."""

    candidates: tuple[Candidate, ...]
    illegal: Mapping[str, int] = field(default_factory=dict)
    restrictions: tuple[str, ...] = ()

    @property
    def num_considered(self) -> int:
        """Legal and illegal together."""
        return len(self.candidates) + sum(self.illegal.values())


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def check_pins(pins: Mapping[str, Any], *, executed: bool = True) -> None:
    """Names and values that no cluster or model could make legal. PinError names the nearest legal one.

    Args:
        executed: the plan is to be run, not only priced.
    """
    for name, value in pins.items():
        if name not in KNOWN_PINS:
            near = [k for k in KNOWN_PINS if k.startswith(name)] or difflib.get_close_matches(name, KNOWN_PINS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PinError(f"unknown pin {name!r}; {hint}known pins: {', '.join(KNOWN_PINS)}")
        if name in ("pp", "dp", "tp", "micro_batch_size", "num_micro_batches") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise PinError(f"pin {name}={value!r}: must be a whole number of at least 1; nearest legal: 1")
    if pins.get("zero_stage", 0) not in (0, 1, 2, 3):
        raise PinError(f"pin zero_stage={pins['zero_stage']!r} does not exist; use 0, 1, 2 or 3")
    if pins.get("schedule", SCHEDULES[0]) not in SCHEDULES:
        raise PinError(f"pin schedule={pins['schedule']!r} is not supported; nearest legal: {SCHEDULES[0]}")
    allowed = RECOMPUTE if executed else PRICED_RECOMPUTE
    recompute = pins.get("recompute", "none")
    for value in recompute.values() if isinstance(recompute, Mapping) else [recompute]:
        if value not in allowed:
            raise PinError(
                f"pin recompute={value!r} is not supported; use {' or '.join(allowed)}, or a mapping block -> one of "
                "them"
            )
    slack = pins.get("state_slack", 1.02)
    if not isinstance(slack, (int, float)) or slack < 1:
        raise PinError(f"pin state_slack={slack!r}: must be a number of at least 1")


def space(
    graph: ModelGraph, cluster: Cluster, global_batch_size: int, pins: Mapping[str, Any], *, executed: bool = True
) -> Space:
    """Enumerate. Every pin is kept; a pin that leaves nothing is a PinError that names the rule and the nearest value.

    Args:
        global_batch_size: sequences per step, over all data-parallel ranks.
    """
    check_pins(pins, executed=executed)
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise PinError(f"global_batch_size={global_batch_size!r}: must be a whole number of at least 1")
    devices = cluster.num_devices
    heads = [h for _, h, _ in head_counts(graph)]
    num_units = len(pipeline_units(graph))
    obstacle = batch_obstacle(graph)
    domain = max(8, cluster.levels[0].size)
    illegal: Counter[str] = Counter()
    found: list[Candidate] = []
    limited = False
    for pp in _degrees(pins, "pp", devices):
        for tp in _degrees(pins, "tp", devices // pp if devices % pp == 0 else devices):
            if devices % (pp * tp):
                illegal["pp x tp does not divide the devices"] += 1
                continue
            dp = devices // (pp * tp)
            rule = _illegal(pp, dp, tp, pins, heads, num_units, global_batch_size, obstacle)
            if rule is None and tp > domain and "tp" not in pins:
                limited, rule = True, "tp beyond the scale-up domain"
            if rule is not None:
                illegal[rule] += 1
                continue
            for size in divisors(global_batch_size // dp):
                num = global_batch_size // dp // size
                if pins.get("micro_batch_size", size) != size or pins.get("num_micro_batches", num) != num:
                    continue
                if num > 1 and obstacle is not None:
                    illegal["the batch cannot be split"] += 1
                    continue
                stages = [pins["zero_stage"]] if "zero_stage" in pins else [0, 1, 2, 3] if dp > 1 else [0]
                found += [Candidate(pp, dp, tp, zero, size, num) for zero in stages]
    if not found:
        _refuse(graph, devices, global_batch_size, pins, illegal, obstacle)
    restrictions = ("tp within one scale-up domain",) if limited else ()
    return Space(tuple(found), dict(illegal), restrictions)


def _degrees(pins: Mapping[str, Any], name: str, limit: int) -> list[int]:
    return [pins[name]] if name in pins else divisors(limit)


def _illegal(
    pp: int,
    dp: int,
    tp: int,
    pins: Mapping[str, Any],
    heads: list[int],
    num_units: int,
    batch: int,
    obstacle: str | None,
) -> str | None:
    """The rule that a mesh breaks, or None."""
    if pins.get("dp", dp) != dp:
        return "another dp is pinned"
    if any(h % tp for h in heads):
        return "tp does not divide the attention heads"
    if pp > num_units:
        return "more stages than layers"
    if pins.get("stages") is not None and len(pins["stages"]) != pp:
        return "another number of stages is pinned"
    if batch % dp:
        return "dp does not divide the global batch"
    if dp > 1 and obstacle is not None:
        return "the batch cannot be split"
    return None


def _refuse(
    graph: ModelGraph,
    devices: int,
    batch: int,
    pins: Mapping[str, Any],
    illegal: Mapping[str, int],
    obstacle: str | None,
) -> None:
    """Nothing is legal: say why."""
    plain = {k: v for k, v in pins.items() if k not in ("micro_batch_size", "recompute")}
    check_degrees(graph, read_pins(plain, devices))  # names the pin that does not fit the devices or the model
    degrees = {k: v for k, v in pins.items() if k in ("dp", "tp", "pp")}
    if "micro_batch_size" in pins or "num_micro_batches" in pins:
        dps = [pins["dp"]] if "dp" in pins else [d for d in divisors(devices) if batch % d == 0]
        size, num = pins.get("micro_batch_size"), pins.get("num_micro_batches")
        parts = sorted({x for d in dps if batch % d == 0 for x in divisors(batch // d)})
        for name, value in (("micro_batch_size", size), ("num_micro_batches", num)):
            if value is not None and value not in parts:
                near = min(parts, key=lambda x: abs(x - value), default=1)
                raise PinError(
                    f"pin {name}={value} does not divide a data-parallel rank's part of the global batch of {batch}; "
                    f"nearest legal: {near}"
                )
    rules = ", ".join(f"{rule} ({count})" for rule, count in sorted(illegal.items(), key=lambda kv: -kv[1]))
    legal_batch = -(-batch // devices) * devices
    hint = "" if batch % devices == 0 else f"; a global batch of {legal_batch} is divisible by all {devices} devices"
    why = f"; {obstacle}" if obstacle else ""
    pinned = " and " + ", ".join(f"{k}={v}" for k, v in degrees.items()) if degrees else ""
    raise PinError(
        f"no plan is legal for {graph.name} on {devices} devices with a global batch of {batch}{pinned}: "
        f"{rules or 'the pins exclude each other'}{hint}{why}"
    )
