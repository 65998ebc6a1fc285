"""A model is exported once, with the parameters of one of several equal layers, unless its forward reads the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph

Batch = Mapping[str, torch.Tensor]
SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64,
)  # fmt: skip
T5 = dict(
    vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two masks used as tensors": (
        "GptOss", "ForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4,
         "_attn_implementation": "eager"},
    ),
    "a least length": ("T5", "ForConditionalGeneration", T5),
    "a table of positions": ("Bert", "ForMaskedLM", SMALL),
    "features in dim 1": (
        "ViT", "ForImageClassification",
        {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5},
    ),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(8, 8), index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self, depth: int = 4, again: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.again = nn.Embedding(32, 8), nn.Linear(8, 32), again
        self.layers = nn.ModuleList(Layer(i) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers[2](x) if self.again else x)


BATCH = {"x": torch.zeros(2, 6, dtype=torch.long), "y": torch.zeros(2, 6, dtype=torch.long)}


def loss(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tensors that every export so far was given; 0 for one that failed."""
    found: list[int] = []
    original = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        found.append(0)
        program = original(*args, **kwargs)
        found[-1] = sum(node.op == "placeholder" for node in program.graph.nodes)
        return program

    monkeypatch.setattr(torch.export, "export", export)
    yield found


def params_of(graph: ModelGraph, call: str) -> int:
    return next(len(c.params) for c in graph.calls if c.name == call)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_exported_once(name: str, exports: list[int]) -> None:
    family, head, settings = FAMILIES[name]
    model = getattr(transformers, f"{family}{head}")(getattr(transformers, f"{family}Config")(**settings))
    ids = torch.zeros(2, 12, dtype=torch.long)
    images = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": ids[:, 0].clone()}
    graph = capture(model, images if family == "ViT" else {"input_ids": ids, "labels": ids.clone()})
    assert len(exports) == 1 and exports[0] > 0
    expected = {"a least length": {"t": (3, None)}, "a table of positions": {"s": (0, 64)}}
    assert graph.bounds == expected.get(name, {})


def test_an_export_is_given_the_parameters_of_one_layer(exports: list[int]) -> None:
    shallow, deep = (capture(Model(depth), BATCH, loss) for depth in (2, 7))
    assert exports == [2 + 1 + 2 + 2] * 2  # the batch, embedding, a layer, head
    assert list(shallow.blocks) == list(deep.blocks) and len(deep.params) == 1 + 7 * 2 + 2


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (Model(again=True), 2 + 2),  # with the layer that is used once more
        (Model(), 2 + 2 * 4 + 1),  # with a penalty on all parameters
    ],
)
def test_a_forward_that_reads_a_hidden_parameter_is_exported_again(model: Model, head: int, exports: list[int]) -> None:
    def with_penalty(out: torch.Tensor, batch: Batch) -> torch.Tensor:
        return loss(out, batch) + sum((p * p).sum() for p in model.parameters())

    graph = capture(model, BATCH, loss if model.again else with_penalty)
    assert exports == [0, 2 + 3 + 2 * 4]
    assert params_of(graph, "head") == head
    assert all(type(m._parameters) is dict for m in model.modules())  # everything is shown again


def test_a_layer_that_computes_with_its_number_repeats_no_other(exports: list[int]) -> None:
    class Numbered(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(x) * (1 + self.index % 2)
            return result

    model = Model(6)
    model.layers = nn.ModuleList(Numbered(i) for i in range(6))
    graph = capture(model, BATCH, loss)
    assert exports == [2 + 1 + 2 * 6 + 2]
    assert len({c.block for c in graph.calls if c.name.startswith("layers.")}) == 2
