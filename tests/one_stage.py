"""The program of one device: what its blocks are predicted to keep, and its stage with inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from parity import SEQ, TARGET, Case, cluster_of, compiled, fake_group, full_tensors, global_batch, graph_of

from autoplan.codegen.program import Layouts
from autoplan.ir.graph import ModelGraph
from autoplan.program.activation_bytes import Activations
from autoplan.program.activations import activations
from autoplan.program.lower import BlockLowering
from autoplan.runtime.mesh import use_mesh
from autoplan.runtime.model import ParallelModel
from experiments.shared.default_plans import make_plan, read_pins


@functools.cache
def predicted(case: Case, batch: int) -> tuple[ModelGraph, Layouts, dict[str, Activations]]:
    """The activations of every block under the plan of a case, for `batch` samples per micro-batch."""
    graph = graph_of(case.family, case.dropout)
    config = read_pins(dict(case.pins), case.world)
    _, layouts, _ = make_plan(graph, cluster_of(case.world, case.prices), config, {"b": 2, "s": SEQ, "t": TARGET})
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    env = {"b": batch, "s": SEQ, "t": TARGET}
    return graph, layouts, {n: activations(low, env) for n, low in lowered.items()}


@contextlib.contextmanager
def stage_of(case: Case) -> Iterator[tuple[ParallelModel, dict[str, torch.Tensor]]]:
    """The emitted stage of one device and its inputs: 12 samples."""
    program = compiled(case)
    params, buffers = full_tensors(case, torch.float32)
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, params, buffers)
        inputs = {**global_batch(case), "loss_denominator": torch.tensor(100.0), "rng": torch.tensor([0, 0, 0])}
        with use_mesh(pm.mesh):
            yield pm, inputs
