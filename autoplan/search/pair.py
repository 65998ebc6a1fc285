"""A second process that does half of the work of a search, where the machine has a second core.

The helper is a fork of the planner: both do the same search in step, and know the same of every candidate. What takes
long and depends on little is shared: each does its half and sends what it found, so that both know all of it. So no
state has to be sent, and the answer is that of one process, to the last bit: what a share finds depends neither on who
does it nor on the moment. Only the clock does, so the planner's readings decide for both.

The helper never outlives the search. If it dies, stands still, or does something else than the planner,
`LostHelperError` says so, and the search is done again without one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from autoplan.config.planning import PROCESSES_VARIABLE

PLANNER, HELPER = 0, 1  # the two halves of what is shared

_T = TypeVar("_T")
# Libraries whose threads hold locks, or wait for work, that a fork would not have.
_THREADED = ("torch", "jax", "tensorflow")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds that it may use in how many, or `max`
_LOAD = Path("/proc/loadavg")  # its fourth field begins with the number of threads that run, or could
_LOOKS, _APART_S = 3, 0.002  # something may run for a moment only
_STUCK_S = 30.0  # a helper that is waited for and took no processor time for so long is stopped, or waits for a lock
_STAT = "/proc/{}/stat"  # fields 14 and 15 of a process: its processor time


class LostHelperError(RuntimeError):
    """The helper died, or is not where the planner is."""


class SearchPair:
    """The two processes of a search, or one that does both halves.

    Attributes:
        waited_s: seconds that this process waited for the other one.
    """

    def __init__(self) -> None:
        self.waited_s: float = 0.0
        self._mine: int | None = None  # the half of this process; None: it is alone, and does both
        self._child = 0
        self._other: Connection | None = None

    def start(self, help_search: Callable[[], None]) -> None:
        """Start a helper that runs `help_search`; without a second core, or if none can be started, go on alone."""
        if not helper_pays():
            return
        with _no_interrupt():
            mine, others = multiprocessing.Pipe()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads do not go on
                    child = os.fork()
            except OSError:  # no more processes, or no memory
                mine.close()
                others.close()
                return
            if child == 0:
                mine.close()
                self._mine, self._other = HELPER, others
                _run_helper(help_search)
            others.close()
            self._mine, self._other, self._child = PLANNER, mine, child

    def close(self) -> None:
        """End the helper, if there is one; from now on this process is alone."""
        child, self._child, self._mine = self._child, 0, None
        if child:
            with suppress(ProcessLookupError, ChildProcessError):  # others in this process may have waited for it
                os.kill(child, signal.SIGKILL)  # it has nothing that must be finished
                os.waitpid(child, 0)
        if self._other is not None:
            self._other.close()
        self._other = None

    def share(
        self,
        items: Sequence[_T],
        halves: Sequence[int],
        work: Callable[[_T], object],
        read: Callable[[_T], Any],
        write: Callable[[_T, Any], object],
    ) -> None:
        """Do some work on every item, once.

        Args:
            halves: which process does each item.
            work: changes what this process knows, of this item alone.
            read: what it changed, as data.
            write: takes what the other process read.

        Raises:
            LostHelperError: the helper is gone.
        """
        for item, half in zip(items, halves, strict=True):
            if self._mine in (None, half):
                work(item)
        if self._mine is None or not items:
            return
        mine = [read(item) for item, half in zip(items, halves, strict=True) if half == self._mine]
        others = [item for item, half in zip(items, halves, strict=True) if half != self._mine]
        for item, found in zip(others, self._exchange(mine, len(items)), strict=True):
            write(item, found)

    def agree(self, answer: bool) -> bool:
        """Return the planner's answer, in both processes."""
        if self._mine == PLANNER:
            self._send(answer)
        elif self._mine == HELPER:
            return self._received(bool)
        return answer

    def _exchange(self, mine: list[Any], number: int) -> list[Any]:
        if self._mine == PLANNER:  # it says first where it is: so none of both waits for ever
            self._send(number)
            found = self._received(list)
            self._send(mine)
            return found
        if self._received(int) != number:
            raise LostHelperError("the helper of the search is not where the planner is")
        self._send(mine)
        return self._received(list)

    def _send(self, value: object) -> None:
        try:
            assert self._other is not None
            self._other.send(value)
        except OSError as error:
            raise LostHelperError("the helper of the search is gone") from error

    def _received(self, kind: type[_T]) -> _T:
        began = time.perf_counter()
        try:
            assert self._other is not None
            self._wait_while_helped(self._other)
            found = self._other.recv()
        except (OSError, EOFError) as error:
            raise LostHelperError("the helper of the search is gone") from error
        finally:
            self.waited_s += time.perf_counter() - began
        if type(found) is not kind:
            raise LostHelperError("the helper of the search is not where the planner is")
        return found

    def _wait_while_helped(self, other: Connection) -> None:
        """Wait in the planner until the helper has sent something, or does not run any more."""
        if self._mine != PLANNER:
            return
        used: tuple[str, ...] | None = None
        since = time.perf_counter()
        while not other.poll(1.0):
            now = _processor_time(self._child)
            if now != used:
                used, since = now, time.perf_counter()
            elif time.perf_counter() - since > _STUCK_S:
                raise LostHelperError("the helper of the search does not run")


def _processor_time(process: int) -> tuple[str, ...]:
    """Return the processor time that a process has used, in ticks; () where that is not known."""
    try:
        fields = Path(_STAT.format(process)).read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(fields[11:13])


def even_halves(keys: Sequence[Hashable], weights: Sequence[float], known: MutableMapping[Hashable, int]) -> list[int]:
    """Return the half of every item: items with the same key have the same, and both halves weigh much the same.

    Args:
        known: halves of keys that have one, added to.
    """
    loads, new = [0.0, 0.0], dict[Hashable, float]()
    for key, weight in zip(keys, weights, strict=True):
        if key in known:
            loads[known[key]] += weight
        else:
            new[key] = new.get(key, 0.0) + weight
    for key in sorted(new, key=lambda k: -new[k]):  # of equal ones the first
        known[key] = PLANNER if loads[PLANNER] <= loads[HELPER] else HELPER
        loads[known[key]] += new[key]
    return [known[key] for key in keys]


def helper_pays() -> bool:
    """Return True if this process can be forked and has a second core that is free.

    Where all cores are at work, two processes that wait for each other would be slower than one.
    `PROCESSES_VARIABLE` turns the helper off, or asks for it there, too.
    """
    asked = os.environ.get(PROCESSES_VARIABLE)
    if asked == "1" or not hasattr(os, "fork"):
        return False
    if threading.current_thread() is not threading.main_thread() or any(map(sys.modules.get, _THREADED)):
        return False
    return num_cores() >= 2 and (asked == "2" or has_free_core())


def num_cores() -> int:
    """Return how many cores this process may use at once."""
    affine = getattr(os, "sched_getaffinity", None)
    cores = len(affine(0)) if affine is not None else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return cores


def has_free_core() -> bool:
    """Return False if as many threads as there are cores on this machine want to run, where that is known."""
    try:
        for look in range(_LOOKS):
            if look:
                time.sleep(_APART_S)
            running = int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])
            if running < (os.cpu_count() or 1):
                return True
    except (OSError, ValueError, IndexError):
        return True
    return False


def _run_helper(help_search: Callable[[], None]) -> None:
    """Run the helper and end its process, without anything that the planner does at its end."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the planner, which ends the helper
        gc.freeze()  # what there is stays: looking at it would copy it
        help_search()
    except BaseException:
        os._exit(1)  # the planner finds the end of the pipe, and goes on alone
    os._exit(0)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back inside, so that no helper is started that nobody knows."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
