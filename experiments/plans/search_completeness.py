"""Plans found in a given time against published layouts, priced by the same model: none should be slower.

    python -m experiments.plans.search_completeness --data FILE.csv [--limit 20] [--seed 0] [--time-limit 60]

The seconds of `--time-limit` are processor seconds, so that a busy machine finds what an idle one does.
Every row that names a framework is priced by plain flags and `--like` (experiments.published.plain_flags), with the
choices that it states. Rows that ask the same (model, cluster, batch, stack) are one request; a search of it without
pins has to find a plan that is no slower than any of their layouts. If the high end of the memory of none of these
fits, but the expected memory does, the search gets the same room (`--memory-risk 0.5`). Rows whose layout the stack
refuses, or does not fit by the model, have nothing to compare with and are counted by reason.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

from autoplan.config.choices import config_label
from autoplan.config.parallel import ParallelConfig
from autoplan.config.planning import DEFAULT_RISK, EXPECTED_RISK
from autoplan.errors import AutoplanError
from autoplan.report.degrees import checked_config
from autoplan.search import clock
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest
from autoplan.stacks.like import Like
from autoplan.stacks.records import Framework
from experiments.published.plain_flags import flags_of, like_of, request_of
from experiments.published.rows import Shapes, interpret, read_rows
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

_CLOSE = 1e-6  # relative: equally fast


@dataclass(frozen=True)
class Found:
    """One request: seconds of its fastest published layout and of the fastest plan found, by the same model, the proof.

    `num_rows`: published layouts that the plan has to be as fast as; `published`, `chosen`: the two layouts.
    """

    name: str
    num_rows: int
    published: str
    chosen: str
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


def _fits_surely(planned: Planned) -> bool:
    """Return True if the high end of the need fits, as a search asks by default."""
    e = planned.estimate
    return e.peak_memory_bytes.high <= e.memory_capacity_bytes and e.peak_host_bytes.high <= e.host_capacity_bytes


def searched(request: PlanRequest, layouts: Sequence[ParallelConfig], reasons: Counter[str]) -> Found | None:
    """Return what a search finds for a request; None, with the reasons counted, without a layout to compare with."""
    published: list[Planned] = []
    for config in layouts:
        try:
            planned = estimate_config(request, config)
        except AutoplanError:
            reasons["the stack refuses the published layout"] += 1
            continue
        if planned.estimate.fits:
            published.append(planned)
        else:
            reasons["the published layout does not fit by the model"] += 1
    if not published:
        return None
    risk = DEFAULT_RISK if any(map(_fits_surely, published)) else EXPECTED_RISK
    fitting = [p for p in published if risk == EXPECTED_RISK or _fits_surely(p)]
    best = min(fitting, key=lambda p: p.estimate.step_time_s.mid)
    try:
        result = search_plan(replace(request, memory_risk=risk))
    except AutoplanError as error:
        reasons[f"no plan although the published one fits: {error}"] += 1
        return None
    c, plan = result.certificate, result.plans[0]
    name = f"{request.graph.name} on {request.cluster.num_devices} x {request.cluster.device.name}"
    layouts_of = (config_label(best.config), config_label(plan.config))
    times = (best.estimate.step_time_s.mid, result.fastest_s)
    return Found(name, len(fitting), *layouts_of, *times, str(c.status), c.gap, c.solve_time_s)


def requests_of(data: Path, only: str, reasons: Counter[str]) -> list[tuple[PlanRequest, list[ParallelConfig]]]:
    """Return every request once, with the layouts of all rows that ask it; what is refused is counted in `reasons`.

    Rows ask the same if the stacks of their versions set and can do the same.
    """
    rows, found = read_rows(data), dict[str, tuple[PlanRequest, list[ParallelConfig]]]()
    shapes = Shapes(rows)
    for row in rows:
        if row.framework is Framework.OTHER or only not in row["model"].lower():
            continue
        try:
            case = interpret(row, shapes)
        except AutoplanError:
            continue
        task = case.task
        if task.layer or task.shape.adapters is not None:
            continue
        try:
            r = request_of(case, like_of(case))
            config = checked_config(r, flags_of(case))
        except AutoplanError:
            reasons["the stack refuses the published layout"] += 1
            continue
        stack = (r.like.stack.name, r.like.can) if isinstance(r.like, Like) else ()
        asked = task.shape, r.cluster, r.seq_len, r.global_batch_size, r.precision, r.mode, r.options, stack
        _, layouts = found.setdefault(repr(asked), (r, []))
        if config not in layouts:
            layouts.append(config)
    return list(found.values())


def main(
    data: Annotated[Path, typer.Option(help="the table of published measurements")],
    limit: Annotated[int, typer.Option(help="most requests, drawn by chance", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    skip: Annotated[int, typer.Option(help="requests of the draw to leave out first", min=0)] = 0,
    time_limit: Annotated[float, typer.Option(help="processor seconds of one search")] = 60.0,
    only: Annotated[str, typer.Option(help="models whose name contains this")] = "",
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Search for every drawn request, and say where a published layout is faster than the plan."""
    console, env = make_console(), environment()
    found, reasons = list[Found](), Counter[str]()
    asked = requests_of(data, only.lower(), reasons)
    random.Random(seed).shuffle(asked)
    drawn = asked[skip : skip + limit]
    console.print(f"{len(drawn)} of {len(asked)} requests; {describe(env)}")
    for request, layouts in drawn:
        with patch.object(clock, "now_s", time.process_time):
            each = searched(replace(request, time_limit_s=time_limit), layouts, reasons)
        if each is None:
            continue
        found.append(each)
        said = f"{each.slower:+.1%} of {each.published_s:.3f} s; {each.status}, gap {each.gap:.1%}"
        console.print(
            f"{'MISSED ' if each.missed else ''}{each.name}: {said}, {each.solve_time_s:.1f} s", soft_wrap=True
        )
        console.print(f"    published {each.published}, plan {each.chosen}", soft_wrap=True)
    faster = statistics.median([-each.slower for each in found]) if found else math.nan
    rows = sum(each.num_rows for each in found)
    console.print(
        f"slower than published: {sum(f.missed for f in found)} of {len(found)} requests ({rows} layouts); plans are "
        f"{faster:.1%} faster in the median",
        soft_wrap=True,
    )
    for reason, count in reasons.most_common():
        console.print(f"{count:>4} layouts not compared: {reason}", soft_wrap=True)
    write_json(json, "search_completeness", env, [asdict(each) for each in found])


if __name__ == "__main__":
    run_command(main)
