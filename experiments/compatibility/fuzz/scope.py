"""Statements of a random program, tried as they are drawn: what PyTorch does not compute is left out.

Every value is known by its tensors on two batches of other sizes. So a size that is equal on both is a number, and all
others are written as sizes of the tensor, as a model that takes any batch must.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH, VOCAB = 8, 16
CAPTURED, RUN = (2, 6), (4, 8)  # samples and tokens of the example that is captured, and of the batch that is run
_MOST_ELEMENTS, _MOST_DIMS, _LARGEST = 20_000, 5, 1e3
_T = TypeVar("_T")
Draw = Callable[[st.SearchStrategy[_T]], _T]


class Unfit(Exception):
    """No value of the program fits an operation. Never leaves this package."""


def batch_of(size: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return every input that a program may take, for [samples, tokens]."""
    b, s = size
    generator = torch.Generator().manual_seed(seed)
    wide = {"generator": generator, "dtype": torch.float64}
    return {
        "ids": torch.randint(VOCAB, (b, s), generator=generator),
        "x": torch.randn(b, s, WIDTH, **wide),
        "mask": torch.rand(b, s, generator=generator) < 0.7,
        "u": torch.rand(b, **wide) + 0.5,
        "labels": torch.randint(VOCAB, (b, s), generator=generator),
    }


class Scope:
    """The body of a forward: its values so far, its lines, and the lines of the `__init__` that they need.

    Args:
        values: the arguments of the forward, by name, on both batches.
        classes: what else the lines name.
    """

    def __init__(
        self, draw: Draw[Any], values: Mapping[str, Sequence[torch.Tensor]], classes: Mapping[str, Any] | None = None
    ) -> None:
        self.draw, self.module = draw, nn.Module()
        self.names = list(values)
        self.arguments = tuple(values)
        self.lines: list[str] = []
        self.init: list[str] = []
        plain = {"torch": torch, "F": F, "nn": nn, **(classes or {})}
        self.spaces = [{**plain, "self": self.module, **{n: v[i] for n, v in values.items()}} for i in range(2)]
        self.count = 0

    def on_both(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors of a value."""
        return self.spaces[0][name], self.spaces[1][name]

    def fresh(self) -> str:
        """Return a name that is not taken."""
        self.count += 1
        return f"v{self.count}"

    def add(self, lines: Sequence[str], init: Sequence[str], made: Sequence[str]) -> bool:
        """Run lines and keep them, with the values that they make. False if PyTorch or the limits refuse them."""
        before = [dict(space) for space in self.spaces]
        text = "\n".join(lines)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(len(self.init))
                for line in init:
                    exec(line, self.spaces[0])
                self.module.double()
                for space in self.spaces:
                    exec(text, space)
            ok = all(usable(*self.on_both(name)) for name in made)
        except Exception:  # PyTorch may raise anything for what does not go together
            ok = False
        if not ok:
            for space, old in zip(self.spaces, before, strict=True):
                space.clear()
                space.update(old)
            return False
        self.lines += lines
        self.init += init
        self.names += [name for name in made if name not in self.names]
        return True

    def text(self, name: str, result: str) -> str:
        """Return the source of the module."""
        init = ["super().__init__()", *self.init]
        body = [*self.lines, f"return {result}"]
        return (
            f"class {name}(nn.Module):\n    def __init__(self):\n"
            + textwrap.indent("\n".join(init), " " * 8)
            + f"\n\n    def forward(self, {', '.join(self.arguments)}):\n"
            + textwrap.indent("\n".join(body), " " * 8)
            + "\n"
        )


def usable(first: object, second: object) -> bool:
    """Return True for a small tensor of numbers that float64 holds well, of the same kind on both batches."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if first.dim() != second.dim() or first.dtype is not second.dtype or first.dim() > _MOST_DIMS:
        return False
    return all(_usable(x) for x in (first, second))


def _usable(x: torch.Tensor) -> bool:
    if not 0 < x.numel() <= _MOST_ELEMENTS or x.is_complex():
        return False
    if not x.is_floating_point():
        return True
    x = x.detach()
    if not bool(x.isfinite().all()) or float(x.abs().max()) > _LARGEST:
        return False
    # sums of other floats than float64 depend on their order, unless they are whole numbers
    return x.dtype is torch.float64 or bool((x == x.round()).all())


class Pick:
    """What the text of a statement is made of: values, numbers, and parameters made for it."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.draw = scope, scope.draw
        self.init: list[str] = []

    def one(self, options: Sequence[_T]) -> _T:
        """Return one of the options; the first is the simplest."""
        if not options:
            raise Unfit
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        """Return True or False."""
        return bool(self.draw(st.booleans()))

    def whole(self, low: int, high: int) -> int:
        """Return a whole number; both ends are possible."""
        if low > high:
            raise Unfit
        return int(self.draw(st.integers(low, high)))

    def number(self) -> float | int:
        """Return a number as models have them."""
        return self.one((2, 0.5, -1.5, 3, 0.1, -1))

    def value(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """Return the name of a value, the latest first."""
        names = [n for n in self.scope.names[::-1] if fits(self.scope.on_both(n)[0])]
        return self.one(names)

    def f(self, rank: int = 1, most: int = 9) -> str:
        """Return a float64 value with at least `rank` dims."""
        return self.value(lambda x: x.dtype is torch.float64 and rank <= x.dim() <= most)

    def i(self, rank: int = 1) -> str:
        """Return a value of whole numbers."""
        return self.value(lambda x: not x.is_floating_point() and x.dtype is not torch.bool and x.dim() >= rank)

    def m(self, rank: int = 1) -> str:
        """Return a value of True and False."""
        return self.value(lambda x: x.dtype is torch.bool and x.dim() >= rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value on the first batch."""
        return tuple(self.scope.on_both(name)[0].shape)

    def rank(self, name: str) -> int:
        """Return the number of dims of a value."""
        return len(self.shape(name))

    def dim(self, name: str) -> int:
        """Return a dim of a value: the last one, then the others, also counted from the end."""
        rank = self.rank(name)
        if not rank:
            raise Unfit
        return self.one((-1, *range(rank - 1, -1, -1), *range(-2, -rank - 1, -1)))

    def dims(self, name: str) -> tuple[int, ...]:
        """Return one or several dims of a value."""
        rank = self.rank(name)
        if not rank:
            raise Unfit
        found = self.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
        return tuple(d - rank if self.flag() else d for d in found)

    def fixed(self, name: str, dim: int) -> int:
        """Return the size of a dim that is the same for every batch."""
        first, second = (x.shape[dim] for x in self.scope.on_both(name))
        if first != second:
            raise Unfit
        return int(first)

    def size(self, name: str, dim: int) -> str:
        """Return the text of the size of a dim."""
        first, second = (x.shape[dim] for x in self.scope.on_both(name))
        return str(first) if first == second else f"{name}.shape[{dim % self.rank(name)}]"

    def with_fixed(self, kind: Callable[[], str] | None = None) -> tuple[str, int]:
        """Return a value and one of its dims of fixed size."""
        name = (kind or self.f)()
        rank = self.rank(name)
        sizes = [self.scope.on_both(name)[k].shape for k in range(2)]
        return name, self.one([d for d in range(rank - 1, -1, -1) if sizes[0][d] == sizes[1][d]])

    def partner(self, name: str, same: bool = False) -> str:
        """Return a float64 value that goes together with another by broadcasting, or has its shape."""
        mine = self.scope.on_both(name)

        def fits(other: str) -> bool:
            theirs = self.scope.on_both(other)
            if theirs[0].dtype is not torch.float64:
                return False
            try:
                shapes = [torch.broadcast_shapes(a.shape, b.shape) for a, b in zip(mine, theirs, strict=True)]
            except RuntimeError:
                return False
            return not same or shapes == [x.shape for x in mine] == [x.shape for x in theirs]

        return self.one([n for n in self.scope.names[::-1] if fits(n)])

    def condition(self, name: str) -> str:
        """Return a mask that can be broadcast to a value: one of the program, or a comparison."""
        shapes = [x.shape for x in self.scope.on_both(name)]

        def fits(other: str) -> bool:
            masks = self.scope.on_both(other)
            if masks[0].dtype is not torch.bool:
                return False
            try:
                return all(torch.broadcast_shapes(s, m.shape) == s for s, m in zip(shapes, masks, strict=True))
            except RuntimeError:
                return False

        found = [n for n in self.scope.names[::-1] if fits(n)]
        return self.one([f"({name} > 0.1)", *found])

    def _made(self, letter: str, text: str) -> str:
        name = f"{letter}{len(self.scope.init) + len(self.init)}"
        self.init.append(text.format(name=name))
        return f"self.{name}"

    def param(self, *shape: int) -> str:
        """Return a new parameter."""
        scale = "" if len(shape) < 2 else f" / {max(1, shape[-1]) ** 0.5:.2g}"
        return self._made("w", f"self.{{name}} = nn.Parameter(torch.randn({', '.join(map(str, shape))}){scale})")

    def module(self, text: str) -> str:
        """Return a new module."""
        return self._made("m", f"self.{{name}} = {text}")

    def buffer(self, text: str, wide: bool = True) -> str:
        """Return a new buffer, or a tensor that is a plain attribute. `wide`: of floats."""
        if self.flag():
            return self._made("t", f"self.{{name}} = {text}{'.double()' if wide else ''}")
        return self.registered(text)

    def registered(self, text: str) -> str:
        """Return a new registered buffer, persistent or not."""
        more = ", persistent=False" if self.flag() else ""
        return self._made("t", f'self.register_buffer("{{name}}", {text}{more})')
