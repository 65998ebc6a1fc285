"""When one rank fails, every rank ends, within a stated time and with the reason of the rank that failed.

What ends the others: gloo's connections close when the process of the failing rank ends, often when it leaves
``guard``. With NCCL, or when a rank hangs or lives on, it is the timeout of collectives: 10 minutes, ``timeout_s=``, or
the variable AUTOPLAN_TIMEOUT_S. It is also made the default of all groups to come, since those of a DeviceMesh do not
inherit it: build meshes after ``init_process_group``.

Where they get the reason: the failing rank writes it to the key-value store of the process group. A rank whose
collective breaks looks there before it raises. A rank killed from outside writes nothing; it is the one that has not
reported when all others have. Rank 0 usually hosts the store, so each rank also has a thread that copies the reason
from it, and rank 0 leaves only after the others have a copy.
"""

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autoplan.runtime import private
from autoplan.runtime.agree import AgreedError

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_VARIABLE = "AUTOPLAN_TIMEOUT_S"
# How long a rank whose collective broke waits for the reports of the others.
GRACE_S = 5.0
# How often a rank looks for the failure of another.
POLL_S = 0.5

_FIRST = "autoplan/failure/first"
_REPORT = "autoplan/failure/rank/"
_COPIED = "autoplan/failure/copied/"

# Parts of the messages of plain RuntimeErrors by which gloo says that the other side is gone or silent.
_GLOO_MARKS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class RankFailure(RuntimeError):
    """A rank failed, this one or another.

    Attributes:
        rank: the rank where it began, None if unknown.
        reason: what happened there, type and message of its exception if it left one.
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(reason if rank is None else f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason


@dataclass
class _State:
    """This process's own connection to the store, since a blocking call on a shared one would hold up the other."""

    store: Any
    # The server dies with its last reference, which the process group would drop when it is aborted.
    server: Any
    rank: int
    world: int
    first: RankFailure | None = None
    stop: threading.Event = field(default_factory=threading.Event)


_state: _State | None = None


def timeout_of(timeout_s: float | None = None) -> timedelta:
    """The timeout of collectives: the argument, else AUTOPLAN_TIMEOUT_S, else 600; all in seconds.

    Raises:
        ValueError: if it is not a positive number.
    """
    if timeout_s is None:
        text = os.environ.get(TIMEOUT_VARIABLE, "")
        try:
            timeout_s = float(text) if text else DEFAULT_TIMEOUT_S
        except ValueError:
            raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds, not {text!r}") from None
    if not timeout_s > 0:
        raise ValueError(f"the timeout must be positive, not {timeout_s} s")
    return timedelta(seconds=timeout_s)


def init_process_group(backend: str | None = None, *, timeout_s: float | None = None, **options: Any) -> None:
    """``torch.distributed.init_process_group`` with this module's timeout and watch for failures.

    Args:
        backend: "gloo", "nccl", ...; default: what torch picks for the machine.
        timeout_s: see ``timeout_of``.
        options: passed on (rank, world_size, store, init_method, device_id, ...).
    """
    dist.init_process_group(backend, timeout=timeout_of(timeout_s), **options)
    watch(timeout_s)


def watch(timeout_s: float | None = None) -> None:
    """Watch for failures of other ranks and set the timeout, in an existing default process group.

    ``init_process_group`` does it. Groups that exist already keep their timeouts.
    """
    global _state
    private.set_timeout(timeout_of(timeout_s))
    server: Any = private.default_store()  # Any: torch's stub of Store lacks clone
    store = server.clone()
    # Not the timeout of the process group: a store that is gone must not hold up the report that it is.
    store.set_timeout(timedelta(seconds=2 * GRACE_S))
    _state = _State(store, server, dist.get_rank(), dist.get_world_size())
    thread = threading.Thread(target=_watch, args=(_state, server.clone()), name="autoplan-failures", daemon=True)
    thread.start()
    atexit.register(_end_watch, _state, thread)


def _end_watch(state: _State, thread: threading.Thread) -> None:
    """Python ends daemon threads by unwinding them, which inside a call to the store aborts the whole process."""
    state.stop.set()
    thread.join(3 * GRACE_S)


def _watch(state: _State, store: Any) -> None:
    while _state is state and not state.stop.is_set():
        try:
            if store.check([_FIRST]):
                state.first = _decode(store.get(_FIRST))
                store.set(f"{_COPIED}{state.rank}", "")
                # Where the main thread is stuck in a device's queue and the process is ended from outside, this line
                # is all there is.
                logger.error("%s", state.first)
                return
        except RuntimeError:
            return  # the store is gone; the broken collective says so too
        state.stop.wait(POLL_S)


def report_failure(exc: BaseException) -> None:
    """Leave ``exc`` as the reason for the other ranks to find. Never raises; the first report of all ranks counts."""
    with contextlib.suppress(RuntimeError):
        state = _require_state()
        _report(state, RankFailure(state.rank, _describe(exc)))


def failure_reason(grace_s: float | None = None) -> RankFailure | None:
    """What another rank reported, or a conclusion from who did not report within ``grace_s`` seconds (GRACE_S).

    Call it when a collective broke. Returns None without ``init_process_group`` or ``watch``.
    """
    if _state is None:
        return None
    state = _state
    grace_s = GRACE_S if grace_s is None else grace_s
    mine = f"{_REPORT}{state.rank}"
    try:
        state.store.set(mine, "")
        deadline = time.monotonic() + grace_s
        while True:
            if state.first is not None:
                return state.first
            if state.store.check([_FIRST]):
                return _decode(state.store.get(_FIRST))
            silent = [rank for rank in range(state.world) if not state.store.check([f"{_REPORT}{rank}"])]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not silent:
            return RankFailure(None, "a collective broke on every rank; none reported a cause of its own")
        ranks = ", ".join(map(str, silent))
        conclusion = f"killed, or hangs: no report within {grace_s:g} s"
        if len(silent) == 1:
            return _report(state, RankFailure(silent[0], conclusion))
        return _report(state, RankFailure(None, f"ranks {ranks} {conclusion}"))
    except RuntimeError as error:
        if state.first is not None:
            return state.first
        return RankFailure(None, f"the rank that hosts the key-value store (usually 0) is gone: {_describe(error)}")


@contextlib.contextmanager
def guard(rank: int | None = None) -> Iterator[None]:
    """Turn any exception inside into a RankFailure that names the rank where it began, and let the others know.

    Afterwards no collective works in this process: its connections are closed, so that the others fail at once.

    Args:
        rank: this process's rank; default: that of the process group.

    Raises:
        RankFailure: for every Exception inside, which is its cause. An AgreedError, which all ranks raise alike,
            passes through, and collectives go on working. Other BaseExceptions (KeyboardInterrupt,
            SystemExit) are reported to the other ranks and pass through.
    """
    try:
        yield
    except (RankFailure, AgreedError):
        raise
    except BaseException as exc:
        failure = _failure_of(exc, rank)
        _leave(failure)
        if isinstance(exc, Exception):
            raise failure from exc
        raise


def _failure_of(exc: BaseException, rank: int | None) -> RankFailure:
    if rank is None and _state is not None:
        rank = _state.rank
    own = RankFailure(rank, _describe(exc))
    if not is_broken_collective(exc):
        if _state is not None:
            with contextlib.suppress(RuntimeError):
                _report(_state, own)
        return own
    other = failure_reason()
    if other is None:
        return own
    return RankFailure(other.rank, f"{other.reason} [seen by rank {rank} as {_describe(exc)}]")


def is_broken_collective(exc: BaseException | None) -> bool:
    """Whether ``exc``, or what caused it, says that another rank is gone or silent, rather than name a fault here."""
    while exc is not None:
        if isinstance(exc, dist.DistError):
            return True
        if isinstance(exc, RuntimeError) and any(mark in str(exc) for mark in _GLOO_MARKS):
            return True
        exc = exc.__cause__
    return False


def _leave(failure: RankFailure) -> None:
    """Close this rank's connections and, on the rank that hosts the store, stay until the others have the reason."""
    state = _state
    with contextlib.suppress(Exception):
        private.abort_process_groups()
    if state is None:
        return
    # torchrun hosts the store in its agent, which outlives the ranks.
    if state.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        deadline = time.monotonic() + GRACE_S
        others = [f"{_COPIED}{rank}" for rank in range(1, state.world) if rank != failure.rank]
        with contextlib.suppress(RuntimeError):
            while not all(state.store.check([key]) for key in others) and time.monotonic() < deadline:
                time.sleep(0.05)


def _report(state: _State, failure: RankFailure) -> RankFailure:
    """Post ``failure`` unless another rank was first; the one that was first."""
    value = json.dumps({"rank": failure.rank, "reason": failure.reason})
    first = state.store.compare_set(_FIRST, "", value)
    state.store.set(f"{_REPORT}{state.rank}", "")
    return _decode(first)


def _decode(value: bytes) -> RankFailure:
    found = json.loads(value)
    return RankFailure(found["rank"], found["reason"])


def _describe(exc: BaseException) -> str:
    """Type and message; of a pipeline's wrapper, those of its cause, which is what a reader looks for."""
    while isinstance(exc, RuntimeError) and exc.__cause__ is not None:
        exc = exc.__cause__
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"


def _require_state() -> _State:
    if _state is None:
        raise RuntimeError("failures are not watched: call autoplan.runtime.failure.init_process_group or watch")
    return _state
