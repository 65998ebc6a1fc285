"""The emitted tensor-parallel program against PyTorch's own: DTensor's `parallelize_module`, at the same degree.

    python experiments/tensor_parallel.py [--processes 2] [--budget-s 20] [--json FILE]

Both run Hugging Face's Llama, forward and backward, in the same processes of one gloo group, in turn. The layout of the
program is what the intra-op ILP chose for `pins={"tp": N}`. Every contender's loss and gradients are compared with one
process's; it fails if one differs.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from dtensor_llama import VARIANTS, CollectiveCount, full_gradients, make_step, reference, repeats_within, slowest
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
from torch.distributed.device_mesh import init_device_mesh

import autoplan

SIZES = (
    Size(hidden=64, num_layers=4, seq=32, num_kv_heads=4),
    Size(hidden=256, num_layers=4, seq=128, num_heads=8, num_kv_heads=4),
    Size(hidden=512, num_layers=4, seq=256, vocab=4096, num_heads=8, num_kv_heads=4),
)
TOLERANCE = 1e-4  # fp32, another order of additions
MINE = "autoplan"


def _count(step: Callable[[], object], world: int) -> dict[str, Any]:
    with CollectiveCount(world) as count:
        step()
    return {
        "forward": count.total("forward"),
        "backward": count.total("backward"),
        "kinds": {f"{phase} {kind}": n for (phase, kind), n in sorted(count.calls.items())},
    }


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """What each process does; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    loss, truth = reference(make_llama(size), batch)
    pm = autoplan.parallelize(make_llama(size), "local", example_inputs=batch, pins={"tp": world}, folder=folder)
    steps: dict[str, Callable[[], torch.Tensor]] = {MINE: lambda: pm.step(batch)}
    gradients: dict[str, Callable[[], dict[str, torch.Tensor]]] = {MINE: pm.gradients}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for variant in VARIANTS:
        model = make_llama(size)
        steps[variant] = make_step(model, mesh, variant, copy.copy(batch))
        gradients[variant] = lambda model=model: full_gradients(model)  # type: ignore[misc]
    out: dict[str, dict[str, Any]] = {}
    mine: dict[str, torch.Tensor] = {}
    for name, step in steps.items():
        got = float(step())
        collected = gradients[name]()
        mine = mine or collected
        worst = max_relative_difference(collected, truth)
        if abs(got - loss) > TOLERANCE * abs(loss) or worst > TOLERANCE:
            raise ValueError(f"{name} at {size}: loss {got}, one process {loss}; gradients differ by {worst:.1e}")
        between = max_relative_difference(mine, collected)
        out[name] = {"to_one_process": worst, "to_autoplan": between, **_count(step, world)}
    times = interleave(steps, budget_s=budget_s, repeats=repeats_within(budget_s, steps), before=dist.barrier)
    for t in times.values():
        t.wall_s = slowest(t.wall_s)
        total = torch.tensor(t.cpu_s, dtype=torch.float64)
        dist.all_reduce(total)
        t.cpu_s = total.tolist()
    for name, t in times.items():
        ratio = compare(times[MINE], t) if name != MINE else None
        out[name] |= {"median_s": t.median_s, "repeats": len(t.wall_s)}
        out[name] |= {"ratio": asdict(ratio), "ratio_text": str(ratio)} if ratio else {}
    return out


def table_of(cases: list[dict[str, Any]], title: str) -> Table:
    """The results as a table."""
    table = Table(title=f"forward + backward of HF Llama: {title}")
    left = ("model", "program")
    for heading in (*left, "ms", "autoplan / this", "cpu", "fwd", "bwd", "MB", "diff"):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for c in cases:
        for name, r in c["contenders"].items():
            ratio = r.get("ratio")
            table.add_row(
                c["name"] if name == MINE else "",
                name,
                f"{1e3 * r['median_s']:.1f}",
                r["ratio_text"] if ratio else "",
                f"{ratio['cpu']:.2f}" if ratio else "",
                str(r["forward"][0]),
                str(r["backward"][0]),
                f"{(r['forward'][1] + r['backward'][1]) / 1e6:.2f}",
                f"{r['to_one_process']:.0e}" if name == MINE else f"{r['to_autoplan']:.0e}",
            )
        table.add_section()
    return table


def main(
    processes: Annotated[int, typer.Option(help="tensor-parallel degree, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 25.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time the tensor-parallel program against parallelize_module, side by side."""
    env = {**environment(), "threads": 1, "processes": processes, "backend": "gloo"}
    console = make_console()
    cases = []
    for size in SIZES:
        with console.status(f"llama {size}"), tempfile.TemporaryDirectory() as folder:
            results = run_ranks(measure_rank, processes, size, budget_s, folder, timeout_s=timeout_s)
        cases.append({"name": f"llama {size}", "size": asdict(size), "contenders": results[0]})
    console.print(table_of(cases, f"{processes} processes, gloo; {describe(env)}"))
    console.print(
        "Below autoplan: DTensor variants. fwd, bwd: collectives per step. MB: sent by each process per step.\n"
        "diff: of the gradients, worst parameter, relative; of autoplan to one process, of the others to autoplan."
    )
    write_json(json, "tensor_parallel", env, cases)


if __name__ == "__main__":
    run_command(main)
