"""Fill in pins by defaults instead of a search (`read_pins`), and cut a model into stages of balanced arithmetic.

`read_pins` sets every open degree: tp = 1, pp = 1, dp = all remaining devices, ZeRO 1, no recompute, 1F1B, stages of
balanced arithmetic, and one micro-batch without a pipeline or 2 * pp with one. The planner searches these instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.ir.graph import ModelGraph
from autoplan.ops.table import flops, rule_for
from autoplan.program.facts import Facts, divisors, expert_counts, head_counts, layer_calls, pipeline_units
from autoplan.program.legality import Scope, check_legal, zero_replica_counts

__all__ = [
    "divisors", "expert_counts", "head_counts", "layer_calls", "pipeline_units",
    "read_pins", "split_stages", "stage_calls", "zero_replica_counts",
]  # fmt: skip


def read_pins(pins: Mapping[str, Any], num_devices: int) -> ParallelConfig:
    """Check pins, as far as is possible without a model, and fill in the defaults.

    Raises:
        PinError: a pin breaks a rule, which the message names.
    """
    config = Pins(pins).completed(num_devices)
    check_legal(config, Facts(num_devices), Scope.SEARCHED)
    return config


def split_stages(graph: ModelGraph, config: ParallelConfig, env: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Return the calls of every stage: as pinned, else contiguous with the least maximal arithmetic."""
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
    """Return the calls of every stage from the number of units per stage."""
    out, at = [], 0
    for count in counts:
        out.append(tuple(n for unit in units[at : at + count] for n in unit))
        at += count
    return tuple(out)


def _balance(weights: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of contiguous parts with the least maximal sum (dynamic programme)."""
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
