"""Rules whose labels depend on the arguments of an op, shared by several families."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.language import Labels, OpRule, Role

_ONE = Expr.of(1)


class _Side:
    """One of two dim lists that are refined: the labels of its dims, and the rest of the current dim."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.labels: list[list[str]] = [[] for _ in shape]
        self.at = -1
        self.rest: Expr | None = None
        self.advance()

    def advance(self) -> None:
        """Go to the next dim that is not 1; `rest` is None after the last."""
        self.at += 1
        while self.at < len(self.shape) and self.shape[self.at].value == 1:
            self.at += 1
        self.rest = self.shape[self.at] if self.at < len(self.shape) else None

    def take(self, label: str, size: Expr) -> None:
        """Give the current dim a label of `size`, which divides its rest."""
        self.labels[self.at].append(label)
        self.rest = None if self.rest is None else self.rest.divide(size)
        if self.rest == _ONE:
            self.advance()


class Refinement(NamedTuple):
    """The labels of every dim of two dim lists, and the sizes of the labels."""

    left: list[Labels]
    right: list[Labels]
    sizes: dict[str, Expr]


def align(left: Shape, right: Shape) -> Refinement | None:
    """Return the common refinement of two dim lists of equal product (a reshape).

    `(b, s, h)` and `(b*s, h)` refine to labels b | s | h. None if there is none, as for `(6,)` and `(4, ...)`.
    """
    sizes: dict[str, Expr] = {}
    sides = _Side(left), _Side(right)
    while True:
        a, b = sides[0].rest, sides[1].rest
        if a is None or b is None:
            if a is not b:
                return None
            one, other = ([tuple(x) for x in side.labels] for side in sides)
            return Refinement(one, other, sizes)
        common = a if a == b else b if a.divide(b) is not None else a if b.divide(a) is not None else None
        if common is None:
            return None
        label = f"f{len(sizes)}"
        sizes[label] = common
        for side in sides:
            side.take(label, common)


def dim_labels(shape: Shape, prefix: str = "a") -> list[Labels]:
    """Return one label per dim, none for a dim of size 1."""
    return [() if size.value == 1 else (f"{prefix}{i}",) for i, size in enumerate(shape)]


def linear_rule(inputs: list[Labels], outputs: list[Labels], whole: set[str] | None = None, **kw: Any) -> OpRule:
    """Return the rule of an op that is linear in its one input."""
    return OpRule((tuple(inputs),), (tuple(outputs),), (Role.LINEAR,), frozenset(whole or ()), **kw)


def whole_dim(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of an op that keeps its dims; the dim of attribute `dim` cannot be split."""
    labels = dim_labels(ins[0])
    dim = node.attrs["dim"] % len(labels)
    return OpRule((tuple(labels),), (tuple(labels),), (Role.OTHER,), frozenset(labels[dim]))
