"""Measure the fixed costs of a step beside its operations and collectives, on real programs of next to no work.

A program of `L` layers, each `x * weight` over a few elements, runs under ParallelModel as an emitted program does.
Slopes over the number of micro-batches, layers or tensors give the cost of one more; the rest is fixed. Their names are
in `autoplan.cost_models.profile.OVERHEADS`.

On one CPU thread these are CPU times of the thread, which do not contain its waiting for other ranks. The dispatch of
the collectives is subtracted, since the measured links contain it, too.

A device with a queue has them twice (`measure_overheads(host=True)`): its own seconds, by events with the host ahead,
less the measured links; and the host's, for queueing the same work including its collectives. A step waits for the
device once, when it has counted its labels. The time before the first forward (`step_s`, `micro_batch_s`) is the
host's. Nothing hides it, so it is among the device's figures, which are added up. The loop over micro-batches and the
actions of a pipeline start no considerable work on the device and are the host's alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from spmd_types import I

from autoplan.cost_models.profile import Profile
from autoplan.profiler.job import Job
from autoplan.profiler.links import measure_stragglers
from autoplan.profiler.ops import Clock, cache_bytes, measure_op
from autoplan.profiler.small_programs import DECODER_INPUT, HIDDEN_SIZE, decoder_program, decoder_tasks, tiny_program
from autoplan.runtime.convert import all_gather, all_reduce, record_collectives, reduce_scatter
from autoplan.runtime.exchange import ReduceScatterByExchange
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.optim import on_local_shards
from autoplan.runtime.private import default_group
from autoplan.runtime.spec import ProgramSpec
from autoplan.runtime.split_backward import backward_input, backward_weight

_REPEATS = 15
_ZERO_REPEATS = 9
_LARGE = 1 << 18  # elements of a large parameter
_CALLS = 20  # calls of a collective in a row
_SPLIT_LAYERS = 4  # layers of a stage: with more of them the walks take longer per layer


_T = TypeVar("_T")


class _Runs:
    """A runner of tiny programs on the ranks of a job. `host`: it measures the seconds of the host, not the device."""

    def __init__(self, job: Job, links: Profile, host: bool) -> None:
        self.job, self.links, self.host = job, links, host
        self._dispatch: dict[str, float] = {}
        self._meshes: list[AxisMesh] = []
        self._late = False

    def close(self) -> None:
        """Give the communicators of all programs back. A collective."""
        self.job.barrier()
        for mesh in self._meshes:
            mesh.close()

    def model(
        self, num_layers: int, dp: int, pp: int, zero_stage: int, size: int = HIDDEN_SIZE, num_params: int = 1
    ) -> ParallelModel:
        """Return a model whose layers have next to no work."""
        return self.run(tiny_program(num_layers, (("pp", pp), ("dp", dp)), zero_stage, size, num_params))

    def run(self, program: tuple[ProgramSpec, dict[str, str]]) -> ParallelModel:
        """Return a program, ready to run."""
        spec, sources = program
        parameters = {p.name: torch.ones(p.shape) for stage in spec.stages for p in stage.params}
        pm = ParallelModel(spec, sources, parameters, {}, device=self.job.device)
        self._meshes.append(pm.mesh)
        return pm

    def median(self, run: Callable[[], object]) -> float:
        """Return the median over repeats of the slowest rank's seconds, after a warm-up."""
        for _ in range(3):
            run()
        samples = self.samples(lambda: self.timed(run)[0], _REPEATS)
        return statistics.median(self.job.slowest(samples))

    def timed(self, work: Callable[[], _T], together: bool = True) -> tuple[float, _T]:
        """Run `work` once on this rank; return its seconds and its result. `together`: the ranks start it together."""
        timer = self.job.timer
        if together or timer is not None:
            self.job.barrier()
        if timer is None:
            start = self.now()
            result = work()
            return self.now() - start, result
        seconds, result = timer.issue(work) if self.host else timer.measure(work, None)
        self._late |= timer.late
        return seconds, result

    def samples(self, sample: Callable[[], _T], count: int) -> list[_T]:
        """Return `count` samples that use `timed`. If the host of some rank was late, all ranks repeat the sample."""
        found: list[_T] = []
        while len(found) < count:
            self._late = False
            taken = sample()
            if not self.job.was_late(self._late):
                found.append(taken)
        return found

    @property
    def now(self) -> Callable[[], float]:
        """The clock."""
        alone = self.job.device.type == "cpu" and torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def collectives_s(self, pm: ParallelModel, run: Callable[[], object]) -> float:
        """Return the seconds that the collectives of `run` take."""
        with record_collectives(pm.mesh) as records:
            run()
        return sum(self.collective_s(r.kind) for r in records)

    def collective_s(self, kind: str) -> float:
        """Return the seconds of one small collective over all ranks, as far as its caller's clock sees them."""
        if self.host:  # the start of a collective is what is measured
            return 0.0
        if kind not in self._dispatch:
            self._dispatch[kind] = self._measured(kind)
        return self._dispatch[kind]

    def _measured(self, kind: str) -> float:
        if self.job.queued:
            found = self.links.collective_s(kind, 64, self.job.world, 1)
            return 0.0 if found is None else found.mid
        whole, part = torch.zeros(16 * self.job.world), torch.zeros(16)
        rank, world = self.job.rank, self.job.world
        exchange, everyone = ReduceScatterByExchange(), default_group()
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather(list(whole.chunk(world)), part),
            "reduce_scatter": lambda: exchange(part, whole, everyone, dist.ReduceOp.SUM),
            "send_recv": lambda: _exchange(whole, rank ^ 1) if rank ^ 1 < world else None,
        }
        return self.median(lambda: [calls[kind]() for _ in range(20)]) / 20


def _exchange(tensor: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, tensor, peer)]):
        work.wait()


def measure_overheads(job: Job, links: Profile, host: bool = False) -> dict[str, float]:
    """Return seconds by name, as far as the time allows; the same on every rank. A collective over all ranks.

    `host`: measure the host's seconds (`Profile.host_overheads`), for a device with a queue.
    """
    runs = _Runs(job, links, host)
    out: dict[str, float] = {}
    for measure in (_step, _operations, _optimizer, _zero, _pipeline, _split, _clip, _stragglers, _collectives):
        if not job.goes_on():
            break
        out.update(measure(runs))
    runs.close()
    names = sorted(out)
    values = job.slowest([out[n] for n in names]) if names else []
    return {n: max(0.0, v) for n, v in zip(names, values, strict=True)}


def _batch(job: Job, num_micro_batches: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(num_micro_batches, HIDDEN_SIZE, device=job.device)}


def _step_of(runs: _Runs, pm: ParallelModel, num_micro_batches: int) -> float:
    """Return the seconds of a step without its collectives."""
    pm.num_micro_batches = num_micro_batches
    batch = _batch(runs.job, num_micro_batches)
    return runs.median(lambda: pm.step(batch)) - runs.collectives_s(pm, lambda: pm.step(batch))


def _step(runs: _Runs) -> dict[str, float]:
    pm = runs.model(1, runs.job.world, 1, 0)
    if runs.job.queued:
        one, nine = (_queued_step(runs.job, pm, m) for m in (1, 9))
        before, whole = ((b - a) / 8 for a, b in zip(one, nine, strict=True))
        if runs.host:
            return {"micro_batch_s": whole - before - _passes_of_one_layer(runs)}
        return {"step_s": one[1] - whole + before, "micro_batch_s": before}
    alone, many = _step_of(runs, pm, 1), _step_of(runs, pm, 9)
    more = max(0.0, (many - alone) / 8)
    return {"step_s": alone - more, "micro_batch_s": more}


def _queued_step(job: Job, pm: ParallelModel, num_micro_batches: int) -> tuple[float, float]:
    """Return the host's seconds from the start of a step to its first forward, and to the return of `step`."""
    timer = job.timer
    if timer is None:
        raise ValueError("the time of the host is measured on devices with a queue only")
    pm.num_micro_batches = num_micro_batches
    batch = _batch(job, num_micro_batches)
    begun: list[float] = []
    hook = pm.stage.register_forward_pre_hook(lambda *_: begun.append(timer.now()))
    before, whole = [], []
    try:
        for _ in range(_REPEATS + 3):
            job.barrier()
            begun.clear()
            start = timer.now()
            pm.step(batch)
            whole.append(timer.now() - start)
            before.append(begun[0] - start)
            job.synchronize()
    finally:
        hook.remove()
    first, last = (statistics.median(job.slowest(taken[3:])) for taken in (before, whole))
    return first, last


def _passes_of_one_layer(runs: _Runs) -> float:
    """Return the seconds of forward and backward of a tiny program's layer."""
    pm = runs.model(1, runs.job.world, 1, 0)
    found = runs.samples(lambda: sum(_both_passes(runs, pm, (1, HIDDEN_SIZE)).values()), _REPEATS + 3)
    return statistics.median(runs.job.slowest(found[3:]))


def _collectives(runs: _Runs) -> dict[str, float]:
    """Return the host's seconds to start a collective inside a block: the median over three kinds."""
    if runs.job.world == 1 or not runs.host:
        return {}
    pm = runs.model(1, runs.job.world, 1, 0)
    x = torch.ones(runs.job.world * HIDDEN_SIZE, device=runs.job.device)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: all_reduce(x, "dp", dst=I),
        lambda: all_gather(x, "dp", dim=0, dst=I),
        lambda: reduce_scatter(x, "dp", dim=0),
    )
    with use_mesh(pm.mesh), torch.no_grad():
        found = [runs.median(lambda: [call() for _ in range(_CALLS)]) / _CALLS for call in calls]  # noqa: B023
    return {"comm_s": statistics.median(found)}


def _stragglers(runs: _Runs) -> dict[str, float]:
    if runs.job.world == 1 or runs.job.queued:
        return {}
    return {"straggler_sqrt_s": measure_stragglers(runs.job)}


def _clip(runs: _Runs) -> dict[str, float]:
    times = {}
    for layers in (1, 17):
        pm = runs.model(layers, runs.job.world, 1, 0)
        pm.step(_batch(runs.job, 1))
        clip = partial(pm.clip_grad_norm_, 1.0)
        times[layers] = runs.median(clip) - runs.collectives_s(pm, clip)
    more = max(0.0, (times[17] - times[1]) / 16)
    return {"clip_s": times[1] - more, "clip_tensor_s": more}


def _operations(runs: _Runs) -> dict[str, float]:
    """Return the cost that an operation has in a program beyond its time in a chain of its own: colder code and data.

    It is the slope between programs of a few and of many small decoder layers, less the sum of a layer's operations.
    """
    if runs.job.queued and not runs.host:  # kernels take the same time whoever queues them
        return {}
    clock, cache = Clock(runs.job.device, runs.job.timer), cache_bytes(runs.job.device)
    alone = {"forward": 0.0, "backward": 0.0}
    counts = {"forward": 0, "backward": 0}
    for task, count in decoder_tasks():
        record = measure_op(task, clock, cache, limit_s=0.05)
        of_device = {"forward": record.forward_s, "backward": record.backward_s}
        for phase in alone:
            timing = record.host_s(phase) if runs.host else of_device[phase]
            if timing is not None:
                alone[phase] += count * timing.median
                counts[phase] += count
    times: dict[int, dict[str, float]] = {}
    few, many = 2, 8
    for layers in (few, many):
        pm = runs.run(decoder_program(layers, runs.job.world))
        taken = runs.samples(lambda: _both_passes(runs, pm, DECODER_INPUT), _REPEATS + 3)[3:]  # noqa: B023
        times[layers] = {phase: statistics.median(sample[phase] for sample in taken) for phase in alone}
    out = {}
    for phase in ("forward", "backward"):
        layer = (times[many][phase] - times[few][phase]) / (many - few)
        out[f"op_{phase}_s"] = max(0.0, layer - alone[phase]) / counts[phase]
    return out


def _inputs(runs: _Runs, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the inputs of a stage."""
    device = runs.job.device
    return {
        "x": torch.ones(shape, device=device),
        "loss_denominator": torch.ones((), device=device),
        "rng": torch.zeros(3, dtype=torch.int64, device=device),
    }


def _both_passes(runs: _Runs, pm: ParallelModel, shape: tuple[int, ...]) -> dict[str, float]:
    inputs = _inputs(runs, shape)
    for p in pm.stage.parameters():
        p.grad = None
    with use_mesh(pm.mesh):
        forward, loss = runs.timed(lambda: pm.stage(**inputs))
        backward, _ = runs.timed(loss.backward, together=False)
        return {"forward": forward, "backward": backward}


def _optimizer(runs: _Runs) -> dict[str, float]:
    """Return the cost of the optimizer for plain tensors, and for the shards of fully_shard (their local parts)."""

    def slope(parameters: Callable[[int], list[torch.nn.Parameter]]) -> tuple[float, float]:
        times = {}
        for tensors in (1, 33):
            params = parameters(tensors)
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer = on_local_shards(lambda p: torch.optim.AdamW(p, lr=1e-4), params)
            optimizer.step()
            times[tensors] = runs.median(optimizer.step)
        more = max(0.0, (times[33] - times[1]) / 32)
        return times[1] - more, more

    def sharded(tensors: int) -> list[torch.nn.Parameter]:
        return list(runs.model(tensors, runs.job.world, 1, 1).stage.parameters())

    step, tensor = slope(
        lambda n: [torch.nn.Parameter(torch.ones(HIDDEN_SIZE, device=runs.job.device)) for _ in range(n)]
    )
    out = {"optimizer_step_s": step, "optimizer_tensor_s": tensor}
    if runs.job.world > 1:
        out["zero_optimizer_tensor_s"] = slope(sharded)[1]
    return out


_MANY_PARAMS = 9


def _zero(runs: _Runs) -> dict[str, float]:
    """Return the cost of fully_shard per block beside the collectives and the block itself.

    Under ZeRO 1 the first forward of a step gathers and the last backward reduces; a micro-batch in between does
    neither and shows the hooks alone. Blocks of one small parameter, of several and of a large one give the parts per
    parameter and per byte.
    """
    if runs.job.world == 1:
        return {}
    shapes = {"one": (HIDDEN_SIZE, 1), "many": (HIDDEN_SIZE, _MANY_PARAMS), "large": (_LARGE, 1)}
    plain = {name: _phases(runs, 0, *shape) for name, shape in shapes.items()}
    sharded = {name: _phases(runs, 1, *shape) for name, shape in shapes.items()}
    out: dict[str, float] = {}
    more_bytes = 4 * (_LARGE - HIDDEN_SIZE)
    for phase, what, synced, hooks in (
        ("forward", "gather", "first forward", "other forward"),
        ("backward", "reduce", "last backward", "other backward"),
    ):
        hook_s = max(0.0, sharded["one"][hooks] - plain["one"][hooks])
        one, many, large = (max(0.0, sharded[name][synced] - plain[name][synced] - hook_s) for name in shapes)
        tensor_s = max(0.0, many - one) / (_MANY_PARAMS - 1)
        byte_s = max(0.0, large - one) / more_bytes
        out[f"zero_block_{phase}_s"] = hook_s
        out[f"zero_{what}_tensor_s"] = tensor_s
        out[f"zero_{what}_byte_s"] = byte_s
        out[f"zero_{what}_s"] = max(0.0, one - tensor_s - 4 * HIDDEN_SIZE * byte_s)
    out["all_reduce_byte_s"] = max(0.0, plain["large"]["end"] - plain["one"]["end"]) / more_bytes
    return out


def _phases(runs: _Runs, zero: int, size: int, num_params: int) -> dict[str, float]:
    """Return the seconds of one more block per pass of a step of two micro-batches, without its collectives.

    The block has `num_params` parameters of `size` elements.
    """
    found: dict[int, dict[str, float]] = {}
    few, many = 2, 6
    for layers in (few, many):
        pm = runs.model(layers, runs.job.world, 1, zero, size, num_params)
        samples = runs.samples(lambda: _passes(runs, pm), _ZERO_REPEATS + 3)[3:]  # noqa: B023
        with record_collectives(pm.mesh) as records:
            _passes(runs, pm)
        spent: dict[str, float] = {}
        for r in records:  # the collectives of ZeRO 0 come after the backward
            name = "end" if not zero else "first forward" if r.phase == "forward" else "last backward"
            spent[name] = spent.get(name, 0.0) + runs.collective_s(r.kind)
        found[layers] = {
            name: statistics.median(runs.job.slowest([sample[name] for sample in samples])) - spent.get(name, 0.0)
            for name in samples[0]
        }
    return {name: (found[many][name] - found[few][name]) / (many - few) for name in found[few]}


def _passes(runs: _Runs, pm: ParallelModel) -> dict[str, float]:
    """Return the seconds of every pass of two micro-batches, by name."""
    out = {}
    (sync,) = pm._syncs.values()
    for micro_batch, (forward, backward) in enumerate(
        (("first forward", "other backward"), ("other forward", "last backward"))
    ):
        inputs = _inputs(runs, (1, HIDDEN_SIZE))

        def back(loss: torch.Tensor, micro_batch: int = micro_batch) -> None:
            sync.before_backward(micro_batch, is_last=micro_batch == 1)
            loss.backward()  # type: ignore[no-untyped-call]

        with use_mesh(pm.mesh):
            out[forward], loss = runs.timed(lambda: pm.stage(**inputs))  # noqa: B023
            out[backward], _ = runs.timed(lambda: back(loss), together=False)  # noqa: B023
    with use_mesh(pm.mesh):
        out["end"], _ = runs.timed(sync.finish_step)
    for p in pm.stage.parameters():
        p.grad = None
    return out


def _split(runs: _Runs) -> dict[str, float]:
    """Compare backwards of small decoder layers in two parts and in one, in turn."""
    pm = runs.run(decoder_program(_SPLIT_LAYERS, runs.job.world))

    def whole(loss: torch.Tensor, _: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def in_parts(loss: torch.Tensor, x: torch.Tensor) -> None:
        _, deferred = backward_input([loss], None, [x], pm.stage.parameters())
        backward_weight(deferred)

    def both() -> tuple[float, float]:
        seconds = []
        for back in (whole, in_parts):
            inputs = _inputs(runs, DECODER_INPUT)
            inputs["x"].requires_grad_()
            with use_mesh(pm.mesh):
                loss = pm.stage(**inputs)
                seconds.append(runs.timed(lambda: back(loss, inputs["x"]), together=False)[0])  # noqa: B023
            for p in pm.stage.parameters():
                p.grad = None
        return seconds[0], seconds[1]

    samples = runs.samples(both, _REPEATS + 3)[3:]
    full, parts = (statistics.median(found) for found in zip(*samples, strict=True))
    return {"split_layer_s": (parts - full) / _SPLIT_LAYERS}


def _pipeline(runs: _Runs) -> dict[str, float]:
    """Measure two stages: one more micro-batch adds a forward and a backward on each, and their sends in turn."""
    world = runs.job.world
    if world % 2 or (runs.job.queued and not runs.host):
        return {}
    pm = runs.model(2, world // 2, 2, 0)
    if runs.host:
        few_s, many_s = (_queued_step(runs.job, pm, m) for m in (4, 12))
        before, whole = ((b - a) / 8 for a, b in zip(few_s, many_s, strict=True))
        return {"pipeline_action_s": max(0.0, (whole - before - _passes_of_one_layer(runs)) / 2)}
    few, many = _step_of(runs, pm, 4), _step_of(runs, pm, 12)
    more = (many - few) / 8
    # each micro-batch has a send and a receive, in one direction forward and in the other backward
    return {"pipeline_action_s": max(0.0, (more - runs.collective_s("send_recv")) / 2)}
