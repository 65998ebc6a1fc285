"""How a case of tests/ops/test_rules.py is written: a small node of one op, and what plain torch computes for it.

Tensors are written by their factors: `"b, s, kv group head"` is [b, s, kv*group*head], `1` a dim of size 1, `[]` a
scalar. A word before `:` says what is in it: `const` has no gradient, `pos` is positive, `int16` holds integers below
16, `target16` also -100, `count8` numbers from 1 to 8, `bool`, `f32` and `complex` are dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, product
from experiments.shared.op_parity import Setting

ENV = {"b": 2, "s": 8}
FACTORS: dict[str, Expr] = {
    "b": Expr.symbol("b"),
    "s": Expr.symbol("s"),
    "next": Expr.symbol("s") + 1,
    "keys": Expr.of(4),
    # two key-value heads: fewer than the four ranks
    **{name: Expr.of(size) for name, size in dict(kv=2, group=4, head=4, value=8, heads=4).items()},
    **{name: Expr.of(size) for name, size in dict(hidden=8, out=12, major=2, minor=8, vocab=16, two=2).items()},
    **{name: Expr.of(size) for name, size in dict(three=3, five=5, six=6, nine=9, four=4, eight=8).items()},
}


SETTING = Setting(FACTORS, ENV)


@dataclass(frozen=True)
class Case:
    """A node, and `ref`: the same in plain torch (None where only the runtime has the op)."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ref: Callable[..., Any] | None
    attrs: dict[str, Any] = field(default_factory=dict)
    setting: Setting = SETTING

    @property
    def name(self) -> str:
        attrs = "".join(f" {k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({'; '.join(self.inputs)}){attrs}"

    @property
    def node(self) -> Node:
        ins = tuple(f"x{i}" for i in range(len(self.inputs)))
        return Node(
            "node", self.op, ins, tuple(f"y{i}" for i in range(len(self.outputs))), self.attrs, source="case.py:1"
        )

    @property
    def values(self) -> dict[str, Value]:
        out = {}
        grad = False
        for i, text in enumerate(self.inputs):
            mark, dims = _read(text)
            mine = mark in ("", "pos", "f32", "complex")
            grad |= mine
            out[f"x{i}"] = _value(
                f"x{i}", dims, _DTYPES.get(mark, "int64" if mark[:3] in ("int", "tar", "cou") else "float64"), mine
            )
        for i, text in enumerate(self.outputs):
            mark, dims = _read(text)
            dtype = _DTYPES.get(mark, "int64" if mark == "int" else "float64")
            mine = grad and ("float" in dtype or "complex" in dtype) and mark != "const"
            out[f"y{i}"] = _value(f"y{i}", dims, dtype, mine)
        return out

    def make(self, seed: int = 0) -> list[torch.Tensor]:
        """The inputs, whole: multiples of 1/16, so that casts to float32 and sums of parts are exact."""
        out = []
        for i, text in enumerate(self.inputs):
            mark, _ = _read(text)
            shape = [int(size.evaluate(ENV)) for size in self.values[f"x{i}"].shape]
            g = torch.Generator().manual_seed(seed * 31 + i)
            if mark.startswith("int"):
                x = torch.randint(int(mark[3:]), shape, generator=g)
            elif mark.startswith("count"):
                x = torch.randint(1, int(mark[5:]) + 1, shape, generator=g)
            elif mark.startswith("target"):
                x = torch.randint(int(mark[6:]), shape, generator=g)
                x[torch.rand(shape, generator=g) < 0.2] = -100
            elif mark == "complex":
                x = torch.view_as_complex(torch.randint(-40, 41, (*shape, 2), generator=g).to(torch.float64) / 16)
            elif mark == "bool":
                x = torch.rand(shape, generator=g) < 0.6
            else:
                low = 1 if mark == "pos" else -40
                x = (
                    torch.randint(low, 41, shape, generator=g).to(torch.float32 if mark == "f32" else torch.float64)
                    / 16
                )
            out.append(x)
        return out


_DTYPES = {"bool": "bool", "f32": "float32", "c32": "float32", "complex": "complex128"}


def _read(text: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    mark, _, rest = text.rpartition(":")
    words = [w.strip() for w in rest.split(",")] if rest.strip() != "[]" else []
    return mark.strip(), tuple(() if w == "1" else tuple(w.split()) for w in words)


def _value(name: str, dims: tuple[tuple[str, ...], ...], dtype: str, grad: bool) -> Value:
    return Value(name, tuple(product([FACTORS[f] for f in dim]) for dim in dims), dtype, grad, dims)


def case(op: str, inputs: list[str], outputs: list[str] | str, ref: Callable[..., Any] | None, **attrs: Any) -> Case:
    return Case(op, tuple(inputs), (outputs,) if isinstance(outputs, str) else tuple(outputs), ref, attrs)


X = "b, s, kv group head"  # what most cases work on
T = torch


def same(op: str, ref: Callable[..., Any] | None, x: str = X, y: str = "", **attrs: Any) -> Case:
    mark = f"{y}:" if y else ""
    return case(op, [x], mark + _strip(x), ref, **attrs)


def _strip(text: str) -> str:
    return text.rpartition(":")[2]
