"""Worker processes for tests that need real process groups.

    from harness import pool, worker_mesh

    def job(rank: int, world: int, x: int) -> float: ...       # at the top of a test module or a helper module

    def test_something():
        results = pool(4).run(job, 3)                          # one result per rank

The workers of a world size run every job of that size in one default gloo process group. They are forked from a
process that has imported torch and the models and has done nothing with them (multiprocessing's fork server), so that
they inherit no threads and no process groups, and that a pool starts in a moment. A job that raises, hangs or dies ends
the whole pool, since collectives may be half done; the next ``pool(world)`` starts a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from autoplan.profiler.processes import STOP_GRACE_S, ProcessOutcome, answer_of, environment, outcomes, problems
from experiments.shared.jobs import answer_jobs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

START_TIMEOUT_S = 120.0
# Longer than any job: the parent's clock decides, a stuck collective must not be reported as something else.
GROUP_TIMEOUT_S = 600.0
# On a machine that is slower than the limits of the jobs were meant for: multiplies them.
PATIENCE = float(os.environ.get("AUTOPLAN_TEST_PATIENCE", "1"))


# What most jobs import, the slow parts first. The package `transformers` imports its modules when they are asked for:
# hence a model.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed._composable.fsdp",
    "transformers.models.llama.modeling_llama",
    "parity",
]


class JobError(AssertionError):
    """A job failed on some rank; the message holds every traceback that came back."""


class Pool:
    """``world`` worker processes in one gloo process group. Also a context manager, for a pool of one's own."""

    def __init__(self, world: int, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self.world = world
        self.alive, self.num_jobs = True, 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        inside = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # The fork server, started here if it is not yet, finds modules by PYTHONPATH alone and must make no threads.
        with environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path)):
            for rank in range(world):
                here, there = context.Pipe()
                process = context.Process(
                    target=_worker, args=(rank, world, there, group_timeout_s, inside), daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
        _started.append(self)
        # Rank 0 binds any free port and says which: nobody can take it in between.
        port = self._collect([0], START_TIMEOUT_S, "start")[0].value
        for pipe in self._pipes[1:]:
            pipe.send_bytes(pickle.dumps(port))
        self._collect(range(world), START_TIMEOUT_S, "start")

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run ``fn(rank, world, *args)`` on every worker; the results by rank.

        Raises:
            JobError: if any rank raised, died or took longer than ``timeout_s``. The pool is gone then.
        """
        timeout_s *= PATIENCE
        found = self.run_each(fn, *args, timeout_s=timeout_s, grace_s=STOP_GRACE_S)
        if any(outcome.status != "ok" for outcome in found):
            self.kill()
            raise JobError(_report(fn, found, timeout_s))
        return [outcome.value for outcome in found]

    def run_each(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        grace_s: float = math.inf,
        awaited: Sequence[int] = (),
    ) -> list[ProcessOutcome]:
        """As ``run``, but says what became of each rank instead of raising. Only a rank that
        hangs ends the pool here.

        With ``grace_s``, ranks still busy that long after the first failure count as hanging. With ``awaited``, only
        these ranks are waited for, their outcomes returned, and the pool ends.
        """
        if not self.alive:
            raise RuntimeError("this pool has ended; call pool(world) for a new one")
        self.num_jobs += 1
        job = pickle.dumps((fn, args))  # by reference: fn must be importable by its module's name
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a dead worker, which _collect reports
                pipe.send_bytes(job)
        found = self._collect(awaited or range(self.world), timeout_s, None, grace_s)
        if awaited or any(outcome.status == "hangs" for outcome in found):
            self.kill()  # its late answer would be taken for that of the next job
        return found

    def _collect(
        self, ranks: Sequence[int], timeout_s: float, must: str | None, grace_s: float = math.inf
    ) -> list[ProcessOutcome]:
        found = outcomes([self._pipes[rank] for rank in ranks], timeout_s, grace_s)
        if must and any(outcome.status != "ok" for outcome in found):
            self.kill()
            raise JobError(_report(must, found, timeout_s))
        return found

    def kill(self) -> None:
        """End every worker at once and reap it."""
        self.alive = False
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


_started: list[Pool] = []
_pools: dict[int, Pool] = {}


# Every process group that a job makes has a thread of gloo for good (torch's caches name the groups, so that they
# cannot be destroyed) that wakes up a hundred times per second: eight idle workers with 400 threads each take a core.
MOST_JOBS = 6


def pool(world: int) -> Pool:
    """The session's pool of ``world`` workers, started at first use and again after it ended or ran MOST_JOBS."""
    found = _pools.get(world)
    if found is not None and found.alive and found.num_jobs >= MOST_JOBS:
        found.kill()
    if found is None or not found.alive:
        found = _pools[world] = Pool(world)
    return found


def end_pools() -> None:
    """End the session's pools; the next job starts new ones."""
    for found in _pools.values():
        if found.alive:
            found.kill()


@atexit.register
def _kill_all() -> None:
    for started in _started:
        if started.alive:
            started.kill()


def free_port() -> int:
    """A port nobody listens on right now; for processes that the pool does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def worker_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """In a worker: the CPU mesh of this shape over all ranks, made once (process groups are never given back)."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _worker(rank: int, world: int, pipe: Connection, group_timeout_s: float, variables: dict[str, str]) -> None:
    # The kernel ends this process with the fork server, which ends with pytest, also when that is killed and this
    # process is stuck in a collective: the server waits for whoever holds this end of its pipe, so it is not held here.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gc.freeze()  # what the server imported is no garbage: a collection that looks at it would copy it
    alive = forkserver._forkserver._forkserver_alive_fd
    assert alive is not None
    os.close(alive)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business

    stores: list[dist.TCPStore] = []

    def join() -> int:
        """Rank 0 calls it twice: first it opens the store and returns its port, then it joins the group."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        timeout = timedelta(seconds=group_timeout_s)
        if not stores:
            port = 0 if rank == 0 else pickle.loads(pipe.recv_bytes())
            stores.append(dist.TCPStore("127.0.0.1", port, None, rank == 0, timeout=timeout, wait_for_workers=False))
            if rank == 0:
                return stores[0].port
        dist.init_process_group("gloo", store=stores[0], rank=rank, world_size=world, timeout=timeout)
        return stores[0].port

    for _ in range(2 if rank == 0 else 1):
        answer_of(pipe, join)
    answer_jobs(pipe, rank, world)


def _report(fn: Callable[..., Any] | str, found: Sequence[ProcessOutcome], timeout_s: float) -> str:
    name = fn if isinstance(fn, str) else f"{fn.__module__}.{fn.__qualname__}"
    return f"{name} failed\n{problems(found, timeout_s)}"
