"""Several axes at once on local processes: the emitted programs against FSDP2, DTensor and stock pipelining by hand.

    python -m experiments.by_hand.composed [--processes 8] [--budget-s 40] [--quick] [--json FILE]

Hugging Face's Llama, whole training steps (forward, backward, AdamW), in the same processes of one gloo group, in turn:
on 4 processes FSDP2 with tensor parallelism, FSDP2 with a pipeline and tensor parallelism with a pipeline, on 8 all
three (2 x 2 x 2), as `parallelize` runs these degrees and by hand (composed_by_hand.py). Losses of three steps, the
gradients of the first and the parameters after the last are compared with one process before anything is timed; it
fails if one differs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from experiments.by_hand.composed_by_hand import Degrees, make_trainer
from experiments.shared.in_turn import report, run_sizes
from experiments.shared.measure import run_command
from experiments.shared.models import Size, make_llama, token_batch
from experiments.shared.training import OPTIMIZER, Reference, Trainer, measure, part_of, program, table_of, train_alone

SIZES = (
    Size(hidden=128, num_layers=4, seq=64, batch=16, num_kv_heads=4),
    Size(hidden=256, num_layers=4, seq=128, batch=16, num_heads=8, num_kv_heads=4),
)
QUICK = Size(hidden=32, num_layers=2, seq=16, batch=8, vocab=64, num_kv_heads=4)
# processes -> degrees. Under a pipeline FSDP2 keeps parameters from the first forward to the last backward and reduces
# gradients once, as stock pipelining has it: ZeRO 1. Without one it drops them after the forward: ZeRO 3.
DEGREES = {
    4: (Degrees(dp=2, tp=2, pp=1, drops=True), Degrees(dp=2, tp=1, pp=2), Degrees(dp=1, tp=2, pp=2)),
    8: (Degrees(dp=2, tp=2, pp=2),),
}
NUM_MICRO_BATCHES = 4
# of tensor parallelism by hand: with sequence parallelism, and whichever of the others is the fastest on CPUs
VARIANTS = ("TP+SP", "TP shared")


def measure_rank(rank: int, world: int, size: Size, budget_s: float, folder: str) -> list[list[dict[str, Any]]]:
    """Do the work of one process and return rows of each of DEGREES. The same come back from all of them."""
    warnings.filterwarnings("ignore")
    # of whole tensors from shards in an order that takes two collectives, which only the check asks for
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    batch = token_batch(size)
    truth = train_alone(make_llama(size), batch)
    return [
        measure_degrees(degrees, size, batch, truth, budget_s, f"{folder}/{k}")
        for k, degrees in enumerate(DEGREES[world])
    ]


def measure_degrees(
    degrees: Degrees, size: Size, batch: Mapping[str, torch.Tensor], truth: Reference, budget_s: float, folder: str
) -> list[dict[str, Any]]:
    """Rows of one combination of degrees."""
    mesh = init_device_mesh("cpu", (degrees.pp, degrees.dp, degrees.tp), mesh_dim_names=("pp", "dp", "tp"))
    zero = 0 if degrees.dp == 1 else 3 if degrees.drops else 1
    count = NUM_MICRO_BATCHES if degrees.pp > 1 else 1
    mine = part_of(batch, mesh["dp"].get_local_rank(), degrees.dp)
    pm = autoplan.parallelize(
        make_llama(size),
        "local",
        optimizer=OPTIMIZER,
        example_inputs=mine,
        pins={
            "dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp, "zero_stage": zero, "num_micro_batches": count,
            "recompute": "none", "stages": [size.num_layers // degrees.pp] * degrees.pp,
        },
        global_batch_size=size.batch,
        folder=folder,
    )  # fmt: skip
    name = f"{degrees} ZeRO {zero}"
    contenders: dict[str, Trainer] = {name: program(pm, part_of(batch, pm.data_rank, degrees.dp))}
    pairs = []
    for variant in VARIANTS if degrees.tp > 1 else ("",):
        parts = ("FSDP2" if degrees.dp > 1 else "", variant, "1F1B" if degrees.pp > 1 else "")
        by_hand = ", ".join(p for p in parts if p)
        contenders[by_hand] = make_trainer(make_llama(size), degrees, mesh, variant, mine, count)
        pairs.append((name, by_hand))
    return measure(contenders, truth, pairs, budget_s)


def main(
    processes: Annotated[int, typer.Option(help="4: each pair of axes; 8: all three")] = 4,
    budget_s: Annotated[float, typer.Option(help="seconds of repetitions per model and degrees")] = 40.0,
    quick: Annotated[bool, typer.Option(help="a tiny model, a few repetitions: does it run?")] = False,
    timeout_s: Annotated[float, typer.Option(help="give up on a model after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time programs with several axes against FSDP2, DTensor and stock pipelining by hand, side by side."""
    if processes not in DEGREES:
        raise typer.BadParameter(f"processes={processes}: the degrees are those of 4 or 8")
    sizes = (QUICK,) if quick else SIZES
    env, found = run_sizes(measure_rank, "llama", sizes, processes, 2.0 if quick else budget_s, timeout_s)
    cases = [
        {"name": case["name"], "size": case["size"], "degrees": asdict(degrees), "rows": rows}
        for case in found
        for degrees, rows in zip(DEGREES[processes], case["contenders"], strict=True)
    ]
    report("composed", env, cases, json, table_of)


if __name__ == "__main__":
    run_command(main)
