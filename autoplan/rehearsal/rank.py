"""Run one rank of a program in this process: fake tensors, a fake process group of the whole world, no weights.

The code is the runtime's own (ParallelModel, fully_shard, torch's pipeline schedules). What a rehearsal replaces:

- values: tensors are fake (FakeTensorMode), so every number that the host would read is given: the counts of the loss,
  and rows per expert, which are equal (balanced routing);
- the other ranks: torch's "fake" backend, whose collectives give results of the right shape at once;
- the number of micro-batches: the fewest that the schedule takes at the same degrees and with as many in flight on this
  rank as in the whole step. Every further one repeats the same actions.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule, fully_shard

from autoplan.errors import RehearsalError
from autoplan.plans.folder import ProgramFolder
from autoplan.rehearsal.expected import Place
from autoplan.rehearsal.watch import Watch
from autoplan.runtime.alone import LoneRank
from autoplan.runtime.batch import Counts
from autoplan.runtime.convert import CollectiveRecord, record_collectives, recorded_name
from autoplan.runtime.host_copies import balanced_rows
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from autoplan.runtime.private import default_group
from autoplan.runtime.spec import ProgramSpec, evaluate_terms
from autoplan.schedules.schedule import actions, held_at_backwards, obstacle


@dataclass(frozen=True)
class Observed:
    """The observations of a rank.

    Attributes:
        num_micro_batches: those that were run.
        state_bytes: live bytes after the start (parameters), added by the step (gradients), and moments of AdamW.
        peak_bytes: the most live bytes in forward and backward, with the moments that later steps have.
        flops: by (what, phase), of the step.
        collectives: of forward, backward and the sums at the end of the step.
        seconds: wall clock of the whole rehearsal of this rank.
    """

    rank: int
    place: Place
    num_micro_batches: int
    state_bytes: Mapping[str, int]
    peak_bytes: int
    flops: Mapping[tuple[str, str], float]
    collectives: tuple[CollectiveRecord, ...]
    seconds: float


class _Mesh(AxisMesh):
    """A mesh whose numbers of ranks are real although everything around them is fake."""

    def submesh(self, *axes: str, connected: bool = False) -> Any:
        with unset_fake_temporarily():
            return super().submesh(*axes, connected=connected)

    def group_of_some(self, groups: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        with unset_fake_temporarily():
            return super().group_of_some(groups, name)


class _Declared:
    """The outcome of a pipeline's vote on how shapes become known: they are declared."""

    def item(self) -> int:
        return 1


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose storages are freed. Torch caches what it knows of an operation under its arguments: the cache
    of `set_`, which brings offloaded activations back, would keep every storage that it was given.

    The product of all experts takes every dtype that the CPU's kernel takes; torch's own fake one takes bfloat16 alone.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket is torch.ops.aten._grouped_mm and args[0].dtype != torch.bfloat16:
            left, right = args[:2]  # [rows, k] by [e, k, n], or [k, rows] by [rows, n]
            apart = () if right.dim() == 3 else ((kwargs or {}).get("offs", args[2] if len(args) > 2 else None).shape)
            with self:
                return left.new_empty((*apart, left.shape[0], right.shape[-1]))
        self.cache_enabled: bool = func._overloadpacket is not torch.ops.aten.set_
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Run as one rank of `world`, of which the others do not exist. RehearsalError if there is a process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RehearsalError("a rehearsal makes its own process group; run it outside of a torchrun job")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():  # a rank that failed has closed its groups
            dist.destroy_process_group()


def rehearsed_micro_batches(folder: ProgramFolder, coordinate: int) -> int:
    """Return the fewest micro-batches with the same schedule and as many in flight on a rank of the pipeline."""
    c = folder.plan.config
    whole = c.num_micro_batches
    if c.pp == 1:
        return min(2, whole)

    def held(count: int) -> tuple[int, int]:
        return held_at_backwards(actions(c.schedule, c.pp, count, c.virtual_stages)[coordinate])

    legal = (n for n in range(c.pp, whole) if obstacle(c.schedule, c.pp, n, c.virtual_stages) is None)
    return next((n for n in legal if held(n) == held(whole)), whole)


def run_rank(
    folder: ProgramFolder,
    rank: int,
    seq_len: int,
    target_len: int | None,
    told: Callable[[str], None] = lambda what: None,
) -> Observed:
    """Run one training step of a rank and its first update by AdamW.

    Args:
        seq_len, target_len: tokens per sequence; target_len None: as seq_len.
        told: called with what is done next, in words.

    Raises:
        RehearsalError: the program failed, as it would on this rank.
    """
    spec, start = folder.program.spec, time.perf_counter()
    world = math.prod(size for _, size in spec.axes)
    if not 0 <= rank < world:
        raise RehearsalError(f"rank {rank} does not exist; this program has the ranks 0 to {world - 1}")
    with fake_world(rank, world), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on fake tensors
        mesh = _Mesh(spec.axes, dict(spec.groups), device_type="cpu")
        try:
            return _observed(folder, mesh, rank, {"s": seq_len, "t": target_len or seq_len}, told, start)
        except RehearsalError:
            raise
        except Exception as error:
            reason = error.__cause__ or error
            raise RehearsalError(f"rank {rank} fails: {type(reason).__name__}: {reason}") from error


def _observed(
    folder: ProgramFolder,
    mesh: AxisMesh,
    rank: int,
    lengths: Mapping[str, int],
    told: Callable[[str], None],
    start: float,
) -> Observed:
    spec, config = folder.program.spec, folder.plan.config
    count = rehearsed_micro_batches(folder, mesh.coordinate("pp"))
    watch = Watch()
    told("making its stages")
    with FakeMode(allow_non_fake_inputs=True), watch, watch.resizes(), balanced_rows():
        whole, buffers = _whole_tensors(folder)
        watch.leave_out(whole)
        size = config.micro_batch_size * count
        model = ParallelModel(
            spec,
            folder.program.sources,
            whole,
            buffers,
            num_micro_batches=count,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            folder=folder.path if folder.path.is_dir() else None,
            mesh=mesh,
            alone=LoneRank(_counts(spec, mesh.size("dp"), size, lengths["s"]), _Declared()),
        )
        _keep_padding(model)
        del whole, buffers
        gc.collect()
        batch = _batch(spec, {"b": size, **lengths})
        problem = model._batches.problem([batch])
        if problem is not None:
            raise RehearsalError(f"the program does not take the batch of its plan: {problem}")
        told(f"forward and backward of {count} micro-batch{'es' if count > 1 else ''}")
        watch.start()
        stored = watch.live_bytes
        watch.flops.clear()
        with record_collectives(mesh, between_stages=True) as records:
            loss = model.step(batch)
        if loss.dim() != 0:
            raise RehearsalError(f"rank {rank}: the loss has shape {tuple(loss.shape)}")
        collectives, peak, flops = tuple(records), watch.peak_bytes, dict(watch.flops)
        del loss, batch
        gc.collect()
        trained = watch.live_bytes
        watch.start()
        if model.optimizer is None:
            raise RehearsalError(f"rank {rank} has no optimizer")
        told("the update")
        model.optimizer.step()
        moments = _bytes_of(model.optimizer)
        peak = max(peak + moments, watch.peak_bytes)
        states = {"parameters": stored, "gradients": trained - stored, "optimizer": moments}
        return Observed(
            rank=rank,
            place=_place(model, mesh),
            num_micro_batches=count,
            state_bytes=states,
            peak_bytes=peak,
            flops=flops,
            collectives=collectives,
            seconds=time.perf_counter() - start,
        )


def _keep_padding(model: ParallelModel) -> None:
    """Do not let the first forward pad shards again.

    `fully_shard` compares addresses there to see that a shard is still the one that it has padded, and fake tensors
    have none: an uneven shard would be held twice.
    """
    for module in (m for stage in model.stages.values() for m in stage.modules() if isinstance(m, FSDPModule)):
        for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
            group._reset_sharded_params = True


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    held = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    return sum(local_of(x).numel() * x.element_size() for x in held)


def _place(model: ParallelModel, mesh: AxisMesh) -> Place:
    replicas, names = model._replicas, (*mesh.axes, *mesh.groups)
    hybrid = "rdp" in mesh.axes
    return Place(
        coordinates={name: mesh.coordinate(name) for name in mesh.axes},
        sizes={name: mesh.size(name) for name in names},
        ranks={name: mesh.coordinate(name) for name in names},
        canonical={name: mesh.canonical(name) for name in names},
        replicas={
            "all": replicas.all,
            "edp": "edp" if mesh.has("edp") else replicas.all,
            "shards": replicas._shards,
            "expert_shards": replicas._expert_shards if mesh.has("edp") else replicas._shards,
            "copies": "rdp" if hybrid else "",
            "expert_copies": "redp" if hybrid and mesh.has("redp") else "",
        },
        world=recorded_name(mesh, default_group()),
        plain=replicas.plain,
        gathered={
            name: str(getattr(block, "gathered", "again"))
            for stage in model.stages.values()
            for name, block in stage.get_submodule("blocks").named_children()
        },
    )


def _whole_tensors(folder: ProgramFolder) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return parameters and buffers of the model by name, without values."""
    spec = folder.program.spec
    parameters = {
        p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for stage in spec.stages for p in stage.params
    }
    buffers = {}
    for name, text in folder.fingerprint["buffers"].items():
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", text).groups()  # type: ignore[union-attr]
        buffers[name] = torch.empty([int(n) for n in shape.split(",") if n.strip()], dtype=getattr(torch, dtype))
    return parameters, buffers


def _batch(spec: ProgramSpec, env: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return one rank's part of a batch, without values."""
    dtypes = dict(spec.input_dtypes)
    return {
        name: torch.empty([evaluate_terms(size, env) for size in shape], dtype=getattr(torch, dtypes[name]))
        for name, shape in spec.input_shapes
    }


def _counts(spec: ProgramSpec, data_world: int, size: int, seq_len: int) -> Counts:
    """Return the numbers on which all ranks agree before a step, which fake tensors cannot: every label is valid.

    Args:
        size: samples of a data-parallel rank, of `data_world`. seq_len: tokens of each.
    """
    samples = (size,) * data_world
    return Counts(tuple(float(sum(samples) * seq_len) for _ in spec.loss_counts), samples)
