"""Run one op under one strategy on simulated ranks and say what the result means.

A value of type R or I is the same on every rank, S is cut along one factor of a dim, P is a sum. The inputs are cut by
the strategy's layouts, the emitted text of the op runs on every rank, and the outputs and the input gradients, put
together by their types, must be those of the op on one device. The cases of the tests are small nodes of every op;
those of the fuzzer (experiments.compatibility.fuzz) are the nodes of captured graphs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import spmd_types
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map

from autoplan.codegen.emit import Context, convert_text, op_text
from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import Axis, AxisType, Layout, conversion
from autoplan.ir.symbols import Expr
from autoplan.ops.strategies import Strategy, strategies
from autoplan.program.statements import Convert, Op
from autoplan.runtime import program
from autoplan.runtime.convert import V, typed
from autoplan.runtime.mesh import AxisMesh, use_mesh

_TYPES = {"R": program.R, "I": program.I, "P": program.P, "S": V}
MESHES: dict[str, tuple[Axis, ...]] = {
    "2": (Axis("tp", 2),),
    "4": (Axis("tp", 4),),
    "2x2": (Axis("tp0", 2), Axis("tp1", 2)),
}


@dataclass(frozen=True)
class Setting:
    """The factors that values are written in, and the sizes that are run: `env` has those of the symbols."""

    factors: Mapping[str, Expr]
    env: Mapping[str, int]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of every factor."""
        return {name: int(size.evaluate(self.env)) for name, size in self.factors.items()}


class Case(Protocol):
    """An op with its operands."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def setting(self) -> Setting:
        """Where it runs."""

    @property
    def node(self) -> Node:
        """The op, from x0, x1, ... to y0, y1, ..."""

    @property
    def values(self) -> Mapping[str, Value]:
        """Its inputs and outputs."""

    @property
    def ref(self) -> Callable[..., Any] | None:
        """Return the operation in plain torch, if torch has it."""

    def make(self) -> list[torch.Tensor]:
        """Return its inputs, whole."""


@contextlib.contextmanager
def ranks(axes: Sequence[Axis], factors: Mapping[str, Expr]) -> Iterator[tuple[AxisMesh, Context]]:
    """Open a mesh of `axes` over the fake process group."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(a.size for a in axes))
    try:
        groups = {"tp": tuple(a.name for a in axes)} if len(axes) > 1 else {}
        mesh = AxisMesh([(a.name, a.size) for a in axes], groups)
        with use_mesh(mesh):
            yield mesh, Context(factors, tuple(axes), {members: name for name, members in groups.items()})
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


Locals = dict[tuple[int, ...], torch.Tensor]  # coordinates on the axes -> local tensor


def _factor_shape(value: Value, sizes: Mapping[str, int]) -> list[list[int]]:
    return [[sizes[f] for f in dim] for dim in value.dims or ()]


def _at(value: Value, kind: AxisType) -> int:
    """Position of a shard's factor among all factors."""
    return sum(len(dim) for dim in (value.dims or ())[: kind.dim]) + kind.factor


def _flat(shape: list[list[int]]) -> list[int]:
    return [size for dim in shape for size in dim]


def cut(
    whole: torch.Tensor, value: Value, layout: Layout, axes: Sequence[Axis], sizes: Mapping[str, int], seed: int
) -> Locals:
    """Return the local tensor at every coordinate; the summands of a P are random. `sizes`: of the factors."""
    shape = _factor_shape(value, sizes)

    def recurse(part: torch.Tensor, axis: int, seed: int) -> Locals:
        if axis == len(axes):
            return {(): part}
        kind, size = layout[axis], axes[axis].size
        if kind.is_shard:
            parts = [p.contiguous() for p in part.chunk(size, _at(value, kind))]
        elif kind.kind_name == "P":
            g = torch.Generator().manual_seed(seed * 7919 + 13)
            parts = [torch.randint(-64, 65, part.shape, generator=g).to(part.dtype) / 16 for _ in range(size - 1)]
            parts.append(part - sum(parts))
        else:  # the same summands and shards everywhere
            same = recurse(part, axis + 1, seed * 31 + 1)
            return {(i, *rest): t.clone() for i in range(size) for rest, t in same.items()}
        return {
            (i, *rest): t for i, p in enumerate(parts) for rest, t in recurse(p, axis + 1, seed * 31 + i + 2).items()
        }

    found = recurse(whole.reshape(_flat(shape)), 0, seed)
    local = [list(dim) for dim in shape]
    for kind, axis in zip(layout, axes, strict=True):
        if kind.is_shard:
            local[kind.dim][kind.factor] //= axis.size
    return {at: t.reshape([math.prod(dim) for dim in local]) for at, t in found.items()}


def join(parts: Locals, value: Value, layout: Layout, axes: Sequence[Axis], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return what the local tensors mean.

    Raises:
        AssertionError: they mean nothing: an R or I that differs, a wrong shape.
    """
    shape = _factor_shape(value, sizes)
    local = [list(dim) for dim in shape]
    for kind, axis in zip(layout, axes, strict=True):
        if kind.is_shard:
            local[kind.dim][kind.factor] //= axis.size
    want = [math.prod(dim) for dim in local]
    for at, part in parts.items():
        assert list(part.shape) == want, f"{value.name} at {at} has shape {list(part.shape)}, its layout says {want}"

    def recurse(parts: Locals, axis: int) -> torch.Tensor:
        if axis == len(axes):
            return parts[()].reshape(_flat(local))
        kind = layout[axis]
        inner = [
            recurse({at[1:]: t for at, t in parts.items() if at[0] == i}, axis + 1) for i in range(axes[axis].size)
        ]
        if kind.is_shard:
            return torch.cat(inner, _at(value, kind))
        if kind.kind_name == "P":
            return torch.stack(inner).sum(0)
        for other in inner[1:]:
            close(other, inner[0], f"{value.name} is {kind} on {axes[axis].name}, but its ranks differ")
        return inner[0]

    return recurse(parts, 0).reshape([math.prod(dim) for dim in shape])


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12, msg=lambda m: f"{what}: {m}")


class _Self:
    site = 3

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}


def namespace(env: Mapping[str, int]) -> dict[str, Any]:
    """Return what the text of a block sees: `from autoplan.runtime.program import *`, and its arguments."""
    names = {name: getattr(program, name) for name in program.__all__}
    rng = torch.tensor([7, 11, 5])
    return {**names, **env, "rng": rng, "self": _Self(), "device": torch.device("cpu")}


def text_of(case: Case, strategy: Strategy, ctx: Context) -> str:
    """Return the emitted right-hand side of the case under a strategy."""
    node, values = case.node, case.values
    op = Op(
        node.outputs, node, node.tensor_inputs, strategy,
        tuple(values[n] for n in node.outputs), tuple(values[n] for n in node.tensor_inputs),
    )  # fmt: skip
    return op_text(op, ctx, 0)


def strategies_of(case: Case, axes: Sequence[Axis]) -> list[Strategy]:
    return strategies(case.node, case.values, case.setting.factors, axes, case.setting.sizes)


def outputs_of(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _gradients(case: Case, outs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """A gradient for every output that has one."""
    values, g = case.values, torch.Generator().manual_seed(99)
    found = {}
    for i, out in enumerate(outs):
        random = torch.randint(-40, 41, out.shape, generator=g).to(
            out.dtype if out.is_floating_point() or out.is_complex() else torch.float64
        )
        if values[f"y{i}"].requires_grad and out.requires_grad:
            found[i] = random / 16
    return found


def _grad(outs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of inputs; zeros for one that has no part in the results."""
    return torch.autograd.grad(outs, inputs, gradients, allow_unused=True, materialize_grads=True)


class Reference:
    """The case on one device, from the same emitted text without axes, checked against plain torch."""

    def __init__(self, case: Case) -> None:
        self.case, values = case, case.values
        self.inputs = case.make()
        (strategy,) = strategies_of(case, ())
        text = text_of(case, strategy, Context(case.setting.factors, (), {}))
        self.outputs, self.gradients, self.incoming = self._run(
            lambda *x: eval(text, {**namespace(case.setting.env), **named(x)})
        )
        for i, out in enumerate(self.outputs):
            assert str(out.dtype) == f"torch.{values[f'y{i}'].dtype}", f"{case.name}: y{i} is {out.dtype}"
        if case.ref is not None:
            plain, gradients, _ = self._run(case.ref)
            for got, want in zip([*self.outputs, *self.gradients.values()], [*plain, *gradients.values()], strict=True):
                close(got, want, f"{case.name}: {text} is not plain torch")

    def _run(self, fn: Any) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the outputs, the gradients of the inputs, and those of the outputs that they are made of."""
        values = self.case.values
        xs = [x.clone().requires_grad_(values[f"x{i}"].requires_grad) for i, x in enumerate(self.inputs)]
        outs = outputs_of(fn(*xs))
        grads = _gradients(self.case, outs)
        wanted = [i for i in range(len(xs)) if values[f"x{i}"].requires_grad]
        if not grads:
            return [o.detach() for o in outs], {}, {}
        found = _grad([outs[i] for i in grads], [xs[i] for i in wanted], list(grads.values()))
        return [o.detach() for o in outs], dict(zip(wanted, found, strict=True)), grads


def named(x: Sequence[Any]) -> dict[str, Any]:
    return {f"x{i}": value for i, value in enumerate(x)}


def run(reference: Reference, strategy: Strategy, mesh: AxisMesh, ctx: Context, text: str | None = None) -> None:
    """Run one strategy on all ranks. AssertionError where outputs or gradients are not those of the reference.

    `text` replaces the emitted text (negative controls).
    """
    case, axes = reference.case, ctx.axes
    values, sizes = case.values, case.setting.sizes
    text = text_of(case, strategy, ctx) if text is None else text
    what = f"{case.name} under {strategy.name}: {text}"
    world = math.prod(a.size for a in axes)
    place = [tuple(mesh.coordinate(a.name, r) for a in axes) for r in range(world)]

    def gather(x: torch.Tensor, value: Value, layout: Layout) -> torch.Tensor:
        assert isinstance(x, LocalTensor)
        return join({place[r]: x._local_tensors[r].detach() for r in range(world)}, value, layout, axes, sizes)

    with LocalTensorMode(world) as mode:
        xs = []
        for i, (whole, layout) in enumerate(zip(reference.inputs, strategy.inputs, strict=True)):
            with mode.disable():
                parts = cut(whole, values[f"x{i}"], layout, axes, sizes, i)
            x = rank_map(lambda rank, parts=parts: parts[place[rank]].clone())
            xs.append(x.requires_grad_(values[f"x{i}"].requires_grad))
        names: Mapping[str, Any] = {**namespace(case.setting.env), **named(xs)}
        if not xs:  # a factory: every rank makes it alike
            return
        outs = outputs_of(eval(text, dict(names)))
        with mode.disable():
            for i, out in enumerate(outs):
                got = gather(out, values[f"y{i}"], strategy.outputs[i])
                close(got, reference.outputs[i], f"{what}: output {i}")
            grads = reference.incoming
        if not grads:
            return
        incoming = []
        for i, whole in grads.items():
            layout = tuple(t.gradient() for t in strategy.outputs[i])
            with mode.disable():
                parts = cut(whole, values[f"y{i}"], layout, axes, sizes, 50 + i)
            incoming.append(rank_map(lambda rank, parts=parts: parts[place[rank]].clone()))
        wanted = list(reference.gradients)
        found = _grad([outs[i] for i in grads], [xs[i] for i in wanted], incoming)
        with mode.disable():
            for i, gradient in zip(wanted, found, strict=True):
                layout = tuple(t.gradient() for t in strategy.inputs[i])
                got = gather(gradient, values[f"x{i}"], layout)
                close(got, reference.gradients[i], f"{what}: gradient of input {i}")


def check_types(case: Case, strategy: Strategy, ctx: Context, mesh: AxisMesh) -> None:
    """Run the emitted text once under the checker of spmd_types. SpmdTypeError where it finds other types."""
    values, axes, sizes = case.values, ctx.axes, case.setting.sizes

    def types(layout: Layout) -> dict[str, Any]:
        return {a.name: _TYPES[t.kind_name] for a, t in zip(axes, layout, strict=True)}

    xs, names = [], namespace(case.setting.env)
    for i, (whole, layout) in enumerate(zip(case.make(), strategy.inputs, strict=True)):
        first = cut(whole, values[f"x{i}"], layout, axes, sizes, i)[(0,) * len(axes)].clone()
        xs.append(first.requires_grad_(values[f"x{i}"].requires_grad))
    with typecheck():
        for x, layout in zip(xs, strategy.inputs, strict=True):
            typed(x, **types(layout))
        typed(names["rng"], **{a.name: program.R for a in axes})
        outs = outputs_of(eval(text_of(case, strategy, ctx), {**names, **named(xs)}))
        for i, (out, layout) in enumerate(zip(outs, strategy.outputs, strict=True)):
            if values[f"y{i}"].requires_grad:
                typed(out, **types(layout))
            else:  # without a gradient R and I are the same
                have = spmd_types.get_local_type(out)
                for axis, kind in types(layout).items():
                    mine = have[mesh.type_axes(axis)[0]]
                    assert mine is kind or {mine, kind} == {program.R, program.I}, (i, axis, mine, kind)


def convert(
    value: Value,
    source: Layout,
    target: Layout,
    mesh: AxisMesh,
    ctx: Context,
    env: Mapping[str, int],
    text: str | None = None,
) -> None:
    """Run the emitted conversion. AssertionError where value or gradient do not mean the same before and after.

    `text` of `x` replaces the emitted steps (negative controls).
    """
    axes, sizes = ctx.axes, Setting(ctx.factors, env).sizes
    what = f"{' '.join(map(str, source))} -> {' '.join(map(str, target))}"
    shape = [int(size.evaluate(env)) for size in value.shape]
    g = torch.Generator().manual_seed(1)
    whole, gradient = (torch.randint(-40, 41, shape, generator=g).double() / 16 for _ in range(2))
    duals = [tuple(t.gradient() for t in layout) for layout in (source, target)]
    world = math.prod(a.size for a in axes)
    place = [tuple(mesh.coordinate(a.name, r) for a in axes) for r in range(world)]
    parts, incoming = cut(whole, value, source, axes, sizes, 3), cut(gradient, value, duals[1], axes, sizes, 4)
    with LocalTensorMode(world) as mode:
        x = rank_map(lambda rank: parts[place[rank]].clone()).requires_grad_()
        y, current = x, source
        for step in (conversion(source, target) or ()) if text is None else ():
            after = tuple(step.target if i in step.axes else t for i, t in enumerate(current))
            line = convert_text(Convert("y", "y", value, step, current, after), ctx)
            what += f"; {line}"
            y, current = eval(line, {**namespace(env), "y": y}), after
        y = y if text is None else eval(text, {**namespace(env), "x": x})
        (gx,) = torch.autograd.grad(y, x, rank_map(lambda rank: incoming[place[rank]].clone()))
        with mode.disable():
            for got, layout, want in ((y, target, whole), (gx, duals[0], gradient)):
                assert isinstance(got, LocalTensor)
                locals_ = {place[r]: got._local_tensors[r].detach() for r in range(world)}
                close(join(locals_, value, layout, axes, sizes), want, what)
