"""Long-lived processes in one gloo group, forked from this one, which has imported all and computed nothing."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autoplan.profiler.processes import STOP_GRACE_S, ProcessOutcome, answer_of, outcomes
from experiments.shared.jobs import answer_jobs

MOST_JOBS = 24  # every group that a job makes keeps a thread of gloo
_START_S = 120.0


class Ranks:
    """`world` processes; started at the first job, and again after a failure or MOST_JOBS jobs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._num_jobs = 0
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run_each(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[ProcessOutcome]:
        """Run `fn(rank, world, *args)` on every rank; return what became of each, a hanging one with its stack."""
        if not self._processes or self._num_jobs >= MOST_JOBS:
            self.end()
            self._start()
        self._num_jobs += 1
        job = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)
        # ranks whose peer has failed wait for it: what they say then is of no interest
        found = outcomes(self._pipes, timeout_s, 4 * STOP_GRACE_S)
        if any(one.status != "ok" for one in found):
            found = [self._with_stack(rank, one) for rank, one in enumerate(found)]
            self.end()
        return found

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._num_jobs = [], [], 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _with_stack(self, rank: int, one: ProcessOutcome) -> ProcessOutcome:
        if one.status != "hangs" or self._folder is None:
            return one
        os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        with contextlib.suppress(InterruptedError):
            self._processes[rank].join(1.0)
        return one._replace(value=(Path(self._folder.name) / f"stack{rank}").read_text())

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world):
            here, there = context.Pipe()
            args = (rank, self.world, there, self._folder.name, os.getpid())
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        found = outcomes(self._pipes, _START_S)
        if any(one.status != "ok" for one in found):
            raise RuntimeError(f"the processes did not start: {found}")


def _work(rank: int, world: int, pipe: Connection, folder: str, parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that asks
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    # gloo writes its complaints there; it stays open for stacks
    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def join() -> None:
        store, wait = f"file://{folder}/store", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)

    answer_of(pipe, join)
    answer_jobs(pipe, rank, world)


class Pools:
    """Processes by world size."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        """Return the processes of a world size."""
        return self._pools.setdefault(world, Ranks(world))

    def end(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.end()
