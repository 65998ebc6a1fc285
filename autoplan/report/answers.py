"""The answers of `autoplan plan`, `estimate`, `whatif` and `capacity`: read the words, compute, print."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from autoplan.catalog import Usual, usual_run
from autoplan.errors import InfeasibleError
from autoplan.program.facts import layer_calls
from autoplan.report.arguments import read_degrees, read_vary
from autoplan.report.commands import fit_words
from autoplan.report.data import Unnamed, estimate_report, infeasible_report, plan_report, to_text, whatif_report
from autoplan.report.degrees import checked_config
from autoplan.report.files import check_writable
from autoplan.report.flags import TaskWords
from autoplan.report.html import check_report_path, write_report
from autoplan.report.output import put, say_note
from autoplan.report.request import read_request, read_run
from autoplan.report.screen import Answer, first_screen
from autoplan.report.sweep_rows import planned_rows
from autoplan.report.sweep_text import outcome_of, whatif_text
from autoplan.report.text import console, estimate_text, plan_text
from autoplan.report.waiting import Countdown, telling, waiting
from autoplan.search.best_use import Use, best_use
from autoplan.search.certificate import Status
from autoplan.search.infeasible import NothingFits
from autoplan.search.planner import estimate_config
from autoplan.search.request import PlanRequest
from autoplan.sweeps.explain import Setting, quick_gains
from autoplan.sweeps.whatif import Point, RunTask, check_varied, columns, points, row


@dataclass(frozen=True)
class Shown:
    """The form of an answer: as JSON, with all figures, and also as a report in this file."""

    as_json: bool = False
    verbose: bool = False
    report: Path | None = None


def answer_plan(task: TaskWords, pin: list[str] | None, by_kind: bool, shown: Shown, **asked: Any) -> None:
    """Plan the task, and print the first screen, all figures, or JSON. `asked`: the limits of the search."""
    check_report_path(shown.report)
    as_json = shown.as_json
    run = read_run(task)
    request = replace(read_request(task, pins=pin, **asked), by_kind=by_kind)
    try:
        with waiting("searching", as_json) as status:
            used = best_use(request, telling(status))
    except InfeasibleError as error:
        if as_json:
            typer.echo(to_text(infeasible_report(error)))
        if not isinstance(error, NothingFits):
            raise
        ways = shlex.join(fit_words(task.named, task.cluster, request))
        raise NothingFits(f"{error} Other ways to train it: {ways}", error.report) from error
    asked_again = used.asked(task.asked)
    if as_json:
        typer.echo(to_text(plan_report(used.request, used.result, run, asked_again, _unnamed(task))))
    elif shown.verbose:
        plan_text(console(), task.named, used.text(task.cluster), used.request, used.result, run, task.cluster)
    if shown.report is None and (as_json or shown.verbose):
        return
    answer, usual = _answer(task, used, run)
    if not as_json and not shown.verbose:
        first_screen(console(), answer)
    if shown.report is not None:
        from autoplan.report.drawn import drawn_plan

        with waiting("drawing", as_json, hint=""):
            drawn = drawn_plan(answer, usual)
        write_report(shown.report, plan_report(used.request, used.result, run, asked_again, _unnamed(task)), drawn)


def _unnamed(task: TaskWords) -> Unnamed | None:
    """Return what an answer about a plan file keeps of it, if no name stands for its model."""
    return None if task.holder is None else Unnamed(task.holder.capture)


def _answer(task: TaskWords, used: Use, run: RunTask) -> tuple[Answer, Usual | None]:
    """Return the contents of the first screen, and the usual run that it uses; no gains after Ctrl-C."""
    usual = usual_run(task.model) if task.written is None and (run.tokens is None or task.usual) else None
    # of pre-training, not of a fine-tuning run
    known = run.tokens is None and usual is not None and usual.tokens is not None and used.request.adapters is None
    answer = Answer(
        model=task.named,
        cluster=used.text(task.cluster),
        request=used.request,
        result=used.result,
        run=replace(run, tokens=usual.tokens) if known and usual is not None else run,
        usual=task.usual,
        usual_tokens=known,
        gains=_gains(used),
        whole=task.cluster,
    )
    return answer, usual


def _gains(use: Use) -> Sequence[Setting]:
    """Return the changes that would help the best plan most; none if Ctrl-C ended its search, or ends this."""
    if use.result.certificate.status == Status.INTERRUPTED:
        return ()
    try:
        return quick_gains(use.request, use.result.plans[0])
    except KeyboardInterrupt:
        return ()


def answer_estimate(
    task: TaskWords, degrees: Mapping[str, Any], timeline: Path | None, shown: Shown, *, runnable: bool, cache: bool
) -> str | None:
    """Price one configuration. Return why it does not fit; None if it fits."""
    check_report_path(shown.report)
    as_json = shown.as_json
    run = read_run(task)
    if timeline is not None:
        check_writable(timeline)
    request = read_request(task, runnable=runnable, cache=cache)
    given = read_degrees(degrees, layer_calls(request.graph))
    if task.written is not None:
        task.written.check_taken()
        for lost in task.written.dropped(given):
            say_note(f"{lost} of {task.written.path} was made for other degrees and is left out")
        given = task.written.but(given, task.cluster)
    config = checked_config(request, given)
    with waiting("pricing", as_json, hint=""):
        planned = estimate_config(request, config)
    if timeline is not None:
        from autoplan.report.timeline import write

        write(planned.estimate, timeline)
    data = estimate_report(request, planned, run, task.asked, _unnamed(task))
    put(data, as_json, lambda out: estimate_text(out, task.named, task.cluster, request, planned, run))
    if shown.report is not None:
        from autoplan.report.drawn import drawn_estimate

        write_report(shown.report, data, drawn_estimate(request, planned, run))
    return None if planned.estimate.fits else planned.estimate.missing()


def _varied_of_file(request: PlanRequest, varied: Iterable[str], *, pins: bool) -> PlanRequest:
    """Return the request of a plan file without what a sweep replaces.

    These are its pins of varied names (if `pins` are its own), and the nodes that its search left idle.
    """
    if pins:
        request = replace(request, pins={n: value for n, value in request.pins.items() if n not in varied})
    if "nodes" in varied and request.cluster.idle_nodes:
        request = replace(request, cluster=request.cluster.with_(idle=0))
    return request


def answer_whatif(
    task: TaskWords, vary: Sequence[str], pin: list[str] | None, csv: Path | None, shown: Shown, **asked: Any
) -> tuple[str, list[Point], int]:
    """Plan every point of a sweep. Return the outcome, the points, and how many there are in all."""
    check_report_path(shown.report)
    as_json = shown.as_json
    run = read_run(task)
    values = read_vary(vary)
    check_varied(values)
    if csv is not None:
        check_writable(csv)
    request = read_request(task, pins=pin, **asked)
    if task.written is not None:
        request = _varied_of_file(request, values, pins=pin == task.written.asked.get("pin"))
    count = math.prod(map(len, values.values()))
    pairs = ((point, row(point, run)) for point in points(request, values))
    done, interrupted = planned_rows(pairs, columns(values, run), Countdown(count, "points"), csv, as_json)
    found = [point for point, _ in done]
    outcome = outcome_of(found, interrupted)
    data = whatif_report(outcome, request, values, [cells for _, cells in done])
    put(data, as_json, partial(whatif_text, request=request, found=found, run=run))
    if shown.report is not None:
        from autoplan.report.drawn_sweeps import drawn_whatif

        write_report(shown.report, data, drawn_whatif(request, found, run))
    return outcome, found, count


def answer_capacity(file: Path, csv: Path | None, shown: Shown) -> tuple[str, list[Point], int]:
    """Plan every row of a capacity file. Return as `answer_whatif`."""
    from autoplan.report.capacity import capacity_report, capacity_text
    from autoplan.sweeps.capacity import cell_columns, cell_row, cells, read_task

    check_report_path(shown.report)
    as_json = shown.as_json
    if csv is not None:
        check_writable(csv)
    with waiting("reading", as_json, hint=""):
        task = read_task(file)
    count = task.num_searches * len(task.tokens)
    pairs = ((cell, cell_row(cell)) for cell in cells(task))
    done, interrupted = planned_rows(pairs, cell_columns(), Countdown(count, "rows"), csv, as_json)
    found = [cell for cell, _ in done]
    outcome = outcome_of([cell.point for cell in found], interrupted)
    data = capacity_report(str(file), outcome, task, found)
    put(data, as_json, partial(capacity_text, title=str(file), task=task, found=found))
    if shown.report is not None:
        from autoplan.report.drawn_sweeps import drawn_capacity

        write_report(shown.report, data, drawn_capacity(task, found))
    return outcome, [cell.point for cell in found], count
