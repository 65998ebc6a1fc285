"""Text of an op in the emitted program: its parts, and how templates are filled.

An emitter sees argument texts, attributes and local sizes. The parts that depend on mesh and methods (the axes of a
special form, of attention over cut sequences, of experts, of sums over the batch) are given to it as `OpText.over`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoplan.ir.symbols import Expr, Shape


@dataclass(frozen=True)
class OpText:
    """The parts of the text of one op.

    Attributes:
        args: texts of its arguments without absent ones.
        inputs: shapes of its inputs in the whole model.
        outputs: shapes of its outputs on one rank.
        whole: gives a size of the model from the size on this rank.
        over: text of the axes that it works over, or of the parts of its output that this rank has; empty if it needs
            none.
        bias: text of a fused bias; empty if there is none.
        num_partial: number of ranks over which the op makes its output a pending sum.
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
    """Return the Python text of a symbolic size, with exact integer division."""
    return _divided(size, "//")


def literal(value: Any) -> str:
    """Return the Python text of an attribute: a number, a symbolic size, a plain value.

    An expression with fractions is a float that the model made of a size, as `0.1 * x.shape[1]`.
    """
    if isinstance(value, Expr):
        return f"({_divided(value, '/')})" if value.value is None else py(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _divided(size: Expr, by: str) -> str:
    denominator = math.lcm(*(coefficient.denominator for _, coefficient in size.terms))
    text = str(size.scale(Fraction(denominator))).replace("*", " * ").replace("+", " + ")
    if denominator == 1:
        return text
    return f"{text} {by} {denominator}" if len(size.terms) == 1 else f"({text}) {by} {denominator}"


def shape_text(sizes: Sequence[Expr]) -> str:
    """Return comma-separated local sizes."""
    return ", ".join(py(s) for s in sizes)


def shape_arguments(sizes: Sequence[Expr]) -> str:
    """Return local sizes as the arguments of `reshape` or `expand`, which take no less than one."""
    return shape_text(sizes) or "()"


@dataclass(frozen=True)
class TextTemplate:
    """Text with the arguments by position and the attributes by name: `{0}.clamp({min}, {max})`.

    `{shape}`: the local sizes of the first output.
    """

    text: str

    def __call__(self, t: OpText) -> str:
        given = {
            name: literal(t.whole(value) if name == "scalar" and isinstance(value, Expr) else value)
            for name, value in t.attrs.items()
        }
        return self.text.format(*t.args, shape=shape_arguments(t.outputs[0]), **given)
