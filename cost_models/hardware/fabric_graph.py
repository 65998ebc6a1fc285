"""A fabric as a graph of devices, switches and links, and the levels that follow from it.

FabricGraph(16, ("switch0",), (FabricLink("device0", "switch0", 50e9, 2e-6), ...))
graph.levels(devices_per_node)                  the levels of the whole cluster, inner to outer
graph.levels_of(group, traffic, levels)         the same levels for the groups of one mesh axis

Devices are `device0`, `device1`, ... in the order of the ranks. Links are full duplex. Devices forward traffic of
others, as in a torus, and as NCCL does between rails (PXN). Traffic takes the paths of least latency, then of the
fewest links; equal paths share it in proportion to their bandwidth (`fabric_routes`).

A level exists where ranks form units of equal size such that any two ranks of one unit are nearer to each other than
any two ranks of different units; `units` gives the sizes instead. The bandwidth of a device on a level is found by
sending: in all groups of the axis at once, each device of a unit sends to the device at its place in another unit.

    bytes_per_s = min over links of bandwidth / sum over flows of their share of the link
    latency_s   = the longest path of a flow to the next unit

In a ring collective a library may use one ring, both directions, or rings of all strides at once (a mesh, where each
stride has links of its own): the fastest of them counts. All-to-all traffic uses all strides. With more than 16
strides, 16 evenly spread ones stand for all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoplan.cost_models.hardware.collective_kinds import Traffic
from autoplan.cost_models.hardware.fabric_routes import Load, Routes
from autoplan.cost_models.hardware.nccl import FABRICS
from autoplan.cost_models.hardware.parts import NETWORK, RAILS, Group, Level
from autoplan.errors import PinError
from autoplan.units import GB

MAX_DEVICES = 4096  # paths between all pairs of devices are stored
_MAX_STRIDES = 16
_BETWEEN_NODES = frozenset(("network", "efa"))  # rows of FABRICS
_DEVICE = re.compile(r"device(\d+)")


@dataclass(frozen=True)
class FabricLink:
    """A full-duplex link between two ends.

    Attributes:
        bytes_per_s: Bandwidth in each direction.
        latency_s: Latency.
        kind: The row of `nccl.FABRICS` that says how well collectives run on it.
    """

    a: str
    b: str
    bytes_per_s: float
    latency_s: float
    kind: str = "network"

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise PinError(
                f"link {self}: it needs a positive bandwidth and a latency of at least 0, got {self.bytes_per_s} "
                f"bytes/s and {self.latency_s} s"
            )
        if self.a == self.b:
            raise PinError(f"link {self} begins and ends at {self.a}; a link joins two devices or switches")
        if self.kind not in FABRICS:
            raise PinError(f"link {self}: unknown kind {self.kind!r}; known: {', '.join(FABRICS)}")

    def __str__(self) -> str:
        return f"{self.a} - {self.b}"


@dataclass(frozen=True)
class FabricGraph:
    """A fabric of `num_devices` devices (from `device0` on), switches and links.

    `units`: sizes of the units of levels, inner to outer, without the whole; None: derived from the distances.

    Raises: PinError for a link to an unknown end, a device that is not reached, or units that do not nest.
    """

    num_devices: int
    switches: tuple[str, ...]
    links: tuple[FabricLink, ...]
    units: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_DEVICES:
            raise PinError(
                f"a fabric of {self.num_devices} devices: it may have 1 to {MAX_DEVICES}; describe a larger cluster "
                "by levels"
            )
        if len(set(self.switches)) < len(self.switches):
            twice = next(name for name in self.switches if self.switches.count(name) > 1)
            raise PinError(f"switch {twice} is declared twice")
        self._check_ends()
        self._check_reached()
        below = 1
        for size in self.units or ():
            if size % below or size <= below or self.num_devices % size or size >= self.num_devices:
                raise PinError(
                    f"units={list(self.units or ())}: each size must divide the next one and the {self.num_devices} "
                    "devices, and be smaller than those"
                )
            below = size

    def _check_ends(self) -> None:
        known = {*self.devices, *self.switches}
        for link in self.links:
            for end in (link.a, link.b):
                if end in known:
                    continue
                if _DEVICE.fullmatch(end):
                    last = self.num_devices - 1
                    raise PinError(f"link {link}: there is no {end}; the cluster has device0 to device{last}")
                raise PinError(f"link {link}: {end} is not a switch; declared: {_shortened(self.switches)}")

    def _check_reached(self) -> None:
        import networkx as nx  # takes a fifth of a second to import, so only clusters with a fabric do it

        graph = nx.Graph((link.a, link.b) for link in self.links)
        graph.add_nodes_from(self.devices)
        reached = nx.node_connected_component(graph, "device0")
        lost = [name for name in self.devices if name not in reached]
        if lost:
            raise PinError(
                f"{_shortened(lost)} cannot be reached from device0 over the links of the fabric; link every device "
                "to a switch or to another device that is reached"
            )

    @property
    def devices(self) -> list[str]:
        """The names of the devices, by rank."""
        return [f"device{i}" for i in range(self.num_devices)]

    @cached_property
    def _routes(self) -> Routes:
        place = {name: i for i, name in enumerate((*self.devices, *self.switches))}
        ends = [(place[link.a], place[link.b]) for link in self.links]
        speeds, latencies = ([getattr(x, f) for x in self.links] for f in ("bytes_per_s", "latency_s"))
        return Routes(self.num_devices, len(place), ends, speeds, latencies)

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """The sizes of the units of the levels, inner to outer; the last is the whole."""
        if self.units is not None:
            return (*self.units, self.num_devices)
        sizes = [n for n in range(2, self.num_devices) if self.num_devices % n == 0 and self._are_units(n)]
        return (*sizes, self.num_devices)

    def _are_units(self, size: int) -> bool:
        """Return True if ranks in one unit of this size are nearer to each other than ranks of different units."""
        count = self.num_devices // size
        apart = self._routes.distance[: self.num_devices].reshape(count, size, count, size)
        farthest, nearest = apart.max(axis=(1, 3)), apart.min(axis=(1, 3))
        np.fill_diagonal(nearest, np.iinfo(nearest.dtype).max)
        return bool(farthest.diagonal().max() < nearest.min())

    def levels(self, devices_per_node: int) -> tuple[Level, ...]:
        """Return the levels of a cluster on this fabric, inner to outer, for groups of whole units.

        Levels between nodes are named `network` (the outermost) and `rails`, levels inside nodes `scale-up`, then
        `node`.
        """
        out: list[Level] = []
        for size in self.unit_sizes:
            group = Group(size)
            inside = out[-1].size if out else 1
            kind = self._kind(group, inside)
            between = kind in _BETWEEN_NODES
            name = (NETWORK if size == self.num_devices else RAILS) if between else "scale-up" if not out else "node"
            name = f"{name}{len(out)}" if any(level.name == name for level in out) else name
            latency_s, speed = self._of_part(group, inside, size, Traffic.RING)
            within = not between and size <= devices_per_node
            out.append(Level(latency_s, speed, "fabric", name, size, within_node=within, fabric=kind))
        return tuple(out)

    def levels_of(self, group: Group, traffic: Traffic, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        """Return `levels` with the bandwidth and latency that all groups of this shape get at once.

        If collectives on a kind of link were measured by group size (`nccl.Fabric.by_ranks`), its bandwidth stays that
        of a whole unit, to which the measurements are relative.
        """
        out = list(levels)
        for i, inside, here in spans(group, levels):
            latency_s, speed = self._of_part(group, inside, here, traffic)
            if FABRICS[levels[i].fabric].by_ranks:
                speed = levels[i].bytes_per_s
            out[i] = replace(levels[i], latency_s=latency_s, bytes_per_s=speed)
        return tuple(out)

    @cached_property
    def _parts(self) -> dict[tuple[Group, int, int, Traffic], tuple[float, float]]:
        return {}  # filled by _of_part

    def __getstate__(self) -> dict[str, Any]:
        """Return the data alone; paths are recomputed when needed."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _of_part(self, group: Group, inside: int, here: int, traffic: Traffic) -> tuple[float, float]:
        """Return `_found_of_part`, cached."""
        key = (group, inside, here, traffic)
        if key not in self._parts:
            self._parts[key] = self._found_of_part(*key)
        return self._parts[key]

    def _found_of_part(self, group: Group, inside: int, here: int, traffic: Traffic) -> tuple[float, float]:
        """Return (latency in seconds, bytes/s per device) between units of `inside` ranks in a unit of `here`."""
        if here == 1:
            return 0.0, min(link.bytes_per_s for link in self.links) if self.links else GB
        parts = max(2, math.ceil(here / inside))
        every = tuple(range(1, parts))
        if len(every) > _MAX_STRIDES:
            every = tuple(sorted({round(1 + k * (parts - 2) / (_MAX_STRIDES - 1)) for k in range(_MAX_STRIDES)}))
        used: set[tuple[int, ...]] = {(1,)} if traffic is Traffic.NEIGHBOURS else {every}
        if traffic is Traffic.RING:
            used |= {(1,), (1, parts - 1)}
        latency_s = self._sent(group, inside, here, (1,)).latency_s
        return latency_s, max(self._sent(group, inside, here, strides).bytes_per_s for strides in used)

    def _sent(self, group: Group, inside: int, here: int, strides: tuple[int, ...]) -> Load:
        sources, targets = _flows(self.num_devices, group, inside, here, strides)
        return self._routes.send(sources, targets, 1.0 / len(set(strides)))

    def _kind(self, group: Group, inside: int) -> str:
        """Return the kind of the slowest link between units."""
        if group.size == 1:
            return "plain"
        return self.links[self._sent(group, inside, group.size, (1,)).slowest].kind


def spans(group: Group, levels: tuple[Level, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield for each level that a group crosses: its index, the group's ranks in a unit below it, and in a unit of it.

    Units are aligned: a group starts where a unit starts.
    """
    inside = 1
    for i, level in enumerate(levels):
        here = group.size if i == len(levels) - 1 else min(group.size, max(1, level.size // group.stride))
        if here > inside:
            yield i, inside, here
            inside = here


def _flows(
    num_devices: int, group: Group, inside: int, here: int, strides: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and targets of the flows of all groups of this shape.

    They run between units of `inside` ranks in one unit of `here` ranks, for each stride.
    """
    span = group.size * group.stride
    bases = np.arange(0, num_devices, span)[:, None] + np.arange(group.stride)[None, :]
    first = bases.ravel()
    first = first[first + (group.size - 1) * group.stride < num_devices]
    members = np.arange(group.size // here * here)
    pairs = []
    for stride in sorted(set(strides)):
        to = members // here * here + (members % here + inside * stride) % here
        pairs.append([first[:, None] + group.stride * at[None, :] for at in (members, to)])
    sources, targets = (np.concatenate([pair[k].ravel() for pair in pairs]) for k in (0, 1))
    return sources, targets


def _shortened(names: list[str] | tuple[str, ...], most: int = 6) -> str:
    shown = ", ".join(itertools.islice(names, most))
    return (f"{shown} and {len(names) - most} more" if len(names) > most else shown) or "none"
