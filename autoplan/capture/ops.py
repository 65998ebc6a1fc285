"""ATen op -> IR op: one small function per op, in a table. An op that is not here is refused with its source line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.capture.frontend.left_out import check_attention_dropout
from autoplan.errors import CaptureError

Args = dict[str, Any]  # ATen arguments by schema name; tensors are value names, symbolic sizes are Expr


@dataclass(frozen=True)
class Lowered:
    """One IR op: tensors (None for absent), plain attributes."""

    op: str
    tensors: tuple[str | None, ...]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class Alias:
    """The op does nothing: its output is its input."""

    of: str


Result = Lowered | Alias | list[Lowered]
INT_MAX = 2**63 - 1


def _unary(op: str) -> Callable[[Args], Result]:
    return lambda a: Lowered(op, (a["self"],), {})


def _binary(op: str) -> Callable[[Args], Result]:
    """Tensor or scalar second operand."""

    def build(a: Args) -> Result:
        other = a["other"]
        if a.get("alpha", 1) != 1:
            raise CaptureError(f"{op} with alpha={a['alpha']} is not supported; write the product out")
        if isinstance(other, str):
            return Lowered(op, (a["self"], other), {})
        if op == "sub":
            return Lowered("add_scalar", (a["self"],), {"scalar": -other})
        if (op == "add" and other == 0) or (op in ("mul", "div") and other == 1):
            return Alias(a["self"])
        return Lowered(f"{op}_scalar", (a["self"],), {"scalar": other})

    return build


def _linear(a: Args) -> Result:
    product = Lowered("linear", (a["input"], a["weight"]), {})
    if a.get("bias") is None:
        return product
    # bias as its own addition: under row-parallel it is added once, after the reduction (the emitter fuses it back)
    return [product, Lowered("add", ("$0", a["bias"]), {"bias": True})]


def _addmm(a: Args) -> Result:
    """beta * self + alpha * product; a factor that both have is taken last, where both have one shape."""
    alpha, beta, added = a.get("alpha", 1), a.get("beta", 1), a["self"]
    out = [Lowered("matmul", (a["mat1"], a["mat2"]), {})]
    if alpha != (beta or 1):
        out.append(Lowered("mul_scalar", ("$0",), {"scalar": alpha / (beta or 1)}))
    if beta != 0:
        out.append(Lowered("add", ("$0", added), {}))
    return [*out, Lowered("mul_scalar", ("$0",), {"scalar": beta})] if beta not in (0, 1) else out


def _rsub(a: Args) -> Result:
    difference = Lowered("rsub_scalar", ("$0",), {"scalar": a["other"]})
    if a.get("alpha", 1) == 1:
        return Lowered("rsub_scalar", (a["self"],), {"scalar": a["other"]})
    return [Lowered("mul_scalar", (a["self"],), {"scalar": a["alpha"]}), difference]


def _attention(a: Args) -> Result:
    check_attention_dropout(
        a.get("dropout_p", 0.0),
        "scaled_dot_product_attention",
        "set it to 0 and use nn.Dropout on the residual branch",
    )
    tensors: tuple[str | None, ...] = (a["query"], a["key"], a["value"])
    if a.get("attn_mask") is not None:
        tensors = (*tensors, a["attn_mask"])
    return Lowered("attention", tensors, {"causal": bool(a.get("is_causal", False)), "scale": a.get("scale")})


def _masked_attention(a: Args) -> Result:
    tensors: tuple[str | None, ...] = (a["query"], a["key"], a["value"])
    attrs = {"causal": a["causal"], "scale": a.get("scale")}
    if a.get("documents") is not None:
        tensors, attrs["documents"] = (*tensors, a["documents"]), True
    if a.get("window") is not None:
        attrs["window"] = a["window"]
    return Lowered("attention", tensors, attrs)


def _biased_attention(a: Args) -> Result:
    attrs = {"causal": a["causal"], "scale": a.get("scale")}
    return Lowered("attention", (a["query"], a["key"], a["value"], a["bias"]), attrs)


def _slice(a: Args) -> Result:
    start = a.get("start") or 0
    end = a.get("end")
    end = INT_MAX if end is None else end
    step = a.get("step", 1)
    if start == 0 and end == INT_MAX and step == 1:
        return Alias(a["self"])
    return Lowered("slice", (a["self"],), {"dim": a.get("dim", 0), "start": start, "end": end, "step": step})


def _dropout(a: Args) -> Result:
    if not a["train"] or a["p"] == 0.0:
        return Alias(a["input"])
    return Lowered("dropout", (a["input"],), {"p": float(a["p"])})


def _pad(a: Args) -> Result:
    if a.get("mode", "constant") != "constant":
        raise CaptureError(f"pad mode {a['mode']!r} is not supported; use 'constant'")
    return Lowered("pad", (a["self"],), {"pad": tuple(a["pad"]), "value": a.get("value") or 0})


def _last_dim_only(op: str, a: Args) -> None:
    if len(a["normalized_shape"]) != 1:
        raise CaptureError(f"{op} over {len(a['normalized_shape'])} dims is not supported; normalise the last dim only")


def _layer_norm(a: Args) -> Result:
    _last_dim_only("layer_norm", a)
    tensors = tuple(t for t in (a["input"], a.get("weight"), a.get("bias")) if t is not None)
    attrs = {"eps": a.get("eps", 1e-5), "weight": a.get("weight") is not None, "bias": a.get("bias") is not None}
    return Lowered("layer_norm", tensors, attrs)


def _rms_norm(a: Args) -> Result:
    _last_dim_only("rms_norm", a)
    tensors = tuple(t for t in (a["input"], a.get("weight")) if t is not None)
    return Lowered("rms_norm", tensors, {"eps": a.get("eps"), "weight": a.get("weight") is not None})


def _embedding(a: Args) -> Result:
    if a.get("scale_grad_by_freq") or a.get("sparse"):
        raise CaptureError("embedding with scale_grad_by_freq or sparse gradients is not supported; switch them off")
    return Lowered("embedding", (a["weight"], a["indices"]), {"padding_idx": a.get("padding_idx", -1)})


def _cross_entropy(a: Args) -> Result:
    if a.get("weight") is not None:
        raise CaptureError("cross_entropy with class weights is not supported")
    if a.get("reduction", 1) not in (1, 2):
        raise CaptureError("cross_entropy with reduction='none' is not supported; use 'mean' or 'sum'")
    return Lowered(
        "cross_entropy",
        (a["self"], a["target"]),
        {
            "mean": a.get("reduction", 1) == 1,
            "ignore_index": a.get("ignore_index", -100),
            "label_smoothing": float(a.get("label_smoothing", 0.0)),
        },
    )


def _reduce(op: str) -> Callable[[Args], Result]:
    def build(a: Args) -> Result:
        dims = a.get("dim")
        dims = None if dims is None else tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
        attrs = {"dims": dims, "keepdim": bool(a.get("keepdim", False))}
        if a.get("dtype") is not None:
            attrs["dtype"] = a["dtype"]
        return Lowered(op, (a["self"],), attrs)

    return build


def _reshape(a: Args) -> Result:
    return Lowered("reshape", (a["self"],), {})


def _to(a: Args) -> Result:
    return Lowered("to", (a["self"],), {"dtype": a["dtype"]})


def _softmax(op: str) -> Callable[[Args], Result]:
    return lambda a: Lowered(op, (a["self"],), {"dim": a["dim"], "dtype": a.get("dtype")})


def _with(op: str, *names: str) -> Callable[[Args], Result]:
    return lambda a: Lowered(op, (a["self"],), {n: a[n] for n in names})


def _topk(a: Args) -> Result:
    if not a.get("largest", True):
        raise CaptureError("topk with largest=False is not supported; negate its input")
    return Lowered("topk", (a["self"],), {"k": a["k"], "dim": a.get("dim", -1), "sorted": bool(a.get("sorted", True))})


def _gather(a: Args) -> Result:
    return Lowered("gather", (a["self"], a["index"]), {"dim": a["dim"]})


def _scatter(a: Args) -> Result:
    return Lowered("scatter", (a["self"], a["index"]), {"dim": a["dim"], "scalar": a["value"]})


def _extreme(op: str) -> Callable[[Args], Result]:
    """Along one dim: of all elements there is no place to speak of."""

    def build(a: Args) -> Result:
        if a.get("dim") is None:
            raise CaptureError(f"{op} over all elements is not supported; give it a dim")
        return Lowered(op, (a["self"],), {"dim": a["dim"], "keepdim": bool(a.get("keepdim", False))})

    return build


def _histc(a: Args) -> Result:
    bins, low, high = a.get("bins", 100), a.get("min", 0), a.get("max", 0)
    if not low < high:
        raise CaptureError("histc between the extremes of its data is not supported; give it min and max")
    return Lowered("histc", (a["self"],), {"bins": bins, "min": low, "max": high})


def _experts(a: Args) -> Result:
    tensors = tuple(a[n] for n in ("hidden", "index", "weights", "gate_up", "down"))
    names = ("num_experts", "top_k", "intermediate_size", "activation", "gated")
    return Lowered("experts", tensors, {n: a[n].value if hasattr(a[n], "value") else a[n] for n in names})


def _first(name: str) -> Callable[[Args], Result]:
    return lambda a: Alias(a[name])


OPS: dict[str, Callable[[Args], Result]] = {
    **{
        f"aten.{op}.default": _unary(op)
        for op in "silu relu tanh sigmoid exp log cos sin rsqrt sqrt abs erf neg logical_not square bitwise_not".split()
    },
    **{f"aten.{op}.Tensor": _binary(op) for op in "add sub mul div eq ne lt gt le ge".split()},
    **{f"aten.{op}.Scalar": _binary(op) for op in "add sub mul div eq ne lt gt le ge".split()},
    **{f"aten.{op}.default": _binary(op) for op in "maximum minimum logical_and logical_or".split()},
    "aten.bitwise_and.Tensor": _binary("bitwise_and"),
    "aten.bitwise_or.Tensor": _binary("bitwise_or"),
    "aten.__and__.Tensor": _binary("bitwise_and"),
    "aten.min.other": _binary("minimum"),
    "aten.max.other": _binary("maximum"),
    "aten.rsub.Scalar": _rsub,
    "aten.pow.Tensor_Scalar": lambda a: Lowered("pow_scalar", (a["self"],), {"scalar": a["exponent"]}),
    "aten.gelu.default": lambda a: Lowered("gelu", (a["self"],), {"approximate": a.get("approximate", "none")}),
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    **{
        f"aten.{op}.default": lambda a: Lowered("matmul", (a["self"], a.get("other", a.get("mat2"))), {})
        for op in ("matmul", "bmm", "mm")
    },
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.dropout.default": _dropout,
    "aten.softmax.int": _softmax("softmax"),
    "aten.log_softmax.int": _softmax("log_softmax"),
    "aten.mean.dim": _reduce("mean"),
    "aten.mean.default": _reduce("mean"),
    "aten.sum.dim_IntList": _reduce("sum"),
    "aten.sum.default": _reduce("sum"),
    **{f"aten.{op}.default": _reshape for op in ("view", "reshape", "_unsafe_view", "view_as")},
    **{f"aten.flatten.{o}": _reshape for o in ("using_ints",)},
    "aten.unflatten.int": _reshape,
    "aten.transpose.int": _with("transpose", "dim0", "dim1"),
    "aten.t.default": lambda a: Lowered("transpose", (a["self"],), {"dim0": 0, "dim1": 1}),
    "aten.permute.default": lambda a: Lowered("permute", (a["self"],), {"dims": tuple(a["dims"])}),
    "aten.unsqueeze.default": _with("unsqueeze", "dim"),
    "aten.squeeze.dim": _with("squeeze", "dim"),
    "aten.expand.default": lambda a: Lowered("expand", (a["self"],), {}),
    "aten.slice.Tensor": _slice,
    "aten.select.int": _with("select", "dim", "index"),
    "aten.cat.default": lambda a: Lowered("cat", tuple(a["tensors"]), {"dim": a.get("dim", 0)}),
    "aten.chunk.default": lambda a: Lowered("chunk", (a["self"],), {"dim": a.get("dim", 0)}),
    "aten.split.Tensor": lambda a: Lowered("chunk", (a["self"],), {"dim": a.get("dim", 0)}),
    "aten.split_with_sizes.default": lambda a: Lowered("chunk", (a["self"],), {"dim": a.get("dim", 0)}),
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.where.self": lambda a: Lowered("where", (a["condition"], a["self"], a["other"]), {}),
    "aten.masked_fill.Scalar": lambda a: Lowered("masked_fill", (a["self"], a["mask"]), {"scalar": a["value"]}),
    "aten.tril.default": lambda a: Lowered("tril", (a["self"],), {"diagonal": a.get("diagonal", 0)}),
    "aten.triu.default": lambda a: Lowered("triu", (a["self"],), {"diagonal": a.get("diagonal", 0)}),
    "aten.topk.default": _topk,
    "aten.gather.default": _gather,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": lambda a: Lowered("scatter_add", (a["self"], a["index"], a["src"]), {"dim": a["dim"]}),
    "aten.histc.default": _histc,
    "aten.argmax.default": _extreme("argmax"),
    "aten.max.dim": _extreme("max"),
    "aten.repeat_interleave.self_int": lambda a: Lowered(
        "repeat_interleave", (a["self"],), {"repeats": a["repeats"], "dim": a.get("dim")}
    ),
    "aten.one_hot.default": lambda a: Lowered("one_hot", (a["self"],), {"num_classes": a["num_classes"]}),
    "autoplan.experts.default": _experts,
    "autoplan.masked_attention.default": _masked_attention,
    "autoplan.biased_attention.default": _biased_attention,
    "aten.cumsum.default": _with("cumsum", "dim"),
    "aten.clamp.default": lambda a: Lowered("clamp", (a["self"],), {"min": a.get("min"), "max": a.get("max")}),
    "aten.to.dtype": _to,
    "aten.to.dtype_layout": _to,
    "aten._to_copy.default": _to,
    "aten.to.device": _to,  # it takes a dtype, too
    "aten.contiguous.default": _first("self"),
    "aten.clone.default": _first("self"),
    "aten.alias.default": _first("self"),
    "aten.lift_fresh_copy.default": _first("self"),
    "aten.detach.default": _unary("detach"),
    "aten.detach_.default": _unary("detach"),
    "aten.arange.default": lambda a: Lowered("arange", (), {"start": 0, "end": a["end"]}),
    "aten.arange.start": lambda a: Lowered("arange", (), {"start": a["start"], "end": a["end"]}),
    "aten.full.default": lambda a: Lowered("full", (), {"scalar": a["fill_value"]}),
    "aten.full_like.default": lambda a: Lowered("full", (), {"scalar": a["fill_value"]}),
    "aten.zeros.default": lambda a: Lowered("full", (), {"scalar": 0}),
    "aten.ones.default": lambda a: Lowered("full", (), {"scalar": 1}),
    "aten.ones_like.default": lambda a: Lowered("full", (), {"scalar": 1}),
    "aten.zeros_like.default": lambda a: Lowered("full", (), {"scalar": 0}),
}

# Arguments that show in the shape, dtype or place of what an operation makes, which are taken from there.
_SHOWN = frozenset(
    "size shape sizes chunks split_size split_sizes start_dim end_dim memory_format device layout pin_memory "
    "non_blocking copy implicit enable_gqa cudnn_enable".split()
)
_SHAPE_OF = {"aten.view_as.default": "other", **{f"aten.{f}_like.default": "self" for f in ("full", "ones", "zeros")}}
_TAKES_DTYPE = frozenset(("to", "arange", "full"))


class Arguments(dict[str, Any]):
    """ATen arguments by schema name. Remembers which were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As that of a dict."""
        self.read.add(name)
        return super().get(name, default)


def lower(target: str, a: Arguments, defaults: Mapping[str, Any]) -> Result:
    """The IR of one ATen operation.

    Args:
        defaults: of its arguments, by the schema.

    Raises: CaptureError, also for an argument that the rule here does not know and that is not at its default.
    """
    result = OPS[target](a)
    if isinstance(result, Alias):
        return result
    made = {item.op for item in (result if isinstance(result, list) else [result]) if isinstance(item, Lowered)}
    for name in sorted(set(a) - a.read - _SHOWN):
        value = dict.__getitem__(a, name)
        if value is None or value == defaults.get(name) or (name == "dtype" and made & _TAKES_DTYPE):
            continue
        if name == _SHAPE_OF.get(target):
            continue
        raise CaptureError(f"{target.split('.')[1]} with {name}={value} is not supported")
    return result


SKIP = frozenset({"aten._assert_tensor_metadata.default", "aten.sym_size.int", "aten._assert_scalar.default"})
