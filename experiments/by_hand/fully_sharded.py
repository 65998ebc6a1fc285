"""Data parallelism under ZeRO 0 to 3 on local processes: the emitted programs against DDP and `fully_shard` by hand.

    python -m experiments.by_hand.fully_sharded [--processes 2] [--budget-s 25] [--quick] [--json FILE]

Hugging Face's Llama, whole training steps (forward, backward, AdamW) with 1 and 4 micro-batches, in the same processes
of one gloo group, in turn: the program of every ZeRO stage beside what a user of PyTorch writes for it
(sharded_by_hand.py); on 4 processes also hybrid ZeRO, with two copies of the sharded state. Losses of three steps, the
gradients of the first and the parameters after the last are compared with one process before anything is timed; it
fails if one differs. MB: the most bytes of tensors that a step makes or touches at one time, of both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import autoplan
from experiments.by_hand.sharded_by_hand import RECIPES, make_trainer
from experiments.shared.in_turn import report, run_sizes
from experiments.shared.measure import run_command
from experiments.shared.models import Size, make_llama, token_batch
from experiments.shared.storage_counter import StorageCounter
from experiments.shared.training import OPTIMIZER, Reference, Trainer, measure, part_of, program, table_of, train_alone

SIZES = (
    Size(hidden=128, num_layers=4, seq=64, batch=16),
    Size(hidden=256, num_layers=4, seq=128, batch=16, num_heads=8, num_kv_heads=4),
)
QUICK = Size(hidden=32, num_layers=2, seq=16, batch=16, vocab=64)
MICRO_BATCHES = (1, 4)
# ZeRO stage -> what is written by hand for it: keeps the same between micro-batches and communicates as often.
BY_HAND = {
    0: ("DDP",),
    1: ("fully_shard kept, reduced once", "DDP, ZeroRedundancyOptimizer"),
    # the second keeps whole gradients where ZeRO 2 keeps whole parameters: as many bytes, but for those of messages
    2: ("fully_shard kept", "fully_shard, reduced once"),
    # the second reduces less often than ZeRO 3, and pays with the memory of whole gradients
    3: ("fully_shard", "fully_shard, reduced once"),
}
OF_ONE_MICRO_BATCH = {
    0: ("DDP",),
    1: ("fully_shard kept", "DDP, ZeroRedundancyOptimizer"),
    2: ("fully_shard kept",),
    3: ("fully_shard",),
}


# on 4 processes, with two copies of what is sharded
HYBRID = {2: ("fully_shard kept, 2 copies",), 3: ("fully_shard, 2 copies",)}


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> list[list[dict[str, Any]]]:
    """Do the work of one process and return rows of each of MICRO_BATCHES. The same come back from all of them."""
    warnings.filterwarnings("ignore")
    batch = token_batch(size)
    truth = train_alone(make_llama(size), batch)
    mine = part_of(batch, rank, world)
    return [measure_cut(world, size, count, mine, truth, budget_s, folder) for count in MICRO_BATCHES]


def measure_cut(
    world: int,
    size: Size,
    num_micro_batches: int,
    mine: Mapping[str, torch.Tensor],
    truth: Reference,
    budget_s: float,
    folder: str,
) -> list[dict[str, Any]]:
    """Rows of one number of micro-batches; `mine` is this rank's part of the batch."""
    contenders: dict[str, Trainer] = {}
    pairs = []
    plain = OF_ONE_MICRO_BATCH if num_micro_batches == 1 else BY_HAND
    cases = [(f"ZeRO {zero}", zero, 1, recipes) for zero, recipes in plain.items()]
    cases += [(f"hybrid ZeRO {zero}", zero, 2, recipes) for zero, recipes in HYBRID.items() if world == 4]
    for name, zero, copies, recipes in cases:
        pm = autoplan.parallelize(
            make_llama(size),
            autoplan.Cluster.local(world, "cpu"),  # every degree is pinned: prices decide nothing
            optimizer=OPTIMIZER,
            example_inputs=mine,
            pins={
                "dp": world, "tp": 1, "pp": 1, "zero_stage": zero, "num_micro_batches": num_micro_batches,
                "recompute": "none", "zero_replicas": copies,
            },
            global_batch_size=size.batch,
            folder=f"{folder}/{zero}-{copies}-{num_micro_batches}",
        )  # fmt: skip
        contenders[name] = program(pm, mine)
        for recipe in recipes:
            if recipe not in contenders:
                contenders[recipe] = make_trainer(make_llama(size), RECIPES[recipe], mine, num_micro_batches)
            pairs.append((name, recipe))
    rows = measure(contenders, truth, pairs, budget_s)
    peaks = {name: peak_bytes(contender.step) for name, contender in contenders.items()}
    return [{**row, "peak_bytes": [peaks[row[side]] for side in ("program", "by_hand")]} for row in rows]


def peak_bytes(step: Callable[[], torch.Tensor]) -> int:
    """The most bytes of tensors that a step makes or touches at one time, on this rank (`StorageCounter`)."""
    with StorageCounter() as live:
        step()
    return live.peak_bytes


def main(
    processes: Annotated[int, typer.Option(help="data-parallel ranks, one local process each")] = 2,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model and micro-batches")] = 40.0,
    quick: Annotated[bool, typer.Option(help="a tiny model, a few repetitions: does it run?")] = False,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs under ZeRO 0 to 3 against DDP and fully_shard by hand, side by side."""
    if processes not in (2, 4):
        raise typer.BadParameter(f"processes={processes}: a batch of 16 is cut into 4 micro-batches on 2 or 4 ranks")
    sizes = (QUICK,) if quick else SIZES
    env, found = run_sizes(measure_rank, "llama", sizes, processes, 2.0 if quick else budget_s, timeout_s)
    cases = [
        {"name": f"{case['name']} m{count}", "size": case["size"], "num_micro_batches": count, "rows": rows}
        for case in found
        for count, rows in zip(MICRO_BATCHES, case["contenders"], strict=True)
    ]
    report("fully_sharded", env, cases, json, table_of)


if __name__ == "__main__":
    run_command(main)
