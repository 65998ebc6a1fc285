"""Recompute of parts of a block, and activations on the host: equal to the bit, and kept is what is predicted."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from parity import (
    SEQ,
    Case,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    reference,
    run_simulated,
    train_reference,
    trained,
    worst,
)
from test_saved import LiveBytes, measure_step, predicted, stage_of

from autoplan.runtime.convert import CollectiveRecord
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import evaluate
from autoplan.search.activations import Activations, peak_bytes_of

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


@pytest.mark.parametrize("choice", [c for c in CHOICES if c != "offload"])
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


@pytest.mark.parametrize(("family", "choice", "dropout"), PEAKS)
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


SIMULATED = [
    Case(tp=2, recompute="attention+mlp+norms", prices="bandwidth"),
    Case("gpt-untied", tp=2, dp=2, dropout=0.25, num_micro_batches=3, recompute="mlp+norms"),
    Case("deepseek", tp=2, recompute="attention+norms", prices="latency"),
]


@pytest.mark.parametrize("case", SIMULATED, ids=str)
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
    want = Counter((e.kind, e.axis, evaluate(e.bytes, env)) for e in gathers for _ in range(case.num_micro_batches))
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
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_training_equals_one_device(case: Case) -> None:
    got = trained(case)
    want = train_reference(case, torch.float64, 3, "adamw")
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert worst(got.gradients, want.gradients)[0] < 1e-12
    floating = {n: p for n, p in want.parameters.items() if p.is_floating_point()}
    assert worst({n: got.parameters[n] for n in floating}, floating)[0] < 1e-9
