"""Does the emitted program cost more than the model it came from? One rank against plain eager PyTorch.

    python -m experiments.plans.program_overhead [--family llama] [--family gpt] [--budget-s 20] [--json FILE]

A step is forward and backward with fresh gradients; `program` is `pm.step(batch)`, all of its bookkeeping included, and
`eager` is the untouched module (sdpa attention) with `loss.backward()`. Losses and gradients must agree, or it fails.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn

import autoplan
from experiments.shared.measure import (
    compare,
    describe,
    environment,
    interleave,
    limit_time,
    make_console,
    max_relative_difference,
    run_command,
    saved_bytes,
    write_json,
)
from experiments.shared.models import Size, gpt_loss, make_gpt, make_llama, token_batch

SIZES = (
    Size(hidden=32, num_layers=4, seq=32),
    Size(hidden=128, num_layers=4, seq=64),
    Size(hidden=256, num_layers=4, seq=128, num_heads=8, num_kv_heads=4),
    Size(hidden=512, num_layers=6, seq=256, num_heads=8, num_kv_heads=4),
)
TOLERANCE = 1e-4  # fp32, another order of additions


def run_case(family: str, size: Size, budget_s: float) -> dict[str, Any]:
    """Measure one model. SystemExit if the program computes something else."""
    batch = token_batch(size)
    model: nn.Module = make_llama(size) if family == "llama" else make_gpt(size)
    loss_fn = None if family == "llama" else gpt_loss
    pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss_fn)

    def eager() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        loss: torch.Tensor
        loss = loss_fn(model(batch["input_ids"]), batch) if loss_fn else model(**batch, use_cache=False).loss
        torch.autograd.backward(loss)
        return loss.detach()

    def program() -> torch.Tensor:
        return pm.step(batch)

    losses = float(program()), float(eager())
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    difference = max_relative_difference(pm.gradients(), theirs)
    if abs(losses[0] - losses[1]) > TOLERANCE * abs(losses[1]) or difference > TOLERANCE:
        raise SystemExit(f"{family} {size}: losses {losses}, gradients differ by {difference:.1e} relative")
    saved = saved_bytes(program, pm.parameters()), saved_bytes(eager, model.parameters())
    times = interleave({"program": program, "eager": eager}, budget_s=budget_s)
    ratio = compare(times["program"], times["eager"])
    return {
        "family": family,
        "size": asdict(size),
        "name": f"{family} {size}",
        "repeats": len(times["eager"].wall_s),
        "program_s": times["program"].median_s,
        "eager_s": times["eager"].median_s,
        "ratio": asdict(ratio),
        "ratio_text": str(ratio),
        "saved_bytes": {"program": saved[0], "eager": saved[1]},
        "gradient_difference": difference,
    }


def table_of(cases: list[dict[str, Any]], title: str) -> Table:
    """Return the results as a table."""
    table = Table(title=f"program at 1 rank / eager, forward + backward: {title}")
    for heading in ("model", "n", "eager ms", "program ms", "ratio [quartiles]", "fastest", "cpu", "saved MB (ratio)"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for c in cases:
        mine, theirs = c["saved_bytes"]["program"], c["saved_bytes"]["eager"]
        table.add_row(
            c["name"],
            str(c["repeats"]),
            f"{1e3 * c['eager_s']:.1f}",
            f"{1e3 * c['program_s']:.1f}",
            c["ratio_text"],
            f"{c['ratio']['best']:.3f}",
            f"{c['ratio']['cpu']:.3f}",
            f"{mine / 1e6:.1f} ({mine / theirs:.3f})",
        )
    return table


def main(
    family: Annotated[list[str] | None, typer.Option(help="llama, gpt; default both")] = None,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 15.0,
    threads: Annotated[int, typer.Option(help="threads of PyTorch")] = 1,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = 900.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time the emitted program at 1 rank against the eager model."""
    families = family or ["llama", "gpt"]
    unknown = set(families) - {"llama", "gpt"}
    if unknown:
        raise typer.BadParameter(f"unknown family {sorted(unknown)[0]!r}; use llama or gpt")
    limit_time(timeout_s)
    warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
    torch.set_num_threads(threads)
    env = environment()
    console = make_console()
    cases = []
    for size in SIZES:
        for name in families:
            with console.status(f"{name} {size}"):
                cases.append(run_case(name, size, budget_s))
    console.print(table_of(cases, describe(env)))
    write_json(json, "program_overhead", env, cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
