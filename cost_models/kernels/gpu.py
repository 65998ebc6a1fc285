"""The time of matrix products and attention on a GPU: tiles, waves, loop, traffic. No torch.

    seconds = launch + (compute^4 + traffic^4)^(1/4)          of the best tile and number of splits of the loop

    compute   waves of tiles over the device's units (streaming multiprocessors), a partial wave counted in part;
              2 * tile area * (depth + fill) operations per tile, where `fill` is the cost of starting and ending the
              loop in elements of depth; small tiles read more per operation (`reuse`)
    traffic   operands and result once, at the share of the bandwidth that large kernels reach
    attention one tile is 128 queries of a head, its depth the keys that they see; short heads pay for the exponentials

Constants are data (profiles/kernels): per family of devices and class of precision, fitted to published timings by
experiments/kernels, with their number of rows and held-out error. A device in the data has its own factor and is
FITTED. A device of the same family takes the family's constants; any other accelerator takes those of the family with
the nearest 16-bit peak, scaled to its stated figures (`Device.achievable`): both are ASSUMED, with wider intervals. A
device below `_LEAST_ACCELERATOR_FLOPS` (a CPU) is not an accelerator and has no model: None.
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

# Splits of the loop over the contracted dimension that a library tries if there are few tiles (cuBLAS split-K).
SPLITS = (1, 2, 4, 8)
QUERIES_PER_TILE = 128
_EFFICIENCY_HEAD = 256  # the head size for which the efficiency of attention is given
_LEAST_ACCELERATOR_FLOPS = 50e12
# Rows of operands that are not a multiple of 16 bytes cannot be loaded directly for matrix units: such kernels have a
# third of the speed or less (NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core requirements).
# Assumed.
_ALIGNMENT_BITS = 128
_MISALIGNED_SHARE = 0.33
# Batches of such products (attention scores in memory, of heads whose size is no multiple of 8) have no kernel with
# matrix units: what is left are the other units, an eighth of the speed (A100: 39 of 312 TFLOP/s in bf16, H100: 134 of
# 989; NVIDIA, "A100 Tensor Core GPU Architecture" and "H100 Tensor Core GPU Architecture", table of peak rates).
_MISALIGNED_BATCH_SHARE = 0.125
_MISALIGNED_ERROR = 1.0
_NORM = 4.0  # exponent by which arithmetic and traffic combine; 4 fits slightly better than their maximum
# Share of the peak of a hand-made device without a stated one (cuBLAS on A100 and H100; NVIDIA, "Matrix Multiplication
# Background User's Guide").
_SAID_NOTHING = 0.75
# Added to the held-out error of a family if the data have no row of the device, or none of the precision.
_SIBLING_ERROR = 0.15
_INHERITED_ERROR = 0.4


class KernelKind(StrEnum):
    """Classes of precision that share constants."""

    HALF = "half"
    FP8 = "fp8"
    FP4 = "fp4"


_ELEMENT_BITS = {KernelKind.FP8: 8, KernelKind.FP4: 4}


def is_aligned(kind: KernelKind, num_bytes: float, *sizes: float) -> bool:
    """Return True if rows of all these sizes start where matrix units can load them.

    Args:
        num_bytes: Bytes of a 16 or 32-bit element.
        sizes: Sizes of the dims in which tensors are contiguous: features, never the number of tokens.
    """
    bits = _ELEMENT_BITS.get(kind, 8 * num_bytes)
    return all(size * bits % _ALIGNMENT_BITS == 0 for size in sizes)


OPERAND_BYTES: dict[KernelKind, float] = {
    KernelKind.HALF: 2.0,
    KernelKind.FP8: 1.0,
    KernelKind.FP4: 0.5625,
}  # FP4: a scale per 16 elements


def kernel_kind(dtype: str) -> KernelKind:
    """Return the class of a dtype: 4 and 8-bit floats have their own, all others count as 16 bits."""
    return (
        KernelKind.FP8
        if dtype.startswith("float8")
        else KernelKind.FP4
        if dtype.startswith("float4")
        else KernelKind.HALF
    )


@dataclass(frozen=True)
class KernelConstants:
    """Constants of one family and class of kernels.

    Attributes:
        efficiency: Share of the peak, for the largest tile in whole waves with an endless loop.
        fill_depth: Cost of starting and ending the loop, in elements of depth.
        reuse: Elements of the tile's sides (attention: of the head).
        wave_share: Share of the idle part of the last wave that is lost.
        split_share: Cost of adding partial results, over their traffic in 32 bits.
    """

    efficiency: float
    fill_depth: float
    reuse: float
    wave_share: float
    split_share: float
    launch_s: float


@dataclass(frozen=True)
class KernelFit:
    """The constants for one device, their relative error (90 % of held-out rows) and their evidence."""

    constants: KernelConstants
    error: float
    tag: Tag


@dataclass(frozen=True)
class Seconds:
    """A modelled time with its relative error. `launch_s`: the part that any such kernel takes at least."""

    busy_s: float
    launch_s: float
    error: float
    tag: Tag


@dataclass(frozen=True)
class KernelTimings:
    """The kernel timings of one device. `steps`: constants that only whole steps show."""

    family: str
    units: int
    tiles: tuple[tuple[int, int], ...]
    gemm: Mapping[KernelKind, KernelFit]
    attention: KernelFit
    backward: KernelFit
    older: Mapping[Attention, float]  # speed of other attention kernels over the device's own kernel
    grouped_error: float
    own_launch: bool  # True if the launch times were fitted for this device
    power: float  # of the device over the usual device of its family
    steps: Constants

    def sustained(self, kind: KernelKind) -> float:
        """Return the share of burst speed that long training sustains; at most 1."""
        return min(1.0, float(self.steps.sustained(self.family, kind) * self.power**self.steps.power_exponent))

    @property
    def memory_share(self) -> float:
        """The share of the bandwidth that memory-bound kernels reach."""
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
        speed: float = 1.0,
    ) -> Seconds:
        """Return the seconds of `groups` products [rows, depth] x [depth, columns] in one kernel.

        Args:
            device: Its `peak_flops` is the peak of the products' dtype.
            operand_bytes: Bytes per element; None: of the kind.
            output_bytes: Bytes per element.
            grouped: True for products with different operands (experts).
            streams: Runs grouped products as kernels of their own, this many side by side; 0: as one kernel.
            aligned: `is_aligned` of the dims in which operands are contiguous.
            speed: Over the timings of the kind (`training_speed`).
        """
        fit = self.gemm.get(kind) or self.gemm[KernelKind.HALF]
        width = OPERAND_BYTES[kind] if operand_bytes is None else operand_bytes
        bandwidth = device.memory_bytes_per_s * self.memory_share
        moved = groups * ((rows + columns) * depth * width + rows * columns * output_bytes)
        grouped = grouped and groups > 1
        share = self.sustained(kind) * speed * (self.steps.grouped_share if grouped else 1.0)
        if not aligned:
            share *= _MISALIGNED_SHARE if grouped or groups == 1 else _MISALIGNED_BATCH_SHARE
        beside = min(groups, streams) if streams else groups
        compute_s = _product_compute_s(
            fit.constants, self.tiles, self.units, rows, columns, depth, beside, device.peak_flops * share, bandwidth
        )
        compute_s *= groups / beside
        if grouped and streams:  # whatever its size, each starts, casts and ends by itself
            compute_s += groups * self.steps.grouped_product_s
        error = fit.error + (self.grouped_error if grouped else 0.0) + (0.0 if aligned else _MISALIGNED_ERROR)
        tag = fit.tag if kind in self.gemm and not grouped and aligned else Tag.ASSUMED
        return Seconds(both_s(compute_s, moved / bandwidth), self._launch_s(fit), error, tag)

    def most_of_peak(self, dtype: str) -> float:
        """Return the share of the peak that no product of `product_s` exceeds, whatever its sizes are."""
        kind = kernel_kind(dtype)
        fit = self.gemm.get(kind) or self.gemm[KernelKind.HALF]
        grouped = max(1.0, self.steps.grouped_share, self.steps.fused_grouped_share)
        return self.sustained(kind) * training_speed(dtype) * grouped * fit.constants.efficiency

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
        edges: int,
        kernel: Attention = Attention.FUSED,
        narrow: float = 1.0,
    ) -> Seconds:
        """Return the seconds of the core of attention.

        Args:
            flops: FLOPs of the forward, which give the average number of keys per query.
            heads: Heads of all sequences.
            head_dims: Head dim of keys plus head dim of values.
            moved: Memory traffic of the phase in bytes.
            edges: Diagonals beside which a mask hides a part of every tile.
            narrow: Speed of its products over those in 16 bits; the exponentials, which short heads pay for, stay.
        """
        fit = self.attention if phase == "forward" else self.backward
        keys = flops / (2.0 * heads * queries * head_dims) + DIAGONAL * edges
        tiles = heads * math.ceil(queries / QUERIES_PER_TILE) / self.units
        area = QUERIES_PER_TILE * head_dims * (1.0 if phase == "forward" else BACKWARD_FLOPS)
        share = self.sustained(KernelKind.HALF) * self.steps.attention_share * self.older.get(kernel, 1.0)
        rate = device.peak_flops * share / self.units
        inverse = inverse_head(head_dims / 2.0)
        compute_s = tiles_s(fit.constants, tiles, area, keys, inverse, rate)
        beside = fit.constants.reuse * inverse
        compute_s *= (1.0 / narrow + beside) / (1.0 + beside)
        traffic_s = moved / (device.memory_bytes_per_s * self.memory_share)
        return Seconds(both_s(compute_s, traffic_s), self._launch_s(fit), fit.error, fit.tag)

    def _launch_s(self, fit: KernelFit) -> float:
        return fit.constants.launch_s if self.own_launch else 0.0


# Scores are recomputed: five products instead of two (Dao, FlashAttention-2, 2023, section 4.1).
BACKWARD_FLOPS = 2.5
# Keys of the tile on the diagonal that a causal mask hides but a kernel computes, on average.
DIAGONAL = QUERIES_PER_TILE / 2


def tiles_s(
    c: KernelConstants, tiles_per_unit: Any, area: float, depth: Any, inverse_sides: float, unit_rate: Any
) -> Any:
    """Return the seconds to process tiles of `area` (elements) and `depth`; numbers, or arrays of them for a fit."""
    busy = tiles_per_unit + (tiles_per_unit < 1) * (1 - tiles_per_unit)  # at least the time of one tile on one unit
    whole = -(-tiles_per_unit // 1)
    waves = busy + c.wave_share * (whole - busy)
    return waves * 2.0 * area * (depth + c.fill_depth) * (1 + c.reuse * inverse_sides) / (unit_rate * c.efficiency)


def inverse_head(head_dim: float) -> float:
    """Return how much shorter a head is than the largest, as a difference of inverse sizes."""
    return max(0.0, 1.0 / head_dim - 1.0 / _EFFICIENCY_HEAD)


def both_s(compute_s: Any, traffic_s: Any) -> Any:
    """Return the time of arithmetic and traffic that overlap: the larger, or slightly more if they are similar."""
    return (compute_s**_NORM + traffic_s**_NORM) ** (1 / _NORM)


def split_s(c: KernelConstants, split: int, elements: Any, bandwidth: Any) -> Any:
    """Return the seconds to add `split` partial results of `elements` in 32 bits: written and read."""
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
            if count * split >= 1:  # every unit has work, so more splits only add cost
                break
    return best


def least_inverse(tiles: tuple[tuple[int, int], ...]) -> float:
    """Return the sum of inverse sides of the largest tile, for which `efficiency` is given."""
    return min(1 / high + 1 / wide for high, wide in tiles)


# -- the data ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def data(name: str) -> Mapping[str, Any]:
    """Return the content of profiles/kernels/`name`.json."""
    return MappingProxyType(
        json.loads(files("autoplan.profiles").joinpath(f"kernels/{name}.json").read_text(encoding="utf-8"))
    )


def memory_ramp_s() -> float:
    """Return the seconds of a memory-bound kernel beyond its traffic: small kernels reach less of the bandwidth."""
    return float(data("devices")["memory"]["ramp_s"])


def training_speed(dtype: str) -> float:
    """Return the speed of a training library's products of `dtype` over the timings of their class (`KernelKind`)."""
    return float(data("gemm")["training"]["by_dtype"].get(dtype, 1.0))


def cast_bytes(dtype: str, family: str) -> float:
    """Return the bytes of traffic per element that is cast to `dtype` before a product of training; 0 for 16 bits."""
    if kernel_kind(dtype) is KernelKind.HALF:
        return 0.0
    known = data("devices")["casts"]
    named = {**known["by_dtype"], **known["by_family"].get(family, {})}
    return float(named.get(dtype, known["bytes_per_element"]))


def _constants(row: Mapping[str, Any]) -> KernelConstants:
    return KernelConstants(**{name: float(row[name]) for name in KernelConstants.__dataclass_fields__})


def half_peak(device: Device) -> float:
    """Return the peak of 16-bit products, whatever peak the device is priced at."""
    by_dtype = device.peak_flops_by_dtype
    return next((by_dtype[d] for d in ("bfloat16", "float16") if d in by_dtype), device.peak_flops)


def family_of(device: Device) -> str | None:
    """Return the family of a device: its own, else the family with the nearest 16-bit peak.

    None if it is not an accelerator.
    """
    known = data("devices")["devices"].get(device.name)
    if known is not None:
        return str(known["family"])
    if max(half_peak(device), device.peak_flops) < _LEAST_ACCELERATOR_FLOPS:
        return None
    rows = data("devices")["families"]
    peaks: Mapping[str, float] = {
        name: row["half_peak_flops"] for name, row in rows.items() if not row.get("listed_only")
    }
    return min(peaks, key=lambda name: abs(math.log(peaks[name] / half_peak(device))))


def _scale(device: Device, family_efficiency: float, recorded: float | None, alike: bool) -> float:
    """Return the factor on the family's efficiency.

    It follows from the stated figures of the device, unless the same were stated when it was fitted.
    """
    said = device.achievable_fraction
    if alike:
        return 1.0 if said is None or said == recorded else said / (recorded or family_efficiency)
    if said is None and not device.peak_flops_by_dtype:
        return _SAID_NOTHING / family_efficiency
    return device.achievable.mid / family_efficiency


def _fit(row: Mapping[str, Any], own: Mapping[str, Any] | None, scale: float, known: bool, spread: float) -> KernelFit:
    """Return the fit of a device. `row`: of the family; `own`: of the device, if the data have it."""
    constants = _constants(row)
    factor = (1.0 if own is None else float(own["factor"])) * scale
    constants = replace(constants, efficiency=min(1.0, constants.efficiency * factor))
    error = float(row["error"]) + spread
    if own is None or scale != 1.0:
        error += _SIBLING_ERROR if known else _INHERITED_ERROR
    return KernelFit(constants, error, Tag.ASSUMED if own is None or scale != 1.0 else Tag.FITTED)


@lru_cache(maxsize=64)
def kernels_of(device: Device, steps: Constants | None = None) -> KernelTimings | None:
    """Return the kernel timings of `device`, or of the most similar device that has any.

    None if it is not an accelerator. `steps` None: the constants of this version.
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
