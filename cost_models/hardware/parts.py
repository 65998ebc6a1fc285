"""Devices, links and prices as plain data: the parts that a Cluster is made of.

Units: bytes per second and FLOP per second are decimal; bandwidth is per device and per direction; FLOP figures are
dense. One device is one rank of the program (a GCD of MI250X, a logical NeuronCore of Trainium2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.config.numbers import Range
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import PinError

# Where nobody measured a device: large matrix products reach 51 % (MI300X) to 87 % (A100) of the data sheet, the
# devices of the catalog that were measured (MAMF of stas00/ml-engineering, compute/accelerator/README.md).
_ASSUMED_ACHIEVABLE = Quantity(0.5, 0.7, 0.88, Tag.ASSUMED)
_ACHIEVABLE_SPREAD = 0.05  # of a published MAMF figure: other shapes, clocks and software


# Levels between nodes: those of one rail group (leaf switches) at the speed of their cards, and beyond.
NETWORKS = RAILS, NETWORK = "rails", "network"

_LEAST = 1e-9  # of what must be above 0
COUNT = Range(1, 10**6, whole=True)  # of nodes, or of devices in one
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


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU process).

    `source` says where the figures come from; `assumed` ones only order choices.
    """

    name: str
    peak_flops: float  # dense, of the dtype that it trains in (bfloat16 where there is a choice), per second
    memory_bytes_per_s: float
    memory_bytes: int  # usable by a program
    source: str
    peak_flops_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    achievable_fraction: float | None = None  # measured best bfloat16 matmul / peak; None: not measured
    power_w: float | None = None
    launch_s: float | None = None  # of one op in eager mode; None: what `cost_models.kernels.operations` assumes
    # of a collective of ZeRO that can hide behind compute; None: what whole steps show (`Constants.overlap`)
    overlap_fraction: float | None = 0.0
    unverified: tuple[str, ...] = ()  # columns of the catalog that no source confirms
    host_bytes_per_s: float | None = None  # to or from the memory of its host, one direction
    host_memory_bytes: int | None = None  # its share of the host's memory; None: see Cluster.host_memory_bytes
    host_memory_bytes_per_s: float | None = None  # its share of that memory's speed; None: assumed

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
        """Dense peak FLOP/s of matrix products in `dtype` (bfloat16, float16, float32, tf32, float8, float4, int8;
        formats of 8 bits with scales per block, as float8_block32, are float8).

        A device without a table (made by hand) has one figure for all. PinError names the dtypes that it has.
        """
        if not self.peak_flops_by_dtype:
            return self.peak_flops
        dtype = dtype.partition("_block")[0]
        if dtype not in self.peak_flops_by_dtype:
            raise PinError(
                f"{self.name} has no figure for {dtype}; it has {', '.join(self.peak_flops_by_dtype)}: choose a "
                "precision among them"
            )
        return self.peak_flops_by_dtype[dtype]

    @property
    def achievable(self) -> Quantity:
        """Share of the peak that a large matrix product reaches: fitted to a published figure, else assumed."""
        if self.achievable_fraction is None:
            return _ASSUMED_ACHIEVABLE
        return Quantity.spread(self.achievable_fraction, _ACHIEVABLE_SPREAD, Tag.FITTED)


@dataclass(frozen=True)
class Link:
    """Alpha-beta of one level: seconds per step of a collective, and bytes per second per device and direction."""

    latency_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Level(Link):
    """A level of the hierarchy: `size` devices share one unit (0: as many as there are), faster than the next level.

    `p2p_bytes_per_s` to a single peer where that is less (a mesh such as xGMI); `within_node`: a unit never crosses a
    node, however few devices of the node are used; `fabric` names the row of `collectives.FABRICS` that says how well
    collectives run on it. `oversubscription`: `bytes_per_s` is what a device may send, of which the level carries this
    fraction's inverse when all of them send beyond the level below at once (3: a third; a rail-optimised fabric: 1).
    """

    name: str = "all"
    size: int = 0
    p2p_bytes_per_s: float | None = None
    within_node: bool = False
    fabric: str = "plain"
    oversubscription: float = 1.0

    def group_bytes_per_s(self, members: int) -> float:
        """What one device gets inside a group of `members`: in a mesh it has only the links to them."""
        speed = self.bytes_per_s
        if self.p2p_bytes_per_s is not None:
            speed = min(speed, max(1, members - 1) * self.p2p_bytes_per_s)
        return speed / self.oversubscription


@dataclass(frozen=True)
class Price:
    """US dollars per device and hour; `as_of` is a date or the version of the source."""

    usd_per_device_hour: float
    source: str
    as_of: str


@dataclass(frozen=True)
class Group:
    """Ranks r0 + i * stride, i < size: the group of one product of adjacent mesh axes."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise PinError(f"a group needs size and stride of at least 1, got size={self.size} stride={self.stride}")
