"""Host and device of a profile: what the profiler makes of a simulated device with a queue is what its steps take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from models import make_llama, token_batch
from parity import fake_group, spread_out

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.config.parallel import Launch, Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.kernels.operations import op_s
from autoplan.cost_models.profile import LinkRecord, MeasuredOp, Profile, Timing
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.time.host import host_op_s
from autoplan.cost_models.work import OpWork
from autoplan.errors import ProfileError
from autoplan.ir.graph import ModelGraph
from autoplan.profiler import run
from autoplan.profiler.clocks import measure_clock
from autoplan.profiler.interference import Beside, measure_interference
from autoplan.profiler.job import Job
from autoplan.profiler.lattice import every_step_tasks, held_out, linear_task, pointwise_task, view_task
from autoplan.profiler.ops import Clock, DeviceTimer, measure_op
from autoplan.profiler.overheads import measure_overheads
from autoplan.profiler.run import graph_tasks, main_dtypes, measure_in_job
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest

CPU = torch.device("cpu")
SEQ, MICRO, CACHE = 16, 2, 1 << 16
LAUNCH_S = 10e-6


@lru_cache
def graph() -> ModelGraph:
    return capture(make_llama(num_hidden_layers=4), token_batch(MICRO, SEQ))


def slow(name: str, elements: int) -> float:
    """Kernels that take longer than queueing them, products most."""
    return (1e-3 if "mm" in name or "attention" in name else 20e-6) + 1e-9 * elements


def fast(name: str, elements: int) -> float:
    return 0.5e-6 + 1e-12 * elements


Kernels = Callable[[str, int], float]


# -- a simulated device ------------------------------------------------------------------------------------------------


@lru_cache
def measured(kernel_s: Kernels) -> Profile:
    """What the profiler says of a device with such kernels."""
    device = FakeDevice(LAUNCH_S, kernel_s)
    tasks = [*graph_tasks(graph(), [1], {"b": MICRO, "s": SEQ}), *every_step_tasks("float32")]
    with fake_group(1), device:
        job = Job(CPU, time.monotonic() + 600.0, timer=device.timer())
        clock = Clock(CPU, job.timer)
        with use_mesh(AxisMesh([("all", 1)])):
            ops = [measure_op(t, clock, CACHE, limit_s=0.02) for t in tasks]
        profile = Profile("fake", "cuda", 1, 1, ops=tuple(ops))
        of_device, of_host = (measure_overheads(job, profile, host) for host in (False, True))
    return Profile.from_json(replace(profile, overheads=of_device, host_overheads=of_host).to_json())


def simulated(kernel_s: Kernels, num_micro_batches: int) -> float:
    """Seconds of a step of the emitted program, until the device is done."""
    device = FakeDevice(LAUNCH_S, kernel_s)
    _, program = plan_program(graph(), Cluster.local(1), {}, MICRO * num_micro_batches, SEQ)
    model, batch = make_llama(num_hidden_layers=4), token_batch(MICRO * num_micro_batches, SEQ)
    tensors = dict(model.named_parameters()), dict(model.named_buffers())
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, *tensors, num_micro_batches=num_micro_batches)
        with device:
            pm.step(batch)
            device.synchronize()
            start = device.host
            pm.step(batch)
            device.synchronize()
            return device.host - start


def estimate(profile: Profile, world: int = 1, options: RunOptions | None = None, **config: Any) -> Estimate:
    c = ParallelConfig(**{"micro_batch_size": MICRO, **config})
    batch = c.dp * c.num_micro_batches * c.micro_batch_size
    request = PlanRequest(graph(), Cluster.local(world, "cuda"), SEQ, batch, precision="native", profile=profile)
    return estimate_config(replace(request, options=options or RunOptions()), c).estimate


def passes_s(profile: Profile, num_micro_batches: int, options: RunOptions | None = None) -> float:
    """The estimate without the update, which `ParallelModel.step` does not do."""
    found = estimate(profile, options=options, num_micro_batches=num_micro_batches)
    update = found.breakdown["optimizer"].mid + profile.overheads["optimizer_step_s"]
    return found.step_time_s.mid - update


@pytest.mark.parametrize("kernel_s", [slow, fast])
@pytest.mark.parametrize("num_micro_batches", spread_out([1, 4], 2))
def test_a_step_takes_the_longer_of_both(kernel_s: Kernels, num_micro_batches: int) -> None:
    profile, want = measured(kernel_s), simulated(kernel_s, num_micro_batches)
    assert passes_s(profile, num_micro_batches) == pytest.approx(want, rel=0.03)
    without = passes_s(replace(profile, host_overheads={}), num_micro_batches, RunOptions(launch=Launch.FULL_GRAPHS))
    if kernel_s is fast:  # who forgets the host misses most of the step
        assert without < 0.3 * want
    else:
        assert without == pytest.approx(want, rel=0.03)


def test_what_the_profiler_measures_is_what_the_device_does() -> None:
    profile = measured(slow)
    record = profile.by_key[next(k for k in profile.by_key if k.startswith("silu("))]
    elements = record.work.outputs[0].num_elements
    for timing in (record.forward_s, record.backward_s):
        assert timing is not None and timing.median == pytest.approx(slow("silu", elements), rel=1e-3)
    for timing in (record.host_forward_s, record.host_backward_s):
        assert timing is not None and timing.median == pytest.approx(LAUNCH_S, rel=1e-3)
    add = next(r for r in profile.ops if r.work.op == "grad_accumulate")
    assert add.host_forward_s is not None and add.host_forward_s.median == pytest.approx(LAUNCH_S, rel=1e-3)
    assert profile.overheads["step_s"] > 0 and "step_s" not in profile.host_overheads
    assert "micro_batch_s" in profile.host_overheads and "op_forward_s" not in profile.overheads


def test_the_queue_is_never_filled() -> None:
    """A chain whose kernels the queue has no room for would make the host wait, and that is not what it needs."""
    many = dataclasses.replace(pointwise_task("silu", 64, "float32"), text="F.silu(x0" + ".neg()" * 50 + ")")
    most = 0

    class Counting(FakeDevice):
        queued = 0

        def synchronize(self) -> None:
            nonlocal most
            most, self.queued = max(most, self.queued), 0
            super().synchronize()

        def queue(self, seconds: float, launch_s: float | None = None) -> None:
            self.queued += launch_s is None  # not of the lead
            super().queue(seconds, launch_s)

    device = Counting(LAUNCH_S, slow)
    with fake_group(1), device, use_mesh(AxisMesh([("all", 1)])):
        record = measure_op(many, Clock(CPU, device.timer()), CACHE, limit_s=0.02)
    assert record.host_forward_s is not None
    assert record.host_forward_s.median == pytest.approx(51 * LAUNCH_S, rel=1e-3)
    device.queued = most = 0
    with device:
        assert device.timer().issue(lambda: None)[0] == 0.0
    assert Clock(CPU).queued is False
    with pytest.raises(ValueError, match="cpu has no queue"):
        Clock(CPU).issue(lambda: None)


def test_the_host_is_timed_on_long_chains_of_large_operations_too() -> None:
    """What a small graph does not show of the time in which autograd's thread wakes is shared by all links."""
    wakes_s, large = 20 * LAUNCH_S, pointwise_task("silu", CACHE // 4, "float32")

    class Waking(FakeDevice):
        def timer(self) -> DeviceTimer:
            timer = super().timer()
            issue = timer.issue
            timer.issue = lambda work: (lambda s, found: (s + wakes_s, found))(*issue(work))  # type: ignore[method-assign]
            return timer

    device = Waking(LAUNCH_S, slow)
    with fake_group(1), device, use_mesh(AxisMesh([("all", 1)])):
        clock = Clock(CPU, device.timer())
        clock.__dict__["host_edges"] = (0.0, 0.0, 0.0)  # a cached property: nothing of it is known
        record = measure_op(large, clock, CACHE, limit_s=0.02)
    for timing in (record.host_forward_s, record.host_backward_s):
        assert timing is not None and LAUNCH_S <= timing.median <= LAUNCH_S + wakes_s / 8 * 1.001


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_whole_profile_of_a_device_with_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured beside operations, in the dtypes asked for; read again; and nothing twice."""
    device = FakeDevice(LAUNCH_S, lambda *_: 1e-3)
    fake = device.timer()
    monkeypatch.setattr(run, "Job", lambda *args, **kwargs: Job(*args, **kwargs, timer=fake))
    monkeypatch.setattr(run, "large_product", lambda _: lambda: device.queue(1e-3))
    monkeypatch.setattr(run, "lattice", lambda dtype, *_: [linear_task(32, 32, 32, dtype)])
    monkeypatch.setattr(run, "held_out", lambda dtype, *_: [linear_task(24, 24, 24, dtype)])
    monkeypatch.setattr(run, "every_step_tasks", lambda dtype: every_step_tasks(dtype)[:1])
    with alone(), device:
        profile = measure_in_job([], 120.0, name="fake", dtypes=("bfloat16", "float32"), progress=False)
        again = measure_in_job([], 120.0, name="fake", known=profile, dtypes=("bfloat16", "float32"), progress=False)
    for dtype in ("bfloat16", "float32"):
        record = profile.by_key[linear_task(32, 32, 32, dtype).work.key]
        assert record.host_backward_s is not None and every_step_tasks(dtype)[0].work.key in profile.by_key
    assert {"zero_block_forward_s", "comm_s"}.isdisjoint(profile.host_overheads)  # one rank
    assert {"micro_batch_s", "op_forward_s", "optimizer_tensor_s"} <= set(profile.host_overheads)
    assert profile.clock == {"burst_s": pytest.approx(1e-3, rel=1e-3), "sustained_s": pytest.approx(1e-3, rel=1e-3)}
    assert again.ops == profile.ops and again.clock == profile.clock and profile.sustained == 1.0


def test_dtypes_of_a_job() -> None:
    assert main_dtypes(graph(), precision_of("native")) == ("float32",)
    assert main_dtypes(graph(), precision_of("bf16")) == ("bfloat16", "float32")
    assert main_dtypes(graph(), precision_of("fp32")) == ("float32",)
    assert {t.work.inputs[0].dtype for t in held_out("bfloat16", 1e9, 1e8) if t.work.op == "linear"} == {"bfloat16"}


# -- profiles by hand --------------------------------------------------------------------------------------------------


def by_hand(device_s: float, host_s: float, world: int = 1, **fields: Any) -> Profile:
    """A CUDA profile in which every operation takes the device and the host so long in each phase."""
    times = [Timing(s, 0.9 * s, 1.2 * s, 9) for s in (device_s, host_s)]
    ops = tuple(
        MeasuredOp(t.work, times[0], times[0] if t.work.has_backward else None, times[1], times[1])
        for degree in {1, world}
        for t in (*graph_tasks(graph(), [degree], {"b": MICRO, "s": SEQ}), *every_step_tasks("float32"))
    )
    second = Timing(1e-6, 1e-6, 1e-6, 9)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")
    links = tuple(LinkRecord(k, 2, 1, size, second) for k in kinds for size in (64, 1 << 22)) if world > 1 else ()
    profile = Profile("by hand", "cuda", world, 1, ops=ops, links=links, **fields)
    return Profile.from_json(profile.to_json())


def test_host_bound_is_told() -> None:
    bound, ahead = (estimate(by_hand(*s)) for s in ((1e-6, 20e-6), (20e-6, 1e-6)))
    assert bound.breakdown["launch"].mid > 0.9 * bound.step_time_s.mid and bound.breakdown["launch"].tag <= Tag.FITTED
    assert "launch" not in ahead.breakdown
    assert sum(q.mid for q in bound.breakdown.values()) == pytest.approx(bound.step_time_s.mid)
    # in graphs the host starts nothing; blocking, both are added up
    graphs = estimate(by_hand(1e-6, 20e-6), options=RunOptions(launch=Launch.FULL_GRAPHS))
    assert "launch" not in graphs.breakdown
    blocking = estimate(by_hand(20e-6, 20e-6), options=RunOptions(launch=Launch.BLOCKING))
    assert blocking.breakdown["launch"].mid == pytest.approx(blocking.breakdown["compute"].mid, rel=0.3)


HOOKS = {"zero_block_forward_s": 50e-6, "zero_block_backward_s": 70e-6, "zero_gather_s": 90e-6, "zero_reduce_s": 110e-6}


@pytest.mark.parametrize(
    ("config", "host", "every"),
    [
        # ZeRO 3: hooks, a gather forward and (of layers, not of what is used last) backward, and a reduction
        ({"dp": 2, "zero_stage": 3}, HOOKS, (320e-6, 410e-6)),
        ({"dp": 2, "zero_stage": 1}, {k: v for k, v in HOOKS.items() if "block" in k}, (120e-6, 120e-6)),
        ({"pp": 2}, {"pipeline_action_s": 100e-6}, (0.0, 0.0)),
        ({"tp": 2}, {"comm_s": 30e-6}, None),
        ({}, {"micro_batch_s": 400e-6}, (0.0, 0.0)),
        ({}, {"optimizer_step_s": 400e-6, "optimizer_tensor_s": 10e-6}, None),
    ],
)
def test_fixed_costs_of_the_host_hide_behind_the_device(
    config: dict[str, Any], host: dict[str, float], every: tuple[float, float] | None
) -> None:
    """Added up where the host is what is waited for; nothing where the device is busy for longer."""
    world = max(1, *(v for k, v in config.items() if k in ("dp", "tp", "pp")), 1)
    config = {**config, "num_micro_batches": 4}

    def added(device_s: float, host_s: float) -> float:
        with_, without = (
            estimate(by_hand(device_s, host_s, world, host_overheads=h), world, **config).step_time_s.mid
            for h in (host, {})
        )
        return with_ - without

    assert added(500e-6, 5e-6) == pytest.approx(0.0, abs=1e-9)
    found = added(0.1e-6, 50e-6)
    assert found > 0
    if "pp" in config:  # the first rank's forwards and backwards, and at the start and the end the other's
        assert found == pytest.approx((2 * 4 + 2) * 100e-6, rel=0.05)
    elif "micro_batch_s" in host:
        assert found == pytest.approx(4 * 400e-6, rel=1e-3)
    elif every is not None:
        blocks = 4 + 2  # layers, embedding, head
        assert 4 * 4 * every[0] <= found <= 4 * blocks * every[1] * 1.001


def test_recompute_pays_the_host_again() -> None:
    profile = by_hand(1e-6, 50e-6)
    none, selective, full = (estimate(profile, recompute=how) for how in ("none", "selective", "full"))
    forward = sum(50e-6 for t in graph().blocks["layer"].nodes if t.op)
    again = full.step_time_s.mid - none.step_time_s.mid
    assert again == pytest.approx(4 * forward, rel=0.1)  # a few operations are of other blocks
    assert none.step_time_s.mid < selective.step_time_s.mid < full.step_time_s.mid


def test_the_search_prices_the_same() -> None:
    """What the search finds is what `estimate` says of it, within the bound that it proves."""
    for seconds in ((1e-6, 30e-6), (100e-6, 10e-6)):
        profile = by_hand(*seconds, world=2, host_overheads={**HOOKS, "pipeline_action_s": 1e-4, "micro_batch_s": 1e-4})
        request = PlanRequest(graph(), Cluster.local(2, "cuda"), SEQ, 8, precision="native", profile=profile)
        found = search_plan(request)
        best = found.plans[0]
        same = estimate_config(request, best.config).estimate.step_time_s.mid
        assert best.estimate.step_time_s.mid == pytest.approx(same, rel=1e-9)
        assert found.certificate.gap >= 0


def test_the_host_of_shapes_that_were_not_measured() -> None:
    def record(task: Any, seconds: float) -> MeasuredOp:
        t = Timing(seconds, seconds, seconds, 5)
        return MeasuredOp(task.work, t, t, t, Timing(2 * seconds, 2 * seconds, 2 * seconds, 5))

    sizes = (64, 128, 256, 512, 1024)
    ops = [record(pointwise_task("add", n, "float32"), (4 + i) * 1e-6) for i, n in enumerate(sizes)]
    ops += [record(linear_task(64, 64, n, "float32"), 9e-6) for n in sizes]
    ops += [record(view_task("reshape", "float32"), 1e-6)]
    profile = Profile("p", "cuda", 1, 1, ops=tuple(ops))
    costs = Costs(Cluster.local(1, "cuda"), profile)

    def host(task: Any, phase: str = "forward") -> tuple[float, float, float, Tag]:
        q = host_op_s(task.work, phase, costs)
        return round(q.low * 1e6, 3), round(q.mid * 1e6, 3), round(q.high * 1e6, 3), q.tag

    assert host(pointwise_task("add", 64, "float32")) == (4.0, 4.0, 4.0, Tag.MEASURED)
    assert host(pointwise_task("add", 4096, "bfloat16")) == (4.0, 6.0, 8.0, Tag.FITTED)  # whatever the shape and dtype
    assert host(pointwise_task("mul", 4096, "float32"), "backward") == (8.0, 12.0, 16.0, Tag.FITTED)  # of its class
    assert host(view_task("transpose", "float32")) == (1.0, 1.0, 1.0, Tag.FITTED)
    softmax = OpWork("softmax", *(pointwise_task("silu", 64, "float32").work.inputs,) * 2, (), 1.0, 1.0)
    assert host_op_s(softmax, "forward", costs).mid == pytest.approx(8e-6, rel=0.2)  # of all but views
    bare = Costs(Cluster.local(1, "cuda"), replace(profile, ops=()))
    assert host_op_s(softmax, "forward", bare).mid == bare.constants.host_eager_s


def test_host_and_clock_in_the_text_form() -> None:
    clock = {"burst_s": 1e-3, "sustained_s": 1.25e-3}
    profile = by_hand(1e-6, 2e-6, host_overheads={"comm_s": 1e-5}, clock=clock)
    assert profile.has_host and profile.sustained == 1.25 and profile.host_overheads == {"comm_s": 1e-5}
    assert Profile.from_json(profile.to_json()).to_json() == profile.to_json()
    assert profile.merged(replace(profile, clock={}, host_overheads={})).clock == clock
    text = profile.to_json()
    for old, new, message in (
        ('"comm_s"', '"lunch_s"', "host_overheads.lunch_s is not known"),
        ('"burst_s": 0.001', '"burst_s": 0', "clock.burst_s must be a positive number, got 0"),
        ('"burst_s": 0.001, ', "", "clock.burst_s is missing; clock has sustained_s"),
    ):
        assert old in text
        with pytest.raises(ProfileError, match=message):
            Profile.from_json(text.replace(old, new))
    plain = Profile("p", "cpu", 1, 1, ops=tuple(MeasuredOp(r.work, r.forward_s) for r in profile.ops)).to_json()
    assert "host" not in plain and "clock" not in plain and not Profile.from_json(plain).has_host


# -- clocks ------------------------------------------------------------------------------------------------------------


class Throttled(FakeDevice):
    """After `patience_s` of work without a pause its products take 1.25 times as long."""

    patience_s, worked_s, idle_at = 3.0, 0.0, 0.0

    def product(self) -> None:
        if self.host - self.idle_at > 0.05:  # it has rested
            self.worked_s = 0.0
        seconds = 1e-3 * (1.25 if self.worked_s > self.patience_s else 1.0)
        self.worked_s += seconds
        self.queue(seconds)
        self.idle_at = self.busy["main"]

    def pause(self, seconds: float) -> None:
        self.synchronize()
        self.host += seconds


@pytest.mark.parametrize(("patience_s", "ratio"), [(3.0, 1.25), (20.0, 1.0), (0.0, 1.25)])
def test_clocks_of_bursts_and_of_sustained_load(patience_s: float, ratio: float) -> None:
    device = Throttled(1e-6)
    device.patience_s = patience_s
    with alone():
        job = Job(CPU, time.monotonic() + 60.0, timer=device.timer())
        clock = measure_clock(job, device.product, device.pause)
        assert measure_clock(job.until(0.0), device.product, device.pause) == {}
    if patience_s:
        assert clock["burst_s"] == pytest.approx(1e-3, rel=1e-6)
        assert clock["sustained_s"] == pytest.approx(ratio * 1e-3, rel=1e-6)
    assert Profile("p", "cuda", 1, 1, clock=clock).sustained == pytest.approx(ratio if patience_s else 1.0, rel=0.03)


def test_products_are_priced_at_the_clock_of_training() -> None:
    t = Timing(1e-3, 0.9e-3, 1.1e-3, 5)
    tasks = [linear_task(64, 64, 64, "float32"), pointwise_task("add", 64, "float32")]
    profile = Profile("p", "cuda", 1, 1, ops=tuple(MeasuredOp(x.work, t, t) for x in tasks))
    hot = replace(profile, clock={"burst_s": 1e-3, "sustained_s": 1.25e-3})
    device = Cluster.local(1, "cuda").device
    product, add = (op_s(x.work, "forward", device, hot, Mode.EAGER) for x in tasks)
    assert (product.low, product.mid, product.high) == (0.9e-3, 1.25e-3, 1.1e-3 * 1.25)
    assert add == op_s(tasks[1].work, "forward", device, profile, Mode.EAGER)  # its memory's clock does not fall


# -- a collective beside products --------------------------------------------------------------------------------------


class FakeBeside(Beside):
    """A gather on a stream of its own and products, of which a share hides."""

    def __init__(self, job: Job, device: FakeDevice, hides: float) -> None:
        super().__init__(job, device)
        self.device, self.hides, self.beside = device, hides, 0.0

    def start(self) -> Any:
        d = self.device
        d.host += 60e-6
        d.busy["nccl"] = max(d.busy.get("nccl", 0.0), d.busy[d.stream], d.host) + 1e-3
        done, event = d.busy["nccl"], type("Done", (), {})()
        event.wait = lambda: d.busy.__setitem__(d.stream, max(d.busy[d.stream], done))
        self.beside = done
        return event

    def products(self, count: int) -> None:
        d = self.device
        for _ in range(count):
            begin = max(d.busy[d.stream], d.host)
            d.queue(1e-4 / (self.hides if begin < self.beside - 1e-9 else 1.0), 5e-6)


@pytest.mark.parametrize(("share", "missed"), [(1.0, 0.05), (0.5, 0.02)])
def test_the_host_is_ahead_of_what_is_beside(share: float, missed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(5e-6)
    with alone():
        job = Job(CPU, time.monotonic() + 60.0, timer=device.timer())
        found = measure_interference(job, FakeBeside(job, device, share))
        assert found["overlap_fraction"] == pytest.approx(share, abs=0.01)
        assert found["overlap_collective_slowdown"] == pytest.approx(1.0, abs=0.01)
        assert job.timer is not None and job.timer.lead > 1
        monkeypatch.setattr(job.timer, "keep_busy", lambda: None)
        without = measure_interference(job, FakeBeside(job, device, share))
    assert without["overlap_fraction"] < share - missed  # the device waited while the gather was queued
