"""Plans found in a given time against published layouts, priced by the same model: none should be slower.

    python -m experiments.plans.search_completeness --data FILE.csv [--limit 20] [--seed 0] [--time-limit 60]

Every row that names a framework is priced by plain flags and `--like` (experiments.published.plain_flags), with the
choices that it states. A search of the same request without pins then has to find a plan that is no slower. Rows whose
layout the stack refuses, or does not fit by the model, have nothing to compare with and are counted by reason.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from autoplan.errors import AutoplanError
from autoplan.report.degrees import checked_config
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import SearchResult, search_plan
from autoplan.stacks.records import Framework
from experiments.published.plain_flags import flags_of, like_of, request_of
from experiments.published.rows import Case, Shapes, interpret, read_rows
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

_CLOSE = 1e-6  # relative: equally fast


@dataclass(frozen=True)
class Found:
    """One row: seconds of the published layout and of the fastest plan found, by the same model, and the proof."""

    name: str
    published_s: float
    fastest_s: float
    status: str
    gap: float
    solve_time_s: float

    @property
    def slower(self) -> float:
        """How much slower the plan is, as a share; negative if it is faster."""
        return self.fastest_s / self.published_s - 1

    @property
    def missed(self) -> bool:
        """True if the search did not find a plan as fast as the published one."""
        return self.slower > _CLOSE


def fastest_s(result: SearchResult) -> float:
    """Return the step of the fastest plan; the chosen one is the simplest of its equals."""
    return min([result.plans[0].estimate.step_time_s.mid, *(seconds for _, seconds in result.equals)])


def searched(case: Case, time_limit_s: float) -> Found | str:
    """Return what a search finds for a row, or why there is nothing to compare with."""
    try:
        request = request_of(case, like_of(case))
        published = estimate_config(request, checked_config(request, flags_of(case))).estimate
    except AutoplanError:
        return "the stack refuses the published layout"
    if not published.fits:
        return "the published layout does not fit by the model"
    name = f"{case.row['model']} on {request.cluster.num_devices}"
    try:
        result = search_plan(replace(request, time_limit_s=time_limit_s))
    except AutoplanError as error:
        return f"no plan although the published one fits: {error}"
    c = result.certificate
    return Found(name, published.step_time_s.mid, fastest_s(result), str(c.status), c.gap, c.solve_time_s)


def cases_of(data: Path, only: str) -> Iterator[Case]:
    """Yield the rows with a framework that can be read, one per task and set of flags."""
    rows, seen = read_rows(data), set[str]()
    shapes = Shapes(rows)
    for row in rows:
        if row.framework is Framework.OTHER or only not in row["model"].lower():
            continue
        try:
            case = interpret(row, shapes)
        except AutoplanError:
            continue
        key = repr((row["model"], case.task.cluster, case.task.seq_len, case.task.global_batch_size, flags_of(case)))
        if case.task.layer or case.task.shape.adapters is not None or key in seen:
            continue
        seen.add(key)
        yield case


def main(
    data: Annotated[Path, typer.Option(help="the table of published measurements")],
    limit: Annotated[int, typer.Option(help="most rows, drawn by chance", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    time_limit: Annotated[float, typer.Option(help="seconds of one search")] = 60.0,
    only: Annotated[str, typer.Option(help="rows whose model contains this")] = "",
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Search for every drawn row, and say where a published layout is faster than the plan."""
    console, env = make_console(), environment()
    cases = list(cases_of(data, only.lower()))
    random.Random(seed).shuffle(cases)
    table = Table(title=f"{min(limit, len(cases))} of {len(cases)} rows; {describe(env)}")
    for heading in ("model", "published s", "plan s", "plan is", "proof", "search s"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    found, reasons = list[Found](), Counter[str]()
    for case in cases[:limit]:
        with console.status(case.row["model"]):
            each = searched(case, time_limit)
        if isinstance(each, str):
            reasons[each] += 1
            continue
        found.append(each)
        proof = f"{each.status}, gap {each.gap:.1%}"
        seconds = (f"{each.published_s:.3f}", f"{each.fastest_s:.3f}", f"{each.slower:+.1%}")
        table.add_row(each.name, *seconds, proof, f"{each.solve_time_s:.1f}")
    console.print(table)
    console.print(f"slower than published: {sum(f.missed for f in found)} of {len(found)}")
    for reason, count in reasons.most_common():
        console.print(f"{count:>4} not compared: {reason}", soft_wrap=True)
    write_json(json, "search_completeness", env, [asdict(each) for each in found])


if __name__ == "__main__":
    run_command(main)
