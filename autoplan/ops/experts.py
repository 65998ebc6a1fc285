"""The op of the experts of a mixture, in every form: attributes say how weights lie, and what stands between products.

    hidden [t, h], index [t, k], routing weights [t, k], first weights, second weights (, first biases, second biases)

Attributes: `num_experts`, `top_k`, `intermediate_size` (f), `activation` and `gated`, and those of `OTHER_FORMS` where
they are not as usual:

    interleaved    rows of the first product alternate between gate and up; usually all of the gate come first
    transposed     weights are [e, h, 2 f] and [e, f, h]; usually [e, 2 f, h] and [e, h, f]
    scales_inputs  routing weights scale what an expert takes; usually what it gives
    alpha, limit   numbers of the activation (`autoplan.runtime.expert_forms`)

Those of GROUPED, of which only prices depend, are there where the router chooses experts of `top_groups` of `groups`
groups for a token (`autoplan.cost_models.routing`).

Experts that are not gated have f instead of 2 f. Biases are [e, 2 f] and [e, h].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import P
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.language import OpRule, RuleTemplate, bind, parse
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, OpFacts, keeps
from autoplan.ops.text import OpText, literal
from autoplan.units import DTYPE_BYTES

FIRST, SECOND, FIRST_BIAS, SECOND_BIAS = 3, 4, 5, 6  # places of weights and biases among the inputs
_COUNTS = ("num_experts", "top_k", "intermediate_size")
_BETWEEN = ("activation", "gated")
OTHER_FORMS: Mapping[str, object] = {
    "interleaved": False,
    "transposed": False,
    "scales_inputs": False,
    "alpha": None,
    "limit": None,
}
GROUPED: Mapping[str, int] = {"groups": 1, "top_groups": 1}

# Ordinary operations of torch that take the host as long as a call of `autoplan.runtime.experts` does, by pass. The
# products that every expert has where no kernel does those of all are apart. Two measurements give 150 in both passes:
# on an H200's host they take 2.6 ms by themselves, and 3.5 ms beside Mixtral's other operations of 16 us each; on a CPU
# by the processor time of small layers, Mixtral's over Llama's. Each pass has about 25 operations and as many views;
# sorting alone starts ten kernels, and the rest is Python.
HOST_OPS = {"forward": 50, "backward": 100}
EACH_HAS = {"forward": 2, "backward": 4}  # products of every expert


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a rank: their number, the hidden size, columns of the first product, the inner size."""

    num: int
    hidden: int
    columns: int
    inner: int


def expert_sizes(attrs: Mapping[str, Any], first: Sequence[int], second: Sequence[int]) -> ExpertSizes:
    """Return the sizes of experts from the shapes of their weights."""
    if attrs.get("transposed"):
        return ExpertSizes(first[0], first[1], first[2], second[1])
    return ExpertSizes(first[0], first[2], first[1], second[2])


def _arguments(a: Args) -> IrResult:
    tensors = [a[n] for n in ("hidden", "index", "weights", "gate_up", "down")]
    tensors += [a[n] for n in ("gate_up_bias", "down_bias") if a.get(n) is not None]
    usual = {n: a[n].value if hasattr(a[n], "value") else a[n] for n in (*_COUNTS, *_BETWEEN)}
    other = {n: a.get(n, common) for n, common in OTHER_FORMS.items()}
    grouped = {n: int(a.get(n, common)) for n, common in GROUPED.items()}
    attrs = usual | {n: x for n, x in other.items() if x != OTHER_FORMS[n]}
    limited = grouped["top_groups"] < grouped["groups"]
    return IrOp("experts", tuple(tensors), attrs | (grouped if limited else {}))


def _line(gated: bool, interleaved: bool, transposed: bool, biased: bool) -> RuleTemplate:
    rows = ("f count!" if interleaved else "count! f") if gated else "f"
    e = "e@expert_parallel"
    first, second = (f"i!,{rows}", "f,o!") if transposed else (f"{rows},i!", "o!,f")
    biases = f" * [{e},{rows}] * [{e},o!]" if biased else ""
    return parse(f"[t,i!], #[t,k!], [t,k!] * [{e},{first}] * [{e},{second}]{biases} -> [t,o!]")


_FLAGS = (False, True)
_LINES = {key: _line(*key) for key in ((g, i, t, b) for g in _FLAGS for i in _FLAGS for t in _FLAGS for b in _FLAGS)}


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of experts of a mixture.

    Tokens can be split with whole weights; experts and their inner size can be split into a pending sum. Gate and up
    are split alike: each by itself where all rows of the gate come first, in pairs where they are interleaved. The
    outer size is not split: only the last of the products would shrink. The second bias has no inner size: where that
    is split, every rank adds its share of the bias (`_text`).
    """
    gated, transposed = bool(node.attrs["gated"]), bool(node.attrs.get("transposed"))
    line = _LINES[gated, bool(node.attrs.get("interleaved")), transposed, len(ins) > FIRST_BIAS]
    sizes = {"count": Expr.of(2), "f": ins[SECOND][1 if transposed else 2]} if gated else None
    return bind(line, ins, outs, sizes)


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return the flops of every token through top_k experts of three (gate, up, down) or two products."""
    tokens, hidden = ins[0].shape
    products = 3 if node.attrs["gated"] else 2
    return tokens * hidden * (int(node.attrs["intermediate_size"]) * int(node.attrs["top_k"]) * 2 * products)


class ExpertRows(NamedTuple):
    """The operands of experts: rows (a token once per expert that takes it), their sizes, and bytes of an element."""

    rows: int
    hidden: int
    inner: int
    width: int


def experts_rows(f: OpFacts) -> ExpertRows:
    """Return the rows of one rank: tokens are spread evenly, so with a part of the experts it has that part of them."""
    hidden, index = f.inputs[:2]
    sizes = expert_sizes(f.attrs, f.inputs[FIRST].shape, f.inputs[SECOND].shape)
    rows = -(-index.num_elements * sizes.num // int(f.attrs.get("num_experts") or sizes.num))
    return ExpertRows(rows, hidden.shape[-1], sizes.inner, DTYPE_BYTES[hidden.dtype])


def _extra(f: OpFacts) -> tuple[int, ...]:
    """Return bytes besides tokens and routing weights: the token of each row, and the first product.

    Not counted: 4 bytes per expert for the end of its rows, if all experts are one product (autoplan.runtime.experts).
    """
    x = experts_rows(f)
    first = x.inner * (2 if f.attrs.get("gated", True) else 1)
    return (x.rows * DTYPE_BYTES["int64"], x.rows * first * x.width)


def _workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: the activated gate and its product with up; or that product and the result of the experts; or this result
    # and the same weighted. Backward: the activated gate, its product with up, gradients of both, of the gate and of
    # the first product; or arriving gradients and, of the values between the products, the first two and its gradient
    x, more = experts_rows(f), _MORE.get(f.attrs.get("activation", ""), (0, 0))
    sizes = [(2 + more[0]) * x.inner, 2 * x.hidden], [(6 + more[1]) * x.inner, 4 * x.inner + x.hidden]
    if len(f.inputs) > FIRST_BIAS:  # what the first product takes, and the bias of its rows
        sizes[0].append(x.hidden + f.inputs[FIRST_BIAS].shape[-1])
    return tuple(x.rows * max(size) * x.width for size in sizes)


# values of the inner size that activations hold beyond those of `silu(gate) * up`: in the forward, in the backward
_MORE: Mapping[str, tuple[int, int]] = {
    "clamped_swiglu": (3, 2),
    "clamped_silu": (1, 1),
    "silu_clamped": (1, 1),
    "silu_in_float32": (4, 8),  # of 16-bit values
}


def _text(t: OpText) -> str:
    args = list(t.args)
    if len(args) > SECOND_BIAS and t.num_partial > 1 and not t.over:  # results of several parts of an expert add up
        args[SECOND_BIAS] = f"{args[SECOND_BIAS]} / {t.num_partial}"
    more = "".join(f", {n}={literal(t.attrs[n])}" for n in OTHER_FORMS if n in t.attrs)
    between = f"activation={t.attrs['activation']!r}, gated={bool(t.attrs['gated'])}{more}"
    return f"experts({', '.join(args)}, {between}{t.over})"


RECORDS = (
    OpRecord(
        "experts",
        OpKind.EXPERTS,
        _rule,
        keeps("x0<0,2,3,4 x2<0,2,3,4", form=Form.NEW, extra=_extra, workspace=_workspace),
        _text,
        {"autoplan.experts.default": _arguments},
        flops=_flops,
        special={"expert_parallel": P},
        weights=(FIRST, SECOND),
        factor_names={"e": "experts", "f": "expert_out", "count": "chunks"},
        # all experts: a rank with a part of them has that part of the rows
        index_limits=lambda attrs, inputs, outputs: {1: range(int(attrs["num_experts"]))},
        has=(Trait.RUNS_ON_DEVICE,),
    ),
)
