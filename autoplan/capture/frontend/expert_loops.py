"""Experts that are modules of their own, in a loop over those that were hit: every expert computes every token.

Such a loop asks the data which tokens an expert has: `torch.where(mask)`, `mask.nonzero()`, `x[mask]`,
`if mask.any()`. It takes their rows and adds the results back: `index_add_`, or `y[tokens] += ...`. No trace can have
sizes that depend on the data. While a model is traced, such a question is answered by all places of the mask; the rows
that the mask leaves out count as zero where they are added back. This is exact if the rows do not meet in between.
Whether they do is not guessed: the module around the loop runs on random numbers in both ways, and results and
gradients must be equal.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.capture.frontend.experts import dense_note
from autoplan.errors import CaptureError

# Symbolic sizes when a module runs on random numbers; none divides a size of its parameters, such as that of experts.
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_MOST_ELEMENTS = 50_000_000  # of the parameters of a module that runs on random numbers
_RELATIVE, _ABSOLUTE = 1e-8, 1e-10  # differences of sums in another order, in float64
_ASKS = frozenset(("where", "nonzero"))
_BRANCH = "__bool__"
_ADVICE = "stack the weights of its experts in one class and decorate it with autoplan.experts_forward"


class _Unproved(CaptureError):
    """A loop over experts was met in a module that has not been compared yet; the model is to be traced once more."""


class _Number(int):
    """The number of an expert, in place of a tensor of `rank` 0 or 1."""

    rank: int

    def __new__(cls, value: int, rank: int) -> _Number:
        made = super().__new__(cls, value)
        made.rank = rank
        return made

    def __getitem__(self, index: int) -> _Number:
        return _Number(self, 0)

    def item(self) -> int:
        return int(self)

    def numel(self) -> int:
        return 1

    def squeeze(self, *_: Any) -> _Number:
        return _Number(self, 0)


class _Hits(list[_Number]):
    """The experts that were hit, in place of a tensor [experts, 1] or [experts]: all of them."""

    def squeeze(self, *_: Any) -> _Hits:
        return _Hits(_Number(x, 0) for x in self)

    flatten = view = reshape = squeeze

    def tolist(self) -> list[Any]:
        return [[int(x)] if x.rank else int(x) for x in self]


@dataclass(eq=False)
class _Places:
    """The places of one dim of a mask [m] or [m, n], once per element of the mask, in place of a tensor [m n].

    `column`: in place of a tensor [m, 1].
    """

    mask: torch.Tensor
    dim: int
    column: bool = False

    def squeeze(self, *_: Any) -> _Places:
        return _Places(self.mask, self.dim)

    flatten = view = reshape = squeeze

    def numel(self) -> Any:
        return self.mask.numel()

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.mask.numel(),)

    def size(self, dim: int = 0) -> Any:
        return self.shape[dim]

    def tolist(self) -> _Places:
        return self

    def __len__(self) -> int:
        return int(self.mask.numel())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_places(function, args, kwargs or {})

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Take the row of `x` [size of the dim, ...] at every place: [m n, ...]."""
        copy = x.clone()  # first: a view of x would be a second holder of what is added to
        if self.mask.dim() == 1:
            return copy
        sizes = [-1] * (x.dim() + 1)
        sizes[1 - self.dim] = self.mask.shape[1 - self.dim]
        return copy.unsqueeze(1 - self.dim).expand(sizes).flatten(0, 1).clone()

    def added(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the rows [m n, ...] of the mask's true places by this dim; the others count as zero."""
        mask = self.mask.to(torch.bool).flatten()
        rows = torch.where(mask.reshape(-1, *[1] * (rows.dim() - 1)), rows, 0.0)
        if self.mask.dim() == 1:
            return rows
        return rows.reshape(*self.mask.shape, *rows.shape[1:]).sum(1 - self.dim)


def _on_places(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation with places among its arguments. Raises CaptureError for one that no loop needs."""
    name = getattr(function, "__name__", str(function))
    if any(isinstance(x, _Places) and x.column for x in pytree.tree_leaves((args, kwargs))):
        raise CaptureError(f"tokens of one expert are used as a column; squeeze what nonzero() returns, or {_ADVICE}")
    if name == "__getitem__":
        return _taken(args[0], args[1])
    if name == "__setitem__":
        x, place, rows = args
        if isinstance(place, _Places) and isinstance(rows, torch.Tensor):
            return x.add_(place.added(rows - place.rows_of(x)))
    if name == "index_select" and args[1] == 0:
        return args[2].rows_of(args[0])
    if name in ("index_add_", "index_add") and args[1] == 0 and not kwargs and isinstance(args[2], _Places):
        add = args[0].add_ if name.endswith("_") else args[0].add
        return add(args[2].added(args[3]))
    raise CaptureError(f"tokens of one expert are used by {name}, so sizes depend on the data; {_ADVICE}")


def _taken(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Compute `x[index]`: places of one dim or of both dims of a mask, None before and behind them."""
    items = list(index) if isinstance(index, tuple) else [index]
    at = [k for k, item in enumerate(items) if isinstance(item, _Places)]
    before, behind = items[: at[0]], items[at[-1] + 1 :]
    places, rows = items[at[0] : at[-1] + 1], x
    if len(at) != len(places) or any(item is not None for item in (*before, *behind)):
        raise CaptureError(f"one index takes the tokens of an expert and other positions; {_ADVICE}")
    if len(places) == 1:
        rows = places[0].rows_of(x)
    else:
        first, second = places
        if len(places) > 2 or first.mask is not second.mask or first.dim == second.dim:
            raise CaptureError(f"tokens of one expert are taken at places of several masks; {_ADVICE}")
        rows = (x.transpose(0, 1) if first.dim == 1 else x).flatten(0, 1).clone()
    for _ in behind:
        rows = rows.unsqueeze(1)
    for _ in before:
        rows = rows.unsqueeze(0)
    return rows


class _Dense(TorchFunctionMode):
    """Answer which tokens an expert has by all of them.

    Args:
        allowed: takes the name of a function that asks the data; says whether it is answered.
        is_number: says whether a size is a number of experts, and not of tokens.
    """

    def __init__(self, allowed: Callable[[str], bool], is_number: Callable[[Any], bool]) -> None:
        super().__init__()
        self.allowed, self.is_number = allowed, is_number

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__":  # an attribute of a tensor, read very often
            return function(*args, **kwargs)
        if any(isinstance(x, _Places) for x in pytree.tree_leaves((args, kwargs))):
            return _on_places(function, args, kwargs)
        if name in ("__getitem__", "__setitem__"):
            return self._indexed(function, args)
        if name in _ASKS and len(args) == 1 and args[0].dim() in (1, 2) and self.allowed(name):
            return self._places(args[0], name == "where" or bool(kwargs.get("as_tuple")))
        if name == _BRANCH and args[0].dtype is torch.bool and self.allowed(name):
            return True
        return function(*args, **kwargs)

    def _indexed(self, function: Any, args: Sequence[Any]) -> Any:
        """Compute `x[index]` or `x[index] = rows`; the index may be the number of an expert or a mask of tokens."""
        index = args[1]
        if isinstance(index, _Number) and index.rank == 1:
            return function(args[0], slice(int(index), int(index) + 1), *args[2:])
        rows = args[2] if len(args) > 2 else args[0]
        by_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() == 1
        if by_mask and isinstance(rows, torch.Tensor) and rows.dim() > 0 and self.allowed(function.__name__):
            return _on_places(function, (args[0], _Places(index, 0), *args[2:]), {})
        return function(*args)

    def _places(self, mask: torch.Tensor, by_dim: bool) -> Any:
        """Return what stands for the places where a mask is true. Raises CaptureError for a matrix of places."""
        if by_dim:
            return tuple(_Places(mask, dim) for dim in range(mask.dim()))
        if mask.dim() == 1:
            count = mask.shape[0]
            return _Hits(_Number(k, 1) for k in range(count)) if self.is_number(count) else _Places(mask, 0, True)
        raise CaptureError(f"nonzero() of a matrix has a size that depends on the data; {_ADVICE}")


@dataclass
class _Input:
    """The arguments of a module call: shapes for tensors, other values as they are."""

    args: Any
    kwargs: Any


@dataclass
class ExpertLoops:
    """The loops over experts of one model, over all traces of one capture.

    Attributes:
        notes: sentences about the modules whose experts compute every token.
    """

    model: nn.Module
    notes: list[str] = field(default_factory=list)
    _proved: set[type] = field(default_factory=set)
    _branches: set[type] = field(default_factory=set)  # classes that ask the data something else
    _met: list[tuple[nn.Module, str]] = field(default_factory=list)
    _given: dict[int, _Input] = field(default_factory=dict)
    _parents: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.model.modules():
            for child in module.children():
                self._parents.setdefault(id(child), module)

    @contextmanager
    def active(self) -> Iterator[Callable[[], AbstractContextManager[object]]]:
        """Trace loops of proved classes; meeting another one ends the trace.

        Yields:
            what makes the context of the model's forward.
        """
        loops = [m for m in self.model.modules() if m is not self.model and _may_loop(m)]
        if not loops:
            yield nullcontext
            return
        around = {id(m): m for loop in loops for m in self._up(loop)}
        handles = [m.register_forward_pre_hook(self._remember, with_kwargs=True) for m in around.values()]
        known, looping = _by_dict(self.model), {id(m) for m in loops}

        def allowed(name: str) -> bool:
            module = _running(known)
            if module is None or id(module) not in looping or type(module) in self._branches:
                return False
            if type(module) not in self._proved:
                self._met.append((module, name))
                raise _Unproved(f"{type(module).__name__} asks which tokens an expert has")
            return True

        try:
            yield partial(_Dense, allowed, lambda size: isinstance(size, int))
        finally:
            for handle in handles:
                handle.remove()

    def again(self) -> bool:
        """Compare the modules that the last trace met. Return True if there were any; the next trace has their loops.

        Raises:
            CaptureError: for a module that computes something else if its experts compute every token.
        """
        met, self._met = self._met, []
        for module, asked in met:
            why, name = self._difference(module), type(module).__name__
            if why and asked == _BRANCH:
                self._branches.add(type(module))
                continue
            if why:
                raise CaptureError(
                    f"{name} loops over the experts that were hit, or over the samples, so sizes depend on the data, "
                    f"and {why}; {_ADVICE}; of samples, compute with all tokens and a mask"
                )
            self._proved.add(type(module))
            self.notes.append(dense_note(name, "are in a loop over those that were hit"))
        return bool(met)

    def _up(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and those around it, from the inside to the outside, but for the whole model."""
        at: nn.Module | None = module
        while at is not None and at is not self.model:
            yield at
            at = self._parents.get(id(at))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._given[id(module)] = _Input(*pytree.tree_map(_plain, (args, kwargs)))

    def _difference(self, module: nn.Module) -> str:
        """Return why a module cannot be shown to compute the same with all tokens; empty if it does."""
        for around in self._up(module):
            given = self._given.get(id(around))
            leaves = pytree.tree_leaves((given.args, given.kwargs)) if given is not None else [None]
            if given is None or not all(_is_plain(x) for x in leaves):
                continue
            if any(isinstance(x, _Shape) and not x.dtype.is_floating_point for x in leaves):
                continue  # random whole numbers would be no choice of experts
            return _compared(around, type(module), given)
        return "no module around it takes tensors of floating numbers alone, with which it could be compared"


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor; sizes are numbers or symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


def _is_plain(x: Any) -> bool:
    return isinstance(x, (bool, int, float, str, type(None), _Shape))


def _plain(x: Any) -> Any:
    """Return the shape of a tensor; any other value itself."""
    return _Shape(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _size(size: Any, primes: Sequence[int]) -> int:
    """Return a size with a prime number for every symbol."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    names = sorted(expr.free_symbols, key=str)
    return int(expr.subs(dict(zip(names, primes, strict=False))))


def _forward_of(module: nn.Module) -> Any:
    found = inspect.unwrap(type(module).forward)
    return found if hasattr(found, "__code__") else nn.Module.__repr__


def _may_loop(module: nn.Module) -> bool:
    """Return True for a module that holds others in a list, or whose forward asks for places."""
    lists = any(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in (module, *module.children()))
    return lists or bool(_ASKS & set(_forward_of(module).__code__.co_names))


def _by_dict(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules by their dicts: a trace may see a stand-in for a module, with the same dict."""
    return {id(vars(m)): m for m in model.modules()}


def _running(known: Mapping[int, nn.Module]) -> nn.Module | None:
    """Return the module whose forward is running innermost."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module) and id(vars(found)) in known:
            return known[id(vars(found))]
        frame = frame.f_back
    return None


def _compared(module: nn.Module, loop: type, given: _Input) -> str:
    """Return how results or gradients differ if all experts compute all tokens, on random numbers; empty if equal."""
    state = {n: t for pairs in (module.named_parameters(), module.named_buffers()) for n, t in pairs}
    if sum(t.numel() for t in state.values()) > _MOST_ELEMENTS:
        return f"{type(module).__name__} has more than {_MOST_ELEMENTS:,} elements, too many to compare it here"
    generator = torch.Generator().manual_seed(0)
    known = {size for t in state.values() for size in t.shape}
    primes = [p for p in _PRIMES if not any(size % p == 0 for size in known)]
    values = {n: _random(t.shape, t.dtype, generator).requires_grad_(t.is_floating_point()) for n, t in state.items()}

    def tensor(x: Any) -> Any:
        return _random([_size(d, primes) for d in x.shape], x.dtype, generator, 3.0) if isinstance(x, _Shape) else x

    for equal in (False, True):  # with all tokens equal, most experts have none
        inputs = pytree.tree_map(tensor, (given.args, given.kwargs))
        inputs = pytree.tree_map(_all_equal, inputs) if equal else inputs
        sides = []
        for dense in (None, loop):
            try:
                sides.append(_results(module, dense, values, inputs, primes))
            except Exception as exc:  # of any type: the module is the user's
                return f"{type(module).__name__} does not run on random numbers ({type(exc).__name__}: {exc})"
        if not all(
            a.shape == b.shape and torch.allclose(a, b, _RELATIVE, _ABSOLUTE) for a, b in zip(*sides, strict=True)
        ):
            return "it computes something else if every expert computes every token"
    return ""


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Return random numbers in float64 whose sums over the last dim are near `scale`; zeros of other dtypes."""
    if not dtype.is_floating_point:
        return torch.zeros(tuple(shape), dtype=dtype)
    scale *= max(shape[-1], 1) ** -0.5 if len(shape) > 1 else 1.0
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator) * scale


def _all_equal(x: Any) -> Any:
    """Return a tensor whose rows are all its first row."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return x
    return x.flatten(0, -2)[:1].expand(x.shape[:-1].numel(), -1).reshape(x.shape)


def _results(
    module: nn.Module, loop: type | None, values: Mapping[str, torch.Tensor], inputs: Any, primes: Sequence[int]
) -> list[torch.Tensor]:
    """Return the results of a module and the gradients of its parameters.

    Args:
        loop: the class whose experts compute every token, if any.
    """
    copies = {n: v.detach().clone().requires_grad_(v.requires_grad) for n, v in values.items()}
    args, kwargs = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
    known = _by_dict(module)
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        if loop is not None:
            stack.enter_context(
                _Dense(
                    lambda name: type(_running(known)) is loop,
                    lambda size: not any(size % prime == 0 for prime in primes),
                )
            )
        torch.default_generator.manual_seed(0)
        out = torch.func.functional_call(module, copies, args, kwargs)
    results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    trained = [v for v in copies.values() if v.requires_grad]
    weighed = [(x * torch.arange(x.numel()).reshape(x.shape).sin()).sum() for x in results if x.requires_grad]
    gradients = torch.autograd.grad(weighed, trained, allow_unused=True) if weighed else [None] * len(trained)
    return [*results, *(torch.zeros_like(v) if g is None else g for v, g in zip(trained, gradients, strict=True))]
