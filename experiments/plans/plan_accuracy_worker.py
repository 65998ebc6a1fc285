"""What every process of plan_accuracy.py does: run all plans, in turn, and note time and memory."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.codegen.program import Program
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from experiments.shared.in_turn import slowest
from experiments.shared.models import Size, make_llama, token_batch
from experiments.shared.storage_counter import StorageCounter, forget_peak, resident_bytes


@dataclass(frozen=True)
class Trial:
    """One plan: its pins. `num_micro_batches` is that of a data-parallel rank."""

    dp: int
    tp: int
    pp: int
    zero_stage: int
    num_micro_batches: int
    recompute: str
    stages: tuple[int, ...] | None

    @property
    def pins(self) -> dict[str, Any]:
        """As `parallelize` takes them."""
        return {name: value for name, value in self.__dict__.items() if value is not None}

    def __str__(self) -> str:
        degrees = " ".join(f"{name}{getattr(self, name)}" for name in ("dp", "tp", "pp") if getattr(self, name) > 1)
        zero = f" z{self.zero_stage}" if self.dp > 1 else ""
        return f"{degrees or 'dp1'}{zero} m{self.num_micro_batches}{' full' if self.recompute == 'full' else ''}"


def every_trial(world: int, batch: int, num_layers: int) -> list[Trial]:
    """All plans of `world` devices: degrees x ZeRO stage x micro-batches x recompute; layers evenly over stages."""
    out = []
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    for dp, tp, pp in itertools.product(degrees, repeat=3):
        if dp * tp * pp != world or batch % dp or pp > num_layers:
            continue
        mine = batch // dp
        stages = tuple((i + 1) * num_layers // pp - i * num_layers // pp for i in range(pp))
        counts = [m for m in (2**i for i in range(12)) if m <= mine and mine % m == 0]
        for zero, m, recompute in itertools.product((0, 1, 2, 3) if dp > 1 else (0,), counts, ("none", "full")):
            out.append(Trial(dp, tp, pp, zero, m, recompute, stages if pp > 1 else None))
    return out


@dataclass
class Measured:
    """What came out of one trial. Seconds of whole steps (optimizer included) and of `pm.step` alone, slowest rank.

    cpu_s: processor time of a step, all threads, of the rank that used most: what a busy machine does not distort.
    foreign: processors that others took meanwhile (0.5: half of one, all the time), from the kernel's counters.
    live_bytes: peak of live tensors during a step, the worst rank. rss_bytes: how much resident memory grew from before
    the model was built to its highest in the first steps, the worst rank.
    """

    step_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    state_bytes: list[int] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


QUIET = 0.1  # of a processor taken by others; the counters are in hundredths of a second


def quiet(measured: Measured) -> list[int]:
    """Repetitions that had the machine for themselves."""
    return [i for i, taken in enumerate(measured.foreign) if taken <= QUIET]


def _busy_s() -> float:
    """Seconds that all processors together have spent on anything since the machine started (Linux)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class _Running:
    model: ParallelModel
    batch: dict[str, torch.Tensor]

    def forward_backward(self) -> float:
        return float(self.model.step(self.batch))

    def update(self) -> None:
        assert self.model.optimizer is not None
        self.model.optimizer.step()


def _build(
    size: Size, trial: Trial, program: Program, meshes: dict[tuple[tuple[str, int], ...], AxisMesh], folder: Path
) -> _Running:
    """Equal plans share their process groups, which torch never gives back."""
    model, spec = make_llama(size), program.spec
    if spec.axes not in meshes:
        meshes[spec.axes] = AxisMesh(spec.axes, dict(spec.groups), device_type="cpu")
    pm = ParallelModel(
        spec,
        program.sources,
        {name: p.detach() for name, p in model.named_parameters()},
        {name: b.detach() for name, b in model.named_buffers()},
        num_micro_batches=trial.num_micro_batches,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        folder=folder,
        mesh=meshes[spec.axes],
    )
    share = size.batch // trial.dp
    first = pm.data_rank * share
    return _Running(pm, {name: x[first : first + share] for name, x in token_batch(size).items()})


def _gathered(value: int) -> list[int]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _existing(running: _Running) -> Iterator[torch.Tensor]:
    """What is there between steps; a generator, so that nothing here keeps it alive."""
    pm = running.model
    assert pm.optimizer is not None
    for p in pm.stage.parameters():
        yield local_of(p).detach()
        if p.grad is not None:
            yield local_of(p.grad)
    yield from pm.stage.buffers()
    for state in pm.optimizer.state.values():
        yield from (local_of(x) for x in state.values() if isinstance(x, torch.Tensor))
    yield from running.batch.values()


def _first_steps(running: _Running, before: int) -> tuple[list[float], Measured]:
    """Three steps: one that makes the optimizer's state, one counted, one to settle."""
    losses = [running.forward_backward()]
    running.update()
    with StorageCounter(_existing(running)) as live:
        losses.append(running.forward_backward())
        running.update()
    losses.append(running.forward_backward())
    running.update()
    highest = resident_bytes()[1]
    measured = Measured(
        live_bytes=_gathered(live.peak_bytes),
        state_bytes=_gathered(live.start_bytes),
        rss_bytes=_gathered(highest - before),
        losses=losses,
    )
    return losses, measured


def _wait_for_calm(limit_s: float) -> None:
    """Let others finish what they do, for a while. Every rank sleeps."""
    end = time.perf_counter() + limit_s
    while True:
        busy, now = _busy_s(), time.perf_counter()
        time.sleep(0.2)
        calm = (_busy_s() - busy) / (time.perf_counter() - now) <= 2 * QUIET or time.perf_counter() > end
        agreed = torch.tensor(float(calm))
        dist.broadcast(agreed, 0)
        if agreed:
            return


def _visit(plan: _Running, repeats: int, measured: Measured, patience_s: float) -> None:
    """An untimed step and some timed ones."""
    _wait_for_calm(patience_s)
    totals = []
    for repeat in range(-1, repeats):
        dist.barrier()
        busy, began, cpu = _busy_s(), time.perf_counter(), time.process_time()
        plan.forward_backward()
        middle = time.perf_counter()
        plan.update()
        ended, mine = time.perf_counter(), time.process_time() - cpu
        dist.barrier()
        if repeat >= 0:
            measured.step_s.append(ended - began)
            measured.backward_s.append(middle - began)
            measured.cpu_s.append(mine)
            # seconds of others, and seconds of the whole: the barrier waits without using a processor
            totals.append(torch.tensor([time.process_time() - cpu, _busy_s() - busy, time.perf_counter() - began]))
    for parameter in plan.model.parameters():
        parameter.grad = None  # or the gradients of all plans together fill the memory
    for values in totals:
        most = values.clone()
        dist.all_reduce(values)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        measured.foreign.append(max(0.0, float(most[1] - values[0])) / float(most[2]))


def run_trials(
    rank: int,
    world: int,
    size: Size,
    plans: list[tuple[Trial, Program]],
    rounds: int,
    repeats: int,
    folder: str,
    budget_s: float,
) -> list[Measured]:
    """Build every plan, then `rounds` times all of them in a random order, each `repeats` steps after an untimed one.

    More rounds follow for plans whose repetitions others disturbed (see `quiet`), until `budget_s` is over.
    """
    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    out: list[Measured] = []
    running: list[_Running] = []
    meshes: dict[tuple[tuple[str, int], ...], AxisMesh] = {}
    for index, (trial, program) in enumerate(plans):
        forget_peak()
        before = resident_bytes()[0]
        running.append(_build(size, trial, program, meshes, Path(folder) / f"plan{index}"))
        losses, measured = _first_steps(running[index], before)
        out.append(measured)
        worst = max(abs(a - b) for a, b in zip(losses, out[0].losses, strict=True))
        if worst > 1e-3 * abs(losses[0]):
            raise ValueError(f"{trial}: losses {losses} differ from those of {plans[0][0]}: {out[0].losses}")
    order = list(range(len(running)))
    for number in range(10_000):
        now = time.perf_counter() - start
        enough = min(len(quiet(measured)) for measured in out) >= rounds * repeats
        over = torch.tensor(float(number >= rounds and (now > budget_s or enough)))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over:
            break
        random.Random(number).shuffle(order)
        for index in order:
            if number >= rounds and len(quiet(out[index])) >= rounds * repeats:
                continue  # the same on every rank: `foreign` is
            _visit(running[index], repeats, out[index], patience_s=2.0 if number < rounds else 10.0)
    for measured in out:
        measured.step_s, measured.backward_s = slowest(measured.step_s), slowest(measured.backward_s)
        measured.cpu_s = slowest(measured.cpu_s)
    return out
