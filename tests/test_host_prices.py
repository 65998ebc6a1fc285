"""Host and device of a profile: what the profiler makes of a simulated device with a queue is what a step there takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from fake_device import FakeDevice
from models import make_llama, token_batch
from parity import fake_group

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import ParallelConfig
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.price import Estimate
from autoplan.cost_models.profile import Profile
from autoplan.estimate import estimate_config
from autoplan.points import PlanRequest
from autoplan.profiler.job import Job
from autoplan.profiler.lattice import every_step_tasks
from autoplan.profiler.ops import Clock, measure_op
from autoplan.profiler.overheads import measure_overheads
from autoplan.profiler.run import graph_tasks
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel

CPU = torch.device("cpu")
SEQ, MICRO, CACHE = 16, 2, 1 << 16
LAUNCH_S = 10e-6
CLUSTER = Cluster.local(1, "cuda")


@lru_cache
def graph() -> ModelGraph:
    tokens = token_batch(MICRO, SEQ)
    return capture(make_llama(num_hidden_layers=3), tokens)


@lru_cache
def measured(kernel_s: Callable[[str, int], float]) -> Profile:
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


def simulated(device: FakeDevice, num_micro_batches: int) -> float:
    """Seconds of a step of the emitted program, until the device is done."""
    _, program = plan_program(graph(), Cluster.local(1), {}, MICRO * num_micro_batches, SEQ)
    model, batch = make_llama(num_hidden_layers=3), token_batch(MICRO * num_micro_batches, SEQ)
    with fake_group(1):
        pm = ParallelModel(
            program.spec,
            program.sources,
            dict(model.named_parameters()),
            dict(model.named_buffers()),
            num_micro_batches=num_micro_batches,
        )
        with device:
            for _ in range(2):
                device.synchronize()
                start = device.host
                pm.step(batch)
            device.synchronize()
            return device.host - start


def estimate(profile: Profile, num_micro_batches: int) -> Estimate:
    config = ParallelConfig(num_micro_batches=num_micro_batches, micro_batch_size=MICRO)
    request = PlanRequest(graph(), CLUSTER, SEQ, MICRO * num_micro_batches, precision="native", profile=profile)
    return estimate_config(request, config).estimate


def passes_s(profile: Profile, num_micro_batches: int) -> float:
    """The estimate without the update."""
    found = estimate(profile, num_micro_batches)
    print({k: round(q.mid * 1e6, 1) for k, q in found.breakdown.items()})
    return found.step_time_s.mid - found.breakdown["optimizer"].mid - profile.overheads["optimizer_step_s"]


def slow(name: str, elements: int) -> float:
    """Kernels that take longer than queueing them, products most."""
    return (300e-6 if "mm" in name or "attention" in name else 20e-6) + 1e-9 * elements


def fast(name: str, elements: int) -> float:
    return 0.5e-6 + 1e-12 * elements


@pytest.mark.parametrize("kernel_s", [slow, fast])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_step_takes_the_longer_of_both(kernel_s: Callable[[str, int], float], num_micro_batches: int) -> None:
    profile = measured(kernel_s)
    want = simulated(FakeDevice(LAUNCH_S, kernel_s), num_micro_batches)
    got = passes_s(profile, num_micro_batches)
    print(kernel_s.__name__, num_micro_batches, want, got, got / want, profile.overheads, profile.host_overheads)
    assert got == pytest.approx(want, rel=0.03)
