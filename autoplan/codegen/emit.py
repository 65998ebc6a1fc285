"""Emit one readable Python module per stage. What is written is what runs; it opens in a debugger and type-checks.

The text of each op is in its record (`autoplan.ops`); here stands what depends on mesh and methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autoplan.config.context_methods import ContextMethod
from autoplan.errors import LayoutError, RuleError
from autoplan.ir.graph import Value
from autoplan.ir.layout import Axis, ConversionKind, Layout
from autoplan.ir.symbols import SYMBOLS, Expr, product
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.ops.text import OpText, py, shape_text
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


def _special_axes(op: Op, ctx: Context) -> str:
    """The axes of a special form, as a Python tuple or name; empty if the op is in none."""
    return repr(ctx.axis(range(len(ctx.axes)))) if op.strategy.special else ""


def _sharing(op: Op, ctx: Context) -> str:
    axis = ctx.sharing(op.node.attrs["over"])
    return repr(axis) if axis else ""


def _expert_axes(op: Op, ctx: Context) -> str:
    axes = _special_axes(op, ctx)
    here = f", axes={axes}" if axes else ""
    if ctx.dispatch is None:
        return here
    if not all(kind.is_shard and kind.dim == 0 for kind in op.strategy.inputs[0]):
        raise LayoutError(
            f"{op.node.name}: tokens travel to experts from ranks that have the same ones; solve the layout with "
            "autoplan.program.token_dispatch_layouts"
        )
    here += f", dispatch={ctx.dispatch.name!r}"
    return here if ctx.inner is None else f"{here}, inner={ctx.inner.name!r}"


def _dropout_parts(op: Op, ctx: Context, site: int) -> str:
    """Number of this dropout in its block; of each factor its local and whole size, and the axes that split it."""
    value, layout = op.values[0], op.strategy.outputs[0]
    local = local_factors(value, layout, ctx.factors, ctx.axes)
    entries = []
    for i, dim in enumerate(value.dims or ()):
        for j, factor in enumerate(dim):
            size = ctx.factors[factor]
            axes = tuple(
                a.name
                for a, kind in zip(ctx.axes, layout, strict=True)
                if kind.is_shard and (kind.dim, kind.factor) == (i, j)
            )
            mark = "'batch'" if size == Expr.symbol("b") else repr(axes)
            entries.append(f"({py(local[i][j])}, {py(size)}, {mark})")
    return f"self.site + {site}, ({', '.join(entries)},)"


def _num_partial(op: Op, ctx: Context) -> int:
    """Over how many ranks the output is a pending sum because of this op."""
    kinds = zip(ctx.axes, op.strategy.outputs[0], op.strategy.choices, strict=True)
    return math.prod(axis.size for axis, kind, c in kinds if kind.kind_name == "P" and c.factor is not None)


# what depends on mesh and methods in the text of an op; of every other op the axes of a special form
_OVER: dict[OpKind, Callable[[Op, Context], str]] = {
    OpKind.ATTENTION: lambda op, ctx: ctx.over(),
    OpKind.EXPERTS: _expert_axes,
    OpKind.COLLECTIVE: _sharing,
}


def op_text(op: Op, ctx: Context, site: int) -> str:
    """Right-hand side of an op. RuleError for an op without a text."""
    record = op_record(op.node.op, op.node.source)
    if record.emit is None:
        raise RuleError(f"op {op.node.op!r} at {op.node.source} cannot be written in a program: its record has no text")
    random = Trait.RANDOM in record.traits
    over = _dropout_parts(op, ctx, site) if random else _OVER.get(record.kind, _special_axes)(op, ctx)
    text = record.emit(
        OpText(
            args=tuple(x for x in op.args if x is not None),
            attrs=op.node.attrs,
            inputs=tuple(v.shape for v in op.inputs),
            outputs=tuple(
                tuple(local_shape(v, layout, ctx.factors, ctx.axes))
                for v, layout in zip(op.values, op.strategy.outputs, strict=True)
            ),
            whole=ctx.whole,
            over=over,
            bias=op.bias or "",
            num_partial=_num_partial(op, ctx),
        )
    )
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
        site += op_has(statement.node.op, Trait.RANDOM)
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
_HEAVY = (OpKind.PRODUCT, OpKind.ATTENTION, OpKind.LOSS, OpKind.EXPERTS)


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
        if dead and (isinstance(statement, Convert) or op_kind(statement.node.op) in _HEAVY):
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
