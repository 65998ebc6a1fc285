"""Bytes and time of collectives, per kind and over the levels of a cluster. An unknown collective is an error.

A library runs a collective on one of several paths (`nccl`: a protocol of a ring, a tree, the switch itself, or
messages between pairs). Consider a group over several levels, with n ranks, of which k_l are in one unit of level l
(k_0 = 1 below the innermost), and N bytes. N is the gathered or reduced tensor; for all_to_all the local tensor; for
send_recv the message; for experts the local tensor with a copy of each token per chosen expert. A path takes

    alpha = base + sum_l hops_l * hop * latency_l
    w     = max_l sent_l / (bandwidth_l / oversubscription_l * efficiency_l)
    T     = alpha + w + c * sqrt(alpha * w)

Bandwidth terms take the maximum because the library works on all levels at once, in chunks. The root term is the cost
of chunks: with s of them T = (1 + s) * alpha' + w / s ..., whose minimum grows as sqrt(alpha * w) (pipelined
collectives: Thakur, Rabenseifner, Gropp, 2005).

NCCL's ring visits all ranks: n / k_(l-1) - n / k_l hops of level l, twice for an all-reduce, and (n - 1) / n * N /
k_(l-1) bytes per device and direction over it. Its trees have 2 * log2(n / k_(l-1)) hops between nodes and the chain
inside a node. For an unknown library there is one ring per level (`Fabric.flat` is False). all_to_all: a message of N /
n to each peer; (n - k_(l-1)) / n * N bytes leave the unit below, on all levels at once; over a network each message
costs its share of a hop. send_recv: one message on the outermost level that the group reaches.

A fabric with rails (a level whose units are the nodes behind one layer of switches, card i of each on switch i) has two
levels between nodes. The rails have the speed of the cards, since NCCL moves data for another rail inside the node
first (PXN); the network beyond may be oversubscribed.

The fastest path is taken, with one exception: inside a node NCCL leaves LL128 at a given share per rank, which is too
early on new devices according to measurements. Time never falls with N: the time of a path at the size where it is left
is the floor of the next path.

Groups of one node share its network: `bytes_per_s` of a level is the share of one device, because a mesh runs all of
its groups at once (8 groups with a rank per node load a node as much as one group over all of its devices).
`Level.oversubscription` describes a fabric that carries less than that between its units.

In a mesh (xGMI) a device has only the links to the members of its group: two MI300X exchange 64 GB/s of their 448. A
larger group is faster (measured: 48 against 313 GB/s), and 8 devices with reductions in the switch are faster than 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS, CollectiveKind, Traffic
from autoplan.cost_models.hardware.fabric_graph import spans
from autoplan.cost_models.hardware.nccl import FABRICS, Fabric, Path, Protocol
from autoplan.cost_models.hardware.parts import Group, Level
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.quantity import ZERO, Quantity, Tag
from autoplan.cost_models.routing import MEASURED, Routing
from autoplan.errors import LayoutError


def _known(kind: str) -> CollectiveKind:
    if kind not in COLLECTIVE_KINDS:
        raise LayoutError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")
    return COLLECTIVE_KINDS[kind]


def wire_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Return the bytes that each device sends.

    Of a ring: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

    Args:
        full_bytes: the gathered or reduced tensor (all_to_all, experts: the local tensor).
    """
    known = _known(kind)
    if group_size == 1:
        return 0.0
    if known.traffic is Traffic.NEIGHBOURS:
        return full_bytes
    return known.rounds * full_bytes * (group_size - 1) / group_size


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one collective by its bytes: the fastest of `small` up to `switch_bytes`, of `large` above it.

    Attributes:
        small, large: Paths: (alpha in seconds, w in seconds per byte, chunk factor).
        floor_s: Seconds of `small` at the switch.
        spread, spread_s: The error, as a share of the time and in seconds.
    """

    small: tuple[tuple[float, float, float], ...]
    large: tuple[tuple[float, float, float], ...]
    switch_bytes: float
    floor_s: float
    spread: float
    spread_s: float
    tag: Tag

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of `num_bytes`; they never fall with the size."""
        if num_bytes <= self.switch_bytes:
            return _fastest(self.small, num_bytes)
        return max(self.floor_s, _fastest(self.large, num_bytes))

    def quantity(self, num_bytes: float) -> Quantity:
        """Return the seconds of `num_bytes` with their interval, no end of which falls with the size."""
        mid = self.seconds(num_bytes)
        return Quantity.spread(mid, self.spread + (self.spread_s / mid if mid else 0.0), self.tag)


def _fastest(paths: tuple[tuple[float, float, float], ...], num_bytes: float) -> float:
    best = math.inf
    for alpha, per_byte, chunk in paths:
        w = per_byte * num_bytes
        seconds = alpha + w + chunk * math.sqrt(alpha * w)
        if seconds < best:
            best = seconds
    return best


@dataclass(frozen=True)
class _Part:
    """A group's part of one level.

    `inside`: its ranks in a unit of the level below. `parts`: such units in one unit of this level.
    """

    level: Level
    fabric: Fabric
    inside: int
    parts: int


def _parts(group: Group, levels: tuple[Level, ...], fabrics: Mapping[str, Fabric]) -> list[_Part]:
    return [
        _Part(levels[i], fabrics[levels[i].fabric], inside, math.ceil(here / inside))
        for i, inside, here in spans(group, levels)
    ]


def _share(kind: CollectiveKind, part: _Part, ranks: int, routing: Routing = MEASURED) -> float:
    """Return the share of the tensor that a device sends over this level."""
    if kind.traffic is Traffic.NEIGHBOURS:
        return 1.0
    free = part.fabric.free_share[kind.name]
    if kind.of_experts:
        units = ranks / part.inside
        return routing.units(units) * (1 - free / units) / routing.top_k
    if kind.traffic is Traffic.ALL_TO_ALL:
        return (ranks - free * part.inside) / ranks
    if part.fabric.flat:
        return kind.rounds * (1 - free / ranks) / part.inside
    return kind.rounds * (1 - free / part.parts) / part.inside


def _ring_hops(kind: CollectiveKind, part: _Part, ranks: int) -> float:
    """Return the hops of one level in a ring: one ring through all ranks, or one per level."""
    units = ranks / part.inside
    steps = units - units / part.parts if part.fabric.flat and units > part.parts else part.parts - 1.0
    return kind.rounds * steps


def _tree_hops(kind: CollectiveKind, part: _Part, ranks: int) -> float:
    """Return the hops of one level in an all-reduce by trees, there and back.

    The tree is a chain inside a node and a double tree between nodes.
    """
    return 2 * (math.log2(part.parts) if part.fabric.tree else part.parts - 1.0)


def _pair_hops(kind: CollectiveKind, part: _Part, ranks: int) -> float:
    if kind.traffic is Traffic.NEIGHBOURS:
        return 1.0
    if not part.fabric.flat:
        return part.parts - 1.0
    peers = min(ranks, part.inside * part.parts) - part.inside  # in this unit, but not in the unit below
    return 1.0 + (0.0 if kind.of_experts else part.fabric.message_hop * peers)


_Hops = Callable[[CollectiveKind, _Part, int], float]


def _speed(part: _Part, kind: CollectiveKind) -> float:
    """Return a device's bandwidth on a level: in a mesh from its links to the members, or by measured factors."""
    alone = kind.traffic is Traffic.NEIGHBOURS
    if not part.fabric.by_ranks:
        return part.level.group_bytes_per_s(2 if alone else part.parts)
    factor = part.fabric.ranks_factor(2 if alone else part.inside * part.parts)
    return factor * part.level.bytes_per_s / part.level.oversubscription


def _path(
    kind: CollectiveKind,
    ranks: int,
    parts: list[_Part],
    paths: list[Path],
    hops: _Hops,
    lanes: float = 1.0,
    routing: Routing = MEASURED,
) -> tuple[float, float, float]:
    """Return alpha, w and chunk factor of a path from its constants per level; `lanes` carry the bytes in parallel."""
    alpha = w = base = chunk = 0.0
    for part, path in zip(parts, paths, strict=True):
        speed = _speed(part, kind) * path.efficiency * part.fabric.efficiency[kind.name]
        alpha += hops(kind, part, ranks) * path.hop * part.level.latency_s
        w = max(w, _share(kind, part, ranks, routing) / (speed * lanes))
        base, chunk = max(base, path.base_s), max(chunk, path.chunk)
    return base + alpha, w, chunk


def _of_protocols(
    tables: list[Mapping[Protocol, Path]],
    kind: CollectiveKind,
    ranks: int,
    parts: list[_Part],
    hops: _Hops,
    routing: Routing = MEASURED,
) -> Iterator[tuple[Protocol, tuple[float, float, float]]]:
    """Yield one path per protocol that all levels have."""
    for protocol in Protocol:
        if all(protocol in table for table in tables):
            paths = [table[protocol] for table in tables]
            lanes = 1.0
            if kind.traffic is Traffic.ALL_TO_ALL and not kind.of_experts and protocol is not Protocol.SIMPLE:
                # short messages to several peers take one channel each, long ones all channels
                lanes = min(ranks - 1.0, 1 / max(path.efficiency for path in paths))
            yield protocol, _path(kind, ranks, parts, paths, hops, lanes, routing)


def _spreads(kind: str, parts: list[_Part]) -> tuple[float, float]:
    fabrics = [part.fabric for part in parts]
    return max(f.spread[kind] for f in fabrics), max(f.latency_spread[kind] for f in fabrics)


def seconds_by_bytes(
    kind: str,
    group: Group,
    levels: tuple[Level, ...],
    fabrics: Mapping[str, Fabric] = FABRICS,
    routing: Routing = MEASURED,
) -> Curve:
    """Return the seconds by bytes of one collective over a group of at least 2. `routing`: of tokens to experts."""
    known, parts = _known(kind), _parts(group, levels, fabrics)
    if known.traffic is Traffic.NEIGHBOURS:
        parts = parts[-1:]
    spread, latency_spread = _spreads(kind, parts)
    tag = Tag.FITTED if all(kind in part.fabric.fitted for part in parts) else Tag.ASSUMED
    small, large, switch = _choice(known, group.size, parts, routing)
    floor = _fastest(small, switch) if small else 0.0
    latency_s = _fastest(small or large, 0.0)
    return Curve(small, large, switch if small else -1.0, floor, spread, latency_spread * latency_s, tag)


_Paths = tuple[tuple[float, float, float], ...]  # alpha, w and chunk factor of each


def _choice(kind: CollectiveKind, ranks: int, parts: list[_Part], routing: Routing) -> tuple[_Paths, _Paths, float]:
    """Return the paths up to a size in bytes, the paths beyond it, and this size."""
    outer = parts[-1].fabric
    if kind.traffic is not Traffic.RING:
        pairs = [part.fabric.experts if kind.of_experts else part.fabric.p2p for part in parts]
        return (), tuple(path for _, path in _of_protocols(pairs, kind, ranks, parts, _pair_hops, routing)), 0.0
    if kind.returns_sums and outer.tree:
        tables = [part.fabric.tree or part.fabric.ring for part in parts]
        return (), tuple(path for _, path in _of_protocols(tables, kind, ranks, parts, _tree_hops)), 0.0
    alone = len(parts) == 1
    switch = outer.switch_bytes * ranks if alone else 0.0
    small: list[tuple[float, float, float]] = []
    large: list[tuple[float, float, float]] = []
    for protocol, path in _of_protocols([p.fabric.ring for p in parts], kind, ranks, parts, _ring_hops):
        (small if switch and protocol is not Protocol.SIMPLE else large).append(path)
    if kind.returns_sums and alone and outer.nvls is not None and ranks >= outer.nvls_ranks:
        # the switch reduces: a device sends its tensor once, then the part whose sum it owns
        lanes = _share(kind, parts[0], ranks) / (1 + 1 / ranks)
        large.append(_path(kind, ranks, parts, [outer.nvls], lambda *_: 1.0, lanes))
        switch = outer.nvls_switch_bytes
    return tuple(small), tuple(large), switch


@lru_cache(maxsize=65536)
def _curve(kind: str, group: Group, levels: tuple[Level, ...], routing: Routing) -> Curve:
    return seconds_by_bytes(kind, group, levels, routing=routing)


def group_collective_s(
    kind: str,
    num_bytes: float,
    group: Group,
    cluster: Cluster,
    profile: Profile | None = None,
    routing: Routing | None = None,
) -> Quantity:
    """Return the seconds of one collective over `group`, from the profile if it has it, else from the model above.

    For send_recv it is the slowest hop between neighbours of the group; use `Group(2, stride)` for one hop.

    Args:
        num_bytes: As for `wire_bytes`.
        routing: How tokens chose the experts that the tensor has a copy for, for kinds made for experts; None: as
            measured.

    Raises: LayoutError for an unknown kind, a negative size or a group beyond the cluster.
    """
    known = _known(kind)
    if num_bytes < 0:
        raise LayoutError(f"{kind} of {num_bytes} bytes: a size is not negative")
    if group.size == 1:
        return ZERO
    if (group.size - 1) * group.stride >= cluster.num_devices:
        raise LayoutError(
            f"a group of {group.size} ranks with stride {group.stride} does not fit the {cluster.num_devices} devices"
        )
    latency = ZERO
    if profile is not None and not known.of_experts:
        measured = profile.collective_s(kind, num_bytes, group.size, group.stride)
        if measured is not None:
            return measured
        latency = profile.longest_s(kind, group.size, group.stride) or ZERO  # only small messages were measured
    levels = cluster.levels_of(group, known.traffic)
    return _curve(kind, group, levels, routing or MEASURED).quantity(num_bytes) + latency
