"""Whether two modules of one structure have the same hooks inside, so that one of them can stand for the other."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# table of hooks -> the tables with the ids of those that are called in another way
_TABLES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def same_hooks(a: nn.Module, b: nn.Module) -> bool:
    """Return True if the modules inside the two have hooks that do the same; their own hooks do not matter.

    Functions do if they have one code and the same values around it: one function, or one lambda that a loop made for
    every layer. A module inside `a` that a hook holds corresponds to the one at its place in `b`.
    """
    pairs = list(zip(a.modules(), b.modules(), strict=True))
    hooks = [(list(_hooks(m)), list(_hooks(n))) for m, n in pairs[1:]]
    same = _Comparison({id(m): n for m, n in pairs}).same
    return all(len(mine) == len(theirs) and all(map(same, mine, theirs)) for mine, theirs in hooks)


def _hooks(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the hooks of a module with the ways in which they are called."""
    for table, ways in _TABLES.items():
        for key, hook in getattr(module, table).items():
            yield table, *(key in getattr(module, way) for way in ways), hook


@dataclass
class _Comparison:
    """A comparison of hooks. `counterpart`: by the id of a module in one layer, the module of the other."""

    counterpart: Mapping[int, nn.Module]
    _running: set[tuple[int, int]] = field(default_factory=set)  # a function may hold itself

    def same(self, a: Any, b: Any) -> bool:
        """Return True for hooks, or values that they hold, that do the same."""
        if isinstance(a, nn.Module):
            return b is self.counterpart.get(id(a), a)
        if a is b or (id(a), id(b)) in self._running:
            return True
        if type(a) is not type(b):
            return False
        self._running.add((id(a), id(b)))
        try:
            return self._same_inside(a, b)
        finally:
            self._running.discard((id(a), id(b)))

    def _same_inside(self, a: Any, b: Any) -> bool:
        if isinstance(a, types.MethodType):
            return self.same(a.__func__, b.__func__) and self.same(a.__self__, b.__self__)
        if isinstance(a, functools.partial):
            return self.same((a.func, a.args, _items(a.keywords)), (b.func, b.args, _items(b.keywords)))
        if isinstance(a, types.FunctionType):
            around = [(f.__defaults__, _items(f.__kwdefaults__ or {}), _cells(f)) for f in (a, b)]
            return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and self.same(*around)
        if isinstance(a, tuple):
            return len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return bool(a == b)
        if isinstance(a, (torch.Tensor, list, dict, set, type)) or not hasattr(a, "__dict__"):
            return False  # equal ones may be filled with something else
        return self.same(_items(vars(a)), _items(vars(b)))


def _items(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items(), key=lambda item: item[0]))


def _cells(function: types.FunctionType) -> tuple[Any, ...]:
    """Return the values of the variables around a function; of one that has none yet, the cell itself."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(cell)
    return tuple(found)
