"""Sizes of a trace as polynomials, and the lengths of sequences for which they hold.

Where a forward asks for the length of a sequence (a table of positions, `min(2048, length)`), torch.export keeps the
answer for the example, and the graph is that of the lengths with the same answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from autoplan.errors import CaptureError, LengthError
from autoplan.ir.symbols import Expr

_LONGEST = 1 << 17  # tokens; conditions that are not linear are tried for every length up to here


def error_kind(*causes: CaptureError) -> type[CaptureError]:
    """Return the class of an error that has these causes: whether a graph of the example's length may help."""
    return LengthError if any(isinstance(exc, LengthError) for exc in causes) else CaptureError


class Lengths:
    """The symbols of a trace: their names, the sizes of its example, and the bounds that it holds for.

    Args:
        symbols: b, s or t for each of torch's symbols.
        model: the name of the model, for errors.
    """

    def __init__(self, program: torch.export.ExportedProgram, symbols: Mapping[str, str], model: str) -> None:
        self.symbols = symbols
        self.model = model
        self.hints: dict[str, int] = _hints(program)
        self.bounds: dict[str, tuple[int, int | None]] = {}
        for symbol, found in program.range_constraints.items():
            low, high = (int(bound) if bound.is_Integer else None for bound in (found.lower, found.upper))
            self._restrict(str(symbol), low or 0, high)
        for condition in _answered(program):
            self._keep_true(condition)

    def expr(self, size: Any) -> Expr:
        """Return a size of the trace as a polynomial; the bounds become those for which it is one.

        Raises:
            CaptureError: for a size that depends on the data.
            LengthError: for one that is not a polynomial.
        """
        return Expr.of(size) if isinstance(size, int) else self._polynomial(size.node.expr)

    def _polynomial(self, expr: Any) -> Expr:
        if expr.is_Integer:
            return Expr.of(int(expr))
        if expr.is_Rational:
            return Expr.of(Fraction(int(expr.p), int(expr.q)))
        if expr.is_Float:
            return Expr.of(Fraction(float(expr)))
        kind = type(expr).__name__
        if kind == "ToFloat":  # torch's float(size)
            return self._polynomial(expr.args[0])
        if expr.is_Symbol:
            if str(expr) not in self.symbols:
                raise CaptureError(
                    "a size depends on the data (x[mask], nonzero()), not only on batch and sequence lengths; keep all "
                    "rows, and give those outside a mask the weight 0 in the loss or a label that does not count (-100)"
                )
            return Expr.symbol(self.symbols[str(expr)])
        if expr.is_Add or expr.is_Mul:
            total = Expr.of(0 if expr.is_Add else 1)
            for part in expr.args:
                total = total + self._polynomial(part) if expr.is_Add else total * self._polynomial(part)
            return total
        if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
            total = Expr.of(1)
            for _ in range(int(expr.exp)):
                total = total * self._polynomial(expr.base)
            return total
        if kind in ("Max", "Min"):
            return self._extreme(expr, largest=kind == "Max")
        if kind == "FloorDiv" and (quotient := _divided(expr)) != expr:
            return self._polynomial(quotient)
        raise self._not_a_polynomial(self._named(expr))

    def _named(self, expr: Any) -> str:
        """Return an expression of torch's symbols as text with the names b, s and t."""
        return re.sub(r"\w+", lambda word: self.symbols.get(word[0], word[0]), str(expr))

    def _not_a_polynomial(self, size: str) -> LengthError:
        return LengthError(f"{self.model} uses the size {size}, which is not a polynomial in batch and sequence length")

    def _extreme(self, expr: Any, largest: bool) -> Expr:
        """Return the argument that is the largest (or smallest) for the example, and keep to lengths where it is.

        Of equal ones it is the one that depends on a length: what a table of positions leaves to its longest sequence
        (`table - max(0, table - length)`) is then as long as the sequence.
        """
        named = {self.symbols[s]: n for s, n in self.hints.items() if s in self.symbols}
        sign = 1 if largest else -1

        def order(size: Expr) -> tuple[Fraction, bool]:
            return sign * size.evaluate(named), any(monomial for monomial, _ in size.terms)

        given = sorted((self._polynomial(a) for a in expr.args), key=order, reverse=True)
        for other in given[1:]:
            self._keep_positive((given[0] - other) * sign, self._named(expr))
        return given[0]

    def _keep_positive(self, difference: Expr, what: str) -> None:
        """Restrict a length so that a difference is not negative."""
        slopes = {monomial: c for monomial, c in difference.terms if monomial}
        at_zero = dict(difference.terms).get((), Fraction(0))
        if not slopes:
            return
        (monomial, slope), *more = slopes.items()
        if more or len(monomial) > 1:
            raise self._not_a_polynomial(what)
        bound = -at_zero / slope
        name = next(s for s, n in self.symbols.items() if n == monomial[0])
        if slope > 0 and bound > 1:  # every length is at least 1
            self._restrict(name, math.ceil(bound), None)
        elif slope < 0:
            self._restrict(name, 0, math.floor(bound))

    def _keep_true(self, condition: Any) -> None:
        """Restrict a length to those around that of the example for which a condition holds.

        Conditions on numbers that depend on the data are left to the data.

        Raises:
            LengthError: for a condition on several lengths at once.
        """
        for symbol in condition.free_symbols:
            if self.symbols.get(str(symbol)) == "b":
                condition = _for_each_sample(condition, symbol)
        names = {str(symbol) for symbol in condition.free_symbols}
        if not names or not names <= set(self.symbols):
            return
        if len(names) > 1:
            needed = self._named(condition)
            raise LengthError(f"{self.model} needs {needed}, which does not hold for every batch and sequence")
        symbol = names.pop()
        holds = eval(f"lambda {symbol}: {PythonPrinter().doprint(condition)}", {"math": math})
        low = high = self.hints[symbol]
        while low > 1 and holds(low - 1):
            low -= 1
        while high < _LONGEST and holds(high + 1):
            high += 1
        self._restrict(symbol, low if low > 1 else 0, high)

    def _restrict(self, symbol: str, low: int, high: int | None) -> None:
        name = self.symbols.get(symbol)
        if name is None or (low == 0 and high is None):
            return
        if name == "b":
            kept = f"up to {high}" if high is not None and (high < _LONGEST or not low) else f"from {low} on"
            raise CaptureError(
                f"the forward of {self.model} asks how large the batch is (this graph is that of {kept}); "
                "micro-batches are smaller than the batch: compute the same for every size"
            )
        before = self.bounds.get(name, (0, None))
        highs = [h for h in (before[1], high) if h is not None]
        self.bounds[name] = max(before[0], low), min(highs, default=None)


def _divided(expr: Any) -> Any:
    """Return an expression with every floor division that leaves no remainder carried out."""

    def quotient(dividend: Any, divisor: Any) -> Any:
        found = sympy.cancel(dividend / divisor)
        whole = found.is_polynomial() and all(c.is_Integer for c in sympy.Poly(found, *symbols).coeffs())
        return found if whole else dividend // divisor

    symbols = sorted(expr.free_symbols, key=str)
    return expr.replace(lambda e: type(e).__name__ == "FloorDiv", lambda e: quotient(*e.args))


def _for_each_sample(condition: Any, batch: Any) -> Any:
    """Return a condition whose two sides are multiples of the batch size, which is positive, without it."""
    if not condition.is_Relational or batch not in condition.free_symbols:
        return condition

    def rest(of: Any) -> Any:
        parts = [sympy.expand(a / batch) for a in of.args]
        return of if any(batch in p.free_symbols for p in parts) else batch * type(of)(*parts)

    difference = (condition.lhs - condition.rhs).replace(lambda e: type(e).__name__ in ("Mod", "PythonMod"), rest)
    difference = sympy.expand(difference / batch)
    return condition if batch in difference.free_symbols else condition.func(difference, 0)


def _hints(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Return the size that every symbol of torch has in the example."""
    out: dict[str, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        sizes: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else []
        for size in sizes:
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                out[str(size.node.expr)] = int(size.node.hint)
    return out


def _answered(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """Yield the conditions that torch.export asserts in the graph."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for node in (n for module in modules for n in module.graph.nodes):
        if str(node.target) == "aten._assert_scalar.default" and isinstance(node.args[0], torch.fx.Node):
            value = node.args[0].meta.get("val")
            if isinstance(value, torch.SymBool):
                yield value.node.expr
