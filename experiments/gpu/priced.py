"""Steps that were measured on a GPU beside their prices: data sheets and published runs alone, no profile, no fit.

    python -m experiments.gpu.priced [FILE ...]      by default all files of experiments/gpu/found; needs no GPU

The rows are those of the part `step` of on_gpu: the models of Hugging Face and of torchtitan, one device, bfloat16.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import autoplan
from experiments.gpu.models import PlainLlama
from experiments.gpu.training import STEP_SIZE
from experiments.shared.measure import make_console, run_command
from experiments.shared.models import llama_config, make_llama, token_batch

FOUND = Path(__file__).parent / "found"
CLUSTERS = {"NVIDIA H200": "1x1xh200-sxm"}
PINS = {"dp": 1, "tp": 1, "pp": 1, "num_micro_batches": 1, "recompute": "none"}


def price(model: str, compiled: bool, cluster: str) -> autoplan.Plan:
    """Plan the step of a row of `step` on one device. model: its name there, without `, compiled`."""
    config: Any = llama_config(STEP_SIZE)
    with torch.device("meta"):
        made = make_llama(STEP_SIZE) if model == "Hugging Face" else PlainLlama(STEP_SIZE, config.intermediate_size)
    return autoplan.plan(
        made.to(torch.bfloat16), cluster, example_inputs=token_batch(STEP_SIZE), global_batch_size=STEP_SIZE.batch,
        pins=PINS, compile=compiled, verify=False,
    )  # fmt: skip


def main(files: Annotated[list[Path] | None, typer.Argument(help="results of on_gpu")] = None) -> None:
    """Print measured and predicted milliseconds of every step."""
    table = Table(title="one step, milliseconds")
    for heading in ("device", "model", "measured", "predicted", "interval", "error, %"):
        table.add_column(heading, justify="left" if heading in ("device", "model") else "right")
    for path in files or sorted(FOUND.glob("*.json")):
        found = json_format.loads(path.read_text())
        gpu = found["environment"]["gpu"]
        for row in (r for r in found["cases"] if r["part"] == "step" and r["figures"]):
            name, _, compiled = row["name"].partition(", ")
            if name not in ("Hugging Face", "as torchtitan"):
                continue
            estimate = price(name, bool(compiled), CLUSTERS[gpu]).estimate
            if estimate is None:
                raise RuntimeError(f"the plan of {row['name']!r} has no estimate")
            step, measured = estimate.step_time_s, row["figures"]["ms"]
            table.add_row(
                gpu, row["name"], f"{measured:.1f}", f"{1e3 * step.mid:.1f}",
                f"{1e3 * step.low:.1f} to {1e3 * step.high:.1f}", f"{100 * (1e3 * step.mid / measured - 1):+.0f}",
            )  # fmt: skip
    make_console().print(table)


if __name__ == "__main__":
    run_command(main)
