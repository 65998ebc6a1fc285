"""Steps and peaks measured on a GPU, beside their prices from data sheets and published runs: no profile, no fit.

    python -m experiments.gpu.priced [FILE ...]      by default all files of experiments/gpu/found; needs no GPU

The rows are those of the parts `step` (autoplan's program, Hugging Face's model, torchtitan's) and `predicted` of
on_gpu: one device, bfloat16, AdamW. `with profile` is what the plan predicted there from a profile of the device.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

import autoplan
from experiments.gpu.models import PlainLlama
from experiments.gpu.training import STEP_SIZE, Training, trainings
from experiments.shared.measure import make_console, run_command
from experiments.shared.models import llama_config, make_llama, make_mixtral, token_batch

FOUND = Path(__file__).parent / "found"
CLUSTERS = {"NVIDIA H200": "1x1xh200-sxm"}


@dataclass(frozen=True)
class Measured:
    """A row: figures are its milliseconds `ms`, and what else there is."""

    name: str
    training: Training
    plain: bool
    figures: dict[str, float]


def measured(cases: list[dict[str, Any]]) -> Iterator[Measured]:
    """Yield the rows that are steps of a model, with how it was trained."""
    known = {str(t): t for t in trainings(False)}
    for row in (r for r in cases if "ms" in r["figures"]):
        if row["part"] == "predicted":
            yield Measured(row["name"], known[row["name"]], False, row["figures"])
        elif row["part"] == "step":
            training = Training("llama", STEP_SIZE, compiled="compiled" in row["name"])
            yield Measured(row["name"], training, "torchtitan" in row["name"], row["figures"])


def price(row: Measured, cluster: str) -> autoplan.Plan:
    """Plan the training of a row on one device of a cluster."""
    t = row.training
    config: Any = llama_config(t.size)
    with torch.device("meta"):
        if row.plain:
            model: nn.Module = PlainLlama(t.size, config.intermediate_size)
        else:
            model = make_mixtral(t.size, 8, 2) if t.family == "mixtral" else make_llama(t.size)
    pins = {"dp": 1, "tp": 1, "pp": 1, "num_micro_batches": t.num_micro_batches, "recompute": t.recompute}
    return autoplan.plan(
        model.to(torch.bfloat16), cluster, example_inputs=token_batch(t.size), global_batch_size=t.size.batch,
        pins=pins, compile=t.compiled, verify=False,
    )  # fmt: skip


def main(files: Annotated[list[Path] | None, typer.Argument(help="results of on_gpu")] = None) -> None:
    """Print measured and predicted milliseconds and gigabytes."""
    table = Table(title="one step")
    headings = ("model", "measured, ms", "predicted", "interval", "error, %", "with profile, %", "peak, GB", "error, %")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for path in files or sorted(FOUND.glob("*.json")):
        found = json_format.loads(path.read_text())
        table.add_section()
        for row in measured(found["cases"]):
            estimate = price(row, CLUSTERS[found["environment"]["gpu"]]).estimate
            if estimate is None:
                raise RuntimeError(f"the plan of {row.name!r} has no estimate")
            step, figures = estimate.step_time_s, row.figures
            low, mid, high = (f"{1e3 * x:.1f}" for x in (step.low, step.mid, step.high))
            table.add_row(
                row.name, f"{figures['ms']:.1f}", mid, f"{low} to {high}",
                f"{100 * (1e3 * step.mid / figures['ms'] - 1):+.0f}",
                f"{100 * (figures['ratio'] - 1):+.0f}" if "ratio" in figures else "",
                *_peak(figures, estimate.peak_allocated_bytes),
            )  # fmt: skip
    make_console().print(table)


def _peak(figures: dict[str, float], predicted: Any) -> tuple[str, str]:
    """Return the most bytes that the allocator gave out, and the error of the price of that."""
    held = figures.get("allocated_gb")
    return ("", "") if held is None else (f"{held:.2f}", f"{100 * (predicted.mid / 1e9 / held - 1):+.0f}")


if __name__ == "__main__":
    run_command(main)
