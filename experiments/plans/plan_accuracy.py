"""How well plans are predicted: every plan of a small model on local processes, predicted and measured.

    python -m experiments.plans.plan_accuracy [--processes 2] [--hidden 256] [--rounds 6] [--json FILE]

First this machine is profiled with as many processes as the plans use, then every plan (dp x tp x pp x ZeRO stage x
micro-batches x recompute) is priced from that profile, and last all of them run in turn, in the same processes. Shown:
error of the step time and of the peak of live tensors per plan, the rank correlation, and the regret: how much slower
the plan that the prediction likes best is than the one that measured fastest.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan.cost_models.profile import Profile
from autoplan.profiler.processes import run_ranks
from experiments.plans.plan_accuracy_predict import Predicted, measure_profile, predict
from experiments.plans.plan_accuracy_worker import Measured, Trial, every_trial, quiet, run_trials
from experiments.shared.measure import describe, environment, make_console, run_command, write_json
from experiments.shared.models import Size

ENOUGH = 3  # repetitions


@dataclass(frozen=True)
class Row:
    """One plan, both ways."""

    trial: Trial
    predicted: Predicted
    measured: Measured

    @cached_property
    def steps_s(self) -> list[float]:
        """Steps that had the machine for themselves; if those are too few, the less disturbed quarter."""
        taken, steps = self.measured.foreign, self.measured.step_s
        order = sorted(range(len(steps)), key=lambda i: taken[i])
        return [steps[i] for i in order[: max(ENOUGH, len(steps) // 4, len(quiet(self.measured)))]]

    @property
    def disturbed(self) -> bool:
        """True if others used the machine during most repetitions that count."""
        return len(quiet(self.measured)) < ENOUGH

    @property
    def seconds(self) -> float:
        """Median of the steps that count."""
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative: what a prediction cannot know."""
        low, mid, high = statistics.quantiles(self.steps_s, n=4, method="inclusive")
        return (high - low) / 2 / mid

    @property
    def time_ratio(self) -> float:
        """Predicted over measured step time."""
        return self.predicted.step_s / self.seconds

    @property
    def covered(self) -> bool:
        """True if the predicted interval holds the measured time."""
        return self.predicted.low_s <= self.seconds <= self.predicted.high_s

    @property
    def memory_ratio(self) -> float:
        """Predicted over measured peak of live tensors, of the fullest rank."""
        return self.predicted.peak_bytes / max(self.measured.live_bytes)


@dataclass(frozen=True)
class Summary:
    """Errors are `|predicted / measured - 1|`; `bias` is the median of predicted / measured."""

    count: int
    mape: float
    median: float
    worst: float
    bias: float
    spearman: float

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> Summary:
        """Of at least two values each."""
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        errors = [abs(r - 1) for r in ratios]
        return Summary(
            len(ratios),
            statistics.fmean(errors),
            statistics.median(errors),
            max(errors),
            statistics.median(ratios),
            statistics.correlation(_ranks(predicted), _ranks(measured)) if len(ratios) > 2 else float("nan"),
        )

    def __str__(self) -> str:
        return (
            f"{self.count} plans: mean error {self.mape:.1%}, median {self.median:.1%}, worst {self.worst:.1%}, "
            f"predicted / measured {self.bias:.2f}, Spearman {self.spearman:.3f}"
        )


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks, the mean of theirs for equal values."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def regret(rows: Sequence[Row]) -> tuple[Row, Row, float]:
    """The plan predicted fastest, the one measured fastest, and how much slower the first was measured."""
    chosen, best = min(rows, key=lambda r: r.predicted.step_s), min(rows, key=lambda r: r.seconds)
    return chosen, best, chosen.seconds / best.seconds - 1


GROUPS: dict[str, Callable[[Trial], bool]] = {
    "dp": lambda t: t.dp > 1,
    "dp, ZeRO 0": lambda t: t.dp > 1 and t.zero_stage == 0,
    "dp, ZeRO 1": lambda t: t.dp > 1 and t.zero_stage == 1,
    "dp, ZeRO 2": lambda t: t.dp > 1 and t.zero_stage == 2,
    "dp, ZeRO 3": lambda t: t.dp > 1 and t.zero_stage == 3,
    "tp": lambda t: t.tp > 1,
    "pp": lambda t: t.pp > 1,
    "one micro-batch": lambda t: t.num_micro_batches == 1,
    "8 micro-batches": lambda t: t.num_micro_batches == 8,
    "recompute none": lambda t: t.recompute == "none",
    "recompute full": lambda t: t.recompute == "full",
}


TERMS = {"compute": "comp", "recompute": "again", "tp_comm": "tp", "dp_comm": "dp", "pp_comm": "pp", "bubble": "bubble"}


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title)
    headings = ("plan", "pred ms", "ms", "ratio", "+-", "cpu", *TERMS.values(), "rest", "pred MB", "MB", "ratio", "RSS")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    for r in sorted(rows, key=lambda r: r.seconds):
        terms = r.predicted.breakdown_s
        rest = sum(seconds for name, seconds in terms.items() if name not in TERMS)
        table.add_row(
            str(r.trial),
            f"{1e3 * r.predicted.step_s:.0f}",
            f"{1e3 * r.seconds:.0f}{'*' if r.disturbed else ''}",
            f"{r.time_ratio:.2f}",
            f"{r.spread:.0%}",
            f"{1e3 * statistics.median(r.measured.cpu_s):.0f}",
            *(f"{1e3 * terms[name]:.0f}" if name in terms else "" for name in TERMS),
            f"{1e3 * rest:.0f}",
            f"{r.predicted.peak_bytes / 1e6:.1f}",
            f"{max(r.measured.live_bytes) / 1e6:.1f}",
            f"{r.memory_ratio:.2f}",
            f"{max(r.measured.rss_bytes) / 1e6:.0f}",
        )
    return table


def _case(row: Row) -> dict[str, Any]:
    return {
        "plan": row.trial.pins,
        "predicted": asdict(row.predicted),
        "measured": asdict(row.measured) | {"median_s": row.seconds, "spread": row.spread},
        "time_ratio": row.time_ratio,
        "memory_ratio": row.memory_ratio,
    }


def main(
    processes: Annotated[int, typer.Option(help="devices, one local process each")] = 2,
    hidden: Annotated[int, typer.Option(help="width of the Llama")] = 256,
    layers: Annotated[int, typer.Option(help="its layers")] = 4,
    seq: Annotated[int, typer.Option(help="tokens per sample")] = 128,
    batch: Annotated[int, typer.Option(help="samples of the global batch")] = 8,
    vocab: Annotated[int, typer.Option(help="vocabulary")] = 1024,
    rounds: Annotated[int, typer.Option(help="how often all plans run in turn, at least")] = 6,
    repeats: Annotated[int, typer.Option(help="timed steps of a plan per round")] = 2,
    budget_s: Annotated[
        float, typer.Option(help="no new round after this long; until then, as many as it takes")
    ] = 400.0,
    profile_s: Annotated[float, typer.Option(help="time for the profile")] = 180.0,
    timeout_s: Annotated[float, typer.Option(help="give up measuring plans after this long")] = 1500.0,
    profile: Annotated[Path | None, typer.Option(help="use this profile in place of a new one")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="keep the profile measured here")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Predict and measure every plan."""
    size = Size(hidden, layers, seq, batch, vocab, num_heads=8, num_kv_heads=4)
    env = {**environment(), "threads": 1, "processes": processes, "backend": "gloo"}
    console = make_console()
    trials = every_trial(processes, batch, layers)
    with console.status("profiling"):
        found = Profile.load(profile) if profile else measure_profile(size, trials, processes, profile_s)
    if save_profile:
        found.save(save_profile)
    with console.status("predicting"):
        predicted = predict(size, trials, processes, found)
    plans = [(t, p) for t, p in zip(trials, predicted, strict=True) if not isinstance(p, str)]
    for trial, why in zip(trials, predicted, strict=True):
        if isinstance(why, str):
            console.print(f"{trial}: {why}")
    with console.status("measuring"), tempfile.TemporaryDirectory() as folder:
        runs = [(trial, program) for trial, (_, program) in plans]
        arguments = (size, runs, rounds, repeats, folder, budget_s)
        measured = run_ranks(run_trials, processes, *arguments, timeout_s=timeout_s)[0]
    rows = [Row(trial, p, m) for (trial, (p, _)), m in zip(plans, measured, strict=True)]
    cores = env["cpu_count"]
    note = (
        f"; {processes} processes on {cores} cores: a check that it runs, not of accuracy" if processes > cores else ""
    )
    console.print(_table(rows, f"llama {size}, {processes} processes, {describe(env)}{note}"))
    time = Summary.of([r.predicted.step_s for r in rows], [r.seconds for r in rows])
    memory = Summary.of([r.predicted.peak_bytes for r in rows], [float(max(r.measured.live_bytes)) for r in rows])
    console.print(f"step time: {time}")
    widths = [(r.predicted.high_s - r.predicted.low_s) / r.predicted.step_s for r in rows]
    covered = sum(r.covered for r in rows)
    console.print(
        f"  measured within the predicted interval: {covered} of {len(rows)}; its median width "
        f"{statistics.median(widths):.0%} of the prediction"
    )
    disturbed = sum(r.disturbed for r in rows)
    if disturbed:
        calm = [r for r in rows if not r.disturbed]
        console.print(f"  * {disturbed} plans never had the machine for themselves: their figures are too high")
        if len(calm) > 1:
            console.print(f"  the others: {Summary.of([r.predicted.step_s for r in calm], [r.seconds for r in calm])}")
    for name, belongs in GROUPS.items():
        mine = [r for r in rows if belongs(r.trial)]
        if len(mine) > 1:
            console.print(f"  {name}: {Summary.of([r.predicted.step_s for r in mine], [r.seconds for r in mine])}")
    console.print(f"peak of live tensors: {memory}")
    chosen, best, much = regret(rows)
    console.print(
        f"chosen: {chosen.trial} ({1e3 * chosen.seconds:.1f} ms measured); fastest: {best.trial} "
        f"({1e3 * best.seconds:.1f} ms); regret {much:.1%}"
    )
    console.print(f"spread of the repetitions of one plan, median: {statistics.median(r.spread for r in rows):.1%}")
    summary = {"time": asdict(time), "memory": asdict(memory), "regret": much, "chosen": chosen.trial.pins}
    summary |= {"covered": covered, "median_width": statistics.median(widths)}
    write_json(json, "plan_accuracy", {**env, "size": asdict(size), "summary": summary}, [_case(r) for r in rows])


if __name__ == "__main__":
    run_command(main)
