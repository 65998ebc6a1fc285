"""Legality rules of experts, and of copies of the state that ZeRO shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from autoplan.config.mesh import folds, product_degree
from autoplan.config.parallel import ParallelConfig
from autoplan.program.facts import Facts, divisors
from autoplan.program.legality.rule import Rule, Scope

_REPLICAS = "ZeRO cannot have as many replicas"


def _no_experts(name: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        if f.model is None or f.model.num_experts or (c.ep == 1 if name == "ep" else c.expert_tp == c.tp):
            return None
        return f"{name}={getattr(c, name)}: the model has no experts"

    return found


def _expert_parts(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or not f.model.num_experts or f.model.num_experts % c.ep == 0:
        return None
    return f"ep={c.ep} does not divide the {f.model.num_experts} experts"


def _inner_parts(c: ParallelConfig, f: Facts) -> str | None:
    etp = c.expert_tp
    if f.model is None or not f.model.num_experts or not c.spreads_experts or f.model.inner_size % etp == 0:
        return None
    return f"etp={etp} does not divide the experts' inner size of {f.model.inner_size}"


def _expert_ranks(c: ParallelConfig, f: Facts) -> str | None:
    etp, ranks = c.expert_tp, c.stage_ranks
    if f.model is None or not c.spreads_experts or ranks % (c.ep * etp) == 0:
        return None
    return f"ep={c.ep} x etp={etp} does not divide dp x cp x tp = {ranks}, which expert parallelism is folded from"


def _expert_whole(c: ParallelConfig, f: Facts) -> str | None:
    etp = c.expert_tp
    return None if etp in (1, c.tp) else f"etp={etp}: experts are whole, or split over all of tp={c.tp}"


def _expert_folds(c: ParallelConfig, f: Facts) -> str | None:
    etp, ranks = c.expert_tp, c.stage_ranks
    if not c.spreads_experts or folds(c.dp, c.cp, c.tp, c.ep, etp):
        return None
    return f"ep={c.ep}: it does not fold into dp x cp x tp = {ranks}" + (f" with etp={etp}" if etp > 1 else "")


def _method_folds(c: ParallelConfig, f: Facts) -> str | None:
    if c.context_method is None or not c.spreads_experts:
        return None
    neighbours = product_degree(c)
    if neighbours == 1 or folds(c.dp, c.cp, c.tp, c.ep, c.expert_tp, neighbours, c.zero_replicas):
        return None
    return (
        f"context_method={c.context_method!r}: ep={c.ep} does not fold into dp x cp x tp with cp={c.cp} as groups of "
        f"{neighbours} (ulysses{neighbours})"
    )


def _copies(why: Callable[[ParallelConfig], str | None]) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        reason = why(c) if c.zero_replicas > 1 else None
        return None if reason is None else f"zero_replicas={c.zero_replicas} with {reason}"

    return found


def _copies_of_dp(c: ParallelConfig) -> str | None:
    return f"dp={c.dp}: it must divide dp and leave several ranks to shard over" if c.dp % c.zero_replicas else None


def _copies_of_nothing(c: ParallelConfig) -> str | None:
    return f"dp={c.dp}, zero_stage=0: ZeRO 0 shards nothing" if c.zero_stage == 0 else None


def _copies_of_one(c: ParallelConfig) -> str | None:
    if c.dp * c.cp > c.zero_replicas:
        return None
    return f"dp={c.dp}: it must leave several ranks to shard over; this is zero_stage=0"


def _copies_of_experts(c: ParallelConfig) -> str | None:
    if folds(c.dp, c.cp, c.tp, c.ep, c.expert_tp, copies=c.zero_replicas):
        return None
    return f"ep={c.ep}: every copy of the sharded state needs ranks for ep"


RULES: tuple[Rule, ...] = (
    Rule("the model has no experts", ("ep",), _no_experts("ep")),
    Rule("the model has no experts", ("etp", "tp"), _no_experts("etp")),
    Rule("ep does not divide the experts", ("ep",), _expert_parts),
    Rule("etp does not divide the experts' inner size", ("etp", "ep", "tp"), _inner_parts),
    Rule("ep x etp does not divide dp x cp x tp", ("ep", "etp", "dp", "cp", "tp"), _expert_ranks),
    Rule("experts are whole or split over all of tp", ("etp", "tp"), _expert_whole, Scope.EXECUTED),
    Rule("ep does not fold into dp x cp x tp", ("ep", "etp", "dp", "cp", "tp"), _expert_folds, Scope.EXECUTED),
    Rule(_REPLICAS, ("zero_replicas", "dp"), _copies(_copies_of_dp)),
    Rule(_REPLICAS, ("zero_stage", "zero_replicas"), _copies(_copies_of_nothing)),
    Rule(_REPLICAS, ("zero_replicas", "dp", "cp"), _copies(_copies_of_one)),
    Rule(
        _REPLICAS,
        ("ep", "zero_replicas", "etp", "dp", "cp", "tp"),
        _copies(_copies_of_experts),
    ),
    Rule(
        "context_method does not leave room for ep",
        ("context_method", "ep", "etp", "dp", "cp", "tp", "zero_replicas"),
        _method_folds,
    ),
)


def zero_replica_counts(dp: int, cp: int, zero_stage: int, tp: int = 1, ep: int = 1, etp: int = 1) -> list[int]:
    """Return the possible numbers of copies of the sharded state: 1, and those that leave several ranks to shard over.

    A count divides dp: all of cp shards. Spread experts are in each copy, sharded over the ranks that ep leaves of it.
    """
    return list(_replica_counts(dp, cp, zero_stage, tp, ep, etp))


@lru_cache(maxsize=4096)  # a search repeats the same few calls
def _replica_counts(dp: int, cp: int, zero_stage: int, tp: int, ep: int, etp: int) -> tuple[int, ...]:
    plain, facts = ParallelConfig(dp=dp, cp=cp, zero_stage=zero_stage, tp=tp, ep=ep, etp=etp), Facts(dp * cp * tp)
    rules = [rule for rule in RULES if rule.name == _REPLICAS]
    several = (replace(plain, zero_replicas=n) for n in divisors(dp))
    return tuple(c.zero_replicas for c in several if all(rule.broken(c, facts) is None for rule in rules))
