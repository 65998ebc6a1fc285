"""Outputs of an evaluation besides the loss (logits): whole tensors from the parts that ranks have.

The stage that makes a result hands it out micro-batch by micro-batch. Its parts are put together over tensor and
context parallelism, and given to `each` if the caller wants less than all of it. After the last micro-batch the rows go
to the other stages of the pipeline, and to the other data-parallel ranks if all rows are wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.context import whole_of_parts, whole_sequence
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.program import Block
from autoplan.runtime.spec import OutputSpec, ProgramSpec, evaluate_terms
from autoplan.runtime.stage_inputs import MicroBatch, StageInputs

_Tensors = dict[str, torch.Tensor]
Each = Callable[[_Tensors], Mapping[str, torch.Tensor]]
ROWS = ("own", "all")


def why_no_outputs(spec: ProgramSpec, rows: str, each: object) -> str | None:
    """Return why an evaluation cannot return outputs; None if it can."""
    if rows not in ROWS:
        return f"rows={rows!r}; give 'own' (the rows of this data-parallel rank) or 'all' (those of the global batch)"
    if each is not None and not callable(each):
        return f"each is of type {type(each).__name__}, not a function of a mapping from names to tensors"
    if not spec.outputs:
        return (
            f"the program of {spec.model} has no output besides the loss: the model returns none that the loss depends "
            "on and that has a batch dim, or the program was compiled from a graph of the catalog; compile the module"
        )
    return None


class Outputs:
    """Collects the outputs of one evaluation.

    Args:
        stages: this rank's modules by stage index.
        each: reduces the outputs of a micro-batch, by name, to tensors [rows, ...]; None: they are kept. It gets those
            of the last stage that makes any.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        mesh: AxisMesh,
        stages: Mapping[int, nn.Module],
        inputs: StageInputs,
        device: torch.device,
        each: Each | None,
    ) -> None:
        self._spec, self._mesh, self._inputs, self._device, self._each = spec, mesh, inputs, device, each
        self._stages = stages
        last = max((o.stage for o in spec.outputs), default=0)
        self._wanted = [o for o in spec.outputs if each is None or o.stage == last]
        self._parts: dict[int, list[_Tensors]] = {}  # by stage, of every micro-batch

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Let the blocks that make outputs keep them."""
        blocks = [self._block(o) for o in self._wanted if o.stage in self._stages]
        for block in blocks:
            block.outputs = {}
        try:
            yield
        finally:
            for block in blocks:
                block.outputs = None

    def _block(self, output: OutputSpec) -> Block:
        found = self._stages[output.stage].get_submodule(f"blocks.{output.block}")
        assert isinstance(found, Block)
        return found

    def take(self, stage: int, micro_batch: MicroBatch) -> None:
        """Put together what a stage made of a micro-batch. A collective of the ranks that hold the stage."""
        part: _Tensors = {}
        for output in (o for o in self._wanted if o.stage == stage):
            kept = self._block(output).outputs
            assert kept is not None
            part[output.name] = self._whole(output, kept.pop(output.name), micro_batch)
        if part:
            self._parts.setdefault(stage, []).append(part if self._each is None else self._reduced(part))

    def _reduced(self, part: _Tensors) -> _Tensors:
        assert self._each is not None
        found = self._each(part)
        if not isinstance(found, Mapping) or not all(isinstance(x, torch.Tensor) and x.dim() for x in found.values()):
            raise TypeError(
                f"each= returned a {type(found).__name__}; it must return a mapping from names to tensors [rows, ...]"
            )
        return dict(found)

    def _whole(self, output: OutputSpec, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the rows of a micro-batch from this rank's part of them."""
        env = self._inputs.sizes(micro_batch)
        sizes = [[evaluate_terms(size, env) for size in dim] for dim in output.sizes]
        for shard in output.shards:
            sizes[shard.dim][shard.position] //= self._mesh.size(shard.axis)
        starts = list(itertools.accumulate((len(dim) for dim in sizes), initial=0))
        x = x.detach().reshape([size for dim in sizes for size in dim]).contiguous()
        if output.pending:
            x = x.clone()
        for axis in output.pending:
            dist.all_reduce(x, group=self._mesh.group(axis))
        for shard in reversed(output.shards):
            x = self._gathered(x, shard.axis, starts[shard.dim] + shard.position)
            sizes[shard.dim][shard.position] *= self._mesh.size(shard.axis)
        for k, (dim, position) in enumerate(output.lengths):
            at = starts[dim] + position
            x = whole_of_parts(x, "cp", at, output.runs[k]) if output.runs else whole_sequence(x, "cp", at)
        return x.reshape([math.prod(x.shape[at : at + len(dim)]) for at, dim in zip(starts, sizes, strict=False)])

    def _gathered(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        if self._mesh.size(axis) == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self._mesh.size(axis))]
        dist.all_gather(parts, x, group=self._mesh.group(axis))
        return torch.cat(parts, dim)

    def result(self, rows: str) -> _Tensors:
        """Return the outputs on every rank, by name. A collective over all ranks."""
        dims = {o.name: o.batch_dim for o in self._wanted} if self._each is None else {}
        out: _Tensors = {}
        for parts in self._parts.values():
            out |= {name: torch.cat([part[name] for part in parts], dims.get(name, 0)) for name in parts[0]}
        if self._mesh.size("pp") > 1:
            mine = out
            for home in sorted({self._spec.rank_of(o.stage) for o in self._wanted}):
                out = out | self._from_stage(mine, home)
        if rows == "all" and self._mesh.size("dp") > 1:
            out = {name: self._all_rows(x, dims.get(name, 0)) for name, x in sorted(out.items())}
        return out

    def _from_stage(self, mine: _Tensors, home: int) -> _Tensors:
        """Return on every rank of the pipeline what its rank `home` has."""
        group = self._mesh.group("pp")
        source = dist.get_global_rank(group, home)
        here = self._mesh.coordinate("pp") == home
        form: list[Any] = [[(name, tuple(x.shape), x.dtype) for name, x in mine.items()] if here else None]
        dist.broadcast_object_list(form, src=source, group=group, device=self._device)
        out: _Tensors = {}
        for name, shape, dtype in form[0]:
            out[name] = mine[name].contiguous() if here else torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(out[name], src=source, group=group)
        return out

    def _all_rows(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rows of all data-parallel ranks, in their order; they may have different numbers of rows."""
        group, count = self._mesh.group("dp"), self._mesh.size("dp")
        numbers = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(count)]
        dist.all_gather(numbers, torch.full_like(numbers[0], x.shape[dim]), group=group)
        rows = [int(n) for n in numbers]
        shape = list(x.shape)
        shape[dim] = max(rows)
        padded = x.new_zeros(shape)
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        parts = [torch.empty_like(padded) for _ in range(count)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, rows, strict=True)], dim)
