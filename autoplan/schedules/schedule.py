"""Pipeline schedules: one record each, the actions of every rank in order, and what they hold in memory.

    table = actions("1F1B", num_stages=4, num_micro_batches=8)      # per rank: Action(FORWARD, chunk, micro-batch), ...
    [max(held) for held in table.flights]                            # [4, 3, 2, 1] micro-batches

A schedule is a record of SCHEDULES. Its order of actions is in `autoplan.schedules.orders`; everything else that
depends on the schedule reads the record. `autoplan.cost_models.time.simulation` gives the time of a step.

A chunk is a run of layers on one rank; chunks are counted in model order over the whole pipeline (torch: stage index).
With virtual stages a rank holds several chunks, chosen by the schedule's placement (`chunks_of_ranks`).

The table gives the papers' figures for p equal stages and m micro-batches; the simulation reproduces them
(test_schedule.py). F, B and W are the seconds of a forward, of a whole backward and of the weight gradient in it, over
all layers of a stage (with v chunks per rank: of a rank). "held" is the largest number of micro-batches whose stage
activations a rank holds.

| schedule | bubble of a rank | held | source |
|---|---|---|---|
| GPipe | (p - 1) (F + B) | m | Huang et al., 2019, section 2.3 |
| 1F1B | (p - 1) (F + B) | p | Narayanan et al., SC 2021, section 2.2.1 |
| Interleaved1F1B | (p - 1) (F + B) / v | p (1 + (p - 1) / (p v)) | section 2.2.2; Korthikanti et al., 2022, 4.2.3 |
| ZB-H1 | (p - 1) (F + B - 2 W) if W <= B - W, F | p | Qi et al., 2023, table 2 |
| ZBV | 0 if F = B - W = W, between first and last action | p | Qi et al., 2023, section 6 |
| DualPipe | (p / 2 - 1) (F&B + B - 3 W) | p + 1, parameters twice | DeepSeek-V3 Technical Report, 2024, table 2 |
| DualPipeV | (p - 1) (F&B + B - 3 W) / 2 | p + 1 / 2 | Qi et al., 2025: DualPipe of 2 p stages on p ranks |

F&B is a forward and a backward that overlap; here F + B. The last two rows hold for F = B - W = W, the case that their
order is made for; with a longer B - W the bubble is smaller, with a longer W or F it is larger. GPipe and 1F1B are the
same with fewer micro-batches than stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from autoplan.errors import PinError
from autoplan.schedules import orders
from autoplan.schedules.dependencies import VisitOrder, visit_order
from autoplan.schedules.orders import Action, B, F, I, W

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Transfer(Enum):
    """The rank that a transfer between ranks keeps busy.

    OVERLAPPED: none. The data arrives `send` seconds after the sender finished (receives are posted early).
    RECEIVER: the receiver. The transfer starts when the sender has finished and the receiver is free: stock torch
    pipelines post a receive just before they need it, and both gloo and NCCL move nothing before that.
    SENDER: the sender, until the data has arrived.
    BOTH: sender and receiver, from when the sender has finished and the receiver is free.
    """

    OVERLAPPED = "overlapped"
    RECEIVER = "receiver"
    SENDER = "sender"
    BOTH = "both"


class ChunkPlacement(Enum):
    """The chunks that a rank holds, by pass of the model through the ranks.

    LOOP: every pass runs from the first rank to the last: rank r of p holds r, p + r, 2 p + r, ...
    V: every second pass runs back from the last rank to the first: rank r holds r, 2 p - 1 - r, ...
    BOTH: one pass in both directions: micro-batches of the first half run from the first rank to the last, those of the
    second half from the last to the first, so that rank r holds copies of chunks r and p - 1 - r.
    """

    LOOP = "loop"
    V = "v"
    BOTH = "both"


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule, with everything that depends on it.

    Attributes:
        name: The name in pins, reports and programs.
        order: Returns the actions of a rank, given rank, num_stages, num_micro_batches and the chunks of the rank.
        torch_class: The class of torch.distributed.pipelining that runs this order. None: priced, but not executed.
        placement: Which chunks a rank holds.
        virtual_stages: The fewest and the most chunks per rank, copies not counted; None: any number.
        split_backward: True if some weight gradients are computed apart from input gradients.
        backward_at_once: True if, with one chunk per rank, the backward of the model's last block follows its forward
            directly.
        windows: True if, with one chunk per rank, every rank runs some forwards and then alternates backwards and
            forwards. The bounds of `autoplan.search.cuts` rely on it. For other schedules a search simulates a few even
            cuts.
        searched: The numbers of stages per rank with which a search tries the schedule besides 1F1B; empty: only if
            pinned.
        divides: True if a search also tries other numbers of stages per rank, near its best plans.
        family: The word for the schedule in a report of what was searched.
        rounds: True if micro-batches run in equal rounds of about num_stages.
        least_rounds: The number of micro-batches is at least this times num_stages.
        settles: True if a rank with v chunks holds no more with more than v + 2 rounds of num_stages micro-batches, and
            the same rest, than with just these.
        transfer: Which rank a transfer keeps busy; in stock torch the receiver.
    """

    name: str
    order: Callable[[int, int, int, tuple[int, ...]], list[Action]]
    torch_class: str | None
    placement: ChunkPlacement = ChunkPlacement.LOOP
    virtual_stages: tuple[int, int | None] = (1, 1)
    split_backward: bool = False
    backward_at_once: bool = False
    windows: bool = False
    searched: tuple[int, ...] = ()
    divides: bool = False
    family: str = ""
    rounds: bool = False
    least_rounds: int = 0
    settles: bool = True
    transfer: Transfer = Transfer.RECEIVER

    def takes(self, virtual_stages: int) -> bool:
        """Return True if a rank may hold that many chunks."""
        fewest, most = self.virtual_stages
        return virtual_stages >= fewest and (most is None or virtual_stages <= most)

    @property
    def num_copies(self) -> int:
        """The number of ranks that hold each chunk; each runs an equal share of the micro-batches on it."""
        return 2 if self.placement is ChunkPlacement.BOTH else 1


_RECORDS = (
    # Searched only if pinned: it is never faster than 1F1B.
    Schedule("GPipe", orders.gpipe, "ScheduleGPipe", windows=True, settles=False),
    Schedule("1F1B", orders.one_f_one_b, "Schedule1F1B", windows=True, backward_at_once=True),
    Schedule(
        "Interleaved1F1B",
        orders.interleaved,
        "ScheduleInterleaved1F1B",
        virtual_stages=(2, None),
        searched=(2, 4, 8),
        divides=True,
        family="interleaved",
        rounds=True,
    ),
    Schedule(
        "ZB-H1",
        orders.zero_bubble,
        "ScheduleInterleavedZeroBubble",  # with one stage per rank
        split_backward=True,
        searched=(1,),
        family="zero-bubble",
        rounds=True,
    ),
    Schedule(
        "InterleavedZeroBubble",
        orders.zero_bubble,
        "ScheduleInterleavedZeroBubble",
        virtual_stages=(2, None),
        split_backward=True,
        searched=(2,),
        divides=True,
        family="zero-bubble",
        rounds=True,
    ),
    Schedule(
        "ZBV",
        orders.zero_bubble_v,
        "ScheduleZBVZeroBubble",
        ChunkPlacement.V,
        (2, 2),
        split_backward=True,
        searched=(2,),
        family="zero-bubble",
    ),
    # A forward and a backward that overlap hide each other's communication (DeepSeek-V3 Technical Report, 2024, section
    # 3.2.1). Here only the transfers between ranks are hidden, not the collectives inside layers.
    Schedule(
        "DualPipeV",
        orders.dual_pipe_v,
        "ScheduleDualPipeV",
        ChunkPlacement.V,
        (2, 2),
        split_backward=True,
        searched=(2,),
        family="DualPipeV",
        least_rounds=2,
        transfer=Transfer.OVERLAPPED,
    ),
    Schedule(
        "DualPipe",
        orders.dual_pipe,
        None,
        ChunkPlacement.BOTH,
        split_backward=True,
        least_rounds=2,
        transfer=Transfer.OVERLAPPED,
    ),
)
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _RECORDS}
PLAIN_SCHEDULE = "1F1B"  # the default, with which a search compares the others
SEARCHED_SCHEDULES = tuple(
    (s.name, count) for s in _RECORDS for count in s.searched
)  # beside PLAIN: (name, stages per rank)


def searched_words() -> str:
    """Return the schedules that a search tries besides 1F1B, in words."""
    *families, last = dict.fromkeys(s.family for s in _RECORDS if s.searched)
    *counts, most = sorted({count for _, count in SEARCHED_SCHEDULES})
    return f"{', '.join(families)} and {last} with {', '.join(map(str, counts))} or {most} stages per rank"


def backward_follows(schedule: str, num_stages: int) -> bool:
    """Return True if the backward of the model's last block directly follows its forward."""
    return num_stages == 1 or SCHEDULES[schedule].backward_at_once


def ranks_of_chunks(schedule: str, num_stages: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of every chunk in model order; for copies, the first.

    Raises: PinError for an unknown schedule.
    """
    turns = _rule(schedule).placement is ChunkPlacement.V
    ranks = range(num_stages)
    return tuple(r for turn in range(virtual_stages) for r in (reversed(ranks) if turns and turn % 2 else ranks))


def chunks_of_ranks(schedule: str, num_stages: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of every rank in model order, copies included. Raises PinError for an unknown schedule."""
    held: list[list[int]] = [[] for _ in range(num_stages)]
    for chunk, rank in enumerate(ranks_of_chunks(schedule, num_stages, virtual_stages)):
        held[rank].append(chunk)
    if _rule(schedule).placement is ChunkPlacement.BOTH:
        held = [sorted(pair) for pair in zip((c for (c,) in held), (c for (c,) in reversed(held)), strict=True)]
    return tuple(map(tuple, held))


def num_copies(schedule: str) -> int:
    """Return the number of ranks that hold each chunk (2 for DualPipe). Raises PinError for an unknown schedule."""
    return _rule(schedule).num_copies


def _rule(schedule: str) -> Schedule:
    if schedule not in SCHEDULES:
        raise PinError(f"schedule {schedule!r} is not known; use {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


class ChunkSpan(NamedTuple):
    """Positions in the actions of a rank: the first forward of a chunk, and the ends of its first and last backward."""

    first_forward: int
    first_end: int
    last_end: int


Waits = tuple[tuple[int, int], ...]  # micro-batches that are held, and how many of them wait


class HeldRow(NamedTuple):
    """Arrays over the actions of a rank.

    `chunks`: the chunk. `begins`: 1 if the action starts to hold a micro-batch. `ends`: 1 if it releases one.
    `halves`: 1 if it is the first part of a backward, -1 if it is the second. `spans`: of every chunk.
    """

    chunks: NDArray[np.int64]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    halves: NDArray[np.float64]
    spans: dict[int, ChunkSpan]

    def waiting(self, chunk: int) -> NDArray[np.float64]:
        """Return the micro-batches of a chunk between two parts of a backward during every action."""
        import numpy as np

        after = np.where(self.chunks == chunk, self.halves, 0.0)
        out: NDArray[np.float64] = np.cumsum(after) - np.maximum(after, 0.0) + np.maximum(-after, 0.0)
        return out

    def held(self, chunk_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes held during every action, which still holds what it frees. `chunk_bytes`: by chunk."""
        import numpy as np

        each = chunk_bytes[self.chunks]
        ends: NDArray[np.float64] = self.ends * each
        out: NDArray[np.float64] = np.cumsum(self.begins * each) - np.cumsum(ends) + ends
        return out


class WarmUp(NamedTuple):
    """What a rank does before its first backward.

    `forwards`: its forwards, by chunk of the rank. `turns`: the chunk of that backward. `last`: the chunk of the rank's
    last action if that is a whole backward, which those of earlier chunks follow; else 0.
    """

    forwards: tuple[int, ...]
    turns: int
    last: int


class ActionLists(tuple[tuple[Action, ...], ...]):
    """The actions of every rank: a tuple that caches what was derived from it."""

    @cached_property
    def visits(self) -> VisitOrder:
        """An order in which every action comes after the action it waits for; it does not depend on durations."""
        return visit_order(self)

    @cached_property
    def flights(self) -> tuple[tuple[int, int], ...]:
        """`held_at_backwards` of every rank."""
        return tuple(held_at_backwards(row) for row in self)

    @cached_property
    def waits(self) -> tuple[tuple[Waits, Waits], ...]:
        """`waits_at_backwards` of every rank."""
        return tuple(waits_at_backwards(row) for row in self)

    @cached_property
    def warm_ups(self) -> tuple[WarmUp, ...]:
        """The warm-up of every rank."""
        return tuple(_warm_up(row) for row in self)

    @cached_property
    def held(self) -> tuple[HeldRow, ...]:
        """The effect of every action on the number of held micro-batches, per rank."""
        import numpy as np  # the command line names schedules without it

        return tuple(
            HeldRow(
                np.array([a.chunk for a in row]),
                np.array([float(a.kind is F) for a in row]),
                np.array([float(a.kind is B or a.kind is W) for a in row]),
                np.array([float(a.kind is I) - float(a.kind is W) for a in row]),
                _spans(row),
            )
            for row in self
        )


def _spans(row: Sequence[Action]) -> dict[int, ChunkSpan]:
    forwards: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for i, a in enumerate(row):
        if a.kind is F:
            forwards.setdefault(a.chunk, i)
        elif a.kind is B or a.kind is W:
            ends.setdefault(a.chunk, []).append(i)
    return {chunk: ChunkSpan(forwards[chunk], found[0], found[-1]) for chunk, found in ends.items()}


def _warm_up(row: Sequence[Action]) -> WarmUp:
    first = next(i for i, a in enumerate(row) if a.kind is not F)
    before = Counter(a.chunk for a in row[:first])
    chunks = sorted({a.chunk for a in row})
    return WarmUp(tuple(before[k] for k in chunks), row[first].chunk, row[-1].chunk if row[-1].kind is B else 0)


def actions(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> ActionLists:
    """Return the actions that every rank runs under `schedule`, in order.

    Raises: PinError for an unknown schedule, or for degrees that it does not take (names the nearest legal ones).
    """
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    return _actions(schedule, num_stages, num_micro_batches, virtual_stages)


def flights(
    schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return `held_at_backwards` of every rank. Raises PinError as `actions` does."""
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    return _flights(
        schedule, num_stages, settled(schedule, num_stages, num_micro_batches, virtual_stages), virtual_stages
    )


def settled(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> int:
    """Return a number of micro-batches, at most the given one, with which every rank holds as many at a time."""
    rest = num_micro_batches % num_stages
    if not SCHEDULES[schedule].settles or (rest and SCHEDULES[schedule].rounds):
        return num_micro_batches
    return min(num_micro_batches, (virtual_stages + 2) * num_stages + rest)


def obstacle(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> str | None:
    """Return the reason why a known schedule does not take these degrees (each at least 1), or None if it does."""
    rule = SCHEDULES[schedule]
    if not rule.takes(virtual_stages):
        fewest, most = rule.virtual_stages
        if most is None:
            return f"schedule {schedule!r} needs at least {fewest} virtual stages, not {virtual_stages}"
        number = "one chunk" if most == 1 else f"{most} chunks"
        return f"schedule {schedule!r} has {number} per rank, not virtual_stages={virtual_stages}"
    if rule.rounds:
        rounds = orders.num_rounds(num_stages, num_micro_batches)
        if num_micro_batches % rounds:
            return (
                f"schedule {schedule!r} runs {num_micro_batches} micro-batches on {num_stages} stages in {rounds} "
                "rounds, which must be equal"
            )
    if num_micro_batches < rule.least_rounds * num_stages:
        return (
            f"schedule {schedule!r} needs at least {rule.least_rounds} micro-batches per stage, not "
            f"{num_micro_batches} on {num_stages} stages"
        )
    if rule.num_copies > 1:
        for name, value in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
            if value % 2:
                return f"schedule {schedule!r} runs in both directions, so {name}={value} must be even"
    return None


def takes(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> bool:
    """Return True if `actions` has lists for these degrees."""
    return obstacle(schedule, num_stages, num_micro_batches, virtual_stages) is None


def _check(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> None:
    _rule(schedule)
    for name, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
        ("virtual_stages", virtual_stages),
    ):
        if value < 1:
            raise PinError(f"{name}={value} must be at least 1")
    reason = obstacle(schedule, num_stages, num_micro_batches, virtual_stages)
    if reason is not None:
        raise PinError(f"{reason}{_near(schedule, num_stages, num_micro_batches, virtual_stages)}")


def _near(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> str:
    """Return a hint with the nearest legal value of one degree, and the schedules that take the degrees as they are.

    The degrees are tried in turn: virtual stages, then micro-batches, then stages.
    """
    given = {"virtual_stages": virtual_stages, "num_micro_batches": num_micro_batches, "num_stages": num_stages}
    for name, value in given.items():

        def legal(n: int, name: str = name) -> bool:
            return takes(schedule, **{**given, name: n})

        below = next(filter(legal, range(value - 1, 0, -1)), None)
        above = next(filter(legal, range(value + 1, 2 * value + 2 * num_stages + 2)), None)
        found = [str(n) for n in (below, above) if n is not None]
        if found:
            text = f"; nearest legal: {name}={' or '.join(found)}"
            others = [each for each in SCHEDULES if takes(each, **given)] if name == "virtual_stages" else []
            return text + (f", or for {virtual_stages} the schedule {' or '.join(others)}" if others else "")
    return ""


def waits(
    schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Waits, Waits], ...]:
    """Return `waits_at_backwards` of every rank. Raises PinError as `actions` does."""
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    fewer = settled(schedule, num_stages, num_micro_batches, virtual_stages)
    return _actions(schedule, num_stages, fewer, virtual_stages).waits


def warm_ups(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> tuple[WarmUp, ...]:
    """Return the warm-up of every rank. Raises PinError as `actions` does."""
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    fewer = settled(schedule, num_stages, num_micro_batches, virtual_stages)
    return _actions(schedule, num_stages, fewer, virtual_stages).warm_ups


@lru_cache(maxsize=4096)
def _flights(
    schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int
) -> tuple[tuple[int, int], ...]:
    return _actions(schedule, num_stages, num_micro_batches, virtual_stages).flights


@lru_cache(maxsize=256)  # a search asks for the same ones many times
def _actions(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> ActionLists:
    order = SCHEDULES[schedule].order
    held = chunks_of_ranks(schedule, num_stages, virtual_stages)
    return ActionLists(tuple(order(r, num_stages, num_micro_batches, mine)) for r, mine in enumerate(held))


def held_at_backwards(row: Sequence[Action]) -> tuple[int, int]:
    """Return the most micro-batches that a rank holds: until its first backward ends, and afterwards.

    Both count all chunks of the rank. The second number is 0 if that backward is the only one. A backward in two parts
    ends with the second, which gives the parameters' gradients.
    """
    held, most = 0, [0, 0]
    begun = False
    for kind, *_ in row:
        if kind is F:
            held += 1
        most[begun] = max(most[begun], held)
        if kind is B or kind is W:
            begun = True
            held -= 1
    return most[0], most[1]


def waits_at_backwards(row: Sequence[Action]) -> tuple[Waits, Waits]:
    """Return how many micro-batches a rank holds, and how many of them wait between two parts of a backward.

    Both until its first backward ends, and afterwards (`held_at_backwards`). Left out are moments at which no more are
    held than at another one, and no fewer wait. During a second part its micro-batch still waits.
    """
    held = waiting = 0
    begun, found = False, (dict[int, int](), dict[int, int]())
    for kind, *_ in row:
        held += kind is F
        found[begun][waiting] = max(found[begun].get(waiting, 0), held)
        waiting += (kind is I) - (kind is W)
        if kind is B or kind is W:
            begun = True
            held -= 1
    first, later = (
        tuple((n, k) for k, n in sorted(each.items()) if n > max((m for j, m in each.items() if j < k), default=0))
        for each in found
    )
    return first, later
