"""Masks that Hugging Face models ask for: none is lost, whoever computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import worst
from test_faithful import run
from torch import nn
from transformers import MegatronBertConfig, MegatronBertForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autoplan.capture.export
from autoplan.capture.export import capture
from autoplan.capture.frontend import huggingface
from autoplan.capture.frontend.cache import capture_key
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph

VOCAB, HIDDEN, HEADS, SEQ = 32, 16, 2, 6


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    hidden_size = HIDDEN
    sliding_window = 2


def plain(
    module: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Any = None,
    **_: Any,
) -> Any:
    """Attention of the model's own file, as 'eager' means it."""
    scores = q @ k.transpose(2, 3) * scaling
    for added in (position_bias, mask):
        if added is not None:
            scores = scores + added
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


class Layer(nn.Module):
    """Attention of a kind: 'registered' calls the registered function, 'own' uses the mask itself.

    'biased' and 'unbiased' are 'registered' with a bias by position: a learned one, and one of zeros, as the
    cross-attention of T5 has it.
    """

    def __init__(self, config: Any, kind: str, extra: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.kind, self.extra, self.is_causal = config, kind, extra, True
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        if kind == "biased":
            self.bias = nn.Parameter(torch.randn(HEADS, 1, 1))
        if kind == "unbiased":
            self.has_relative_attention_bias, self.is_decoder, self.is_causal = False, True, False

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, HIDDEN // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scaling = (HIDDEN // HEADS) ** -0.5
        if self.kind != "own":
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain)
            extra = self.extra | ({} if self.kind == "registered" else {"position_bias": self.by_position(x)})
            y, _ = attend(self, q, k, v, mask, scaling=scaling, dropout=0.0, **extra)
        else:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -1e9)
            y, _ = plain(self, q, k, v, mask, scaling)
        return x + self.out(y.reshape(b, s, HIDDEN))

    def by_position(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1])
        if self.kind == "unbiased":
            return torch.zeros((1, HEADS, x.shape[1], x.shape[1]), dtype=x.dtype)
        return (self.bias * (place[None] - place[:, None]))[None]


def causal(model: Any, x: torch.Tensor, ids: torch.Tensor, mask: Any) -> Any:
    return create_causal_mask(model.config, x, mask, past_key_values=None)


def bidirectional(model: Any, x: torch.Tensor, ids: torch.Tensor, mask: Any) -> Any:
    return create_bidirectional_mask(model.config, x, mask)


class Toy(PreTrainedModel):
    """A language model of two layers; `ask` asks transformers for their mask."""

    config_class = ToyConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(
        self,
        kinds: tuple[str, ...] = ("registered", "registered"),
        ask: Callable[..., Any] = causal,
        attention: str = "sdpa",
        **extra: Any,
    ) -> None:
        super().__init__(ToyConfig(attn_implementation=attention))
        torch.manual_seed(0)
        self.ask, self.embed, self.head = ask, nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(Layer(self.config, kind, extra) for kind in kinds)

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, use_cache: bool = False) -> Any:
        x = self.embed(input_ids)
        mask = self.ask(self, x, input_ids, attention_mask)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))}


def given(padded: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (2, SEQ), generator=generator)
    batch = {"input_ids": ids, "labels": ids.flip(1).contiguous()}
    if padded:
        ids[1, 4:] = 0
        batch["labels"][1, 4:] = -100
        batch["attention_mask"] = (ids != 0).long()
    return batch


def both(
    model: Any, batch: dict[str, torch.Tensor], without: str = "no gradient"
) -> tuple[float, float, float, ModelGraph]:
    """Loss of the program, of the module, the worst gradient, and the graph.

    Args:
        without: parameters with this in their names have gradients of 0, of which only rounding would be compared.
    """
    model = model.double()
    want = model(**batch)["loss"]
    want.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    graph = capture(model, batch)
    loss, got = run(model, graph, batch)
    for n in [n for n in wanted if without in n]:
        assert max(found.pop(n).abs().max().item() for found in (got, wanted)) < 1e-14
    return loss, want.item(), worst(got, wanted)[0], graph


def assert_equal(model: Any, batch: dict[str, torch.Tensor]) -> ModelGraph:
    got, want, error, graph = both(model, batch)
    assert got == pytest.approx(want, rel=1e-10) and error < 1e-8  # the models are float64
    return graph


def ops(graph: ModelGraph) -> list[str]:
    return [n.op for block in graph.blocks.values() for n in block.nodes]


def megatron_bert() -> Any:
    config = MegatronBertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.5,
        is_decoder=True,
    )
    torch.manual_seed(0)
    return MegatronBertForCausalLM(config)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_of_its_own_gets_the_mask(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file writes it out: it is one op, but with padding, where a query may see nothing."""
    # a softmax does not see what a bias adds to all keys of a query alike
    got, want, error, graph = both(megatron_bert(), given(padded), without="no gradient" if padded else "key.bias")
    assert got == pytest.approx(want, rel=1e-6) and error < 1e-6  # its loss is computed in float32
    assert ("masked_fill" in ops(graph)) == ("attention" not in ops(graph)) == padded
    assert sum("layer" in name for name in graph.blocks) == 1
    if padded:
        return
    # negative control: without the mask it is another model
    monkeypatch.setattr(huggingface.masks_of, "mask_function", lambda *_: lambda **_: None)
    got, want, _, _ = both(megatron_bert(), given())
    assert abs(got - want) > 1e-3


@pytest.mark.parametrize(("attention", "padded"), [("sdpa", True), ("eager", False)])
def test_layers_of_both_kinds(attention: str, padded: bool) -> None:
    assert_equal(Toy(("registered", "own"), attention=attention), given(padded))


def test_registered_attention_needs_no_elements_of_a_mask() -> None:
    graph = assert_equal(Toy(), given())
    found = [n for b in graph.blocks.values() for n in b.nodes if n.op == "attention"]
    assert [n.attrs["causal"] for n in found] == [True]  # one block, called twice
    assert not {"arange", "masked_fill", "bitwise_and"} & set(ops(graph))


def window(model: Any, x: Any, ids: Any, mask: Any) -> Any:
    return create_sliding_window_causal_mask(model.config, x, mask, past_key_values=None)


def odd_keys(model: Any, x: Any, ids: Any, mask: Any) -> Any:
    return create_causal_mask(
        model.config, x, mask, past_key_values=None, and_mask_function=lambda b, h, q, k: (q == k) | (q - k > 1)
    )


def not_zero(model: Any, x: Any, ids: Any, mask: Any) -> Any:
    """The model makes the mask of what it reads, as ESM and XLM do."""
    return create_causal_mask(model.config, x, (ids != 0).long(), past_key_values=None)


def ones(model: Any, x: Any, ids: Any, mask: Any) -> Any:
    return create_causal_mask(model.config, x, torch.ones_like(ids), past_key_values=None)


def test_the_window_of_a_mask_is_kept_by_layers_that_do_not_name_it() -> None:
    assert_equal(Toy(ask=window), given())


def test_a_mask_that_the_model_makes_of_its_inputs_is_one() -> None:
    zeros = given(padded=True)
    del zeros["attention_mask"]
    assert "masked_fill" not in ops(assert_equal(Toy(ask=ones), given()))
    assert_equal(Toy(ask=not_zero), zeros)


def test_a_mask_function_of_the_models_own_is_never_taken_for_causal() -> None:
    for batch in (given(), given(padded=True)):
        assert_equal(Toy(ask=odd_keys), batch)
        assert_equal(Toy(ask=odd_keys, attention="eager"), batch)
    # negative control: causal alone is another model
    assert abs(both(Toy(ask=odd_keys), given())[0] - both(Toy(), given())[0]) > 1e-4


def test_everybody_sees_everybody_where_no_mask_says_otherwise() -> None:
    """is_causal is True of these layers: 'eager' does not go by it, 'sdpa' does."""
    eager, _, _, _ = both(Toy(ask=bidirectional, attention="eager"), given())
    assert_equal(Toy(ask=bidirectional, attention="eager"), given())
    assert_equal(Toy(ask=bidirectional), given())
    assert_equal(Toy(ask=bidirectional), given(padded=True))
    assert abs(both(Toy(ask=bidirectional), given())[0] - eager) > 1e-4


def assert_equal_where_a_query_sees_nothing(kind: str, ask: Callable[..., Any], attention: str) -> None:
    """On a sample with padding before it and one of nothing but padding, whose labels count."""
    batch = given()
    batch["attention_mask"] = torch.tensor([[0, 0, 1, 1, 0, 1], [0] * SEQ])
    assert_equal(Toy((kind, kind), ask, attention), batch)


def test_by_eager_attention_a_query_that_sees_nothing_sees_all() -> None:
    for ask in (causal, bidirectional):
        assert_equal_where_a_query_sees_nothing("registered", ask, "eager")


def test_so_it_does_by_sdpa_with_a_bias() -> None:
    assert_equal_where_a_query_sees_nothing("biased", causal, "sdpa")
    assert_equal_where_a_query_sees_nothing("unbiased", bidirectional, "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ask", [causal, bidirectional])
@pytest.mark.parametrize("kind", ["registered", "biased", "unbiased"])
def test_a_query_that_sees_nothing_has_what_transformers_gives_it(
    kind: str, ask: Callable[..., Any], attention: str
) -> None:
    assert_equal_where_a_query_sees_nothing(kind, ask, attention)


def test_a_window_of_nothing() -> None:
    """As the config of Qwen2-MoE has it, whose layers do not use it; one that does attends to nothing."""

    def windowed(model: Any, x: Any, ids: Any, mask: Any) -> Any:
        model.config.sliding_window = 0
        return create_sliding_window_causal_mask(model.config, x, mask, past_key_values=None)

    def unused(model: Any, x: Any, ids: Any, mask: Any) -> Any:
        windowed(model, x, ids, mask)
        return causal(model, x, ids, mask)

    for ask in (unused, windowed):
        for padded in (False, True):
            assert_equal(Toy(ask=ask), given(padded))


def test_a_flag_against_the_mask_is_refused() -> None:
    model = Toy()
    for layer in model.layers:
        layer.is_causal = False
    with pytest.raises(CaptureError, match="its is_causal is False"):
        capture(model, given())
    eager = Toy(attention="eager")
    for layer in eager.layers:
        layer.is_causal = False
    assert_equal(eager, given())


def test_what_attention_as_one_op_cannot_say_is_left_to_the_function_of_the_model() -> None:
    with_indices = assert_equal(Toy(attention="eager", indices=torch.zeros(2)), given())
    assert "softmax" in ops(with_indices) and "attention" not in ops(with_indices)
    one_op = assert_equal(Toy(attention="eager", output_attentions=False, labels=torch.zeros(2)), given())
    assert "softmax" not in ops(one_op)
    assert "softmax" not in ops(assert_equal(Toy(indices=torch.zeros(2)), given()))  # which 'sdpa' ignores


def is_torchdynamo_compiling() -> bool:
    """As model files import it from transformers."""
    return torch.compiler.is_compiling()


def counted(model: Any, x: torch.Tensor, ids: torch.Tensor, mask: Any) -> Any:
    """A mask that Switch Transformers make only where they are not compiled, and need."""
    if mask is None and not is_torchdynamo_compiling():
        mask = (ids != 3).long()
    return (1 - mask[:, None, None, :].to(x.dtype)) * -1e9


def test_model_files_take_the_branches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their branch for torch.compile lacks something; negative control: without that it is refused."""
    model = Toy(ask=counted, attention="eager")
    assert_equal(model, given())
    assert torch.compiler.is_compiling() is is_torchdynamo_compiling() is False
    monkeypatch.setattr(autoplan.capture.export, "files_with_branches", lambda model: [])
    with pytest.raises(CaptureError, match="NoneType"):
        capture(model, given())


def test_the_attention_of_a_config_is_part_of_what_a_stored_graph_is_known_by() -> None:
    model = megatron_bert()
    found = capture_key(model, given())
    model.config._attn_implementation = "sdpa"
    assert found is not None and capture_key(model, given()) not in (found, None)


def test_capturing_leaves_transformers_as_it_was() -> None:
    from transformers import masking_utils

    before = dict(ALL_ATTENTION_FUNCTIONS), dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    find = masking_utils.find_packed_sequence_indices
    model = Toy()
    capture(model, given())
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)) == before
    assert masking_utils.find_packed_sequence_indices is find and model.config._attn_implementation == "sdpa"
