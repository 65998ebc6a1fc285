"""Pipeline schedules as data: the actions of every rank in order, what they hold in memory, their event simulation.

    table = actions("1F1B", num_stages=4, num_micro_batches=8)      # per rank: Action(FORWARD, chunk, micro-batch), ...
    [num_held(row) for row in table]                                 # [4, 3, 2, 1] micro-batches
    timeline = simulate(table, [ChunkTimes(1e-3, 2e-3)] * 4)        # seconds
    lower_bound_1f1b([3e-3] * 4, 8) <= timeline.end_s

A chunk is a run of layers on one rank; chunks are counted in model order over the whole pipeline (torch: stage index).
With virtual stages a rank holds several; which, the schedule's placement says (`chunks_of_ranks`). The orders
themselves: `autoplan.schedules.orders`.

What the papers say of p equal stages and m micro-batches, and the simulation gives (test_schedule.py). F, B and W:
seconds of a forward, of a whole backward and of the weight gradient in it, on all the layers of a stage (with v
chunks per rank: of a rank); held: the most micro-batches' worth of a stage's activations on any rank.

| schedule | bubble of a rank | held | source |
|---|---|---|---|
| GPipe | (p - 1) (F + B) | m | Huang et al., 2019, section 2.3 |
| 1F1B | (p - 1) (F + B) | p | Narayanan et al., SC 2021, section 2.2.1 |
| Interleaved1F1B | (p - 1) (F + B) / v | p (1 + (p - 1) / (p v)) | section 2.2.2; Korthikanti et al., 2022, 4.2.3 |
| ZB-H1 | (p - 1) (F + B - 2 W) if W <= B - W, F | p | Qi et al., 2023, table 2 |
| ZBV | 0 if F = B - W = W, between first and last action | p | Qi et al., 2023, section 6 |
| DualPipe | (p / 2 - 1) (F&B + B - 3 W) | p + 1, parameters twice | DeepSeek-V3 Technical Report, 2024, table 2 |
| DualPipeV | (p - 1) (F&B + B - 3 W) / 2 | p + 1 / 2 | Qi et al., 2025: DualPipe of 2 p stages on p ranks |

F&B: a forward and a backward that overlap; here F + B. The last two hold where F = B - W = W, which is what their order
is made for; with a longer B - W the bubble is smaller than that, with a longer W or F it is larger. GPipe and 1F1B with
fewer micro-batches than stages are the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from autoplan.errors import AutoplanError, PinError
from autoplan.schedules import orders
from autoplan.schedules.orders import Action, ActionKind, B, F, I, W

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ScheduleError(AutoplanError):
    """Action lists that can never finish, or durations that do not fit them."""


class Transfer(Enum):
    """Who pays for what is sent between ranks.

    OVERLAPPED: nobody is held up: it arrives `send` seconds after the sender finished (receives posted early).
    RECEIVER: it starts when the sender has finished and the receiver is free: stock torch pipelines post a receive just
        before they need it, and both gloo and NCCL move nothing before that.
    SENDER: the sender is busy until it has arrived.
    """

    OVERLAPPED = "overlapped"
    RECEIVER = "receiver"
    SENDER = "sender"


class Placement(Enum):
    """Which chunks a rank holds, by pass of the model through the ranks.

    LOOP: every pass from the first rank to the last: rank r of p holds r, p + r, 2 p + r, ...
    V: every second pass back from the last rank to the first: r, 2 p - 1 - r, ...
    BOTH: one pass, but in both directions: micro-batches of the first half from the first rank to the last, those of
        the second half from the last to the first, so that rank r holds copies of chunks r and p - 1 - r.
    """

    LOOP = "loop"
    V = "v"
    BOTH = "both"


@dataclass(frozen=True)
class ScheduleRule:
    """One schedule.

    Attributes:
        order: the actions of a rank; arguments: rank, num_stages, num_micro_batches, the chunks of the rank.
        placement: which chunks those are.
        virtual_stages: the fewest and the most chunks per rank, copies not counted; None: any number.
        split_backward: weight gradients are (partly) computed apart from input gradients.
        rounds: micro-batches run in equal rounds of about num_stages.
        least_rounds: the fewest micro-batches are this times num_stages.
        transfer: who pays for what is sent between ranks; in stock torch the receiver.
    """

    order: Callable[[int, int, int, tuple[int, ...]], list[Action]]
    placement: Placement = Placement.LOOP
    virtual_stages: tuple[int, int | None] = (1, 1)
    split_backward: bool = False
    rounds: bool = False
    least_rounds: int = 0
    transfer: Transfer = Transfer.RECEIVER

    def takes(self, virtual_stages: int) -> bool:
        """True if a rank may hold that many chunks."""
        fewest, most = self.virtual_stages
        return virtual_stages >= fewest and (most is None or virtual_stages <= most)

    @property
    def num_copies(self) -> int:
        """Ranks that hold each chunk; each runs an equal share of the micro-batches on it."""
        return 2 if self.placement is Placement.BOTH else 1


SCHEDULES: Mapping[str, ScheduleRule] = {
    "GPipe": ScheduleRule(orders.gpipe),
    "1F1B": ScheduleRule(orders.one_f_one_b),
    "Interleaved1F1B": ScheduleRule(orders.interleaved, virtual_stages=(2, None), rounds=True),
    "ZB-H1": ScheduleRule(orders.zero_bubble, split_backward=True, rounds=True),
    "InterleavedZeroBubble": ScheduleRule(
        orders.zero_bubble, virtual_stages=(2, None), split_backward=True, rounds=True
    ),
    "ZBV": ScheduleRule(orders.zero_bubble_v, Placement.V, (2, 2), split_backward=True),
    # A forward and a backward that overlap hide each other's communication: DeepSeek-V3 Technical Report, 2024,
    # section 3.2.1. Here only the transfers between ranks are hidden, not the collectives inside layers.
    "DualPipeV": ScheduleRule(
        orders.dual_pipe_v, Placement.V, (2, 2), split_backward=True, least_rounds=2, transfer=Transfer.OVERLAPPED
    ),
    "DualPipe": ScheduleRule(
        orders.dual_pipe, Placement.BOTH, split_backward=True, least_rounds=2, transfer=Transfer.OVERLAPPED
    ),
}


def ranks_of_chunks(schedule: str, num_stages: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of every chunk, in model order; of copies the first. Raises: PinError: unknown schedule."""
    turns = _rule(schedule).placement is Placement.V
    ranks = range(num_stages)
    return tuple(r for turn in range(virtual_stages) for r in (reversed(ranks) if turns and turn % 2 else ranks))


def chunks_of_ranks(schedule: str, num_stages: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of every rank, in model order, copies too. Raises: PinError: unknown schedule."""
    held: list[list[int]] = [[] for _ in range(num_stages)]
    for chunk, rank in enumerate(ranks_of_chunks(schedule, num_stages, virtual_stages)):
        held[rank].append(chunk)
    if _rule(schedule).placement is Placement.BOTH:
        held = [sorted(pair) for pair in zip((c for (c,) in held), (c for (c,) in reversed(held)), strict=True)]
    return tuple(map(tuple, held))


def num_copies(schedule: str) -> int:
    """Ranks that hold each chunk (2: DualPipe). Raises: PinError: unknown schedule."""
    return _rule(schedule).num_copies


def _rule(schedule: str) -> ScheduleRule:
    if schedule not in SCHEDULES:
        raise PinError(f"schedule {schedule!r} is not known; use {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


class HeldRow(NamedTuple):
    """Of every action of a rank: its chunk, 1 where a micro-batch is held from then on, 1 where it is given up."""

    chunks: NDArray[np.int64]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]


class ActionLists(tuple[tuple[Action, ...], ...]):
    """Per rank its actions: a plain tuple that remembers what was found out about them."""

    @cached_property
    def program(self) -> _Program:
        """The order in which a simulation visits them, see `_Program`; it does not depend on durations."""
        return _compile(self)

    @cached_property
    def flights(self) -> tuple[tuple[int, int], ...]:
        """Per rank `held_at_backwards`."""
        return tuple(held_at_backwards(row) for row in self)

    @cached_property
    def held(self) -> tuple[HeldRow, ...]:
        """Per rank what its actions do to the number of micro-batches it holds."""
        import numpy as np  # the command line names schedules without it

        return tuple(
            HeldRow(
                np.array([a.chunk for a in row]),
                np.array([float(a.kind is F) for a in row]),
                np.array([float(a.kind is B or a.kind is W) for a in row]),
            )
            for row in self
        )


def actions(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> ActionLists:
    """Per rank the actions that `schedule` runs there, in order.

    Raises: PinError: unknown schedule, or degrees that it does not take (names the nearest legal ones).
    """
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    return _actions(schedule, num_stages, num_micro_batches, virtual_stages)


def obstacle(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> str | None:
    """Why a known schedule has no action lists for these degrees (each at least 1), or None if it has."""
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
    """True if `actions` has lists for these degrees."""
    return obstacle(schedule, num_stages, num_micro_batches, virtual_stages) is None


def _check(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> None:
    _rule(schedule)
    for name, value in (
        ("num_stages", num_stages),
        ("num_micro_batches", num_micro_batches),
        ("virtual_stages", virtual_stages),
    ):
        if value < 1:
            raise PinError(f"{name}={value}: must be at least 1")
    reason = obstacle(schedule, num_stages, num_micro_batches, virtual_stages)
    if reason is not None:
        raise PinError(f"{reason}{_near(schedule, num_stages, num_micro_batches, virtual_stages)}")


def _near(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> str:
    """The nearest number of virtual stages, else of micro-batches, else of stages that the schedule takes, each tried;
    and the schedules that take the degrees as they are."""
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


@lru_cache(maxsize=64)  # a search asks for the same few again and again
def _actions(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> ActionLists:
    order = SCHEDULES[schedule].order
    held = chunks_of_ranks(schedule, num_stages, virtual_stages)
    return ActionLists(tuple(order(r, num_stages, num_micro_batches, mine)) for r, mine in enumerate(held))


def held_at_backwards(row: Sequence[Action]) -> tuple[int, int]:
    """Micro-batches a rank holds, over all its chunks: the most until its first backward ends, and the most afterwards.

    The second is 0 if that backward is the only one.
    """
    held, most = 0, [0, 0]
    begun = False
    for kind, *_ in row:
        if kind is F:
            held += 1
        most[begun] = max(most[begun], held)
        if kind is not F:
            begun = True
            held -= kind is not I
    return most[0], most[1]


def num_held(row: Sequence[Action]) -> int:
    """The most micro-batches a rank holds at one time, over all its chunks."""
    return max(held_at_backwards(row))


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of one micro-batch on one chunk.

    `backward_s` is the whole backward; where the schedule splits it, `weight_s` of it is the weight gradient, which
    then takes `split_extra_s` more. The other extras are added to the chunk's first forward (e.g. gathering parameters)
    and last backward (reducing gradients).
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    first_forward_extra_s: float = 0.0
    last_backward_extra_s: float = 0.0
    split_extra_s: float = 0.0


class Event(NamedTuple):
    """One action in time; transfers are not part of it."""

    rank: int
    chunk: int
    micro_batch: int
    kind: ActionKind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step. `rank_end_s`: when each rank finishes; `busy_s`: how long each computes."""

    end_s: float
    rank_end_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    events: tuple[Event, ...] = ()

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Per rank: how long it waits."""
        return tuple(self.end_s - busy for busy in self.busy_s)


# Durations differ by chunk and by these: kind, and whether it is the chunk's first forward or last backward.
_SLOTS = {(F, False): 0, (F, True): 1, (B, False): 2, (B, True): 3, (I, False): 4, (W, False): 5, (W, True): 6}
_NUM_SLOTS = len(_SLOTS)
# A lag is what a value takes from the chunk where it was made: forward to the next, backward to the previous one.
_NO_LAG = 0


class _Step(NamedTuple):
    rank: int
    dependency: int  # position of the step that must have ended, or -1
    lag: int  # 0: none; 1 + c: chunk c to c + 1; 1 + num_chunks + c: chunk c + 1 back to c
    slot: int  # chunk * _NUM_SLOTS + kind


@dataclass(frozen=True)
class _Program:
    """The actions of all ranks in one order in which every action comes after what it waits for."""

    steps: tuple[_Step, ...]
    what: tuple[Action, ...]
    num_ranks: int
    num_chunks: int
    slots: tuple[tuple[tuple[int, int], ...], ...]  # per rank: (slot, how often)


def _compile(table: Sequence[Sequence[Action]]) -> _Program:
    """Put all actions into an order that respects what they wait for. ScheduleError if there is none."""
    # by micro-batch too: in both directions, a chunk is on the rank that its direction visits
    home = {(a.chunk, a.micro_batch): rank for rank, row in enumerate(table) for a in row}
    known = sorted({chunk for chunk, _ in home})
    num_chunks = len(known)
    if known != list(range(num_chunks)):
        raise ScheduleError(f"the chunks of a schedule are counted from 0 without a gap, not {known}")
    # gradients of a chunk are complete after its last weight gradient, wherever that was computed
    last = {(rank, a.chunk): i for rank, row in enumerate(table) for i, a in enumerate(row) if a.kind in (B, W)}
    first = {(r, a.chunk): i for r, row in enumerate(table) for i, a in reversed(list(enumerate(row))) if a.kind is F}
    places: dict[tuple[bool, int, int], int] = {}  # (forward, chunk, micro-batch) -> position of the step
    steps: list[_Step] = []
    what: list[Action] = []
    position = [0] * len(table)
    waiting: dict[tuple[bool, int, int], int] = {}
    given: list[list[tuple[bool, int, int]]] = [[] for _ in table]  # by actions whose end is that of the next one
    ready = deque(range(len(table)))
    while ready:
        rank = ready.popleft()
        row = table[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            kind, chunk, micro_batch, joined = action
            needs, lag = None, _NO_LAG
            if kind is F and chunk > 0:
                needs = (True, chunk - 1, micro_batch)
                lag = chunk if home.get((chunk - 1, micro_batch)) != rank else _NO_LAG
            elif kind in (B, I) and chunk == num_chunks - 1:
                needs = (True, chunk, micro_batch)
            elif kind in (B, I):
                needs = (False, chunk + 1, micro_batch)
                lag = 1 + num_chunks + chunk if home.get((chunk + 1, micro_batch)) != rank else _NO_LAG
            elif kind is W:
                needs = (False, chunk, micro_batch)
            if needs is not None and needs not in places:
                waiting[needs] = rank
                break
            edge = position[rank] == (first if kind is F else last).get((rank, chunk))
            slot = chunk * _NUM_SLOTS + _SLOTS[kind, edge and kind is not I]
            if kind is not W:
                given[rank].append((kind is F, chunk, micro_batch))
            while given[rank] and not joined:
                key = given[rank].pop()
                places[key] = len(steps)
                if key in waiting:
                    ready.append(waiting.pop(key))
            steps.append(_Step(rank, places[needs] if needs is not None else -1, lag, slot))
            what.append(action)
            position[rank] += 1
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(table) if position[r] < len(row)]
    if stuck:
        needed = ", ".join(f"{c}{'F' if forward else 'B'}{m}" for forward, c, m in waiting)
        raise ScheduleError(f"the schedule never finishes: waiting are {', '.join(stuck)}, for {needed}")
    counts: list[Counter[int]] = [Counter() for _ in table]
    for step in steps:
        counts[step.rank][step.slot] += 1
    return _Program(tuple(steps), tuple(what), len(table), num_chunks, tuple(tuple(sorted(c.items())) for c in counts))


def simulate(
    table: Sequence[Sequence[Action]],
    chunks: Sequence[ChunkTimes],
    send_forward_s: Sequence[float] = (),
    send_backward_s: Sequence[float] = (),
    *,
    transfer: Transfer = Transfer.OVERLAPPED,
    events: bool = True,
) -> Timeline:
    """Run the actions as soon as their rank is free and what they need has arrived.

    Args:
        table: what `actions` returns (then the order of visits is found once), or any lists of actions per rank.
        chunks: durations of every chunk, in model order.
        send_forward_s: seconds from chunk i to i + 1, one per boundary; none: 0. Nothing is sent within a rank.
        send_backward_s: likewise from chunk i + 1 back to i.
        events: False: do not record them (a search does not look at them).

    Raises: ScheduleError: a table that never finishes (says who waits for what), or durations that do not fit it.
    """
    program = (table if isinstance(table, ActionLists) else ActionLists(tuple(row) for row in table)).program
    durations = _durations(program, chunks)
    lags = _lags(program, send_forward_s, send_backward_s)
    compute = durations
    steps: Iterable[tuple[int, int, int, int]] = program.steps
    if transfer is not Transfer.OVERLAPPED and any(lags):
        # The lag becomes part of the action that pays for it.
        steps, durations = _paid(program, durations, lags, transfer)
        lags = [0.0] * len(lags)
    clock = [0.0] * program.num_ranks
    ends: list[float] = []
    for rank, dependency, lag, slot in steps:
        start = clock[rank]
        if dependency >= 0:
            arrival = ends[dependency] + lags[lag]
            if arrival > start:
                start = arrival
        clock[rank] = end = start + durations[slot]
        ends.append(end)
    busy = tuple(sum(compute[slot] * count for slot, count in row) for row in program.slots)
    recorded: list[Event] = []
    if events:
        for (rank, _, _, slot), (_, _, _, paid), action, end in zip(
            program.steps, steps, program.what, ends, strict=True
        ):
            if transfer is Transfer.SENDER:
                end -= durations[paid] - compute[slot]
            recorded.append(Event(rank, action.chunk, action.micro_batch, action.kind, end - compute[slot], end))
    return Timeline(max(clock), tuple(clock), busy, tuple(recorded))


def _durations(program: _Program, chunks: Sequence[ChunkTimes]) -> list[float]:
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


def _lags(program: _Program, send_forward_s: Sequence[float], send_backward_s: Sequence[float]) -> list[float]:
    boundaries = program.num_chunks - 1
    for name, values in (("send_forward_s", send_forward_s), ("send_backward_s", send_backward_s)):
        if (values and len(values) != boundaries) or min(values, default=0.0) < 0:
            raise ScheduleError(
                f"{name} must be {boundaries} times of at least 0 (one per boundary), not {list(values)}"
            )
    nothing = [0.0] * boundaries
    return [0.0, *(send_forward_s or nothing), 0.0, *(send_backward_s or nothing)]


def _paid(
    program: _Program, durations: list[float], lags: list[float], transfer: Transfer
) -> tuple[list[tuple[int, int, int, int]], list[float]]:
    """Steps whose durations contain the transfers that they pay for: each gets a slot of its own."""
    extra = [0.0] * len(program.steps)
    for index, step in enumerate(program.steps):
        if transfer is Transfer.RECEIVER:
            extra[index] += lags[step.lag]
        elif step.dependency >= 0:
            extra[step.dependency] += lags[step.lag]
    steps = [(step.rank, step.dependency, _NO_LAG, index) for index, step in enumerate(program.steps)]
    return steps, [durations[step.slot] + more for step, more in zip(program.steps, extra, strict=True)]


def lower_bound_1f1b(chunk_s: Sequence[float], num_micro_batches: int, send_s: Sequence[float] = ()) -> float:
    """`max_s (m T_s + sum_{i<s} T_i)`: no step of GPipe or 1F1B, with one chunk per stage, is shorter.

    Args:
        chunk_s: T_s, forward plus backward of one micro-batch on each stage.
        send_s: per boundary, forward plus backward; none: 0.

    Proof: stage s starts after the forwards of the first micro-batch on the stages before it, computes m T_s, and after
    its last backward those of the same micro-batch follow on the stages before it.
    """
    sends = send_s or [0.0] * (len(chunk_s) - 1)
    before = accumulate((t + send for t, send in zip(chunk_s, sends, strict=False)), initial=0.0)
    return max(num_micro_batches * t + b for t, b in zip(chunk_s, before, strict=True))


def bound_1f1b(
    forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int, send_s: Sequence[float] = ()
) -> float:
    """A lower bound of the 1F1B step that knows forwards from backwards; never below `lower_bound_1f1b`.

    With w_s = min(m, p - s) forwards before the first backward of stage s (m: fewer micro-batches than stages), and

        E_s = (w_s - 1) (max_{t<=s} f_t - f_s + max_{t<=s} b_t - b_s)    slower stages before s, filling and draining
        A_s = m T_s + sum_{i<s} T_i + E_s                                 stage s is never idle in between
        D_s = sum_i T_i + (m - 1) T_s - (w_s - 1) (f_s + b_s - max_{t<=s} b_t)    it waits for its first backward

    the bound is max_s max(A_s, D_s), sums over stages with the sends between them. Both are lengths of paths through
    the actions. A_s: the forwards 0 .. w_s - 1 on stage t, the last of them on to s, everything else on s up to
    backward m - w_s, that one back to t', where the rest of the backwards follow. D_s: forward 0 through all stages
    and back to s, from there as before. A_s needs the stages up to s only, D_s those and the sum over all, so both
    serve a dynamic programme from left to right.
    """
    num_stages = len(forward_s)
    sends = [*send_s, 0.0] if send_s else [0.0] * num_stages
    total = sum(forward_s) + sum(backward_s) + sum(sends)
    best = before = most_f = most_b = 0.0
    for s, (f, b, send) in enumerate(zip(forward_s, backward_s, sends, strict=True)):
        warm = num_micro_batches if num_micro_batches < num_stages else num_stages - s
        most_f, most_b = max(most_f, f), max(most_b, b)
        drain = (warm - 1) * (most_b - b)
        alone = num_micro_batches * (f + b) + before + (warm - 1) * (most_f - f) + drain
        waits = total + (num_micro_batches - 1) * (f + b) - (warm - 1) * f + drain
        best = max(best, alone, waits)
        before += f + b + send
    return best
