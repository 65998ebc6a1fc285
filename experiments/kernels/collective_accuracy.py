"""Predicted against published collectives: errors by collective, fabric, ranks and size, in sample and held out.

    python -m experiments.kernels.collective_accuracy --data FILE.csv [--write FILE.json]

Held out: the constants of a fabric are fitted anew without one source (a table or plot that one party measured on one
machine), which they then predict; blank where no other source has this collective on this fabric. Errors are
predicted / measured - 1; MAPE is the mean of their sizes, P90 their 90th percentile, bias their geometric mean.
`--write` fits the constants anew and writes them with their errors and intervals.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS
from autoplan.cost_models.hardware.nccl import DATA, FABRICS, Fabric, fabric_of, rows
from autoplan.cost_models.network.collectives import seconds_by_bytes
from autoplan.cost_models.quantity import Tag
from experiments.kernels.collective_fit import Row, errors, fit
from experiments.kernels.collective_rows import Sample, read_samples

_LEAST_ROWS = 8  # of a collective on a fabric, to call its constants fitted
_LEAST_SPREAD = 0.15
_LATENCY_RULES = 0.25  # T(0) / T(N) above which an error counts as one of latency
# intervals where nothing can be held out: what the errors in sample are multiplied by, and what they are at least
_UNTESTED_FACTOR, _UNTESTED_SPREAD = 2.0, 0.3
_LIKE = {"nvlink": "nvlink4", "nvlink2_switch": "nvlink2"}
_KEEP_ASSUMED = ("pcie",)  # fitted to one system that is not in the catalog


def held_out_errors(samples: Sequence[Sample], shipped: Mapping[str, Row], between: bool = False) -> np.ndarray:
    """log(predicted / measured) of each sample by constants fitted without its source; nan if none can be.

    `between`: only samples of a size between those of as many ranks that were fitted to: the constants in use were
    fitted to all, so that what they do beyond a part says nothing of their interval.
    """
    out = np.full(len(samples), math.nan)
    for fabric in sorted({s.fabric for s in samples}):
        mine = [i for i, s in enumerate(samples) if s.fabric == fabric]
        for source in sorted({samples[i].source for i in mine}):
            kept = [samples[i] for i in mine if samples[i].source != source]
            kinds = {s.kind for s in kept}
            asked = [i for i in mine if samples[i].source == source and samples[i].kind in kinds]
            if between:
                asked = [i for i in asked if _is_between(samples[i], kept)]
            if asked:
                row = fit(fabric, shipped[fabric], kept, FABRICS)
                out[asked] = errors([samples[i] for i in asked], {**FABRICS, fabric: fabric_of(row)})
    return out


def _is_between(s: Sample, kept: Sequence[Sample]) -> bool:
    sizes = [k.num_bytes for k in kept if (k.kind, k.ranks) == (s.kind, s.ranks)]
    return bool(sizes) and min(sizes) <= s.num_bytes <= max(sizes)


def _figures(log_errors: np.ndarray) -> tuple[str, ...]:
    """n, median, MAPE, bias and P90 as text."""
    known = log_errors[~np.isnan(log_errors)]
    if not len(known):
        return ("0", "", "", "", "")
    sizes = np.abs(np.expm1(known))
    bias = math.expm1(float(known.mean()))
    return (
        str(len(known)),
        f"{np.median(sizes):.1%}",
        f"{sizes.mean():.1%}",
        f"{bias:+.1%}",
        f"{np.quantile(sizes, 0.9):.1%}",
    )


def _ranks_class(s: Sample) -> str:
    if s.nodes == 1:
        return f"{s.ranks} in a node" if s.ranks <= 8 else "more in a domain"
    return f"{s.nodes} nodes" if s.nodes <= 8 else "9-64 nodes" if s.nodes <= 64 else "over 64 nodes"


def _decade(s: Sample) -> str:
    return f"1e{math.floor(math.log10(s.num_bytes))} B"


_VIEWS: dict[str, tuple[Callable[[Sample], str], ...]] = {
    "collective and fabric": (lambda s: s.kind, lambda s: s.fabric),
    "device": (lambda s: s.kind, lambda s: s.device),
    "ranks": (lambda s: s.kind, lambda s: s.fabric, _ranks_class),
    "size": (lambda s: s.kind, lambda s: s.fabric, _decade),
    "source": (lambda s: s.source, lambda s: s.fabric),
}


def report(samples: Sequence[Sample], inside: np.ndarray, held_out: np.ndarray, console: Console) -> None:
    """One table per view."""
    for title, keys in _VIEWS.items():
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, s in enumerate(samples):
            groups[tuple(key(s) for key in keys)].append(i)
        table = Table(title=f"By {title}")
        for name in ("", *("" for _ in keys[1:]), "n", "median", "MAPE", "bias", "P90"):
            table.add_column(name, justify="left" if not name else "right")
        for name in ("held out n", "median", "MAPE", "bias", "P90"):
            table.add_column(name, justify="right")
        for group in sorted(groups):
            at = groups[group]
            table.add_row(*group, *_figures(inside[at]), *_figures(held_out[at]))
        console.print(table)
    covered = tested = 0
    for i, s in enumerate(samples):
        if not math.isnan(held_out[i]):
            spread = seconds_by_bytes(s.kind, s.group, s.levels).quantity(s.num_bytes)
            tested += 1
            covered += abs(held_out[i]) <= math.log(spread.high / spread.mid)
    console.print(f"{covered} of {tested} rows held out lie within the interval of their fabric and collective")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _spreads(sizes: np.ndarray, latency_share: np.ndarray, least: float) -> tuple[float, float]:
    """(spread, latency spread) that hold 90 % of `sizes`, which are factors less 1.

    The first from rows whose time is mostly bytes, the second from what it leaves of the others.
    """
    bytes_rule = latency_share < _LATENCY_RULES
    spread = max(least, float(np.quantile(sizes[bytes_rule], 0.9)) if bytes_rule.sum() >= _LEAST_ROWS else least)
    if bytes_rule.all():
        return spread, 0.0
    left = (sizes[~bytes_rule] - spread) / latency_share[~bytes_rule]
    return spread, max(0.0, float(np.quantile(left, 0.9)))


def _with_errors(name: str, row: Row, samples: list[Sample], inside: np.ndarray, held_out: np.ndarray) -> Row:
    """The row with intervals, the kinds that count as fitted, and what was fitted to what."""
    row = {**row, "spread": dict(row["spread"]), "latency_spread": {"default": 0.0}, "fitted": []}
    notes: dict[str, Any] = {}
    fabrics = {**FABRICS, name: fabric_of(row)}
    for kind in COLLECTIVE_KINDS:
        at = [i for i, s in enumerate(samples) if s.kind == kind]
        if len(at) < _LEAST_ROWS or name in _KEEP_ASSUMED:
            continue
        row["fitted"].append(kind)
        latency_share = np.array([_latency_share(samples[i], fabrics) for i in at])
        tested = ~np.isnan(held_out[at])
        if tested.sum() >= max(_LEAST_ROWS, len(at) // 2):
            sizes = np.expm1(np.abs(held_out[at][tested]))
            spreads = _spreads(sizes, latency_share[tested], _LEAST_SPREAD)
        else:
            sizes = _UNTESTED_FACTOR * np.expm1(np.abs(inside[at]))
            spreads = _spreads(sizes, latency_share, _UNTESTED_SPREAD)
        row["spread"][kind], row["latency_spread"][kind] = spreads
        known = held_out[at][tested]
        notes[kind] = {
            "n": len(at),
            "mape": float(np.abs(np.expm1(inside[at])).mean()),
            "held_out_n": len(known),
            "held_out_mape": float(np.abs(np.expm1(known)).mean()) if len(known) else None,
        }
    if notes:
        row["fit"] = {"sources": sorted({s.source for s in samples}), **notes}
    return _rounded(row)


def _latency_share(s: Sample, fabrics: Mapping[str, Fabric]) -> float:
    """T(0) / T(N) as predicted."""
    of_size = seconds_by_bytes(s.kind, s.group, s.levels, fabrics)
    return of_size.seconds(0.0) / of_size.seconds(s.num_bytes)


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Fits all fabrics that samples hold and writes them all, with the intervals that follow from held-out errors."""
    text = json.loads(path.read_text(encoding="utf-8"))
    for name, row in text["fabrics"].items():
        mine = [s for s in samples if s.fabric == name]
        if not mine:
            continue
        fitted = fit(name, row, mine, FABRICS)
        fabrics: dict[str, Fabric] = {**FABRICS, name: fabric_of(fitted)}
        held_out = held_out_errors(mine, {**rows(), name: fitted}, between=True)
        text["fabrics"][name] = _with_errors(name, fitted, mine, errors(mine, fabrics), held_out)
    for name, like in _LIKE.items():  # links that nobody measured
        if name not in text["fabrics"]:
            continue
        same = {field: text["fabrics"][like][field] for field in ("ring", "p2p", "experts", "efficiency", "free_share")}
        text["fabrics"][name].update(same)
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def main(
    data: Annotated[Path, typer.Option(help="CSV of measured collectives.")],
    write_to: Annotated[Path | None, typer.Option("--write", help=f"Fit, and write to this copy of {DATA}.")] = None,
) -> None:
    """See the docstring of this file."""
    samples, left_out = read_samples(data)
    console = Console(width=160)
    console.print(f"{len(samples)} rows priced; left out:")
    for reason, count in left_out.most_common():
        console.print(f"  {count} {reason}")
    if write_to is not None:
        write(write_to, samples)
        return
    fitted = sum(kind in fabric.fitted for fabric in FABRICS.values() for kind in COLLECTIVE_KINDS)
    console.print(f"{fitted} pairs of fabric and collective are tagged {Tag.FITTED}")
    report(samples, errors(samples, FABRICS), held_out_errors(samples, rows()), console)


if __name__ == "__main__":
    typer.run(main)
