"""The space of degrees: every way to spread the devices over pp, dp and tp, cut the batch, and choose a ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import RECOMPUTE as PRICED_RECOMPUTE
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.rules.batch import batch_obstacle
from autoplan.search.degrees import Candidate, Limits, Space, candidates
from autoplan.search.pins import (
    RECOMPUTE,
    check_recompute,
    check_stages,
    check_values,
    expert_counts,
    head_counts,
    is_count,
    pipeline_units,
)
from autoplan.search.refusals import refusal

__all__ = ["KNOWN_PINS", "Candidate", "Space", "check_pins", "space"]

SEARCHED = ("pp", "dp", "tp", "ep", "cp", "zero_stage", "micro_batch_size", "num_micro_batches", "stages", "recompute")
KNOWN_PINS = (*SEARCHED, "schedule", "state_slack")
_LEAST_DOMAIN = 8  # tp up to this is looked at even where no scale-up domain is as large


def check_pins(pins: Mapping[str, Any], *, executed: bool = True) -> None:
    """Names and values that no cluster or model could make legal. PinError names the nearest legal one.

    Args:
        executed: the plan is to be run, not only priced.
    """
    check_values(pins, KNOWN_PINS, RECOMPUTE if executed else PRICED_RECOMPUTE)


def space(
    graph: ModelGraph, cluster: Cluster, global_batch_size: int, pins: Mapping[str, Any], *, executed: bool = True
) -> Space:
    """Enumerate. Every pin is kept; a pin that leaves nothing is a PinError that names the rule and the nearest value.

    Args:
        global_batch_size: sequences per step, over all data-parallel ranks.
    """
    check_pins(pins, executed=executed)
    if not is_count(global_batch_size):
        raise PinError(f"global_batch_size={global_batch_size!r}: must be a whole number of at least 1")
    check_recompute(graph, pins.get("recompute"))
    limits = Limits(
        cluster.num_devices,
        global_batch_size,
        max(_LEAST_DOMAIN, cluster.levels[0].size),
        tuple((where, count) for where, count, _ in head_counts(graph)),
        len(pipeline_units(graph)),
        batch_obstacle(graph),
        expert_counts(graph),
    )
    stages = pins.get("stages")
    if stages is not None:
        check_stages(stages, pins.get("pp", len(stages)), 1, limits.num_units)
    found = candidates(limits, pins)
    if not found.candidates:
        raise refusal(graph.name, limits, pins, found.illegal)
    return found
