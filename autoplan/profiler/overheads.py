"""Fixed costs of a step beside its operations and collectives, from real programs of next to no work.

A program of `L` layers, each `x * weight` over a few elements, runs under ParallelModel as an emitted one does. Slopes
over the number of micro-batches, layers or tensors give the cost of one more; the rest is fixed. Names:
`autoplan.cost_models.profile.OVERHEADS`.

On one CPU thread these are CPU times of the thread, which do not contain its waiting for other ranks; dispatching the
collectives, which the measured links contain too, is taken off. On CUDA they are wall times less the measured links.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from autoplan.cost_models.profile import Profile
from autoplan.profiler.job import Job
from autoplan.runtime.convert import record_collectives
from autoplan.runtime.mesh import use_mesh
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import CarriedSpec, ParamSpec, ProgramSpec, StageSpec

_WIDTH = 16
_REPEATS = 15
_HEAD = '''"""A pipeline stage of next to no work."""

from autoplan.runtime.program import *  # noqa: F403


class Layer(Block):
    def __init__(self, *, recompute: bool = False, site: int = 0) -> None:
        super().__init__(recompute=recompute, site=site)
        self.weight = parameter((%(width)d,), torch.float32, True)

    def compute(self, x: Tensor) -> Tensor:
        return x * self.weight


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer{i}": Layer() for i in range(%(first)d, %(last)d)})

    def forward(self, %(carried)s*, x: Tensor, loss_denominator: Tensor, rng: Tensor) -> Tensor:
        h = %(start)s
        for block in self.blocks.values():
            h = block(h)
        return %(result)s

    def count(self, *, x: Tensor) -> Tensor:
        return (x[:, 0] != 0).sum()
'''


def _program(num_layers: int, axes: tuple[tuple[str, int], ...], zero_stage: int) -> tuple[ProgramSpec, dict[str, str]]:
    """Layers divided evenly over the stages."""
    pp = dict(axes)["pp"]
    each = num_layers // pp
    shape = (((1, 1, ("b",)),), ((_WIDTH, 1, ()),))
    stages, sources = [], {}
    for index in range(pp):
        first, last = index * each, (index + 1) * each
        params = tuple(
            ParamSpec(f"layer{i}", "weight", f"layer{i}.weight", (_WIDTH,), ((_WIDTH,),), "float32", True, (), (), ())
            for i in range(first, last)
        )
        values = {name: CarriedSpec(name, shape, "float32", ()) for name in ("before", "after")}
        name = f"stage{index}.py"
        stages.append(
            StageSpec(
                index,
                name,
                tuple(p.block for p in params),
                params,
                (),
                (values["before"],) if index else (),
                (values["after"],) if index < pp - 1 else (),
            )
        )
        sources[name] = _HEAD % {
            "width": _WIDTH,
            "first": first,
            "last": last,
            "carried": "before: Tensor, " if index else "",
            "start": "before" if index else "x",
            "result": "h" if index < pp - 1 else "h.sum() / loss_denominator",
        }
    spec = ProgramSpec(
        "next to nothing", axes, (), zero_stage, "1F1B", ("x",), (("b", "x", 0),), "tokens", tuple(stages), (), (), ()
    )
    return spec, sources


class _Runs:
    """Tiny programs on the ranks of a job."""

    def __init__(self, job: Job, links: Profile) -> None:
        self.job, self.links = job, links
        self._dispatch: dict[str, float] = {}

    def model(self, num_layers: int, dp: int, pp: int, zero_stage: int) -> ParallelModel:
        spec, sources = _program(num_layers, (("pp", pp), ("dp", dp)), zero_stage)
        parameters = {p.name: torch.ones(p.shape) for stage in spec.stages for p in stage.params}
        return ParallelModel(spec, sources, parameters, {}, device=self.job.device)

    def median(self, run: Callable[[], object]) -> float:
        """Median over repeats of the slowest rank's seconds, after a warm-up."""
        for _ in range(3):
            run()
        samples = []
        for _ in range(_REPEATS):
            self.job.barrier()
            samples.append(self.seconds(run))
        return statistics.median(self.job.slowest(samples))

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one run, on this rank."""
        start = self.now()
        run()
        self.job.synchronize()
        return self.now() - start

    @property
    def now(self) -> Callable[[], float]:
        """The clock."""
        alone = self.job.device.type == "cpu" and torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def collectives_s(self, pm: ParallelModel, run: Callable[[], object], phase: str | None = None) -> float:
        """What the collectives that `run` performs take of its time."""
        with record_collectives(pm.mesh) as records:
            run()
        return sum(self.collective_s(r.kind) for r in records if phase in (None, r.phase))

    def collective_s(self, kind: str) -> float:
        """Of one small collective over all ranks: what its caller's clock sees."""
        if kind not in self._dispatch:
            self._dispatch[kind] = self._measured(kind)
        return self._dispatch[kind]

    def _measured(self, kind: str) -> float:
        if self.job.device.type == "cuda":
            found = self.links.collective_s(kind, 64, self.job.world, 1)
            return 0.0 if found is None else found.mid
        whole, part = torch.zeros(16 * self.job.world), torch.zeros(16)
        rank, world = self.job.rank, self.job.world
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather(list(whole.chunk(world)), part),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(world))),
            "send_recv": lambda: _exchange(whole, rank ^ 1) if rank ^ 1 < world else None,
        }
        return self.median(lambda: [calls[kind]() for _ in range(20)]) / 20


def _exchange(tensor: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, tensor, peer)]):
        work.wait()


def measure_overheads(job: Job, links: Profile) -> dict[str, float]:
    """Seconds by name, as far as the time allows; the same on every rank. A collective over all ranks of the job."""
    runs = _Runs(job, links)
    out: dict[str, float] = {}
    measures: list[Callable[[], Mapping[str, float]]] = [
        lambda: _step(runs),
        lambda: _optimizer(runs),
        lambda: _zero(runs),
        lambda: _pipeline(runs),
        lambda: _clip(runs),
    ]
    for measure in measures:
        if not job.goes_on():
            break
        out.update(measure())
    names = sorted(out)
    values = job.slowest([out[n] for n in names]) if names else []
    return {n: max(0.0, v) for n, v in zip(names, values, strict=True)}


def _batch(job: Job, num_micro_batches: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(num_micro_batches, _WIDTH, device=job.device)}


def _step_of(runs: _Runs, pm: ParallelModel, num_micro_batches: int) -> float:
    """Seconds of a step without its collectives."""
    pm.num_micro_batches = num_micro_batches
    batch = _batch(runs.job, num_micro_batches)
    return runs.median(lambda: pm.step(batch)) - runs.collectives_s(pm, lambda: pm.step(batch))


def _step(runs: _Runs) -> dict[str, float]:
    pm = runs.model(1, runs.job.world, 1, 0)
    one, nine = _step_of(runs, pm, 1), _step_of(runs, pm, 9)
    more = max(0.0, (nine - one) / 8)
    return {"step_s": one - more, "micro_batch_s": more}


def _clip(runs: _Runs) -> dict[str, float]:
    times = {}
    for layers in (1, 17):
        pm = runs.model(layers, runs.job.world, 1, 0)
        pm.step(_batch(runs.job, 1))
        clip = _clipper(pm)
        times[layers] = runs.median(clip) - runs.collectives_s(pm, clip)
    more = max(0.0, (times[17] - times[1]) / 16)
    return {"clip_s": times[1] - more, "clip_tensor_s": more}


def _clipper(pm: ParallelModel) -> Callable[[], object]:
    return lambda: pm.clip_grad_norm_(1.0)


def _optimizer(runs: _Runs) -> dict[str, float]:
    times = {}
    for tensors in (1, 33):
        params = [torch.nn.Parameter(torch.ones(1, device=runs.job.device)) for _ in range(tensors)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        optimizer.step()
        times[tensors] = runs.median(optimizer.step)
    more = max(0.0, (times[33] - times[1]) / 32)
    return {"optimizer_step_s": times[1] - more, "optimizer_tensor_s": more}


def _zero(runs: _Runs) -> dict[str, float]:
    """Hooks of fully_shard per block and micro-batch, under ZeRO 3, beside the collectives and the block itself."""
    job, world = runs.job, runs.job.world
    if world == 1:
        return {}
    found: dict[tuple[int, int, str], float] = {}
    for zero in (0, 3):
        for layers in (2, 10):
            pm = runs.model(layers, world, 1, zero)
            pm.step(_batch(job, 1))
            times = {"forward": [], "backward": []}  # type: dict[str, list[float]]

            def run(pm: ParallelModel = pm, times: dict[str, list[float]] = times) -> None:
                inputs = {
                    "x": torch.ones(1, _WIDTH, device=job.device),
                    "loss_denominator": torch.ones((), device=job.device),
                    "rng": torch.zeros(3, dtype=torch.int64, device=job.device),
                }
                with use_mesh(pm.mesh):
                    job.barrier()
                    start = runs.now()
                    loss = pm.stage(**inputs)
                    job.synchronize()
                    middle = runs.now()
                    pm._sync.before_backward(0, is_last=True)
                    loss.backward()
                    job.synchronize()
                    times["backward"].append(runs.now() - middle)
                    times["forward"].append(middle - start)
                    if pm.spec.zero_stage:  # stage 0 reduces at the end of the step, which is no part of the backward
                        pm._sync.finish_step()

            for _ in range(_REPEATS + 3):
                run()
            for phase, samples in times.items():
                spent = statistics.median(job.slowest(samples[3 : 3 + _REPEATS]))
                found[zero, layers, phase] = spent - runs.collectives_s(pm, run, phase)
    out = {}
    for phase in ("forward", "backward"):
        more = [(found[zero, 10, phase] - found[zero, 2, phase]) / 8 for zero in (0, 3)]
        out[f"zero_block_{phase}_s"] = max(0.0, more[1] - more[0])
    return out


def _pipeline(runs: _Runs) -> dict[str, float]:
    """Two stages: what one more micro-batch adds is a forward and a backward on each, and their sends in turn."""
    world = runs.job.world
    if world % 2:
        return {}
    pm = runs.model(2, world // 2, 2, 0)
    few, many = _step_of(runs, pm, 4), _step_of(runs, pm, 12)
    more = (many - few) / 8
    # a send and a receive for each micro-batch, in one direction forward and in the other backward
    return {"pipeline_action_s": max(0.0, (more - runs.collective_s("send_recv")) / 2)}
