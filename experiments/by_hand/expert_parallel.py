"""Mixtures of experts on local processes: the emitted programs against what one writes by hand.

    python -m experiments.by_hand.expert_parallel [--processes 2] [--budget-s 20] [--json FILE]

Hugging Face's Mixtral, forward and backward, in the same processes of one gloo group, in turn: `program` with every
expert on every rank (ep 1), with experts spread over the ranks (ep N), and with every expert cut over them (etp N),
beside PyTorch's DDP around the untouched model, DDP with the experts spread by hand, and DTensor's tensor parallelism
with the experts cut by hand (experts_by_hand.py). Loss and gradients of all six are compared with one process; it fails
if one differs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.nn.parallel import DistributedDataParallel

import autoplan
from experiments.by_hand.experts_by_hand import cut, cut_gradients, gradients, make_step, spread
from experiments.shared.in_turn import (
    Contender,
    check,
    reference,
    report,
    results_of,
    run_sizes,
    table_of,
    time_together,
)
from experiments.shared.measure import run_command
from experiments.shared.models import Size, make_mixtral, token_batch

SIZES = (
    Size(hidden=64, num_layers=4, seq=32, batch=4),
    Size(hidden=128, num_layers=4, seq=128, batch=4),
    Size(hidden=256, num_layers=4, seq=256, batch=4, num_heads=8, num_kv_heads=4),
)
NUM_EXPERTS, TOP_K = 8, 2
# (program, what it is compared with)
PAIRS = (("program ep 1", "DDP"), ("program ep N", "by hand ep N"))
CUT = ("program etp N", "by hand etp N")


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> dict[str, Any]:
    """Do the work of one process and return its results; the same figures come back from all of them."""
    warnings.filterwarnings("ignore")
    whole = token_batch(size)
    truth = reference(make_mixtral(size, NUM_EXPERTS, TOP_K), whole)
    part = size.batch // world
    mine = {n: x[rank * part : (rank + 1) * part] for n, x in whole.items()}
    contenders = {}
    for (program, by_hand), ep in zip(PAIRS, (1, world), strict=True):
        pm = autoplan.parallelize(
            make_mixtral(size, NUM_EXPERTS, TOP_K),
            "local",
            example_inputs=mine,
            pins={"dp": world, "tp": 1, "ep": ep, "zero_stage": 0, "num_micro_batches": 1},
            global_batch_size=size.batch,
            folder=f"{folder}/{ep}",
        )
        contenders[program] = Contender(lambda pm=pm: pm.step(mine), pm.gradients)  # type: ignore[misc]
        plain = make_mixtral(size, NUM_EXPERTS, TOP_K)
        model = DistributedDataParallel(plain) if ep == 1 else spread(plain)
        contenders[by_hand] = Contender(
            make_step(model, mine),
            lambda model=model: gradients(model),  # type: ignore[misc]
            share=1 / world,  # a mean over this rank's part of the batch, all parts equally large
        )
    pm = autoplan.parallelize(
        make_mixtral(size, NUM_EXPERTS, TOP_K),
        "local",
        example_inputs=whole,
        pins={"dp": 1, "tp": world, "ep": 1, "etp": world},
        global_batch_size=size.batch,
        folder=f"{folder}/cut",
    )
    contenders[CUT[0]] = Contender(lambda: pm.step(whole), pm.gradients)
    by_hands = cut(make_mixtral(size, NUM_EXPERTS, TOP_K))
    contenders[CUT[1]] = Contender(make_step(by_hands, whole), lambda: cut_gradients(by_hands))
    differences = check(contenders, truth, size)
    return results_of(time_together(contenders, budget_s), differences, dict([*PAIRS, CUT]))


def main(
    processes: Annotated[int, typer.Option(help="data-parallel ranks, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model")] = 25.0,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with experts against DDP and experts spread by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: batch of 4 and {NUM_EXPERTS} experts are cut by 2 or 4")
    env, cases = run_sizes(measure_rank, "mixtral", SIZES, processes, budget_s, timeout_s)
    title = f"forward + backward of HF Mixtral, {NUM_EXPERTS} experts, {TOP_K} per token"
    report("expert_parallel", env, cases, json, lambda c, where: table_of(c, f"{title}: {where}"))


if __name__ == "__main__":
    run_command(main)
