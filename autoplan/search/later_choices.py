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
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.degrees import MAX_ACTIONS
from autoplan.search.request import PlanRequest, space_of
from autoplan.search.space import LEAST_PART, least_part
from autoplan.search.standings import Evaluated

NEAR = 0.05  # share by which a bound may be above the best plan
_MORE_ACTIONS = 4  # few candidates are simulated here, so that each may have more actions than others


def shorter_parts(request: PlanRequest, best: Evaluated) -> list[ParallelConfig]:
    """Return the candidates of a plan with its sequences cut over twice as many ranks, which dp gives up.

    The parts are half as long as the shortest that are searched everywhere (`space.least_part`). This pays where memory
    makes a plan recompute or offload; for others nothing is returned. Published runs of Llama 405B cut 8,192 tokens
    over two ranks.
    """
    c, model, cp = best.candidate, request.facts.model, 2 * best.candidate.cp
    if not (any(best.recompute) or c.offload):
        return []
    searched, shortest = request.seq_len // least_part(request.facts), request.seq_len // (LEAST_PART // 2)
    if model is None or model.context_obstacle or "cp" in request.pins or c.dp % 2 or not searched < cp <= shortest:
        return []
    same = {name: getattr(c, name) for name in ("pp", "tp", "zero_stage", "micro_batch_size")}
    try:
        return list(space_of(replace(request, pins={**request.pins, **same, "cp": cp})).candidates)
    except PinError:  # nothing is legal: a pinned dp, or ranks that do not divide
        return []


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
        if each.num_actions <= _MORE_ACTIONS * MAX_ACTIONS and broken(each, request.facts, request.scope) is None:
            yield each
