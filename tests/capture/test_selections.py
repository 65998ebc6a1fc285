"""Rows that a mask selects: x[mask], nonzero()."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from parity import worst
from test_faithful import graph_of, run
from torch import nn

from autoplan.errors import CaptureError

DIM, CLASSES, SAMPLES, LENGTH, END = 8, 5, 4, 6, 2
Batch = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Batch], torch.Tensor]


class Classifier(nn.Module):
    """Logits of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [b, s, CLASSES]. x: [b, s, DIM]."""
        logits: torch.Tensor = self.last(self.first(x).tanh())
        return logits


class EndClassifier(Classifier):
    """Logits of the last END of every sample, taken as BART does."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return logits [b, CLASSES]. ids: [b, s]."""
        hidden, ends = self.first(x).tanh(), ids.eq(END)
        rows = hidden[ends, :].view(hidden.size(0), -1, hidden.size(-1))[:, -1, :]
        logits: torch.Tensor = self.last(rows)
        return logits


def given() -> dict[str, torch.Tensor]:
    """Samples with 6, 4, 1 and 5 tokens; the sample of 1 has no class."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 9, (SAMPLES, LENGTH), generator=g)
    ids[torch.arange(SAMPLES), torch.tensor([5, 3, 0, 4])] = END
    ids[:, 2] = torch.where(ids[:, 0] == END, ids[:, 2], END)
    ids[2, 1] = END
    return {
        "x": torch.randn(SAMPLES, LENGTH, DIM, dtype=torch.float64, generator=g),
        "ids": ids,
        "valid": (torch.arange(LENGTH) < torch.tensor([6, 4, 1, 5])[:, None]).long(),
        "labels": torch.randint(CLASSES, (SAMPLES, LENGTH), generator=g),
        "kind": torch.tensor([1, 4, -3, 0]),
        "known": torch.tensor([1, 4, 3, 0]),
    }


def of_mask(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    mask = batch["valid"].bool()
    return F.cross_entropy(out[mask], batch["labels"][mask])


def of_shifted(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As Qwen2-Audio: the mask twice, and views of what it takes."""
    logits = out[:, :-1][batch["valid"][:, 1:] != 0].contiguous()
    labels = batch["labels"][:, 1:][batch["valid"][:, 1:].to(out.device) != 0].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1).to(out.device))


def of_flat_tokens(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    """With labels that do not count in the mask, too, and smoothed ones."""
    mask, labels = batch["valid"].flatten() > 0, batch["labels"].flatten()
    rows = out.flatten(0, 1)[mask]
    return F.cross_entropy(rows, labels[mask], ignore_index=1, label_smoothing=0.1)


def of_samples_with_a_class(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As DeBERTa."""
    logits, places = out[:, 0], (batch["kind"] >= 0).nonzero()
    if places.size(0) == 0:
        return torch.tensor(0.0).to(logits)
    logits = torch.gather(logits, 0, places.expand(places.size(0), logits.size(1)))
    labels = torch.gather(batch["kind"], 0, places.view(-1))
    return F.cross_entropy(logits.view(-1, CLASSES).double(), labels.view(-1))


def of_kinds(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out, batch["known"])


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Classifier, of_mask),
        (Classifier, of_shifted),
        (Classifier, of_flat_tokens),
        (Classifier, of_samples_with_a_class),
        (EndClassifier, of_kinds),
    ],
)
def test_the_program_is_the_module(make: type[Classifier], loss: Loss, num_micro_batches: int) -> None:
    torch.manual_seed(0)
    model, batch = make().double(), given()
    got_loss, got = run(model, graph_of(model, batch, loss), batch, num_micro_batches=num_micro_batches)
    want = loss(model(batch["x"], batch["ids"]) if make is EndClassifier else model(batch["x"]), batch)
    want.backward()
    assert got_loss == pytest.approx(want.item(), rel=1e-12)
    error, name = worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert error < 1e-12, name


def by_two_masks(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out[batch["valid"] > 0], batch["labels"][batch["valid"].flip(0) > 0])


def by_two_random_masks(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out[torch.rand_like(out[..., 0]) > 0.5], batch["labels"][torch.rand_like(out[..., 0]) > 0.5])


def by_a_mask_that_changes_later(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    mask = batch["valid"] > 0
    logits, labels = out[mask], batch["labels"][mask]
    mask.logical_not_()
    return F.cross_entropy(logits, labels)


def by_a_mask_that_changes_between(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    valid = batch["valid"] + 0
    first = valid > 0
    valid.sub_(1)
    return F.cross_entropy(out[first], batch["labels"][valid > 0])


def without_a_sum(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    mask = batch["valid"] > 0
    return F.cross_entropy(out[mask], batch["labels"][mask], reduction="none").square().mean()


def of_rows(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return out[batch["valid"] > 0].square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        by_two_masks,
        by_two_random_masks,
        by_a_mask_that_changes_later,
        by_a_mask_that_changes_between,
        without_a_sum,
        of_rows,
    ],
)
def test_others_are_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"a size depends on the data \(x\[mask\], nonzero\(\)\).*keep all rows"):
        graph_of(Classifier().double(), given(), loss)


def test_a_sample_without_an_end_is_refused() -> None:
    model, batch = EndClassifier().double(), given()
    graph = graph_of(model, batch, of_kinds)
    assert any("last <eos>" in note for note in graph.notes)
    batch["ids"][1] = 3
    with pytest.raises((IndexError, RuntimeError), match="index"):
        run(model, graph, batch)
