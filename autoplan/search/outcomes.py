"""The ways in which a search decides its candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from autoplan.config.parallel import ParallelConfig


class Outcome(Enum):
    """The way in which a candidate was decided."""

    ILLEGAL = "illegal"
    TOO_BIG = "too big"
    BOUNDED_OUT = "bounded out"
    SOLVED = "solved"


Decided = tuple[Outcome, str]  # how, and by which rule or term
LARGE_VALUES: Decided = (Outcome.TOO_BIG, "activations")
BOUNDED_OUT: Decided = (Outcome.BOUNDED_OUT, "")
SOLVED: Decided = (Outcome.SOLVED, "")
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


@dataclass(frozen=True)
class Settled:
    """The outcomes of all candidates at the end of a search.

    Attributes:
        least_open_s: the least bound of an open candidate; inf without any.
        least_solved_s: the least bound of a solved one, which its best cut may still reach.
    """

    tally: Tally
    num_open: int
    least_open_s: float
    least_solved_s: float


def all_counted(
    candidates: Iterable[ParallelConfig],
    outcomes: MutableMapping[ParallelConfig, Decided],
    bounds: Mapping[ParallelConfig, float],
    not_made: Mapping[Decided | None, int],
    not_made_bounds: Mapping[float, int],
    cutoff_s: float,
) -> Settled:
    """Decide by its bound every candidate that is not decided, and count all.

    Args:
        outcomes: how candidates were decided; those that are bounded out are added.
        not_made: numbers of candidates that were never made, as they are decided.
        not_made_bounds: numbers of candidates that were never made, by bound in seconds.
        cutoff_s: candidates whose bounds are not below are out.
    """
    others = Counter(dict(not_made))
    least_solved, least_open = inf, inf
    for bound, number in not_made_bounds.items():
        others[BOUNDED_OUT if bound >= cutoff_s else None] += number
        least_open = least_open if bound >= cutoff_s else min(least_open, bound)
    num_open = others[None]
    for candidate in candidates:
        bound = bounds.get(candidate, 0.0)
        if candidate not in outcomes and bound >= cutoff_s:
            outcomes[candidate] = BOUNDED_OUT
        if candidate not in outcomes:
            num_open, least_open = num_open + 1, min(least_open, bound)
        elif outcomes[candidate][0] is Outcome.SOLVED:
            least_solved = min(least_solved, bound)
    return Settled(tally(outcomes.values(), others), num_open, least_open, least_solved)
