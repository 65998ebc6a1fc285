"""What the checks of every step cost: does the batch fit, and is it the same on the ranks that must have the same?

    python -m experiments.plans.batch_checks [--steps 40] [--json FILE]

A small Llama on four processes (dp 2, tp 2) trains in turns, step by step: as it is; comparing the contents of its
batch in every step; and with the count of valid labels alone, all-reduced over data parallelism, as a program without
checks needs it. Median milliseconds of a step, and the median ratio of steps that stand side by side.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

import autoplan
from autoplan.profiler.processes import run_ranks
from autoplan.runtime import batch as checks
from experiments.shared.measure import describe, environment, make_console, run_command, write_json
from experiments.shared.models import Size, make_llama, token_batch

SIZES = (Size(hidden=64, num_layers=4, seq=64, batch=8), Size(hidden=256, num_layers=4, seq=256, batch=8, num_heads=8))
WAYS = ("as it is", "contents in every step", "count alone")


def _count_alone(pm: Any) -> Any:
    """`Batches.settle` without checks: what the loss needs."""

    def settle(batch: Any, problem: str | None, count: Any, **_: Any) -> checks.Counts:
        total = torch.tensor([count()])
        dist.all_reduce(total, group=pm.mesh.group("dp"))
        return checks.Counts(int(total), None)

    return settle


def steps(rank: int, world: int, size: Size, num_steps: int) -> dict[str, list[float]]:
    """Seconds of every step, by way."""
    pm = autoplan.parallelize(
        make_llama(size), "local", example_inputs=token_batch(size), pins={"dp": 2, "tp": 2}, verify=False
    )
    batch = {n: x[: size.batch // 2] for n, x in token_batch(size).items()}
    usual, alone = pm._batches.settle, _count_alone(pm)
    out: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(num_steps + 2):  # the first two warm up
        for way in WAYS:
            pm._batches.settle = alone if way == "count alone" else usual
            pm.progress.num_steps = 0 if way == "contents in every step" else 1
            dist.barrier()
            begin = time.perf_counter()
            pm.step(batch)
            if step > 1:
                out[way].append(time.perf_counter() - begin)
    return out


def main(
    num_steps: Annotated[int, typer.Option("--steps", help="Of each way.")] = 40,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    """Time steps with and without checks."""
    console = make_console()
    console.print(describe(environment()))
    os.environ["AUTOPLAN_PROFILE"] = "assumed"  # nothing is searched that a measurement could decide
    table = Table("hidden", "seq", *(f"{way}, ms" for way in WAYS), "as it is / count alone")
    rows = []
    for size in SIZES:
        found = run_ranks(steps, 4, size, num_steps, timeout_s=400)[0]
        medians = {way: 1e3 * statistics.median(times) for way, times in found.items()}
        ratio = statistics.median(a / b for a, b in zip(found["as it is"], found["count alone"], strict=True))
        rows.append({"hidden": size.hidden, "seq": size.seq, **medians, "ratio": ratio})
        table.add_row(str(size.hidden), str(size.seq), *(f"{medians[w]:.1f}" for w in WAYS), f"{ratio:.3f}")
    console.print(table)
    write_json(json_file, "batch_checks.py", environment(), rows)


if __name__ == "__main__":
    run_command(main)
