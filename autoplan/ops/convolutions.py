"""Record of convolutions over one to three dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, Shape, product
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import Labels, OpRule, Role
from autoplan.ops.record import OpKind, OpRecord
from autoplan.ops.saved import Form, keeps
from autoplan.ops.text import OpText


def _arguments(a: Args) -> IrResult:
    """Lower `aten.convolution` and its forms for one, two and three dims."""
    tensors = tuple(a[name] for name in ("input", "weight", "bias") if a.get(name) is not None)
    num = len(a["stride"]) if a.get("stride") else 1
    padding = a.get("padding", [0] * num)
    attrs = {
        "stride": tuple(a.get("stride", [1] * num)),
        "padding": padding if isinstance(padding, str) else tuple(padding),
        "dilation": tuple(a.get("dilation", [1] * num)),
        "groups": a.get("groups", 1),
        "transposed": bool(a.get("transposed", False)),
        "output_padding": tuple(a.get("output_padding", ())),
    }
    return IrOp(CONVOLUTION, tensors, attrs)


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule: samples, and channels of the output (of both sides if each channel is convolved alone).

    Channels of the input are summed over, which a bias added in the same kernel forbids to split. Dims that a kernel
    slides over are whole.
    """
    x, weight, out = dim_labels(ins[0], "x"), dim_labels(ins[1], "w"), dim_labels(outs[0], "y")
    whole = {label for dims in (x[2:], weight[2:], out[2:]) for dim in dims for label in dim}
    x[0] = out[0] = () if ins[0][0].value == 1 else ("b",)
    groups, one, sizes = node.attrs["groups"], Expr.of(1), dict[str, Expr]()
    biased, turned = len(ins) == 3, node.attrs["transposed"]
    rows, columns = (1, 0) if turned else (0, 1)  # of the weight: output channels, input channels

    def label(size: Expr, name: str) -> Labels:
        return () if size == one else (name,)

    if groups == 1:
        x[1] = weight[columns] = label(ins[0][1], "i")
        out[1] = weight[rows] = label(outs[0][1], "o")
        whole |= {"i"} if biased else set()
    elif ins[0][1] == Expr.of(groups) and (not turned or outs[0][1] == ins[0][1]):
        x[1], several = ("o",), outs[0][1].divide(ins[0][1])  # of each channel, one or several
        out[1] = weight[0] = ("o",) if several == one else ("o", "each")
        whole |= {"each"}
        sizes = {"o": ins[0][1], "each": several or one}
    else:
        whole |= {n for dim in (x[1], out[1], *weight[:2]) for n in dim}
    operands = [tuple(x), tuple(weight)]
    if biased:
        operands.append((out[1],))
    roles = (Role.MUL, Role.MUL, Role.OTHER)[: len(ins)]
    return OpRule(tuple(operands), (tuple(out),), roles, frozenset(whole), sizes=sizes)


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return one multiplication and one addition per element of the output, of the kernel and of the channels summed.

    A transposed convolution does them per element of its input.
    """
    moving = ins[0] if node.attrs["transposed"] else out
    return moving.num_elements * product(ins[1].shape[1:]) * 2


def _text(t: OpText) -> str:
    a = t.attrs
    groups = a["groups"]
    if groups != 1 and t.inputs[0][1] == Expr.of(groups):  # each alone: as many groups as this rank has channels
        groups = f"{t.args[0]}.shape[1]"
    bias = t.args[2] if len(t.args) == 3 else "None"
    place = f"{t.args[0]}, {t.args[1]}, {bias}, {list(a['stride'])}"
    if isinstance(a["padding"], str):
        return f"F.conv{len(a['stride'])}d({place}, {a['padding']!r}, {list(a['dilation'])}, {groups})"
    output_padding = list(a["output_padding"] or [0] * len(a["stride"]))
    rest = f"{list(a['padding'])}, {list(a['dilation'])}, {a['transposed']}, {output_padding}, {groups}"
    return f"torch.convolution({place}, {rest})"


_FORMS = [f"conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")]
_ATEN: Mapping[str, Lowering] = {f"aten.{name}": _arguments for name in (*_FORMS, "convolution.default")}

CONVOLUTION = "convolution"
RECORDS = (
    OpRecord(
        CONVOLUTION,
        OpKind.OTHER,
        _rule,
        keeps("x0<1 x1<0", form=Form.NEW),
        _text,
        _ATEN,
        flops=_flops,
    ),
)
