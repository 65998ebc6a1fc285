"""The norm of gradients and scaling by it: exact enough, few kernels, no waits."""

from __future__ import annotations

import math

import pytest
import torch
from device_counter import DeviceCounter

from autoplan.runtime.norm import check_finite, limit_of, norm_of_all, order_of, power_sum, scale_

CPU = torch.device("cpu")


def some(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, generator=generator, dtype=torch.float64) * 1e-3 + 1e-4).to(dtype) for n in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    tensors = some(dtype, 1, 7, 65_536, 65_537, 3_000_000, 0)
    want = math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))
    got = power_sum(tensors, 2, CPU)
    assert got.dtype == torch.float64 and got.shape == ()
    assert float(got.sqrt()) == pytest.approx(want, rel=1e-14)
    # every tensor counts: without one the norm is another
    assert float(power_sum(tensors[:-2], 2, CPU).sqrt()) != pytest.approx(want, rel=1e-9)


def test_mixed_dtypes_shapes_and_views() -> None:
    tensors = [torch.full((3, 4), 2.0), torch.full((2,), 3.0, dtype=torch.bfloat16), torch.ones(8, 2)[:, 1]]
    tensors.append(torch.full((5,), 1e-200, dtype=torch.float64))
    assert float(power_sum(tensors, 2, CPU)) == pytest.approx(48 + 18 + 8, rel=1e-15)
    assert float(power_sum([], 2, CPU)) == 0
    assert float(power_sum([torch.tensor([1.0, math.inf])], 2, CPU)) == math.inf
    assert math.isnan(float(power_sum([torch.tensor([1.0, math.nan])], 2, CPU)))
    # squares that no float16, and no float32, holds
    assert float(power_sum([torch.full((4,), 6e4, dtype=torch.float16)], 2, CPU)) == pytest.approx(
        4 * 6e4**2, rel=1e-14
    )
    assert float(power_sum([torch.full((4,), 2.0**70)], 2, CPU)) == pytest.approx(2.0**142, rel=1e-14)


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, 3.5, 40, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_order_is_that_of_torch(order: float, dtype: torch.dtype) -> None:
    tensors = some(dtype, 1, 7, 65_537, 0, 300_000)
    everything = torch.cat(tensors).double().abs()
    want = everything.max() if order == math.inf else everything.pow(order).sum().pow(1 / order)  # added pairwise
    got = norm_of_all(iter(tensors), order, CPU, 1)
    assert got.dtype == torch.float64 and got.shape == ()
    assert float(got) == pytest.approx(float(want), rel=1e-13)
    assert float(norm_of_all([], order, CPU, 1)) == float(norm_of_all([torch.zeros(0)], order, CPU, 1)) == 0
    assert float(norm_of_all([torch.tensor([1.0, -math.inf])], order, CPU, 1)) == math.inf
    for strange in ([math.nan, 1.0], [math.inf, math.nan], [2.0, math.nan]):
        tensors = [torch.tensor(strange), torch.ones(3, dtype=torch.float64)]
        assert math.isnan(float(norm_of_all(tensors, order, CPU, 1))), strange
        assert math.isnan(float(norm_of_all(tensors[::-1], order, CPU, 1))), strange


def test_values_that_are_no_order_or_limit_are_refused() -> None:
    assert order_of("inf") == math.inf and order_of(torch.tensor(3)) == 3 == limit_of("3")  # type: ignore[arg-type]
    assert limit_of(0) == 0 and limit_of(math.inf) == math.inf
    for bad in (0, -1, -math.inf, math.nan, "two", None):
        with pytest.raises(ValueError, match=r"norm_type=.*above 0"):
            order_of(bad)  # type: ignore[arg-type]
    for bad in (-1.0, math.nan, "much", None):
        with pytest.raises(ValueError, match=r"max_norm=.*at least 0"):
            limit_of(bad)  # type: ignore[arg-type]
    check_finite(torch.tensor(1.0), 2, skipped=False)
    with pytest.raises(RuntimeError, match=r"order inf of the gradients is nan.*unchanged"):
        check_finite(torch.tensor(math.nan), math.inf, skipped=False)
    with pytest.raises(RuntimeError, match=r"order 2 of the gradients is inf.*loss scaler"):
        check_finite(torch.tensor(math.inf), 2, skipped=True)


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
        total = power_sum(tensors, 2, torch.device("meta"))
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
        power_sum(host, 2, torch.device("meta"))
    assert counter.syncs == [], counter.report()
