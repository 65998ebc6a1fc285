"""The table of a sweep as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from autoplan.config import numbers
from autoplan.report.plots import MOST_BARS, bar_plot, show_plot
from autoplan.report.tables import fitting_table
from autoplan.report.text import heading, paragraph, prices, run_cells, task_notes
from autoplan.search.certificate import Status
from autoplan.search.planner import PlanRequest
from autoplan.sweeps.whatif import STEP_ONLY, Point, RunTask, notes, row, run_of


def whatif_text(out: Console, request: PlanRequest, found: Sequence[Point], run: RunTask = STEP_ONLY) -> None:
    """Print the table of `autoplan whatif`."""
    heading(out, request)
    out.print()
    varied = list(found[0].varied) if found else []
    heads = [*varied, "devices", "step s", "low to high", "tokens/s"]
    if run.tokens is not None:
        heads += ["days", "cost"]
    heads += ["GB left", "plan"]
    rows: list[list[str]] = []
    reasons: dict[str, int] = {}
    for point in found:
        data = row(point, run)
        cells = [numbers.plain_number(point.varied[name]) for name in varied]
        cells.append(numbers.plain_number(data["num_devices"]) if data["num_devices"] is not None else "-")
        if point.planned is None:
            cells += ["-", "-", "-"] + (["-", "-"] if run.tokens is not None else []) + ["-"]
            cells.append(f"{point.status} [{reasons.setdefault(point.reason, len(reasons) + 1)}]")
        else:
            e = point.planned.estimate
            step = e.step_time_s
            span = f"{numbers.digits(step.low)}-{numbers.digits(step.high)}"
            cells += [numbers.digits(step.mid), span, numbers.scaled(e.tokens_per_s)]
            if point.request is not None:
                days_and_cost = run_cells(run_of(e, point.request, run))
                cells += days_and_cost[::2]  # only --csv and --json show them with failures
            cells.append(f"{(e.memory_capacity_bytes - e.peak_memory_bytes.mid) / 1e9:.1f}")
            ended = "" if data["search_status"] in _AS_ASKED else f" ({data['search_status']})"
            cells.append(point.label + ended)
        rows.append(cells)
    table, left_out = fitting_table(heads, rows, out.width, _LESS_NEEDED)
    out.print(table)
    for reason, number in reasons.items():
        paragraph(out, f"[{number}] {reason}", 4, "yellow")
    show_plot(out, _bars(found, out.width))
    planned = next((p for p in found if p.planned is not None), None)
    out.print()
    if planned is not None and planned.planned is not None:
        tag = planned.planned.estimate.step_time_s.tag
        spans = (
            "low to high as stated" if not left_out else f"{' and '.join(map(repr, left_out))} left out at this width"
        )
        paragraph(out, f"Each row is planned anew; times are {tag}, {spans}. All figures: --csv, --json", 2)
    prices(out, [p.request for p in found if p.request is not None and p.planned is not None], run)
    for text in _notes(request, found, run):
        paragraph(out, f"Note: {text}", 6, "yellow")


def _notes(request: PlanRequest, found: Sequence[Point], run: RunTask) -> list[str]:
    """Return what a reader must know besides the figures, of all planned points; the rest is in --csv and --json."""
    planned = [p for p in found if p.planned is not None and p.request is not None]
    texts = task_notes([p.request for p in planned if p.request is not None] or [request])
    texts += [text for p in planned for text in notes(p, run)]
    texts = list(dict.fromkeys(texts))
    left = len(texts) - _MOST_NOTES
    return texts if left <= 1 else [*texts[:_MOST_NOTES], f"{left} more notes: --csv, --json"]


def _bars(found: Sequence[Point], width: int) -> list[str]:
    """Return bars of the tokens per second of a sweep, if there are at least three."""
    rows = [
        (" ".join(f"{name} {numbers.plain_number(value)}" for name, value in point.varied.items()), point.planned)
        for point in found
    ]
    known = [(name, planned.estimate.tokens_per_s) for name, planned in rows if planned is not None]
    return bar_plot(known, "tokens/s", min(width, 80)) if 3 <= len(known) <= MOST_BARS else []


_MOST_NOTES = 4
_LESS_NEEDED = ("low to high", "GB left")  # the first to go where a line is too short

_AS_ASKED = (Status.COMPLETE, Status.NEAR)  # searches that ended by themselves; their gap is in --csv and --json

# The outcome of a sweep, by the best state among its points
_OUTCOMES = {"ok": "ok", "stopped": "stopped", "does not fit": "infeasible"}


def outcome_of(found: Sequence[Point], interrupted: bool) -> str:
    """Return the outcome of a sweep. `interrupted`: between two of its points."""
    states = {point.status for point in found}
    interrupted = interrupted or (bool(found) and found[-1].interrupted)
    return "interrupted" if interrupted else next((n for s, n in _OUTCOMES.items() if s in states), "illegal")
