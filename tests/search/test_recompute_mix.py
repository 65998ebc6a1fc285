"""Mixes of recompute that a stack can express: searched as such, against every number of layers, and refused else."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import models
import pytest
from enumeration import compositions, fits, request

from autoplan.capture.export import capture
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import RecomputeMix, can_mix, every_nth, layers_on_ranks
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.ir.graph import ModelGraph
from autoplan.search.cuts import Cutter
from autoplan.search.interleaved_cuts import ChunkCutter, LeastPass
from autoplan.search.planner import estimate_config

LAYERS = ("layers.0", "layers.1", "layers.2", "layers.3")


def brute(pricer: Pricer, capacity: float, mix: RecomputeMix) -> float:
    """Every cut with every number of first layers that all stages share."""
    best = math.inf
    for chunks in compositions(pricer.num_units, pricer.config.pp):
        ranges = ranges_of(chunks)
        most = [pricer.frontier.height(units) for units in ranges]
        numbers = {0, max(most)} if mix is RecomputeMix.UNIFORM else range(max(most) + 1)
        for number in numbers:
            steps = tuple(min(number, each) for each in most)
            if all(fits(pricer, held, capacity) for held in pricer.memory.stages(ranges, steps)):
                best = min(best, pricer.step_s(chunks, steps))
    return best


@pytest.mark.parametrize("mix", [RecomputeMix.UNIFORM, RecomputeMix.FIRST_LAYERS])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_best_cut_of_a_mix_is_that_of_all_numbers_of_layers(mix: RecomputeMix, pp: int) -> None:
    r = request(pp)
    config = ParallelConfig(pp=pp, num_micro_batches=4, micro_batch_size=2)
    one = estimate_config(replace(r, pins={}), config)
    pricer = Pricer(one.point.workload, config, r.costs, alike=True)
    top = one.estimate.peak_memory_bytes.mid
    found = []
    for share in (1.1, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.1):
        cut = Cutter(pricer, Room(share * top, math.inf, 0.0), mix=mix).search()
        assert cut.step_s == pytest.approx(brute(pricer, share * top, mix), rel=1e-9)
        found.append(cut.recompute)
    assert any(map(any, found)) and not all(map(any, found))


@functools.cache
def deep() -> ModelGraph:
    return capture(models.make_llama(num_hidden_layers=8), models.token_batch(2, 16))


def brute_chunks(pricer: Pricer, cut: tuple[int, ...], capacity: float, mix: RecomputeMix) -> float:
    """Every number of first layers that all chunks of a cut share, priced by hand on every rank."""
    ranges = ranges_of(cut)
    most = [pricer.frontier.height(units) for units in ranges]
    best = math.inf
    for number in {0, max(most)} if mix is RecomputeMix.UNIFORM else range(max(most) + 1):
        steps = tuple(min(number, each) for each in most)
        if all(fits(pricer, held, capacity) for held in pricer.memory.stages(ranges, steps)):
            best = min(best, pricer.step_s(cut, steps))
    return best


@pytest.mark.parametrize("mix", [RecomputeMix.UNIFORM, RecomputeMix.FIRST_LAYERS])
@pytest.mark.parametrize(("schedule", "virtual"), [("Interleaved1F1B", 2), ("ZBV", 2), ("ZB-H1", 1)])
def test_a_mix_in_several_chunks_is_that_of_all_numbers_of_layers(
    mix: RecomputeMix, schedule: str, virtual: int
) -> None:
    """Two ranks with chunks of 2 layers (4 with one stage each): the least that fits is the fastest of all that do."""
    asked = replace(request(2), graph=deep(), pins={})
    config = ParallelConfig(pp=2, num_micro_batches=4, micro_batch_size=2)
    priced = config.but(schedule=schedule, virtual_stages=virtual)
    one = estimate_config(asked, priced)
    plain = Pricer(estimate_config(asked, config).point.workload, config, asked.costs, alike=True)
    pricer, cut = plain.under(schedule, virtual), one.config.stages or ()
    least, top, found = (
        LeastPass(plain.workload.unit_kinds, Cutter(plain, Room(1e15)).passes),
        one.estimate.peak_memory_bytes.mid,
        [],
    )
    for share in (1.1, 0.97, 0.93, 0.9, 0.86, 0.82, 0.78, 0.7, 0.1):
        room = Room(share * top, math.inf, 0.0)
        cutter = ChunkCutter(Cutter(plain, room, mix=mix), schedule, virtual, least)
        units = cutter.chunks
        assert len(units) == 2 * virtual == len(cut)
        best = cutter.search()
        assert best.step_s == pytest.approx(brute_chunks(pricer, units, share * top, mix), rel=1e-9)
        found.append(best.recompute)
    counts = {max(each) for each in found if each}
    assert len(counts) == (2 if mix is RecomputeMix.UNIFORM else max(counts) + 1) and () in found


@pytest.mark.parametrize(("recompute", "stages", "uniform", "first"), [
    ("full", None, True, True), ((2, 2), (2, 2), True, True), ((0, 0), (2, 2), True, True),
    ((1, 1), (2, 2), False, True), ((1, 0), (2, 2), False, False), ((1, 2), (1, 3), False, True),
    (dict.fromkeys(LAYERS, "full"), (2, 2), True, True), ({"layers.0": "full"}, (4,), False, True),
    ({"layers.0": "full"}, (2, 2), False, False), ({"layers.1": "full"}, (4,), False, False),
    ({"layers.0": "full", "layers.1": "offload"}, (4,), False, False),
    ({"layers.0": "selective"}, (4,), False, False),
])  # fmt: skip
def test_what_each_mix_allows(recompute: object, stages: tuple[int, ...] | None, uniform: bool, first: bool) -> None:
    found = [can_mix(mix, recompute, LAYERS, stages) for mix in RecomputeMix]  # type: ignore[arg-type]
    assert dict(zip(RecomputeMix, found, strict=True)) == {
        RecomputeMix.ANY: True, RecomputeMix.FIRST_LAYERS: first, RecomputeMix.EVERY_NTH: uniform,
        RecomputeMix.UNIFORM: uniform,
    }  # fmt: skip


@pytest.mark.parametrize(("again", "stages", "chunks", "number"), [
    ((1, 3), (4,), None, 2), ((2,), (4,), None, 3), ((1, 3), (2, 2), None, 2), ((0, 2), (4,), None, None),
    ((2,), (2, 2), None, None), ((1, 2), (1, 1, 1, 1), ((0, 2), (1, 3)), None),
    ((2, 3), (1, 1, 1, 1), ((0, 2), (1, 3)), 2), ((2, 3), (1, 1, 1, 1), ((0, 3), (1, 2)), 2),
    ((1,), (1, 3), None, None),
])  # fmt: skip
def test_every_nth_layer_of_a_rank(
    again: tuple[int, ...], stages: tuple[int, ...], chunks: tuple[tuple[int, ...], ...] | None, number: int | None
) -> None:
    """A rank counts its own layers, over its chunks: 2 and 3 are the second ones of ranks with 0 2 and 1 3."""
    recompute = {LAYERS[k]: "full" for k in again}
    assert can_mix(RecomputeMix.EVERY_NTH, recompute, LAYERS, stages, chunks) is (number is not None)
    kinds = [recompute.get(name, "none") for name in LAYERS]
    held = layers_on_ranks(stages, chunks or [(k,) for k in range(len(stages))])
    assert every_nth(kinds, held) == number
    assert not can_mix(RecomputeMix.EVERY_NTH, recompute | {LAYERS[again[0]]: "offload"}, LAYERS, stages, chunks)
