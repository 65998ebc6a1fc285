"""Emit one readable Python module per stage. The emitted text is what runs; it opens in a debugger and type-checks.

The text of each op is in its record (`autoplan.ops`); its statement gives the axes that it works over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType

from autoplan.errors import RuleError
from autoplan.ir.dataflow import last_uses
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Value
from autoplan.ir.layout import Axis, AxisType, ConversionKind, Layout
from autoplan.ir.symbols import SYMBOLS, Expr, product
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.statistics import UPDATE
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.ops.text import OpText, py, shape_text
from autoplan.program.lower import identifier
from autoplan.program.regions import Flow, Region, regions
from autoplan.program.statements import Convert, LoweredBlock, Op, local_factors, local_shape

_FLOATS = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
_SHORT = {**_FLOATS, "int64": "i64", "int32": "i32", "bool": "bool"}


@dataclass(frozen=True)
class Context:
    """The facts that the text of a block depends on."""

    factors: Mapping[str, Expr]
    axes: tuple[Axis, ...]
    groups: Mapping[tuple[str, ...], str]  # sub-axes -> name of their product
    parts: Mapping[str, int] = field(default_factory=dict)  # symbol -> ranks that each have a part of it

    def whole(self, size: Expr) -> Expr:
        """Return a size of the model from the sizes of this rank, whose b and s are parts of the whole ones."""
        out = Expr(())
        for symbols, coefficient in size.terms:
            out += Expr(((symbols, coefficient * math.prod(self.parts.get(x, 1) for x in symbols)),))
        return out

    def axis(self, indices: Sequence[int]) -> str:
        """Return the name of one sub-axis or of a product."""
        names = tuple(self.axes[i].name for i in indices)
        return names[0] if len(names) == 1 else self.groups[names]


def describe_value(value: Value, layout: Layout, ctx: Context) -> str:
    """Return the comment of a value: dtype, local shape, types, as in `f32[b, s // 2, 64] tp:S(s)`."""
    shape = shape_text(local_shape(value, layout, ctx.factors, ctx.axes))
    return f"{_SHORT.get(value.dtype, value.dtype)}[{shape}] {_types(value, layout, ctx)}".rstrip()


def _types(value: Value, layout: Layout, ctx: Context) -> str:
    """Return the type of a value on each axis, as in `tp:S(s)`."""
    types = []
    for axis, kind in zip(ctx.axes, layout, strict=True):
        name = kind.kind_name
        if kind.is_shard:
            name = f"S({(value.dims or ())[kind.dim][kind.factor]})"
        types.append(f"{axis.name}:{name}")
    return " ".join(types)


def _over(op: Op, ctx: Context, site: int) -> str:
    """Return the axes that an op works over, as arguments of its function.

    For one that draws numbers also its number in its block, and the parts of what it draws: of its output, or of the
    samples and heads of attention.
    """
    draws = op_has(op.node.op, Trait.RANDOM)
    if draws and op_kind(op.node.op) is not OpKind.ATTENTION:
        return f"self.site + {site}, {_parts_text(op.values[0], op.strategy.outputs[0], ctx)}"
    special = repr(ctx.axis(range(len(ctx.axes)))) if op.strategy.special else ""
    if op_kind(op.node.op) not in _KEYWORDS:
        return special or "".join(repr(axis) for _, axis in op.over)
    given = [("axes", special)] if special else []
    if draws:
        heads = _parts_text(op.inputs[0], op.strategy.inputs[0], ctx, dims=2)
        given += [("site", f"self.site + {site}"), ("index", heads)]
    return "".join(f", {name}={text}" for name, text in (*given, *((name, repr(axis)) for name, axis in op.over)))


_KEYWORDS = frozenset((OpKind.ATTENTION, OpKind.EXPERTS))  # their functions take the axes by keyword


def _parts_text(value: Value, layout: Layout, ctx: Context, dims: int | None = None) -> str:
    """Return of each factor of the first dims its sizes, local and whole, and its axes: `Factor` of random_bits.py."""
    local = local_factors(value, layout, ctx.factors, ctx.axes)
    entries = []
    for i, dim in enumerate((value.dims or ())[:dims]):
        for j, factor in enumerate(dim):
            size = ctx.factors[factor]
            axes = tuple(
                a.name
                for a, kind in zip(ctx.axes, layout, strict=True)
                if kind.is_shard and (kind.dim, kind.factor) == (i, j)
            )
            mark, cut = "'batch'" if size == Expr.symbol("b") else repr(axes), ""
            if size == Expr.symbol("s") and ctx.parts.get("s", 1) > 1:
                size, cut = ctx.whole(size), ", 'cp'"
            entries.append(f"({py(local[i][j])}, {py(size)}, {mark}{cut})")
    return f"({''.join(f'{entry}, ' for entry in entries).rstrip()})"


def _num_partial(op: Op, ctx: Context) -> int:
    """Return the number of ranks over which the output is a pending sum because of this op."""
    kinds = zip(ctx.axes, op.strategy.outputs[0], op.strategy.choices, strict=True)
    return math.prod(axis.size for axis, kind, c in kinds if kind.kind_name == "P" and c.factor is not None)


def op_text(op: Op, ctx: Context, site: int) -> str:
    """Return the right-hand side of an op. RuleError for an op without a text."""
    record = op_record(op.node.op, op.node.source)
    if record.emit is None:
        raise RuleError(f"op {op.node.op!r} at {op.node.source} cannot be written in a program: its record has no text")
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
            over=_over(op, ctx, site),
            bias=op.bias or "",
            num_partial=_num_partial(op, ctx),
        )
    )
    new = [
        axis.name
        for axis, kind, choice in zip(ctx.axes, op.strategy.outputs[0], op.strategy.choices, strict=True)
        if kind.kind_name == "P" and choice.factor is not None and choice.special is None
    ]
    # tell the type checker: a local product over a split dim is a pending sum, a local expansion a shard
    if new:
        return f"typed({text}, {', '.join(f'{name}=P' for name in new)})"
    made = [
        axis.name
        for i, (axis, kind) in enumerate(zip(ctx.axes, op.strategy.outputs[0], strict=True))
        if kind.is_shard and op.args and not any(layout[i].is_shard for layout in op.strategy.inputs)
    ]
    return f"vary({text}, {', '.join(map(repr, made))})" if made else text


_CONVERSIONS = {
    ConversionKind.ALL_REDUCE: "all_reduce({x}, {axis}, dst={target})",
    ConversionKind.REDUCE_SCATTER: "reduce_scatter({x}, {axis}, dim={cut})",
    ConversionKind.ALL_GATHER: "all_gather({x}, {axis}, dim={joined}, dst={target})",
    ConversionKind.SLICE: "slice_({x}, {axis}, dim={cut}, src={source})",
    ConversionKind.TO_REPLICATE: "to_replicate({x}, {axis})",
    ConversionKind.ALL_TO_ALL: "all_to_all({x}, {axis}, src_dim={joined}, dst_dim={cut})",
    ConversionKind.TO_PARTIAL: "to_partial({x}, {axis}, src={source})",
}


def convert_text(c: Convert, ctx: Context) -> str:
    """Return the right-hand side of a conversion; during the collective, a factor inside a dim gets its own dim."""
    local = local_factors(c.value, c.layout, ctx.factors, ctx.axes)
    source, target = c.step.source, c.step.target
    opened = _opened_dims(local, [t for t in (source, target) if t.is_shard])

    def place(t: AxisType) -> int:
        """Return the dim of a shard's factor, counted after opening dims."""
        before = sum(len(local[d]) if d in opened else 1 for d in range(t.dim))
        return before + (t.factor if t.dim in opened else 0)

    x = c.source
    if opened:
        sizes = [s for d, dim in enumerate(local) for s in (dim if d in opened else [product(dim)])]
        x = f"{x}.reshape({shape_text(sizes)})"
    text = _CONVERSIONS[c.step.kind].format(
        x=x,
        axis=repr(ctx.axis(c.step.axes)),
        source=source.kind_name,
        target=target.kind_name,
        joined=place(source) if source.is_shard else None,
        cut=place(target) if target.is_shard else None,
    )
    after = local_shape(c.value, c.result, ctx.factors, ctx.axes)
    return f"{text}.reshape({shape_text(after)})" if opened else text


def _opened_dims(local: Sequence[Sequence[Expr]], shards: Sequence[AxisType]) -> list[int]:
    """Return the dims that a collective sees factor by factor: it cuts or joins a factor that is not their first."""
    inner = {t.dim for t in shards if any(s != Expr.of(1) for s in local[t.dim][: t.factor])}
    dims = [t.dim for t in shards]
    return sorted(inner | {d for d in dims if dims.count(d) > 1})  # from one factor of a dim to another


def block_source(
    lowered: LoweredBlock,
    ctx: Context,
    calls: Sequence[str],
    free: bool,
    groups: Iterable[str] = (),
    given: Mapping[int, Sequence[str]] = MappingProxyType({}),
    more: Sequence[str] = (),
) -> tuple[list[str], dict[str, bool]]:
    """Return the source lines of a block's class, and which of b, s, t, device, rng its forward takes.

    Args:
        free: emit a plain module, not a unit of recompute, since nothing in it depends on a parameter.
        groups: groups of the regions that a call of the block recomputes; the regions become functions.
        given: lines to put behind statements, by their index: results that an evaluation may ask for.
        more: lines of a further method.
    """
    lowered, held = _with_held_buffers(lowered)
    method, needs = method_source(lowered, ctx, "forward" if free else "compute", groups, given, held)
    lines = [f"class {lowered.class_name}({'nn.Module' if free else 'Block'}):"]
    shown = ", ".join(calls[:3]) + (f", ... ({len(calls)} calls)" if len(calls) > 3 else "")
    lines += [f'    """{shown}"""', ""]
    lines += [f"    held = {held!r}", ""] * bool(held)
    lines += ["    site: int = 0", ""] * bool(free and lowered.num_draws)  # a stage gives each its own
    if lowered.params or lowered.buffers:
        lines += _init_lines(lowered, ctx, free)
    return [*lines, *method, *(("", *more) if more else ()), "", ""], needs


def method_source(
    lowered: LoweredBlock,
    ctx: Context,
    name: str,
    groups: Iterable[str] = (),
    given: Mapping[int, Sequence[str]] = MappingProxyType({}),
    held: Sequence[str] = (),
) -> tuple[list[str], dict[str, bool]]:
    """Return the lines of a method that runs the statements of a block, and which of b, s, t, device, rng it takes.

    Args:
        groups, given: as for `block_source`.
        held: buffers that are arguments.
    """
    lines, site = [], 0
    for statement in lowered.statements:
        if isinstance(statement, Convert):
            comment = describe_value(statement.value, statement.result, ctx)
            lines.append(_assign(statement.target, convert_text(statement, ctx), comment))
            continue
        text = op_text(statement, ctx, site)
        site += op_has(statement.node.op, Trait.RANDOM)
        comment = "; ".join(
            describe_value(v, o, ctx) for v, o in zip(statement.values, statement.strategy.outputs, strict=True)
        )
        lines.append(_assign(", ".join(statement.targets), text, comment))
    flow = Flow.of(lowered.statements)
    lines = ["\n".join((line, *given.get(i, ()))) for i, line in enumerate(lines)]
    body = _body(lowered, flow, lines, regions(flow, lowered.outputs, groups))
    joined = "\n".join(line.split("#")[0] for line in body)
    needs = {name: _mentions(joined, name) for name in (*SYMBOLS, "device", "rng")}
    extra = [
        f"{n}: {'int' if n in SYMBOLS else 'torch.device' if n == 'device' else 'Tensor'}"
        for n, used in needs.items()
        if used
    ]
    args = _arguments(lowered, held)
    star = ["*"] if extra else []
    lines = [f"    def {name}({', '.join(['self', *args, *star, *extra])}) -> {_returns(len(lowered.outputs))}:"]
    for each in lowered.inputs:
        lines.append(f"        # {each.var}: {describe_value(each.value, each.layout, ctx)}")
    lines += [f"        {line}" for line in body]
    lines.append(f"        return {', '.join(lowered.outputs)}")
    return lines, needs


def _with_held_buffers(lowered: LoweredBlock) -> tuple[LoweredBlock, tuple[str, ...]]:
    """Return the block with variables for the buffers that get a new value, and their names.

    They are arguments of `compute` (`autoplan.runtime.program.Block.held`), so that a recompute reads the old value.
    """
    updates = [s for s in lowered.statements if isinstance(s, Op) and s.node.op == UPDATE]
    held = {text: text.removeprefix("self.") for text in (str(s.args[-1]) for s in updates)}
    if not held:
        return lowered, ()

    def renamed(s: Op | Convert) -> Op | Convert:
        if isinstance(s, Convert):
            return replace(s, source=held.get(s.source, s.source))
        args = tuple(a if a is None else held.get(a, a) for a in s.args)
        return replace(s, args=args, bias=s.bias if s.bias is None else held.get(s.bias, s.bias))

    return replace(lowered, statements=tuple(map(renamed, lowered.statements))), tuple(held.values())


def _arguments(lowered: LoweredBlock, held: Sequence[str]) -> list[str]:
    return [f"{name}: Tensor" for name in (*(given.var for given in lowered.inputs), *held)]


def _body(lowered: LoweredBlock, flow: Flow, lines: Sequence[str], apart: Sequence[Region]) -> list[str]:
    """Return the lines of the statements, with `apart` as functions and `del` of dead variables."""
    variables = flow.variables
    at = {region.statements[-1]: region for region in apart}
    inside = {i for region in apart for i in region.statements}
    read_or_written = {v for pair in variables for side in pair for v in side}
    names = FreshNames(read_or_written | {given.var for given in lowered.inputs})
    order = [i for i in range(len(lines)) if i not in inside or i in at]
    steps = [(i, at[i].reads, at[i].writes) if i in at else (i, *variables[i]) for i in order]
    last_use = last_uses(steps, lowered.outputs)
    body: list[str] = []
    dead: list[str] = []
    for before, i in zip([-1, *order], order, strict=False):
        dead += last_use.get(before, [])
        statement = lowered.statements[i]
        if dead and (isinstance(statement, Convert) or op_record(statement.node.op).heavy):
            body.append(f"del {', '.join(dead)}")  # the locals of a module would be gone here, too
            dead = []
        if i not in at:
            body += lines[i].split("\n")
            continue
        body += _region_lines(at[i], lines, names.fresh(f"{identifier(at[i].group)}_region"))
    return body


def _region_lines(region: Region, lines: Sequence[str], name: str) -> list[str]:
    """Return a function of the statements of a region, and its call."""
    results = ", ".join(region.writes)
    signature = ", ".join(f"{v}: Tensor" for v in region.reads)
    body = [f"def {name}({signature}) -> {_returns(len(region.writes))}:  # may be computed again"]
    body += [f"    {line}" for k in region.statements for line in lines[k].split("\n")]
    arguments = ", ".join([repr(region.group), name, *region.reads])
    return [*body, f"    return {results}", f"{results} = self.again({arguments})"]


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _mentions(text: str, name: str) -> bool:
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
        made, used = describe_value(param.value, param.stored, ctx), ""
        if param.spread:
            made = describe_value(param.value, (), replace(ctx, axes=()))
            for part in param.spread:
                sizes[part.dim] = sizes[part.dim].scale(Fraction(1, part.ways))
                used += f" {part.axis}:S({(param.value.dims or ())[part.dim][part.position]})"
        elif param.used != param.stored:
            used = f" used as {_types(param.value, param.used, ctx)}, reduced once per step"
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
