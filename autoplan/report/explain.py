"""The answers of `autoplan explain`: sentences for people, and versioned JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import config_data, plain_option
from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.cost_models.time.estimate import Estimate
from autoplan.errors import PinError
from autoplan.plans.document import chosen, plain
from autoplan.report.arguments import read_pin_words
from autoplan.report.data import head, planned_data, shortage_data
from autoplan.report.degrees import checked_config
from autoplan.report.flags import TaskWords
from autoplan.report.html import check_report_path, write_report
from autoplan.report.output import put
from autoplan.report.plan_file import read_plan_file
from autoplan.report.plots import scatter_plot, show_plot
from autoplan.report.request import read_run
from autoplan.report.task_text import task_line
from autoplan.report.text import (
    TERMS,
    cluster_line,
    heading,
    paragraph,
    plain_table,
    proof_of,
    proof_text,
)
from autoplan.report.waiting import INCOMPLETE, telling, waiting
from autoplan.report.words import choice_text, value_text
from autoplan.report.written import WrittenPlan
from autoplan.search.best_use import best_use
from autoplan.search.certificate import how_searched
from autoplan.search.planner import Certificate, Planned, PlanRequest, Status, estimate_config, search_plan
from autoplan.sweeps.difference import Difference, Pair, decided, difference, fullest
from autoplan.sweeps.explain import Alternative, Decision, Explanation, FrontPoint, Setting, explain
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.whatif import RunTask

_LEAST_SHARE = 0.002  # of a step: smaller differences of a term are not worth a word
_MOST_TERMS = 3


def terms_text(changed: Mapping[str, float], whole: float) -> str:
    """Return the largest differences by term: `communication inside layers +0.210 s, computing -0.0200 s`."""
    found = [(n, d) for n, d in changed.items() if abs(d) >= _LEAST_SHARE * whole][:_MOST_TERMS]
    return ", ".join(f"{_term(n)} {numbers.signed(d)} s" for n, d in found)


def _term(name: str) -> str:
    return "computing" if name == "compute" else TERMS.get(name, name)


def cost_text(share: float) -> str:
    """Return how much longer a step takes, in words."""
    if abs(share) < 5e-4:
        return "costs nothing"
    return f"costs {numbers.percent(share)} more" if share > 0 else f"is {numbers.percent(-share)} faster"


def _equal(share: float, equal_within: float) -> str:
    """Return the words for a difference that is below the error of the prices."""
    return "; equal within the error" if 5e-4 <= abs(share) <= equal_within else ""


def _stopped(certificate: Certificate | None) -> bool:
    return certificate is not None and certificate.stopped


def alternative_text(name: str, own: Any, a: Alternative, equal_within: float) -> str:
    """Return a sentence on the cost of another value of a choice."""
    words = f"{choice_text(name, a.value)} instead of {value_text(own, name)}"
    if a.status == "does not fit":
        return f"{words} does not fit{_shortage(a)}"
    if a.difference is None or a.planned is None:
        return f"{words}: {'not decided in time' if a.status == 'stopped' else f'not legal: {a.reason}'}"
    share = a.difference.step_s.share or 0.0
    text = f"{words} {cost_text(share)}"
    terms = terms_text(a.difference.time_s, a.difference.step_s.own or 0.0)
    text += f": {terms}" if terms else ""
    text += _equal(share, equal_within)
    if _stopped(a.certificate):
        text += f"; stopped, {proof_text(a.gap, 0.0)}"
    return f"{text} ({plan_label(a.planned.config, a.planned.estimate)})"


def _shortage(a: Alternative) -> str:
    s = a.shortage
    if s is None:
        return f": {a.reason}"
    return (
        f": stage {s.stage} needs {s.needed_bytes / 1e9:.1f} GB of {s.available_bytes / 1e9:.1f} GB, its largest term "
        f"is {s.term}"
    )


def explain_command(
    task: TaskWords,
    request: PlanRequest,
    vs: str | None,
    seconds: float,
    as_json: bool,
    file: Path | None = None,
    **asked: Any,
) -> None:
    """Explain the plan of a request, or of the plan file that a command was given, and print the answer.

    Args:
        vs: what to compare the plan with; None: explain its decisions.
        seconds: time limit of one search.
        file: where a report is written, too.
        asked: what to look at, as `sweeps.explain.explain` takes it.
    """
    check_report_path(file)
    if vs is not None:
        _check_versus(vs, asked)
    run = read_run(task)
    config = None if task.written is None else checked_config(request, task.written.but({}, task.cluster))
    if config is not None and task.written is not None:
        _check_pinned(task.written, config, request)
    if vs is None:
        with waiting("explaining", as_json) as status:
            told = partial(_say_progress, status)
            found = explain(request, config, seconds=seconds, run=run, told=told, **asked)
        request = found.request
        report, show, own = explain_report(found, run), partial(explain_text, found=found), found.planned
        said = _proved(found)
    else:
        with waiting("searching", as_json) as status:
            if config is None:
                use = best_use(replace(request, top=1), telling(status))
                request, own = use.request, use.result.plans[0]
            else:
                own = estimate_config(request, config)
            other = other_plan(request, vs, seconds)
        changed = difference(request, own, other.request, other.planned, run)
        report = versus_report(request, own, other, changed, run)
        show = partial(versus_text, request=request, own=own, other=other, found=changed)
        said = _verdict(request, other, changed)
    put(report, as_json, show)
    if file is not None:
        from autoplan.report.drawn_sweeps import drawn_explained

        whole = found if vs is None else None
        write_report(file, report, drawn_explained(request, own, run, said, whole))
    if vs is None and found.interrupted:
        raise KeyboardInterrupt(INCOMPLETE)


# Arguments about what is looked at without --vs -> (how they are typed, their value if they are not)
_WITHOUT_VS: Mapping[str, tuple[str, object]] = {
    "only": ("--only", ()),
    "every_value": ("--every-value", False),
    "settings": ("--no-settings", True),
    "front": ("--pareto", False),
}


def _check_versus(vs: str, asked: Mapping[str, Any]) -> None:
    """Raise PinError for an argument that the comparison of two plans would not use."""
    for name, (flag, default) in _WITHOUT_VS.items():
        if asked[name] != default:
            raise PinError(f"{flag} is about the choices of one plan, --vs {vs} compares two: leave one of them out")


_NUMBERS = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "zero_replicas", "micro_batch_size", "num_micro_batches",
            "schedule", "virtual_stages", "stages")  # fmt: skip


def _check_pinned(written: WrittenPlan, config: ParallelConfig, request: PlanRequest) -> None:
    """Raise PinError for a choice that is pinned to another value than that of the plan in a file."""
    pins = request.pins
    asked = read_pin_words(written.asked.get("pin") or ())
    own = {name: getattr(config, name) for name in _NUMBERS}
    same = {name: pins[name] for name in _NUMBERS if name in pins}
    if "stages" in same:
        same["stages"] = tuple(same["stages"])
    for name in ("etp", "recompute", "offload", "context_method"):  # which have several forms
        if name in pins and asked.get(name) != pins[name]:
            pinned = config.but(**{name: getattr(Pins(pins).config, name)})
            own[name], same[name] = (decided(request, c)[name] for c in (config, pinned))
    for name, value in same.items():
        if value != own[name]:
            text = value_text(pins[name], name)
            raise PinError(
                f"pin {name}={text}: the plan of {written.path} has {name}={value_text(own[name], name)}; compare it "
                f"with --vs {name}={text}, or leave out the pin"
            )


def _say_progress(status: Any, done: int, num: int, what: str) -> None:
    status.update(f"explaining: {what}" + (f", {done} of {num} questions answered" if num else ""))


# -- text --------------------------------------------------------------------------------------------------------------


def explain_text(out: Console, found: Explanation) -> None:
    """Print why a plan was chosen."""
    heading(out, found.request)
    _plan_line(out, "PLAN", found.planned)
    paragraph(out, _proved(found), 1, first=1)
    if found.decisions:
        out.print()
        out.print(Text("What each choice is worth, what matters most first:", style="bold"))
    for decision in found.decisions:
        _decision(out, decision, found.request.equal_within)
    if found.settings:
        out.print()
        out.print(Text("What would help most, one change at a time:", style="bold"))
        _settings(out, found.settings)
    if found.front:
        out.print()
        out.print(Text("Step time against memory (no plan found is better in both):", style="bold"))
        _front(out, found.front)
        paragraph(out, found.front_end, 1, first=1)


def _proved(found: Explanation) -> str:
    """Return what is proved of the plan; nothing if it was given, not searched."""
    c = found.certificate
    return "" if c is None else f"{c.considered:,} candidates: {proof_of(c)}"


def _plan_line(out: Console, title: str, planned: Planned) -> None:
    e = planned.estimate
    out.print()
    out.print(Text(f" {title}  {plan_label(planned.config, e)}", style="bold"), soft_wrap=True)
    out.print(Text(f" {_figures(e)}"), soft_wrap=True)
    if not e.fits:
        paragraph(out, f"DOES NOT FIT: {e.missing()}", 1, "bold red", first=1)


def _figures(e: Estimate) -> str:
    return (
        f"step {numbers.digits(e.step_time_s.mid)} s   {numbers.scaled(e.tokens_per_s)} tokens/s   MFU "
        f"{100 * e.mfu:.0f} %   memory {e.peak_memory_bytes.mid / 1e9:.1f} of {e.memory_capacity_bytes / 1e9:.1f} GB"
    )


def _decision(out: Console, decision: Decision, equal_within: float) -> None:
    out.print(Text(f" {choice_text(decision.name, decision.value)}"))
    if not decision.alternatives:
        paragraph(out, "no other value is legal beside the other choices of this plan", 6, first=4)
    for a in decision.alternatives:
        paragraph(out, alternative_text(decision.name, decision.value, a, equal_within), 6, first=4)


def _settings(out: Console, settings: Sequence[Setting]) -> None:
    table = plain_table("", "now", "changed to", "same plan", "new plan", "plan", left=1)
    table.columns[-1].justify = "left"
    for s in settings:
        gains = ["-" if g is None else f"{100 * g:+.1f} %" for g in (s.same_gain, s.gain)]
        label = "" if s.planned is None else plan_label(s.planned.config, s.planned.estimate)
        label += " (stopped)" if _stopped(s.certificate) else ""
        table.add_row(s.what, value_text(s.own), value_text(s.value), *gains, label)
    out.print(table)
    said = "tokens per second, in comparison with the plan; settings of the mode are priced, see autoplan stacks"
    if any(s.gain is not None for s in settings):
        said += "; of a new plan only the gain that it would not have without the change"
    paragraph(out, said, 2)


def _front(out: Console, front: Sequence[FrontPoint]) -> None:
    table = plain_table("memory GB", "step s", "more", "plan", left=0)
    table.columns[-1].justify = "left"
    for p in front:
        more = p.step_s / front[0].step_s - 1
        label = plan_label(p.planned.config, p.planned.estimate) + (" (stopped)" if _stopped(p.certificate) else "")
        table.add_row(f"{p.peak_bytes / 1e9:.1f}", numbers.digits(p.step_s), numbers.percent(more), label)
    out.print(table)
    points = [(p.peak_bytes / 1e9, p.step_s) for p in front]
    show_plot(out, scatter_plot(points, "GB of the fullest device", "step s; 1 is the first row", min(out.width, 80)))


# -- two plans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherPlan:
    """A plan that another one is compared with, the request that it answers, and its name in the comparison."""

    request: PlanRequest
    planned: Planned
    name: str
    certificate: Certificate | None = None  # None: it was given, not searched


def other_plan(request: PlanRequest, vs: str, seconds: float) -> OtherPlan:
    """Return the plan that `--vs` names: pins (searched), or a plan file (priced).

    Raises: PinError if it is neither; AutoplanError as a search.
    """
    if vs.endswith(".json"):
        file = read_plan_file(Path(vs))
        return OtherPlan(file.request, estimate_config(file.request, file.config), vs)
    if "=" not in vs:
        raise PinError(f"--vs {vs!r} is neither name=value, for example --vs tp=4, nor a plan file that ends in .json")
    pins = {**request.pins, **read_pin_words([vs])}
    asked = replace(request, pins=pins, top=1, time_limit_s=seconds)
    result = search_plan(asked)
    if result.certificate.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return OtherPlan(result.request, result.plans[0], vs, result.certificate)


def versus_text(out: Console, request: PlanRequest, own: Planned, other: OtherPlan, found: Difference) -> None:
    """Print two plans side by side."""
    heading(out, request)
    _plan_line(out, "PLAN", own)
    _plan_line(out, f"VS {other.name}", other.planned)
    for line in _other_task(request, other.request):
        paragraph(out, line, 3, first=1)
    out.print()
    paragraph(out, _verdict(request, other, found), 1)
    if found.decisions:
        words = [f"{choice_text(n, a)} -> {value_text(b, n)}" for n, (a, b) in found.decisions.items()]
        paragraph(out, f"Decided differently: {'; '.join(words)}", 2)
    else:
        paragraph(out, "Both decide the same.", 2)
    _terms_table(out, own.estimate, other.planned.estimate, found)
    _rates(out, found)


def _other_task(request: PlanRequest, other: PlanRequest) -> list[str]:
    """Return what the other plan is for, where it is not the model, the cluster or the task of the plan."""
    pairs = [
        (f"model {r.graph.name}", f"on {cluster_line(r.cluster)}", f"for {task_line(replace(r, pins={}))}")
        for r in (request, other)
    ]
    return [theirs for ours, theirs in zip(*pairs, strict=True) if ours != theirs]


def _verdict(request: PlanRequest, other: OtherPlan, found: Difference) -> str:
    """Return what the other plan costs, with its largest terms, and whether its search was stopped."""
    share = found.step_s.share or 0.0
    terms = terms_text(found.time_s, found.step_s.own or 0.0)
    text = f"The other plan {cost_text(share)} per step{f': {terms}' if terms else ''}"
    text += "" if _other_task(request, other.request) else _equal(share, request.equal_within)
    c = other.certificate
    text += f"; its search was stopped, {proof_text(c.gap, 0.0)}" if c is not None and c.stopped else ""
    return f"{text}."


def _terms_table(out: Console, own: Estimate, other: Estimate, found: Difference) -> None:
    out.print()
    table = plain_table("step time, seconds", "plan", "other", "difference", left=1)
    for name, more in found.time_s.items():
        pair = [each.breakdown[name].mid if name in each.breakdown else 0.0 for each in (own, other)]
        if max(pair) >= 1e-4 * own.step_time_s.mid:
            table.add_row(_term(name), *map(numbers.digits, pair), numbers.signed(more))
    table.add_section()
    steps = found.step_s
    table.add_row(
        "step", numbers.digits(steps.own or 0), numbers.digits(steps.other or 0), numbers.signed(steps.more or 0)
    )
    out.print(table)
    out.print()
    table = plain_table("memory of the fullest stage, GB", "plan", "other", "difference", left=1)
    stages = [fullest(own), fullest(other)]
    for name, more in found.memory_bytes.items():
        pair = [s.memory[name].mid / 1e9 if name in s.memory else 0.0 for s in stages]
        if max(pair) >= 5e-3:
            table.add_row(name, *(f"{size:.2f}" for size in pair), f"{more / 1e9:+.2f}")
    table.add_section()
    peaks = [found.peak_bytes.own or 0.0, found.peak_bytes.other or 0.0]
    table.add_row("total", *(f"{size / 1e9:.1f}" for size in peaks), f"{(peaks[1] - peaks[0]) / 1e9:+.1f}")
    out.print(table)


def _rates(out: Console, found: Difference) -> None:
    table = plain_table("", "plan", "other", "difference", left=1)

    def add(name: str, pair: Pair, shown: Any) -> None:
        if pair.own is not None or pair.other is not None:
            cells = ["-" if v is None else shown(v) for v in (pair.own, pair.other)]
            table.add_row(name, *cells, "-" if pair.share is None else f"{100 * pair.share:+.1f} %")

    add("tokens/s", found.tokens_per_s, numbers.scaled)
    add("MFU", found.mfu, numbers.percent)
    add("devices", found.num_devices, lambda v: f"{v:,.0f}")
    add("price per hour", found.usd_per_hour, numbers.dollars)
    add("days", found.days, numbers.digits)
    add("cost", found.usd, numbers.dollars)
    out.print()
    out.print(table)


# -- JSON --------------------------------------------------------------------------------------------------------------


def explain_report(found: Explanation, run: RunTask) -> dict[str, Any]:
    """Return the answer of `autoplan explain` as plain data."""
    r = found.request
    return {
        **head("explain", r, "interrupted" if found.interrupted else "ok"),
        **planned_data(found.planned, r, run),
        "certificate": plain(found.certificate),
        "decisions": [
            {
                "name": d.name,
                "value": plain_option(d.value),
                "alternatives": [_alternative_data(d.name, d.value, a, r.equal_within) for a in d.alternatives],
            }
            for d in found.decisions
        ],
        "settings": [
            {
                **chosen(s, "name what same_gain gain"),
                "own": plain_option(s.own),
                "value": plain_option(s.value),
                "plan": None if s.planned is None else config_data(s.planned.config),
                "search_status": None if s.certificate is None else str(s.certificate.status),
            }
            for s in found.settings
        ],
        "front": [
            {
                **chosen(p, "capacity_bytes step_s peak_bytes"),
                "plan": config_data(p.planned.config),
                **how_searched(p.certificate),
            }
            for p in found.front
        ],
        "front_end": found.front_end,
    }


def _alternative_data(name: str, own: Any, a: Alternative, equal_within: float) -> dict[str, Any]:
    return {
        "value": plain_option(a.value),
        "pins": {n: plain_option(v) for n, v in a.pins.items()},
        "status": a.status,
        "cost": a.cost if math.isfinite(a.cost) else None,
        "sentence": alternative_text(name, own, a, equal_within),
        "plan": None if a.planned is None else config_data(a.planned.config),
        "difference": None if a.difference is None else difference_data(a.difference),
        **how_searched(a.certificate),
        "shortage": shortage_data(a.shortage),
        "reason": a.reason or None,
    }


def difference_data(found: Difference) -> dict[str, Any]:
    """Return a difference as plain data."""
    pairs = "step_s peak_bytes tokens_per_s mfu num_devices usd_per_hour days usd"
    return {
        "decisions": {n: {"own": plain_option(a), "other": plain_option(b)} for n, (a, b) in found.decisions.items()},
        **chosen(found, f"time_s memory_bytes {pairs}"),
    }


def versus_report(
    request: PlanRequest,
    own: Planned,
    other: OtherPlan,
    found: Difference,
    run: RunTask,
) -> dict[str, Any]:
    """Return the answer of `autoplan explain --vs` as plain data."""
    return {
        **head("explain", request),
        **planned_data(own, request, run),
        "vs": {
            "name": other.name,
            **planned_data(other.planned, other.request, run),
            **how_searched(other.certificate),
        },
        "difference": difference_data(found),
    }
