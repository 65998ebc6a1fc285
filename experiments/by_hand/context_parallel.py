"""Context parallelism on local processes: the emitted programs against what one writes by hand.

    python -m experiments.by_hand.context_parallel [--processes 2] [--budget-s 20] [--json FILE]

Hugging Face's Llama, forward and backward, every sequence cut over the same processes of one gloo group, in turn:
`program` with keys gathered, by a ring and by Ulysses, and the three written by hand (context_by_hand.py). Loss and
gradients of all six are compared with one process; it fails if one differs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import autoplan
from experiments.by_hand.context_by_hand import METHODS, cut, make_step
from experiments.shared.in_turn import (
    Contender,
    check,
    grads_of,
    reference,
    report,
    results_of,
    run_sizes,
    table_of,
    time_together,
)
from experiments.shared.measure import run_command
from experiments.shared.models import Size, make_llama, token_batch

SIZES = (
    Size(hidden=128, num_layers=4, seq=256, batch=2),
    Size(hidden=128, num_layers=4, seq=1024, batch=1),
    Size(hidden=256, num_layers=4, seq=2048, batch=1),
)


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """Do the work of one process and return its results; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    truth = reference(make_llama(size), batch)
    contenders = {}
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
        contenders[f"program {method}"] = Contender(lambda pm=pm: pm.step(batch), pm.gradients)  # type: ignore[misc]
        model = cut(make_llama(size), method)
        contenders[f"by hand {method}"] = Contender(
            make_step(model, batch, method),
            lambda model=model: grads_of(model.module),  # type: ignore[misc]
            share=1.0,  # each rank's tokens over the number of all
        )
    differences = check(contenders, truth, size)
    pairs = {f"program {m}": f"by hand {m}" for m in METHODS}
    return results_of(time_together(contenders, budget_s), differences, pairs)


def main(
    processes: Annotated[int, typer.Option(help="ranks that share every sequence, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 25.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with cut sequences against context parallelism written by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: 4 attention heads are cut by 2 or 4")
    env, cases = run_sizes(measure_rank, "llama", SIZES, processes, budget_s, timeout_s)
    title = "forward + backward of HF Llama, sequences cut"
    report("context_parallel", env, cases, json, lambda c, where: table_of(c, f"{title}: {where}"))


if __name__ == "__main__":
    run_command(main)
