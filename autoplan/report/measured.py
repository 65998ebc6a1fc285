"""A plan beside a log of its steps (autoplan.runtime.step_log): `autoplan compare PLAN LOG`. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from autoplan.catalog import load_model
from autoplan.config.choices import OPTIONS, config_data
from autoplan.config.settings import VARIED_SETTINGS
from autoplan.cost_models.hardware.catalog import entries
from autoplan.errors import AutoplanError, PinError
from autoplan.files import json_of, write_whole
from autoplan.plans.document import plain
from autoplan.plans.record import Plan
from autoplan.report.data import report
from autoplan.report.text import TERMS, paragraph, plain_table

WARM_UP = 2  # rows of the beginning that count for nothing
_LEAST_SHARE = 1e-3  # of the predicted step: smaller terms are left out
_LOG_VERSION = 1
_HEAD = ("model", "graph", "plan", "device", "world")  # that are read
_ROW = {"step_s": False, "tokens_per_s": True, "mfu": True, "peak_bytes": False}  # that are read: may be null


@dataclass(frozen=True)
class Figure:
    """One figure of a step: as predicted (low and high if there is an interval) and as measured (median, quartiles)."""

    name: str
    predicted: float
    low: float | None
    high: float | None
    measured: float
    quartiles: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Predicted over measured; infinite if nothing was measured."""
        return self.predicted / self.measured if self.measured else math.inf

    @property
    def inside(self) -> bool | None:
        """True if the measured median lies in the predicted interval; None without one."""
        return None if self.low is None or self.high is None else self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Comparison:
    """A plan and the steps that were run under it.

    Attributes:
        num_rows: rows that count. notes: how the log differs from what the plan was made for.
        predicted_s: the predicted step by term, in seconds.
        unlike: those of the notes that say that the log is of another run than the plan's.
    """

    model: str
    num_rows: int
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    predicted_s: Mapping[str, float]
    unlike: tuple[str, ...] = ()


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return head and rows of a log. A last line that is cut off is left out.

    Raises:
        PinError: the file is missing, or is not a log; names the line and the figure at fault.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PinError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PinError(f"{path} is not a text; give the file that autoplan.StepLog wrote") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(json_of(line))
        except ValueError:
            raise PinError(f"{path}: line {number} is not JSON; give the file that autoplan.StepLog wrote") from None
    head = found[0] if found else {}
    if not isinstance(head, dict) or head.get("autoplan_step_log") != _LOG_VERSION:
        raise PinError(
            f"{path} is not a log of steps of version {_LOG_VERSION}; give the file that autoplan.StepLog wrote"
        )
    for key in _HEAD:
        if key not in head:
            raise PinError(f"{path}: line 1 has no {key!r}; give the file that autoplan.StepLog wrote")
    for number, row in enumerate(found[1:], start=2):
        _check_row(row, f"{path}: line {number}")
    return head, found[1:]


def _check_row(row: object, where: str) -> None:
    """Raise PinError for a row that lacks a figure, or has one that is no number."""
    if not isinstance(row, Mapping):
        raise PinError(f"{where} is no row of a log, but {row!r}; give the file that autoplan.StepLog wrote")
    for name, optional in _ROW.items():
        value = row.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not (optional and value is None):
            kind = "a number or null" if optional else "a number"
            raise PinError(f"{where}: {name} is {value!r} and must be {kind}, as autoplan.StepLog writes it")


def check_used(log: Path, traces: bool, calibrate: Path | None, model: str | None, timeline: Path | None) -> None:
    """Raise PinError for an argument of the command that nothing would use. `traces`: the log is a trace."""
    if model is not None and calibrate is None:
        raise PinError(f"--model {model} is about --calibrate: add --calibrate steps.yaml, or leave it out")
    if timeline is not None and not traces:
        raise PinError(
            f"--timeline {timeline} needs a trace of torch.profiler, and {log} is none; give a trace in its place, or "
            "leave out --timeline"
        )


def compare(plan: Plan, log: Path) -> Comparison:
    """Return a plan's prediction beside the steps of a log.

    Raises:
        PinError: the plan has no estimate, or the log has no rows after the first `WARM_UP`.
    """
    head, rows = read_log(log)
    e = plan.priced()
    counted = rows[WARM_UP:]
    if not counted:
        raise PinError(f"{log} has {len(rows)} rows, of which the first {WARM_UP} do not count; run more steps")
    step = e.step_time_s
    memory = e.peak_memory_bytes if head["device"] == "cpu" else e.peak_allocated_bytes  # as the log counts
    figures = [figure_of("step_s", step.mid, (step.low, step.high), counted)]
    for name in ("tokens_per_s", "mfu"):
        if all(row.get(name) is not None for row in counted):
            figures.append(figure_of(name, getattr(e, name), None, counted))
    figures.append(figure_of("peak_bytes", memory.mid, (memory.low, memory.high), counted))
    notes = []
    if head["graph"] and plan.graph_hash and head["graph"] != plan.graph_hash:
        notes.append(f"the log is of another graph ({head['model']}) than the plan ({plan.model})")
    if head["world"] != plan.num_devices:
        notes.append(f"the log is of {head['world']} ranks, the plan for {plan.num_devices} devices")
    first = str(plan).splitlines()[0]
    if head["plan"] and head["plan"] != first:
        notes.append(f"the log is of another plan: {head['plan']}")
    notes += on_another_device(plan, head["device"])
    unlike = tuple(notes)
    if head["device"] == "cpu":
        notes.append("memory is the peak of a whole process, with Python and its libraries")
    terms = {name: q.mid for name, q in e.breakdown.items()}
    return Comparison(plan.model, len(counted), tuple(figures), tuple(notes), terms, unlike)


def on_another_device(plan: Plan, ran_on: str) -> tuple[str, ...]:
    """Return a note if steps ran on another kind of device (`cpu` or `cuda`) than the plan is for; else nothing."""
    device = str(plan.document.get("cluster", {}).get("device", ""))
    planned = "cpu" if device == "cpu" else "cuda" if device in entries() else ran_on
    return () if planned == ran_on else (f"the steps ran on {ran_on}, the plan is for {device}",)


def figure_of(
    name: str, predicted: float, interval: tuple[float, float] | None, rows: Sequence[Mapping[str, Any]]
) -> Figure:
    """Return a figure from its prediction, with an interval or without, and its values in the rows."""
    values = [float(row[name]) for row in rows]
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, high = interval if interval is not None else (None, None)
    return Figure(name, predicted, low, high, statistics.median(values), (quarters[0], quarters[2]))


_SHOWN = {
    "step_s": ("step, s", 1.0, ".4g"),
    "compute_s": ("compute, s", 1.0, ".4g"),
    "comm_s": ("exposed comm, s", 1.0, ".4g"),
    "optimizer_s": ("optimizer, s", 1.0, ".4g"),
    "rest_s": ("rest, s", 1.0, ".4g"),
    "tokens_per_s": ("tokens/s", 1.0, ",.0f"),
    "mfu": ("MFU, %", 100.0, ".1f"),
    "peak_bytes": ("memory, GB", 1e-9, ".2f"),
}


def shown_row(figure: Figure) -> tuple[str, ...]:
    """Return the cells of a figure: name with unit, predicted, interval, measured, quartiles, ratio, inside."""
    title, factor, form = _SHOWN[figure.name]

    def text(*values: float | None) -> str:
        return " to ".join(format(value * factor, form) for value in values if value is not None)

    inside = {True: "yes", False: "no", None: ""}[figure.inside]
    return (
        title,
        text(figure.predicted),
        text(figure.low, figure.high),
        text(figure.measured),
        text(*figure.quartiles),
        f"{figure.ratio:.2f}",
        inside,
    )


def comparison_text(out: Console, found: Comparison) -> None:
    """Print a comparison."""
    out.print(f"{found.model}: predicted and measured, steps: {found.num_rows}")
    table = plain_table("", "predicted", "interval", "measured", "quartiles", "predicted/measured", "inside")
    for figure in found.figures:
        table.add_row(*shown_row(figure))
    out.print(table)
    largest = sorted(found.predicted_s.items(), key=lambda item: -item[1])
    least = _LEAST_SHARE * sum(found.predicted_s.values())
    shown = "; ".join(f"{TERMS.get(name, name)} {seconds:.3g} s" for name, seconds in largest if seconds > least)
    paragraph(out, f"The predicted step: {shown}.")
    for note in found.notes:
        paragraph(out, f"Note: {note}.")


def comparison_data(found: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON data."""
    figures = [{**asdict(f), "ratio": f.ratio, "inside": f.inside} for f in found.figures]
    return report("compare", **{**asdict(found), "figures": figures})


def write_calibration(plan: Plan, found: Comparison, path: Path, model: str | None = None) -> None:
    """Write the measured step as a file for `autoplan calibrate`.

    Args:
        model: the plan's model as the command line takes it; None: the name that the plan has for it.

    Raises:
        PinError: the command line cannot load the model, the plan has none, the model is another one than the plan's,
            or the steps are of another run.
    """
    if found.unlike:
        raise PinError(f"--calibrate needs steps that were run under this plan: {'; '.join(found.unlike)}")
    asked = plan.document.get("asked")
    if not isinstance(asked, Mapping) or "model" not in asked:
        raise PinError(
            "--calibrate needs a plan of the command line (`autoplan plan MODEL ... --json`), whose model has a name"
        )
    name = asked["model"] if model is None else model
    try:
        num_params = load_model(name).num_params
    except AutoplanError as exc:
        raise PinError(
            f"--calibrate needs a model that the command line can load, and cannot load {name!r}; add --model with a "
            "name of `autoplan models`, the path of a Hugging Face config.json, or package.module:factory"
        ) from exc
    planned = _num_params(plan)
    if planned not in (None, num_params):
        raise PinError(
            f"--calibrate needs the model that the plan was made for, {plan.model} with {planned:,} parameters; "
            f"{name} has {num_params:,}"
        )
    import yaml

    request = plan.document["request"]
    data = config_data(plan.config)
    degrees = {key: data[key] for key in data if data[key] is not None and key != "num_micro_batches"}
    step = {
        "name": f"{plan.model}, measured",
        "model": name,
        "cluster": asked["cluster"],
        **{setting: request[setting] for setting in VARIED_SETTINGS},
        "options": {option: request[option] for option in OPTIONS if request.get(option) is not None},
        "step_time_s": found.figures[0].measured,
        "degrees": plain(degrees),
    }
    write_whole(path, yaml.safe_dump([step], sort_keys=False))


def _num_params(plan: Plan) -> int | None:
    """Return the parameters of the model that a plan was made for; None if the plan does not say it."""
    for section, name in (("made_for", "parameters"), ("model", "num_params")):
        found = plan.document.get(section)
        if isinstance(found, Mapping) and isinstance(found.get(name), int):
            return int(found[name])
    return None
