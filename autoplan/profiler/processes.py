"""Local processes, each with a pipe for its answers: started in one process group, watched by a clock, always ended.

results = run_ranks(fn, 4, *args, timeout_s=60)     fn(rank, world, *args) on every rank; one result per rank
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

from autoplan.errors import AutoplanError

# After the first failure the other ranks get this long to report theirs, which is often the more telling one.
STOP_GRACE_S = 2.0


class RankError(AutoplanError):
    """Raised for a rank that failed, died or did not finish in time; the message has its traceback if it left one."""


class ProcessOutcome(NamedTuple):
    """The end of a process; `value`: its result, or the traceback of what it raised."""

    status: Literal["ok", "raised", "died", "hangs"]
    value: Any = None


def answer_of(pipe: Connection, fn: Callable[..., Any], *args: Any) -> None:
    """Send what a function returns or raises."""
    try:  # plain pickle: Connection.send would pass tensors as shared memory, which ends with this process
        data = pickle.dumps(ProcessOutcome("ok", fn(*args)))
    except BaseException:
        data = pickle.dumps(ProcessOutcome("raised", traceback.format_exc()))
    pipe.send_bytes(data)


def outcomes(pipes: Sequence[Connection], timeout_s: float, grace_s: float = math.inf) -> list[ProcessOutcome]:
    """Return the answers of the processes behind the pipes; after a failure the others have `grace_s` left."""
    end, found = time.monotonic() + timeout_s, dict[object, ProcessOutcome]()
    while len(found) < len(pipes) and (left := end - time.monotonic()) > 0:
        # a dead process's pipe reads as closed, so that the pipes alone are enough to wait on
        ready = wait([pipe for pipe in pipes if pipe not in found], left)
        for pipe in (pipe for pipe in pipes if pipe in ready):
            try:
                found[pipe] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                found[pipe] = ProcessOutcome("died")
            if found[pipe].status != "ok":
                end = min(end, time.monotonic() + grace_s)
    return [found.get(pipe, ProcessOutcome("hangs")) for pipe in pipes]


def problems(found: Sequence[ProcessOutcome], timeout_s: float) -> str:
    """Return the problem of each rank that has one, on lines of its own; "" if none has."""
    silent = {"died": " the process died", "hangs": f" no answer (limit {timeout_s:g} s)"}
    texts = [silent.get(outcome.status, f"\n{outcome.value}") for outcome in found]
    return "\n".join(f"rank {rank}:{text}" for rank, text in enumerate(texts) if found[rank].status != "ok")


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float,
    start: Literal["spawn", "fork"] = "spawn",
    num_threads: int = 1,
    gpus: bool = False,
) -> list[Any]:
    """Run `fn(rank, world, *args)` in `world` processes of one group; the results by rank.

    Args:
        fn: importable by name; what it returns must pickle.
        timeout_s: for everything, start included.
        start: "spawn" makes fresh processes; "fork" copies of this one, which spares their imports but must not have
            threads.
        gpus: a group of NCCL with a GPU per rank instead of gloo.

    Raises:
        RankError: a rank raised, died, or the time is over. No process is left running either way.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "spawn":
        resource_tracker.ensure_running()  # it starts with the first process otherwise, and lets interrupts through
    lo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if sys.platform == "linux" else {}
    pipes, children = list[Connection](), []
    with tempfile.TemporaryDirectory() as folder, environment(OMP_NUM_THREADS=str(num_threads), **lo):
        try:
            for rank in range(world):
                here, there = context.Pipe(duplex=False)
                work = (_in_group, fn, rank, world, args, f"file://{folder}/store", timeout_s, gpus)
                children.append(context.Process(target=answer_of, args=(there, *work), daemon=True))
                with _interrupts_held():
                    children[-1].start()
                there.close()
                pipes.append(here)
            found = outcomes(pipes, timeout_s, STOP_GRACE_S)
        finally:
            for child in children:  # they have answered, or will not
                child.kill()
                child.join()
    if any(outcome.status != "ok" for outcome in found):
        raise RankError(problems(found, timeout_s))
    return [outcome.value for outcome in found]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back: processes that start meanwhile never see it, and the one that waits for them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_group(
    fn: Callable[..., Any], rank: int, world: int, args: Sequence[Any], store: str, timeout_s: float, gpus: bool
) -> Any:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(timeout_s, exit=True)  # if the process that waits for it has died
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a fork has torch, and its threads, already
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank) if gpus else None,
    )
    result = fn(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result
