"""Recurrent layers of PyTorch (LSTM, GRU, RNN) as one op: split over the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.errors import FormError
from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import Labels, OpRule, Role
from autoplan.ops.record import IndexSizes, OpKind, OpRecord
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps
from autoplan.ops.text import OpText, literal
from autoplan.units import DTYPE_BYTES

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_PACKED = "autoplan.runtime.recurrent.packed_layers"
_SETTINGS = ("kind", "biases", "layers", "bidirectional", "batch_first")


def _arguments(a: Args) -> IrResult:
    if a["kind"] not in _GATES:
        raise FormError(f"recurrent layers of kind {a['kind']!r} are not supported; use {', '.join(_GATES)}")
    states = tuple(a["state"])
    settings = {name: a[name].value if isinstance(a[name], Expr) else a[name] for name in _SETTINGS}
    lengths = (a["lengths"],) if "lengths" in a else ()
    attrs = {**settings, "states": len(states)} | ({"by_length": True} if lengths else {})
    return IrOp("recurrent", (a["x"], *states, *a["weights"], *lengths), attrs)


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule: x [b, s, i] (or [s, b, i]), states [layers, b, h] and weights -> [b, s, o] and states.

    With `by_length`, the lengths of the samples [b] follow.
    """
    states = node.attrs["states"]
    whole: set[str] = set()

    def labels(shape: Shape, prefix: str, batch: int | None) -> tuple[Labels, ...]:
        out = dim_labels(shape, prefix)
        if batch is not None and out[batch]:
            out[batch] = ("batch",)
        whole.update(label for dim in out for label in dim if label != "batch")
        return tuple(out)

    batch = 0 if node.attrs["batch_first"] else 1
    places: list[int | None] = [batch, *[1] * states, *[None] * (len(ins) - 1 - states)]
    roles = [Role.OTHER] * len(ins)
    if node.attrs.get("by_length"):
        places[-1], roles[-1] = 0, Role.INDEX
    inputs = [labels(s, f"x{k}d", places[k]) for k, s in enumerate(ins)]
    outputs = [labels(s, f"y{k}d", 1 if k else batch) for k, s in enumerate(outs)]
    return OpRule(tuple(inputs), tuple(outputs), tuple(roles), frozenset(whole))


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return one multiplication and one addition per token and element of a weight matrix."""
    tokens = ins[0].shape[0] * ins[0].shape[1]
    matrices = [w.num_elements for w in ins[1 + node.attrs["states"] :] if len(w.shape) == 2]
    total = Expr.of(0)
    for size in matrices:
        total = total + size
    return tokens * total * 2


def _text(t: OpText) -> str:
    a, count = t.attrs, t.attrs["states"]
    x, states, weights = t.args[0], t.args[1 : 1 + count], t.args[1 + count :]
    if a.get("by_length"):
        weights, lengths = weights[:-1], weights[-1]
        given = f"{x}, {lengths}, [{', '.join(states)}], [{', '.join(weights)}]"
        settings = ", ".join(map(literal, (a["biases"], a["layers"], a["bidirectional"], a["batch_first"])))
        return f"scan({_PACKED!r}, {a['kind']!r}, {given}, {settings})"
    state = f"[{', '.join(states)}]" if a["kind"] == "lstm" else states[0]
    rest = ", ".join(map(literal, (a["biases"], a["layers"], 0.0, True, a["bidirectional"], a["batch_first"])))
    return f"torch.ops.aten.{a['kind']}.input({x}, {state}, [{', '.join(weights)}], {rest})"


def _lengths(attrs: Mapping[str, Any], inputs: IndexSizes, outputs: IndexSizes) -> dict[int, range]:
    """Return the lengths that samples may have."""
    tokens = int(inputs[0][1 if attrs["batch_first"] else 0])
    return {len(inputs) - 1: range(1, tokens + 1)} if attrs.get("by_length") else {}


@functools.cache
def _keeps(count: int) -> SavedRule:
    """Return the rule for `count` operands: input, output, and for every token and layer its gates and its state."""

    def extra(f: OpFacts) -> tuple[int, ...]:
        x, state = f.inputs[0], f.inputs[1]
        rows = x.shape[0] * x.shape[1] * state.shape[0]
        return (rows * state.shape[2] * (_GATES[f.attrs["kind"]] + 1) * DTYPE_BYTES[x.dtype],)

    every = ",".join(map(str, range(count)))
    return keeps(f"x0<{every} y0<{every}", form=Form.NEW, extra=extra)


@functools.cache
def _keeps_inputs(count: int) -> SavedRule:
    """Return the rule of layers by length, whose backward computes them again (runtime/recurrent.py)."""
    return keeps(f"x0<{','.join(map(str, range(count)))}", form=Form.NEW)


RECORDS = (
    OpRecord(
        "recurrent",
        OpKind.OTHER,
        _rule,
        text=_text,
        aten={f"autoplan.{name}.default": _arguments for name in ("recurrent", "packed_recurrent")},
        flops=_flops,
        index_limits=_lengths,
        saved_form=lambda f: (_keeps_inputs if f.attrs.get("by_length") else _keeps)(len(f.inputs)),
    ),
)
