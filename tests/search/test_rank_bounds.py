"""Ranks of cuts, bounded together: compared with all choices of their units, and with plans of little host memory."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.memory.least import most_held
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.memory.stage_ends import Beyond
from autoplan.cost_models.time.price import ranges_of
from autoplan.schedules.schedule import SCHEDULES, SEARCHED_SCHEDULES, chunks_of_ranks, flights, obstacle
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.layouts import LayoutCache
from autoplan.search.rank_bounds import RankRows, ranks_of
from autoplan.search.request import PlanRequest, offloaded, space_of
from autoplan.search.state_arrays import Alike, prices_of

ANY = 1e300  # a step that no bound reaches: all are made as strong as they can be
KINDS = (0, 1, 1, 1, 2)  # of every unit
CUTS = (
    (ParallelConfig(pp=2, num_micro_batches=4, schedule="ZB-H1"), (2, 3)),
    (ParallelConfig(pp=2, num_micro_batches=4, schedule="ZBV", virtual_stages=2), (1, 1, 2, 1)),
    (ParallelConfig(pp=2, num_micro_batches=6, schedule="Interleaved1F1B", virtual_stages=2), (1, 2, 1, 1)),
)


def arrays(random: np.random.Generator, rows: int) -> Alike:
    """Random seconds and bytes of four choices: nothing, some, all of it again, and all of it on the host."""
    shape = (4, max(KINDS) + 1)
    kept = np.sort(random.uniform(0.5, 10.0, shape), axis=0)[::-1].copy()
    kept[1, 0] = np.inf  # a choice that a kind does not have
    again = np.sort(random.uniform(0.0, 4.0, (rows, *shape)), axis=1)
    again[:, 0] = 0.0
    again[:, 3] = random.uniform(0.0, 4.0, (rows, shape[1]))
    again = np.where(np.isinf(kept), np.inf, again)
    moved = np.zeros(shape)
    moved[3] = random.uniform(1.0, 10.0, shape[1])
    forward, backward = (random.uniform(1.0, 2.0, (rows, shape[1])) for _ in range(2))
    counts = np.bincount(KINDS).astype(float)
    return Alike(
        forward,
        backward,
        0.7 * backward,
        counts,
        np.zeros(rows),
        random.uniform(0.0, 5.0, (rows, shape[1])),
        again,
        kept,
        random.uniform(0.0, 3.0, shape),
        random.uniform(5.0, 160.0, rows),
        0.1,
        moved,
        random.uniform(0.0, 1.0, (rows, shape[1])),
        random.uniform(1.0, 60.0, rows),
        *prices_of((forward + backward) @ counts, counts, again, kept, moved),
    )


def least_s(a: Alike, row: int, config: ParallelConfig, cut: tuple[int, ...], rank: int, crosses: Beyond) -> float:
    """The fewest seconds of recompute of all choices of a rank's units that fit device and host; inf if none does."""
    c = config
    most = most_held(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
    in_flight = max(flights(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)[rank])
    ends, mine = np.cumsum([0, *cut]), chunks_of_ranks(c.schedule, c.pp, c.virtual_stages)[rank]
    units = [(k, u) for k in mine for u in range(ends[k], ends[k + 1])]
    last = int(ends[most.running[rank] + 1]) - 1
    used = sum(a.states[row, KINDS[u]] for _, u in units)
    for k in mine:
        begins = crosses.turned if k - 1 in mine else crosses.received
        used += most.held[k] * (a.free_saved + begins[ends[k]] + crosses.sent[ends[k + 1]])
    best, hosted = math.inf, sum(a.host_states[row, KINDS[u]] for _, u in units)
    for chosen in itertools.product(range(len(a.kept)), repeat=len(units)):
        device, seconds, host = used, 0.0, dict.fromkeys(mine, 0.0)
        for (k, u), h in zip(units, chosen, strict=True):
            kind = KINDS[u]
            device += most.held[k] * a.kept[h, kind] + (a.transient[h, kind] if u == last else 0.0)
            seconds += a.again[row, h, kind]
            host[k] += a.moved[h, kind]
        if device <= a.room[row] and hosted + in_flight * max(host.values()) <= a.host_room[row]:
            best = min(best, seconds)
    return best


def test_no_choice_of_units_is_faster_than_the_bound_of_its_rank() -> None:
    """Neither more than the bound fits, nor anything where it says that nothing does; and it is strong."""
    random, rows = np.random.default_rng(3), 8
    strong = beyond = found = by_host = 0
    for config, cut in CUTS:
        for _ in range(12):
            a, sizes = arrays(random, rows), np.array([0.0, *random.uniform(0.0, 3.0, len(KINDS) - 1), 0.0])
            crosses = Beyond(sizes, -sizes / 3, sizes)
            num = np.full(rows, float(config.num_micro_batches))
            ranks = RankRows([(np.arange(rows), ranks_of(config, cut, KINDS))], a, num)
            limited, free = (
                (ranks.fitting_s(each, np.arange(rows), ANY, crosses) - ranks.seconds) / num[0]
                for each in (a, unlimited_host(a))
            )
            by_host += int((limited > 1.01 * free).sum())
            for (row, rank), bound in zip(itertools.product(range(rows), range(config.pp)), limited, strict=True):
                least = least_s(a, row, config, cut, rank, crosses)
                assert bound <= least * (1 + 1e-9), (config, row, rank)
                found, strong = found + (0 < least < math.inf), strong + (bound > 0.5 * least > 0)
                beyond += bound == math.inf
    assert found > 30 and strong > 0.4 * found and beyond > 20 and by_host > 20, (found, strong, beyond, by_host)


def unlimited_host(a: Alike) -> Alike:
    """The same arrays where any number of bytes fits the host."""
    moved = np.zeros_like(a.moved)
    prices = prices_of((a.forward + a.backward) @ a.counts, a.counts, a.again, a.kept, moved)
    return Alike(
        a.forward,
        a.backward,
        a.inputs,
        a.counts,
        a.beside,
        a.states,
        a.again,
        a.kept,
        a.transient,
        a.room,
        a.free_saved,
        moved,
        a.host_states,
        a.host_room,
        *prices,
    )


def test_ranks_hold_no_more_at_their_fullest_than_they_ever_do() -> None:
    """What is on the host is priced by the micro-batches held at one moment, and taken by the most held at any."""
    checked = 0
    for (schedule, count), pp, num in itertools.product(SEARCHED_SCHEDULES, (2, 3, 8), (4, 8, 24)):
        if SCHEDULES[schedule].num_copies > 1 or obstacle(schedule, pp, num, count):
            continue
        held = most_held(schedule, pp, num, count).held
        for rank, mine in enumerate(chunks_of_ranks(schedule, pp, count)):
            assert held[list(mine)].sum() <= max(flights(schedule, pp, num, count)[rank]), (schedule, pp, num, rank)
            checked += 1
    assert checked > 60, checked


def test_no_plan_with_little_memory_of_the_host_is_faster_than_its_bounds() -> None:
    """Bounds know what the host holds."""
    graph, cluster = load_model("mixtral-8x7b"), Cluster.parse("2x4xh100-sxm5-80gb")
    r = PlanRequest(graph, cluster, 4096, 16, pins={"tp": 1}, mode=Mode.EAGER)
    points, stronger, none, fits = LayoutCache(r), 0, 0, 0
    few_cuts = [c for c in space_of(r).candidates if c.pp > 1 and not SCHEDULES[c.schedule].windows]
    for kept in few_cuts[::31]:
        points.room = Room(1e15)
        points._cutters.clear()
        plain, point = points.cutter(kept), points.of(kept)
        assert plain is not None and point is not None
        needed, fixed = plain.shortage().needed_bytes, FixedMemory(point.workload, r.cluster).of(kept).mid
        for candidate, share in itertools.product(offloaded(r, kept), (0.8, 0.9, 1.0, 1.1)):
            if "activations" not in candidate.offload:
                continue
            points.room = Room(fixed + share * (needed - fixed))
            host = on_host_bytes(points, candidate)
            ((_, unlimited),) = points.state_bounds([candidate], ANY) or ()
            for part in (0.3, 0.8, 1.1) if host else ():
                points.room = Room(points.room.device_bytes, part * host)
                points._cutters.clear()
                cutter = points.cutter(candidate)
                assert isinstance(cutter, ChunkCutter)
                ((_, bound),) = points.state_bounds([candidate], ANY) or ()
                step = cutter.search(math.inf, 500).step_s
                assert unlimited * (1 - 1e-9) <= bound <= step, (candidate, share, part)
                none += step == math.inf
                fits, stronger = fits + (step < math.inf), stronger + (bound > 1.001 * unlimited)
    assert fits > 5 and none > 10 and stronger > (fits + none) / 5, (fits, none, stronger)


def on_host_bytes(points: LayoutCache, candidate: ParallelConfig) -> float:
    """The most bytes that a rank of a plan keeps on an unlimited host; 0 if it has none there, or there is no plan."""
    points._cutters.clear()
    cutter = points.cutter(candidate)
    assert isinstance(cutter, ChunkCutter)
    found, p = cutter.search(math.inf, 500), cutter.pricer
    if found.chunks is None:
        return 0.0
    ranges = ranges_of(found.chunks)
    ranks = (p.memory.rank(rank, ranges, found.recompute, p.pinned_recompute) for rank in range(candidate.pp))
    return max(sum(q.mid for q in memory.host.values()) if "activations" in memory.host else 0.0 for memory in ranks)
