"""Do the ranks that are left name the one that broke? Ranks are killed, stopped, raise and exit at all points of a job.

    python -m experiments.faults.run [--how kill] [--where forward] [--rank 1] [--tree DIR] [--torchrun] [--json FILE]
    python -m experiments.faults.run --read FILE ... [--before FILE ...] --write docs/faults.md

Four processes over gloo train a small program (tp 2, pp 2). One of them breaks, and each of the three others counts as
right if what it writes names that rank and no other, gives the cause, and it ends by itself with an exit code that is
not 0. `--tree`: the autoplan of another checkout, for comparison. `--json`: one line per run with what every rank
wrote, as soon as it is there; `--read` takes several such files instead of running anything.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Annotated, Any

import typer
from rich.table import Table

from experiments.faults.worker import WORLD, Cell
from experiments.shared.measure import make_console, run_command

HOWS = ("kill", "stop", "raise", "exit")  # also "os._exit", which others see as they see "kill"
WHERES = ("planning", "parallelize", "groups", "forward", "backward", "clip", "optimizer", "state_dict", "script")
# What a survivor must say of the cause; the words of releases before are accepted.
_CAUSES = {
    "kill": r"gone without a word|killed",
    "stop": r"stopped",
    "raise": r"ZeroDivisionError: the injected fault",
    "exit": r"SystemExit: 3|it exited",
    "os._exit": r"os\._exit|killed",
}
_WORKER = Path(__file__).with_name("worker.py")
# A rank that torchrun ends before it could say anything is not counted.
_BY_TORCHRUN = ("SIGTERM",)


@dataclass(frozen=True)
class Verdict:
    """Of one run: survivors, those that named the right rank alone, also gave the cause, and ended by themselves."""

    cell: Cell
    survivors: int
    named: int
    caused: int
    ended: int
    right: int


def judge(result: dict[str, Any]) -> Verdict:
    """Judge what the survivors of one run wrote."""
    cell = Cell(**result["cell"])
    counts: Counter[str] = Counter()
    for rank, (status, text) in enumerate(zip(result["statuses"], result["texts"], strict=True)):
        if rank == cell.rank or status in _BY_TORCHRUN:
            continue
        found = {int(r) for r in re.findall(r"rank (\d+) (?:failed|could not)", text)}
        others = {int(r) for some in re.findall(r"ranks ([\d, ]+) ", text) for r in re.findall(r"\d+", some)}
        named = found | others == {cell.rank}
        caused = re.search(_CAUSES[cell.how], text) is not None
        ended = status.startswith("exit code ") and status != "exit code 0"
        counts.update(survivors=1, named=named, caused=named and caused, ended=ended, right=named and caused and ended)
    return Verdict(cell, *(counts[name] for name in ("survivors", "named", "caused", "ended", "right")))


def cells(hows: tuple[str, ...], wheres: tuple[str, ...], ranks: tuple[int, ...], timeout_s: float) -> list[Cell]:
    """All runs of these kinds. While rank 0 plans the others only wait, and cannot raise or call sys.exit."""
    return [
        Cell(how, where, rank, timeout_s)
        for how, where, rank in itertools.product(hows, wheres, ranks)
        if not (where == "planning" and rank > 0 and how in ("raise", "exit"))
    ]


def _read(paths: list[Path]) -> list[Verdict]:
    """Verdicts on results that `--json` wrote, in the order of the table."""
    found = [judge(json.loads(line)) for path in paths for line in path.read_text().splitlines()]
    return sorted(found, key=lambda v: (list(_CAUSES).index(v.cell.how), WHERES.index(v.cell.where), v.cell.rank))


def _environment(tree: Path) -> dict[str, str]:
    mine = {"AUTOPLAN_PROFILE": "assumed", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        mine["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **mine}


def run_cells(
    wanted: list[Cell], tree: Path, at_once: int, done: Callable[[dict[str, Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run every cell, `at_once` beside each other, and hand each result to `done`; the results in the order of
    `wanted`."""
    todo: Queue[Cell] = Queue()
    for cell in wanted:
        todo.put(cell)
    results: dict[Cell, dict[str, Any]] = {}

    def work() -> None:
        command = [sys.executable, str(_WORKER), "launch"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(tree)
        ) as launcher:
            assert launcher.stdin is not None and launcher.stdout is not None
            while True:
                try:
                    cell = todo.get_nowait()
                except Empty:
                    return
                print(cell.to_json(), file=launcher.stdin, flush=True)
                results[cell] = json.loads(launcher.stdout.readline())
                done(results[cell])

    workers = [threading.Thread(target=work) for _ in range(min(at_once, len(wanted)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    missing = [cell for cell in wanted if cell not in results]
    if missing:
        raise RuntimeError(f"no result of {missing[0]}; see what its launcher wrote above")
    return [results[cell] for cell in wanted]


def run_torchrun(cell: Cell, tree: Path) -> dict[str, Any]:
    """Run one cell under torchrun, which hosts the store and ends the other ranks soon after one has ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += ["--log-dir", folder, "--redirects", "3", str(_WORKER), "rank", cell.to_json(), folder]
        out = subprocess.run(
            command, env=_environment(tree), capture_output=True, text=True, timeout=300, check=False
        ).stderr
        logs = sorted(Path(folder).glob("*/attempt_0/*/stderr.log"), key=lambda path: int(path.parent.name))
        codes = {
            int(r): int(code) for r, code in re.findall(r"local_rank: (\d+).*?exitcode *: (-?\d+)", out, re.DOTALL)
        }
        texts = [path.read_text(errors="replace") for path in logs]
    # ranks that torchrun's summary does not list were ended by it: what they wrote until then counts
    told = ["rank" in text and "failed" in text for text in texts]
    statuses = [
        f"exit code {codes[r]}" if codes.get(r, -1) >= 0 else "exit code 1" if told[r] else "SIGTERM"
        for r in range(len(texts))
    ]
    return {"cell": asdict(cell), "statuses": statuses, "texts": texts}


def table_of(verdicts: list[Verdict]) -> dict[str, dict[str, str]]:
    """fault -> place -> 'right of survivors' over all ranks."""
    out: dict[str, dict[str, str]] = {}
    for how in dict.fromkeys(v.cell.how for v in verdicts):
        row = out[how] = {}
        for where in dict.fromkeys(v.cell.where for v in verdicts):
            mine = [v for v in verdicts if (v.cell.how, v.cell.where) == (how, where)]
            row[where] = f"{sum(v.right for v in mine)} of {sum(v.survivors for v in mine)}" if mine else ""
    return out


def summary(verdicts: list[Verdict]) -> str:
    """All runs in one sentence."""
    total = {n: sum(getattr(v, n) for v in verdicts) for n in ("survivors", "named", "caused", "ended", "right")}
    return (
        f"{len(verdicts)} runs, {total['survivors']} survivors: {total['named']} named the right rank and no other, "
        f"{total['caused']} with the cause; {total['ended']} ended by themselves with an exit code that is not 0; "
        f"{total['right']} did all of it."
    )


def _document(verdicts: list[Verdict], before: list[Verdict] | None) -> str:
    lines = [
        "# Faults",
        "",
        "Generated by `python -m experiments.faults.run --write docs/faults.md`; do not edit.",
        "",
        f"{WORLD} processes over gloo train a small program (tp 2, pp 2; rank 0 hosts the key-value store). One",
        "rank is killed (SIGKILL), stopped (SIGSTOP), raises, or calls `sys.exit(3)`: while rank 0 plans, in",
        "`parallelize` (comparing parameters; making process groups), in forward, backward, `clip_grad_norm_`, the",
        "optimizer, `state_dict`, or between the calls (script). Every rank in turn; each number counts survivors that",
        "name that rank and no other, give the cause, and end by themselves with an exit code that is not 0. While",
        "rank 0 plans, the other ranks wait and cannot raise or call `sys.exit`. Elsewhere a cell of fewer than 12",
        "was not run on every rank, and an empty one on none.",
        "",
    ]
    for title, mine in (("", verdicts), ("Before (the release without it):", before)):
        if mine is None:
            continue
        table = table_of(mine)
        wheres = list(next(iter(table.values())))
        lines += [title, ""] if title else []
        lines += ["| | " + " | ".join(wheres) + " |", "|---" * (len(wheres) + 1) + "|"]
        lines += [f"| **{how}** | " + " | ".join(row[w] for w in wheres) + " |" for how, row in table.items()]
        lines += ["", summary(mine), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(
    how: Annotated[list[str] | None, typer.Option(help="Only these faults.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Only these places.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only these ranks.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Of collectives.")] = 6.0,
    at_once: Annotated[int, typer.Option(help="Runs beside each other.")] = 2,
    tree: Annotated[Path | None, typer.Option(help="Another checkout whose autoplan runs.")] = None,
    torchrun: Annotated[bool, typer.Option(help="Start the ranks with torchrun.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Append what every rank wrote.")] = None,
    read: Annotated[list[Path] | None, typer.Option(help="Results of --json, instead of running.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    before: Annotated[list[Path] | None, typer.Option(help="--json of another checkout, for --write.")] = None,
) -> None:
    """Break ranks of a small job in every way at every point, and count what the others say."""
    wanted = cells(tuple(how or HOWS), tuple(where or WHERES), tuple(rank or range(WORLD)), timeout_s)
    tree = tree or Path(__file__).resolve().parents[2]

    def keep(result: dict[str, Any]) -> None:
        if json_file is not None:
            with json_file.open("a") as file:
                print(json.dumps(result), file=file)

    if read:
        verdicts = _read(read)
    elif torchrun:
        results = [run_torchrun(cell, tree) for cell in wanted]
        for result in results:
            keep(result)
        verdicts = [judge(result) for result in results]
    else:
        verdicts = [judge(result) for result in run_cells(wanted, tree, at_once, keep)]
    console = make_console()
    table = Table(title="survivors that were right")
    for name in ("", *dict.fromkeys(v.cell.where for v in verdicts)):
        table.add_column(name)
    for name, row in table_of(verdicts).items():
        table.add_row(name, *row.values())
    console.print(table)
    console.print(summary(verdicts))
    for v in verdicts:
        if v.right < v.survivors:
            console.print(f"{v.cell.how} in {v.cell.where} on rank {v.cell.rank}: {v.right} of {v.survivors} right")
    if write is not None:
        write.write_text(_document(verdicts, _read(before) if before else None))


if __name__ == "__main__":
    run_command(main)
