"""The table of published runs in docs/accuracy.md, generated: predicted against measured, campaign by campaign.

    python -m experiments.published.validate --data FILE.csv --trust A --readme docs/accuracy.md

What stands between the two marks is replaced; `held out` is of the shipped constants (profiles/constants.json): every
campaign predicted by constants fitted without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.report.files import write_text

BEGIN = "<!-- published runs: made by experiments/published/validate.py --readme, do not edit -->"
END = "<!-- end of published runs -->"


def held_out_errors() -> dict[str, float]:
    """Mean error by campaign with the constants of this version fitted without it; all of its rows count."""
    return {name: float(error) for name, error in _constants().get("unseen", {}).items()}


def _constants() -> dict[str, Any]:
    text = files("autoplan.profiles").joinpath("constants.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def held_out_of(campaigns: Sequence[str]) -> dict[str, Any]:
    """Return what is known of these campaigns without a part of theirs in the constants; None where it is not known.

    macro_mean: over those with a held-out error, by `errors` of each; models: mean error of rows with and without
    experts; covered: share of steps in the intervals of their class, each campaign's in intervals of the others.
    `not_fitted`: campaigns without a part in the constants, all figures of which are held out.
    """
    data = _constants()
    known = held_out_errors()
    errors = {name: known[name] for name in campaigns if name in known}
    intervals = data.get("step_intervals", {})
    return {
        "macro_mean": sum(errors.values()) / len(errors) if errors else None,
        "errors": errors,
        "models": {name: float(error) for name, error in data.get("unseen_models", {}).items()} or None,
        "covered": {name: float(found["covered"]) for name, found in intervals.items() if "covered" in found} or None,
        "not_fitted": [name for name in campaigns if name not in known and name not in data.get("errors", {})],
    }


def held_out_text(campaigns: Sequence[str]) -> list[str]:
    """Return lines that say which of the printed figures are in sample, and which are not."""
    found = held_out_of(campaigns)
    lines = []
    if found["errors"]:
        lines.append(
            f"held out (constants fitted without a campaign): macro average over {len(found['errors'])} of these "
            f"campaigns {_share(found['macro_mean'])}; their figures above are in sample"
        )
    if found["not_fitted"]:
        lines.append(
            f"had no part in the constants, so that all of their figures are held out: {', '.join(found['not_fitted'])}"
        )
    if found["errors"] and found["models"] is None:
        lines.append(
            "held-out errors of rows with experts are not stored with the constants: those above are in sample"
        )
    elif found["errors"]:
        models = ", ".join(f"{name} {_share(error)}" for name, error in found["models"].items())
        lines.append(f"held out, mean error of the rows that the constants were fitted to: {models}")
    if found["covered"] is not None:
        shares = ", ".join(
            f"{name} {_share(found['covered'][name])}" for name in found["covered"] if " of " not in name
        )
        lines.append(f"held out, steps within the intervals of their class: {shares}; covered above is in sample")
    else:
        lines.append("no intervals are stored with the constants: covered above is in sample")
    return lines


def _share(value: float | None, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:+.0%}" if signed else f"{value:.1%}"


def markdown(summary: Mapping[str, Any], held_out: Mapping[str, float]) -> str:
    """Return the table of a summary (`results.summary_of`)."""
    lines = [
        "| runs | rows | priced | mean error | held out | median | bias | within interval |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]

    def line(name: str, e: Mapping[str, Any], out: float | None) -> str:
        priced = _share(e["num_priced"] / e["num_stated"]) if e["num_stated"] else ""
        figures = (_share(e["mean_with_unpriced"]), _share(out), _share(e["median"]), _share(e["bias"], True))
        return f"| {name} | {e['num_stated']} | {priced} | {' | '.join(figures)} | {_share(e['coverage'])} |"

    groups = summary["groups"]
    for name, errors in groups["campaign"].items():
        lines.append(line(name, errors, held_out.get(name)))
    for name, errors in groups["model"].items():
        if errors["num_stated"]:
            lines.append(line(f"all, {name}", errors, None))
    lines.append(line("**all**", summary["all"], None))
    macro, width = f"{summary['macro_mean']:.1%}", f"{summary['all']['width']:.0%}"
    counts = ("num_right", "num_pairs", "num_other_right", "num_other")
    right, pairs, other_right, others = (sum(r[k] for r in summary["ranking"].values()) for k in counts)
    known = [held_out[name] for name in groups["campaign"] if name in held_out]
    out = f", held out **{sum(known) / len(known):.1%}**" if len(known) == len(groups["campaign"]) else ""
    lines += [
        "",
        f"Macro average over campaigns: **{macro}**{out}. Median width of the interval: {width} of the prediction.",
        f"Pairs of layouts of one sweep, measured more than 5 % apart, in the order predicted: {right} of {pairs};",
        f"of pairs that differ in the number format, too (mostly MXFP8 and FP8): {other_right} of {others}.",
    ]
    if summary["doubted"]:
        names, without = ", ".join(summary["doubted"]), f"{summary['macro_without_doubted']:.1%}"
        lines += [
            f"{len(summary['doubted'])} steps are not those of their settings alone, as their own sources say",
            f"(a release with a regression, or runs whose steps scatter tenfold: {names}).",
            f"They count in all figures; the macro average without them is **{without}**.",
        ]
    unseen = summary.get("held_out", {}).get("models", {})
    if unseen:
        parts = ", ".join(f"{name} {_share(error)}" for name, error in unseen.items())
        whose = "all rows the constants were fitted to (small runs of another table too)"
        lines += [f"Mean error, held out, of {whose}:", f"{parts}."]
    return "\n".join(lines)


def insert(path: Path, text: str) -> None:
    """Put `text` between the marks of a file, atomically. AutoplanError if it has not exactly one of each, in order."""
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AutoplanError(f"{path}: cannot be read ({error.strerror})") from error
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise AutoplanError(f"{path}: the line {BEGIN!r} and then {END!r} are needed, once each")
    head, rest = old.split(BEGIN)
    write_text(path, f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
