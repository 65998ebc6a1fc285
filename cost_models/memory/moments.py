"""What a rank holds at the moments of a step at which it may be fullest, as plain numbers of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.parameters import States
from autoplan.schedules.schedule import Waits


class Moment(NamedTuple):
    """The terms that differ between the moments of a step, in bytes.

    `gathered`: parameters that ZeRO has gathered; None: as many as a rank ever has.
    """

    name: str
    gradients: float
    held: float
    transient: float
    buffers: float = 0.0
    gathered: float | None = None

    def num_bytes(self, gathered: float) -> float:
        """Return the sum of the terms. `gathered`: parameters that a rank gathers."""
        now = gathered if self.gathered is None else self.gathered
        return self.gradients + self.held + self.transient + self.buffers + now


class Held(NamedTuple):
    """Activations of one chunk, in bytes.

    `one`: of a micro-batch. `running`: for each unit, the held bytes and the transient bytes while it runs backward.
    `transient`: the most bytes beyond `one`.
    """

    one: float
    running: tuple[tuple[float, float], ...]
    transient: float


def most_of(waits: Waits, one: float, spent: float, others: bool = False) -> float:
    """Return the most bytes of micro-batches of one chunk, of which those that wait have spent some.

    Args:
        others: without the one that runs.
    """
    return max((held - others) * one - waiting * spent for held, waiting in waits)


@dataclass(frozen=True)
class RankStates:
    """The memory of a rank with given units that recompute does not change, in bytes.

    `gathered`: parameters that it gathers. `reducing`: the largest gradient that is reduced and not kept whole.
    """

    grads: float
    gathered: float
    parameters: float
    optimizer: float
    placeholders: float
    reducing: float


@dataclass(frozen=True)
class Rows:
    """The memory of a rank with several chunks that recompute does not change, in bytes by action.

    `more`: by chunk, the most that a moment of its first backward has beyond those of its fullest backward.
    """

    grads: Array
    reducing: Array
    gathered: Array
    more: dict[int, float]


@dataclass(frozen=True)
class TiedStates:
    """A parameter that several units use and a rank holds once: the first and last of these units, and its bytes."""

    first: int
    last: int
    states: States
