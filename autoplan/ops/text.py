"""Text of an op in the emitted program: each op of the IR has one line in `EMITTERS`.

An emitter sees argument texts, attributes and local sizes. What depends on mesh and methods (the axes of a special
form, of attention over cut sequences, of experts, of sums over the batch) is a text given to it, `OpText.over`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoplan.ir.symbols import Expr

Shape = tuple[Expr, ...]


@dataclass(frozen=True)
class OpText:
    """What the text of one op is made of.

    Attributes:
        args: texts of its arguments, those that are absent left out.
        inputs: shapes of its inputs in the whole model.
        outputs: shapes of its outputs on one rank.
        whole: a size of the model, from the sizes of this rank.
        over: text of the axes that it works over, or of the parts of its output that this rank has; empty where it
            needs none.
        bias: text of a bias that is added to it; empty where there is none.
        num_partial: over how many ranks its output is a pending sum because of it.
    """

    args: tuple[str, ...]
    attrs: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    whole: Callable[[Expr], Expr]
    over: str = ""
    bias: str = ""
    num_partial: int = 1


Emitter = Callable[[OpText], str]


def py(size: Expr) -> str:
    """Python text of a symbolic size; exact integer division."""
    denominator = 1
    for _, coefficient in size.terms:
        denominator = max(denominator, coefficient.denominator)
    text = str(size.scale(Fraction(denominator))).replace("*", " * ").replace("+", " + ")
    if denominator == 1:
        return text
    simple = len(size.terms) == 1
    return f"{text} // {denominator}" if simple else f"({text}) // {denominator}"


def literal(value: Any) -> str:
    """Python text of an attribute: a number, a symbolic size, a plain value."""
    if isinstance(value, Expr):
        return f"({py(value)})" if value.value is None else py(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def shape_text(sizes: Sequence[Expr]) -> str:
    """Comma-separated local sizes."""
    return ", ".join(py(s) for s in sizes)


def _unary(template: str) -> Emitter:
    return lambda t: template.format(x=t.args[0])


def _infix(symbol: str) -> Emitter:
    return lambda t: f"{t.args[0]} {symbol} {t.args[1]}"


def _function(name: str) -> Emitter:
    return lambda t: f"{name}({t.args[0]}, {t.args[1]})"


def _scalar(template: str) -> Emitter:
    def text(t: OpText) -> str:
        scalar = t.attrs["scalar"]
        return template.format(x=t.args[0], c=literal(t.whole(scalar) if isinstance(scalar, Expr) else scalar))

    return text


def _linear(t: OpText) -> str:
    bias = f", {t.bias}" if t.bias else ""
    return f"F.linear({t.args[0]}, {t.args[1]}{bias})"


def _reduce(name: str) -> Emitter:
    def text(t: OpText) -> str:
        dims = t.attrs["dims"]
        over = ["dim=None"] if not dims else [repr(dims[0] if len(dims) == 1 else tuple(dims))]
        more = ["keepdim=True"] if t.attrs["keepdim"] else []
        more += [f"dtype=torch.{t.attrs['dtype']}"] if t.attrs.get("dtype") else []
        call = f"{t.args[0]}.{name}({', '.join([*over, *more] if dims or more else [])})"
        return f"{call} / {t.num_partial}" if name == "mean" and t.num_partial > 1 else call

    return text


def _squeeze(t: OpText) -> str:
    # torch leaves a dim that is not 1 as it is; its shard may be 1
    return f"{t.args[0]}.squeeze({t.attrs['dim']})" if t.inputs[0][t.attrs["dim"]].value == 1 else t.args[0]


def _slice(t: OpText) -> str:
    dim = t.attrs["dim"] % len(t.inputs[0])
    start, end, step = t.attrs["start"], t.attrs["end"], t.attrs["step"]
    stop = "" if isinstance(end, int) and end >= 2**62 else literal(end)
    part = f"{literal(start) if start else ''}:{stop}" + (f":{step}" if step != 1 else "")
    if dim == len(t.inputs[0]) - 1:
        return f"{t.args[0]}[..., {part}]"
    return f"{t.args[0]}[{', '.join([':'] * dim + [part])}]"


def _chunk(t: OpText) -> str:
    dim = t.attrs["dim"]
    sizes = [shape[dim] for shape in t.outputs]
    if all(s == sizes[0] for s in sizes):
        return f"{t.args[0]}.chunk({len(sizes)}, dim={dim})"
    return f"{t.args[0]}.split([{', '.join(py(s) for s in sizes)}], dim={dim})"


def _attention(t: OpText) -> str:
    mask = f", {'documents' if t.attrs.get('documents') else 'mask'}={t.args[3]}" if len(t.args) > 3 else ""
    scale = t.attrs["scale"]
    window = f", window={t.attrs['window']}" if t.attrs.get("window") is not None else ""
    return f"attention({', '.join(t.args[:3])}{mask}, causal={t.attrs['causal']}, scale={scale!r}{window}{t.over})"


def _embedding(t: OpText) -> str:
    padding = t.attrs["padding_idx"]
    pad = "" if padding is None or padding < 0 else f", padding_idx={padding}"
    if t.over:
        return f"vocab_parallel_embedding({t.args[1]}, {t.args[0]}, {t.over}{pad})"
    return f"F.embedding({t.args[1]}, {t.args[0]}{pad})"


def _cross_entropy(t: OpText) -> str:
    extra = f", ignore_index={t.attrs['ignore_index']}"
    if t.attrs["label_smoothing"]:
        extra += f", label_smoothing={t.attrs['label_smoothing']}"
    if t.over:
        return f"vocab_parallel_cross_entropy_sum({t.args[0]}, {t.args[1]}, {t.over}{extra})"
    return f"cross_entropy_sum({t.args[0]}, {t.args[1]}{extra})"


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


def _dropout(t: OpText) -> str:
    return f"dropout({t.args[0]}, {t.attrs['p']}, rng, {t.over})"


def _cat(t: OpText) -> str:
    return f"torch.cat([{', '.join(t.args)}], dim={t.attrs['dim']})"


def _arange(t: OpText) -> str:
    start = f"{literal(t.attrs['start'])}, " if t.attrs["start"] else ""
    return f"torch.arange({start}{literal(t.attrs['end'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _full(t: OpText) -> str:
    shape = shape_text(t.outputs[0]) + ("," if len(t.outputs[0]) == 1 else "")
    return f"torch.full(({shape}), {literal(t.attrs['scalar'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _gelu(t: OpText) -> str:
    how = t.attrs["approximate"]
    return f"F.gelu({t.args[0]}" + (f", approximate={how!r})" if how != "none" else ")")


def _softmax(name: str) -> Emitter:
    def text(t: OpText) -> str:
        dtype = f", dtype=torch.{t.attrs['dtype']}" if t.attrs.get("dtype") else ""
        return f"torch.{name}({t.args[0]}, dim={t.attrs['dim']}{dtype})"

    return text


def _topk(t: OpText) -> str:
    return f"torch.topk({t.args[0]}, {literal(t.attrs['k'])}, dim={t.attrs['dim']}, sorted={t.attrs['sorted']})"


def _histc(t: OpText) -> str:
    return f"torch.histc({t.args[0]}.float(), bins={t.attrs['bins']}, min={t.attrs['min']}, max={t.attrs['max']})"


def _weighted_count(t: OpText) -> str:
    index, weights = t.args
    return f"{weights}.new_zeros({literal(t.attrs['num'])}).scatter_add(0, {index}.flatten(), {weights}.flatten())"


def _batch_sum(t: OpText) -> str:
    return f"all_reduce({t.args[0]}, {t.over}, dst=R)" if t.over else t.args[0]


def _batch_part(t: OpText) -> str:
    return f"to_partial({t.args[0]}, {t.over}, src=R)" if t.over else t.args[0]


def _experts(t: OpText) -> str:
    return f"experts({', '.join(t.args)}, activation={t.attrs['activation']!r}, gated={bool(t.attrs['gated'])}{t.over})"


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "bitwise_and": "&", "bitwise_or": "|"}
_SYMBOLS = {**_ARITHMETIC, "eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}

EMITTERS: dict[str, Emitter] = {
    **{
        op: _unary(f"torch.{op}({{x}})")
        for op in "tanh sigmoid exp log cos sin rsqrt sqrt abs erf square logical_not".split()
    },
    **{op: _unary(f"F.{op}({{x}})") for op in "silu relu softplus".split()},
    **{op: _unary(f"{{x}}.{op}()") for op in ("detach", "clone")},
    "neg": _unary("-{x}"),
    "bitwise_not": _unary("~{x}"),
    "gelu": _gelu,
    **{op: _infix(symbol) for op, symbol in _SYMBOLS.items()},
    **{op: _function(f"torch.{op}") for op in "pow maximum minimum logical_and logical_or matmul".split()},
    **{f"{op}_scalar": _scalar(f"{{x}} {_SYMBOLS[op]} {{c}}") for op in "add mul div eq ne lt gt le ge".split()},
    "pow_scalar": _scalar("{x}.pow({c})"),
    "rsub_scalar": _scalar("{c} - {x}"),
    "topk": _topk,
    "argmax": lambda t: f"torch.argmax({t.args[0]}, dim={t.attrs['dim']}, keepdim={t.attrs['keepdim']})",
    "max": lambda t: f"torch.max({t.args[0]}, dim={t.attrs['dim']}, keepdim={t.attrs['keepdim']})",
    "gather": lambda t: f"{t.args[0]}.gather({t.attrs['dim']}, {t.args[1]})",
    "scatter": lambda t: f"{t.args[0]}.scatter({t.attrs['dim']}, {t.args[1]}, {literal(t.attrs['scalar'])})",
    "one_hot": lambda t: f"F.one_hot({t.args[0]}, {literal(t.attrs['num_classes'])})",
    "histc": _histc,
    "weighted_count": _weighted_count,
    "repeat_interleave": lambda t: f"{t.args[0]}.repeat_interleave({t.attrs['repeats']}, dim={t.attrs['dim'] or 0})",
    "batch_sum": _batch_sum,
    "batch_part": _batch_part,
    "experts": _experts,
    "linear": _linear,
    "attention": _attention,
    "embedding": _embedding,
    "cross_entropy_sum": _cross_entropy,
    "layer_norm": _norm("layer_norm"),
    "rms_norm": _norm("rms_norm"),
    "dropout": _dropout,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "reshape": lambda t: f"{t.args[0]}.reshape({shape_text(t.outputs[0])})",
    "expand": lambda t: f"{t.args[0]}.expand({shape_text(t.outputs[0])})",
    "transpose": lambda t: f"{t.args[0]}.transpose({t.attrs['dim0']}, {t.attrs['dim1']})",
    "permute": lambda t: f"{t.args[0]}.permute({', '.join(map(str, t.attrs['dims']))})",
    "unsqueeze": lambda t: f"{t.args[0]}.unsqueeze({t.attrs['dim']})",
    "squeeze": _squeeze,
    "slice": _slice,
    "select": lambda t: f"{t.args[0]}.select({t.attrs['dim']}, {literal(t.attrs['index'])})",
    "chunk": _chunk,
    "cat": _cat,
    "pad": lambda t: f"F.pad({t.args[0]}, {tuple(t.attrs['pad'])!r}, value={t.attrs['value']!r})",
    "where": lambda t: f"torch.where({', '.join(t.args)})",
    "masked_fill": lambda t: f"{t.args[0]}.masked_fill({t.args[1]}, {literal(t.attrs['scalar'])})",
    "clamp": lambda t: f"{t.args[0]}.clamp({t.attrs['min']!r}, {t.attrs['max']!r})",
    "tril": lambda t: f"{t.args[0]}.tril({t.attrs['diagonal']})",
    "triu": lambda t: f"{t.args[0]}.triu({t.attrs['diagonal']})",
    "cumsum": lambda t: f"{t.args[0]}.cumsum({t.attrs['dim']})",
    "to": lambda t: f"{t.args[0]}.to(torch.{t.attrs['dtype']})",
    "arange": _arange,
    "full": _full,
}
