"""Padding masks and packed sequences of Hugging Face models: captured, equal to the model itself and over processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import models
import parity_matrix
import pytest
import torch
from parity import Case, Trained, cluster_of, compiled, fake_group, worst
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.cost_models.errors import CaptureError
from autoplan.rules.saved import OpFacts, TensorFacts, saved_rule
from autoplan.runtime.attention import attention
from autoplan.runtime.model import ParallelModel

SEQ = 16
MIXED = functools.partial(models.make_windowed, mixed=True)  # windows in some layers
KINDS = {"right": {"packed": False}, "left": {"packed": False, "left": True}, "packed": {"packed": True}}


@pytest.mark.parametrize("make", [models.make_llama, models.make_deepseek, models.make_windowed, MIXED])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_the_model(kind: str, make: Callable[[], nn.Module]) -> None:
    """Loss and gradients of transformers' own attention with its own masks; not those without the mask."""
    model, batch = make(), models.with_documents(models.token_batch(4, SEQ), **KINDS[kind])
    graph = capture(model, {n: x[:2] for n, x in batch.items()})
    _, program = plan_program(graph, cluster_of(1, "bandwidth"), {}, 4, SEQ)
    assert all(", documents=" in text for text in program.sources.values())
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, dict(model.named_parameters()), dict(model.named_buffers()))
        loss = float(pm.step(batch))
        got = {n: g.clone() for n, g in pm.gradients().items()}
    whole = model(**batch, use_cache=False).loss
    whole.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(whole.item(), rel=1e-6) and worst(got, want)[0] < 1e-5
    rest = {n: x for n, x in batch.items() if n not in ("attention_mask", "position_ids")}
    if kind != "right":  # causal attention sees no padding behind it
        assert model(**rest, use_cache=False).loss.item() != pytest.approx(loss, rel=1e-4)


def test_a_token_sees_its_own_document() -> None:
    """Two documents in one sequence are two sequences."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 10, 8, dtype=torch.float64) for h in (4, 2, 2))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    got = attention(q, k, v, causal=True, scale=None, documents=documents)
    parts = [attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], causal=True, scale=None) for a, b in ((0, 3), (3, 10))]
    assert (got - torch.cat(parts, 2)).abs().max() < 1e-14
    for wrong in ({"documents": documents[:, :4]}, {"mask": torch.ones(10, 10, dtype=torch.bool)}):
        with pytest.raises(ValueError, match=r"documents .* must be \[b, s\], without a mask"):
            attention(q, k, v, **{"causal": True, "scale": None, "documents": documents, **wrong})


@pytest.mark.parametrize("window", [1, 3, 4, 10])
def test_a_token_sees_the_window_of_its_own_document(window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 10, 8, dtype=torch.float64) for h in (4, 2, 2))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4]])
    got = attention(q, k, v, causal=True, scale=None, documents=documents, window=window)
    for b, ends in enumerate(((0, 3, 9, 10), (0, 7, 10))):
        for first, end in itertools.pairwise(ends):
            part = (x[b : b + 1, :, first:end] for x in (q, k, v))
            want = attention(*part, causal=True, scale=None, window=window)
            assert (got[b : b + 1, :, first:end] - want).abs().max() < 1e-14


@pytest.mark.parametrize("window", [None, 4, 20])
def test_what_is_kept_is_what_the_table_says(window: int | None) -> None:
    q, k, v = (torch.randn(2, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.arange(10).expand(2, -1) // 5
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = attention(q, k, v, causal=True, scale=None, window=window, documents=documents)
    for x in (q, k, v, out):
        kept.pop(x.untyped_storage().data_ptr(), None)
    attrs = {"causal": True, "scale": None, "documents": True, "window": window}
    *ins, made = (TensorFacts(tuple(x.shape), str(x.dtype)[6:], x.requires_grad) for x in (q, k, v, documents, out))
    facts = OpFacts("attention", attrs, tuple(ins), (made,))
    extra = saved_rule(facts).extra
    assert extra is not None and sum(extra(facts)) == sum(kept.values())


def test_a_mask_of_scores_is_refused() -> None:
    batch = {**models.token_batch(2, SEQ), "attention_mask": torch.ones(2, 1, SEQ, SEQ, dtype=torch.long)}
    why = r"attention_mask has shape \(2, 1, 16, 16\); it must say of every token"
    with pytest.raises(CaptureError, match=why):
        capture(models.make_llama(), batch)


def test_over_cut_sequences_every_method_is_looked_at() -> None:
    text = compiled(Case("llama-packed", cp=2)).sources["stage0.py"]
    assert text.count("gather='cp'") == 1 and "documents=" in text and text.count("context_part(") == 5
    graph = capture(models.make_llama(), models.with_documents(models.token_batch(2, SEQ), packed=True))
    for method in ("ring", "ulysses", "gather"):
        plan, program = plan_program(graph, cluster_of(2, "bandwidth"), {"cp": 2, "context_method": method}, 4, SEQ)
        assert plan.config.context_method == {"layer": method}
        assert f"{method}='cp'" in program.sources["stage0.py"]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize("family", [pytest.param("llama-padded", marks=pytest.mark.exhaustive), "llama-packed"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"cp": 2},
        {"cp": 2, "context_method": "ring", "num_micro_batches": 2},
        {"cp": 2, "context_method": "ulysses", "zero": 3},
        {"cp": 4, "context_method": "ulysses2xring2"},
        {"cp": 4, "context_method": "ulysses2xgather2", "recompute": "full"},
        {"dp": 2, "tp": 2, "zero": 2},
        {"pp": 2, "num_micro_batches": 3, "recompute": "full"},
    ],
    ids=str,
)
def test_training_equals_one_device(family: str, degrees: dict[str, int | str]) -> None:
    result = parity_matrix.check(Case(family, **degrees))  # type: ignore[arg-type]
    assert result.equal, result


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize(
    "case",
    [
        Case("mistral-packed", cp=2, context_method="ring", num_micro_batches=2),
        Case("mistral-padded", cp=4, context_method="ulysses2xring2"),
        Case("mistral-packed", cp=2),
        Case("mistral-padded", cp=2, context_method="ulysses", zero=3),
        Case("mistral-packed", dp=2, pp=2, num_micro_batches=2, recompute="attention+mlp"),
    ],
    ids=str,
)
def test_windows_too(case: Case) -> None:
    result = parity_matrix.check(case)
    assert result.equal, result


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
def test_a_ring_over_all_documents_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the reference without the documents."""
    wanted: Callable[..., Trained] = parity_matrix.wanted
    monkeypatch.setattr(parity_matrix, "wanted", lambda family, dropout, labels: wanted("llama", dropout, labels))
    result = parity_matrix.check(Case("llama-packed", cp=2, context_method="ring"))
    assert not result.equal and not result.refused
