"""Dims that are cut in two ways without a common refinement: the value is regrouped in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parity import cluster_of
from test_faithful import run
from torch import nn

from autoplan.capture.export import capture
from autoplan.codegen.program import compile_program
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.simulated import SimulatedStep, run_simulated

ROWS, WIDE = 12, 8


class Windows(nn.Module):
    """Mixes windows of 3 of 12 rows, as 4 times 3."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = x.reshape(x.shape[0], ROWS // 3, 3, WIDE)
        mixed: torch.Tensor = self.mix(cut.transpose(-1, -2)).transpose(-1, -2)
        return mixed.reshape(x.shape)


class Merged(nn.Module):
    """Joins pairs of 12 rows, as 6 times 2, and takes them apart again: before the windows, after them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDE, 2 * WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.join(x.reshape(x.shape[0], ROWS // 2, 2 * WIDE))
        return joined.reshape(x.shape)


class Image(nn.Module):
    def __init__(self, kinds: list[type[nn.Module]], in_layers: bool) -> None:
        super().__init__()
        made = [kind() for kind in kinds]
        self.layers = nn.ModuleList(made) if in_layers else nn.Sequential(*made)
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        out: torch.Tensor = self.head(x.mean(1))
        return out


def _loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(out, batch["labels"])


CASES = [
    pytest.param(kinds, in_layers, id=f"{'-'.join(k.__name__ for k in kinds)}-{in_layers}")
    for in_layers in (True, False)
    for kinds in ([Windows, Merged], [Merged, Windows, Merged])
]


@pytest.mark.parametrize(("kinds", "in_layers"), CASES)
def test_both_ways_compute_what_the_module_computes(kinds: list[Any], in_layers: bool) -> None:
    torch.manual_seed(0)
    model = Image(kinds, in_layers).double()
    batch = {"x": torch.randn(4, ROWS, WIDE, dtype=torch.float64), "labels": torch.randint(4, (4,))}
    graph = capture(model, batch, _loss)
    assert any(node.op == "regroup" for block in graph.blocks.values() for node in block.nodes)
    want = _loss(model(batch["x"]), batch)
    want.backward()
    params = {n: p.detach() for n, p in model.named_parameters()}
    found = [run(model, graph, batch)]
    for pins in ({"tp": 2}, {"dp": 2, "zero_stage": 3}):
        env = {"b": 4 // pins.get("dp", 1), "s": ROWS, "t": ROWS}
        _, layouts, _ = make_plan(graph, cluster_of(2, "bandwidth"), read_pins({**pins, "recompute": "none"}, 2), env)
        step = SimulatedStep(params, {}, batch, 1, None, torch.float64)
        found.append(run_simulated(compile_program(graph, layouts), step))
    for loss, gradients in found:
        assert loss == pytest.approx(want.item(), rel=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-14)
