"""Lowerings from the arguments of an ATen op to ops of the IR: their types, and those that many ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.errors import FormError
from autoplan.ir.symbols import Shape

Args = dict[str, Any]  # ATen arguments by schema name; tensors are value names, symbolic sizes are Expr


@dataclass(frozen=True)
class IrOp:
    """One IR op: tensors (None for absent), plain attributes.

    In a list of ops, the tensor "$0" is the result of the op before, and "#k" that of op k of the list.

    Attributes:
        shape, dtype: of its result, if they are not those of the ATen op that it is made of; the dtype "": its input's.
    """

    op: str
    tensors: tuple[str | None, ...]
    attrs: dict[str, Any]
    shape: Shape | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Alias:
    """An op that does nothing: its output is its input."""

    of: str


IrResult = IrOp | Alias | list[IrOp]
Lowering = Callable[[Args], IrResult]


def by_name(op: str, tensors: str = "self", *attrs: str, **usual: object) -> Lowering:
    """Return a lowering that takes arguments by their names: tensors, and attributes.

    Args:
        tensors: names of the tensors, with spaces between them.
        attrs: names of the attributes; `scalar=value` is the attribute `scalar` from the argument `value`.
        usual: attributes whose arguments may be left out, with their defaults.
    """
    names, pairs = tensors.split(), [attr.partition("=") for attr in attrs]

    def build(a: Args) -> IrResult:
        found = {name: a[argument or name] for name, _, argument in pairs}
        return IrOp(op, tuple(a[x] for x in names), found | {n: a.get(n, value) for n, value in usual.items()})

    return build


def alias(name: str) -> Lowering:
    """Return a lowering to nothing: the output is the named argument."""
    return lambda a: Alias(a[name])


def binary(op: str) -> Lowering:
    """Return a lowering that takes a tensor or a scalar as second operand."""

    def build(a: Args) -> IrResult:
        other = a["other"]
        if a.get("alpha", 1) != 1:
            raise FormError(f"{op} with alpha={a['alpha']} is not supported; write the product out")
        if isinstance(other, str):
            return IrOp(op, (a["self"], other), {})
        if op == "sub":
            return IrOp("add_scalar", (a["self"],), {"scalar": -other})
        if (op == "add" and other == 0) or (op in ("mul", "div") and other == 1):
            return Alias(a["self"])
        return IrOp(f"{op}_scalar", (a["self"],), {"scalar": other})

    return build


def default(op: str, lowering: Lowering | None = None) -> Mapping[str, Lowering]:
    """Return the lowering of the ATen op of the same name, by default of one tensor."""
    return {f"aten.{op}.default": lowering or by_name(op)}
