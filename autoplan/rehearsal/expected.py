"""Expectations of one rank by its plan, ledger and price, in the units in which a rehearsal observes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoplan.codegen.program import Layouts
from autoplan.config.context_methods import GATHER, RING, ContextMethod
from autoplan.config.parallel import Attention, FusedLoss, Mode, RunOptions
from autoplan.config.precision import precision_of
from autoplan.config.recompute import FULL, NONE, SELECTIVE, recompute_kind, region_groups
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.ranks import NOT_ALLOCATED, MemoryModel, RankMemory
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.work import BlockWork, OpWork, Workload
from autoplan.errors import RehearsalError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.attention import computed_on_cpu, is_in_row_blocks
from autoplan.ops.convolutions import CONVOLUTION
from autoplan.ops.experts import FIRST, FIRST_BIAS, SECOND
from autoplan.ops.record import OpKind
from autoplan.ops.saved import OpFacts
from autoplan.ops.scans import SCAN
from autoplan.ops.table import op_kind, op_record
from autoplan.plans.record import Plan
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.megatron_kernels import Kernels
from autoplan.program.op_costs import OpCosts
from autoplan.program.token_dispatch import sends_rows
from autoplan.program.workload import lower_all, workload
from autoplan.runtime.params import local_param_shape
from autoplan.runtime.shard_placement import shard_dim
from autoplan.runtime.spec import LedgerEntry, ParamSpec, ProgramSpec, StageSpec, evaluate_terms
from autoplan.runtime.tied import RECORDED
from autoplan.torch_kernels import GROUPED_BYTES
from autoplan.units import DTYPE_BYTES

BY_PRODUCTS, BY_ATTENTION = "products", "attention"
_BLOCKS_AGAIN = 2.5  # a backward of attention in blocks of queries: four products, and the scores again
FORWARD, BACKWARD = "forward", "backward"
REPEATED = "recompute"  # the phase of what a backward repeats of a forward
_MASTER = "float32"  # dtype of sums of gradients under mixed precision, if no other is given
_LOSS_BYTES = 8  # the sum of the loss over all ranks, float64
_OVERFLOW_BYTES = 4  # whether a gradient overflows, float32
Messages = Counter[tuple[str, str, str, int]]  # kind, axis, phase, bytes
Totals = Counter[tuple[str, str]]  # kind, axis -> bytes of a step


@dataclass(frozen=True)
class Place:
    """The position of a rank, and the axes over which its program shards and reduces.

    Attributes:
        sizes: ranks along every axis and group of the mesh.
        ranks: this rank's index along every axis and group.
        canonical: axis or group -> the name under which its collectives are recorded.
        replicas: all, edp, shards, expert_shards, copies, expert_copies -> axis; empty if there is none.
        world: the name under which collectives of all ranks are recorded.
        plain: True if ZeRO shards nothing.
        gathered: block -> what happens to parameters that ZeRO 3 gathers.
    """

    coordinates: Mapping[str, int]
    sizes: Mapping[str, int]
    ranks: Mapping[str, int]
    canonical: Mapping[str, str]
    replicas: Mapping[str, str]
    world: str
    plain: bool
    gathered: Mapping[str, str]


@dataclass(frozen=True)
class CpuFlops:
    """FLOPs of one rank and micro-batch on a CPU, by (what, phase): products or a kernel of attention.

    Attributes:
        least: those that the price counts.
        spare: how many more there may be: for masks where attention runs over a cut sequence, and in sums of the
            gradients of experts' biases.
    """

    least: Counter[tuple[str, str]] = field(default_factory=Counter)
    spare: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def total(cls, parts: Iterable[CpuFlops]) -> CpuFlops:
        """Return the sum of several."""
        out = cls()
        for part in parts:
            out.least.update(part.least)
            out.spare.update(part.spare)
        return out


@dataclass(frozen=True)
class Expected:
    """The expectations of a rank.

    Attributes:
        memory: predicted bytes by term that a tensor of the program has, of its fullest moment.
        memory_bytes: their sum: low, expected, high.
        kernels: by how many bytes each term of the fullest moment is larger with the kernels of a CPU, which a
            rehearsal runs, instead of the device's; None: the graph is not at hand.
        host: what the plan keeps in host memory, by term: state, activations. It is the same memory here.
        own: the runtime's own collectives of a step: the sums of the loss, whether a gradient in float16 overflows.
        per_micro_batch: the ledger's collectives of one micro-batch.
        again: likewise those that a recompute repeats; None: the graph is not at hand.
        deferred: bytes of the sums at the end of a step, by (kind, axis).
        unlisted: how the ledger's sums at the end of a step differ from those of the parameters; empty if they do not.
        zero: bytes that ZeRO moves in a step of this many micro-batches, by (kind, axis).
        flops: what a CPU computes in one micro-batch; None: the graph is not at hand.
        flops_again: the part of it that a recompute repeats.
    """

    memory: Mapping[str, float]
    memory_bytes: tuple[float, float, float]
    kernels: Mapping[str, float] | None
    host: Mapping[str, float]
    own: Messages
    per_micro_batch: Messages
    again: Messages | None
    deferred: Totals
    unlisted: str
    zero: Totals
    flops: CpuFlops | None
    flops_again: CpuFlops


def expected(
    plan: Plan, spec: ProgramSpec, at: Place, num_micro_batches: int, env: Mapping[str, int], work: Work | None
) -> Expected:
    """Return the expectations of a rank for a step of so many micro-batches.

    Args:
        env: b of one micro-batch, and the whole lengths s and t.
        work: the price's operations; None: not at hand.

    Raises:
        RehearsalError: the plan has no predicted memory.
    """
    if plan.estimate is None:
        raise RehearsalError("the plan has no price, so that there is nothing to compare its memory with")
    stages = spec.stages_of(at.coordinates["pp"])
    local = {**env, "s": env["s"] // at.sizes.get("cp", 1)}
    entries = [e for e in spec.ledger if any(e.stage == s.index for s in stages) and at.sizes[e.axis] > 1]
    often = [e for e in entries if e.per == "micro_batch"]
    repeated = _repeated(often, work)
    calls = [name for stage in stages for name in stage.calls]
    stage = plan.estimate.stages[at.coordinates["pp"]]
    held = _held(stage.memory)
    return Expected(
        memory={name: q.mid for name, q in held.items()},
        memory_bytes=(_sum(held, "low"), _sum(held, "mid"), _sum(held, "high")),
        kernels=None if work is None else work.kernels(at.coordinates["pp"]),
        host={name: q.mid for name, q in stage.host_memory.items()},
        own=_own(spec, at),
        per_micro_batch=_messages(often, local),
        again=None if work is None else _messages(repeated, local),
        deferred=_deferred(spec, at, stages),
        unlisted=_unlisted(spec, at, [e for e in entries if e.per == "step"], local),
        zero=_zero(spec, at, stages, num_micro_batches),
        flops=None if work is None else work.flops(calls),
        flops_again=CpuFlops() if work is None else work.flops_again(calls),
    )


def _own(spec: ProgramSpec, at: Place) -> Messages:
    out: Messages = Counter()
    for axis in (at.replicas["all"], "pp"):
        if at.sizes[axis] > 1:
            out["all_reduce", at.canonical[axis], "forward", _LOSS_BYTES] += 1
    if "float16" in (spec.compute_dtype, spec.autocast_dtype) and math.prod(size for _, size in spec.axes) > 1:
        out["all_reduce", at.world, "forward", _OVERFLOW_BYTES] += 1
    return out


def _held(terms: Mapping[str, Quantity]) -> dict[str, Quantity]:
    """Return the predicted terms that a tensor of the program has."""
    return {name: q for name, q in terms.items() if name not in NOT_ALLOCATED}


def _sum(terms: Mapping[str, Quantity], end: str) -> float:
    return float(sum(getattr(q, end) for q in terms.values()))


def _repeated(entries: list[LedgerEntry], work: Work | None) -> list[LedgerEntry]:
    return [] if work is None else [replace(e, phase=REPEATED) for e in entries if work.repeats(e)]


def _messages(entries: list[LedgerEntry], env: Mapping[str, int]) -> Messages:
    return Counter(_message(e, evaluate_terms(e.bytes, env)) for e in entries)


def _message(e: LedgerEntry, num_bytes: int) -> tuple[str, str, str, int]:
    """Return a line of the ledger as it is observed: transfers between stages are sent outside of a backward."""
    return e.kind, e.axis, "forward" if (e.kind, e.axis) == ("send_recv", "pp") else e.phase, num_bytes


def _deferred(spec: ProgramSpec, at: Place, stages: tuple[StageSpec, ...]) -> Totals:
    """Return the sums of gradients at the end of a step of what ZeRO leaves here: over sub-axes, and of tied copies."""
    out: Totals = Counter()
    for stage in stages:
        for p in stage.params:
            size = _own_elements(at, p) * _summed_width(spec, p)
            for axis in p.reduce_axes if p.trainable else ():
                if at.sizes[axis] > 1:
                    out["all_reduce", at.canonical[axis]] += size
    held = {s.index: s for s in stages}
    for tied in spec.tied:  # copies on several pipeline ranks; on some of all ranks they have a group of their own
        homes = {spec.rank_of(place.stage) for place in tied.places}
        first = next((place for place in tied.places if place.stage in held), None)
        if first is not None and len(homes) > 1:
            p = next(p for p in held[first.stage].params if (p.block, p.attr) == (first.block, first.attr))
            masters = p.dtype == spec.compute_dtype
            axis = at.canonical["pp"] if len(homes) == at.sizes["pp"] else RECORDED
            out["all_reduce", axis] += _own_elements(at, p) * DTYPE_BYTES[_MASTER if masters else p.dtype]
    return out


def _own_elements(at: Place, p: ParamSpec) -> int:
    """Return the elements of a gradient that this rank holds at the end of a step."""
    shape = local_param_shape(p, at.sizes.__getitem__)
    axis = at.replicas["expert_shards" if any(s.axis == "ep" for s in p.shards) else "shards"]
    if at.plain or at.sizes[axis] == 1 or not shape:
        return math.prod(shape)
    dim = shard_dim(shape, at.sizes[axis])
    chunk = math.ceil(shape[dim] / at.sizes[axis])
    mine = min(chunk, max(0, shape[dim] - chunk * at.ranks[axis]))
    return mine * math.prod(size for d, size in enumerate(shape) if d != dim)


def _summed_width(spec: ProgramSpec, p: ParamSpec) -> int:
    """Return the bytes of an element of a sum over tensor-parallel ranks: under mixed precision that of all sums."""
    return DTYPE_BYTES[p.dtype if spec.compute_dtype is None else spec.gradient_dtype or _MASTER]


def _unlisted(spec: ProgramSpec, at: Place, entries: list[LedgerEntry], env: Mapping[str, int]) -> str:
    """Return how the ledger's sums at the end of a step differ from the parameters'; empty if they do not."""
    said, params = Counter[str](), Counter[str]()
    for e in entries:
        said[e.axis] += evaluate_terms(e.bytes, env)
    for stage in spec.stages_of(at.coordinates["pp"]):
        for p in stage.params:
            live = [axis for axis in p.reduce_axes if at.sizes[axis] > 1]
            if live and p.trainable:
                shape = local_param_shape(p, at.sizes.__getitem__)
                axis = at.canonical[live[0]] if len(live) == 1 else _product(spec, at, live)
                params[axis] += math.prod(shape) * _reduced_width(spec, p)
    wrong = [a for a in {**said, **params} if said[a] != params[a]]
    if not wrong:
        return ""
    at_first = wrong[0]
    return (
        f"the ledger sums {said[at_first]:,} bytes over {at_first} per step, the parameters need {params[at_first]:,}"
    )


def _product(spec: ProgramSpec, at: Place, axes: list[str]) -> str:
    """Return the name under which the ledger lists several sub-axes together."""
    found = [name for name, members in spec.groups if {m for m in members if at.sizes[m] > 1} == set(axes)]
    return at.canonical[found[0]] if found else "+".join(axes)


def _zero(spec: ProgramSpec, at: Place, stages: tuple[StageSpec, ...], num_micro_batches: int) -> Totals:
    """Return the bytes that ZeRO moves: gathered parameters, and gradients that are reduced.

    ZeRO 0 and 1 reduce once per step, 2 and 3 in every backward; 1 and 2 gather once per step, 3 in every pass that
    reads the parameters (autoplan.runtime.zero). fully_shard pads a dim to whole shards.
    """
    out: Totals = Counter()
    for stage in stages:
        for p in {(p.name if at.plain else (p.block, p.attr)): p for p in stage.params}.values():
            apart = any(s.axis == "ep" for s in p.shards)
            shape = local_param_shape(p, at.sizes.__getitem__)
            width = _reduced_width(spec, p)
            if at.plain:
                axis = at.replicas["edp" if apart else "all"]
                if at.sizes[axis] > 1 and p.trainable:
                    out["all_reduce", at.canonical[axis]] += math.prod(shape) * width
                continue
            axis = at.replicas["expert_shards" if apart else "shards"]
            ranks = at.sizes[axis]
            padded = _padded(shape, ranks)
            if ranks > 1:
                passes = 1 if at.gathered.get(p.block, "again") in ("drop", "keep") else 2
                gathers = num_micro_batches * passes if spec.zero_stage == 3 else 1
                out["all_gather", at.canonical[axis]] += padded * DTYPE_BYTES[p.dtype] * gathers
                reductions = 1 if spec.zero_stage == 1 else num_micro_batches
                out["reduce_scatter", at.canonical[axis]] += padded * width * reductions * p.trainable
            copies = at.replicas["expert_copies" if apart else "copies"]
            if copies and at.sizes[copies] > 1 and p.trainable:
                out["all_reduce", at.canonical[copies]] += padded * width // ranks
    return +out


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of a parameter whose sharded dim is padded to whole shards."""
    whole = list(shape) or [1]
    dim = shard_dim(whole, ranks)
    whole[dim] = math.ceil(whole[dim] / ranks) * ranks
    return math.prod(whole)


def _reduced_width(spec: ProgramSpec, p: ParamSpec) -> int:
    """Return the bytes of an element of a gradient that is sent."""
    return _summed_width(spec, p) if p.dtype == spec.compute_dtype else DTYPE_BYTES[p.dtype]


# -- the price's arithmetic --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeated:
    """What a backward repeats of one call: FLOPs, and collectives by (what, kind)."""

    flops: CpuFlops
    sent: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, block: BlockWork, how: str, method: ContextMethod | None, cp: int) -> Repeated:
        """Return what a recompute choice repeats of a block, as it is priced. `method`, `cp`: as for `_arithmetic`.

        Regions send nothing but what attention over a cut sequence does.
        """
        if how == FULL and block.needed is not None:
            ops, sent = block.needed.ops, block.needed.comms
        else:
            chosen = [block.selective_ops] if how == SELECTIVE else map(block.group_ops.get, region_groups(how))
            ops = frozenset[int]().union(*(at for at in chosen if at))
            attends = any(op_kind(block.ops[k].op) is OpKind.ATTENTION for k in ops)
            sent = tuple(c for c in block.comms if attends and c.axis == "cp" and c.phase == "forward")
        flops = _arithmetic([block.ops[k] for k in sorted(ops)], method, cp)
        return cls(flops, frozenset((c.what, c.kind) for c in sent))


@dataclass(frozen=True)
class Work:
    """The figures of a plan that its price counts.

    Attributes:
        by_call: FLOPs of one call of every block on one rank.
        again: what a backward repeats of a call, for calls that recompute something.
        here, there: memory of every rank of the pipeline, with the kernels of a CPU and of the plan's device.
    """

    by_call: Mapping[str, CpuFlops]
    again: Mapping[str, Repeated]
    here: tuple[RankMemory, ...]
    there: tuple[RankMemory, ...]

    @classmethod
    def of(cls, plan: Plan, graph: ModelGraph, layouts: Layouts, env: Mapping[str, int]) -> Work:
        """Return the arithmetic and the memory that the plan's price counts.

        Args:
            env: b of one micro-batch, and the whole lengths s and t.
        """
        task = plan.document.get("request", {})
        mode, cpu = Mode(task.get("mode", Mode.EAGER)), plan.document.get("cluster", {}).get("device") == "cpu"
        here = _workload(plan, graph, layouts, env, "cpu", Kernels(context=plan.config.cp))
        by_block = {
            n: _arithmetic(block.ops, layouts.context.get(n), plan.config.cp) for n, block in here.blocks.items()
        }
        ranks = _ranks(plan, layouts, here, "cpu", Mode.EAGER)
        if cpu and mode is Mode.EAGER:
            there = ranks
        else:
            attention = Attention(task.get("attention", Attention.FLASH2))
            loss = RunOptions(fused_loss=task.get("fused_loss", FusedLoss.NO)).fused_loss
            kernels = Kernels(mode, attention, loss=loss, context=plan.config.cp)
            on_device = _workload(plan, graph, layouts, env, "cuda", kernels)
            there = _ranks(plan, layouts, on_device, "cuda", mode)
        block_of = {call.name: call.block for call in graph.calls}
        by_call = {name: by_block[block] for name, block in block_of.items()}
        again = {
            name: Repeated.of(here.blocks[block_of[name]], how, layouts.context.get(block_of[name]), plan.config.cp)
            for name, how in layouts.recompute.items()
            if name in block_of and recompute_kind(how).recomputes
        }
        return cls(by_call, again, ranks, there)

    def repeats(self, e: LedgerEntry) -> bool:
        """Return True for a collective of a forward that a recompute repeats; counts of rows go with the rows."""
        again = self.again.get(e.call)
        if again is None or e.phase != "forward":
            return False
        rows = any(sends_rows(what) for what, _ in again.sent)
        return (e.what, e.kind) in again.sent or (e.kind == "all_to_all" and rows)

    def flops(self, calls: list[str]) -> CpuFlops:
        """Return the sum over calls."""
        return CpuFlops.total(self.by_call[name] for name in calls)

    def flops_again(self, calls: list[str]) -> CpuFlops:
        """Return the sum of what is repeated over calls."""
        return CpuFlops.total(self.again[name].flops for name in calls if name in self.again)

    def kernels(self, coordinate: int) -> Mapping[str, float]:
        """Return by term the bytes that a pipeline rank holds more at its fullest moment with the kernels of a CPU."""
        here, there = (_held(ranks[coordinate].terms) for ranks in (self.here, self.there))
        more = {
            n: sum(terms[n].mid * sign for terms, sign in ((here, 1), (there, -1)) if n in terms)
            for n in {**there, **here}
        }
        return {name: size for name, size in more.items() if size}


def _workload(
    plan: Plan, graph: ModelGraph, layouts: Layouts, env: Mapping[str, int], device_type: str, kernels: Kernels
) -> Workload:
    c = plan.config
    op_costs = OpCosts(
        graph,
        layouts.axes,
        {**env, "s": env["s"] // c.cp},
        context=c.cp,
        precision=precision_of(plan.precision),
        device_type=device_type,
        kernels=kernels,
        methods=layouts.context,
    )
    experts = ExpertDegrees(c.ep, c.expert_tp, executed=True) if c.spreads_experts else None
    return workload(graph, layouts.selection, op_costs, experts, made=lower_all(graph, layouts.selection, op_costs))


def _ranks(plan: Plan, layouts: Layouts, work: Workload, device_type: str, mode: Mode) -> tuple[RankMemory, ...]:
    """Return the memory of every rank of the pipeline in a step of the plan."""
    c = plan.config
    model = MemoryModel(work, c, precision_of(plan.precision), Cluster.local(c.num_devices, device_type), mode)
    unit_of = {call: u for u, unit in enumerate(work.unit_calls) for call in unit}
    chunks = []
    for calls in layouts.stages:
        units = sorted({unit_of[call] for call in calls if call in unit_of})
        chunks.append(range(units[0], units[-1] + 1))
    given = {unit_of[call]: how for call, how in layouts.recompute.items() if call in unit_of and how != NONE}
    again = {u: found for u, how in given.items() if (found := work.recompute_of(u, how))}
    return tuple(model.stages(chunks, [0] * len(chunks), again))


def _arithmetic(ops: Iterable[OpWork], method: ContextMethod | None, cp: int) -> CpuFlops:
    """Return the FLOPs of operations.

    Args:
        method: how attention reads a sequence that is cut over `cp` ranks; None: it is whole.
    """
    out = CpuFlops()
    for op in ops:
        if op_kind(op.op) is OpKind.ATTENTION:
            again = method is None and is_in_row_blocks(_facts(op))
            times = {FORWARD: 1.0, BACKWARD: _BLOCKS_AGAIN if again else 2.0}
            for what, least, spare in _attention(op, method, cp):
                out.least.update({(what, phase): n * least for phase, n in times.items()})
                out.spare.update({(what, phase): n * spare for phase, n in times.items()})
        elif op.op == SCAN:  # how much of it are products is the affair of its function
            out.spare.update({(BY_PRODUCTS, FORWARD): op.flops, (BY_PRODUCTS, BACKWARD): 2.0 * op.flops})
        elif op_kind(op.op) in (OpKind.PRODUCT, OpKind.EXPERTS) or op.op == CONVOLUTION:
            out.least.update({(BY_PRODUCTS, FORWARD): op.flops, (BY_PRODUCTS, BACKWARD): op.flops * _gradients(op)})
            out.spare.update({(BY_PRODUCTS, BACKWARD): _summed_biases(op)})
    return out


def _facts(op: OpWork) -> OpFacts:
    return OpFacts(op.op, dict(op.attrs), op.inputs, op.outputs)


def _summed_biases(op: OpWork) -> float:
    """Return the FLOPs by which the runtime sums the gradients of experts' biases, as products with rows of ones."""
    biases = op.inputs[FIRST_BIAS:] if op_kind(op.op) is OpKind.EXPERTS else ()
    if not biases:
        return 0.0
    weights = (op.inputs[k].shape[1:] for k in (FIRST, SECOND))
    num_rows = op.flops / (2.0 * sum(map(math.prod, weights)))
    ones = GROUPED_BYTES // DTYPE_BYTES[op.inputs[FIRST].dtype]
    return 2.0 * ones * num_rows * sum(b.shape[-1] for b in biases)


def _attention(op: OpWork, method: ContextMethod | None, cp: int) -> list[tuple[str, float, float]]:
    """Return as what attention runs on a CPU, the FLOPs of its forward, and how many more masks may cost.

    Over a cut sequence masks may cost all pairs of tokens. A ring computes what has windows or documents, and what no
    kernel takes, in blocks of queries (`runtime.ring`): these are products, besides the kernel's.
    """
    facts = _facts(op)
    kind, flops = computed_on_cpu(facts)
    what = BY_PRODUCTS if kind is OpKind.PRODUCT else BY_ATTENTION
    if method is None or facts.attrs.get("context_whole"):
        return [(what, flops, 0.0)]
    seen = any(facts.attrs.get(name) for name in ("window", "chunk", "documents"))
    if what == BY_ATTENTION and method.inner != GATHER and not seen:
        return [(what, op.flops, 0.0)]
    q, k, v = op.inputs[:3]
    pairs = cp * k.shape[2] * q.num_elements // q.shape[-1]
    most = 2.0 * pairs * (q.shape[-1] + v.shape[-1])
    if method.inner == RING and seen:
        return [(BY_PRODUCTS, 0.0, most), (BY_ATTENTION, 0.0, most)]
    if facts.attrs.get("chunk"):  # whose ends need not be those of the ranks' parts: some see more than others
        return [(what, 0.0, most)]
    return [(what, op.flops, most - op.flops)]


def _gradients(op: OpWork) -> int:
    """Return for how many of its two operands a product computes a gradient: data and frozen weights have none."""
    weights = op_record(op.op).weights
    wanted = [i for i, x in enumerate(op.inputs) if x.requires_grad and len(x.shape) > 1]
    if not weights:
        return min(2, len(wanted))
    return any(i in weights for i in wanted) + any(i not in weights for i in wanted)
