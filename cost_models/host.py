"""What the host needs to start the kernels of a pass, which a device that is faster has to wait for.

Python, dispatch and launch of each operation; a device works off a queue that the host fills, so that a block takes the
longer of both (launch `async`), the device's share alone (`full_graphs`; `graphs`: but for experts), or their sum
(`blocking`). Views start no kernel; in fused and compiled programs neither do element-wise operations, unless the host
waits for each kernel (where old fused kernels save few of them). Modules of Megatron and Transformer Engine start
products of one input together, and a norm with the product after it (`BlockWork.joined_ops`): what such a module costs
in Python is most of a layer of a small micro-batch, and every collective of tensor parallelism adds to it. A call of
experts sorts rows by expert and, where the number of rows of each is not known beforehand, waits for the device to tell
it: Megatron's dropless dispatch; then each expert of the rank has products of its own (Transformer Engine's
GroupedLinear), unless they are fused.

The constants are fitted to whole steps of small micro-batches (`Constants.host_*`). What is no accelerator pays for
operations one at a time in `compute`, and a profile of the runtime has it measured.
"""

from __future__ import annotations

from autoplan.cost_models.compute import ELEMENTWISE, VIEWS
from autoplan.cost_models.config import Launch, Mode
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.kernels import kernels_of
from autoplan.cost_models.quantity import ZERO, Quantity, Tag
from autoplan.cost_models.work import Again, BlockWork

# What a module of Megatron or Transformer Engine stands for. What else there is, is started one operation at a time.
_MODULES = frozenset("linear matmul attention embedding cross_entropy_sum layer_norm rms_norm".split())
_SPREAD = 0.5  # from host to host and from one version of a framework to the next


def host_s(block: BlockWork, phase: str, costs: Costs, again: Again | None = None) -> Quantity:
    """Seconds of the host for one pass over a block, or over what it runs `again`; nothing where it costs nothing."""
    if costs.profile is not None and costs.mode is Mode.EAGER:  # measured as it runs, the host with it
        return ZERO
    if costs.options.launch is Launch.FULL_GRAPHS or kernels_of(costs.cluster.device, costs.constants) is None:
        return ZERO
    c, launch = costs.constants, costs.options.launch
    given = costs.cluster.device.launch_s  # what the user says of one operation in eager mode
    each = c.host_fused_s if costs.mode is Mode.FUSED else c.host_eager_s if given is None else given
    if launch is Launch.BLOCKING:
        each = c.host_blocking_s
    together = block.joined_ops if costs.mode is Mode.FUSED and launch is not Launch.BLOCKING else ()
    apart = costs.mode is Mode.EAGER or launch is Launch.BLOCKING  # element-wise operations have kernels of their own
    seconds = 0.0
    for k, op in enumerate(block.ops):
        if again is not None and k not in again.ops:
            continue
        if op.op in VIEWS or k in together or (phase == "backward" and not op.has_backward):
            continue
        if op.op == "experts":
            num_local = op.inputs[3].shape[0] if len(op.inputs) > 3 and not costs.options.fused_experts else 0
            seconds += c.host_experts_s + num_local * c.host_expert_s
        elif launch is not Launch.GRAPHS and (apart or op.op not in ELEMENTWISE):
            one = each if op.op in _MODULES or launch is Launch.BLOCKING else min(each, c.host_eager_s)
            seconds += one * (1.0 if op.matmul_dtype is None else c.host_fp8)
    if again is not None and launch is not Launch.GRAPHS:
        seconds += len(again.beside) * min(each, c.host_eager_s)
    for comm in (
        block.comms if again is None else again.comms
    ):  # those of experts have sizes that no graph knows beforehand
        if comm.per == "micro_batch" and comm.phase == phase and (comm.top_k or launch is not Launch.GRAPHS):
            seconds += c.host_comm_s
    return Quantity.spread(seconds, _SPREAD, Tag.FITTED) if seconds else ZERO


def waited_s(host: Quantity, device: Quantity, launch: Launch) -> Quantity:
    """What the host adds to a block that keeps the device busy for `device`."""
    return host if launch is Launch.BLOCKING else host.less(device)
