"""Samples that a forward takes one by one and joins again, and rows that are written where a mask is, as of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_faithful import Model, assert_equal, given, graph_of, mean_square

from autoplan.capture.frontend.samples import scattered_rows
from autoplan.errors import CaptureError
from autoplan.ops.batch import batch_obstacle

NUM = 2  # rows per sample


def largest(x: torch.Tensor, most: int = NUM) -> torch.Tensor:
    """True for the tokens of each sample whose first feature is largest: [b, s, 1]."""
    return x[..., :1] >= x[..., :1].topk(most, 1).values[:, -1:]


def joined(m: Any, x: torch.Tensor) -> torch.Tensor:
    features = torch.cat(list(x[:, -NUM:] @ m.weight), dim=0)
    return x.masked_scatter(largest(x.detach()), features)


def expanded(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = largest(x.detach()).expand_as(x)
    return torch.masked_scatter(x, mask, torch.stack(list(x[:, -NUM:].sin())))


@pytest.mark.parametrize("op", [joined, expanded])
def test_rows_are_written_into_each_sample(op: Callable[..., Any]) -> None:
    model = Model(op).double()
    assert batch_obstacle(graph_of(model, given())) is None
    assert_equal(model, given())


@pytest.mark.parametrize("places", [NUM - 1, NUM + 1])
def test_another_number_of_places_is_an_error(places: int) -> None:
    """PyTorch takes the next row of all, so that samples would get the rows of others."""
    x, rows = given()["x"], torch.randn(4 * NUM, 8, dtype=torch.float64)
    assert torch.equal(scattered_rows(x, largest(x), rows), x.masked_scatter(largest(x), rows))
    with pytest.raises(RuntimeError, match="out of bounds"):
        scattered_rows(x, largest(x, places), rows)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda m, x: torch.cat([y.sum(0, keepdim=True) for y in x], 0), r"\.sum of one sample of a batch"),
        (lambda m, x: torch.stack([torch.sin(y) for y in x]), "sin is given the samples of a batch one by one"),
        (lambda m, x: torch.cat(list(x), dim=1), "cat is given the samples of a batch one by one"),
        (lambda m, x: x * len(x), r"write x\.shape\[0\] for len\(x\)"),
    ],
)
def test_other_uses_of_one_sample_are_refused(op: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        graph_of(Model(op), given(), mean_square)
