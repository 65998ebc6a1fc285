"""A search that is stopped: good plans first, bounds for groups of candidates, and a certificate that stays honest."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import clocks
import models
import pytest
from typer.testing import CliRunner

from autoplan import catalog
from autoplan.capture.export import capture
from autoplan.cli import app
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.ir.graph import ModelGraph
from autoplan.schedules.schedule import takes
from autoplan.search.first_plans import Neighbours, mesh_of, usual
from autoplan.search.group_bounds import group_key, step_bounds_s
from autoplan.search.interleaved_cuts import LeastPass
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import estimate_config, search_plan
from autoplan.search.request import PlanRequest, space_of

SEQ = 16
LARGE = PlanRequest(
    catalog.load_model("deepseek-v3"),
    Cluster.parse("256x8xh800-sxm-80gb"),
    4096,
    15_360,
    mode=Mode.FUSED,
    time_limit_s=600.0,
)


@lru_cache(maxsize=2)
def graph(kind: str) -> ModelGraph:
    make = {"mixtral": models.make_mixtral, "llama": models.make_llama}[kind]
    return capture(make(), models.token_batch(2, SEQ))


def request(kind: str, mode: Mode = Mode.EAGER, pins: dict[str, object] | None = None) -> PlanRequest:
    link = Level(1e-6, 1e9, "made up")
    cluster = Cluster(1, 4, Device("made up", 1e12, 1e9, 1 << 33, "made up", host_bytes_per_s=1e9), link, "cuda")
    return PlanRequest(graph(kind), cluster, SEQ, 8, pins or {}, mode=mode, gap=0.0)


@pytest.mark.parametrize(
    ("kind", "mode", "pins"),
    [
        ("llama", Mode.EAGER, {}),
        ("mixtral", Mode.FUSED, {}),
        ("llama", Mode.EAGER, {"cp": 2}),
        ("mixtral", Mode.EAGER, {"recompute": "full"}),
    ],
)
def test_no_bound_of_a_group_is_above_that_of_a_candidate(kind: str, mode: Mode, pins: dict[str, object]) -> None:
    """And without a pipeline, sharding or peers nothing but the update lies between them."""
    r = request(kind, mode, pins)
    points, close = LayoutCache(r), {True: [0.0], False: [0.0]}
    for candidate in space_of(r).candidates:
        for each in points.with_methods(candidate):
            least, cutter = points.least_pass(each), points.cutter(each)
            assert (least is None) == (cutter is None)
            if least is None or cutter is None:
                continue
            (bound,), known = step_bounds_s(least, [each]), cutter.quick_bound_s()
            (weak,) = step_bounds_s(least, [each], 0.0)
            assert weak <= bound * (1 + 1e-9) and bound <= known * (1 + 1e-9), each
            close[each.virtual_stages > 1].append(bound / known)
    for several, found in close.items():
        assert max(found) > (0.5 if len(found) > 1 else 0.0), several
    assert sum(map(len, close.values())) > 22


def test_a_bound_that_adds_the_wait_twice_is_above_that_of_a_candidate() -> None:
    """The negative control of the test above."""
    r = request("llama")
    points, above = LayoutCache(r), 0
    for candidate in space_of(r).candidates:
        least, cutter = points.least_pass(candidate), points.cutter(candidate)
        if least is not None and cutter is not None and candidate.virtual_stages > 1:
            (bound,), even = (
                step_bounds_s(least, [candidate]),
                least.total_s * candidate.num_micro_batches / candidate.pp,
            )
            above += bound + (bound - even) > cutter.quick_bound_s()
    assert above


def seconds_of(least: LeastPass | None) -> tuple[float, ...]:
    """Forward and backward of every unit."""
    if least is None:
        return ()
    forward, backward = least.passes.forward.tolist(), least.passes.backward.tolist()
    return (*(forward[k] for k in least.kinds), *(backward[k] for k in least.kinds))


@pytest.mark.parametrize("overlap", [(), ("ep",)])
def test_members_of_a_group_have_one_pass(overlap: tuple[str, ...]) -> None:
    """Also if what experts exchange overlaps, of which DualPipe hides more than other schedules do."""
    r = request("mixtral", Mode.FUSED if overlap else Mode.EAGER)
    slow = replace(r.cluster, link=Level(1e-6, 3e6, "made up"))  # so that not all of it is hidden
    r = replace(r, cluster=slow, options=replace(r.options, overlap=frozenset(overlap)))
    points = LayoutCache(r)
    found: dict[object, set[tuple[float, ...]]] = {}
    plain = space_of(r).candidates
    both_ways = [
        c.but(schedule="DualPipe")
        for c in plain
        if c.schedule == "1F1B" and takes("DualPipe", c.pp, c.num_micro_batches)
    ]
    assert both_ways
    for candidate in (*plain, *both_ways):
        fresh = LayoutCache(r)
        fresh._found, fresh._layouts, fresh._lowered = points._found, points._layouts, points._lowered
        found.setdefault(group_key(candidate), set()).add(seconds_of(fresh.least_pass(candidate)))
    assert len(found) > 5 and all(len(seconds) == 1 for seconds in found.values())


def test_usual_layouts_are_of_every_mesh() -> None:
    found = space_of(LARGE).candidates
    by_tp = usual(found)
    first = [c for some in by_tp for c in some]
    assert [{c.tp for c in some} for some in by_tp] == [{tp} for tp in (1, 1, 8, 8, 4, 4, 2, 2)]
    assert all(c.pp > 1 and c.zero_stage == 1 and c.ep >= 32 for some in by_tp[::2] for c in some)
    assert len(first) < len(found) / 100
    assert {(c.pp, c.tp, c.cp) for c in first} == {(c.pp, c.tp, c.cp) for c in found}
    assert {(c.pp, c.dp, c.tp, c.ep, c.zero_stage) for c in first} >= {(16, 64, 2, 64, 1), (1, 1024, 2, 8, 3)}
    assert all(c.schedule == "1F1B" and (c.pp == 1 or c.micro_batch_size <= 2) for c in first)
    far_last = usual(found, lambda c: 3.0 if c.tp in (1, 8) else 1.9 if c.tp == 4 else 1.0)
    assert far_last == [*by_tp[4:], *by_tp[:4]]


def test_neighbours_differ_in_one_choice_then_in_the_mesh_and_another() -> None:
    found = space_of(LARGE).candidates
    best = next(c for c in found if (c.pp, c.tp, c.ep, c.zero_stage, c.micro_batch_size) == (8, 4, 64, 1, 1))
    one, two = Neighbours(found).of(best)
    assert best not in one and best not in two and not set(one) & set(two)
    assert {c.but(zero_stage=1, zero_replicas=best.zero_replicas) == best for c in one if c.zero_stage != 1} == {True}
    assert any(c.pp == 16 and c.ep == 64 for c in one) and any(c.pp == 16 and c.ep == 32 for c in two)
    meshes = [{(c.pp, c.dp, c.tp, c.cp) for c in some} for some in (Neighbours(found).on_mesh(best), found)]
    assert meshes[0] == {(best.pp, best.dp, best.tp, best.cp)} < meshes[1]
    assert set(Neighbours(found).on_mesh(best)) == {c for c in found if mesh_of(c) == mesh_of(best)}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("readings", "slower"), [(20, 1.2), (200, 1.0)])
def test_a_stopped_search_has_a_sane_plan_and_says_that_it_was_stopped(
    readings: int, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3 on 2,048 devices: as fast as the published degrees with unlimited memory, soon all but as fast."""
    clocks.ticking(monkeypatch, LARGE.time_limit_s / readings)
    result = search_plan(LARGE)
    certificate, best = result.certificate, result.plans[0]
    published = ParallelConfig(dp=128, pp=16, ep=64, etp=1, num_micro_batches=120)
    assert best.estimate.fits
    assert best.estimate.step_time_s.mid <= slower * estimate_config(LARGE, published).estimate.step_time_s.mid
    assert certificate.status == "stopped by time limit" and certificate.open and certificate.stopped_far
    decided = certificate.illegal + certificate.too_big + certificate.bounded_out + certificate.solved
    assert certificate.considered == decided + certificate.open


@pytest.mark.parametrize("readings", [20, 60])
def test_a_stopped_search_counts_every_candidate_once(readings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of cut sequences that the first plans decided, each with its methods, before others were bounded."""
    clocks.ticking(monkeypatch, 600 / readings)
    task = catalog.load_model("llama-3.2-1b"), Cluster.parse("1x8xh100-sxm5-80gb"), 16_384, 8
    c = search_plan(PlanRequest(*task, time_limit_s=600.0)).certificate
    assert c.status == "stopped by time limit" and c.open
    assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_pinned_offload_is_kept_where_memory_does_not_bind(kind: str) -> None:
    """Also in a space without usual layouts, which are not evaluated first then."""
    pins = {"offload": "optimizer", "pp": 1, "dp": 2, "tp": 2, "zero_stage": 0, "recompute": "none"}
    result = search_plan(request(kind, pins=pins))
    assert result.plans[0].config.offload == ("optimizer",)
    assert result.certificate.status == "complete" and not result.certificate.open


def test_what_is_not_proved_is_not_called_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    task = "plan qwen3-235b-a22b --cluster 32x8xh100-sxm5-80gb --seq 4k --gbs 1k --mode fused --time-limit 600"
    pins = "--pin tp=4 --pin pp=8 --pin ep=8 --pin micro_batch_size=1 --pin schedule=1F1B"
    for words, readings, title in ((task, 20, "BEST KNOWN, not proved:"), (f"{task} {pins}", 1e9, "BEST ")):
        clocks.ticking(monkeypatch, 600 / readings)
        done = CliRunner().invoke(app, [*words.split(), "--verbose"], prog_name="autoplan")
        assert done.exit_code == 0 and re.search(rf"^ {title}", done.stdout, flags=re.MULTILINE), done.output
        assert ("not proved" in done.stdout) == (readings == 20)
