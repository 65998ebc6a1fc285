"""Emit one readable Python module per stage. What is written is what runs; it opens in a debugger and type-checks.

Each op of the IR has one line in `EMITTERS`; an unknown op is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from autoplan.config.context_methods import ContextMethod
from autoplan.errors import LayoutError, RuleError
from autoplan.ir.graph import Value
from autoplan.ir.layout import Axis, ConversionKind, Layout
from autoplan.ir.symbols import SYMBOLS, Expr, product
from autoplan.program.regions import Region, regions, variables_of
from autoplan.program.statements import Convert, LoweredBlock, Op, local_factors, local_shape
from autoplan.program.token_dispatch_layouts import expert_weights, inner_place

_FLOATS = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
_SHORT = {**_FLOATS, "int64": "i64", "int32": "i32", "bool": "bool"}


@dataclass(frozen=True)
class Context:
    """What the text of a block needs to know."""

    factors: Mapping[str, Expr]
    axes: tuple[Axis, ...]
    groups: Mapping[tuple[str, ...], str]  # sub-axes -> name of their product
    dispatch: Axis | None = None  # over which experts are spread and tokens travel to them
    inner: Axis | None = None  # over which each of these experts is split
    context: Axis | None = None  # over which sequences are cut
    method: ContextMethod | None = None  # how attention of this block sees all of them
    batch: int = 1  # ranks of data parallelism, which share a micro-batch
    cut: bool = True  # this block sees a part of a sequence that is cut

    def whole(self, size: Expr) -> Expr:
        """A size of the model in the sizes of this rank: b and s are parts of the whole micro-batch and sequence."""
        ways = {"b": self.batch, "s": self.context.size if self.context is not None and self.cut else 1}
        out = Expr(())
        for symbols, coefficient in size.terms:
            out += Expr(((symbols, coefficient * math.prod(ways.get(x, 1) for x in symbols)),))
        return out

    def sharing(self, symbols: Sequence[str]) -> str:
        """The axis of the ranks that have the parts of a micro-batch along `symbols`; empty where it is one rank."""
        axes = [a for a, there in (("dp", "b" in symbols), ("cp", "s" in symbols)) if there]
        sizes = {"dp": self.batch, "cp": self.context.size if self.context is not None else 1}
        axes = [a for a in axes if sizes[a] > 1]
        return "replicas" if len(axes) > 1 else axes[0] if axes else ""

    def over(self) -> str:
        """Keywords of attention: the axes that its method works over."""
        m = self.method
        if self.context is None or m is None:
            return ""
        whole = self.context.name
        axes = {"ulysses": "cpu" if m.is_product else whole, m.inner: "cpr" if m.is_product else whole}
        names = (*(("ulysses",) if m.ulysses > 1 else ()), *((m.inner,) if m.inner else ()))
        return "".join(f", {name}={axes[name]!r}" for name in names)

    def axis(self, indices: Sequence[int]) -> str:
        """Name of one sub-axis or of a product."""
        names = tuple(self.axes[i].name for i in indices)
        return names[0] if len(names) == 1 else self.groups[names]


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


def _literal(value: Any) -> str:
    if isinstance(value, Expr):
        return f"({py(value)})" if value.value is None else py(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def shape_text(sizes: Sequence[Expr]) -> str:
    """Comma-separated local sizes."""
    return ", ".join(py(s) for s in sizes)


def describe(value: Value, layout: Layout, ctx: Context) -> str:
    """Comment: dtype, local shape, types. `f32[b, s // 2, 64] tp:S(s)`."""
    shape = shape_text(local_shape(value, layout, ctx.factors, ctx.axes))
    types = []
    for axis, kind in zip(ctx.axes, layout, strict=True):
        name = kind.kind_name
        if kind.is_shard:
            name = f"S({(value.dims or ())[kind.dim][kind.factor]})"
        types.append(f"{axis.name}:{name}")
    return f"{_SHORT.get(value.dtype, value.dtype)}[{shape}] {' '.join(types)}".rstrip()


class _OpText:
    """Text of one op; `a` are its argument texts."""

    def __init__(self, op: Op, ctx: Context, site: int) -> None:
        self.op, self.ctx, self.site = op, ctx, site
        self.a = [x for x in op.args if x is not None]
        self.attrs = op.node.attrs
        self.out_layout = op.strategy.outputs[0]

    @property
    def out_shape(self) -> str:
        return shape_text(local_shape(self.op.values[0], self.out_layout, self.ctx.factors, self.ctx.axes))

    def special(self, name: str) -> str:
        """The axes of a special form, as a Python tuple or name; empty if the op is not in that form."""
        if self.op.strategy.special != name:
            return ""
        return repr(self.ctx.axis(range(len(self.ctx.axes))))

    def num_partial(self) -> int:
        """Over how many ranks the output is a pending sum because of this op."""
        total = 1
        for axis, kind, choice in zip(self.ctx.axes, self.out_layout, self.op.strategy.choices, strict=True):
            if kind.kind_name == "P" and choice.factor is not None:
                total *= axis.size
        return total


def _unary(template: str) -> Callable[[_OpText], str]:
    return lambda t: template.format(x=t.a[0])


def _infix(symbol: str) -> Callable[[_OpText], str]:
    return lambda t: f"{t.a[0]} {symbol} {t.a[1]}"


def _function(name: str) -> Callable[[_OpText], str]:
    return lambda t: f"{name}({t.a[0]}, {t.a[1]})"


def _scalar(template: str) -> Callable[[_OpText], str]:
    def text(t: _OpText) -> str:
        scalar = t.attrs["scalar"]
        return template.format(x=t.a[0], c=_literal(t.ctx.whole(scalar) if isinstance(scalar, Expr) else scalar))

    return text


def _linear(t: _OpText) -> str:
    bias = f", {t.op.bias}" if t.op.bias else ""
    return f"F.linear({t.a[0]}, {t.a[1]}{bias})"


def _reduce(name: str) -> Callable[[_OpText], str]:
    def text(t: _OpText) -> str:
        dims = t.attrs["dims"]
        over = ["dim=None"] if not dims else [repr(dims[0] if len(dims) == 1 else tuple(dims))]
        more = ["keepdim=True"] if t.attrs["keepdim"] else []
        more += [f"dtype=torch.{t.attrs['dtype']}"] if t.attrs.get("dtype") else []
        call = f"{t.a[0]}.{name}({', '.join([*over, *more] if dims or more else [])})"
        shards = t.num_partial()
        return f"{call} / {shards}" if name == "mean" and shards > 1 else call

    return text


def _squeeze(t: _OpText) -> str:
    # torch leaves a dim that is not 1 as it is; its shard may be 1
    return f"{t.a[0]}.squeeze({t.attrs['dim']})" if t.op.inputs[0].shape[t.attrs["dim"]].value == 1 else t.a[0]


def _slice(t: _OpText) -> str:
    value = t.op.inputs[0]
    dim = t.attrs["dim"] % len(value.shape)
    start, end, step = t.attrs["start"], t.attrs["end"], t.attrs["step"]
    stop = "" if isinstance(end, int) and end >= 2**62 else _literal(end)
    part = f"{_literal(start) if start else ''}:{stop}" + (f":{step}" if step != 1 else "")
    if dim == len(value.shape) - 1:
        return f"{t.a[0]}[..., {part}]"
    return f"{t.a[0]}[{', '.join([':'] * dim + [part])}]"


def _chunk(t: _OpText) -> str:
    dim = t.attrs["dim"]
    sizes = [
        local_shape(v, layout, t.ctx.factors, t.ctx.axes)[dim]
        for v, layout in zip(t.op.values, t.op.strategy.outputs, strict=True)
    ]
    if all(s == sizes[0] for s in sizes):
        return f"{t.a[0]}.chunk({len(sizes)}, dim={dim})"
    return f"{t.a[0]}.split([{', '.join(py(s) for s in sizes)}], dim={dim})"


def _attention(t: _OpText) -> str:
    mask = f", {'documents' if t.attrs.get('documents') else 'mask'}={t.a[3]}" if len(t.a) > 3 else ""
    scale = t.attrs["scale"]
    window = f", window={t.attrs['window']}" if t.attrs.get("window") is not None else ""
    return f"attention({', '.join(t.a[:3])}{mask}, causal={t.attrs['causal']}, scale={scale!r}{window}{t.ctx.over()})"


def _embedding(t: _OpText) -> str:
    padding = t.attrs["padding_idx"]
    pad = "" if padding is None or padding < 0 else f", padding_idx={padding}"
    axes = t.special("vocab_embedding")
    if axes:
        return f"vocab_parallel_embedding({t.a[1]}, {t.a[0]}, {axes}{pad})"
    return f"F.embedding({t.a[1]}, {t.a[0]}{pad})"


def _cross_entropy(t: _OpText) -> str:
    extra = f", ignore_index={t.attrs['ignore_index']}"
    if t.attrs["label_smoothing"]:
        extra += f", label_smoothing={t.attrs['label_smoothing']}"
    axes = t.special("vocab_cross_entropy")
    if axes:
        return f"vocab_parallel_cross_entropy_sum({t.a[0]}, {t.a[1]}, {axes}{extra})"
    return f"cross_entropy_sum({t.a[0]}, {t.a[1]}{extra})"


def _norm(name: str) -> Callable[[_OpText], str]:
    def text(t: _OpText) -> str:
        rest = list(t.a[1:])
        weight = rest.pop(0) if t.attrs.get("weight") else "None"
        bias = rest.pop(0) if t.attrs.get("bias") else None
        size = t.op.inputs[0].shape[-1]
        args = [t.a[0], f"({py(size)},)", weight, *([bias] if bias else [])]
        eps = f", eps={t.attrs['eps']!r}" if t.attrs["eps"] is not None else ""
        return f"F.{name}({', '.join(args)}{eps})"

    return text


def _dropout(t: _OpText) -> str:
    value, layout = t.op.values[0], t.out_layout
    local = local_factors(value, layout, t.ctx.factors, t.ctx.axes)
    entries = []
    for i, dim in enumerate(value.dims or ()):
        for j, factor in enumerate(dim):
            size = t.ctx.factors[factor]
            axes = tuple(
                a.name
                for a, kind in zip(t.ctx.axes, layout, strict=True)
                if kind.is_shard and (kind.dim, kind.factor) == (i, j)
            )
            mark = "'batch'" if size == Expr.symbol("b") else repr(axes)
            entries.append(f"({py(local[i][j])}, {py(size)}, {mark})")
    return f"dropout({t.a[0]}, {t.attrs['p']}, rng, self.site + {t.site}, ({', '.join(entries)},))"


def _cat(t: _OpText) -> str:
    return f"torch.cat([{', '.join(t.a)}], dim={t.attrs['dim']})"


def _arange(t: _OpText) -> str:
    start = f"{_literal(t.attrs['start'])}, " if t.attrs["start"] else ""
    return f"torch.arange({start}{_literal(t.attrs['end'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _full(t: _OpText) -> str:
    shape = t.out_shape + ("," if len(t.op.values[0].shape) == 1 else "")
    return f"torch.full(({shape}), {_literal(t.attrs['scalar'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _gelu(t: _OpText) -> str:
    how = t.attrs["approximate"]
    return f"F.gelu({t.a[0]}" + (f", approximate={how!r})" if how != "none" else ")")


def _softmax(name: str) -> Callable[[_OpText], str]:
    def text(t: _OpText) -> str:
        dtype = f", dtype=torch.{t.attrs['dtype']}" if t.attrs.get("dtype") else ""
        return f"torch.{name}({t.a[0]}, dim={t.attrs['dim']}{dtype})"

    return text


def _topk(t: _OpText) -> str:
    return f"torch.topk({t.a[0]}, {_literal(t.attrs['k'])}, dim={t.attrs['dim']}, sorted={t.attrs['sorted']})"


def _histc(t: _OpText) -> str:
    return f"torch.histc({t.a[0]}.float(), bins={t.attrs['bins']}, min={t.attrs['min']}, max={t.attrs['max']})"


def _weighted_count(t: _OpText) -> str:
    index, weights = t.a
    return f"{weights}.new_zeros({_literal(t.attrs['num'])}).scatter_add(0, {index}.flatten(), {weights}.flatten())"


def _batch_sum(t: _OpText) -> str:
    axis = t.ctx.sharing(t.attrs["over"])
    return f"all_reduce({t.a[0]}, {axis!r}, dst=R)" if axis else t.a[0]


def _batch_part(t: _OpText) -> str:
    axis = t.ctx.sharing(t.attrs["over"])
    return f"to_partial({t.a[0]}, {axis!r}, src=R)" if axis else t.a[0]


def _experts(t: _OpText) -> str:
    axes = t.special("expert_parallel")
    here = f", axes={axes}" if axes else ""
    if t.ctx.dispatch is not None:
        if not all(kind.is_shard and kind.dim == 0 for kind in t.op.strategy.inputs[0]):
            raise LayoutError(
                f"{t.op.node.name}: tokens travel to experts from ranks that have the same ones; solve the layout with "
                "autoplan.program.token_dispatch_layouts"
            )
        here += f", dispatch={t.ctx.dispatch.name!r}"
        if t.ctx.inner is not None:
            here += f", inner={t.ctx.inner.name!r}"
    return f"experts({', '.join(t.a)}, activation={t.attrs['activation']!r}, gated={bool(t.attrs['gated'])}{here})"


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "bitwise_and": "&", "bitwise_or": "|"}
_SYMBOLS = {**_ARITHMETIC, "eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}

EMITTERS: dict[str, Callable[[_OpText], str]] = {
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
    "argmax": lambda t: f"torch.argmax({t.a[0]}, dim={t.attrs['dim']}, keepdim={t.attrs['keepdim']})",
    "max": lambda t: f"torch.max({t.a[0]}, dim={t.attrs['dim']}, keepdim={t.attrs['keepdim']})",
    "gather": lambda t: f"{t.a[0]}.gather({t.attrs['dim']}, {t.a[1]})",
    "scatter": lambda t: f"{t.a[0]}.scatter({t.attrs['dim']}, {t.a[1]}, {_literal(t.attrs['scalar'])})",
    "one_hot": lambda t: f"F.one_hot({t.a[0]}, {_literal(t.attrs['num_classes'])})",
    "histc": _histc,
    "weighted_count": _weighted_count,
    "repeat_interleave": lambda t: f"{t.a[0]}.repeat_interleave({t.attrs['repeats']}, dim={t.attrs['dim'] or 0})",
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
    "reshape": lambda t: f"{t.a[0]}.reshape({t.out_shape})",
    "expand": lambda t: f"{t.a[0]}.expand({t.out_shape})",
    "transpose": lambda t: f"{t.a[0]}.transpose({t.attrs['dim0']}, {t.attrs['dim1']})",
    "permute": lambda t: f"{t.a[0]}.permute({', '.join(map(str, t.attrs['dims']))})",
    "unsqueeze": lambda t: f"{t.a[0]}.unsqueeze({t.attrs['dim']})",
    "squeeze": _squeeze,
    "slice": _slice,
    "select": lambda t: f"{t.a[0]}.select({t.attrs['dim']}, {_literal(t.attrs['index'])})",
    "chunk": _chunk,
    "cat": _cat,
    "pad": lambda t: f"F.pad({t.a[0]}, {tuple(t.attrs['pad'])!r}, value={t.attrs['value']!r})",
    "where": lambda t: f"torch.where({', '.join(t.a)})",
    "masked_fill": lambda t: f"{t.a[0]}.masked_fill({t.a[1]}, {_literal(t.attrs['scalar'])})",
    "clamp": lambda t: f"{t.a[0]}.clamp({t.attrs['min']!r}, {t.attrs['max']!r})",
    "tril": lambda t: f"{t.a[0]}.tril({t.attrs['diagonal']})",
    "triu": lambda t: f"{t.a[0]}.triu({t.attrs['diagonal']})",
    "cumsum": lambda t: f"{t.a[0]}.cumsum({t.attrs['dim']})",
    "to": lambda t: f"{t.a[0]}.to(torch.{t.attrs['dtype']})",
    "arange": _arange,
    "full": _full,
}


def op_text(op: Op, ctx: Context, site: int) -> str:
    """Right-hand side of an op. RuleError for an op without an emitter."""
    if op.node.op not in EMITTERS:
        raise RuleError(
            f"op {op.node.op!r} ({op.node.source}) has no emitter; add one line to autoplan.codegen.emit.EMITTERS"
        )
    text = EMITTERS[op.node.op](_OpText(op, ctx, site))
    new = [
        axis.name
        for axis, kind, choice in zip(ctx.axes, op.strategy.outputs[0], op.strategy.choices, strict=True)
        if kind.kind_name == "P" and choice.factor is not None and choice.special is None
    ]
    # a local product over a split dim is a pending sum, a local expansion a shard: say so to the type checker
    if new:
        return f"typed({text}, {', '.join(f'{name}=P' for name in new)})"
    made = [
        axis.name
        for i, (axis, kind) in enumerate(zip(ctx.axes, op.strategy.outputs[0], strict=True))
        if kind.is_shard and op.args and not any(layout[i].is_shard for layout in op.strategy.inputs)
    ]
    return f"vary({text}, {', '.join(map(repr, made))})" if made else text


def convert_text(c: Convert, ctx: Context) -> str:
    """Right-hand side of a conversion; a factor inside a dim gets a dim of its own for the time of the collective."""
    local = local_factors(c.value, c.layout, ctx.factors, ctx.axes)
    after = local_factors(c.value, c.result, ctx.factors, ctx.axes)
    step = c.step
    shards = [t for t in (step.source, step.target) if t.is_shard]
    inner = {t.dim for t in shards if any(s != Expr.of(1) for s in local[t.dim][: t.factor])}
    within = {step.source.dim} if len({t.dim for t in shards}) < len(shards) else set()  # between factors of one dim
    opened = sorted(inner | within)
    x = c.source
    if opened:
        sizes = [s for d, dim in enumerate(local) for s in (dim if d in opened else [product(dim)])]
        x = f"{x}.reshape({shape_text(sizes)})"

    def at(dim: int, factor: int) -> int:
        before = sum(len(local[d]) if d in opened else 1 for d in range(dim))
        return before + (factor if dim in opened else 0)

    axis = repr(ctx.axis(step.axes))
    if step.kind is ConversionKind.ALL_REDUCE:
        text = f"all_reduce({x}, {axis}, dst={step.target.kind_name})"
    elif step.kind is ConversionKind.REDUCE_SCATTER:
        text = f"reduce_scatter({x}, {axis}, dim={at(step.target.dim, step.target.factor)})"
    elif step.kind is ConversionKind.ALL_GATHER:
        text = f"all_gather({x}, {axis}, dim={at(step.source.dim, step.source.factor)}, dst={step.target.kind_name})"
    elif step.kind is ConversionKind.SLICE:
        text = f"slice_({x}, {axis}, dim={at(step.target.dim, step.target.factor)}, src={step.source.kind_name})"
    elif step.kind is ConversionKind.TO_REPLICATE:
        text = f"to_replicate({x}, {axis})"
    elif step.kind is ConversionKind.ALL_TO_ALL:
        source, target = at(step.source.dim, step.source.factor), at(step.target.dim, step.target.factor)
        text = f"all_to_all({x}, {axis}, src_dim={source}, dst_dim={target})"
    else:
        text = f"to_partial({x}, {axis}, src={step.source.kind_name})"
    if opened:
        text += f".reshape({shape_text([product(dim) for dim in after])})"
    return text


def block_source(
    lowered: LoweredBlock, ctx: Context, calls: Sequence[str], free: bool, groups: Iterable[str] = ()
) -> tuple[list[str], dict[str, bool]]:
    """Source lines of a block's class, and which of b, s, t, device, rng its forward takes.

    Args:
        free: a plain module, not a unit of recompute, since nothing in it depends on a parameter.
        groups: of the regions that a call of the block computes again; they are functions of their own.
    """
    lines, site = [], 0
    for statement in lowered.statements:
        if isinstance(statement, Convert):
            comment = describe(statement.value, statement.result, ctx)
            lines.append(_assign(statement.target, convert_text(statement, ctx), comment))
            continue
        text = op_text(statement, ctx, site)
        site += statement.node.op == "dropout"
        comment = "; ".join(
            describe(v, o, ctx) for v, o in zip(statement.values, statement.strategy.outputs, strict=True)
        )
        lines.append(_assign(", ".join(statement.targets), text, comment))
    body = _body(lowered, lines, regions(lowered.statements, lowered.outputs, groups))
    joined = "\n".join(line.split("#")[0] for line in body)
    needs = {name: _mentions(joined, name) for name in (*SYMBOLS, "device", "rng")}
    extra = [
        f"{n}: {'int' if n in SYMBOLS else 'torch.device' if n == 'device' else 'Tensor'}"
        for n, used in needs.items()
        if used
    ]
    lines = [f"class {lowered.class_name}({'nn.Module' if free else 'Block'}):"]
    shown = ", ".join(calls[:3]) + (f", ... ({len(calls)} calls)" if len(calls) > 3 else "")
    lines += [f'    """{shown}"""', ""]
    if lowered.params or lowered.buffers:
        lines += _init_lines(lowered, ctx, free)
    args = [f"{var}: Tensor" for var, _, _ in lowered.inputs]
    star = ["*"] if extra else []
    returns = "Tensor" if len(lowered.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(lowered.outputs))}]"
    name = "forward" if free else "compute"
    lines.append(f"    def {name}({', '.join(['self', *args, *star, *extra])}) -> {returns}:")
    for var, value, layout in lowered.inputs:
        lines.append(f"        # {var}: {describe(value, layout, ctx)}")
    lines += [f"        {line}" for line in body]
    lines.append(f"        return {', '.join(lowered.outputs)}")
    lines += ["", ""]
    return lines, needs


# before these, variables that nobody needs any more are let go
_HEAVY = frozenset({"linear", "matmul", "attention", "cross_entropy_sum", "experts"})


def _body(lowered: LoweredBlock, lines: Sequence[str], apart: Sequence[Region]) -> list[str]:
    """The statements with `apart` as functions, and what lets go of variables that nobody needs any more."""
    variables = variables_of(lowered.statements)
    at = {region.statements[-1]: region for region in apart}
    inside = {i for region in apart for i in region.statements}
    names = {v for reads, writes in variables for v in (*reads, *writes)} | {v for v, _, _ in lowered.inputs}
    order = [i for i in range(len(lines)) if i not in inside or i in at]
    reads = {i: at[i].reads if i in at else variables[i][0] for i in order}
    writes = {i: at[i].writes if i in at else variables[i][1] for i in order}
    last_use = _last_uses(order, reads, writes, lowered.outputs)
    body: list[str] = []
    dead: list[str] = []
    for before, i in zip([-1, *order], order, strict=False):
        dead += last_use.get(before, [])
        statement = lowered.statements[i]
        if dead and (isinstance(statement, Convert) or statement.node.op in _HEAVY):
            body.append(f"del {', '.join(dead)}")  # as a module's own locals would be gone by now
            dead = []
        if i not in at:
            body.append(lines[i])
            continue
        region, results = at[i], ", ".join(at[i].writes)
        name = _unused(f"{region.group}_region", names)
        signature = ", ".join(f"{v}: Tensor" for v in region.reads)
        made = "Tensor" if len(region.writes) == 1 else f"tuple[{', '.join(['Tensor'] * len(region.writes))}]"
        body.append(f"def {name}({signature}) -> {made}:  # may be computed again")
        body += [f"    {lines[k]}" for k in region.statements]
        body.append(f"    return {results}")
        arguments = ", ".join([repr(region.group), name, *region.reads])
        body.append(f"{results} = self.again({arguments})")
    return body


def _unused(name: str, names: set[str]) -> str:
    text, k = name, 1
    while text in names:
        text, k = f"{name}_{k}", k + 1
    names.add(text)
    return text


def _last_uses(
    order: Sequence[int], reads: Mapping[int, Sequence[str]], writes: Mapping[int, Sequence[str]], kept: Sequence[str]
) -> dict[int, list[str]]:
    """Statement -> variables made in the block that nobody needs after it."""
    made: set[str] = set()
    last: dict[str, int] = {}
    for i in order:
        for name in reads[i]:
            if name in made:
                last[name] = i
        made.update(writes[i])
    out: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in kept:
            out.setdefault(i, []).append(name)
    return out


def _mentions(text: str, name: str) -> bool:
    import re

    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", text) is not None


def _assign(target: str, text: str, comment: str) -> str:
    return f"{target} = {text}  # {comment}"


def _init_lines(lowered: LoweredBlock, ctx: Context, free: bool) -> list[str]:
    lines = [
        "    def __init__(self, *, recompute: str = 'none', site: int = 0, gathered: str = 'again') -> None:",
        "        super().__init__(recompute=recompute, site=site, gathered=gathered)",
    ]
    if free:
        lines = ["    def __init__(self) -> None:", "        super().__init__()"]
    for param in lowered.params:
        sizes = local_shape(param.value, param.stored, ctx.factors, ctx.axes)
        made, used = describe(param.value, param.stored, ctx), ""
        if ctx.dispatch is not None and param.value.name in expert_weights(lowered.block):
            sizes = [sizes[0].scale(Fraction(1, ctx.dispatch.size)), *sizes[1:]]
            made, used = describe(param.value, (), replace(ctx, axes=())), f" {ctx.dispatch.name}:S(experts)"
            if ctx.inner is not None:
                dim, position = inner_place(lowered.block, param.value.name)
                sizes[dim] = sizes[dim].scale(Fraction(1, ctx.inner.size))
                used += f" {ctx.inner.name}:S({(param.value.dims or ())[dim][position]})"
        elif param.used != param.stored:
            used = f" used as {describe(param.value, param.used, ctx).split('] ')[-1]}, reduced once per step"
        shape = shape_text(sizes)
        comma = "," if len(param.value.shape) == 1 else ""
        lines.append(
            f"        self.{param.attr} = parameter(({shape}{comma}), torch.{param.value.dtype}, "
            f"{param.value.requires_grad})  # {made}{used}"
        )
    for attr, value in lowered.buffers:
        shape = shape_text(local_shape(value, (), ctx.factors, ()))
        comma = "," if len(value.shape) == 1 else ""
        lines.append(
            f"        self.register_buffer({attr!r}, torch.empty(({shape}{comma}), dtype=torch.{value.dtype}))"
        )
    lines.append("")
    return lines
