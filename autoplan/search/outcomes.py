"""The ways in which a search decides its candidates."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """The way in which a candidate was decided."""

    ILLEGAL = "illegal"
    TOO_BIG = "too big"
    BOUNDED_OUT = "bounded out"
    SOLVED = "solved"


Decided = tuple[Outcome, str]  # how, and by which rule or term
LARGE_VALUES: Decided = (Outcome.TOO_BIG, "activations")
NO_LAYOUT: Decided = (Outcome.ILLEGAL, "no layout exists at this tp")
