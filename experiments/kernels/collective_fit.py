"""Least squares of the constants of one fabric on measured collectives: Levenberg-Marquardt on log time, robust.

Positive constants are fitted by their logarithm, shares between 0 and 1 by their logit. Thresholds, where the
library changes its path, are taken from a short list, one after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoplan.cost_models.hardware.nccl import Fabric, fabric_of
from autoplan.cost_models.network.collectives import Curve, seconds_by_bytes
from experiments.kernels.collective_rows import Sample

_OUTLIER = 0.15  # errors beyond this count less than their square (soft L1)
_SHARES = ("free_share", "efficiency")
THRESHOLDS = {
    "switch_bytes": (0.0, 0.27e6, 0.4e6, 0.55e6, 0.8e6, 1.1e6, 1.6e6, 2.3e6),
    "nvls_switch_bytes": (0.8e6, 1.5e6, 3e6, 6e6, 1.2e7),
}
LEAST_ROWS = 8  # of a fabric, to fit its constants at all
Row = dict[str, Any]
# where fits begin: NCCL's own table of latencies (src/graph/tuning.cc, in us; hops over the latency of the level) and
# round shares of the bandwidth. (table, protocol) -> base, hop, efficiency, chunk
_START: Mapping[tuple[str, str], tuple[float, float, float, float]] = {
    ("ring", "LL"): (6.6e-6, 0.8, 0.05, 0.0),
    ("ring", "LL128"): (14e-6, 2.5, 0.5, 0.3),
    ("ring", "Simple"): (8.4e-6, 4.5, 0.8, 0.7),
    ("tree", "LL"): (6.8e-6, 0.4, 0.15, 0.0),
    ("tree", "LL128"): (14e-6, 0.7, 0.5, 0.3),
    ("tree", "Simple"): (8.4e-6, 1.1, 0.9, 0.7),
    ("p2p", "LL"): (6.6e-6, 0.0, 0.02, 0.0),
    ("p2p", "Simple"): (14e-6, 0.0, 0.7, 0.5),
    ("experts", "Simple"): (40e-6, 0.0, 0.6, 0.5),
}
_START_NVLS = {"base_s": 25e-6, "hop": 1.0, "efficiency": 0.65, "chunk": 0.5}
_SCALES = (1.0, 2.0)  # of the latencies; there are several minima
_START_SHARE, _START_FACTOR = 0.7, 0.97


def started(row: Row, scale: float) -> Row:
    """The row with its constants set back to where fits begin, latencies times `scale`; which paths it has, stays."""
    out = copy.deepcopy(row)
    for (table, protocol), values in _START.items():
        if protocol in out[table]:
            base, hop, share, chunk = values
            out[table][protocol] = {"base_s": base * scale, "hop": hop * scale, "efficiency": share, "chunk": chunk}
    if out["nvls"] is not None:
        out["nvls"] = dict(_START_NVLS)
    for table, value in (("free_share", _START_SHARE), ("efficiency", _START_FACTOR)):
        out[table] = {kind: given if given == 1.0 else value for kind, given in out[table].items()}
    return out


def _names(row: Row, kinds: frozenset[str]) -> list[tuple[str, ...]]:
    """Constants that measurements of these kinds can tell: (table, protocol, constant) or (table, kind)."""
    out: list[tuple[str, ...]] = []
    tables = {"ring": {"all_reduce", "all_gather", "reduce_scatter"}, "tree": {"all_reduce"}, "p2p": {"all_to_all"}}
    tables["experts"] = {"ep_dispatch", "ep_combine"}
    for table, of in tables.items():
        if kinds & of and not (table == "ring" and row["tree"]):
            for protocol, path in row[table].items():
                out += [(table, protocol, name) for name, value in path.items() if value > 0]
    if row["nvls"] is not None and "all_reduce" in kinds:
        out += [("nvls", name) for name, value in row["nvls"].items() if value > 0 and name != "hop"]
    for table in ("efficiency", "free_share"):
        out += [(table, kind) for kind in row[table] if kind in kinds and row[table][kind] not in (0.0, 1.0)]
    out += [("by_ranks", str(i)) for i, (_, factor) in enumerate(row["by_ranks"]) if factor != 1.0]
    return out


def _is_share(name: tuple[str, ...]) -> bool:
    return name[0] == "free_share" or name[-1] == "efficiency"


def _get(row: Row, name: tuple[str, ...]) -> float:
    if name[0] == "by_ranks":
        return float(row["by_ranks"][int(name[1])][1])
    value: Any = row
    for part in name:
        value = value[part]
    return float(value)


def _set(row: Row, name: tuple[str, ...], value: float) -> None:
    if name[0] == "by_ranks":
        row["by_ranks"][int(name[1])][1] = value
        return
    at: Any = row
    for part in name[:-1]:
        at = at[part]
    at[name[-1]] = value
    if name[0] in _SHARES and name[1] == "all_gather":
        at["broadcast"] = value  # the same path; nobody measured it


def errors(samples: Sequence[Sample], fabrics: Mapping[str, Fabric]) -> np.ndarray:
    """log(predicted / measured) of each sample."""
    curves: dict[tuple[Any, ...], Curve] = {}
    out = np.empty(len(samples))
    for i, s in enumerate(samples):
        key = (s.kind, s.ranks, s.levels)
        if key not in curves:
            curves[key] = seconds_by_bytes(s.kind, s.group, s.levels, fabrics)
        out[i] = math.log(curves[key].seconds(s.num_bytes) / s.seconds)
    return out


def _loss(r: np.ndarray) -> float:
    return float(np.sum(2 * _OUTLIER**2 * (np.sqrt(1 + (r / _OUTLIER) ** 2) - 1)))


def _descend(
    name: str, row: Row, samples: Sequence[Sample], fabrics: Mapping[str, Fabric], rounds: int
) -> tuple[Row, float]:
    names = _names(row, frozenset(s.kind for s in samples))
    share = np.array([_is_share(n) for n in names])
    start = np.array([_get(row, n) for n in names])
    x = np.where(share, np.log(start / np.maximum(1e-12, 1 - np.minimum(start, 0.999))), np.log(start))
    prior = x.copy()

    def of(x: np.ndarray) -> Row:
        new = copy.deepcopy(row)
        values = np.where(share, 1 / (1 + np.exp(-x)), np.exp(np.clip(x, -30, 30)))
        for n, value in zip(names, values, strict=True):
            _set(new, n, float(value))
        return new

    def residuals(x: np.ndarray) -> np.ndarray:
        r = errors(samples, {**fabrics, name: fabric_of(of(x))})
        # a weak pull to where it began keeps constants that no sample tells from running away
        return np.concatenate([r, 0.02 * (x - prior)])

    r = residuals(x)
    best, damping = _loss(r), 1e-2
    for _ in range(rounds):
        jacobian = np.empty((len(r), len(x)))
        for j in range(len(x)):
            moved = x.copy()
            moved[j] += 1e-4
            jacobian[:, j] = (residuals(moved) - r) / 1e-4
        weight = 1 / np.sqrt(1 + (r / _OUTLIER) ** 2)
        hessian = jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * r)
        improved = False
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * (np.diag(np.diag(hessian)) + 1e-6 * np.eye(len(x))), gradient)
            new = x - np.clip(step, -1.0, 1.0)
            r_new = residuals(new)
            loss = _loss(r_new)
            if loss < best:
                improved = best - loss > 1e-5 * best
                x, r, best, damping = new, r_new, loss, damping / 4
                break
            damping *= 4
        if not improved:
            break
    return of(x), best


def fit(name: str, row: Row, samples: Sequence[Sample], fabrics: Mapping[str, Fabric]) -> Row:
    """The row of fabric `name` with its constants fitted to `samples`; as it is if there are too few."""
    if len(samples) < LEAST_ROWS:
        return row
    held = frozenset(s.kind for s in samples)
    best, least = row, math.inf
    for scale in _SCALES:
        begin, kept = started(row, scale), copy.deepcopy(row)  # what no sample tells stays as it is
        for constant in _names(row, held):
            _set(kept, constant, _get(begin, constant))
        found, loss = _with_thresholds(name, kept, samples, fabrics)
        if loss < least:
            best, least = found, loss
    return best


def _with_thresholds(
    name: str, row: Row, samples: Sequence[Sample], fabrics: Mapping[str, Fabric]
) -> tuple[Row, float]:
    best, loss = _descend(name, row, samples, fabrics, 40)
    for threshold, values in THRESHOLDS.items():
        for value in values if row[threshold] else ():
            if value != best[threshold]:
                tried, at = _descend(name, {**copy.deepcopy(best), threshold: value}, samples, fabrics, 12)
                if at < loss:
                    best, loss = tried, at
    return best, loss
