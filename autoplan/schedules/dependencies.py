"""Dependencies between the actions of a schedule, and an order of all actions that respects them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError
from autoplan.schedules.graph import ActionResult, deadlock, shown
from autoplan.schedules.orders import Action, ActionKind, B, F, I, W

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ScheduleError(AutoplanError):
    """Raised for action lists that can never finish, and for durations that do not fit the lists."""


# Durations differ by chunk, kind, and whether the action is the chunk's first forward or last backward: one more.
_FORWARD, _BACKWARD, _INPUT, _WEIGHT, NUM_SLOTS = 0, 2, 4, 5, 7
# A lag is a transfer to the next chunk (forward) or to the previous chunk (backward), by index; see VisitOrder.
NO_LAG = 0
_NOTHING = _NOT_YET = -1  # no result, or one that no step has made yet


@dataclass(frozen=True)
class VisitOrder:
    """The actions of all ranks in one order, in which every action comes after the action it waits for.

    Attributes:
        what: the action of every step.
        rank_list: the rank of every step.
        dependency_list: of every step, the position of the step that must have ended, or -1.
        lag_list: the transfer to every step; 0: none; 1 + c: chunk c to c + 1; 1 + num_chunks + c: chunk c + 1 to c.
        slot_list: of every step, chunk * NUM_SLOTS + kind.
        slots: per rank (slot, number of actions).
    """

    what: list[Action]
    rank_list: list[int]
    dependency_list: list[int]
    lag_list: list[int]
    slot_list: list[int]
    num_ranks: int
    num_chunks: int
    slots: tuple[tuple[tuple[int, int], ...], ...]

    # Columns as arrays, where numpy goes through them.

    @cached_property
    def dependency_of(self) -> NDArray[np.int64]:
        """The dependency of every step."""
        return _column(self.dependency_list)

    @cached_property
    def lag_of(self) -> NDArray[np.int64]:
        """The transfer of every step."""
        return _column(self.lag_list)

    @cached_property
    def slot_of(self) -> NDArray[np.int64]:
        """The slot of every step."""
        return _column(self.slot_list)


def _column(values: list[int]) -> NDArray[np.int64]:
    import numpy as np  # the command line names schedules without it

    return np.array(values, dtype=np.int64)


def visit_order(table: Sequence[Sequence[Action]]) -> VisitOrder:
    """Return an order of all actions that respects their dependencies. Raises ScheduleError if there is none."""
    return _Visit(table).run()


# Of one kind of action on one chunk, for micro-batch 0: the result that it needs, the lag of that, and the result that
# it makes, each by number, and its slot. The results of other micro-batches are as many numbers further.
_Step = tuple[int, int, int, int]


class _Visit:
    """A walk over the ranks: each rank advances until it waits for another.

    Plain lists, and results (`graph.ActionResult`) as numbers: a search visits millions of actions.
    """

    def __init__(self, table: Sequence[Sequence[Action]]) -> None:
        self.table = table
        held = [set(map(itemgetter(1), row)) for row in table]
        known = sorted(set().union(*held))
        self.num_chunks = len(known)
        if known != list(range(self.num_chunks)):
            raise ScheduleError(f"the chunks of a schedule are counted from 0 without a gap, not {known}")
        # with both directions, the home of a chunk depends on the micro-batch
        self.homes: dict[tuple[int, int], int] | None = None
        if sum(map(len, held)) > self.num_chunks:
            self.homes = {(chunk, batch): rank for rank, row in enumerate(table) for _, chunk, batch, _ in row}
        self.held = held
        self.num_batches: int = 1 + max((max(map(itemgetter(2), row)) for row in table if row), default=0)
        self.made = [_NOT_YET] * (2 * self.num_chunks * self.num_batches)  # by result: the step that makes it
        self.position = [0] * len(table)
        self.waiting: dict[int, int] = {}  # result -> the rank that waits for it
        self.ready = deque(range(len(table)))
        self.order = VisitOrder([], [], [], [], [], len(table), self.num_chunks, ())
        self.slots: list[tuple[tuple[int, int], ...]] = [()] * len(table)

    def run(self) -> VisitOrder:
        """Visit all actions and return their order. Raises ScheduleError if some can never run."""
        walks = [self._walk(rank, row) for rank, row in enumerate(self.table)]
        while self.ready:
            next(walks[self.ready.popleft()], None)
        stuck = [f"rank {r} at {row[at]}" for r, (row, at) in enumerate(zip(self.table, self.position, strict=True))
                 if at < len(row)]  # fmt: skip
        if stuck:
            missing = ", ".join(shown(self._result(number)) for number in self.waiting)
            raise ScheduleError(
                f"the schedule never finishes: waiting are {', '.join(stuck)}, for {missing}; {deadlock(self.table)}"
            )
        return replace(self.order, slots=tuple(self.slots))

    def _result(self, number: int) -> ActionResult:
        forward, place = divmod(number, self.num_chunks * self.num_batches)
        return (bool(forward), *divmod(place, self.num_batches))

    def _steps(self, rank: int, row: Sequence[Action]) -> list[_Step]:
        """Return of every action of a rank what it needs (`graph.needed_by`), or _NOTHING, and makes."""
        each = {chunk: {kind: self._step(rank, kind, chunk) for kind in ActionKind} for chunk in self.held[rank]}
        found = [each[chunk][kind] for kind, chunk, _, _ in row]
        homes = self.homes
        if homes is None:
            return found
        for at, (kind, chunk, batch, _) in enumerate(row):
            needed, lag, makes, slot = found[at]
            if lag and homes.get((chunk - 1 if kind is F else chunk + 1, batch)) == rank:
                found[at] = needed, NO_LAG, makes, slot
        return found

    def _step(self, rank: int, kind: ActionKind, chunk: int) -> _Step:
        """Return what an action needs and makes; with both directions, with the lag of a result of another rank."""
        chunks, batches = self.num_chunks, self.num_batches
        at, held = chunk * batches, self.held[rank] if self.homes is None else ()
        slot = chunk * NUM_SLOTS
        if kind is F:
            needed = at + (chunks - 1) * batches if chunk else _NOTHING
            return needed, chunk if chunk and chunk - 1 not in held else NO_LAG, at + chunks * batches, slot + _FORWARD
        if kind is W:
            return at, NO_LAG, _NOTHING, slot + _WEIGHT
        slot += _BACKWARD if kind is B else _INPUT
        if chunk == chunks - 1:
            return at + chunks * batches, NO_LAG, at, slot
        return at + batches, 1 + chunks + chunk if chunk + 1 not in held else NO_LAG, at, slot

    def _walk(self, rank: int, row: Sequence[Action]) -> Iterator[None]:
        """Visit the actions of `rank`; yield where it has to wait."""
        made, waiting, ready, order = self.made, self.waiting, self.ready, self.order
        dependencies, lags, steps = order.dependency_list, order.lag_list, self._steps(rank, row)
        slots = _slots(row, steps)
        self.slots[rank] = tuple(sorted(Counter(slots).items()))
        joined: list[int] = []  # made by actions that end with the next one
        start, step = 0, len(dependencies)
        for at, ((_, _, batch, with_next), (needed, lag, makes, _)) in enumerate(zip(row, steps, strict=True)):
            dependency = -1
            if needed >= 0:
                dependency = made[needed + batch]
                if dependency < 0:
                    waiting[needed + batch] = rank
                    self._visited(rank, slots, start, at)
                    yield
                    dependency, start, step = made[needed + batch], at, len(dependencies)
            result = makes + batch
            if with_next or joined:
                joined += [result] if makes >= 0 else []
                while joined and not with_next:
                    made[result := joined.pop()] = step
                    if result in waiting:
                        ready.append(waiting.pop(result))
            elif makes >= 0:
                made[result] = step
                if result in waiting:
                    ready.append(waiting.pop(result))
            dependencies.append(dependency)
            lags.append(lag)
            step += 1
        self._visited(rank, slots, start, len(row))

    def _visited(self, rank: int, slots: Sequence[int], start: int, end: int) -> None:
        """Add what `_walk` knows of some actions only when it stops."""
        self.position[rank] = end
        self.order.what.extend(self.table[rank][start:end])
        self.order.slot_list.extend(slots[start:end])
        self.order.rank_list.extend([rank] * (end - start))


def _slots(row: Sequence[Action], steps: Sequence[_Step]) -> list[int]:
    """Return the slot of every action of a rank: another one for the first forward and last backward of a chunk."""
    # the gradients of a chunk are complete after its last weight gradient, wherever that runs
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, (kind, chunk, _, _) in enumerate(row):
        if kind is F:
            first.setdefault(chunk, at)
        elif kind is not I:
            last[chunk] = at
    out = [slot for _, _, _, slot in steps]
    for at in (*first.values(), *last.values()):
        out[at] += 1
    return out
