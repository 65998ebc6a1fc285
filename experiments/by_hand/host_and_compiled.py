"""State on the host and compiled blocks on local processes: the emitted programs against what one writes by hand.

    python -m experiments.by_hand.host_and_compiled [--processes 2] [--budget-s 25] [--quick] [--json FILE]

Hugging Face's Llama, whole training steps, in the same processes of one gloo group, in turn: parameters on the host
beside `fully_shard` with torch's CPUOffloadPolicy, activations on the host beside DDP with every layer under torch's
save_on_cpu, and compiled blocks beside DDP with compiled layers (inductor). Compared with one process first, as in
fully_sharded.py. On a CPU the host is the device: this times the bookkeeping and the copies, not a link. There
save_on_cpu copies nothing and the program does (so that its tests on CPUs run what a GPU runs); `saved tensors copied`
does by hand what save_on_cpu does with a GPU's tensors.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import autoplan
from experiments.by_hand.fully_sharded import QUICK, SIZES
from experiments.by_hand.sharded_by_hand import RECIPES, make_trainer
from experiments.shared.in_turn import report, run_sizes
from experiments.shared.measure import run_command
from experiments.shared.models import Size, make_llama, token_batch
from experiments.shared.training import OPTIMIZER, Trainer, measure, part_of, program, table_of, train_alone

# program -> pins beside those of all, whether its blocks are compiled, what is written by hand for it
CASES: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "parameters on the host": ({"zero_stage": 3, "offload": "parameters"}, False, ("fully_shard, on the host",)),
    "activations on the host": (
        {"zero_stage": 0, "recompute": "offload"},
        False,
        ("DDP, saved tensors copied", "DDP, save_on_cpu"),
    ),
    "compiled": ({"zero_stage": 0}, True, ("DDP, compiled layers",)),
}


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> list[dict[str, Any]]:
    """Do the work of one process and return its results; the same rows come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    truth = train_alone(make_llama(size), batch)
    mine = part_of(batch, rank, world)
    contenders: dict[str, Trainer] = {}
    for name, (pins, compiled, recipes) in CASES.items():
        pm = autoplan.parallelize(
            make_llama(size),
            autoplan.Cluster.local(world, "cpu"),  # every degree is pinned: prices decide nothing
            optimizer=OPTIMIZER,
            example_inputs=mine,
            pins={"dp": world, "tp": 1, "pp": 1, "num_micro_batches": 1, "recompute": "none", **pins},
            global_batch_size=size.batch,
            compile=compiled,
            folder=f"{folder}/{name}",
        )
        contenders[name] = program(pm, mine)
        contenders |= {r: make_trainer(make_llama(size), RECIPES[r], mine, 1) for r in recipes}
    pairs = [(name, recipe) for name, (_, _, recipes) in CASES.items() for recipe in recipes]
    return measure(contenders, truth, pairs, budget_s)


def main(
    processes: Annotated[int, typer.Option(help="data-parallel ranks, one local process each")] = 2,
    budget_s: Annotated[
        float | None, typer.Option(help="seconds of repetitions per model; default: 40, with --quick 2")
    ] = None,
    quick: Annotated[bool, typer.Option(help="a tiny model, a few repetitions: does it run?")] = False,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 900.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with state on the host and with compiled blocks against the same by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: a batch of 16 is cut by 2 or 4")
    sizes = (QUICK,) if quick else SIZES
    seconds = budget_s if budget_s is not None else 2.0 if quick else 40.0
    env, found = run_sizes(measure_rank, "llama", sizes, processes, seconds, timeout_s)
    cases = [{"name": case["name"], "size": case["size"], "rows": case["contenders"]} for case in found]
    report("host_and_compiled", env, cases, json, table_of)


if __name__ == "__main__":
    run_command(main)
