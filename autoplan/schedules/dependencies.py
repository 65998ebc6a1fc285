"""Dependencies between the actions of a schedule, and an order of all actions that respects them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError
from autoplan.schedules.graph import ActionResult, deadlock, shown
from autoplan.schedules.orders import Action, B, F, I, W

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


class _Visit:
    """A walk over the ranks: each rank advances until it waits for another.

    Plain lists, and results (`graph.ActionResult`) as numbers: a search visits millions of actions.
    """

    def __init__(self, table: Sequence[Sequence[Action]]) -> None:
        self.table = table
        # keyed by micro-batch too: with both directions, the home of a chunk depends on the direction
        self.home = {(chunk, batch): rank for rank, row in enumerate(table) for _, chunk, batch, _ in row}
        known = sorted({chunk for chunk, _ in self.home})
        self.num_chunks = len(known)
        if known != list(range(self.num_chunks)):
            raise ScheduleError(f"the chunks of a schedule are counted from 0 without a gap, not {known}")
        self.num_batches: int = 1 + max((batch for _, batch in self.home), default=0)
        self.made = [_NOT_YET] * (2 * self.num_chunks * self.num_batches)  # by result: the step that makes it
        self.position = [0] * len(table)
        self.waiting: dict[int, int] = {}  # result -> the rank that waits for it
        self.joined: list[list[int]] = [[] for _ in table]  # made by actions that end with the next one
        self.ready = deque(range(len(table)))
        self.order = VisitOrder([], [], [], [], [], len(table), self.num_chunks, ())

    def run(self) -> VisitOrder:
        """Visit all actions and return their order. Raises ScheduleError if some can never run."""
        rows = [self._needs(rank, row) for rank, row in enumerate(self.table)]
        slots = [self._slots(row) for row in self.table]
        while self.ready:
            rank = self.ready.popleft()
            self._advance(rank, rows[rank], slots[rank])
        stuck = [f"rank {r} at {row[at]}" for r, (row, at) in enumerate(zip(self.table, self.position, strict=True))
                 if at < len(row)]  # fmt: skip
        if stuck:
            missing = ", ".join(shown(self._result(number)) for number in self.waiting)
            raise ScheduleError(
                f"the schedule never finishes: waiting are {', '.join(stuck)}, for {missing}; {deadlock(self.table)}"
            )
        return replace(self.order, slots=tuple(tuple(sorted(Counter(row).items())) for row in slots))

    def _result(self, number: int) -> ActionResult:
        forward, place = divmod(number, self.num_chunks * self.num_batches)
        return (bool(forward), *divmod(place, self.num_batches))

    def _needs(self, rank: int, row: Sequence[Action]) -> list[tuple[int, int, int, bool]]:
        """Return of every action of a rank the result that it needs, the lag of that, what it makes, and `joined`.

        The result is that of `graph.needed_by`, or _NOTHING.
        """
        chunks, batches, home = self.num_chunks, self.num_batches, self.home
        out = []
        for kind, chunk, batch, joined in row:
            at, lag = chunk * batches + batch, NO_LAG  # the gradients of this chunk
            if kind is F:
                makes = at + chunks * batches
                needed = makes - batches if chunk else _NOTHING
                if chunk and home.get((chunk - 1, batch)) != rank:
                    lag = chunk
            elif kind is W:
                needed, makes = at, _NOTHING
            elif chunk == chunks - 1:
                needed, makes = at + chunks * batches, at
            else:
                needed, makes = at + batches, at
                if home.get((chunk + 1, batch)) != rank:
                    lag = 1 + chunks + chunk
            out.append((needed, lag, makes, joined))
        return out

    @staticmethod
    def _slots(row: Sequence[Action]) -> list[int]:
        """Return the slot of every action of a rank."""
        # the gradients of a chunk are complete after its last weight gradient, wherever that runs
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        out = []
        for at, (kind, chunk, _, _) in enumerate(row):
            if kind is F:
                first.setdefault(chunk, at)
            elif kind is not I:
                last[chunk] = at
            inner = _FORWARD if kind is F else _BACKWARD if kind is B else _INPUT if kind is I else _WEIGHT
            out.append(chunk * NUM_SLOTS + inner)
        for at in (*first.values(), *last.values()):
            out[at] += 1
        return out

    def _advance(self, rank: int, row: Sequence[tuple[int, int, int, bool]], slots: Sequence[int]) -> None:
        """Visit the next actions of `rank`, until it has to wait."""
        made, waiting, joined, order = self.made, self.waiting, self.joined[rank], self.order
        start = at = self.position[rank]
        step = len(order.what)
        for at in range(start, len(row)):
            needed, lag, makes, with_next = row[at]
            dependency = made[needed] if needed >= 0 else -1
            if needed >= 0 and dependency < 0:
                waiting[needed] = rank
                break
            if makes >= 0:
                joined.append(makes)
            while joined and not with_next:
                result = joined.pop()
                made[result] = step
                if result in waiting:
                    self.ready.append(waiting.pop(result))
            order.dependency_list.append(dependency)
            order.lag_list.append(lag)
            step += 1
        else:
            at = len(row)
        self.position[rank] = at
        order.what.extend(self.table[rank][start:at])
        order.slot_list.extend(slots[start:at])
        order.rank_list.extend([rank] * (at - start))
