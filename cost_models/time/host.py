"""The host's time to start the kernels of a pass, which a faster device has to wait for.

The host runs Python, dispatch and launch for each operation; a device works off a queue that the host fills. A block
therefore takes the longer of both times (launch `async`), the device's time alone (`full_graphs`; `graphs`: except for
experts), or their sum (`blocking`). Views start no kernel. In fused and compiled programs element-wise operations start
none either. Modules of Megatron and Transformer Engine start products of one input together, and a norm with the
product after it (`BlockWork.joined_ops`). A host that waits for every kernel pays for each (`BlockWork.same_kernel`):
the products of a backward, the parts of unfused attention, the sums of gradients of micro-batches.
Such a module's time in Python is most of a layer with a small micro-batch, and every collective of tensor parallelism
adds to it. A call of experts sorts rows by expert; if the number of rows of each is not known beforehand, the host
waits for the device to report it (Megatron's dropless dispatch). Graphs hold the router and the preparation of the
dispatch, and `router_graphs` nothing else. Each expert of the rank then has products of its own (Transformer Engine's
GroupedLinear), unless they are fused. Products in 8 bits cost the host more, of experts as of others.
Outside of fused mode there are no modules: experts are as many operations as `ops.experts` says, and the backward of
an operation is two. A compiled block has a call of its own, whatever is in it.

A profile of a device with a queue has measured host times, for each operation (`MeasuredOp.host_forward_s`) and for the
runtime (`Profile.host_overheads`: hooks, gathers, micro-batches, pipeline actions). For a shape that it lacks, the
median of the same operation in other shapes is used, else of its class, because the shape hardly affects the host; the
interval goes from the tenth to the ninetieth percentile. Without such a profile the constants are fitted to whole steps
with small micro-batches (`Constants.host_*`). A CPU pays for operations one at a time in `compute`; its profile has
host and device in one time, and nothing is added.

`waited_s` combines host and device: a block takes the longer of both. Host time that belongs to no block (the loop over
micro-batches, an action of a pipeline, `optimizer.step()`) hides where blocks leave the host idle (`slack_s`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache

from autoplan.config.parallel import Launch, Mode
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.kernels.gpu import kernels_of
from autoplan.cost_models.kernels.products import has_one_product, is_unfused
from autoplan.cost_models.profile import PHASES, Profile
from autoplan.cost_models.quantity import ZERO, Quantity, Tag, total
from autoplan.cost_models.work import BlockWork, CommWork, OpWork, Recomputed
from autoplan.ops.experts import EACH_HAS, FIRST, HOST_OPS
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind, op_record

# Operations that a module of Megatron or Transformer Engine stands for. All others start one at a time.
_MODULES = (OpKind.PRODUCT, OpKind.ATTENTION, OpKind.EMBEDDING, OpKind.LOSS, OpKind.NORM)
# Kernels of attention with scores in memory (Megatron-LM's CoreAttention): two products, softmax and dropout, which the
# price of its passes has, too; then four products and two gradients. Products in a backward are one per gradient.
_UNFUSED = {"forward": 4, "backward": 6}
# Kernels that add the gradient of a parameter to the sum: autograd's addition, or a cast and an addition (DeepSpeed's
# bf16_optimizer.py, update_hp_grads).
_ADDS, _CASTS_AND_ADDS = 1, 2
_SPREAD = 0.5  # relative, between hosts and between versions of a framework


def host_s(block: BlockWork, phase: str, costs: Costs, again: Recomputed | None = None) -> Quantity:
    """Return the host seconds of a pass over a block, or of rerunning `again` of it; ZERO if the host adds nothing."""
    if costs.options.launch is Launch.FULL_GRAPHS:
        return ZERO
    if costs.profile is not None and costs.profile.has_host:
        return _measured_s(block, phase, costs, again)
    return _fitted_s(block, phase, costs, again) if _is_fitted(costs) else ZERO


def _is_fitted(costs: Costs) -> bool:
    """Return True if the host's time comes from fitted constants: neither measured, nor part of measured times."""
    profile = costs.profile
    if profile is not None and (profile.has_host or (costs.mode is Mode.EAGER and profile.device_type == "cpu")):
        return False
    return kernels_of(costs.cluster.device, costs.constants) is not None


def _fitted_s(block: BlockWork, phase: str, costs: Costs, again: Recomputed | None) -> Quantity:
    """Return the host seconds of a pass from constants that were fitted to whole steps."""
    c, launch = costs.constants, costs.options.launch
    each, blocking = _each_s(costs), launch is Launch.BLOCKING
    seconds = _call_s(block, phase, costs)
    together: Collection[int] = ()
    if costs.mode is Mode.FUSED:
        together = block.same_kernel if blocking else block.joined_ops
    elif costs.options.fused_norms and costs.mode is Mode.EAGER:
        together = block.same_kernel
    for k, op in _ops(block, phase, again):
        if not op_record(op.op).as_view and k not in together:
            num = _num_kernels(op, phase, costs) if blocking else _num_started(op, phase, costs)
            seconds += _started_s(op, phase, costs, each) * num
    if again is not None and launch is not Launch.GRAPHS:
        seconds += len(again.beside) * min(each, c.host_eager_s)
    for _ in _comms(block, phase, costs, again):
        seconds += c.host_comm_s
    return Quantity.spread(seconds, _SPREAD, Tag.FITTED) if seconds else ZERO


def _call_s(block: BlockWork, phase: str, costs: Costs) -> float:
    """Return the seconds of the call of a compiled block.

    Blocks without products (tables of positions, an embedding) are called while the device works off what is before
    them: their calls are not counted, else each would be waited for.
    """
    calls = costs.mode is Mode.COMPILED and costs.options.launch is Launch.ASYNC
    heavy = calls and any(op_record(op.op).heavy for _, op in _ops(block, phase, None))
    return costs.constants.host_call_s if heavy else 0.0


# Operations of a backward over those of its forward: of an eager Llama layer 71 to 38, of Mixtral's without its experts
# 66 to 34 (counted by a TorchDispatchMode; views are none).
_BACKWARD_OPS = 2


def _num_started(op: OpWork, phase: str, costs: Costs) -> int:
    """Return the modules or operations that the host starts for one. An op of many knows its own number."""
    if costs.mode is Mode.FUSED or phase != "backward" or op_kind(op.op) is OpKind.EXPERTS:
        return op.num_started(phase)
    return max(_BACKWARD_OPS, op.num_started(phase))


def _num_kernels(op: OpWork, phase: str, costs: Costs) -> int:
    """Return the kernels of an operation that a host waits for one by one."""
    kind = op_kind(op.op)
    if kind is OpKind.ATTENTION and is_unfused(op, costs.mode, costs.options):
        return _UNFUSED[phase]
    if kind is OpKind.PRODUCT and phase == "backward":
        return sum(t.requires_grad for t in op.inputs[:2])
    return op.num_started(phase)


def host_send_s(costs: Costs) -> float:
    """Return the expected host seconds of a collective inside a block; 0 if none of them waits for the host."""
    if costs.options.launch in (Launch.GRAPHS, Launch.FULL_GRAPHS):
        return 0.0
    if costs.measures_host:
        return costs.host_fixed_s("comm_s").mid
    return costs.constants.host_comm_s if _is_fitted(costs) else 0.0


def adds_s(block: BlockWork, num_micro_batches: int, costs: Costs) -> Quantity:
    """Return the fitted host seconds per micro-batch of adding up gradients, if it waits for every kernel; else ZERO.

    Weights of products of one input are one parameter. Products that add to the sum themselves start nothing more.
    """
    options = costs.options
    waits = options.launch is Launch.BLOCKING and _is_fitted(costs)
    if not waits or (costs.mode is Mode.FUSED and options.fused_accumulation):
        return ZERO
    joined = sum(op_kind(block.ops[k].op) is OpKind.PRODUCT for k in block.same_kernel)
    num = max(0, sum(p.trainable for p in block.params) - joined)
    first = 0 if options.whole_sums else 1  # the gradient of the first micro-batch becomes the sum
    each = (_CASTS_AND_ADDS if options.whole_sums else _ADDS) * (1 - first / num_micro_batches)
    seconds = each * num * costs.constants.host_blocking_s
    return Quantity.spread(seconds, _SPREAD, Tag.FITTED) if seconds else ZERO


# Hooks of ZeRO 3 around a module in a pass: one fetches its parameters, one releases them.
_HOOKS = 2
# Elements of parameters that stay on every rank (stage3_param_persistence_threshold, deepspeed/runtime/zero/config.py).
_PERSISTENT = 100_000


def hooks_s(block: BlockWork, num_ranks: int, costs: Costs) -> Quantity:
    """Return the fitted host seconds of ZeRO 3's hooks around the modules of a block in a pass; ZERO without them.

    These modules are those that hold its parameters, and those that hold these. Each that holds large ones starts a
    gather. What the device does meanwhile includes ZeRO's traffic.

    Args:
        num_ranks: ranks that share a parameter.
    """
    if not costs.options.module_hooks or not _is_fitted(costs):
        return ZERO
    paths = {p.name: tuple(p.name.split(".")[:-1]) for p in block.params}
    modules = {path[:k] for path in paths.values() for k in range(len(path) + 1)}
    gathers = {paths[p.name] for p in block.params if p.num_elements > _PERSISTENT} if num_ranks > 1 else ()
    seconds = _HOOKS * len(modules) * costs.constants.host_hook_s + len(gathers) * costs.constants.host_comm_s
    return Quantity.spread(seconds, _SPREAD, Tag.FITTED) if seconds else ZERO


def _each_s(costs: Costs) -> float:
    """Return the seconds to start one module, one kernel to wait for, or one operation if there are no modules."""
    c, given = costs.constants, costs.cluster.device.launch_s  # the user's figure for one operation in eager mode
    if costs.options.launch is Launch.BLOCKING:
        return c.host_blocking_s
    if costs.mode is Mode.FUSED:
        return c.host_fused_s
    return c.host_eager_s if given is None else given


def _started_s(op: OpWork, phase: str, costs: Costs, each_s: float) -> float:
    """Return the seconds to start one operation that is not a view."""
    c, launch = costs.constants, costs.options.launch
    kind = op_kind(op.op)
    if kind is OpKind.EXPERTS:
        return _experts_s(op, phase, costs, each_s)
    # element-wise operations have kernels of their own if nothing fuses them
    apart = costs.mode is Mode.EAGER or launch is Launch.BLOCKING
    if launch is Launch.GRAPHS or not (apart or kind is not OpKind.ELEMENTWISE):
        return 0.0
    one = each_s if kind in _MODULES or launch is Launch.BLOCKING else min(each_s, c.host_eager_s)
    return one * (1.0 if op.matmul_dtype is None else c.host_fp8)


def _experts_s(op: OpWork, phase: str, costs: Costs, each_s: float) -> float:
    """Return the seconds to start one call of experts; a host that waits for each kernel is Megatron's."""
    c, launch = costs.constants, costs.options.launch
    num_local = op.inputs[FIRST].shape[0] if len(op.inputs) > FIRST and not costs.options.fused_experts else 0
    if costs.mode is not Mode.FUSED and launch is not Launch.BLOCKING:
        if has_one_product(op, costs.mode, costs.cluster.device):
            num_local = 0
        return (HOST_OPS[phase] + EACH_HAS[phase] * num_local) * each_s
    captured = c.host_router_s if launch in (Launch.GRAPHS, Launch.ROUTER_GRAPHS) else 0.0
    seconds = max(0.0, c.host_experts_s - captured) + num_local * c.host_expert_s
    return seconds * (1.0 if op.matmul_dtype is None else c.host_fp8)


def _ops(block: BlockWork, phase: str, again: Recomputed | None) -> Iterator[tuple[int, OpWork]]:
    """Yield the operations of a pass over a block, or of rerunning `again` of it, with their positions."""
    for k, op in enumerate(block.ops):
        if (again is None or k in again.ops) and (phase != "backward" or op.has_backward):
            yield k, op


def _comms(block: BlockWork, phase: str, costs: Costs, again: Recomputed | None) -> Iterator[CommWork]:
    """Yield the collectives that the host starts. No graph knows the sizes of experts' collectives."""
    graphs = costs.options.launch is Launch.GRAPHS
    for comm in block.comms if again is None else again.comms:
        if comm.per == "micro_batch" and comm.phase == phase and (comm.routing or not graphs):
            yield comm


def _inside_others(op: OpWork) -> bool:
    """Return True for views and element-wise operations, which run inside other kernels when fused."""
    return op_record(op.op).as_view or op_kind(op.op) is OpKind.ELEMENTWISE


def _measured_s(block: BlockWork, phase: str, costs: Costs, again: Recomputed | None) -> Quantity:
    """Return the host seconds of a pass from a profile. Outside of eager mode, fused operations start no kernel."""
    graphs, apart = costs.options.launch is Launch.GRAPHS, costs.mode is Mode.EAGER
    found = [
        host_op_s(op, phase, costs) + costs.host_fixed_s(f"op_{phase}_s")
        for _, op in _ops(block, phase, again)
        if (op_kind(op.op) is OpKind.EXPERTS if graphs else apart or not _inside_others(op))
    ]
    if again is not None and not graphs:
        found += [host_op_s(op, phase, costs) for op in again.beside]
    found += [costs.host_fixed_s("comm_s") for _ in _comms(block, phase, costs, again)]
    return total(found)


def host_op_s(work: OpWork, phase: str, costs: Costs) -> Quantity:
    """Return the host seconds of one operation: measured, else the median of its kind, else fitted."""
    record = None if costs.profile is None else costs.profile.by_key.get(work.key)
    timing = None if record is None else record.host_s(phase)
    if timing is not None:
        return timing.quantity()
    medians = {} if costs.profile is None else _host_medians(costs.profile)
    for kind in (work.op, op_record(work.op).measured_as, ""):
        if (phase, kind) in medians:
            return medians[phase, kind] * work.num_started(phase)
    return Quantity.spread(costs.constants.host_eager_s * work.num_started(phase), _SPREAD, Tag.FITTED)


@lru_cache(maxsize=8)
def _host_medians(profile: Profile) -> dict[tuple[str, str], Quantity]:
    """Return host seconds by phase and operation, class, or '' for all but views, which start no kernel."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in profile.ops:
        op = record.work.op
        for phase in PHASES:
            timing = record.host_s(phase)
            if timing is None:
                continue
            known = op_record(op)
            for kind in {op, known.measured_as, *(() if known.as_view else ("",))}:
                found.setdefault((phase, kind), []).append(timing.median)
    out = {}
    for key, values in found.items():
        values.sort()
        low, mid, high = (values[round(share * (len(values) - 1))] for share in (0.1, 0.5, 0.9))
        out[key] = Quantity(low, mid, high, Tag.FITTED)
    return out


def waited_s(host: Quantity, device: Quantity, launch: Launch) -> Quantity:
    """Return the seconds that the host adds to a block that keeps the device busy for `device`."""
    return host if launch is Launch.BLOCKING else host.less(device)


def slack_s(host: Quantity, device: Quantity, launch: Launch) -> Quantity:
    """Return how long the host finishes before the device, and can do other work."""
    return ZERO if launch is Launch.BLOCKING else device.less(host)
