"""Published runs priced by plain flags, without and with --like, against the full reading of their row.

    python -m experiments.published.plain_flags --data FILE.csv [--trust A] [--jobs N] [--limit N]

Every row that names a framework is priced three times: (a) by model, cluster, batch, precision and the choices that the
row states, as `autoplan estimate` takes them; (b) by the same and `--like STACK@VERSION`, the version being the month
of the release that the row names or is taken to be of; (c) as `experiments.published.validate` reads the row, with the
words of its flags and notes. Errors are predicted / measured - 1.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoplan.config.choices import options_of
from autoplan.errors import AutoplanError
from autoplan.report.degrees import checked_config
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest
from autoplan.stacks.like import read_like
from autoplan.stacks.records import Framework, stacks_of_frameworks
from experiments.published.graphs import graph_of
from experiments.published.reading import era_of
from experiments.published.rows import Case, Shapes, interpret, read_rows
from experiments.published.validate import price

# The columns of a row that state a choice -> the choice; degrees and micro-batch are always given
_STATED = {"zero_stage": "zero_stage", "recompute": "recompute"}
_DEGREES = ("tp", "pp", "cp", "dp", "ep", "zero_replicas", "micro_batch_size")


@dataclass(frozen=True)
class Compared:
    """One row: seconds of a step as measured, and by plain flags, with --like, and by the full reading; NaN: refused.

    `refused`: why --like has no price.
    """

    stack: str
    measured_s: float
    plain_s: float
    like_s: float
    row_s: float
    refused: str = ""


def like_of(case: Case) -> str:
    """Return the stack of a row with its version."""
    row, found = case.row, stacks_of_frameworks()[case.framework]
    year = max(era_of(row["source"], row["notes"], row["gpu"]), 2010.0)
    return f"{found.name}@{int(year) % 100:02d}.{int((year % 1) * 12) + 1:02d}"


def flags_of(case: Case) -> dict[str, Any]:
    """Return the choices that a row states, as they would be typed."""
    row, config = case.row, case.task.settings[0].config
    given = {name: getattr(config, name) for name in _DEGREES}
    given |= {choice: getattr(config, choice) for column, choice in _STATED.items() if row[column]}
    if config.pp > 1 and (row["vpp"] or row["schedule"]):
        given |= {"schedule": config.schedule, "virtual_stages": config.virtual_stages}
    return given | ({"offload": config.offload} if config.offload else {})


def request_of(case: Case, like: str | None) -> PlanRequest:
    """Return the task of a row by plain flags, with or without a stack. AutoplanError if refused."""
    task = case.task
    precision = task.precision.partition("-")[0]
    said = {"sequence_parallel": False if case.row["sp"] == "0" and case.row["tp"] != "1" else None}
    chosen = read_like(like, {**said, "precision": precision}) if like is not None else None
    return PlanRequest(
        replace(graph_of(task.shape), name=case.row["model"]),  # some recipes differ by model
        task.cluster,
        task.seq_len,
        task.global_batch_size,
        precision=precision,
        options=options_of(said),
        like=chosen,
    )


def seconds(case: Case, like: str | None) -> float:
    """Return the predicted seconds of a step by plain flags, with or without a stack. AutoplanError if refused."""
    request = request_of(case, like)
    return estimate_config(request, checked_config(request, flags_of(case))).estimate.step_time_s.mid


def _tried(case: Case, like: str | None) -> tuple[float, str]:
    try:
        return seconds(case, like), ""
    except AutoplanError as error:
        return math.nan, str(error)


def compared(cases: Sequence[Case]) -> list[Compared]:
    """Return the rows of one model; those that the full reading refuses are left out."""
    out = []
    for case in cases:
        try:
            full = price(case.task).estimates[0].step_time_s.mid
        except AutoplanError:
            continue
        (plain, _), (like, refused) = _tried(case, None), _tried(case, like_of(case))
        name = stacks_of_frameworks()[case.framework].name
        out.append(Compared(name, case.measured_s, plain, like, full, refused))
    return out


def errors(found: Sequence[Compared], which: str) -> tuple[float, float]:
    """Return mean absolute error and bias of `which` (a field in seconds) over the rows that all three price."""
    off = [getattr(c, which) / c.measured_s - 1 for c in found]
    return statistics.fmean(map(abs, off)), statistics.fmean(off)


def table(rows: Sequence[Compared]) -> Table:
    """Return the figures by stack."""
    out = Table("stack", "rows", "plain flags", "--like", "row", "same as row", "within 2 %", "refused")
    groups: dict[str, list[Compared]] = defaultdict(list)
    for each in rows:
        groups[each.stack].append(each)
    for name, found in [*sorted(groups.items()), ("all", list(rows))]:
        priced = [c for c in found if not math.isnan(c.plain_s + c.like_s)]
        if not priced:
            continue
        cells = ["{:.1%} ({:+.1%})".format(*errors(priced, which)) for which in ("plain_s", "like_s", "row_s")]
        off = [abs(c.like_s / c.row_s - 1) for c in priced]
        shares = [f"{sum(d <= most for d in off) / len(off):.0%}" for most in (1e-9, 0.02)]
        out.add_row(name, str(len(priced)), *cells, *shares, str(sum(math.isnan(c.like_s) for c in found)))
    return out


def main(
    data: Annotated[Path, typer.Option(help="The table of published measurements.")],
    trust: Annotated[str | None, typer.Option(help="Only rows of this trust.")] = None,
    jobs: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 2,
    limit: Annotated[int | None, typer.Option(help="Every n-th row, so that at most this many are priced.")] = None,
) -> None:
    """Compare plain flags, --like and the full reading of published runs."""
    rows = read_rows(data)
    shapes, groups = Shapes(rows), defaultdict(list)
    wanted = [r for r in rows if r.framework is not Framework.OTHER and trust in (None, r["trust"])]
    for row in wanted[:: max(1, -(-len(wanted) // limit))] if limit else wanted:
        try:
            case = interpret(row, shapes)
        except AutoplanError:
            continue
        if math.isfinite(case.measured_s) and not case.task.layer and case.task.shape.adapters is None:
            groups[case.task.shape].append(case)
    with ProcessPoolExecutor(jobs) as pool:
        found = [c for each in pool.map(compared, groups.values()) for c in each]
    console = Console(width=130)
    console.print(table(found))
    reasons: dict[str, int] = defaultdict(int)
    for each in found:
        if each.refused:
            reasons[f"{each.stack}: {each.refused[:100]}"] += 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:10]:
        console.print(f"{count:>4} refused: {reason}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
