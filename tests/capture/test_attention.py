"""Attention of every kind: what one op cannot say is written as plain ops, and the program is still the module."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from parity import cluster_of, worst
from plain_models import assert_equal as equal_at_all_degrees
from test_faithful import Model, given, run
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoplan.capture.export import capture
from autoplan.capture.frontend import hf_attention
from autoplan.capture.frontend.hf_attention import is_standard
from autoplan.capture.frontend.written_out import written_attention
from autoplan.codegen.program import compile_program
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph
from experiments.shared import simulated
from experiments.shared.default_plans import make_plan, read_pins

VOCAB, SEQ = 96, 12
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip


def both(
    model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64
) -> tuple[float, float, float, ModelGraph]:
    """Loss of the program, of the module, the worst gradient, and the graph."""
    model = model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    want = model(**batch).loss
    want.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    graph = capture(model, batch)
    loss, got = run(model, graph, batch, dtype)
    return loss, want.item(), worst(got, wanted)[0], graph


def assert_equal(model: nn.Module, batch: dict[str, torch.Tensor]) -> ModelGraph:
    torch.manual_seed(0)
    # a mask of 'eager' is the least number of its dtype: in float64 that is too large for their softmax in float32
    one_dtype = "attention_mask" in batch and model.config._attn_implementation == "eager"
    got, want, error, graph = both(model, batch, torch.float32 if one_dtype else torch.float64)
    assert got == pytest.approx(want, rel=1e-6) and error < 2e-5  # softmax and the loss are computed in float32
    return graph


def ops(graph: ModelGraph) -> list[str]:
    return [n.op for block in graph.blocks.values() for n in block.nodes]


def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return models.with_documents(batch, packed=False)


# -- what the function of a model computes -----------------------------------------------------------------------------


def standard(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **_: Any) -> Any:
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2), None


def with_sinks(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
    return standard(module, q, k, v, mask + module.sinks, **kwargs)


def capped(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **_: Any) -> Any:
    return standard(module, q.tanh(), k, v, mask, scaling)


def other_heads(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **_: Any) -> Any:
    groups, alone = module.num_key_value_groups, type(module)(num_key_value_groups=1)
    return standard(alone, q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), mask, scaling)


def without_mask(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **_: Any) -> Any:
    return standard(module, q, k, v, None, scaling)


@pytest.mark.parametrize(
    ("function", "is_one_op"),
    [(standard, True), (with_sinks, False), (capped, False), (other_heads, False), (without_mask, False)],
)
def test_a_function_is_one_op_only_if_it_computes_the_same(function: Callable[..., Any], is_one_op: bool) -> None:
    assert is_standard(function, grouped=True, masked=True, biased=False) == is_one_op
    assert not is_standard(function, grouped=True, masked=True, biased=True)  # none of them adds a bias
    assert is_standard(other_heads, grouped=False, masked=True, biased=False)
    assert is_standard(without_mask, grouped=True, masked=False, biased=False)


def gemma2(**kwargs: Any) -> nn.Module:
    return models.make_gemma2(num_hidden_layers=2, **kwargs)


def sinks(attention: str = "eager", **kwargs: Any) -> nn.Module:
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    settings = {**SMALL, "sliding_window": 4, "attn_implementation": attention, **kwargs}
    model: nn.Module = GraniteSWAForCausalLM(GraniteSWAConfig(**settings))
    return model


def chunked(chunk: int = 5, attention: str = "sdpa") -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=chunk,
        attn_implementation=attention, interleave_moe_layer_step=2, layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    model: nn.Module = Llama4ForCausalLM(config)
    return model


def modern_bert(attention: str = "sdpa") -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, local_attention=4, global_attn_every_n_layers=3, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = ModernBertForMaskedLM(config)
    return model


def falcon(alibi: bool, attention: str = "sdpa") -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=alibi,
        new_decoder_architecture=False, multi_query=False, parallel_attn=not alibi, attn_implementation=attention,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = FalconForCausalLM(config)
    return model


@pytest.mark.parametrize(
    "with_padding", [pytest.param(False, id="whole", marks=pytest.mark.exhaustive), pytest.param(True, id="padded")]
)
@pytest.mark.parametrize(
    "make",
    [gemma2, sinks, chunked, modern_bert, lambda: modern_bert("eager"), lambda: falcon(True), lambda: falcon(False)],
    ids=["softcap", "sinks", "chunks", "two-sided-window", "two-sided-window-eager", "alibi", "falcon"],
)
def test_the_program_is_the_module(make: Callable[[], nn.Module], with_padding: bool) -> None:
    batch = models.token_batch(2, SEQ, vocab=VOCAB)
    assert_equal(make().eval(), padded(batch) if with_padding else batch)


def with_holes(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padding before, between and behind valid tokens, longer than a chunk."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :4], mask[1, :1], mask[1, 2:11] = 0, 0, 0
    return {**batch, "attention_mask": mask}


CHUNKS = {"causal": True, "chunk": 5, "window": None, "ahead": None}
TWO_SIDES = {"causal": False, "chunk": None, "window": 3, "ahead": 2}
PLAIN = {"causal": True, "chunk": None, "window": None, "ahead": None}


@pytest.mark.parametrize(
    ("make", "how"),
    [(chunked, CHUNKS), (modern_bert, TWO_SIDES), (lambda: falcon(False), PLAIN)],
    ids=["chunks", "two-sided-window", "torch-s-own"],
)
@pytest.mark.parametrize("with_padding", [False, True])
def test_local_attention_is_one_op_without_a_mask(
    make: Callable[[], nn.Module], how: dict[str, Any], with_padding: bool
) -> None:
    batch = models.token_batch(2, SEQ, vocab=VOCAB)
    graph = assert_equal(make().eval(), with_holes(batch) if with_padding else batch)
    nodes = [n for block in graph.blocks.values() for n in block.nodes if n.op == "attention"]
    assert any({name: n.attrs.get(name) for name in how} == how for n in nodes) and "softmax" not in ops(graph)
    assert all(bool(n.attrs.get("documents")) == with_padding and len(n.inputs) == 3 + with_padding for n in nodes)


def test_chunks_of_packed_documents_begin_with_the_document() -> None:
    model = chunked()
    model.config.use_cache = False  # with a cache transformers finds no documents
    batch = models.token_batch(2, SEQ, vocab=VOCAB)
    batch["position_ids"] = torch.cat((torch.arange(7), torch.arange(5))).expand(2, -1).contiguous()
    graph = assert_equal(model.eval(), batch)
    attrs = [n.attrs for block in graph.blocks.values() for n in block.nodes if n.op == "attention"]
    assert [(a.get("chunk"), a["documents"]) for a in attrs] == [(5, True), (None, True)]


def test_positions_repeated_over_the_batch_are_no_documents() -> None:
    """As Whisper's decoder makes them."""
    from autoplan.capture.frontend.masks import document_starts

    def forward(x: torch.Tensor) -> torch.Tensor:
        once = torch.arange(x.shape[1]).unsqueeze(0)
        found.append([document_starts(p) is None for p in (once.repeat(2, 1), once.repeat(1, 2))])
        return x

    found: list[list[bool]] = []
    make_fx(forward)(torch.zeros(2, 4))
    assert found == [[True, False]]


@pytest.mark.parametrize("make", [models.make_bloom, models.make_mpt], ids=["bloom", "mpt"])
def test_alibi_of_attention_that_a_file_writes_out(make: Callable[[], nn.Module]) -> None:
    """One op without a tensor of all pairs; with padding, where a query may see nothing, it stays as it is written."""
    batch = models.token_batch(2, SEQ)
    graph = assert_equal(make().eval(), batch)
    found = [n for block in graph.blocks.values() for n in block.nodes if n.op == "attention"]
    assert found and all(n.attrs["key_bias"] and n.attrs["causal"] for n in found) and "softmax" not in ops(graph)
    pairs = [v for b in graph.blocks.values() for v in b.values.values() if [str(d) for d in v.shape].count("s") > 1]
    assert not pairs
    assert "attention" not in ops(assert_equal(make().eval(), padded(batch)))


def test_shares_of_attention_that_a_model_reads() -> None:
    """A loss of the shares needs them all: attention stays as it is written."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.make_mpt()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out = self.model(input_ids=ids, output_attentions=True)
            return out.logits * (1 + out.attentions[0].square().mean((1, 2, 3))[:, None, None])

    batch = models.token_batch(2, SEQ)
    graph = capture(Reading().eval(), {"ids": batch["input_ids"], "labels": batch["labels"]}, loss_of)
    assert "softmax" in ops(graph)


def test_what_makes_these_kinds_special_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: without the cap, the sinks, the chunks or the window, the loss is another."""
    batch = models.token_batch(2, SEQ, vocab=VOCAB)

    def loss(model: nn.Module) -> float:
        torch.manual_seed(0)
        return both(model.eval(), batch)[0]

    # far more than the 1e-6 of equality
    assert abs(loss(gemma2()) - loss(gemma2(attn_logit_softcapping=None))) > 1e-4
    assert abs(loss(chunked(5)) - loss(chunked(64))) > 1e-3
    torch.manual_seed(0)
    monkeypatch.setattr(hf_attention._Call, "is_plain_for_eager", lambda *_: False)
    monkeypatch.setattr(hf_attention._Call, "special", lambda *_: None)
    model = sinks().double().eval()
    got, _ = run(model, capture(model, batch), batch)
    assert abs(got - model(**batch).loss.item()) > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_relative_bias_with_padding(attention: str) -> None:
    """One source is nothing but padding, one target begins with it, and all labels count."""
    model = models.make_t5(attn_implementation=attention)
    batch = models.token_batch(2, SEQ)
    batch["labels"] = batch["labels"][:, :7].contiguous()
    batch["attention_mask"], batch["decoder_attention_mask"] = (torch.ones(2, n, dtype=torch.long) for n in (SEQ, 7))
    batch["attention_mask"][0, 5:], batch["attention_mask"][1] = 0, 0
    batch["decoder_attention_mask"][0, :3] = 0
    assert_equal(model, batch)


def test_sdpa_ignores_sinks_and_refuses_caps_as_transformers_does() -> None:
    batch = models.token_batch(2, SEQ, vocab=VOCAB)
    ignoring = sinks()
    ignoring.config._attn_implementation = "sdpa"
    graph = assert_equal(ignoring.eval(), batch)
    assert any("'sdpa' of transformers ignores s_aux" in note for note in graph.notes)
    assert not any("ignores" in note for note in assert_equal(sinks().eval(), batch).notes)
    flash = sinks()
    flash.config._attn_implementation = "flash_attention_2"  # whose kernels may not ignore them
    with pytest.raises(CaptureError, match="attn_implementation='flash_attention_2' with sinks is not supported"):
        capture(flash, batch)
    refusing = gemma2()
    refusing.config._attn_implementation = "sdpa"
    with pytest.raises(CaptureError, match="'sdpa' with soft-capping is not supported; use attn_impl"):
        capture(refusing, batch)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        refusing(**batch)


# -- dropout inside attention ------------------------------------------------------------------------------------------


def scores_of(kind: str) -> dict[str, Any]:
    """Arguments of F.scaled_dot_product_attention; the last query of a mask sees nothing."""
    generator = torch.Generator().manual_seed(2)
    seen = torch.rand(2, 1, 5, 7, generator=generator) < 0.6
    seen[..., -1, :] = False
    added = torch.randn(2, 4, 5, 7, generator=generator).double()
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.3},
        "bool": {"attn_mask": seen},
        "added": {"attn_mask": added},
        "minus infinity": {"attn_mask": added.masked_fill(~seen, float("-inf"))},
    }[kind]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "scaled", "bool", "added", "minus infinity"])
def test_written_out_attention_is_that_of_torch(kind: str, grouped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 5, 6, generator=generator).double()
    k, v = (torch.randn(2, 2 if grouped else 4, 7, 6, generator=generator).double() for _ in range(2))
    given = scores_of(kind) | ({"enable_gqa": True} if grouped else {})
    got, want = [], []
    for function, found in ((written_attention, got), (F.scaled_dot_product_attention, want)):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*tensors, **given)
        out.square().sum().backward()
        found += [out, *(x.grad for x in tensors)]
    for mine, torchs in zip(got, want, strict=True):
        assert torch.allclose(mine, torchs, rtol=1e-10, atol=1e-12)


class Attending(nn.Module):
    """F.scaled_dot_product_attention with dropout, as nanoGPT calls it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p, self.embed, self.head = p, nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.qkv = nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (t.view(*ids.shape, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.head(x + y.transpose(1, 2).reshape(x.shape))


def loss_of(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def test_dropout_inside_attention_is_that_of_nn_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """One op, with dropout in training alone: with a mask that keeps all it is the module without dropout."""
    from autoplan.runtime import program

    batch = models.token_batch(4, SEQ, vocab=VOCAB)
    batch = {"ids": batch["input_ids"], "labels": batch["labels"]}
    model = Attending(0.5).double()
    graph = capture(model, batch, loss_of)
    assert "attention" not in ops(graph) and ops(graph).count("dropped_attention") == 1
    want = loss_of(model.eval()(batch["ids"]), batch)
    want.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert "attention" in ops(capture(model, batch, loss_of))
    dropped, gradients = run(model, graph, batch)
    assert abs(dropped - want.item()) > 1e-3 and worst(gradients, wanted)[0] > 1e-3
    whole = program.attention
    monkeypatch.setattr(program, "attention", lambda *x, dropout_p, **how: whole(*x, **how))
    got, gradients = run(model, graph, batch)
    assert got == pytest.approx(want.item(), rel=1e-12) and worst(gradients, wanted)[0] < 1e-10


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "with_padding", [pytest.param(False, id="whole", marks=pytest.mark.exhaustive), pytest.param(True, id="padded")]
)
def test_dropout_inside_attention_of_hugging_face_models(attention: str, with_padding: bool) -> None:
    batch = models.token_batch(2, SEQ)
    for make in (models.make_llama, models.make_gemma2):
        if make is models.make_gemma2 and attention == "sdpa":
            continue  # which refuses it
        model = make(attention_dropout=0.25, attn_implementation=attention)
        given = padded(batch) if with_padding else batch
        found = ops(capture(model, given))
        # 'eager' with padding attends to all tokens where a query would see none, which no op of attention does
        plain = attention == "eager" and with_padding
        assert ("dropped_attention" in found) != plain and "attention" not in found
        assert found.count("dropout") == found.count("softmax") and bool(found.count("softmax")) == plain
        assert "dropout" not in ops(assert_equal(model.eval(), given))


class Grouped(nn.Module):
    """Fewer key heads than heads, under an additive mask whose least number hides padding and later tokens.

    Args:
        broadcast: torch broadcasts the key head, or else groups the heads.
    """

    def __init__(self, heads: int, groups: int, broadcast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.groups, self.broadcast = heads, groups, broadcast
        self.embed, self.out, self.head = nn.Embedding(VOCAB, 32), nn.Linear(8 * heads, 32), nn.Linear(32, VOCAB)
        self.q, self.k, self.v = (nn.Linear(32, 8 * n) for n in (heads, groups, groups))

    def forward(self, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q = self.q(x).view(*ids.shape, self.heads, 8).transpose(1, 2)
        k, v = (f(x).view(*ids.shape, self.groups, 8).transpose(1, 2) for f in (self.k, self.v))
        least = torch.finfo(x.dtype).min
        mask = torch.full((ids.shape[1], ids.shape[1]), least, dtype=x.dtype).triu(1)
        mask = mask[None, None].masked_fill((valid == 0)[:, None, None], least)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=not self.broadcast)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("heads", "groups", "broadcast"), [(2, 1, True), (2, 1, False), (4, 2, False)])
def test_queries_of_which_a_mask_hides_all_keys_by_the_least_number(
    heads: int, groups: int, broadcast: bool, tp: int
) -> None:
    """Gradients there are another number in torch's fused kernel, which it takes for equal or grouped heads, than in
    the operations that it takes for a broadcast key head: the program has those of the module, whatever heads a rank
    has."""
    batch = models.token_batch(2, SEQ, vocab=VOCAB)
    batch = {"ids": batch["input_ids"], "labels": batch["labels"], "valid": torch.ones(2, SEQ, dtype=torch.long)}
    batch["valid"][0, :3] = 0
    model = Grouped(heads, groups, broadcast).double()

    def loss_of_module(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())

    want = loss_of_module(model(batch["ids"], batch["valid"]), batch)
    want.backward()
    graph = capture(model, batch, loss_of_module)
    pins, long = {"tp": tp, "state_slack": 1.0}, {"b": 64, "s": 512}  # heads are worth sharding
    _, layouts, _ = make_plan(graph, cluster_of(tp, "bandwidth"), read_pins(pins, tp), long)
    program = compile_program(graph, layouts)
    assert re.search(rf"(softmax|attended) = .*f64\[b, {heads // tp}, s, ", "".join(program.sources.values()))
    params = {n: p.detach() for n, p in model.named_parameters()}
    loss, got = simulated.run_simulated(program, simulated.SimulatedStep(params, {}, batch))
    assert loss == pytest.approx(want.item(), rel=1e-12)
    wanted = {n: p.grad for n, p in model.named_parameters() if n != "k.bias"}  # nothing but rounding
    error, name = worst({n: got[n] for n in wanted}, wanted)
    assert error < 1e-12, name


# -- attention of other dims than [b, heads, s, d] ---------------------------------------------------------------------


def one_head(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.tanh(), x, is_causal=True)


def one_head_of_a_mask(x: torch.Tensor) -> torch.Tensor:
    seen = x[..., 0][:, None] < x[..., 1][:, :, None] + 2  # [b, s, s]
    return F.scaled_dot_product_attention(x, x.tanh(), x, attn_mask=seen)


def windows_of_a_bias(x: torch.Tensor) -> torch.Tensor:
    """[b, windows, heads, s, d], and a bias for every head and window."""
    parts = x.unflatten(1, (3, 4)).unflatten(-1, (2, 4)).transpose(2, 3)
    bias = torch.linspace(0, 2, 96, dtype=x.dtype).view(1, 3, 2, 4, 4)
    out = F.scaled_dot_product_attention(parts, parts.tanh(), parts, attn_mask=bias, scale=0.4)
    return out.transpose(2, 3).flatten(-2).flatten(1, 2)


def keys_of_all_samples(x: torch.Tensor) -> torch.Tensor:
    """Learned keys, which all samples share."""
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys = torch.linspace(-1, 1, 40, dtype=x.dtype).view(1, 2, 5, 4)
    return F.scaled_dot_product_attention(heads, keys, keys.cos()).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("function", "is_whole"),
    [(one_head, True), (one_head_of_a_mask, True), (windows_of_a_bias, True), (keys_of_all_samples, False)],
)
def test_attention_of_other_dims(function: Callable[[torch.Tensor], torch.Tensor], is_whole: bool) -> None:
    model, batch = Model(lambda m, x: function(x)).double(), given(seq=SEQ)
    graph = equal_at_all_degrees(model, batch, lambda out, _: out.square().mean(), ("tp 2", "dp 2 ZeRO 3"))
    assert ("attention" in ops(graph)) is is_whole
