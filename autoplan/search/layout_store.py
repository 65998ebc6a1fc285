"""What several searches share: the points of a sweep, the other choices that an explanation prices.

These are layouts, what they are solved by and what is made of them, seconds of equal operations and parameters, and the
degrees of the best plans, with which the next search begins.

Two tasks have the same problem of layouts (`autoplan.search.layout_problem`) if graph, degrees, sizes and the
prices that their tensor-parallel ranks see are equal, but for the number of micro-batches n, over which traffic and
updates once per step are spread: every option costs a + b / n. The least cost is then a concave function of 1 / n, and
that of one selection a linear one. So a selection that is the best for two numbers of micro-batches is the best for
every number between them, and its bound there is at least the line through both bounds. For any other number, the
program that was made for one is solved anew (`autoplan.search.intra.LayoutProgram`), which takes half the time.

Under other prices, those of another device for example, the problem has the same options, conversions and rows
(`layout_problem.shape_key`): only prices are made anew. Where the best layouts are the same, their work is, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autoplan.config.parallel import ParallelConfig
from autoplan.ir.layout import Axis
from autoplan.program.problem import Selection
from autoplan.search.intra import IntraSolution

FEWEST, MOST = 1, 2**40  # numbers of micro-batches between which all others lie
MOST_MADE = 1024  # workloads kept; a search of a mixture of experts makes some 300, each of about 100 kB

MOST_BEST = 4  # best candidates kept

_T = TypeVar("_T")
Solve = Callable[[int], tuple[tuple[Axis, ...], IntraSolution]]  # from the number of micro-batches


@dataclass(frozen=True)
class _Range:
    """The fewest and the most micro-batches for which one selection was solved to be the best."""

    fewest: tuple[int, IntraSolution]
    most: tuple[int, IntraSolution]

    def holds(self, number: int) -> bool:
        return self.fewest[0] <= number <= self.most[0]

    def at(self, number: int) -> IntraSolution:
        """Return the solution for a number of micro-batches inside."""
        (low, few), (high, many) = self.fewest, self.most
        if number == low or few is many:
            return few
        share = (1 / number - 1 / high) / (1 / low - 1 / high)
        cost_s, bound_s = (
            share * getattr(few, name) + (1 - share) * getattr(many, name) for name in ("cost_s", "bound_s")
        )
        return replace(many, cost_s=cost_s, bound_s=min(cost_s, bound_s))

    def joined(self, number: int, solution: IntraSolution) -> _Range | None:
        """Return the range with one more solution; None if its selection is another one."""
        if _names(solution) != _names(self.most[1]):
            return None
        mine = number, solution
        return _Range(min(self.fewest, mine, key=lambda e: e[0]), max(self.most, mine, key=lambda e: e[0]))


def layouts_in(selection: Selection) -> frozenset[object]:
    """Return what a selection says of layouts, without prices: the work of a rank follows from it and the sizes."""
    return frozenset((c, o.name, o.requires, o.provides, o.strategy) for c, o in selection.items())


def _names(solution: IntraSolution) -> dict[str, str]:
    return {choice: option.name for choice, option in solution.selection.items()}


@dataclass(frozen=True, eq=False)
class ById:
    """An object as a part of a key: equal to itself alone. It is kept, so that no other gets its place."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


@dataclass(frozen=True)
class LayoutStore:
    """Proved layouts by everything that their problem depends on, but for the number of micro-batches; and their work.

    Its keys may hold objects that compare by identity: it keeps them alive.

    Attributes:
        best: candidates of the best plans of the last searches, first the last one.
    """

    best: list[ParallelConfig] = field(default_factory=list)

    _found: dict[object, tuple[tuple[Axis, ...], list[_Range]]] = field(default_factory=dict)
    _made: dict[object, Any] = field(default_factory=dict)

    def get(self, key: object, number: int, solve: Solve) -> tuple[tuple[Axis, ...], IntraSolution]:
        """Return the axes and the best layout for a number of micro-batches, solved if it is not known.

        Where the task is known with other numbers alone, the end of all numbers on this side is solved first: if the
        selection is the same, all numbers between them are known from then on. Raises what `solve` raises.
        """
        axes, known = self._found.get(key, ((), []))
        for one in known:
            if one.holds(number):
                return axes, one.at(number)
        if known:
            nearest = min(known, key=lambda r: min(abs(1 / n - 1 / number) for n in (r.fewest[0], r.most[0])))
            end = FEWEST if number < nearest.fewest[0] else MOST
            if not any(one.holds(end) for one in known):
                found = self.keep(key, end, *solve(end))
                if found.holds(number):
                    return axes, found.at(number)
        axes, solution = solve(number)
        self.keep(key, number, axes, solution)
        return axes, solution

    def made(self, key: object, make: Callable[[], _T]) -> _T:
        """Return what `make` returned for this key, if it is among the last that were made. They stay unchanged."""
        if key not in self._made:
            if len(self._made) >= MOST_MADE:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        found: _T = self._made[key]
        return found

    def found_best(self, candidates: Sequence[ParallelConfig]) -> None:
        """Keep the candidates of the best plans of a search."""
        self.best[:] = list(dict.fromkeys((*candidates, *self.best)))[:MOST_BEST]

    def keep(self, key: object, number: int, axes: tuple[Axis, ...], solution: IntraSolution) -> _Range:
        """Store a solution, if it is proved, with those that have its selection; return their range."""
        one = _Range((number, solution), (number, solution))
        if solution.status != "optimal":
            return one
        _, known = self._found.setdefault(key, (axes, []))
        for i, other in enumerate(known):
            both = other.joined(number, solution)
            if both is not None:
                known[i] = both
                return both
        known.append(one)
        return one
