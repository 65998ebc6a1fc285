"""A second process that does half of the work of a search, where the machine has a second core.

The helper is a fork of the planner: both do the same search in step, and know the same of every candidate. What takes
long and depends on little is shared: each does its half and sends what it found, so that both know all of it. So no
state has to be sent, and the answer is that of one process, to the last bit: what a share finds depends neither on who
does it nor on the moment. Only the clock does, so the planner's readings decide for both. So who is done with its half
may also go on with the other one's.

The helper never outlives the search. If it dies, stands still, or does something else than the planner,
`LostHelperError` says so, and the search is done again without one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import struct
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
_TURN = struct.Struct("5q")  # share, then by process what is taken of its list from the front, and up to where it goes
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
        self._turns: _Turns | None = None

    def start(self, help_search: Callable[[], None]) -> None:
        """Start a helper that runs `help_search`; without a second core, or if none can be started, go on alone."""
        if not helper_pays():
            return
        with _no_interrupt():
            mine, others = multiprocessing.Pipe()
            try:
                self._turns = _Turns()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads do not go on
                    child = os.fork()
            except OSError:  # no more processes, files, or memory
                mine.close()
                others.close()
                self._close_turns()
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
        self._close_turns()

    def _close_turns(self) -> None:
        if self._turns is not None:
            self._turns.close()
        self._turns = None

    def share(
        self,
        items: Sequence[_T],
        halves: Sequence[int],
        work: Callable[[_T], object],
        read: Callable[[_T], Any],
        write: Callable[[_T, Any], object],
        *,
        by_either: bool = False,
    ) -> None:
        """Do some work on every item, once.

        Args:
            halves: which process does each item.
            work: changes what this process knows, of this item alone.
            read: what it changed, as data.
            write: takes what the other process read.
            by_either: items need nothing that one process alone has: who is done first goes on with the other's last.

        Raises:
            LostHelperError: the helper is gone.
        """
        if self._mine is None:
            for item in items:
                work(item)
            return
        lists = [[i for i, half in zip(items, halves, strict=True) if half == each] for each in (PLANNER, HELPER)]
        in_order = [*lists[PLANNER], *lists[HELPER]]  # the halves, each of which both processes have in the same order
        done: list[int] = []
        for at in self._places(self._mine, len(lists[PLANNER]), len(items), by_either):
            work(in_order[at])
            done.append(at)
        if not items:
            return
        found = self._exchange({at: read(in_order[at]) for at in done}, len(items))
        if sorted([*done, *found]) != list(range(len(items))):
            raise LostHelperError("the helper of the search is not where the planner is")
        for at in sorted(found):
            write(in_order[at], found[at])

    def _places(self, mine: int, num_planner: int, number: int, by_either: bool) -> Iterator[int]:
        """Yield the places, in the order of halves, of the items that this process does."""
        places = range(num_planner), range(num_planner, number)
        if by_either and number > 1 and self._turns is not None:
            yield from self._turns.taken(mine, places)
        else:
            yield from places[mine]

    def agree(self, answer: bool) -> bool:
        """Return the planner's answer, in both processes."""
        if self._mine == PLANNER:
            self._send(answer)
        elif self._mine == HELPER:
            return self._received(bool)
        return answer

    def _exchange(self, mine: dict[int, Any], number: int) -> dict[int, Any]:
        if self._mine == PLANNER:  # it says first where it is: so none of both waits for ever
            self._send(number)
            found = self._received(dict)
            self._send(mine)
            return found
        if self._received(int) != number:
            raise LostHelperError("the helper of the search is not where the planner is")
        self._send(mine)
        return self._received(dict)

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


class _Turns:
    """Who takes which item of a share: its own ones in order, then those of the other process from the last one on.

    What is taken already is a message in a pipe. Who reads it has the turn, until it is written back.
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self._number = 0  # of the share, in this process
        self._write((0, 0, 0, 0, 0))

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._out)
        os.close(self._in)

    def taken(self, mine: int, lists: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield what this process takes of the lists of both, until nothing is left."""
        self._number += 1
        while True:
            number, *marks = self._read()
            first, end = marks[:2], marks[2:]  # by process: what is left of its list
            if number != self._number:  # the other one is not here yet
                first, end = [0, 0], [len(each) for each in lists]
            at: int | None = None
            if first[mine] < end[mine]:
                at = lists[mine][first[mine]]
                first[mine] += 1
            elif first[1 - mine] < end[1 - mine]:
                end[1 - mine] -= 1
                at = lists[1 - mine][end[1 - mine]]
            self._write((self._number, *first, *end))
            if at is None:
                return
            yield at

    def _read(self) -> tuple[int, ...]:
        if not select.select([self._out], [], [], _STUCK_S)[0]:
            raise LostHelperError("the helper of the search, or the planner, ended in its turn")
        return _TURN.unpack(os.read(self._out, _TURN.size))

    def _write(self, marks: Sequence[int]) -> None:
        os.write(self._in, _TURN.pack(*marks))


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
