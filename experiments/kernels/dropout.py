"""Dropout on the CPU: op by op, compiled, and torch's own, forward and backward in turn.

    python -m experiments.kernels.dropout [--budget-s 20] [--quick] [--json FILE]

The program's dropout draws the same mask in every plan. Its own operators run in blocks that fit the cache; inside a
compiled block inductor makes one loop of them. Both must give the same bits, forward and backward. torch's own draws
another mask and stands for its price. What compiling takes is measured too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from autoplan.runtime.dropout import dropout
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.random_bits import Factor
from experiments.shared.measure import (
    compare,
    describe,
    environment,
    interleave,
    limit_time,
    make_console,
    run_command,
    write_json,
)

Drop = Callable[[torch.Tensor], torch.Tensor]
OWN = "torch's own"


def measured(shape: tuple[int, int, int], dtype: torch.dtype, budget_s: float) -> dict[str, Any]:
    """Return the figures of one tensor: [batch, sequence, hidden], one half of the hidden dim on this rank of two."""
    batch, length, hidden = shape
    index: tuple[Factor, ...] = ((batch, batch, "batch"), (length, length, ()), (hidden, 2 * hidden, ("tp",)))
    given = partial(dropout, p=0.1, rng=torch.tensor([7, 3, 16]), site=3, index=index)
    node = torch.compiler.allow_in_graph(dropout)  # as autoplan.runtime.compiled does

    def in_graph(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = node(x, *given.args, **given.keywords)
        return out

    ways: dict[str, Drop] = {"op by op": given, "compiled": torch.compile(in_graph, fullgraph=True)}
    ways[OWN] = partial(torch.nn.functional.dropout, p=0.1)
    x, grad = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)

    def step(drop: Drop) -> tuple[torch.Tensor, torch.Tensor]:
        out = drop(x)
        return out.detach(), torch.autograd.grad(out, x, grad)[0]

    begin = time.perf_counter()
    first = step(ways["compiled"])
    compiling_s = time.perf_counter() - begin
    if not all(torch.equal(a, b) for a, b in zip(first, step(given), strict=True)):
        raise SystemExit(f"{dtype}: the compiled mask is another one")
    times = interleave({name: partial(step, drop) for name, drop in ways.items()}, budget_s=budget_s)
    rows = {
        name: {"ms": 1e3 * t.median_s, "ratio": compare(t, times[OWN]).median, "cpu": compare(t, times[OWN]).cpu}
        for name, t in times.items()
    }
    return {"shape": list(shape), "dtype": str(dtype)[6:], "compiling_s": compiling_s, "rows": rows}


def main(
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per tensor")] = 20.0,
    quick: Annotated[bool, typer.Option(help="a small tensor, a few repetitions: does it run?")] = False,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time dropout op by op, compiled, and torch's own, side by side."""
    limit_time(timeout_s)
    warnings.filterwarnings("ignore")
    env, console = environment(), make_console()
    dist.init_process_group("fake", rank=1, world_size=2)
    shape = (2, 64, 256) if quick else (8, 512, 1024)
    with use_mesh(AxisMesh([("tp", 2)], {})):
        cases = [measured(shape, d, 1.0 if quick else budget_s) for d in (torch.float32, torch.bfloat16)]
    table = Table(title=f"dropout of {shape}; {describe(env)}")
    for column in ("dtype", "how", "ms", f"ratio to {OWN}", "cpu", "compiling s"):
        table.add_column(column)
    for case in cases:
        for name, row in case["rows"].items():
            compiling = f"{case['compiling_s']:.1f}" if name == "compiled" else ""
            table.add_row(
                case["dtype"], name, f"{row['ms']:.1f}", f"{row['ratio']:.2f}", f"{row['cpu']:.2f}", compiling
            )
    console.print(table)
    write_json(json, "dropout", env, cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
