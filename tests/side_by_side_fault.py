"""Run by test_side_by_side.py: what the check of the experiments says of contenders that train something else.

    python -m tests.side_by_side_fault

Prints a line per rank and fault.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.profiler.processes import run_ranks
from experiments.by_hand.sharded_by_hand import RECIPES, make_trainer
from experiments.shared.models import Size, make_llama, token_batch
from experiments.shared.training import check, part_of, train_alone

FAULTS = ("none", "data", "weights", "no step", "name")
TINY = Size(hidden=16, num_layers=1, seq=8, batch=4, vocab=32)


def check_all(rank: int, world: int) -> list[str]:
    """The messages of `check`."""
    return [faulty(rank, world, fault) for fault in FAULTS]


def faulty(rank: int, world: int, fault: str) -> str:
    """That of one fault."""
    batch = token_batch(TINY)
    truth = train_alone(make_llama(TINY), batch)
    model = make_llama(TINY, seed=1 if fault == "weights" else 0)
    mine = part_of(batch, 0 if fault == "data" else rank, world)
    contender = make_trainer(model, RECIPES["fully_shard"], mine, 1)
    if fault == "no step":
        contender = replace(contender, parameters=lambda: dict(make_llama(TINY).named_parameters()))
    elif fault == "name":
        contender = replace(contender, gradients=dict)
    try:
        check(fault, contender, truth)
    except ValueError as error:
        return str(error) if str(error).startswith(fault) else f"{fault}: {error}"
    return f"{fault}: equal"


if __name__ == "__main__":
    for messages in run_ranks(check_all, 2, timeout_s=250.0):
        print(*messages, sep="\n")
