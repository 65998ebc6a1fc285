"""The code that a model runs as it is bound now: functions that somebody has put on a class or into a module are seen.

The version of a package says what its files hold, not what a process has made of it: `LlamaMLP.forward = mine`,
`modeling_llama.apply_rotary_pos_emb = fused`, a new entry of a registry. The walk starts at `forward` and `__call__` of
the classes of all submodules and follows names, without running anything: methods of these classes, globals of
transformers (functions, classes, registries, numbers), and `F.silu` through the module `F`. It goes by name alone, so
that it reaches too much rather than too little.

Not seen: what is inside torch and other installed packages beyond the functions that are called from here (torch's own
classes are followed by one step), attributes whose name is computed (`getattr(self, kind)`), and the content of objects
that are neither numbers, text, containers, functions nor classes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

PACKAGES = ("torch", "transformers")  # their versions are part of every key
_FOLLOWED = "transformers"  # the package whose functions are followed into the functions that they call
_OWN = "autoplan"  # its code has a hash of its own
_NOT_IN_DICT = ("_attn_implementation", "_experts_implementation")  # left out of a config's dict by transformers
_PLAIN = (bool, int, float, str, type(None))
_ENTRIES = ("forward", "__call__")


def plain_value(value: Any) -> Any:
    """Return the JSON form of an attribute. Raises TypeError if its content cannot be read."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return [plain_value(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain_value(v)) for v in value)
    if isinstance(value, Mapping):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if package_root(type(value)) == "transformers" and hasattr(value, "to_dict"):
        own = {name: getattr(value, name, None) for name in _NOT_IN_DICT}
        return plain_value({**value.to_dict(), **own})
    name = getattr(value, "__qualname__", None)
    if name is not None and package_root(value) in PACKAGES and "<" not in name:
        return f"{value.__module__}.{name}"  # a function or class of an installed package
    raise TypeError(f"{type(value).__name__} has no content that can be hashed")


def package_root(value: Any) -> str:
    """Return the package of a class or function: of a function, where it was made, not what functools.wraps copied."""
    names = getattr(value, "__globals__", None)  # of a class of functions it is no mapping
    made = names.get("__name__") if isinstance(names, dict) else None
    return str(made or getattr(value, "__module__", None) or "").split(".")[0]


def bound_code(classes: Iterable[type]) -> list[str]:
    """Return what is bound to every name that the forwards of these classes reach, sorted: `holder.name = content`.

    The same in every process that binds the same.

    Raises:
        TypeError: a function or class among them is of no installed package, so that nothing identifies what it calls.
    """
    classes = (*classes, torch.Tensor)
    walk = _Walk(classes)
    for cls in classes:
        walk.add_class(cls)
    for name in _ENTRIES:
        walk.add_name(name)
    walk.run()
    return sorted(walk.found)


def code_digest(code: types.CodeType) -> str:
    """Return the hash of what code does, with the code inside of it; lines and files do not matter."""
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = (code.co_code, code.co_exceptiontable, numbers, names, [_constant(c) for c in code.co_consts])
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # in another order in every process
        return "frozenset", sorted(repr(_constant(v)) for v in value)
    return tuple(_constant(v) for v in value) if isinstance(value, tuple) else value


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes that code, or code inside of it, names."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class _Walk:
    """The walk of `bound_code`. `found`: what it has found so far."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.found: set[str] = set()
        self._own = {str(cls) for cls in classes}
        self._members: dict[str, list[tuple[str, Any]]] = defaultdict(list)  # name -> owners and values
        self._classes: set[type] = set()
        self._reached: set[str] = set()
        self._functions: dict[int, tuple[types.FunctionType, str]] = {}  # by id, with the text of each
        self._entered: set[int] = set()  # functions that are followed, by id
        self._waiting: list[types.FunctionType] = []
        self._versions: dict[str, str] = {}

    def run(self) -> None:
        """Follow every function that was reached."""
        while self._waiting:
            self._follow(self._waiting.pop())

    def add_class(self, cls: type) -> None:
        """Follow the members of a class and its bases, as far as their names are reached."""
        for base in cls.__mro__:
            if base is object or base in self._classes:
                continue
            self._classes.add(base)
            owner = self._identified(base.__module__, base.__qualname__)
            for name, value in list(vars(base).items()):
                self._members[name].append((owner, value))
                if name in self._reached:
                    self._bind(owner, name, value, member=True)

    def add_name(self, name: str) -> None:
        """Follow the members of this name."""
        if name not in self._reached:
            self._reached.add(name)
            for owner, value in list(self._members.get(name, ())):
                self._bind(owner, name, value, member=True)

    def _follow(self, function: types.FunctionType) -> None:
        names, here = set(_names(function.__code__)), function.__globals__
        for name in names:
            self.add_name(name)
        modules = []
        for name in names & here.keys():
            if isinstance(here[name], types.ModuleType):
                modules.append(here[name])
            elif not name.startswith("__"):
                self._bind(here["__name__"], name, here[name])
        seen = set[int]()
        while modules:  # a chain such as torch.nn.functional.silu
            module = modules.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name in names & vars(module).keys():
                value = vars(module)[name]
                if isinstance(value, types.ModuleType):
                    modules.append(value)
                elif isinstance(value, types.FunctionType):
                    self._bind(module.__name__, name, value)

    def _bind(self, holder: str, name: str, value: Any, member: bool = False) -> None:
        self.found.add(f"{holder}.{name} = {self._content(value, member)}")

    def _content(self, value: Any, member: bool) -> str:
        """Return a text that tells a value from others, and follow what it calls."""
        value = _unwrapped(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, member)
        if isinstance(value, type):
            if package_root(value) == _FOLLOWED:
                self.add_class(value)
            return self._identified(value.__module__, value.__qualname__)
        if isinstance(value, functools.partial | functools.partialmethod):
            parts = (value.func, *value.args, *value.keywords.values())
            return f"partial({', '.join(self._content(part, member) for part in parts)}; {list(value.keywords)})"
        if type(value) in (dict, OrderedDict) or (isinstance(value, MutableMapping) and not isinstance(value, dict)):
            kept = self._of_these_classes(value)
            entries = sorted(f"{k}: {self._content(v, False)}" for k, v in kept.items())  # a registry of functions
            return f"{{{', '.join(entries)}}}"
        if isinstance(value, dict):
            value = self._of_these_classes(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._content(v, False) for v in value)}]"
        try:
            return json.dumps(plain_value(value))
        except TypeError:
            return self._identified(type(value).__module__, type(value).__qualname__)

    def _of_these_classes(self, registry: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a registry without the entries of classes of which the process has made other models."""
        return {k: v for k, v in registry.items() if not str(k).startswith("<class ") or str(k) in self._own}

    def _function(self, function: types.FunctionType, member: bool) -> str:
        module = str(function.__globals__.get("__name__", ""))  # `__module__` is what functools.wraps has copied
        root = module.split(".")[0]
        if id(function) not in self._entered and (root == _FOLLOWED or (root in PACKAGES and member)):
            self._entered.add(id(function))
            self._waiting.append(function)
        known = self._functions.get(id(function))
        if known is not None:
            return known[1]
        text = self._identified(module, f"{function.__qualname__} {code_digest(function.__code__)}")
        self._functions[id(function)] = function, text
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self._bind(text, name, cell.cell_contents, member)
        for i, default in enumerate(function.__defaults__ or ()):
            self._bind(text, str(i), default)
        for name, default in (function.__kwdefaults__ or {}).items():
            self._bind(text, name, default)
        return text

    def _identified(self, module: str, name: str) -> str:
        """Return a name with the version of its package. Raises TypeError where none identifies the code."""
        root = module.split(".")[0]
        if root not in self._versions:
            self._versions[root] = _version(root)
        return f"{module}{self._versions[root]}.{name}"


def _unwrapped(value: Any) -> Any:
    """Return the function behind a member of a class, a bound method, or a function with a cache."""
    if isinstance(value, property):
        return _unwrapped(value.fget)
    if isinstance(value, functools.cached_property):
        return value.func
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return _unwrapped(value.__func__)
    if not isinstance(value, types.FunctionType) and isinstance(
        getattr(value, "__wrapped__", None), types.FunctionType
    ):
        return value.__wrapped__
    return value


def _version(root: str) -> str:
    """Return the version of an installed package in the form `@1.2`, empty where a key has it anyway."""
    if root in sys.stdlib_module_names or root in (*PACKAGES, _OWN):
        return ""
    try:
        found = importlib.metadata.distribution(root)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: no name
        raise TypeError(f"no installed package {root!r} has a version that identifies its code") from None
    if '"editable": true' in (found.read_text("direct_url.json") or ""):
        raise TypeError(f"{root} is installed from a folder whose files may change under one version")
    return f"@{found.version}"
