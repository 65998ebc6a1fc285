"""`autoplan calibrate`: fit the constants to a user's steps, say what the steps determine, and write the file."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from autoplan.calibration.fit import Fitted, HeldOut, MeasuredStep, fit_constants, held_out_errors, priced_by
from autoplan.calibration.steps import functions, read_steps
from autoplan.calibration.tables import constants_table, rounded, stored
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.profile import Profile
from autoplan.errors import PinError
from autoplan.report.files import write_text
from autoplan.report.text import console, paragraph

_LEAST_GROUPS = 1  # a user's own machines: the prior holds constants that few steps determine


def calibrate_command(
    file: Path, profile: str | None, constants: Path | None, only: str | None, write: Path | None
) -> Callable[[], None]:
    """Run the command, and return the function that prints its results.

    Raises:
        AutoplanError: if a file cannot be read or written.
    """
    start = Constants.shipped() if constants is None else Constants.load(constants)
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    start.with_(dict.fromkeys(names, 1.0))  # an unknown name is an error before models are loaded
    if write is not None and not write.parent.is_dir():
        raise PinError(f"cannot write {write}: there is no folder {write.parent}")
    measured = read_steps(file, start, None if profile is None else Profile.load(profile))
    steps = [m.step for m in measured]
    price = priced_by(functions(measured))
    fitted = fit_constants(steps, price, start, names=names, least_groups=_LEAST_GROUPS)
    several = len({step.group for step in steps}) > 1
    held = held_out_errors(fitted, steps, price, least_groups=_LEAST_GROUPS) if several else None
    if write is not None:
        _write(write, file, steps, fitted, held)
    return lambda: _show(console(), steps, fitted, held, write)


def _write(path: Path, file: Path, steps: Sequence[MeasuredStep], fitted: Fitted, held: HeldOut | None) -> None:
    more = {"date": datetime.date.today().isoformat(), "sources": [file.name]}
    text = json.dumps(stored(steps, fitted, held, more=more), indent=1) + "\n"
    write_text(path, text)


def _show(
    out: Console, steps: Sequence[MeasuredStep], fitted: Fitted, held: HeldOut | None, write: Path | None
) -> None:
    out.print(_steps_table(steps, fitted, held))
    means = f"{_mean(fitted.before)} before, {_mean(fitted.after)} after"
    if held is not None:
        means += f", {_mean(held.errors)} of steps that had no part in the fit"
    paragraph(out, f"mean error: {means}", 2)
    out.print(constants_table(fitted, held, "group"))
    open_ = [name for name, row in fitted.rows.items() if row.groups and not row.determined]
    none = [name for name, row in fitted.rows.items() if not row.groups]
    if open_:
        paragraph(out, f"These steps do not determine, and the prior holds: {', '.join(open_)}.", 2)
    if none:
        paragraph(out, f"No step depends on: {', '.join(none)}.", 2)
    if rounded(fitted.constants) == rounded(Constants.shipped()):
        paragraph(out, "The constants stay as shipped.", 2)
    if write is not None:
        paragraph(out, f"Written to {write}; use it with --constants {write}", 2)


def _mean(logs: Array) -> str:
    return f"{np.mean(np.abs(np.expm1(logs))):.1%}"


def _steps_table(steps: Sequence[MeasuredStep], fitted: Fitted, held: HeldOut | None) -> Table:
    table = Table(title="Steps: predicted / measured - 1", title_justify="left")
    table.add_column("step")
    for name in ("measured", "before", "after", *(["without it"] if held else [])):
        table.add_column(name, justify="right")
    columns = [fitted.before, fitted.after, *([held.errors] if held else [])]
    for i, step in enumerate(steps):
        table.add_row(step.name, f"{step.measured_s:.4g} s", *(f"{math.expm1(logs[i]):+.1%}" for logs in columns))
    return table
