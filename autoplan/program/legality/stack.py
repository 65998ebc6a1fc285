"""Rules of a stack: what the framework that will run the plan cannot do (`--like`)."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import can_mix, kinds_in, recompute_text
from autoplan.program.facts import Facts, layer_calls
from autoplan.program.legality.rule import Rule
from autoplan.schedules.schedule import PLAIN_SCHEDULE, chunks_of_ranks
from autoplan.stacks.limits import beyond


def _cannot(f: Facts, said: str, able: Sequence[object]) -> str:
    name = f.like.name if f.like is not None else ""
    return f"{said}: {name} cannot; it can {', '.join(map(str, able)) or 'nothing but the default'}"


def _degree(name: str) -> Rule:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        value = getattr(c, name)
        if f.like is None or value in (None, 1) or name in f.like.can.degrees:
            return None
        if name == "etp" and value == c.tp:  # experts as everything else
            return None
        return _cannot(f, f"{name}={value}", [f"{n} above 1" for n in f.like.can.degrees])

    return Rule(f"the stack has no {name}", (name,), found)


def _zero(c: ParallelConfig, f: Facts) -> str | None:
    if f.like is None or c.dp * c.cp == 1 or c.zero_stage in f.like.can.zero_stages:
        return None
    return _cannot(f, f"zero_stage={c.zero_stage}", f.like.can.zero_stages)


def _schedule(c: ParallelConfig, f: Facts) -> str | None:
    # without a pipeline every stack has the default, and no other says anything
    if f.like is None or c.schedule in f.like.can.schedules or (c.pp == 1 and c.schedule == PLAIN_SCHEDULE):
        return None
    return _cannot(f, f"schedule={c.schedule!r}", f.like.can.schedules)


def _recompute(c: ParallelConfig, f: Facts) -> str | None:
    if f.like is None or kinds_in(c.recompute) <= set(f.like.can.recompute):
        return None
    return _cannot(f, f"recompute={c.recompute!r}", f.like.can.recompute)


def _stages(c: ParallelConfig, layers: int) -> tuple[int, ...] | None:
    """Return the layers of every stage; equal ones if they are left open, and None where that cannot be known."""
    chunks = c.pp * c.virtual_stages
    if c.stages is not None:
        return c.stages if sum(c.stages) == layers else None
    return None if isinstance(c.recompute, tuple) or layers % chunks else (layers // chunks,) * chunks


def _mix(c: ParallelConfig, f: Facts) -> str | None:
    if f.like is None or f.model is None or isinstance(c.recompute, str):
        return None
    layers, mix = layer_calls(f.model.graph), f.like.can.recompute_mix
    chunks = chunks_of_ranks(c.schedule, c.pp, c.virtual_stages)
    if can_mix(mix, c.recompute, layers, _stages(c, len(layers)), chunks):
        return None
    return _cannot(f, f"recompute={recompute_text(c.recompute, layers)}", [mix.words])


def _offload(c: ParallelConfig, f: Facts) -> str | None:
    if f.like is None or set(c.offload) <= set(f.like.can.offload):
        return None
    return _cannot(f, f"offload={'+'.join(c.offload)!r}", f.like.can.offload)


def _limits(c: ParallelConfig, f: Facts) -> str | None:
    if f.like is None or not f.like.can.limits:
        return None
    num_experts = 0 if f.model is None else f.model.num_experts
    said = next(filter(None, (beyond(limit, c, num_experts, f.precision) for limit in f.like.can.limits)), None)
    return said and f"{said} ({f.like.name})"


_OF_LIMITS = ("etp", "ep", "zero_stage", "zero_replicas", "num_micro_batches", "tp", "dp", "cp", "pp")

RULES: tuple[Rule, ...] = (
    *map(_degree, ("tp", "pp", "cp", "ep", "etp")),
    Rule("the stack has no such ZeRO stage", ("zero_stage", "dp", "cp"), _zero),
    Rule("the stack has no such combination", _OF_LIMITS, _limits),
    Rule("the stack has no such schedule", ("schedule", "virtual_stages", "pp"), _schedule),
    Rule("the stack has no such recompute", ("recompute",), _recompute),
    Rule("the stack has no such mix of recompute", ("recompute", "stages", "pp", "virtual_stages", "schedule"), _mix),
    Rule("the stack has no such offload", ("offload",), _offload),
)
