"""Measure a collective beside a product: how much of it hides, and how much each slows the other.

Both are made about equally long and started together, as ZeRO starts a gather before the block that hides it. With a
and c their times alone and t the time of both, `t = a + c - hidden`. `overlap_fraction = hidden / min(a, c)` is the
share of computing that `exposed = c - share * a` takes off (`cost_models.time.blocks`). Products are counted while the
collective runs: `overlap_compute_slowdown` is how much longer one takes then, and `overlap_collective_slowdown` how
much longer the collective takes. NCCL runs on streams and multiprocessors of its own; gloo on threads that want the
same cores.

A device with a queue is kept busy until both are queued (`DeviceTimer.keep_busy`). Without that lead it would wait for
the host between the start and the collective, and again before the first product, and this wait would count as not
hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autoplan.profiler.clocks import half_dtype
from autoplan.profiler.job import Job
from autoplan.profiler.ops import DeviceTimer

_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}  # gathered bytes: as many as of a layer, far from latency
_PRODUCT = {"cpu": 256, "cuda": 4096}  # rows and columns
_REPEATS = 9
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in older torch
_MAX_PRODUCTS = 2000


class Streams(Protocol):
    """The streams of a device, beside its timer."""

    def side(self) -> AbstractContextManager[Any]:
        """Return a context in which work goes to a stream of its own."""

    def wait(self, event: Any) -> None:
        """Make the work that is queued next wait for an event."""


class _CudaStreams:
    """The streams of `torch.cuda`."""

    def side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)


class Beside:
    """The product, the collective and their clock on one rank; random numbers, as in training, draw full power.

    `streams`: of a job whose device has a queue; default: CUDA's.
    """

    def __init__(self, job: Job, streams: Streams | None = None) -> None:
        self.job = job
        kind = job.device.type
        self.streams: Streams = _CudaStreams() if streams is None else streams
        size, dtype = _PRODUCT[kind], torch.float32 if kind == "cpu" else half_dtype(job.device)
        self.a: torch.Tensor
        self.b: torch.Tensor
        self.out: torch.Tensor
        self.a, self.b, self.out = (torch.randn(size, size, device=job.device).to(dtype) for _ in range(3))
        part = _BYTES[kind] // 4 // job.world
        self.part: torch.Tensor = torch.randn(part, device=job.device)
        self.whole: torch.Tensor = torch.empty(part * job.world, device=job.device)

    def products(self, count: int) -> None:
        """Run `count` products in a row; on CUDA only queue them."""
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.out)

    def start(self) -> Any:  # Any: torch's None is for async_op=False
        """Start the collective, beside the work that follows."""
        return _gather(self.whole, self.part, async_op=True)

    def alone_s(self, run: Callable[[], object]) -> float:
        """Return the median of the slowest rank's seconds."""
        run()
        return statistics.median(self.job.slowest([self.job.wall(run) for _ in range(_REPEATS)]))

    def both(self, count: int) -> tuple[float, float]:
        """Return the seconds from the start of both until the collective, and until everything, was done."""
        timer = self.job.timer
        while timer is not None:
            self.job.barrier()
            seconds = self._both_on_streams(count, timer)
            if not self.job.was_late(timer.late):
                return seconds
        self.job.barrier()
        begin = time.perf_counter()
        work, done = self.start(), 0.0
        for _ in range(count):
            self.products(1)
            if not done and work.is_completed():
                done = time.perf_counter() - begin
        work.wait()
        end = time.perf_counter() - begin
        return done or end, end

    def _both_on_streams(self, count: int, timer: DeviceTimer) -> tuple[float, float]:
        """Measure `both` by events. `wait` makes the stream that it is called on wait, not the host."""
        start, gathered, computed = (timer.event() for _ in range(3))
        timer.keep_busy()
        start.record()
        work = self.start()
        with self.streams.side():
            work.wait()
            gathered.record()
        self.products(count)
        self.streams.wait(gathered)
        computed.record()
        timer.judge(start)
        timer.synchronize()
        return start.elapsed_time(gathered) * 1e-3, start.elapsed_time(computed) * 1e-3


def measure_interference(job: Job, beside: Beside | None = None) -> dict[str, float]:
    """Return `overlap_fraction` and the two slowdowns, the same on every rank; nothing on one rank. A collective.

    `beside`: the work to run; default: products and a gather on the job's device.
    """
    if beside is None:
        if job.world == 1:
            return {}
        beside = Beside(job)
    gather_s = beside.alone_s(lambda: beside.start().wait())
    product_s = beside.alone_s(lambda: beside.products(10)) / 10
    count = max(1, min(_MAX_PRODUCTS, round(gather_s / product_s)))
    compute_s = beside.alone_s(lambda: beside.products(count))
    beside.both(count)
    pairs = [beside.both(count) for _ in range(_REPEATS)]
    gathered_s = statistics.median(job.slowest([g for g, _ in pairs]))
    both_s = statistics.median(job.slowest([b for _, b in pairs]))
    # once more with products that outlast the collective by far: their loss is due to it
    long = min(_MAX_PRODUCTS, 3 * count)
    longer_s = statistics.median(job.slowest([beside.both(long)[1] for _ in range(_REPEATS)]))
    lost_s = longer_s - long * compute_s / count
    hidden = (compute_s + gather_s - both_s) / min(compute_s, gather_s)
    return {
        "overlap_fraction": min(1.0, max(0.0, hidden)),
        "overlap_compute_slowdown": max(1.0, 1.0 + lost_s / gathered_s),
        "overlap_collective_slowdown": max(1.0, gathered_s / gather_s),
    }
