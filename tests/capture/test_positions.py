"""Indexing with the numbers of the samples: the same values, and the batch can be split."""

from __future__ import annotations

from collections.abc import Callable

import plain_models
import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.ops.batch import batch_obstacle

Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def last(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]), places[:, 0]]


def two_of_each(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(0, x.shape[0])[:, None], places].sum(1)


def from_the_end(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0], device=x.device), places[:, 0] - x.shape[1]]


def number_of_the_last(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]), -1]


def all_of_them(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None, :]
    return x[rows, columns].mean(1)


def in_more_dims(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.mean(1)[torch.arange(x.shape[0])[:, None, None].long()].sum((1, 2))


def later_ones(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[:, 1:][torch.arange(x.shape[0]), places[:, 0] % 2]


def reversed_samples(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[x.shape[0] - 1 - torch.arange(x.shape[0]), places[:, 0]]


def first_sample(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]) * 0, places[:, 0]]


class Picks(nn.Module):
    """A classifier of some places of a sequence."""

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.embed, self.head, self.pick = nn.Embedding(16, 8), nn.Linear(8, 3), pick

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.pick(self.embed(ids), places))
        return out


def loss(out: torch.Tensor, batch: object) -> torch.Tensor:
    return out.square().mean()


def given() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.randint(high, size, generator=generator)
        for n, high, size in (("ids", 16, (4, 6)), ("places", 6, (4, 2)))
    }


KNOWN = [last, two_of_each, from_the_end, number_of_the_last, all_of_them, in_more_dims, later_ones]


@pytest.mark.parametrize("pick", KNOWN)
def test_equal_and_the_batch_can_be_split(pick: Pick) -> None:
    graph = plain_models.assert_equal(Picks(pick).double(), given(), loss, ("tp 2", "dp 2 ZeRO 3"))
    assert batch_obstacle(graph) is None


@pytest.mark.parametrize("pick", [reversed_samples, first_sample])
def test_other_samples_are_not_taken_for_their_own(pick: Pick) -> None:
    """Equal as well, but then other samples are needed."""
    graph = plain_models.assert_equal(Picks(pick).double(), given(), loss, degrees=())
    assert batch_obstacle(graph) is not None


def test_without_the_form_the_batch_could_not_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("autoplan.capture.positions._COUNTS", ())
    assert "arange at test_positions.py" in (batch_obstacle(capture(Picks(last), given(), loss)) or "")
