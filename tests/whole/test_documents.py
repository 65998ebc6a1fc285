"""Padding masks and packed sequences of Hugging Face models: captured, equal to the model itself and over processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import models
import parity_matrix
import pytest
import torch
from parity import Case, Trained, cluster_of, compiled, fake_group, spread_out, worst
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.ops.saved import OpFacts, TensorFacts
from autoplan.ops.table import saved_rule
from autoplan.runtime.attention import attention
from autoplan.runtime.model import ParallelModel

SEQ = 16
EAGER = {"attn_implementation": "eager"}
MIXED = functools.partial(models.make_windowed, mixed=True)  # windows in some layers
KINDS = {"right": {"packed": False}, "left": {"packed": False, "left": True}, "packed": {"packed": True}}


def stepped(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """Loss and gradients of the program of one device, and its sources."""
    graph = capture(model, {n: x[:2] for n, x in batch.items()})
    _, program = plan_program(graph, cluster_of(1, "bandwidth"), {}, len(batch["labels"]), SEQ)
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, dict(model.named_parameters()), dict(model.named_buffers()))
        loss = float(pm.step(batch))
        return loss, {n: g.clone() for n, g in pm.gradients().items()}, list(program.sources.values())


@pytest.mark.parametrize("make", spread_out([models.make_llama, models.make_windowed, models.make_deepseek, MIXED], 4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_the_model(kind: str, make: Callable[[], nn.Module]) -> None:
    """Loss and gradients of transformers' own attention with its own masks; not those without the mask."""
    model, batch = make(), models.with_documents(models.token_batch(4, SEQ), **KINDS[kind])
    loss, got, sources = stepped(model, batch)
    assert all(", documents=" in text for text in sources)
    whole = model(**batch, use_cache=False).loss
    whole.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(whole.item(), rel=1e-6) and worst(got, want)[0] < 1e-5
    rest = {n: x for n, x in batch.items() if n not in ("attention_mask", "position_ids")}
    if kind != "right":  # causal attention sees no padding behind it
        assert model(**rest, use_cache=False).loss.item() != pytest.approx(loss, rel=1e-4)


def mask_of(batch: dict[str, torch.Tensor], left: bool = False) -> torch.Tensor:
    return models.with_documents(batch, packed=False, left=left)["attention_mask"]


PADDED: dict[str, tuple[Callable[[], nn.Module], dict[str, bool]]] = {
    "llama": (models.make_llama, {"attention_mask": False}),
    "llama-left": (models.make_llama, {"attention_mask": True}),
    "mistral": (models.make_windowed, {"attention_mask": False}),
    "mistral-left": (MIXED, {"attention_mask": True}),
    "llama-eager": (functools.partial(models.make_llama, **EAGER), {"attention_mask": True}),
    "mistral-eager": (functools.partial(models.make_windowed, **EAGER), {"attention_mask": False}),
    "deepseek": (models.make_deepseek, {"attention_mask": False}),
    "bert": (models.make_bert, {"attention_mask": False}),
    "bert-left": (models.make_bert, {"attention_mask": True}),
    "t5": (models.make_t5, {"attention_mask": True, "decoder_attention_mask": False}),
    "t5-source": (models.make_t5, {"attention_mask": False}),
    "t5-target": (models.make_t5, {"decoder_attention_mask": False}),
    "bart": (models.make_bart, {"attention_mask": True, "decoder_attention_mask": False}),
    "bart-source": (models.make_bart, {"attention_mask": False}),
    "bert-eager": (functools.partial(models.make_bert, **EAGER), {"attention_mask": True}),
    "t5-eager": (functools.partial(models.make_t5, **EAGER), {"attention_mask": True, "decoder_attention_mask": True}),
    "bart-eager": (functools.partial(models.make_bart, **EAGER), {"attention_mask": False}),
}


@pytest.mark.parametrize("kind", spread_out(sorted(PADDED), 4))
def test_padding_whose_loss_counts(kind: str) -> None:
    """Labels everywhere, also where padding is: what padding sees is what transformers shows it, and where it sees
    nothing, attention is what transformers makes it. One sample is nothing but padding."""
    make, masks = PADDED[kind]
    model, plain = make(), models.token_batch(4, SEQ)
    batch = {**plain, **{name: mask_of(plain, left) for name, left in masks.items()}}
    for name in masks:
        batch[name][2] = 0
    loss, got, sources = stepped(model, batch)
    assert all("documents=" in text or "mask=" in text or "eager" in kind for text in sources)
    whole = model(**batch).loss
    whole.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(whole.item(), rel=1e-6) and worst(got, want)[0] < 1e-5
    model.zero_grad()
    model(**plain).loss.backward()
    without = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert worst(got, without)[0] > 1e-2  # not those without the mask


def test_a_mask_of_the_target_alone_is_of_the_target() -> None:
    """BART makes a mask of ones for its decoder, where it is given none: not padding."""
    plain = models.token_batch(2, SEQ)
    masked = capture(models.make_bart(), {**plain, "attention_mask": mask_of(plain)})
    attends = {b: [n.attrs for n in block.nodes if n.op == "attention"] for b, block in masked.blocks.items()}
    kinds = sorted({(bool(a["causal"]), bool(a.get("documents"))) for found in attends.values() for a in found})
    assert kinds == [(False, False), (False, True), (True, False)]  # over the source, of the encoder, of the decoder


def test_a_token_sees_its_own_document() -> None:
    """Two documents in one sequence are two sequences."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 10, 8, dtype=torch.float64) for h in (4, 2, 2))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    got = attention(q, k, v, causal=True, scale=None, documents=documents)
    parts = [attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], causal=True, scale=None) for a, b in ((0, 3), (3, 10))]
    assert (got - torch.cat(parts, 2)).abs().max() < 1e-14
    seen = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    for causal in (True, False):
        got = attention(q, k, v, causal=causal, scale=None, documents=torch.where(seen, 1, -2))
        shown = seen[:, None, None, :].expand(1, 1, 10, 10)
        want = attention(q, k, v, causal=False, scale=None, mask=shown.tril() if causal else shown)
        assert (got - want).abs().max() < 1e-14
    short, masked = {"documents": documents[:, :4]}, {"mask": torch.ones(10, 10, dtype=torch.bool)}
    for wrong, said in ((short, r"documents must .* \(1, 10\), not \(1, 4\)"), (masked, "with a mask beside them")):
        with pytest.raises(ValueError, match=said):
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


@pytest.mark.parametrize(
    ("window", "ahead", "causal"),
    [(None, None, True), (4, None, True), (20, None, True), (None, None, False), (4, 2, False), (20, 1, False)],
)
@pytest.mark.parametrize("samples", [1, 2])  # blocks of one sample are views
def test_what_is_kept_is_what_the_table_says(window: int | None, ahead: int | None, causal: bool, samples: int) -> None:
    q, k, v = (torch.randn(samples, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.arange(10).expand(samples, -1) // 5
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = attention(q, k, v, causal=causal, scale=None, window=window, ahead=ahead, documents=documents)
    for x in (q, k, v, out):
        kept.pop(x.untyped_storage().data_ptr(), None)
    attrs = {"causal": causal, "scale": None, "documents": True, "window": window, "ahead": ahead}
    *ins, made = (TensorFacts(tuple(x.shape), str(x.dtype)[6:], x.requires_grad) for x in (q, k, v, documents, out))
    facts = OpFacts("attention", attrs, tuple(ins), (made,))
    extra = saved_rule(facts).extra
    assert extra is not None and sum(extra(facts)) == sum(kept.values())


def test_a_mask_of_scores_is_refused() -> None:
    batch = {**models.token_batch(2, SEQ), "attention_mask": torch.ones(2, 1, SEQ, SEQ, dtype=torch.long)}
    why = r"attention_mask has shape \(2, 1, 16, 16\); it must say of every token"
    with pytest.raises(CaptureError, match=why):
        capture(models.make_llama(), batch)
    wrong = {**models.token_batch(2, SEQ), "decoder_attention_mask": torch.ones(2, SEQ + 1, dtype=torch.long)}
    with pytest.raises(CaptureError, match=r"decoder_attention_mask has shape \(2, 17\)"):
        capture(models.make_t5(), wrong)


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
@pytest.mark.parametrize("family", [pytest.param("llama-padded", marks=pytest.mark.slow), "llama-packed"])
@pytest.mark.parametrize(
    "degrees",
    spread_out(
        [
            {"cp": 2, "context_method": "ring", "num_micro_batches": 2},
            {"cp": 2},
            {"cp": 2, "context_method": "ulysses", "zero": 3},
            {"cp": 4, "context_method": "ulysses2xring2"},
            {"cp": 4, "context_method": "ulysses2xgather2", "recompute": "full"},
            {"dp": 2, "tp": 2, "zero": 2},
            {"pp": 2, "num_micro_batches": 3, "recompute": "full"},
        ]
    ),
    ids=str,
)
def test_training_equals_one_device(family: str, degrees: dict[str, int | str]) -> None:
    result = parity_matrix.check(Case(family, **degrees))  # type: ignore[arg-type]
    assert result.equal, result


OTHERS = [
    Case("mistral-packed", cp=2, context_method="ring", num_micro_batches=2),
    Case("mistral-padded", cp=4, context_method="ulysses2xring2"),
    Case("mistral-packed", cp=2),
    Case("mistral-padded", cp=2, context_method="ulysses", zero=3),
    Case("mistral-packed", dp=2, pp=2, num_micro_batches=2, recompute="attention+mlp"),
    Case("bert-padded", cp=2, context_method="ring", num_micro_batches=2, labels="unequal"),
    Case("bert-padded", cp=2, context_method="gather", zero=3),
    Case("bert-padded", cp=4, context_method="ulysses2xring2"),
    Case("bert-padded", cp=4, context_method="ulysses2xgather2", recompute="full"),
    Case("t5-padded", dp=2, pp=2, num_micro_batches=3, zero=1, labels="unequal"),
    Case("t5-padded", tp=2, pp=2, num_micro_batches=2, recompute="full"),
    Case("t5-padded", tp=2, dp=2, zero=3, prices="latency"),
    Case("bart-padded", pp=4, num_micro_batches=4),
    Case("llama-left", cp=2, context_method="ring", num_micro_batches=2),
    Case("mistral-left", cp=4, context_method="ulysses2xring2"),
    Case("llama-left", cp=2, context_method="gather", zero=3),
    Case("mistral-left", tp=2, pp=2, num_micro_batches=2),
    Case("bart-padded", tp=2, dp=2, zero=2),
]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize("case", spread_out(OTHERS, 8), ids=str)
def test_windows_encoders_and_targets_too(case: Case) -> None:
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
