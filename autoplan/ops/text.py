"""Text of an op in the emitted program: what it is made of, and how templates are filled.

An emitter sees argument texts, attributes and local sizes. What depends on mesh and methods (the axes of a special
form, of attention over cut sequences, of experts, of sums over the batch) is a text given to it, `OpText.over`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoplan.ir.symbols import Expr

Shape = tuple[Expr, ...]


@dataclass(frozen=True)
class OpText:
    """What the text of one op is made of.

    Attributes:
        args: texts of its arguments, those that are absent left out.
        inputs: shapes of its inputs in the whole model.
        outputs: shapes of its outputs on one rank.
        whole: a size of the model, from the sizes of this rank.
        over: text of the axes that it works over, or of the parts of its output that this rank has; empty where it
            needs none.
        bias: text of a bias that is added to it; empty where there is none.
        num_partial: over how many ranks its output is a pending sum because of it.
    """

    args: tuple[str, ...]
    attrs: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    whole: Callable[[Expr], Expr]
    over: str = ""
    bias: str = ""
    num_partial: int = 1


Emitter = Callable[[OpText], str]


def py(size: Expr) -> str:
    """Python text of a symbolic size; exact integer division."""
    denominator = 1
    for _, coefficient in size.terms:
        denominator = max(denominator, coefficient.denominator)
    text = str(size.scale(Fraction(denominator))).replace("*", " * ").replace("+", " + ")
    if denominator == 1:
        return text
    simple = len(size.terms) == 1
    return f"{text} // {denominator}" if simple else f"({text}) // {denominator}"


def literal(value: Any) -> str:
    """Python text of an attribute: a number, a symbolic size, a plain value."""
    if isinstance(value, Expr):
        return f"({py(value)})" if value.value is None else py(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def shape_text(sizes: Sequence[Expr]) -> str:
    """Comma-separated local sizes."""
    return ", ".join(py(s) for s in sizes)


@dataclass(frozen=True)
class TextTemplate:
    """Text with the arguments by position and the attributes by name: `{0}.clamp({min}, {max})`."""

    text: str

    def __call__(self, t: OpText) -> str:
        given = {
            name: literal(t.whole(value) if name == "scalar" and isinstance(value, Expr) else value)
            for name, value in t.attrs.items()
        }
        return self.text.format(*t.args, **given)
