"""Mixtures of experts on local processes: the emitted programs against what one writes by hand.

    python experiments/expert_parallel.py [--processes 2] [--budget-s 20] [--json FILE]

Hugging Face's Mixtral, forward and backward, in the same processes of one gloo group, in turn: `program` with every
expert on every rank (ep 1) and with experts spread over the ranks (ep N), PyTorch's DDP around the untouched model, and
DDP with the experts spread by hand (experts_by_hand.py). Loss and gradients of all four are compared with one process;
it fails if one differs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from dtensor_llama import reference, repeats_within, slowest
from experts_by_hand import gradients, make_step, spread
from measure import (
    compare,
    describe,
    environment,
    interleave,
    make_console,
    max_relative_difference,
    run_command,
    write_json,
)
from models import Size, make_mixtral, token_batch
from processes import run_ranks
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import autoplan

SIZES = (
    Size(hidden=64, num_layers=4, seq=32, batch=4),
    Size(hidden=128, num_layers=4, seq=128, batch=4),
    Size(hidden=256, num_layers=4, seq=256, batch=4, num_heads=8, num_kv_heads=4),
)
NUM_EXPERTS, TOP_K = 8, 2
TOLERANCE = 1e-4  # fp32, another order of additions
# (program, what it is compared with)
PAIRS = (("program ep 1", "DDP"), ("program ep N", "by hand ep N"))


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """What each process does; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    whole = token_batch(size)
    loss, truth = reference(make_mixtral(size, NUM_EXPERTS, TOP_K), whole)
    part = size.batch // world
    mine = {n: x[rank * part : (rank + 1) * part] for n, x in whole.items()}
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    collected: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
    for (program, by_hand), ep in zip(PAIRS, (1, world), strict=True):
        pm = autoplan.parallelize(
            make_mixtral(size, NUM_EXPERTS, TOP_K),
            "local",
            example_inputs=mine,
            pins={"dp": world, "tp": 1, "ep": ep, "zero_stage": 0, "num_micro_batches": 1},
            global_batch_size=size.batch,
            folder=f"{folder}/{ep}",
        )
        steps[program], collected[program] = (lambda pm=pm: pm.step(mine)), pm.gradients  # type: ignore[misc]
        plain = make_mixtral(size, NUM_EXPERTS, TOP_K)
        model = DistributedDataParallel(plain) if ep == 1 else spread(plain)
        steps[by_hand] = make_step(model, mine)
        collected[by_hand] = lambda model=model: gradients(model)  # type: ignore[misc]
    differences = {}
    for name, step in steps.items():
        got = step().clone()
        if name not in dict(PAIRS):  # of this rank's part of the batch, all parts equally large
            dist.all_reduce(got)
            got /= world
        differences[name] = max_relative_difference(collected[name](), truth)
        if abs(float(got - loss)) > TOLERANCE * abs(loss) or differences[name] > TOLERANCE:
            raise ValueError(
                f"{name} at {size}: loss {float(got)}, one process {loss}; gradients differ by {differences[name]:.1e}"
            )
    times = interleave(steps, budget_s=budget_s, repeats=repeats_within(budget_s, steps), before=dist.barrier)
    for t in times.values():
        t.wall_s = slowest(t.wall_s)
    ratios = {program: compare(times[program], times[by_hand]) for program, by_hand in PAIRS}
    return {
        name: {
            "median_s": t.median_s,
            "difference": differences[name],
            "repeats": len(t.wall_s),
            **({"ratio": asdict(ratios[name]), "ratio_text": str(ratios[name])} if name in ratios else {}),
        }
        for name, t in times.items()
    }


def table_of(cases: list[dict[str, Any]], title: str) -> Table:
    """The results as a table."""
    table = Table(title=f"forward + backward of HF Mixtral, {NUM_EXPERTS} experts, {TOP_K} per token: {title}")
    for heading in ("model", "contender", "n", "ms", "program / by hand", "gradients to one process"):
        table.add_column(heading, justify="left" if heading in ("model", "contender") else "right", no_wrap=True)
    for c in cases:
        for k, (name, r) in enumerate(c["contenders"].items()):
            table.add_row(
                "" if k else c["name"], name, str(r["repeats"]), f"{1e3 * r['median_s']:.1f}",
                r.get("ratio_text", ""), f"{r['difference']:.0e}",
            )  # fmt: skip
        table.add_section()
    return table


def main(
    processes: Annotated[int, typer.Option(help="data-parallel ranks, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 25.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with experts against DDP and experts spread by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: batch of 4 and {NUM_EXPERTS} experts are cut by 2 or 4")
    env = {**environment(), "threads": 1, "processes": processes, "backend": "gloo"}
    console = make_console()
    cases = []
    for size in SIZES:
        with console.status(f"mixtral {size}"), tempfile.TemporaryDirectory() as folder:
            results = run_ranks(measure_rank, processes, size, budget_s, folder, timeout_s=timeout_s)
        cases.append({"name": f"mixtral {size}", "size": asdict(size), "contenders": results[0]})
    console.print(table_of(cases, f"{processes} processes, gloo; {describe(env)}"))
    write_json(json, "expert_parallel", env, cases)


if __name__ == "__main__":
    run_command(main)
