"""Pinned degrees: reading them, the legality rules, and the stated defaults for what is not pinned.

Defaults until the search chooses: tp = 1, pp = 1, dp = all remaining devices, ZeRO 1, one micro-batch without a
pipeline and 2 * pp with one, no recompute, 1F1B, stages of balanced arithmetic.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.cost_models.config import ParallelConfig
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.layout import Axis, Mesh
from autoplan.rules.batch import batch_obstacle
from autoplan.rules.table import flops, rule_for

KNOWN = ("tp", "pp", "dp", "zero_stage", "num_micro_batches", "recompute", "stages", "schedule", "state_slack")
# what the runtime executes today; more is priced (autoplan.cost_models.config)
SCHEDULES = ("1F1B",)
RECOMPUTE = ("none", "full")


def _nearest_divisor(value: int, of: int) -> str:
    """The nearest legal degrees: the divisors of `of` around `value`."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d < value]
    above = [d for d in divisors if d > value]
    return " or ".join(str(d) for d in [*below[-1:], *above[:1]])


def _integer(pins: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    value = pins.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PinError(f"pin {name}={value!r}: must be a whole number of at least {least}; nearest legal: {least}")
    return value


def read_pins(pins: Mapping[str, Any], num_devices: int) -> ParallelConfig:
    """Check pins and fill in the defaults. PinError names the rule and the nearest legal value."""
    for name in pins:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PinError(f"unknown pin {name!r}; {hint}known pins: {', '.join(KNOWN)}")
    tp, pp = _integer(pins, "tp", 1), _integer(pins, "pp", 1)
    for name, degree in (("tp", tp), ("pp", pp)):
        if num_devices % degree:
            raise PinError(
                f"pin {name}={degree} does not divide the {num_devices} devices; nearest legal: "
                f"{_nearest_divisor(degree, num_devices)}"
            )
    if num_devices % (tp * pp):
        rest = num_devices // pp
        raise PinError(
            f"pins tp={tp} x pp={pp} do not divide the {num_devices} devices; with pp={pp}, tp may be "
            f"{_nearest_divisor(tp, rest)}"
        )
    dp = _integer(pins, "dp", num_devices // (tp * pp))
    if dp * tp * pp != num_devices:
        raise PinError(
            f"dp={dp} x tp={tp} x pp={pp} = {dp * tp * pp} devices, but the cluster has {num_devices}; nearest legal: "
            f"dp={num_devices // (tp * pp)}"
        )
    zero = pins.get("zero_stage", 1)
    if zero not in (0, 1, 2, 3):
        raise PinError(f"pin zero_stage={zero!r} does not exist; use 0, 1, 2 or 3")
    schedule = pins.get("schedule", "1F1B")
    if schedule not in SCHEDULES:
        raise PinError(f"pin schedule={schedule!r} is not supported; nearest legal: {SCHEDULES[0]}")
    recompute = pins.get("recompute", "none")
    for value in recompute.values() if isinstance(recompute, Mapping) else [recompute]:
        if value not in RECOMPUTE:
            raise PinError(
                f"pin recompute={value!r} is not supported; use {' or '.join(RECOMPUTE)}, or a mapping block -> "
                "one of them"
            )
    stages = pins.get("stages")
    slack = pins.get("state_slack", 1.02)
    if not isinstance(slack, (int, float)) or slack < 1:
        raise PinError(f"pin state_slack={slack!r}: must be a number of at least 1")
    return ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=int(zero),
        num_micro_batches=_integer(pins, "num_micro_batches", 2 * pp if pp > 1 else 1),
        schedule=schedule,
        recompute=recompute,
        stages=tuple(stages) if stages is not None else None,
        state_slack=float(slack),
    )


def head_counts(graph: ModelGraph) -> list[tuple[str, int, int]]:
    """(where, attention heads, key-value heads) of every attention op."""
    out = []
    for block in graph.blocks.values():
        for node in block.nodes:
            if node.op == "attention":
                q, k = (block.values[n] for n in node.tensor_inputs[:2])
                heads, kv = q.shape[1].value, k.shape[1].value
                if heads is not None and kv is not None:
                    out.append((node.source or f"{block.name}/{node.name}", heads, kv))
    return out


def check_degrees(graph: ModelGraph, config: ParallelConfig) -> None:
    """Rules that need the model. PinError names the rule and the nearest legal value."""
    for where, heads, _ in head_counts(graph):
        if heads % config.tp:
            raise PinError(
                f"pin tp={config.tp} does not divide the {heads} attention heads at {where}; nearest legal: "
                f"{_nearest_divisor(config.tp, heads)}"
            )
    layers = layer_calls(graph)
    if config.pp > 1 and config.pp > len(layers):
        raise PinError(
            f"pin pp={config.pp} needs at least as many layers, the model has {len(layers)}; nearest legal: "
            f"{len(layers)}"
        )
    if config.stages is not None:
        if len(config.stages) != config.pp:
            raise PinError(
                f"pin stages={list(config.stages)} has {len(config.stages)} entries for pp={config.pp}; give "
                f"{config.pp}"
            )
        if any(not isinstance(n, int) or n < 1 for n in config.stages) or sum(config.stages) != len(layers):
            raise PinError(
                f"pin stages={list(config.stages)} must be {config.pp} positive numbers that add up to the model's "
                f"{len(layers)} layers"
            )
    if config.dp > 1 or config.num_micro_batches > 1:
        obstacle = batch_obstacle(graph)
        if obstacle is not None:
            raise PinError(f"{obstacle}, so the batch cannot be split; use dp=1 and num_micro_batches=1")


def layer_calls(graph: ModelGraph) -> list[str]:
    """Calls that a pipeline may be cut between: those of the model's layers (not embedding, head, glue or tables)."""
    # capture names a layer by its module path, which has a dot; everything around layers by one word
    return [c.name for c in graph.calls if c.params and "." in c.name]


def pipeline_units(graph: ModelGraph) -> tuple[tuple[str, ...], ...]:
    """What a pipeline may be cut between: a layer and the glue after it; what precedes the first layer goes with it.

    Names of calls; parameter-free calls, which every stage computes for itself, are left out. A model without layers is
    one unit.
    """
    free = graph.free_calls()
    calls = [c.name for c in graph.calls if c.name not in free]
    layers = set(layer_calls(graph))
    units: list[list[str]] = [[]]
    for name in calls:
        if name in layers and any(n in layers for n in units[-1]):
            units.append([])
        units[-1].append(name)
    return tuple(tuple(unit) for unit in units)


def split_stages(graph: ModelGraph, config: ParallelConfig, env: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Calls per stage: as pinned, else contiguous with the least maximal arithmetic."""
    units = pipeline_units(graph)
    if config.pp == 1:
        return (tuple(n for unit in units for n in unit),)
    if config.stages is not None:
        counts: Sequence[int] = config.stages
    else:
        cost = {
            b: sum(float(flops(n, blk.values, rule_for(n, blk.values)).evaluate(env)) for n in blk.nodes)
            for b, blk in graph.blocks.items()
        }
        by_name = {c.name: cost[c.block] for c in graph.calls}
        counts = _balance([sum(by_name[n] for n in unit) for unit in units], config.pp)
    return stage_calls(units, counts)


def stage_calls(units: Sequence[Sequence[str]], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Calls per stage from the number of units per stage."""
    out, at = [], 0
    for count in counts:
        out.append(tuple(n for unit in units[at : at + count] for n in unit))
        at += count
    return tuple(out)


def _balance(weights: Sequence[float], parts: int) -> list[int]:
    """Contiguous parts with the least maximal sum (dynamic programme)."""
    n = len(weights)
    prefix = [0.0]
    for w in weights:
        prefix.append(prefix[-1] + w)
    best = [[math.inf] * (n + 1) for _ in range(parts + 1)]
    cut = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for p in range(1, parts + 1):
        for j in range(p, n + 1):
            for i in range(p - 1, j):
                value = max(best[p - 1][i], prefix[j] - prefix[i])
                if value < best[p][j]:
                    best[p][j], cut[p][j] = value, i
    counts, j = [], n
    for p in range(parts, 0, -1):
        counts.append(j - cut[p][j])
        j = cut[p][j]
    return counts[::-1]


def make_mesh(graph: ModelGraph, config: ParallelConfig) -> tuple[Mesh, tuple[Axis, ...]]:
    """pp, dp and tp major to minor over ranks; tp as two sub-axes where there are fewer key-value heads than tp."""
    axes = [Axis("pp", config.pp), Axis("dp", config.dp)]
    kv = min((k for _, _, k in head_counts(graph)), default=config.tp)
    major = math.gcd(config.tp, kv)
    if config.tp > 1 and 1 < major < config.tp:
        split = (Axis("tp0", major), Axis("tp1", config.tp // major))
        return Mesh((*axes, *split), {"tp": ("tp0", "tp1")}), split
    tensor = (Axis("tp", config.tp),)
    return Mesh((*axes, *tensor), {}), tensor if config.tp > 1 else ()
