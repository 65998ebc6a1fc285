"""When one rank fails, every rank ends, within a stated time and with the reason of the rank that failed.

How the other ranks end:

- With gloo, the failing rank closes its connections when it leaves ``guard`` (autoplan.runtime.connections), whether or
  not its process lives on.
- With NCCL, a rank may wait for its device, where no error reaches it. Its watch aborts the communicators a second or
  two after it learns that a rank failed, and the call into autoplan raises, whatever the device returned. A value that
  the script waits for between calls (``loss.item()``) is then worthless, and its next call raises. (On a GPU
  only the abort has run, at one rank. If torch's own watchdog sees the broken connection first, it ends the process.)
- When a rank is stopped or hangs, or lives on with a group of the caller's, the timeout of collectives ends the
  others: 10 minutes, ``timeout_s=``, or the variable AUTOPLAN_TIMEOUT_S. It is also made the default of all later
  groups, because a DeviceMesh's groups do not inherit it: build meshes after ``init_process_group``.

How they learn the reason: every rank answers questions over its own socket (autoplan.runtime.peers). A rank that
raises, or whose script ends, tells some others before its connections close, and they pass it on: four times among
1,024 ranks. A rank whose collective breaks looks at what it was told, then asks every other rank. A refused connection
means that the process is gone, no answer within GRACE_S that it is stopped, and an answer that the rank does something
else means that it did not come to the collective. Silence alone ends nothing before the timeout: a debugger, a loaded
machine or a long C call make a healthy rank silent.

Between calls each rank asks the next rank every POLL_S whether it lives, and tells the others if it is gone. Work of
rank 0 for which the others wait (planning) does not count against the timeout: see ``work_of_first``.
"""

import atexit
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from autoplan.runtime import activity, connections, private
from autoplan.runtime.agree import is_agreed
from autoplan.runtime.news import News, NewsKind
from autoplan.runtime.peers import Address, Listener, Silence, route_to
from autoplan.runtime.ranks import Ranks
from autoplan.runtime.timeouts import timeout_of

logger: logging.Logger = logging.getLogger(__name__)

# How long a rank whose collective broke waits for answers of the others, which may be slow on a busy machine.
GRACE_S = 10.0
# How long one question waits for its answer.
ANSWER_S = 2.0
# How often a rank asks the next one whether it lives.
POLL_S = 0.5
# How long a failing rank keeps its NCCL connections after telling others, which look every POLL_S, and POLL_S longer
# for each further time that the others have to pass it on.
HEAD_START_S = 2 * POLL_S
# Silence of a rank after which a warning is logged, and time of waiting for rank 0 after which a line is logged.
SILENCE_NOTE_S = 30.0
WAIT_NOTE_S = 10.0
# Least silence of rank 0, while it works, that ends the waiting, even if the timeout is shorter: on a busy machine a
# long call that holds Python's lock leaves questions unanswered for seconds.
LEAST_SILENCE_S = 20.0

# Hosts that are contacted at the start. A refused connection to a host that never answered proves nothing.
_HOSTS_TRIED = 64
# Seconds between two looks at rank 0 while it works, per rank of the job: rank 0 answers 500 questions per second.
_LOOK_S_PER_RANK = 0.002
_LOOK_S = (0.005, 0.1)
# Seconds between two questions about its activity, per rank of the job: 50 per second.
_DOING_S_PER_RANK = 0.02

# Parts of the messages of plain RuntimeErrors by which gloo reports that the other side is gone or silent.
_GLOO_MARKS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")

# Where gloo's messages begin to guess the cause.
_GLOO_ADVICE = ". This is typically caused by"

_ADDRESS = "autoplan/address"

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RankFailure(RuntimeError):
    """A rank failed, this one or another.

    Attributes:
        rank: the rank where the failure began; None if it is unknown or there were several.
        ranks: the ranks where it began, as far as they are known.
        reason: what happened there: type and message of the rank's exception, if it left one.

    Example:
        >>> from autoplan import RankFailure
        >>> print(RankFailure(1, "ValueError: no data"))
        rank 1 failed: ValueError: no data
    """

    def __init__(self, rank: int | None, reason: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(reason if rank is None else f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason
        self.ranks: tuple[int, ...] = tuple(ranks) if rank is None else (rank,)


class Aborted(dist.DistError):
    """The communicators of this rank were aborted, because another rank failed."""


class WaitEnded(dist.DistError):
    """Waiting for another rank ended without the awaited result."""


_state: Ranks | None = None
_call: ContextVar[str] = ContextVar("autoplan_call", default="")


def init_process_group(backend: str | None = None, *, timeout_s: float | None = None, **options: Any) -> None:
    """Call ``torch.distributed.init_process_group`` with this module's timeout, and watch for failures.

    Args:
        backend: "gloo", "nccl", ...; by default torch's choice for the machine.
        timeout_s: see ``timeout_of``.
        options: passed on (rank, world_size, store, init_method, device_id, ...).
    """
    with connections.noted():
        dist.init_process_group(backend, timeout=timeout_of(timeout_s), **options)
    if (endpoint := private.store_endpoint(private.default_store())) is not None:
        connections.spare(endpoint[1])
    watch(timeout_s)


def watch(timeout_s: float | None = None) -> None:
    """Watch for failures of other ranks and set the timeout, in an existing process group. Call it on every rank.

    ``init_process_group`` does it. Existing groups keep their timeouts.

    Raises:
        RankFailure: a rank did not come within the timeout.
    """
    global _state
    timeout = timeout_of(timeout_s)
    private.set_timeout(timeout)
    store = private.default_store()
    if _state is not None and _state.store is store:
        _state.timeout_s = timeout.total_seconds()
        return
    turn = 0 if _state is None else _state.turn + 1
    if _state is not None:
        _end_watch(_state)
    state = Ranks(store, dist.get_rank(), dist.get_world_size(), timeout.total_seconds(), turn)
    if _call.get():
        state.begin(_call.get())
    if state.world > 1:
        _exchange_addresses(state)
    _state = state
    if state.world > 1:
        thread = threading.Thread(target=_watch, args=(state,), name="autoplan-failures", daemon=True)
        thread.start()
        atexit.register(_exit, state, thread)
        if not isinstance(sys.excepthook, _Hook):
            sys.excepthook = _Hook(sys.excepthook)


@dataclass(frozen=True)
class _Hook:
    """A sys.excepthook that tells the other ranks of an exception that ends this rank's script, then calls `before`."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(self, kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        try:
            if _state is not None:
                _uncaught(_state, exc)
        finally:
            self.before(kind, exc, trace)


def _exchange_addresses(state: Ranks) -> None:
    """Learn through the store where the other ranks answer. The store is not needed afterwards."""
    endpoint = private.store_endpoint(state.store)
    try:
        host = route_to(*endpoint) if endpoint else socket.gethostbyname(socket.gethostname())
    except OSError:
        host = "127.0.0.1"
    state.listener = Listener(host, state.answer, backlog=min(state.world, 1024))
    try:
        mine = state.listener.address.to_json()
        texts = exchange_texts(state.store, state.rank, state.world, f"{_ADDRESS}/{state.turn}", mine, state.timeout_s)
    except BaseException:
        state.listener.close()
        raise
    state.addresses = {r: Address.from_json(text) for r, text in enumerate(texts)}
    hosts = {a.host: rank for rank, a in reversed(state.others.items())}  # host -> its first rank
    state.ask({r: state.addresses[r] for r in sorted(hosts.values())[:_HOSTS_TRIED]}, GRACE_S)


def exchange_texts(store: Any, rank: int, world: int, name: str, text: str, timeout_s: float) -> list[str | bytes]:
    """Return every rank's text under `name`, in rank order, through a key-value store; needs no process group.

    Raises:
        RankFailure: a rank did not come within the timeout, or the store is gone.
    """
    keys = [f"{name}/{other}" for other in range(world)]
    # a call to the store of a stopped process would never return
    timer = threading.Timer(timeout_s + GRACE_S, private.break_store, (store,))
    timer.daemon = True
    timer.start()
    try:
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=timeout_s))
        return list(store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))
    except RuntimeError as error:
        raise _missing(store, keys, timeout_s, error) from error
    finally:
        timer.cancel()


def _missing(store: Any, keys: list[str], timeout_s: float, error: RuntimeError) -> RankFailure:
    with contextlib.suppress(RuntimeError):
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        late = f"did not begin to watch for failures within {timeout_s:g} s"
        if len(absent) == 1:
            return RankFailure(absent[0], late)
        return RankFailure(None, f"ranks {', '.join(map(str, absent))} {late}", absent)
    return RankFailure(0, f"the key-value store, which rank 0 usually hosts, is gone or silent: {_describe(error)}")


def _watch(state: Ranks) -> None:
    """Run the watch thread of a rank: notice that the next rank is gone, and log news that no call may ask for."""
    told, warned, since = False, False, time.monotonic()
    host_since: float | None = None
    while not state.stop.wait(POLL_S):
        news = state.known.first(exits=False)
        if news is not None and not told and state.ended is None:
            # If the main thread is stuck in a device's queue and the process is ended from outside, this line is the
            # only report.
            logger.error("%s", _failure(news))
            told = True
            # passed on first: where this rank's connections break, torch's watchdog ends processes that know nothing
            with contextlib.suppress(OSError):
                state.tell()
            _abort(state)
        ring = (r % state.world for r in range(state.rank + 1, state.rank + state.world))
        following = next((r for r in ring if not state.known.explains(r)), None)
        if following is not None:
            answer = state.ask({following: state.addresses[following]}, ANSWER_S)[following]
            if answer is Silence.GONE and not state.known.explains(following):
                state.note_gone([following])
                state.tell()
            elif answer is not Silence.NO_ANSWER:
                since, warned = time.monotonic(), False
            elif time.monotonic() - since > SILENCE_NOTE_S and not warned:
                warned = True
                quiet_s = time.monotonic() - since
                logger.warning("rank %d has not answered for %.0f s%s", following, quiet_s, state.last(following))
        host_since = _watch_host(state, host_since)


def _abort(state: Ranks) -> None:
    """Free a main thread that waits for its device in a collective to which another rank will not come."""
    groups = private.nccl_groups()
    if not groups:
        return  # gloo raises by itself
    state.aborted = True  # set first: the main thread continues at once
    try:
        private.abort_communicators(groups)
    except RuntimeError as exc:
        logger.error("the communicators of rank %d could not be aborted: %s", state.rank, _describe(exc))


def _check_whole() -> None:
    """Raise Aborted if the communicators were aborted: results of collectives are then worthless."""
    if _state is not None and _state.aborted:
        raise Aborted("the communicators of this rank were aborted")


def _watch_host(state: Ranks, since: float | None) -> float | None:
    """Free a main thread from a call to the store of a stopped rank 0, which would never return.

    This happens only if the call into autoplan has lasted longer than the timeout and rank 0 was silent for half of it.
    Return the time since when rank 0 has been silent.
    """
    now = time.monotonic()
    if state.rank == 0 or not state.call or now - state.since < state.timeout_s / 2:
        return None
    if state.ask({0: state.addresses[0]}, ANSWER_S)[0] is not Silence.NO_ANSWER:
        return None
    since = since or now
    if now - since > state.timeout_s / 2 and now - state.since > state.timeout_s + GRACE_S:
        private.break_store(state.store)
    return since


def _exit(state: Ranks, thread: threading.Thread) -> None:
    if state is not _state:
        return  # a later process group replaced it
    if state.rank not in state.known.left:
        ends = f"it exited (sys.exit, or its script ended) after {state.after or 'the start'}"
        state.known.add(News((state.rank,), NewsKind.EXITED, ends))
    with contextlib.suppress(OSError):
        state.tell()
    _end_watch(state)
    thread.join(3 * ANSWER_S)
    _give_back(state)


def give_back_at_exit() -> None:
    """Destroy the default process group when the script ends, because autoplan made it."""
    if _state is not None:
        _state.made_here = True
        if _state.world == 1:  # nobody is watched
            atexit.register(_give_back, _state)


def _give_back(state: Ranks) -> None:
    """Destroy the groups that were made here; without waiting if a rank failed or a collective does not end."""
    if state is not _state or not dist.is_initialized():
        return  # already gone, after a failure or by the caller
    try:
        failed = state.ended is not None or state.known.first(exits=False) is not None
        if failed or not private.device_settles(GRACE_S):
            private.abort_process_groups()
        else:
            private.give_back_groups(state.made_here)
    except RuntimeError as exc:  # the script has ended, and its exit status is its own
        logger.warning("the process groups of rank %d could not be given back: %s", state.rank, _describe(exc))


def _end_watch(state: Ranks) -> None:
    state.stop.set()
    if state.listener is not None:
        state.listener.close()


def _after_fork() -> None:
    """Close a forked child's copy of the parent's port; the child never speaks for the parent."""
    global _state
    if _state is not None and _state.listener is not None:
        _state.listener.drop()
    _state = None
    connections.forget()


os.register_at_fork(after_in_child=_after_fork)


def _uncaught(state: Ranks, exc: BaseException) -> None:
    """Handle an exception that ends the script: tell the other ranks, or log whose failure it comes from."""
    if state.ended is not None or isinstance(exc, RankFailure):
        return
    with _ended_later():
        failure = _failure_of(exc, None)
        state.ended = (failure.rank, failure.reason, failure.ranks)
        state.known.leave([state.rank])
        if failure.rank != state.rank:
            logger.error("%s", failure)
        state.tell()


def _note_raised(state: Ranks, exc: BaseException) -> RankFailure:
    place = activity.of_traceback(exc.__traceback__)
    reason = f"{_describe(exc)} [{state.where(place)}]"
    state.known.add(News((state.rank,), NewsKind.RAISED, reason))
    with contextlib.suppress(OSError):
        state.tell()
    return RankFailure(state.rank, reason)


def _failure(news: News) -> RankFailure:
    if len(news.ranks) == 1:
        return RankFailure(news.ranks[0], news.reason)
    who = f"ranks {', '.join(map(str, news.ranks))} failed: " if news.ranks else ""
    return RankFailure(None, who + news.reason, news.ranks)


@contextlib.contextmanager
def guard(
    rank: int | None = None, call: str | None = None, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn any exception inside into a RankFailure that names the rank where it began, and tell the other ranks.

    Afterwards no collective works in this process: its connections are closed, so that the other ranks fail at once.

    Args:
        rank: this process's rank; default: its rank in the process group.
        call: what the rank does inside, for the messages of all ranks; calls are counted ("step 12").
        passing: classes of argument errors, which pass unchanged. If any are given and there are no other ranks, every
            Exception passes.

    Raises:
        RankFailure: for every Exception inside, which is its cause. An AgreedError or an error marked by ``agreed``,
            which all ranks raise alike, passes through, and collectives go on working. Other BaseExceptions
            (KeyboardInterrupt, SystemExit) are reported to the other ranks and pass through.
    """
    with _calling(call):
        try:
            _check_whole()
            yield
            _check_whole()
        except RankFailure:
            raise
        except BaseException as exc:
            alone = not dist.is_initialized() or dist.get_world_size() == 1
            if is_agreed(exc) or isinstance(exc, passing) or (passing and alone and isinstance(exc, Exception)):
                raise
            with _ended_later():
                failure = _failure_of(exc, rank)
                _leave(failure)
            if isinstance(exc, Exception):
                raise failure from exc
            raise


def guarded(call: str, passing: tuple[type[Exception], ...] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Run every call of a function under ``guard(call=call, passing=passing)``.

    In a script under torch.compile it runs as it is: its collectives and messages are no part of a graph.
    """

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @_uncompiled
        @functools.wraps(fn)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with guard(call=call, passing=passing):
                return fn(*args, **kwargs)

        return inside

    return decorate


def _uncompiled(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    disable: Any = torch.compiler.disable  # which has no types
    made: Callable[_P, _R] = disable(fn, reason="autoplan compiles blocks by itself, compile= of autoplan.parallelize")
    return made


@contextlib.contextmanager
def _calling(call: str | None) -> Iterator[None]:
    """Note this rank's call, for ranks that ask. An inner call is part of the outer one."""
    if call is None or _call.get():
        yield
        return
    token = _call.set(call)
    if _state is not None:
        _state.begin(call)
    try:
        yield
    finally:
        _call.reset(token)
        if _state is not None:
            _state.end()


@contextlib.contextmanager
def _ended_later() -> Iterator[None]:
    """Delay SIGTERM until the code inside is done.

    torchrun sends it as soon as one rank has ended, and this rank is about to report why. Applies only in the main
    thread and if SIGTERM has no handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _failure_of(exc: BaseException, rank: int | None) -> RankFailure:
    state = _state
    if state is None or state.world == 1:
        return RankFailure(rank if state is None or rank is not None else state.rank, _describe(exc))
    if state.ended is not None and not dist.is_initialized():
        return RankFailure(*state.ended)  # everything after a failure fails for the same reason
    if not is_broken_collective(exc) and not state.aborted:  # after an abort the device may report anything
        return _note_raised(state, exc)
    place = activity.of_traceback(exc.__traceback__)
    other = _failure(state.find_out(GRACE_S))
    what = _describe(exc).partition(_GLOO_ADVICE)[0]
    seen = f"{other.reason} [seen by rank {state.rank} {state.where(place)} as {what}]"
    return RankFailure(other.rank, seen, other.ranks)


def is_broken_collective(exc: BaseException | None) -> bool:
    """Return True if ``exc`` or a cause of it says that another rank is gone or silent, not that this rank failed."""
    while exc is not None:
        if isinstance(exc, dist.DistError):
            return True
        if isinstance(exc, RuntimeError) and any(mark in str(exc) for mark in _GLOO_MARKS):
            return True
        exc = exc.__cause__
    return False


def _leave(failure: RankFailure) -> None:
    """Log the reason, tell the other ranks, and close this rank's connections.

    A process that is alone has nobody to tell: its group stays, so that a notebook can go on after the error.
    """
    state = _state
    if dist.is_initialized() and dist.get_world_size() == 1:
        return
    if state is not None and state.world > 1:
        state.ended = (failure.rank, failure.reason, failure.ranks)
        if failure.rank != state.rank:
            logger.error("%s", failure)  # now: the launcher may end the ranks before the exception is shown
        state.known.leave([state.rank])
        with contextlib.suppress(OSError):
            state.tell()
        if not state.aborted and private.nccl_groups():
            # torch's watchdog ends processes whose NCCL connections break: let their own watch act first
            time.sleep(HEAD_START_S + POLL_S * (state.hops - 1))
    connections.shut_down()
    with contextlib.suppress(Exception):
        private.abort_process_groups()


@contextlib.contextmanager
def work_of_first(what: str) -> Iterator[None]:
    """Run work of rank 0 (the body) that takes as long as it takes; the other ranks wait at the entry until it is done.

    Enter it on every rank, before the collective that hands out the result. Waiting is not a collective, so no timeout
    applies: the others ask rank 0, and log a line after WAIT_NOTE_S, then after twice as long each time.

    Raises:
        DistError: (which ``guard`` explains) rank 0 is gone or has not answered within the timeout (or LEAST_SILENCE_S,
            if that is longer), or a rank failed.
    """
    state = _state
    if state is None or state.world == 1 or 0 not in state.addresses:
        yield
    elif state.rank == 0:
        try:
            yield
        finally:
            state.works_done += 1
    else:
        state.works_awaited += 1
        if state.addresses[0].host in state.known.reached:  # otherwise rank 0 cannot be asked, and the collective waits
            state.waits = True
            _await_first(state, what)
            state.waits = False
        yield


def _await_first(state: Ranks, what: str) -> None:
    begin = heard = time.monotonic()
    note_s, pause_s, asked = WAIT_NOTE_S, _LOOK_S[0], 0.0
    while True:
        brief = time.monotonic() - asked < max(1.0, _DOING_S_PER_RANK * state.world)
        answer = state.ask({0: state.addresses[0]}, ANSWER_S, brief)[0]
        now = time.monotonic()
        asked = asked if brief else now
        if not isinstance(answer, Silence):
            heard = now
            if answer["works_done"] >= state.works_awaited:
                return
        failed = state.known.first(exits=True) is not None
        if failed or answer is Silence.GONE or now - heard > max(state.timeout_s, LEAST_SILENCE_S):
            raise WaitEnded(f"waited {now - begin:.0f} s for rank 0: {what}")
        if now - begin > note_s:
            note_s *= 2
            silent = f"; it has not answered for {now - heard:.0f} s" if now - heard > 1 else ""
            logger.warning("rank %d waits for rank 0: %s, %.0f s%s", state.rank, what, now - begin, silent)
        state.stop.wait(pause_s)
        pause_s = min(2 * pause_s, max(_LOOK_S[1], _LOOK_S_PER_RANK * state.world))


def _describe(exc: BaseException) -> str:
    """Return type and message of an exception; for a RuntimeError with a cause (a pipeline's wrapper), the cause's."""
    while isinstance(exc, RuntimeError) and exc.__cause__ is not None:
        exc = exc.__cause__
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"
