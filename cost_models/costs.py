"""Costs: what one operation, collective or copy costs on this cluster. The search and `price` both ask here.

A profile overrides the device's and links' figures op by op; what it lacks is interpolated or taken from the roofline,
and every answer says which (`Quantity.tag`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.cost_models.cluster import Cluster, Group
from autoplan.cost_models.collectives import group_collective_s
from autoplan.cost_models.compute import op_s
from autoplan.cost_models.config import Mode
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.quantity import ZERO, Quantity
from autoplan.cost_models.work import OpWork, TensorWork

# bytes AdamW moves per element beside the state it keeps: reads gradient and parameter, writes the parameter
_ADAMW_FLOPS_PER_ELEMENT = 12.0


@dataclass(frozen=True)
class Costs:
    """Prices of one cluster in one mode, with or without a measured profile."""

    cluster: Cluster
    profile: Profile | None = None
    mode: Mode = Mode.EAGER

    def forward_s(self, work: OpWork) -> Quantity:
        """Seconds of the forward pass of one operation."""
        return op_s(work, "forward", self.cluster.device, self.profile, self.mode)

    def backward_s(self, work: OpWork) -> Quantity:
        """Seconds of its backward pass; nothing if no gradient flows through it."""
        if not work.has_backward:
            return ZERO
        return op_s(work, "backward", self.cluster.device, self.profile, self.mode)

    def collective_s(self, kind: str, num_bytes: float, group: Group) -> Quantity:
        """Seconds of one collective over ranks `r0 + i * stride`."""
        if group.size == 1 or num_bytes == 0:
            return ZERO
        return group_collective_s(kind, num_bytes, group, self.cluster, self.profile)

    def optimizer_s(self, num_elements: float, dtype: str, state_bytes: float) -> Quantity:
        """Seconds of one AdamW update of `num_elements`: gradient and parameter read, parameter written, state both."""
        if num_elements < 1:
            return ZERO
        tensor = TensorWork((round(num_elements),), dtype)
        moved = 3 * tensor.num_bytes + 2 * state_bytes * num_elements
        flops = _ADAMW_FLOPS_PER_ELEMENT * num_elements
        work = OpWork("optimizer_adamw", (tensor,), (), (), flops, moved)
        return self.forward_s(work)

    def overhead_s(self, name: str) -> float:
        """A measured constant of the runtime (`step_s`, `zero_block_forward_s`, ...); 0 where it was not measured."""
        return 0.0 if self.profile is None else self.profile.overheads.get(name, 0.0)
