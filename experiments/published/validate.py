"""Predicted against published training measurements, on catalog hardware without a profile.

    python -m experiments.published.validate --data FILE.csv [--json FILE] [--trust A] [--campaign NAME] [--limit N]

Every row is priced with `estimate_config` from its model, cluster and degrees alone (rows.py; what it leaves blank:
profiles/stacks), then compared. Errors are predicted / measured - 1. The intervals are the planner's own,
over all readings of a row where it leaves something open.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.config.recompute import recompute_of_text
from autoplan.cost_models.quantity import ZERO, Quantity
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.time.price import Pricer
from autoplan.errors import AutoplanError
from autoplan.program.facts import layer_calls
from autoplan.report.files import write_text
from autoplan.search.estimate import Planned, check_config, ends_apart, estimate_config, recompute_counts, units_of
from autoplan.search.request import PlanRequest
from autoplan.stacks.records import within_layers
from experiments.published.defaults import BLOCKS, FORMATS, find
from experiments.published.graphs import graph_of
from experiments.published.pictures import write as write_pictures
from experiments.published.reading import doubt_of
from experiments.published.results import (
    FAILED,
    GROUPS,
    NOT_STATED,
    Errors,
    Feasibility,
    Result,
    doubt_text,
    duplicates,
    grouped,
    macro_mean,
    memory_errors,
    ranked_pairs,
    reasons,
    summary_of,
)
from experiments.published.results import MemoryErrors as MemoryErrors
from experiments.published.results import Ranking as Ranking
from experiments.published.rows import Case, Row, Setting, Shape, Shapes, Task, interpret, own_precision, read_rows
from experiments.published.summary import held_out_errors, held_out_text, insert, markdown
from experiments.published.table import Unmeasured, Unstated

_log = logging.getLogger(__name__)


# -- pricing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """Of a task: the first legal setting, with `refused`, why those before it are not; estimates of it and of all legal
    ones after it."""

    setting: Setting
    estimates: tuple[Estimate, ...]
    refused: str = ""


@lru_cache(maxsize=4096)
def price(task: Task) -> Priced:
    """Of every reading that is legal; where none is, of what is nearest to the row. AutoplanError if that is not."""
    if task.layer:
        return _second_layer(task)
    usual, first, refused = _first_legal(task)
    out = [replace(first.estimate, events=())]  # thousands of them, not needed
    rest = task.settings[task.settings.index(usual) + 1 :] if usual in task.settings else ()
    for setting in rest:
        try:
            changed = replace(setting, config=config_of(task, setting))
            out.append(variant(request_of(task, setting), first, usual, changed))
        except AutoplanError as exc:
            _log.debug("not legal, and left out: %s: %s", setting, exc)
    return Priced(usual, tuple(out), refused)


def _second_layer(task: Task) -> Priced:
    """Return a model of two layers less one of one, without the optimizer: forward and backward of a layer."""
    two, one = (price(replace(task, shape=replace(task.shape, layers=n), layer=False)) for n in (2, 1))
    out = []
    for more, less in zip(two.estimates, one.estimates, strict=True):
        names = [n for n in more.breakdown if n != "optimizer"]
        added = {n: max(0.0, more.breakdown[n].mid - less.breakdown.get(n, ZERO).mid) for n in names}
        step, whole = sum(added.values()), more.step_time_s
        bounds = (step * q / whole.mid for q in (whole.low, whole.mid, whole.high))
        parts = {n: Quantity.spread(s, 0.0, whole.tag) for n, s in added.items()}
        out.append(replace(less, step_time_s=Quantity(*bounds, whole.tag), breakdown=parts))
    return replace(one, estimates=tuple(out))


def _first_legal(task: Task) -> tuple[Setting, Planned, str]:
    """The first setting with a price, that price, and why the very first has none, which is raised if none has."""
    error: AutoplanError | None = None
    for setting in (*task.settings, *task.last):
        try:
            return (
                setting,
                estimate_config(request_of(task, setting), config_of(task, setting)),
                "" if error is None else str(error),
            )
        except AutoplanError as exc:
            error = error or exc
    raise error or AutoplanError("no setting to price")


def request_of(task: Task, setting: Setting) -> PlanRequest:
    """Return what the planner is asked."""
    graph, batch = graph_of(setting.shape or task.shape), task.global_batch_size
    return PlanRequest(
        graph,
        setting.cluster or task.cluster,
        task.seq_len,
        batch,
        precision=setting.precision or task.precision,
        mode=setting.mode,
        options=setting.options,
    )


def config_of(task: Task, setting: Setting) -> ParallelConfig:
    """Return the configuration of a setting, with its recompute by the names of layers."""
    if not setting.again:
        return setting.config
    layers = tuple(layer_calls(graph_of(setting.shape or task.shape)))
    return setting.config.but(recompute=recompute_of_text(within_layers(setting.again, len(layers)), layers))


def variant(request: PlanRequest, first: Planned, was: Setting, setting: Setting) -> Estimate:
    """The price of another reading, with the layout of the first where that does not depend on what differs."""
    config = setting.config

    def laid_out(c: ParallelConfig) -> tuple[object, ...]:
        return c.etp, c.virtual_stages, c.micro_batch_size, c.schedule, c.offload

    def asked(s: Setting) -> tuple[object, ...]:
        return s.mode, s.options, s.shape, s.cluster, s.precision

    if asked(was) != asked(setting) or laid_out(was.config) != laid_out(config):
        return replace(estimate_config(request, config).estimate, events=())
    check_config(request, config)
    costs = request.costs
    point = first.point
    chunks = units_of(first.config.stages or (), ends_apart(request.graph, first.config))
    pricer = Pricer(point.workload, config, costs, precision_of(request.precision), point.times)
    return estimated(pricer, chunks, recompute_counts(pricer, config, chunks))


def _whose(row: Row) -> dict[str, Any]:
    """Return the fields of a result that its row states."""
    return {
        "id": row["id"],
        "campaign": row["campaign"],
        "trust": row["trust"],
        "model": row["model"],
        "device": row["gpu"],
        "num_devices": row["n_gpus"],
        "doubt": doubt_of(row["source"], row["notes"], row["model"]),
    }


def blank_result(row: Row, reason: str, stated: bool = True, shapes: Shapes | None = None) -> Result:
    """Of a row that is not priced, with what its own columns say of its group."""

    def count(column: str) -> int:
        try:
            return row.count(column) or 0
        except AutoplanError:
            return 0

    dense = False if row["hidden"] or row["ffn_hidden"] else None
    return Result(
        **_whose(row),
        reason=reason,
        stated=stated,
        precision=own_precision(row, shapes),
        framework=row.framework.value,
        experts=True if count("moe_experts") else dense,
        tp=count("tp"),
        pp=count("pp"),
        cp=count("cp"),
        ep=count("ep"),
        recompute=row["recompute"].split(" ")[0] or NOT_STATED,
    )


def failure(row: Row, exc: Exception, shapes: Shapes | None = None) -> Result:
    """Of a row that an exception kept from a price: a fault here, which costs one row of hundreds, and is shown."""
    _log.error("row %s cannot be priced", row["id"], exc_info=exc)
    return blank_result(row, f"{FAILED}{type(exc).__name__}: {exc}", shapes=shapes)


def result_of(case: Case) -> Result:
    """Price a case and compare. The reason stands in the result if the planner refuses it."""
    try:
        return _compared(case, price(case.task))
    except AutoplanError as exc:
        return blank_result(case.row, f"refused: {exc}")
    except Exception as exc:
        return failure(case.row, exc)


def _compared(case: Case, priced: Priced) -> Result:
    row, task, used = case.row, case.task, priced.setting
    first, estimates = used.config, priced.estimates
    steps, estimate = [e.step_time_s for e in estimates], estimates[0]
    predicted_bytes, measured_bytes, comparable = estimate.peak_memory_bytes.mid, math.nan, False
    memory, memory_reason = None, ""
    try:
        memory = case.memory
    except Unmeasured as exc:
        memory_reason = str(exc)
    if memory is not None:
        kind, measured_bytes = memory
        comparable = kind.comparable
        stages = estimate.stages[-1:] if kind.last_stage else estimate.stages
        sizes = [stage.allocated_bytes if comparable else stage.memory_bytes for stage in stages]
        predicted_bytes = max(size.mid for size in sizes)
    assumed, notes = case.assumed, case.notes
    if priced.refused:
        assumed += tuple(name for name in used.instead if name not in assumed)
        notes += (f"as the row says it is refused ({priced.refused}); priced is {used}",)
    precision = used.precision or task.precision
    bits = precision.replace(BLOCKS, "fp8")  # formats are told apart by `number_format`
    shape = used.shape or task.shape
    sweep = (shape, row["gpu"], row["gpu_mem_gb"], row["n_gpus"], bits, task.global_batch_size)
    return Result(
        **_whose(row),
        reason=case.unmeasured,
        stated=not case.unmeasured,
        precision=precision,
        framework=case.framework.value,
        experts=shape.num_experts > 0,
        tp=first.tp,
        pp=first.pp,
        cp=first.cp,
        ep=first.ep,
        recompute=row["recompute"].split(" ")[0] or NOT_STATED,
        sweep=f"{row['campaign']} {sweep}",
        number_format=find(FORMATS, row["precision"]) or precision,
        setting=str(used),
        assumed=assumed,
        notes=notes,
        predicted_s=steps[0].mid,
        low_s=min(q.low for q in steps),
        high_s=max(q.high for q in steps),
        measured_s=case.measured_s,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        memory_kind=row["mem_kind"],
        memory_comparable=comparable,
        memory_reason=memory_reason,
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
            done[row.line] = blank_result(row, str(exc), not isinstance(exc, Unstated), shapes)
        except Exception as exc:
            done[row.line] = failure(row, exc, shapes)
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
        asked = [pool.submit(results_of_shape, group) for group in groups]
        yield from shown(_answer(future, group) for future, group in zip(asked, groups, strict=True))


def _answer(future: Future[list[Result]], group: Sequence[Case]) -> list[Result]:
    """Return what a process answered; if it died (of memory, mostly), with its pool, the group has one of its own."""
    try:
        return future.result()
    except BrokenProcessPool:
        return _in_own_process(group)


def _in_own_process(cases: Sequence[Case]) -> list[Result]:
    try:
        with ProcessPoolExecutor(1) as pool:
            return pool.submit(results_of_shape, cases).result()
    except BrokenProcessPool as exc:
        if len(cases) == 1:
            return [failure(cases[0].row, exc)]
        return [result for case in cases for result in _in_own_process([case])]


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
    campaigns = grouped(results, GROUPS["campaign"])
    for name, key in GROUPS.items():
        console.print(_errors_table(name, grouped(results, key)))
    console.print(_errors_table("all", {"all rows": Errors.of(results)}))
    console.print(
        "stated: rows with dimensions, degrees and a result; priced: share of those; unpriced 100 %: mean error where "
        "stated rows that are not priced count as 100 %"
    )
    console.print(f"mean error with those, macro average over campaigns: {_percent(macro_mean(campaigns))}")
    for line in doubt_text(results):
        console.print(line)
    for line in held_out_text(list(campaigns)):
        console.print(line)
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
    for reason, count in Counter(r.memory_reason for r in results if r.memory_reason).most_common():
        console.print(f"{count} memory figures are {reason}")
    f = Feasibility.of(results)
    console.print(
        f"feasibility: {f.num_ran_right} of {f.num_ran} rows that ran are predicted to fit, {f.num_out_right} of "
        f"{f.num_out} that ran out of memory not to; balanced accuracy {_percent(f.balanced_accuracy)}"
    )
    if same := duplicates(results):
        console.print(f"ids of more than one row, each priced and counted: {', '.join(same)}")
    if failed := sum(r.failed for r in results):
        console.print(f"{failed} rows failed: exceptions in here, not refusals of the planner; each is logged above")
    for title, stated in (("Refused", True), ("No dimensions, degrees or result", False)):
        refused = Table("rows", "not priced because", title=title, title_justify="left")
        for reason, count in reasons([r for r in results if r.stated is stated]):
            refused.add_row(str(count), reason)
        console.print(refused)


RENAMED: Mapping[str, str] = {  # fields of a result under other names in a file
    "predicted_s": "predicted_step_time_s",
    "low_s": "low",
    "high_s": "high",
    "measured_s": "measured_step_time_s",
    "predicted_bytes": "predicted_peak_bytes",
    "measured_bytes": "measured_peak_bytes",
}


def _json_row(r: Result) -> dict[str, Any]:
    known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(r).items()}
    return {RENAMED.get(name, name): value for name, value in known.items()}


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
    readme: Annotated[
        Path | None, typer.Option(help="put the table and pictures between the marks of this file")
    ] = None,
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
            table = markdown(summary_of(results), held_out_errors())
            insert(readme, "\n\n".join(part for part in (table, write_pictures(results, readme)) if part))
        except AutoplanError as exc:
            raise typer.BadParameter(str(exc)) from exc
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"rows": [_json_row(r) for r in results], "summary": _plain(summary_of(results))}
        write_text(json_path, json.dumps(stored, indent=1) + "\n")


def chosen(rows: Sequence[Row], trust: str, campaign: str, limit: int) -> list[Row]:
    """Return the rows that the options ask for. AutoplanError names the values that there are."""
    for column, wanted in (("trust", trust), ("campaign", campaign)):
        there = sorted({row[column] for row in rows})
        if wanted and wanted not in there:
            raise AutoplanError(f"{column} {wanted!r}: there is only {', '.join(there)}")
    found = [r for r in rows if r["trust"] == (trust or r["trust"]) and r["campaign"] == (campaign or r["campaign"])]
    step = max(1, math.ceil(len(found) / limit)) if limit else 1
    return found[::step]


if __name__ == "__main__":
    typer.run(main)
