"""Run a program on simulated devices: every rank in this process, with real numerics (torch's LocalTensorMode).

The pipeline stages run one after the other. What the runtime adds around the emitted program does not run: schedules of
pipelines, the sharding of ZeRO, buckets of gradients. Context parallelism needs real processes: its ranks take their
parts of a sequence by numbers of Python, which LocalTensorMode does not have by rank.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
from torch.overrides import TorchFunctionMode

from autoplan.codegen.program import Program
from autoplan.runtime.convert import CollectiveRecord, record_collectives
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.params import buffer_owner, declare, fill, fill_buffers
from autoplan.runtime.program import load_module
from autoplan.runtime.spec import ParamSpec, ProgramSpec
from autoplan.runtime.values import dtypes_of
from autoplan.units import LossUnit

_SUMMED = ("dp",)  # axes over which the runtime sums every gradient that they do not shard


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Open a process group of `world` ranks that sends nothing; this process is rank 0."""
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


class _NumbersOnRanks(TorchFunctionMode):
    """A mode that makes `torch.tensor` give a tensor of every rank, as LocalTensorMode makes other factories do.

    A plain tensor would be cut as rank 0 cuts it, on every rank.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`."""
        out = func(*args, **(kwargs or {}))
        return rank_map(lambda _: out.clone()) if func is torch.tensor else out


@dataclass(frozen=True)
class SimulatedStep:
    """One step of training.

    Attributes:
        params, buffers: full tensors by their names in the model.
        batch: the global batch; data-parallel ranks take its parts in order, each `num_micro_batches` of them.
        denominator: of the loss; None: what the program counts.
        dtype: of floating parameters and buffers.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    batch: Mapping[str, torch.Tensor]
    num_micro_batches: int = 1
    denominator: float | None = None
    dtype: torch.dtype = torch.float64


def run_simulated(
    program: Program,
    step: SimulatedStep,
    sources: Mapping[str, str] | None = None,
    records: list[CollectiveRecord] | None = None,
    updated: dict[str, torch.Tensor] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the full gradients of one step.

    Args:
        sources: texts of the stages to run instead of the program's.
        records: receives the collectives that really ran.
        updated: receives the buffers that the step updates, by their names in the model.
    """
    spec = program.spec
    if any(size > 1 for name, size in spec.axes if name.startswith("cp")):
        raise ValueError("context parallelism cannot be simulated; run the program on real processes")
    axes = [(name, 1 if name == "pp" else size) for name, size in spec.axes]
    world = _product(size for _, size in axes)
    with fake_group(world), tempfile.TemporaryDirectory() as folder:
        mesh = AxisMesh(axes, dict(spec.groups), device_type="cpu")
        stages = [load_stage(Path(folder), s.source, (sources or program.sources)[s.source]) for s in spec.stages]
        per_rank = _materialised(spec, stages, step, mesh)
        total = 0.0
        with LocalTensorMode(world), _NumbersOnRanks(), use_mesh(mesh), record_collectives(mesh) as seen:
            for s, stage in zip(spec.stages, stages, strict=True):
                for p in s.params:
                    block, name = stage.get_submodule(f"blocks.{p.block}"), f"blocks.{p.block}.{p.attr}"
                    value = rank_map(lambda r, n=name, i=s.index: per_rank[r][i][n].clone())
                    setattr(block, p.attr, torch.nn.Parameter(value, requires_grad=p.trainable))
                for b in s.buffers:  # a plain tensor would be cut as rank 0 cuts it, on every rank
                    owner = buffer_owner(stage, b)
                    whole = getattr(owner, b.attr)
                    setattr(owner, b.attr, rank_map(lambda _, whole=whole: whole.clone()))
            given = step.denominator
            counted = _counted(spec, stages[-1], step.batch) if given is None else [given]
            denominators = {name: x for (name, _), x in zip(spec.loss_counts, counted, strict=True)}
            for index in range(step.num_micro_batches):
                total += _micro_batch(spec, stages, step, mesh, denominators, index)
        if records is not None:
            records += seen
        if updated is not None:
            updated |= _updated(spec, stages)
        return total, _gradients(spec, stages, mesh)


def _product(sizes: Iterator[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def load_stage(folder: Path, name: str, text: str) -> torch.nn.Module:
    """Write the text of a stage to a folder and return its module."""
    path = folder / name
    path.write_text(text)
    module: torch.nn.Module = load_module(path, f"parity_{name.removesuffix('.py')}", text).Stage()
    return module


def _materialised(
    spec: ProgramSpec, stages: Sequence[torch.nn.Module], step: SimulatedStep, mesh: AxisMesh
) -> list[dict[int, dict[str, torch.Tensor]]]:
    """Return the parameters and buffers of every stage on every rank, by their names in the stage."""
    per_rank: list[dict[int, dict[str, torch.Tensor]]] = []
    given = dtypes_of(step.params)
    kinds = {n: step.dtype if step.dtype is not None and d.is_floating_point else d for n, d in given.items()}
    for rank in range(mesh.world_size):

        def coordinate(axis: str, rank: int = rank) -> int:
            return mesh.coordinate(axis, rank)

        held = {}
        for s, stage in zip(spec.stages, stages, strict=True):
            cpu = torch.device("cpu")
            declare(stage, s, mesh.size, cpu, lambda p: kinds[p.name])
            fill(stage, s, step.params, mesh.size, coordinate)
            fill_buffers(stage, s, step.buffers, cpu, step.dtype)
            tensors = itertools.chain(stage.named_parameters(), stage.named_buffers())
            held[s.index] = {n: t.detach().clone() for n, t in tensors}
        per_rank.append(held)
    return per_rank


def _counted(spec: ProgramSpec, stage: Any, batch: Mapping[str, torch.Tensor]) -> list[float]:
    if spec.loss_count is LossUnit.NONE:
        return [1.0]
    drawn = {"rng": torch.tensor([0, 0, 0])} if spec.draws_counts else {}
    found: torch.Tensor = stage.count(**{n: batch[n] for n in spec.inputs}, **drawn)
    return [float(x) for x in found.reshape(-1)]


def _micro_batch(
    spec: ProgramSpec,
    stages: Sequence[torch.nn.Module],
    step: SimulatedStep,
    mesh: AxisMesh,
    denominators: Mapping[str, float],
    index: int,
) -> float:
    """Run forward and backward of one micro-batch of every data-parallel rank; return their losses' sum."""
    inputs, first = _local_inputs(step, index, mesh)
    rng = rank_map(lambda r, f=first: torch.tensor([0, 0, f[r]]))
    if spec.loss_share:
        inputs["loss_share"] = rank_map(lambda _: torch.tensor(1.0 / step.num_micro_batches, dtype=step.dtype))
    inputs |= {name: torch.tensor(number, dtype=step.dtype) for name, number in denominators.items()}
    carried: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        out = stage(*carried, **inputs, rng=rng)
        carried = out if isinstance(out, tuple) else (out,)
    loss: Any = carried[0]
    loss.backward()
    locals_ = loss.detach()._local_tensors
    others = [a for a in mesh.axes if a not in _SUMMED]
    return sum(float(locals_[r]) for r in locals_ if all(mesh.coordinate(a, r) == 0 for a in others))


def _local_inputs(step: SimulatedStep, index: int, mesh: AxisMesh) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return micro-batch `index` of every rank as LocalTensors, and the global number of its first sample per rank."""
    size = next(iter(step.batch.values())).shape[0] // mesh.size("dp") // step.num_micro_batches
    first = [(mesh.coordinate("dp", r) * step.num_micro_batches + index) * size for r in range(mesh.world_size)]
    parts = {k: rank_map(lambda r, v=v: v[first[r] : first[r] + size].clone()) for k, v in step.batch.items()}
    return parts, first


def _updated(spec: ProgramSpec, stages: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers that a step has updated. ValueError if they are not the same on all ranks."""
    found = {}
    for s, stage in zip(spec.stages, stages, strict=True):
        for b in s.buffers:
            if b.updated:
                parts = list(getattr(buffer_owner(stage, b), b.attr)._local_tensors.values())
                if any(not torch.equal(part, parts[0]) for part in parts):
                    raise ValueError(f"the buffer {b.name} differs between ranks")
                found[b.name] = parts[0].detach()
    return found


def _gradients(spec: ProgramSpec, stages: Sequence[torch.nn.Module], mesh: AxisMesh) -> dict[str, torch.Tensor]:
    """Return the full gradient of every trainable parameter that has one."""
    gradients: dict[str, torch.Tensor] = {}
    for s, stage in zip(spec.stages, stages, strict=True):
        for p in s.params:
            grad = stage.get_submodule(f"blocks.{p.block}").get_parameter(p.attr).grad
            if not p.trainable or grad is None:
                continue
            full = _assembled(grad, p, mesh)
            gradients[p.name] = gradients[p.name] + full if p.name in gradients else full
    return gradients


def _assembled(grad: torch.Tensor, p: ParamSpec, mesh: AxisMesh) -> torch.Tensor:
    """Return the full gradient from every rank's local one.

    By sub-axis they are concatenated (sharded), summed (replicas, deferred), or one of them (invariant).

    Raises:
        ValueError: an invariant gradient differs between ranks.
    """
    if not isinstance(grad, LocalTensor):
        raise ValueError(f"the gradient of {p.name} is not one of simulated ranks")
    shape = [f for dim in p.factor_shape for f in dim]
    where = {at: i for i, at in enumerate((d, k) for d, dim in enumerate(p.factor_shape) for k in range(len(dim)))}
    for s in p.shards:
        shape[where[s.dim, s.position]] //= mesh.size(s.axis)
    parts = {r: t.reshape(shape) for r, t in grad._local_tensors.items()}
    for axis in reversed([a for a in mesh.axes if a != "pp"]):
        groups: dict[tuple[int, ...], list[int]] = {}
        for r in sorted(parts, key=lambda r, axis=axis: mesh.coordinate(axis, r)):
            groups.setdefault(tuple(mesh.coordinate(a, r) for a in mesh.axes if a != axis), []).append(r)
        at = [where[s.dim, s.position] for s in p.shards if s.axis == axis]
        summed = axis in _SUMMED or axis in p.reduce_axes
        name = f"{p.name} on {axis}"
        parts = {ranks[0]: _joined([parts[r] for r in ranks], at, summed, name) for ranks in groups.values()}
    (full,) = parts.values()
    return full.reshape(p.shape)


def _joined(tensors: Sequence[torch.Tensor], at: Sequence[int], summed: bool, name: str) -> torch.Tensor:
    """Return the tensors of the ranks of one axis as one: concatenated along dim `at`, summed, or the same of all."""
    if at:
        return torch.cat(list(tensors), at[0])
    if summed:
        return torch.stack(list(tensors)).sum(0)
    if any(not torch.equal(t, tensors[0]) for t in tensors[1:]):
        raise ValueError(f"the gradient of {name} is invariant, but differs between ranks")
    return tensors[0]
