"""Name the first value in which a captured graph differs from its module.

Both run once more. Every floating tensor that they make is remembered by its size, its sum, and the sums of its
absolute values and squares, which stay the same when it is reshaped or transposed. Values of the graph are named by
their op, module and source line.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.ir.graph import Call, Node
from autoplan.program.lower import identifier
from autoplan.program.statements import Op
from autoplan.verify.one_device import MODULE, OneDevice, load_stage
from autoplan.verify.runs import ADVICE, VerifyTask, WideTensors, Wrong, run_graph, run_module

_HIDDEN = 1e29
_CLOSE = 1e-10  # relative, of fingerprints: both sides are float64
_SEEN = "_autoplan_seen"


@dataclass(frozen=True)
class Fingerprint:
    """Figures of a tensor that reshaping, transposing and permuting do not change."""

    size: int
    num_hidden: int  # elements beyond _HIDDEN: masks, which would outweigh the others
    total: float
    magnitude: float  # sum of absolute values: the other two hardly tell normalised tensors apart
    squares: float

    @staticmethod
    def of(t: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a floating tensor."""
        flat = t.detach().to(torch.float64)
        hidden = flat.abs() > _HIDDEN
        flat = flat.masked_fill(hidden, 0.0)
        sums = (float(x.sum()) for x in (flat, flat.abs(), flat.square()))
        return Fingerprint(t.numel(), int(hidden.sum()), *sums)

    @property
    def norm(self) -> float:
        """The root of the sum of squares."""
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan

    def same(self, other: Fingerprint) -> bool:
        """Return True if both may belong to the same tensor."""
        if (self.size, self.num_hidden) != (other.size, other.num_hidden):
            return False
        if not math.isfinite(self.squares) or not math.isfinite(other.squares):
            return not math.isfinite(self.squares) and not math.isfinite(other.squares)
        close = abs(self.squares - other.squares) <= _CLOSE * max(self.squares, other.squares)
        close = close and abs(self.magnitude - other.magnitude) <= _CLOSE * max(self.magnitude, other.magnitude)
        return close and abs(self.total - other.total) <= _CLOSE * math.sqrt(self.size * max(self.squares, 1e-300))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A record of the floating tensors that the module makes, in order: path of the module, operation, fingerprint."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str, Fingerprint]] = []
        self._paths = {id(m): name for name, m in model.named_modules()}
        self._stack: list[str] = [""]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` and remember its results."""
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel():
                self.found.append((self._stack[-1], str(func), Fingerprint.of(t)))
        return out

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep track of the module whose forward runs."""

        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(self._paths.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self._stack.pop()

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave).remove)
            yield


@dataclass(frozen=True)
class _Value:
    """A value of the graph: the node that makes it, its inputs by name, and its fingerprint."""

    call: Call
    node: Node
    inputs: tuple[str, ...]
    name: str
    fingerprint: Fingerprint

    @property
    def scope(self) -> str:
        """The path of the module that made it."""
        layer = self.call.name if any(p.startswith(f"{self.call.name}.") for p in self.call.params.values()) else ""
        return ".".join(part for part in (layer, self.node.scope) if part)

    def __str__(self) -> str:
        where = f" ({self.node.source})" if self.node.source else ""
        return f"{self.node.op} of {self.scope or 'the model itself'}{where}"


class _Instrument(ast.NodeTransformer):
    """A rewrite that adds a call of `_autoplan_seen` behind every assignment to a variable of the blocks."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Add the calls behind one assignment."""
        (target,) = node.targets
        names = [x.id for x in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(x, ast.Name)]
        seen = "".join(f"{_SEEN}(self, {name!r}, {name})\n" for name in names)
        return [node, *ast.parse(seen).body]


def _values(
    task: VerifyTask, compiled: OneDevice, tensors: WideTensors, batch: Mapping[str, torch.Tensor]
) -> list[_Value]:
    """Return all floating values of the graph, in the order of the program."""
    tree = ast.parse(compiled.text)
    for item in tree.body:
        if isinstance(item, ast.ClassDef) and item.name != "Stage":
            for method in item.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("compute", "forward"):
                    _Instrument().visit(method)
    stage = load_stage(ast.unparse(ast.fix_missing_locations(tree)))
    calls = {}
    for call in compiled.graph.calls:
        name = identifier(call.name)
        blocks = stage.get_submodule("blocks")
        calls[id(blocks.get_submodule(name) if name in blocks._modules else getattr(stage, name, None))] = call
    seen: dict[tuple[str, str], Fingerprint] = {}

    def show(block: nn.Module, variable: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            seen[calls[id(block)].name, variable] = Fingerprint.of(value)

    setattr(sys.modules[MODULE], _SEEN, show)
    run_graph(task, stage, compiled, tensors, batch)
    out = []
    for call in compiled.graph.calls:
        block = compiled.graph.blocks[call.block]
        names = dict(zip((*block.inputs, *block.outputs), (*call.inputs, *call.outputs), strict=True))
        for op in compiled.lowered[call.block].statements:
            if not isinstance(op, Op):
                continue
            given = tuple(names.get(x, f"{call.name}/{x}") for x in op.node.tensor_inputs)
            for variable, value in zip(op.targets, op.values, strict=True):
                found = seen.get((call.name, variable))
                if found is not None:
                    name = names.get(value.name, f"{call.name}/{value.name}")
                    out.append(_Value(call, op.node, given, name, found))
    return out


def _first(values: Sequence[_Value], made: Sequence[Fingerprint]) -> _Value | None:
    """Return the first value that the module does not make and that leads to no later value which the module makes.

    A value with such a successor is only an intermediate of other steps to the same result.
    """
    by_size: dict[int, list[Fingerprint]] = {}
    for f in made:
        by_size.setdefault(f.size, []).append(f)

    def known(f: Fingerprint) -> bool:
        return any(f.same(other) for other in by_size.get(f.size, ()))

    found = [known(v.fingerprint) for v in values]
    right: set[str] = set()  # values that lead to a right one
    for value, there in zip(reversed(values), reversed(found), strict=True):
        if (there and value.fingerprint.squares > 0) or value.name in right:
            right |= {value.name, *value.inputs}
    return next((v for v, there in zip(values, found, strict=True) if not there and v.name not in right), None)


def _counterpart(
    value: _Value, values: Sequence[_Value], made: Sequence[tuple[str, str, Fingerprint]]
) -> Fingerprint | None:
    """Return the tensor of the module that should have been the value.

    It has the size of the value, comes from the same module, and is nowhere in the graph. A result of the same
    operation is preferred, else the last one counts.
    """
    mine = [v.fingerprint for v in values if v.fingerprint.size == value.fingerprint.size]
    there = [(op, f) for path, op, f in made if path == value.scope and f.size == value.fingerprint.size]
    there = [(op, f) for op, f in there if not any(f.same(other) for other in mine)]
    alike = [f for op, f in there if value.node.op.removesuffix("_scalar") in op]
    return next(iter(alike or [f for _, f in there[-1:]]), None)


def _first_gradient(compiled: OneDevice, wrong: Sequence[Wrong]) -> Wrong:
    """Return the wrong gradient that the backward reaches first."""
    by_name = {w.name: w for w in wrong}
    for call in reversed(compiled.graph.calls):
        for node in reversed(compiled.graph.blocks[call.block].nodes):
            for name in node.tensor_inputs:
                if call.params.get(name) in by_name:
                    return by_name[call.params[name]]
    return wrong[0]


def explain_difference(
    task: VerifyTask,
    compiled: OneDevice,
    tensors: WideTensors,
    batch: Mapping[str, torch.Tensor],
    losses: tuple[float, float],
    wrong: Sequence[Wrong],
) -> str:
    """Return the message for a graph that is not its module: the losses and the first value that differs.

    Args:
        losses: of the graph and of the module.
        wrong: the gradients that differ.
    """
    text = _summary(task, losses, wrong)
    try:
        where = _where(task, compiled, tensors, batch, wrong)
    except Exception as exc:  # the difference itself must be reported in any case
        where = f". The first value that differs was not found ({type(exc).__name__}: {exc})"
    return f"{text}{where}. {ADVICE}"


def _where(
    task: VerifyTask,
    compiled: OneDevice,
    tensors: WideTensors,
    batch: Mapping[str, torch.Tensor],
    wrong: Sequence[Wrong],
) -> str:
    made = _Made(task.model)
    with made.following(), made:
        run_module(task, tensors, batch, backward=False)
    values = _values(task, compiled, tensors, batch)
    first = _first(values, [f for *_, f in made.found])
    if first is not None:
        other = _counterpart(first, values, made.found)
        beside = "" if other is None else f", in the module {other.norm:.6g}"
        return f". The first value that differs is the {first}: its norm is {first.fingerprint.norm:.6g}{beside}"
    if not wrong:
        return ""
    g = _first_gradient(compiled, wrong)
    return (
        f". All values of the forward agree; the first gradient that differs is that of {g.name}: its largest element "
        f"is {g.got:.6g}, in the module {g.want:.6g}; they differ by up to {g.error:.3g}"
    )


def _summary(task: VerifyTask, losses: tuple[float, float], wrong: Sequence[Wrong]) -> str:
    got, want = losses
    count = f"{len(wrong)} gradient{'s' if len(wrong) != 1 else ''} differ{'' if len(wrong) != 1 else 's'}"
    return (
        f"the captured graph of {task.graph.name} is not the module: its loss is {got:.8g}, that of the module "
        f"{want:.8g}, and {count}"
    )
