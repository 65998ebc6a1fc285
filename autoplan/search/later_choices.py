"""Choices that a search looks at only near the best plans, because each of them would multiply its candidates.

Their candidates are made from those that are near the best, with all other choices as they are. The certificate names
each as a restriction of the space (`autoplan.search.certificate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.program.facts import divisors
from autoplan.program.legality import broken
from autoplan.program.legality.experts import zero_replica_counts
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.degrees import MAX_ACTIONS
from autoplan.search.request import PlanRequest, space_of
from autoplan.search.space import LEAST_PART, least_part
from autoplan.search.standings import Evaluated

NEAR = 0.05  # share by which a bound may be above the best plan
_MORE_ACTIONS = 4  # few candidates are simulated here, so that each may have more actions than others


def shorter_parts(request: PlanRequest, best: Evaluated) -> list[ParallelConfig]:
    """Return the candidates of a plan with its sequences cut over twice as many ranks, which dp or tp gives up.

    The parts are half as long as the shortest that are searched everywhere (`space.least_part`). In place of dp this
    pays where memory makes a plan recompute or offload, or forbids virtual stages; in place of half or three quarters
    of tp, whose collectives it saves, also with twice as many stages. Published runs cut 8,192 tokens over two ranks:
    of Llama 405B with tp 8 or, on 512 H200 (MLPerf v5.1), tp 4 and pp 8, of Llama 70B on 64 H100 with tp 4 and pp 4.
    """
    c, model, cp = best.candidate, request.facts.model, 2 * best.candidate.cp
    if model is None or model.context_obstacle or "cp" in request.pins:
        return []
    tokens = model.num_tokens(request.seq_len)
    if not tokens // least_part(request.facts) < cp <= tokens // (LEAST_PART // 2):
        return []
    fewer = [c.tp // n for n in (2, 4) if c.tp % n == 0]
    meshes = [(c.tp, c.pp), *((tp, pp) for tp in fewer for pp in (c.pp, 2 * c.pp))]
    out: list[ParallelConfig] = []
    for tp, pp in meshes:
        same = {"tp": tp, "pp": pp, "zero_stage": c.zero_stage, "micro_batch_size": c.micro_batch_size}
        if any(request.pins.get(name, value) != value for name, value in same.items()):
            continue
        try:
            out += space_of(replace(request, pins={**request.pins, **same, "cp": cp})).candidates
        except PinError:  # nothing is legal: a pinned dp, or ranks or heads that do not divide
            continue
    return out


def other_copies(request: PlanRequest, best: Evaluated) -> list[ParallelConfig]:
    """Return a plan with the other numbers of copies of the state that ZeRO may shard over a part of dp.

    Everywhere are searched one copy, those whose shards stay within a node or a rail group, and of ZeRO 3 one number
    between. MaxText's recipes for 1,024 H100 shard over 128 of them.
    """
    c, facts = best.candidate.but(context_method=None), request.facts
    if "zero_replicas" in request.pins:
        return []
    if "offload" not in request.pins:
        c = c.but(offload=())
    counts = zero_replica_counts(c.dp, c.cp, c.zero_stage, c.tp, c.ep, c.expert_tp)
    others = (c.but(zero_replicas=n) for n in counts if n != c.zero_replicas)
    return [each for each in others if broken(each, facts, request.scope, "zero_replicas") is None]


def more_stages(request: PlanRequest, candidate: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield the candidate with the other usual numbers of stages per rank, and those of equal stages.

    Embedding and head count as layers or do not (`Like`'s equal stages). Published runs have 12, 20 and 24.
    """
    c, model, pins = candidate, request.facts.model, request.pins
    if model is None or not SCHEDULES[c.schedule].divides or c.stages is not None or "virtual_stages" in pins:
        return
    sizes = {n // c.pp for n in (model.num_layers, model.num_layers + model.num_ends) if n % c.pp == 0}
    numbers = {*SCHEDULES[c.schedule].searched, *(v for size in sizes for v in divisors(size))}
    for number in sorted(numbers - {1, c.virtual_stages}):
        each = c.but(virtual_stages=number)
        if each.num_actions > _MORE_ACTIONS * MAX_ACTIONS:
            continue
        if broken(each, request.facts, request.scope, "virtual_stages") is None:
            yield each
