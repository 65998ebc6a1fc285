"""Capture of in-place ops: those that nobody can see, those that somebody can, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_stacks import ScaledBlock, Stack, square_loss
from test_faithful import assert_stack_equal, run
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

IDS = {"ids": torch.zeros(2, 4, dtype=torch.long)}


class InPlace(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.linear(x)
        return x


class Scaled(ScaledBlock):
    """Divides a tensor it has just made, as routers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x).softmax(-1)
        made /= made.sum(-1, keepdim=True) + 1.0
        made *= 2.0
        return x + made


class Filled(ScaledBlock):
    """Allocates a tensor and writes its two parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(*x.shape[:-1], 10)
        whole[..., 2:].copy_(self.linear(x))
        whole[..., :2].copy_(x[..., 3:5])
        return x + whole[..., 1:9] * whole[..., :8]


class FilledInTurn(ScaledBlock):
    """Writes every other place, as Wan and SkyReels write what their positions rotate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even, odd = self.linear(x).unflatten(-1, (-1, 2)).unbind(-1)
        whole = torch.empty_like(x)
        whole[..., 1::2] = 2 * even + odd
        whole[..., 0::2] = even - odd * odd
        return x + whole.type_as(x)


def test_every_other_place_is_filled() -> None:
    assert_stack_equal(Stack(FilledInTurn))
    ops = [n.op for n in capture(Stack(FilledInTurn), IDS, square_loss).blocks["layer"].nodes]
    assert ops[-5:] == ["unsqueeze", "unsqueeze", "cat", "reshape", "add"]


class FilledInThirds(ScaledBlock):
    """Leaves out every third place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(*x.shape[:-1], 24)
        whole[..., 0::3] = self.linear(x)
        whole[..., 1::3] = x
        return x + whole[..., :8]


def test_places_that_are_left_out_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"a tensor is used before all of it is written"):
        capture(Stack(FilledInThirds), IDS, square_loss)


class FilledData(ScaledBlock):
    """Writes constants into the data of zeros, as the positions of CogVideoX are written behind those of its text."""

    grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.linear.bias if self.grad else torch.arange(8, dtype=x.dtype) / 8
        whole = x.new_zeros(1, 4, 8, requires_grad=False)
        whole.data[:, 2:].copy_(table.expand(2, 8))
        other = x.new_zeros(1, 4, 8)
        other[:, 1:2].copy_(table[None])
        return x + self.linear(x) * (whole + other)


class FilledDataOfParameters(FilledData):
    grad = True


def test_what_is_not_written_is_zero() -> None:
    assert_stack_equal(Stack(FilledData))


class ReadWhileFilled(ScaledBlock):
    """Reads places of zeros before they are written, as states of recurrent cells, and what it has written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = x.new_zeros(2, *x.shape)
        first, second = states[0], states[1]
        whole = x.new_zeros(*x.shape[:-1], 16)
        whole[..., :8] = self.linear(x + first)
        whole[..., 8:] = self.linear(whole[..., :8] + second)
        return whole[..., 8:]


def test_slices_are_read_while_others_are_written() -> None:
    assert_stack_equal(Stack(ReadWhileFilled))


def test_no_gradient_passes_what_is_written_into_data() -> None:
    with pytest.raises(CaptureError, match="a value with a gradient is written into data, past autograd"):
        capture(Stack(FilledDataOfParameters), IDS, square_loss)


def test_in_place_ops_on_fresh_tensors() -> None:
    ops = [n.op for n in capture(Stack(Scaled), IDS, square_loss).blocks["layer"].nodes]
    assert ops == ["linear", "add", "softmax", "sum", "add_scalar", "div", "mul_scalar", "add"]
    (cat,) = [n for n in capture(Stack(Filled), IDS, square_loss).blocks["layer"].nodes if n.op == "cat"]
    assert cat.inputs == ("slice", "add") and cat.attrs["dim"] == 2  # in the order of their places, not of writing


class SeenByView(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        part = made[..., :4]
        made *= 2.0
        return x + torch.cat([part, made[..., 4:]], -1)  # part has changed too


class ThroughView(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        made.transpose(0, 1).mul_(2.0)
        return x + made


class OfInput(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return x + self.linear(x)


class Gap(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(x)
        whole[..., 2:].copy_(self.linear(x)[..., 2:])
        return x + whole


class Rewritten(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(x)
        whole[..., :8].copy_(self.linear(x))
        y = x + whole
        whole[..., :4].copy_(x[..., :4])
        return y + whole


class Broadcast(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(x)
        whole[..., :7].copy_(self.linear(x)[..., :1])
        whole[..., 7:].copy_(x[..., 7:])
        return x + whole


class Clamped(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-1.0, 1.0)  # as Gemma 3n
        return x + self.linear(x)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Clamped, r"parameter 'layers\.\d\.linear\.weight' is changed in the forward by .*clamp_.*optimizer's step"),
        (Gap, r"test_in_place\.py:\d+: a tensor is used before all of it is written"),
        (Rewritten, r"test_in_place\.py:\d+|in-place op aten\.copy_"),
    ],
)
def test_in_place_ops_that_cannot_be_captured_are_named(block: type, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Stack(block), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)


class Held(Stack):
    """Uses what a layer was given once more, after the layer."""

    def __init__(self, make: Any, at: int) -> None:
        super().__init__(make)
        self.at = at

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for i, layer in enumerate(self.layers):
            held = x
            x = layer(x) + (held if i == self.at else 0.0)
        return x


@pytest.mark.parametrize("at", [0, 2])  # the first layer, and one that repeats it
@pytest.mark.parametrize(("block", "op"), [(InPlace, "add_"), (OfInput, "mul_")])
def test_a_changed_input_that_is_used_after_the_layer_is_refused(block: type, op: str, at: int) -> None:
    with pytest.raises(CaptureError, match=rf"test_in_place\.py:\d+: in-place op aten\.{op}.*x = x \+ y"):
        capture(Held(block, at), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)


class Behind(Stack):
    """Changes what a layer returned."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
            x *= 0.5
        return x


@pytest.mark.parametrize("block", [SeenByView, ThroughView, Broadcast])
def test_in_place_ops_that_somebody_can_see(block: type) -> None:
    assert_stack_equal(Stack(block))


@pytest.mark.parametrize(("model", "block"), [(Stack, OfInput), (Behind, ScaledBlock), (Behind, OfInput)])
def test_in_place_ops_on_what_enters_and_leaves_layers(model: type, block: type) -> None:
    assert_stack_equal(model(block))


class Casts(ScaledBlock):
    """Keeps the dtype of what is changed, whatever it is changed by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x).float()
        made *= x.double().cos()
        return x + made.to(x.dtype).relu_()


def test_an_in_place_op_keeps_the_dtype_of_what_it_changes() -> None:
    torch.manual_seed(0)
    model, batch = Stack(Casts).double(), {"ids": torch.randint(16, (2, 4))}
    graph = capture(model, batch, square_loss)
    loss, _ = run(model, graph, batch)  # gradients differ in the last digit of float32
    assert loss == pytest.approx(square_loss(model(batch["ids"]), batch).item(), rel=1e-12)
    block = graph.blocks["layer"]
    made = [(n.op, block.values[n.outputs[0]].dtype) for n in block.nodes if n.op in ("mul", "to", "relu")]
    assert made == [("to", "float32"), ("mul", "float64"), ("to", "float32"), ("to", "float64"), ("relu", "float64")]


def test_dropout_in_place_of_a_model_that_updates_buffers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2, inplace=True), nn.Linear(8, 8)).double()
    example = {"input": torch.randn(4, 8).double(), "y": torch.randn(4, 8).double()}

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return (out - batch["y"]).square().mean()

    graph = capture(model, example, loss)
    assert [n.op for b in graph.blocks.values() for n in b.nodes].count("dropout") == 1
    assert verify_whole(VerifyTask(model, graph, example, loss)).done
