"""How steps grow with the number of devices beyond what is predicted, and the spread of devices that this says.

    python -m experiments.published.validate --data FILE.csv --json PRICED.json
    python -m experiments.published.scaling --data FILE.csv --priced PRICED.json

A series are runs of one campaign that differ in the number of devices alone: the same model, device, number format,
degrees, lengths and sequences per device. All ranks wait for the slowest device: equal GPUs of five clusters differ by
8 % on average and 22 % at most (Sinha et al., SC22, arXiv 2208.11035), products by up to 14 % (Golden et al., arXiv
2510.15596). If their speeds are normal, the slowest of n is e(n) standard deviations slower than the mean (Blom,
Statistical Estimates and Transformed Beta-Variables, 1958), and from one number of devices to the next log(measured /
predicted) grows by spread * (e(n2) - e(n1)), since predictions have no such term. The spread of a campaign is the
least-squares slope over its pairs; the level of predictions has no part in it. What a campaign has left is given with
the median spread of the others.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoplan.errors import AutoplanError
from experiments.published.rows import read_rows
from experiments.published.table import Row

# Pairs that change by more than this (log) differ in more than the number of devices: another release, a bad node.
BEYOND = 0.15
LEAST_PAIRS = 3  # of a campaign, for a spread of its own
_RELEASE = r"(?:release|container) v?\d\S*|@v\d\S*|training_results_v\S+"
_SAME = ("model", "layers", "gpu", "precision", "tp", "pp", "vpp", "cp", "ep", "seq_len", "micro_batch", "zero_stage")


@dataclass(frozen=True)
class Pair:
    """Two runs of a series, one after the other by devices.

    `grows`: log(measured / predicted) of the larger less that of the smaller; `slower`: e of the larger less the other.
    """

    campaign: str
    fewer: int
    more: int
    grows: float
    slower: float


def slowest_of(num_devices: int) -> float:
    """By how many standard deviations the slowest of so many is expected to be slower than the mean."""
    return NormalDist().inv_cdf((num_devices - 0.375) / (num_devices + 0.25))


def series_of(row: Row, predicted: Mapping[str, Any]) -> tuple[object, ...]:
    """What runs of one series have in common."""
    each = float(row["global_batch"]) / int(predicted["num_devices"])
    release = re.findall(_RELEASE, f"{row['source']} {row['notes']}")
    zero = row["zero_stage"].split(" (degree")[0]  # of a fixed shape for few and many devices
    return row["campaign"], *release, round(each, 3), *(zero if n == "zero_stage" else row[n] for n in _SAME)


def pairs_of(rows: Sequence[Row], priced: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Pairs of all series, neighbours by the number of devices."""
    by_id = {row["id"]: row for row in rows}
    found: dict[tuple[object, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in priced:
        predicted, measured = line["predicted_step_time_s"], line["measured_step_time_s"]
        if predicted and measured and line["id"] in by_id and by_id[line["id"]]["global_batch"]:
            count = int(line["num_devices"])
            found[series_of(by_id[line["id"]], line)][count].append(math.log(measured / predicted))
    out = []
    for key, by_count in found.items():
        means = {count: statistics.mean(values) for count, values in sorted(by_count.items())}
        for fewer, more in pairwise(means):
            slower = slowest_of(more) - slowest_of(fewer)
            if abs(grows := means[more] - means[fewer]) <= BEYOND:
                out.append(Pair(str(key[0]), fewer, more, grows, slower))
    return out


def spread_of(pairs: Sequence[Pair]) -> float:
    """The least-squares slope, at least 0."""
    return max(0.0, sum(p.grows * p.slower for p in pairs) / sum(p.slower**2 for p in pairs))


def left_over(pairs: Sequence[Pair], spread: float) -> float:
    """Mean growth per doubling of devices that the term leaves, with its sign."""
    return sum(p.grows - spread * p.slower for p in pairs) / sum(math.log2(p.more / p.fewer) for p in pairs)


def main(
    data: Annotated[Path, typer.Option(help="CSV of published measurements")],
    priced: Annotated[Path, typer.Option(help="what published/validate.py --json wrote")],
) -> None:
    """Print the spread of devices by campaign, and what growth it leaves."""
    try:
        lines = json.loads(priced.read_text(encoding="utf-8"))["rows"]
        pairs = pairs_of(read_rows(data), lines)
    except (OSError, KeyError, json.JSONDecodeError) as exc:
        raise typer.BadParameter(f"{priced}: {exc!r}; give what published/validate.py --json wrote") from exc
    except AutoplanError as exc:
        raise typer.BadParameter(str(exc)) from exc
    by_campaign: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_campaign[pair.campaign].append(pair)
    kept = {name: found for name, found in sorted(by_campaign.items()) if len(found) >= LEAST_PAIRS}
    if len(kept) < 2:
        raise typer.BadParameter(f"{data}: fewer than two campaigns have {LEAST_PAIRS} pairs of runs of one series")
    own = {name: spread_of(found) for name, found in kept.items()}
    table = Table(
        "campaign", "pairs", "grow", "spread", "growth per doubling", "left by the others' spread", title="Scaling"
    )
    for name, found in kept.items():
        others = statistics.median(value for other, value in own.items() if other != name)
        grow = sum(p.grows > 0 for p in found)
        table.add_row(
            name, str(len(found)), str(grow), f"{own[name]:.1%}", f"{left_over(found, 0.0):+.2%}",
            f"{left_over(found, others):+.2%}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"spread: {statistics.median(own.values()):.1%}, the median of {len(own)} campaigns")


if __name__ == "__main__":
    typer.run(main)
