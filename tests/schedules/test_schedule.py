"""Pipeline schedules: torch's own order, dependencies, closed forms, bounds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parity import spread_out
from schedule_bounds import bound_1f1b, lower_bound_1f1b
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from typer.testing import CliRunner

from autoplan import cli
from autoplan.codegen.schedules import schedule_spec
from autoplan.cost_models.time.simulation import ChunkTimes, Timeline, simulate
from autoplan.errors import PinError
from autoplan.runtime.pipeline import class_of
from autoplan.schedules.dependencies import ScheduleError
from autoplan.schedules.graph import action_graph, deadlock
from autoplan.schedules.orders import Action, ActionKind
from autoplan.schedules.schedule import (
    SCHEDULES,
    ActionLists,
    Transfer,
    actions,
    chunks_of_ranks,
    held_at_backwards,
    ranks_of_chunks,
)

F, B, I, W = ActionKind  # noqa: E741
SHAPES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 16, 21)]


def peaks(table: ActionLists, chunk_bytes: Sequence[float]) -> tuple[float, ...]:
    """Per rank the most that its chunks hold together, as memory counts it."""
    return tuple(float(row.held(np.array(chunk_bytes)).max()) for row in table.held)


class _Stage:
    """Stands in for a PipelineStage and notes what a schedule makes it do."""

    def __init__(self, rank: int) -> None:
        self.stage_index = rank
        self.ran: list[str] = []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.ran.append(f"{self.stage_index}F{index}")

    def backward_one_chunk(self, index: int, **kwargs: Any) -> None:
        self.ran.append(f"{self.stage_index}B{index}")

    def perform_reduce_grad(self, factor: int) -> None:
        pass

    def _nothing(self, index: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing


def _run_by_torch(kind: type, rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    """The calls that a single-chunk schedule of torch makes. Its `_get_pipeline_order` is a drawing for people, which
    leaves out micro-batch 0 of the last stage of 1F1B."""
    schedule = object.__new__(kind)
    stage = _Stage(rank)
    schedule._stage, schedule._n_microbatches, schedule._num_stages = stage, num_micro_batches, num_stages
    schedule.scale_grads = False
    schedule._check_inputs = lambda *_: ([()] * num_micro_batches, [{}] * num_micro_batches)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, lambda *_: None)
    schedule._step_microbatches()
    return stage.ran


def _ordered_by_torch(kind: type, rank: int, num_stages: int, num_micro_batches: int, virtual: int) -> list[str]:
    """The order that a multi-chunk schedule of torch computes."""
    schedule = object.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = num_stages, virtual, num_micro_batches
    schedule.microbatches_per_round = num_micro_batches // max(1, num_micro_batches // num_stages)
    schedule.num_stages, schedule._stages = num_stages * virtual, [None] * virtual
    found = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
    # a pair that overlaps: `+` after its forward
    return ["+ ".join(map(str, a.sub_actions)) if a.sub_actions else str(a) for a in found]


def _written(row: Sequence[Action]) -> list[str]:
    """Actions as torch writes them."""
    return [f"{a}+" if a.joined else str(a) for a in row]


def _by_torch(kind: type, rank: int, num_stages: int, num_micro_batches: int, virtual: int) -> list[str]:
    if not issubclass(kind, torch_schedules.PipelineScheduleSingle):
        return " ".join(_ordered_by_torch(kind, rank, num_stages, num_micro_batches, virtual)).split(" ")
    if kind is torch_schedules.Schedule1F1B and num_micro_batches < num_stages:  # which it refuses
        kind = torch_schedules.ScheduleGPipe
    return _run_by_torch(kind, rank, num_stages, num_micro_batches)


@pytest.mark.parametrize("name", spread_out([s.name for s in SCHEDULES.values() if s.torch_class is not None], 4))
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_order_and_placement_of_what_is_executed_are_those_of_its_torch_class(name: str, p: int, m: int) -> None:
    record = SCHEDULES[name]
    kind = class_of(schedule_spec(name))
    fewest, most = record.virtual_stages
    for virtual in range(fewest, fewest + 3 if most is None else most + 1):
        homes = generate_stage_to_rank_mapping(p, p * virtual, style=record.placement.value)
        assert ranks_of_chunks(name, p, virtual) == tuple(homes[chunk] for chunk in range(p * virtual))
        if m < record.least_rounds * p:  # so does torch
            with pytest.raises(PinError, match=f"nearest legal: num_micro_batches={record.least_rounds * p}"):
                actions(name, p, m, virtual)
        elif record.rounds and m % max(1, m // p):
            with pytest.raises(PinError, match=r"equal; nearest legal: num_micro_batches=\d+ or \d+"):
                actions(name, p, m, virtual)
        else:
            table = actions(name, p, m, virtual)
            assert len(simulate(table, [ChunkTimes(1, 2, 1)] * (p * virtual)).events) == sum(map(len, table))
            for rank, row in enumerate(table):
                assert _written(row) == _by_torch(kind, rank, p, m, virtual)


def test_chunks_are_placed_in_loops_in_a_v_or_in_both_directions() -> None:
    assert chunks_of_ranks("Interleaved1F1B", 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert chunks_of_ranks("ZBV", 3, 2) == ((0, 5), (1, 4), (2, 3))
    assert chunks_of_ranks("DualPipe", 4, 1) == ((0, 3), (1, 2), (1, 2), (0, 3))
    with pytest.raises(PinError, match="not known; use GPipe"):
        ranks_of_chunks("Dualpipe", 2, 2)


def _legal() -> st.SearchStrategy[tuple[str, int, int, int]]:
    def fits(case: tuple[str, int, int, int]) -> bool:
        name, p, m, virtual = case
        rule = SCHEDULES[name]
        rounds = m >= rule.least_rounds * p and (not rule.rounds or m % max(1, m // p) == 0)
        return rule.takes(virtual) and rounds and p % rule.num_copies == m % rule.num_copies == 0

    cases = itertools.product(SCHEDULES, (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3))
    return st.sampled_from([case for case in cases if fits(case)])


TIMES = st.floats(0.0, 10.0, allow_subnormal=False)


@st.composite
def _run(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], list[ChunkTimes], list[float], list[float], Transfer]:
    case = draw(_legal())
    count = case[1] * case[3]
    chunks = []
    for _ in range(count):
        weight = draw(TIMES)
        chunks.append(ChunkTimes(draw(TIMES), weight + draw(TIMES), weight, draw(TIMES), draw(TIMES)))
    sends = st.lists(TIMES, min_size=count - 1, max_size=count - 1)
    return case, chunks, draw(sends), draw(sends), draw(st.sampled_from(Transfer))


@given(_run())
def test_every_timeline_respects_what_actions_wait_for(run: Any) -> None:
    (name, p, m, virtual), chunks, forward, backward, transfer = run
    table = actions(name, p, m, virtual)
    timeline = simulate(table, chunks, forward, backward, transfer=transfer)
    ends = {(e.kind, e.chunk, e.micro_batch): e for e in timeline.events}
    assert len(ends) == len(timeline.events)
    whole, split = frozenset((F, B)), frozenset((F, I, W))
    kinds: dict[tuple[int, int], set[ActionKind]] = {}
    for kind, chunk, mb in ends:
        kinds.setdefault((chunk, mb), set()).add(kind)
    assert set(kinds) == set(itertools.product(range(p * virtual), range(m)))
    legal = {split if SCHEDULES[name].split_backward else whole} | ({whole} if "DualPipe" in name else set())
    assert set(map(frozenset, kinds.values())) <= legal
    homes, near = {(a.chunk, a.micro_batch): rank for rank, row in enumerate(table) for a in row}, 1e-9
    first_way = {chunk: homes[chunk, 0] for chunk in range(p * virtual)}
    assert tuple(first_way.values()) == ranks_of_chunks(name, p, virtual)
    for rank, row in enumerate(table):
        mine = [ends[a[:3]] for a in row]
        for earlier, later in itertools.pairwise(mine):
            assert earlier.end_s <= later.start_s + near
        assert all(e.rank == rank for e in mine)
        assert timeline.rank_end_s[rank] >= mine[-1].end_s - near
        assert timeline.busy_s[rank] == pytest.approx(sum(e.end_s - e.start_s for e in mine))
    there = {key: event.end_s for key, event in ends.items()}  # when the result may leave
    for row in table:
        there |= {a[:3]: ends[b[:3]].end_s for a, b in itertools.pairwise(row) if a.joined}
    for (kind, chunk, mb), event in ends.items():
        if kind is F and chunk > 0:
            lag = forward[chunk - 1] if homes[chunk - 1, mb] != homes[chunk, mb] else 0.0
            assert there[F, chunk - 1, mb] + lag <= event.start_s + near
        if kind in (B, I):
            assert there[F, chunk, mb] <= event.start_s + near
            if chunk < p * virtual - 1:
                lag = backward[chunk] if homes[chunk + 1, mb] != homes[chunk, mb] else 0.0
                later = (B if B in kinds[chunk + 1, mb] else I, chunk + 1, mb)
                assert there[later] + lag <= event.start_s + near
        if kind is W:
            assert ends[I, chunk, mb].end_s <= event.start_s + near
    c = chunks[0]
    extras = c.first_forward_extra_s + c.last_backward_extra_s
    want = m * (c.forward_s + c.backward_s) + SCHEDULES[name].num_copies * extras  # each copy has its own
    assert sum(e.end_s - e.start_s for e in timeline.events if e.chunk == 0) == pytest.approx(want)
    quick = simulate(table, chunks, forward, backward, transfer=transfer, events=False)
    assert (quick.end_s, quick.rank_end_s, quick.busy_s) == (timeline.end_s, timeline.rank_end_s, timeline.busy_s)


@given(_run(), st.data())
def test_no_duration_shortens_the_step(run: Any, data: st.DataObject) -> None:
    (name, p, m, virtual), chunks, forward, backward, transfer = run
    table = actions(name, p, m, virtual)
    before = simulate(table, chunks, forward, backward, transfer=transfer, events=False).end_s
    where, more = data.draw(st.integers(0, len(chunks) - 1)), data.draw(TIMES)
    c = chunks[where]
    longer = [
        ChunkTimes(c.forward_s + more, c.backward_s, c.weight_s, c.first_forward_extra_s, c.last_backward_extra_s),
        ChunkTimes(c.forward_s, c.backward_s + more, c.weight_s, c.first_forward_extra_s, c.last_backward_extra_s),
        ChunkTimes(c.forward_s, c.backward_s + more, c.weight_s + more, c.first_forward_extra_s, 11.0),
        replace(c, split_extra_s=more),
    ]
    for other in longer:
        chunks[where] = other
        assert simulate(table, chunks, forward, backward, transfer=transfer, events=False).end_s >= before - 1e-9
    chunks[where] = c
    if forward:
        forward[where - 1] += more
        assert simulate(table, chunks, forward, backward, transfer=transfer, events=False).end_s >= before - 1e-9
    overlapped = simulate(table, chunks, forward, backward, events=False).end_s
    assert overlapped <= simulate(table, chunks, forward, backward, transfer=transfer, events=False).end_s + 1e-9


@given(st.integers(1, 8), st.integers(1, 20), st.data())
def test_bounds_stay_below_the_simulation(p: int, m: int, data: st.DataObject) -> None:
    times = st.lists(TIMES, min_size=p, max_size=p)
    forward, backward = data.draw(times), data.draw(times)
    sends = data.draw(times)[1:]
    chunks = [ChunkTimes(f, b) for f, b in zip(forward, backward, strict=True)]
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    both = [2 * s for s in sends]
    for name in ("1F1B", "GPipe"):
        for transfer in Transfer:
            end = simulate(actions(name, p, m), chunks, sends, sends, transfer=transfer, events=False).end_s
            bound = lower_bound_1f1b(whole, m, both)
            assert lower_bound_1f1b(whole, m) <= bound + 1e-9 <= end + 1e-8
            if name == "1F1B":
                assert bound <= bound_1f1b(forward, backward, m, both) + 1e-9 <= end + 1e-8


def test_bounds_are_exact_where_stages_are_equal_or_one_dominates() -> None:
    for p, m in SHAPES:
        assert bound_1f1b([1.0] * p, [2.0] * p, m) == (m + p - 1) * 3.0 == lower_bound_1f1b([3.0] * p, m)
    slow_first = simulate(actions("1F1B", 4, 8), [ChunkTimes(9, 9), *[ChunkTimes(1, 1)] * 3], events=False).end_s
    assert slow_first == bound_1f1b([9, 1, 1, 1], [9, 1, 1, 1], 8) == lower_bound_1f1b([18, 2, 2, 2], 8) == 144


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_equal_stages_have_the_closed_form(name: str, p: int, m: int) -> None:
    timeline = simulate(actions(name, p, m), [ChunkTimes(1.0, 2.0)] * p)
    assert timeline.end_s == (m + p - 1) * 3.0
    assert timeline.busy_s == (m * 3.0,) * p
    assert timeline.bubble_s == ((p - 1) * 3.0,) * p


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaving_and_splitting_shrink_the_bubble(p: int, m: int, v: int) -> None:
    plain = simulate(actions("1F1B", p, m), [ChunkTimes(1.0 * v, 2.0 * v)] * p).bubble_s[0]
    interleaved = simulate(actions("Interleaved1F1B", p, m, v), [ChunkTimes(1.0, 2.0)] * (p * v)).bubble_s[0]
    assert interleaved == pytest.approx(plain / v)  # Narayanan et al., 2021, section 2.2.2
    split = simulate(actions("ZB-H1", p, m), [ChunkTimes(1.0 * v, 2.0 * v, 1.0 * v)] * p).bubble_s[0]
    assert split == pytest.approx((p - 1) * v)  # (p - 1) (f + b - 2 w) with b the whole backward: Qi et al., table 2
    assert split < plain


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zbv_has_no_bubble_and_the_memory_of_1f1b(p: int) -> None:
    """Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6: no rank waits between its first and last action if
    forward, input and weight gradient are equal; the peak is that of 1F1B's first rank, now on every rank."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 4 * p):
        table = actions("ZBV", p, m, 2)
        timeline = simulate(table, [ChunkTimes(1.0, 2.0, 1.0)] * (2 * p))
        for rank, busy in enumerate(timeline.busy_s):
            mine = [e for e in timeline.events if e.rank == rank]
            assert mine[-1].end_s - mine[0].start_s == busy == 6.0 * m
            assert mine[0].start_s == rank
        assert peaks(table, [0.5] * (2 * p)) == (float(p),) * p
        assert max(peaks(actions("1F1B", p, m), [1.0] * p)) == p
    few = simulate(actions("ZBV", p, p, 2), [ChunkTimes(1.0, 2.0, 1.0)] * (2 * p))
    assert few.bubble_s[0] == 2.0 * (p - 1)  # too few micro-batches to fill it


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_dual_pipe_v_has_the_published_bubble_and_memory(p: int) -> None:
    """(PP / 2 - 1) (F&B + B - 3 W) and PP + 1 chunks, of PP = 2 p stages (DualPipe's README; a pair takes F + B)."""
    for m in (2 * p, 2 * p + 1, 4 * p):
        table = actions("DualPipeV", p, m, 2)
        timeline = simulate(table, [ChunkTimes(1.0, 2.0, 1.0)] * (2 * p))
        assert timeline.bubble_s == ((p - 1) * (1.0 + 2.0 + 2.0 - 3.0),) * p
        assert peaks(table, [1.0] * (2 * p)) == (2.0 * p + 1,) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dual_pipe_has_the_published_bubble_and_memory(p: int) -> None:
    """(PP / 2 - 1) (F&B + B - 3 W), twice the parameters and PP + 1 activations: DeepSeek-V3 Technical Report, 2024,
    table 2, and DualPipe's README; a pair takes F + B."""
    for m in (2 * p, 2 * p + 2, 4 * p):
        table = actions("DualPipe", p, m)
        for f in (1.0, 2.5):
            timeline = simulate(table, [ChunkTimes(f, 2 * f, f)] * p)
            assert timeline.bubble_s == ((p // 2 - 1) * (f + 2 * f + 2 * f - 3 * f),) * p
        assert peaks(table, [1.0] * p) == (p + 1.0,) * p
        assert [sorted({a.chunk for a in row}) for row in table] == [sorted({r, p - 1 - r}) for r in range(p)]


def test_dual_pipe_feeds_micro_batches_from_both_ends() -> None:
    """The order of figure 5 of the report (8 ranks, 20 micro-batches): a rank starts with the direction that enters at
    its end; rank 0 runs 6 forwards of it alone, its neighbours 2 fewer each. Every micro-batch passes every stage once,
    downwards in the first half, upwards in the second."""
    table = actions("DualPipe", 8, 20)
    firsts = [list(itertools.takewhile(lambda a, row=row: a[:2] == row[0][:2], row)) for row in table]
    assert [len(run) - 1 for run in firsts] == [
        6,
        4,
        2,
        0,
        0,
        2,
        4,
        6,
    ]  # and the one before the other direction's first
    assert [run[0] for run in firsts[:2]] == [Action(F, 0, 0), Action(F, 1, 0)]
    assert [run[0] for run in firsts[-2:]] == [Action(F, 1, 10), Action(F, 0, 10)]
    for rank, row in enumerate(table):
        forwards = [(a.chunk, a.micro_batch) for a in row if a.kind is F]
        here, there = [(rank, m) for m in range(10)], [(7 - rank, m) for m in range(10, 20)]
        assert sorted(forwards) == sorted(here + there)
        mirrored = [a._replace(micro_batch=(a.micro_batch + 10) % 20) for a in table[7 - rank]]
        assert list(row) == mirrored


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_table_of_bubbles_and_activations(p: int, m: int) -> None:
    """The table of autoplan.schedules.schedule, where it claims so with parts of a backward of different lengths."""
    v = 2
    for f, b, w in ((1.0, 2.0, 1.0), (2.0, 6.0, 2.0), (2.0, 3.5, 1.5)):
        rows = {
            "GPipe": (1, (p - 1) * (f + b), m),
            "1F1B": (1, (p - 1) * (f + b), p),
            "Interleaved1F1B": (v, (p - 1) * (f + b) / v, p * (1 + (p - 1) / (p * v))),
            "ZB-H1": (1, (p - 1) * (f + b - 2 * w), p),
        }
        if f == b - w == w:
            rows["DualPipe"] = (1, (p / 2 - 1) * (f + b + b - 3 * w), p + 1)
            rows["DualPipeV"] = (2, (p - 1) * (f + b + b - 3 * w) / 2, p + 0.5)
        for name, (chunks, bubble, held) in rows.items():
            table = actions(name, p, m, chunks)
            num = p * chunks
            timeline = simulate(table, [ChunkTimes(f / chunks, b / chunks, w / chunks)] * num)
            assert max(timeline.bubble_s) == pytest.approx(bubble), (name, f, b, w)
            assert max(peaks(table, [1 / chunks] * num)) == pytest.approx(held), name
    table = actions("ZBV", p, m, 2)
    timeline = simulate(table, [ChunkTimes(1.0, 2.0, 1.0)] * (2 * p))
    assert max(timeline.bubble_s) == p - 1  # only before the first and after the last action
    assert max(peaks(table, [0.5] * (2 * p))) == p


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_in_flight_counts(p: int, m: int) -> None:
    held = [max(held_at_backwards(row)) for row in actions("1F1B", p, m)]
    assert held == [min(m, p - i) for i in range(p)] if m >= p else held == [m] * p
    assert [held_at_backwards(row) for row in actions("GPipe", p, m)] == [(m, m - 1)] * p
    assert peaks(actions("1F1B", p, m), [10.0] * p) == tuple(10.0 * count for count in held)


def test_interleaved_memory_is_the_peak_of_the_sum_not_the_sum_of_peaks() -> None:
    table = actions("Interleaved1F1B", 2, 8, 2)
    together = peaks(table, [1.0] * 4)
    # Megatron: p (1 + (p - 1) / (p v)) micro-batches of a whole rank, here 5 chunks on rank 0.
    assert together == (5.0, 3.0)
    assert [max(held_at_backwards(row)) for row in table] == [5, 3]
    assert peaks(table, [1.0, 0.0, 0.0, 0.0]) == (4.0, 0.0)
    assert [max(held_at_backwards(row)) for row in actions("ZB-H1", 4, 8)] == [4] * 4


def test_refusals_name_what_works() -> None:
    cases: list[tuple[tuple[str, int, int, int], str]] = [
        (("2F2B", 2, 2, 1), "not known; use GPipe, 1F1B, "),
        (("1F1B", 2, 4, 2), "virtual_stages=1"),
        (("Interleaved1F1B", 2, 4, 1), "at least 2 virtual stages"),
        (("Interleaved1F1B", 4, 9, 2), "num_micro_batches=8 or 10"),
        (("1F1B", 0, 4, 1), "num_stages=0"),
        (("GPipe", 2, 0, 1), "num_micro_batches=0"),
        (("ZBV", 2, 4, 3), "2 chunks per rank, .*legal: virtual_stages=2, or for 3 the schedule Interleaved1F1B"),
        (("DualPipeV", 2, 4, 1), "2 chunks per rank, .*legal: virtual_stages=2, or for 1 the schedule GPipe"),
        (("DualPipeV", 4, 7, 2), "at least 2 micro-batches per stage, not 7 on 4 stages; .*num_micro_batches=8"),
        (("DualPipe", 3, 8, 1), "both directions, so num_stages=3 must be even; nearest legal: num_stages=2 or 4"),
        (("DualPipe", 4, 9, 1), "both directions, so num_micro_batches=9 must be even; .*num_micro_batches=8 or 10"),
        (("DualPipe", 4, 6, 1), "at least 2 micro-batches per stage, not 6 on 4 stages; .*num_micro_batches=8"),
    ]
    for arguments, message in cases:
        with pytest.raises(PinError, match=message):
            actions(*arguments)
    for number in (8, 10):
        actions("Interleaved1F1B", 4, number, 2)


def _two_ranks(first: str, second: str) -> list[list[Action]]:
    rows = [[text[i : i + 2] for i in range(0, len(text), 2)] for text in (first, second)]
    return [[Action(ActionKind(t[0]), rank, int(t[1])) for t in row] for rank, row in enumerate(rows)]


def test_a_deadlock_names_who_waits_for_what() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 at 0B0, rank 1 at 1F1, for .*1B0") as error:
        simulate(_two_ranks("F0B0F1B1", "F0F1B0B1"), [ChunkTimes(1, 1)] * 2)
    assert "0F1" in str(error.value)
    circle = "0B0 of rank 0 waits for 1B0 of rank 1", "1B0 comes after 1F1 on rank 1"
    circle += ("1F1 of rank 1 waits for 0F1 of rank 0", "0F1 comes after 0B0 on rank 0")
    assert sorted(str(error.value).split("; ")[1].split(", ")) == sorted(circle)
    with pytest.raises(ScheduleError, match=r"waiting are rank 0 at 0B0.*0F0 comes after 0B0 on rank 0"):
        simulate(_two_ranks("B0F0", "F0B0"), [ChunkTimes(1, 1)] * 2)
    with pytest.raises(ScheduleError, match=r"; nothing makes 0F1, which 1F1 of rank 1 waits for"):
        simulate(_two_ranks("F0B0", "F0B0F1B1"), [ChunkTimes(1, 1)] * 2)


@given(_run())
def test_the_step_is_the_critical_path_of_the_actions(run: Any) -> None:
    """networkx's longest path through what waits for what, where nothing takes time to send."""
    arguments, chunks, *_ = run
    table = actions(*arguments)
    graph = action_graph(table)
    assert deadlock(table) == ""
    timeline = simulate(table, chunks)
    seconds = {(e.rank, e.kind, e.chunk, e.micro_batch): e.end_s - e.start_s for e in timeline.events}
    for before, after in graph.edges:
        action = table[after[0]][after[1]]
        graph.edges[before, after]["s"] = seconds[after[0], action.kind, action.chunk, action.micro_batch]
    for rank, row in enumerate(table):
        first = row[0]
        graph.add_edge("start", (rank, 0), s=seconds[rank, first.kind, first.chunk, first.micro_batch])
    assert timeline.end_s == pytest.approx(nx.dag_longest_path_length(graph, weight="s"))


def test_joined_actions_give_their_results_together() -> None:
    second = [Action(F, 1, 0), Action(F, 1, 1)]
    for joined, end in ((False, 5.0), (True, 6.0)):
        table = [[Action(F, 0, 0, joined), Action(F, 0, 1)], second]
        assert simulate(table, [ChunkTimes(2, 0), ChunkTimes(1, 0)]).end_s == end
    with pytest.raises(ScheduleError, match="rank 1 at 1F0, for 0F0"):
        simulate([[Action(F, 0, 0, True)], [Action(F, 1, 0)]], [ChunkTimes(1, 0)] * 2)


def test_lists_of_ones_own_run_and_extras_count_once() -> None:
    table = _two_ranks("F0F1B0B1", "F0B0F1B1")
    plain = simulate(table, [ChunkTimes(1, 2)] * 2)
    assert plain == simulate(actions("1F1B", 2, 2), [ChunkTimes(1, 2)] * 2)
    extra = simulate(table, [ChunkTimes(1, 2, 0.0, 0.5, 0.25), ChunkTimes(1, 2)])
    assert extra.end_s == plain.end_s + 0.75
    assert extra.busy_s == (6.75, 6.0)
    for name in ("ZBV", "DualPipeV"):  # split backwards and whole ones in one chunk
        busy = simulate(actions(name, 2, 4, 2), [ChunkTimes(1, 2, 1, 0.5, 0.25), *[ChunkTimes(1, 2, 1)] * 3]).busy_s
        assert busy == (24.75, 24.0)


def _transferred(transfer: Transfer) -> Timeline:
    return simulate(actions("1F1B", 2, 2), [ChunkTimes(1, 2)] * 2, [0.5], [0.25], transfer=transfer)


def test_who_pays_for_transfers() -> None:
    # Rank 0: F0 0-1, F1 1-2; rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5 (it arrived long ago), B1 5.5-7.5.
    overlapped = _transferred(Transfer.OVERLAPPED)
    assert overlapped.end_s == 7.5 + 0.25 + 2
    # The receiver takes in micro-batch 1 only when it is free, so the second transfer shows too.
    receiver = _transferred(Transfer.RECEIVER)
    assert receiver.end_s == overlapped.end_s + 0.5
    # The sender holds its own work back: rank 1's B0 is followed by 0.25 of sending.
    sender = _transferred(Transfer.SENDER)
    assert sender.end_s == overlapped.end_s + 0.25
    # Both: rank 1 receives from 1 to 1.5, sends from 4.5 to 4.75, and receives micro-batch 1 after that.
    both = _transferred(Transfer.BOTH)
    assert both.end_s == overlapped.end_s + 0.75
    assert receiver.busy_s == sender.busy_s == both.busy_s == overlapped.busy_s
    ended = {(e.rank, e.micro_batch, e.kind): (e.start_s, e.end_s) for e in both.events}
    assert ended[1, 0, F] == (1.5, 2.5) and ended[1, 0, B] == (2.5, 4.5) and ended[0, 1, B] == (8.5, 10.5)


def test_durations_that_do_not_fit_are_refused() -> None:
    table = actions("1F1B", 2, 2)
    with pytest.raises(ScheduleError, match="2 chunks, durations are given for 3"):
        simulate(table, [ChunkTimes(1, 1)] * 3)
    with pytest.raises(ScheduleError, match="send_backward_s must be 1 times"):
        simulate(table, [ChunkTimes(1, 1)] * 2, [1.0], [1.0, 1.0])
    with pytest.raises(ScheduleError, match="chunk 1: negative"):
        simulate(table, [ChunkTimes(1, 1), ChunkTimes(-1, 1)])
    with pytest.raises(ScheduleError, match="weight gradient longer"):
        simulate(table, [ChunkTimes(1, 1), ChunkTimes(1, 1, 2)])


# -- command line ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ZBV", "DualPipeV"])
def test_v_shaped_schedules_are_priced_by_name(name: str) -> None:
    task = "estimate gpt2 --cluster 1x4xh100-sxm5-80gb --seq-len 1024 --global-batch-size 16 --dp 1 --schedule".split()

    def run(*options: str) -> Any:
        return CliRunner().invoke(cli.app, [*task, name, *options])

    plan = json.loads(run("--pp", "4", "--json").stdout)["plan"]
    assert (plan["schedule"], plan["virtual_stages"], len(plan["stages"])) == (name, 2, 8)


def _priced(schedule: str, *options: str) -> Any:
    task = "estimate llama-2-7b --cluster 1x8xh100-sxm5-80gb --seq-len 1024 --global-batch-size 32 --dp 2 --pp 4 --json"
    return CliRunner().invoke(cli.app, [*task.split(), "--schedule", schedule, *options])


def test_dual_pipe_is_priced_with_both_copies() -> None:
    """Twice the parameters and gradients of ZB-H1 on the same stages; under ZeRO twice as many ranks to shard over, so
    that the optimizer's state does not grow. Without ZeRO it does, and the copies' gradients are reduced too."""
    options = ("--stages", "8,8,8,8", "--zero")
    for zero, growth in (("0", 2.0), ("1", 1.0)):
        both, one = (json.loads(_priced(name, *options, zero).stdout)["estimate"] for name in ("DualPipe", "ZB-H1"))
        pairs = [(0, 3), (1, 2), (1, 2), (0, 3)]
        assert [s["num_layers"] for s in both["stages"]] == [one["stages"][a]["num_layers"] * 2 for a, _ in pairs]

        def held(which: Any, rank: int, term: str) -> float:
            return float(which["memory_bytes"][rank][term]["mid"])

        for rank, pair in enumerate(pairs):
            for term, factor in (("gradients", 2.0), ("parameters", growth), ("optimizer", growth)):
                want = sum(held(one, r, term) for r in pair) * factor / 2
                assert held(both, rank, term) == pytest.approx(want), (zero, rank, term)
            if zero == "1":
                gathered = sum(held(one, r, "gathered parameters") for r in pair)
                assert held(both, rank, "gathered parameters") == pytest.approx(gathered)
        assert both["breakdown_s"]["compute"]["mid"] <= one["breakdown_s"]["compute"]["mid"]
        if zero == "0":
            assert both["breakdown_s"]["dp_comm"]["mid"] > one["breakdown_s"]["dp_comm"]["mid"]
    assert "must be even" in _priced("DualPipe", "--pp", "1", "--dp", "8").stderr


def test_the_step_is_written_as_a_chrome_trace(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    report = json.loads(_priced("1F1B", "--timeline", str(file)).stdout)["estimate"]
    events = json.loads(file.read_text())["traceEvents"]
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]  # nothing temporary is left
    actions_of = [e for e in events if e["ph"] == "X" and e["cat"] != "rest"]
    assert len(actions_of) == 2 * 16 * 4
    assert {e["name"] for e in actions_of if e["tid"] == 3} == {f"3{kind}{m}" for kind in "FB" for m in range(16)}
    for rank in range(4):
        row = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        for earlier, later in itertools.pairwise(row):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-6
        assert row[-1]["ts"] + row[-1]["dur"] == pytest.approx(1e6 * report["step_time_s"]["mid"])
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [f"pipeline rank {r}" for r in range(4)]
    missing = tmp_path / "no" / "step.json"
    refused = _priced("1F1B", "--timeline", str(missing))
    assert refused.exit_code == 2 and f"cannot write {missing}" in refused.stderr


def test_help_lists_every_schedule() -> None:
    option = get_type_hints(cli.estimate, include_extras=True)["schedule"].__metadata__[0]
    assert {text.strip(" .") for text in option.help.split(":")[1].split(",")} == set(SCHEDULES)
