"""Random programs against PyTorch, for as long as you like.

    python -m experiments.compatibility.fuzz --examples 1000 --seed 0 [--level ops|models] [--workers 2] [--minutes 60]

Draws modules with hypothesis: embeddings, products, norms, views, reductions, attention, indexing, in-place ops,
repeated layers, tied weights, buffers that stay or are updated, random numbers, masks, several outputs and losses.
Every module is captured; loss, all gradients and updated buffers of its program in float64 are compared with the
module's own, on one device and under random plans with random layouts, all ranks in one process. Where a program draws
random numbers, they are the same in both on one device, and plans are compared with that. At level `ops` programs are
short, and every split that the rule of any of their nodes claims is run, too. Prints the smallest program of every
finding: a wrong number, an exception that is no refusal, or a refusal that names nothing. Exits with an error if there
is one. The same seed draws the same programs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from experiments.compatibility.fuzz.rounds import LEVELS, run_round
from experiments.compatibility.fuzz.stateful import ALL_OPERATIONS
from experiments.compatibility.one_by_one import EQUAL, Row, Task, run_all

_ROUND = 25  # programs of a process


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.compatibility.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--examples", type=int, default=200, help="programs of each level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=list(LEVELS), nargs="+", default=list(LEVELS))
    families = ", ".join(ALL_OPERATIONS)
    parser.add_argument(
        "--only", nargs="+", choices=ALL_OPERATIONS, metavar="FAMILY", help=f"of operations, all by default: {families}"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="start no round after these")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of a round of 25 programs, or of one finding")
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and how often")
    return parser.parse_args()


def main() -> int:
    args = _read_arguments()
    torch.set_num_threads(1)
    numbers: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    findings: list[Row] = []

    def done(row: Row) -> None:
        for name, n in row.parity:
            (refusals if name.startswith(("capture: ", "plan: ")) else numbers)[name] += int(n)
        if row.outcome != EQUAL:
            findings.append(row)
        print(f"{row.group} {row.name}: {row.outcome}, {row.seconds:.0f} s {row.why}", flush=True)

    rounds = -(-args.examples // _ROUND)
    tasks = [
        Task(
            level,
            f"seed {s}",
            functools.partial(run_round, level, s, min(_ROUND, args.examples), args.only or tuple(ALL_OPERATIONS)),
        )
        for s in range(args.seed * 1000, args.seed * 1000 + rounds)
        for level in args.level
    ]
    run_all(tasks, args.workers, args.timeout_s, None if args.minutes is None else 60 * args.minutes, done)
    print(", ".join(f"{n:,} {name}" for name, n in numbers.items()) + f"; {len(findings)} findings")
    for why, n in refusals.most_common() if args.refusals else ():
        print(f"{n:5d}  {why}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
