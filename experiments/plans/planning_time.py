"""How long planning takes, from starting Python to the plan: dense models and mixtures of experts, to 131,072 H100.

    python -m experiments.plans.planning_time [--only 405b] [--repeats 1] [--no-warm] [--json FILE]

Every row is a process of its own, cold: nothing is imported, captured or cached. Aim: 405B within 5 s and 1 GB. Beside
the seconds from start to plan stand those of the processor, which other work on the machine changes less, of both
processes of a search together, and their share of its helper (none with AUTOPLAN_PROCESSES=1). Memory is that of both,
what they share counted twice. In a column
`warm` stand the processor's seconds of the same search in a process that finds its layouts on disk, where an earlier
one left them (autoplan/search/layout_files.py); its plan is compared with the cold one.
"""

from __future__ import annotations

import json as text
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan.config.planning import NO_CACHE_VARIABLE
from autoplan.files import CACHE_VARIABLE
from autoplan.search.certificate import Status
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

ROWS = (  # model, nodes, tokens per sequence (megatron-1t has 2,048 positions), tokens per step
    ("llama-3.1-8b", 8, 8192, 2**22),
    ("llama-3.1-70b", 128, 8192, 2**23),
    ("llama-3.1-405b", 2048, 8192, 2**24),
    ("llama-3.1-405b", 16384, 8192, 2**27),
    ("megatron-1t", 4096, 2048, 2**25),
    ("qwen3-235b-a22b", 32, 8192, 2**22),
    ("deepseek-v3", 256, 8192, 2**26),
    ("deepseek-v3", 2048, 8192, 2**27),
    ("deepseek-v3@mtp=1", 256, 8192, 2**26),
)
PHASES: dict[str, tuple[str, ...]] = {
    "imports": ("imports",),
    "load": ("load graph", "cluster"),
    "intra-op": ("intra-op build", "intra-op solve", "layout files"),
    "work": ("workloads",),
    "bounds": ("space", "bounds"),
    "evaluate": ("evaluation",),
    "other": ("other",),
}


def plan(model: str, nodes: int, seq_len: int, tokens: int, limit_s: float, cache: str | None = None) -> dict[str, Any]:
    """One process. RuntimeError with its output if it fails.

    Args:
        cache: folder of cached layouts; None: nothing is cached.
    """
    machines = f"{nodes}x8xh100-sxm5-80gb"
    command = [
        sys.executable,
        "-m",
        "experiments.plans.planning_time_child",
        model,
        machines,
        str(seq_len),
        str(tokens // seq_len),
        str(limit_s),
    ]
    kept = {CACHE_VARIABLE: cache, NO_CACHE_VARIABLE: ""} if cache is not None else {NO_CACHE_VARIABLE: "1"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **kept}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 60, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{model} on {machines} failed:\n{done.stderr[-4000:]}")
    row: dict[str, Any] = text.loads(done.stdout.splitlines()[-1])
    unknown = set(row["phases_s"]) - {name for names in PHASES.values() for name in names}
    if unknown:
        raise RuntimeError(f"phases that this table does not show: {sorted(unknown)}")
    return {"model": model, "devices": nodes * 8, "seq_len": seq_len, "tokens": tokens, **row}


def plan_warm(*task: Any) -> dict[str, Any]:
    """Plan twice with the same cached layouts, and return the second time."""
    with tempfile.TemporaryDirectory() as folder:
        plan(*task, cache=folder)
        return plan(*task, cache=folder)


def _check_same(model: str, cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """Raise RuntimeError if the plan with cached layouts differs in a bit, and time stopped neither search."""
    if Status.TIME_LIMIT in (cold["certificate"]["status"], warm["certificate"]["status"]):
        return
    for name in ("config", "step_time_s", "memory_bytes", "breakdown_s"):
        if cold[name] != warm[name]:
            raise RuntimeError(f"{model}: {name} is {warm[name]} with cached layouts, {cold[name]} without")


def _describe(config: dict[str, Any], row: dict[str, Any]) -> str:
    degrees = " ".join(f"{n}{config[n]}" for n in ("dp", "tp", "pp", "cp", "ep") if config[n] > 1)
    stages, again = config["stages"], config["recompute"]
    cut = f" stages {min(stages)}-{max(stages)}" if config["pp"] > 1 else ""
    recompute = f" recompute {sum(again)}" if isinstance(again, list) and sum(again) else ""
    batch = f"b{config['micro_batch_size']} x {config['num_micro_batches']}"
    return (
        f"{degrees} z{config['zero_stage']} {batch}{cut}{recompute}:"
        f" {row['step_time_s']:.2f} s, MFU {row['mfu']:.1%}, {row['memory_bytes'] / 1e9:.0f} GB"
    )


def main(
    only: Annotated[str, typer.Option(help="rows whose model contains this")] = "",
    repeats: Annotated[int, typer.Option(help="processes per row; the median is shown")] = 1,
    limit_s: Annotated[float, typer.Option(help="time limit of one search")] = 60.0,
    warm: Annotated[bool, typer.Option(help="also with the layouts of an earlier process")] = True,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Plan each row in fresh processes and say where the time goes."""
    env = environment()
    console = make_console()
    table = Table(title=f"seconds from start to plan; {describe(env)}")
    for heading in ("model", "devices", *PHASES, "total", "processor", "helper", "warm", "MB"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    cases, notes = [], []
    for model, *task in ROWS:
        if only not in model:
            continue
        with console.status(model):
            runs = sorted((plan(model, *task, limit_s) for _ in range(repeats)), key=lambda r: r["total_s"])
        row = runs[len(runs) // 2] | {"totals_s": [r["total_s"] for r in runs]}
        if warm:
            row["warm"] = min((plan_warm(model, *task, limit_s) for _ in range(repeats)), key=lambda r: r["total_s"])
            _check_same(model, row, row["warm"])
        cases.append(row)
        times = [sum(row["phases_s"].get(n, 0.0) for n in names) for names in PHASES.values()]
        table.add_row(
            model,
            str(row["devices"]),
            *(f"{t:.2f}" for t in times),
            f"{statistics.median(row['totals_s']):.2f}",
            f"{row['processor_s']:.2f}",
            f"{row['helper_processor_s']:.2f}",
            f"{row['warm']['processor_s']:.2f}" if warm else "",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
        )
        c = row["certificate"]
        notes.append(f"{model}: {_describe(row['config'], row)}")
        counts = ("considered", "illegal", "too_big", "bounded_out", "solved", "open")
        counted = " ".join(f"{n} {c[n]:,}" for n in counts)
        notes.append(f"  {counted}; gap {c['gap']:.2%}, intra-op gap {c['intra_gap']:.1e}, {c['status']}")
        if row["torch_loaded"]:
            notes.append("  torch was loaded")
    console.print(table)
    for note in notes:
        console.print(note)
    write_json(json, "planning_time", env, cases)


if __name__ == "__main__":
    run_command(main)
