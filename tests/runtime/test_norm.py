"""The norm of gradients and scaling by it: exact enough, few kernels, no waits."""

from __future__ import annotations

import math

import pytest
import torch
from device_counter import DeviceCounter

from autoplan.runtime.norm import scale_, square_sum

CPU = torch.device("cpu")


def some(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, generator=generator, dtype=torch.float64) * 1e-3 + 1e-4).to(dtype) for n in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    tensors = some(dtype, 1, 7, 65_536, 65_537, 3_000_000, 0)
    want = math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))
    got = square_sum(tensors, CPU)
    assert got.dtype == torch.float64 and got.shape == ()
    assert float(got.sqrt()) == pytest.approx(want, rel=1e-14)
    # every tensor counts: without one the norm is another
    assert float(square_sum(tensors[:-2], CPU).sqrt()) != pytest.approx(want, rel=1e-9)


def test_mixed_dtypes_shapes_and_views() -> None:
    tensors = [torch.full((3, 4), 2.0), torch.full((2,), 3.0, dtype=torch.bfloat16), torch.ones(8, 2)[:, 1]]
    tensors.append(torch.full((5,), 1e-200, dtype=torch.float64))
    assert float(square_sum(tensors, CPU)) == pytest.approx(48 + 18 + 8, rel=1e-15)
    assert float(square_sum([], CPU)) == 0
    assert float(square_sum([torch.tensor([1.0, math.inf])], CPU)) == math.inf
    assert math.isnan(float(square_sum([torch.tensor([1.0, math.nan])], CPU)))
    # squares that no float16, and no float32, holds
    assert float(square_sum([torch.full((4,), 6e4, dtype=torch.float16)], CPU)) == pytest.approx(4 * 6e4**2, rel=1e-14)
    assert float(square_sum([torch.full((4,), 2.0**70)], CPU)) == pytest.approx(2.0**142, rel=1e-14)


def test_scaling_in_place() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2,), 4.0, dtype=torch.bfloat16), torch.ones(4, 4)[:, 1]]
    scale_(tensors, torch.tensor(0.3, dtype=torch.float64))
    for t, was in zip(tensors, (2.0, 4.0, 1.0), strict=True):
        assert torch.equal(t, torch.full_like(t, was) * torch.tensor(0.3, dtype=t.dtype))
    assert float(tensors[2]._base.sum()) == pytest.approx(12 + 4 * 0.3)  # type: ignore[union-attr]


def test_kernels_bytes_and_waits() -> None:
    shapes = [(1024, 64)] * 150
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    elements = 150 * 1024 * 64
    with DeviceCounter("meta") as counter:
        total = square_sum(tensors, torch.device("meta"))
    assert counter.syncs == [], counter.report()
    assert counter.num_kernels <= 2 + 3, counter.report("kernel")
    assert 2 * elements <= counter.moved_bytes <= 2.01 * elements, counter.report("kernel")
    with DeviceCounter("meta") as counter:
        scale_(tensors, total)
    assert counter.syncs == [], counter.report()
    assert counter.num_kernels <= 4, counter.report("kernel")
    assert 4 * elements <= counter.moved_bytes <= 4.01 * elements, counter.report("kernel")


def test_gradients_on_the_host_cost_the_device_one_wait_to_be_scaled() -> None:
    host = [torch.ones(100) for _ in range(20)]
    on_device = torch.full((), 0.5, device="meta")
    with DeviceCounter("meta") as counter, pytest.raises((RuntimeError, NotImplementedError)):
        scale_(host, on_device)  # meta has no number to give
    assert [event.name for event in counter.syncs] == ["_to_copy meta to cpu"], counter.report()
    with DeviceCounter("meta") as counter:
        square_sum(host, torch.device("meta"))
    assert counter.syncs == [], counter.report()
