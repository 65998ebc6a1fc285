"""Predicted against published training measurements, on catalog hardware without a profile.

    python experiments/validate_published.py --data FILE.csv [--json FILE] [--trust A] [--campaign NAME] [--limit N]

Every row is priced with `estimate_config` from its model, cluster and degrees alone (published_rows.py; what it leaves
blank: published_defaults.py), then compared. Errors are predicted / measured - 1. The intervals are the planner's own,
over all readings of a row where it leaves something open.
"""

from __future__ import annotations

import json
import logging
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from published_defaults import BLOCKS, FORMATS, find
from published_graphs import graph_of
from published_rows import Case, Row, Setting, Shape, Shapes, Task, Unstated, interpret, read_rows
from published_summary import held_out_errors, insert, markdown
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoplan.cost_models.config import ParallelConfig, precision_of
from autoplan.cost_models.errors import AutoplanError
from autoplan.cost_models.price import Estimate, Pricer
from autoplan.estimate import Planned, check_config, ends_apart, estimate_config, recompute_counts, units_of
from autoplan.points import PlanRequest
from autoplan.report.files import write_text

_log = logging.getLogger(__name__)
RANKED_APART = 0.05  # pairs whose measured times differ by less are not ranked


@dataclass(frozen=True)
class Result:
    """One row, priced or not (`reason`). Times in seconds of a step, memory in bytes of one device.

    `stated`: the row has dimensions, degrees and a result, so that a planner can be asked. low_s, high_s: over all
    readings; `fits`: any of them does. `measured_s` is NaN where only memory is published. `measured_bytes` where the
    row has a figure; `memory_kind` as the row says.
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
    experts: bool = False
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    recompute: str = ""
    sweep: str = ""
    number_format: str = ""
    setting: str = ""
    assumed: tuple[str, ...] = ()
    predicted_s: float = math.nan
    low_s: float = math.nan
    high_s: float = math.nan
    measured_s: float = math.nan
    predicted_bytes: float = math.nan
    measured_bytes: float = math.nan
    memory_kind: str = ""
    memory_comparable: bool = False
    fits: bool = True
    out_of_memory: bool = False
    breakdown_s: Mapping[str, float] | None = None

    @property
    def compared(self) -> bool:
        """True if there are a predicted and a measured time."""
        return not self.reason and not math.isnan(self.measured_s)

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


# -- pricing -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def price(task: Task) -> tuple[Estimate, ...]:
    """Of every reading that is legal, at least of the first. AutoplanError if that is not."""
    usual = task.settings[0]
    first = estimate_config(request_of(task, usual), usual.config)
    out = [replace(first.estimate, events=())]  # thousands of them, not needed
    for setting in task.settings[1:]:
        try:
            out.append(variant(request_of(task, setting), first, usual, setting))
        except AutoplanError as exc:
            _log.debug("not legal, and left out: %s: %s", setting, exc)
    return tuple(out)


def request_of(task: Task, setting: Setting) -> PlanRequest:
    """What the planner is asked."""
    graph, batch = graph_of(task.shape), task.global_batch_size
    return PlanRequest(
        graph,
        task.cluster,
        task.seq_len,
        batch,
        precision=task.precision,
        mode=setting.mode,
        options=setting.options,
    )


def variant(request: PlanRequest, first: Planned, was: Setting, setting: Setting) -> Estimate:
    """The price of another reading, with the layout of the first where that does not depend on what differs."""
    config = setting.config

    def laid_out(c: ParallelConfig) -> tuple[object, ...]:
        return c.etp, c.virtual_stages, c.micro_batch_size

    if (was.mode, was.options) != (setting.mode, setting.options) or laid_out(was.config) != laid_out(config):
        return estimate_config(request, config).estimate
    check_config(request, config)
    costs = request.costs
    point = first.point
    chunks = units_of(first.config.stages or (), ends_apart(request.graph, first.config))
    pricer = Pricer(point.workload, config, costs, precision_of(request.precision), point.times)
    return pricer.estimate(chunks, recompute_counts(pricer, config, chunks))


def blank_result(row: Row, reason: str, stated: bool = True) -> Result:
    """Of a row that is not priced."""
    return Result(row["id"], row["campaign"], row["trust"], row["model"], row["gpu"], row["n_gpus"], reason, stated)


def result_of(case: Case) -> Result:
    """Price a case and compare. The reason stands in the result if the planner refuses it."""
    row, task, first = case.row, case.task, case.task.settings[0].config
    try:
        estimates = price(task)
    except AutoplanError as exc:
        return blank_result(row, f"refused: {exc}")
    except Exception as exc:  # a fault of the planner or of a library costs one row of hundreds, and is shown
        _log.exception("row %s cannot be priced", row["id"])
        return blank_result(row, f"failed: {type(exc).__name__}: {exc}")
    steps, estimate = [e.step_time_s for e in estimates], estimates[0]
    predicted_bytes, measured_bytes, comparable = estimate.peak_memory_bytes.mid, math.nan, False
    if case.memory is not None:
        kind, measured_bytes = case.memory
        comparable = kind.comparable
        stages = estimate.stages[-1:] if kind.last_stage else estimate.stages
        sizes = [stage.allocated_bytes if comparable else stage.memory_bytes for stage in stages]
        predicted_bytes = max(size.mid for size in sizes)
    bits = task.precision.replace(BLOCKS, "fp8")  # formats are told apart by `number_format`
    sweep = (task.shape, row["gpu"], row["gpu_mem_gb"], row["n_gpus"], bits, task.global_batch_size)
    return Result(
        id=row["id"],
        campaign=row["campaign"],
        trust=row["trust"],
        model=row["model"],
        device=row["gpu"],
        num_devices=row["n_gpus"],
        precision=task.precision,
        framework=case.framework.value,
        experts=task.shape.num_experts > 0,
        tp=first.tp,
        pp=first.pp,
        cp=first.cp,
        ep=first.ep,
        recompute=row["recompute"].split(" ")[0] or "not stated",
        sweep=f"{row['campaign']} {sweep}",
        number_format=find(FORMATS, row["precision"]) or task.precision,
        setting=str(task.settings[0]),
        assumed=case.assumed,
        predicted_s=steps[0].mid,
        low_s=min(q.low for q in steps),
        high_s=max(q.high for q in steps),
        measured_s=case.measured_s,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        memory_kind=row["mem_kind"],
        memory_comparable=comparable,
        fits=any(e.fits for e in estimates),
        out_of_memory=row.out_of_memory,
        breakdown_s={name: q.mid for name, q in estimate.breakdown.items()},
    )


def results_of_shape(cases: Sequence[Case]) -> list[Result]:
    """Results of rows that share a model: its graph is made once. What one process is given."""
    return [result_of(case) for case in cases]


def validate(
    rows: Sequence[Row], everything: Sequence[Row], jobs: int, progress: Console | None = None
) -> list[Result]:
    """Results in the order of `rows`. `everything`: all rows of the file, which shapes are read from."""
    shapes = Shapes(everything)
    done: dict[int, Result] = {}
    cases: dict[Shape, list[Case]] = defaultdict(list)
    for row in rows:
        try:
            case = interpret(row, shapes)
            cases[case.task.shape].append(case)
        except AutoplanError as exc:
            done[row.line] = blank_result(row, str(exc), not isinstance(exc, Unstated))
    groups = sorted(cases.values(), key=len, reverse=True)
    for group, results in zip(groups, _map(groups, jobs, progress), strict=True):
        done.update((case.row.line, result) for case, result in zip(group, results, strict=True))
    return [done[row.line] for row in rows]


def _map(groups: Sequence[Sequence[Case]], jobs: int, progress: Console | None) -> Iterator[list[Result]]:
    def shown(results: Iterable[list[Result]]) -> Iterable[list[Result]]:
        if progress is None:
            return results
        return track(results, "models", total=len(groups), console=progress, disable=not progress.is_terminal)

    if jobs == 1:
        yield from shown(map(results_of_shape, groups))
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from shown(pool.map(results_of_shape, groups))


# -- summaries ---------------------------------------------------------------------------------------------------------


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


GROUPS: Mapping[str, Callable[[Result], str]] = {
    "campaign": lambda r: r.campaign,
    "device": lambda r: r.device,
    "precision": lambda r: r.precision,
    "model": lambda r: "experts" if r.experts else "dense",
    "framework": lambda r: r.framework,
    "recompute": lambda r: r.recompute,
    "tp": lambda r: f"tp {r.tp}",
    "pp": lambda r: f"pp {r.pp}" if r.pp <= 2 else "pp 3-8" if r.pp <= 8 else "pp > 8",
    "cp": lambda r: f"cp {r.cp}",
    "ep": lambda r: f"ep {r.ep}",
}


def summary_of(results: Sequence[Result]) -> dict[str, Any]:
    """All groups as plain data."""
    priced = [r for r in results if not r.reason]
    feasibility = Feasibility.of(results)
    tables = {"campaign": grouped(results, GROUPS["campaign"]), "device": grouped(results, GROUPS["device"])}
    tables |= {name: grouped(priced, key) for name, key in GROUPS.items() if name not in tables}
    return {
        "all": asdict(Errors.of(results)),
        "macro_mean": macro_mean(tables["campaign"]),
        "feasibility": asdict(feasibility) | {"balanced_accuracy": feasibility.balanced_accuracy},
        "groups": {name: {k: asdict(e) for k, e in groups.items()} for name, groups in tables.items()},
        "ranking": {name: asdict(found) for name, found in ranked_pairs(results).items()},
        "memory": {k: asdict(e) for k, e in memory_errors(results).items()},
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


def reasons(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Why rows are not priced, most frequent first; numbers do not tell reasons apart."""
    return Counter(re.sub(r"(?<![A-Za-z\d])\d+", "N", r.reason) for r in results if r.reason).most_common()


# -- output ------------------------------------------------------------------------------------------------------------


def _percent(value: float, signed: bool = False) -> str:
    return "-" if math.isnan(value) else f"{value:+.1%}" if signed else f"{value:.1%}"


def _errors_table(title: str, groups: Mapping[str, Errors]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = "rows, stated, priced, mean error, unpriced 100 %, median, bias, p90, covered, width".split(", ")
    for name in (title, *columns):
        table.add_column(name, justify="left" if name == title else "right")
    for name, e in groups.items():
        figures = (e.mean, e.mean_with_unpriced, e.median)
        share = _percent(e.num_priced / e.num_stated if e.num_stated else math.nan)
        rest = (_percent(e.bias, True), *map(_percent, (e.p90, e.coverage, e.width)))
        table.add_row(name, str(e.num_rows), str(e.num_stated), share, *map(_percent, figures), *rest)
    return table


def show(results: Sequence[Result], console: Console) -> None:
    """Print every table."""
    priced = [r for r in results if not r.reason]
    campaigns = grouped(results, GROUPS["campaign"])
    for name, key in GROUPS.items():
        # what a row that is not priced has is not known beyond its campaign and device
        console.print(_errors_table(name, grouped(results if name in ("campaign", "device") else priced, key)))
    console.print(_errors_table("all", {"all rows": Errors.of(results)}))
    console.print(
        "stated: rows with dimensions, degrees and a result; priced: share of those; unpriced 100 %: mean error where "
        "stated rows that are not priced count as 100 %"
    )
    console.print(f"mean error with those, macro average over campaigns: {_percent(macro_mean(campaigns))}")
    columns = ("campaign", "sweeps", "pairs", "right order", "of other formats", "right order")
    ranking = Table(*columns, title="Order within sweeps", title_justify="left")
    for name, found in ranked_pairs(results).items():
        order = _percent(found.num_right / found.num_pairs) if found.num_pairs else ""
        ranking.add_row(
            name, str(found.num_sweeps), str(found.num_pairs), order, str(found.num_other), str(found.num_other_right)
        )
    console.print(ranking)
    memory = Table("peak memory", "rows", "mean error", "bias", "p90", title="Memory", title_justify="left")
    for name, m in memory_errors(results).items():
        label = name if m.comparable else f"{name} (not comparable)"
        memory.add_row(label, str(m.num_rows), _percent(m.mean), _percent(m.bias, True), _percent(m.p90))
    console.print(memory)
    f = Feasibility.of(results)
    console.print(
        f"feasibility: {f.num_ran_right} of {f.num_ran} rows that ran are predicted to fit, {f.num_out_right} of "
        f"{f.num_out} that ran out of memory not to; balanced accuracy {_percent(f.balanced_accuracy)}"
    )
    for title, stated in (("Refused", True), ("No dimensions, degrees or result", False)):
        refused = Table("rows", "not priced because", title=title, title_justify="left")
        for reason, count in reasons([r for r in results if r.stated is stated]):
            refused.add_row(str(count), reason)
        console.print(refused)


def _json_row(r: Result) -> dict[str, Any]:
    known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(r).items()}
    renamed = {
        "predicted_s": "predicted_step_time_s",
        "low_s": "low",
        "high_s": "high",
        "measured_s": "measured_step_time_s",
        "predicted_bytes": "predicted_peak_bytes",
        "measured_bytes": "measured_peak_bytes",
    }
    return {renamed.get(name, name): value for name, value in known.items()}


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def main(
    data: Annotated[Path, typer.Option(help="CSV of published measurements")],
    json_path: Annotated[Path | None, typer.Option("--json", help="store all rows and the summary here")] = None,
    trust: Annotated[str, typer.Option(help="only rows of this trust (A, B or C); all by default")] = "",
    campaign: Annotated[str, typer.Option(help="only rows of this campaign; all by default")] = "",
    limit: Annotated[int, typer.Option(min=0, help="at most so many rows, spread over the file; 0: all")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    readme: Annotated[Path | None, typer.Option(help="put the table between the marks of this file")] = None,
) -> None:
    """Price published measurements and print the planner's error."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    try:
        everything = read_rows(data)
        rows = chosen(everything, trust, campaign, limit)
    except AutoplanError as exc:
        raise typer.BadParameter(str(exc)) from exc
    results = validate(rows, everything, jobs, console)
    show(results, console)
    if readme is not None:
        try:
            insert(readme, markdown(summary_of(results), held_out_errors()))
        except AutoplanError as exc:
            raise typer.BadParameter(str(exc)) from exc
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"rows": [_json_row(r) for r in results], "summary": _plain(summary_of(results))}
        write_text(json_path, json.dumps(stored, indent=1) + "\n")


def chosen(rows: Sequence[Row], trust: str, campaign: str, limit: int) -> list[Row]:
    """The rows that the options ask for. AutoplanError names the values that there are."""
    for column, wanted in (("trust", trust), ("campaign", campaign)):
        there = sorted({row[column] for row in rows})
        if wanted and wanted not in there:
            raise AutoplanError(f"{column} {wanted!r}: there is only {', '.join(there)}")
    found = [r for r in rows if r["trust"] == (trust or r["trust"]) and r["campaign"] == (campaign or r["campaign"])]
    step = max(1, math.ceil(len(found) / limit)) if limit else 1
    return found[::step]


if __name__ == "__main__":
    typer.run(main)
