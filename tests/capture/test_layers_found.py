"""Which modules are layers, between which a pipeline may be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from small_stacks import square_loss
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.layer_tracer import layer_modules
from autoplan.errors import CaptureError
from autoplan.program.facts import layer_calls
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask
from experiments.compatibility.architectures import vision


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class ChangesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


class Stage(nn.Module):
    """Blocks of one width, and what changes the width after them; `deep`: the blocks are in a module of their own."""

    def __init__(self, width: int, blocks: int, deep: bool = False) -> None:
        super().__init__()
        listed = nn.ModuleList(Block(width) for _ in range(blocks))
        self.blocks = Held(listed) if deep else listed
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.norm(x)
        return out


class Held(nn.Module):
    """Whatever is to be found, beside a list of layers if `with_list`."""

    def __init__(self, inside: nn.Module, with_list: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.listed = nn.ModuleList([nn.Linear(8, 8)]) if with_list else None


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "sequence": (lambda: Held(nn.Sequential(Block(), Block(), Block())), ["inside.0", "inside.1", "inside.2"]),
    "operations": (lambda: Held(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))), []),
    "one-block": (lambda: Held(nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 8))), []),
    "named": (lambda: Held(nn.ModuleDict({"a": Block(), "b": Block()})), ["inside.a", "inside.b"]),
    "nested": (
        lambda: Held(nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(Block()), Block())),
        ["inside.1.0", "inside.2"],
    ),
    "nanoGPT": (
        lambda: Held(nn.ModuleDict({"wte": nn.Embedding(4, 8), "h": nn.ModuleList([Block(), Block()])})),
        ["inside.h.0", "inside.h.1"],
    ),
    "lists-in-a-list": (
        lambda: Held(nn.ModuleList([nn.ModuleList([Block(), nn.Linear(8, 8)])])),
        ["inside.0.0", "inside.0.1"],
    ),
    "stages": (
        lambda: Held(nn.Sequential(Stage(4, 1), nn.Linear(8, 8), Stage(8, 2))),
        ["inside.0.blocks.0", "inside.2.blocks.0", "inside.2.blocks.1"],
    ),
    "stages-in-a-list": (
        lambda: Held(nn.ModuleList([Stage(4, 1), Stage(8, 2)])),
        ["inside.0.blocks.0", "inside.1.blocks.0", "inside.1.blocks.1"],
    ),
    "equal-stages": (lambda: Held(nn.ModuleList([Stage(4, 2), Stage(4, 2)])), ["inside.0", "inside.1"]),
    "lists-deeper-inside": (
        lambda: Held(nn.ModuleList([Stage(4, 2, deep=True), Stage(8, 2, deep=True)])),
        ["inside.0", "inside.1"],
    ),
    "both": (lambda: Held(nn.Sequential(Block(), Block()), True), ["inside.0", "inside.1", "listed.0"]),
    "the-model": (lambda: nn.Sequential(Block(), Block(4)), ["0", "1"]),
    "resnet": (vision.ResNet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
    "swin": (vision.SwinBlocks, ["blocks.0", "blocks.1"]),
}


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own modules
def test_compiled_blocks() -> None:
    model = Held(nn.Sequential(*(torch.compile(Block()) for _ in range(2))))
    found = layer_modules(model)
    assert list(found) == ["inside.0", "inside.1"] and all(type(layer) is Block for layer in found.values())


@pytest.mark.parametrize("name", list(FOUND))
def test_layers(name: str) -> None:
    make, found = FOUND[name]
    assert list(layer_modules(make())) == found


def test_layers_of_stages_are_captured_once() -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(Stage(4, 2), Stage(6, 3)).double(), {"input": torch.randn(4, 8).double()}
    graph = capture(model, example, square_loss)
    blocks = {call.name: call.block for call in graph.calls}
    assert layer_calls(graph) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2"]
    assert len({blocks[name] for name in layer_calls(graph)}) == 3  # the first one's input has no gradient
    assert verify_whole(VerifyTask(model, graph, example, square_loss), limit_s=60.0).done


@dataclass
class Inside:
    """What a layer returns beside its result."""

    values: torch.Tensor
    more: list[torch.Tensor]
    kind: str = "a"


class Tells(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Inside]:  # type: ignore[override]
        out = super().forward(x)
        return out, Inside(out.sin(), [x.square()])


class AsksItsLayers(nn.Module):
    """Layers that return tensors in a dataclass, some of which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Tells() for _ in range(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, told = self.first(input), list[Inside]()
        for layer in self.layers:
            x, inside = layer(x)
            told.append(inside)
        return x + told[1].values * told[2].more[0] if told[3].kind == "a" else x


def test_layers_may_return_dataclasses() -> None:
    torch.manual_seed(0)
    model, example = AsksItsLayers().double(), {"input": torch.randn(4, 8).double()}
    graph = capture(model, example, square_loss)
    blocks = {call.name: call.block for call in graph.calls}
    assert {blocks[f"layers.{i}"] for i in range(4)} == {blocks["layers.0"]}
    assert verify_whole(VerifyTask(model, graph, example, square_loss), limit_s=60.0).done


class Bias(nn.Module):
    """A bias that is made once, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.linspace(0.5, 1, 8))
        self.register_buffer("kept", None)

    def forward(self, length: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.arange(length)[:, None] * self.slope
        return self.kept[:length]


class AsksForBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bias: nn.Module) -> torch.Tensor:
        out: torch.Tensor = self.linear(x).tanh() + bias(x.shape[1])
        return out


class SharesBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias, self.layers = nn.Linear(8, 8), Bias(), nn.ModuleList(AsksForBias() for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.first(input)
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


def test_layers_that_are_given_one_module_are_captured_once() -> None:
    """torch.export hands out a new object for it each time; what a trace leaves in it is taken out again."""
    torch.manual_seed(0)
    model, example = SharesBias().double(), {"input": torch.randn(4, 6, 8).double()}
    graph = capture(model, example, square_loss)
    blocks = {call.name: call.block for call in graph.calls}
    assert {blocks[f"layers.{i}"] for i in range(3)} == {blocks["layers.0"]}
    assert model.bias.kept is None
    assert verify_whole(VerifyTask(model, graph, example, square_loss), limit_s=60.0).done


def test_layers_of_a_sequence_are_captured_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block())
    graph = capture(model, {"input": torch.randn(4, 8)}, square_loss)
    assert layer_calls(graph) == ["1", "2", "3"]
    assert len({call.block for call in graph.calls if call.name in ("1", "2", "3")}) == 1


class ReadLater(nn.Module):
    """Layers that change their input, which is read again behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([ChangesItsInput(), ChangesItsInput()])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = before = self.first(input)
        for layer in self.layers:
            x = layer(x)
        return x + before


def test_a_block_that_changes_what_it_is_given_is_a_layer_if_nothing_else_reads_it() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), ChangesItsInput(), ChangesItsInput()), {"input": torch.randn(4, 8)}
    graph = capture(model, batch, square_loss)
    assert layer_calls(graph) == ["1", "2"]
    outcome = verify_whole(VerifyTask(model, graph, batch, square_loss), limit_s=60.0)
    assert outcome.done and "10 gradients" in outcome.text, outcome.text


def test_a_block_that_changes_what_is_read_later_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"test_layers_found.py:\d+: in-place op aten.add_.Tensor cannot be captured"
    ):
        capture(ReadLater(), {"input": torch.randn(4, 8)}, square_loss)
