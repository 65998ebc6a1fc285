"""The memory that a plan may take, and how much of the uncertainty of its need has to fit as well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from autoplan.config.planning import HIGH_END_RISK
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.quantity import Quantity


@dataclass(frozen=True)
class Room:
    """The memory of one device and its share of the host's, in bytes.

    Attributes:
        guard: where in the interval of a need the bytes stand that have to fit: 0 at the expected ones, 1 at the high
            end, between and beyond in proportion.
    """

    device_bytes: float
    host_bytes: float = math.inf
    guard: float = 0.0

    @staticmethod
    def guarded(device_bytes: float, host_bytes: float, risk: float) -> Room:
        """Return the room in which a plan runs out of memory with at most this probability.

        Needs are taken as normal on their upper side, and all terms of a need as wrong in the same direction.
        """
        normal = NormalDist()
        return Room(device_bytes, host_bytes, normal.inv_cdf(1 - risk) / normal.inv_cdf(1 - HIGH_END_RISK))

    def bytes_of(self, need: Quantity) -> float:
        """Return the bytes of a need that have to fit."""
        return need.mid + self.guard * (need.high - need.mid)

    def total_bytes(self, terms: Mapping[str, Quantity]) -> float:
        """Return the bytes of all terms that have to fit."""
        return sum(map(self.bytes_of, terms.values()))

    def fits_device(self, memory: RankMemory) -> bool:
        """Return True if what a rank holds on its device fits."""
        return self.total_bytes(memory.terms) <= self.device_bytes

    def fits_host(self, memory: RankMemory) -> bool:
        """Return True if what a rank holds on the host fits."""
        return self.total_bytes(memory.host) <= self.host_bytes

    def fits(self, memory: RankMemory) -> bool:
        """Return True if a rank fits."""
        return self.fits_device(memory) and self.fits_host(memory)
