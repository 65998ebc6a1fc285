"""Jobs that fail, for test_failure.py. Apart from it so that a worker does not import pytest."""

import os
import threading
import time

import torch
import torch.distributed as dist

from autoplan.runtime import failure
from autoplan.runtime.failure import RankFailure, guard

# As failure.GRACE_S, shorter.
GRACE_S = 1.5


def prepare(timeout_s: float) -> None:
    failure.GRACE_S = GRACE_S
    failure.watch(timeout_s)


def end_soon() -> None:
    """Let the answer out, then end like a script whose exception nobody catches."""
    threading.Timer(0.3, os._exit, (1,)).start()


def fail_in_step(rank: int, world: int, bad: int, how: str, timeout_s: float) -> tuple[float, int | None, str]:
    """Seconds until this rank's guard raised, and what it raised."""
    prepare(timeout_s)
    torch.distributed.all_reduce(torch.ones(1))
    start = time.monotonic()
    try:
        with guard(rank):
            if rank == bad:
                time.sleep(0.2)
                if how == "raise":
                    raise ZeroDivisionError("a batch\nwithout tokens")
                if how == "die":
                    os._exit(9)
                time.sleep(8)
                os._exit(1)
            dist.all_reduce(torch.ones(1))
    except RankFailure as error:
        end_soon()
        return time.monotonic() - start, error.rank, str(error)
    return time.monotonic() - start, None, "no error"


def fail_in_pipeline(rank: int, world: int, bad: int, timeout_s: float) -> tuple[float, str]:
    # Here, because the other jobs of this file need neither.
    from harness import worker_mesh
    from toy_stages import batch, make_runner

    prepare(timeout_s)
    (part,), runner = make_runner((2, 2), 2)
    stage = part.module
    inputs = batch(2, 4, 0)[worker_mesh((2, 2), ("pp", "dp"))["dp"].get_local_rank()]
    if rank == bad:
        calls = []
        stage.register_forward_hook(lambda *_: calls.append(0) if len(calls) < 2 else 1 / 0)
    start = time.monotonic()
    try:
        with guard():
            runner.run(inputs)
    except RankFailure as error:
        return time.monotonic() - start, str(error)
    return 0.0, "no error"


def misbehave(rank: int, world: int, how: str) -> int:
    if rank == 1:
        if how == "raise":
            raise KeyError("on rank one")
        time.sleep(60)
    return rank


def answer(rank: int, world: int) -> tuple[int, int, int]:
    return rank, world, os.getpid()
