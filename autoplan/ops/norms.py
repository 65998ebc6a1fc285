"""Records of norms, softmax, sums and means."""

from __future__ import annotations

from autoplan.errors import FormError
from autoplan.ir.graph import Node
from autoplan.ir.symbols import Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering, by_name
from autoplan.ops.labels import dim_labels, linear_rule, whole_dim
from autoplan.ops.language import OpRule
from autoplan.ops.record import Linear, OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, Gradient, OpFacts, keeps, statistics_bytes, units
from autoplan.ops.text import Emitter, OpText, py
from autoplan.units import DTYPE_BYTES, HALF

# -- norms -------------------------------------------------------------------------------------------------------------


def _last_dim_only(op: str, a: Args) -> None:
    if len(a["normalized_shape"]) != 1:
        raise FormError(f"{op} over {len(a['normalized_shape'])} dims is not supported; normalise the last dim only")


def _layer_norm(a: Args) -> IrResult:
    _last_dim_only("layer_norm", a)
    tensors = tuple(t for t in (a["input"], a.get("weight"), a.get("bias")) if t is not None)
    attrs = {"eps": a.get("eps", 1e-5), "weight": a.get("weight") is not None, "bias": a.get("bias") is not None}
    return IrOp("layer_norm", tensors, attrs)


def _rms_norm(a: Args) -> IrResult:
    _last_dim_only("rms_norm", a)
    tensors = tuple(t for t in (a["input"], a.get("weight")) if t is not None)
    return IrOp("rms_norm", tensors, {"eps": a.get("eps"), "weight": a.get("weight") is not None})


def _layer_norm_extra(f: OpFacts) -> tuple[int, ...]:
    x = f.inputs[0]
    rows = x.num_elements // x.shape[-1]
    # the CPU kernel writes the statistics in the dtype of the input unless the weight is wider
    parts = [t.dtype for t in f.inputs]
    width = DTYPE_BYTES[x.dtype] if f.device_type == "cpu" else statistics_bytes(x.dtype)
    width = max([width, *(DTYPE_BYTES[d] for d in parts)])
    return (rows * width, rows * width)  # mean, reciprocal standard deviation


def _rms_norm_extra(f: OpFacts) -> tuple[int, ...]:
    x = f.inputs[0]
    width = statistics_bytes(x.dtype)
    rows = x.num_elements // x.shape[-1] * width
    if f.device_type != "cpu":
        return (rows,)  # one kernel: reciprocal root mean square
    # composed on the CPU: below float32 the input is cast up; the scaled input is kept for the weight's gradient
    wide = x.num_elements * width
    cast = (wide,) if x.dtype in HALF else ()
    weighted = (wide,) if len(f.inputs) > 1 and f.inputs[1].requires_grad else ()
    return (rows, *cast, *weighted)


def _norm(name: str) -> Emitter:
    def text(t: OpText) -> str:
        rest = list(t.args[1:])
        weight = rest.pop(0) if t.attrs.get("weight") else "None"
        bias = rest.pop(0) if t.attrs.get("bias") else None
        size = t.inputs[0][-1]
        args = [t.args[0], f"({py(size)},)", weight, *([bias] if bias else [])]
        eps = f", eps={t.attrs['eps']!r}" if t.attrs["eps"] is not None else ""
        return f"F.{name}({', '.join(args)}{eps})"

    return text


# -- sums and means ----------------------------------------------------------------------------------------------------


def _reduce_arguments(op: str) -> Lowering:
    def build(a: Args) -> IrResult:
        dims = a.get("dim")
        dims = None if dims is None else tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
        attrs = {"dims": dims, "keepdim": bool(a.get("keepdim", False))}
        if a.get("dtype") is not None:
            attrs["dtype"] = a["dtype"]
        return IrOp(op, (a["self"],), attrs)

    return build


def _reduce_rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of a sum or mean over dims: a split reduced dim makes the result P (a mean divides globally)."""
    labels = dim_labels(ins[0])
    dims = node.attrs.get("dims")
    over = {d % len(labels) for d in (dims if dims else range(len(labels)))}
    keep = bool(node.attrs.get("keepdim"))
    out = [() if i in over else label for i, label in enumerate(labels) if keep or i not in over]
    return linear_rule(labels, out)


def _reduce_text(name: str) -> Emitter:
    def text(t: OpText) -> str:
        dims = t.attrs["dims"]
        over = ["dim=None"] if not dims else [repr(dims[0] if len(dims) == 1 else tuple(dims))]
        more = ["keepdim=True"] if t.attrs["keepdim"] else []
        more += [f"dtype=torch.{t.attrs['dtype']}"] if t.attrs.get("dtype") else []
        call = f"{t.args[0]}.{name}({', '.join([*over, *more] if dims or more else [])})"
        return f"{call} / {t.num_partial}" if name == "mean" and t.num_partial > 1 else call

    return text


# -- softmax -----------------------------------------------------------------------------------------------------------


def _plain_softmax(op: str) -> Lowering:
    def build(a: Args) -> IrResult:
        if a["half_to_float"]:
            raise FormError(f"{op} of 16-bit numbers into float32 is not supported")
        return IrOp(op, (a["self"],), {"dim": a["dim"], "dtype": None})

    return build


def _softmax_text(name: str) -> Emitter:
    def text(t: OpText) -> str:
        dtype = f", dtype=torch.{t.attrs['dtype']}" if t.attrs.get("dtype") else ""
        return f"torch.{name}({t.args[0]}, dim={t.attrs['dim']}{dtype})"

    return text


def _softmax(name: str, *traits: Trait) -> OpRecord:
    return OpRecord(
        name,
        OpKind.SOFTMAX,
        whole_dim,
        keeps("y0<0", form=Form.NEW),
        _softmax_text(name),
        {f"aten.{name}.int": by_name(name, "self", "dim", dtype=None), f"aten._{name}.default": _plain_softmax(name)},
        has=traits,
    )


RECORDS = (
    OpRecord(
        "layer_norm",
        OpKind.NORM,
        "[*b,n!], [n!], [n!] -> [*b,n!]",
        keeps("x0<0,1,2 x1<0,1,2 x2<0,1,2", form=Form.NEW, extra=_layer_norm_extra),
        _norm("layer_norm"),
        {"aten.layer_norm.default": _layer_norm},
    ),
    OpRecord(
        "rms_norm",
        OpKind.NORM,
        "[*b,n!], [n!] -> [*b,n!]",
        keeps("x0<0,1 x1<0,1", extra=_rms_norm_extra, workspace=units(1, 2)),
        _norm("rms_norm"),
        {"aten.rms_norm.default": _rms_norm},
    ),
    _softmax("softmax", Trait.FOLLOWS),
    _softmax("log_softmax"),
    OpRecord(
        "sum",
        OpKind.REDUCTION,
        _reduce_rule,
        keeps(form=Form.NEW, gradient=Gradient.PASS),  # an expanded view of the output's gradient
        _reduce_text("sum"),
        {f"aten.sum.{x}": _reduce_arguments("sum") for x in ("dim_IntList", "default")},
        Linear.ALL,
        has=(Trait.FOLLOWS,),
    ),
    OpRecord(
        "mean",
        OpKind.REDUCTION,
        _reduce_rule,
        keeps(form=Form.NEW),
        _reduce_text("mean"),
        {f"aten.mean.{x}": _reduce_arguments("mean") for x in ("dim", "default")},
        Linear.ALL,
        has=(Trait.FOLLOWS, Trait.AVERAGES, Trait.VARIANCE),
    ),
)
