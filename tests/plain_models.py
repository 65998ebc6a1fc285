"""Parity of small plain models at the degrees of docs/model_zoo.md: captured, split over simulated ranks, compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph
from experiments.compatibility import families


def filled(model: nn.Module, training: bool = True) -> nn.Module:
    """Return the model in float64 with values under which every parameter matters."""
    return families.filled(model).train(training)


def assert_equal(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss: families.Loss | None,
    degrees: Iterable[str] = families.NEEDED,
) -> ModelGraph:
    """Compare loss and every gradient with the module's own, at each of the degrees; return the graph."""
    truth = families.Truth(model, batch, *families.eager(loss, model, batch))
    graph = capture(model, batch, loss)
    for name in degrees:
        wrong, _ = truth.compared(*families.run(truth, graph, name))
        assert not wrong, f"{name}: {wrong}"
    return graph
