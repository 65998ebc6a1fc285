"""The time of one operation on one rank: measured, else interpolated between measured shapes, else the roofline.

    exact key in the profile       -> MEASURED, with its spread; products and attention, which draw most power, at the
                                      clock of sustained load, the interval reaching down to that of short bursts
    measured shapes of its class   -> FITTED: t = c0 + c1 flops + c2 bytes (c >= 0, least squares of the relative error)
                                      times the residual of the nearest measured shapes (inverse distance in log space);
                                      the interval is the held-out error
    neither                        -> the device's own figures: on an accelerator the kernel model (`gpu`; FITTED if
                                      published timings hold the device), else ASSUMED: a roofline with an efficiency
                                      that saturates with size. Memory-bound operations are ASSUMED

The backward takes, of the forward's arithmetic, 1x per operand of a product that needs a gradient and 2.5x for
attention (scores are recomputed; Dao, FlashAttention-2, 2023, section 4.1). All others move twice the bytes (they read
the gradient and saved values, and write a gradient).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.config.parallel import FusedLoss, Mode, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Device
from autoplan.cost_models.kernels.attention import as_run
from autoplan.cost_models.kernels.gpu import kernels_of, memory_ramp_s
from autoplan.cost_models.kernels.products import dtype_of, is_unfused, model_of, phase_bytes, phase_flops, size_of
from autoplan.cost_models.profile import PHASES, UNKNOWN_ERROR, MeasuredOp, Profile
from autoplan.cost_models.quantity import ZERO, Quantity, Tag
from autoplan.cost_models.work import OpWork
from autoplan.errors import ProfileError
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind, op_record

# -- assumptions where nothing was measured ----------------------------------------------------------------------------

# Share of the peak that large kernels reach on a device that is not an accelerator (a CPU): products the stated share,
# else 75 %; attention half; memory-bound kernels 80 % of the bandwidth.
_PRODUCT_EFFICIENCY = 0.75
_ATTENTION_EFFICIENCY = 0.5
_MEMORY_EFFICIENCY = 0.8
# There a product that would take this long at the peak reaches half of that share.
_HALF_S = 10e-6
# Python, dispatch and launch of one op in eager mode, forward or backward, if the device does not state it
# (`launch_s`). Only devices that are not accelerators pay it; on an accelerator the host runs ahead (time.host).
_DEFAULT_LAUNCH_S = 6e-6
# Share of it that an op pays: a graph launch pays it once for all ops.
_LAUNCH_SHARE: dict[Mode, float] = {Mode.EAGER: 1.0, Mode.FUSED: 0.0, Mode.COMPILED: 0.0}
# Share of the traffic of an element-wise op that remains when it is fused into its producer, if `program.fusion` does
# not tell what runs together: its input stays in registers, its output is written if a backward needs it.
_FUSED_SHARE: dict[Mode, float] = {Mode.EAGER: 1.0, Mode.FUSED: 0.5, Mode.COMPILED: 0.4}
# How often the kernels of a loss read or write all logits. log_softmax finds the maximum, adds up, and writes.
# Megatron's vocabulary-parallel loss (core/tensor_parallel/cross_entropy.py) finds the maximum (1), subtracts it in
# place (2), exponentiates in place (2), adds up (1) and divides in place (2). A compiler reads twice. The backward
# reads and writes them.
_LOSS_PASSES: dict[Mode, dict[str, float]] = {
    Mode.EAGER: {"forward": 4.0, "backward": 3.0},
    Mode.FUSED: {"forward": 8.0, "backward": 2.0},
    Mode.COMPILED: {"forward": 2.0, "backward": 2.0},
}
# COMPILED (core/fusions/fused_cross_entropy.py): the maximum comes with the copy in 32 bits, exponents and their sum
# are one kernel in place, the division another; the backward also writes what it changes in place, and a 16-bit
# gradient, which is counted as the cast's. FLASH and ONLINE read and write 16 bits: `cross_entropy.py` of
# flash-attention, and of transformer_engine (online_softmax_kernel, cross_entropy_kernel, and element_mul_kernel in the
# backward). LINEAR: as ONLINE, but the backward scales the gradient of the hidden states instead.
_FUSED_LOSS_PASSES: dict[FusedLoss, dict[str, float]] = {
    FusedLoss.COMPILED: {"forward": 4.0, "backward": 1.0},
    FusedLoss.FLASH: {"forward": 1.0, "backward": 2.0},
    FusedLoss.ONLINE: {"forward": 3.0, "backward": 2.0},
    FusedLoss.LINEAR: {"forward": 3.0, "backward": 0.0},
}
# In passes over 16-bit logits. Op by op: the cast reads 2 bytes and writes 4, log_softmax reads 4 and writes 4; in the
# backward nll_loss writes 4, log_softmax reads 8 and writes 4, the cast reads 4 and writes 2. A compiler reads twice.
_CHUNKED_LOSS_PASSES: dict[Mode, dict[str, float]] = {
    Mode.EAGER: {"forward": 7.0, "backward": 11.0},
    Mode.FUSED: {"forward": 2.0, "backward": 2.0},
    Mode.COMPILED: {"forward": 2.0, "backward": 2.0},
}
# Relative errors of the roofline: the interval is a factor of 1 + this either way.
_ASSUMED_ERROR = 0.6
_BEYOND_ERROR = 0.25  # added per doubling of the distance to the nearest measured shape, from the second on
# The error of a group is known if at least this many of its shapes have another one within this many doublings.
_ENOUGH = 4
_NEAR = 2.0


_PLAIN = RunOptions()


# -- the roofline ------------------------------------------------------------------------------------------------------


def roofline_s(
    work: OpWork,
    phase: str,
    device: Device,
    mode: Mode,
    options: RunOptions = _PLAIN,
    constants: Constants | None = None,
) -> Quantity:
    """Return the time from the device's figures alone.

    On an accelerator it is the kernel model if there is one for the operation. Otherwise it is the larger of arithmetic
    and traffic, plus the launch.
    """
    known = kernels_of(device, constants or Constants.shipped())
    launch = _LAUNCH_SHARE[mode] * (_DEFAULT_LAUNCH_S if device.launch_s is None else device.launch_s)
    op = op_record(work.op)
    if op.as_view:
        return ZERO if known is not None else Quantity.spread(launch, _ASSUMED_ERROR, Tag.ASSUMED)
    if known is not None:
        kernel = options.attention_in(mode)
        if op.kind is OpKind.ATTENTION and not is_unfused(work, mode, options):
            work = as_run(work, device, options, mode)
        model = model_of(work, mode, device, options)
        found = None if model is None else model(work, phase, device, known, kernel)
        if found is not None:
            copied = dict(work.attrs).get("copied_bytes")
            copied_s = (copied if isinstance(copied, float) else 0.0) / (known.memory_share * device.memory_bytes_per_s)
            return Quantity.spread(found.busy_s + copied_s + found.launch_s, found.error, found.tag)
        launch = memory_ramp_s() if known.own_launch and not _is_fused(op.kind, mode) else 0.0
    moved = phase_bytes(work, phase)
    if known is not None and op.kind is OpKind.LOSS:
        moved = _loss_passes(mode, options)[phase] * work.inputs[0].num_bytes
    together = _fused_bytes(work, phase, mode, options)
    if together is not None:
        moved, launch = float(together), 0.0
    share = _MEMORY_EFFICIENCY if known is None else known.memory_share
    traffic_s = moved / (share * device.memory_bytes_per_s)
    if op.kind is OpKind.ELEMENTWISE and together is None:
        traffic_s *= _FUSED_SHARE[mode]
    seconds = max(_arithmetic_s(op.kind, phase_flops(work, phase), device), traffic_s)
    seconds += launch * work.num_started(phase)
    return Quantity.spread(seconds, _ASSUMED_ERROR, Tag.ASSUMED)


def _fused_bytes(work: OpWork, phase: str, mode: Mode, options: RunOptions) -> int | None:
    """Return the traffic of an operation that is part of a kernel with its neighbours; None if it is none."""
    joins = mode is not Mode.EAGER or options.fused_norms
    together = dict(work.attrs).get(f"fused_{phase}_bytes") if joins else None
    return together if isinstance(together, int) else None


def _is_fused(kind: OpKind, mode: Mode) -> bool:
    return kind is OpKind.ELEMENTWISE and mode is not Mode.EAGER


def _loss_passes(mode: Mode, options: RunOptions) -> Mapping[str, float]:
    """Return the passes of a loss. A compiler's own loss is compiled as it is."""
    fused = options.fused_loss
    own = fused in (FusedLoss.NO, FusedLoss.TORCH) or (fused is FusedLoss.COMPILED and mode is Mode.COMPILED)
    if fused is FusedLoss.CHUNKED:
        return _CHUNKED_LOSS_PASSES[mode]
    return _LOSS_PASSES[mode] if own else _FUSED_LOSS_PASSES[fused]


def _arithmetic_s(kind: OpKind, flops: float, device: Device) -> float:
    """Return the seconds of the arithmetic of an operation, at the share of the peak that its size reaches."""
    said = device.achievable_fraction is not None or device.peak_flops_by_dtype
    product = device.achievable.mid if said else _PRODUCT_EFFICIENCY
    best = _ATTENTION_EFFICIENCY if kind is OpKind.ATTENTION else product
    # flops / (peak * eff) with eff = best * flops / (flops + half) is linear in flops
    half = device.peak_flops * _HALF_S if kind in (OpKind.ATTENTION, OpKind.PRODUCT) else 0.0
    return (flops + half) / (best * device.peak_flops)


# -- interpolation -----------------------------------------------------------------------------------------------------


def _features(work: OpWork) -> tuple[float, ...]:
    """Return the position of a shape among others of its class, in doublings."""
    what = op_kind(work.op)
    if what is OpKind.PRODUCT and len(work.inputs) >= 2 and work.inputs[0].shape:
        rows, contracted = size_of(work.inputs[0].shape[:-1]), work.inputs[0].shape[-1]
        columns = size_of(work.outputs[0].shape) / rows
        sizes: tuple[float, ...] = (rows, contracted, columns)
    elif what is OpKind.ATTENTION:
        sizes = (work.flops, work.inputs[0].shape[-2], work.inputs[0].shape[-1])
    elif what in (OpKind.EMBEDDING, OpKind.LOSS):
        sizes = (work.outputs[0].num_bytes, *(t.num_bytes for t in work.inputs))
    else:
        sizes = (work.moved_bytes,)
    return tuple(math.log2(max(1.0, x)) for x in sizes)


def _group(work: OpWork) -> str:
    """Return the group, within its class, of shapes that are comparable by size."""
    what = op_kind(work.op)
    if what is OpKind.PRODUCT:
        return "".join("*" if t.requires_grad else "." for t in work.inputs[:2])
    if what is OpKind.ATTENTION:
        attrs = dict(work.attrs)
        how = f"causal={attrs.get('causal')} mask={len(work.inputs) > 3} grad={work.has_backward}"
        return how + "".join(f" {name}" for name in ("sinks", "softcap") if attrs.get(name))
    return f"{work.op} {len(work.inputs)} {work.has_backward}"


@dataclass(frozen=True)
class _Fit:
    """Trend and residuals of one group of measured shapes in one phase."""

    coefficients: tuple[float, float, float]
    points: tuple[tuple[tuple[float, ...], float], ...]  # features, log(measured / trend)
    error: float

    @staticmethod
    def of(rows: Sequence[tuple[tuple[float, ...], float, float, float]], error: float | None) -> _Fit:
        """Return the fit of rows (features, flops, bytes, seconds).

        `error` None: the error of predicting each shape from others near it.
        """
        coefficients = _least_squares([((1.0, flops, moved), t) for _, flops, moved, t in rows])
        points = tuple((f, math.log(t / _trend(coefficients, flops, moved))) for f, flops, moved, t in rows)
        if error is None:
            error = UNKNOWN_ERROR
            others = [_Fit(coefficients, points[:i] + points[i + 1 :], 0.0) for i in range(len(points))]
            told = [(*o.residual(f), r) for o, (f, r) in zip(others, points, strict=True) if o.points]
            wrong = [abs(math.exp(found - r) - 1) for found, distance, r in told if distance <= _NEAR]
            if len(wrong) >= _ENOUGH:
                error = sorted(wrong)[math.ceil(0.9 * len(wrong)) - 1]
        return _Fit(coefficients, points, error)

    def residual(self, features: tuple[float, ...]) -> tuple[float, float]:
        """Return the log residual at a position, and its distance from the nearest measured shape in doublings."""
        near = sorted((sum((a - b) ** 2 for a, b in zip(features, f, strict=True)), r) for f, r in self.points)[:4]
        if near[0][0] == 0.0:
            same = [r for d, r in near if d == 0.0]
            return sum(same) / len(same), 0.0
        weights = [1.0 / d for d, _ in near]
        return sum(w * r for w, (_, r) in zip(weights, near, strict=True)) / sum(weights), math.sqrt(near[0][0])

    def at(self, features: tuple[float, ...], flops: float, moved: float) -> Quantity:
        residual, distance = self.residual(features)
        mid = _trend(self.coefficients, flops, moved) * math.exp(residual)
        return Quantity.spread(mid, self.error + _BEYOND_ERROR * max(0.0, distance - 1.0), Tag.FITTED)


def _trend(coefficients: tuple[float, float, float], flops: float, moved: float) -> float:
    return coefficients[0] + coefficients[1] * flops + coefficients[2] * moved


def _least_squares(rows: Sequence[tuple[tuple[float, float, float], float]]) -> tuple[float, float, float]:
    """Return c >= 0 that minimises sum((c . x / t - 1)^2): the best of the solutions over every subset of columns."""
    scaled = [tuple(x / t for x in xs) for xs, t in rows]
    best: tuple[float, tuple[float, float, float]] | None = None
    for chosen in range(1, 8):
        columns = [i for i in range(3) if chosen >> i & 1]
        solution = _solve(
            [[sum(r[i] * r[j] for r in scaled) for j in columns] for i in columns],
            [sum(r[i] for r in scaled) for i in columns],
        )
        if solution is None or min(solution) < 0:
            continue
        full = [0.0, 0.0, 0.0]
        for i, value in zip(columns, solution, strict=True):
            full[i] = value
        c = (full[0], full[1], full[2])
        wrong = sum((sum(a * b for a, b in zip(c, r, strict=True)) - 1) ** 2 for r in scaled)
        if best is None or wrong < best[0] * (1 - 1e-9):
            best = (wrong, c)
    if best is None:  # the constant column alone is always solvable
        raise ProfileError("an operation without measured times cannot be interpolated")
    return best[1]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve by Gauss elimination with scaled columns; None if singular."""
    n = len(right)
    scale = [math.sqrt(matrix[i][i]) for i in range(n)]
    if min(scale) == 0.0:
        return None
    a = [[matrix[i][j] / scale[i] / scale[j] for j in range(n)] + [right[i] / scale[i]] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(a[k][i]))
        if abs(a[pivot][i]) < 1e-9:
            return None
        a[i], a[pivot] = a[pivot], a[i]
        for k in range(n):
            if k != i:
                ratio = a[k][i] / a[i][i]
                a[k] = [x - ratio * y for x, y in zip(a[k], a[i], strict=True)]
    return [a[i][n] / a[i][i] / scale[i] for i in range(n)]


@lru_cache(maxsize=8)
def _fits(profile: Profile) -> dict[tuple[str, str, str, str], _Fit]:
    """Return (phase, class, dtype, group) -> fit; group '' is the whole class."""
    rows: dict[tuple[str, str, str, str], list[tuple[tuple[float, ...], float, float, float]]] = {}
    for record in profile.ops:
        for phase in PHASES:
            timing = record.forward_s if phase == "forward" else record.backward_s
            if timing is not None:
                _add(rows, record, phase, timing.median)
    errors = profile.held_out
    return {
        key: _Fit.of(group, errors[f"{key[1]} {key[0]}"].p90 if f"{key[1]} {key[0]}" in errors else None)
        for key, group in rows.items()
    }


def _add(
    rows: dict[tuple[str, str, str, str], list[tuple[tuple[float, ...], float, float, float]]],
    record: MeasuredOp,
    phase: str,
    seconds: float,
) -> None:
    work = record.work
    row = (_features(work), phase_flops(work, phase), phase_bytes(work, phase), seconds)
    for group in ("", _group(work)):
        rows.setdefault((phase, op_record(work.op).measured_as, dtype_of(work), group), []).append(row)


def interpolated_s(work: OpWork, phase: str, profile: Profile) -> Quantity | None:
    """Return the time from measured shapes of the same op (else of the same class) and dtype; None if there are none.

    `Profile.op_s` has the exact measurements.
    """
    fit = _fit_of(work, phase, profile)
    return None if fit is None else fit.at(_features(work), phase_flops(work, phase), phase_bytes(work, phase))


def has_near(work: OpWork, phase: str, profile: Profile) -> bool:
    """Return True if a measured shape of the same op or class lies within a few doublings of this one."""
    fit = _fit_of(work, phase, profile)
    return fit is not None and fit.residual(_features(work))[1] <= _NEAR


def _fit_of(work: OpWork, phase: str, profile: Profile) -> _Fit | None:
    fits = _fits(profile)
    features = _features(work)
    for group in (_group(work), ""):
        fit = fits.get((phase, op_record(work.op).measured_as, dtype_of(work), group))
        if fit is not None and len(fit.points[0][0]) == len(features):
            return fit
    return None


# -- the one function --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 17)
def op_s(
    work: OpWork,
    phase: str,
    device: Device,
    profile: Profile | None,
    mode: Mode,
    options: RunOptions = _PLAIN,
    constants: Constants | None = None,
) -> Quantity:
    """Return the seconds of the forward or backward of one operation on one rank.

    ZERO for a backward without a gradient. A profile holds eager times; for other modes, times of element-wise ops are
    scaled by an assumed share.

    Raises: ProfileError for an unknown phase.
    """
    if phase not in PHASES:
        raise ProfileError(f"phase {phase!r} is not known; use {' or '.join(PHASES)}")
    if phase == "backward" and not work.has_backward:
        return ZERO
    found = None
    if profile is not None:
        alone = replace(
            work, attrs=tuple(a for a in work.attrs if not a[0].startswith(("fused_", "context_", "cast_")))
        )
        found = profile.op_s(alone, phase) or interpolated_s(alone, phase, profile)
    if found is None or profile is None:
        return roofline_s(work, phase, device, mode, options, constants)
    op = op_record(work.op)
    if op.multiplies:  # under a power limit a device lowers its clock, but not the clock of its memory
        found = Quantity(found.low, found.mid * profile.sustained, found.high * profile.sustained, found.tag)
    if mode is not Mode.EAGER and (op.kind is OpKind.ELEMENTWISE or op.as_view):
        share = 0.0 if op.as_view else _FUSED_SHARE[mode]
        return Quantity(found.low * share, found.mid * share, found.high * share, Tag.ASSUMED)
    return found
