"""Event simulation of a pipeline schedule: how long a step takes, from the durations of its actions.

timeline = simulate(actions("1F1B", num_stages=4, num_micro_batches=8), [ChunkTimes(1e-3, 2e-3)] * 4)  # seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoplan.cost_models.arrays import Array
from autoplan.schedules.dependencies import ScheduleError, VisitOrder
from autoplan.schedules.orders import Action, ActionKind
from autoplan.schedules.schedule import ActionLists, Transfer


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of one micro-batch on one chunk.

    `backward_s` is the whole backward. If the schedule splits it, `weight_s` of it is the weight gradient, which then
    takes `split_extra_s` more. The other extras are added to the chunk's first forward (for example, gathering
    parameters) and last backward (reducing gradients).
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    first_forward_extra_s: float = 0.0
    last_backward_extra_s: float = 0.0
    split_extra_s: float = 0.0


class TimelineEvent(NamedTuple):
    """One action in time, without its transfers."""

    rank: int
    chunk: int
    micro_batch: int
    kind: ActionKind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        rank_end_s: when each rank finishes.
        events: actions in time, if they were asked for.
        slot_s: seconds of every slot (`VisitOrder.slots`).
        slots: per rank (slot, number of actions).
    """

    end_s: float
    rank_end_s: tuple[float, ...]
    events: tuple[TimelineEvent, ...]
    slot_s: Sequence[float]
    slots: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """The seconds that each rank computes."""
        return tuple(sum(self.slot_s[slot] * count for slot, count in row) for row in self.slots)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """The seconds that each rank waits."""
        return tuple(self.end_s - busy for busy in self.busy_s)


class AfterPipeline(NamedTuple):
    """Seconds on a rank after its last action: reductions, traffic once per step that nothing hides, the update."""

    reductions_s: float
    once_s: float
    update_s: float


def step_of(rank_end_s: Sequence[float], after: Sequence[AfterPipeline], fixed_s: float) -> float:
    """Return the seconds of a step: the ranks meet after the reductions, and again before the update."""
    ends = [end + mine.reductions_s for end, mine in zip(rank_end_s, after, strict=True)]
    return max(ends) + max(mine.once_s for mine in after) + max(mine.update_s for mine in after) + fixed_s


def simulate(
    table: Sequence[Sequence[Action]],
    chunks: Sequence[ChunkTimes],
    send_forward_s: Sequence[float] = (),
    send_backward_s: Sequence[float] = (),
    *,
    transfer: Transfer = Transfer.OVERLAPPED,
    events: bool = True,
) -> Timeline:
    """Run every action as soon as its rank is free and its inputs have arrived.

    Args:
        table: The result of `actions` (the order of visits is then found once), or any lists of actions per rank.
        chunks: The durations of every chunk, in model order.
        send_forward_s: Seconds from chunk i to i + 1, one per boundary; empty: 0. Nothing is sent within a rank.
        send_backward_s: Seconds from chunk i + 1 back to i, likewise.
        events: False to record no events (a search does not look at them).

    Raises: ScheduleError for a table that never finishes (says who waits for what), or durations that do not fit it.
    """
    program = (table if isinstance(table, ActionLists) else ActionLists(tuple(row) for row in table)).visits
    compute = _durations(program, chunks)
    lags = _lags(program, send_forward_s, send_backward_s)
    durations = np.array(compute)[program.slot_of]
    sent = np.zeros(len(durations))  # of the time of every step
    if transfer is not Transfer.OVERLAPPED and any(lags):
        # The lag becomes part of the actions that pay for it.
        received, sent = _paid(program, lags, transfer)
        durations += received + sent
        # a sender that pays, too, ends when its message has arrived; the receiver begins to receive that much earlier
        lags = [-lag if transfer is Transfer.BOTH else 0.0 for lag in lags]
    ends, clock = _run(program, durations.tolist(), lags)
    recorded: list[TimelineEvent] = []
    if events:
        columns = program.rank_list, program.slot_list, sent.tolist(), program.what, ends
        for rank, slot, sending, action, end in zip(*columns, strict=True):
            start = end - sending - compute[slot]
            recorded.append(TimelineEvent(rank, action.chunk, action.micro_batch, action.kind, start, end - sending))
    return Timeline(max(clock), tuple(clock), tuple(recorded), compute, program.slots)


def _durations(program: VisitOrder, chunks: Sequence[ChunkTimes]) -> list[float]:
    if len(chunks) != program.num_chunks:
        raise ScheduleError(f"the schedule has {program.num_chunks} chunks, durations are given for {len(chunks)}")
    out: list[float] = []
    for index, c in enumerate(chunks):
        first, last, split = c.first_forward_extra_s, c.last_backward_extra_s, c.backward_s - c.weight_s
        if not min(c.forward_s, split, c.weight_s, first, last, c.split_extra_s) >= 0:
            raise ScheduleError(f"chunk {index}: negative time, or weight gradient longer than its backward: {c}")
        out += [c.forward_s, c.forward_s + first, c.backward_s, c.backward_s + last, split]
        weight = c.weight_s + c.split_extra_s
        out += [weight, weight + last]
    return out


def _lags(program: VisitOrder, send_forward_s: Sequence[float], send_backward_s: Sequence[float]) -> list[float]:
    boundaries = program.num_chunks - 1
    for name, values in (("send_forward_s", send_forward_s), ("send_backward_s", send_backward_s)):
        if (values and len(values) != boundaries) or min(values, default=0.0) < 0:
            raise ScheduleError(
                f"{name} must be {boundaries} times of at least 0 (one per boundary), not {list(values)}"
            )
    nothing = [0.0] * boundaries
    return [0.0, *(send_forward_s or nothing), 0.0, *(send_backward_s or nothing)]


def _paid(program: VisitOrder, lags: list[float], transfer: Transfer) -> tuple[Array, Array]:
    """Return the seconds that every step pays for what it receives, and for what it sends."""
    received, sent, moved = np.zeros(len(program.what)), np.zeros(len(program.what)), np.array(lags)[program.lag_of]
    if transfer is not Transfer.SENDER:
        received += moved
    if transfer is not Transfer.RECEIVER:
        waits = program.dependency_of >= 0
        np.add.at(sent, program.dependency_of[waits], moved[waits])
    return received, sent


def _run(program: VisitOrder, durations: list[float], lags: list[float]) -> tuple[list[float], list[float]]:
    """Return when every step ends, and when every rank does."""
    clock = [0.0] * program.num_ranks
    ends: list[float] = []
    add, steps = ends.append, zip(program.rank_list, program.dependency_list, durations, strict=True)
    if not any(lags):
        for rank, dependency, seconds in steps:
            start = clock[rank]
            if dependency >= 0 and ends[dependency] > start:
                start = ends[dependency]
            clock[rank] = end = start + seconds
            add(end)
        return ends, clock
    late = np.array(lags)[program.lag_of].tolist()
    for (rank, dependency, seconds), lag in zip(steps, late, strict=True):
        start = clock[rank]
        if dependency >= 0:
            arrival = ends[dependency] + lag
            if arrival > start:
                start = arrival
        clock[rank] = end = start + seconds
        add(end)
    return ends, clock
