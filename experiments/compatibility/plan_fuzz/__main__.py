"""Random combinations of plan, model and training loop on real processes, compared with one process.

    python -m experiments.compatibility.plan_fuzz --examples 200 --seed 0 [--minutes 30] [--refusals]
    python -m experiments.compatibility.plan_fuzz --case '{"world": 2, ...}'

Every case draws a model (decoders, encoder-decoders, mixtures of experts, vision, convolutions; odd sizes, tied or
frozen parameters, dropout, buffers, several losses), a plan (degrees, ZeRO, replicas, schedule, stages, micro-batches,
recompute, context method, offload, precision, compile, compressed gradients) and a loop (optimizer, groups, clipping,
accumulation, batches of changing sizes and lengths, unequal ranks, evaluations, updates left out, checkpoints loaded
under another plan, state dicts). It runs on two or four gloo processes. Losses, norms, evaluations, the gradients of
the first step and the parameters after the last are compared with the untouched module in one process; with dropout,
with autoplan on one. Prints the smallest case of every finding: a wrong number, ranks that disagree, an exception that
is no refusal, a hang, or a refusal that names nothing. Exits with an error if there is one. The same seed draws the
same cases.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AUTOPLAN_PROFILE", "assumed")

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import transformers.models  # noqa: F401  # the processes are copies of this one, which has everything

import autoplan.api  # noqa: F401
from autoplan.capture.export import capture
from experiments.compatibility.plan_fuzz.cases import Case
from experiments.compatibility.plan_fuzz.draw import draw_case
from experiments.compatibility.plan_fuzz.examine import EQUAL, FINDING, REFUSED, Examiner, Verdict
from experiments.compatibility.plan_fuzz.models import decoder
from experiments.compatibility.plan_fuzz.pool import Pools
from experiments.compatibility.plan_fuzz.shrink import shrink


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.compatibility.plan_fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="start no case after these")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a case")
    parser.add_argument("--shrink-s", type=float, default=120.0, help="to make a finding small; 0: leave it")
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and how often")
    parser.add_argument("--only", default="", help="regular expression: leave out cases whose JSON has no match")
    parser.add_argument("--case", help="run this one alone")
    return parser.parse_args()


def main() -> int:
    args = _read_arguments()
    torch.set_num_threads(1)
    _warm_up()
    pools = Pools()
    examiner = Examiner(pools, args.timeout_s)
    try:
        if args.case:
            found = examiner.examine(Case.from_json(args.case))
            print(found.outcome, found.text or found.kind, *found.notes, sep="\n")
            return found.outcome == FINDING
        return _run(examiner, args)
    finally:
        pools.end()


def _warm_up() -> None:
    """Capture a model once, so that the processes, copies of this one, need not load what a capture needs."""
    task = decoder()
    capture(task.make(), task.batch(2, 8, torch.Generator().manual_seed(0), torch.float64), task.loss)


def _run(examiner: Examiner, args: argparse.Namespace) -> int:
    outcomes: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    steps = 0
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    for number in range(args.first, args.first + args.examples):
        if end is not None and time.monotonic() > end:
            break
        case = draw_case(args.seed, number)
        if not re.search(args.only, case.to_json()):
            continue
        found = examiner.examine(case)
        outcomes[found.outcome] += 1
        steps += found.num_steps
        if found.outcome == REFUSED:
            refusals[found.kind] += 1
        for note in found.notes:
            if note.startswith(("move: ", "step: ")):
                refusals[re.sub(r"\d+", "N", note)[:160]] += 1
        print(
            f"{number} {found.outcome} {found.seconds:.1f} s {case.model} {dict(case.options)} {found.kind}", flush=True
        )
        if found.outcome == FINDING:
            if findings[found.kind] == 0:
                _report(examiner, case, found, args.shrink_s)
            findings[found.kind] += 1
    total = sum(outcomes.values())
    print(
        f"{total} cases, {steps} steps: {outcomes[EQUAL]} equal, {outcomes[REFUSED]} refused, "
        f"{outcomes[FINDING]} findings of {len(findings)} kinds"
    )
    for kind, n in findings.most_common():
        print(f"{n:5d}  {kind}")
    for why, n in refusals.most_common() if args.refusals else ():
        print(f"{n:5d}  {why}")
    return 1 if findings else 0


def _report(examiner: Examiner, case: Case, found: Verdict, budget_s: float) -> None:
    """Print a finding as it was drawn, and as small as it can be made."""
    command = "python -m experiments.compatibility.plan_fuzz --case"
    print(f"--- {found.kind}\n{found.text}\n{command} '{case.to_json()}'", flush=True)

    def still(other: Case) -> bool:
        again = examiner.examine(other)
        return again.outcome == FINDING and again.kind == found.kind

    small = shrink(case, still, budget_s)
    if small != case:
        print(f"smaller:\n{command} '{small.to_json()}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
