"""State-space and linear attention layers of transformers: their scan as one op, equal to the module's."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import models
import pytest
import scan_models
import torch
from harness import pool
from torch.utils import _pytree as pytree

from autoplan.capture.export import capture
from autoplan.capture.frontend.scan_trials import ScanFacts, Trial, result_form
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph, Node
from autoplan.ops.batch import batch_obstacle, context_obstacle
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

NAMES = {
    "mamba": "mamba_selective_scan",
    "mamba2": "mamba2_chunk_scan",
    "bamba": "mamba2_chunk_scan",
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "rwkv": "rwkv_linear_attention",
}
FAST = ("mamba2", "qwen3_next", "bamba")


@functools.cache
def _captured(kind: str) -> tuple[torch.nn.Module, ModelGraph]:
    model = scan_models.made(kind)
    return model, capture(model, models.token_batch(2, 40))


def _scans(graph: ModelGraph) -> list[Node]:
    return [n for b in graph.blocks.values() for n in b.nodes if n.op == "scan"]


def _kinds() -> list[Any]:
    return [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in NAMES]


@pytest.mark.parametrize("kind", _kinds())
def test_a_scan_is_one_op_of_every_length(kind: str) -> None:
    model, graph = _captured(kind)
    found = _scans(graph)
    assert {n.attrs["function"].rsplit(".", 1)[1] for n in found} == {NAMES[kind]}
    assert "s" not in graph.bounds and any(NAMES[kind] in note for note in graph.notes)
    outcome = verify_whole(VerifyTask(model, graph, models.token_batch(4, 40), None), limit_s=60.0)
    assert outcome.done and "s=" in outcome.text, outcome.text


def test_another_call_is_found_to_be_wrong() -> None:
    """The negative control: the comparison sees an argument that the program leaves out."""
    model, graph = _captured("mamba2")
    changed = {}
    for name, block in graph.blocks.items():
        nodes = [
            replace(n, attrs={**n.attrs, "call": n.attrs["call"].removesuffix(", dt_softplus=True")})
            if n.op == "scan"
            else n
            for n in block.nodes
        ]
        changed[name] = replace(block, nodes=tuple(nodes))
    assert changed != graph.blocks
    wrong = replace(graph, blocks=changed)
    with pytest.raises(CaptureError):
        verify_whole(VerifyTask(model, wrong, models.token_batch(4, 40), None), limit_s=60.0)


def test_batch_groups_and_heads_can_be_split_and_the_sequence_cannot() -> None:
    (node,) = _scans(_captured("mamba2")[1])
    rule = node.attrs["rule"]
    assert rule.startswith("[f0, x0d1!, f1 f1x4, f2], [f0, x1d1!, f1 f1x4], [f1 f1x4], [f0, x3d1!, f1, x3d3!]")
    assert rule.endswith("-> [f0, x7d1!, f1 f1x4, f2]")
    (node,) = _scans(_captured("qwen3_next")[1])
    assert node.attrs["rule"].startswith("[f0, x0d1!, f1, x0d3!], [f0, x1d1!, f1, x1d3!], [f0, x2d1!, f1 f1x2, f2]")
    for kind in FAST:
        graph = _captured(kind)[1]
        assert batch_obstacle(graph) is None
        assert "cannot be computed for a part of the sequence: ranks would" in (context_obstacle(graph) or "")


def _facts(function: Any, *shapes: tuple[int, ...]) -> ScanFacts:
    tensors = [torch.empty(s) for s in shapes]
    leaves, spec = pytree.tree_flatten((tuple(tensors), {}))
    trial = Trial("function", function, leaves, spec, 0, ())
    return trial.facts(tensors, result_form(trial, tensors, None))


def test_only_what_is_independent_is_split() -> None:
    def apart(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        return (x * decay).cumsum(1)

    def mixed(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:  # one sum over the heads, which is small
        return (x * decay).cumsum(1) + 1e-7 * x.sum(-1, keepdim=True)

    def by_number(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:  # what a head computes depends on its number
        return (x * decay * torch.arange(x.shape[-1])).cumsum(1)

    shapes = (2, 6, 8), (8,)
    assert _facts(apart, *shapes).rule == "[f0, x0d1!, f1], [f1] -> [f0, x2d1!, f1]"
    assert _facts(mixed, *shapes).rule == "[f0, x0d1!, x0d2!], [x1d0!] -> [f0, x2d1!, x2d2!]"
    assert _facts(by_number, *shapes).rule == "[f0, x0d1!, x0d2!], [x1d0!] -> [f0, x2d1!, x2d2!]"


def test_costs_are_those_of_a_forward() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        out, state = [], torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = (state + x[:, i]).tanh()  # two kernels per token
            out.append(state)
        return torch.stack(out, 1)

    facts = _facts(steps, (2, 64, 8))
    assert facts.starts == (1 + 2 * 64 + 1, 0) and facts.kept == 4  # zeros, the steps, the join; every state
    (node,) = _scans(_captured("mamba2")[1])
    # 11 products and the operations around them, for any number of chunks; the inputs alone are 4 bytes per element
    assert 40 < node.attrs["starts"][0] < 90 and node.attrs["starts"][1] == 0
    assert node.attrs["moved"] > 4 and node.attrs["kept"] > 4 and node.attrs["flops"] > 2 * 8


def test_a_loop_in_the_forward_of_a_module_is_refused_by_name() -> None:
    model = scan_models.made("minimax")
    start = time.monotonic()
    with pytest.raises(
        CaptureError, match=r"MiniMaxForCausalLM: model\.layers\.0 .*MiniMaxLightningAttention.* in the"
    ):
        capture(model, models.token_batch(2, 512))
    assert time.monotonic() - start < 30


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2, "zero_stage": 3}, {"tp": 2}, {"pp": 2}], ids=["dp", "tp", "pp"])
@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "bamba"])
def test_two_ranks_train_it(kind: str, pins: dict[str, Any]) -> None:
    """The functions compute in float32, so that sums in another order differ in its last digits."""
    for loss, gradients, text in pool(2).run(scan_models.errors, kind, pins, timeout_s=180):
        assert loss < 1e-6 and gradients < 5e-5
        assert f"scan('transformers.models.{kind}.modeling_{kind}.{NAMES[kind]}', " in text
