"""What each process of `make demo` runs, under torchrun: plan, train, and hold the prediction against the clock.

    python -m torch.distributed.run --standalone --nproc-per-node 2 experiments/demo/worker.py OUT SCRATCH NUM_STEPS

`parallelize` without pins chooses the plan; the same with a pin makes others to compare with. What is predicted is
written to OUT before the first step is run. The model and the data are here too, so that demo.py's single process uses
the very same.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import autoplan
from autoplan.cost_models.profile import Profile
from autoplan.errors import AutoplanError
from autoplan.runtime.failure import init_process_group
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from experiments.demo.predict import Prediction, timeline, used_profile, write_json
from experiments.shared.storage_counter import StorageCounter

CHECKED_STEPS = 3  # compared with the single process, step by step
COUNTED_STEP = 1  # its memory is counted: the optimizer's state is there from the first step on
BATCH = 8  # sequences in a global batch
MICRO_BATCH = 4  # of the single process
SEQUENCE = 128
VOCABULARY = 256  # bytes
CORPUS_BYTES = 4_000_000
CHOSEN = "chosen"
LEAST_ROUNDS, LATEST_ROUND_S = 4, 12.0  # all plans in turn: no new round after this long
TIMED_PER_ROUND = 3

make_optimizer = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)


def make_model() -> nn.Module:
    """Return a small Llama with random weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


@functools.cache
def corpus() -> torch.Tensor:
    """Bytes of the Python standard library's own sources, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    read: list[bytes] = []
    for path in sorted(folder.glob("*.py")):
        read.append(path.read_bytes())
        if sum(map(len, read)) > CORPUS_BYTES:
            break
    text = b"".join(read)
    if len(text) < 100 * SEQUENCE:
        raise SystemExit(f"the demo trains on the standard library's sources, but {folder} has hardly any .py files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """The batch of one step, the same for every plan: random places of the corpus. (The model shifts the labels.)"""
    text = corpus()
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
    ids = torch.stack([text[i : i + SEQUENCE] for i in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Times:
    """Seconds of steps, of this rank: one entry per step.

    The last three are of a step and the wait for the other ranks: processor time of everything on this machine (empty
    where the system does not say), processor time of this process, and time.
    """

    program_s: list[float] = field(default_factory=list)  # pm.step: forward, backward, reductions
    clip_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # processor time of pm.step and the optimizer
    busy_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


@dataclass
class Running:
    """One plan, being trained."""

    pm: ParallelModel
    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    live_bytes: int = 0
    training: Times = field(default_factory=Times)
    in_turn: Times = field(default_factory=Times)

    def batch(self) -> dict[str, torch.Tensor]:
        """This data-parallel rank's part of the next batch."""
        part = BATCH // self.pm.data_world
        rows = slice(self.pm.data_rank * part, (self.pm.data_rank + 1) * part)
        return {name: tensor[rows] for name, tensor in global_batch(self.num_steps).items()}

    def step(self, times: Times | None = None, batch: dict[str, torch.Tensor] | None = None) -> None:
        """One step, timed without the making of its batch."""
        assert self.pm.optimizer is not None
        batch = self.batch() if batch is None else batch
        dist.barrier()
        busy, began, cpu_began = _busy_s(), time.perf_counter(), time.process_time()
        loss = self.pm.step(batch)
        stepped, used = time.perf_counter(), time.process_time() - cpu_began
        if self.num_steps == 0:
            self.gradients = self.pm.gradients()  # a collective: every rank takes part
        clipping = time.perf_counter()
        self.pm.clip_grad_norm_(1.0)
        clipped, cpu = time.perf_counter(), time.process_time()
        self.pm.optimizer.step()
        ended, used = time.perf_counter(), used + time.process_time() - cpu
        self.num_steps += 1
        self.losses.append(float(loss))
        if times is not None:
            times.program_s.append(stepped - began)
            times.clip_s.append(clipped - clipping)
            times.optimizer_s.append(ended - clipped)
            times.cpu_s.append(used)
            dist.barrier()  # the slower ranks are running still
            times.own_s.append(time.process_time() - cpu_began)
            times.whole_s.append(time.perf_counter() - began)
            if busy is not None:
                times.busy_s.append((_busy_s() or 0.0) - busy)

    def counted_step(self) -> None:
        """One step whose live tensors are counted, which slows it."""
        batch = self.batch()  # not inside: a slice of the corpus counts as the whole corpus
        with StorageCounter(self._existing()) as live:
            self.step(batch=batch)
        self.live_bytes = live.peak_bytes

    def _existing(self) -> Iterator[torch.Tensor]:
        """What is there between steps; a generator, so that nothing here keeps it alive."""
        assert self.pm.optimizer is not None
        for p in self.pm.stage.parameters():
            yield local_of(p).detach()
            if p.grad is not None:
                yield local_of(p.grad)
        yield from self.pm.stage.buffers()
        for state in self.pm.optimizer.state.values():
            yield from (local_of(x) for x in state.values() if isinstance(x, torch.Tensor))


def _busy_s() -> float | None:
    """Seconds that all processors together have spent on anything since the machine started (Linux)."""
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _of_all_ranks(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def together(mine: Times) -> dict[str, list[float]]:
    """Times of the job: of each step what the slowest rank took. `step_s` is without clipping.

    `others`: how many processors something else kept busy meanwhile.
    """
    ranks: list[Times] = _of_all_ranks(mine)

    def most(*names: str) -> list[float]:
        each = [[sum(values) for values in zip(*(getattr(r, n) for n in names), strict=True)] for r in ranks]
        return [max(values) for values in zip(*each, strict=True)]

    own = [sum(values) for values in zip(*(r.own_s for r in ranks), strict=True)]
    return {
        "step_s": most("program_s", "optimizer_s"),
        "program_s": most("program_s"),
        "optimizer_s": most("optimizer_s"),
        "clip_s": most("clip_s"),
        "cpu_s": most("cpu_s"),
        "others": [max(0.0, b - o) / w for b, o, w in zip(mine.busy_s, own, mine.whole_s, strict=False)],
    }


class Shown:
    """Progress of rank 0."""

    def __init__(self, lead: bool) -> None:
        self.lead = lead
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

    def say(self, text: str, style: str = "") -> None:
        """A line."""
        if self.lead:
            self.console.print(f"  {text}", style=style, markup=False, soft_wrap=True)

    def bar(self, what: str) -> Progress:
        """Of steps, with a note."""
        return Progress(
            TextColumn(f"  {what}"),
            BarColumn(30),
            TextColumn("{task.completed}/{task.total}  {task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.lead,
        )


def build(out: Path, name: str, pins: Mapping[str, Any], profile: Profile | None) -> Running:
    """Plan and parallelise; `profile` None: `parallelize` finds or measures one."""
    pm = autoplan.parallelize(
        make_model(),
        "local",
        example_inputs=global_batch(0),
        global_batch_size=BATCH,
        pins=pins,
        optimizer=make_optimizer,
        profile=profile,
        folder=out / name,
    )
    if dist.get_rank() == 0:
        write_json(out / name / "timeline.json", timeline(pm.plan))
    return Running(pm)


def other_pins(pm: ParallelModel) -> dict[str, dict[str, int]]:
    """All devices given to one axis: the plans that the chosen one is compared with."""
    world = dist.get_world_size()
    return {f"pinned_{a}": {a: world} for a in ("dp", "tp", "pp") if getattr(pm.plan.config, a) != world}


def prepare(out: Path, shown: Shown) -> dict[str, Running]:
    """Every plan of the demo, the chosen one first; OUT/predicted.json says what is expected of them."""
    world, lead = dist.get_world_size(), dist.get_rank() == 0
    before = used_profile(world) if lead else None
    began = time.perf_counter()
    running = {CHOSEN: build(out, CHOSEN, {}, None)}
    seconds = time.perf_counter() - began
    box = [used_profile(world) if lead else None]
    dist.broadcast_object_list(box, 0)
    profile = box[0]
    plan = running[CHOSEN].pm.plan
    prediction = Prediction(profile, before, seconds) if lead else None
    if prediction is not None:
        prediction.explain(plan, make_model(), global_batch(0), BATCH)
        prediction.add(CHOSEN, {}, plan)
        shown.say(f"planned: {prediction.line(CHOSEN)}")
    for name, pins in other_pins(running[CHOSEN].pm).items():
        try:
            running[name] = build(out, name, pins, profile)
        except AutoplanError as exc:  # the same on every rank
            if prediction is not None:
                prediction.refused[name] = str(exc)
        else:
            if prediction is not None:
                prediction.add(name, pins, running[name].pm.plan)
                shown.say(f"to compare: {prediction.line(name)}", "dim")
    if prediction is not None:
        write_json(out / "predicted.json", prediction.data())
        if profile is not None:
            profile.save(out / "profile.json")
    return running


def train(running: dict[str, Running], num_steps: int, shown: Shown) -> None:
    """The first steps of every plan, then the rest of the chosen one's."""
    for name, one in running.items():
        if name != CHOSEN:
            for step in range(CHECKED_STEPS):
                one.counted_step() if step == COUNTED_STEP else one.step()
    chosen = running[CHOSEN]
    with shown.bar("training") as progress:
        task = progress.add_task("", total=num_steps, note="")
        for step in range(num_steps):
            chosen.counted_step() if step == COUNTED_STEP else chosen.step(chosen.training)
            progress.update(task, advance=1, note=f"loss {chosen.losses[-1]:.3f}")


def run_in_turn(running: dict[str, Running], shown: Shown) -> None:
    """Time all plans, in turn, so that whatever else the machine does meets all of them."""
    began = time.perf_counter()
    with shown.bar("timing all plans in turn") as progress:
        task = progress.add_task("", total=LEAST_ROUNDS, note="rounds")
        for number in range(1000):
            over = torch.tensor(float(number >= LEAST_ROUNDS and time.perf_counter() - began > LATEST_ROUND_S))
            dist.broadcast(over, 0)
            if over:
                break
            order = list(running.values())
            for one in order if number % 2 == 0 else order[::-1]:
                one.step()  # the caches are another plan's
                for _ in range(TIMED_PER_ROUND):
                    one.step(one.in_turn)
            progress.update(task, completed=number + 1, total=max(LEAST_ROUNDS, number + 1))


def main(out: Path, scratch: Path, num_steps: int) -> None:
    """All of it. OUT gets plans, programs, predicted.json, measured.json; SCRATCH the gradients of the first step."""
    torch.set_num_threads(1)
    init_process_group("gloo", timeout_s=None)
    lead = dist.get_rank() == 0
    shown = Shown(lead)
    running = prepare(out, shown)
    train(running, num_steps, shown)
    run_in_turn(running, shown)
    measured = {
        name: {
            "losses": one.losses[: num_steps if name == CHOSEN else CHECKED_STEPS],
            "live_bytes": _of_all_ranks(one.live_bytes),
            "in_turn": together(one.in_turn),
            **({"training": together(one.training)} if name == CHOSEN else {}),
        }
        for name, one in running.items()
    }
    if lead:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        machine = {"processes": dist.get_world_size(), "cores": os.cpu_count(), "load_average": load}
        write_json(out / "measured.json", {"version": 1, "machine": machine, "plans": measured})
        torch.save({name: one.gradients for name, one in running.items()}, scratch / "gradients.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
