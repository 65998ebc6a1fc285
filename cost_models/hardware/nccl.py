"""How a communication library runs collectives on each kind of link: protocols and algorithms, as data.

FABRICS["nvlink4"]       Fabric, from profiles/links/nccl.json

NCCL sends by three protocols: LL (8-byte words with flags: the least latency, half the bandwidth at most), LL128 (128
bytes) and Simple (chunks with fences: all of the bandwidth), along rings, trees, or by the switch itself (NVLS), and
chooses by message size. A `Path` is one of these on one kind of link; which of them a group takes:
`network.collectives`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.resources import files
from types import MappingProxyType
from typing import Any

DATA = "links/nccl.json"
# ep_dispatch and ep_combine: kernels made for experts, as DeepEP's
NCCL_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
    "ep_dispatch",
    "ep_combine",
)


class Protocol(StrEnum):
    """How bytes and their arrival are told apart; Simple is the only one that other libraries have."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


@dataclass(frozen=True)
class Path:
    """One protocol of one algorithm on one kind of link.

    base_s: seconds of a collective whatever its size. hop: seconds of one hop over the latency of the level.
    efficiency: share of the level's bandwidth that it reaches. chunk: factor c of the cost of chunks, c * sqrt(a * w).
    """

    base_s: float
    hop: float
    efficiency: float
    chunk: float


@dataclass(frozen=True)
class Fabric:
    """Collectives on one kind of link.

    flat: one ring through all ranks, as NCCL builds it; else one per level (a library that is not known).
    ring, tree, p2p (messages between pairs), experts (kernels for experts): paths by protocol; a fabric without trees
    does without. nvls: reductions inside the switch, for
    groups of at least `nvls_ranks` on one level.
    switch_bytes: a ring on this level alone leaves LL and LL128 when a rank's share of the tensor exceeds this, even
    where that costs time; nvls_switch_bytes: NVLS begins at this size of the tensor. 0: whatever is fastest.
    message_hop: hops that each peer beyond the unit below costs in an all_to_all: one after the other over one port.
    efficiency: factor by kind. free_share: how much of what a rank keeps for itself costs nothing, by kind (1: all).
    by_ranks: (ranks, factor of the bandwidth from this many on), where groups get in each other's way.
    spread, latency_spread: the time lies within a factor of 1 + spread + latency_spread * T(0) / T(N), by kind; from
    rows held out of the fit. Sources differ most where latency rules: in drivers, clocks and how they count.
    fitted: kinds that measurements of this fabric hold; the others are assumed.
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
        """Factor of the bandwidth in a group of `ranks` on this level."""
        return next((factor for least, factor in reversed(self.by_ranks) if ranks >= least), 1.0)


def _paths(data: Mapping[str, Mapping[str, float]]) -> Mapping[Protocol, Path]:
    return MappingProxyType({Protocol(name): Path(**path) for name, path in data.items()})


def fabric_of(data: Mapping[str, Any], kinds: tuple[str, ...]) -> Fabric:
    """The fabric that a row of the data describes; tables by kind may give a `default`.

    Raises: KeyError for a field or kind that the row lacks, ValueError for an unknown protocol.
    """
    out: dict[str, Any] = {f.name: data[f.name] for f in fields(Fabric)}
    for name in ("ring", "p2p", "experts", "tree"):
        out[name] = _paths(data[name])
    for name in ("efficiency", "free_share", "spread", "latency_spread"):
        table = data[name]
        out[name] = MappingProxyType({k: table[k] if k in table else table["default"] for k in kinds})
    out["nvls"] = None if data["nvls"] is None else Path(**data["nvls"])
    out["by_ranks"] = tuple((int(n), float(factor)) for n, factor in data["by_ranks"])
    out["fitted"] = frozenset(data["fitted"])
    return Fabric(**out)


def rows() -> dict[str, Any]:
    """The rows of the data as they stand, by fabric."""
    text = files("autoplan.profiles").joinpath(DATA).read_text(encoding="utf-8")
    return dict(json.loads(text)["fabrics"])


def read_fabrics(kinds: tuple[str, ...]) -> Mapping[str, Fabric]:
    """All fabrics by name, in the order of the data."""
    return MappingProxyType({name: fabric_of(row, kinds) for name, row in rows().items()})


FABRICS: Mapping[str, Fabric] = read_fabrics(NCCL_KINDS)
