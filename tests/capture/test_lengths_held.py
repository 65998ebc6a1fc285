"""Forwards that ask for lengths: the graph is that of the lengths with the same answers, or of the example's alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_faithful import DIM, Model, assert_equal, given, graph_of, mean_square
from torch import nn

import autoplan
from autoplan.errors import CaptureError, PinError


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


def from_the_middle(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Positions around the middle, as xPos has them: `length // 2` is no polynomial."""
    positions = torch.arange(x.shape[1], dtype=x.dtype) - x.shape[1] // 2
    return x * (1 + positions / 8)[:, None] + x.mean(1, keepdim=True)


def in_chunks(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Sums within chunks of 4: torch.export says that the length has the form 4 * n."""
    b, s, _ = x.shape
    return x + x.view(b, s // 4, 4, DIM).cumsum(2).view(b, s, DIM)


def causal_if_long(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As OpenAI's Whisper asks for causal attention: torch takes a bool and no symbol."""
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (from_the_middle, r"uses the size .*floor\(s/2\)"),
        (in_chunks, r"must have the form 4\*n"),
        (causal_if_long, "must be bool, not SymBool"),
    ],
)
def test_where_no_graph_holds_for_any_length_it_is_that_of_the_example(op: Callable[..., Any], why: str) -> None:
    model, batch = Model(op).double(), given(seq=8)
    assert_equal(model, batch)
    graph = graph_of(model, batch)
    (note,) = graph.notes
    assert note.startswith("the graph is that of sequences of the example's length alone") and re.search(why, note)
    assert [str(size) for size in graph.values["x"].shape] == ["b", "8", str(DIM)] and graph.bounds == {"s": (8, 8)}


def test_what_else_cannot_be_captured_is_said_of_the_example_s_length() -> None:
    def drawn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return from_the_middle(m, x) * float(x.mean())

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        graph_of(Model(drawn).double(), given(seq=8))


def test_the_place_where_a_batch_size_became_a_number_is_named() -> None:
    def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.shape[0])

    with pytest.raises(CaptureError, match=r"one batch size only \(test_lengths_held.py:\d+ \(return x \* int\("):
        graph_of(Model(counted).double(), given(seq=8))


class Chunked(nn.Module):
    """Source and target of lengths of their own, the source in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read = in_chunks(self, self.embed(source)).mean(1, keepdim=True)
        return (self.embed(target) + read).tanh()


def test_a_graph_of_one_length_is_planned_at_that_length_alone() -> None:
    model = Chunked().double()
    batch = {"source": torch.arange(32).view(4, 8) % 16, "target": torch.arange(20).view(4, 5) % 16}
    planned = functools.partial(
        autoplan.plan, model, "local", example_inputs=batch, loss_fn=mean_square, global_batch_size=4
    )
    assert planned().capture.startswith("capture verified")
    with pytest.raises(PinError, match="sequences of 12 tokens: the forward of Chunked depends on the length"):
        planned(seq_len=12)
    assert graph_of(model, batch).bounds == {"s": (8, 8), "t": (5, 5)}


def test_a_loop_over_tokens_holds_for_their_number_alone() -> None:
    def one_by_one(m: Any, x: torch.Tensor) -> torch.Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            state = (state + x[:, i]).tanh()
            found.append(state)
        return torch.stack(found, 1)

    class Read(Model):
        def __init__(self) -> None:
            super().__init__(one_by_one)
            self.embed = nn.Embedding(16, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.embed(x))

    graph = graph_of(Read().double(), {"x": torch.zeros(2, 6, dtype=torch.long)})
    assert graph.bounds == {"s": (6, 6)} and not graph.notes
