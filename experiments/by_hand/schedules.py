"""Pipeline schedules on local processes: the emitted programs against stages written by hand on stock PyTorch.

    python -m experiments.by_hand.schedules [--processes 2] [--budget-s 25] [--json FILE]

Hugging Face's Llama, forward and backward, in the same processes of one gloo group, in turn: every schedule as
`autoplan.parallelize` runs it (no tensor or data parallelism), beside the same cut of the model into stages of
untouched Hugging Face layers under the same schedule of `torch.distributed.pipelining` (pipeline_by_hand.py). Loss and
gradients of all are compared with one process; it fails if one differs. The predicted step stands beside the measured
one, from a profile of the machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import autoplan
from autoplan.schedules.schedule import chunks_of_ranks
from experiments.by_hand.pipeline_by_hand import make_step
from experiments.shared.in_turn import Contender, check, reference, report, results_of, run_sizes, time_together
from experiments.shared.measure import compare, run_command
from experiments.shared.models import Size, make_llama, token_batch

SIZES = (
    Size(hidden=128, num_layers=8, seq=128, batch=8),
    Size(hidden=256, num_layers=8, seq=256, batch=8, num_heads=8, num_kv_heads=4),
)
# (schedule, stages per rank)
SCHEDULES = (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZB-H1", 1), ("ZBV", 2), ("DualPipeV", 2))


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """Do the work of one process and return its results; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    truth = reference(make_llama(size), batch)
    contenders: dict[str, Contender] = {}
    predicted: dict[str, float] = {}
    for schedule, virtual in SCHEDULES:
        num_stages = world * virtual
        pm = autoplan.parallelize(
            make_llama(size),
            "local",
            example_inputs=batch,
            pins={
                "pp": world, "dp": 1, "tp": 1, "zero_stage": 0, "num_micro_batches": size.batch, "recompute": "none",
                "schedule": schedule, "virtual_stages": virtual, "stages": [size.num_layers // num_stages] * num_stages,
            },
            global_batch_size=size.batch,
            folder=f"{folder}/{schedule}",
        )  # fmt: skip
        contenders[schedule] = Contender(lambda pm=pm: pm.step(batch), pm.gradients)  # type: ignore[misc]
        predicted[schedule] = pm.plan.estimate.step_time_s.mid
        held = chunks_of_ranks(schedule, world, virtual)[rank]
        step, mine = make_step(make_llama(size), schedule, held, num_stages, size.batch, batch)
        contenders[f"{schedule} by hand"] = Contender(
            step,
            lambda mine=mine: {n: p.grad for n, p in mine.items() if p.grad is not None},  # type: ignore[misc]
            share=1.0,  # 0 but where the last stage is
        )
    differences = check(contenders, truth, size, parts=True)
    times = time_together(contenders, budget_s)
    results = results_of(times, differences, {s: f"{s} by hand" for s, _ in SCHEDULES})
    return {
        schedule: {
            **results[schedule],
            "by_hand_s": times[f"{schedule} by hand"].median_s,
            "predicted_s": predicted[schedule],
            "to_1f1b": str(compare(times[schedule], times["1F1B"])),
        }
        for schedule, _ in SCHEDULES
    }


def table_of(cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the results as a table."""
    table = Table(title=f"forward + backward of HF Llama in stages: {title}")
    for heading in (
        "model", "schedule", "n", "ms", "by hand", "program / by hand", "to 1F1B", "predicted", "gradients",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("model", "schedule") else "right", no_wrap=True)
    for c in cases:
        for k, (name, r) in enumerate(c["contenders"].items()):
            table.add_row(
                "" if k else c["name"], name, str(r["repeats"]), f"{1e3 * r['median_s']:.1f}",
                f"{1e3 * r['by_hand_s']:.1f}", r["ratio_text"], r["to_1f1b"].split(" ")[0],
                f"{1e3 * r['predicted_s']:.1f}", f"{r['difference']:.0e}",
            )  # fmt: skip
        table.add_section()
    return table


def main(
    processes: Annotated[int, typer.Option(help="ranks of the pipeline, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 40.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 500.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs under every schedule against stages written by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: 8 layers are cut into 2 or 4 ranks of up to 2 stages")
    env, cases = run_sizes(measure_rank, "llama", SIZES, processes, budget_s, timeout_s)
    report("schedules", env, cases, json, table_of)


if __name__ == "__main__":
    run_command(main)
