"""The program of one device: codegen's text for a graph without parallelism, run without a process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoplan.codegen.program import Layouts, Program, compile_program
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import LOSS_SHARE, Block, ModelGraph, Node, denominator
from autoplan.ir.symbols import SYMBOLS
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_has, op_kind
from autoplan.program.lower import BlockLowering
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.program.statements import LoweredBlock
from autoplan.runtime.params import buffer_owner
from autoplan.runtime.program import load_module, unwritten_folder
from autoplan.units import LossUnit
from autoplan.verify.drawn import known_draw
from autoplan.verify.wide import thinned

_STAGE = "stage0.py"
MODULE = "autoplan_verified_program"  # module name of the loaded text


@dataclass(frozen=True)
class OneDevice:
    """A graph compiled for one device.

    Attributes:
        graph: the graph with factors in place of dropout.
        program: the emitted program.
        lowered: its blocks as they are in the text.
    """

    graph: ModelGraph
    program: Program
    lowered: Mapping[str, LoweredBlock]

    @property
    def text(self) -> str:
        """The text of its only stage."""
        return self.program.sources[_STAGE]


def compile_one_device(graph: ModelGraph) -> OneDevice:
    """Compile a graph for one device. Without sub-axes every choice of the layout has one option: no search is needed.

    Dropout becomes a fixed factor (`autoplan.verify.wide.thinned`).

    Raises:
        RuleError: for an op without a rule or an emitter.
    """
    graph = replace(graph, blocks={name: _without_dropout(block) for name, block in graph.blocks.items()})
    dims = parallel_dims(graph, ParallelConfig())
    axes = dims.layout_axes
    env = dict.fromkeys(SYMBOLS, 16)  # sizes for the prices only, which decide nothing here
    problem = build_problem(graph, IntraSettings(axes, Costs(Cluster.local(1, "cpu")), env))
    selection = {choice.name: choice.options[0] for choice in problem.choices}
    stages = (tuple(call.name for call in graph.bound_calls()),)
    program = compile_program(graph, Layouts(dims.mesh, axes, selection, stages, 0, "1F1B", {}))
    lowered = {name: BlockLowering(graph, block, selection, axes).run() for name, block in graph.blocks.items()}
    return OneDevice(graph, program, lowered)


def _without_dropout(block: Block) -> Block:
    values, nodes = dict(block.values), list[Node]()
    for node in block.nodes:
        if not op_has(node.op, Trait.DROPS):
            nodes.append(node)
            continue
        name, factor = node.tensor_inputs[0], {"scalar": thinned(float(node.attrs["p"]))}
        if op_kind(node.op) is OpKind.ATTENTION:  # the factor of all shares is that of the result
            (out,) = node.outputs
            name = FreshNames(values).fresh(f"{out}_whole")
            values[name] = replace(values[out], name=name)
            nodes.append(replace(node, outputs=(name,), attrs={**node.attrs, "p": 0.0}))
            node = replace(node, name=f"{node.name}_thinned")
        nodes.append(replace(node, op="mul_scalar", inputs=(name,), attrs=factor))
    return replace(block, nodes=tuple(nodes), values=values)


def load_stage(text: str) -> nn.Module:
    """Load the stage of an emitted text; its parameters have no memory yet. It draws the numbers that a module draws
    in a comparison (`autoplan.verify.drawn`)."""
    module = load_module(unwritten_folder() / _STAGE, MODULE, text)
    vars(module)["draw"] = known_draw
    with torch.device("meta"):
        stage: nn.Module = module.Stage()
        return stage


def bind_params(
    stage: nn.Module, program: Program, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Make the stage compute with these tensors, by their names in the model; no tensor is copied."""
    (spec,) = program.spec.stages
    for p in spec.params:
        setattr(stage.get_submodule(f"blocks.{p.block}"), p.attr, parameters[p.name])
    for b in spec.buffers:
        setattr(buffer_owner(stage, b), b.attr, buffers[b.name])


def run_one_device(
    stage: nn.Module, graph: ModelGraph, batch: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the loss of one micro-batch that is the whole batch."""
    count: Callable[..., torch.Tensor] = stage.count  # type: ignore[assignment]  # a method of every emitted stage
    rng = torch.zeros(3, dtype=torch.int64)  # of no use: see `load_stage`
    draws = {"rng": rng} if "rng" in inspect.signature(count).parameters else {}
    number = count(**batch, **draws) if graph.loss_count is not LossUnit.NONE else torch.ones(())
    every = zip(range(len(graph.loss_counts)), number.to(dtype).reshape(-1), strict=True)
    inputs: dict[str, Any] = {**batch, **{denominator(i): value for i, value in every}}
    if LOSS_SHARE in graph.inputs:
        inputs[LOSS_SHARE] = torch.ones((), dtype=dtype)
    loss: torch.Tensor = stage(**inputs, rng=rng)
    return loss
