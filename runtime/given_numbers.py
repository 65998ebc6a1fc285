"""Numbers and tensors that a forward or a loss function reads: a program has those of its capture.

`self.temperature`, the rate of a dropout, a weight of the loss in a closure or a global: torch.export puts their values
into the graph, and a program copies tensors. Whoever changes one later (an annealed weight) would train on with the old
value, so a step refuses it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

_MOST_ENTRIES = 64  # of a list or dict of numbers
# modes that training code turns on and off: pm.train(), pm.eval(); recompute is the plan's
_MODES = frozenset(("training", "gradient_checkpointing"))
_NUMBERS = (bool, int, float, complex)
_NOT_PLAIN = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_Read = Callable[[], Any]
_Known = dict[tuple[type, str], frozenset[str]]  # the attributes that a method of a class reads
_MOST_ELEMENTS = 65_536  # of a tensor whose values are kept
# statistics that a norm changes itself, when somebody runs the module
_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
_GONE = object()
_OF_LOSS = ", which loss_fn reads,"


class GivenNumbers:
    """The numbers and tensors that a module and its loss function read, with their present values.

    Counted are ints, floats, bools and complex numbers, alone or in a list, tuple or dict: attributes of modules that
    their forward names, or a method, property or function of the same file that it names, and that none of these sets;
    variables of the loss function's closure and globals that it does not set itself; attributes of the object that it
    is a method of; and floats of the plain objects in all of these (a config, a config in a config), at any depth:
    attributes that the forward or the loss function names, and entries of lists, tuples and dicts. In all of these
    places tensors count, too, of at most 65,536 elements (a clone of each is kept), and the buffers of modules, but not
    the running statistics of norms. Not seen is what a function of another file reads, or a method or property of such
    an object. No module is kept alive.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._entries: list[tuple[str, _Read, Any]] = []
        self._tensors: list[tuple[str, _Read, _KeptTensor]] = []
        names = _Known()
        self._add_modules("", type(model).__name__, model, names, in_state=True)
        if loss_fn is not None:
            self._add_loss(loss_fn, names)

    def texts(self) -> dict[str, str]:
        """Return the numbers by name, as text."""
        return {name: repr(was) for name, _, was in self._entries}

    def changed(self) -> str | None:
        """Return what is another number now than at first, as an error for the user; None if nothing is."""
        for name, read, was in self._entries:
            value = read()
            if value is was or value is _GONE or (now := _frozen(value)) == was or (now != now and was != was):
                continue
            return (
                f"{name} was {was!r} when the program was made and is {'no number' if now is None else repr(now)} now, "
                f"but the program has {was!r}: give what changes as an input (a tensor with one value per sample), or "
                "set it back"
            )
        return next((_changed_tensor(name) for name, read, kept in self._tensors if kept.changed(read())), None)

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Record that the program was given other values, as the module may be now or later.

        Args:
            values: persistent buffers by their names in the state of the module.
        """
        for _, read, kept in self._tensors:
            if isinstance(value := values.get(kept.in_state), torch.Tensor):
                kept.loaded(read(), value)

    def _add(self, name: str, read: _Read) -> None:
        value = read()
        if _is_constant(value) and value.numel() <= _MOST_ELEMENTS:
            self._tensors.append((name, read, _KeptTensor(value)))
            return
        frozen = _frozen(value)
        if frozen is not None:
            self._entries.append((name, read, frozen))

    def _add_modules(self, prefix: str, alone: str, model: nn.Module, names: _Known, *, in_state: bool = False) -> None:
        for name, module in model.named_modules():
            path = (f"{name}." if name else "") if in_state else None
            self._add_attributes(f"{prefix}{name or alone}.", module, "forward", names, path)

    def _add_attributes(self, where: str, holder: Any, method: str, names: _Known, path: str | None = None) -> None:
        """Add the numbers that a method of a holder reads of it, and floats in the objects that it reads of it.

        `path`: what precedes the names of its persistent buffers in the state of the program; None: they are not there.
        """
        kind = type(holder), method
        if kind not in names:
            names[kind] = _attributes_read(*kind)
        attributes, reference = _attributes(holder), _reference(holder)
        if reference is None:
            return
        for name in sorted(names[kind] & attributes.keys()):
            held = attributes[name]
            self._add(where + name, functools.partial(_value, reference, _Part(name)))
            self._add_inside(where + name, "", reference, (_Part(name),), held, names[kind])
        if isinstance(holder, nn.Module):
            for name in sorted((names[kind] & holder._buffers.keys()) - _STATISTICS):
                value = holder._buffers[name]
                if _is_constant(value) and value.numel() <= _MOST_ELEMENTS:
                    held_there = path is not None and name not in holder._non_persistent_buffers_set
                    kept = _KeptTensor(value, f"{path}{name}" if held_there else "")
                    self._tensors.append((where + name, functools.partial(_buffer, reference, name), kept))

    def _add_inside(
        self, where: str, after: str, root: _Read, path: tuple[_Part, ...], held: Any, read: Set[str]
    ) -> None:
        """Add the floats in a plain object that is at `path` from a root, and in the objects in it, each object once.

        Args:
            where, after: its name, and what follows the name of each number.
            read: names of the attributes that count.
        """
        waiting = [(where, path, held)]
        seen, whole = set[int](), _frozen(held) is not None  # then its own numbers are added already
        while waiting:
            at, path, held = waiting.pop()
            if id(held) in seen or isinstance(held, _NOT_PLAIN):
                continue
            seen.add(id(held))
            for part, value in _parts(held, read):
                to = f"{at}{part}"
                if (isinstance(value, float) and not whole) or isinstance(value, torch.Tensor):
                    self._add(to + after, functools.partial(_value, root, *path, part))
                elif not isinstance(value, _NUMBERS):
                    waiting.append((to, (*path, part), value))
            whole = False

    def _add_loss(self, loss_fn: Any, names: _Known) -> None:
        given = loss_fn
        while isinstance(given, functools.partial):
            for name, value in (*((f"argument {i}", x) for i, x in enumerate(given.args)), *given.keywords.items()):
                if isinstance(value, torch.Tensor):
                    self._add(name + _OF_LOSS, functools.partial(_itself, value))
            given = given.func
        if isinstance(given, nn.Module):
            self._add_modules("loss_fn.", "self", given, names)
        elif isinstance(given, types.MethodType):
            self._add_attributes("loss_fn: self.", given.__self__, given.__func__.__name__, names)
            self._add_functions(given.__func__)
        elif isinstance(given, types.FunctionType):
            self._add_functions(given)
        else:
            self._add_attributes("loss_fn.", given, "__call__", names)

    def _add_functions(self, function: Any) -> None:
        """Add what a function, and those of the same file that it names, read of their closures and globals."""
        seen = set[str]()
        for each in _reached(function, None):
            reads, writes = _variables(each.__code__)
            of_objects, set_there = _attributes_of(each.__code__)
            cells = dict(zip(each.__code__.co_freevars, each.__closure__ or (), strict=True))
            found = {name: functools.partial(_cell_value, cells[name]) for name in sorted(cells.keys() - writes)}
            for name in sorted((reads & each.__globals__.keys()) - writes - seen):
                seen.add(name)
                found[name] = functools.partial(each.__globals__.get, name, _GONE)
            for name, read in found.items():
                self._add(name + _OF_LOSS, read)
                held = read()
                root = _reference(held) or read  # an object may hold a module beside numbers
                self._add_inside(name, _OF_LOSS, root, (), held, of_objects - set_there)


class _KeptTensor:
    """A tensor and a clone of its values.

    Its values are compared if it is another tensor, or if torch counted a change of it: a step that finds neither waits
    for no device. Of a tensor that somebody cast or moved, or deleted, nothing is known.

    Attributes:
        in_state: the name of a persistent buffer in the state of the program; "" for other tensors.
    """

    def __init__(self, tensor: torch.Tensor, in_state: str = "") -> None:
        self.in_state = in_state
        self._of_load: torch.Tensor | None = None  # what the program was given since
        self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version
        self._values = tensor.detach().clone()

    def loaded(self, now: Any, value: torch.Tensor) -> None:
        """Record that the program was given `value` while the module had `now`: both may be there from now on."""
        if _is_constant(now):
            self._keep(now)
        self._of_load = value.detach().to(self._values, copy=True)

    def changed(self, now: Any) -> bool:
        """Return True if `now` has other values."""
        if not _is_constant(now):
            return isinstance(now, _NUMBERS)
        was = self._values
        if (now is self._tensor() and now._version == self._version) or (now.dtype, now.device) != (
            was.dtype,
            was.device,
        ):
            return False
        if not any(_same(now, known) for known in (was, self._of_load) if known is not None):
            return True
        self._tensor, self._version = weakref.ref(now), now._version
        return False


def _same(now: torch.Tensor, known: torch.Tensor) -> bool:
    return now.shape == known.shape and bool(((now == known) | ((now != now) & (known != known))).all())


def _is_constant(value: Any) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with values in memory that nothing trains."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
    return plain and not value.requires_grad and not value.is_inference()


def _changed_tensor(name: str) -> str:
    return (
        f"{name} was changed after the program was made or loaded, which has other values: give what changes as an "
        "input (a tensor with one value per sample), pass a persistent buffer of the model to pm.load_state_dict, or "
        "set it back"
    )


def _itself(value: Any) -> Any:
    return value


def _buffer(reference: _Read, name: str) -> Any:
    holder = reference()
    return _GONE if holder is None else holder._buffers.get(name, _GONE)


def _attributes(holder: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; none where it has no ordinary dict of them."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _reference(holder: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(holder)
    except TypeError:
        return None


class _Part(NamedTuple):
    """A part of an object: an attribute, or an entry of a list, tuple or dict."""

    key: Any
    is_entry: bool = False

    def __str__(self) -> str:
        return f"[{self.key!r}]" if self.is_entry else f".{self.key}"


def _parts(held: Any, read: Set[str]) -> Iterator[tuple[_Part, Any]]:
    """Yield the entries of a list, tuple or dict, if they are not too many; of another object the attributes `read`."""
    if isinstance(held, (list, tuple, dict)):
        entries = dict.items(held) if isinstance(held, dict) else enumerate(held)
        if len(held) <= _MOST_ENTRIES:
            yield from ((_Part(key, True), value) for key, value in entries)
        return
    attributes = _attributes(held)
    for name in sorted(read & attributes.keys()):
        yield _Part(name), attributes[name]


def _value(root: _Read, *path: _Part) -> Any:
    """Return what is at a path from an object, `_GONE` where there is nothing any more."""
    at = root()
    for part in path:
        if not part.is_entry:
            at = _attributes(at).get(part.key, _GONE)
        elif isinstance(at, dict):
            at = dict.get(at, part.key, _GONE)
        else:
            at = at[part.key] if isinstance(at, (list, tuple)) and part.key < len(at) else _GONE
    return at


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # deleted
        return _GONE


def _frozen(value: Any) -> Any:
    """Return a number, or the numbers in a container, in a form that does not change; None for anything else."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (list, tuple)) and 0 < len(value) <= _MOST_ENTRIES:
        return tuple(value) if all(isinstance(x, _NUMBERS) for x in value) else None
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        numbers = tuple((key, x) for key, x in value.items() if isinstance(x, _NUMBERS))
        return numbers or None
    return None


def _attributes_read(kind: type, method: str) -> frozenset[str]:
    """Return the names of attributes that a method of a class reads, less those that it sets: a counter, a cache."""
    reads, writes = set[str](), set[str]()
    for function in _methods(kind, method):
        for each in _reached(function, kind):
            found = _attributes_of(each.__code__)
            reads |= found[0]
            writes |= found[1]
    return frozenset(reads - writes) - _MODES


def _attributes_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of attributes that code reads, and of those that it sets, of whatever object."""
    reads, writes, steps = set[str](), set[str](), list(_steps(code))
    by_name = any(step.argval in ("setattr", "register_buffer") for step in steps if step.opname.startswith("LOAD"))
    for step in steps:
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            writes.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            reads.add(step.argval)
        elif by_name and isinstance(step.argval, str) and step.opname == "LOAD_CONST":
            writes.add(step.argval)  # setattr(self, f"{kind}_length", n)
    return reads, writes


def _methods(kind: type, name: str) -> list[types.FunctionType]:
    """Return the functions of a name in a class and its bases: methods, getters of properties."""
    found = []
    for base in kind.__mro__:
        if base not in (nn.Module, object) and name in vars(base):
            found += _functions(vars(base)[name])
    return found


def _functions(member: Any) -> list[types.FunctionType]:
    """Return the Python functions that a member of a class, or a decorated function, stands for."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if not isinstance(member, types.FunctionType):
        return []
    inner = inspect.getattr_static(member, "__wrapped__", None)
    return [member, *_functions(inner)]


def _reached(function: types.FunctionType, kind: type | None) -> Iterator[types.FunctionType]:
    """Yield a function, the methods of `kind` that it names, and the functions of the same file that it names."""
    waiting, seen = _functions(function), set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for step in _steps(each.__code__):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and kind is not None:
                waiting += _methods(kind, step.argval)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                waiting += _of_file(each.__globals__.get(step.argval), each)
        for cell in each.__closure__ or ():
            waiting += _of_file(_cell_value(cell), each)


def _of_file(value: Any, function: types.FunctionType) -> list[types.FunctionType]:
    return [f for f in _functions(value) if f.__globals__ is function.__globals__]


def _variables(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the globals that code reads, and the globals and variables of closures that it sets."""
    reads, writes = set[str](), set[str]()
    for step in _steps(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"):
            writes.add(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads.add(step.argval)
    return reads, writes


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code and of the functions inside of it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant)
