"""What the reports of whatif, capacity, size and explain show beside their JSON answers (see autoplan.report.drawn)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoplan.config import numbers
from autoplan.report.drawn import drawn_of, gain_data, hardware_sources, request_text, run_sources, sources
from autoplan.report.task_text import batch_text, settings_text
from autoplan.report.text import title
from autoplan.search.planner import Planned, PlanRequest
from autoplan.sweeps.capacity import CapacityTask, Cell
from autoplan.sweeps.explain import Explanation
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.size import Size, SizePoint
from autoplan.sweeps.whatif import Point, RunTask


def drawn_whatif(request: PlanRequest, found: Sequence[Point], run: RunTask) -> dict[str, Any]:
    """Return the verdict of a sweep, its task, and the sources of the figures of all its clusters."""
    planned = [p for p in found if p.planned is not None and p.request is not None]
    said = f"{len(planned)} of {len(found)} points have a plan."
    if planned:
        best = min(planned, key=_seconds)
        said += f" The fastest is {_varied(best)}: {numbers.digits(_seconds(best))} s per step."
        paid = [(usd, p) for p in planned if (usd := _usd(p, run)) is not None]
        if paid:
            usd, cheapest = min(paid, key=lambda pair: pair[0])
            said += f" The cheapest is {_varied(cheapest)}: {numbers.dollars(usd)}."
    return {
        "task": request_text(request),
        "verdict": said,
        "good": bool(planned),
        "sources": [*_hardware(p.request for p in planned), *run_sources(run)],
    }


def _varied(point: Point) -> str:
    return ", ".join(f"{name}={numbers.plain_number(value)}" for name, value in point.varied.items())


def _seconds(point: Point) -> float:
    return point.planned.estimate.step_time_s.mid if point.planned is not None else float("inf")


def _usd(point: Point, run: RunTask) -> float | None:
    found = point.run(run)
    return None if found is None or found.usd is None else found.usd.mid


def _hardware(requests: Iterable[PlanRequest | None]) -> list[dict[str, str]]:
    return hardware_sources([request.cluster for request in requests if request is not None])


def drawn_capacity(task: CapacityTask, found: Sequence[Cell]) -> dict[str, Any]:
    """Return what a capacity table says first: the quickest and the cheapest row of every model and size of run."""
    planned = [c for c in found if c.point.planned is not None]
    answers = []
    for model, tokens in dict.fromkeys((c.model, c.tokens) for c in planned):
        own = [c for c in planned if (c.model, c.tokens) == (model, tokens)]
        paid = [c for c in own if _usd(c.point, c.run) is not None]
        cheapest = min(paid, key=lambda c: _usd(c.point, c.run) or 0.0, default=None)
        words = ["-" if c is None else _cell(c) for c in (min(own, key=_days), cheapest)]
        answers.append([model, f"{numbers.scaled(tokens)} tokens", *words])
    settings = [f"{n:,} tokens" for n in task.seq_len], [f"{n:,} sequences" for n in task.global_batch_size]
    rest = ", ".join([*task.precision, *map(str, task.mode)])
    return {
        "task": f"{', '.join(settings[0])} x {', '.join(settings[1])}, {rest}",
        "verdict": f"{len(planned)} of {len(found)} rows have a plan.",
        "good": bool(planned),
        "answers": {"heads": ["model", "run", "quickest", "cheapest"], "rows": answers},
        "sources": [*_hardware(c.point.request for c in planned), *run_sources(RunTask(1.0, task.assumptions))],
    }


def _days(cell: Cell) -> float:
    found = cell.point.run(cell.run)
    if found is None:
        return float("inf")
    return (found.days_with_failures or found.days).mid


def _cell(cell: Cell) -> str:
    usd = _usd(cell.point, cell.run)
    return f"{cell.cluster}: {numbers.days(_days(cell))}" + ("" if usd is None else f", {numbers.dollars(usd)}")


def drawn_size(found: Size) -> dict[str, Any]:
    """Return the question of a size, its answer in words, and the plan and the interval of every point."""
    r = found.request
    money = "" if found.budget_usd is None else f" for at most {numbers.dollars(found.budget_usd)}"
    question = f"{numbers.scaled(found.tokens)} tokens in {numbers.days(found.deadline_days)}{money}"
    best = found.fewest
    if best is None:
        said = f"Nothing that was tried trains on {question}."
    else:
        kind = next(k for k in found.kinds if best in k.points)
        known = "the fewest that" if found.proved else "the fewest known that"
        said = f"{best.num_devices:,} x {kind.name} are {known} train on {question}."
    points = [p for k in found.kinds for p in k.points]
    return {
        "task": f"{title(r)}; {batch_text(r)}, {settings_text(r)}",
        "verdict": said,
        "good": best is not None,
        "points": [_point(p) for p in points],
        "sources": [
            *_hardware(p.point.request for p in points if p.point.planned is not None),
            *run_sources(RunTask(found.tokens, found.assumptions)),
        ],
    }


def _point(point: SizePoint) -> Mapping[str, str]:
    """Return the interval of a point's days and its plan, or why it has none."""
    planned, days = point.point.planned, point.whole_days
    if planned is None:
        return {"span": "", "plan": point.point.reason or point.point.status}
    if days is None:
        return {"span": "", "plan": plan_label(planned.config, planned.estimate)}
    span = f"{numbers.digits(days.low)} to {numbers.digits(days.high)}"
    return {"span": span, "plan": plan_label(planned.config, planned.estimate)}


def drawn_explained(
    request: PlanRequest, own: Planned, run: RunTask, said: str, found: Explanation | None = None
) -> dict[str, Any]:
    """Return what the report of an explanation draws. `said`: its answer; `found`: None for two plans."""
    more: dict[str, Any] = {}
    if found is not None:
        more["gains"] = [gain_data(s) for s in found.settings]
        more["front"] = [plan_label(p.planned.config, p.planned.estimate) for p in found.front]
    return {
        **drawn_of(request, own),
        "verdict": said,
        "good": own.estimate.fits,
        "sources": list(sources(request, run, None)),
        **more,
    }
