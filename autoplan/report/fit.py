"""The answers of `autoplan fit`: yes or no, the terms of memory, and the ways to make a model fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.catalog import load_model
from autoplan.config import numbers
from autoplan.config.choices import config_data
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.plans.document import chosen
from autoplan.program.facts import ModelFacts
from autoplan.program.legality import not_executed
from autoplan.report.data import head, planned_data, shortage_data
from autoplan.report.flags import TaskWords
from autoplan.report.output import put
from autoplan.report.request import import_from_here, read_request
from autoplan.report.text import (
    figure_notes,
    heading,
    memory_table,
    notes_of,
    paragraph,
    plain_table,
    priced_only,
    task_notes,
)
from autoplan.report.waiting import INCOMPLETE, waiting
from autoplan.sweeps.fit import Fit, Way, fit
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.whatif import STEP_ONLY

USUAL_LEN = 4096  # tokens per sequence if none are given, or as many as the model has positions


def fit_command(task: TaskWords, pin: list[str] | None, ways: bool, seconds: float, as_json: bool, **asked: Any) -> int:
    """Look whether a model fits, print the answer, and return the exit code: 0 it fits, 3 it does not, 2 undecided."""
    request = read_request(completed(task), pins=pin, **asked)
    with waiting("searching", as_json) as status:
        found = fit(request, ways=ways, seconds=seconds, told=lambda what: status.update(f"trying: {what}"))
    put(fit_report(found), as_json, partial(fit_text, found=found))
    if found.interrupted:
        raise KeyboardInterrupt(INCOMPLETE)
    return {True: 0, False: 3, None: 2}[found.fits]


def completed(task: TaskWords) -> TaskWords:
    """Return a task with a length and a batch: the usual length, and a sequence for every device."""
    given = {name: getattr(task, name) for name in ("seq_len", "global_batch_size")}
    if given["seq_len"] is None:
        if ":" in task.model:
            import_from_here()
        graph = load_model(task.model)
        named = [] if graph.positions is None else [graph.positions]
        task = replace(task, seq_len=str(min([USUAL_LEN, *named, *ModelFacts(graph).positions.values()])))
    if given["global_batch_size"] is None:
        task = replace(task, global_batch_size=str(Cluster.parse(task.cluster).num_devices))
    return task


# -- text --------------------------------------------------------------------------------------------------------------


def fit_text(out: Console, found: Fit) -> None:
    """Print whether a model fits, and the ways to make it fit."""
    request, asked = found.asked.request, found.asked
    heading(out, request)
    out.print()
    if asked.planned is not None:
        e = asked.planned.estimate
        left = e.memory_capacity_bytes - e.peak_memory_bytes.mid
        out.print(Text(f" YES, it fits:  {plan_label(asked.planned.config, e)}", style="bold green"), soft_wrap=True)
        paragraph(
            out,
            f"memory {e.peak_memory_bytes.mid / 1e9:.1f} GB ({e.peak_memory_bytes.low / 1e9:.1f} to "
            f"{e.peak_memory_bytes.high / 1e9:.1f}) of {e.memory_capacity_bytes / 1e9:.1f} GB, {left / 1e9:.1f} GB "
            f"left; step {numbers.digits(e.step_time_s.mid)} s, {numbers.scaled(e.tokens_per_s)} tokens/s",
            1,
            first=1,
        )
        memory_table(out, e)
    else:
        word = "NO, it does not fit" if asked.status == "does not fit" else "NOT DECIDED in time"
        out.print(Text(f" {word}", style="bold red"))
        paragraph(out, _need(asked, request.memory_risk), 1, first=1)
        if found.closest is not None:
            label = plan_label(found.closest.config, found.closest.estimate)
            paragraph(out, f"A plan with little memory, {label}:", 1, first=1)
            memory_table(out, found.closest.estimate)
    if found.ways:
        out.print()
        out.print(Text("Ways to train it, each planned by itself:", style="bold"))
        _ways(out, found)
    _notes(out, found)


def _notes(out: Console, found: Fit) -> None:
    """Print what a reader must know besides the figures: of the plan, and of the ways what they assume."""
    notes = task_notes([found.asked.request])
    for way in (found.asked, *found.ways):
        if way.planned is not None:
            e, r = way.planned.estimate, way.request
            notes += notes_of(e, r, STEP_ONLY) if way is found.asked else figure_notes(e, r)
            texts = [text for text in priced_only(way.planned.config, r) if text not in notes]
            notes += [f"{way.name}: {text}" if way.name else text for text in texts]
    for text in dict.fromkeys(notes):
        paragraph(out, f"Note: {text}", 6, "yellow")


def _need(way: Way, risk: float) -> str:
    """Return the shortage of the closest plan of a way, in words. `risk`: accepted probability of running out."""
    s = way.shortage
    if s is None:
        return way.reason
    return (
        f"at a memory risk of {risk:g} the closest plan needs {s.needed_bytes / 1e9:.1f} GB on stage {s.stage}, there "
        f"are {s.available_bytes / 1e9:.1f} GB; its largest term is {s.term}"
    )


def _ways(out: Console, found: Fit) -> None:
    table = plain_table("", "fits", "memory GB", "tokens/s", "plan, or what is needed", left=2)
    table.columns[-1].justify = "left"
    table.columns[0].min_width = 24
    for way in found.ways:
        if way.planned is not None:
            e = way.planned.estimate
            cells = ["yes", f"{e.peak_memory_bytes.mid / 1e9:.1f}", numbers.scaled(e.tokens_per_s)]
            table.add_row(way.name, *cells, plan_label(way.planned.config, e))
        else:
            s = way.shortage
            size = f"{s.needed_bytes / 1e9:.1f}" if s is not None else "-"
            text = "not decided in time" if way.status == "stopped" else f"too much: {s.term}" if s is not None else ""
            table.add_row(way.name, "no" if way.status == "does not fit" else "?", size, "-", text)
    out.print(table)


# -- JSON --------------------------------------------------------------------------------------------------------------


_OUTCOMES = {True: "ok", False: "infeasible", None: "stopped"}  # by whether it fits


def fit_report(found: Fit) -> dict[str, Any]:
    """Return the answer of `autoplan fit` as plain data."""
    asked, none = found.asked, partial(dict.fromkeys, ("priced_not_executed", "plan", "estimate"))
    shown = asked.planned if asked.planned is not None else found.closest
    return {
        **head("fit", asked.request, _OUTCOMES[found.fits]),
        "fits": found.fits,
        **(none() if shown is None else planned_data(shown, asked.request, STEP_ONLY)),
        "shortage": shortage_data(asked.shortage),
        "ways": [_way(way) for way in found.ways],
    }


def _way(way: Way) -> dict[str, Any]:
    p = way.planned
    e = None if p is None else p.estimate
    return {
        **chosen(way, "name status"),
        "priced_not_executed": None if p is None else list(not_executed(p.config, way.request.facts)),
        "plan": None if p is None else config_data(p.config),
        "peak_memory_bytes": None if e is None else e.peak_memory_bytes.mid,
        "tokens_per_s": None if e is None else e.tokens_per_s,
        "shortage": shortage_data(way.shortage),
        "search_status": None if way.certificate is None else str(way.certificate.status),
    }
