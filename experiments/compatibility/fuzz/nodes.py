"""The nodes of a captured graph as cases of `experiments.shared.op_parity`, with the values that they have in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.ir.graph import LOSS_SHARE, Block, ModelGraph, Node, Value, denominator
from autoplan.ir.layout import Axis
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import op_has, op_kind
from experiments.shared.op_parity import MESHES, Case, Reference, Setting, ranks, run, strategies_of

_LARGEST = 64.0  # sums of larger numbers differ by their order in more than the last digits that are compared


class WrongNode(AssertionError):
    """A node of a captured graph, or one of its splits, that computes something else. The message names it."""


@dataclass(frozen=True)
class NodeCase:
    """A node of a block, and its inputs in this run."""

    node: Node
    values: Mapping[str, Value]
    setting: Setting
    inputs: tuple[torch.Tensor, ...]
    ref: Callable[..., Any] | None = None

    @staticmethod
    def of(node: Node, block: Block, setting: Setting, space: Mapping[str, torch.Tensor]) -> NodeCase:
        """Return the case of a node. `space`: values of the block by name."""
        places = iter(range(len(node.inputs)))
        names = tuple(None if n is None else f"x{next(places)}" for n in node.inputs)
        made = tuple(f"y{i}" for i in range(len(node.outputs)))
        values = {f"x{i}": replace(block.values[n], name=f"x{i}") for i, n in enumerate(node.tensor_inputs)}
        values |= {f"y{i}": replace(block.values[n], name=f"y{i}") for i, n in enumerate(node.outputs)}
        inputs = tuple(space[n] for n in node.tensor_inputs)
        return NodeCase(replace(node, inputs=names, outputs=made), values, setting, inputs)

    @property
    def name(self) -> str:
        """The op, and where it is."""
        shapes = "; ".join(str([str(d) for d in v.shape]) for n, v in self.values.items() if n[0] == "x")
        return f"{self.node.op}({shapes}) {dict(self.node.attrs)} at {self.node.source or self.node.name}"

    def make(self) -> list[torch.Tensor]:
        """Return the inputs, whole."""
        return [x.contiguous() for x in self.inputs]  # on simulated ranks all parts must have the same strides


def cases(
    graph: ModelGraph, env: Mapping[str, int], tensors: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> Iterator[Reference]:
    """Yield every node of a graph, run on one device on what the nodes before it made.

    Args:
        env: the sizes of the batch.
        tensors: parameters and buffers by name.

    Raises:
        WrongNode: an output has another shape or dtype than the graph says.
    """
    setting = Setting(graph.factors, env)
    shared = {denominator(i): torch.tensor(5.0, dtype=torch.float64) for i in range(len(graph.loss_counts))}
    shared[LOSS_SHARE] = torch.tensor(1.0, dtype=torch.float64)
    top: dict[str, torch.Tensor] = {**shared, **batch}
    with ranks((Axis("tp", 1),), graph.factors):  # random numbers ask the mesh for their places
        yield from _cases(graph, setting, tensors, top)


def _cases(
    graph: ModelGraph, setting: Setting, tensors: Mapping[str, torch.Tensor], top: dict[str, torch.Tensor]
) -> Iterator[Reference]:
    for call in graph.calls:
        block = graph.blocks[call.block]
        space = dict(zip(block.inputs, (top[n] for n in call.inputs), strict=True))
        space |= {mine: tensors[full] for mine, full in (*call.params.items(), *call.buffers.items())}
        for node in block.nodes:
            case = NodeCase.of(node, block, setting, space)
            try:
                done = Reference(case)
            except AssertionError as exc:
                raise WrongNode(str(exc)) from exc
            for name, out in zip(node.outputs, done.outputs, strict=True):
                want = [int(size.evaluate(setting.env)) for size in block.values[name].shape]
                if list(out.shape) != want:
                    raise WrongNode(f"{case.name}: {name} has shape {list(out.shape)}, the graph says {want}")
                space[name] = out
            yield done
        top |= {outer: space[inner] for outer, inner in zip(call.outputs, block.outputs, strict=True)}


def _means_something(case: Case, strategy: Strategy) -> bool:
    """Return False for a strategy that is the same on every rank, or has pending sums that mean nothing here.

    A mask is no sum, and the parts of a sum in narrow floats are rounded.
    """
    pending = any(
        kind.kind_name == "P" and case.values[f"x{i}"].dtype in ("bool", "float32", "float16", "bfloat16")
        for i, layout in enumerate(strategy.inputs)
        for kind in layout
    )
    return not pending and (strategy.num_shards > 1 or "P" in strategy.name)


def check_splits(references: Sequence[Reference], mesh_name: str) -> int:
    """Run every split that the rules of these nodes claim on simulated ranks. Returns how many there were.

    Raises:
        WrongNode: outputs or gradients, put together, are not those of the whole.
    """
    axes, num = MESHES[mesh_name], 0
    if not references:
        return 0
    with ranks(axes, references[0].case.setting.factors) as (mesh, ctx):
        for reference in references:
            if op_has(reference.case.node.op, Trait.RANDOM) or op_kind(reference.case.node.op) is OpKind.COLLECTIVE:
                continue
            if any(x.is_floating_point() and float(x.abs().max()) > _LARGEST for x in reference.inputs if x.numel()):
                continue
            for strategy in strategies_of(reference.case, axes):
                if not _means_something(reference.case, strategy):
                    continue
                try:
                    run(reference, strategy, mesh, ctx)
                except Exception as exc:
                    raise WrongNode(f"{reference.case.name} under {strategy.name} on {mesh_name}: {exc}") from exc
                num += 1
    return num
