"""Ops without a record, as nodes that say of themselves what a record would say (`autoplan.ops.generic`).

An op that PyTorch tags as pointwise is split like any other. Every other pure op is run on small random tensors: a dim
can be split if the op, run on each half, gives the halves of the whole, for every draw of the numbers. What it keeps
for its backward, and by which inputs its results have a derivative, is seen by running it, too. Nothing is taken from
names. An op that fails on small tensors runs unsplit. Trials run in a process of their own, as some kernels write past
the end of tensors whose sizes do not go together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoplan.capture.child import in_child
from autoplan.capture.draws import has_generator
from autoplan.capture.ops import Arguments
from autoplan.capture.rules import check_rule, disproved, half, rule_line
from autoplan.errors import CaptureError
from autoplan.ir.graph import OF_THE_WHOLE_BATCH
from autoplan.ir.symbols import SYMBOLS, Expr, Shape
from autoplan.ops.arguments import IrOp
from autoplan.ops.generic import FUNCTION, POINTWISE
from autoplan.ops.text import literal

_SMALL = (4, 6, 8, 10, 14, 22, 26, 34)  # sizes of different dims; even, as every dim is cut in two
_KEPT = 4  # sizes up to this one may be part of an op's meaning: trials keep them first
_MOST_ELEMENTS = 1 << 16  # of the tensors of a trial
_MOST_SPLITS = 256
# ops that read their first tensor by places in memory; and one that takes none whose conjugate is pending, as that of
# torch.fft.ifft may be
_BY_PLACE_IN_MEMORY = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
_RESOLVED = ("aten::view_as_real",)
_CLOSE = {"rtol": 1e-9, "atol": 1e-12}

SizeOf = Callable[[Any], Expr]
_Place = tuple[int, int]  # (tensor, dim); outputs follow the inputs


def is_pointwise(op: Any) -> bool:
    """Return True for a pure op that computes every element of its output from one element of each input."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags and not why_impure(op)


def why_impure(op: torch._ops.OpOverload, node: fx.Node | None = None) -> str:
    """Return why an op is more than a function of its arguments; empty if it is one.

    Args:
        node: its call, if there is one.
    """
    if torch.Tag.nondeterministic_seeded in op.tags:
        return _why_not_drawn(node)
    if op._schema.is_mutable:
        return "changes its argument"
    if torch.Tag.data_dependent_output in op.tags:
        return "returns a number that depends on the data"
    return ""


def _why_not_drawn(node: fx.Node | None) -> str:
    if node is not None and has_generator(node):
        return (
            "draws from a generator of its own (generator=...), whose numbers would differ between plans: leave the "
            "generator out, and the numbers are those of parallelize's seed, the same in all plans"
        )
    return (
        "draws random numbers in a way of its own, so they would differ between plans: draw them with torch.rand, "
        "randn, randint, bernoulli, multinomial or randperm, Tensor.normal_, uniform_ or exponential_ (the same in all "
        "plans), or give them as an input, a tensor with one row per sample"
    )


def generic(op: torch._ops.OpOverload, node: fx.Node, a: Arguments, size_of: SizeOf, made: dict[object, IrOp]) -> IrOp:
    """Return an op without a record as a node.

    Args:
        node: its call in the exported graph.
        a: its arguments by name: tensors as names of values, sizes as expressions.
        size_of: gives the expression of a size of a fake tensor.
        made: what this function made so far in this capture; an equal call is not tried once more.
    """
    call, tensors, sizes = _call(op, a)
    leaves, value = _tensors(node), node.meta["val"]
    if op._schema.name in _BY_PLACE_IN_MEMORY:
        _refuse_other_order(op, leaves[0], size_of)
        call = call.replace("{0}", "{0}.contiguous()", 1)  # a rank may hold it in another order
    if op._schema.name in _RESOLVED:
        call = call.replace("{0}", "{0}.resolve_conj()", 1)
    results = list(value) if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, (list, tuple)) and len(value) == 1:
        call += "[0]"  # a node with one output is a tensor
    shapes = [tuple(size_of(d) for d in t.shape) for t in (*leaves, *results)]
    key = (call, tuple(sizes.items()), tuple(t.dtype for t in leaves), tuple(shapes))
    if key not in made:
        made[key] = _generic(op, node, call, sizes, shapes, size_of)
    return replace(made[key], tensors=tensors)


def _refuse_other_order(op: torch._ops.OpOverload, x: torch.Tensor, size_of: SizeOf) -> None:
    """Raise CaptureError for a tensor whose elements do not stand in memory one after another."""
    expected = Expr.of(1)
    for size, stride in reversed(list(zip(map(size_of, x.shape), map(size_of, x.stride()), strict=True))):
        if size != Expr.of(1) and stride != expected:
            raise CaptureError(
                f"{op} reads a tensor by places in memory, which differ between plans where its elements do not stand "
                "in order; give it x.contiguous()"
            )
        expected = expected * size


def _generic(
    op: torch._ops.OpOverload,
    node: fx.Node,
    call: str,
    sizes: Mapping[str, Expr],
    shapes: Sequence[Shape],
    size_of: SizeOf,
) -> IrOp:
    """Return the node without its tensors. `shapes`: of its tensors and results."""
    leaves = _tensors(node)
    num_results, tensors = len(shapes) - len(leaves), ()
    attrs: dict[str, Any] = {"call": call, **sizes}
    if any("b" in size.symbols for size in sizes.values()):
        attrs[OF_THE_WHOLE_BATCH] = True
    if is_pointwise(op) and not sizes:
        inputs = ", ".join(_mark(leaf) + "[*a]" for leaf in leaves)
        attrs["rule"] = f"{inputs} -> {', '.join(['[*a]'] * num_results)}"
        small = [[1 if d.value == 1 else _SMALL[len(s) - k] for k, d in enumerate(s)] for s in shapes]
        trial = _Trial.of(op, node, leaves, small, size_of)
        return IrOp(POINTWISE, tensors, attrs | _kept(trial, leaves))
    given = None if sizes else rule_line(op)
    if given is not None:
        check_rule(op, given, shapes[: len(leaves)], shapes[len(leaves) :])

    def by_trial() -> dict[str, Any]:
        trial = _trial(op, node, leaves, shapes, size_of, fixed=bool(sizes))
        if given is not None:
            _try_rule(op, given, trial)
        rule = given or _rule_by_trial(trial if not sizes else None, leaves, shapes)
        return {"rule": rule, **_kept(trial, leaves)}

    found = in_child(by_trial) or {"rule": given or _rule_by_trial(None, leaves, shapes), **_kept(None, leaves)}
    return IrOp(FUNCTION, tensors, attrs | found)


def _rule_by_trial(trial: _Trial | None, leaves: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> str:
    """Return the rule that a trial shows; without one nothing is split."""
    labels = [[f"x{i}d{d}!" for d in range(len(shape))] for i, shape in enumerate(shapes)]
    for k, places in enumerate(_splits(trial, shapes) if trial is not None else ()):
        for tensor, dim in places:
            labels[tensor][dim] = f"f{k}"
    sides = [f"[{', '.join(mine)}]" for mine in labels]
    inputs = ", ".join(_mark(leaf) + side for leaf, side in zip(leaves, sides, strict=False))
    return f"{inputs} -> {', '.join(sides[len(leaves) :])}"


def _try_rule(op: torch._ops.OpOverload, line: str, trial: _Trial | None) -> None:
    """Raise CaptureError for a rule that a trial shows to be wrong."""
    wrong = disproved(line, trial.run, trial.inputs, trial.outputs) if trial is not None else ""
    if wrong:
        raise CaptureError(f"{op}: its rule {line!r} splits {wrong!r}, but halves of it do not give the whole")


def _mark(x: torch.Tensor) -> str:
    return "" if _has_gradient(x) else "#"


def _has_gradient(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# -- the text of the call ----------------------------------------------------------------------------------------------


def _call(op: torch._ops.OpOverload, a: Arguments) -> tuple[str, tuple[str, ...], dict[str, Expr]]:
    """Return the text of the call, with {i} for tensors and {size_i} for symbolic sizes; the tensors; the sizes."""
    tensors: list[str] = []
    sizes: dict[str, Expr] = {}

    def text(value: Any, tensor: bool) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(text(v, tensor) for v in value)}]"
        if tensor and isinstance(value, str):
            tensors.append(value)
            return f"{{{len(tensors) - 1}}}"
        if isinstance(value, Expr) and value.value is None:
            sizes[f"size_{len(sizes)}"] = value
            return f"{{size_{len(sizes) - 1}}}"
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        return literal(value)

    parts, named = [], False
    for argument in op._schema.arguments:
        named = named or argument.kwarg_only or argument.name not in a
        if argument.name not in a:
            continue
        value = a[argument.name]
        if argument.name == "dtype" and isinstance(value, str):
            value = getattr(torch, value)
        mine = text(value, "Tensor" in str(argument.type))
        parts.append(f"{argument.name}={mine}" if named else mine)
    namespace, name = op._schema.name.split("::")
    return f"torch.ops.{namespace}.{name}.{op._overloadname}({', '.join(parts)})", tuple(tensors), sizes


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors among the arguments, in order."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, fx.Node)]
    return [v for v in values if isinstance(v, torch.Tensor)]


# -- trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """An op on small tensors: `run` takes its tensors and returns its results.

    Attributes:
        others: further tensors of these shapes, and their results. By chance an op may give the halves of the whole on
            some tensors alone: `masked_scatter` does where a mask has one True in a row.
    """

    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    others: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...] = ()

    @staticmethod
    def of(
        op: torch._ops.OpOverload,
        node: fx.Node,
        leaves: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int]],
        size_of: SizeOf,
        env: Mapping[str, int] = MappingProxyType({}),
    ) -> _Trial | None:
        """Return the op on tensors of these shapes; None if it fails on them. `env`: b, s and t among its arguments."""
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in flat]
        sizes = [v for v in values if isinstance(v, (torch.SymInt, torch.SymFloat))]
        numbers = iter([size_of(v).evaluate(env) for v in sizes])
        filled = [next(numbers) if isinstance(v, (torch.SymInt, torch.SymFloat)) else v for v in values]
        places = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            out = op(*args, **kwargs)
            return list(out) if isinstance(out, (list, tuple)) else [out]

        shapes = shapes[: len(leaves)]
        limit = min((d for shape in shapes for d in shape if d > 1), default=1)
        drawn: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for kind in _DRAWS:
            generator = torch.Generator().manual_seed(len(drawn))
            inputs = [kind.of(leaf.dtype, shape, limit, generator) for leaf, shape in zip(leaves, shapes, strict=True)]
            try:
                with torch.random.fork_rng(devices=[]):
                    drawn.append((inputs, run(inputs)))
            except Exception:  # an op may raise anything for sizes or numbers that it does not expect
                continue
        return _Trial(run, *drawn[0], tuple(drawn[1:])) if drawn else None


@dataclass(frozen=True)
class _Draw:
    """Random tensors of one kind.

    Attributes:
        low, high: bounds of real numbers.
        true: the share of True.
        definite: whether matrices of real numbers are symmetric and positive definite.
    """

    low: float
    high: float
    true: float
    definite: bool = False

    def of(self, dtype: torch.dtype, shape: Sequence[int], limit: int, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor. `limit`: of whole numbers."""
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.float64 if dtype.is_floating_point else torch.complex128
            x = torch.rand(shape, dtype=wide, generator=generator) * (self.high - self.low) + self.low
            is_square = self.definite and len(shape) > 1 and shape[-1] == shape[-2]
            return x + x.mT.conj() + 2 * shape[-1] * torch.eye(shape[-1], dtype=wide) if is_square else x
        if dtype is torch.bool:
            return torch.rand(shape, generator=generator) < self.true
        return torch.randint(limit, shape, dtype=dtype, generator=generator)


_DRAWS = (_Draw(0.1, 0.9, 0.5), _Draw(-2.0, 2.0, 0.85), _Draw(0.1, 0.9, 0.3), _Draw(0.1, 0.9, 0.5, definite=True))


def _trial(
    op: torch._ops.OpOverload,
    node: fx.Node,
    leaves: Sequence[torch.Tensor],
    shapes: Sequence[Shape],
    size_of: SizeOf,
    fixed: bool,
) -> _Trial | None:
    """Return a trial with few elements: with the model's own sizes, else equal dims get equal small sizes.

    Small sizes are larger than the numbers among the arguments, such as a shift or a dilation: an op that reads a place
    so far away shows it.

    Args:
        fixed: True if arguments name sizes, so that only b, s and t can be made small.
    """
    reach = max((abs(n) for n in pytree.tree_leaves((node.args, node.kwargs)) if type(n) is int), default=0)
    reach = 2 * reach if reach <= _SMALL[-1] else 0
    env = {name: size + reach for name, size in zip(SYMBOLS, _SMALL, strict=False)}
    own = [[int(d.evaluate(env)) for d in shape] for shape in shapes]
    if sum(map(math.prod, own)) <= _MOST_ELEMENTS:
        trial = _Trial.of(op, node, leaves, own, size_of, env)
        if trial is not None or fixed:
            return trial
    for most_kept in () if fixed else (_KEPT, 1):
        small = _small_sizes(shapes[: len(leaves)], reach, most_kept)
        made = [[small[d] for d in shape] for shape in shapes[: len(leaves)]] if small else []
        if small is None or sum(map(math.prod, made)) > _MOST_ELEMENTS:
            continue
        trial = _Trial.of(op, node, leaves, made, size_of)
        if trial is not None and _as_expected(trial.outputs, shapes[len(leaves) :], small):
            return trial
    return None


def _small_sizes(shapes: Sequence[Shape], reach: int, most_kept: int) -> dict[Expr, int] | None:
    """Return a small size for every size of a dim; None if there are too many.

    Args:
        most_kept: sizes up to this one stay as they are, such as the 2 of real and imaginary parts.
    """
    sizes = dict.fromkeys(size for shape in shapes for size in shape)
    kept = {size: size.value for size in sizes if size.value is not None and size.value <= most_kept}
    free = [n for n in _SMALL if n + reach not in kept.values()]
    others = [size for size in sizes if size not in kept]
    if len(others) > len(free):
        return None
    return {Expr.of(1): 1, **kept, **{size: n + reach for size, n in zip(others, free, strict=False)}}


def _as_expected(outputs: Sequence[torch.Tensor], shapes: Sequence[Shape], small: Mapping[Expr, int]) -> bool:
    """Return True if dims that are as large as a dim of an input in the model are so in the trial."""
    if [x.dim() for x in outputs] != [len(shape) for shape in shapes]:
        return False
    pairs = [(d, n) for x, shape in zip(outputs, shapes, strict=True) for d, n in zip(shape, x.shape, strict=True)]
    return all(small[d] == n for d, n in pairs if d in small)


# -- splits ------------------------------------------------------------------------------------------------------------


def _splits(trial: _Trial, shapes: Sequence[Shape]) -> Iterator[list[_Place]]:
    """Yield the dims of inputs and outputs that are split together; every dim at most once, all of one size."""
    taken: set[_Place] = set()
    for places in itertools.islice(_candidates(trial.inputs), _MOST_SPLITS):
        if taken.isdisjoint(places):
            found = _outputs_of(trial, places)
            sizes = {shapes[tensor][dim] for tensor, dim in (*places, *(found or ()))}
            if found is not None and taken.isdisjoint(found) and len(sizes) == 1:
                taken |= {*places, *found}
                yield [*places, *found]


def _candidates(inputs: Sequence[torch.Tensor]) -> Iterator[list[_Place]]:
    """Yield sets of dims of equal size, at most one of each input, by their number."""
    for count in range(1, len(inputs) + 1):
        for chosen in itertools.combinations(range(len(inputs)), count):
            for dims in itertools.product(*(range(inputs[i].dim()) for i in chosen)):
                sizes = {inputs[i].shape[d] for i, d in zip(chosen, dims, strict=True)}
                if len(sizes) == 1 and not next(iter(sizes)) % 2:
                    yield list(zip(chosen, dims, strict=True))


def _outputs_of(trial: _Trial, places: Sequence[_Place]) -> list[_Place] | None:
    """Return the dim of every output that splits with these dims of inputs; None if an output has none."""
    possible = [set(range(whole.dim())) for whole in trial.outputs]
    for inputs, outputs in ((trial.inputs, trial.outputs), *trial.others):
        halves = []
        for k in range(2):
            parts = list(inputs)
            for tensor, dim in places:
                parts[tensor] = half(parts[tensor], dim, k)
            try:
                halves.append(trial.run(parts))
            except Exception:  # the op needs the whole
                return None
        for k, whole in enumerate(outputs):
            possible[k] = {d for d in possible[k] if _joins(whole, halves[0][k], halves[1][k], d)}
        if not all(possible):
            return None
    return [(len(trial.inputs) + k, min(dims)) for k, dims in enumerate(possible)]


def _joins(whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
    if a.dim() != whole.dim() or a.shape != b.shape or 2 * a.shape[dim] != whole.shape[dim]:
        return False
    if any(m != n for d, (m, n) in enumerate(zip(a.shape, whole.shape, strict=True)) if d != dim):
        return False
    joined = torch.cat([a, b], dim)
    if not _has_gradient(whole):
        return torch.equal(joined, whole)
    return torch.allclose(joined, whole, equal_nan=True, **_CLOSE)


# -- what is kept for the backward -------------------------------------------------------------------------------------


def _kept(trial: _Trial | None, leaves: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return `keeps` and `num_extra`: as autograd does in the trial; everything if there is none."""
    with_gradient = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
    needs = ",".join(map(str, with_gradient))
    if not needs:
        return {"keeps": "", "num_extra": 0}
    if trial is None:
        every_one = [*(f"x{i}" for i in range(len(leaves))), "y0"]
        return {"keeps": _kept_for(every_one, needs), "num_extra": 0}
    inputs = [x.clone().requires_grad_() if i in with_gradient else x for i, x in enumerate(trial.inputs)]
    packed: list[torch.Tensor] = []
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x), lambda x: x):
            outputs = trial.run(inputs)
    except RuntimeError:  # not differentiable in all of them
        return _kept(None, leaves)
    names = {x.untyped_storage().data_ptr(): f"x{i}" for i, x in enumerate(inputs)}
    names |= {y.untyped_storage().data_ptr(): f"y{i}" for i, y in enumerate(outputs) if i == 0}
    found = [names.get(x.untyped_storage().data_ptr(), "") for x in packed]
    keeps = {"keeps": _kept_for(dict.fromkeys(filter(None, found)), needs), "num_extra": found.count("")}
    with_derivative = _derivatives(inputs, trial.run, with_gradient)
    every = all(len(places) == len(with_gradient) for places in with_derivative)
    return keeps if every else keeps | {"derivatives": ";".join(",".join(map(str, x)) for x in with_derivative)}


def _kept_for(names: Iterable[str], needs: str) -> str:
    return " ".join(f"{name}<{needs}" for name in names)


def _derivatives(
    inputs: Sequence[torch.Tensor],
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    places: Sequence[int],
) -> list[list[int]]:
    """Return for every output the inputs by which autograd gives it a derivative."""
    found: dict[int, list[int]] = {}
    for i in places:
        for k, y in enumerate(run([x.detach().requires_grad_(at == i) for at, x in enumerate(inputs)])):
            found.setdefault(k, []).extend([i] * y.requires_grad)
    return list(found.values())
