"""Functions of other libraries that go along the sequence (state-space layers, linear attention) as one op each.

A capture finds out what it must know of one (`autoplan.capture.frontend.scan_trials`) and writes it into the attributes
of the node:

    function        its path, under which a program imports it
    call            its arguments: `{0}, {1}, chunk_size=256, D={2}`
    rule            how it can be split, as a line of the rule language; a dim of several parts: `f0 f0x4`
    length_of       (tensor, dim) of the sequence
    starts          kernels that a forward starts: at least, and per token
    flops, moved    arithmetic, and bytes read and written, per element of the first output
    kept            bytes kept for the backward, likewise
    keeps           the arguments that it keeps for its backward as they are
"""

from __future__ import annotations

import functools
import json
from fractions import Fraction

from autoplan.errors import RuleError
from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.language import OpRule, bind, parse
from autoplan.ops.record import Inside, OpKind, OpRecord
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps


def _arguments(a: Args) -> IrResult:
    facts = json.loads(a["facts"])
    attrs = {
        "function": a["function"],
        "call": a["call"],
        "rule": facts["rule"],
        "length_of": tuple(facts["length"]),
        "starts": tuple(facts["starts"]),
        **{name: facts[name] for name in ("flops", "moved", "kept")},
        "keeps": tuple(facts["keeps"]),
    }
    for shown in ("ranks", "dtypes"):
        a.get(shown)
    return IrOp(SCAN, tuple(a["xs"]), attrs)


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    template = parse(node.attrs["rule"])
    rule = bind(template, ins, outs)
    operands = zip((*rule.inputs, *rule.outputs), (*ins, *outs), strict=True)
    dims = [pair for labels, shape in operands for pair in zip(labels, shape, strict=True)]
    alone = {dim[0]: size for dim, size in dims if len(dim) == 1}
    sizes: dict[str, Expr] = {}
    for dim, size in dims:
        if len(dim) == 2:
            rest = size.divide(alone[dim[0]])
            if rest is None:
                raise RuleError(f"{node.name}: {size} parts are not a multiple of {alone[dim[0]]}")
            sizes |= {dim[0]: alone[dim[0]], dim[1]: rest}
    return bind(template, ins, outs, sizes)


def _inside(f: OpFacts) -> Inside:
    """Return the kernels that it starts in a forward, and the bytes that they read and write."""
    tensor, dim = f.attrs["length_of"]
    least, per_token = f.attrs["starts"]
    tokens = f.inputs[tensor].shape[dim]
    return Inside(round(least + per_token * tokens), f.attrs["moved"] * f.outputs[0].num_elements)


@functools.cache
def _keeps(kept: tuple[int, ...], count: int) -> SavedRule:
    """Return the rule for `count` operands. The backward makes the gradients of what is kept one at a time."""

    def extra(f: OpFacts) -> tuple[int, ...]:
        more = sum(f.inputs[i].num_bytes for i in kept if i > _LAST_NAMED)
        return (round(f.attrs["kept"] * f.outputs[0].num_elements) + more,)

    every = ",".join(map(str, range(count)))
    return keeps(" ".join(f"x{i}<{every}" for i in kept if i <= _LAST_NAMED), form=Form.NEW, extra=extra)


_LAST_NAMED = 9  # rules of what is kept name operands by one digit


SCAN = "scan"
RECORDS = (
    OpRecord(
        SCAN,
        OpKind.OTHER,
        _rule,
        text=lambda t: f"scan({t.attrs['function']!r}, {t.attrs['call'].format(*t.args)})",
        aten={"autoplan.scan.default": _arguments},
        flops=lambda node, ins, out, rule: out.num_elements.scale(Fraction(round(node.attrs["flops"]))),
        saved_form=lambda f: _keeps(f.attrs["keeps"], len(f.inputs)),
        variable="scanned",
        inside=_inside,
    ),
)
