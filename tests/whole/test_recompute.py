"""Recompute of parts of a block, and activations on the host: equal to the bit, and kept is what is predicted."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_stage import predicted, stage_of
from parity import (
    SEQ,
    Case,
    assert_trains_as_one_device,
    cluster_of,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    graph_of,
    reference,
    run_simulated,
    spread_out,
    trained,
    worst,
)
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.api import plan_program
from autoplan.catalog import load_model
from autoplan.codegen.check import check_program
from autoplan.config.precision import precision_of
from autoplan.config.recompute import read_recompute
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.recompute_frontier import RecomputeChoice, RecomputeFrontier
from autoplan.cost_models.time.blocks import op_times
from autoplan.cost_models.time.price import Pricer
from autoplan.errors import PinError
from autoplan.program.activation_bytes import Activations, peak_bytes_of
from autoplan.runtime import recompute
from autoplan.runtime.convert import CollectiveRecord
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import evaluate_terms
from autoplan.search.planner import estimate_config, search_plan
from autoplan.search.request import PlanRequest
from experiments.plans.live_memory import LiveBytes, measure_step

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

CHOICES = ["selective", "attention", "mlp", "norms", "attention+mlp", "attention+mlp+norms", "offload"]
FAMILIES = [("llama", 0.0), ("llama-frozen", 0.0), ("gpt-untied", 0.25), ("qwen3-moe", 0.0), ("deepseek", 0.0)]


@functools.cache
def gradients(case: Case, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    program = compiled(case)
    params, buffers = full_tensors(case, dtype)
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, params, buffers, dtype=dtype, num_micro_batches=2)
        loss = pm.step(global_batch(case))
        return loss.item(), {n: g.clone() for n, g in pm.gradients().items()}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("family", "dropout"), FAMILIES)
def test_equal_to_the_bit(family: str, dropout: float, choice: str) -> None:
    """One device, float32: loss and gradients are those without recompute, and something is computed again."""
    case = Case(family, dropout=dropout, recompute=choice)
    loss, got = gradients(case, torch.float32)
    want_loss, want = gradients(replace(case, recompute="none"), torch.float32)
    assert loss == want_loss
    for name, g in want.items():
        assert torch.equal(got[name], g), name
    assert f"recompute={choice!r}" in compiled(case).sources["stage0.py"]


@pytest.mark.parametrize("choice", spread_out([c for c in CHOICES if c != "offload"], 3))
@pytest.mark.parametrize(("family", "dropout"), FAMILIES[:3])
def test_kept_is_what_is_predicted(family: str, dropout: float, choice: str) -> None:
    """To the byte: all that is alive after the forward, whoever holds it."""
    case = Case(family, dropout=dropout, recompute=choice)
    graph, layouts, blocks = predicted(case, 12)
    with stage_of(case) as (pm, inputs), LiveBytes() as live:
        loss = pm.stage(**inputs)
        measured = live.current_bytes - loss.untyped_storage().nbytes()
        alive = live.alive()
    want = sum(bytes_of(blocks[c.block])[layouts.recompute.get(c.name, "none")] for c in graph.calls)
    assert choice in layouts.recompute.values()
    # what a frozen embedding hands out is taken to be kept; a norm without a gradient keeps nothing, but as a region
    unused = blocks["embed"].saved_bytes if family == "llama-frozen" and "norms" not in choice else 0
    assert measured + unused == want, alive


def bytes_of(held: Activations) -> dict[str, int]:
    """What a block keeps under every choice."""
    return {
        "none": held.saved_bytes,
        "selective": held.selective_bytes,
        "full": held.kept_bytes,
        **held.choice_bytes,
    }


PEAKS = [("llama", "attention+mlp+norms", 0.0), ("llama", "mlp", 0.0), ("gpt-untied", "attention+norms", 0.25)]


@pytest.mark.parametrize(("family", "choice", "dropout"), spread_out(PEAKS, 3, unpack=True))
def test_the_peak_is_within_what_is_predicted(family: str, choice: str, dropout: float) -> None:
    """Regions come back one at a time: the peak is at most that of a block whose regions come back at once."""
    case = Case(family, dropout=dropout, recompute=choice)
    graph, layouts, blocks = predicted(case, 12)
    with stage_of(case) as (pm, inputs):
        measured = measure_step(pm.stage, inputs)
    changed = {
        name: replace(
            held,
            kept_bytes=bytes_of(held).get(choice, held.saved_bytes),
            recompute_transient_bytes=held.transient_bytes + held.saved_bytes - held.choice_bytes.get(choice, 0),
        )
        for name, held in blocks.items()
    }
    again = {c for c, how in layouts.recompute.items() if how == choice}
    gradients = {n: 4 * p.num_elements for n, p in graph.params.items()}
    peak = peak_bytes_of(graph.calls, changed, again, gradients)
    without = peak_bytes_of(graph.calls, blocks, frozenset(), gradients)
    assert measured.peak_bytes <= 1.02 * peak < 1.02 * without
    assert measured.peak_bytes > 0.8 * peak


@dataclass
class Freed:
    """Which of the storages that autograd was given are still there."""

    storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.storages.setdefault(storage._cdata, StorageWeakRef(storage))


def test_what_waits_on_the_host_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every storage once, and none of them stays but what others need: the rotary tables, the input of the head."""
    case = Case(recompute="offload")
    graph, layouts, blocks = predicted(case, 12)
    moved, freed = [], Freed()
    make = recompute._Moved.__init__

    def counted(self: recompute._Moved, x: torch.Tensor, *given: Any) -> None:
        make(self, x, *given)
        moved.append(self.waiting.host.nbytes)
        freed.see(x)

    monkeypatch.setattr(recompute._Moved, "__init__", counted)
    with stage_of(case) as (pm, inputs):
        loss = pm.stage(**inputs)
        left = sum(not ref.expired() for ref in freed.storages.values())
        layers = [blocks[c.block] for c in graph.calls if layouts.recompute.get(c.name) == "offload"]
        assert len(layers) == 4
        # rotary tables are made outside and needed by all: a copy goes with every layer
        tables = len(layers) * 2 * SEQ * 8 * 4
        assert sum(moved) == sum(b.saved_bytes - b.choice_bytes["offload"] for b in layers) + tables
        assert left <= 2 + 1
        loss.backward()


def test_offload_is_priced_by_the_host_link() -> None:
    """Bytes there and back at the catalog's speed, less what computing hides; a device of unknown speed is refused."""
    graph = load_model("gpt2")
    request = PlanRequest(graph, Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 64, {"recompute": "offload", "tp": 1})
    none = search_plan(replace(request, pins={"recompute": "none", "tp": 1, "pp": 1})).plans[0]
    config = replace(none.config, recompute="offload")
    estimate = estimate_config(request, config).estimate
    pricer = Pricer(none.point.workload, config, request.costs, precision_of(request.precision))
    speed = request.cluster.device.host_bytes_per_s
    assert speed == 63e9
    work = pricer.workload
    layers = [
        b for unit, marks in zip(work.units, work.is_layer, strict=True) for b, m in zip(unit, marks, strict=True) if m
    ]
    moved = sum(work.blocks[b].offloaded_bytes for b in layers)
    assert moved > 0
    whole = 2 * moved / speed * config.num_micro_batches
    times, constants, shown = op_times(work, request.costs), request.costs.constants, 0.0
    for name in layers:
        copy = work.blocks[name].offloaded_bytes / speed
        for computed in (times[name].forward.mid, times[name].backward.mid):
            exposed = max(0.0, copy - constants.overlap * computed)
            shown += exposed + constants.contention * (copy - exposed)
    want = shown * config.num_micro_batches
    assert estimate.breakdown["offload"].mid == pytest.approx(want, rel=1e-9)
    assert constants.contention * whole < want < whole
    beside_nothing = replace(request.costs, cluster=replace(request.cluster, device_type="cpu"))
    alone = Pricer(work, config, beside_nothing, precision_of(request.precision)).blocks
    assert sum(alone[name].offload.mid for name in layers) == pytest.approx(2 * moved / speed, rel=1e-9)
    assert "recompute" not in estimate.breakdown
    held = [e.stages[0].memory["activations"].mid for e in (none.estimate, estimate)]
    assert held[1] < held[0]
    unknown = replace(request.cluster, device=replace(request.cluster.device, host_bytes_per_s=None))
    with pytest.raises(
        PinError,
        match=r"the catalog has no speed of the host link of h100-sxm5-80gb, .* nearest legal: recompute='full'",
    ):
        search_plan(replace(request, cluster=unknown))


# -- the search --------------------------------------------------------------------------------------------------------

CHOICE = st.tuples(st.floats(1.0, 100.0), st.floats(0.0, 10.0))


@settings(max_examples=60)
@given(st.lists(CHOICE, min_size=1, max_size=4), st.integers(1, 4), st.floats(0.0, 1.0))
def test_the_ladder_is_the_cheapest_but_for_one_step(
    points: list[tuple[float, float]], layers: int, share: float
) -> None:
    """Against every choice of every layer: never more than the last step dearer, and every step down frees more."""
    options = [RecomputeChoice(f"c{k}", freed, seconds) for k, (freed, seconds) in enumerate(points)]
    frontier = RecomputeFrontier.of([options] * layers, ["layer"] * layers)
    by_name = {"none": RecomputeChoice("none", 0.0, 0.0)} | {c.name: c for c in options}
    short = share * layers * max(c.freed_bytes for c in options)

    def sums(names: Iterable[str]) -> tuple[float, float]:
        chosen = [by_name[n] for n in names]
        return sum(c.freed_bytes for c in chosen), sum(c.recompute_s for c in chosen)

    every = [sums(names) for names in itertools.product(by_name, repeat=layers)]
    best = min(seconds for freed, seconds in every if freed >= short * (1 - 1e-12))
    steps = [sums(frontier.choices(range(layers), k).values()) for k in range(frontier.height(range(layers)) + 1)]
    assert all(a[0] < b[0] and a[1] <= b[1] + 1e-12 for a, b in itertools.pairwise(steps))
    first = next(k for k, (freed, _) in enumerate(steps) if freed >= short * (1 - 1e-12))
    last = steps[first][1] - steps[first - 1][1] if first else 0.0
    assert best - 1e-9 <= steps[first][1] <= best + last + 1e-9


def test_a_little_too_much_costs_a_little() -> None:
    """A plan that misses little memory computes regions again, for less than layers in full; a mapping prices alike."""
    graph = load_model("llama-3.1-8b")
    pins = {"dp": 8, "zero_stage": 3, "micro_batch_size": 1}
    request = PlanRequest(graph, Cluster.parse("1x8xh100-sxm5-80gb"), 8192, 64, pins)
    found = search_plan(request)
    best = found.plans[0]
    assert isinstance(best.config.recompute, dict) and "mlp" in best.config.recompute.values()
    prices = [estimate_config(request, replace(best.config, recompute=(n,))).estimate for n in range(0, 33, 4)]
    fitting = [e for e in prices if e.peak_memory_bytes.mid <= 0.95 * e.memory_capacity_bytes]
    assert fitting and len(fitting) < len(prices)
    assert best.estimate.step_time_s.mid < min(e.step_time_s.mid for e in fitting)
    again = estimate_config(request, best.config).estimate
    assert again.step_time_s.mid == pytest.approx(best.estimate.step_time_s.mid, rel=1e-12)
    assert again.stages[0].memory == best.estimate.stages[0].memory
    assert any("convex front" in text for text in found.certificate.restrictions)


def test_pins_of_recompute() -> None:
    """One form of every legal value; others name what is legal."""
    assert read_recompute(("norms", "attention")) == read_recompute("norms+attention") == "attention+norms"
    assert read_recompute({"a": "mlp", "b": ["mlp"]}) == {"a": "mlp", "b": "mlp"}
    for wrong in ("some", "mlp+", "mlp+mlp", "full+mlp", 3, ()):
        with pytest.raises(PinError, match="offload, products, or some of attention, mlp, norms"):
            read_recompute(wrong)


def test_a_mapping_by_block_runs() -> None:
    """Every block its own choice, in one program."""
    pins = {"recompute": {"model.layers.0": "mlp", "model.layers.1": "full", "model.layers.3": ("norms", "attention")}}
    _, program = plan_program(graph_of("llama", 0.0), cluster_of(1, "bandwidth"), pins, 12, SEQ)
    params, buffers = full_tensors(Case(), torch.float64)
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, params, buffers, dtype=torch.float64)
        loss, got = pm.step(global_batch(Case())).item(), pm.gradients()
    want_loss, want = reference(Case())
    assert loss == want_loss and all(torch.equal(got[n], want[n]) for n in want)
    assert [b.recompute for b in pm.stage.blocks.values()] == ["none", "mlp", "full", "none", "attention+norms", "none"]


def test_regions_type_check() -> None:
    """The emitted text with regions passes spmd_types."""
    program = compiled(Case(tp=2, recompute="attention+mlp+norms"))
    assert "mlp_region" in program.sources["stage0.py"]
    check_program(program.spec, program.sources, sequence=SEQ)


SIMULATED = [
    Case(tp=2, recompute="attention+mlp+norms", prices="bandwidth"),
    Case("gpt-untied", tp=2, dp=2, dropout=0.25, num_micro_batches=3, recompute="mlp+norms"),
    Case("deepseek", tp=2, recompute="attention+norms", prices="latency"),
]


@pytest.mark.parametrize("case", spread_out(SIMULATED, 3), ids=str)
def test_regions_on_simulated_ranks_send_nothing_more(case: Case) -> None:
    """float64 parity; the collectives are those of the program without recompute: no region holds one."""
    seen: list[CollectiveRecord] = []
    plain: list[CollectiveRecord] = []
    loss, got = run_simulated(case, records=seen)
    run_simulated(replace(case, recompute="none"), records=plain)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(got, want)[0] < 1e-12
    assert Counter(seen) == Counter(plain) and not any(r.phase == "recompute" for r in seen)


@pytest.mark.processes
def test_keys_and_values_of_other_ranks_are_gathered_again() -> None:
    """Attention over a cut sequence is one operation with its gathers: computed again, they run again on all ranks, as
    the ledger's forward entries say (LedgerEntry counts a recomputed forward twice)."""
    case = Case(cp=2, recompute="attention", num_micro_batches=2)
    got = trained(case, "float32", 1, "sgd")
    gathers = [e for e in compiled(case).spec.ledger if e.axis == "cp" and e.phase == "forward"]
    env = {"b": 12 // case.num_micro_batches, "s": SEQ // 2}
    want = Counter(
        (e.kind, e.axis, evaluate_terms(e.bytes, env)) for e in gathers for _ in range(case.num_micro_batches)
    )
    for phase in ("forward", "recompute"):
        assert Counter(r[:3] for r in got.ledger if r[0] == "all_gather" and r[3] == phase) == want, phase


PROCESSES = [
    Case("llama", dp=2, tp=2, zero=3, num_micro_batches=2, labels="unequal", recompute="attention+mlp+norms"),
    Case("gpt", pp=2, stages=(1, 3), num_micro_batches=4, dropout=0.25, recompute="mlp+norms"),
    Case("llama-tied", pp=2, dp=2, zero=1, num_micro_batches=3, labels="unequal", recompute="selective"),
    Case("gpt-untied", dp=2, zero=2, num_micro_batches=2, recompute="attention+norms"),
    Case("qwen2-mixed", dp=2, cp=2, zero=3, num_micro_batches=3, recompute="attention+mlp"),
    Case("deepseek", dp=2, ep=2, pp=2, zero=1, num_micro_batches=3, recompute="attention+mlp+norms"),
    Case("llama", dp=2, tp=2, zero=3, num_micro_batches=2, recompute="offload"),
    Case("mixtral", pp=2, dp=2, zero=2, num_micro_batches=2, schedule="GPipe", recompute="offload"),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(PROCESSES, 7), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)
