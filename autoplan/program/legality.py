"""Which configurations are legal: one tuple of rules with reasons, which estimate, plan and what-ifs keep alike.

    broken(config, facts, Scope.PRICED)           the first rule that a configuration breaks, and why; None: legal
    not_executed(config, facts)                   what of a legal configuration is priced, but not executed

A configuration is accepted or refused by all commands alike, but for what is priced and not executed: rules of a wider
scope than `Scope.PRICED`. `autoplan.search.degrees` enumerates by the same rules, each as soon as all it names is
decided, and `autoplan.search.nearest` tries what it suggests against them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import lru_cache

from autoplan.config.choice import is_count
from autoplan.config.offload import NEEDS_SHARDS, lacks_shards
from autoplan.config.parallel import Attention, Mode, ParallelConfig, RunOptions
from autoplan.config.parallel import precision_obstacle as _precision_obstacle
from autoplan.config.recompute import KINDS, Kind, check_choice, groups_of, kinds_in, modules_of
from autoplan.errors import PinError
from autoplan.program.context_pins import method_obstacle, product_degree
from autoplan.program.facts import Facts, divisors
from autoplan.program.parallel_dims import folds
from autoplan.schedules.schedule import SCHEDULES, obstacle

_REPLICAS = "ZeRO cannot have as many replicas"
_MAX_LISTED = 8  # names in a message


class Scope(IntEnum):
    """Who keeps a rule: whoever asks with its scope or a wider one.

    PRICED: every command, since what breaks it has no price. SEARCHED: plan and what-ifs, too; `estimate` prices it.
    EXECUTED: only what the runtime is to run.
    """

    PRICED = 0
    SEARCHED = 1
    EXECUTED = 2


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: what candidates that break it are counted under.
        names: the choices that it reads, the one to change first in front; `global_batch_size`, `seq_len` and
            `target_len` are of the run.
        broken: why a configuration breaks it, or None; begins with `name=value` where one choice is at fault.
        scope: see Scope.
        priced: of a rule that only limits what is executed: what is priced all the same, for reports; "": the reason.
    """

    name: str
    names: tuple[str, ...]
    broken: Callable[[ParallelConfig, Facts], str | None]
    scope: Scope = Scope.PRICED
    priced: str = ""


@dataclass(frozen=True)
class Broken:
    """A rule, and why a configuration breaks it."""

    rule: Rule
    reason: str


def broken(config: ParallelConfig, facts: Facts, scope: Scope) -> Broken | None:
    """The first rule of those that are kept in `scope` that a configuration breaks; None: it is legal."""
    for rule in RULES:
        if rule.scope <= scope:
            reason = rule.broken(config, facts)
            if reason is not None:
                return Broken(rule, reason)
    return None


def check(config: ParallelConfig, facts: Facts, scope: Scope) -> None:
    """Raise PinError, without a suggestion (see `autoplan.search.nearest`), for a configuration that breaks a rule."""
    found = broken(config, facts, scope)
    if found is not None:
        raise PinError(found.reason, found.rule.names)


def not_executed(config: ParallelConfig, facts: Facts) -> tuple[str, ...]:
    """Why autoplan's own runtime does not execute a configuration that has a price; nothing if it does."""
    out = []
    for rule in RULES:
        reason = rule.broken(config, facts) if rule.scope > Scope.PRICED else None
        if reason is not None:
            out.append(rule.priced or reason)
    return tuple(dict.fromkeys(out))


# -- devices -----------------------------------------------------------------------------------------------------------


def _divides(name: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        degree = getattr(c, name)
        return f"{name}={degree} does not divide the {f.devices} devices" if f.devices % degree else None

    return found


def _product(c: ParallelConfig, f: Facts) -> str:
    made = c.dp * c.cp * c.tp * c.pp
    cut = f" x cp={c.cp}" if c.cp > 1 else ""
    return f"dp={c.dp}{cut} x tp={c.tp} x pp={c.pp} = {made} devices, but the cluster has {f.devices}"


def _mesh(c: ParallelConfig, f: Facts) -> str | None:
    return _product(c, f) if f.devices % (c.cp * c.tp * c.pp) else None


def _world(c: ParallelConfig, f: Facts) -> str | None:
    return _product(c, f) if c.dp * c.cp * c.tp * c.pp != f.devices else None


def _heads(c: ParallelConfig, f: Facts) -> str | None:
    for where, count in f.model.heads if f.model is not None and c.tp > 1 else ():
        if count % c.tp:
            return f"tp={c.tp} does not divide the {count} attention heads at {where}"
    return None


# -- stages ------------------------------------------------------------------------------------------------------------


def _stage_each(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or c.pp <= f.model.num_layers:
        return None
    return f"pp={c.pp} needs at least as many layers, the model has {f.model.num_layers}"


def _chunks(ends: bool) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        if f.model is None or c.pp * c.virtual_stages <= f.model.num_layers + (f.model.num_ends if ends else 0):
            return None
        if c.virtual_stages == 1:
            return f"pp={c.pp} needs at least as many layers, the model has {f.model.num_layers}"
        return (
            f"pp={c.pp} x virtual_stages={c.virtual_stages} = {c.pp * c.virtual_stages} chunks need at least as many "
            f"layers, the model has {f.model.num_layers}"
        )

    return found


_ENDS = "embedding and head as chunks of a pipeline by themselves"


def _stages_devices(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or len(c.stages) == 1 or math.gcd(len(c.stages), f.devices) > 1:
        return None
    return f"stages={list(c.stages)} has {len(c.stages)} stages, which do not divide the {f.devices} devices"


def _stages_pp(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or len(c.stages) % c.pp == 0:
        return None
    return f"stages={list(c.stages)} has {len(c.stages)} entries for pp={c.pp}"


def _stages_chunks(c: ParallelConfig, f: Facts) -> str | None:
    chunks = c.pp * c.virtual_stages
    if c.stages is None or len(c.stages) == chunks:
        return None
    of = f"pp={c.pp}" if c.virtual_stages == 1 else f"pp={c.pp} x virtual_stages={c.virtual_stages}"
    return f"stages={list(c.stages)} has {len(c.stages)} entries for {of}; give {chunks}"


def _stages_sum(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or f.model is None:
        return None
    last = len(c.stages) - 1
    least = [0 if last and k in (0, last) and f.model.num_ends else 1 for k in range(len(c.stages))]
    if sum(c.stages) == f.model.num_layers and all(map(is_count, c.stages, least)):
        return None
    return (
        f"stages={list(c.stages)} must be {len(c.stages)} positive numbers that add up to the model's "
        f"{f.model.num_layers} layers"
    )


def _stages_ends(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or min(c.stages) > 0:
        return None
    return f"stages={list(c.stages)} must be positive numbers"


# -- the batch ---------------------------------------------------------------------------------------------------------


def _batch(*names: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        values = [getattr(c, name) for name in names]
        product = math.prod(values)
        if f.batch is None or f.batch % product == 0:
            return None
        given = " x ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        return f"{given}{f' = {product}' if len(names) > 1 else ''} does not divide the global batch of {f.batch}"

    return found


def _whole_batch(c: ParallelConfig, f: Facts) -> str | None:
    made = c.dp * c.micro_batch_size * c.num_micro_batches
    if f.batch is None or made == f.batch:
        return None
    return (
        f"dp={c.dp} x micro_batch_size={c.micro_batch_size} x num_micro_batches={c.num_micro_batches} = {made}, but "
        f"the global batch is {f.batch}"
    )


def _unsplit(name: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        value = getattr(c, name)
        if value == 1 or f.model is None or f.model.batch_obstacle is None:
            return None
        return f"{name}={value}: {f.model.batch_obstacle}, so the batch cannot be split"

    return found


# -- experts -----------------------------------------------------------------------------------------------------------


def _no_experts(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or f.model.num_experts or not c.spreads_experts:
        return None
    name = "ep" if c.ep > 1 else "etp"
    return f"{name}={getattr(c, name)}: the model has no experts"


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
    etp, ranks = c.expert_tp, c.dp * c.cp * c.tp
    if f.model is None or not c.spreads_experts or ranks % (c.ep * etp) == 0:
        return None
    return f"ep={c.ep} x etp={etp} does not divide dp x cp x tp = {ranks}, which expert parallelism is folded from"


def _expert_whole(c: ParallelConfig, f: Facts) -> str | None:
    etp = c.expert_tp
    return None if etp in (1, c.tp) else f"etp={etp}: experts are whole, or split over all of tp={c.tp}"


def _expert_folds(c: ParallelConfig, f: Facts) -> str | None:
    etp, ranks = c.expert_tp, c.dp * c.cp * c.tp
    if not c.spreads_experts or folds(c.dp, c.cp, c.tp, c.ep, etp):
        return None
    return f"ep={c.ep}: it does not fold into dp x cp x tp = {ranks}" + (f" with etp={etp}" if etp > 1 else "")


# -- sequences ---------------------------------------------------------------------------------------------------------


def _parts(c: ParallelConfig, f: Facts) -> str | None:
    if c.cp == 1 or f.seq_len is None or f.seq_len % (2 * c.cp) == 0:
        return None
    return f"seq_len={f.seq_len} cannot be cut into {2 * c.cp} equal chunks over cp={c.cp}"


_LENGTHS = {"s": "seq_len", "t": "target_len"}


def _no_target(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or f.model.graph.has_target or f.target_len in (None, f.seq_len):
        return None
    return f"target_len={f.target_len}, but {f.model.name} has no second sequence with a length of its own"


def _positions(symbol: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        length, rows = f.length(symbol), None if f.model is None else f.model.positions.get(symbol)
        if f.model is None or length is None or rows is None or length <= rows:
            return None
        return f"{_LENGTHS[symbol]}={length}, but {f.model.name} has {rows} learned positions"

    return found


def _bounds(symbol: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        length, bounds = f.length(symbol), None if f.model is None else f.model.graph.bounds.get(symbol)
        if f.model is None or length is None or bounds is None:
            return None
        low, high = bounds
        if low <= length and (high is None or length <= high):
            return None
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        return (
            f"sequences of {length} tokens: the forward of {f.model.name} asks for the length, and this graph is that "
            f"of {allowed}"
        )

    return found


def _uncut(target: bool) -> Callable[[ParallelConfig, Facts], str | None]:
    """Of models with two lengths (which have no price) and of others."""

    def found(c: ParallelConfig, f: Facts) -> str | None:
        if c.cp == 1 or f.model is None or f.model.graph.has_target is not target:
            return None
        reason = f.model.context_obstacle
        return None if reason is None else f"cp={c.cp}: {reason}"

    return found


def _method(c: ParallelConfig, f: Facts) -> str | None:
    if c.context_method is None:
        return None
    if c.cp == 1:
        return f"context_method={c.context_method!r} needs cp of at least 2"
    if f.model is None:
        return None
    return method_obstacle(f.model.graph, c.context_method, c.cp, c.tp)


def _method_folds(c: ParallelConfig, f: Facts) -> str | None:
    return method_folds_obstacle(c)


def method_folds_obstacle(c: ParallelConfig) -> str | None:
    """Why experts cannot be spread between the two axes of a product of methods, or None."""
    if c.context_method is None or not c.spreads_experts:
        return None
    neighbours = product_degree(c)
    if neighbours == 1 or folds(c.dp, c.cp, c.tp, c.ep, c.expert_tp, neighbours, c.zero_replicas):
        return None
    return (
        f"context_method={c.context_method!r}: ep={c.ep} does not fold into dp x cp x tp with cp={c.cp} as groups of "
        f"{neighbours} (ulysses{neighbours})"
    )


# -- ZeRO and the host -------------------------------------------------------------------------------------------------


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


def _shards(c: ParallelConfig, f: Facts) -> str | None:
    if not lacks_shards(c.offload, c.zero_stage, c.num_shards):
        return None
    beside = f"zero_stage={c.zero_stage}, dp={c.dp} and cp={c.cp}"
    return f"offload={'+'.join(c.offload)!r} with {beside}: {NEEDS_SHARDS}"


def _host_link(c: ParallelConfig, f: Facts) -> str | None:
    if f.host_link or not (c.offload or any(KINDS[name].on_host for name in kinds_in(c.recompute))):
        return None
    return f"the catalog has no speed of the host link of {f.device_name}, so offloading has no price"


# -- schedules ---------------------------------------------------------------------------------------------------------


def _pipeline(c: ParallelConfig, f: Facts) -> str | None:
    if c.pp > 1 or c.virtual_stages == 1:
        return None
    fewest, most = SCHEDULES[c.schedule].virtual_stages
    if fewest == most == c.virtual_stages:
        return f"schedule {c.schedule!r} needs a pipeline"
    return f"virtual_stages={c.virtual_stages} needs a pipeline"


def _split_backward(c: ParallelConfig, f: Facts) -> str | None:
    if c.zero_stage != 3 or not SCHEDULES[c.schedule].split_backward:
        return None
    return f"schedule {c.schedule!r} splits the backward, which with zero_stage=3 gives wrong gradients"


def _takes(c: ParallelConfig, f: Facts) -> str | None:
    return obstacle(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)


def _unknown_order(c: ParallelConfig, f: Facts) -> str | None:
    if SCHEDULES[c.schedule].torch_class is not None:
        return None
    return f"schedule {c.schedule!r} is priced (autoplan estimate), but not searched and not executed"


# -- recompute ---------------------------------------------------------------------------------------------------------


def _recompute_values(c: ParallelConfig, f: Facts) -> str | None:
    """Of a mapping every block and choice, of numbers per stage how many, and that of modules all layers."""
    if isinstance(c.recompute, tuple):
        return None
    if not isinstance(c.recompute, Mapping):
        return None
    for block, how in c.recompute.items():
        check_choice(how)
        if modules_of(how):
            return f"recompute of {block!r}: modules are computed again in all layers or none; got {how!r}"
        if f.model is not None and block not in f.model.block_calls:
            calls = f.model.block_calls
            near = difflib.get_close_matches(str(block), calls, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            more = ", ..." if len(calls) > _MAX_LISTED else ""
            return (
                f"recompute names {block!r}, which is not a block; {hint}blocks: {', '.join(calls[:_MAX_LISTED])}{more}"
            )
    return None


def _recompute_stages(c: ParallelConfig, f: Facts) -> str | None:
    chunks, counts = c.pp * c.virtual_stages, c.recompute
    if not isinstance(counts, tuple):
        return None
    if len(counts) != chunks:
        return f"recompute={counts} has {len(counts)} entries for {chunks} stages; give {chunks}"
    for k, (again, most) in enumerate(zip(counts, c.stages or counts, strict=False)):
        if again > most:
            return f"recompute={','.join(map(str, counts))}: stage {k} has {most} layers, not {again}"
    return None


def _kinds(c: ParallelConfig) -> list[Kind]:
    return [KINDS[name] for name in sorted(kinds_in(c.recompute))]


def _recompute_mode(c: ParallelConfig, f: Facts) -> str | None:
    for kind in _kinds(c):
        if kind.modes and f.mode not in kind.modes:
            modes = " or ".join(kind.modes)
            return f"recompute={c.recompute!r}: {kind.does}, priced with mode {modes} and not executed"
    return None


def _recompute_executed(c: ParallelConfig, f: Facts) -> str | None:
    reasons = (f"recompute={c.recompute!r}: {kind.does}, priced and not executed" for kind in _kinds(c)
               if not kind.executed)  # fmt: skip
    return next(reasons, None)


def _compiled(c: ParallelConfig, f: Facts) -> str | None:
    if f.mode is not Mode.COMPILED:
        return None
    for how in c.recompute.values() if isinstance(c.recompute, Mapping) else [c.recompute]:
        if isinstance(how, str) and groups_of(how):
            return (
                f"recompute={c.recompute!r} with compiled blocks: torch.compile decides what a block keeps of its "
                "inside"
            )
    return None


# -- the run -----------------------------------------------------------------------------------------------------------


def _precision(c: ParallelConfig, f: Facts) -> str | None:
    return _precision_obstacle(f.precision)


def _mode(c: ParallelConfig, f: Facts) -> str | None:
    return "mode fused is priced (kernels of Megatron), but not executed" if f.mode is Mode.FUSED else None


def _options(c: ParallelConfig, f: Facts) -> str | None:
    plain = RunOptions()
    names = [
        each.name
        for each in fields(RunOptions)
        if each.name not in ("attention", "document_len", "sequence_parallel")
        and getattr(f.options, each.name) != getattr(plain, each.name)
    ]
    if f.mode is not Mode.FUSED and f.options.attention_in(f.mode) is not Attention.FLASH2:
        names.insert(0, "attention")
    return f"the options {', '.join(names)} are priced, but not executed" if names else None


RULES: tuple[Rule, ...] = (
    Rule("cp does not divide the devices", ("cp",), _divides("cp")),
    *(Rule("pp x tp does not divide the devices", (name,), _divides(name)) for name in ("tp", "pp")),
    Rule("pp x tp does not divide the devices", ("tp", "pp", "cp"), _mesh),
    Rule("another dp is pinned", ("dp",), _divides("dp")),
    Rule("another dp is pinned", ("dp", "tp", "pp", "cp"), _world),
    Rule("tp does not divide the attention heads", ("tp",), _heads),
    Rule("more stages than layers", ("pp",), _stage_each, Scope.SEARCHED, _ENDS),
    Rule("more stages than layers", ("virtual_stages", "pp"), _chunks(ends=True)),
    Rule("more stages than layers", ("virtual_stages", "pp"), _chunks(ends=False), Scope.SEARCHED, _ENDS),
    Rule("another number of stages is pinned", ("stages", "pp", "virtual_stages"), _stages_chunks),
    Rule("another number of stages is pinned", ("stages", "pp"), _stages_pp),
    Rule("another number of stages is pinned", ("stages",), _stages_devices),
    Rule("another number of stages is pinned", ("stages",), _stages_sum),
    Rule("another number of stages is pinned", ("stages",), _stages_ends, Scope.SEARCHED, _ENDS),
    Rule("dp does not divide the global batch", ("dp", "global_batch_size"), _batch("dp")),
    Rule("the batch cannot be split", ("dp",), _unsplit("dp")),
    *(
        Rule("the micro-batches do not make the global batch", (*names, "global_batch_size"), _batch(*names))
        for names in (
            ("micro_batch_size",),
            ("num_micro_batches",),
            ("dp", "micro_batch_size"),
            ("dp", "num_micro_batches"),
            ("micro_batch_size", "num_micro_batches"),
        )
    ),
    Rule(
        "the micro-batches do not make the global batch",
        ("num_micro_batches", "micro_batch_size", "dp", "global_batch_size"),
        _whole_batch,
    ),
    Rule("the batch cannot be split", ("num_micro_batches",), _unsplit("num_micro_batches")),
    Rule("no second sequence", ("target_len",), _no_target),
    *(Rule("learned positions", (name,), _positions(symbol)) for symbol, name in _LENGTHS.items()),
    *(Rule("the length that was captured", (name,), _bounds(symbol)) for symbol, name in _LENGTHS.items()),
    Rule("the sequence cannot be cut into equal chunks", ("seq_len", "cp"), _parts),
    Rule("the sequence cannot be cut", ("cp",), _uncut(target=True)),
    Rule("the sequence cannot be cut", ("cp",), _uncut(target=False), Scope.EXECUTED),
    Rule("the pinned context_method does not exist at this tp", ("context_method", "cp", "tp"), _method),
    Rule("the model has no experts", ("ep", "etp", "tp"), _no_experts),
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
    Rule(NEEDS_SHARDS, ("zero_stage", "offload", "dp", "cp", "zero_replicas"), _shards),
    Rule("no host link is known", ("recompute", "offload"), _host_link),
    Rule("several stages per rank without a pipeline", ("pp", "virtual_stages", "schedule"), _pipeline),
    Rule("a split backward with ZeRO 3", ("zero_stage", "schedule"), _split_backward),
    Rule(
        "the schedule does not take that many micro-batches",
        ("num_micro_batches", "virtual_stages", "pp", "schedule"),
        _takes,
    ),
    Rule("the schedule is not executed", ("schedule",), _unknown_order, Scope.SEARCHED),
    Rule("recompute names no block", ("recompute",), _recompute_values),
    Rule("recompute per stage", ("recompute", "stages", "pp", "virtual_stages"), _recompute_stages),
    Rule("modules are priced with mode fused", ("recompute",), _recompute_mode),
    Rule("modules are not executed", ("recompute",), _recompute_executed, Scope.EXECUTED),
    Rule("compiled blocks", ("recompute",), _compiled, Scope.EXECUTED),
    Rule("the precision is not executed", (), _precision, Scope.EXECUTED),
    Rule("the mode is not executed", (), _mode, Scope.EXECUTED),
    Rule("the options are not executed", (), _options, Scope.EXECUTED),
)


def zero_replica_counts(dp: int, cp: int, zero_stage: int, tp: int = 1, ep: int = 1, etp: int = 1) -> list[int]:
    """How many copies of the sharded state there may be: 1, and what leaves several neighbours to shard over.

    A divisor of dp: all of cp shards. Experts that are spread are in each copy, sharded over what ep leaves of it.
    """
    return list(_replica_counts(dp, cp, zero_stage, tp, ep, etp))


@lru_cache(maxsize=4096)  # a search asks for the same few again and again
def _replica_counts(dp: int, cp: int, zero_stage: int, tp: int, ep: int, etp: int) -> tuple[int, ...]:
    plain, facts = ParallelConfig(dp=dp, cp=cp, zero_stage=zero_stage, tp=tp, ep=ep, etp=etp), Facts(dp * cp * tp)
    rules = [rule for rule in RULES if rule.name == _REPLICAS]
    several = (replace(plain, zero_replicas=n) for n in divisors(dp))
    return tuple(c.zero_replicas for c in several if all(rule.broken(c, facts) is None for rule in rules))
