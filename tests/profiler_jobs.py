"""Jobs of test_profiler.py that run on several processes."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch
from torch import nn

import autoplan
from autoplan.cost_models.profile import LinkRecord, MeasuredOp, Timing
from autoplan.errors import AutoplanError
from autoplan.profiler import run
from autoplan.profiler.interference import measure_interference
from autoplan.profiler.job import Job
from autoplan.profiler.lattice import linear_task, pointwise_task
from autoplan.profiler.links import measure_sharing
from autoplan.profiler.ops import Clock, MeasureTask
from autoplan.profiler.run import measure_in_job


def measure(rank: int, world: int, budget_s: float, general: bool) -> str:
    """The profile that this rank got, as text."""
    tasks = [linear_task(32, 64, 32, "float32"), pointwise_task("silu", 2048, "float32")]
    return measure_in_job(tasks, budget_s, name="toy", progress=False, general=general).to_json()


def measure_unlike(rank: int, world: int) -> tuple[list[str], dict[str, str]]:
    """What is measured and what is left out where rank 1 has little memory, and an operation fails on rank 0 only."""
    tasks = [
        linear_task(32, 64, 32, "float32"),
        linear_task(512, 512, 512, "float32"),
        linear_task(16, 16, 16, "float32"),
    ]
    before = run.memory_bytes, run.measure_op

    def unlike(task: MeasureTask, clock: Clock, cache: int) -> MeasuredOp:
        if rank == 0 and task is tasks[2]:
            raise RuntimeError("no kernel for this")
        return before[1](task, clock, cache)

    run.memory_bytes = lambda device: (1 << 30, 1 << 22)[rank]
    run.measure_op = unlike
    try:
        profile = measure_in_job(tasks, 30.0, progress=False, general=False)
    finally:
        run.memory_bytes, run.measure_op = before
    assert set(profile.failed) | set(profile.by_key) == {t.work.key for t in tasks}
    return [str(tasks.index(t)) for t in tasks if t.work.key in profile.by_key], profile.failed


def measured_on(rank: int, world: int, device: str) -> str:
    """The error of measuring on a device."""
    try:
        measure_in_job([], 5.0, progress=False, general=False, device=device)
    except AutoplanError as error:
        return f"{type(error).__name__}: {error}"
    return "measured"


def measure_again(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Keys after measuring twice, the second time with what was known from the first."""
    first = measure_in_job([linear_task(32, 64, 32, "float32")], 5.0, progress=False, general=False)
    both = [linear_task(32, 64, 32, "float32"), linear_task(64, 64, 32, "float32")]
    second = measure_in_job(both, 5.0, known=first, progress=False, general=False)
    same = first.by_key[both[0].work.key] == second.by_key[both[0].work.key]
    assert same, "what was known was measured again"
    return sorted(first.by_key), sorted(second.by_key)


def share(rank: int, world: int) -> tuple[list[LinkRecord], list[str], list[str]]:
    """All-reduces of two sizes over groups of 2 and 4 ranks, with those of one group alone; then without any time."""
    second = Timing(1.0, 1.0, 1.0, 1)
    links = [
        LinkRecord("all_reduce", size, stride, num_bytes, second)
        for size, stride in ((2, 1), (2, 2), (4, 1))
        for num_bytes in (4096, 8192)
    ]
    job = Job(torch.device("cpu"), time.monotonic() + 60.0)
    shared = measure_sharing(job, links, sizes=(4096,))
    return shared.links, shared.left_out, measure_sharing(job.until(0.0), links, sizes=(4096,)).left_out


def interfere(rank: int, world: int) -> dict[str, float]:
    """A gather beside products."""
    return measure_interference(Job(torch.device("cpu"), time.monotonic() + 60.0))


class Asked(Exception):
    """What would be measured, in place of measuring it."""


def asked_by_parallelize(rank: int, world: int) -> int:
    """The number of operations to measure of a model whose source and target have one length each, not alike."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Linear(8, 4), nn.Embedding(9, 4)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            rows = self.target(target).reshape(-1, 20) @ self.source(source.reshape(-1, 8)).sum(0).repeat(5)
            return rows.square().mean()

    def ask(tasks: list[MeasureTask], *_: object, **__: object) -> None:
        raise Asked(len(tasks))

    batch = {"source": torch.randint(9, (4, 8)).double(), "target": torch.randint(9, (4, 5))}
    with (
        patch.dict(os.environ),
        patch.object(run, "measure_in_job", ask),
        patch.object(run, "cached_profile", lambda key: None),
    ):
        del os.environ[run.ENVIRONMENT]
        try:
            autoplan.parallelize(Model().double(), "local", example_inputs=batch, global_batch_size=4)
        except Asked as asked:
            return int(asked.args[0])
    return 0
