"""The counter of host waits, kernels and bytes sees what it is there to see, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_counter import DeviceCounter
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

X = torch.arange(12.0).reshape(3, 4)
MASK = X > 5
COUNTS = torch.tensor([1, 2, 0])
DEVICE = torch.device("cpu")  # stands for the accelerator


class _WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * len(x.tolist())


def _backward() -> None:
    _WaitsInBackward.apply(X.clone().requires_grad_()).sum().backward()


SYNCS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.any()),
    "float": lambda: float(X.max()),
    "if": lambda: 1 if X.isnan().any() else 0,
    "range": lambda: list(range(COUNTS[1])),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "index": lambda: X[MASK],
    "index_put": lambda: X.clone().__setitem__(MASK, torch.ones(6, device=DEVICE)),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: COUNTS.unique(),
    "bincount": lambda: COUNTS.bincount(minlength=4),
    "repeat_interleave": lambda: X.repeat_interleave(COUNTS, 0),
    "equal": lambda: torch.equal(X, X.clone()),
    "tensor": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
    "as_tensor": lambda: torch.as_tensor(0, device=DEVICE),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "to device": lambda: torch.tensor([1.0]).to(DEVICE),
    "computed on the host": lambda: (torch.arange(3) + 1).float().to(DEVICE),
    "copy_": lambda: X.clone().copy_(torch.zeros(3, 4)),
    "index of the host": lambda: X[[0, 2]],
    "backward": _backward,
    "synchronize": lambda: torch.cuda.synchronize(),
    "event": lambda: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
}

FREE: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: ((X * 2).sum() / COUNTS.sum()).sqrt(),
    "shapes": lambda: X.reshape(2, 6).T.contiguous()[1:, :1].expand(5, 2),
    "where": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "index": lambda: X[COUNTS],
    "set": lambda: X.clone().__setitem__(0, 3.0),
    "set by a mask": lambda: X.clone().__setitem__(MASK, 3.0),
    "repeat_interleave": lambda: X.repeat_interleave(COUNTS, 0, output_size=3),
    "factories": lambda: torch.zeros(3, device=DEVICE) + torch.full((), 3, device=DEVICE),
    "dtypes": lambda: X.to(torch.bfloat16).to(X),
    "to the same device": lambda: X.to(DEVICE),
    "asynchronous": lambda: torch.tensor([1.0]).to(DEVICE, non_blocking=True),
    "host": lambda: (torch.tensor([1, 2]) + torch.zeros(2, dtype=torch.int64)).sum().item(),
    "host list": lambda: torch.tensor([1, 2]).tolist(),
    "sort": lambda: X.sort(),
    "backward": lambda: (X.clone().requires_grad_() ** 2).sum().backward(),
}


@pytest.mark.parametrize("name", SYNCS)
def test_every_wait_is_seen_once_with_its_line(name: str) -> None:
    with DeviceCounter() as counter:
        SYNCS[name]()
    assert len(counter.syncs) == 1, counter.report()
    assert f"{__file__}:" in counter.syncs[0].where, counter.report()


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    with DeviceCounter() as counter:
        FREE[name]()
    assert counter.syncs == [], counter.report()


def test_shapes_that_depend_on_data() -> None:
    with DeviceCounter() as counter:
        X.sum().item()
        X.nonzero()
        X[MASK]
    assert [event.name for event in counter.data_dependent_shapes] == ["nonzero", "index"]


def test_the_line_is_that_of_the_wait_also_in_a_backward() -> None:
    with DeviceCounter() as counter:
        _backward()
    source, first = inspect.getsourcelines(_WaitsInBackward.backward)
    line = first + next(i for i, text in enumerate(source) if "tolist" in text)
    assert counter.syncs[0].where == f"{__file__}:{line}"


def test_tensors_of_the_host_as_given() -> None:
    batch = torch.arange(4)
    with DeviceCounter(host=[batch]) as counter:
        assert batch.max().item() == 3
    assert counter.syncs == []
    with DeviceCounter(host=[batch]) as counter:
        assert batch[1:].to(DEVICE).max().item() == 3
    assert [event.name for event in counter.syncs] == ["to device", "_local_scalar_dense"], counter.report()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_and_bytes(device: str) -> None:
    x = torch.empty(8, 16, dtype=torch.bfloat16, device=device)
    row = torch.empty(16, dtype=torch.bfloat16, device=device)
    with DeviceCounter(device) as counter:  # type: ignore[arg-type]
        y = x.view(16, 8).T
        assert counter.num_kernels == 0
        y = x + row.expand(8, 16)
        assert (counter.num_kernels, counter.read_bytes, counter.written_bytes) == (1, 256 + 32, 256)
        y.mul_(2)
        assert (counter.num_kernels, counter.read_bytes, counter.written_bytes) == (2, 288 + 256, 512)
        y.zero_()
        assert (counter.num_kernels, counter.read_bytes, counter.written_bytes) == (3, 544, 768)
        y[0] = row
        assert (counter.num_kernels, counter.read_bytes, counter.written_bytes) == (4, 576, 800)
    x + 1
    assert counter.num_kernels == 4, "outside nothing is counted"


def test_bytes_of_looking_up() -> None:
    table = torch.empty(1000, 4, device="meta", requires_grad=True)
    tokens = torch.empty(5, dtype=torch.int64, device="meta")
    with DeviceCounter("meta") as counter:
        out = functional.embedding(tokens, table)
    assert (counter.read_bytes, counter.written_bytes) == (40 + 80, 80)
    with DeviceCounter("meta") as counter:
        out.sum().backward()
    # the sum, the expanded gradient, a gradient as large as the table
    assert counter.written_bytes >= 16000, counter.report("kernel")


def test_launches_of_foreach() -> None:
    small = [torch.empty(10, device="meta") for _ in range(250)]
    with DeviceCounter("meta") as counter:
        torch._foreach_norm(small)
    assert counter.num_kernels == 3, "110 tensors a launch"
    with DeviceCounter("meta") as counter:
        torch._foreach_mul_([torch.empty(1 << 26, device="meta")], 2.0)
    assert counter.num_kernels == 4, "320 blocks of 65,536 elements a launch"


def test_backward_counts() -> None:
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    with DeviceCounter("meta") as counter:
        y = x.exp()
        forward = counter.num_kernels
        y.backward(torch.empty_like(y))
    assert (forward, counter.num_kernels - forward) == (1, 1), counter.report("kernel")


def test_waits_on_meta_are_seen_before_it_refuses() -> None:
    x = torch.empty(4, device="meta")
    with DeviceCounter("meta") as counter, pytest.raises((NotImplementedError, RuntimeError)):
        x.sum().item()
    assert len(counter.syncs) == 1
    with DeviceCounter("meta") as counter:
        torch.tensor(3.0, device="meta")
        torch.zeros(3)  # of the host
        torch.zeros(3).sum().item()
    assert [event.name for event in counter.syncs] == ["tensor of values of the host"], counter.report()
    assert counter.num_kernels == 0, counter.report("kernel")


def test_fake_cuda_tensors() -> None:
    with FakeTensorMode(), DeviceCounter("cuda") as counter:
        x = torch.ones(4, device="cuda")
        host = torch.ones(4)
        host + 1
        (x + 1).exp()
        assert counter.syncs == [], counter.report()
        assert counter.num_kernels == 3, counter.report("kernel")
        torch.ops.aten._to_copy(host, device=torch.device("cuda"))  # .to("cuda") asks for a driver
        x.cpu()
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
    names = [event.name for event in counter.syncs]
    assert names == ["_to_copy cpu to cuda", "_to_copy cuda to cpu", "_local_scalar_dense"], counter.report()
