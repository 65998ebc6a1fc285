"""The order of actions under each pipeline schedule: the forwards, backwards and split backwards that one rank runs.

Every order is a function of (rank, number of ranks, number of micro-batches, the chunks of this rank in model order).
`autoplan.schedules.schedule.SCHEDULES` names them and says which chunks a rank holds.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """The kind of work for one micro-batch; the value is torch's letter. I and W are the two parts of a split B."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


F, B, I, W = ActionKind  # noqa: E741


class Action(NamedTuple):
    """One action of one rank. `chunk` counts over the whole pipeline, in model order.

    `joined`: run together with the next action (torch's OVERLAP_F_B): its result exists when both have ended.
    """

    kind: ActionKind
    chunk: int
    micro_batch: int
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.micro_batch}"  # as torch writes it


def gpipe(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return all forwards, then all backwards (Huang et al., GPipe, 2019; torch's ScheduleGPipe)."""
    (chunk,) = chunks
    return [Action(kind, chunk, m) for kind in (F, B) for m in range(num_micro_batches)]


def one_f_one_b(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the 1F1B order (Narayanan et al., PipeDream, 2019; torch's Schedule1F1B).

    torch refuses fewer micro-batches than stages; the order is then GPipe's, which the runtime runs instead.
    """
    if num_micro_batches < num_stages:
        return gpipe(rank, num_stages, num_micro_batches, chunks)
    return _warmed_up(num_stages, num_micro_batches, chunks, num_stages - 1 - rank)


def interleaved(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the interleaved 1F1B order, as torch's ScheduleInterleaved1F1B has it.

    Source: Narayanan et al., Megatron-LM, 2021, section 2.2.
    """
    warmup = (len(chunks) - 1) * _round_size(num_stages, num_micro_batches) + 2 * (num_stages - 1 - rank)
    return _warmed_up(num_stages, num_micro_batches, chunks, warmup)


def zero_bubble(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the ZB-H1 order, as torch's ScheduleInterleavedZeroBubble has it.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023. A weight gradient follows its input gradient with a delay
    of `rank` input gradients.
    """
    warmup = (len(chunks) - 1) * _round_size(num_stages, num_micro_batches) + num_stages - 1 - rank
    return _warmed_up(num_stages, num_micro_batches, chunks, warmup, weights_behind=rank)


def zero_bubble_v(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the ZB-V order, as torch's ScheduleZBVZeroBubble has it.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6. With fewer than 2 num_stages - 1
    micro-batches, it is the order for 2 num_stages - 1 without the actions of the missing micro-batches.
    """
    first, second = chunks
    out: list[Action] = []
    done: Counter[tuple[ActionKind, int]] = Counter()
    total = max(2 * num_stages - 1, num_micro_batches)

    def run(chunk: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            out.append(Action(kind, chunk, done[kind, chunk]))
            done[kind, chunk] += 1

    for _ in range(2 * (num_stages - rank) - 1):
        run(first, F)
    for _ in range(rank):
        run(second, F)
        run(first, F)
    for _ in range(num_stages - rank):
        run(second, F, I, W)
    while done[F, second] < total:
        if done[F, first] < total:
            run(first, F)
        run(first, I, W)
        run(second, F, I, W)
    for _ in range(rank):
        run(first, I)
        run(second, I)
    for _ in range(num_stages - rank):
        run(first, I, W)
    for chunk in (second, first):
        while done[W, chunk] < total:
            run(chunk, W)
    return [action for action in out if action.micro_batch < num_micro_batches]


def dual_pipe_v(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the order of DualPipeV, as torch's ScheduleDualPipeV has it.

    It is DualPipe (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1) cut in half, so that no parameters
    are held twice (Qi et al., DualPipe could be better without the Dual, 2025). A forward is joined with a backward of
    the other chunk, except where nothing is gained. Backwards are split where that fills the bubble: the first ones of
    the second chunk, and the second half of the last ones.
    """
    first, second = chunks
    behind = num_stages - 1 - rank  # ranks between this one and the turn of the V
    out: list[Action] = []
    done: Counter[tuple[bool, int]] = Counter()
    weights: deque[tuple[int, int]] = deque()  # chunk and micro-batch of weight gradients that are still to come

    def run(kind: ActionKind, chunk: int, joined: bool = False) -> None:
        micro_batch = done[kind is F, chunk]
        out.append(Action(kind, chunk, micro_batch, joined))
        done[kind is F, chunk] += 1
        if kind is I:
            weights.append((chunk, micro_batch))

    def run_weight() -> None:
        out.append(Action(W, *weights.popleft()))

    for _ in range(2 * behind):
        run(F, first)
    for _ in range(rank + 1):
        run(F, first)
        run(F, second)
    for _ in range(behind):
        run(I, second)
        run_weight()
        run(F, second)
    for step in range(num_micro_batches - num_stages - behind):
        run(F, first, joined=step > 0 or behind > 0)
        run(B, second)
        run(F, second, joined=True)
        run(B, first)
    for _ in range(behind):
        run(B, second)
        run(F, second, joined=True)
        run(B, first)
    for step in range(2 * (rank + 1)):
        run(B if step <= rank else I, first if step % 2 else second)
    for _ in range(behind):
        run_weight()
        run(I, first)
    while weights:
        run_weight()
    return out


def dual_pipe(rank: int, num_stages: int, num_micro_batches: int, chunks: tuple[int, ...]) -> list[Action]:
    """Return the order of DualPipe.

    Sources: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1 and figure 5; `DualPipe.step` in
    github.com/deepseek-ai/DualPipe.

    Micro-batches of the first half enter at the first rank and visit the stages downwards. Those of the second half
    enter at the last rank and visit the stages upwards, so every rank holds its own stage and the stage of its mirror
    rank. To a rank it is DualPipeV on half as many ranks: the direction that enters at its end of the pipeline is the
    first chunk.
    """
    near, far = chunks
    half = num_micro_batches // 2
    folded = dual_pipe_v(min(rank, num_stages - 1 - rank), num_stages // 2, half, (near, far))
    return [a if a.chunk == rank else a._replace(micro_batch=half + a.micro_batch) for a in folded]


def num_rounds(num_stages: int, num_micro_batches: int) -> int:
    """Return the number of rounds, of about num_stages micro-batches, in a schedule with several chunks per rank."""
    return max(1, num_micro_batches // num_stages)


def _round_size(num_stages: int, num_micro_batches: int) -> int:
    return num_micro_batches // num_rounds(num_stages, num_micro_batches)


def _warmed_up(
    num_stages: int, num_micro_batches: int, chunks: tuple[int, ...], warmup: int, weights_behind: int | None = None
) -> list[Action]:
    """Return forwards alone, then alternating forwards and backwards, then backwards alone.

    Chunks take turns after every round of micro-batches: forwards from the first chunk on, backwards from the last.

    Args:
        warmup: The number of forwards before the first backward.
        weights_behind: Splits the backwards; a weight gradient comes this many micro-batches after its input gradient.
    """
    size = _round_size(num_stages, num_micro_batches)
    total = num_micro_batches * len(chunks)
    alone = min(warmup, total)
    backward = B if weights_behind is None else I
    forwards = _in_rounds(F, chunks, num_micro_batches, size)
    backwards = _in_rounds(backward, chunks[::-1], num_micro_batches, size)
    both = total - alone  # backwards with a forward before them
    if weights_behind is None:
        out = forwards[:alone] + [forwards[-1]] * (2 * both)
        out[alone::2], out[alone + 1 :: 2] = forwards[alone:], backwards[:both]
        return out + backwards[both:]
    weights = _in_rounds(W, chunks[::-1], num_micro_batches, size)
    out = forwards[:alone]
    for step, action in enumerate(backwards):
        out += forwards[alone + step : alone + step + 1]
        out.append(action)
        out += weights[step - weights_behind : step - weights_behind + 1] if step >= weights_behind else ()
    return out + weights[max(0, total - weights_behind) :]


def _in_rounds(kind: ActionKind, chunks: tuple[int, ...], num_micro_batches: int, size: int) -> list[Action]:
    """Return the actions of one kind: for every round of `size` micro-batches, all of them on one chunk after another.

    With several chunks, the micro-batches are a multiple of `size`.
    """
    ends = [(first, min(first + size, num_micro_batches)) for first in range(0, num_micro_batches, size)]
    each = [(kind, chunk, m, False) for first, end in ends for chunk in chunks for m in range(first, end)]
    return list(map(Action._make, each))
