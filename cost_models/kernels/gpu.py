"""How long matrix products and attention take on a GPU: tiles, waves, loop, traffic. No torch.

    seconds = launch + (compute^4 + traffic^4)^(1/4)          of the best tile and number of splits of the loop

    compute   waves of tiles over the device's units (streaming multiprocessors), a partly filled one counted in part;
              2 * tile area * (depth + fill) operations per tile, where `fill` is what starting and ending the loop
              costs in elements of depth; small tiles read more per operation (`reuse`)
    traffic   operands and result once, at the share of the bandwidth that large kernels reach
    attention one tile is 128 queries of a head, its depth the keys that they see; short heads pay for the exponentials

Constants are data (profiles/kernels): per family of devices and class of precision, fitted to published timings by
experiments/kernels, with their number of rows and held-out error. A device that the data hold has its own
factor and is FITTED; one of the same family takes the family's constants; any other accelerator those of the family
whose 16-bit peak is nearest, scaled to what is said of it (`Device.achievable`): both ASSUMED, with wider intervals.
A device below `_LEAST_ACCELERATOR_FLOPS` is none (a CPU): None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from autoplan.config.parallel import Attention
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.parts import Device
from autoplan.cost_models.quantity import Tag

# Splits of the loop over the contracted dimension that a library tries where there are few tiles (cuBLAS split-K).
SPLITS = (1, 2, 4, 8)
QUERIES_PER_TILE = 128
LARGEST_HEAD = 256  # to which the efficiency of attention belongs
_LEAST_ACCELERATOR_FLOPS = 50e12
# Rows of operands that are no multiple of 16 bytes cannot be loaded for matrix units at once: kernels of a third of the
# speed or less (NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core requirements). Assumed.
_ALIGNMENT_BITS = 128
_MISALIGNED_SHARE = 0.33
_MISALIGNED_ERROR = 1.0
_NORM = 4.0  # how sharply arithmetic and traffic take turns; 4 fits a little better than their maximum
# What a device made by hand reaches where nothing is said (cuBLAS on A100 and H100; NVIDIA, "Matrix Multiplication
# Background User's Guide").
_SAID_NOTHING = 0.75
# Added to the held-out error of a family where the data hold no row of the device, or none of the precision.
_SIBLING_ERROR = 0.15
_INHERITED_ERROR = 0.4


class KernelKind(StrEnum):
    """Classes of precision that share constants."""

    HALF = "half"
    FP8 = "fp8"
    FP4 = "fp4"


_ELEMENT_BITS = {KernelKind.FP8: 8, KernelKind.FP4: 4}


def is_aligned(kind: KernelKind, num_bytes: float, *sizes: float) -> bool:
    """True if rows of all these sizes start where matrix units can load them. `num_bytes`: of a 16 or 32-bit element.

    Sizes are those of the dims that tensors are contiguous in: features, never the number of tokens.
    """
    bits = _ELEMENT_BITS.get(kind, 8 * num_bytes)
    return all(size * bits % _ALIGNMENT_BITS == 0 for size in sizes)


OPERAND_BYTES: dict[KernelKind, float] = {
    KernelKind.HALF: 2.0,
    KernelKind.FP8: 1.0,
    KernelKind.FP4: 0.5625,
}  # FP4: a scale per 16 elements


def kernel_kind(dtype: str) -> KernelKind:
    """The class of a dtype: 4 and 8-bit floats are their own, everything else counts as 16 bits."""
    return (
        KernelKind.FP8
        if dtype.startswith("float8")
        else KernelKind.FP4
        if dtype.startswith("float4")
        else KernelKind.HALF
    )


@dataclass(frozen=True)
class KernelConstants:
    """Of one family and class of kernels.

    `efficiency`: share of the peak of the largest tile in whole waves with an endless loop. `fill_depth`: elements of
    depth. `reuse`: elements of the tile's sides (attention: of the head). `wave_share`: of the idle part of the last
    wave that is lost. `split_share`: cost of adding up partial results, in times of their traffic in 32 bits.
    """

    efficiency: float
    fill_depth: float
    reuse: float
    wave_share: float
    split_share: float
    launch_s: float


@dataclass(frozen=True)
class Fit:
    """Constants for one device, their relative error (90 % of held-out rows) and what they rest on."""

    constants: KernelConstants
    error: float
    tag: Tag


@dataclass(frozen=True)
class Seconds:
    """A modelled time with its relative error. `launch_s`: what of it is the least that such a kernel takes."""

    busy_s: float
    launch_s: float
    error: float
    tag: Tag


@dataclass(frozen=True)
class KernelTimings:
    """What is known of the kernels of one device. `steps`: what whole steps add to bursts of one kernel."""

    family: str
    units: int
    tiles: tuple[tuple[int, int], ...]
    gemm: Mapping[KernelKind, Fit]
    attention: Fit
    backward: Fit
    older: Mapping[Attention, float]  # speed of other attention kernels over the device's own
    grouped_error: float
    own_launch: bool  # True: the constants' launch times are those of such a device
    power: float  # of the device over that of its family's usual one
    steps: Constants

    def sustained(self, kind: KernelKind) -> float:
        """Share of a burst's speed that long training keeps; all of it where there is power enough."""
        return min(1.0, float(self.steps.sustained(self.family, kind) * self.power**self.steps.power_exponent))

    @property
    def memory_share(self) -> float:
        """Share of the bandwidth that memory-bound kernels reach."""
        return self.steps.memory_share

    def product_s(
        self,
        device: Device,
        kind: KernelKind,
        rows: float,
        columns: float,
        depth: float,
        *,
        groups: float = 1,
        operand_bytes: float | None = None,
        output_bytes: float = 2.0,
        grouped: bool = False,
        streams: int = 0,
        aligned: bool = True,
    ) -> Seconds:
        """Seconds of `groups` products [rows, depth] x [depth, columns] in one kernel at `device.peak_flops`.

        `grouped`: of unlike operands (experts), in one kernel, or where `streams` is given as products of their own,
        that many side by side. Bytes are per element; None: of the kind.
        `aligned`: what `is_aligned` says of the dims that operands are contiguous in.
        """
        fit = self.gemm.get(kind) or self.gemm[KernelKind.HALF]
        width = OPERAND_BYTES[kind] if operand_bytes is None else operand_bytes
        bandwidth = device.memory_bytes_per_s * self.memory_share
        moved = groups * ((rows + columns) * depth * width + rows * columns * output_bytes)
        share = self.sustained(kind) * (self.steps.grouped_share if grouped and groups > 1 else 1.0)
        if not aligned:
            share *= _MISALIGNED_SHARE
        beside = min(groups, streams) if streams else groups
        compute_s = _product_compute_s(
            fit.constants, self.tiles, self.units, rows, columns, depth, beside, device.peak_flops * share, bandwidth
        )
        compute_s *= groups / beside
        error = fit.error + (self.grouped_error if grouped else 0.0) + (0.0 if aligned else _MISALIGNED_ERROR)
        tag = fit.tag if kind in self.gemm and not grouped and aligned else Tag.ASSUMED
        return Seconds(both_s(compute_s, moved / bandwidth), self._launch_s(fit), error, tag)

    def attention_s(
        self,
        device: Device,
        phase: str,
        *,
        flops: float,
        heads: float,
        queries: float,
        head_dims: float,
        moved: float,
        causal: bool,
        kernel: Attention = Attention.FUSED,
    ) -> Seconds:
        """Seconds of the core of attention. `heads`: of all sequences; `head_dims`: of keys and values together.

        `flops` are those of the forward: they say how many keys a query sees on average. `moved` in bytes of the phase.
        """
        fit = self.attention if phase == "forward" else self.backward
        keys = flops / (2.0 * heads * queries * head_dims) + DIAGONAL * causal
        tiles = heads * math.ceil(queries / QUERIES_PER_TILE) / self.units
        area = QUERIES_PER_TILE * head_dims * (1.0 if phase == "forward" else BACKWARD_FLOPS)
        share = self.sustained(KernelKind.HALF) * self.steps.attention_share * self.older.get(kernel, 1.0)
        rate = device.peak_flops * share / self.units
        compute_s = tiles_s(fit.constants, tiles, area, keys, inverse_head(head_dims / 2.0), rate)
        traffic_s = moved / (device.memory_bytes_per_s * self.memory_share)
        return Seconds(both_s(compute_s, traffic_s), self._launch_s(fit), fit.error, fit.tag)

    def _launch_s(self, fit: Fit) -> float:
        return fit.constants.launch_s if self.own_launch else 0.0


# Scores are computed again: five products instead of two (Dao, FlashAttention-2, 2023, section 4.1).
BACKWARD_FLOPS = 2.5
# Keys of the tile on the diagonal that a causal mask hides and a kernel computes all the same, on average.
DIAGONAL = QUERIES_PER_TILE / 2


def tiles_s(
    c: KernelConstants, tiles_per_unit: Any, area: float, depth: Any, inverse_sides: float, unit_rate: Any
) -> Any:
    """Seconds to work off tiles of `area` (elements) and `depth`; numbers, or arrays of them for a fit."""
    busy = tiles_per_unit + (tiles_per_unit < 1) * (1 - tiles_per_unit)  # at least one unit works for one tile's time
    whole = -(-tiles_per_unit // 1)
    waves = busy + c.wave_share * (whole - busy)
    return waves * 2.0 * area * (depth + c.fill_depth) * (1 + c.reuse * inverse_sides) / (unit_rate * c.efficiency)


def inverse_head(head_dim: float) -> float:
    """How much shorter a head is than the largest, as inverse sizes."""
    return max(0.0, 1.0 / head_dim - 1.0 / LARGEST_HEAD)


def both_s(compute_s: Any, traffic_s: Any) -> Any:
    """Arithmetic and traffic that overlap: the larger, and a little more where they are alike."""
    return (compute_s**_NORM + traffic_s**_NORM) ** (1 / _NORM)


def split_s(c: KernelConstants, split: int, elements: Any, bandwidth: Any) -> Any:
    """Seconds to add up `split` partial results of `elements` in 32 bits: written and read."""
    return c.split_share * split * elements * 8.0 / bandwidth if split > 1 else 0.0


@lru_cache(maxsize=1 << 16)
def _product_compute_s(
    c: KernelConstants,
    tiles: tuple[tuple[int, int], ...],
    units: int,
    rows: float,
    columns: float,
    depth: float,
    groups: float,
    flops_per_s: float,
    bandwidth: float,
) -> float:
    best = math.inf
    unit_rate = flops_per_s / units
    least = least_inverse(tiles)
    for high, wide in tiles:
        count = groups * math.ceil(rows / high) * math.ceil(columns / wide) / units
        inverse = 1 / high + 1 / wide - least
        for split in SPLITS:
            seconds = tiles_s(c, count * split, high * wide, depth / split, inverse, unit_rate)
            best = min(best, seconds + split_s(c, split, groups * rows * columns, bandwidth))
            if count * split >= 1:  # every unit has work: more splits only add cost
                break
    return best


def least_inverse(tiles: tuple[tuple[int, int], ...]) -> float:
    """Of the largest tile, to which `efficiency` belongs: sum of its inverse sides."""
    return min(1 / high + 1 / wide for high, wide in tiles)


# -- the data ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def data(name: str) -> Mapping[str, Any]:
    """profiles/kernels/`name`.json."""
    return MappingProxyType(
        json.loads(files("autoplan.profiles").joinpath(f"kernels/{name}.json").read_text(encoding="utf-8"))
    )


def memory_ramp_s() -> float:
    """What a memory-bound kernel pays beside its traffic: its share of the bandwidth grows with its size."""
    return float(data("devices")["memory"]["ramp_s"])


def cast_bytes(dtype: str, family: str) -> float:
    """Traffic per element that is cast to `dtype` before a product of training, in bytes; 0 for 16 bits."""
    if kernel_kind(dtype) is KernelKind.HALF:
        return 0.0
    known = data("devices")["casts"]
    named = {**known["by_dtype"], **known["by_family"].get(family, {})}
    return float(named.get(dtype, known["bytes_per_element"]))


def _constants(row: Mapping[str, Any]) -> KernelConstants:
    return KernelConstants(**{name: float(row[name]) for name in KernelConstants.__dataclass_fields__})


def half_peak(device: Device) -> float:
    """Peak of 16-bit products, whatever peak the device is priced at."""
    by_dtype = device.peak_flops_by_dtype
    return next((by_dtype[d] for d in ("bfloat16", "float16") if d in by_dtype), device.peak_flops)


def family_of(device: Device) -> str | None:
    """The family of a device: its own, else the one whose 16-bit peak is nearest; None for what is no accelerator."""
    known = data("devices")["devices"].get(device.name)
    if known is not None:
        return str(known["family"])
    if max(half_peak(device), device.peak_flops) < _LEAST_ACCELERATOR_FLOPS:
        return None
    peaks: Mapping[str, float] = {name: row["half_peak_flops"] for name, row in data("devices")["families"].items()}
    return min(peaks, key=lambda name: abs(math.log(peaks[name] / half_peak(device))))


def _scale(device: Device, family_efficiency: float, recorded: float | None, alike: bool) -> float:
    """Of the family's efficiency, by what is said of the device, unless the same was said when it was fitted."""
    said = device.achievable_fraction
    if alike:
        return 1.0 if said is None or said == recorded else said / (recorded or family_efficiency)
    if said is None and not device.peak_flops_by_dtype:
        return _SAID_NOTHING / family_efficiency
    return device.achievable.mid / family_efficiency


def _fit(row: Mapping[str, Any], own: Mapping[str, Any] | None, scale: float, known: bool, spread: float) -> Fit:
    """`row` of the family; `own` of the device, if the data hold it."""
    constants = _constants(row)
    factor = (1.0 if own is None else float(own["factor"])) * scale
    constants = replace(constants, efficiency=min(1.0, constants.efficiency * factor))
    error = float(row["error"]) + spread
    if own is None or scale != 1.0:
        error += _SIBLING_ERROR if known else _INHERITED_ERROR
    return Fit(constants, error, Tag.ASSUMED if own is None or scale != 1.0 else Tag.FITTED)


@lru_cache(maxsize=64)
def kernels_of(device: Device, steps: Constants | None = None) -> KernelTimings | None:
    """What is known of the kernels of `device`, or of the nearest one; None for what is no accelerator.

    `steps` None: the constants of this version.
    """
    family = family_of(device)
    if family is None:
        return None
    devices, gemm, attention = data("devices"), data("gemm"), data("attention")
    listed = devices["devices"].get(device.name)
    shape = devices["families"][family]
    own_gemm = gemm["devices"].get(device.name, {})
    own_attention = attention["devices"].get(device.name)
    rows = gemm["families"][family]
    recorded = own_gemm.get("achievable_fraction")
    inherited = listed is not None and bool(listed.get("inherited"))
    known = listed is not None and not inherited
    scale = _scale(device, float(rows[KernelKind.HALF]["efficiency"]), recorded, known or inherited)
    spread = float(gemm["sustained"]["spread"])
    core = attention["families"][family]
    forward = _fit(core, own_attention, scale, known, spread)
    again = attention["backward"]
    backward = replace(
        forward,
        constants=replace(
            forward.constants,
            efficiency=min(1.0, forward.constants.efficiency * float(again["efficiency"])),
            fill_depth=forward.constants.fill_depth * float(again["fill"]),
        ),
        error=forward.error + float(again["held_out_p90"]),
        tag=Tag.ASSUMED if family not in again["families"] else forward.tag,
    )
    return KernelTimings(
        family=family,
        units=int(listed["units"] if listed is not None else shape["units"]),
        tiles=tuple((int(high), int(wide)) for high, wide in shape["tiles"]),
        gemm=MappingProxyType(
            {KernelKind(k): _fit(row, own_gemm.get(k), scale, known, spread) for k, row in rows.items()}
        ),
        attention=forward,
        backward=backward,
        older={Attention(k): float(share) for k, share in attention["older"][family].items()},
        grouped_error=float(gemm["grouped"]["held_out_p90"]),
        own_launch=known,
        power=1.0 if device.power_w is None or not known else device.power_w / float(shape["power_w"]),
        steps=steps or Constants.shipped(),
    )
