"""No plan of a candidate is faster than the bounds that a search has of it before it makes any price."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.memory.stage_ends import Beyond
from autoplan.search.cuts import Cutter
from autoplan.search.group_bounds import group_key, step_bounds_s
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest, less_offloaded, offloaded, space_of

CASES = [  # model, tp, mode, every which candidate
    ("llama-3.1-8b", 2, Mode.EAGER, 5),
    ("llama-3.1-8b", 1, Mode.FUSED, 13),
    ("mixtral-8x7b", 1, Mode.EAGER, 23),
]


ANY = 1e300  # a step that no bound reaches: all are made as strong as they can be


def request(model: str, tp: int, mode: Mode) -> PlanRequest:
    return PlanRequest(load_model(model), Cluster.parse("2x4xh100-sxm5-80gb"), 4096, 16, pins={"tp": tp}, mode=mode)


def some(r: PlanRequest, step: int) -> Iterator[ParallelConfig]:
    for candidate in space_of(r).candidates[::step]:
        yield candidate
        yield from offloaded(r, candidate)[:2]


def bounds_of(points: LayoutCache, candidate: ParallelConfig) -> tuple[float, float]:
    found = points.state_bounds([candidate])
    assert found is not None
    return found[0]


def step_s(cutter: Cutter | ChunkCutter) -> float:
    """The fastest plan of a candidate; inf if none fits."""
    return cutter.search(math.inf, 500).step_s


@pytest.mark.parametrize(("model", "tp", "mode", "every"), CASES)
def test_no_plan_is_faster_than_its_bounds(model: str, tp: int, mode: Mode, every: int) -> None:
    """With memory that is scarce and memory that is not; the bounds are stronger than those of groups."""
    r = request(model, tp, mode)
    points, stronger, forced, checked, bubbles, whole = LayoutCache(r), 0, 0, 0, 0, 0
    for candidate in some(r, every):
        points.room = Room(1e15)
        cutter = points.cutter(candidate)
        if cutter is None:
            continue
        point = points.of(candidate)
        assert point is not None
        needed = cutter.shortage().needed_bytes
        fixed = FixedMemory(point.workload, r.cluster).of(candidate).mid
        free, tight = bounds_of(points, candidate)
        unlimited = step_s(cutter)
        assert free <= tight <= unlimited, candidate
        ((simulated, _),) = points.state_bounds([candidate], 1.001 * free) or ()
        assert free <= simulated <= unlimited, candidate
        bubbles += simulated > 1.01 * free
        least = points.least_pass(candidate)
        assert least is not None
        checked, stronger = checked + 1, stronger + (free > 1.01 * step_bounds_s(least, [candidate])[0])
        for share in (1.02, 1.2, 1.6):
            points.room = Room(fixed + share * (needed - fixed))
            points._cutters.clear()
            limited = points.cutter(candidate)
            assert limited is not None
            fits_s, (_, bound) = step_s(limited), bounds_of(points, candidate)
            ((_, whole_units),) = points.state_bounds([candidate], ANY) or ()
            assert bound <= whole_units <= fits_s, (candidate, share)
            forced, whole = forced + (bound > 1.001 * free), whole + (whole_units > 1.01 * bound)
    assert checked > 40 and stronger > checked / 2 and forced > checked / 10, (checked, stronger, forced)
    assert bubbles > 3 and whole > 3, (bubbles, whole)


def test_what_does_not_fit_with_activations_on_the_host_has_no_plan() -> None:
    """What is excluded before any price has no plan, and of what has none a good part is excluded."""
    r = request(*CASES[2][:3])
    points, excluded, beyond = LayoutCache(r), 0, 0
    for candidate in space_of(r).candidates[::31]:
        candidate = candidate.but(offload=("activations",))
        points.room = Room(1e15)
        cutter, point = points.cutter(candidate), points.of(candidate)
        assert cutter is not None and point is not None
        needed, fixed = cutter.shortage().needed_bytes, FixedMemory(point.workload, r.cluster).of(candidate).mid
        for share in (0.2, 0.4, 0.8, 1.02):
            points.room = Room(fixed + share * (needed - fixed))
            points._cutters.clear()
            tight = points.cutter(candidate)
            assert tight is not None
            out, fits = points.shortage(candidate) is not None, tight.search(math.inf, 200).chunks is not None
            assert not (out and fits), (candidate, share)
            excluded, beyond = excluded + out, beyond + (not fits)
    assert beyond > 20 and excluded > 0.2 * beyond, (beyond, excluded)


@pytest.mark.parametrize(("model", "tp", "mode", "every"), [(*CASES[0][:3], 23), (*CASES[2][:3], 61)])
def test_kinds_of_offload_bound_each_other(model: str, tp: int, mode: Mode, every: int) -> None:
    """With scarce memory no kind is faster than the bound of all, or than the one with more on the host says.

    Where it says that nothing fits with less on the host, nothing does.
    """
    r = request(model, tp, mode)
    points, bounded, together, beyond = LayoutCache(r), 0, 0, 0
    for kept in [c for c in space_of(r).candidates if c.pp > 1][::every]:
        points.room = Room(1e15)
        plain, point = points.cutter(kept), points.of(kept)
        assert plain is not None and point is not None
        needed, fixed = plain.shortage().needed_bytes, FixedMemory(point.workload, r.cluster).of(kept).mid
        for share, host in ((0.2, 1e15), (0.9, 1e15), (1.1, 1e15), (0.9, 2e9)):
            points.room = Room(fixed + share * (needed - fixed), host)
            points._cutters.clear()
            plain = points.cutter(kept)
            cutters = {
                c: points.cutter(c, kept=plain if isinstance(plain, ChunkCutter) else None) for c in offloaded(r, kept)
            }
            steps = {c: step_s(cutter) for c, cutter in cutters.items() if cutter is not None}
            (bound,) = points.offloaded_bounds_s([kept], ANY)
            assert bound <= min(steps.values()), (kept, share)
            together += bound > 1.001 * bounds_of(points, kept)[0]
            for c, cutter in cutters.items():
                if isinstance(cutter, ChunkCutter):
                    least = cutter.less_on_host_s()
                    others = [steps[other] for other in less_offloaded(r, c)]
                    assert all(least <= other for other in others), (c, share)
                    bounded += bool(least and others)
                if cutter is not None and steps[c] == math.inf:
                    term = cutter.lacks_with_less_on_host(cutter.any_shortage())
                    out = [steps[other] for other in less_offloaded(r, c)] if term is not None else []
                    assert all(other == math.inf for other in out), (c, share, host)
                    beyond += len(out)
    assert min(bounded, together, beyond) > 3, (bounded, together, beyond)


@pytest.mark.parametrize(("model", "tp", "mode", "every"), [(*CASES[0][:3], 3), (*CASES[2][:3], 17)])
def test_stages_of_whole_units_hold_what_crosses_their_ends(
    model: str, tp: int, mode: Mode, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes bounds stronger, as what their last units need does, and no plan is faster than they say."""
    r = request(model, tp, mode)
    points, stronger, checked = LayoutCache(r), 0, 0
    plain = [c for c in space_of(r).candidates if c.pp > 1 and c.schedule == "1F1B"]
    for candidate in plain[::every]:
        points.room = Room(1e15)
        cutter, point = points.cutter(candidate), points.of(candidate)
        assert cutter is not None and point is not None
        needed, fixed = cutter.shortage().needed_bytes, FixedMemory(point.workload, r.cluster).of(candidate).mid
        for share in (0.9, 1.0, 1.02, 1.1, 1.3):
            points.room = Room(fixed + share * (needed - fixed))
            points._cutters.clear()
            limited = points.cutter(candidate)
            assert limited is not None
            ((_, bound),) = points.state_bounds([candidate], ANY) or ()
            memory = points.least_memory(point)
            with monkeypatch.context() as without:
                nothing = np.zeros(len(memory.transient_before))
                without.setattr(memory, "ends", Beyond(nothing, nothing, nothing))
                without.setitem(memory.__dict__, "transient_before", nothing + memory.least_transient)
                ((_, before),) = points.state_bounds([candidate], ANY) or ()
            assert before <= bound <= step_s(limited), (candidate, share)
            checked, stronger = checked + 1, stronger + (bound > 1.001 * before)
    assert stronger > checked / 20, (checked, stronger)


def test_candidates_are_bounded_together_as_one_by_one() -> None:
    r = request(*CASES[2][:3])
    points = LayoutCache(r)
    key = group_key(space_of(r).candidates[0])
    members = [c for c in space_of(r).candidates if group_key(c) == key]
    found = points.state_bounds(members)
    assert found is not None and len(members) > 20
    for candidate, pair in zip(members, found, strict=True):
        assert pair == pytest.approx(bounds_of(points, candidate), rel=1e-9)


def test_a_bound_that_is_not_one_is_found() -> None:
    """The comparison of the first test fails for bounds of a twentieth more seconds."""
    r = request(*CASES[0][:3])
    points, beyond = LayoutCache(r), 0
    points.room = Room(1e15)
    for candidate in some(r, 5):
        cutter = points.cutter(candidate)
        assert cutter is not None
        free, _ = bounds_of(points, candidate)
        beyond += 1.05 * free > step_s(copy.copy(cutter))
    assert beyond > 5
