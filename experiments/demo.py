"""`make demo`: a small Llama trained by two plans on 4 local processes, checked against one process.

For each plan torchrun starts 4 processes of demo_worker.py, which parallelise Hugging Face's untouched LlamaForCausalLM
and train it on the standard library's own sources, byte by byte. The losses of the first steps and all gradients of the
first one must equal those of the same model in this process; the loss must fall. Any failure: a non-zero exit code.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a demo of 4 processes, wherever it runs: CPU and gloo

import torch
from demo_worker import (
    BATCH,
    CHECKED_STEPS,
    MICRO_BATCH,
    NUM_PROCESSES,
    NUM_STEPS,
    PLANS,
    DemoPlan,
    global_batch,
    make_model,
    make_optimizer,
)
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from autoplan.runtime.spec import ProgramSpec

HERE = Path(__file__).resolve().parent
OUT = Path("demo_out")
WORKER_TIMEOUT_S = 280
END_TIMEOUT_S = 40  # torchrun gives its workers 30 s to end by themselves before it kills them

# float32 sums in another order (over ranks, shards and micro-batches) differ by about 1e-6 of the largest gradient;
# AdamW divides a gradient by its own size, so from the second step on rounding in tiny gradients moves the losses too.
# A missing or doubled reduction is off by more than 0.1.
TOLERANCE = 1e-4
# Untrained, the loss is ln 256 = 5.5.
LEAST_FALL = 1.0

console = Console(highlight=False)


class DemoFailure(Exception):
    """The demo ran and did not show what it should."""


@dataclass(frozen=True)
class Reference:
    """What one process computes: losses of the first steps, gradients of the first by parameter name."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def reference_run() -> Reference:
    """Train the original model by ordinary eager PyTorch, with the same data and micro-batches as the plans."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    num_micro_batches = BATCH // MICRO_BATCH
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        batch, total = global_batch(step), 0.0
        for i in range(0, BATCH, MICRO_BATCH):
            part = {name: tensor[i : i + MICRO_BATCH] for name, tensor in batch.items()}
            loss = model(**part).loss / num_micro_batches
            loss.backward()
            total += loss.item()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return Reference(losses, gradients)


@contextlib.contextmanager
def torchrun(plan: DemoPlan, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the workers of a plan; on the way out, for whatever reason, none is left running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    # A session of its own: Ctrl-C reaches this process only, and torchrun gets one clear signal from the lines below.
    process = subprocess.Popen([*command, str(HERE / "demo_worker.py"), plan.name, str(folder)], start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, then itself
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(plan: DemoPlan, folder: Path) -> dict[str, Any]:
    """Run one plan; what its rank 0 left."""
    with torchrun(plan, folder) as process:
        try:
            code = process.wait(WORKER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailure(f"{plan.name} has not ended after {WORKER_TIMEOUT_S} s") from None
    if code:
        raise DemoFailure(f"the processes of {plan.name} failed (exit code {code}); the reason stands above")
    result: dict[str, Any] = torch.load(folder / "result.pt")
    return result


def compare(result: dict[str, Any], reference: Reference) -> Table:
    """Losses of the first steps and gradients of the first against one process; DemoFailure if they differ."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("against one process", "one process", "4 processes", "relative difference"):
        table.add_column(title, justify="left" if title == "against one process" else "right")
    found: list[float] = []
    for step, (one, many) in enumerate(zip(reference.losses, result["losses"], strict=False), 1):
        difference = abs(many - one) / abs(one)
        found.append(difference)
        table.add_row(f"loss of step {step}", f"{one:.6f}", f"{many:.6f}", f"{difference:.1e}")
    theirs: dict[str, torch.Tensor] = result["gradients"]
    if theirs.keys() != reference.gradients.keys():
        odd = sorted(theirs.keys() ^ reference.gradients.keys())
        raise DemoFailure(f"the two programs have gradients of different parameters: {', '.join(odd)}")
    differences = {
        name: float((theirs[name] - mine).abs().max() / mine.abs().max()) for name, mine in reference.gradients.items()
    }
    name = max(differences, key=lambda n: differences[n])
    found += differences.values()
    table.add_row(f"{len(differences)} gradients of step 1", "", "", f"{differences[name]:.1e}")
    table.caption = f"largest gradient difference in {name}; tolerance {TOLERANCE:g} (float32)"
    table.caption_justify = "left"
    if not all(difference <= TOLERANCE for difference in found):  # a NaN is not
        console.print(table)
        raise DemoFailure(f"the plan differs from one process by more than {TOLERANCE:g}")
    return table


def check_fall(losses: list[float]) -> str:
    """How far the loss fell; DemoFailure if it did not."""
    few = 5
    first, last = losses[0], sum(losses[-few:]) / few
    if not first - last >= LEAST_FALL:
        raise DemoFailure(f"the loss did not fall by {LEAST_FALL}: {first:.3f} at first, {last:.3f} at the end")
    return f"loss [bold]{first:.3f} -> {last:.3f}[/bold] nats per byte in {len(losses)} steps\n  {curve(losses)}"


def curve(values: list[float]) -> str:
    """One bar per value, where the terminal can show them."""
    low, span = min(values), max(values) - min(values) or 1.0
    bars = [chr(0x2581 + round(7 * (x - low) / span)) for x in values]
    return "".join(bars) if console.encoding.startswith("utf") else ""


def sharded(spec: ProgramSpec) -> Table:
    """How tensor parallelism splits the parameters, equal layers once. (ZeRO 3 splits the result again, over dp.)"""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("parameter", "whole", "on a rank", "how"):
        table.add_column(title)
    seen: set[str] = set()
    for p in (p for stage in spec.stages for p in stage.params):
        kind = re.sub(r"\d+", "*", p.name)
        if kind in seen:
            continue
        seen.add(kind)
        local = list(p.shape)
        for shard in p.shards:
            local[shard.dim] //= spec.axis_size(shard.axis)
        how = ", ".join(f"dim {shard.dim} over {shard.axis}" for shard in p.shards) or "replicated"
        table.add_row(kind, *(" x ".join(map(str, shape)) for shape in (p.shape, local)), how)
    return table


def excerpt(source: str) -> str:
    """The attention of a layer in the emitted text: queries, then from the attention itself to the end of its output
    projection."""
    lines = [line[8:] for line in source.splitlines() if not line.lstrip().startswith("del ")]

    def find(name: str, start: int = 0) -> int:
        found = (i for i in range(start, len(lines)) if lines[i].startswith(name))
        return next(found, start)

    query = find("q_proj = ")
    attended = find("attended", query)
    output = find("o_proj = ", attended)
    end = output + 2 if lines[output + 1].startswith("o_proj_") else output + 1
    middle = "...  # keys, values, rotary embedding"
    return "\n".join([*lines[query - 1 : query + 3], middle, *lines[attended:end]])


def show(plan: DemoPlan, folder: Path, result: dict[str, Any], reference: Reference) -> None:
    """Check and print what a plan did."""
    console.print("  " + check_fall(result["losses"]))
    console.print()
    console.print(compare(result, reference))
    console.print()
    console.print(result["plan"], markup=False, soft_wrap=True)
    console.print()
    console.print(sharded(ProgramSpec.from_json((folder / "program.json").read_text())))
    files = sorted(p.name for p in folder.glob("*") if p.suffix in (".py", ".json"))
    console.print(f"\nthe emitted program: [bold]{folder}/[/bold] ({', '.join(files)}); in stage0.py:\n")
    text = Syntax("", "python", theme="ansi_dark", background_color="default")
    console.print(text.highlight(excerpt((folder / "stage0.py").read_text())), soft_wrap=True)


def main() -> None:
    """The whole demo."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: through the `finally` of torchrun
    console.rule("[bold]one process: Hugging Face Llama, eager", align="left")
    reference = reference_run()
    num = sum(g.numel() for g in reference.gradients.values())
    losses = ", ".join(f"{x:.3f}" for x in reference.losses)
    console.print(f"  {num:,} parameters; {CHECKED_STEPS} steps: loss {losses}")
    for plan in PLANS.values():
        console.print()
        console.rule(f"[bold]{plan.name}: {plan.what}", align="left")
        folder = OUT / plan.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        console.print(f"  starting {NUM_PROCESSES} processes; rank 0 captures and plans", style="dim")
        result = run(plan, folder)
        show(plan, folder, result, reference)
    console.print()
    seconds = time.monotonic() - started
    console.print(
        f"[green]Both plans trained for {NUM_STEPS} steps and equal the single process[/green] ({seconds:.0f} s)."
    )


if __name__ == "__main__":
    try:
        main()
    except DemoFailure as failure:
        console.print(f"[red]demo failed:[/red] {failure}")
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("[red]interrupted[/red]")
        sys.exit(130)
