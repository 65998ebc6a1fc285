"""The answers of `autoplan size`: the fewest devices, the least money, and the curve, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import config_data
from autoplan.errors import PinError
from autoplan.plans.document import chosen
from autoplan.report.data import assumptions, head
from autoplan.report.flags import TaskWords
from autoplan.report.html import check_report_path, write_report
from autoplan.report.output import put
from autoplan.report.request import read_request, read_run
from autoplan.report.tables import print_fitting
from autoplan.report.task_text import settings_text
from autoplan.report.text import paragraph, prices, task_notes
from autoplan.report.waiting import INCOMPLETE, waiting
from autoplan.sweeps.size import Kind, Size, SizePoint, nodes_of, read_kinds, size, size_rows
from autoplan.sweeps.whatif import RunTask, batch_warning


def size_command(
    task: TaskWords,
    pin: Sequence[str] | None,
    deadline: str,
    budget: str | None,
    devices: Sequence[str] | None,
    seconds: float,
    as_json: bool,
    report: Path | None = None,
    **asked: Any,
) -> int:
    """Size a run, print the answer, and return the exit code: 0 if some kind of device meets it, else 3."""
    check_report_path(report)
    run = read_run(task)
    if run.tokens is None:
        raise PinError("--tokens is missing: the size of the run, for example --tokens 15T")
    days = numbers.read_days(deadline, "--deadline")
    usd = None if budget is None else numbers.read_number(budget, "--budget")
    kinds = [kind for text in devices or () for kind in read_kinds(text)]
    cluster: str | None = task.__dict__["cluster"]
    if not kinds and cluster is None:
        raise PinError("--devices is missing: kinds of devices or instances, for example --devices h100,gb200")
    if kinds and cluster is not None and (task.written is None or cluster != task.written.asked.get("cluster")):
        raise PinError(
            f"--cluster {cluster} and --devices {', '.join(kinds)} both name kinds of devices; give one of them"
        )
    if cluster is None:
        task = replace(task, cluster=_cluster_text(kinds[0]))
    request = read_request(task, pins=list(pin or ()), **asked)
    with waiting("sizing", as_json) as status:
        found = size(
            request,
            run.tokens,
            days,
            kinds=kinds,
            budget_usd=usd,
            assumptions=run.assumptions.given,
            seconds=seconds,
            told=lambda kind, nodes: status.update(f"sizing: {nodes} nodes of {kind}"),
        )
    data = size_report(found)
    put(data, as_json, partial(size_text, found=found))
    if report is not None:
        from autoplan.report.drawn_sweeps import drawn_size

        write_report(report, data, drawn_size(found))
    if found.interrupted:
        raise KeyboardInterrupt(INCOMPLETE)
    return 0 if found.fewest is not None else 3


def _cluster_text(kind: str) -> str:
    """Return the text of one node of a kind."""
    at, overrides = kind.partition("@")[1:]
    cluster = nodes_of(kind)
    return f"1x{cluster.devices_per_node}x{cluster.device.name}{at}{overrides}"


# -- text --------------------------------------------------------------------------------------------------------------


def size_text(out: Console, found: Size) -> None:
    """Print the fewest devices, the least money, and the curve of every kind."""
    from autoplan.versions import __version__

    r = found.request
    model = f"{r.graph.name} ({numbers.scaled(r.graph.num_params)} parameters)"
    out.print(Text(f"autoplan {__version__} - size of a run of {model}", style="bold"), soft_wrap=True)
    batch = numbers.scaled(r.seq_len * r.global_batch_size)
    money = "" if found.budget_usd is None else f" for at most {numbers.dollars(found.budget_usd)}"
    paragraph(
        out,
        f"{numbers.scaled(found.tokens)} tokens in {numbers.days(found.deadline_days)}{money}, steps of {batch} tokens "
        f"({r.seq_len:,} x {r.global_batch_size:,}), {settings_text(r)}",
        5,
        first=2,
    )
    out.print()
    _answers(out, found)
    for kind in found.kinds:
        _curve(out, kind, found)
    _assumed(out, found)


def _answers(out: Console, found: Size) -> None:
    fewest, cheapest = found.fewest, found.cheapest
    if fewest is None:
        text = "NOT POSSIBLE with these devices" if found.proved else "NOT FOUND with these devices, not proved"
        out.print(Text(f" {text}", style="bold red"))
    else:
        title = "FEWEST  " if found.proved else "FEWEST KNOWN, not proved:"
        out.print(Text(f" {title} {_answer(found, fewest)}", style="bold green"), soft_wrap=True)
    if cheapest is not None and cheapest is not fewest:
        out.print(Text(f" CHEAPEST {_answer(found, cheapest)}", style="bold green"), soft_wrap=True)
    _at_high_ends(out, found)
    for kind in found.kinds:
        if kind.fewest is None:
            paragraph(out, f"{kind.name}: {kind.reason}", 3, "yellow", first=1)


def _at_high_ends(out: Console, found: Size) -> None:
    """Say that the fewest devices meet the limits as expected, but not at the high end of an interval."""
    fewest, surest = found.fewest, found.surest
    if fewest is None or fewest is surest or fewest.whole_days is None:
        return
    ends = [numbers.days(fewest.whole_days.high)]
    if found.budget_usd is not None and fewest.whole_usd is not None:
        ends.append(numbers.dollars(fewest.whole_usd.high))
    limits = "the deadline" if found.budget_usd is None else "the deadline and the budget"
    there = f"no number of devices that was planned meets {limits} there"
    if surest is not None:
        kind = next(k.name for k in found.kinds if surest in k.points)
        count = f"{surest.num_devices:,} devices ({_nodes(surest.nodes)} of {kind})"
        there = f"of those that were planned, {count} are the fewest that meet {limits} there"
    paragraph(
        out,
        f"This is as expected; the high end of the interval is {' and '.join(ends)}: {there}.",
        3,
        "yellow",
        first=1,
    )


def _answer(found: Size, point: SizePoint) -> str:
    kind = next(k.name for k in found.kinds if point in k.points)
    money = "" if point.usd is None else f", {numbers.dollars(point.usd)}"
    return f"{point.num_devices:,} devices ({_nodes(point.nodes)} of {kind}): {numbers.days(point.days or 0)}{money}"


def _nodes(count: int) -> str:
    return f"{count:,} node{'s' if count > 1 else ''}"


def _curve(out: Console, kind: Kind, found: Size) -> None:
    out.print()
    heads = (kind.name, "devices", "days", "low to high", "cost", "MFU", "", "plan")
    rows: list[tuple[str, ...]] = []
    for p in [p for p in kind.points if p.point.status != "illegal"] or kind.points[-1:]:
        name = _nodes(p.nodes)
        days = p.whole_days
        if days is None or p.point.planned is None:
            why = "failures without end" if p.run is not None else p.point.status
            rows.append((name, f"{p.num_devices:,}", "-", "-", "-", "-", "", why))
            continue
        e = p.point.planned.estimate
        label = p.point.label
        c = p.point.certificate
        label += f" ({c.status}, gap {numbers.percent(c.gap)})" if c is not None and c.gap > 0.05 else ""
        mark = "meets" if p.meets(found.deadline_days, found.budget_usd) else ""
        mark = "fewest" if p is kind.fewest else mark
        rows.append(
            (
                name,
                f"{p.num_devices:,}",
                numbers.digits(days.mid),
                f"{numbers.digits(days.low)}-{numbers.digits(days.high)}",
                "-" if p.usd is None else numbers.dollars(p.usd),
                f"{100 * e.mfu:.0f} %",
                mark,
                label,
            )
        )
    print_fitting(out, heads, rows, ("MFU", "low to high"))


def _assumed(out: Console, found: Size) -> None:
    out.print()
    text = "Whole nodes are counted. Numbers between those of the table were not planned"
    paragraph(out, f"{text}{_proof(found)}. Days and cost are with failures and checkpoints where known.", 2)
    planned = [p for k in found.kinds for p in k.points if p.point.planned is not None]
    requests = [p.point.request for p in planned if p.point.request is not None]
    prices(out, requests, RunTask(found.tokens, found.assumptions), "days and cost")
    runs = [p.run for p in planned if p.run is not None]
    notes = [note for run in runs for note in run.notes]
    warning = batch_warning(found.request, found.tokens)
    notes += [*task_notes([found.request]), *([] if warning is None else [warning])]
    for text in dict.fromkeys(notes):
        paragraph(out, f"Note: {text}", 6, "yellow")


def _proof(found: Size) -> str:
    """Return a sentence on what is proved of fewer nodes than the answers have."""
    sure = [k.name for k in found.kinds if k.fewest is not None and k.adjacent and k.proved]
    unsure = [k.name for k in found.kinds if k.fewest is not None and not k.adjacent]
    stopped = [k.name for k in found.kinds if not k.proved]
    dear = "" if found.budget_usd is None else " or too dear"
    texts = (
        (sure, f"the next smaller legal number (if there is one) was planned and is too slow{dear}"),
        (unsure, "smaller numbers that were not planned may be fast enough"),
        (stopped, "searches were stopped (--seconds) that may have found plans that are in time"),
    )
    return "".join(f"; of {', '.join(names)} {text}" for names, text in texts if names)


# -- JSON --------------------------------------------------------------------------------------------------------------


def size_report(found: Size) -> dict[str, Any]:
    """Return the answer of `autoplan size` as plain data."""
    return {
        **head("size", found.request, "ok" if found.fewest is not None else "infeasible"),
        **chosen(found, "tokens deadline_days budget_usd"),
        "fewest": _point_data(found, found.fewest),
        "cheapest": _point_data(found, found.cheapest),
        "surest": _point_data(found, found.surest),
        "kinds": [
            {
                "name": k.name,
                "fewest_nodes": None if k.fewest is None else k.fewest.nodes,
                "cheapest_nodes": None if k.cheapest is None else k.cheapest.nodes,
                **chosen(k, "adjacent proved"),
                "reason": k.reason or None,
            }
            for k in found.kinds
        ],
        "rows": size_rows(found),
        "assumptions": assumptions(found.assumptions),
    }


def _point_data(found: Size, point: SizePoint | None) -> dict[str, Any] | None:
    if point is None or point.point.planned is None:
        return None
    return {
        "kind": next(k.name for k in found.kinds if point in k.points),
        **chosen(point, "nodes num_devices days usd"),
        "plan": config_data(point.point.planned.config),
    }
