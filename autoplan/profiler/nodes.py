"""The nodes of the ranks of a measuring job: all ranks agree on them before measuring, and failures name a node.

A node is an agent of torchrun on a host: two agents on one host are two nodes, so that one machine can play several.
Ranks of a node are consecutive, as torchrun numbers them; `Group(size, stride)` relies on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.errors import ProfileError
from autoplan.runtime.failure import RankFailure

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class MeasuredNodes:
    """The names of a job's nodes in the order of their ranks, `ranks_per_node` each."""

    names: tuple[str, ...]
    ranks_per_node: int

    def of(self, rank: int) -> str:
        """Return the node of a rank."""
        return self.names[rank // self.ranks_per_node]

    def is_first(self, rank: int) -> bool:
        """Return True for the first rank of a node, which speaks for it."""
        return rank % self.ranks_per_node == 0

    def explain(self, failure: RankFailure) -> RankFailure:
        """Return the same failure with the node where it began."""
        if failure.rank is not None:
            return RankFailure(failure.rank, f"on node {self.of(failure.rank)}: {failure.reason}")
        if not failure.ranks:
            return failure
        where = dict.fromkeys(map(self.of, failure.ranks))
        return RankFailure(None, f"node {', '.join(where)}: {failure.reason}")


def under_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if torchrun, or a launcher that sets the same variables, started this process."""
    environment = os.environ if environment is None else environment
    return all(name in environment for name in _TORCHRUN)


def num_nodes(world_size: int, environment: Mapping[str, str] | None = None) -> int:
    """Return the number of nodes of a job of `world_size` ranks, by torchrun's variables; 1 if they are another
    job's."""
    environment = os.environ if environment is None else environment
    if not under_torchrun(environment) or environment["WORLD_SIZE"] != str(world_size):
        return 1
    local = int(environment["LOCAL_WORLD_SIZE"])
    return world_size // local if local and world_size % local == 0 else 1


def identity(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return host and agent of this rank; ranks with equal ones are on one node."""
    environment = os.environ if environment is None else environment
    return socket.gethostname(), environment.get("GROUP_RANK", "")


def agree_on_nodes(identities: Sequence[tuple[str, str]]) -> MeasuredNodes:
    """Return the nodes of a job from every rank's `identity`, by rank.

    Raises:
        ProfileError: if the ranks of a node are not consecutive, or nodes have different numbers of ranks.
    """
    names: dict[tuple[str, str], str] = {}
    hosts = [host for host, _ in dict.fromkeys(identities)]
    for host, agent in identities:
        names.setdefault((host, agent), host if hosts.count(host) == 1 else f"{host} (node rank {agent})")
    counts = {key: identities.count(key) for key in names}
    usual = next(iter(counts.values()))
    for key, count in counts.items():
        if count != usual:
            first = next(iter(names.values()))
            raise ProfileError(
                f"node {names[key]} has {count} ranks, {first} has {usual}; start equally many on every node "
                f"(torchrun --nproc-per-node {min(count, usual)})"
            )
    ordered = [key for key in names for _ in range(usual)]
    if list(identities) != ordered:
        rank = next(i for i, (a, b) in enumerate(zip(identities, ordered, strict=True)) if a != b)
        raise ProfileError(
            f"rank {rank} is on node {names[identities[rank]]}, between ranks of {names[ordered[rank]]}; number the "
            "ranks node by node, as torchrun does"
        )
    return MeasuredNodes(tuple(names.values()), usual)
