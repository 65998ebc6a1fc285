"""The table of published runs in README.md, generated: predicted against measured, campaign by campaign.

    python experiments/validate_published.py --data FILE.csv --trust A --readme README.md

What stands between the two marks is replaced; `held out` is of the shipped constants (profiles/constants.json): every
campaign predicted by constants fitted without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoplan.cost_models.errors import AutoplanError
from autoplan.report.files import write_text

BEGIN = "<!-- published runs: made by experiments/validate_published.py --readme, do not edit -->"
END = "<!-- end of published runs -->"


def held_out_errors() -> dict[str, float]:
    """Mean error by campaign with the constants of this version fitted without it; all of its rows count."""
    text = files("autoplan.profiles").joinpath("constants.json").read_text(encoding="utf-8")
    return {name: float(error) for name, error in json.loads(text).get("unseen", {}).items()}


def _share(value: float | None, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:+.0%}" if signed else f"{value:.1%}"


def markdown(summary: Mapping[str, Any], held_out: Mapping[str, float]) -> str:
    """The table of a summary (`validate_published.summary_of`)."""
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
