"""Fit the global constants of the cost model to measured training steps.

    fitted = fit(steps, price, Constants.shipped(), least_groups=3)
    fitted.constants, fitted.rows["overlap"].groups, fitted.after
    held_out_errors(fitted, steps, price)                # every group predicted by a fit without it

The objective to minimise, over z = log(constant):

    sum over groups of mean over their steps of huber(r / SCALE) + 1/2 sum over constants of ((z - z_prior) / width)^2

with r = log(predicted / measured). Steps of one group (one campaign: the same people, machines and software) err
together, so a group counts as one observation, however many steps it has. The prior is log-normal: constants that the
steps do not determine stay where they were. Huber (1964): least absolute error beyond HUBER x SCALE, so that no outlier
decides.

Each round takes finite differences d r / d z, solves the linear model by iteratively reweighted least squares within
the bounds and a trust region (Conn, Gould and Toint, 2000), and prices the result; a round that does not improve halves
the region. A constant is fitted only if steps of `least_groups` groups depend on it. The fit is deterministic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models.arrays import Array
from autoplan.cost_models.constants import Constants
from autoplan.errors import AutoplanError, ProfileError

# Assumed, as priors are. SCALE: how far (log) a group's steps lie from a right model, which weighs groups against the
# prior: the order by which repeated runs of one configuration in different clusters differ.
SCALE = 0.1
HUBER = 0.5  # in units of SCALE: smaller errors count squared
LEAST_ELASTICITY = 0.02  # of a step's time to a constant: smaller ones do not determine the constant
LEAST_GROUPS = 3
_DIFFERENCE = 0.04  # of a constant's logarithm: wide enough to see past a maximum of two times
_RADIUS = 0.3  # of the trust region, in logarithms
_LEAST_RADIUS = 0.02
_SETTLED = 2e-3  # the last round is the first that improves the objective by less (relative)
_REWEIGHTINGS = 60
# For fits without a group: how far the linear model is trusted without true prices, and the tried shares of the way.
_NEAR = 0.1
_SHARES = (1.0, 0.6, 0.3, 0.0)
_CLOSE = 1e-9


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: seconds, and the group that it counts with."""

    name: str
    group: str
    measured_s: float

    def __post_init__(self) -> None:
        if not 0 < self.measured_s < math.inf:
            raise AutoplanError(
                f"step {self.name}: measured_s={self.measured_s!r} must be a positive number of seconds"
            )


# Predicted seconds of steps, by their index, at given constants: one array per question. All questions of a round come
# at once, so that they can be answered in parallel.
Question = tuple[Constants, Sequence[int]]
StepPrice = Callable[[Sequence[Question]], Sequence[Sequence[float]]]


def priced_by(functions: Sequence[Callable[[Constants], float]]) -> StepPrice:
    """Return the price function of steps that are given as a function each."""
    return lambda questions: [[functions[i](constants) for i in steps] for constants, steps in questions]


@dataclass(frozen=True)
class FittedRange:
    """The range of a constant, and the width (log) of the prior around its value."""

    low: float
    high: float
    width: float


# By name, the first pattern that matches. A share cannot pass the whole; a little above 1 where the whole is itself
# fitted. Widths: 5 to 10 % where hardware settles it, a factor of 2 where software does.
_RANGES: tuple[tuple[str, FittedRange], ...] = (
    (r"sustained_.*", FittedRange(0.6, 1.0, 0.07)),
    (r"memory_share", FittedRange(0.5, 1.0, 0.1)),
    (r"(attention|network)_share", FittedRange(0.4, 1.2, 0.15)),
    (r".*_share", FittedRange(0.2, 1.2, 0.2)),
    (r"power_exponent", FittedRange(0.1, 1.5, 0.3)),
    (r"grouped_product_s", FittedRange(1e-7, 1e-4, 0.7)),
    (r"imbalance", FittedRange(1.0, 2.5, 0.2)),
    (r"host_fp8", FittedRange(1.0, 5.0, 0.3)),
    (r"host_.*_s", FittedRange(1e-6, 2e-2, 0.7)),
    (r"overlap|(block_)?contention|.*_hidden", FittedRange(0.05, 1.0, 0.4)),
    (r".*", FittedRange(1e-12, 1e12, 0.3)),
)


def range_of(name: str, value: float) -> FittedRange:
    """Return the range of a constant, wide enough for its value."""
    found = next(r for pattern, r in _RANGES if re.fullmatch(pattern, name))
    return FittedRange(min(found.low, value), max(found.high, value), found.width)


@dataclass(frozen=True)
class FittedConstant:
    """The result of the fit for one constant.

    Attributes:
        before, value: before and after the fit; equal if it is not `fitted`.
        groups: the groups with steps that depend on it.
        num_steps: how many steps depend on it.
        standard_error: of its logarithm (relative, where small), from the curvature of the objective; close to
            `prior_width` if the steps do not determine it.
        at_bound: it ended at the end of its range.
    """

    name: str
    before: float
    value: float
    fitted: bool
    groups: tuple[str, ...]
    num_steps: int
    standard_error: float
    prior_width: float
    at_bound: bool

    @property
    def determined(self) -> bool:
        """True if the steps say at least as much about it as the prior does (which halves the variance)."""
        return self.fitted and self.standard_error < self.prior_width / math.sqrt(2)


@dataclass(frozen=True)
class Fitted:
    """Constants, a row for each, and log(predicted / measured) of every step before and after the fit."""

    constants: Constants
    rows: Mapping[str, FittedConstant]
    before: Array
    after: Array
    rounds: int
    linear: _Linear


@dataclass(frozen=True)
class HeldOut:
    """The results of fits without one group each.

    Attributes:
        errors: log(predicted / measured) of every step by the constants of the fit without its group.
        constants: by the group that was left out.
        span: lowest and highest value of every constant among them.
    """

    errors: Array
    constants: Mapping[str, Constants]
    span: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class _Linear:
    """The model r(z) = residual + jacobian (z - at), and all that a fit of it needs; logarithms, columns by `names`."""

    names: tuple[str, ...]
    prior: Array
    width: Array
    low: Array
    high: Array
    at: Array
    residual: Array
    jacobian: Array
    group: NDArray[np.int64]

    def weights(self, kept: NDArray[np.bool_]) -> Array:
        """Return the weight of every step, so that a group counts once."""
        sizes = np.bincount(self.group[kept], minlength=int(self.group.max()) + 1)
        return np.where(kept, 1.0 / np.maximum(1, sizes[self.group]), 0.0)

    def determining(self, kept: NDArray[np.bool_]) -> list[set[int]]:
        """Return, per constant, the groups with steps that depend on it."""
        felt = (np.abs(self.jacobian) >= LEAST_ELASTICITY) & kept[:, None]
        return [set(self.group[felt[:, j]].tolist()) for j in range(len(self.names))]

    def solve(self, weights: Array, free: NDArray[np.bool_], radius: float) -> tuple[Array, Array]:
        """Return z within bounds and radius, and the objective's curvature. Constants that are not free keep the
        prior."""
        z = np.where(free, self.at, self.prior)
        low = np.where(free, np.maximum(self.low, self.at - radius), self.prior)
        high = np.where(free, np.minimum(self.high, self.at + radius), self.prior)
        curvature = np.diag(1.0 / self.width**2)
        for _ in range(_REWEIGHTINGS):
            r = self.residual + self.jacobian @ (z - self.at)
            # Huber's weights: 1 below the corner, falling as 1 / |r| beyond
            w = weights * np.minimum(1.0, HUBER * SCALE / np.maximum(np.abs(r), 1e-12)) / SCALE**2
            curvature = self.jacobian.T @ (self.jacobian * w[:, None]) + np.diag(1.0 / self.width**2)
            gradient = self.jacobian.T @ (w * r) + (z - self.prior) / self.width**2
            new = _bounded(curvature, gradient, z, low, high)
            moved = float(np.max(np.abs(new - z), initial=0.0))
            z = new
            if moved < _CLOSE:
                break
        return z, curvature


def _bounded(curvature: Array, gradient: Array, z: Array, low: Array, high: Array) -> Array:
    """Minimise a convex quadratic in a box, by coordinates (it converges for any positive definite curvature)."""
    step, g = np.zeros_like(z), gradient.copy()
    for _ in range(200):
        largest = 0.0
        for j in range(len(z)):
            wanted = step[j] - g[j] / curvature[j, j]
            taken = min(max(wanted, low[j] - z[j]), high[j] - z[j])
            if (moved := taken - step[j]) != 0.0:
                g = g + curvature[:, j] * moved
                step[j] = taken
                largest = max(largest, abs(moved))
        if largest < _CLOSE:
            break
    out: Array = z + step
    return out


def objective(residual: Array, weights: Array, z: Array, prior: Array, width: Array) -> float:
    """Return the objective of the fit; see the top of the file."""
    a = np.abs(residual) / SCALE
    huber = np.where(a <= HUBER, a**2 / 2, HUBER * (a - HUBER / 2))
    return float(np.sum(weights * huber) + np.sum(((z - prior) / width) ** 2) / 2)


# -- the fit -----------------------------------------------------------------------------------------------------------


def _check_arguments(steps: Sequence[MeasuredStep], least_groups: int, rounds: int, looseness: float) -> None:
    if not steps:
        raise AutoplanError("no measured steps; give at least one")
    if least_groups < 1 or rounds < 1:
        raise AutoplanError(f"least_groups={least_groups} and rounds={rounds} must be at least 1")
    if not 0 < looseness < math.inf:
        raise AutoplanError(f"looseness={looseness!r} must be a positive number")


def fit_constants(
    steps: Sequence[MeasuredStep],
    price: StepPrice,
    start: Constants,
    *,
    names: Sequence[str] = (),
    least_groups: int = LEAST_GROUPS,
    rounds: int = 4,
    looseness: float = 1.0,
) -> Fitted:
    """Fit the constants `names` (none: all) of `start` to steps. Constants that are 0 stay.

    Args:
        least_groups: a constant is fitted if steps of so many groups depend on it.
        rounds: the most rounds of the fit.
        looseness: factor on the widths of all priors.

    Raises:
        AutoplanError: for no steps, a step without a price, or an unknown constant.
    """
    _check_arguments(steps, least_groups, rounds, looseness)
    chosen = _names(names, start)
    measured = np.log([s.measured_s for s in steps])
    labels = sorted({s.group for s in steps})
    group = np.array([labels.index(s.group) for s in steps], dtype=np.int64)
    everything, kept = range(len(steps)), np.ones(len(steps), dtype=bool)
    ranges = [range_of(n, start.values[n]) for n in chosen]
    prior = np.log([start.values[n] for n in chosen])
    before = _logs(steps, everything, price([(start, everything)])[0]) - measured
    linear = _Linear(
        tuple(chosen),
        prior,
        np.array([r.width * looseness for r in ranges]),
        np.log([r.low for r in ranges]),
        np.log([r.high for r in ranges]),
        prior.copy(),
        before,
        np.zeros((len(steps), len(chosen))),
        group,
    )
    weights, radius, done = linear.weights(kept), _RADIUS, 0
    felt: list[Sequence[int]] = [everything] * len(chosen)
    linear = _differences(linear, steps, price, start, felt)
    # constants that a step does not depend on in the first round are not priced again: most belong to one device family
    felt = [np.flatnonzero(linear.jacobian[:, j]).tolist() for j in range(len(chosen))]
    free = np.array([len(found) >= least_groups for found in linear.determining(kept)], dtype=bool)
    best = objective(before, weights, linear.at, prior, linear.width)
    for _ in range(rounds):
        z, _ = linear.solve(weights, free, radius)
        if not free.any() or np.max(np.abs(z - linear.at)) < 1e-4 or radius < _LEAST_RADIUS:
            break
        done += 1
        residual = _logs(steps, everything, price([(_constants(start, chosen, z), everything)])[0]) - measured
        value = objective(residual, weights, z, prior, linear.width)
        if value >= best:
            radius /= 2
            continue
        linear = replace(linear, at=z, residual=residual)
        linear = _differences(linear, steps, price, start, felt)
        settled, best = best - value < _SETTLED * best, value
        if settled:
            break
    _, curvature = linear.solve(weights, free, 0.0)
    constants = _constants(start, chosen, linear.at)
    rows = _rows(linear, labels, start, constants, free, curvature)
    return Fitted(constants, rows, before, linear.residual, done, linear)


def held_out_errors(
    fitted: Fitted, steps: Sequence[MeasuredStep], price: StepPrice, *, least_groups: int = LEAST_GROUPS
) -> HeldOut:
    """Fit without each group in turn, and price that group with the result.

    Each fit solves the linear model at the end of the whole fit; how far it goes from there is decided by true prices
    of the remaining steps (a line search, as in `fit_constants`). A constant that has too few groups left without the
    group returns to its value before the fit, by the same rule.

    Raises:
        AutoplanError: if there is only one group.
    """
    linear, labels = fitted.linear, sorted({s.group for s in steps})
    if len(labels) < 2:
        raise AutoplanError(f"leaving out a group needs at least two; there is only {', '.join(labels) or 'none'}")
    measured, everything = np.log([s.measured_s for s in steps]), range(len(steps))
    tried: list[tuple[int, Array]] = []
    for g in range(len(labels)):
        kept = linear.group != g
        free = np.array([len(rest) >= least_groups for rest in linear.determining(kept)], dtype=bool)
        free &= np.array([fitted.rows[n].fitted for n in linear.names], dtype=bool)
        z, _ = linear.solve(linear.weights(kept), free, math.inf)
        start = np.where(free, linear.at, linear.prior)
        far = float(np.max(np.abs(z - start), initial=0.0)) > _NEAR
        tried += [(g, start + share * (z - start)) for share in (_SHARES if far else (1.0,))]
    questions = [(_constants(fitted.constants, linear.names, z), everything) for _, z in tried]
    found: dict[str, Constants] = {}
    least = dict.fromkeys(labels, math.inf)
    errors = np.zeros(len(steps))
    for (g, z), (constants, _), seconds in zip(tried, questions, price(questions), strict=True):
        residual, kept = _logs(steps, everything, seconds) - measured, linear.group != g
        value = objective(residual, linear.weights(kept), z, linear.prior, linear.width)
        if value < least[labels[g]]:
            least[labels[g]], found[labels[g]] = value, constants
            errors[~kept] = residual[~kept]
    values = [c.values for c in found.values()]
    span = {n: (min(v[n] for v in values), max(v[n] for v in values)) for n in linear.names}
    return HeldOut(errors, found, span)


def _names(names: Sequence[str], start: Constants) -> list[str]:
    known = start.values
    for name in names:
        if name not in known:
            raise ProfileError(f"constant {name!r} is not known; known are {', '.join(known)}")
        if not known[name]:
            raise ProfileError(f"constant {name!r} is 0, which cannot be fitted; start it above 0")
    return [n for n in known if known[n] and (not names or n in names)]


def _constants(start: Constants, names: Sequence[str], z: Array) -> Constants:
    before = start.values
    values = {n: float(math.exp(v)) for n, v in zip(names, z, strict=True)}
    # a constant that stays keeps its digits
    return start.with_({n: v for n, v in values.items() if not math.isclose(v, before[n], rel_tol=1e-12)})


def _logs(steps: Sequence[MeasuredStep], indices: Sequence[int], seconds: Sequence[float]) -> Array:
    for i, value in zip(indices, seconds, strict=True):
        if not 0 < value < math.inf:
            raise AutoplanError(f"step {steps[i].name}: the predicted time {value!r} is not above 0 s")
    return np.log(np.asarray(seconds, dtype=np.float64))


def _differences(
    linear: _Linear, steps: Sequence[MeasuredStep], price: StepPrice, start: Constants, asked: Sequence[Sequence[int]]
) -> _Linear:
    """Return the model with the jacobian at `at`: one difference per constant, away from a bound that is near."""
    jacobian = np.zeros((len(steps), len(linear.names)))
    measured = np.log([s.measured_s for s in steps])
    questions: list[Question] = []
    deltas = []
    for j in range(len(linear.names)):
        up = linear.at[j] + _DIFFERENCE <= linear.high[j]
        deltas.append(_DIFFERENCE if up else -_DIFFERENCE)
        z = linear.at.copy()
        z[j] += deltas[j]
        questions.append((_constants(start, linear.names, z), asked[j]))
    for j, ((_, indices), seconds) in enumerate(zip(questions, price(questions), strict=True)):
        index = list(indices)
        if index:
            moved = _logs(steps, index, seconds) - measured[index] - linear.residual[index]
            jacobian[index, j] = moved / deltas[j]
    jacobian[np.abs(jacobian) < 1e-9] = 0.0
    return replace(linear, jacobian=jacobian)


def _rows(
    linear: _Linear,
    labels: Sequence[str],
    start: Constants,
    constants: Constants,
    free: NDArray[np.bool_],
    curvature: Array,
) -> dict[str, FittedConstant]:
    out = {}
    errors = linear.width.copy()
    if free.any():
        errors[free] = np.sqrt(np.diag(np.linalg.inv(curvature[np.ix_(free, free)])))
    everywhere = linear.determining(np.ones(len(linear.residual), dtype=bool))
    for j, name in enumerate(linear.names):
        out[name] = FittedConstant(
            name=name,
            before=start.values[name],
            value=constants.values[name],
            fitted=bool(free[j]),
            groups=tuple(labels[g] for g in sorted(everywhere[j])),
            num_steps=int(np.sum(np.abs(linear.jacobian[:, j]) >= LEAST_ELASTICITY)),
            standard_error=float(errors[j]),
            prior_width=float(linear.width[j]),
            at_bound=bool(free[j] and min(linear.at[j] - linear.low[j], linear.high[j] - linear.at[j]) < 1e-6),
        )
    return out


# -- errors ------------------------------------------------------------------------------------------------------------


def group_errors(steps: Sequence[MeasuredStep], logs: Array) -> dict[str, float]:
    """Return the mean |log(predicted / measured)| by group, in order of their names."""
    found: dict[str, list[float]] = {}
    for step, value in zip(steps, np.abs(logs), strict=True):
        found.setdefault(step.group, []).append(float(value))
    return {name: float(np.mean(found[name])) for name in sorted(found)}
