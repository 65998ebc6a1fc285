"""Dependencies between the actions of a schedule, and an order of all actions that respects them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from autoplan.errors import AutoplanError
from autoplan.schedules.graph import ActionResult, deadlock, needed_by, shown
from autoplan.schedules.orders import Action, B, F, I, W

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ScheduleError(AutoplanError):
    """Raised for action lists that can never finish, and for durations that do not fit the lists."""


# Durations differ by chunk, kind, and whether the action is the chunk's first forward or last backward.
_SLOTS = {(F, False): 0, (F, True): 1, (B, False): 2, (B, True): 3, (I, False): 4, (W, False): 5, (W, True): 6}
NUM_SLOTS = len(_SLOTS)
# A lag is a transfer to the next chunk (forward) or to the previous chunk (backward), by index; see TimedAction.
NO_LAG = 0


class TimedAction(NamedTuple):
    """One action in the order of visits."""

    rank: int
    dependency: int  # position of the step that must have ended, or -1
    lag: int  # the transfer; 0: none; 1 + c: chunk c to c + 1; 1 + num_chunks + c: chunk c + 1 back to c
    slot: int  # chunk * NUM_SLOTS + kind


@dataclass(frozen=True)
class VisitOrder:
    """The actions of all ranks in one order, in which every action comes after the action it waits for."""

    steps: tuple[TimedAction, ...]
    what: tuple[Action, ...]
    num_ranks: int
    num_chunks: int
    slots: tuple[tuple[tuple[int, int], ...], ...]  # per rank: (slot, number of actions)

    # Columns of the steps, for simulations: lists where Python goes through them, arrays where numpy does.

    @cached_property
    def rank_list(self) -> list[int]:
        """The rank of every step."""
        return [step.rank for step in self.steps]

    @cached_property
    def dependency_list(self) -> list[int]:
        """The dependency of every step."""
        return [step.dependency for step in self.steps]

    @cached_property
    def dependency_of(self) -> NDArray[np.int64]:
        """The dependency of every step."""
        return _column(self.dependency_list)

    @cached_property
    def lag_of(self) -> NDArray[np.int64]:
        """The transfer of every step."""
        return _column([step.lag for step in self.steps])

    @cached_property
    def slot_of(self) -> NDArray[np.int64]:
        """The slot of every step."""
        return _column([step.slot for step in self.steps])


def _column(values: list[int]) -> NDArray[np.int64]:
    import numpy as np  # the command line names schedules without it

    return np.array(values, dtype=np.int64)


def visit_order(table: Sequence[Sequence[Action]]) -> VisitOrder:
    """Return an order of all actions that respects their dependencies. Raises ScheduleError if there is none."""
    return _Visit(table).run()


class _Visit:
    """A walk over the ranks: each rank advances until it waits for another.

    Plain lists: networkx takes 2.6 times as long for the same order of `action_graph`, and 0.2 s to import.
    """

    def __init__(self, table: Sequence[Sequence[Action]]) -> None:
        self.table = table
        # keyed by micro-batch too: with both directions, the home of a chunk depends on the direction
        self.home = {(a.chunk, a.micro_batch): rank for rank, row in enumerate(table) for a in row}
        known = sorted({chunk for chunk, _ in self.home})
        self.num_chunks = len(known)
        if known != list(range(self.num_chunks)):
            raise ScheduleError(f"the chunks of a schedule are counted from 0 without a gap, not {known}")
        # (rank, forward, chunk) -> positions of its first forward and of its last backward; the gradients of a chunk
        # are complete after its last weight gradient, wherever that runs
        self.edges: dict[tuple[int, bool, int], int] = {}
        for rank, row in enumerate(table):
            for at, action in enumerate(row):
                if action.kind is F:
                    self.edges.setdefault((rank, True, action.chunk), at)
                elif action.kind is not I:
                    self.edges[rank, False, action.chunk] = at
        self.steps: list[TimedAction] = []
        self.what: list[Action] = []
        self.made: dict[ActionResult, int] = {}  # -> position of the step that makes it
        self.position = [0] * len(table)
        self.waiting: dict[ActionResult, int] = {}  # -> the rank that waits for it
        self.joined: list[list[ActionResult]] = [[] for _ in table]  # made by actions that end with the next one
        self.ready = deque(range(len(table)))

    def run(self) -> VisitOrder:
        """Visit all actions and return their order. Raises ScheduleError if some can never run."""
        while self.ready:
            rank = self.ready.popleft()
            while self.position[rank] < len(self.table[rank]) and self._advance(rank):
                pass
        stuck = [f"rank {r} at {row[at]}" for r, (row, at) in enumerate(zip(self.table, self.position, strict=True))
                 if at < len(row)]  # fmt: skip
        if stuck:
            missing = ", ".join(map(shown, self.waiting))
            raise ScheduleError(
                f"the schedule never finishes: waiting are {', '.join(stuck)}, for {missing}; {deadlock(self.table)}"
            )
        counts: list[Counter[int]] = [Counter() for _ in self.table]
        for step in self.steps:
            counts[step.rank][step.slot] += 1
        slots = tuple(tuple(sorted(c.items())) for c in counts)
        return VisitOrder(tuple(self.steps), tuple(self.what), len(self.table), self.num_chunks, slots)

    def _advance(self, rank: int) -> bool:
        """Visit the next action of `rank`; return False if it has to wait."""
        at = self.position[rank]
        action = self.table[rank][at]
        needed = needed_by(action, self.num_chunks - 1)
        if needed is not None and needed not in self.made:
            self.waiting[needed] = rank
            return False
        forward = action.kind is F
        edge = action.kind is not I and self.edges[rank, forward, action.chunk] == at
        slot = action.chunk * NUM_SLOTS + _SLOTS[action.kind, edge]
        if action.kind is not W:
            self.joined[rank].append((forward, action.chunk, action.micro_batch))
        while self.joined[rank] and not action.joined:
            result = self.joined[rank].pop()
            self.made[result] = len(self.steps)
            if result in self.waiting:
                self.ready.append(self.waiting.pop(result))
        dependency = -1 if needed is None else self.made[needed]
        self.steps.append(TimedAction(rank, dependency, self._lag(rank, action, needed), slot))
        self.what.append(action)
        self.position[rank] += 1
        return True

    def _lag(self, rank: int, action: Action, needed: ActionResult | None) -> int:
        """Return the index of the transfer that brings the needed result, or NO_LAG if it was made on the same rank."""
        if needed is None or needed[1] == action.chunk or self.home.get(needed[1:]) == rank:
            return NO_LAG
        return action.chunk if action.kind is F else 1 + self.num_chunks + action.chunk
