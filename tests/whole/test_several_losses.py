"""Losses of several means over their own valid labels: those of the whole batch, however it is split."""

from __future__ import annotations

import plain_models
import pytest
import several_losses
from harness import pool

from autoplan.ir.graph import ModelGraph


@pytest.mark.parametrize("name", list(several_losses.LOSSES))
def test_means_of_their_own(name: str) -> None:
    loss, count = several_losses.LOSSES[name]
    graph = plain_models.assert_equal(several_losses.made(), several_losses.batch(name), loss)
    assert len(graph.loss_counts) == count
    assert ModelGraph.from_json(graph.to_json()) == graph


def test_ranks_settle_every_denominator() -> None:
    pins = {"dp": 2, "num_micro_batches": 2}
    for loss, gradients in pool(2).run(several_losses.errors, "next sentence", pins, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-10
