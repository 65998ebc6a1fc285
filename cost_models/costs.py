"""The cost of one operation, collective or copy on a cluster. The search and `time.price` both ask here.

A profile overrides the figures of the device and the links, one operation at a time. What it lacks is interpolated or
taken from the roofline; every answer says which (`Quantity.tag`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from autoplan.config.adapters import PACKED_BYTES
from autoplan.config.offload import no_host_link
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions, Sends
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster, Device, Group
from autoplan.cost_models.kernels.operations import op_s
from autoplan.cost_models.network.collectives import group_collective_s
from autoplan.cost_models.profile import LINK_WORK_S, Profile
from autoplan.cost_models.quantity import ZERO, Quantity, Tag
from autoplan.cost_models.routing import Routing
from autoplan.cost_models.work import OpWork
from autoplan.errors import PinError
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_record
from autoplan.schedules.schedule import SCHEDULES, Transfer
from autoplan.units import REAL_PARTS

# FLOPs of AdamW per element; see `_adamw_bytes` for its memory traffic
_ADAMW_FLOPS_PER_ELEMENT = 12.0
_WAIT_SPREAD = 0.5  # relative error of the difference of two square roots; assumed
_HOST_COPY_SPREAD = 0.5  # relative error of copies to the host at the stated speed of the link; assumed
# Time of an AdamW step on a GPU's host over the time of moving its bytes once. The runtime updates by one kernel
# (`autoplan.runtime.optim`), as DeepSpeed's CPUAdam does: 16 Mi float32 elements on one core of a CPU took 12.0 ms, and
# 28 bytes each at the speed of a large copy (38.5 GB/s) would take 12.2 (fastest of 7, torch 2.13). That is the least;
# one process on all of a DGX-2's memory takes 1.6 times as long (ZeRO-Offload, table 4: 0.22 s per billion). The middle
# is what the eight ranks of a node of Megatron Bridge's took (bridge_skill_022 and 026, 3.19 s more for the whole
# optimizer): their threads and pages are not bound to sockets. The most is assumed; DeepSpeed's published steps are 4.3
# to 5.8 (experiments/published/README.md, offload). Torch's default, one operation at a time, took 97 ms.
_HOST_STEP = Quantity(1.0, 3.2, 6.0, Tag.ASSUMED)
# Bytes per element that DeepSpeed's host moves beside the update: gradients in 32 bits are scaled, which reads and
# writes them (unscale_and_clip_grads), and parameters in 32 bits are rounded to a buffer in 16 (step; both in
# deepspeed/runtime/zero/stage_1_and_2.py, and stage3.py alike).
_HOST_SUMS_BYTES = 4.0 + 4.0 + 4.0 + 2.0
_COPY_SPREAD = 0.15  # relative error of the straight line through two measured sizes; assumed


@lru_cache(maxsize=64)
def _with_peak(device: Device, dtype: str) -> Device:
    peak = device.flops(dtype)
    return device if peak == device.peak_flops else replace(device, peak_flops=peak)


@dataclass(frozen=True)
class Costs:
    """The prices of one cluster in one mode, with or without a measured profile."""

    cluster: Cluster
    profile: Profile | None = None
    mode: Mode = Mode.EAGER
    options: RunOptions = field(default_factory=RunOptions)
    constants: Constants = field(default_factory=Constants.shipped)

    def forward_s(self, work: OpWork) -> Quantity:
        """Return the seconds of the forward pass of one operation."""
        return self._op_s(work, "forward")

    def backward_s(self, work: OpWork) -> Quantity:
        """Return the seconds of the backward pass of one operation; ZERO if no gradient flows through it."""
        if not work.has_backward:
            return ZERO
        return self._op_s(work, "backward")

    def _op_s(self, work: OpWork, phase: str) -> Quantity:
        """Return the seconds of an operation, with its measured extra cost among other operations (eager only)."""
        found = self._known_ops.get((work, phase))
        if found is None:
            found = self._known_ops[work, phase] = self._found_op_s(work, phase)
        return found

    @cached_property
    def _known_ops(self) -> dict[tuple[OpWork, str], Quantity]:
        return {}

    def _found_op_s(self, work: OpWork, phase: str) -> Quantity:
        alone = op_s(work, phase, self._device(work), self.profile, self.mode, self.options, self.constants)
        if phase == "forward" or work.inputs[0].requires_grad:
            alone = alone + self._opening_s(work)
        return alone + self.fixed_s(f"op_{phase}_s") if self.mode is Mode.EAGER else alone

    def _opening_s(self, work: OpWork) -> Quantity:
        """Return the seconds of opening a weight in 4 bits for a product: it is read, and written in 16 bits.

        bitsandbytes does so in both passes (`MatMul4Bit`); the backward needs it for the gradient of the input.
        """
        if not any(name == "packed" and value for name, value in work.attrs):
            return ZERO
        weight = work.inputs[1]
        moved = weight.num_bytes + weight.num_elements * PACKED_BYTES
        alone = (("fused_forward_bytes", round(moved)),)  # in all modes a kernel of its own
        return self._op_s(OpWork("clone", (weight,), (weight,), alone, 0.0, moved), "forward")

    @property
    def measures_host(self) -> bool:
        """True if the profile has the host's times apart from the device's."""
        return self.profile is not None and self.profile.has_host

    def host_fixed_s(self, name: str) -> Quantity:
        """Return the host's part of a measured constant of the runtime; ZERO if it was not measured separately."""
        seconds = 0.0 if self.profile is None else self.profile.host_overheads.get(name, 0.0)
        return Quantity.spread(seconds, 0.0, Tag.MEASURED) if seconds else ZERO

    def zero_host_s(self, what: str, num_tensors: int, num_bytes: float) -> Quantity:
        """Return the host seconds of one gather or reduction (`what`) of a block, collective included.

        See `zero_copy_s` for the device seconds around it.
        """
        fixed, per_tensor, per_byte = (self.host_fixed_s(f"zero_{what}_{n}") for n in ("s", "tensor_s", "byte_s"))
        return fixed + per_tensor * num_tensors + per_byte * num_bytes

    def _device(self, work: OpWork) -> Device:
        """Return the device with the peak of the dtype in which this operation's products run."""
        device = self.cluster.device
        if not op_record(work.op).multiplies or not device.peak_flops_by_dtype:
            return device
        dtype = work.matmul_dtype or next(d for t in work.inputs if "float" in (d := REAL_PARTS.get(t.dtype, t.dtype)))
        return _with_peak(device, dtype)

    def transfer(self, config: ParallelConfig) -> Transfer:
        """Return which ranks a message between stages keeps busy."""
        if self.options.sends is Sends.SERIAL:
            return Transfer.BOTH
        if "pp" in self.options.overlap and config.virtual_stages > 1:
            return Transfer.OVERLAPPED
        return SCHEDULES[config.schedule].transfer

    def sent_s(self, num_bytes: float, group: Group, tp: Group) -> Quantity:
        """Return the seconds of sending the values of a cut, all of which every rank of the next stage then holds.

        Args:
            num_bytes: On every rank of `tp`.
            group: A rank of the stage and one of the next.
        """
        if self.options.sends is Sends.WHOLE or self.options.sequence_parallel or tp.size == 1:
            return self.collective_s("send_recv", num_bytes, group)
        return self.collective_s("send_recv", num_bytes / tp.size, group) + self.collective_s(
            "all_gather", num_bytes, tp
        )

    def collective_s(self, kind: str, num_bytes: float, group: Group, routing: Routing | None = None) -> Quantity:
        """Return the seconds of one collective over `group`. `routing`: for collectives made for experts."""
        if group.size == 1 or num_bytes == 0:
            return ZERO
        seconds = group_collective_s(kind, num_bytes, group, self.cluster, self.profile, routing)
        # a profile measured its links as they are used; links between CPU processes are not such a network
        if self.profile is None and self.cluster.device_type != "cpu" and self.crosses_network(group):
            return seconds * (1.0 / self.constants.network_share)
        return seconds

    def crosses_network(self, group: Group) -> bool:
        """Return True if a group reaches beyond one scale-up domain."""
        return (group.size - 1) * group.stride >= self.cluster.domain_size

    def optimizer_s(self, num_elements: float, dtype: str, state_bytes: float) -> Quantity:
        """Return the seconds of one AdamW update of `num_elements`.

        It reads gradient and parameter, writes the parameter, and reads and writes the state.
        """
        if num_elements < 1:
            return ZERO
        tensor = TensorFacts((round(num_elements),), dtype)
        moved = _adamw_bytes(tensor, num_elements, state_bytes)
        flops = _ADAMW_FLOPS_PER_ELEMENT * num_elements
        work = OpWork("optimizer_adamw", (tensor,), (), (), flops, moved)
        return self.forward_s(work)

    def host_optimizer_s(self, num_elements: float, dtype: str, state_bytes: float) -> Quantity:
        """Return the seconds of one AdamW update on the host, from the speed of its memory.

        It is never less than on the device, which the search relies on; on a CPU the two are equal.
        """
        here = self.optimizer_s(num_elements, dtype, state_bytes)
        if self.cluster.device_type == "cpu" or num_elements < 1:
            return here
        moved = _adamw_bytes(TensorFacts((round(num_elements),), dtype), num_elements, state_bytes)
        if self.options.host_sums:
            moved += _HOST_SUMS_BYTES * num_elements
        there = _HOST_STEP * (moved / self.cluster.host_memory_bytes_per_s)
        low, mid, high = (max(getattr(here, w), getattr(there, w)) for w in ("low", "mid", "high"))
        return Quantity(low, mid, high, there.tag)

    def host_copy_s(self, num_bytes: float) -> Quantity:
        """Return the seconds of copying to host memory or back. Raises PinError if the link's speed is not known."""
        speed = self.cluster.host_link_bytes_per_s
        if speed is None:
            raise PinError(
                f"{no_host_link(self.cluster.device.name)}; "
                "nearest legal: recompute='full' for activations, offload='none' for the rest"
            )
        return Quantity.spread(num_bytes / speed, _HOST_COPY_SPREAD, Tag.ASSUMED) if num_bytes else ZERO

    def accumulate_s(self, num_elements: float, dtype: str, of: str) -> Quantity:
        """Return the seconds of adding a gradient of dtype `of` to one of `dtype`: both read, one written.

        Megatron's fused kernels add while they write the gradient, so it is only read once more. Modules of PyTorch
        cast parameters, so that their gradients are as wide as the sum.
        """
        return ZERO if num_elements < 1 else self.forward_s(self.accumulate_work(num_elements, dtype, of))

    def accumulate_work(self, num_elements: float, dtype: str, of: str) -> OpWork:
        """Return the addition of a gradient of dtype `of` to one of `dtype` as an operation."""
        tensor = TensorFacts((round(num_elements),), dtype)
        if self.mode is not Mode.FUSED:
            moved = 3.0 * tensor.num_bytes
        elif self.options.fused_accumulation:
            moved = 1.0 * tensor.num_bytes
        else:
            moved = 2.0 * tensor.num_bytes + TensorFacts(tensor.shape, of).num_bytes
        return OpWork("grad_accumulate", (tensor,), (), (), num_elements, moved)

    def zero_copy_s(self, what: str, num_bytes: float, num_tensors: int, num_ranks: int) -> Quantity:
        """Return the seconds that fully_shard spends around one gather or reduction (`what`) of a block of `num_bytes`.

        It copies shards into one buffer and the gathered buffer into the parameters; gradients into one buffer
        (torch.distributed.fsdp._fully_shard._fsdp_collectives). Measured if the profile has it. Megatron's distributed
        optimizer works on contiguous buffers, without copies.
        """
        fixed, per_tensor, per_byte = (self.overhead_s(f"zero_{what}_{n}") for n in ("s", "tensor_s", "byte_s"))
        if fixed or per_tensor or per_byte:
            seconds = fixed + per_tensor * num_tensors + per_byte * num_bytes
            return Quantity.spread(seconds, _COPY_SPREAD, Tag.MEASURED)
        if self.mode is Mode.FUSED:
            return ZERO
        moved = 2.0 * num_bytes * (1 + 1 / num_ranks)
        return self.forward_s(OpWork("clone", (TensorFacts((round(moved / 4),), "float32"),), (), (), 0.0, moved))

    def wait_s(self, computed_s: float, count: int = 1) -> Quantity:
        """Return the seconds that `count` collectives wait for slower ranks, each after `computed_s` of compute.

        Disturbances are many and small, so the difference between two ranks grows with the square root of the time.
        ZERO if it was not measured.
        """
        noise = self.overhead_s("straggler_sqrt_s")
        seconds = count * noise * (math.sqrt(computed_s) - math.sqrt(LINK_WORK_S))
        return Quantity.spread(seconds, _WAIT_SPREAD, Tag.FITTED) if seconds > 0 else ZERO

    def overlap_fraction(self) -> float | None:
        """Return the share of compute that hides a collective of ZeRO: measured, else the device's.

        None stands for `Constants.overlap`. The measured share counts only if fully_shard has streams to overlap on: on
        CPUs it waits for every collective.
        """
        if self.profile is not None and self.profile.device_type == "cuda":
            measured = self.profile.overheads.get("overlap_fraction")
            if measured is not None:
                return measured
        return self.cluster.device.overlap_fraction

    def overhead_s(self, name: str) -> float:
        """Return a measured constant of the runtime (`step_s`, `zero_block_forward_s`, ...); 0 if not measured."""
        return 0.0 if self.profile is None else self.profile.overheads.get(name, 0.0)

    def fixed_s(self, name: str) -> Quantity:
        """Return a measured constant of the runtime with its evidence; ZERO if it was not measured."""
        seconds = self.overhead_s(name)
        return Quantity.spread(seconds, 0.0, Tag.MEASURED) if seconds else ZERO


def _adamw_bytes(tensor: TensorFacts, num_elements: float, state_bytes: float) -> float:
    """Return the memory traffic of AdamW: gradient and parameter read, parameter written, state read and written."""
    return 3 * tensor.num_bytes + 2 * state_bytes * num_elements
