"""A few local processes in one gloo group, for experiments: started, watched by a clock, and always ended."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(RuntimeError):
    """A process failed, died or did not finish in time; the message holds its traceback if it left one."""


def _worker(
    fn: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...], pipe: Connection, timeout_s: float
) -> None:
    import torch
    import torch.distributed as dist

    from experiments.shared.measure import limit_time

    limit_time(timeout_s)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("ok", result))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float) -> list[Any]:
    """Run `fn(rank, world, *args)` in `world` fresh processes of one gloo group, one thread each; the results by rank.

    Args:
        fn: importable by name; what it returns must pickle.
        timeout_s: for everything, start included.

    Raises:
        RankError: a rank raised, died, or the time is over. No process is left running either way.
    """
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the child imports torch
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        children = []
        try:
            for rank in range(world):
                here, there = context.Pipe(duplex=False)
                child = context.Process(
                    target=_worker,
                    args=(fn, rank, world, str(Path(folder) / "store"), args, there, timeout_s),
                    daemon=True,
                )
                child.start()
                there.close()
                pipes[here] = rank
                children.append(child)
            return _collect(pipes, world, deadline)
        finally:
            for child in children:
                child.join(timeout=5.0)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collect(pipes: dict[Connection, int], world: int, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = dict(pipes)
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(open_pipes.values())} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                status, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if status != "ok":
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(world)]
