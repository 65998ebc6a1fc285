"""Devices, links and prices as plain data: the parts of a Cluster.

Units: bytes per second and FLOP per second are decimal; bandwidth is per device and per direction; FLOP figures are
dense. One device is one rank of the program (a GCD of MI250X, a logical NeuronCore of Trainium2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoplan.config.numbers import Range
from autoplan.config.precision import PRECISIONS
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import PinError
from autoplan.units import DEVICE_TYPES

# For devices without a measurement: large matrix products reach 51 % (MI300X) to 87 % (A100) of the data sheet on the
# measured devices of the catalog (MAMF of stas00/ml-engineering, compute/accelerator/README.md).
_ASSUMED_ACHIEVABLE = Quantity(0.5, 0.7, 0.88, Tag.ASSUMED)
_ACHIEVABLE_SPREAD = 0.05  # relative error of a published MAMF figure, for other shapes, clocks and software


# Levels between nodes: inside a rail group (leaf switches), at the speed of the cards, and beyond it.
NETWORKS = RAILS, NETWORK = "rails", "network"

_LEAST = 1e-9  # lower bound of figures that must be above 0
COUNT = Range(1, 10**6, whole=True)  # of nodes, or of devices in one
COUNT_OR_NONE = Range(0, COUNT.most, whole=True)
GBIT_S = Range(_LEAST, 1e6, "Gbit/s")
GB_S = Range(_LEAST, 1e6, "GB/s")
MEMORY_GB = Range(_LEAST, 1e6, "GB")
TFLOPS = Range(_LEAST, 1e7, "TFLOP/s")
MICROSECONDS = Range(0, 1e7, "us")
WATTS = Range(0, 1e6, "W")
USD = Range(0, 1e6, "US dollars")
ACHIEVABLE = Range(0.01, 1)
SHARE = Range(0, 1)
OVERSUBSCRIPTION = Range(1, 1000)
ASSUMED = "assumed"  # the source of figures that nobody has looked up


@dataclass(frozen=True)
class Host:
    """The host of a device's usual node, which the devices in use share.

    Attributes:
        memory_bytes_per_s: The speed of its memory by data sheet: sockets x channels x the rate of a channel.
        num_devices: The devices of the node.
    """

    memory_bytes_per_s: float
    num_devices: int


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU process).

    `source` names the source of the figures; `assumed` figures are good enough only for ranking choices.
    """

    name: str
    peak_flops: float  # dense FLOP/s in its training dtype (bfloat16 if it has several)
    memory_bytes_per_s: float
    memory_bytes: int  # usable by a program
    source: str
    peak_flops_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    achievable_fraction: float | None = None  # measured best bfloat16 matmul / peak; None: not measured
    power_w: float | None = None
    # seconds of one op in eager mode; None: the assumption of `cost_models.kernels.operations`
    launch_s: float | None = None
    # share of compute that hides a collective of ZeRO; None: as whole steps show (`Constants.overlap`)
    overlap_fraction: float | None = 0.0
    unverified: tuple[str, ...] = ()  # columns of the catalog that no source confirms
    host_bytes_per_s: float | None = None  # to or from host memory, one direction
    host_memory_bytes: int | None = None  # its share of host memory; None: see Cluster.host_memory_bytes
    host_memory_bytes_per_s: float | None = None  # its share of the speed of host memory; None: of `host`, or assumed
    host: Host | None = None  # the host of its usual node; None: not known
    compute_capability: float | None = None  # of CUDA (10.0: Blackwell); None: not known, or of another vendor

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise PinError(f"device {self.name}: {name}={value!r} must be a finite number above 0")
        for name in ("host_bytes_per_s", "host_memory_bytes", "host_memory_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PinError(f"device {self.name}: {name}={value!r} must be a finite number above 0")
        if self.achievable_fraction is not None:
            ACHIEVABLE.check(self.achievable_fraction, f"device {self.name}: achievable_fraction")
        if self.overlap_fraction is not None:
            SHARE.check(self.overlap_fraction, f"device {self.name}: overlap_fraction")
        if self.launch_s is not None and not 0 <= self.launch_s < math.inf:
            raise PinError(f"device {self.name}: launch_s={self.launch_s!r} must be a finite number of at least 0")

    def flops(self, dtype: str) -> float:
        """Return the dense peak FLOP/s of matrix products in `dtype`.

        dtypes: bfloat16, float16, float32, tf32, float8, float4, int8. 8-bit formats with scales per block, such as
        float8_block32, count as float8. A device without a table (made by hand) has one figure for all.

        Raises: PinError that names the dtypes of the device.
        """
        if not self.peak_flops_by_dtype:
            return self.peak_flops
        dtype = dtype.partition("_block")[0]
        if dtype not in self.peak_flops_by_dtype:
            there = [p.name for p in PRECISIONS.values() if p.compute and self._has(p.compute, p.products)]
            raise PinError(
                f"{self.name} has no figure for {dtype}; it has {', '.join(self.peak_flops_by_dtype)}: choose a "
                f"precision among them: {', '.join(there)}"
            )
        return self.peak_flops_by_dtype[dtype]

    def _has(self, *dtypes: str | None) -> bool:
        return all(dtype is None or dtype.partition("_block")[0] in self.peak_flops_by_dtype for dtype in dtypes)

    @property
    def achievable(self) -> Quantity:
        """The share of the peak that a large matrix product reaches: fitted to a published figure, else assumed."""
        if self.achievable_fraction is None:
            return _ASSUMED_ACHIEVABLE
        return Quantity.spread(self.achievable_fraction, _ACHIEVABLE_SPREAD, Tag.FITTED)


def unknown_device_type(device_type: str) -> PinError:
    """Return the error for a type that is none of DEVICE_TYPES."""
    return PinError(f"device type {device_type!r} is not supported; use {' or '.join(map(repr, DEVICE_TYPES))}")


@dataclass(frozen=True)
class Level:
    """A level of the hierarchy: `size` devices share one unit (0: all), and are connected faster than the next level.

    Attributes:
        latency_s: Seconds per step of a collective.
        bytes_per_s: Bytes per second per device and direction.
        p2p_bytes_per_s: Bandwidth to a single peer, if it is lower (a mesh such as xGMI).
        within_node: True if a unit never crosses a node, however few devices of the node are used.
        fabric: The row of `nccl.FABRICS` that says how well collectives run on it.
        oversubscription: `bytes_per_s` is the rate at which a device can send. If all devices send beyond the level
            below at once, the level carries 1 / oversubscription of it (3: a third; a rail-optimised fabric: 1).
    """

    latency_s: float
    bytes_per_s: float
    source: str
    name: str = "all"
    size: int = 0
    p2p_bytes_per_s: float | None = None
    within_node: bool = False
    fabric: str = "plain"
    oversubscription: float = 1.0

    def group_bytes_per_s(self, members: int) -> float:
        """Return the bandwidth of one device in a group of `members`; in a mesh it has only the links to them."""
        speed = self.bytes_per_s
        if self.p2p_bytes_per_s is not None:
            speed = min(speed, max(1, members - 1) * self.p2p_bytes_per_s)
        return speed / self.oversubscription

    def at(self, bytes_per_s: float) -> Level:
        """Return the level at another speed; all links of a mesh scale together."""
        peer = None if self.p2p_bytes_per_s is None else self.p2p_bytes_per_s * bytes_per_s / self.bytes_per_s
        return replace(self, bytes_per_s=bytes_per_s, p2p_bytes_per_s=peer)


@dataclass(frozen=True)
class Price:
    """US dollars per device and hour; `as_of` is a date or the version of the source."""

    usd_per_device_hour: float
    source: str
    as_of: str

    @property
    def dated(self) -> str:
        """The date of the price, `as of 2026-11-09`, or the version of its source, `from list v8/vms.csv@05887511`."""
        if self.as_of[:4].isdigit():
            return f"as of {self.as_of}"
        return f"from {self.as_of.partition(' (')[0]}"


@dataclass(frozen=True)
class Group:
    """Ranks r0 + i * stride, i < size: the group of one product of adjacent mesh axes."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise PinError(f"a group needs size and stride of at least 1, got size={self.size} stride={self.stride}")
