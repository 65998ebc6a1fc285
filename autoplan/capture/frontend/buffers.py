"""All tensors of a model that are not parameters: registered buffers, and tensors that are plain attributes.

And what a forward changes in place in its modules: lists, dicts, sets and deques, and plain objects that they hold.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_GONE = object()
_VALUES = (torch.Tensor, bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_INTERNAL = frozenset(nn.Module().__dict__)
_CONTAINERS: tuple[Any, ...] = (list, dict, set, deque)
# what has a __dict__ and is no object whose attributes are a state
_NOT_PLAIN = (*_CONTAINERS, nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes, by path: `self.freqs = torch.outer(...)`."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }


def all_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield registered buffers, then tensors that are plain attributes, as `nn.Module.named_buffers` does."""
    yield from model.named_buffers(remove_duplicate=remove_duplicate)
    yield from plain_tensors(model).items()


@contextmanager
def buffers_copied(model: nn.Module) -> Iterator[None]:
    """Give the model copies of its buffers and plain tensors, shared as they are, which a forward may change in place.

    A fake tensor has no values to keep.
    """
    copies: dict[int, torch.Tensor] = {}
    given = list[tuple[dict[str, Any], str, torch.Tensor]]()
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, value in list(table.items()):
                plain = isinstance(value, torch.Tensor) and not isinstance(value, (nn.Parameter, FakeTensor))
                if plain and value.is_leaf:
                    if id(value) not in copies:
                        copies[id(value)] = value.detach().clone()
                    table[name] = copies[id(value)]
                    given.append((table, name, value))
    try:
        yield
    finally:
        for table, name, value in given:
            table[name] = value


def held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all buffers, and the tensors inside containers and objects that modules hold, under all names.

    Such as `cache['t']`, `memory[0]`, `state.h`.
    """
    found = dict(all_buffers(model, remove_duplicate=False))
    for _, path, held in _containers(model):
        for name, value in _entries(held):
            if isinstance(value, torch.Tensor):
                found[path + name] = value
    return found


@dataclass(frozen=True)
class HeldTable:
    """What a module has under names: its attributes, those of an object that it holds, or a dict, list or deque.

    Attributes:
        path: of the holder, empty for the model.
        kind: equal for tables at one place of modules of one class.
        entries: the live table.
        named: the keys are names of attributes.
    """

    path: str
    kind: object
    entries: Any
    named: bool

    def values(self) -> dict[Any, Any]:
        """Return a copy of the table, of a list by index."""
        return dict(self.entries if isinstance(self.entries, dict) else enumerate(self.entries))

    def name_of(self, key: Any) -> str:
        """Return the path of an entry."""
        return ".".join(filter(None, (self.path, key))) if self.named else f"{self.path}[{key!r}]"


def tables(model: nn.Module) -> Iterator[HeldTable]:
    """Yield the attributes of the modules, and once each the containers and plain objects that they hold."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        yield HeldTable(path, type(module), vars(module), named=True)
    for prefix, path, held in _containers(model):
        if not isinstance(held, _CONTAINERS):
            yield HeldTable(path, type(held), vars(held), named=True)
        elif not isinstance(held, set):
            yield HeldTable(path, (type(modules[prefix]), path[len(prefix) :]), held, named=False)


def _containers(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield every container and plain object that modules hold as attributes, once: path of the module, path, itself.

    Containers are followed into containers; of objects that modules hold, the containers are.
    """
    seen = set[int]()
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        waiting = [(start + n, x, True) for n, x in vars(module).items() if n not in _INTERNAL]
        while waiting:
            path, held, direct = waiting.pop()
            if id(held) not in seen and (isinstance(held, _CONTAINERS) or (direct and _is_plain(held))):
                seen.add(id(held))
                yield prefix, path, held
                waiting += [(path + name, x, False) for name, x in _entries(held)]


def _entries(held: Any) -> list[tuple[str, Any]]:
    if isinstance(held, dict):
        return [(f"[{key!r}]", x) for key, x in list(held.items())]
    if isinstance(held, (list, deque)):
        return [(f"[{i}]", x) for i, x in enumerate(held)]
    if isinstance(held, set):
        return [("", x) for x in held]
    return [(f".{name}", x) for name, x in vars(held).items()]


def _is_plain(value: Any) -> bool:
    """Return True for an object of Python with attributes of its own, such as a config or a holder of a state."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _NOT_PLAIN)


@contextmanager
def attributes_restored(model: nn.Module, every: bool = False) -> Iterator[None]:
    """Restore on exit the tensors and numbers that a forward puts into its modules, such as a state.

    Those of a trace are fake tensors and symbols.

    Lists, dicts, sets and deques get back all their contents.

    Args:
        every: also what is neither, but may hold some.
    """
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    contents = [(held, _contents(held)) for _, _, held in _containers(model)]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            _restore(vars(module), attributes, every)
            _restore(module._buffers, buffers, every)
        for held, then in contents:
            if not isinstance(held, _CONTAINERS):
                _restore(vars(held), dict(then), every)
            elif not _identical(_contents(held), then):
                _refill(held, then)


def _contents(held: Any) -> list[Any]:
    """Return the entries of a container, or the attributes of an object; of dicts and objects with their names."""
    if isinstance(held, _CONTAINERS):
        return list(held.items() if isinstance(held, dict) else held)
    return list(vars(held).items())


def _identical(now: list[Any], then: list[Any]) -> bool:
    """Return True if both have the same entries, by identity."""
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in pairs
    )


def _refill(held: Any, then: list[Any]) -> None:
    """Give a container back what it held."""
    held.clear()
    if isinstance(held, (dict, set)):
        held.update(then)
    else:
        held.extend(then)


def _restore(now: dict[str, Any], then: dict[str, Any], every: bool) -> None:
    """Make the tensors and numbers of a table, or all its values, what they were; take out those it did not have."""
    for name in dict.fromkeys((*now, *then)):
        value, before = now.get(name, _GONE), then.get(name, _GONE)
        if value is before or not (every or any(isinstance(x, _VALUES) for x in (value, before))):
            continue
        if before is _GONE:
            del now[name]
        else:
            now[name] = before
