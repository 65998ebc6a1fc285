"""Why no candidate is legal: the pin at fault, the rule it breaks, and the nearest value that leaves some plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoplan.cost_models.config import ParallelConfig
from autoplan.cost_models.errors import PinError
from autoplan.search.degrees import Candidate, Limits, candidates
from autoplan.search.offload_pins import NEEDS_SHARDS
from autoplan.search.pins import around, check_chunks, check_schedule, divisors, schedule_of

# Which pin is blamed first where several exclude each other.
_BLAMED = (
    "dp", "ep", "etp", "cp", "tp", "stages", "pp", "micro_batch_size", "num_micro_batches", "zero_replicas"
)  # fmt: skip


def refusal(model: str, limits: Limits, pins: Mapping[str, Any], illegal: Mapping[str, int]) -> PinError:
    """The error for pins under which `candidates` finds nothing.

    Args:
        illegal: how many candidates each rule excluded.
    """
    if illegal.get(NEEDS_SHARDS) and candidates(limits, {k: v for k, v in pins.items() if k != "offload"}).candidates:
        beside = ", ".join(f"{k}={pins[k]}" for k in ("dp", "cp", "zero_stage", "zero_replicas") if k in pins)
        near = "zero_stage=3" if candidates(limits, {**pins, "zero_stage": 3}).candidates else "offload='optimizer'"
        why = f"pin offload={pins['offload']!r}{' with ' + beside if beside else ''}: {NEEDS_SHARDS}"
        return PinError(f"{why}; nearest legal: {near}")
    given = [name for name in _BLAMED if pins.get(name) is not None]
    of_schedule = {k: pins[k] for k in ("schedule", "virtual_stages") if k in pins}
    others = {k: v for k, v in pins.items() if k not in (*of_schedule, "stages")}
    if of_schedule and (found := candidates(limits, others).candidates):
        error = _schedule_error(of_schedule, found, limits.num_units)
        if error is not None:
            return error
    for name in given:  # illegal by itself
        if not candidates(limits, {name: pins[name]}).candidates:
            legal = _legal(limits, pins, name) or _legal(limits, {}, name)
            if legal:
                return _blame(name, limits, {name: pins[name]}, legal)
    for name in given:  # the others leave some plan
        legal = _legal(limits, pins, name)
        if legal:
            return _blame(name, limits, pins, legal)
    rules = ", ".join(f"{rule} ({count})" for rule, count in sorted(illegal.items(), key=lambda kv: -kv[1]))
    pinned = " and " + ", ".join(f"{name}={pins[name]}" for name in given) if given else ""
    why = f"; {limits.obstacle}" if limits.obstacle else ""
    return PinError(
        f"no plan is legal for {model} on {limits.devices} devices with a global batch of {limits.batch}{pinned}: "
        f"{rules or 'the pins exclude each other'}{_other_batch(limits, pins)}{why}"
    )


def _schedule_error(pins: Mapping[str, Any], others: Sequence[Candidate], num_units: int) -> PinError | None:
    """Why a pinned schedule takes none of the candidates that the other pins leave: of the one nearest to legal."""
    schedule, virtual_stages = schedule_of(pins)
    c = min(others, key=lambda c: (c.pp == 1, c.zero_stage == 3, -c.num_micro_batches, c.pp))
    config = ParallelConfig(
        pp=c.pp,
        num_micro_batches=c.num_micro_batches,
        zero_stage=c.zero_stage,
        schedule=schedule,
        virtual_stages=virtual_stages,
    )
    try:
        check_chunks(check_schedule(config), num_units)
    except PinError as error:
        return error
    return None


def _legal(limits: Limits, pins: Mapping[str, Any], name: str) -> set[int]:
    """Values of one pin (for stages, their number) that leave some plan under the other pins."""
    attribute = "pp" if name == "stages" else name
    others = {k: v for k, v in pins.items() if k != name}
    if name in ("zero_replicas", "cp"):  # more are legal than are searched
        return {d for d in divisors(limits.devices) if candidates(limits, {**others, name: d}).candidates}
    return {getattr(c, attribute) for c in candidates(limits, others).candidates}


def _other_batch(limits: Limits, pins: Mapping[str, Any]) -> str:
    """A global batch that leaves some plan, where the batch is what is in the way."""
    unit = pins.get("dp") or limits.devices
    batch = -(-limits.batch // unit) * unit
    changed = replace(limits, batch=batch)
    if batch == limits.batch or not candidates(changed, pins).candidates:
        return ""
    if "dp" in pins:
        return f", or a global batch of {batch}"
    return f"; a global batch of {batch} is divisible by all {unit} devices"


def _blame(name: str, limits: Limits, pins: Mapping[str, Any], legal: set[int]) -> PinError:
    reason = _reason(name, limits, pins)
    value = len(pins[name]) if name == "stages" else pins[name]
    # a rule of several pins leaves open which of them the value is of
    which = "" if name == "stages" or (name != "dp" and reason.startswith("pin ")) else f"{name}="
    nearest = f"{which}{around(value, legal)}{' stages' if name == 'stages' else ''}"
    batch = _other_batch(limits, pins) if name == "dp" else ""
    return PinError(f"{reason}; nearest legal: {nearest}{batch}")


def _reason(name: str, limits: Limits, pins: Mapping[str, Any]) -> str:
    """The rule that a pin breaks, alone or together with the others."""
    value, devices = pins[name], limits.devices
    if name in ("micro_batch_size", "num_micro_batches"):
        return _batch_reason(name, limits, pins)
    if name == "ep" and value > 1:
        if not limits.experts:
            return f"pin ep={value}: the model has no experts"
        if any(count % value for count in limits.experts):
            return f"pin ep={value} does not divide the {math.gcd(*limits.experts)} experts"
        if pins.get("zero_replicas", 1) > 1:
            copies = pins["zero_replicas"]
            return f"pin ep={value} with zero_replicas={copies}: every copy of the sharded state needs ranks for ep"
        others = {k: pins[k] for k in ("etp", "dp", "cp", "tp", "pp") if k in pins}
        if others:
            beside = ", ".join(f"{k}={v}" for k, v in others.items())
            return f"pin ep={value} with {beside}: ep is made of the ranks of dp, cp and tp beside etp, and this is not"
    if name == "etp":
        return _inner_reason(limits, pins)
    if name == "stages" and devices % len(value):
        return f"pin stages={list(value)} has {len(value)} stages, which do not divide the {devices} devices"
    if name != "stages" and devices % value:
        return f"pin {name}={value} does not divide the {devices} devices"
    if name == "zero_replicas":
        given = ", ".join(f"{k}={pins[k]}" for k in ("dp", "cp", "ep", "zero_stage") if k in pins)
        return (
            f"pin zero_replicas={value}{' with ' + given if given else ''}: ZeRO 1 to 3 needs it to divide dp and to "
            "leave several ranks to shard over, and ranks for ep in every copy"
        )
    if name == "tp":
        for where, count in limits.heads:
            if count % value:
                return f"pin tp={value} does not divide the {count} attention heads at {where}"
    if name == "pp" and value > limits.num_units:
        return f"pin pp={value} needs at least as many layers, the model has {limits.num_units}"
    if name == "dp" and limits.obstacle is not None and value > 1:
        return f"{limits.obstacle}, so the batch cannot be split; use dp=1 and num_micro_batches=1: pin dp={value}"
    if name == "dp" and limits.batch % value:
        return f"pin dp={value} does not divide the global batch of {limits.batch}"
    stages = pins.get("stages")
    tp, dp = pins.get("tp", 1), pins.get("dp", 1)
    pp = pins.get("pp", len(stages) if stages is not None else 1)
    if devices % (dp * tp * pp) or (pp * tp * dp != devices and "dp" in pins and "tp" in pins and pp > 1):
        return f"dp={dp} x tp={tp} x pp={pp} = {dp * tp * pp} devices, but the cluster has {devices}"
    if name == "dp" and ("micro_batch_size" in pins or "num_micro_batches" in pins):
        return _batch_reason(name, limits, pins)
    given = ", ".join(f"{k}={pins[k]}" for k in _BLAMED if pins.get(k) is not None)
    return f"pins {given} leave no legal plan on {devices} devices with a global batch of {limits.batch}"


def _inner_reason(limits: Limits, pins: Mapping[str, Any]) -> str:
    value = pins["etp"]
    if not limits.experts:
        return f"pin etp={value}: the model has no experts"
    if any(size % value for size in limits.inner):
        return f"pin etp={value} does not divide the experts' inner size of {math.gcd(*limits.inner)}"
    others = ", ".join(f"{k}={pins[k]}" for k in ("ep", "dp", "cp", "tp", "pp") if k in pins)
    return f"pin etp={value}{f' with {others}' if others else ''}: experts are whole (1) or split over all of tp"


def _batch_reason(name: str, limits: Limits, pins: Mapping[str, Any]) -> str:
    size, num, batch = pins.get("micro_batch_size"), pins.get("num_micro_batches"), limits.batch
    if limits.obstacle is not None and name == "num_micro_batches" and num is not None and num > 1:
        return f"{limits.obstacle}, so the batch cannot be split; use dp=1 and num_micro_batches=1: pin {name}={num}"
    if len([x for x in (size, num, pins.get("dp")) if x is not None]) > 1:
        parts = {k: pins[k] for k in ("dp", "micro_batch_size", "num_micro_batches") if k in pins}
        product = " x ".join(f"{k}={v}" for k, v in parts.items())
        return (
            f"{product} = {math.prod(parts.values())} does not make the global batch of {batch} on {limits.devices} "
            "devices"
        )
    return f"pin {name}={pins[name]} does not divide a data-parallel rank's part of the global batch of {batch}"
