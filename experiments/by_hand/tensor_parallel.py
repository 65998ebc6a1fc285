"""The emitted tensor-parallel program against PyTorch's own: DTensor's `parallelize_module`, at the same degree.

    python -m experiments.by_hand.tensor_parallel [--processes 2] [--budget-s 20] [--json FILE]

Both run Hugging Face's Llama, forward and backward, in the same processes of one gloo group, in turn. The layout of the
program is what the intra-op ILP chose for `pins={"tp": N}`. Every contender's loss and gradients are compared with one
process's; it fails if one differs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from experiments.by_hand.dtensor_llama import VARIANTS, CollectiveCount, full_gradients, make_step
from experiments.shared.in_turn import Contender, check, reference, report, run_sizes, time_together
from experiments.shared.measure import compare, make_console, max_relative_difference, run_command
from experiments.shared.models import Size, make_llama, token_batch

SIZES = (
    Size(hidden=64, num_layers=4, seq=32, num_kv_heads=4),
    Size(hidden=256, num_layers=4, seq=128, num_heads=8, num_kv_heads=4),
    Size(hidden=512, num_layers=4, seq=256, vocab=4096, num_heads=8, num_kv_heads=4),
)
MINE = "autoplan"


def _count(contender: Contender, world: int) -> dict[str, Any]:
    with CollectiveCount(world) as count:
        contender.step()
    return {
        "forward": count.total("forward"),
        "backward": count.total("backward"),
        "kinds": {f"{phase} {kind}": n for (phase, kind), n in sorted(count.calls.items())},
    }


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """Do the work of one process and return its results; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    truth = reference(make_llama(size), batch)
    pm = autoplan.parallelize(make_llama(size), "local", example_inputs=batch, pins={"tp": world}, folder=folder)
    contenders = {MINE: Contender(lambda: pm.step(batch), pm.gradients)}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for variant in VARIANTS:
        model = make_llama(size)
        contenders[variant] = Contender(
            make_step(model, mesh, variant, copy.copy(batch)),
            lambda model=model: full_gradients(model),  # type: ignore[misc]
        )
    differences = check(contenders, truth, size)
    out: dict[str, dict[str, Any]] = {}
    mine = pm.gradients()
    for name, contender in contenders.items():
        between = max_relative_difference(mine, contender.gradients())
        out[name] = {"to_one_process": differences[name], "to_autoplan": between, **_count(contender, world)}
    times = time_together(contenders, budget_s)
    for name, t in times.items():
        total = torch.tensor(t.cpu_s, dtype=torch.float64)
        dist.all_reduce(total)
        t.cpu_s = total.tolist()
        out[name] |= {"median_s": t.median_s, "repeats": len(t.wall_s)}
        if name != MINE:
            ratio = compare(times[MINE], t)
            out[name] |= {"ratio": asdict(ratio), "ratio_text": str(ratio)}
    return out


def table_of(cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the results as a table."""
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
    env, cases = run_sizes(measure_rank, "llama", SIZES, processes, budget_s, timeout_s)
    report("tensor_parallel", env, cases, json, table_of)
    make_console().print(
        "Below autoplan: DTensor variants. fwd, bwd: collectives per step. MB: sent by each process per step.\n"
        "diff: of the gradients, worst parameter, relative; of autoplan to one process, of the others to autoplan."
    )


if __name__ == "__main__":
    run_command(main)
