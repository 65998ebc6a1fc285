"""Collectives of a communication library on each kind of link: protocols and algorithms, as data.

FABRICS["nvlink4"]       Fabric, from profiles/links/nccl.json

NCCL has three protocols: LL (8-byte words with flags: the least latency, at most half the bandwidth), LL128 (128 bytes)
and Simple (chunks with fences: the full bandwidth). It sends along rings or trees, or the switch itself reduces (NVLS),
and it chooses by message size. A `Path` is one protocol of one algorithm on one kind of link; `network.collectives`
chooses the path of a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS

DATA = "links/nccl.json"


class Protocol(StrEnum):
    """The way a receiver knows that bytes have arrived. Simple is the only protocol that other libraries have."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


@dataclass(frozen=True)
class Path:
    """One protocol of one algorithm on one kind of link.

    Attributes:
        base_s: Seconds of a collective regardless of its size.
        hop: Seconds of one hop, as a multiple of the level's latency.
        efficiency: Share of the level's bandwidth that it reaches.
        chunk: Factor c of the cost of chunks, c * sqrt(a * w).
    """

    base_s: float
    hop: float
    efficiency: float
    chunk: float


@dataclass(frozen=True)
class Fabric:
    """Collectives on one kind of link.

    Attributes:
        flat: True: one ring through all ranks, as NCCL builds it. False: one ring per level (an unknown library).
        ring, tree: Paths by protocol; a fabric without trees uses rings instead.
        p2p: Paths of messages between pairs, by protocol.
        experts: Paths of kernels made for experts, by protocol.
        nvls: Path of reductions inside the switch; None if there are none.
        nvls_ranks: The fewest ranks, on one level, for nvls.
        switch_bytes: A ring on this level alone leaves LL and LL128 when a rank's share of the tensor exceeds this,
            even if that costs time. 0: the fastest path.
        nvls_switch_bytes: NVLS begins at this tensor size. 0: the fastest path.
        message_hop: Hops that each peer beyond the unit below costs in an all_to_all: messages share one port.
        efficiency: Factor on the bandwidth, by kind.
        free_share: Share of the rank's own part that costs nothing, by kind (1: all of it).
        by_ranks: (ranks, factor of the bandwidth from this many ranks on), for groups that slow each other down.
        spread, latency_spread: By kind, from rows held out of the fit: the time lies within a factor of 1 + spread +
            latency_spread * T(0) / T(N). Sources differ most where latency dominates: in drivers, clocks and how they
            count.
        fitted: Kinds that measurements of this fabric cover; the others are assumed.
    """

    flat: bool
    ring: Mapping[Protocol, Path]
    p2p: Mapping[Protocol, Path]
    experts: Mapping[Protocol, Path]
    tree: Mapping[Protocol, Path]
    nvls: Path | None
    nvls_ranks: int
    switch_bytes: float
    nvls_switch_bytes: float
    message_hop: float
    efficiency: Mapping[str, float]
    free_share: Mapping[str, float]
    by_ranks: tuple[tuple[int, float], ...]
    spread: Mapping[str, float]
    latency_spread: Mapping[str, float]
    fitted: frozenset[str]

    def ranks_factor(self, ranks: int) -> float:
        """Return the factor of the bandwidth in a group of `ranks` on this level."""
        return next((factor for least, factor in reversed(self.by_ranks) if ranks >= least), 1.0)


def _paths(data: Mapping[str, Mapping[str, float]]) -> Mapping[Protocol, Path]:
    return MappingProxyType({Protocol(name): Path(**path) for name, path in data.items()})


def fabric_of(data: Mapping[str, Any]) -> Fabric:
    """Return the fabric that a row of the data describes; tables by kind may have a `default`.

    Raises: KeyError for a field or kind that the row lacks, ValueError for an unknown protocol.
    """
    out: dict[str, Any] = {f.name: data[f.name] for f in fields(Fabric)}
    for name in ("ring", "p2p", "experts", "tree"):
        out[name] = _paths(data[name])
    for name in ("efficiency", "free_share", "spread", "latency_spread"):
        table = data[name]
        out[name] = MappingProxyType({k: table[k] if k in table else table["default"] for k in COLLECTIVE_KINDS})
    out["nvls"] = None if data["nvls"] is None else Path(**data["nvls"])
    out["by_ranks"] = tuple((int(n), float(factor)) for n, factor in data["by_ranks"])
    out["fitted"] = frozenset(data["fitted"])
    return Fabric(**out)


def rows() -> dict[str, Any]:
    """Return the unparsed rows of the data, by fabric."""
    text = files("autoplan.profiles").joinpath(DATA).read_text(encoding="utf-8")
    return dict(json.loads(text)["fabrics"])


FABRICS: Mapping[str, Fabric] = MappingProxyType({name: fabric_of(row) for name, row in rows().items()})
