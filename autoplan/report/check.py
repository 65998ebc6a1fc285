"""The answers of `autoplan check`: whether the input of another framework is legal and fits, and a better plan.

JSON of schema 1 (report.data):

    {"schema": 1, "status": "ok" | "illegal" | "infeasible", "command": "check", "file", "target", "version", "like",
     "faults": [str],       # what is illegal, each with the nearest that is legal
     "warnings": [str], "not_read": [field],
     "foreign": [name],     # names of the file that are no fields of the target, as far as autoplan knows it
     "said_elsewhere": {name: where},
     "model", "cluster", "request": as of estimate,   # left out if seq_len or the batch is not known
     "fits": null | bool, "shortage": null | str, "plan", "estimate": as of estimate, null if it is illegal
     "search": null | {"limit_s", "seconds", "reason": null | str, "certificate": null | as of plan},
     "better": null | {"plan", "estimate", "gain": null | share of the step, "not_said": [str], "export": [word]}}
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import PINS
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import AutoplanError, InfeasibleError, PinError
from autoplan.exporters.door import ConfigFile, Export, export_setup
from autoplan.exporters.setup import ESSENTIAL, Setup
from autoplan.exporters.targets import TARGETS
from autoplan.plans.document import chosen
from autoplan.program.facts import layer_calls
from autoplan.report.arguments import read_degrees, read_pin_words
from autoplan.report.commands import estimate_command, wrapped
from autoplan.report.data import estimate_report, head, planned_data, report, to_text
from autoplan.report.degrees import checked_config
from autoplan.report.files import check_writable, write_text
from autoplan.report.flags import TaskWords
from autoplan.report.output import put
from autoplan.report.request import read_request, read_run
from autoplan.report.text import (
    answer,
    evidence,
    heading,
    memory_table,
    paragraph,
    prices,
    proof_of,
    say_warnings,
)
from autoplan.report.waiting import telling, waiting
from autoplan.search.planner import Certificate, Planned, PlanRequest, estimate_config, search_plan
from autoplan.stacks.records import year_of
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.whatif import RunTask

EXIT_REFUSED = 1  # illegal, or does not fit
_SHOWN = 4  # plans of a search, of which the first that the target can say is taken
_NAME = "better.json"
_SEARCHES = 3  # with what the target could not say pinned to what it has


@dataclass(frozen=True)
class Better:
    """A search for a better plan.

    Attributes:
        limit_s: time limit of one search.
        seconds: what all took.
        request: what was searched.
        planned: the fastest plan that the target can say; None if there is none.
        export: that plan as the input of the target.
        gain: share of the step that it saves; None if the file has no price, or does not fit.
        reason: why there is no plan.
    """

    limit_s: float
    seconds: float
    request: PlanRequest
    planned: Planned | None = None
    export: Export | None = None
    certificate: Certificate | None = None
    gain: float | None = None
    reason: str | None = None

    @property
    def is_better(self) -> bool:
        """True if the plan is faster by more than what counts as equal, or if the file is illegal or does not fit."""
        return self.planned is not None and (self.gain is None or self.gain > self.request.equal_within)


@dataclass(frozen=True)
class Check:
    """The verdict on an input file of another framework.

    Attributes:
        request: the task; None if the file is illegal and does not say the batch or the length.
        faults: what is illegal, each with the nearest that is legal.
        planned: the file's own configuration with its price; None if it is illegal.
        better: None if no better plan was searched.
    """

    read: ConfigFile
    request: PlanRequest | None
    faults: tuple[str, ...]
    planned: Planned | None = None
    better: Better | None = None

    @property
    def fits(self) -> bool | None:
        """Return True if the plan of the file fits; None if the file is illegal."""
        return None if self.planned is None else self.planned.estimate.fits

    @property
    def status(self) -> str:
        """`ok`, `illegal` or `infeasible`, as in the JSON."""
        return {True: "ok", False: "infeasible", None: "illegal"}[self.fits]


def check_command(
    task: TaskWords,
    degrees: Mapping[str, Any],
    pins: Sequence[str],
    seconds: float | None,
    out: Path | None,
    as_json: bool,
    how: Mapping[str, Any],
) -> int:
    """Check a file, print the answer, and return the exit code: 0 it is legal and fits, 1 it is not or does not.

    Args:
        degrees: choices as they were typed, for what the file does not say.
        pins: what a better plan must keep, as texts.
        seconds: time limit of the search for it; None: none is searched.
        out: file for the better plan.
        how: settings of the search.
    """
    for flag, value in (("--out", out), ("--pin", " ".join(pins))):
        if value and seconds is None:
            raise PinError(f"{flag} {value} is of the better plan, which --no-better leaves out: give one of them")
    run = read_run(task)
    if out is not None:
        check_writable(out)
    with waiting("pricing", as_json) as status:
        found = _checked(task, degrees, how)
        if found.request is not None and seconds is not None:
            asked = replace(found.request, pins=read_pin_words(pins))
            found = replace(found, better=_better(found, asked, seconds, telling(status)))
    better = found.better
    plan_file = None
    if better is not None and better.is_better and better.planned is not None and out is not None:
        write_text(out, to_text(estimate_report(better.request, better.planned, run, task.asked)) + "\n")
        plan_file = out
    put(check_report(found, run, plan_file), as_json, lambda out: _text(out, found, task, run, plan_file))
    return 0 if found.fits else EXIT_REFUSED


def _checked(task: TaskWords, degrees: Mapping[str, Any], how: Mapping[str, Any]) -> Check:
    """Return whether a file is legal, and its price."""
    written = task.written
    if written is None or written.config is None:
        raise PinError(f"{task.model} is not the input of a framework")
    read = written.config
    if None in (task.seq_len, task.global_batch_size):
        return Check(read, None, read.faults)
    request = read_request(task, **how)
    if read.faults:
        return Check(read, request, read.faults)
    given = written.but(read_degrees(degrees, layer_calls(request.graph)), task.cluster)
    try:
        planned = estimate_config(request, checked_config(request, given))
    except (PinError, InfeasibleError) as error:
        return Check(read, request, (str(error),))
    return Check(read, request, (), planned)


def _better(found: Check, request: PlanRequest, seconds: float, told: Any) -> Better:
    """Return the fastest plan that the target can say, with the settings of the file and the pins of the request."""
    read, started = found.read, time.perf_counter()
    fixed, reason = {**_unsaid(read), **request.pins}, ""
    for _ in range(_SEARCHES):
        try:
            result = search_plan(replace(request, pins=fixed, top=_SHOWN, time_limit_s=seconds, patient=False), told)
            asked = result.request
        except AutoplanError as error:
            reason = str(error)
            break
        planned, export, refused = _said(result.plans, asked, read)
        if planned is not None:
            own = found.planned.estimate.step_time_s.mid if found.planned is not None and found.fits else None
            gain = None if own is None else 1 - planned.estimate.step_time_s.mid / own
            took = time.perf_counter() - started
            return Better(seconds, took, asked, planned, export, result.certificate, gain)
        reason = f"{read.target} cannot say a plan: {refused[0]}"
        more = _usual([name for name in refused[0].names if name not in fixed])
        if not more:
            break
        fixed |= more
    return Better(seconds, time.perf_counter() - started, request, reason=reason)


def _said(
    plans: Sequence[Planned], request: PlanRequest, read: ConfigFile
) -> tuple[Planned | None, Export | None, list[PinError]]:
    """Return the first plan that the target can say, as its input, and why it cannot say those before it."""
    refused: list[PinError] = []
    for planned in plans:
        try:
            export = export_setup(Setup.of(request, planned.config), f"{read.target}@{read.version}")
        except PinError as error:
            refused.append(error)
        else:
            return planned, export, refused
    return None, None, refused


def _unsaid(read: ConfigFile) -> dict[str, Any]:
    """Return the choices that the target has no field for, at the value that it runs."""
    target = TARGETS[read.target]
    said = {name for each in target.fields_at(year_of(read.version)) for name in each.names} | set(target.elsewhere)
    return _usual([name for name in ESSENTIAL if name not in said])


def _usual(names: Sequence[str]) -> dict[str, Any]:
    """Return the values of choices that a target without them runs: the defaults of a configuration."""
    default = ParallelConfig()
    free = ("dp", "micro_batch_size", "num_micro_batches", "etp", "schedule")  # follow from others
    usual = {name: getattr(default, name) for name in names if name in PINS and name not in free}
    return {name: "none" if name == "offload" else value for name, value in usual.items()}


def _export_words(found: Better, plan_file: Path | None) -> list[str]:
    """Return the command that writes the better plan as the input of the target."""
    if found.export is None:
        return []
    name = str(plan_file or _NAME)
    target, suffix = found.export.target, Path(found.export.file).suffix
    out = f"better{suffix}"
    if out == Path(name).name:  # the plan itself
        out = f"better_{target}{suffix}"
    return ["autoplan", "export", name, "--to", f"{target}@{found.export.version}", "--out", out]


# -- JSON --------------------------------------------------------------------------------------------------------------


def check_report(found: Check, run: RunTask, plan_file: Path | None = None) -> dict[str, Any]:
    """Return the answer of `autoplan check` as plain data. `plan_file`: where the better plan was written."""
    read, better = found.read, found.better
    first = report("check", found.status) if found.request is None else head("check", found.request, found.status)
    none = dict.fromkeys(("priced_not_executed", "plan", "estimate"))
    own = none if found.planned is None or found.request is None else planned_data(found.planned, found.request, run)
    lacking = None if found.planned is None or found.fits else found.planned.estimate.missing()
    return {
        **first,
        "file": read.path,
        **chosen(read, "target version like"),
        "faults": list(found.faults),
        **chosen(read, "warnings not_read foreign"),
        "said_elsewhere": dict(read.open),
        "fits": found.fits,
        "shortage": lacking,
        **own,
        "search": None if better is None else chosen(better, "limit_s seconds reason certificate"),
        "better": None if better is None or not better.is_better else _better_data(better, run, plan_file),
    }


def _better_data(better: Better, run: RunTask, plan_file: Path | None) -> dict[str, Any]:
    if better.planned is None or better.export is None:
        return {}
    return {
        **planned_data(better.planned, better.request, run),
        "gain": better.gain,
        "not_said": list(better.export.not_said),
        "export": _export_words(better, plan_file),
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _text(out: Console, found: Check, task: TaskWords, run: RunTask, plan_file: Path | None) -> None:
    """Print the answer."""
    read, request = found.read, found.request
    if request is not None:
        heading(out, request)
    if found.planned is not None and request is not None:
        evidence(out, request, found.planned.estimate)
        fits = "fits" if found.fits else "DOES NOT FIT"
        answer(out, f"{read.path}: legal, {fits}:", found.planned, request, run)
        if not found.fits:
            paragraph(out, found.planned.estimate.missing(), 1, first=1)
        memory_table(out, found.planned.estimate)
        prices(out, [request], run)
        say_warnings(out, found.planned.estimate, request, run)
    else:
        out.print()
        out.print(Text(f" {read.path}: ILLEGAL for {read.target}@{read.version}", style="bold red"), soft_wrap=True)
        for fault in found.faults:
            paragraph(out, f"- {fault}", 3, first=1)
    if found.better is not None:
        _better_text(out, found.better, task, run, plan_file)


def _better_text(out: Console, better: Better, task: TaskWords, run: RunTask, plan_file: Path | None) -> None:
    out.print()
    searched = f"a search of {better.seconds:.1f} s (limit {better.limit_s:g} s)"
    planned, export = better.planned, better.export
    if planned is None or export is None:
        paragraph(out, f"No better plan by {searched}: {better.reason}")
        return
    proof = "" if better.certificate is None else proof_of(better.certificate)
    if not better.is_better:
        gain = better.gain or 0.0
        near = "it found none that is faster"
        if gain > 0:
            equal = numbers.percent(better.request.equal_within)
            near = f"the step of its best is {numbers.percent(gain)} shorter, and plans within {equal} count as equal"
        paragraph(out, f"No better plan by {searched}: {near}; {proof}")
        return
    step = planned.estimate.step_time_s.mid
    by = "legal and fits" if better.gain is None else f"{numbers.percent(better.gain)} shorter"
    out.print(Text(f" BETTER  {plan_label(planned.config, planned.estimate)}", style="bold green"), soft_wrap=True)
    peak = planned.estimate.peak_memory_bytes.mid
    paragraph(out, f"step {numbers.digits(step)} s ({by}), memory {peak / 1e9:.1f} GB; {searched}: {proof}", 1, first=1)
    for line in export.not_said:
        paragraph(out, f"{export.target} cannot say {line}", 1, first=1)
    lines = wrapped(_export_words(better, plan_file), out.width - 12)
    if plan_file is None:
        again = estimate_command(task.model, task.cluster, better.request, planned.config, run)
        *first, last = wrapped([*again, "--json"], out.width - 12)
        lines = [*first, f"{last} > {_NAME}", *lines]
    for line in lines:
        out.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
