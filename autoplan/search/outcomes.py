"""The ways in which a search decides its candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Tally:
    """Numbers of decided candidates.

    Attributes:
        outcomes: all of them, by outcome.
        illegal: the illegal ones, by rule.
        too_big: those that do not fit, by term of memory.
    """

    outcomes: Counter[Outcome]
    illegal: dict[str, int]
    too_big: dict[str, int]


def tally(decided: Iterable[Decided], others: Mapping[Decided | None, int]) -> Tally:
    """Count the decided candidates.

    Args:
        others: numbers of further candidates; those under None are not decided, and not counted.
    """
    found = Counter(decided)
    found += Counter({how: n for how, n in others.items() if how is not None})
    counts: Counter[Outcome] = Counter()
    for (outcome, _), number in found.items():
        counts[outcome] += number
    rules, terms = (
        {detail: n for (outcome, detail), n in found.items() if outcome is which}
        for which in (Outcome.ILLEGAL, Outcome.TOO_BIG)
    )
    return Tally(counts, rules, terms)
