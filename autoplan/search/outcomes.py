"""The ways in which a search decides its candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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


def tally(
    decided: Iterable[Decided], others: Mapping[Decided | None, int]
) -> tuple[Counter[Outcome], dict[str, int], dict[str, int]]:
    """Return the number of candidates by outcome, of illegal ones by rule, and of those too big by term.

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
    return counts, rules, terms
