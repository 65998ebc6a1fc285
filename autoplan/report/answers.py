"""The answers of `autoplan plan`, `estimate`, `whatif` and `capacity`: read the words, compute, print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from autoplan.catalog import usual_run
from autoplan.errors import InfeasibleError
from autoplan.program.facts import layer_calls
from autoplan.report.arguments import read_degrees, read_vary
from autoplan.report.data import estimate_report, infeasible_report, plan_report, to_text, whatif_report
from autoplan.report.degrees import checked_config
from autoplan.report.files import check_writable
from autoplan.report.flags import TaskWords
from autoplan.report.output import say_note
from autoplan.report.request import read_request, read_run
from autoplan.report.screen import Answer, first_screen
from autoplan.report.sweep_rows import planned_rows
from autoplan.report.sweep_text import outcome_of, whatif_text
from autoplan.report.text import console, estimate_text, plan_text
from autoplan.report.waiting import Countdown, telling, waiting
from autoplan.search.best_use import Use, best_use
from autoplan.search.certificate import Status
from autoplan.search.planner import estimate_config
from autoplan.sweeps.explain import quick_gains
from autoplan.sweeps.whatif import Point, RunTask, check_varied, columns, points, row


def answer_plan(
    task: TaskWords, pin: list[str] | None, by_kind: bool, verbose: bool, as_json: bool, **asked: Any
) -> None:
    """Plan the task, and print the first screen, all figures, or JSON. `asked`: the limits of the search."""
    run = read_run(task)
    request = replace(read_request(task, pins=pin, **asked), by_kind=by_kind)
    try:
        with waiting("searching", as_json) as status:
            used = best_use(request, telling(status))
    except InfeasibleError as error:
        if as_json:
            typer.echo(to_text(infeasible_report(error)))
        raise
    if as_json:
        typer.echo(to_text(plan_report(used.request, used.result, run, used.asked(task.asked))))
    elif verbose:
        plan_text(console(), task.model, used.text(task.cluster), used.request, used.result, run)
    else:
        first_screen(console(), _answer(task, used, run))


def _answer(task: TaskWords, used: Use, run: RunTask) -> Answer:
    """Return what the first screen shows; what would help is left out after Ctrl-C."""
    usual = usual_run(task.model) if run.tokens is None and task.written is None else None
    known = usual is not None and usual.tokens is not None
    interrupted = used.result.certificate.status == Status.INTERRUPTED
    return Answer(
        model=task.model,
        cluster=used.text(task.cluster),
        request=used.request,
        result=used.result,
        run=replace(run, tokens=usual.tokens) if usual is not None else run,
        usual=task.usual,
        usual_tokens=known,
        gains=() if interrupted else quick_gains(used.request, used.result.plans[0]),
    )


def answer_estimate(
    task: TaskWords, degrees: Mapping[str, Any], timeline: Path | None, runnable: bool, as_json: bool
) -> str | None:
    """Price one configuration. Return why it does not fit; None if it fits."""
    run = read_run(task)
    if timeline is not None:
        check_writable(timeline)
    request = read_request(task, runnable=runnable)
    given = read_degrees(degrees, layer_calls(request.graph))
    if task.written is not None:
        task.written.check_taken()
        for lost in task.written.dropped(given):
            say_note(f"{lost} of {task.written.path} was made for other degrees and is left out")
        given = task.written.but(given, task.cluster)
    config = checked_config(request, given)
    with waiting("pricing", as_json):
        planned = estimate_config(request, config)
    if timeline is not None:
        from autoplan.report.timeline import write

        write(planned.estimate, timeline)
    if as_json:
        typer.echo(to_text(estimate_report(request, planned, run, task.asked)))
    else:
        estimate_text(console(), task.model, task.cluster, request, planned, run)
    return None if planned.estimate.fits else planned.estimate.missing()


def answer_whatif(
    task: TaskWords, vary: Sequence[str], pin: list[str] | None, csv: Path | None, as_json: bool, **asked: Any
) -> tuple[str, list[Point], int]:
    """Plan every point of a sweep. Return the outcome, the points, and how many there are in all."""
    run = read_run(task)
    values = read_vary(vary)
    check_varied(values)
    if csv is not None:
        check_writable(csv)
    request = read_request(task, pins=pin, **asked)
    count = math.prod(map(len, values.values()))
    pairs = ((point, row(point, run)) for point in points(request, values))
    done, interrupted = planned_rows(pairs, columns(values, run), Countdown(count, "points"), csv, as_json)
    found = [point for point, _ in done]
    outcome = outcome_of(found, interrupted)
    if as_json:
        typer.echo(to_text(whatif_report(outcome, request, values, [cells for _, cells in done])))
    else:
        whatif_text(console(), request, found, run)
    return outcome, found, count


def answer_capacity(file: Path, csv: Path | None, as_json: bool) -> tuple[str, list[Point], int]:
    """Plan every row of a capacity file. Return as `answer_whatif`."""
    from autoplan.report.capacity import capacity_report, capacity_text
    from autoplan.sweeps.capacity import cell_columns, cell_row, cells, read_task

    if csv is not None:
        check_writable(csv)
    with waiting("reading", as_json):
        task = read_task(file)
    count = task.num_searches * len(task.tokens)
    pairs = ((cell, cell_row(cell)) for cell in cells(task))
    done, interrupted = planned_rows(pairs, cell_columns(), Countdown(count, "rows"), csv, as_json)
    found = [cell for cell, _ in done]
    outcome = outcome_of([cell.point for cell in found], interrupted)
    if as_json:
        typer.echo(to_text(capacity_report(str(file), outcome, task, found)))
    else:
        capacity_text(console(), str(file), task, found)
    return outcome, [cell.point for cell in found], count
