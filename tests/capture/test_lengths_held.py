"""Forwards that ask for lengths: the graph is that of the lengths with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_faithful import DIM, Model, assert_equal, given, graph_of
from torch import nn

from autoplan.errors import CaptureError


def table(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A table of 9 rows, as GPT-Neo cuts its mask: the whole of it is another case to torch.export."""
    rows = torch.linspace(0, 1, 81, dtype=x.dtype).view(9, 9)[: x.shape[1], : x.shape[1]]
    return x + rows @ x


def at_most(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x[:, : min(7, x.shape[1])].sum(1, keepdim=True) + x


def missing(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As MPT cuts its bias: max(0, 9 - length) from the left."""
    rows = torch.linspace(0, 1, 9, dtype=x.dtype)
    return x * rows[max(0, 9 - x.shape[1]) :][:, None]


def shifted(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As XLNet shifts its scores: [2 s - 1, s] read as [s, 2 s - 1]."""
    b, s, _ = x.shape
    wide = torch.cat([x, x[:, 1:] * 2], 1)  # 2 s - 1
    scores = x @ wide.transpose(1, 2)
    return scores.reshape(b, 2 * s - 1, s)[:, 1:].reshape(b, s, 2 * s - 2)[:, :, :s] @ x


@pytest.mark.parametrize(
    ("op", "seq", "bounds", "others", "beyond"),
    [
        (table, 6, (0, 8), (2, 8), None),
        (at_most, 5, (0, 7), (2, 6), 8),
        (at_most, 8, (8, 1 << 17), (9, 11), 6),  # torch asks in a way that is not linear: tried up to there
        (missing, 5, (0, 9), (3, 8), None),
        (missing, 9, (0, 9), (3, 8), None),
    ],
)
def test_a_graph_holds_for_the_lengths_with_the_same_answers(
    op: Callable[..., Any], seq: int, bounds: tuple[int, int], others: tuple[int, ...], beyond: int | None
) -> None:
    model = Model(op).double()
    graph = graph_of(model, given(seq=seq))
    assert graph.bounds == {"s": bounds}
    assert_equal(model, given(seq=seq))
    for length in others:
        assert graph_of(model, given(seq=length)).blocks == graph.blocks  # also if captured there
    if beyond is not None:  # negative control: another graph
        assert graph_of(model, given(seq=beyond)).blocks != graph.blocks


def test_divisions_without_a_rest_are_polynomials() -> None:
    model = Model(shifted).double()
    assert_equal(model, given(seq=6))
    graph = graph_of(model, given(seq=6))
    assert graph.bounds["s"][0] <= 3 and (graph.bounds["s"][1] or 1 << 20) > 1 << 16


def test_a_condition_on_the_batch_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)[:, : min(x.shape[0] + 1, x.shape[1])] * 2

    with pytest.raises(CaptureError, match="batch"):
        graph_of(Both().double(), given(seq=6))
