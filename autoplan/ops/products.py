"""Records of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.errors import RuleError
from autoplan.ir.graph import Block, Node, Value
from autoplan.ir.symbols import Expr, Shape, product
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import Labels, OpRule, Role
from autoplan.ops.record import OpKind, OpRecord
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps
from autoplan.ops.text import OpText

PACKED = "packed"  # attribute: the weight is stored in 4 bits, and opened for every product (priced only)
NOT_EXECUTED = "weights in 4 bits are priced, but not executed"


def packed_weights(block: Block) -> frozenset[str]:
    """Return the parameters of a block that are stored in 4 bits."""
    return frozenset(n.tensor_inputs[1] for n in block.nodes if n.attrs.get(PACKED))


def _linear(a: Args) -> IrResult:
    made = IrOp("linear", (a["input"], a["weight"]), {})
    if a.get("bias") is None:
        return made
    # the bias is its own addition: under row-parallel it is added once, after the reduction (the emitter fuses it back)
    return [made, IrOp("add", ("$0", a["bias"]), {"bias": True})]


def adds_bias(node: Node) -> bool:
    """Return True for the addition that a bias of `linear` is captured as."""
    return node.op == "add" and bool(node.attrs.get("bias"))


def _linear_text(t: OpText) -> str:
    if t.attrs.get(PACKED):
        raise RuleError(NOT_EXECUTED)
    bias = f", {t.bias}" if t.bias else ""
    return f"F.linear({t.args[0]}, {t.args[1]}{bias})"


def _addmm(a: Args) -> IrResult:
    """Lower beta * self + alpha * product; a factor that both have is applied last, when both have one shape."""
    alpha, beta, added = a.get("alpha", 1), a.get("beta", 1), a["self"]
    out = [IrOp("matmul", (a["mat1"], a["mat2"]), {})]
    if alpha != (beta or 1):
        out.append(IrOp("mul_scalar", ("$0",), {"scalar": alpha / (beta or 1)}))
    if beta != 0:
        out.append(IrOp("add", ("$0", added), {}))
    return [*out, IrOp("mul_scalar", ("$0",), {"scalar": beta})] if beta not in (0, 1) else out


def _matmul_arguments(a: Args) -> IrResult:
    return IrOp("matmul", (a["self"], a.get("other", a.get("mat2"))), {})


def _matmul(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    a, b, out = ins[0], ins[1], outs[0]
    if len(a) < 2 or len(b) < 2:
        raise RuleError(f"{node.name}: matmul of a vector has no rule; unsqueeze it to a matrix")
    batch = dim_labels(out[:-2], "n")

    def lead(shape: Shape) -> list[Labels]:
        skip = len(batch) - (len(shape) - 2)
        return [() if size.value == 1 else batch[skip + i] for i, size in enumerate(shape[:-2])]

    def one(size: Expr, label: str) -> Labels:
        return () if size.value == 1 else (label,)

    m, k, n = one(a[-2], "m"), one(a[-1], "k"), one(b[-1], "n")
    return OpRule(((*lead(a), m, k), (*lead(b), one(b[-2], "k"), n)), ((*batch, m, n),), (Role.MUL, Role.MUL))


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return one multiplication and one addition per element of the output and of the contracted dims."""
    contracted = product(
        [s for s, dim in zip(ins[0].shape, rule.inputs[0], strict=True) if any(rule.contracted(x) for x in dim)]
    )
    return out.num_elements * contracted * 2


def _opened_bytes(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of a weight that is opened for a product: in both passes, and only while it runs."""
    return (f.inputs[1].num_bytes,) * 2


_SAVED = keeps("x0<1 x1<0", form=Form.NEW)
_PACKED_SAVED = keeps("x0<1 x1<0", form=Form.NEW, workspace=_opened_bytes)


def _saved_form(f: OpFacts) -> SavedRule | None:
    return _PACKED_SAVED if f.attrs.get(PACKED) else None


RECORDS = (
    OpRecord(
        "linear",
        OpKind.PRODUCT,
        "[*b,i] * [o,i] -> [*b,o]",
        _SAVED,
        _linear_text,
        {"aten.linear.default": _linear},
        flops=_flops,
        saved_form=_saved_form,
        weights=(1,),
        factor_names={"o": "out", "i": "in"},
    ),
    OpRecord(
        "matmul",
        OpKind.PRODUCT,
        _matmul,
        _SAVED,
        "torch.matmul({0}, {1})",
        {**{f"aten.{x}.default": _matmul_arguments for x in ("matmul", "bmm", "mm")}, "aten.addmm.default": _addmm},
        flops=_flops,
        saved_form=_saved_form,
    ),
)
