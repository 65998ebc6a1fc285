"""Records of Fourier transforms: they mix the dims that they are told, and all others can be split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import OpKind, OpRecord
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps
from autoplan.ops.text import OpText, literal
from autoplan.units import DTYPE_BYTES

_ONE_DIM = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")  # functions of torch.fft
_TWO_DIMS = ("fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2")
_ANY_DIMS = ("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn")
_USUAL_LENGTH = 1024  # counts for a length that is not known yet: arithmetic grows with its logarithm


def _tuple(given: Any) -> tuple[Any, ...] | None:
    return None if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _transform(function: str) -> Lowering:
    one, usual = function in _ONE_DIM, [-2, -1] if function in _TWO_DIMS else None

    def build(a: Args) -> IrResult:
        sizes, dims = a.get("n" if one else "s"), a.get("dim", -1 if one else usual)
        attrs = {"function": function, "sizes": _tuple(sizes), "dims": _tuple(dims), "norm": a.get("norm")}
        return IrOp("fourier", (a["self"],), attrs)

    return build


def _shift(function: str) -> Lowering:
    attrs = {"function": function}
    return lambda a: IrOp("fourier_shift", (a["self"],), attrs | {"dims": _tuple(a.get("dim"))})


def _dims(node: Node, rank: int) -> list[int]:
    """Return the dims that are mixed. If none are named, PyTorch takes all, or the last ones, one for every size."""
    dims, sizes = node.attrs["dims"], node.attrs.get("sizes")
    if dims is None:
        return list(range(rank - len(sizes), rank) if sizes is not None else range(rank))
    return [dim % rank for dim in dims]


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels, mixed = dim_labels(ins[0]), _dims(node, len(ins[0]))
    after = dim_labels(outs[0], "y")
    out = [after[i] if i in mixed else label for i, label in enumerate(labels)]
    whole = frozenset(name for i in mixed for name in (*labels[i], *after[i]))
    return OpRule((tuple(labels),), (tuple(out),), (Role.OTHER,), whole)


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return the usual count: 5 N log2 N per transform of N complex elements, half of it if one side is real."""
    longer = max((ins[0], out), key=lambda value: value.dtype.startswith("complex"))
    mixed = [out.shape[i].value or _USUAL_LENGTH for i in _dims(node, len(out.shape))]
    each = Fraction(5 * round(math.log2(max(2, math.prod(mixed)))))
    count = longer.num_elements.scale(each)
    return count.scale(Fraction(1, 4)) if out.dtype.startswith("complex") else count  # the table multiplies by 4


def _saved(f: OpFacts) -> SavedRule | None:
    """Return what a transform of real numbers keeps: its input, or a copy of it that is padded to another length.

    Those over several dims that have no real form first make complex numbers, and keep nothing.
    """
    function = f.attrs["function"]
    real = function in ("fft", "ifft") or function.startswith(("rfft", "ihfft"))
    if not real or f.inputs[0].dtype.startswith("complex"):
        return None
    return _KEEPS_INPUT if f.attrs["sizes"] is None else _KEEPS_PADDED


def _padded_bytes(f: OpFacts) -> tuple[int, ...]:
    x, out = f.inputs[0], f.outputs[0]
    half = f.attrs["function"].startswith(("rfft", "ihfft"))
    last = f.attrs["dims"][-1] if f.attrs["dims"] else -1
    shape = [2 * (n - 1) if half and i == last % len(out.shape) else n for i, n in enumerate(out.shape)]
    if (known := getattr(f.attrs["sizes"][-1], "value", f.attrs["sizes"][-1])) is not None and known > 0:
        shape[last] = known
    return (math.prod(map(max, shape, x.shape)) * DTYPE_BYTES[x.dtype],)  # a shorter one is a part of the input


def _text(t: OpText) -> str:
    function, sizes, dims, norm = (t.attrs[name] for name in ("function", "sizes", "dims", "norm"))
    one = function in _ONE_DIM
    words = [t.args[0]]
    if sizes is not None:
        # by position: in a program `s` is the length of the sequence
        words.append(literal(sizes[0]) if one else f"({', '.join(map(literal, sizes))},)")
    if dims is not None:
        words.append(f"dim={dims[0] if one else dims!r}")
    if norm is not None:
        words.append(f"norm={norm!r}")
    return f"torch.fft.{function}({', '.join(words)})"


def _shift_text(t: OpText) -> str:
    dims = "" if t.attrs["dims"] is None else f", dim={t.attrs['dims']!r}"
    return f"torch.fft.{t.attrs['function']}({t.args[0]}{dims})"


_KEEPS_INPUT = keeps("x0<0", form=Form.NEW)
_KEEPS_PADDED = keeps(form=Form.NEW, extra=_padded_bytes)

RECORDS = (
    OpRecord(
        "fourier",
        OpKind.OTHER,
        _rule,
        keeps(form=Form.NEW),
        _text,
        {f"aten.fft_{name}.default": _transform(name) for name in (*_ONE_DIM, *_TWO_DIMS, *_ANY_DIMS)},
        flops=_flops,
        saved_form=_saved,
    ),
    OpRecord(
        "fourier_shift",
        OpKind.OTHER,
        _rule,
        keeps(form=Form.NEW),
        _shift_text,
        {f"aten.fft_{name}.default": _shift(name) for name in ("fftshift", "ifftshift")},
    ),
)
