"""What the runtime's own kernels are given: they read memory in order, so that every tensor must lie in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.runtime.dropout import dropout
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, use_mesh


class _Watch(TorchDispatchMode):
    """The calls of our kernels, on `meta`, where no kernel runs: operator, and whether its tensors lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "autoplan_fused":
            given = [x for x in args if isinstance(x, torch.Tensor)]
            self.calls.append((func._schema.name.partition("::")[2], all(x.is_contiguous() for x in given)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch() -> Iterator[_Watch]:
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        with use_mesh(AxisMesh([("tp", 2)], {})), _Watch() as found:
            yield found
    finally:
        dist.destroy_process_group()


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("sharded", [False, True])
def test_columns_of_labels_and_logits(watch: _Watch, sharded: bool) -> None:
    """`model(x).logits[:, 0]` and `labels[:, 0]` of a batch with one class per sample: every row lies apart."""
    logits = _empty(8, 3, 32)[:, 0].requires_grad_()
    target = _empty(8, 5, dtype=torch.int64)[:, 0]
    assert not logits.is_contiguous() and not target.is_contiguous()
    loss = vocab_parallel_cross_entropy_sum(logits, target, "tp") if sharded else cross_entropy_sum(logits, target)
    loss.backward()
    assert watch.calls == [("loss_statistics", True), ("loss_gradient", True)]


def test_dropout_of_a_transposed_tensor(watch: _Watch) -> None:
    x, rng = _empty(16, 8).T.requires_grad_(), _empty(6, dtype=torch.int64)[::2]
    out = dropout(x, 0.1, rng, 3, ((8, 8, "batch"), (16, 16, ())))
    out.backward(_empty(16, 8).T)
    assert watch.calls == [("dropout", True)] * 2
