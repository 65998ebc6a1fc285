"""Bytes and time of collectives, per kind and over the levels of a cluster. An unknown collective is an error.

Over a group that spans levels, with n ranks, k_l of them in one unit of level l (k_0 = 1 below the innermost), and N
bytes (the gathered or reduced tensor; all_to_all: the local one; send_recv: the message):

    alpha = base + sum_l steps_l * latency_l
    w     = max_l sent_l / (bandwidth_l * efficiency_l)
    T     = alpha + w + c * sqrt(alpha * w)

Bandwidth terms take the maximum because the library works on all levels at once, in chunks; the root term is the cost
of chunks: with s of them T = (1 + s) * alpha' + w / s ..., whose minimum grows as sqrt(alpha * w) (pipelined
collectives: Thakur, Rabenseifner, Gropp, 2005; its factor c is fitted). Bytes sent per device on level l, m = k_l /
k_(l-1) units of the level below, reducing or gathering inside first:

    all_reduce                  2 * N / k_(l-1) * (m - 1) / m
    all_gather, reduce_scatter      N / k_(l-1) * (m - 1) / m
    all_to_all                      N * (n - k_(l-1)) / n     what leaves the unit below (NCCL forwards over it too)
    send_recv                       N on the level of the slowest hop of the group

Every device has its own share of its node's network, so that groups of one node do not slow each other down. T never
falls with N. It never falls with n either, except in a mesh (xGMI), where a device has only the links to the members of
its group: two MI300X exchange 64 GB/s of their 448, and a larger group is really faster (measured: 48 against 313).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.errors import LayoutError
from autoplan.cost_models.hardware import Group, Level, Link
from autoplan.cost_models.quantity import ZERO, Quantity, Tag

# share of the full (gathered or reduced) tensor that each device sends over its link, times n/(n-1).
# Ring algorithms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
_VOLUME: dict[str, float] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "send_recv": 1.0,
}


@dataclass(frozen=True)
class Fabric:
    """How collectives run on a kind of link: share of the bandwidth by kind, fixed seconds, chunk factor, error factor.

    `spread`: the true time lies between mid / (1 + spread) and mid * (1 + spread).
    """

    efficiency: Mapping[str, float]
    base_s: float
    chunk_factor: float
    spread: float


def _equal(value: float) -> dict[str, float]:
    return dict.fromkeys(_VOLUME, value)


# nvlink: least squares on log time of nccl-tests of 2, 4, 8 A100, H100, H200, B200, B300, GB200, GB300, 128 KiB to
# 512 MiB (ai-dynamo/aiconfigurator tables): 90 % of 1,000 points within a factor of 1.43, as `spread` says.
# network: all-reduces of 32 to 8192 H100 with 400 Gbit/s each (two published scaling plots): 90 % within 1.25; one user
# report has all-gathers of 256 at 60 % of the all-reduce's bandwidth, so the others are lower and the spread is wider.
# xgmi: MI300X all-reduces, 48 of 64 GB/s over 2 and 313 of 448 over 8. pcie: between L40S staged through the host
# (20 of 31 GB/s over 2, 5 over 4, 1.4 over 8) and RTX PRO 6000 (25 to 33 of 63): no one figure, hence the spread.
# ici, plain: assumed. A plain link states what collectives reach.
FABRICS: dict[str, Fabric] = {
    "plain": Fabric(_equal(1.0), 0.0, 0.0, 0.5),
    "nvlink": Fabric(
        {**_equal(0.72), "all_reduce": 0.8, "all_to_all": 0.65, "send_recv": 0.83},
        base_s=8e-6,
        chunk_factor=1,
        spread=0.4,
    ),
    "xgmi": Fabric(_equal(0.72), base_s=12e-6, chunk_factor=1, spread=0.5),
    "pcie": Fabric(_equal(0.4), base_s=8e-6, chunk_factor=0.5, spread=2.0),
    "ici": Fabric(_equal(0.8), base_s=8e-6, chunk_factor=1, spread=0.5),
    "network": Fabric(
        {**_equal(0.8), "all_reduce": 0.95, "all_to_all": 0.7, "send_recv": 0.85},
        base_s=20e-6,
        chunk_factor=1,
        spread=0.5,
    ),
}


class CollectiveProfile(Protocol):
    """What is asked of a measured profile."""

    def collective_s(self, kind: str, num_bytes: float, group_size: int, stride: int) -> Quantity | None:
        """Seconds of one collective, or None if it was not measured."""
        ...

    def longest_s(self, kind: str, group_size: int, stride: int) -> Quantity | None:
        """Seconds of the largest message that was measured."""
        ...


def _known(kind: str) -> None:
    if kind not in _VOLUME:
        raise LayoutError(f"unknown collective {kind!r}; known: {', '.join(_VOLUME)}")


def wire_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Bytes each device sends. `full_bytes`: the gathered or reduced tensor (all_to_all: the local tensor)."""
    _known(kind)
    if group_size == 1:
        return 0.0
    if kind == "send_recv":
        return full_bytes
    return _VOLUME[kind] * full_bytes * (group_size - 1) / group_size


def collective_s(kind: str, full_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of one collective on one link: a latency per ring step plus the wire bytes over the link's bandwidth."""
    if group_size == 1:
        return 0.0
    steps = 2 * (group_size - 1) if kind == "all_reduce" else 1 if kind == "send_recv" else group_size - 1
    return steps * link.latency_s + wire_bytes(kind, full_bytes, group_size) / link.bytes_per_s


def _steps(kind: str, fabric: str, members: int) -> float:
    """Messages in a row on one level. Rings inside; over the network trees, and rings while they are shorter.

    4 log2(m) of 12.5 us for an all-reduce of m nodes fits the published plots from 4 to 1024 nodes.
    """
    if kind == "send_recv" or (kind == "all_to_all" and fabric not in ("plain", "network")):
        return 1.0  # a switch carries the messages to all peers at once (measured: 10 us whatever the number of peers)
    if fabric == "network":
        tree = 4 * math.log2(members)
        return tree if kind == "all_reduce" else min(members - 1.0, tree)
    return 2.0 * (members - 1) if kind == "all_reduce" else members - 1.0


@lru_cache(maxsize=65536)
def _coefficients(kind: str, group: Group, levels: tuple[Level, ...]) -> tuple[float, float, float, float]:
    """(alpha in seconds, w in seconds per byte, chunk factor, spread) of a group of at least 2."""
    alpha, w, base, chunk, spread = 0.0, 0.0, 0.0, 0.0, 0.0
    inside = 1  # members of the group in one unit of the level below
    for level in levels:
        here = min(group.size, max(1, level.size // group.stride))  # units are aligned: a group starts where one starts
        if level is levels[-1]:
            here = group.size
        if here == inside:
            continue
        fabric, parts = FABRICS[level.fabric], math.ceil(here / inside)
        speed = level.group_bytes_per_s(2 if kind == "send_recv" else parts) * fabric.efficiency[kind]
        if kind == "send_recv":
            alpha, sent = level.latency_s, 1.0  # the outermost level that the group reaches
        elif kind == "all_to_all":
            alpha += _steps(kind, level.fabric, parts) * level.latency_s
            sent = (group.size - inside) / group.size
        else:
            alpha += _steps(kind, level.fabric, parts) * level.latency_s
            sent = _VOLUME[kind] / inside * (parts - 1) / parts
        w = max(w, sent / speed)
        base, chunk = max(base, fabric.base_s), max(chunk, fabric.chunk_factor)
        spread, inside = max(spread, fabric.spread), here
    return base + alpha, w, chunk, spread


def group_collective_s(
    kind: str, num_bytes: float, group: Group, cluster: Cluster, profile: CollectiveProfile | None = None
) -> Quantity:
    """Seconds of one collective over `group`, from the profile if it has it, else the model above (assumed).

    `num_bytes` as for `wire_bytes`. LayoutError for an unknown kind, a negative size or a group beyond the cluster.
    send_recv: the slowest hop between neighbours of the group; ask with `Group(2, stride)` for one hop.
    """
    _known(kind)
    if num_bytes < 0:
        raise LayoutError(f"{kind} of {num_bytes} bytes: a size is not negative")
    if group.size == 1:
        return ZERO
    if (group.size - 1) * group.stride >= cluster.num_devices:
        raise LayoutError(
            f"a group of {group.size} ranks with stride {group.stride} does not fit the {cluster.num_devices} devices"
        )
    latency = ZERO
    if profile is not None:
        measured = profile.collective_s(kind, num_bytes, group.size, group.stride)
        if measured is not None:
            return measured
        latency = profile.longest_s(kind, group.size, group.stride) or ZERO  # only small messages were measured
    alpha, per_byte, chunk, spread = _coefficients(kind, group, cluster.levels)
    w = per_byte * num_bytes
    return Quantity.spread(alpha + w + chunk * math.sqrt(alpha * w), spread, Tag.ASSUMED) + latency
