"""Inputs of a batch that have names which the emitted text, Python or the runtime use otherwise."""

from __future__ import annotations

import plain_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError


class _Norms(nn.Module):
    """Its batch norms divide by the size of the batch, which the text calls b."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(a)).relu() * b)


def _loss(out: torch.Tensor, batch: plain_models.families.Batch) -> torch.Tensor:
    return F.l1_loss(out.sum(1), batch["my-label"]) + (out.sum(1) * batch["class"] * batch["torch"]).mean()


def test_inputs_may_have_any_name() -> None:
    torch.manual_seed(0)
    batch = {n: torch.randn(4, 6, dtype=torch.float64) for n in ("a", "b")}
    batch |= {n: torch.randn(4, dtype=torch.float64) for n in ("my-label", "class", "torch")}
    plain_models.assert_equal(plain_models.filled(_Norms()), batch, _loss, ("tp 2", "dp 2 ZeRO 3"))


@pytest.mark.parametrize("name", ["rng", "self", "loss_share", "loss_denominator2"])
def test_names_of_the_runtime_are_refused(name: str) -> None:
    batch = {"a": torch.randn(4, 6), "b": torch.randn(4, 6), name: torch.randn(4)}
    with pytest.raises(CaptureError, match=f"'{name}', a name that programs use themselves; rename"):
        capture(_Norms(), batch, lambda out, given: (out.sum(1) * given[name]).mean())
