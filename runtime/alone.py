"""A rank that runs without the others, on tensors without values: a rehearsal gives it what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from autoplan.runtime.batch import Counts


class Vote(Protocol):
    """The outcome of a pipeline's vote on how shapes become known, which torch reads of a tensor."""

    def item(self) -> Any:
        """Return 1 if every stage declares its shapes."""


@dataclass(frozen=True)
class LoneRank:
    """What a rank is given instead of asking the others for it.

    It sums its losses in a message of their own, as a plan counts them; on CPUs they may travel with gradients.

    Attributes:
        counts: of the global batch, in every step.
        vote: of the pipeline.
        overflows: a gradient of some rank is not finite, in float16.
    """

    counts: Counts
    vote: Vote
    overflows: bool = False
