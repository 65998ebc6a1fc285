"""Jobs that lose all their ranks at random moments, and go on under other plans and numbers of ranks.

    python -m experiments.state.killed_at_random [--lives 12] [--seed 0]

A small model trains in float64 with dropout, AdamW, a schedule and clipping, and writes a checkpoint after every step,
every other life beside the training. Each life has another plan on one to four processes; all of them get SIGKILL at a
random moment: after the start, or after the first step. The last life is left alone. Every printed loss, also of
repeated steps, must be that of one process without a failure to 1e-12; a life must begin at the last step that was
reported as saved or later; and no checkpoint may be damaged (`older` is not set, so that damage would be an error).

    python -m experiments.state.killed_at_random rank PLAN BESIDE      # one rank of one life
"""

from __future__ import annotations

import functools
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from experiments.shared.measure import make_console, run_command

PLANS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "dp 2": (2, {"dp": 2, "zero_stage": 0}),
    "ZeRO 1, dp 4": (4, {"dp": 4, "zero_stage": 1}),
    "ZeRO 2, dp 3": (3, {"dp": 3, "zero_stage": 2}),
    "ZeRO 3, dp 4": (4, {"dp": 4, "zero_stage": 3}),
    "tp 2": (2, {"tp": 2}),
    "tp 2, ZeRO 3, dp 2": (4, {"tp": 2, "dp": 2, "zero_stage": 3}),
    "pp 2": (2, {"pp": 2, "num_micro_batches": 2}),
}
NUM_STEPS, BATCH = 400, 12
STEP, SAVED, BEGUN = (re.compile(rf"^{word}", re.MULTILINE) for word in (r"step (\d+): loss (\S+)$", r"saved (\d+)$",
                                                                        r"begin at (\d+)$"))  # fmt: skip
CLOSE = 1e-12
START_LIMIT_S, LIFE_LIMIT_S = 120.0, 300.0


# -- one rank ---------------------------------------------------------------------------------------------------------


def run_rank(plan: str, beside: bool, last: int) -> None:
    """Train until a step, from the last checkpoint of the working directory."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import autoplan

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(30, 12), nn.Linear(12, 30, bias=False)
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    tokens = torch.randint(0, 30, (512, 9), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    pm = autoplan.parallelize(
        Model().double(),
        "local",
        example_inputs={"ids": tokens[:2, :-1], "labels": tokens[:2, 1:]},
        loss_fn=lambda out, batch: nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        global_batch_size=BATCH,
        pins=PLANS[plan][1],
        verify=False,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(pm.optimizer, 50, gamma=0.7)
    resumed = pm.load_checkpoint("checkpoints", states={"scheduler": scheduler})
    first = dist.get_rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    say(f"begin at {resumed.step if resumed else 0}")
    while pm.progress.num_steps < last:
        mine = BATCH // pm.data_world
        at = pm.progress.num_samples + pm.data_rank * mine
        part = tokens[torch.arange(at, at + mine) % len(tokens)]
        loss = pm.step({"ids": part[:, :-1], "labels": part[:, 1:]})
        pm.clip_grad_norm_(1.0)
        pm.optimizer.step()
        scheduler.step()
        step = pm.progress.num_steps
        say(f"step {step}: loss {loss.item()!r}")
        pm.save_checkpoint("checkpoints", states={"scheduler": scheduler}, keep=2, wait=not beside)
        say(f"saved {step - 1 if beside else step}")  # the one before has been waited for


# -- lives ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One start: its plan, whether checkpoints are written beside the training, and when all ranks are killed.

    Attributes:
        after_s: seconds until SIGKILL, after the start or after the first step; None: left alone.
    """

    plan: str
    beside: bool
    after_s: float | None
    of_step: bool


def live(life: Life, folder: Path, last: int) -> str:
    """Run one life in a folder; return what rank 0 printed. Raises RuntimeError if it fails by itself."""
    world = PLANS[life.plan][0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    environment |= {"AUTOPLAN_PROFILE": "assumed", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ["-m", "experiments.state.killed_at_random", "rank", life.plan, str(int(life.beside)), str(last)]
    logs = [folder / f"log{rank}" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            with log.open("wb") as out:
                command = [sys.executable, *words]
                ranks.append(
                    subprocess.Popen(command, cwd=folder, env={**environment, **of_rank}, stdout=out, stderr=out)
                )
        if life.after_s is None:
            codes = [rank.wait(LIFE_LIMIT_S) for rank in ranks]
            if any(codes):
                raise RuntimeError(f"{life}: exit codes {codes}\n" + _text(logs))
        else:
            _wait(life, ranks, logs)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
    return logs[0].read_text()


def _wait(life: Life, ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    end = time.monotonic() + START_LIMIT_S
    while life.of_step and not STEP.search(logs[0].read_text()):
        if time.monotonic() > end or any(rank.poll() for rank in ranks):
            raise RuntimeError(f"{life}: it does not begin\n" + _text(logs))
        time.sleep(0.02)
    time.sleep(life.after_s or 0.0)
    if any(rank.poll() for rank in ranks):
        raise RuntimeError(f"{life}: it failed before it was killed\n" + _text(logs))


def _text(logs: Sequence[Path]) -> str:
    return "\n".join(log.read_text()[-2500:] for log in logs)


def wrong(text: str, truth: Mapping[int, float], saved: int) -> list[str]:
    """Return what is wrong with a life, of what it printed and the last step that was saved before it."""
    out = []
    begun = BEGUN.search(text)
    if begun is not None and int(begun[1]) < saved:
        out.append(f"begins at {begun[1]}, and {saved} was saved")
    steps = [(int(step), float(loss)) for step, loss in STEP.findall(text)]
    if begun is not None and [step for step, _ in steps] != [int(begun[1]) + 1 + i for i in range(len(steps))]:
        out.append("its steps are not those that follow")
    return out + [f"step {n}: {loss}, not {truth[n]}" for n, loss in steps if abs(loss / truth[n] - 1) > CLOSE]


def main(
    lives: Annotated[int, typer.Option(help="lives that are killed")] = 12,
    seed: Annotated[int, typer.Option(help="of plans and moments")] = 0,
) -> None:
    """Kill a job again and again, and compare its losses with those of one that is left alone."""
    rng, names = random.Random(seed), list(PLANS)
    table = Table("life", "plan", "checkpoints", "killed", "begins at", "last step", "wrong")
    found: list[str] = []
    saved = last = 0
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as folder:
        text = live(Life("one rank", True, None, False), Path(alone), NUM_STEPS)
        truth = {int(step): float(loss) for step, loss in STEP.findall(text)}
        for number in range(lives + 1):
            of_step = rng.random() < 0.75
            after = rng.uniform(0.0, 1.5) if of_step else rng.uniform(1.0, 25.0)
            life = Life(rng.choice(names), number % 2 == 1, None if number == lives else after, of_step)
            text = live(life, Path(folder), min(last + 5, NUM_STEPS) if number == lives else NUM_STEPS)
            problems = wrong(text, truth, saved)
            begun, steps = BEGUN.search(text), STEP.findall(text)
            saved = max([saved, *(int(step) for step in SAVED.findall(text))])
            last = int(steps[-1][0]) if steps else last
            killed = "no" if life.after_s is None else f"{after:.2f} s after the {'first step' if of_step else 'start'}"
            how = "beside" if life.beside else "waited for"
            row = (life.plan, how, killed, begun[1] if begun else "-", steps[-1][0] if steps else "-")
            table.add_row(str(number + 1), *row, "; ".join(problems) or "nothing")
            print(number + 1, *row, problems, sep=" | ", file=sys.stderr, flush=True)
            found += problems
    make_console().print(table)
    print(f"{lives} lives were killed, and {len(found)} things are wrong")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2], bool(int(sys.argv[3])), int(sys.argv[4]))
    else:
        run_command(main)
