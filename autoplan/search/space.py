"""The space of degrees: every way to spread the devices over pp, dp and tp, cut the batch, and choose a ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.pins import Pins
from autoplan.config.settings import check_setting
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import Facts, ModelFacts, divisors
from autoplan.program.legality import Scope
from autoplan.schedules.schedule import SEARCHED_SCHEDULES
from autoplan.search.degrees import Limits, Space, legal_candidates
from autoplan.search.refusals import refusal

# Least tokens per rank and sequence for which cp is searched; with fewer, a device has little work. Where there are
# fewer sequences than devices, half of it: published runs of Llama 405B cut 8,192 tokens over two ranks.
LEAST_PART = 8192
_LEAST_DOMAIN = 8  # tp up to this is searched even if no scale-up domain is as large


def space(
    graph: ModelGraph,
    cluster: Cluster,
    global_batch_size: int,
    pins: Mapping[str, Any],
    *,
    seq_len: int = 0,
    facts: Facts | None = None,
    scope: Scope = Scope.SEARCHED,
) -> Space:
    """Enumerate the candidates under pins.

    Args:
        global_batch_size: sequences per step, over all data-parallel ranks.
        seq_len: tokens per sequence; 0: cp is 1 unless pinned.
        facts: facts of model, cluster and run; None: those of the other arguments, and the run's defaults.
        scope: scope of the rules to keep.

    Raises:
        PinError: the pins leave no candidate; the message names the rule and the nearest value.
    """
    check_setting("global_batch_size", global_batch_size)
    if facts is None:
        facts = Facts.of(graph, cluster, global_batch_size, seq_len or None)
    limits = limits_of(facts, cluster, scope)
    error = refusal(limits, pins)
    if error is not None:
        raise error
    return legal_candidates(limits, Pins(pins))


def limits_of(facts: Facts, cluster: Cluster, scope: Scope) -> Limits:
    """Return the limits of a search."""
    return Limits(
        facts,
        scope,
        max(_LEAST_DOMAIN, cluster.domain_size),
        (1,) if facts.model is None else _contexts(facts, facts.model, cluster),
        SEARCHED_SCHEDULES,
        tuple(level.size for level in cluster.levels[:-1]),
    )


def least_part(facts: Facts) -> int:
    """Return the least tokens per rank and sequence for which cp is searched."""
    few = facts.batch is not None and facts.batch < facts.devices
    return LEAST_PART // 2 if few else LEAST_PART


def _contexts(facts: Facts, model: ModelFacts, cluster: Cluster) -> tuple[int, ...]:
    """Return 1, and the cp that leave every rank enough tokens, if the model can be cut.

    They may span several scale-up domains: Llama 3 405B was trained on 131,072 tokens with tp 8 and cp 16 (arXiv
    2407.21783, table 4).
    """
    seq_len = facts.seq_len or 0
    most, chunks = model.num_tokens(seq_len) // least_part(facts), model.graph.sequence_chunks
    found = [cp for cp in divisors(cluster.num_devices) if 1 < cp <= most and seq_len % (chunks * cp) == 0]
    return (1, *found) if found and model.context_obstacle is None else (1,)
