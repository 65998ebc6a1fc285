"""Predicted against published kernel timings: products, grouped products, attention; and the fit of their constants.

    python -m experiments.kernels.kernel_accuracy --data FILE.csv [--fit] [--json FILE]

Per operation, device, precision and source: errors (predicted / measured - 1) of the constants in profiles/kernels, and
of constants fitted without that source (held out: what is predicted for it comes from other sources of its family, or
with fewer than 20 rows of those from the nearest family). `--fit` fits anew and writes profiles/kernels/*.json first.
The data are short bursts: the predictions here are without `sustained`, the share of a burst's speed that lasts.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.kernels import gpu as kernels
from autoplan.cost_models.kernels.gpu import KernelKind
from autoplan.errors import PinError
from experiments.kernels.kernel_accuracy_fit import (
    ATTENTION,
    BACKWARD,
    CASTS,
    GEMM,
    LEAST_ROWS,
    RUNTIME,
    Attention,
    Fitted,
    Products,
    Rows,
    descend,
    fit,
)
from experiments.kernels.kernel_accuracy_rows import Timing, read_timings

_log = logging.getLogger(__name__)
FOLDER = Path(__file__).resolve().parents[2] / "profiles" / "kernels"
OLD_KERNEL = ("hopper", "FlashAttention FA2")  # of an older device: fits the backward's share, not the family
ONE_SOURCE = 2.0  # times the in-sample error, where no other source of the family could hold a row out
# Of whole layers with sorting and copies, and of 2024's kernels: reported, but no part of the factor.
NOT_KERNELS = frozenset({"nnscaler"})
_PAPERS = (
    "ai-dynamo/aiconfigurator systems/data (2026), stas00/ml-engineering compute/accelerator (MAMF), "
    "deepseek-ai/DeepGEMM@a6d97a1, Dao-AILab/flash-attention benchmark images (read by eye), pytorch/ao "
    "prototype/moe_training, microsoft/nnscaler deepseek_coder_v2_lite"
)
_HOW = (
    "experiments/kernels/kernel_accuracy.py --fit: least mean |log(predicted / measured)| per family and precision; "
    "held_out: "
    "every source predicted without its own rows; p90: of the relative errors. source_*: costs that only the sources "
    "of inference runtimes hold (casts, cache writes, launches)"
)


@dataclass(frozen=True)
class Line:
    """Errors of one operation, device, precision and source; held out: NaN where no other constants exist."""

    op: str
    device: str
    kind: str
    source: str
    n: int
    median: float
    mape: float
    bias: float
    p90: float
    held_out_mape: float
    held_out_p90: float


def errors(logs: Any) -> tuple[float, float, float]:
    """Median and mean relative error, and the 90 % quantile (higher of the neighbours)."""
    wrong = np.abs(np.expm1(logs))
    return float(np.median(wrong)), float(np.mean(wrong)), float(np.quantile(wrong, 0.9, method="higher"))


def held_out(rows: Rows, again: Callable[[Rows], Fitted], nearest: Callable[[], Fitted | None]) -> Any:
    """log(predicted / measured) of every row with constants that its source had no part in; NaN if there are none."""
    logs = np.full(len(rows.timings), np.nan)
    for source in sorted({t.source for t in rows.timings}):
        mine = np.array([t.source == source for t in rows.timings])
        rest = [bool(x) for x in ~mine]
        fitted = again(rows.take(rest)) if sum(rest) >= LEAST_ROWS else nearest()
        if fitted is not None:
            logs[mine] = rows.take([bool(x) for x in mine]).logs(fitted)
    return logs


def listed_family(device: str) -> str | None:
    """The family of a device that the data of profiles/kernels name; None for others, which only inherit."""
    known = kernels.data("devices")["devices"].get(device)
    return None if known is None or known.get("inherited") else str(known["family"])


def nearest_family(family: str, among: Iterable[str]) -> str | None:
    """Of `among` without `family`, the one of the nearest 16-bit peak; None if there is no other."""
    peaks = kernels.data("devices")["families"]
    ours = peaks[family]["half_peak_flops"]
    others = [f for f in among if f != family]
    return min(others, key=lambda f: abs(math.log(peaks[f]["half_peak_flops"] / ours)), default=None)


def of_family(timings: Sequence[Timing], op: str, family: str) -> list[Timing]:
    return [t for t in timings if t.op == op and listed_family(t.device) == family]


# -- fitting -----------------------------------------------------------------------------------------------------------


class Study:
    """All constants from all timings, with held-out errors."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self.timings = timings
        self.gemm: dict[tuple[str, KernelKind], Fitted] = {}
        self.attention: dict[str, Fitted] = {}
        self.held: dict[int, float] = {}  # id of a timing -> log error without its source
        self.families = list(kernels.data("devices")["families"])
        self._gemm()
        self.again, self.again_p90 = self._backward()
        self._attention()
        self.grouped_factor, self.grouped_p90 = self._grouped()
        self.sustained = self._sustained()

    def _bounds(self, kind: KernelKind) -> dict[str, tuple[float, float, float]]:
        return GEMM if kind is KernelKind.HALF else {**GEMM, **CASTS}

    def _gemm(self) -> None:
        for kind in KernelKind:  # 16 bits first: the launch of its kernels is that of all
            for family in self.families:
                rows = [t for t in of_family(self.timings, "gemm", family) if t.kind is kind]
                if len(rows) >= LEAST_ROWS:
                    self.gemm[family, kind] = self._fit_gemm(family, kind)(Products(rows))
        for (family, kind), _ in list(self.gemm.items()):
            rows_ = Products([t for t in of_family(self.timings, "gemm", family) if t.kind is kind])
            logs = held_out(rows_, self._fit_gemm(family, kind), lambda f=family, k=kind: self._nearest(f, k))  # type: ignore[misc]
            self._keep(rows_, logs)

    def _fit_gemm(self, family: str, kind: KernelKind) -> Callable[[Rows], Fitted]:
        held = None if kind is KernelKind.HALF else {"launch_s": self.gemm[family, KernelKind.HALF].values["launch_s"]}
        return lambda rows: fit(rows, self._bounds(kind), held)

    def _nearest(self, family: str, kind: KernelKind) -> Fitted | None:
        """Return what an unknown device of this peak would inherit: constants of the nearest family, scaled."""
        near = nearest_family(family, [f for f, k in self.gemm if k is kind])
        if near is None:
            return None
        found, half = self.gemm[near, kind], self.gemm[near, KernelKind.HALF]
        ours = {t.device for t in of_family(self.timings, "gemm", family)}
        scale = {d: catalog.device(d).achievable.mid / half.values["efficiency"] for d in ours}
        return replace(found, factors=scale)

    def _keep(self, rows: Rows, logs: Any) -> None:
        self.held.update({id(t): float(x) for t, x in zip(rows.timings, logs, strict=True)})

    def _backward(self) -> tuple[dict[str, float], float]:
        """The backward against the forward, of the one kernel that has both; held out: its rows of other families."""
        family, source = OLD_KERNEL
        rows = Attention([t for t in of_family(self.timings, "attention", family) if t.source == source])
        if not len(rows.timings):
            return {name: bound[0] for name, bound in BACKWARD.items()}, 0.3
        bounds = {**{f"again_{k}": v for k, v in BACKWARD.items()}, **ATTENTION}
        launch = self.gemm[family, KernelKind.HALF].values["launch_s"]
        del bounds["launch_s"]

        def split(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
            again = {k[6:]: v for k, v in values.items() if k.startswith("again_")}
            return again, {k: v for k, v in values.items() if not k.startswith("again_")}

        def loss(values: dict[str, float]) -> float:
            again, core = split(values)
            return float(np.mean(np.abs(rows.with_again(again).logs(Fitted(core)))))

        values, _ = descend(loss, {**{k: v[0] for k, v in bounds.items()}, "launch_s": launch}, bounds)
        again, core = split(values)
        fitted = rows.with_again(again).logs(Fitted(core))
        self._keep(rows, np.full(len(rows.timings), np.nan))
        return again, errors(fitted)[2]

    def attention_rows(self, family: str) -> list[Timing]:
        found = of_family(self.timings, "attention", family)
        return [t for t in found if (family, t.source) != OLD_KERNEL]

    def _attention(self) -> None:
        for family in self.families:
            timings = self.attention_rows(family)
            if len(timings) < LEAST_ROWS:
                continue
            rows = Attention(timings).with_again(self.again)
            launch = {"launch_s": self.gemm[family, KernelKind.HALF].values["launch_s"]}

            def again(rows: Rows, launch: dict[str, float] = launch) -> Fitted:
                """The runtimes' kernel is taken for the training kernel where no row of one is there."""
                only = {} if {t.runtime for t in rows.timings} == {True, False} else {"source_factor": 1.0}
                return fit(rows, {**ATTENTION, **RUNTIME}, {**launch, **only})

            self.attention[family] = again(rows)
            self._keep(rows, held_out(rows, again, lambda f=family: self._nearest_attention(f)))  # type: ignore[misc]

    def _nearest_attention(self, family: str) -> Fitted | None:
        near = nearest_family(family, self.attention)
        return None if near is None else replace(self.attention[near], factors={})

    def _grouped(self) -> tuple[float, float]:
        """One factor on the efficiency of a product: the geometric mean over sources of their medians."""
        by_source: dict[str, list[tuple[Timing, float]]] = {}
        for (family, kind), fitted in self.gemm.items():
            timings = [t for t in of_family(self.timings, "grouped", family) if t.kind is kind]
            if timings:
                for t, x in zip(timings, Products(timings).logs(fitted), strict=True):
                    by_source.setdefault(t.source, []).append((t, float(x)))
        medians = {s: float(np.median([x for _, x in rows])) for s, rows in by_source.items() if s not in NOT_KERNELS}
        if not medians:
            return 1.0, 1.0
        for source, rows in by_source.items():
            others = [m for s, m in medians.items() if s != source]
            shift = sum(others) / len(others) if others else math.nan
            self.held.update({id(t): x - shift for t, x in rows})
        logs = np.array([self.held[id(t)] for s, rows in by_source.items() if s in medians for t, _ in rows])
        return min(1.0, math.exp(sum(medians.values()) / len(medians))), errors(logs)[2]

    def _sustained(self) -> dict[str, Any]:
        """Sustained acceptance values over the fitted asymptote of the same device."""
        found = {}
        for t in self.timings:
            fitted = self.gemm.get((listed_family(t.device) or "", t.kind))
            if t.op == "sustained" and fitted is not None:
                peak = catalog.device(t.device).flops("bfloat16")
                found[t.device] = t.flops / (peak * fitted.values["efficiency"] * fitted.factor(t.device))
        logs = [math.log(x) for x in found.values()]
        mean = sum(logs) / len(logs) if logs else 0.0
        return {
            "factor": _round(min(1.0, math.exp(mean))),
            "spread": _round(max([0.05, *(abs(x - mean) for x in logs)])),
            "n": len(logs),
            "source": "sustained acceptance values of Azure/ai-infrastructure-on-azure (ubergemm) over what a short "
            "burst of large products reaches by these constants, geometric mean: " + _listing(found),
        }

    # -- as data

    def stats(self, rows: Rows, fitted: Fitted) -> dict[str, float | str]:
        logs, held = rows.logs(fitted), np.array([self.held[id(t)] for t in rows.timings])
        _, mape, p90 = errors(logs)
        _, held_mape, held_p90 = errors(held)
        found = {"mape": mape, "p90": p90, "held_out_mape": held_mape, "held_out_p90": held_p90}
        found = {k: v for k, v in found.items() if not math.isnan(v)}
        sources = Counter(t.source for t in rows.timings)
        # held out, a family with one large source has only another family's constants
        one = fitted.num_rows - max(sources.values()) < LEAST_ROWS or math.isnan(held_p90)
        found["error"] = ONE_SOURCE * p90 if one else held_p90
        basis = "twice the in-sample p90: one source" if one else "held_out_p90"
        return {"n": fitted.num_rows, **{k: _round(v) for k, v in found.items()}, "error_is": basis}

    def gemm_data(self, date: str) -> dict[str, Any]:
        families: dict[str, Any] = {}
        devices: dict[str, Any] = {}
        for (family, kind), fitted in self.gemm.items():
            rows = Products([t for t in of_family(self.timings, "gemm", family) if t.kind is kind])
            families.setdefault(family, {})[kind] = {**_rounded(fitted.values), **self.stats(rows, fitted)}
            for device, factor in fitted.factors.items():
                own = devices.setdefault(device, {"achievable_fraction": catalog.device(device).achievable_fraction})
                own[kind] = {"factor": _round(factor), "n": int(np.sum(rows.device == device))}
        grouped = {
            "factor": _round(self.grouped_factor),
            "held_out_p90": _round(self.grouped_p90),
            "n": sum(t.op == "grouped" for t in self.timings),
            "source": "geometric mean over DeepGEMM (forward) and torchao (with backward, 8 bits with casts)",
        }
        head = {"source": _PAPERS, "date": date, "how": _HOW, "sustained": self.sustained, "grouped": grouped}
        # no row of the table: what a library's authors published beside it stays
        head["training"] = kernels.data("gemm")["training"]
        return {**head, **_with_others("gemm", families, devices)}

    def attention_data(self, date: str) -> dict[str, Any]:
        families: dict[str, Any] = {}
        devices: dict[str, Any] = {}
        for family, fitted in self.attention.items():
            rows = Attention(self.attention_rows(family)).with_again(self.again)
            families[family] = {"split_share": 1.0, **_rounded(fitted.values), **self.stats(rows, fitted)}
            for device, factor in fitted.factors.items():
                devices[device] = {"factor": _round(factor), "n": int(np.sum(rows.device == device))}
        known = _with_others("attention", families, devices)["families"]
        for family in self.families:  # no row of it: of the nearest, and no device of it is fitted
            if family not in families and not known.get(family, {}).get("n"):
                near = nearest_family(family, self.attention)
                if near is None:
                    raise PinError("the data hold no attention of any listed device: nothing to inherit")
                families[family] = {**families[near], "n": 0, "inherits": near}
        both = sorted({str(listed_family(t.device)) for t in self.timings if t.op == "attention" and t.backward})
        backward = {
            **_rounded(self.again),
            "held_out_p90": _round(self.again_p90),
            "families": both,
            "source": "FlashAttention-2 on H100, forward against forward and backward; the error is in-sample",
        }
        # no row of the table: shares of older kernels stay
        older = kernels.data("attention")["older"]
        head = {"source": _PAPERS, "date": date, "how": _HOW, "backward": backward, "older": older}
        return {**head, **_with_others("attention", families, devices)}


def _with_others(kind: str, families: Mapping[str, Any], devices: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return fitted constants with those in use of families and devices of which the table has no row.

    The timings of an RTX PRO 6000 (family rtx_blackwell) are aiconfigurator's, systems/data/rtx_pro_6000_server.
    """
    in_use = kernels.data(kind)
    return {"families": {**in_use["families"], **families}, "devices": {**in_use["devices"], **devices}}


def _round(x: float) -> float:
    return float(f"{x:.4g}")


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {k: _round(v) for k, v in values.items()}


def _listing(found: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {v:.2f}" for k, v in found.items()) or "none in the data"


# -- comparing ---------------------------------------------------------------------------------------------------------


def stored(device: str, kind: KernelKind, op: str) -> Fitted | None:
    """The constants that the planner uses for a device, from profiles/kernels; None where it has none of the kind."""
    known = kernels.kernels_of(catalog.device(device))
    if known is None:
        return None
    if op == "attention":
        table = kernels.data("attention")["families"][known.family]
        fitted = known.attention
    else:
        table = kernels.data("gemm")["families"][known.family].get(kind)
        fitted = known.gemm.get(kind)  # type: ignore[assignment]
        if table is None:
            return None
    values = {k: float(v) for k, v in table.items() if isinstance(v, float | int)}
    factor = fitted.constants.efficiency / values["efficiency"]
    if op == "grouped":
        factor *= float(kernels.data("gemm")["grouped"]["factor"])
    return Fitted(values, {device: factor}, int(values["n"]))


def compare(timings: Sequence[Timing], held: Mapping[int, float]) -> Iterator[Line]:
    """Errors by operation, device, precision and source."""
    groups: dict[tuple[str, str, KernelKind, str], list[Timing]] = {}
    for t in timings:
        if t.op != "sustained":
            groups.setdefault((t.op, t.device, t.kind, t.source), []).append(t)
    again = kernels.data("attention")["backward"]
    for (op, device, kind, source), rows in sorted(groups.items()):
        fitted = stored(device, kind, op)
        if fitted is None:
            continue
        table = Attention(rows).with_again(again) if op == "attention" else Products(rows)
        logs = table.logs(fitted)
        median, mape, p90 = errors(logs)
        without = np.array([held.get(id(t), math.nan) for t in rows])
        _, held_mape, held_p90 = errors(without) if not np.isnan(without).any() else (math.nan,) * 3
        bias = float(np.expm1(np.median(logs)))
        yield Line(op, device, kind, source, len(rows), median, mape, bias, p90, held_mape, held_p90)


def show(lines: Sequence[Line]) -> None:
    """One table."""
    table = Table("op", "device", "class", "source", "n", "median", "MAPE", "bias", "P90", "held-out MAPE", "P90")
    for line in lines:
        figures = (line.median, line.mape, line.bias, line.p90, line.held_out_mape, line.held_out_p90)
        cells = ["" if math.isnan(x) else f"{x:+.1%}" if i == 2 else f"{x:.1%}" for i, x in enumerate(figures)]
        table.add_row(line.op, line.device, line.kind, line.source, str(line.n), *cells)
    Console(width=160).print(table)


def main(
    data: Annotated[Path, typer.Option(help="CSV of measured kernels", exists=True, dir_okay=False)],
    fit_anew: Annotated[bool, typer.Option("--fit", help="fit anew and write profiles/kernels/*.json")] = False,
    date: Annotated[str, typer.Option(help="written with the constants")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures here")] = None,
) -> None:
    """Compare the constants of profiles/kernels with published timings."""
    timings, skipped = read_timings(data)
    for reason, count in skipped.items():
        _log.warning("%d rows left out: %s", count, reason)
    study = Study(timings)
    if fit_anew:
        stamp = date or kernels.data("devices")["date"]
        for name, content in (("gemm", study.gemm_data(stamp)), ("attention", study.attention_data(stamp))):
            (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        kernels.data.cache_clear()
        kernels.kernels_of.cache_clear()
    lines = list(compare(timings, study.held))
    show(lines)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=1), encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    typer.run(main)
