"""The demo's tables, from predicted.json and measured.json: the plan and why, and predicted against measured."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from autoplan.config import numbers
from autoplan.report.text import plain_table, proof_text
from experiments.demo.worker import CHECKED_STEPS, CHOSEN

WIDTH = 110
QUIET = 0.1  # processors taken by others: less does not disturb; the system counts in hundredths of a second
ENOUGH = 5
TERMS = {
    "compute": "compute (forward, backward)",
    "recompute": "recompute",
    "tp_comm": "tp_comm (inside blocks)",
    "dp_comm": "dp_comm (exposed)",
    "pp_comm": "pp_comm (exposed)",
    "overhead": "overhead (fixed costs)",
    "optimizer": "optimizer",
    "bubble": "bubble (stages that wait)",
}


@dataclass(frozen=True)
class Plan:
    """One plan, both ways."""

    name: str
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Degrees, ZeRO stage, micro-batches."""
        return str(self.predicted["label"])

    @property
    def times(self) -> Mapping[str, list[float]]:
        """Of the steps that were timed in turn with the other plans."""
        times: Mapping[str, list[float]] = self.measured["in_turn"]
        return times

    @cached_property
    def quiet(self) -> list[int]:
        """Timed steps that had the machine for themselves."""
        return [i for i, taken in enumerate(self.times["others"]) if taken <= QUIET]

    @cached_property
    def counted(self) -> list[int]:
        """Timed steps that count: the quiet ones if there are enough of them, else all."""
        return self.quiet if len(self.quiet) >= ENOUGH else list(range(len(self.times["step_s"])))

    def median_s(self, what: str) -> float:
        """Of the steps that count."""
        return statistics.median(self.times[what][i] for i in self.counted)

    @property
    def predicted_s(self) -> float:
        """Seconds of a step."""
        return float(self.predicted["step_time_s"]["mid"])

    @property
    def measured_s(self) -> float:
        """Seconds of a step, without clipping."""
        return self.median_s("step_s")

    @property
    def predicted_bytes(self) -> float:
        """Of the fullest rank."""
        return float(self.predicted["peak_memory_bytes"]["mid"])

    @property
    def measured_bytes(self) -> float:
        """Of the fullest rank: its peak of live tensors."""
        return float(max(self.measured["live_bytes"]))


@dataclass
class Outcome:
    """What main() found, for the answer."""

    falls: str
    largest_difference: float
    tolerance: float
    failures: list[str] = field(default_factory=list)


def make_console() -> Console:
    """At most WIDTH columns."""
    probe = Console()
    return Console(width=min(WIDTH, probe.width) if probe.is_terminal else WIDTH, highlight=False)


def paragraph(console: Console, text: str, indent: int = 2, style: str = "") -> None:
    """Wrapped at words, later lines indented by two more."""
    wrapped = textwrap.wrap(
        text,
        max(40, console.width),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapped:
        console.print(line, style=style, markup=False, soft_wrap=True)


def plans_of(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Plan]:
    """Return the plans, the chosen one first."""
    return [Plan(name, predicted["plans"][name], measured["plans"][name]) for name in predicted["plans"]]


def off(predicted: float, measured: float) -> str:
    """`+4.1%`: the prediction is that much too high."""
    return f"{100 * (predicted / measured - 1):+.1f}%"


def answer(console: Console, plans: Sequence[Plan], outcome: Outcome) -> None:
    """Everything in a few lines."""
    chosen = plans[0]
    same = f"same losses and gradients as one process (largest difference {outcome.largest_difference:.1e}"
    good = not outcome.failures
    console.print(
        f"[bold {'green' if good else 'red'}]{'OK' if good else 'FAILED'}[/]  [bold]{chosen.label}[/bold], chosen by "
        f"the planner: {outcome.falls}",
        soft_wrap=True,
    )
    if good:
        paragraph(console, f"{same}, tolerance {outcome.tolerance:g})", 4)
    for failure in outcome.failures:
        paragraph(console, failure, 4, "red")
    paragraph(
        console,
        f"step: predicted {_ms(chosen.predicted_s)} ms, measured {_ms(chosen.measured_s)} ms "
        f"({off(chosen.predicted_s, chosen.measured_s)}); peak memory: predicted {_mb(chosen.predicted_bytes)} MB, "
        f"measured {_mb(chosen.measured_bytes)} MB ({off(chosen.predicted_bytes, chosen.measured_bytes)})",
        4,
    )
    paragraph(console, ranking(plans), 4)


def ranking(plans: Sequence[Plan]) -> str:
    """Return whether the prediction ordered the plans as the clock did."""
    if len(plans) < 2:
        return "no other plan to compare with"
    chosen, best = plans[0], min(plans, key=lambda p: p.measured_s)
    order = [p.label for p in sorted(plans, key=lambda p: p.measured_s)]
    same = order == [p.label for p in sorted(plans, key=lambda p: p.predicted_s)]
    ranked = "all were predicted in this order" if same else "the predicted order was another"
    if best is chosen:
        return f"the chosen plan was the fastest of the {len(plans)} measured; {ranked}"
    lost = 100 * (chosen.measured_s / best.measured_s - 1)
    return f"NOT the fastest: {best.label} took less, the choice costs {lost:.1f} %; {ranked}"


def _ms(seconds: float) -> str:
    return numbers.digits(1e3 * seconds)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def why(console: Console, predicted: Mapping[str, Any]) -> None:
    """The chosen plan, what it was chosen from, and what its price is made of."""
    plan, found = predicted["plans"][CHOSEN], predicted["why"]
    step = plan["step_time_s"]
    console.print(
        f"[bold]{plan['label']}[/bold]: predicted {_ms(step['mid'])} ms a step ({_ms(step['low'])} to "
        f"{_ms(step['high'])}, {step['tag']}), {found['tokens_per_step'] / step['mid']:,.0f} tokens/s",
        soft_wrap=True,
    )
    paragraph(console, profile_line(predicted["profile"]), 2, "dim")
    paragraph(console, certificate_line(plan["certificate"]), 2, "dim")
    paragraph(console, f"the space: {'; '.join(plan['certificate']['restrictions'])}", 2, "dim")
    if not found["agrees"]:
        paragraph(console, "a second search, for the runners-up, found another best plan: see the table", 2, "yellow")
    console.print()
    table = plain_table("best plans found", "step ms", "low to high", "evidence", "memory MB", left=1)
    for row in found["top"]:
        s = row["step_time_s"]
        span = f"{_ms(s['low'])} to {_ms(s['high'])}"
        table.add_row(row["label"], _ms(s["mid"]), span, s["tag"], _mb(row["peak_memory_bytes"]["mid"]))
    console.print(table)
    console.print()
    console.print(breakdown(predicted))
    console.print()
    console.print(memory(plan))


def breakdown(predicted: Mapping[str, Any]) -> Table:
    """The step of every plan that will be run, by term."""
    plans = predicted["plans"]
    table = plain_table("predicted step, ms", *(p["label"] for p in plans.values()), "evidence", left=1)
    found = {t for p in plans.values() for t in p["estimate"]["breakdown_s"]}
    for term in [*(t for t in TERMS if t in found), *sorted(found - set(TERMS))]:
        cells = [p["estimate"]["breakdown_s"].get(term) for p in plans.values()]
        tags = {c["evidence"] for c in cells if c is not None and c["mid"]}
        values = ["" if c is None or not c["mid"] else _ms(c["mid"]) for c in cells]
        table.add_row(TERMS.get(term, term), *values, ", ".join(sorted(tags)))
    table.add_section()
    table.add_row("step", *(_ms(p["step_time_s"]["mid"]) for p in plans.values()), "")
    return table


def memory(plan: Mapping[str, Any]) -> Table:
    """Return the chosen plan's memory by term and stage."""
    stages = plan["estimate"]["memory_bytes"]
    heads = [f"stage {i}" for i in range(len(stages))] if len(stages) > 1 else ["every rank"]
    table = plain_table(f"predicted memory of {plan['label']}, MB", *heads, "evidence", left=1)
    for term in dict.fromkeys(t for s in stages for t in s):
        cells = [s.get(term) for s in stages]
        table.add_row(
            term, *("" if c is None else _mb(c["mid"]) for c in cells), cells[0]["evidence"] if cells[0] else ""
        )
    table.add_section()
    table.add_row("peak", *(_mb(sum(q["mid"] for q in s.values())) for s in stages), "")
    return table


def profile_line(profile: Mapping[str, Any]) -> str:
    """Where the times come from."""
    if profile["name"] is None:
        return "prices: assumed round figures of a CPU core (AUTOPLAN_PROFILE=assumed), nothing measured"
    if profile["new_ops"]:
        first = f"{profile['new_ops']} operations measured now, in {profile['seconds']:.0f} s with capture and planning"
        later = "; kept, so the next run reuses them"
    else:
        first, later = f"reused, measured {profile['date']}", "; delete the file to measure anew, or use --fresh"
    held = profile["held_out"]
    error = ""
    if held:
        worst = max(held, key=lambda name: held[name]["median"])
        error = f"; median error on held-out shapes at most {100 * held[worst]['median']:.0f} % ({worst})"
    left_out = [n for n in profile["notes"] if n.startswith("no time for")]
    lacking = f"; not complete, {len(left_out)} of its notes say what is missing" if left_out else ""
    return (
        f"prices: profile {profile['path']} ({first}; {profile['num_ops']} operations, {profile['num_links']} times of "
        f"collectives{error}{lacking}){later}"
    )


def certificate_line(c: Mapping[str, Any]) -> str:
    """Return what was searched, and how far from the best the plan may be."""
    rules = "".join(f", {name} {count}" for name, count in c["illegal_by_rule"].items())
    return (
        f"certificate: {c['considered']} candidates: {c['illegal']} illegal{rules}, {c['too_big']} too big, "
        f"{c['bounded_out']} bounded out, {c['solved']} solved, {c['open']} left open in {c['solve_time_s']:.1f} s: "
        f"{proof_text(c['gap'], c['intra_gap'])}, gap {c['gap']:.2g} (of the layouts inside {c['intra_gap']:.2g}), "
        f"{c['status']}, at these prices"
    )


def comparison(
    console: Console, plans: Sequence[Plan], predicted: Mapping[str, Any], machine: Mapping[str, Any]
) -> None:
    """Predicted against measured, of every plan that was run."""
    heads = ("step, ms", "error", "program", "AdamW", "cpu", "peak, MB", "error")
    table = plain_table("predicted / measured", *heads, left=1)
    for column in table.columns:
        column.no_wrap = True
    for p in sorted(plans, key=lambda p: p.measured_s):
        pins = " ".join(f"{k}={v}" for k, v in p.predicted["pins"].items())
        table.add_row(
            f"{p.label} ({pins or 'chosen'})",
            f"{_ms(p.predicted_s)} / {_ms(p.measured_s)}",
            off(p.predicted_s, p.measured_s),
            f"{_ms(p.predicted['program_s'])} / {_ms(p.median_s('program_s'))}",
            f"{_ms(p.predicted['optimizer_s'])} / {_ms(p.median_s('optimizer_s'))}",
            _ms(p.median_s("cpu_s")),
            f"{_mb(p.predicted_bytes)} / {_mb(p.measured_bytes)}",
            off(p.predicted_bytes, p.measured_bytes),
            style="" if pins else "bold",
        )
    console.print(table)
    for name, reason in predicted["refused"].items():
        paragraph(console, f"{name}: {reason}", 2, "yellow")
    paragraph(
        console,
        "Pins in brackets. step = program (pm.step: forward, backward, reductions) + AdamW, of the slowest rank; "
        "cpu: its processor time, without waiting. Plans timed in turn. MB: peak of live tensors, of the fullest rank.",
        2,
        "dim",
    )
    if machine["processes"] > (machine["cores"] or 0):
        crowded = (
            f"{machine['processes']} processes share {machine['cores']} cores: operations are priced in processor "
            "time, so that steps take longer than predicted. This shows that it runs, not how well it predicts."
        )
        paragraph(console, crowded, 2, "yellow")
    paragraph(console, clipping(plans[0], predicted), 2, "dim")
    paragraph(console, disturbance(plans, machine), 2, "dim")
    paragraph(console, missing(plans[0]), 2)


def clipping(chosen: Plan, predicted: Mapping[str, Any]) -> str:
    """Clipping stands apart on both sides."""
    costs = predicted["profile"].get("overheads", {})
    known = "the profile has its fixed cost, but a plan need not clip" if "clip_s" in costs else "the profile lacks it"
    return (
        f"Clipping the gradient norm is in neither number: {_ms(chosen.median_s('clip_s'))} ms more of every step here "
        f"({known})."
    )


def disturbance(plans: Sequence[Plan], machine: Mapping[str, Any]) -> str:
    """Return whether the machine was ours while the plans were timed."""
    training = statistics.median(plans[0].measured["training"]["step_s"][CHECKED_STEPS:])
    before = f" The chosen plan's steps in training: median {_ms(training)} ms."
    total = sum(len(p.times["step_s"]) for p in plans)
    if not plans[0].times["others"]:
        return f"Medians of {total} steps; this system does not say whether others used it meanwhile.{before}"
    quiet = sum(len(p.quiet) for p in plans)
    taken = statistics.fmean(x for p in plans for x in p.times["others"])
    text = f"{quiet} of {total} timed steps had the machine for themselves"
    disturbed = [p.label for p in plans if len(p.quiet) < ENOUGH]
    if disturbed:
        text += (
            f": too few for {', '.join(disturbed)}, so these medians are of all their steps. Others used {taken:.1f} "
            f"of {machine['cores']} cores meanwhile: expect more than predicted for a quiet machine"
        )
    else:
        text += "; the medians are theirs"
    return f"{text}.{before}"


def missing(p: Plan) -> str:
    """Which part of the step the prediction of the chosen plan misses most."""
    parts = {
        "forward, backward and communication": p.predicted["program_s"] - p.median_s("program_s"),
        "the optimizer": p.predicted["optimizer_s"] - p.median_s("optimizer_s"),
    }
    told = " and ".join(f"{1e3 * seconds:+.1f} ms in {name}" for name, seconds in parts.items())
    return f"The prediction of {p.label} is off by {1e3 * (p.predicted_s - p.measured_s):+.1f} ms: {told}."
