"""Whole tensors on the host: right on ranks of every layout, and of a GPU's memory a bucket is enough."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import whole_jobs
from harness import pool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoplan.runtime import private, whole
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.params import unshard
from autoplan.runtime.spec import ParamSpec, ShardSpec

GPU = torch.device("meta")  # stands for one: torch without CUDA cannot write into a fake tensor of its
MIB = 1 << 20


class DeviceBytes(TorchDispatchMode):
    """The most bytes of one kind of device that are alive at once, of tensors that are made inside."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.now, self.peak = device_type, 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == self.device_type:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.fixture
def peak_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], torch.Tensor]], tuple[int, Any]]]:
    """Bytes of a GPU that nobody has that some work takes, and what it returns; on rank 1 of four. What the other ranks
    would send is not there: of fake tensors there are no values."""
    monkeypatch.setattr(dist, "all_gather", lambda received, sent, group: None)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group=None: None)

    def peak(work: Callable[[], torch.Tensor]) -> tuple[int, Any]:
        with FakeTensorMode(), DeviceBytes(GPU.type) as counted:
            out = work()
        return counted.peak, out

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield peak
    finally:
        dist.destroy_process_group()


Peak = Callable[[Callable[[], torch.Tensor]], tuple[int, Any]]
MOST = whole.HOST_BUCKET_BYTES + MIB


def test_a_gathered_tensor_takes_a_bucket_of_the_device(peak_of: Peak) -> None:
    def work() -> torch.Tensor:
        local = torch.empty(128 * MIB, device="cpu")  # of what is on the host already
        parts = whole.gather(local, [local.shape] * 4, private.default_group(), GPU)
        return torch.cat(parts)

    peak, out = peak_of(work)
    assert 0 < peak <= MOST
    assert out.shape == (512 * MIB,) and out.device.type == "cpu"


def test_a_shard_on_the_device_is_gathered_on_the_host(peak_of: Peak) -> None:
    size = (8192, 8192)
    spec = ParamSpec("b", "w", "w", size, ((8192,), (8192,)), "float32", True, (ShardSpec("tp", 0, 0),), (), ())

    def work() -> torch.Tensor:
        local = torch.empty(8192 // 4, 8192, device=GPU)
        return unshard(local, spec, mesh, GPU)

    mesh = AxisMesh([("tp", 4)], device_type="cpu")
    peak, out = peak_of(work)
    assert out.shape == spec.shape and out.device.type == "cpu"
    shard_bytes = 8192 * 8192  # a quarter of four bytes each
    assert shard_bytes <= peak <= shard_bytes + MOST  # whole it has four times the bytes of the shard


def test_a_broadcast_takes_a_bucket_of_the_device(peak_of: Peak) -> None:
    def work() -> torch.Tensor:
        value = torch.empty(512 * MIB)
        whole.broadcast_whole(value, 0, GPU)
        return value

    peak, out = peak_of(work)
    assert 0 < peak <= MOST
    assert out.device.type == "cpu"


def test_the_counter_counts(peak_of: Peak) -> None:
    """What these tests would see if the whole tensor went through the device."""

    def work() -> torch.Tensor:
        value = torch.empty(512 * MIB, device=GPU)
        dist.broadcast(value, 0)
        return value.to("cpu")

    assert peak_of(work)[0] >= 2048 * MIB


@pytest.mark.parametrize(("size", "parts"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 2)])
def test_parts_are_those_of_fully_shard(size: int, parts: int) -> None:
    chunks = [len(c) for c in torch.arange(size).chunk(parts)]
    assert [whole._length(size, parts, i) for i in range(parts)] == chunks + [0] * (parts - len(chunks))


@pytest.mark.processes
@pytest.mark.parametrize("bucket_bytes", [whole.HOST_BUCKET_BYTES, 64])
def test_right_on_every_rank(bucket_bytes: int) -> None:
    """Even and uneven shards, gathered at once or in pieces, and cut again; values brought from one rank."""
    for found in pool(4).run(whole_jobs.there_and_back, bucket_bytes):
        bits = {f"torch.{name}": True for name in ("int16", "uint16", "float8_e4m3fn")}
        assert found == {"even": True, "uneven": True, "columns": True, "own": True, "brought": True, **bits}
