"""autoplan and other predictors on the same published steps.

    python -m experiments.published.side_by_side [--calculon DIR] [--calculon-python PYTHON]

The steps are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (arXiv
2205.05198), table 5: four GPT models on A100 of NVIDIA's Selene, each with full recompute and as the paper proposes
(sequence parallelism and selective recompute). autoplan prices them with `autoplan estimate` and no knowledge of them;
they are in no file that its constants were fitted to. Calculon (github.com/calculon-ai/calculon, a checkout in DIR; it
needs numpy, pandas and psutil) was validated on these very steps by its authors, with a system file of their own for
this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer


@dataclass(frozen=True)
class Step:
    """A published step: its model by autoplan's name and Calculon's, degrees, and seconds."""

    model: str
    their_name: str
    nodes: int
    pp: int
    virtual_stages: int
    batch: int
    micro_batch_size: int
    full_s: float  # with full recompute, without sequence parallelism
    proposed_s: float


# Korthikanti et al. 2022, table 3 (configurations) and table 5 (seconds of an iteration).
STEPS = (
    Step("gpt-22b", "megatron-22B", 1, 1, 1, 4, 4, 1.42, 1.10),
    Step("gpt3-175b", "gpt3-175B", 8, 8, 3, 64, 1, 18.13, 13.75),
    Step("megatron-530b", "turing-530B", 35, 35, 3, 280, 1, 49.05, 37.83),
    Step("megatron-1t", "megatron-1T", 64, 64, 1, 512, 1, 94.42, 71.49),
)


def autoplan_command(step: Step, full: bool) -> list[str]:
    """Return the `autoplan estimate` of a step."""
    degrees = ["--tp", "8", "--pp", str(step.pp), "--dp", "1", "--zero", "0", "--mbs", str(step.micro_batch_size)]
    if step.virtual_stages > 1:
        degrees += ["--virtual-stages", str(step.virtual_stages), "--schedule", "Interleaved1F1B"]
    # the paper brought selective recompute to Megatron, whose record has it from 2023 on, with another attention
    run = ["--like", "megatron-lm@22.12", "--recompute", "full", "--no-sequence-parallel"]
    if not full:
        run = ["--like", "megatron-lm@23.01", "--attention", "unfused", "--recompute", "selective"]
    run += ["--precision", "fp16"]
    task = ["--cluster", f"{step.nodes}x8xa100-sxm4-80gb", "--seq-len", "2k", "--global-batch-size", str(step.batch)]
    return ["autoplan", "estimate", step.model, *task, *degrees, *run]


def autoplan_s(step: Step, full: bool) -> tuple[float, float, float]:
    """Return autoplan's seconds of a step: low, mid, high."""
    done = subprocess.run(
        [sys.executable, "-m", *autoplan_command(step, full), "--json"], capture_output=True, text=True
    )
    if done.returncode:
        raise typer.BadParameter(done.stderr.strip())
    seconds = json.loads(done.stdout)["estimate"]["step_time_s"]
    return seconds["low"], seconds["mid"], seconds["high"]


def calculon_s(folder: Path, python: str, step: Step, full: bool) -> float:
    """Return Calculon's seconds of a step, with its authors' files for this step."""
    execution = folder / "validation/seqsel/tab5" / f"{step.their_name}_{'full' if full else 'seqsel'}.json"
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        files = [folder / "models" / f"{step.their_name}.json", execution, folder / "systems/a100_80g.json", answer]
        command = [python, str(folder / "bin/calculon"), "llm", *map(str, files)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)
        if done.returncode or not answer.exists():
            raise typer.BadParameter(f"Calculon did not run: {(done.stderr or done.stdout).strip()[-500:]}")
        return float(json.loads(answer.read_text())["total_time"])


def main(
    calculon: Annotated[Path | None, typer.Option(help="A checkout of Calculon.")] = None,
    calculon_python: Annotated[str, typer.Option(help="A Python with numpy, pandas and psutil.")] = sys.executable,
    commands: Annotated[bool, typer.Option("--commands", help="Print autoplan's commands instead.")] = False,
) -> None:
    """Print measured and predicted seconds of every step as a Markdown table, and the mean errors."""
    cases = [(step, full) for step in STEPS for full in (True, False)]
    if commands:
        for case in cases:
            print(" ".join(autoplan_command(*case)))
        return
    heads = ["model", "GPUs", "recompute", "measured s", "autoplan", "error"] + ["Calculon", "error"] * (
        calculon is not None
    )
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    errors: dict[str, list[float]] = {"autoplan": [], "Calculon": []}
    inside = 0
    for step, full in cases:
        measured = step.full_s if full else step.proposed_s
        low, mid, high = autoplan_s(step, full)
        inside += low <= measured <= high
        errors["autoplan"].append(mid / measured - 1)
        cells = [step.model, str(8 * step.nodes), "full" if full else "selective", f"{measured:g}"]
        cells += [f"{mid:.3g} ({low:.3g} to {high:.3g})", f"{errors['autoplan'][-1]:+.1%}"]
        if calculon is not None:
            theirs = calculon_s(calculon, calculon_python, step, full)
            errors["Calculon"].append(theirs / measured - 1)
            cells += [f"{theirs:.3g}", f"{errors['Calculon'][-1]:+.1%}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    for name, found in errors.items():
        if found:
            print(f"\n{name}: mean error {fmean(map(abs, found)):.1%}, worst {max(found, key=abs):+.1%}", end="")
    print(f"\n\n{inside} of {len(cases)} measured steps are inside autoplan's interval")


if __name__ == "__main__":
    typer.run(main)
