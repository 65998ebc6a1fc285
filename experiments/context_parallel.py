"""Context parallelism on local processes: the emitted programs against what one writes by hand.

    python experiments/context_parallel.py [--processes 2] [--budget-s 20] [--json FILE]

Hugging Face's Llama, forward and backward, every sequence cut over the same processes of one gloo group, in turn:
`program` with keys gathered, by a ring and by Ulysses, and the three written by hand (context_by_hand.py). Loss and
gradients of all six are compared with one process; it fails if one differs.
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
from context_by_hand import METHODS, cut, make_step
from dtensor_llama import reference, repeats_within, slowest
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
from models import Size, make_llama, token_batch
from processes import run_ranks
from rich.table import Table

import autoplan

SIZES = (
    Size(hidden=128, num_layers=4, seq=256, batch=2),
    Size(hidden=128, num_layers=4, seq=1024, batch=1),
    Size(hidden=256, num_layers=4, seq=2048, batch=1),
)
TOLERANCE = 1e-4  # fp32, another order of additions


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """What each process does; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    loss, truth = reference(make_llama(size), batch)
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    collected: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
    for method in METHODS:
        pm = autoplan.parallelize(
            make_llama(size),
            "local",
            example_inputs=batch,
            pins={
                "dp": 1, "tp": 1, "pp": 1, "cp": world, "context_method": method, "zero_stage": 0,
                "num_micro_batches": 1, "recompute": "none",
            },
            global_batch_size=size.batch,
            folder=f"{folder}/{method}",
        )  # fmt: skip
        program, by_hand = f"program {method}", f"by hand {method}"
        steps[program], collected[program] = (lambda pm=pm: pm.step(batch)), pm.gradients  # type: ignore[misc]
        model = cut(make_llama(size), method)
        steps[by_hand] = make_step(model, batch, method)
        collected[by_hand] = lambda model=model: {  # type: ignore[misc]
            n: p.grad for n, p in model.module.named_parameters() if p.grad is not None
        }
    differences = {}
    for name, step in steps.items():
        got = step().clone()
        if name.startswith("by hand"):
            dist.all_reduce(got)
        differences[name] = max_relative_difference(collected[name](), truth)
        if abs(float(got - loss)) > TOLERANCE * abs(loss) or differences[name] > TOLERANCE:
            raise ValueError(
                f"{name} at {size}: loss {float(got)}, one process {loss}; gradients differ by {differences[name]:.1e}"
            )
    times = interleave(steps, budget_s=budget_s, repeats=repeats_within(budget_s, steps), before=dist.barrier)
    for t in times.values():
        t.wall_s = slowest(t.wall_s)
    ratios = {f"program {m}": compare(times[f"program {m}"], times[f"by hand {m}"]) for m in METHODS}
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
    table = Table(title=f"forward + backward of HF Llama, sequences cut: {title}")
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
    processes: Annotated[int, typer.Option(help="ranks that share every sequence, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 25.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with cut sequences against context parallelism written by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: 4 attention heads are cut by 2 or 4")
    env = {**environment(), "threads": 1, "processes": processes, "backend": "gloo"}
    console = make_console()
    cases = []
    for size in SIZES:
        with console.status(f"llama {size}"), tempfile.TemporaryDirectory() as folder:
            results = run_ranks(measure_rank, processes, size, budget_s, folder, timeout_s=timeout_s)
        cases.append({"name": f"llama {size}", "size": asdict(size), "contenders": results[0]})
    console.print(table_of(cases, f"{processes} processes, gloo; {describe(env)}"))
    write_json(json, "context_parallel", env, cases)


if __name__ == "__main__":
    run_command(main)
