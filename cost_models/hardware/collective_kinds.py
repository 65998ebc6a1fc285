"""Kinds of collectives: a record per kind. Prices, tables of links, profiles and memory read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Traffic(Enum):
    """The pattern in which the ranks of a group send to each other."""

    RING = "ring"
    ALL_TO_ALL = "all to all"
    NEIGHBOURS = "neighbours"  # one message from each rank to the next


@dataclass(frozen=True)
class CollectiveKind:
    """One kind of collective.

    Attributes:
        name: The name in programs, ledgers, profiles and the tables of links.
        traffic: Which ranks send to which; a kind whose traffic is a ring may take a tree instead.
        returns_sums: True if sums are made and then sent back: twice the bytes, and a tree or a switch can do it.
        of_experts: True for a kernel made for experts, such as DeepEP's: each token goes once to each node and once to
            each device with an expert for it. Profiles have no such kernels.
    """

    name: str
    traffic: Traffic = Traffic.RING
    returns_sums: bool = False
    of_experts: bool = False

    @property
    def rounds(self) -> int:
        """The number of times that the tensor goes around a ring."""
        return 2 if self.returns_sums else 1

    @property
    def is_message(self) -> bool:
        """True if a rank sends to single ranks of its group, by the library's own messages."""
        return self.traffic is not Traffic.RING and not self.of_experts


COLLECTIVE_KINDS: Mapping[str, CollectiveKind] = {
    kind.name: kind
    for kind in (
        CollectiveKind("all_reduce", returns_sums=True),
        CollectiveKind("all_gather"),
        CollectiveKind("reduce_scatter"),
        CollectiveKind("all_to_all", Traffic.ALL_TO_ALL),
        CollectiveKind("broadcast"),
        CollectiveKind("send_recv", Traffic.NEIGHBOURS),
        CollectiveKind("ep_dispatch", Traffic.ALL_TO_ALL, of_experts=True),
        CollectiveKind("ep_combine", Traffic.ALL_TO_ALL, of_experts=True),
    )
}
MEASURED_COLLECTIVES = tuple(name for name, kind in COLLECTIVE_KINDS.items() if not kind.of_experts)
