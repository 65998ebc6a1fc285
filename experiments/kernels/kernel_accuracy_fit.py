"""Constants of cost_models.kernels.gpu from timings: coordinate descent on the mean |log(predicted / measured)|.

Attention and 8 or 4-bit products of inference runtimes hold more than the kernel (casts, cache writes): what that costs
is fitted with them (`source_*` in the data) and not part of what training pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.kernels.gpu import (
    BACKWARD_FLOPS,
    DIAGONAL,
    OPERAND_BYTES,
    QUERIES_PER_TILE,
    SPLITS,
    KernelConstants,
    KernelKind,
    both_s,
    data,
    family_of,
    inverse_head,
    least_inverse,
    split_s,
    tiles_s,
)
from experiments.kernels.kernel_accuracy_rows import Timing

Values = dict[str, float]
# parameter -> start, least, most
GEMM: dict[str, tuple[float, float, float]] = {
    "efficiency": (0.8, 0.1, 1.0),
    "fill_depth": (100.0, 1.0, 2000.0),
    "reuse": (20.0, 0.1, 300.0),
    "wave_share": (0.5, 0.01, 1.0),
    "split_share": (1.0, 0.1, 10.0),
    "launch_s": (3e-6, 0.5e-6, 2e-5),
}
CASTS: dict[str, tuple[float, float, float]] = {"source_cast": (1.0, 0.01, 20.0), "source_launch_s": (3e-6, 1e-7, 3e-5)}
ATTENTION: dict[str, tuple[float, float, float]] = {
    "efficiency": (0.7, 0.1, 1.0),
    "fill_depth": (100.0, 1.0, 4000.0),
    "reuse": (20.0, 0.1, 300.0),
    "wave_share": (0.5, 0.01, 1.0),
    "launch_s": (3e-6, 0.5e-6, 2e-5),
}
RUNTIME: dict[str, tuple[float, float, float]] = {
    "source_traffic": (1.0, 0.01, 20.0),
    "source_launch_s": (3e-6, 1e-7, 3e-5),
    "source_factor": (1.0, 0.3, 1.5),
}
BACKWARD: dict[str, tuple[float, float, float]] = {"efficiency": (0.9, 0.3, 1.5), "fill": (1.5, 0.2, 10.0)}
LEAST_ROWS = 20  # to fit all constants; fewer take those of the nearest family
LEAST_OWN_ROWS = 10  # for a device's own factor


@dataclass(frozen=True)
class Fitted:
    """Constants (and what belongs to sources only) of one family and class, and each device's factor."""

    values: Values
    factors: Mapping[str, float] = field(default_factory=dict)
    num_rows: int = 0

    def factor(self, device: str) -> float:
        return self.factors.get(device, 1.0)


def constants(values: Mapping[str, float]) -> KernelConstants:
    """Return the kernel's part of `values`."""
    filled = {"split_share": 1.0, **values}
    return KernelConstants(**{name: filled[name] for name in KernelConstants.__dataclass_fields__})


def units_of(device: str) -> int:
    """Of the catalog's id; of a device that the data do not know, those of its family."""
    shapes = data("devices")
    known = shapes["devices"].get(device)
    return int((known or shapes["families"][family_of(catalog.device(device))])["units"])


def bandwidth_of(device: str) -> float:
    return float(catalog.device(device).memory_bytes_per_s * data("devices")["memory"]["share"])


DTYPE = {KernelKind.HALF: "bfloat16", KernelKind.FP8: "float8", KernelKind.FP4: "float4"}


class Rows:
    """Timings of one family as arrays; `model` predicts them."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self.timings = list(timings)
        self.seconds = np.array([t.seconds for t in timings])
        self.device = np.array([t.device for t in timings])
        self.peak = np.array([catalog.device(t.device).flops(DTYPE[t.kind]) for t in timings])
        self.units = np.array([float(units_of(t.device)) for t in timings])
        self.bandwidth = np.array([bandwidth_of(t.device) for t in timings])

    def take(self, keep: Sequence[bool]) -> Rows:
        return type(self)([t for t, k in zip(self.timings, keep, strict=True) if k])

    def rate(self, fitted: Fitted) -> Any:
        return self.peak / self.units * np.array([fitted.factor(d) for d in self.device])

    def model(self, fitted: Fitted) -> Any:
        raise NotImplementedError

    def logs(self, fitted: Fitted) -> Any:
        """log(predicted / measured)."""
        return np.log(self.model(fitted) / self.seconds)


class Products(Rows):
    """Products: forward and backward of one measurement are up to six of them, each `groups` times in one kernel."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        super().__init__(timings)
        self.sizes = np.zeros((len(timings), 6, 3))
        for i, t in enumerate(timings):
            self.sizes[i, : len(t.products)] = t.products
        self.groups = np.array([float(t.groups) for t in timings])
        self.width = np.array([OPERAND_BYTES[t.kind] for t in timings])
        self.casts = np.array([t.casts for t in timings])

    def model(self, fitted: Fitted) -> Any:
        c, total = constants(fitted.values), np.zeros(len(self.timings))
        tiles = data("devices")["families"][fitted_family(self.timings)]["tiles"]
        for i in range(6):
            used = self.sizes[:, i, 0] > 0
            if not used.any():
                break
            m, n, k = np.where(used[:, None], self.sizes[:, i], 1.0).T
            total += np.where(used, self._one(c, tiles, self.rate(fitted), m, n, k), 0.0)
        m, _, k = self.sizes[:, 0].T
        cast_s = fitted.values.get("source_cast", 0.0) * m * k * (2 + self.width) / self.bandwidth
        return total + self.casts * (cast_s + fitted.values.get("source_launch_s", 0.0))

    def _one(self, c: KernelConstants, tiles: Any, rate: Any, m: Any, n: Any, k: Any) -> Any:
        best = np.full(len(m), np.inf)
        least = least_inverse(tiles)
        for high, wide in tiles:
            count = self.groups * np.ceil(m / high) * np.ceil(n / wide) / self.units
            open_ = np.ones(len(m), bool)
            for split in SPLITS:
                seconds = tiles_s(c, count * split, high * wide, k / split, 1 / high + 1 / wide - least, rate)
                seconds = seconds + split_s(c, split, self.groups * m * n, self.bandwidth)
                best = np.where(open_, np.minimum(best, seconds), best)
                open_ &= count * split < 1
        moved = self.groups * ((m + n) * k * self.width + 2 * m * n)
        return both_s(best, moved / self.bandwidth) + c.launch_s


class Attention(Rows):
    """Attention; `again` is how the backward differs from the forward."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        super().__init__(timings)
        self.again: Mapping[str, float] = {name: bound[0] for name, bound in BACKWARD.items()}
        self.heads, self.queries, self.dim, self.moved = (
            np.array([getattr(t, name) for t in timings]) for name in ("heads", "queries", "head_dim", "head_bytes")
        )
        self.keys = np.array([t.flops / (4.0 * t.heads * t.queries * t.head_dim) for t in timings])
        self.keys += DIAGONAL * np.array([t.causal for t in timings])
        self.inverse = np.array([inverse_head(t.head_dim) for t in timings])
        self.backward = np.array([t.backward for t in timings])
        self.runtime = np.array([t.runtime for t in timings])

    def with_again(self, again: Mapping[str, float]) -> Attention:
        self.again = again
        return self

    def take(self, keep: Sequence[bool]) -> Attention:
        return Attention([t for t, k in zip(self.timings, keep, strict=True) if k]).with_again(self.again)

    def model(self, fitted: Fitted) -> Any:
        c, v = constants(fitted.values), fitted.values
        rate = self.rate(fitted) * np.where(self.runtime, v.get("source_factor", 1.0), 1.0)
        tiles = self.heads * np.ceil(self.queries / QUERIES_PER_TILE) / self.units
        area, inverse = 2.0 * QUERIES_PER_TILE * self.dim, self.inverse
        traffic_s = self.moved / self.bandwidth
        forward = both_s(tiles_s(c, tiles, area, self.keys, inverse, rate), traffic_s) + c.launch_s
        efficiency = min(1.0, c.efficiency * self.again["efficiency"])
        b = replace(c, efficiency=efficiency, fill_depth=c.fill_depth * self.again["fill"])
        compute_s = tiles_s(b, tiles, area * BACKWARD_FLOPS, self.keys, inverse, rate)
        backward = both_s(compute_s, 2 * traffic_s) + c.launch_s
        around = self.runtime * (v.get("source_traffic", 0.0) * traffic_s + v.get("source_launch_s", 0.0))
        return forward + self.backward * backward + around


def fitted_family(timings: Sequence[Timing]) -> str:
    found = family_of(catalog.device(timings[0].device))
    if found is None:
        raise ValueError(f"{timings[0].device} is no accelerator")
    return found


def descend(
    loss: Callable[[Values], float], start: Values, bounds: Mapping[str, tuple[float, float, float]]
) -> tuple[Values, float]:
    """Least `loss` by steps of one parameter at a time, multiplied or divided; deterministic."""
    best, steps = dict(start), dict.fromkeys(bounds, 0.3)
    least = loss(best)
    for _ in range(80):
        for name, (_, low, high) in bounds.items():
            for sign in (1, -1):
                moved = {**best, name: min(high, max(low, best[name] * math.exp(sign * steps[name])))}
                value = loss(moved)
                if value < least - 1e-7:
                    best, least = moved, value
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
        if max(steps.values()) < 0.004:
            break
    return best, least


def fit(rows: Rows, bounds: Mapping[str, tuple[float, float, float]], held: Values | None = None) -> Fitted:
    """Constants and factors of devices (with LEAST_OWN_ROWS; their weighted mean is 1). `held`: values not fitted."""
    free = {name: bound for name, bound in bounds.items() if name not in (held or {})}
    values: Values = {**{name: bound[0] for name, bound in free.items()}, **(held or {})}
    factors: dict[str, float] = {}
    names, counts = np.unique(rows.device, return_counts=True)
    own = [str(d) for d, n in zip(names, counts, strict=True) if n >= LEAST_OWN_ROWS]
    for round_ in range(3):
        values, _ = descend(lambda v, f=factors: float(np.mean(np.abs(rows.logs(Fitted(v, f))))), values, free)  # type: ignore[misc]
        if round_ == 2 or not own:
            break
        logs = rows.logs(Fitted(values, factors))
        raw = {d: math.log(factors.get(d, 1.0)) + float(np.median(logs[rows.device == d])) for d in own}
        # a factor never lifts a device above its peak
        mean, most = sum(raw.values()) / len(raw), -math.log(values["efficiency"])
        factors = {d: math.exp(min(most, r - mean)) for d, r in raw.items()}
    return Fitted(values, factors, len(rows.timings))
