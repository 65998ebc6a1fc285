"""The space of degrees: every way to spread the devices over pp, dp and tp, cut the batch, and choose a ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.rules.batch import batch_obstacle, context_obstacle
from autoplan.search.degrees import Candidate, Limits, Space, candidates
from autoplan.search.pins import (
    check_recompute,
    check_stages,
    check_values,
    divisors,
    expert_counts,
    head_counts,
    inner_sizes,
    is_count,
    pipeline_units,
    schedule_of,
)
from autoplan.search.refusals import refusal

__all__ = ["KNOWN_PINS", "Candidate", "Space", "check_pins", "space"]

SEARCHED = (
    "pp", "dp", "tp", "ep", "etp", "cp", "zero_stage", "micro_batch_size", "num_micro_batches", "stages", "recompute",
    "schedule", "virtual_stages",
)  # fmt: skip
KNOWN_PINS = (*SEARCHED, "state_slack", "context_method", "zero_replicas", "offload")
# Looked at beside 1F1B: GPipe is never shorter than that, and ZBV holds what DualPipeV holds twice.
SCHEDULES = (
    *(("Interleaved1F1B", v) for v in (2, 4, 8)),
    ("ZB-H1", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBV", 2),
    ("DualPipeV", 2),
)
LEAST_PART = 8192  # tokens per rank and sequence from which on cp is searched: below, a device has too little to do
_LEAST_DOMAIN = 8  # tp up to this is looked at even where no scale-up domain is as large


def check_pins(pins: Mapping[str, Any]) -> None:
    """Names and values that no cluster or model could make legal. PinError names the nearest legal one."""
    check_values(pins, KNOWN_PINS)


def space(
    graph: ModelGraph,
    cluster: Cluster,
    global_batch_size: int,
    pins: Mapping[str, Any],
    *,
    seq_len: int = 0,
) -> Space:
    """Enumerate. Every pin is kept; a pin that leaves nothing is a PinError that names the rule and the nearest value.

    Args:
        global_batch_size: sequences per step, over all data-parallel ranks.
        seq_len: their length; 0: cp is 1 unless pinned.
    """
    check_pins(pins)
    if not is_count(global_batch_size):
        raise PinError(f"global_batch_size={global_batch_size!r}: must be a whole number of at least 1")
    check_recompute(graph, pins.get("recompute"))
    limits = Limits(
        cluster.num_devices,
        global_batch_size,
        max(_LEAST_DOMAIN, cluster.domain_size),
        tuple((where, count) for where, count, _ in head_counts(graph)),
        len(pipeline_units(graph)),
        batch_obstacle(graph),
        expert_counts(graph),
        _contexts(graph, cluster, seq_len) if "cp" not in pins else (1,),
        SCHEDULES,
        inner_sizes(graph),
        tuple(level.size for level in cluster.levels[:-1]),
    )
    stages = pins.get("stages")
    if stages is not None:
        virtual_stages = schedule_of(pins)[1]
        check_stages(stages, pins.get("pp", max(1, len(stages) // virtual_stages)), virtual_stages, limits.num_units)
    found = candidates(limits, pins)
    if not found.candidates:
        raise refusal(graph.name, limits, pins, found.illegal)
    return found


def _contexts(graph: ModelGraph, cluster: Cluster, seq_len: int) -> tuple[int, ...]:
    """1, and within a scale-up domain what leaves every rank enough of each sequence, if the model can be cut."""
    most = min(seq_len // LEAST_PART, max(_LEAST_DOMAIN, cluster.domain_size))
    found = [cp for cp in divisors(cluster.num_devices) if 1 < cp <= most and seq_len % (2 * cp) == 0]
    return (1, *found) if found and context_obstacle(graph) is None else (1,)
