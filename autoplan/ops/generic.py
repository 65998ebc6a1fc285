"""Records of PyTorch functions that have no record of their own.

A capture finds out what a record would say (`autoplan.capture.generic`) and writes it into the attributes of the node:

    call  the right-hand side in a program: `torch.ops.aten.floor.default({0})`
    rule  how it can be split, as a line of the rule language (`autoplan.ops.language`)
    keeps  what it keeps for its backward: "x0<0 y0<0" (`autoplan.ops.saved`)
    num_extra  number of further tensors that it keeps, each as large as its first output
    derivatives  of every output, separated by ";", the inputs by which it has a derivative; absent: by all

Symbolic sizes among its arguments are attributes of their own, and refer to the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.language import OpRule, bind, parse
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps, units
from autoplan.ops.text import OpText, literal

POINTWISE, FUNCTION = "pointwise", "function"


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    return bind(parse(node.attrs["rule"]), ins, outs)


def _text(t: OpText) -> str:
    sizes = {name: literal(t.whole(value)) for name, value in t.attrs.items() if isinstance(value, Expr)}
    text: str = t.attrs["call"].format(*t.args, **sizes)
    return text


def has_derivative(attrs: Mapping[str, Any], output: int, place: int) -> bool:
    """Return False for an output that has no derivative by the input at `place`."""
    given = attrs.get("derivatives")
    return given is None or str(place) in given.split(";")[output].split(",")


@functools.cache
def _keeps(what: str, num_extra: int, form: Form) -> SavedRule:
    def extra(f: OpFacts) -> tuple[int, ...]:
        return (f.outputs[0].num_bytes,) * num_extra

    # while a backward runs, it holds one factor of the gradient beside the gradient itself
    return keeps(what, form=form, extra=extra, workspace=units(0, 1))


def _kept_by(form: Form) -> Callable[[OpFacts], SavedRule | None]:
    return lambda f: _keeps(f.attrs["keeps"], f.attrs["num_extra"], form)


RECORDS = (
    OpRecord(
        POINTWISE,
        OpKind.ELEMENTWISE,
        _rule,
        text=_text,
        saved_form=_kept_by(Form.DENSE),
        has=(Trait.TRANSCENDENTAL,),
    ),
    OpRecord(FUNCTION, OpKind.OTHER, _rule, text=_text, saved_form=_kept_by(Form.NEW)),
)
