"""Requests that no plan answers: what does not fit, what is not legal, and what is said of it."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import cluster, graph, least_memory, request

from autoplan.capture.export import capture
from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import AutoplanError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.search import clock, infeasible, intra
from autoplan.search.cuts import Cutter, Shortage, shortage_of
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import (
    InfeasibleReport,
    NothingFits,
    PlanRequest,
    StoppedError,
    estimate_config,
    search_plan,
)
from autoplan.search.quick_memory import QuickMemory
from autoplan.search.request import space_of
from autoplan.search.space import space

INTERLEAVED = "Interleaved1F1B"


# -- nothing fits, nothing is legal ------------------------------------------------------------------------------------


def test_nothing_fits_names_stage_term_and_change() -> None:
    r = request(4, 200_000, pins={"recompute": "none"})
    with pytest.raises(NothingFits) as caught:
        search_plan(r)
    report = caught.value.report
    assert report.needed_bytes > report.available_bytes == 200_000
    assert report.term in ("parameters", "gradients", "optimizer", "activations", "transient", "gathered parameters")
    assert 0 <= report.stage < 4 and "fits" in report.cheapest_change


def test_the_cheapest_change_does_fit() -> None:
    tight = int(least_memory(4) * 0.8)
    r = request(4, tight, pins={"zero_stage": 0, "dp": 4, "recompute": "none", "micro_batch_size": 2})
    with pytest.raises(NothingFits) as caught:
        search_plan(r)
    change = caught.value.report.cheapest_change
    name = next(n for n in r.pins if n in change)
    assert search_plan(replace(r, pins={k: v for k, v in r.pins.items() if k != name})).plans


def test_what_would_fit_is_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pin, then all pins, then nodes with the pins, then without: the first that fits is said."""
    r = request(4, 200_000, pins={"recompute": "none", "zero_stage": 0}, memory_risk=0.05)
    tried: list[tuple[int, frozenset[str]]] = []

    def only(devices: int, pins: set[str]) -> str:
        def feasible(changed: PlanRequest, deadline: float) -> bool | None:
            tried.append((changed.cluster.num_devices, frozenset(changed.pins)))
            return (changed.memory_risk == 0.5) if devices < 0 else tried[-1] == (devices, pins)

        monkeypatch.setattr(infeasible, "feasible", feasible)
        return infeasible.cheapest_change(r, Shortage(0, "parameters", 3e9, 1e9))

    assert only(-1, set()).startswith("At a memory risk of 0.5 ")
    assert only(4, {"zero_stage"}) == "Without the pin recompute=none it fits."
    assert only(4, set()) == "Without pins it fits."
    assert only(8, {"recompute", "zero_stage"}) == "With 2 nodes (8 devices) it fits."
    assert only(16, set()) == "With 4 nodes (16 devices) and without pins it fits."
    assert tried[-1] == (16, frozenset())
    assert only(0, set()) == "With 2.0 GB more memory per device it fits."
    assert "more memory" in infeasible.cheapest_change(replace(r, executed=True), Shortage(0, "parameters", 3e9, 1e9))


def test_more_memory_of_the_host_is_said_to_be_enough_only_if_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stages may lack memory of the device, whatever the host has."""
    r, short = request(4, 200_000), Shortage(0, "state on the host", 3e9, 1e9, on_host=True)
    sizes: list[float] = []

    def feasible(changed: PlanRequest, deadline: float) -> bool | None:
        sizes.append(changed.cluster.host_memory_bytes)
        return enough and sizes[-1] == pytest.approx(3e9)

    monkeypatch.setattr(infeasible, "feasible", feasible)
    enough = True
    assert infeasible.cheapest_change(r, short) == "With 2.0 GB more host memory per device it fits."
    enough = False
    assert "it fits" not in infeasible.cheapest_change(r, short)
    assert sizes[-1] == pytest.approx(3e9)


def test_a_stage_that_fits_between_two_tried_choices_is_not_short() -> None:
    """With few steps the device lacks memory, with many the host; only some steps are tried for a shortage."""

    class Middle(Cutter):
        pp, fixed, pinned, num_units = 2, None, (1, 1), 2

        def __init__(self) -> None:
            self.room = Room(10.0, 10.0)

        def _counts(self, units: range, layers: int) -> list[int]:
            return list(range(100))

        def _num_layers(self, units: range) -> int:
            return 1

        def _least_of(self, stage: int, units: range) -> int | None:
            return 3 if stage == 0 else None

        def memory_of(self, stage: int, units: range, count: int) -> RankMemory:
            device, host = (20.0 - 10.0 * (count > 2), 20.0 * (count > 3)) if stage == 0 else (11.0, 0.0)
            sizes = {"activations": device}, {"activations": host}
            terms, there = ({k: Quantity(v, v, v, Tag.EXACT) for k, v in each.items()} for each in sizes)
            return RankMemory(terms, 1, "backward", there)

    cutter = Middle()
    whole = shortage_of(0, [cutter.memory_of(0, range(1), n) for n in (0, 50, 99)], cutter.room)
    assert whole.on_host and whole.on_device == "activations"
    assert cutter.any_shortage() == Shortage(1, "activations", 11.0, 10.0, on_device="activations")


def test_out_of_time_is_not_infeasible() -> None:
    assert infeasible.feasible(request(4), clock.now_s() - 1) is None
    assert infeasible.feasible(request(4), math.inf) is True
    assert infeasible.feasible(request(4, 1000), math.inf) is False


@pytest.mark.parametrize("kind", [NothingFits, StoppedError, *AutoplanError.__subclasses__()], ids=lambda k: k.__name__)
def test_errors_travel_between_ranks(kind: type[AutoplanError]) -> None:
    report = InfeasibleReport(1, "activations", 2.0, 1.0, "pp=1", "With 2 nodes it fits.")
    error = NothingFits("too big", report) if kind is NothingFits else kind("too big")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "too big" and getattr(again, "report", report) == report


class Tied(torch.nn.Module):
    """The head is the transposed table of embeddings: a view with a gradient and without the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.layers = torch.nn.Embedding(512, 16), torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in "ab")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tok(ids)
        for layer in self.layers:
            h = h + torch.nn.functional.gelu(layer(h))
        return h @ self.tok.weight.t()


def tied_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out.view(-1, 512), batch["labels"].view(-1))


@functools.cache
def tied_graph() -> ModelGraph:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return capture(Tied(), {"ids": ids, "labels": ids.clone()}, tied_loss)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seq_len", [2, 32])
@pytest.mark.parametrize("name", ["tied", "llama"])
def test_the_quick_memory_bound_is_below_the_memory_model(name: str, seq_len: int, tp: int) -> None:
    made = tied_graph() if name == "tied" else graph()
    for size in (1, 8):
        r = PlanRequest(made, cluster(tp, 1 << 40), seq_len, size, precision="native", memory_risk=0.5)
        for recompute in ("none", "full"):
            config = ParallelConfig(tp=tp, micro_batch_size=size, recompute=recompute)
            terms = estimate_config(r, config).estimate.stages[0].memory
            held = terms["activations"].mid + terms["transient"].mid
            assert 0 < QuickMemory(r).largest_bytes(size) / tp <= held


def test_what_states_exclude_has_no_plan() -> None:
    """Parameters and optimizer state are looked at without a layout: never too strictly, and excluding a good part."""
    excluded = 0
    for size in (100_000, 200_000):
        r = request(4, size)
        quick, points = QuickMemory(r), LayoutCache(r)
        for candidate in space_of(r).candidates[::11]:
            if quick.shortage(candidate, states=True) is not None:
                cutter = points.cutter(candidate)
                assert cutter is None or cutter.search(math.inf, 50).chunks is None, candidate
                excluded += 1
    assert excluded > 10, excluded


def test_that_no_states_fit_is_known_without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[object] = []
    inside = intra.LayoutProgram.solve

    def counting(*args: Any) -> Any:
        solved.append(args)
        return inside(*args)

    monkeypatch.setattr(intra.LayoutProgram, "solve", counting)
    r = PlanRequest(load_model("llama-3.1-70b"), Cluster.parse("1x2xh100-sxm5-80gb"), 4096, 8, patient=False)
    with pytest.raises(NothingFits, match="largest term is"):
        search_plan(r)
    assert 0 < len(solved) <= 2  # for the plans that come closest


@pytest.mark.parametrize(
    ("pins", "batch", "message"),
    [
        ({"stages": 3}, 8, r"stages=3: must be positive numbers"),
        ({"stages": [3, 0, 1, 0]}, 8, r"stages=\[3, 0, 1, 0\] must be 4 positive numbers"),
        ({"stages": [2, 1, 1]}, 8, r"has 3 stages, .* the 4 devices; nearest legal: stages=\[2, 2\] or \[1, 1, 1, 1\]"),
        ({"stages": [4, 4]}, 8, r"add up to the model's 4 layers"),
        ({"zero_stage": True}, 8, r"zero_stage=True does not exist; use 0, 1, 2 or 3"),
        ({"state_slack": math.nan}, 8, r"state_slack=nan: must be a number of at least 1"),
        ({"recompute": {"model.layers.1": "some"}}, 8, r"recompute='some' is not supported; use none, selective, full"),
        ({"recompute": {"model.layers.9": "full"}}, 8, r"'model.layers.9', which is not a block; did you mean"),
        ({"recompute": "full", "micro_batch_size": 8, "num_micro_batches": 8}, 8, r"=8 x num_micro_batches=8 = 64 "),
        ({"pp": 4, "tp": 4}, 8, r"dp=1 x tp=4 x pp=4 = 16 devices, but the cluster has 4; nearest legal: tp=1"),
        ({"dp": 2, "micro_batch_size": 8}, 8, r"dp=2 x micro_batch_size=8 = 16 does not divide .* nearest legal: dp=1"),
        ({"pp": 2, "cp": 1, "tp": 1, "num_micro_batches": 8}, 8, r"dp=2 x num_micro_batches=8 = 16 does not divide"),
        ({"dp": 4}, 3, r"dp=4 does not divide the global batch of 3; nearest legal: dp=1, or global_batch_size=4"),
        ({"dp": 2, "tp": 4}, 8, r"dp=2 x tp=4 x pp=1 = 8 devices, but the cluster has 4; nearest legal: dp=1"),
        (
            {"schedule": "DualPipeV", "dp": 1, "tp": 1, "num_micro_batches": 2},
            8,
            r"=2 = 8 chunks need at least as many",
        ),
        ({"tp": 3}, 8, r"pin tp=3 does not divide the 4 devices; nearest legal: tp=2 or 4"),
        ({"zero": 3}, 8, r"unknown pin 'zero'; did you mean 'zero_stage'"),
        ({"micro_batch_size": 3}, 8, r"micro_batch_size=3 does not divide .* nearest legal: micro_batch_size=2 or 4"),
        ({"dp": 4}, 6, r"global batch of 6"),
        ({"recompute": "some"}, 8, r"recompute='some' is not supported"),
        ({"tp": 2.0}, 8, r"tp=2.0: must be a whole number"),
        ({}, 0, r"global_batch_size=0"),
        ({"num_micro_batches": 5}, 8, r"num_micro_batches=5 does not divide"),
    ],
    ids=str,
)
def test_refusals(pins: dict[str, Any], batch: int, message: str) -> None:
    with pytest.raises(PinError, match=message):
        search_plan(request(4, batch=batch, pins=pins))


def test_the_nearest_legal_value_is_legal() -> None:
    """12 heads on 8 devices: neither 6 nor 12 can be; and one stage is all that a model without layers has."""
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 8, {"tp": 8})
    with pytest.raises(PinError, match=r"tp=8 does not divide the 12 attention heads at .*; nearest legal: tp=4$"):
        search_plan(r)
    with pytest.raises(PinError, match=r"tp=8 does not .*; nearest legal: tp=4 with dp=2 with num_micro_batches=4$"):
        estimate_config(replace(r, pins={}), ParallelConfig(tp=8, num_micro_batches=8))
    flat = capture(torch.nn.Linear(4, 4), {"input": torch.zeros(2, 8, 4)}, lambda out, batch: out.sum())
    few = "pp=2 needs at least as many layers, the model has 1, since all but one of its parts are too light to be one"
    with pytest.raises(PinError, match=rf"{few}; nearest legal: pp=1$"):
        search_plan(PlanRequest(flat, cluster(2, 1 << 40), 8, 4, {"pp": 2}))


def test_a_sequence_beyond_learned_positions_is_refused() -> None:
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x8xh100-sxm5-80gb"), 2048, 8)
    with pytest.raises(PinError, match=r"seq_len=2048, but gpt2 has 1024 learned .* legal: seq_len=1024"):
        search_plan(r)
    assert search_plan(replace(r, seq_len=1024)).plans


def test_the_high_end_of_the_memory_fits() -> None:
    """What needs all of the memory is chosen only if it may run out of it as often as not."""
    tight = request(4, least_memory(4) + 1)
    assert search_plan(tight).plans[0].estimate.peak_memory_bytes.mid == least_memory(4)
    for risk, most in ((0.05, "high"), (0.5, "mid")):
        found = search_plan(replace(tight, memory_risk=risk)).plans[0].estimate
        assert all(getattr(stage.memory_bytes, most) <= found.memory_capacity_bytes for stage in found.stages)


@pytest.mark.parametrize(
    "wrong", [{"memory_risk": 0}, {"memory_risk": 0.6}, {"equal_within": -0.1}, {"equal_within": 1}]
)
def test_settings_of_a_choice_that_mean_nothing(wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(PinError, match=f"{name}={value}"):
        search_plan(request(4, **wrong))


def test_candidates_are_all_of_them() -> None:
    """By hand: 4 devices, batch 4, the tiny Llama (4 heads, 4 layers)."""
    found = space(graph(), cluster(4, 1 << 40), 4, {"zero_stage": 1})
    meshes = {(c.pp, c.dp, c.tp) for c in found.candidates}
    assert meshes == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    for size, num in ((2, 1), (1, 2)):
        assert ParallelConfig(pp=2, dp=2, micro_batch_size=size, num_micro_batches=num) in found.candidates
    assert len([c for c in found.candidates if c.schedule == "1F1B"]) == 3 + 2 + 1 + 3 + 2 + 3

    def others(**degrees: int) -> set[tuple[str, int]]:
        same = (c for c in found.candidates if all(getattr(c, k) == n for k, n in degrees.items()))
        return {(c.schedule, c.virtual_stages) for c in same} - {("1F1B", 1)}

    several = {("Interleaved1F1B", 2), ("ZB-H1", 1), ("InterleavedZeroBubble", 2), ("ZBV", 2)}
    assert others(pp=1) == set() and others(pp=4) == {("ZB-H1", 1)}
    assert others(pp=2, num_micro_batches=2) == several
    assert others(pp=2, num_micro_batches=4) == {*several, ("DualPipeV", 2)}
