"""Agreement among the ranks of a measuring job: when to stop, and whose time counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoplan.profiler.ops import DeviceTimer, cuda_timer


class Job:
    """The ranks of the default process group, with a deadline by rank 0's clock.

    Args:
        device: where tensors of the group's backend live.
        deadline: in `time.monotonic()`.
        advance: shows the name of the measurement that was just made.
        timer: of the device's queue; made if the device has a queue.
        sharing: number of ranks that share the memory of this rank's device; None: all of them.
    """

    def __init__(
        self,
        device: torch.device,
        deadline: float,
        advance: Callable[[str], object] | None = None,
        timer: DeviceTimer | None = None,
        sharing: int | None = None,
    ) -> None:
        self.device = device
        self.deadline = deadline
        self.advance: Callable[[str], object] = advance or (lambda what: None)
        self.timer: DeviceTimer | None = cuda_timer(device) if timer is None and device.type == "cuda" else timer
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self.sharing: int = self.world if sharing is None else sharing

    @property
    def queued(self) -> bool:
        """True if the device works off a queue that the host fills."""
        return self.timer is not None

    def until(self, share: float) -> Job:
        """Return the same job with a share of the remaining time."""
        now = time.monotonic()
        return Job(self.device, now + share * max(0.0, self.deadline - now), self.advance, self.timer, self.sharing)

    def goes_on(self) -> bool:
        """Return False once rank 0's time is over. Also brings the ranks together, so that they measure together."""
        left = torch.tensor([1 if time.monotonic() < self.deadline else 0], device=self.device)
        dist.broadcast(left, 0)
        self.barrier()
        return bool(left.item())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        token = torch.zeros(1, device=self.device)
        dist.all_reduce(token)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Return the element-wise maximum over ranks; each rank gives equally many numbers."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(v) for v in values.tolist()]

    def anywhere(self, here: bool) -> bool:
        """Return True if `here` is true on any rank."""
        return bool(self.slowest([float(here)])[0])

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def wall(self, work: Callable[[], Any]) -> float:
        """Return the seconds of `work` on this rank, by the device's events or else by the host's clock.

        A collective: all ranks start together. If the host of some rank was late, all ranks repeat `work` with more
        lead, so it must be repeatable.
        """
        if self.timer is not None:
            while True:
                self.barrier()
                seconds, _ = self.timer.measure(work, None)
                if not self.was_late(self.timer.late):
                    return seconds
        self.barrier()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def was_late(self, late: bool) -> bool:
        """Return True if the host of some rank was late (`late`: this one). All then get the longest lead."""
        if self.timer is None:
            return False
        lead, any_late = self.slowest([float(self.timer.lead), float(late)])
        self.timer.lead = int(lead)
        return bool(any_late)
