"""Ops without a record: decomposed, pointwise by their tag, or split as a trial shows; and losses made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_faithful import DIM, Model, assert_equal, graph_of, run
from torch import nn

from autoplan.capture import decompose, generic
from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph, Node
from autoplan.ops.batch import batch_obstacle

Op = Callable[[Model, torch.Tensor], torch.Tensor]
SEQ = 12


def given() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    valid = (torch.rand(4, SEQ) > 0.4).double()
    return {"x": torch.randn(4, SEQ, DIM, dtype=torch.float64), "y": torch.randint(DIM, (4, SEQ)), "valid": valid}


def nodes(graph: ModelGraph, op: str) -> list[Node]:
    return [node for block in graph.blocks.values() for node in block.nodes if node.op == op]


DECOMPOSED: dict[str, Op] = {
    "stack": lambda m, x: torch.stack([x, x * 2], -1).sum(-1),
    "einsum": lambda m, x: torch.einsum("bsh,oh->bso", x, m.weight),
    "repeat": lambda m, x: x.repeat(1, 1, 2)[..., :DIM],
    "unbind": lambda m, x: sum(x.unflatten(-1, (2, 4)).unbind(2)).repeat(1, 1, 2),  # type: ignore[attr-defined]
    "vector norm": lambda m, x: x / x.norm(dim=-1, keepdim=True),
    "glu": lambda m, x: F.glu(x).repeat(1, 1, 2),
    "baddbmm": lambda m, x: torch.baddbmm(x.new_zeros(1, 1, 1), x, x.transpose(1, 2)) @ x,
    "a tensor given twice": lambda m, x: torch.hstack([x, x])[:, : x.shape[1]],
    "patches": lambda m, x: F.conv1d(x.transpose(1, 2), m.weight.view(DIM, 2, 4).mT.reshape(DIM, DIM, 1)).mT,
    "in place": lambda m, x: (x * 1).masked_fill_(x > 0.1, 0.5),
    "a constant": lambda m, x: x * torch.tensor([float(i) for i in range(DIM)], dtype=x.dtype),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions_are_the_op(name: str) -> None:
    model = Model(DECOMPOSED[name])
    assert_equal(model, given())
    graph = graph_of(model.double(), given())
    assert not nodes(graph, "function") and batch_obstacle(graph) is None


POINTWISE: dict[str, Op] = {
    "softplus": lambda m, x: F.softplus(x * 300),  # its decomposition has no gradient here: exp is infinite
    "mish": lambda m, x: F.mish(x),
    "floor": lambda m, x: x + x.floor(),
    "lerp": lambda m, x: torch.lerp(x, x.tanh(), 0.3),
    "a complex number": lambda m, x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * (0.6 + 0.8j)
    ).flatten(-2),
    "pow": lambda m, x: x.abs().pow(torch.arange(DIM) + 1),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_ops_stay_whole(name: str) -> None:
    model = Model(POINTWISE[name])
    assert_equal(model, given())
    (node,) = nodes(graph_of(model.double(), given()), "pointwise")
    assert node.attrs["rule"].count("[*a]") == len(node.inputs) + 1


# op -> the rule that trials find: f0, f1, ... can be split
TRIED: dict[str, tuple[Op, str]] = {
    "logsumexp": (lambda m, x: x * x.logsumexp(-1, keepdim=True), "[f0, f1, x0d2!] -> [f0, f1, x1d2!]"),
    "roll": (lambda m, x: x + torch.roll(x, 2, 1), "[f0, x0d1!, f1] -> [f0, x1d1!, f1]"),
    "flip": (lambda m, x: x.flip(-1), "[f0, f1, x0d2!] -> [f0, f1, x1d2!]"),
    "sort": (lambda m, x: x.sort(-1)[0], "[f0, f1, x0d2!] -> [f0, f1, x1d2!], [f0, f1, x2d2!]"),
    "index": (
        lambda m, x: x[:, torch.arange(x.shape[1])],
        "[f0, x0d1!, f1], #[f2] -> [f0, f2, f1]",
    ),
    "group norm": (
        lambda m, x: F.group_norm(x.mT, 2).mT,
        "[f0, x0d1!, x0d2!] -> [f0, x1d1!, x1d2!]",
    ),
    "pooling": (lambda m, x: F.avg_pool1d(x, 3, 1, 1), "[f0, f1, x0d2!] -> [f0, f1, x1d2!]"),
    "statistics": (lambda m, x: x / x.std(-1, keepdim=True), "[f0, f1, x0d2!] -> [f0, f1, x1d2!]"),
}


@pytest.mark.parametrize("name", TRIED)
def test_trials_find_what_can_be_split(name: str) -> None:
    op, rule = TRIED[name]
    model = Model(op)
    assert_equal(model, given())
    found = [node.attrs["rule"] for node in nodes(graph_of(model.double(), given()), "function")]
    assert found == [rule]


def test_equal_ops_are_decomposed_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one capture; other arguments, other dims and the next capture are traced and tried for themselves."""
    traced, trials = [], []
    once, child = decompose._traced, generic.in_child
    monkeypatch.setattr(decompose, "_traced", lambda node, *a: traced.append(str(node.target)) or once(node, *a))
    monkeypatch.setattr(generic, "in_child", lambda function: trials.append(1) or child(function))

    def op(m: Model, x: torch.Tensor) -> torch.Tensor:
        first = torch.stack([x, x * 2], -1).sum(-1) + torch.stack([x, x * 3], -1).sum(-1)
        other = torch.stack([x, x], -1).sum(-1) + torch.stack([x, x], 1).sum(1)  # one tensor twice; another dim
        return first + other + torch.roll(x * 2, 2, 1) + torch.roll(x, 2, 1) + torch.roll(x, 4, 1)

    for captures in (1, 2):
        graph_of(Model(op).double(), given())
        assert traced.count("aten.stack.default") == 3 * captures
        assert len(trials) == 2 * captures  # of roll
    assert_equal(Model(op), given())


def test_what_cannot_be_split_is_said() -> None:
    graph = graph_of(Model(lambda m, x: x @ torch.linalg.matrix_exp(m.weight)).double(), given())
    (node,) = nodes(graph, "function")
    assert node.attrs["rule"] == "[x0d0!, x0d1!] -> [x1d0!, x1d1!]"
    (note,) = graph.notes
    assert note.startswith("aten.linalg_matrix_exp.default (test_faithful.py:")
    assert note.endswith(") cannot be split: it runs unsplit on every tensor-parallel rank")
    split = graph_of(Model(TRIED["roll"][0]).double(), given())
    assert nodes(split, "function") and not split.notes


def test_complex_numbers() -> None:
    def rotate(m: Model, x: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones(DIM // 2), torch.arange(DIM // 2).float())
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (DIM // 2, 2))) * turns).flatten(2)

    assert_equal(Model(rotate), given())


def test_a_plain_tensor_is_a_buffer() -> None:
    model = Model(lambda m, x: x * m.scale)
    model.scale = torch.arange(float(DIM), dtype=torch.float64)  # type: ignore[assignment]
    graph = graph_of(model.double(), given())
    assert list(graph.buffers) == ["scale"]


def test_a_custom_op_is_tried() -> None:
    @torch.library.custom_op("autoplan_tests::thirds", mutates_args=())
    def thirds(x: torch.Tensor) -> torch.Tensor:
        return x / 3 - x.mean(-1, keepdim=True)

    thirds.register_fake(torch.empty_like)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 3 - grad.sum(-1, keepdim=True) / DIM

    thirds.register_autograd(backward)
    assert_equal(Model(lambda m, x: thirds(x)), given())
    (node,) = nodes(graph_of(Model(lambda m, x: thirds(x)).double(), given()), "function")
    assert node.attrs["rule"] == "[f0, f1, x0d2!] -> [f0, f1, x1d2!]"
    assert node.attrs["call"] == "torch.ops.autoplan_tests.thirds.default({0})"


# -- losses ------------------------------------------------------------------------------------------------------------

WEIGHTS = torch.rand(DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5


def flat(out: torch.Tensor, batch: Any, **more: Any) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), **more)


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {  # and what its denominator counts
    "mse": (lambda o, b: F.mse_loss(o, b["x"]), "samples"),
    "bce": (lambda o, b: F.binary_cross_entropy_with_logits(o, (b["x"] > 0).double()), "samples"),
    "huber": (lambda o, b: F.smooth_l1_loss(o, b["x"]), "samples"),
    "masked": (
        lambda o, b: (flat(o, b, reduction="none") * b["valid"].flatten()).sum() / b["valid"].sum(),
        "total",
    ),
    "masked, at least one": (
        lambda o, b: (flat(o, b, reduction="none") * b["valid"].flatten()).sum() / b["valid"].sum().clamp(min=1),
        "total",
    ),
    "class weights": (lambda o, b: flat(o, b, weight=WEIGHTS), "total"),
    "nll": (lambda o, b: F.nll_loss(F.log_softmax(o.flatten(0, 1), -1), b["y"].flatten()), "total"),
    "classes in dim 1": (lambda o, b: F.cross_entropy(o.mT, b["y"]), "tokens"),
    "soft targets": (lambda o, b: F.cross_entropy(o.flatten(0, 1), b["x"].softmax(-1).flatten(0, 1)), "none"),
    "kl": (lambda o, b: F.kl_div(o.log_softmax(-1), b["x"].softmax(-1), reduction="batchmean"), "none"),
    "by hand": (
        lambda o, b: -(o.log_softmax(-1).gather(-1, b["y"][..., None])[..., 0] * b["valid"]).sum() / b["valid"].sum(),
        "total",
    ),
    "and a mean square": (lambda o, b: flat(o, b) + 0.1 * o.square().mean(), "tokens"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, count = LOSSES[name]
    model = Model(lambda m, x: x)
    assert_equal(model, given(), loss)
    graph = graph_of(model.double(), given(), loss)
    assert graph.loss_count == count and batch_obstacle(graph) is None


@pytest.mark.parametrize("name", ["masked", "class weights", "soft targets", "kl", "by hand", "mse"])
def test_losses_in_two_micro_batches(name: str) -> None:
    """The denominator is that of the whole batch: parts with unequal masks do not count alike."""
    loss, _ = LOSSES[name]
    model, batch = Model(lambda m, x: x).double(), given()
    want = loss(model(batch["x"]), batch)
    want.backward()
    got, gradients = run(model, graph_of(model, batch, loss), batch, num_micro_batches=2)
    assert got == pytest.approx(want.item(), rel=1e-12)
    for parameter, value in gradients.items():
        torch.testing.assert_close(value, model.get_parameter(parameter).grad, rtol=1e-10, atol=1e-13)


# -- functions with a backward of their own ----------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Its backward is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x**2 * grad, None


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_a_backward_that_is_the_derivative_is_captured() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    assert_equal(Model(lambda m, x: Cube.apply(x, 2.0)), given())  # type: ignore[no-untyped-call]
    assert torch.autograd.Function.__dict__["apply"] is before


def test_hooks_on_gradients_are_refused() -> None:
    model = Model(lambda m, x: x).double()
    handle = model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(CaptureError, match="parameter 'weight' has a hook on its gradient"):
        graph_of(model, given())
    handle.remove()
    with pytest.raises(CaptureError, match=r"module 'first' has a backward hook"):
        model.first.register_full_backward_hook(lambda m, i, o: None)
        graph_of(model, given())


def test_a_hook_on_a_tensor_of_the_forward_is_refused() -> None:
    """No trace shows it, and a large model is not compared with its graph."""

    def scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: 0.1 * g)
        return x

    before = torch.Tensor.register_hook
    with pytest.raises(
        CaptureError, match=r"test_generic.py:\d+ \(x.register_hook.*a hook on the gradient of a tensor"
    ):
        graph_of(Model(scaled).double(), given())
    assert torch.Tensor.register_hook is before
    assert_equal(Model(lambda m, x: x.detach() + 0.1 * (x - x.detach())), given())  # as the message says


def test_another_backward_is_refused() -> None:
    with pytest.raises(CaptureError, match="Rounded has a backward of its own that is not the derivative"):
        graph_of(Model(lambda m, x: Rounded.apply(x)).double(), given())  # type: ignore[no-untyped-call]


def test_ops_on_large_tensors_are_tried_on_small_ones() -> None:
    """A size that is part of the meaning of an op (2: real and imaginary) stays."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 40 * 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = self.linear(x).unflatten(-1, (40, 64, 2))
            turned = torch.view_as_complex(pairs) * torch.polar(torch.ones(64), torch.arange(64.0))
            return torch.view_as_real(turned).flatten(-3)

    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    graph = capture(Rotated(), {"x": x}, lambda out, _: out.square().mean())
    rules = [node.attrs["rule"] for node in nodes(graph, "function") if "view_as" in node.attrs["call"]]
    assert rules == ["[f0, f1, f2, f3, x0d4!] -> [f0, f1, f2, f3]", "[f0, f1, f2, f3] -> [f0, f1, f2, f3, x1d4!]"]
    assert batch_obstacle(graph) is None
