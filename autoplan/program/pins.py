"""Pins with defaults instead of a search (`read_pins`), stages of balanced arithmetic, and the mesh of degrees.

`read_pins` fills in tp = 1, pp = 1, dp = all remaining devices, ZeRO 1, one micro-batch without a pipeline and 2 * pp
with one, no recompute, 1F1B, stages of balanced arithmetic. The planner leaves open what is not pinned instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis, Mesh
from autoplan.ops.table import flops, rule_for
from autoplan.program.context_pins import product_degree
from autoplan.program.expert_mesh import data_axes, folded_mesh, sequence_axes
from autoplan.program.facts import Facts, divisors, expert_counts, head_counts, layer_calls, pipeline_units
from autoplan.program.legality import Scope, check, method_folds_obstacle, zero_replica_counts

__all__ = [
    "divisors", "expert_counts", "head_counts", "layer_calls", "make_mesh", "pipeline_units",
    "read_pins", "split_stages", "stage_calls", "zero_replica_counts",
]  # fmt: skip


def read_pins(pins: Mapping[str, Any], num_devices: int) -> ParallelConfig:
    """Check pins, as far as that can be without a model, and fill in the defaults. PinError names the rule."""
    config = Pins(pins).completed(num_devices)
    check(config, Facts(num_devices), Scope.SEARCHED)
    return config


def split_stages(graph: ModelGraph, config: ParallelConfig, env: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Calls per stage: as pinned, else contiguous with the least maximal arithmetic."""
    units = pipeline_units(graph)
    num_stages = config.pp * config.virtual_stages
    if num_stages == 1:
        return (tuple(n for unit in units for n in unit),)
    if config.stages is not None:
        counts: Sequence[int] = config.stages
    else:
        cost = {
            b: sum(float(flops(n, blk.values, rule_for(n, blk.values)).evaluate(env)) for n in blk.nodes)
            for b, blk in graph.blocks.items()
        }
        by_name = {c.name: cost[c.block] for c in graph.calls}
        counts = _balance([sum(by_name[n] for n in unit) for unit in units], num_stages)
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
    """pp, dp, cp and tp major to minor over ranks, and the sub-axes that layouts are chosen on: tp, as two where there
    are fewer key-value heads than tp. Where experts are spread also what they are spread over (`folding`); dp as copies
    of the sharded state and its shards; cp as groups and neighbours in them where Ulysses is one of two methods."""
    kv = min((k for _, _, k in head_counts(graph)), default=config.tp)
    major = math.gcd(config.tp, kv)
    tensor: tuple[Axis, ...] = (Axis("tp", config.tp),)
    if config.tp > 1 and 1 < major < config.tp:
        tensor = Axis("tp0", major), Axis("tp1", config.tp // major)
    chosen = tensor if config.tp > 1 else ()
    if expert_counts(graph) and config.spreads_experts:
        reason = method_folds_obstacle(config)
        if reason is not None:
            raise PinError(reason, ("context_method", "ep"))
        return folded_mesh(config, tensor), chosen
    data = [Axis(name, size) for name, size in data_axes(config.dp, config.zero_replicas)]
    axes, groups = [Axis("pp", config.pp), *data], dict[str, tuple[str, ...]]()
    if len(data) > 1:
        groups["dp"] = tuple(a.name for a in data)
    if config.cp > 1:
        cut = [Axis(name, size) for name, size in sequence_axes(config.cp, product_degree(config))]
        if len(cut) > 1:
            groups["cp"] = tuple(a.name for a in cut)
        axes += cut
        groups["replicas"] = tuple(a.name for a in axes[1:])
        if config.zero_replicas > 1:
            groups["shards"] = ("sdp", *(a.name for a in cut))
    if len(tensor) > 1:
        groups["tp"] = ("tp0", "tp1")
    return Mesh((*axes, *tensor), groups), chosen
