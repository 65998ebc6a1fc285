"""How tokens choose experts, and how many nodes or devices the experts of one token are on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of experts by a token: `top_k` of all, or of those in its `top_groups` best of `groups` groups.

    Experts of a group have consecutive numbers, and consecutive experts are on consecutive ranks, so that a group is on
    as few nodes as it can be. A group is as good as its best `top_k / top_groups` experts (DeepSeek-V3, arXiv
    2412.19437, sections 2.1.2 and 3.2.2, limits a token to 4 nodes so; Megatron-Core's `group_limited_topk`). All
    groups chosen: the choice is not limited.
    """

    top_k: int
    groups: int = 1
    top_groups: int = 1

    @property
    def limited(self) -> bool:
        """True if a token cannot choose experts of all groups."""
        return self.top_groups < self.groups

    def units(self, units: float) -> float:
        """Return the expected number of `units` (nodes, devices) with experts of a token, of equal units.

        Not limited, the experts are spread evenly: units * (1 - (1 - 1 / units)^k), since each is on a given unit with
        probability 1 / units. Drawing without replacement from E experts reaches more, by a share of at most k / E and
        usually a few per cent (2 of 8 on 8 units: 2 instead of 1.88).

        Limited, every chosen group has k / top_groups of the experts, because it was chosen for so many. A unit with g
        groups is reached unless all chosen ones are elsewhere; of the m units of one group, its experts reach
        m * (1 - (1 - 1 / m)^(k / top_groups)). Drawing scores at random gives up to 5 % less (DeepSeek-V3 on 4, 8, 16
        and 64 units: 3.12, 3.97, 5.72, 7.50; here 3.14, 4, 6, 7.5).
        """
        free: float = units * (1 - (1 - 1 / units) ** self.top_k)
        if not self.limited:
            return free
        reached: float
        if units > self.groups:
            each = units / self.groups
            reached = self.top_groups * each * (1 - (1 - 1 / each) ** (self.top_k / self.top_groups))
        else:
            elsewhere = self.groups - math.floor(self.groups / units)
            reached = units * (1 - math.comb(elsewhere, self.top_groups) / math.comb(self.groups, self.top_groups))
        return min(free, reached)


MEASURED = Routing(8)  # in all measurements of kernels made for experts
