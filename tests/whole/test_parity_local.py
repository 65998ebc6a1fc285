"""Parity in one process: every combination against one device, loss and all gradients, in float64."""

from __future__ import annotations

import itertools
import random
import re

import models
import pytest
import torch
from parity import (
    MOE,
    SEQ,
    Case,
    compiled,
    global_batch,
    graph_of,
    is_hf,
    make_model,
    reference,
    run_simulated,
    spread_out,
    worst,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

TOLERANCE = 1e-12  # float64, sums of a few thousand terms in another order

SPACE = {
    "family": ["llama", "llama-tied", "gpt", "gpt-untied"],
    "dp": [1, 2],
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "recompute": ["none", "full"],
    "num_micro_batches": [1, 2, 3],
    "labels": ["equal", "unequal"],
    "dropout": [0.0, 0.25],
    "uneven": [False, True],
    "prices": ["bandwidth", "latency"],
}


def legal(point: dict[str, object]) -> bool:
    if point["dropout"] and not str(point["family"]).startswith("gpt"):
        return False  # HF Llama has none but inside attention
    return not (point["uneven"] and point["pp"] != 2)


def pairwise(space: dict[str, list[object]], seed: int = 0) -> list[dict[str, object]]:
    """Greedy covering array: every legal pair of values occurs together at least once."""
    rng = random.Random(seed)
    names = list(space)
    points = [p for p in (dict(zip(names, c, strict=True)) for c in itertools.product(*space.values())) if legal(p)]

    def pairs(point: dict[str, object]) -> set[tuple[object, ...]]:
        return {(a, point[a], b, point[b]) for a, b in itertools.combinations(names, 2)}

    missing = set().union(*(pairs(p) for p in points))
    out = []
    while missing:
        sample = rng.sample(points, min(400, len(points)))
        best = max(sample, key=lambda p: len(pairs(p) & missing))
        if not pairs(best) & missing:
            best = next(p for p in points if pairs(p) & missing)
        out.append(best)
        missing -= pairs(best)
    return out


def case_of(point: dict[str, object]) -> Case:
    values = {k: v for k, v in point.items() if k != "uneven"}
    return Case(**values, stages=(3, 1) if point["uneven"] else None)  # type: ignore[arg-type]


MATRIX = [case_of(p) for p in pairwise(SPACE)]


@pytest.mark.parametrize("case", spread_out(MATRIX, 6), ids=str)
def test_matrix(case: Case) -> None:
    loss, gradients = run_simulated(case)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    error, name = worst(gradients, want)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("prices", ["bandwidth", "latency"])
def test_frozen_parameters(prices: str) -> None:
    """Parameters that are not trained: sharded too, without a gradient; their layer differs from the others."""
    test_matrix(Case("llama-frozen", tp=2, dp=2, pp=2, num_micro_batches=2, prices=prices))


WINDOWED = [
    Case("mistral", tp=2, dp=2, labels="unequal"),
    Case("mistral", tp=2, pp=2, recompute="full", num_micro_batches=2, prices="latency"),
    Case("qwen2-mixed", tp=2, pp=2, num_micro_batches=2),
    Case("qwen2-mixed", dp=2, pp=2, recompute="full", stages=(3, 1)),
]


@pytest.mark.parametrize("case", spread_out(WINDOWED, 4), ids=str)
def test_sliding_windows(case: Case) -> None:
    """Windows shorter than the sequence, in all layers (Mistral) and in the later ones (Qwen2)."""
    windows = [n.attrs.get("window") for b in graph_of(case.family, 0.0).blocks.values() for n in b.nodes]
    assert any(w is not None and w < SEQ for w in windows)
    test_matrix(case)


OTHER_ATTENTION = [
    Case("llama", tp=2, dp=2, dropout=0.25, labels="unequal"),
    Case("llama", tp=4, pp=2, dropout=0.25, num_micro_batches=2, recompute="full", prices="latency"),
    Case("bloom", tp=2, dp=2, dropout=0.25, labels="unequal"),
    Case("mpt", tp=2, pp=2, num_micro_batches=2, recompute="full"),
    Case("gemma2", tp=2, dp=2, labels="unequal"),
    Case("gemma2", tp=4, pp=2, num_micro_batches=2),
]


@pytest.mark.parametrize("case", spread_out(OTHER_ATTENTION, 3), ids=str)
def test_attention_that_torch_has_no_kernel_for(case: Case) -> None:
    """With dropout inside it is one op, with the same mask in every plan; with capped scores or ALiBi too."""
    ops = [n.op for b in graph_of(case.family, case.dropout).blocks.values() for n in b.nodes]
    assert ("dropped_attention" in ops) == ("attention" not in ops) == bool(case.dropout) and "softmax" not in ops
    test_matrix(case)
    if case.dropout:  # negative control: it is there
        assert reference(case)[0] != pytest.approx(reference(Case(case.family, labels=case.labels))[0], rel=1e-6)


EXPERTS = [
    Case("mixtral", tp=2, dp=2, labels="unequal"),
    Case("mixtral", tp=4, prices="latency", recompute="full"),
    Case("qwen3-moe", tp=2, pp=2, num_micro_batches=2),
    Case("qwen3-moe", tp=4, dp=2, num_micro_batches=2, labels="unequal"),
    Case("deepseek", tp=2, dp=2, prices="latency"),
    Case("deepseek", dp=2, pp=2, num_micro_batches=3, recompute="full"),
    Case("deepseek", tp=2, pp=2, labels="unequal"),
]


@pytest.mark.parametrize("case", spread_out(EXPERTS, 4), ids=str)
def test_experts(case: Case) -> None:
    test_matrix(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [case_of(p) for p in (dict(zip(SPACE, c, strict=True)) for c in itertools.product(*SPACE.values())) if legal(p)],
    ids=str,
)
def test_everything(case: Case) -> None:
    test_matrix(case)


@pytest.mark.parametrize(
    "family", spread_out(["llama", "llama-tied", "gpt", "gpt-untied", "mistral", "qwen2-mixed", *MOE], 3)
)
def test_one_device_equals_eager(family: str) -> None:
    """The captured and emitted program of one device is the user's model."""
    case = Case(family=family, labels="unequal")
    batch = global_batch(case)
    model = make_model(family, 0.0)
    loss = model(**batch).loss if is_hf(family) else models.gpt_loss(model(batch["ids"]), batch)
    loss.backward()
    got_loss, got = reference(case, torch.float32, batch)
    assert got_loss == pytest.approx(loss.item(), rel=1e-6)
    error, name = worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert error < 2e-6, name


def test_gpt_equals_eager_in_float64() -> None:
    case = Case(family="gpt")
    batch = global_batch(case)
    model = make_model("gpt", 0.0).double()
    models.gpt_loss(model(batch["ids"]), batch).backward()
    _, got = reference(case, torch.float64, batch)
    assert worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})[0] < 1e-12


CONTROLS = {
    "forward reduction dropped": (
        "bandwidth",
        r"reduce_scatter\((\w+), 'tp', dim=(\d)\)",
        r"slice_(\1, 'tp', dim=\2, src=R)",
    ),
    "backward reduction dropped": ("bandwidth", r"dst=R\)", "dst=I)"),
    "forward all-reduce doubled": (
        "latency",
        r"all_reduce\((\w+), 'tp', dst=I\)",
        r"all_reduce(all_reduce(\1, 'tp', dst=I), 'tp', dst=I)",
    ),
    "backward all-reduce dropped": ("latency", r"to_replicate\((\w+), 'tp'\)", r"\1"),
}


@pytest.mark.parametrize("control", list(CONTROLS))
def test_negative_control(control: str) -> None:
    """A dropped or doubled reduction is seen by the comparison."""
    prices, old, new = CONTROLS[control]
    case = Case(tp=2, prices=prices)
    program = compiled(case)
    ((name, text),) = program.sources.items()
    broken, count = re.subn(old, new, text)
    assert count, f"the layout has nothing that matches {old}"
    _, want = reference(case)
    try:
        _, got = run_simulated(case, sources={name: broken})
    except ValueError as exc:
        assert "differs between ranks" in str(exc)  # ranks that must agree do not
    else:
        assert worst(got, want)[0] > 1e-2


def test_sequence_length_is_free() -> None:
    """One captured graph, any batch and sequence length."""
    case = Case(family="gpt")
    batch = models.token_batch(3, SEQ // 2)
    batch = {"ids": batch["input_ids"], "labels": batch["labels"]}
    model = make_model("gpt", 0.0).double()
    models.gpt_loss(model(batch["ids"]), batch).backward()
    _, got = reference(case, torch.float64, batch)
    assert worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})[0] < 1e-12
    assert {str(s) for s in graph_of("gpt", 0.0).values["ids"].shape} == {"b", "s"}
