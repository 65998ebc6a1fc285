"""Layers of models that have no lists of them."""

from __future__ import annotations

import divided_models
import pytest
import torch
from divided_models import CASES, Block
from torch import nn
from trained_jobs import square

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import layer_calls, pipeline_units
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


def captured(name: str) -> ModelGraph:
    case = CASES[name]
    model, example = case.model(), case.batch(4, 0)
    graph = capture(model, example, case.loss)
    assert verify_whole(VerifyTask(model, graph, example, case.loss), limit_s=60.0).done
    return graph


def kinds(graph: ModelGraph) -> list[int]:
    """The block of every layer, as numbers."""
    found = [call.block for call in graph.calls if call.name in layer_calls(graph)]
    return [list(dict.fromkeys(found)).index(block) for block in found]


FOUND = {  # the layers, and which of them are of one block
    "attributes": ("block1 block2 block3", [0, 0, 0]),
    "used-again": ("first block block_1 block_2", [0, 1, 1, 1]),
    "residual": ("conv1 layer1.a layer1.b layer1.c layer2.a layer2.b layer2.c", [0, 1, 1, 1, 2, 3, 3]),
    "u-net": ("inc down1 down2 up1 up2", [0, 1, 2, 3, 4]),
    "unlike": ("0 3 7 10", [0, 1, 2, 3]),
    "functions": ("linear linear_1 linear_2 linear_3", [0, 1, 2, 3]),
    "recurrent": ("embed_1 lstm head_1", [0, 1, 2]),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_layers_found(name: str) -> None:
    graph = captured(name)
    names, alike = FOUND[name]
    assert (" ".join(layer_calls(graph)), kinds(graph)) == (names, alike)
    assert len(pipeline_units(graph)) == len(alike)


def test_blocks_used_again_have_the_same_parameters() -> None:
    graph = captured("used-again")
    assert all(len(where) == 3 for where in graph.tied_params.values())
    assert set(graph.tied_params) == {name for name in graph.params if name.startswith("block.")}


class Beside(nn.Module):
    """Attributes beside a list: `wide` is the width of what the list holds."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = Block(8), Block(8)
        self.listed = nn.ModuleList(nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        for layer in self.listed:
            x = layer(x)
        return x


@pytest.mark.parametrize(("wide", "names"), [(4, "first second listed.0 listed.1"), (512, "listed.0 listed.1")])
def test_a_list_stays_and_blocks_beside_it_are_layers_if_they_weigh_more(wide: int, names: str) -> None:
    graph = capture(Beside(wide).double(), divided_models.normal(6, 8)(4, 0), square)
    assert " ".join(layer_calls(graph)) == names


def test_one_operation_is_not_divided() -> None:
    graph = capture(nn.Linear(4, 4), {"input": torch.zeros(2, 4)}, square)
    assert not layer_calls(graph) and [call.name for call in graph.calls] == ["model"]
