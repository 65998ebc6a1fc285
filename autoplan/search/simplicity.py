"""The choice among plans whose prices are closer than the model's own error: the simplest.

A price that differs by less than the error does not say which plan is faster. What is known for certain then decides:
fewer kinds of parallelism, a plain schedule, fewer stages per rank and less recompute have less that can go wrong, and
less that a user must understand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from autoplan.config.parallel import ParallelConfig
from autoplan.schedules.schedule import PLAIN_SCHEDULE

MOST_EXAMINED = 64  # candidates that are priced only because they may be simpler


class Complexity(NamedTuple):
    """The complexity of a plan, the heaviest term first; smaller is simpler.

    Attributes:
        num_kinds: kinds of parallelism beside plain data parallelism and its ZeRO, and offload.
        scheduled: 1 for a schedule other than 1F1B.
        recomputed: share of layers with any recompute, in quarters, rounded up.
    """

    num_kinds: int
    scheduled: int
    virtual_stages: int
    recomputed: int = 0


def complexity(config: ParallelConfig, recomputed: float = 0.0) -> Complexity:
    """Return how far a configuration is from plain data parallelism. `recomputed`: share of its layers."""
    c = config
    kinds = (c.tp > 1, c.pp > 1, c.cp > 1, c.ep > 1, bool(c.offload), c.zero_replicas > 1)
    return Complexity(sum(kinds), int(c.schedule != PLAIN_SCHEDULE), c.virtual_stages, math.ceil(4 * recomputed))


def kind_of(config: ParallelConfig) -> tuple[bool, ...]:
    """Return which kinds of parallelism a configuration uses: over tp, pp, cp, ep, sharded parameters, the host."""
    c = config
    return (c.tp > 1, c.pp > 1, c.cp > 1, c.ep > 1, c.zero_stage == 3, bool(c.offload))


def limit_s(fastest_s: float, equal_within: float) -> float:
    """Return the step time up to which plans are equal to the fastest."""
    return fastest_s * (1 + equal_within)


def simpler_first(
    candidates: Iterable[tuple[ParallelConfig, float]], than: Complexity, below_s: float
) -> list[ParallelConfig]:
    """Return the candidates that may be simpler than `than`, the simplest first.

    Args:
        candidates: each with a lower bound of its step time.
        below_s: a candidate with a bound above this is not an equal.
    """
    some = [(complexity(c), bound, c) for c, bound in candidates if bound <= below_s]
    return [c for least, _, c in sorted((e for e in some if e[0] < than), key=lambda e: e[:2])]
