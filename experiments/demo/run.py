"""`make demo`: plan a small Llama for this machine, train it, and hold the prediction against the clock.

torchrun starts 2 processes of experiments.demo.worker. They measure this machine (once, for at most 40 seconds), let
`parallelize` choose the plan of Hugging Face's untouched LlamaForCausalLM, and train it on the standard library's own
sources, byte by byte. Losses of the first steps and all gradients of the first one must equal those of the same model
in this process, and the loss must fall: else the exit code is 1. Step time and memory are compared with what was
predicted, for the chosen plan and for pinned ones; a wrong prediction is shown and fails nothing.

    python -m experiments.demo.run [--processes 2] [--steps 40] [--fresh]
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same demo wherever it runs: CPU and gloo

import torch
import typer
from rich.syntax import Syntax
from rich.table import Table

from experiments.demo import report
from experiments.demo.worker import BATCH, CHECKED_STEPS, CHOSEN, MICRO_BATCH, global_batch, make_model, make_optimizer
from experiments.shared.measure import run_command

OUT = Path("demo_out")
PROFILE_BUDGET_S = "40"  # unless AUTOPLAN_PROFILE_BUDGET_S says otherwise
WORKER_TIMEOUT_S = 420
END_TIMEOUT_S = 40  # torchrun gives its workers 30 s to end by themselves before it kills them

# float32 sums in another order (over ranks, shards and micro-batches) differ by about 1e-6 of the largest gradient;
# AdamW divides a gradient by its own size, so from the second step on rounding in tiny gradients moves the losses too.
# A missing or doubled reduction is off by more than 0.1.
TOLERANCE = 1e-4
# Untrained, the loss is ln 256 = 5.5.
LEAST_FALL = 1.0
LEAST_STEPS = 20

console = report.make_console()


class DemoFailure(Exception):
    """The demo could not run to its end."""


@dataclass(frozen=True)
class Reference:
    """What one process computes: losses of the first steps, gradients of the first by parameter name."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def reference_run() -> Reference:
    """Train the original model by ordinary eager PyTorch, with the same data as the plans."""
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
def torchrun(processes: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the workers; on the way out, for whatever reason, none is left running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # A session of its own: Ctrl-C reaches this process only, and torchrun gets one clear signal from the lines below.
    process = subprocess.Popen([*command, "-m", "experiments.demo.worker", *arguments], start_new_session=True)
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


def run(processes: int, steps: int, timeout_s: float) -> dict[str, dict[str, torch.Tensor]]:
    """Run the job; the gradients of every plan's first step. All else it leaves in OUT."""
    with tempfile.TemporaryDirectory() as scratch:
        with torchrun(processes, str(OUT), scratch, str(steps)) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise DemoFailure(f"the processes have not ended after {timeout_s:g} s") from None
        if code:
            raise DemoFailure(f"the processes failed (exit code {code}); the reason stands above")
        gradients: dict[str, dict[str, torch.Tensor]] = torch.load(Path(scratch) / "gradients.pt")
    return gradients


@dataclass(frozen=True)
class Parity:
    """One plan against one process: relative differences of the first losses, and of every gradient by name."""

    losses: list[float]
    gradients: dict[str, float]

    @property
    def worst_gradient(self) -> str:
        """Its name."""
        return max(self.gradients, key=lambda n: self.gradients[n])

    @property
    def largest(self) -> float:
        """Of all."""
        return max(*self.losses, *self.gradients.values())

    @property
    def holds(self) -> bool:
        """Within TOLERANCE; a NaN is not."""
        return all(difference <= TOLERANCE for difference in (*self.losses, *self.gradients.values()))


def compare(losses: list[float], gradients: dict[str, torch.Tensor], reference: Reference) -> Parity:
    """Losses of the first steps and gradients of the first against one process."""
    if gradients.keys() != reference.gradients.keys():
        odd = sorted(gradients.keys() ^ reference.gradients.keys())
        raise DemoFailure(f"the two programs have gradients of different parameters: {', '.join(odd)}")
    return Parity(
        [abs(many - one) / abs(one) for one, many in zip(reference.losses, losses, strict=False)],
        {n: float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in reference.gradients.items()},
    )


def parity_table(plans: list[report.Plan], found: dict[str, Parity], reference: Reference) -> Table:
    """Return a row per plan."""
    losses = [f"loss of step {i}" for i in range(1, CHECKED_STEPS + 1)]
    title = f"{len(reference.gradients)} gradients"
    table = report.plain_table("relative difference", *losses, title, "largest in the gradient of", left=1)
    table.columns[-1].justify = "left"
    table.columns[0].no_wrap = table.columns[-1].no_wrap = True
    for p in plans:
        mine = found[p.name]
        cells = [f"{x:.1e}" for x in (*mine.losses, mine.gradients[mine.worst_gradient])]
        table.add_row(p.label, *cells, mine.worst_gradient.removeprefix("model.").removesuffix(".weight"))
    return table


def curve(values: list[float]) -> str:
    """One bar per value, where the terminal can show them."""
    low, span = min(values), max(values) - min(values) or 1.0
    bars = [chr(0x2581 + round(7 * (x - low) / span)) for x in values]
    return "".join(bars) if console.encoding.startswith("utf") else ""


def outcome(plans: list[report.Plan], found: dict[str, Parity]) -> report.Outcome:
    """Return what the exit code depends on."""
    few = 5
    losses = plans[0].measured["losses"]
    first, last = losses[0], sum(losses[-few:]) / few
    out = report.Outcome(
        f"loss {first:.3f} -> {last:.3f} nats per byte in {len(losses)} steps",
        max(parity.largest for parity in found.values()),
        TOLERANCE,
    )
    if not first - last >= LEAST_FALL:
        out.failures.append(f"the loss did not fall by {LEAST_FALL}: {first:.3f} at first, {last:.3f} at the end")
    for p in plans:
        mine = found[p.name]
        if not mine.holds:
            out.failures.append(
                f"{p.label} differs from one process by more than {TOLERANCE:g}: losses by "
                f"{', '.join(f'{x:.1e}' for x in mine.losses)}, the gradient of {mine.worst_gradient} by "
                f"{mine.gradients[mine.worst_gradient]:.1e}"
            )
    return out


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


def show_program(name: str, label: str) -> None:
    """The attention as it runs."""
    folder = OUT / name
    files = ", ".join(sorted(p.name for p in folder.glob("*") if p.suffix in (".py", ".json")))
    console.print()
    report.paragraph(console, f"{label}: {folder}/ ({files}); attention in stage0.py:", style="bold")
    console.print()
    text = Syntax("", "python", theme="ansi_dark", background_color="default")
    console.print(text.highlight(excerpt((folder / "stage0.py").read_text())), soft_wrap=True)


def heading(text: str) -> None:
    """Of a section."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def show(reference: Reference, gradients: dict[str, dict[str, torch.Tensor]]) -> report.Outcome:
    """Everything, the answer first."""
    predicted = json.loads((OUT / "predicted.json").read_text())
    measured = json.loads((OUT / "measured.json").read_text())
    plans = report.plans_of(predicted, measured)
    found = {p.name: compare(p.measured["losses"], gradients[p.name], reference) for p in plans}
    told = outcome(plans, found)
    heading("answer")
    report.answer(console, plans, told)
    heading("the plan, and why")
    report.why(console, predicted)
    heading("training, against one process")
    console.print(f"  {told.falls}  {curve(plans[0].measured['losses'])}", soft_wrap=True)
    console.print()
    console.print(parity_table(plans, found, reference))
    heading("predicted against measured")
    report.comparison(console, plans, predicted, measured["machine"])
    heading("the emitted program")
    show_program(CHOSEN, plans[0].label)
    split = next((p for p in plans[1:] if p.predicted["degrees"]["tp"] > 1), None)
    if split is not None:
        show_program(split.name, f"and pinned to tensor parallelism, {split.label}")
    return told


def prepare_folder(fresh: bool) -> None:
    """Empty what an earlier run has left."""
    names = [CHOSEN, *(f"pinned_{axis}" for axis in ("dp", "tp", "pp")), *(["cache"] if fresh else [])]
    for name in names:
        shutil.rmtree(OUT / name, ignore_errors=True)
    for name in ("predicted.json", "measured.json", "profile.json"):
        (OUT / name).unlink(missing_ok=True)
    OUT.mkdir(exist_ok=True)
    if fresh:
        os.environ["AUTOPLAN_CACHE"] = str((OUT / "cache").resolve())


def demo(processes: int, steps: int, fresh: bool, timeout_s: float) -> int:
    """Run the whole demo and return the exit code."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: through the `finally` of torchrun
    prepare_folder(fresh)
    os.environ.setdefault("AUTOPLAN_PROFILE_BUDGET_S", PROFILE_BUDGET_S)
    reference = reference_run()
    num = sum(g.numel() for g in reference.gradients.values())
    losses = ", ".join(f"{x:.3f}" for x in reference.losses)
    console.print(f"one process: Hugging Face Llama, {num:,} parameters, {CHECKED_STEPS} eager steps: loss {losses}")
    console.print(f"{processes} processes: measure this machine where it is not known, plan, train, compare")
    gradients = run(processes, steps, timeout_s)
    told = show(reference, gradients)
    seconds = time.monotonic() - started
    files = "plans and programs in their folders, predicted.json, measured.json, profile.json, */timeline.json (Chrome)"
    console.print()
    report.paragraph(console, f"written to {OUT}/: {files}; {seconds:.0f} s in all", 0)
    if told.failures:
        console.print(f"[red]demo failed:[/red] {told.failures[0]}", soft_wrap=True)
    return 1 if told.failures else 0


def main(
    processes: Annotated[int, typer.Option(envvar="NUM_PROCESSES", min=1, help="local processes")] = 2,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="training steps of the chosen plan")] = 40,
    fresh: Annotated[bool, typer.Option(help="use an empty cache in demo_out/: measure this machine anew")] = False,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = WORKER_TIMEOUT_S,
) -> None:
    """Plan, train, and hold the prediction against the clock."""
    try:
        code = demo(processes, steps, fresh, timeout_s)
    except DemoFailure as failure:
        console.print(f"[red]demo failed:[/red] {failure}", soft_wrap=True)
        code = 1
    except KeyboardInterrupt:
        console.print("[red]interrupted[/red]")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    run_command(main)
