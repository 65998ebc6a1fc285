"""The capacity table as text and as JSON (see autoplan.report.data for the schema)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import option_data, option_texts
from autoplan.config.settings import VARIED_SETTINGS
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.whole_run import Run
from autoplan.plans.document import plain
from autoplan.report import data
from autoplan.report.text import paragraph, plain_table, prices, run_cells, task_notes
from autoplan.search.certificate import Status
from autoplan.sweeps.capacity import CapacityTask, Cell, cell_row
from autoplan.sweeps.whatif import RunTask, notes

_LISTS = {
    "models": "model",
    "clusters": "cluster",
    "tokens": "tokens",
    **{name: name for name in VARIED_SETTINGS},
}
_RUN = ("days", "with failures", "cost", "goodput")
_FOLDED = {"model": 12, "cluster": 20}  # columns that may take several lines, and their least width


def _shown(name: str, value: object) -> str:
    return numbers.scaled(value) if name == "tokens" and isinstance(value, float) else numbers.plain_number(value)


def capacity_text(out: Console, title: str, task: CapacityTask, found: Sequence[Cell]) -> None:
    """Print the table of `autoplan capacity`: the common values first, then a row each, then reasons and sources."""
    from autoplan.versions import __version__

    rows = [cell_row(cell) for cell in found]
    out.print(Text(f"autoplan {__version__} - capacity of {title}", style="bold"), soft_wrap=True)
    varied = [column for field, column in _LISTS.items() if len(getattr(task, field)) > 1]
    if rows:
        same = [f"{c} {_shown(c, rows[0].get(c))}" for c in _LISTS.values() if c not in varied]
        paragraph(out, ", ".join([*same, *_settings(task)]), 5, first=2)
    out.print()
    table = plain_table("", *varied, *_RUN, left=1 + len(varied))
    for name, column in zip(["", *varied, *_RUN], table.columns, strict=True):
        column.no_wrap, column.min_width = name not in _FOLDED, _FOLDED.get(name)
    plans = plain_table("", "step s", "low-high", "days, low-high", "energy", "GB left", "plan", left=1)
    plans.columns[-1].justify = "left"
    marks: dict[str, int] = {}
    for i, (cell, values) in enumerate(zip(found, rows, strict=True), 1):
        shown = [_shown(name, values.get(name)) for name in varied]
        run = cell.point.run(cell.run)
        table.add_row(str(i), *shown, *_run_columns(run))
        plans.add_row(str(i), *_plan_columns(cell, run, marks))
    out.print(table)
    out.print()
    out.print(plans)
    for reason, number in marks.items():
        paragraph(out, f"[{number}] {reason}", 4, "yellow")
    out.print()
    paragraph(
        out,
        "Each row is planned by itself. The range of the days includes failures. Goodput is the share of the time that "
        "failures and checkpoints leave. Cost and energy are without failures; all figures: --csv, --json",
        2,
    )
    planned = [c.point.request for c in found if c.point.request is not None and c.point.planned is not None]
    prices(out, planned, RunTask(task.tokens[0], task.assumptions))
    for text in task_notes(planned):
        paragraph(out, f"Note: {text}", 6, "yellow")


def _settings(task: CapacityTask) -> list[str]:
    """Return how all rows are set up, in words."""
    said = [f"like {task.like.name}"] if task.like is not None else []
    said += option_texts(task.options)
    said += [f"adapters {task.adapters}"] if task.adapters is not None else []
    said += [f"target {task.target_len:,} tokens"] if task.target_len is not None else []
    said += ["runnable"] if task.runnable else []
    said += [f"constants of {task.constants_file}"] if task.constants_file is not None else []
    return said + ([f"pinned {' '.join(f'{k}={v}' for k, v in task.pins.items())}"] if task.pins else [])


def _run_columns(run: Run | None) -> list[str]:
    if run is None:
        return ["-"] * len(_RUN)
    return [*run_cells(run), numbers.uptime(run.goodput.share.mid) if run.goodput is not None else "-"]


def _plan_columns(cell: Cell, run: Run | None, marks: dict[str, int]) -> list[str]:
    """Return the cells of the plan, or the reason why there is none; remarks are numbered in `marks`."""
    point = cell.point
    if point.planned is None or run is None:
        return ["-"] * 5 + [f"{point.status} [{marks.setdefault(point.reason, len(marks) + 1)}]"]
    e = point.planned.estimate
    words = [point.label]
    c = point.certificate
    if c is not None and c.status != "complete":
        near = c.status == Status.NEAR
        words.append(f"({'' if near else f'{c.status}, '}gap {numbers.percent(c.gap)})")
    words += [f"[{marks.setdefault(note, len(marks) + 1)}]" for note in notes(point, cell.run)]
    return [
        numbers.digits(e.step_time_s.mid),
        _ends(e.step_time_s),
        _ends(run.days_with_failures if run.days_with_failures is not None else run.days),
        numbers.energy(run.kwh.mid) if run.kwh is not None else "-",
        f"{(e.memory_capacity_bytes - e.peak_memory_bytes.mid) / 1e9:.1f}",
        " ".join(words),
    ]


def _ends(q: Quantity) -> str:
    return f"{numbers.digits(q.low)}-{numbers.digits(q.high)}"


def capacity_report(path: str, status: str, task: CapacityTask, found: Sequence[Cell]) -> dict[str, Any]:
    """Return the answer of `autoplan capacity` as plain data."""
    return data.report(
        "capacity",
        status,
        file=path,
        pins=plain(task.pins),
        like=None if task.like is None else task.like.name,
        runnable=task.runnable,
        adapters=None if task.adapters is None else str(task.adapters),
        target_len=task.target_len,
        options=option_data(task.options),
        profile=task.profile.name if task.profile is not None else None,
        constants=task.constants_file,
        assumptions=data.assumptions(task.assumptions),
        notes=_notes(found),
        rows=[cell_row(cell) for cell in found],
    )


def _notes(found: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the notes of the planned tasks by model."""
    out: dict[str, list[str]] = {}
    for cell in found:
        if cell.point.request is not None:
            mine = out.setdefault(cell.point.request.graph.name, [])
            mine += [note for note in cell.point.request.facts.notes if note not in mine]
    return {name: notes for name, notes in out.items() if notes}
