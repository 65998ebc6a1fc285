"""Pinned degrees: reading them, the legality rules, and the defaults of a configuration made without a search.

`read_pins` fills in tp = 1, pp = 1, dp = all remaining devices, ZeRO 1, one micro-batch without a pipeline and 2 * pp
with one, no recompute, 1F1B, stages of balanced arithmetic. The planner leaves open what is not pinned instead.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from autoplan.cost_models.config import (
    GROUPS,
    RECOMPUTE,
    Mode,
    ParallelConfig,
    groups_of,
    modules_choice,
    modules_of,
)
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.layout import Axis, Mesh
from autoplan.cost_models.schedule import SCHEDULES as SCHEDULE_RULES
from autoplan.cost_models.schedule import actions
from autoplan.rules.batch import batch_obstacle, context_obstacle
from autoplan.rules.table import flops, rule_for
from autoplan.search.context_pins import chosen_methods, product_degree
from autoplan.search.folding import data_axes, folded_mesh, folds, inner_degree, sequence_axes, spreads
from autoplan.search.offload_pins import check_offload, read_offload, state_offload, with_offload

_DEGREES = ("tp", "pp", "dp", "ep", "etp", "cp")
KNOWN = (
    *_DEGREES, "zero_stage", "num_micro_batches", "recompute", "stages", "schedule", "virtual_stages", "state_slack",
    "context_method", "zero_replicas", "offload",
)  # fmt: skip
ZERO_STAGES = (0, 1, 2, 3)
# what the runtime executes today; more is priced (autoplan.cost_models.config)
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZB-H1", "InterleavedZeroBubble", "ZBV", "DualPipeV")
_COUNTS = (
    "tp", "pp", "dp", "ep", "etp", "cp", "micro_batch_size", "num_micro_batches", "virtual_stages", "zero_replicas"
)  # fmt: skip
_MAX_LISTED = 8  # names in a message


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def around(value: int, legal: Iterable[int]) -> str:
    """The legal values next to an illegal one, for a message: `2 or 4`."""
    ordered = sorted(set(legal))
    below = [n for n in ordered if n <= value]
    above = [n for n in ordered if n > value]
    return " or ".join(str(n) for n in [*below[-1:], *above[:1]])


def is_count(value: object, least: int = 1) -> bool:
    """True for a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_values(pins: Mapping[str, Any], known: Sequence[str]) -> None:
    """Names and values that no cluster or model could make legal. PinError names the nearest legal one."""
    for name in pins:
        if name not in known:
            near = [k for k in known if k.startswith(name)] or difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PinError(f"unknown pin {name!r}; {hint}known pins: {', '.join(known)}")
    for name in _COUNTS:
        if name in pins and not is_count(pins[name]):
            raise PinError(f"pin {name}={pins[name]!r}: must be a whole number of at least 1; nearest legal: 1")
    zero = pins.get("zero_stage", 1)
    if not is_count(zero, 0) or zero not in ZERO_STAGES:
        raise PinError(f"pin zero_stage={zero!r} does not exist; use 0, 1, 2 or 3")
    if pins.get("context_method") is not None and pins.get("cp", 1) == 1:
        raise PinError(f"pin context_method={pins['context_method']!r} needs a pin of cp; nearest legal: cp=2")
    schedule = pins.get("schedule", SCHEDULES[0])
    if schedule not in SCHEDULES:
        close = [*difflib.get_close_matches(str(schedule), SCHEDULES, 1), SCHEDULES[0]]
        raise PinError(
            f"pin schedule={schedule!r} is not supported; nearest legal: {close[0]}; all: {', '.join(SCHEDULES)}"
        )
    recompute = pins.get("recompute", "none")
    for value in recompute.values() if isinstance(recompute, Mapping) else [recompute]:
        check_choice(value)
    read_offload(pins.get("offload", "none"))
    with_offload(pins)
    stages = pins.get("stages")
    if stages is not None and (
        not isinstance(stages, (list, tuple)) or not stages or not all(is_count(n) for n in stages)
    ):
        raise PinError(f"pin stages={stages!r}: must be positive numbers, the layers of every stage, e.g. [3, 5]")
    slack = pins.get("state_slack", 1.02)
    if isinstance(slack, bool) or not isinstance(slack, (int, float)) or not 1 <= slack < math.inf:
        raise PinError(f"pin state_slack={slack!r}: must be a number of at least 1; nearest legal: 1.0")


def check_choice(value: object) -> str:
    """A choice of recompute for one block or all: its name, groups in their order. PinError names the legal ones."""
    if isinstance(value, str) and value in RECOMPUTE:
        return value
    if named := modules_of(value):
        return modules_choice(named)
    parts = value.split("+") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and parts and all(isinstance(p, str) for p in parts):
        unknown = [p for p in parts if p not in GROUPS]
        if not unknown and len(set(parts)) == len(parts):
            return "+".join(g for g in GROUPS if g in parts)
    raise PinError(
        f"pin recompute={value!r} is not supported; use {', '.join(RECOMPUTE)}, or some of "
        f"{', '.join(GROUPS)} joined by + (attention+norms), or a mapping block -> one of these; with --mode fused "
        "also modules of Megatron's (modules:core_attn,mlp)"
    )


def read_recompute(value: Any) -> str | dict[str, str]:
    """The pin in one form: a choice for all layers, or one by block."""
    if isinstance(value, Mapping):
        return {name: check_choice(v) for name, v in value.items()}
    return check_choice(value)


def check_modules(recompute: object, mode: Mode, executed: bool) -> None:
    """PinError for modules computed again where no hand-written kernels run, or in some layers alone."""
    if isinstance(recompute, Mapping):
        for block, how in recompute.items():
            if modules_of(how):
                raise PinError(f"recompute of {block!r}: modules are computed again in all layers or none; got {how!r}")
    if modules_of(recompute) and (executed or mode is not Mode.FUSED):
        raise PinError(
            f"recompute={recompute!r}: modules are Megatron's, priced with mode fused and not executed; nearest legal: "
            "recompute='full', or groups of regions (attention+mlp+norms)"
        )


def check_compiled(pins: Mapping[str, Any]) -> None:
    """PinError for what compiled blocks cannot do: torch.compile decides what they keep of their inside."""
    pinned = pins.get("recompute", "none")
    for value in pinned.values() if isinstance(pinned, Mapping) else [pinned]:
        if groups_of(check_choice(value)):
            raise PinError(
                f"pin recompute={value!r} with compiled blocks: torch.compile decides what a block keeps of its "
                "inside; nearest legal: recompute='full'"
            )


def check_recompute(graph: ModelGraph, recompute: object) -> None:
    """PinError if a mapping from block to recompute names what is no call of a block with work of its own."""
    if not isinstance(recompute, Mapping):
        return
    free = graph.free_calls()
    calls = [c.name for c in graph.calls if c.name not in free]
    for name in recompute:
        if name not in calls:
            near = difflib.get_close_matches(str(name), calls, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            more = ", ..." if len(calls) > _MAX_LISTED else ""
            raise PinError(
                f"pin recompute names {name!r}, which is not a block; {hint}blocks: "
                f"{', '.join(calls[:_MAX_LISTED])}{more}"
            )


def read_pins(pins: Mapping[str, Any], num_devices: int) -> ParallelConfig:
    """Check pins and fill in the defaults. PinError names the rule and the nearest legal value."""
    check_values(pins, KNOWN)
    pins = with_offload(pins)
    tp, pp, cp = pins.get("tp", 1), pins.get("pp", 1), pins.get("cp", 1)
    if num_devices % cp:
        raise PinError(
            f"pin cp={cp} does not divide the {num_devices} devices; nearest legal: {around(cp, divisors(num_devices))}"
        )
    num_devices //= cp
    for name, degree in (("tp", tp), ("pp", pp)):
        if num_devices % degree:
            raise PinError(
                f"pin {name}={degree} does not divide the {num_devices} devices; nearest legal: "
                f"{around(degree, divisors(num_devices))}"
            )
    if num_devices % (tp * pp):
        raise PinError(
            f"pins tp={tp} x pp={pp} do not divide the {num_devices} devices; with pp={pp}, tp may be "
            f"{around(tp, divisors(num_devices // pp))}"
        )
    dp = pins.get("dp", num_devices // (tp * pp))
    if dp * tp * pp != num_devices:
        raise PinError(
            f"dp={dp} x tp={tp} x pp={pp} = {dp * tp * pp} devices, but the cluster has {num_devices}; nearest legal: "
            f"dp={num_devices // (tp * pp)}"
        )
    stages = pins.get("stages")
    schedule, virtual_stages = schedule_of(pins)
    config = check_schedule(
        ParallelConfig(
            dp=dp,
            tp=tp,
            pp=pp,
            ep=pins.get("ep", 1),
            cp=cp,
            etp=pins.get("etp"),
            zero_stage=pins.get("zero_stage", 1),
            num_micro_batches=pins.get("num_micro_batches", 2 * pp if pp > 1 else 1),
            schedule=schedule,
            virtual_stages=virtual_stages,
            recompute=read_recompute(pins.get("recompute", "none")),
            stages=tuple(stages) if stages is not None else None,
            state_slack=float(pins.get("state_slack", 1.02)),
            context_method=pins.get("context_method"),
            zero_replicas=pins.get("zero_replicas", 1),
            offload=state_offload(pins),
        )
    )
    check_offload(config)
    return config


def schedule_of(pins: Mapping[str, Any]) -> tuple[str, int]:
    """The schedule and the stages per rank of the pipeline that pins say, each by default what the other takes."""
    virtual_stages = pins.get("virtual_stages", 1)
    schedule = pins.get("schedule", "1F1B" if virtual_stages == 1 else "Interleaved1F1B")
    fewest = SCHEDULE_RULES[schedule].virtual_stages[0]
    return schedule, virtual_stages if "virtual_stages" in pins else fewest


def check_schedule(c: ParallelConfig) -> ParallelConfig:
    """The same configuration. PinError if its schedule is unknown or does not take its degrees, with what is near."""
    if c.schedule not in SCHEDULE_RULES:
        raise PinError(f"schedule {c.schedule!r} is not known; use {', '.join(SCHEDULE_RULES)}")
    fewest, most = SCHEDULE_RULES[c.schedule].virtual_stages
    if c.pp == 1 and fewest == most == c.virtual_stages > 1:
        raise PinError(f"schedule {c.schedule!r} needs a pipeline; nearest legal: pp=2, or schedule=1F1B")
    if c.virtual_stages > 1 and c.pp == 1:
        raise PinError(f"virtual_stages={c.virtual_stages} needs a pipeline; nearest legal: virtual_stages=1, or pp=2")
    actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)  # its own rules
    if SCHEDULE_RULES[c.schedule].split_backward and c.zero_stage == 3:
        raise PinError(
            f"schedule {c.schedule!r} splits the backward, which with zero_stage=3 gives wrong gradients; nearest "
            "legal: zero_stage=2"
        )
    return c


def head_counts(graph: ModelGraph) -> list[tuple[str, int, int]]:
    """(where, attention heads, key-value heads) of every attention op."""
    out = []
    for block in graph.blocks.values():
        for node in block.nodes:
            if node.op == "attention":
                q, k = (block.values[n] for n in node.tensor_inputs[:2])
                heads, kv = q.shape[1].value, k.shape[1].value
                if heads is not None and kv is not None:
                    out.append((node.source or f"{block.name}/{node.name}", heads, kv))
    return out


def check_degrees(graph: ModelGraph, config: ParallelConfig, ends: bool = False) -> None:
    """Rules that need the model. PinError names the rule and the nearest legal value.

    `ends`: what precedes the layers and what follows them may be chunks of their own (see `pipeline_units`).
    """
    c, heads = config, head_counts(graph)
    for where, count, _ in heads:
        if count % c.tp:
            common = math.gcd(c.dp * c.tp, *(n for _, n, _ in heads))
            raise PinError(
                f"pin tp={c.tp} does not divide the {count} attention heads at {where}; nearest legal: "
                f"{around(c.tp, divisors(common))}"
            )
    num_layers = len(pipeline_units(graph))
    check_chunks(c, num_layers, len(pipeline_units(graph, ends)) - num_layers)
    if c.stages is not None:
        check_stages(c.stages, c.pp, c.virtual_stages, num_layers, ends)
    if c.dp > 1 or c.num_micro_batches > 1:
        obstacle = batch_obstacle(graph)
        if obstacle is not None:
            raise PinError(f"{obstacle}, so the batch cannot be split; use dp=1 and num_micro_batches=1")


def expert_counts(graph: ModelGraph) -> tuple[int, ...]:
    """Number of experts of every experts op."""
    return tuple(int(n.attrs["num_experts"]) for b in graph.blocks.values() for n in b.nodes if n.op == "experts")


def inner_sizes(graph: ModelGraph) -> tuple[int, ...]:
    """Inner size of the experts of every experts op."""
    nodes = [n for b in graph.blocks.values() for n in b.nodes if n.op == "experts"]
    return tuple(int(n.attrs["intermediate_size"]) for n in nodes)


def dispatch_degrees(dp: int, tp: int, counts: Sequence[int], cp: int = 1, etp: int = 1) -> list[int]:
    """Degrees of expert parallelism in which tokens travel: whole parts of the experts, folded from dp x cp x tp."""
    return [ep for ep in divisors(math.gcd(*counts)) if folds(dp, cp, tp, ep, etp)] if counts else [1]


def check_dispatch(graph: ModelGraph, c: ParallelConfig) -> None:
    """What the runtime cannot spread. PinError names the rule and the nearest legal value."""
    if not spreads(c):
        return
    counts, etp = expert_counts(graph), inner_degree(c)
    if not counts:
        name, value = ("ep", c.ep) if c.ep > 1 else ("etp", c.etp)
        raise PinError(f"pin {name}={value}: {graph.name} has no experts; nearest legal: 1")
    if etp not in (1, c.tp):
        near = around(etp, (1, c.tp))
        raise PinError(f"pin etp={etp}: experts are whole, or split over all of tp={c.tp}; nearest legal: {near}")
    inner = math.gcd(*inner_sizes(graph))
    if inner % etp:
        raise PinError(f"pin etp={etp} does not divide the experts' inner size of {inner}; nearest legal: 1")
    legal = dispatch_degrees(c.dp, c.tp, counts, c.cp, etp)
    if c.ep not in legal:
        ranks = f"dp x cp x tp = {c.dp * c.cp * c.tp}" + (f" with etp={etp}" if etp > 1 else "")
        whole = math.gcd(*counts)
        why = f"it does not divide the {whole} experts" if whole % c.ep else f"it does not fold into {ranks}"
        hint = ", or etp=1" if etp > 1 and folds(c.dp, c.cp, c.tp, c.ep, 1) else ""
        raise PinError(f"pin ep={c.ep}: {why}; nearest legal: {around(c.ep, legal)}{hint}")


def check_product(c: ParallelConfig) -> None:
    """PinError for a product of methods of context parallelism, between whose axes experts cannot be spread."""
    neighbours = product_degree(c)
    if neighbours == 1 or not spreads(c):
        return
    if not folds(c.dp, c.cp, c.tp, c.ep, inner_degree(c), neighbours, c.zero_replicas):
        raise PinError(
            f"pin context_method: ep={c.ep} does not fold into dp x cp x tp with cp={c.cp} as groups of {neighbours} "
            f"(ulysses{neighbours}); nearest legal: ring, gather or ulysses"
        )


def check_context(graph: ModelGraph, c: ParallelConfig) -> None:
    """What cannot be cut along the sequence by the runtime. PinError names the operation, and what to do."""
    if c.cp == 1:
        return
    found = context_obstacle(graph)
    if found is not None:
        raise PinError(f"pin cp={c.cp}: {found}; nearest legal: cp=1")
    chosen_methods(graph, c)
    check_product(c)


def zero_replica_counts(dp: int, cp: int, zero_stage: int, tp: int = 1, ep: int = 1, etp: int = 1) -> list[int]:
    """How many copies of the sharded state there may be: 1, and what leaves several neighbours to shard over.

    A divisor of dp: all of cp shards. Experts that are spread are in each copy, sharded over what ep leaves of it.
    """
    if zero_stage == 0:
        return [1]
    several = (n for n in divisors(dp) if n > 1 and dp * cp // n > 1)
    return [1, *(n for n in several if folds(dp, cp, tp, ep, etp, copies=n))]


def check_replicas(c: ParallelConfig) -> None:
    """Copies of the sharded state that ZeRO cannot have. PinError names the rule and the nearest legal value."""
    legal = zero_replica_counts(c.dp, c.cp, c.zero_stage, c.tp, c.ep, inner_degree(c))
    if c.zero_replicas in legal:
        return
    dense = zero_replica_counts(c.dp, c.cp, c.zero_stage)
    why = (
        "ZeRO 0 shards nothing" if c.zero_stage == 0
        else f"a copy has no ranks for ep={c.ep}" if c.zero_replicas in dense
        else f"nothing is left to shard over, which is zero_stage=0, of dp={c.dp}" if c.dp * c.cp == c.zero_replicas
        else f"it must divide dp={c.dp} and leave several ranks to shard over"
    )  # fmt: skip
    raise PinError(f"pin zero_replicas={c.zero_replicas}: {why}; nearest legal: {around(c.zero_replicas, legal)}")


def check_chunks(c: ParallelConfig, num_units: int, num_ends: int = 0) -> None:
    """Every chunk of the pipeline holds at least one layer, or one of the ends."""
    if c.pp * c.virtual_stages <= num_units + num_ends:
        return
    if c.pp > num_units:
        near = max(d for d in divisors(c.dp * c.pp) if d <= num_units)
        raise PinError(f"pin pp={c.pp} needs at least as many layers, the model has {num_units}; nearest legal: {near}")
    if c.pp * c.virtual_stages > num_units:
        raise PinError(
            f"pp={c.pp} x virtual_stages={c.virtual_stages} = {c.pp * c.virtual_stages} chunks need at least as many "
            f"layers, the model has {num_units}; nearest legal: virtual_stages={num_units // c.pp}"
        )


def check_stages(stages: Sequence[int], pp: int, virtual_stages: int, num_units: int, ends: bool = False) -> None:
    """PinError unless there is a positive number for every chunk and they add up to the layers of the model.

    `ends`: the first and the last chunk may have no layer, only what stands before or after all of them.
    """
    chunks, listed = pp * virtual_stages, list(stages)
    if len(stages) != chunks:
        of = f"pp={pp}" if virtual_stages == 1 else f"pp={pp} x virtual_stages={virtual_stages}"
        raise PinError(f"pin stages={listed} has {len(listed)} entries for {of}; give {chunks}")
    last = len(listed) - 1
    least = [0 if ends and chunks > 1 and k in (0, last) else 1 for k in range(len(listed))]
    if not all(is_count(n, low) for n, low in zip(listed, least, strict=True)) or sum(stages) != num_units:
        raise PinError(
            f"pin stages={listed} must be {chunks} positive numbers that add up to the model's {num_units} layers"
        )


def layer_calls(graph: ModelGraph) -> list[str]:
    """Calls that a pipeline may be cut between: those of the model's layers (not embedding, head, glue or tables)."""
    # capture names a layer by its module path, which has a dot; everything around layers by one word
    return [c.name for c in graph.calls if c.params and "." in c.name]


def pipeline_units(graph: ModelGraph, ends: bool = False) -> tuple[tuple[str, ...], ...]:
    """What a pipeline may be cut between: a layer and the glue after it; what precedes the first layer goes with it.

    Names of calls; parameter-free calls, which every stage computes for itself, are left out. A model without layers is
    one unit. `ends`: what precedes the first layer (embedding) and what follows the last one (head, loss) are units of
    their own, as Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split count them.
    """
    free = graph.free_calls()
    calls = [c.name for c in graph.calls if c.name not in free]
    layers = set(layer_calls(graph))
    units: list[list[str]] = [[]]
    for name in calls:
        if name in layers and any(n in layers for n in units[-1]):
            units.append([])
        units[-1].append(name)
    if ends and layers:
        units = _ends_apart(units, layers)
    return tuple(tuple(unit) for unit in units)


def _ends_apart(units: list[list[str]], layers: Set[str]) -> list[list[str]]:
    first = next(k for k, name in enumerate(units[0]) if name in layers)
    units = [units[0][:first], units[0][first:], *units[1:]]
    last = next(k for k, name in enumerate(units[-1]) if name in layers)
    units = [*units[:-1], units[-1][: last + 1], units[-1][last + 1 :]]
    return [unit for unit in units if unit]


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
    if expert_counts(graph) and spreads(config):
        check_product(config)
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
