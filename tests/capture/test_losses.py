"""Losses that are divided by the size of the batch: the mean of the whole batch, however it is split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from parity import (
    LOSSES,
    SEQ,
    Case,
    assert_trains_as_one_device,
    compiled,
    global_batch,
    make_model,
    reference,
    run_simulated,
    spread_out,
    worst,
)
from plain_models import assert_equal, filled
from test_faithful import run
from torch import nn

from autoplan.capture.export import capture
from autoplan.ops.batch import batch_obstacle
from experiments.compatibility import families

SIMULATED = [
    Case("gpt-summed", num_micro_batches=3),
    Case("gpt-summed", dp=2, num_micro_batches=2, labels="unequal"),
    Case("gpt-summed", dp=2, tp=2, pp=2, num_micro_batches=3),
    Case("gpt-penalty", dp=2, tp=2, num_micro_batches=3, labels="unequal"),
]


def untouched(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model itself, of the whole batch at once."""
    model, batch = make_model(case.family, 0.0).double(), global_batch(case)
    loss = LOSSES[case.family](model(batch["ids"]), batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", [Case("gpt-penalty", labels="unequal"), Case("gpt-summed"), *SIMULATED], ids=str)
def test_equal_to_the_untouched_model(case: Case) -> None:
    want_loss, want = untouched(case)
    for found in (run_simulated, reference):
        loss, gradients = found(case)
        assert loss == pytest.approx(want_loss, rel=1e-12)
        error, name = worst(gradients, want)
        assert error < 1e-12, name


def test_negative_control() -> None:
    """Without the share of a micro-batch the loss is as many times too large as there are micro-batches."""
    case = SIMULATED[0]
    ((name, text),) = compiled(case).sources.items()
    broken, count = re.subn(r" \* loss_share", "", text)
    assert count == 3
    loss, _ = run_simulated(case, sources={name: broken})
    assert loss == pytest.approx(3 * untouched(case)[0], rel=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    spread_out(
        [
            Case("gpt-summed", dp=2, pp=2, num_micro_batches=2, zero=1),
            Case("gpt-summed", cp=2, num_micro_batches=3),
            Case("gpt-penalty", cp=2, dp=2, zero=3, num_micro_batches=2, labels="unequal"),
            Case("gpt-summed", pp=2, num_micro_batches=4, schedule="ZB-H1"),
        ],
        2,
    ),
    ids=str,
)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def batch() -> dict[str, torch.Tensor]:
    given = models.token_batch(2, SEQ)
    return {"ids": given["input_ids"], "labels": given["labels"]}


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda out, b: (out / b["ids"].shape[0]).square().sum(), "div_scalar"),
        (lambda out, b: out.square().sum() * b["ids"].shape[0], "mul_scalar"),
        (lambda out, b: out.square().sum() / b["ids"].shape[0] ** 2, "div_scalar"),
    ],
)
def test_another_use_of_the_size_of_the_batch_is_refused(loss: object, op: str) -> None:
    graph = capture(models.make_gpt(), batch(), loss)
    assert re.match(rf"{op} at the loss function cannot be computed sample by sample", str(batch_obstacle(graph)))


def normalized_advantages(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The clipped objective of PPO."""
    gain = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-8)
    ratio = (F.log_softmax(out, -1)[:, 0] + 1.5).exp()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def balanced(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A weight that is counted in the batch, before a mean."""
    true = (batch["gain"] > 0).double()
    weight = (1 - true).sum() / true.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(out[:, 0], true, pos_weight=weight)


@pytest.mark.parametrize(
    "loss",
    [normalized_advantages, balanced, lambda out, batch: F.cross_entropy(out, batch["labels"]) / out.shape[0]],
)
def test_a_mean_of_what_has_a_mean_inside(loss: Any) -> None:
    """It is that of the whole batch, which is not split."""
    model = filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    generator = torch.Generator().manual_seed(1)
    x, gain = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((4, 6), (4,)))
    batch = {"input": x, "gain": gain, "labels": torch.tensor([2, 1, 0, 3])}
    graph = assert_equal(model, batch, loss, ("tp 2",))
    assert "cannot be computed sample by sample" in str(batch_obstacle(graph))


def detector_loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Classes of the batch as one-hot targets (none for the background, -1), over the number of those that have one."""
    has_class = batch["labels"] >= 0
    wanted = F.one_hot(batch["labels"].clamp(min=0), 4).to(out.dtype) * has_class[..., None]
    errors = F.binary_cross_entropy_with_logits(out, wanted, reduction="none")
    return (errors * (1 - torch.exp(-errors)) ** 2).sum() / has_class.sum().clamp(min=1)


def test_targets_that_are_made_of_the_batch_are_no_choices_of_a_router() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "labels": torch.tensor([2, -1, 0, -1]),  # unequal parts
    }
    graph = assert_equal(filled(model), batch, detector_loss, ("dp 2 ZeRO 3", "tp 2"))
    assert batch_obstacle(graph) is None


@pytest.mark.parametrize(
    ("loss", "splits"),
    [
        (lambda out, batch: 1 - out.tanh().mean(), True),
        (lambda out, batch: F.cross_entropy(out, batch["labels"].abs()) + 1 - out.sigmoid().mean(), True),
        (lambda out, batch: 3 * (0.5 - out.square().mean()) + 2, True),
        (lambda out, batch: (1 - out.mean()).square(), False),  # negative control
    ],
)
def test_a_number_in_the_loss_is_counted_once(loss: Any, splits: bool) -> None:
    model = filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = {"input": x, "labels": torch.tensor([2, 1, 0, 3])}
    graph = assert_equal(model, batch, loss, ("dp 2 ZeRO 3",) if splits else ("tp 2",))
    assert (batch_obstacle(graph) is None) is splits
    want, _ = families.eager(loss, model, batch)
    got, _ = run(model, graph, batch, num_micro_batches=2 if splits else 1)
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("reduction", "ignore"), [("mean", -100), ("mean", 255), ("sum", 1)])
@pytest.mark.parametrize("dims", [2, 3])
def test_smoothed_labels_with_weights_of_classes(reduction: str, ignore: int, dims: int) -> None:
    """The mean is over the weights of the labels that count; one part has none of them."""
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    labels = torch.tensor([[2, ignore, 0], [1, 3, 0], [ignore] * 3, [ignore] * 3])

    def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        settings: dict[str, Any] = {"ignore_index": ignore, "label_smoothing": 0.1, "reduction": reduction}
        if dims == 2:
            return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), weight, **settings)
        return F.cross_entropy(out.transpose(1, 2), batch["labels"], weight, **settings)

    model = filled(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = assert_equal(model, {"input": x, "labels": labels}, loss, ("dp 2 ZeRO 3", "tp 2"))
    assert batch_obstacle(graph) is None
