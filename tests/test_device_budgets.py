"""What every operation of the runtime costs a GPU, counted without one: kernels, bytes, waits of the host.

`BUDGETS` states for each operation how many kernels it may launch and how many bytes it may move per element, forward
and backward. A change that is over its budget fails; one that is well under it (`_SLACK`) fails too, so that the table
stays what it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import spmd_types
import torch
import torch.distributed as dist
from device_counter import DeviceCounter

from autoplan.runtime.dropout import dropout
from autoplan.runtime.mesh import AxisMesh, use_mesh

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

TOKENS, HIDDEN = 1 << 12, 1 << 10
BF16 = torch.bfloat16
Made = tuple[Callable[..., torch.Tensor], list[torch.Tensor], int]
"""A function, its tensors, and the number of elements that bytes are counted per."""


@contextlib.contextmanager
def a_mesh() -> Iterator[AxisMesh]:
    """Rank 0 of two tensor-parallel ranks; collectives go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = AxisMesh([("tp", 2)], {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


@dataclass(frozen=True)
class Budget:
    """Kernels and bytes per element, forward and backward; and collectives."""

    forward_kernels: int
    forward_bytes: float
    backward_kernels: int
    backward_bytes: float
    collectives: int = 0


def on_meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _dropout() -> Made:
    rng = on_meta(3, dtype=torch.int64, grad=False)
    index = ((4, 4, "batch"), (TOKENS // 4, TOKENS // 4, ()), (HIDDEN, 2 * HIDDEN, ("tp",)))
    x = on_meta(TOKENS, HIDDEN)
    return lambda x: dropout(x, 0.1, rng, 3, index), [x], x.numel()


OPERATIONS: dict[str, tuple[Callable[[], Made], Budget]] = {
    # torch's own: 2 + 2 + 1 byte of mask, and again
    "dropout": (_dropout, Budget(1, 4, 1, 4)),
}
_SLACK = 0.75


@dataclass(frozen=True)
class Counted:
    """What an operation costs."""

    forward: DeviceCounter
    backward: DeviceCounter
    elements: int


def count(make: Callable[[], Made], device: Any = "meta") -> Counted:
    """Forward and backward of one operation, its gradient arriving contiguous and the parameters' fresh."""
    with a_mesh():
        function, tensors, elements = make()
        with DeviceCounter(device) as forward:
            out = function(*tensors)
        gradient = torch.empty_like(out)
        with DeviceCounter(device) as backward:
            torch.autograd.grad(out, [t for t in tensors if t.requires_grad], gradient)
    return Counted(forward, backward, elements)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_its_budget(name: str) -> None:
    make, budget = OPERATIONS[name]
    counted = count(make)
    for which, counter, kernels, per_element in (
        ("forward", counted.forward, budget.forward_kernels, budget.forward_bytes),
        ("backward", counted.backward, budget.backward_kernels, budget.backward_bytes),
    ):
        assert counter.syncs == [], f"{which}: {counter.report()}"
        said = f"{which}, {counter.moved_bytes / counted.elements:.2f} bytes per element: {counter.report('kernel')}"
        assert _SLACK * kernels <= counter.num_kernels <= kernels, said
        # scalars and statistics per row: a hundredth
        assert _SLACK * per_element <= counter.moved_bytes / counted.elements <= per_element * 1.01, said
    collectives = len(counted.forward.of("collective")) + len(counted.backward.of("collective"))
    assert collectives == budget.collectives, counted.forward.report("collective")
