"""What it would have cost to run the layout that is predicted fastest: measured regret over published sweeps.

    python -m experiments.published.regret --data FILE.csv [--json FILE] [--jobs 2]
    python -m experiments.published.regret --rows FILE.json          (of `validate --json`, without pricing them again)

A sweep is what one campaign measured of one model, on the same devices, in one number format, with one batch: at least
two layouts that ran. The layout with the least predicted step is chosen, of those whose expected need of memory is said
to fit (of all, if none is). Its regret is its measured step over that of the fastest layout, less one. A layout that
was measured several times counts with its fastest run. A chosen layout that ran out of memory has no step, and is
counted by itself. For comparison: the regret without the filter of memory, of the better of the three layouts
predicted fastest, and of the layout in the middle of what was measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoplan.errors import AutoplanError
from autoplan.report.files import write_text
from experiments.published.results import Result
from experiments.published.rows import read_rows
from experiments.published.validate import RENAMED, validate

MEAN_AIM, WORST_AIM = 0.015, 0.10
_TOP = 3


@dataclass(frozen=True)
class Choice:
    """The layout chosen in one sweep.

    Attributes:
        num_layouts: layouts that ran.
        chosen, best: ids of rows.
        regret: None if the chosen layout ran out of memory.
        without_memory, of_three, of_median: regret without the filter, of the best of three, of the median layout.
        num_excluded: layouts that ran and are said not to fit.
    """

    campaign: str
    model: str
    devices: str
    num_layouts: int
    chosen: str
    best: str
    regret: float | None
    without_memory: float
    of_three: float
    of_median: float
    num_excluded: int


def choices(results: Sequence[Result]) -> list[Choice]:
    """Return the choice of every sweep, the one with the largest regret first."""
    sweeps: dict[tuple[str, str], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        if not r.reason and not math.isnan(r.predicted_s) and (r.out_of_memory or r.compared):
            sweeps[r.sweep, r.number_format][r.setting].append(r)
    found = [_choice(list(layouts.values())) for layouts in sweeps.values()]
    return sorted((c for c in found if c is not None), key=lambda c: (c.regret is not None, -(c.regret or 0.0)))


def _choice(layouts: Sequence[Sequence[Result]]) -> Choice | None:
    """Return the choice among layouts, each with all of its runs; None with fewer than two that ran."""
    fastest = [min(runs, key=lambda r: math.inf if r.out_of_memory else r.measured_s) for runs in layouts]
    ran = [r for r in fastest if not r.out_of_memory and r.compared]
    if len(ran) < 2:
        return None
    best = min(ran, key=lambda r: r.measured_s)

    def regret(r: Result) -> float:
        return math.inf if r.out_of_memory else r.measured_s / best.measured_s - 1

    ranked = sorted(fastest, key=lambda r: r.predicted_s)
    fitting = [r for r in ranked if r.fits] or ranked
    of_ran = sorted(ran, key=lambda r: r.predicted_s)
    chosen = fitting[0]
    return Choice(
        campaign=chosen.campaign,
        model=chosen.model,
        devices=f"{chosen.num_devices} x {chosen.device}",
        num_layouts=len(ran),
        chosen=chosen.id,
        best=best.id,
        regret=None if chosen.out_of_memory else regret(chosen),
        without_memory=regret(of_ran[0]),
        of_three=min(map(regret, of_ran[:_TOP])),
        of_median=statistics.median(map(regret, ran)),
        num_excluded=sum(not r.fits for r in ran),
    )


def summary_of(found: Sequence[Choice]) -> dict[str, Any]:
    """Return mean and worst of every kind of regret, as fractions. AutoplanError without a sweep."""
    regrets = [c.regret for c in found if c.regret is not None]
    if not regrets:
        raise AutoplanError("no sweep: no two layouts of one model, cluster, number format and batch have a step time")

    def both(values: Sequence[float]) -> dict[str, float]:
        return {"mean": statistics.fmean(values), "worst": max(values)}

    return {
        "num_sweeps": len(found),
        "num_out_of_memory": len(found) - len(regrets),
        "num_best_chosen": sum(r == 0 for r in regrets),
        "chosen": both(regrets),
        "without_memory": both([c.without_memory for c in found]),
        "best_of_three": both([c.of_three for c in found]),
        "median_layout": both([c.of_median for c in found]),
    }


def show(found: Sequence[Choice], console: Console, most: int) -> None:
    """Print the sweeps with the largest regret, then the summary."""
    table = Table("campaign", "model", "devices", "layouts", "said not to fit", "chosen", "best", "regret")
    for c in found[:most]:
        said = "out of memory" if c.regret is None else f"{c.regret:.1%}"
        counts = str(c.num_layouts), str(c.num_excluded)
        table.add_row(c.campaign, c.model, c.devices, *counts, c.chosen, c.best, said)
    console.print(table)
    s = summary_of(found)
    for name in ("chosen", "without_memory", "best_of_three", "median_layout"):
        console.print(f"{name.replace('_', ' ')}: mean {s[name]['mean']:.1%}, worst {s[name]['worst']:.1%}")
    console.print(
        f"{s['num_sweeps']} sweeps; the best layout was chosen in {s['num_best_chosen']}, one that ran out of memory "
        f"in {s['num_out_of_memory']}. Aims: mean {MEAN_AIM:.1%}, worst {WORST_AIM:.0%}"
    )


def read_results(path: Path) -> list[Result]:
    """Return the rows that `validate --json` stored. AutoplanError for another file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [_result(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AutoplanError(f"{path}: not the rows of validate --json ({error})") from error


def _result(row: dict[str, Any]) -> Result:
    stored = {RENAMED.get(f.name, f.name): f for f in fields(Result)}
    values = {f.name: math.nan if row[key] is None and f.default is not None else row[key] for key, f in stored.items()}
    return Result(**values)


def main(
    data: Annotated[Path | None, typer.Option(help="CSV of published measurements, which are priced")] = None,
    rows: Annotated[Path | None, typer.Option(help="rows that `validate --json` stored, instead")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="store all sweeps and the summary here")] = None,
    trust: Annotated[str, typer.Option(help="only rows of this trust (A, B or C); all by default")] = "",
    most: Annotated[int, typer.Option(min=0, help="sweeps to print, those with the largest regret")] = 15,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
) -> None:
    """Print the measured regret of the layouts that are predicted fastest."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if (data is None) == (rows is None):
        raise typer.BadParameter("give either --data or --rows")
    try:
        if rows is not None:
            results = read_results(rows)
        else:
            everything = read_rows(data)  # type: ignore[arg-type]
            results = validate(everything, everything, jobs, console)
        found = choices([r for r in results if r.trust == (trust or r.trust)])
        show(found, console, most)
    except AutoplanError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if json_path is not None:
        stored = {"sweeps": [asdict(c) for c in found], "summary": summary_of(found)}
        write_text(json_path, json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
