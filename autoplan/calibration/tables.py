"""Fitted constants as tables for people and as the data of a constants file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from autoplan.calibration.fit import Fitted, FittedConstant, HeldOut, MeasuredStep, group_errors
from autoplan.cost_models.constants import Constants

_DIGITS = 4  # of stored values: far finer than any error


def rounded(constants: Constants) -> Constants:
    """Round the constants to the digits that a file holds."""
    return constants.with_({n: float(f"{v:.{_DIGITS}g}") for n, v in constants.values.items()})


def constants_table(fitted: Fitted, held: HeldOut | None, group: str) -> Table:
    """Return a table with a row per constant that a step depends on. `group`: the word for a group.

    State `few steps`: too few groups depend on it, so it stays. `prior holds`: fitted, but not determined.
    """
    table = Table(title="Constants", title_justify="left")
    table.add_column("constant")
    for name in ("before", "after", "error", "prior", f"{group}s", "steps", *(["without one"] if held else [])):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in fitted.rows.values():
        if not row.groups:
            continue
        span = [" - ".join(f"{v:.3g}" for v in held.span[row.name])] if held else []
        table.add_row(
            row.name,
            f"{row.before:.4g}",
            f"{row.value:.4g}",
            f"{row.standard_error:.1%}" if row.fitted else "-",
            f"{row.prior_width:.0%}",
            str(len(row.groups)),
            str(row.num_steps),
            *span,
            state(row),
        )
    return table


def state(row: FittedConstant) -> str:
    """Return a word for what the fit did with a constant."""
    if not row.fitted:
        return "few steps"
    if row.at_bound:
        return "at the end of its range"
    return "fitted" if row.determined else "prior holds"


def stored(
    steps: Sequence[MeasuredStep],
    fitted: Fitted,
    held: HeldOut | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the data of a constants file (`Constants.load`), with the source of every value.

    Its figures: `standard_error` and `prior_width` are of the logarithm. `held_out_error` is the mean |log(predicted /
    measured)| of the groups that determine a constant, each predicted by a fit without it. `error` is over groups,
    `errors` by group.
    """
    by_group = {"before": group_errors(steps, fitted.before), "in_sample": group_errors(steps, fitted.after)}
    if held is not None:
        by_group["held_out"] = group_errors(steps, held.errors)
    values = rounded(fitted.constants).values
    constants: dict[str, Any] = {}
    for name, value in values.items():
        row = fitted.rows.get(name)
        if row is None:
            constants[name] = {"value": value, "fitted": False}
            continue
        entry: dict[str, Any] = {
            "value": value if row.fitted else row.before,
            "before": row.before,
            "fitted": row.fitted,
            "determined": row.determined,
            "groups": list(row.groups),
            "steps": row.num_steps,
            "standard_error": short(row.standard_error) if row.fitted else None,
            "prior_width": row.prior_width,
        }
        if held is not None:
            out = [by_group["held_out"][g] for g in row.groups]
            entry["held_out_error"] = short(sum(out) / len(out)) if out else None
            entry["without_one_group"] = [short(v) for v in held.span[name]]
        constants[name] = entry
    return {
        "constants": constants,
        "error": {name: short(sum(e.values()) / len(e)) for name, e in by_group.items()},
        "errors": {
            g: {"steps": sum(s.group == g for s in steps)} | {n: short(e[g]) for n, e in by_group.items()}
            for g in by_group["before"]
        },
        **(more or {}),
    }


def short(value: float) -> float | None:
    """Return the value in the digits that are stored; None if it is not finite."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
