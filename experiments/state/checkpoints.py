"""Does a training go on under another plan as if nothing had happened? Every pair of plans: saved, loaded, compared.

    python -m experiments.state.checkpoints [--only REGEX] [--json FILE] [--write docs/checkpoints_matrix.md]

A cell trains two steps under one plan, saves, and trains on; under the other plan the checkpoint is loaded into a
program with other parameters, saved again at once, and trained on with the samples that come next. It passes if

- the second checkpoint has the same bits: parameters, buffers and every moment of the optimizer;
- the losses are those of the training that went on: the same bits under the same plan, in float64 to 1e-12 under
  another (sums in another order), in 16 bits to 2e-3;
- learning rates, the state of the loss scaler and the number of samples agree, and with as many data-parallel ranks
  also their random draws.

Controls break one thing after loading and pass if that is seen. `--json` keeps results line by line; a second run with
the same file does only what is missing.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan.files import AppendedFile
from autoplan.profiler.processes import RankError, run_ranks
from autoplan.report.files import write_text
from experiments.shared.measure import make_console, run_command
from experiments.state.jobs import CONTROLS, SCALER, After, Loaded, error_of, load_all, load_and_go_on, save_all
from experiments.state.plans import TRAININGS, Cell, Training, all_cells, job_of, world_of

TOLERANCE = 1e-12
TOLERANCE_16 = 2e-3
RUN_S = 1800.0  # limit of one group of processes
GROUP_CELLS = 60  # a group of processes runs as many cells, so that it starts seldom and little is lost with it
_CONTROLLED = (
    (Training("dropout"), "pp2", "tp2"),
    (Training("llama"), "ZeRO 3, dp2", "ZeRO 3, dp2"),
    (Training("llama", "fp16"), "ZeRO 1, dp2", "pp2"),
)


def verdict(cell: Cell, found: Sequence[Loaded], truth: Sequence[After]) -> list[str]:
    """Return what is wrong with a cell; nothing if it passes. Both by rank."""
    first, same = found[0], cell.saved == cell.loaded
    wrong = []
    if first.changed:
        wrong.append(f"{len(first.changed)} tensors changed: {first.changed[0]}")
    error = max(error_of(f.after, truth[0]) for f in found)
    limit = 0.0 if same else TOLERANCE if cell.training.precision == "native" else TOLERANCE_16
    if not error <= limit:
        wrong.append(f"losses differ by {error:.1e}")
    if any(f.after.num_samples != truth[0].num_samples for f in found):
        wrong.append(f"{first.after.num_samples} samples instead of {truth[0].num_samples}")
    if first.after.learning_rates != truth[0].learning_rates:
        wrong.append("learning rates differ")
    if any(f.after.scaler != truth[0].scaler for f in found):
        wrong.append(f"the scaler is at {first.after.scaler} instead of {truth[0].scaler}")
    draws = {t.data_rank: t.draw for t in truth}
    here = {f.after.data_rank for f in found}
    if len(draws) == len(here) and any(f.after.draw != draws[f.after.data_rank] for f in found):
        wrong.append("random draws differ")
    if len(draws) != len(here) and len({f.after.draw for f in found}) != len(here):
        wrong.append("data-parallel ranks draw alike")
    return wrong


def _by_world(plans: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for world in sorted({world_of(p) for p in plans}):
        yield world, [p for p in plans if world_of(p) == world]


def _groups(cells: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """Yield (world, cells) of each group of processes: those that load one plan, or several with few cells."""
    for world, plans in _by_world(list(dict.fromkeys(c.loaded for c in cells))):
        group: list[Cell] = []
        for plan in plans:
            more = [c for c in cells if c.loaded == plan]
            if group and len(group) + len(more) > GROUP_CELLS:
                yield world, group
                group = []
            group += more
        yield world, group


def run_training(training: Training, cells: Sequence[Cell], end: float) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells of one training; yield each with its result. `end`: no new processes after this time."""
    saved = list(dict.fromkeys(c.saved for c in cells))
    with tempfile.TemporaryDirectory() as root:
        folders = {plan: str(Path(root, str(i))) for i, plan in enumerate(saved)}
        truth: dict[str, list[After]] = {}
        for world, plans in _by_world(saved):
            if time.monotonic() > end:
                return
            jobs = [job_of(training, p) for p in plans]
            found = run_ranks(save_all, world, jobs, [folders[p] for p in plans], timeout_s=RUN_S)
            for i, plan in enumerate(plans):
                truth[plan] = [of_rank[i] for of_rank in found]
        for world, group in _groups(cells):
            if time.monotonic() > end:
                return
            try:
                yield from _run_group(world, group, folders, truth)
            except RankError:  # which cell was it?
                for cell in group:
                    try:
                        yield from _run_group(world, [cell], folders, truth)
                    except RankError as exc:
                        yield cell, {"error": math.inf, "wrong": [str(exc).strip().splitlines()[-1]]}


def _run_group(
    world: int, cells: Sequence[Cell], folders: Mapping[str, str], truth: Mapping[str, Sequence[After]]
) -> list[tuple[Cell, dict[str, Any]]]:
    """Load and go on in one group of processes; return the cells with their results."""
    plans = list(dict.fromkeys(c.loaded for c in cells))
    mine = [[c for c in cells if c.loaded == p] for p in plans]
    jobs = [job_of(cells[0].training, p) for p in plans]
    wanted = [[folders[c.saved] for c in some] for some in mine]
    loaded = run_ranks(load_all, world, jobs, wanted, timeout_s=RUN_S)
    out = []
    for i, some in enumerate(mine):
        for j, cell in enumerate(some):
            of_ranks = [of_rank[i][j] for of_rank in loaded]
            error = max(error_of(f.after, truth[cell.saved][0]) for f in of_ranks)
            out.append((cell, {"error": error, "wrong": verdict(cell, of_ranks, truth[cell.saved])}))
    return out


def run_controls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Break one thing after loading; yield what it was and what the comparison says."""
    for training, before, after in _CONTROLLED:
        cell = Cell(training, before, after)
        with tempfile.TemporaryDirectory() as root:
            saved = run_ranks(save_all, world_of(before), [job_of(training, before)], [root], timeout_s=RUN_S)
            truth = [of_rank[0] for of_rank in saved]
            for name in CONTROLS:
                if (name == SCALER) is not (training.precision == "fp16"):
                    continue
                if "dropout" in name and training.family != "dropout":
                    continue
                job = job_of(training, after)
                found = run_ranks(load_and_go_on, world_of(after), job, [root], name, timeout_s=RUN_S)
                yield f"{cell}: {name}", {"wrong": verdict(cell, [of_rank[0] for of_rank in found], truth)}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the document of all results, by cell."""
    cells = [c for c in all_cells() if str(c) in results]
    passed = [c for c in cells if not results[str(c)]["wrong"]]
    total = sum(1 for _ in all_cells())
    controls = {name: r for name, r in results.items() if any(name.endswith(f": {c}") for c in CONTROLS)}
    seen = [name for name, r in controls.items() if r["wrong"]]
    lines = [
        "# Checkpoints under other plans",
        "",
        "Generated by `python -m experiments.state.checkpoints`, whose docstring says when a cell passes.",
        "Real processes over gloo on CPU; no dim of the models is a multiple of 4, so that shards are uneven.",
        "",
        f"**{len(passed)} of {len(cells)}** pairs of a plan that saves and a plan that loads pass"
        + ("" if len(cells) == total else f" ({total - len(cells)} were not run)")
        + f"; **{len(seen)} of {len(controls)}** controls, which break one thing after loading, are seen.",
        "",
        "Rows save, columns load. `=`: losses have the same bits; `ok`: they differ by rounding (in float64 at most",
        "1e-12); `X`: wrong; `.`: not run.",
    ]
    for training in TRAININGS:
        lines += ["", f"## {training}", ""]
        lines += ["| | " + " | ".join(training.plans) + " |", "|---" * (len(training.plans) + 1) + "|"]
        for before in training.plans:
            marks = [_mark(results.get(str(Cell(training, before, after)))) for after in training.plans]
            lines.append(f"| {before} | " + " | ".join(marks) + " |")
    lines += ["", "## Controls", "", "| what is broken after loading | what is seen |", "|---|---|"]
    lines += [f"| {name} | {'; '.join(r['wrong']) or '**nothing**'} |" for name, r in controls.items()]
    wrong = [c for c in cells if results[str(c)]["wrong"]]
    if wrong:
        lines += ["", "## What is wrong", ""]
        lines += [f"- {c}: {'; '.join(results[str(c)]['wrong'])}" for c in wrong]
    return "\n".join(lines) + "\n"


def _mark(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "."
    return "**X**" if result["wrong"] else "=" if result["error"] == 0 else "ok"


def read_results(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return what `--json` has kept, by cell."""
    if path is None or not path.exists():
        return {}
    return {r.pop("cell"): r for r in map(json.loads, path.read_text().splitlines())}


def run(
    only: Annotated[str, typer.Option(help="run the cells whose name has this (a regular expression)")] = "",
    keep: Annotated[Path | None, typer.Option("--json", help="results, line by line; what is there is not run")] = None,
    write: Annotated[Path | None, typer.Option(help="write the document here")] = None,
    timeout_s: Annotated[float, typer.Option(help="begin nothing new after this many seconds")] = 3600.0,
) -> None:
    """Save under every plan, load under every other, compare."""
    end = time.monotonic() + timeout_s
    results = read_results(keep)
    old = "".join(json.dumps({"cell": c, **r}) + "\n" for c, r in results.items())
    file = AppendedFile(keep, old) if keep is not None else None
    console = make_console()

    def done(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        if file is not None:
            file.append(json.dumps({"cell": name, **result}) + "\n")
        if result["wrong"] and ":" in name:
            console.print(f"{name}: {'; '.join(result['wrong'])}", markup=False)

    for training in TRAININGS:
        wanted = [
            c for c in all_cells() if c.training == training and str(c) not in results and re.search(only, str(c))
        ]
        if not wanted:
            continue
        try:
            for cell, result in run_training(training, wanted, end):
                done(str(cell), result)
        except RankError as exc:
            console.print(f"{training}: {exc}", markup=False)
    if time.monotonic() < end and not only and not any(n.endswith(tuple(CONTROLS)) for n in results):
        for name, result in run_controls():
            done(name, result)
    if write is not None:
        write_text(write, page(results))
    table = Table("training", "passed", "of", "not run")
    missing = 0
    for training in TRAININGS:
        mine = [c for c in all_cells() if c.training == training]
        count = Counter("none" if str(c) not in results else bool(results[str(c)]["wrong"]) for c in mine)
        missing += count["none"]
        table.add_row(str(training), str(count[False]), str(len(mine) - count["none"]), str(count["none"]))
    console.print(table)
    controls = [r for n, r in results.items() if n.endswith(tuple(CONTROLS))]
    console.print(f"controls seen: {sum(bool(r['wrong']) for r in controls)} of {len(controls)}")
    cells = {str(c) for c in all_cells()}
    if any(r["wrong"] for n, r in results.items() if n in cells) or not all(r["wrong"] for r in controls):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(run)
