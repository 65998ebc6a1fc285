"""Results of published rows, and what is said of many: errors, order, memory, feasibility, by group.

Errors.of(results)           of one group
summary_of(results)          everything as plain data, as stored by validate.py --json
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.published.summary import held_out_of

RANKED_APART = 0.05  # pairs whose measured times differ by less are not ranked
FAILED = "failed: "  # what the reason of a row begins with that an exception kept from a price


@dataclass(frozen=True)
class Result:
    """One row, priced or not (`reason`). Times in seconds of a step, memory in bytes of one device.

    `stated`: the row has dimensions, degrees and a result, so that a planner can be asked and compared. A row with the
    first two alone has a prediction, and the `reason` says what is wrong with its result. low_s, high_s: over all
    readings; `fits`: any of them does. `measured_s` is NaN where only memory is published. `measured_bytes` where the
    row has a figure; `memory_kind` as the row says; `memory_reason`: why the figure it has is not compared. `experts`
    None, degrees of 0, and blank words are those that a row without a price does not state. `notes`: what is priced in
    another way than the row says. `doubt`: why its own source says that the step is not that of the settings alone.
    """

    id: str
    campaign: str
    trust: str
    model: str
    device: str
    num_devices: str
    reason: str = ""
    stated: bool = True
    precision: str = ""
    framework: str = ""
    experts: bool | None = None
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    recompute: str = ""
    sweep: str = ""
    number_format: str = ""
    setting: str = ""
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    predicted_s: float = math.nan
    low_s: float = math.nan
    high_s: float = math.nan
    measured_s: float = math.nan
    predicted_bytes: float = math.nan
    measured_bytes: float = math.nan
    memory_kind: str = ""
    memory_comparable: bool = False
    memory_reason: str = ""
    fits: bool = True
    out_of_memory: bool = False
    breakdown_s: Mapping[str, float] | None = None

    @property
    def compared(self) -> bool:
        """True if there are a predicted and a measured time."""
        return not self.reason and not math.isnan(self.measured_s)

    @property
    def failed(self) -> bool:
        """True if an exception that is no refusal kept it from a price: a fault of the planner, a library, or here."""
        return self.reason.startswith(FAILED)

    @property
    def error(self) -> float:
        """Relative error of the step."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        """True if what was measured is within the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """Of the interval, relative to the prediction."""
        return (self.high_s - self.low_s) / self.predicted_s


@dataclass(frozen=True)
class Errors:
    """Of one group: fractions, not per cent; NaN where there is nothing.

    `num_rows`: all; `num_stated`: those with dimensions, degrees and a result; `num_priced`: of those. The error is of
    rows with a measured time; `mean_with_unpriced` counts stated rows that are not priced as an error of 100 %.
    """

    num_rows: int
    num_stated: int
    num_priced: int
    mean: float
    mean_with_unpriced: float
    median: float
    bias: float
    p90: float
    coverage: float
    width: float

    @staticmethod
    def of(results: Sequence[Result]) -> Errors:
        compared = [r for r in results if r.compared]
        num_stated, num_priced = sum(r.stated for r in results), sum(not r.reason for r in results)
        sizes = sorted(abs(r.error) for r in compared)
        counted = [*sizes, *(1.0 for r in results if r.stated and r.reason)]
        with_unpriced = statistics.fmean(counted) if counted else math.nan
        counts = len(results), num_stated, num_priced
        if not compared:
            return Errors(*counts, math.nan, with_unpriced, *[math.nan] * 5)
        return Errors(
            *counts,
            mean=statistics.fmean(sizes),
            mean_with_unpriced=with_unpriced,
            median=statistics.median(sizes),
            bias=statistics.fmean(r.error for r in compared),
            p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
            coverage=statistics.fmean(r.covered for r in compared),
            width=statistics.median(r.width for r in compared),
        )


@dataclass(frozen=True)
class Feasibility:
    """Whether what ran is predicted to fit, and what ran out of memory is not: rows of both, and how many are right."""

    num_ran: int
    num_ran_right: int
    num_out: int
    num_out_right: int

    @staticmethod
    def of(results: Sequence[Result]) -> Feasibility:
        priced = [r for r in results if not r.reason]
        ran, out = [r for r in priced if not r.out_of_memory], [r for r in priced if r.out_of_memory]
        return Feasibility(len(ran), sum(r.fits for r in ran), len(out), sum(not r.fits for r in out))

    @property
    def balanced_accuracy(self) -> float:
        """Mean of the two shares; NaN unless there are rows of both."""
        if not self.num_ran or not self.num_out:
            return math.nan
        return (self.num_ran_right / self.num_ran + self.num_out_right / self.num_out) / 2


def grouped(results: Sequence[Result], key: Callable[[Result], str]) -> dict[str, Errors]:
    """Errors by group, largest group first."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        groups[key(r)].append(r)
    return {name: Errors.of(found) for name, found in sorted(groups.items(), key=lambda item: -len(item[1]))}


def macro_mean(campaigns: Mapping[str, Errors]) -> float:
    """Mean over campaigns, each counting once, of their error with stated rows that are not priced counted as 100 %."""
    known = [e.mean_with_unpriced for e in campaigns.values() if not math.isnan(e.mean_with_unpriced)]
    return statistics.fmean(known) if known else math.nan


def doubted(results: Sequence[Result]) -> list[Result]:
    """Return the compared steps of which their own source says that they are not those of the settings alone."""
    return [r for r in results if r.compared and r.doubt]


def macro_without_doubted(results: Sequence[Result]) -> float:
    """Return the mean over campaigns without the steps that are doubted."""
    return macro_mean(grouped([r for r in results if not r.doubt], GROUPS["campaign"]))


def doubt_text(results: Sequence[Result]) -> list[str]:
    """Return lines that name the doubted steps, and the average without them; empty where there are none."""
    found = doubted(results)
    if not found:
        return []
    lines = [f"without {len(found)} steps that their own source says are not those of the settings alone: "]
    lines[0] += f"{macro_without_doubted(results):.1%}"
    return lines + [f"  {r.id} ({r.error:+.0%}): {r.doubt}" for r in found]


@dataclass(frozen=True)
class Ranking:
    """Of pairs whose measured times differ by more than RANKED_APART, how many are predicted in the right order.

    Two measurements of one setting (another site, a repetition) are no pair: nothing tells them apart. `num_other`:
    pairs of one sweep but for the number format (MXFP8 against scales per tensor), which have the same price.
    """

    num_sweeps: int = 0
    num_pairs: int = 0
    num_right: int = 0
    num_other: int = 0
    num_other_right: int = 0


def ranked_pairs(results: Sequence[Result]) -> dict[str, Ranking]:
    """By campaign, over its sweeps: same model, devices, number format and batch; other layouts or schedules."""
    sweeps: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        if r.compared:
            sweeps[r.sweep].append(r)
    out: dict[str, Ranking] = {}
    for found in sweeps.values():
        pairs, right = Counter[bool](), Counter[bool]()  # by whether the formats are the same
        for i, a in enumerate(found):
            for b in found[:i]:
                if a.setting == b.setting:
                    continue
                if max(a.measured_s, b.measured_s) > (1 + RANKED_APART) * min(a.measured_s, b.measured_s):
                    same = a.number_format == b.number_format
                    pairs[same] += 1
                    right[same] += (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
        if pairs:
            was = out.get(found[0].campaign, Ranking())
            out[found[0].campaign] = Ranking(
                was.num_sweeps + (pairs[True] > 0),
                was.num_pairs + pairs[True],
                was.num_right + right[True],
                was.num_other + pairs[False],
                was.num_other_right + right[False],
            )
    return out


NOT_STATED = "not stated"
# Of a row that is not priced: what its own columns say.
GROUPS: Mapping[str, Callable[[Result], str]] = {
    "campaign": lambda r: r.campaign,
    "device": lambda r: r.device,
    "precision": lambda r: r.precision or NOT_STATED,
    "model": lambda r: NOT_STATED if r.experts is None else "experts" if r.experts else "dense",
    "framework": lambda r: r.framework or NOT_STATED,
    "recompute": lambda r: r.recompute,
    "tp": lambda r: f"tp {r.tp or NOT_STATED}",
    "pp": lambda r: f"pp {r.pp or NOT_STATED}" if r.pp <= 2 else "pp 3-8" if r.pp <= 8 else "pp > 8",
    "cp": lambda r: f"cp {r.cp or NOT_STATED}",
    "ep": lambda r: f"ep {r.ep or NOT_STATED}",
}


def summary_of(results: Sequence[Result]) -> dict[str, Any]:
    """Return all groups as plain data."""
    feasibility = Feasibility.of(results)
    tables = {name: grouped(results, key) for name, key in GROUPS.items()}
    return {
        "all": asdict(Errors.of(results)),
        "macro_mean": macro_mean(tables["campaign"]),
        "doubted": {r.id: r.doubt for r in doubted(results)},
        "macro_without_doubted": macro_without_doubted(results),
        "feasibility": asdict(feasibility) | {"balanced_accuracy": feasibility.balanced_accuracy},
        "groups": {name: {k: asdict(e) for k, e in groups.items()} for name, groups in tables.items()},
        "ranking": {name: asdict(found) for name, found in ranked_pairs(results).items()},
        "memory": {k: asdict(e) for k, e in memory_errors(results).items()},
        "memory_not_compared": dict(Counter(r.memory_reason for r in results if r.memory_reason).most_common()),
        "held_out": held_out_of(sorted({r.campaign for r in results})),
        "duplicate_ids": duplicates(results),
        "failed": sum(r.failed for r in results),
        "not_priced": dict(reasons([r for r in results if r.stated])),
        "not_stated": dict(reasons([r for r in results if not r.stated])),
    }


@dataclass(frozen=True)
class MemoryErrors:
    """Of one kind of memory figure. `comparable`: the figure counts live tensors only."""

    num_rows: int
    mean: float
    bias: float
    p90: float
    comparable: bool


def memory_errors(results: Sequence[Result]) -> dict[str, MemoryErrors]:
    """By kind of figure and campaign."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        if not r.reason and not math.isnan(r.measured_bytes):
            groups[f"{r.campaign}: {r.memory_kind}"].append(r)
    out = {}
    for name, found in groups.items():
        errors = [r.predicted_bytes / r.measured_bytes - 1 for r in found]
        sizes = sorted(map(abs, errors))
        p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
        out[name] = MemoryErrors(
            len(found), statistics.fmean(sizes), statistics.fmean(errors), p90, found[0].memory_comparable
        )
    return out


def duplicates(results: Sequence[Result]) -> list[str]:
    """Ids that more than one row has: each of them is priced and counted."""
    return [name for name, count in Counter(r.id for r in results).items() if count > 1]


def reasons(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Why rows are not priced, most frequent first; numbers do not tell reasons apart."""
    return Counter(re.sub(r"(?<![A-Za-z\d])\d+", "N", r.reason) for r in results if r.reason).most_common()
