"""Properties of a function along the sequence, found by running it on small tensors.

Which dims can be split together is read from gradients: a dim of an input goes with a dim of the result if each half of
the one influences the same half of the other, and nothing else. That is exact (a gradient that must be zero is zero),
and the function, run on each part, must then give the parts of the whole. So samples and heads can be split, and the
sequence cannot. What it costs is counted on fake tensors of two lengths.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from autoplan.errors import CaptureError

_FEW, _MORE = (5, 7, 11), (13, 17, 19)  # two sets of small sizes of the dims that are symbols
_PARTS = (2, 4)
_LEAST_STATIC = 4  # of the small sizes of the other dims
_MOST_ELEMENTS = 1 << 20
_LONGEST_REACH = 256  # a trial has two chunks if chunks have at most so many tokens
_COUNTED = 32  # operations are counted at lengths of this many tokens, or of a chunk, and of twice as many
_CLOSE = 1e-4  # relative to the largest element; the functions compute in float32
_ASKS = ("is_torchdynamo_compiling", "is_torchdynamo_exporting")  # functions of transformers that model files import

_Place = tuple[int, int]  # (tensor, dim); results follow the arguments


@dataclass(frozen=True)
class ResultForm:
    """The form of a result: shape and dtype of its tensors, and the structure that holds them."""

    tensors: list[tuple[tuple[Any, ...], torch.dtype]]
    leaves: list[Any]  # None for a tensor
    spec: Any

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result with these tensors."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is _TENSOR else x for x in self.leaves], self.spec)


_TENSOR = object()  # stands for a tensor in a result


@dataclass(frozen=True)
class ScanFacts:
    """The properties of a function along the sequence that layouts, prices and memory depend on.

    Attributes:
        rule: how it can be split, as a line of the rule language.
        split: the dims that the rule splits, in words.
        length: (tensor, dim) of the sequence.
        starts: kernels that it starts in a forward: at least, and per token.
        flops, moved, kept: arithmetic, bytes read and written, and bytes kept for the backward, of a forward, per
            element of the first result.
        keeps: the arguments that it keeps for the backward as they are.
    """

    rule: str
    split: tuple[str, ...]
    length: _Place
    starts: tuple[float, float]
    flops: float
    moved: float
    kept: float
    keeps: tuple[int, ...]

    def plain(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """A function with its arguments, in which tensors can be replaced.

    Attributes:
        reach: the largest whole number among the arguments, such as the size of a chunk.
        files: modules whose questions about tracing are answered by no.
    """

    name: str
    function: Callable[..., Any]
    leaves: Sequence[Any]
    spec: Any
    reach: int
    files: Sequence[types.ModuleType]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def tensors(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the result."""
        return [x for x in pytree.tree_leaves(self(given)) if isinstance(x, torch.Tensor)]

    @contextmanager
    def apart(self, grad: bool = True) -> Iterator[None]:
        """Run the function outside of the running trace, as the program will."""
        with ExitStack() as stack:
            for file in self.files:
                for name in _ASKS:
                    if hasattr(file, name):
                        stack.enter_context(patch.object(file, name, lambda: False))
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch.set_grad_enabled(grad))
            yield

    def facts(self, tensors: Sequence[torch.Tensor], form: ResultForm) -> ScanFacts:
        """Return the properties of the function for arguments of these shapes, whose result has this form."""
        results = form.tensors
        with self.apart():
            labels = _labels(self, tensors, [shape for shape, _ in results])
            cut = {place for label in labels for place in label.places}
            symbols = [(i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if not isinstance(n, int)]
            length = next((place for place in symbols if place not in cut), (0, 1))
            starts, flops, moved, kept, keeps = _counted(self, tensors, length)
        rule = _line(tensors, labels, [len(shape) for shape, _ in results])
        split = tuple("the batch" if label.size is None else f"{label.size} channels" for label in labels)
        return ScanFacts(rule, split, length, starts, flops, moved, kept, keeps)


# -- the form of the result --------------------------------------------------------------------------------------------


def result_form(trial: Trial, tensors: Sequence[torch.Tensor], length: int | None) -> ResultForm:
    """Return the form of the result for these (fake) tensors, by running on small ones of two sizes.

    Args:
        length: a size that is that of the sequence, if sizes are plain numbers.

    Raises:
        CaptureError: if the function does not run on fake tensors, or has a size that no argument has.
    """
    results, given = [], []
    for numbers in (_FEW, _MORE):
        sizes = _Sizes(tensors, numbers, length)
        given.append([sizes.of(x) for x in tensors])
        with trial.apart(grad=False), FakeTensorMode():
            try:
                results.append(trial([torch.empty(s, dtype=x.dtype) for s, x in zip(given[-1], tensors, strict=True)]))
            except Exception as exc:  # a function of somebody else may raise anything
                raise CaptureError(
                    f"{trial.name} goes along the sequence and cannot be captured as one operation: without its module "
                    f"and the values of its tensors it fails ({type(exc).__name__}: {str(exc).splitlines()[0]})"
                ) from exc
    named: dict[tuple[int, int], Any] = {}
    for small, large, x in zip(*given, tensors, strict=True):
        named |= {(a, b): n for a, b, n in zip(small, large, x.shape, strict=True) if a != b}
    (few, spec), (more, _) = map(pytree.tree_flatten, results)
    found = []
    for a, b in zip(few, more, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        shape = []
        for m, n in zip(a.shape, b.shape, strict=True):
            if m != n and (m, n) not in named:
                raise CaptureError(f"{trial.name} returns a size that none of its arguments has, so it is not captured")
            shape.append(m if m == n else named[m, n])
        found.append((tuple(shape), a.dtype))
    return ResultForm(found, [_TENSOR if isinstance(x, torch.Tensor) else x for x in few], spec)


class _Sizes:
    """Small numbers for the symbols of shapes, or for the dims of `length`."""

    def __init__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], length: int | None) -> None:
        sizes: list[Any] = [d for x in tensors for d in x.shape]
        free = [s for d in sizes if not isinstance(d, int) for s in sorted(d.node.expr.free_symbols, key=str)]
        ordered = list(dict.fromkeys(free))  # the batch first
        if len(ordered) > len(numbers):
            raise CaptureError(f"sizes of {', '.join(map(str, ordered))} in one operation along the sequence")
        self.numbers = dict(zip(ordered, numbers, strict=False))
        self.length, self.small = length, numbers[1]

    def of(self, x: torch.Tensor) -> list[int]:
        sizes: list[Any] = list(x.shape)
        return [self._number(d) for d in sizes]

    def _number(self, size: Any) -> int:
        if isinstance(size, int):
            return self.small if self.length is not None and size == self.length else size
        return int(size.node.expr.subs(self.numbers))


# -- splits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Label:
    """Dims that are split together. `size`: the fewest parts of one of them; None: a symbol, the batch."""

    places: dict[_Place, Any]  # with their sizes in the model
    size: int | None


def _labels(trial: Trial, tensors: Sequence[torch.Tensor], results: Sequence[tuple[Any, ...]]) -> list[_Label]:
    """Return the labels of a rule that splits; none if the function does not run on small tensors."""
    shapes = [*(tuple(x.shape) for x in tensors), *results]
    found = _Small.of(trial, tensors, _small_sizes(tensors)) or _Small.of(trial, tensors, {})
    if found is None:
        return []
    labels, taken = [], set[_Place]()
    for dim in range(len(shapes[len(tensors)])):
        places = found.together(dim)
        if places is None or not taken.isdisjoint(places):
            continue
        label = _label({place: shapes[place[0]][place[1]] for place in places})
        if label is not None:
            taken |= set(places)
            labels.append(label)
    return labels


def _label(places: dict[_Place, Any]) -> _Label | None:
    """Return the label of dims with these sizes: equal symbols, or numbers that the smallest divides; else None."""
    sizes = list(places.values())
    if not all(isinstance(n, int) for n in sizes):
        return _Label(places, None) if len({str(n) for n in sizes}) == 1 else None
    least = min(sizes)
    return _Label(places, least) if least > 1 and all(n % least == 0 for n in sizes) else None


def _small_sizes(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return a small even number for every number that is a size; one that divides another does so here, too."""
    found: dict[int, int] = {}
    for n in sorted({d for x in tensors for d in x.shape if isinstance(d, int) and d > 1}):
        step = math.lcm(2, *(small for size, small in found.items() if n % size == 0))
        small = step * -(-_LEAST_STATIC // step)
        while small in found.values():
            small += step
        found[n] = min(n, small)
    return found


@dataclass(frozen=True)
class _Small:
    """A function, run on small tensors."""

    trial: Trial
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    _known: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)  # of `_going`

    @staticmethod
    def of(trial: Trial, tensors: Sequence[torch.Tensor], static: Mapping[int, int]) -> _Small | None:
        """Return the run with these sizes in place of the model's numbers; None if it fails or is too large."""
        reach = trial.reach if trial.reach <= _LONGEST_REACH else 0
        sizes = _Sizes(tensors, (2, reach + 6, reach + 10), None)
        pairs = [list(zip(x.shape, sizes.of(x), strict=True)) for x in tensors]
        shapes = [[static.get(n, n) if isinstance(d, int) else n for d, n in dims] for dims in pairs]
        if sum(torch.Size(s).numel() for s in shapes) > _MOST_ELEMENTS:
            return None
        generator = torch.Generator().manual_seed(0)
        inputs = [_random(x.dtype, s, generator) for x, s in zip(tensors, shapes, strict=True)]
        try:
            outputs = trial.tensors(inputs)
        except Exception:  # the function needs the sizes of the model
            return None
        return _Small(trial, inputs, outputs)

    def together(self, dim: int) -> list[_Place] | None:
        """Return the dims of arguments and results that are split with a dim of the first result."""
        if self.outputs[0].shape[dim] % 2:
            return None
        going = self._going(0, dim)
        if not any(going):
            return None
        floating = [(i, dims[0]) for i, dims in enumerate(going) if dims]
        for others in self._other_inputs(self.outputs[0].shape[dim]):
            places = [*floating, *others]
            results = []
            for k, out in enumerate(self.outputs):
                at = [d for d in range(out.dim()) if (dim if k == 0 else d) == d and self._going(k, d) == going]
                results += [(len(self.inputs) + k, d) for d in at[:1]]
            if len(results) == len(self.outputs) and all(self._holds(places, results, n) for n in _PARTS):
                return [*places, *results]
        return None

    def _going(self, result: int, dim: int) -> list[list[int]]:
        """Return for every argument its dims whose halves influence only the same half of a dim of a result."""
        if (result, dim) not in self._known:
            self._known[result, dim] = self._influenced(result, dim)
        return self._known[result, dim]

    def _influenced(self, result: int, dim: int) -> list[list[int]]:
        out = self.outputs[result]
        size = out.shape[dim]
        if size % 2 or not out.requires_grad:
            return [[] for _ in self.inputs]
        both: list[list[list[int]]] = []
        for half in range(2):
            part = out.narrow(dim, half * (size // 2), size // 2)
            weights = torch.linspace(1.0, 2.0, part.numel(), dtype=part.dtype).reshape(part.shape)
            trained = [x for x in self.inputs if x.requires_grad]
            found = iter(torch.autograd.grad(part, trained, weights, retain_graph=True, allow_unused=True))
            grads = [next(found) if x.requires_grad else None for x in self.inputs]
            both.append([[] if g is None else [d for d in range(g.dim()) if _only(g, d, half)] for g in grads])
        first, second = both
        return [[d for d in a if d in b] for a, b in zip(first, second, strict=True)]

    def _other_inputs(self, size: int) -> Iterator[list[_Place]]:
        """Yield sets of dims of arguments without a gradient (masks, places) that may be split, too."""
        others = [i for i, x in enumerate(self.inputs) if not x.requires_grad]
        yield [(i, list(self.inputs[i].shape).index(size)) for i in others if size in self.inputs[i].shape]
        if others:
            yield []

    def _holds(self, places: Sequence[_Place], results: Sequence[_Place], parts: int) -> bool:
        """Return True if the function, run on each part, gives the parts of the whole; also if a dim is too small."""
        if any(self.inputs[i].shape[d] % parts for i, d in places):
            return True
        for k in range(parts):
            given = list(self.inputs)
            for i, d in places:
                given[i] = given[i].chunk(parts, d)[k].contiguous()
            try:
                with torch.no_grad():
                    got = self.trial.tensors(given)
            except Exception:  # it needs the whole
                return False
            for (i, d), x in zip(results, got, strict=True):
                whole = self.outputs[i - len(self.inputs)].chunk(parts, d)[k]
                if x.shape != whole.shape or not bool(((x - whole).abs() <= _CLOSE * whole.abs().max()).all()):
                    return False
        return True


def _only(grad: torch.Tensor, dim: int, half: int) -> bool:
    """Return True if a gradient is zero outside of one half of a dim, and not inside."""
    if grad.shape[dim] % 2:
        return False
    parts = grad.chunk(2, dim)
    return not bool((parts[1 - half] != 0).any()) and bool((parts[half] != 0).any())


def _random(dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(2, shape, dtype=dtype, generator=generator)
    wide = dtype if dtype is torch.float64 else torch.float32
    x = torch.rand(shape, dtype=wide, generator=generator) * 0.1 + 0.01
    return x.requires_grad_()


def _line(tensors: Sequence[torch.Tensor], labels: Sequence[_Label], ranks: Sequence[int]) -> str:
    """Return the rule with these labels; a dim that holds several of the smallest one has a second label."""
    names: dict[_Place, str] = {}
    for k, label in enumerate(labels):
        for place, size in label.places.items():
            more = "" if label.size is None or size == label.size else f" f{k}x{size // label.size}"
            names[place] = f"f{k}{more}"
    dims = [x.dim() for x in tensors] + list(ranks)
    sides = [f"[{', '.join(names.get((i, d), f'x{i}d{d}!') for d in range(n))}]" for i, n in enumerate(dims)]
    marks = ["" if x.is_floating_point() else "#" for x in tensors]
    inputs = ", ".join(mark + side for mark, side in zip(marks, sides, strict=False))
    return f"{inputs} -> {', '.join(sides[len(tensors) :])}"


# -- costs -------------------------------------------------------------------------------------------------------------


_NO_KERNEL = (torch.ops.aten.detach, torch.ops.aten.empty, torch.ops.aten._unsafe_view)


class _Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts kernels, floating point operations, and bytes read and written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.flops, self.moved = 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim" or func.overloadpacket in _NO_KERNEL:
            return out
        given, made = ([x for x in pytree.tree_leaves(side) if isinstance(x, torch.Tensor)] for side in (args, out))
        counted = flop_registry.get(func.overloadpacket)
        self.kernels += 1
        self.flops += counted(*args, **(kwargs or {}), out_val=out) if counted else sum(x.numel() for x in made)
        self.moved += sum(x.numel() * x.element_size() for x in (*given, *made))
        return out


def _counted(
    trial: Trial, tensors: Sequence[torch.Tensor], length: _Place
) -> tuple[tuple[float, float], float, float, float, tuple[int, ...]]:
    """Return the costs of `ScanFacts`, from fake tensors of two lengths."""
    rows: list[tuple[int, int, int, int, int]] = []
    keeps: tuple[int, ...] = ()
    short = max(_COUNTED, trial.reach if trial.reach <= _LONGEST_REACH else 0)
    for tokens in (short, 2 * short):
        sizes = _Sizes(tensors, (2, tokens, tokens), None)
        at = tensors[length[0]].shape[length[1]]
        own: set[Any] = set() if isinstance(at, int) else at.node.expr.free_symbols
        sizes.numbers |= {s: tokens if s in own else 2 for s in sizes.numbers}
        mode, packed = _Counts(), dict[int, int]()
        with FakeTensorMode():
            given = [torch.empty(sizes.of(x), dtype=x.dtype) for x in tensors]
            inputs = [x.requires_grad_() if x.is_floating_point() else x for x in given]

            def pack(x: torch.Tensor, packed: dict[int, int] = packed) -> torch.Tensor:
                packed[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), mode:
                out = trial.tensors(inputs)
        own_memory = {x.untyped_storage()._cdata: i for i, x in enumerate(inputs)}
        keeps = tuple(sorted({own_memory[key] for key in packed if key in own_memory}))
        kept = sum(n for key, n in packed.items() if key not in own_memory)
        rows.append((mode.kernels, mode.flops, mode.moved, kept, out[0].numel()))
    few, more = rows
    if few == more:  # no size is a symbol
        few, short = (0, 0, 0, 0, 0), 1
    elements = more[4] - few[4]
    per_token = (more[0] - few[0]) / short
    starts = (max(0.0, few[0] - per_token * short), per_token) if any(few) else (float(more[0]), 0.0)
    flops, moved, kept_bytes = (max(0.0, (b - a) / elements) for a, b in zip(few[1:4], more[1:4], strict=True))
    return starts, flops, moved, kept_bytes, keeps
