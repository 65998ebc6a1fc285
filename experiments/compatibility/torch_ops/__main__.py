"""Do the operations and modules of PyTorch compute what they do alone, in programs of one device and of several?

    python -m experiments.compatibility.torch_ops [--only REGEX] [--json FILE] [--write]

Takes them from the database of PyTorch's own tests, with its sample arguments (`samples.py`); puts each into a module
that learns (`programs.py`); and examines it as the fuzzer does its programs: loss and gradients on one device, at dp 2
and at tp 2, and every split that the rule of a node claims. Each runs in a process of its own. With `--json` a run goes
on where the last one stopped. `--write` writes docs/torch_ops.md. Exits with an error if something is wrong or crashed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from experiments.compatibility.one_by_one import OUTCOMES, Row, read_rows, run_all, show, write_rows
from experiments.compatibility.torch_ops.examine import MOST, tasks
from experiments.compatibility.torch_ops.page import page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "torch_ops.md"
_WARM = "^log1p$"  # examined here, so that forked processes have imported everything


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.compatibility.torch_ops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--samples", type=int, default=MOST, help="of one operation; default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one operation")
    parser.add_argument("--minutes", type=float, help="start no operation after these; 0: only read and write")
    parser.add_argument("--json", type=Path, help="where to write the rows; names in it already are not run again")
    parser.add_argument("--write", action="store_true", help="write docs/torch_ops.md")
    return parser.parse_args()


def main() -> int:
    args = _read_arguments()
    torch.set_num_threads(1)
    known = read_rows(args.json) if args.json else {}

    def done(row: Row) -> None:
        known[row.name] = row
        show(row)
        if args.json:
            write_rows(args.json, known)

    every = tasks(args.only, args.samples)
    waiting = [t for t in every if t.name not in known]
    if waiting and args.minutes != 0:
        for task in tasks(_WARM, 1):
            task.work()
    run_all(waiting, args.workers, args.timeout_s, None if args.minutes is None else 60 * args.minutes, done)
    rows = [known[t.name] for t in every if t.name in known]
    counts = Counter(r.outcome for r in rows)
    print(f"{len(rows)} operations and modules: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES))
    if args.write:
        PAGE.write_text(page(rows, len(every) - len(rows)))
    return 1 if any(r.is_defect for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
