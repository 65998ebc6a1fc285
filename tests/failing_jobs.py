"""Jobs that fail, for test_failure.py. Apart from it so that a worker does not import pytest."""

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.runtime import activity, connections, failure, private
from autoplan.runtime.failure import RankFailure, guard, work_of_first

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
        with guard(rank, "step"):
            if rank == bad:
                time.sleep(0.2)
                if how == "raise":
                    raise ZeroDivisionError("a batch\nwithout tokens")
                if how == "die":
                    os._exit(9)
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(8)
                os._exit(1)
            dist.all_reduce(torch.ones(1))
    except RankFailure as error:
        end_soon()
        return time.monotonic() - start, error.rank, str(error)
    return time.monotonic() - start, None, "no error"


def raise_and_live(
    rank: int, world: int, bad: int, timeout_s: float, live_s: float, folder: Path
) -> tuple[float, str, int]:
    """Rank `bad` raises in its guard, and its script, which holds the group, goes on until the others have raised, or
    for `live_s`. Seconds until this rank's guard raised, what it raised, and how many sockets the group has here."""
    prepare(timeout_s)
    connections.forget()
    group = private.form_groups([list(range(world))], "held")
    num = len(connections._noted)
    torch.distributed.all_reduce(torch.ones(1), group=group)
    start, said = time.monotonic(), ""
    try:
        with guard(rank, "step"):
            if rank == bad:
                time.sleep(0.2)
                raise ZeroDivisionError("a stage")
            dist.all_reduce(torch.ones(1), group=group)
    except RankFailure as error:
        said = str(error)
    seconds = time.monotonic() - start
    (folder / f"rank{rank}").touch()
    while rank == bad and len(list(folder.iterdir())) < world and time.monotonic() - start < live_s:
        time.sleep(0.05)
    end_soon()
    assert group is not None
    return seconds, said, num


def unguarded(rank: int, world: int, bad: int) -> str:
    """What gloo says by itself when a rank is killed."""
    dist.all_reduce(torch.ones(1))
    if rank == bad:
        os._exit(9)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "no error"


def quiet_but_healthy(rank: int, world: int, silence_s: float) -> tuple[float, list[str]]:
    """The result of a sum for which rank 1 comes late, and every failure that any rank heard of. First it sleeps, then
    it holds Python's lock, so that nothing in it answers."""
    failure.GRACE_S, failure.POLL_S, failure.SILENCE_NOTE_S = 0.2, 0.05, 0.5
    failure.watch(30.0)
    total = torch.ones(1)
    with guard(call="step"):
        if rank == 1:
            time.sleep(silence_s)
            ctypes.PyDLL(None).usleep(int(silence_s * 1e6))
        dist.all_reduce(total)
        time.sleep(0.2)
        dist.all_reduce(total)
    assert failure._state is not None
    return total.item(), [str(news) for news in failure._state.known.to_plain()["news"]]


def long_work_of_first(rank: int, world: int, waiting: bool, timeout_s: float) -> tuple[str, list[str]]:
    """Rank 0 works for twice the timeout; with `waiting` the others wait as told, else in the collective. The outcome
    and the lines that were logged."""
    prepare(timeout_s)
    failure.WAIT_NOTE_S = timeout_s / 2
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    failure.logger.addHandler(handler)
    box = [None]

    def work() -> None:
        if rank == 0:
            time.sleep(2 * timeout_s)
            box[0] = "planned"

    try:
        with guard(call="parallelize"):
            if waiting:
                with work_of_first("planning"):
                    work()
            else:
                work()
            dist.broadcast_object_list(box, 0)
    except RankFailure as error:
        end_soon()
        return str(error), lines
    return str(box[0]), lines


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


def frozen_and_loaded(rank: int, world: int) -> tuple[int, bool]:
    """Objects that collections of garbage leave alone, and whether the slow part of transformers is imported."""
    return gc.get_freeze_count(), "transformers.modeling_utils" in sys.modules


def read_beside_foreign_threads(rank: int, world: int, seconds: float) -> tuple[int, int, list[str]]:
    """Read a thread that makes threads of C, which call Python: numbers of threads made and of reads, the files."""
    libc = ctypes.CDLL(None)
    hello = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    done, made, names, reads = threading.Event(), 0, set(), 0

    def work() -> None:
        nonlocal made
        while not done.is_set():
            handles = [ctypes.c_ulong() for _ in range(8)]
            for handle in handles:
                libc.pthread_create(ctypes.byref(handle), None, hello, None)
            for handle in handles:
                libc.pthread_join(handle, None)
            made += len(handles)

    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        names.add(activity.of_thread(thread.ident).line.split(":")[0])
        reads += 1
    done.set()
    thread.join()
    return made, reads, sorted(names)
