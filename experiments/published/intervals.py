"""What held-out errors say of predictions: errors by group, and intervals that hold a stated share of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from autoplan.calibration.fit import Fitted, HeldOut, MeasuredStep, group_errors
from autoplan.calibration.tables import short
from autoplan.cost_models.arrays import Array
from autoplan.errors import AutoplanError

FEW_STEPS = 20  # a group of fewer steps counts in an interval as that share of a group


def macro(steps: Sequence[MeasuredStep], logs: Array) -> float:
    """Return the mean over groups of `group_errors`, each group counting once."""
    return float(np.mean(list(group_errors(steps, logs).values())))


@dataclass(frozen=True)
class Interval:
    """The factors `low` and `high` between which measured / predicted is to lie for the share `aimed` of steps.

    `covered`: the share of steps inside, of groups that had no part in the quantiles, each group counting once.
    """

    aimed: float
    low: float
    high: float
    covered: float

    @property
    def width(self) -> float:
        """The width relative to the prediction."""
        return self.high - self.low


def interval(steps: Sequence[MeasuredStep], errors: Array, aimed: float) -> Interval:
    """Return the central interval of measured / predicted from held-out errors, each group counting once.

    A group of few steps (under `FEW_STEPS`) counts by their share of these: a single step is not a tail. The coverage
    is that of intervals from the other groups (leave-one-out conformal: Vovk, 2015).

    Raises:
        AutoplanError: for a single group or a share outside (0, 1).
    """
    if not 0 < aimed < 1:
        raise AutoplanError(f"aimed={aimed!r} is a share of steps; it must lie in (0, 1)")
    labels = sorted({s.group for s in steps})
    if len(labels) < 2:
        raise AutoplanError("an interval needs steps of at least two groups")
    group = np.array([labels.index(s.group) for s in steps])
    weights = 1.0 / np.maximum(FEW_STEPS, np.bincount(group))[group]
    ratio = -errors  # log of measured / predicted
    tail = (1 - aimed) / 2
    shares = []
    for g in range(len(labels)):
        rest = group != g
        low, high = (_quantile(ratio[rest], weights[rest], q) for q in (tail, 1 - tail))
        shares.append(float(np.mean((ratio[~rest] >= low) & (ratio[~rest] <= high))))
    low, high = (_quantile(ratio, weights, q) for q in (tail, 1 - tail))
    return Interval(aimed, math.exp(low), math.exp(high), float(np.mean(shares)))


def _quantile(values: Array, weights: Array, q: float) -> float:
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) / np.sum(weights)
    return float(values[order][min(len(values) - 1, int(np.searchsorted(below, q)))])


def groups_table(steps: Sequence[MeasuredStep], fitted: Fitted, held: HeldOut | None, group: str) -> Table:
    """Return a table of mean |log(predicted / measured)| by group, and the mean over groups."""
    columns = {"before": fitted.before, "in sample": fitted.after} | ({"held out": held.errors} if held else {})
    errors = [group_errors(steps, logs) for logs in columns.values()]
    table = Table(title="Errors", title_justify="left")
    for name in (group, "steps", *columns):
        table.add_column(name, justify="left" if name == group else "right")
    for label in errors[0]:
        count = sum(s.group == label for s in steps)
        table.add_row(label, str(count), *(f"{e[label]:.1%}" for e in errors))
    table.add_section()
    table.add_row(f"mean over {group}s", str(len(steps)), *(f"{macro(steps, logs):.1%}" for logs in columns.values()))
    return table


def interval_text(found: Interval) -> str:
    """Return one line about an interval."""
    return (
        f"interval from held-out errors: measured / predicted in [{found.low:.2f}, {found.high:.2f}] aims at "
        f"{found.aimed:.0%} of steps; of groups that had no part in it, it covers {found.covered:.0%}; its width is "
        f"{found.width:.0%} of the prediction"
    )


def stored_intervals(intervals: Sequence[Interval]) -> list[dict[str, float | None]]:
    """Return intervals as a constants file holds them."""
    return [{name: short(getattr(i, name)) for name in ("aimed", "low", "high", "covered")} for i in intervals]
