"""Parameters that a loss or a module holds in a list: they are trained from there, too, or refused."""

from __future__ import annotations

import held_parameters
import plain_models
import pytest
import torch
from harness import pool
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.export import capture
from autoplan.capture.frontend.host import module_on_host
from autoplan.errors import CaptureError


def test_equal_to_the_module() -> None:
    """Loss and every gradient: the penalty of a layer that repeats another one, and the scale, too."""
    model = held_parameters.made()
    graph = plain_models.assert_equal(model, held_parameters.batch(), held_parameters.penalty(model))
    assert set(graph.params) == {n for n, _ in model.named_parameters()}
    assert all(p.trainable for p in graph.params.values())
    assert not any(n.op == "constant" for block in graph.blocks.values() for n in block.nodes)


class Weighted(nn.Module):
    """A loss with a buffer, an attribute, a module of its own and the model, and maybe a parameter."""

    def __init__(self, model: nn.Module, trained: bool) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(weight=torch.rand(32, dtype=torch.float64) + 0.5)
        self.model, self.factor = model, torch.tensor(0.7, dtype=torch.float64)
        self.register_buffer("shift", torch.tensor(0.3, dtype=torch.float64))
        self.noise = nn.Parameter(torch.ones((), dtype=torch.float64)) if trained else 1.0

    def forward(self, out: torch.Tensor, batch: held_parameters.Batch) -> torch.Tensor:
        loss: torch.Tensor = self.entropy(out.flatten(0, 1), batch["labels"].flatten())
        return (loss * self.factor + self.shift) * self.noise + 0.1 * self.model.scale.square().mean()


def test_a_loss_that_is_a_module() -> None:
    model, batch = held_parameters.made(), held_parameters.batch()
    graph = plain_models.assert_equal(model, batch, Weighted(model, False))
    assert set(graph.params) == {n for n, _ in model.named_parameters()} and not graph.buffers
    with pytest.raises(CaptureError, match="requires gradients and is not a parameter of Scaled"):
        capture(model, batch, Weighted(model, True))


def test_an_input_may_have_the_name_of_a_parameter() -> None:
    """The loss reads both: the `scale` of the batch, and that of the model."""
    model, batch = held_parameters.made(), held_parameters.batch()
    batch["scale"] = torch.rand(4, 12, 32, dtype=torch.float64)
    graph = plain_models.assert_equal(
        model, batch, lambda out, b: (out.square() * b["scale"]).mean() + model.scale.square().mean()
    )
    assert "scale" in graph.params


def test_the_program_reads_parameters_as_they_are_now() -> None:
    """The list of another model of the same shapes is that model's: its values would be constants."""
    model, other = held_parameters.made(), held_parameters.made()
    with pytest.raises(CaptureError, match=r"tensor \[32\] that requires gradients and is not a parameter of Scaled"):
        capture(model, held_parameters.batch(), held_parameters.penalty(other))


def test_of_a_model_on_a_gpu() -> None:
    """The capture replaces its parameters by stand-ins on the host."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(4, 4, device="cuda:0")
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight = nn.Parameter(weight)
    held = list(model.parameters())
    x = {"input": torch.randn(2, 4)}
    graph = capture(model, x, lambda out, _: out.square().mean() + held[0].square().sum())
    want = capture(model, x, lambda out, _: out.square().mean() + model[0].weight.square().sum())
    assert graph.content_hash == want.content_hash
    with module_on_host(model):
        assert model[0].weight is not held[0]


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "num_micro_batches": 2}], ids=str)
def test_on_ranks(pins: dict[str, int]) -> None:
    for loss, gradients, different in pool(2).run(held_parameters.errors, pins, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-12 and not different
