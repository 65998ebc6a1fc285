"""Numbers of Python that a forward or a loss function reads: a program has those of its capture.

`self.temperature`, the rate of a dropout, a weight of the loss in a closure or a global: torch.export puts their values
into the graph. Whoever changes one later (an annealed weight) would train on with the old value, so a step refuses it.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

_MOST_ENTRIES = 64  # of a list or dict of numbers
# they build or print a module; what they read is in no graph
_NO_FORWARD = frozenset(("__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"))
_OWN = frozenset(("training",))  # pm.train() and pm.eval() decide it
_Read = Callable[[], tuple[bool, Any]]


class GivenNumbers:
    """The numbers that a module and its loss function read, with their present values.

    Counted are ints, floats, bools and complex numbers, alone or in a list, tuple or dict: attributes of the modules
    that a method of the module's class names and only its constructor sets; floats of what modules hold (a config; its
    ints and bools are sizes, tokens and modes); variables of the loss function's closure, its globals, attributes of
    the object that it is a method of. What a function of another file reads, and what stands deeper, is not seen. No
    module is kept alive.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._entries: list[tuple[str, _Read, Any]] = []
        for name, module in model.named_modules():
            where = f"{type(module).__name__}.{{}}" if not name else f"{name}.{{}}"
            self._add_attributes(where, module)
        if loss_fn is not None:
            self._add_function(loss_fn)

    def changed(self) -> str | None:
        """Return what is another number now than in the capture, as an error for the user; None if nothing is."""
        for name, read, was in self._entries:
            there, value = read()
            if there and value is not was and (now := _frozen(value)) != was and not (now != now and was != was):
                return (
                    f"{name} was {_shown(was)} when the program was made and is {_shown(now)} now, but the program has "
                    f"{_shown(was)}: give what changes as an input (a tensor with one value per sample), or set it back"
                )
        return None

    def _add(self, name: str, read: _Read) -> None:
        there, value = read()
        frozen = _frozen(value)
        if there and frozen is not None:
            self._entries.append((name, read, frozen))

    def _add_attributes(self, where: str, holder: Any) -> None:
        """Add the numbers of an object that methods of its class read, and of the plain objects that it holds."""
        kind: type = type(holder)
        names = _names_read(kind) - _OWN
        for name in sorted(names & vars(holder).keys()):
            self._add(where.format(name), _attribute(holder, name))
        for name, held in vars(holder).items():
            if not name.startswith("_") and _is_plain(held):
                for inner in sorted(names & vars(held).keys()):
                    if isinstance(vars(held)[inner], float):
                        self._add(where.format(f"{name}.{inner}"), _attribute(held, inner))

    def _add_function(self, function: Any) -> None:
        seen = set[int]()
        waiting = [function]
        while waiting:
            given = waiting.pop()
            given = given.func if isinstance(given, functools.partial) else given
            if id(given) in seen:
                continue
            seen.add(id(given))
            if isinstance(given, nn.Module):
                for name, module in given.named_modules():
                    self._add_attributes(f"loss_fn.{name}.{{}}" if name else "loss_fn.{}", module)
            elif isinstance(given, types.MethodType):
                self._add_attributes("loss_fn: self.{}", given.__self__)
                waiting.append(given.__func__)
            elif isinstance(given, types.FunctionType):
                waiting += self._add_variables(given)
            elif hasattr(given, "__dict__"):  # an object with __call__
                self._add_attributes("loss_fn.{}", given)

    def _add_variables(self, function: types.FunctionType) -> list[types.FunctionType]:
        """Add what a function reads from around it; return the functions of the same file that it names."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            self._add(f"{name}, which loss_fn reads,", _cell(cell))
        around = function.__globals__
        names = sorted(_reads_and_writes(function.__code__)[0] & around.keys())
        for name in names:
            self._add(f"{name}, which loss_fn reads,", _entry(around, name))
        held = [*(read()[1] for read in map(_cell, cells.values())), *(around[name] for name in names)]
        return [f for f in held if isinstance(f, types.FunctionType) and f.__globals__ is around]


def _attribute(holder: Any, name: str) -> _Read:
    reference = weakref.ref(holder)

    def read() -> tuple[bool, Any]:
        alive = reference()
        return (False, None) if alive is None or name not in vars(alive) else (True, vars(alive)[name])

    return read


def _cell(cell: types.CellType) -> _Read:
    def read() -> tuple[bool, Any]:
        try:
            return True, cell.cell_contents
        except ValueError:  # deleted
            return False, None

    return read


def _entry(variables: Mapping[str, Any], name: str) -> _Read:
    return lambda: (name in variables, variables.get(name))


def _is_plain(value: Any) -> bool:
    """Return True for an object with attributes of its own, such as a config; not for modules, classes, functions."""
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return hasattr(value, "__dict__") and type(value).__weakrefoffset__ != 0


def _frozen(value: Any) -> Any:
    """Return a number, or numbers in a container, in a form that does not change; None for anything else."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, (list, tuple)) and 0 < len(value) <= _MOST_ENTRIES:
        return tuple(value) if all(isinstance(x, (bool, int, float, complex)) for x in value) else None
    if isinstance(value, dict) and 0 < len(value) <= _MOST_ENTRIES:
        simple = all(isinstance(x, (bool, int, float, complex)) for x in value.values())
        return tuple(value.items()) if simple else None
    return None


def _shown(value: Any) -> str:
    return "no number" if value is None else repr(value)


@functools.cache
def _names_read(kind: type) -> frozenset[str]:
    """Return the names that methods of a class read, less those that they set: a counter or cache of its own."""
    reads, writes = set[str](), set[str]()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, member in vars(base).items():
            code = getattr(member, "__code__", None)
            if code is None or name in _NO_FORWARD:
                continue
            read, written = _reads_and_writes(code)
            reads |= read
            writes |= written
    return frozenset(reads - writes)


def _reads_and_writes(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of attributes and globals that code, with the functions inside of it, reads and sets."""
    reads, writes = set[str](), set[str]()
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR"):
                writes.add(step.argval)
            elif step.opname.startswith(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_NAME")):
                reads.add(step.argval)
    return reads, writes


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
