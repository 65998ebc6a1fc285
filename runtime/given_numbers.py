"""Numbers and tensors that a forward or a loss function reads: a program has those of its capture.

`self.temperature`, the rate of a dropout, a weight of the loss in a closure or a global: torch.export puts their values
into the graph, and a program copies tensors. Whoever changes one later (an annealed weight) would train on with the old
value, so a step refuses it.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

_MOST_ENTRIES = 64  # of a list or dict of numbers
# modes that training code turns on and off: pm.train(), pm.eval(); recompute is the plan's
_MODES = frozenset(("training", "gradient_checkpointing"))
_NUMBERS = (bool, int, float, complex)
_NOT_PLAIN = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_Read = Callable[[], Any]
_Entry = tuple[str, _Read, Any]
_Known = dict[tuple[type, str], frozenset[str]]  # the attributes that a method of a class reads
_MOST_ELEMENTS = 65_536  # of a tensor whose values are kept
# statistics that a norm changes itself, when somebody runs the module
_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
_GONE = object()
_OF_LOSS, _OF_FORWARD = ", which loss_fn reads,", ", which the forward reads,"
_ALONE = (*_NUMBERS, str, enum.Enum)  # constants that count where they stand alone, not in a list or an object
_Function = types.FunctionType | types.BuiltinFunctionType


class GivenNumbers:
    """The numbers and tensors that a module and its loss function read, with their present values.

    Counted are ints, floats, bools and complex numbers, alone or in a list, tuple or dict: attributes of modules and
    of their classes that their forward names, or a method, property or function of the same file that it names, and
    that none of these sets; variables of the closures and globals of these functions and of the loss function that they
    do not set themselves; attributes of the object that the loss function is a method of; and floats of the plain
    objects in all of these (a config, a config in a config), at any depth: attributes that the forward or the loss
    function names, or a method or property of the object that it names, and entries of lists, tuples and dicts. Alone,
    texts, members of an Enum, None (where it becomes one of these) and functions count, too. In all of these places
    tensors count of at most 65,536 elements (a clone of each is kept), and the buffers of modules, but not the running
    statistics of norms. Modules that a loss function or an object holds are looked at as those of the model. Not seen
    is what a function of another file reads. No module is kept alive.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._entries: list[_Entry] = []
        self._tensors: list[tuple[str, _Read, _KeptTensor]] = []
        self._functions: list[tuple[str, _Read, weakref.ref[_Function], str]] = []
        self._names = _Known()
        self._seen = set[tuple[Any, ...]]()  # modules, classes and globals, while all of them are there
        self._add_modules("", type(model).__name__, model, in_state=True)
        if loss_fn is not None:
            self._add_loss(loss_fn)
        self._names.clear()  # it has classes, whose methods may hold modules
        self._seen.clear()
        self._alone, self._others = _by_holder(self._entries)

    def texts(self) -> dict[str, str]:
        """Return the numbers by name, as text."""
        return {name: _text(was) for name, _, was in self._entries if was is not None}

    def changed(self) -> str | None:
        """Return what is another number now than at first, as an error for the user; None if nothing is."""
        others = self._others
        for group in self._alone:
            if not group.is_same():
                others = [*others, *group.entries]
        for name, read, was in others:
            value = read()
            if value is was or value is _GONE or (now := _frozen(value)) == was or (now != now and was != was):
                continue
            as_input = isinstance(was if now is None else now, (*_NUMBERS, tuple))
            return _changed(name, _text(was), "no number" if now is None else _text(now), as_input)
        for name, read, function, was in self._functions:
            if isinstance(now := read(), _Function) and now is not function():
                return _changed(name, was, now.__name__, False)
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
        if frozen is not None or value is None:
            self._entries.append((name, read, frozen))

    def _add_modules(self, prefix: str, alone: str, model: nn.Module, *, in_state: bool = False) -> None:
        for name, module in model.named_modules():
            if self._is_known("module", id(module)):
                continue
            path = (f"{name}." if name else "") if in_state else None
            self._add_attributes(f"{f'{prefix}.{name}'.strip('.') or alone}.", module, "forward", path)
            if not self._is_known("class", type(module)):
                for function in _methods(type(module), "forward"):
                    self._add_variables(function, type(module), _OF_FORWARD)

    def _is_known(self, *what: Any) -> bool:
        known = what in self._seen
        self._seen.add(what)
        return known

    def _read_by(self, kind: type, method: str) -> frozenset[str]:
        if (kind, method) not in self._names:
            self._names[kind, method] = _attributes_read(kind, method)
        return self._names[kind, method]

    def _add_attributes(self, where: str, holder: Any, method: str, path: str | None = None) -> None:
        """Add the numbers that a method of a holder reads of it, and floats in the objects that it reads of it.

        `path`: what precedes the names of its persistent buffers in the state of the program; None: they are not there.
        """
        names = self._read_by(type(holder), method)
        attributes, reference = _attributes(holder), _reference(holder)
        if reference is None:
            return
        for name in sorted(names & attributes.keys()):
            held, read = attributes[name], functools.partial(_value, reference, _Part(name))
            if isinstance(held, _Function):
                self._functions.append((where + name, read, weakref.ref(held), held.__name__))
            self._add(where + name, read)
            self._add_inside(where + name, "", reference, (_Part(name),), held, names)
        for name in sorted(names - attributes.keys()):
            if _of_class(type(holder), name) is not _GONE:
                self._add(where + name, functools.partial(_value_or_of_class, reference, name))
        if isinstance(holder, nn.Module):
            for name in sorted((names & holder._buffers.keys()) - _STATISTICS):
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
            if isinstance(held, nn.Module):
                self._add_modules(at, at, held)
            if id(held) in seen or isinstance(held, _NOT_PLAIN):
                continue
            seen.add(id(held))
            behind = (self._read_by(type(held), name) for name in sorted(read) if _methods(type(held), name))
            for part, value in _parts(held, read | frozenset[str]().union(*behind)):
                to = f"{at}{part}"
                if (isinstance(value, float) and not whole) or isinstance(value, torch.Tensor):
                    self._add(to + after, functools.partial(_value, root, *path, part))
                elif not isinstance(value, _NUMBERS):
                    waiting.append((to, (*path, part), value))
            whole = False

    def _add_loss(self, loss_fn: Any) -> None:
        given, arguments = loss_fn, dict[str, Any]()
        while isinstance(given, functools.partial):
            arguments |= {f"argument {i}": x for i, x in enumerate(given.args)} | given.keywords
            given = given.func
        if isinstance(given, nn.Module):
            self._add_modules("loss_fn", "", given)
        elif isinstance(given, types.MethodType):
            self._add_attributes("loss_fn: self.", given.__self__, given.__func__.__name__)
            self._add_variables(given.__func__, type(given.__self__), _OF_LOSS)
        elif isinstance(given, types.FunctionType):
            self._add_variables(given, None, _OF_LOSS)
        else:
            self._add_attributes("loss_fn.", given, "__call__")
            for function in _methods(type(given), "__call__"):
                self._add_variables(function, type(given), _OF_LOSS)
        read = frozenset[str]().union(*(_attributes_of(each.__code__)[0] for each in _functions(given)))
        for name, value in arguments.items():
            self._add_variable(name, functools.partial(_itself, value), read, _OF_LOSS)

    def _add_variables(self, function: Any, kind: type | None, of: str) -> None:
        """Add what a function, the methods of `kind` and the functions of the same file that it names read of their
        closures and globals."""
        for each in _reached(function, kind):
            reads, writes = _variables(each.__code__)
            of_objects, set_there = _attributes_of(each.__code__)
            cells = dict(zip(each.__code__.co_freevars, each.__closure__ or (), strict=True))
            found = {
                name: functools.partial(_cell_value, cells[name])
                for name in sorted(cells.keys() - writes)
                if not self._is_known("cell", id(cells[name]))
            }
            for name in sorted((reads & each.__globals__.keys()) - writes):
                if not self._is_known("global", id(each.__globals__), name):
                    found[name] = functools.partial(each.__globals__.get, name, _GONE)
            for name, read in found.items():
                self._add_variable(name, read, of_objects - set_there, of)

    def _add_variable(self, name: str, read: _Read, of_objects: Set[str], of: str) -> None:
        self._add(name + of, read)
        held = read()
        self._add_inside(name, of, _reference(held) or read, (), held, of_objects)  # it may hold a module


class _Alone:
    """Attributes of one object whose values nobody can change in place: all are looked at in one call, in every step.

    Attributes:
        entries: what `GivenNumbers` knows of each.
    """

    def __init__(self, holder: _Read, entries: Sequence[_Entry], names: Sequence[str]) -> None:
        self.entries = entries
        self._holder = holder
        self._of = operator.itemgetter(*names, names[0])  # of one name alone it would give no tuple
        self._were = self._of(_attributes(holder()))

    def is_same(self) -> bool:
        """Return True if the object is gone, or has the very same values as before."""
        holder = self._holder()
        try:
            return holder is None or all(map(operator.is_, self._of(_attributes(holder)), self._were))
        except KeyError:
            return False


def _by_holder(entries: Sequence[_Entry]) -> tuple[list[_Alone], list[_Entry]]:
    """Return the entries that are attributes which nobody can change in place, by their objects, and all others."""
    found: dict[int, tuple[_Read, list[_Entry], list[str]]] = {}
    others = []
    for entry in entries:
        read = entry[1]
        holder, *path = read.args if isinstance(read, functools.partial) and read.func is _value else (read,)
        if len(path) == 1 and not path[0].is_entry and isinstance(read(), (*_NUMBERS, str, type(None))):
            group = found.setdefault(id(holder), (holder, [], []))
            group[1].append(entry)
            group[2].append(path[0].key)
        else:
            others.append(entry)
    return [_Alone(*group) for group in found.values()], others


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


def _changed(name: str, was: str, now: str, as_input: bool) -> str:
    do = "give what changes as an input (a tensor with one value per sample), or set it back"
    return (
        f"{name} was {was} when the program was made and is {now} now, but the program has {was}: "
        f"{do if as_input else 'set it back, or call autoplan.parallelize again'}"
    )


def _text(value: Any) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)


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


def _of_class(kind: type, name: str) -> Any:
    """Return what a class or a base of it has under a name, `_GONE` if nothing; nothing of nn.Module itself."""
    bases = (base for base in kind.__mro__ if base not in (nn.Module, object))
    return next((vars(base)[name] for base in bases if name in vars(base)), _GONE)


def _value_or_of_class(reference: _Read, name: str) -> Any:
    holder = reference()
    value = _attributes(holder).get(name, _GONE)
    return _of_class(type(holder), name) if value is _GONE else value


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # deleted
        return _GONE


def _frozen(value: Any) -> Any:
    """Return a constant, or the numbers in a container, in a form that does not change; None for anything else."""
    if isinstance(value, _ALONE):
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
