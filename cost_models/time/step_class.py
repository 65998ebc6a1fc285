"""The class of a step. The prices of steps of one class err alike (`constants.class_of_step`)."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.cost_models.constants import class_of_step
from autoplan.cost_models.hardware.parts import Device
from autoplan.cost_models.kernels.gpu import family_of
from autoplan.cost_models.quantity import ZERO, Quantity
from autoplan.cost_models.time.estimate import comm_term
from autoplan.cost_models.work import Workload
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind


def step_class(workload: Workload, device: Device, breakdown: Mapping[str, Quantity], step_s: float) -> str:
    """Return the class of a step with its family of devices. `breakdown`: its seconds by term (`Estimate`)."""
    experts = any(op_kind(op.op) is OpKind.EXPERTS for block in workload.blocks.values() for op in block.ops)
    terms = ("launch", comm_term("dp"), comm_term("pp"))
    host, data, stages = (breakdown.get(name, ZERO).mid / step_s for name in terms)
    return class_of_step(experts, host, data + stages, family_of(device) or "")
