"""Symbolic sizes: polynomials with rational coefficients over `b` (batch), `s` (sequence) and `t` (target sequence).

`t` occurs if a second sequence has a length of its own (the target of an encoder-decoder). Capture happens before the
search chooses the micro-batch, so a dim is `b`, `s`, `b*s`, `s+1` or a number. The operations are those that sizes
need: +, -, *, exact division, evaluation, and a text form for JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Union

SYMBOLS = ("b", "s", "t")  # batch, sequence, target sequence

Monomial = tuple[str, ...]  # sorted symbol names, repeated for powers; () is the constant term
ExprLike = Union["Expr", int, Fraction]


@dataclass(frozen=True)
class Expr:
    """A polynomial. `terms` maps monomials to non-zero coefficients, sorted."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @staticmethod
    def of(value: ExprLike) -> Expr:
        """Return a number as an Expr; an Expr is returned as it is."""
        if isinstance(value, Expr):
            return value
        return Expr._make({(): Fraction(value)})

    @staticmethod
    def symbol(name: str) -> Expr:
        """Return the symbol `name` itself."""
        return Expr((((name,), Fraction(1)),))

    @staticmethod
    def _make(terms: Mapping[Monomial, Fraction]) -> Expr:
        return Expr(tuple(sorted((m, c) for m, c in terms.items() if c != 0)))

    def __add__(self, other: ExprLike) -> Expr:
        out = dict(self.terms)
        for monomial, coefficient in Expr.of(other).terms:
            out[monomial] = out.get(monomial, Fraction(0)) + coefficient
        return Expr._make(out)

    def __mul__(self, other: ExprLike) -> Expr:
        out: dict[Monomial, Fraction] = {}
        for m1, c1 in self.terms:
            for m2, c2 in Expr.of(other).terms:
                key = tuple(sorted(m1 + m2))
                out[key] = out.get(key, Fraction(0)) + c1 * c2
        return Expr._make(out)

    def __sub__(self, other: ExprLike) -> Expr:
        return self + Expr.of(other) * -1

    def __neg__(self) -> Expr:
        return self * -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: ExprLike) -> Expr:
        return Expr.of(other) - self

    def divide(self, other: ExprLike) -> Expr | None:
        """Return the exact quotient with integer coefficients, or None.

        `(b*s).divide(s) == b`; `(s+1).divide(2)` is None.
        """
        divisor = Expr.of(other)
        if not divisor.terms:
            return None
        remainder, quotient = self, Expr(())
        lead_monomial, lead_coefficient = max(divisor.terms, key=lambda t: (len(t[0]), t[0]))
        while remainder.terms:
            monomial, coefficient = max(remainder.terms, key=lambda t: (len(t[0]), t[0]))
            rest = list(monomial)
            for symbol in lead_monomial:
                if symbol not in rest:
                    return None
                rest.remove(symbol)
            ratio = coefficient / lead_coefficient
            if ratio.denominator != 1:
                return None
            term = Expr._make({tuple(rest): ratio})
            quotient, remainder = quotient + term, remainder - term * divisor
        return quotient

    def scale(self, ratio: Fraction) -> Expr:
        """Return the product with a rational, e.g. the local part of a sharded size."""
        return Expr._make({m: c * ratio for m, c in self.terms})

    @property
    def value(self) -> int | None:
        """The number, if there are no symbols."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == () and self.terms[0][1].denominator == 1:
            return int(self.terms[0][1])
        return None

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols that occur."""
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def evaluate(self, env: Mapping[str, int]) -> Fraction:
        """Return the value under `env`; KeyError names a missing symbol."""
        total = Fraction(0)
        for monomial, coefficient in self.terms:
            term = coefficient
            for name in monomial:
                term *= env[name]
            total += term
        return total

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, coefficient in sorted(self.terms, key=lambda t: (-len(t[0]), t[0])):
            factors = list(monomial)
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return "+".join(parts).replace("+-", "-")

    def __repr__(self) -> str:
        return f"Expr({self})"

    @staticmethod
    def parse(text: str) -> Expr:
        """Return the Expr with this text: the inverse of str(). ValueError names a malformed term."""
        total, compact = Expr(()), re.sub(r"\s*([+*-])\s*", r"\1", text.strip())
        if not re.fullmatch(r"[+-]?[^+-]+([+-][^+-]+)*", compact):
            raise ValueError(f"malformed size {text!r}: terms are joined by + or -")
        for sign, term in re.findall(r"([+-]?)([^+-]+)", compact):
            product = Expr.of(-1 if sign == "-" else 1)
            for factor in term.split("*"):
                if re.fullmatch(r"\d+(/[1-9]\d*)?", factor):
                    product = product * Fraction(factor)
                elif factor.isidentifier():
                    product = product * Expr.symbol(factor)
                else:
                    raise ValueError(f"malformed size {text!r}: cannot read {factor!r}")
            total = total + product
        return total


def product(values: tuple[Expr, ...] | list[Expr]) -> Expr:
    """Return the product of sizes; 1 for none."""
    return reduce(lambda a, b: a * b, values, Expr.of(1))


Shape = tuple[Expr, ...]  # the symbolic size of every dim
