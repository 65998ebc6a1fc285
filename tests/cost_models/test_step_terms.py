"""What blocks, hops and schedules cost at degrees that one rank cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_work import GRADS, SENT, cluster, layer, workload

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.profile import LINK_WORK_S, Profile
from autoplan.cost_models.time.blocks import BlockCost
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.time.simulation import simulate
from autoplan.cost_models.work import Gathered
from autoplan.schedules.schedule import Transfer, actions


def test_every_micro_batch_but_the_first_adds_to_gradients() -> None:
    def accumulated(m: int, zero: int = 0) -> float:
        pricer = Pricer(
            workload(), ParallelConfig(dp=2, zero_stage=zero, num_micro_batches=m), Costs(cluster(2), None, Mode.EAGER)
        )
        breakdown = estimated(pricer, [4], [0]).breakdown
        return breakdown["accumulate"].mid if "accumulate" in breakdown else 0.0

    assert accumulated(1) == 0.0
    assert accumulated(5) == pytest.approx(4 * accumulated(2))
    assert accumulated(5, zero=1) == accumulated(5) > accumulated(5, zero=2) == accumulated(5, zero=3)


def test_measured_copies_of_fully_shard() -> None:
    """The first forward of ZeRO 1 gathers; under ZeRO 3 all passes do, and all backwards reduce."""
    overheads = {"zero_gather_s": 1.0, "zero_gather_byte_s": 0.5, "zero_reduce_s": 90.0, "zero_reduce_tensor_s": 10.0}
    overheads |= {"zero_block_forward_s": 7.0}
    profile = Profile("made up", "cpu", 2, 1, overheads=overheads)
    work, costs = workload(1), Costs(cluster(2), profile, Mode.EAGER)
    plain = Pricer(work, ParallelConfig(dp=2, zero_stage=0, num_micro_batches=3), costs).blocks["layer"]
    gather, reduce = 1.0 + 0.5 * GRADS, 100.0
    for zero, want in {
        1: (7.0, 0.0, gather, reduce),
        2: (7.0, reduce, gather, 0.0),
        3: (7.0 + gather, gather + reduce, 0.0, 0.0),
    }.items():
        block = Pricer(work, ParallelConfig(dp=2, zero_stage=zero, num_micro_batches=3), costs).blocks["layer"]
        got = (block.zero_forward, block.zero_backward, block.zero_first, block.zero_last)
        assert [q.mid for q in got] == pytest.approx(want, rel=1e-3), zero
    assert plain.zero_forward.mid == plain.zero_first.mid == 0.0


@pytest.mark.parametrize(
    ("what", "pp", "schedule", "mode", "again"),
    [
        (Gathered.TWICE, 1, "1F1B", Mode.EAGER, True),
        (Gathered.DROP, 2, "GPipe", Mode.EAGER, False),
        (Gathered.LAST, 1, "1F1B", Mode.EAGER, False),
        (Gathered.LAST, 2, "1F1B", Mode.COMPILED, False),
        (Gathered.LAST, 2, "GPipe", Mode.EAGER, True),
        (Gathered.DROP, 1, "1F1B", Mode.FUSED, True),
    ],
)
def test_what_zero_3_gathers_for_a_backward(what: Gathered, pp: int, schedule: str, mode: Mode, again: bool) -> None:
    def cost(gathered: Gathered, zero: int) -> BlockCost:
        block = replace(layer(), ops=(), gathered=gathered)  # nothing to hide behind
        config = ParallelConfig(dp=2, pp=pp, zero_stage=zero, num_micro_batches=2, schedule=schedule)
        return Pricer(workload(2, block=block), config, Costs(cluster(2 * pp), None, mode)).blocks["layer"]

    reduced = cost(what, 2).zero_backward.mid
    assert cost(what, 3).zero_forward.mid == cost(Gathered.TWICE, 3).zero_forward.mid > 0
    assert (cost(what, 3).zero_backward.mid > reduced) == again
    assert cost(what, 3).zero_backward.mid == (cost(Gathered.TWICE, 3).zero_backward.mid if again else reduced) > 0


def test_collectives_wait_for_stragglers() -> None:
    """As the square root of what was computed since the last one, beyond what the links were measured between."""
    profile = Profile("made up", "cpu", 2, 1, overheads={"straggler_sqrt_s": 0.1})
    costs = Costs(cluster(2), profile, Mode.EAGER)
    assert costs.wait_s(LINK_WORK_S).mid == costs.wait_s(LINK_WORK_S / 2).mid == 0.0
    assert costs.wait_s(4 * LINK_WORK_S, 3).mid == pytest.approx(3 * 0.1 * LINK_WORK_S**0.5)
    slow = replace(layer(), ops=(replace(layer().ops[0], flops=1e11),))
    for zero, gathers, reduces in ((1, 1, 1), (3, 2, 1)):
        config = ParallelConfig(dp=2, zero_stage=zero)
        with_, without = (
            Pricer(workload(1, block=slow), config, Costs(cluster(2), p, Mode.EAGER)).step_s([1], [0])
            for p in (profile, replace(profile, overheads={}))
        )
        least = costs.wait_s(0.1).mid
        assert (gathers + reduces - 1) * least < with_ - without < (gathers + reduces + 1) * costs.wait_s(0.3).mid


def test_hops_between_nodes_cost_more() -> None:
    work = replace(workload(16), cut_bytes=(16e6,) * 15)
    pricer = Pricer(work, ParallelConfig(tp=4, pp=4), Costs(cluster(16, 8), None, Mode.EAGER))
    inside, between, inside_too, back = (hop[0] for hop in pricer.hops)
    assert inside == inside_too < between / 3 and back == between


def test_split_backwards_fill_the_bubble() -> None:
    def bubble(schedule: str, mode: Mode = Mode.EAGER, again: int = 0) -> float:
        config = ParallelConfig(pp=4, num_micro_batches=8, schedule=schedule)
        pricer = Pricer(workload(), config, Costs(cluster(4), None, mode))
        return estimated(pricer, [1] * 4, [again] * 4).breakdown["bubble"].mid

    assert bubble("ZB-H1") < 0.7 * bubble("1F1B")
    # compiled layers, and those that are computed again, have a backward in one part
    assert bubble("ZB-H1", Mode.COMPILED) == pytest.approx(bubble("1F1B", Mode.COMPILED))
    assert bubble("ZB-H1", again=1) == pytest.approx(bubble("1F1B", again=1))


def test_what_is_computed_again_under_a_split_backward_is_so_once() -> None:
    def recompute(schedule: str) -> float:
        config = ParallelConfig(pp=4, num_micro_batches=8, schedule=schedule)
        pricer = Pricer(workload(), config, Costs(cluster(4), None, Mode.EAGER))
        return estimated(pricer, [1] * 4, [1] * 4).breakdown["recompute"].mid

    assert recompute("ZB-H1") == recompute("1F1B") > 0


def in_v_shape(schedule: str, cuts: tuple[float, ...] = (SENT,) * 7, per_node: int = 0) -> Pricer:
    config = ParallelConfig(pp=4, num_micro_batches=8, schedule=schedule, virtual_stages=2)
    work = replace(workload(8), cut_bytes=cuts)
    return Pricer(work, config, Costs(cluster(4, per_node), None, Mode.EAGER))


def test_schedules_in_v_shape_are_priced_where_their_chunks_are() -> None:
    zbv = estimated(in_v_shape("ZBV"), [1] * 8, [0] * 8, events=True)
    assert {(e.chunk, e.rank) for e in zbv.events} == {(k, min(k, 7 - k)) for k in range(8)}
    config = ParallelConfig(pp=4, num_micro_batches=8, schedule="ZB-H1")
    plain = estimated(Pricer(workload(8), config, Costs(cluster(4), None, Mode.EAGER)), [2] * 4, [0] * 4)
    assert zbv.breakdown["bubble"].mid < plain.breakdown["bubble"].mid
    for schedule in ("ZBV", "DualPipeV"):
        estimate = estimated(in_v_shape(schedule), [1] * 8, [1, 0, 0, 0, 0, 0, 1, 1])
        assert [s.num_recomputed for s in estimate.stages] == [2, 1, 0, 0]
        assert sum(q.mid for q in estimate.breakdown.values()) == pytest.approx(estimate.step_time_s.mid, rel=1e-9)


def test_nothing_is_sent_at_the_turn_of_a_v() -> None:
    def step(schedule: str, at: int) -> float:
        cuts = tuple(1e9 if k == at else SENT for k in range(7))
        return in_v_shape(schedule, cuts).step_s([1] * 8, [0] * 8)

    for schedule in ("ZBV", "DualPipeV"):
        assert step(schedule, 3) == step(schedule, -1) < step(schedule, 2) - 0.1
        assert step(schedule, 3) < step(schedule, 4) - 0.1


def test_the_way_back_of_a_v_takes_the_links_of_the_way_there() -> None:
    """Two nodes of two: only the boundaries between ranks 1 and 2 leave a node; in a loop also from the last rank."""
    pricer = in_v_shape("ZBV", per_node=2)
    between = [None if group is None else group.stride > 1 for group in pricer.boundary_groups]
    assert between == [False, True, False, None, False, True, False]
    config = replace(pricer.config, schedule="Interleaved1F1B")
    loop = Pricer(pricer.workload, config, pricer.costs).boundary_groups
    assert [group is not None and group.stride > 1 for group in loop] == [False, True, False, True, False, True, False]


def test_dual_pipe_hides_its_transfers() -> None:
    """Behind the pairs of a forward and a backward; a receiver would have to wait for each."""
    pricer = in_v_shape("DualPipeV", (1e6,) * 7)
    times, table = pricer.chunk_times([1] * 8, [0] * 8, "mid"), actions("DualPipeV", 4, 8, 2)
    sends = [0.0 if k == 3 else pricer.hops[0][k] for k in range(7)]
    found = estimated(pricer, [1] * 8, [0] * 8, events=True).events
    assert found == simulate(table, times, sends, sends, transfer=Transfer.OVERLAPPED).events
    waiting = simulate(table, times, sends, sends, transfer=Transfer.RECEIVER)
    assert max(e.end_s for e in found) < waiting.end_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_breakdown_adds_up(zero: int, pp: int) -> None:
    config = ParallelConfig(pp=pp, dp=2, zero_stage=zero, num_micro_batches=4)
    pricer = Pricer(workload(), config, Costs(cluster(2 * pp), None, Mode.EAGER))
    estimate = estimated(pricer, {1: [4], 2: [1, 3], 4: [1] * 4}[pp], [0] * pp)
    assert sum(q.mid for q in estimate.breakdown.values()) == pytest.approx(estimate.step_time_s.mid, rel=1e-9)
    assert estimate.step_time_s.tag == max(q.tag for q in estimate.breakdown.values())


@pytest.mark.parametrize(("device", "paid"), [("cuda", 1), ("cpu", 4)])
def test_what_zero_moves_once_per_step_is_paid_once_on_gpus(device: str, paid: int) -> None:
    """All ranks gather at the same time there; over gloo every stage does it before it sends."""
    fast = Device("made up", 1e12, 1e11, 1 << 40, "made up")
    machines = Cluster(1, 8, fast, Level(1e-3, 1e10, "made up"), device)
    work = replace(workload(), cut_bytes=(0.0,) * 3)
    config = ParallelConfig(pp=4, dp=2, zero_stage=1, num_micro_batches=8)
    pricer = Pricer(work, config, Costs(machines, None, Mode.FUSED))
    table = pricer._tables["mid"]
    once = pricer.first[0] + pricer.last[0] if device == "cpu" else table.gather[0] + table.reduce[0]
    bare = Pricer(work, config, Costs(machines, None, Mode.FUSED))
    there = bare._tables["mid"]
    for values in (there.first, there.last, there.gather, there.reduce):
        values[:] = [0.0] * 4
    more = pricer.step_s([1] * 4, [0] * 4) - bare.step_s([1] * 4, [0] * 4)
    assert once > 1e-3 and more == pytest.approx(paid * once, rel=1e-6)
