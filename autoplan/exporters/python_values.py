"""Values of Python files that are read: plain Python values, objects with fields, and what is not known.

Two states of a file, after the one and the other branch of a test that is not known, are merged value by value: what is
the same in both is kept, the rest is Unknown with the test and its line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "?"  # prefix of paths whose value is not known
BY_FUNCTION = "settings of this function"
MADE_BY = "made by"  # path: the class or function that made an object
MORE = "more arguments"  # that a command takes from its caller
MISSING = object()  # the value of a field or a name that is not set


@dataclass(frozen=True)
class Unknown:
    """A value that the file does not decide: its expression, with the line."""

    text: str

    @classmethod
    def of(cls, node: ast.AST) -> Unknown:
        """Return the value of an expression or a statement that is not known."""
        return cls(f"{ast.unparse(node)} (line {getattr(node, 'lineno', 0)})")


@dataclass(eq=False, repr=False)
class ConfigObject:
    """An object of the file: a configuration, a section of it, or what a call of a class returned.

    Attributes:
        made_by: the class or function that made it, with literal arguments; empty for an object that is given.
        origin: the expression that it was first read as, with the line.
        unknown: an expression that set fields of it that are not known; empty if there is none.
        fields: by name.
        parent: the object that it is a section of, if that is where it came from.
        changed: True if the file assigned an attribute of it, or of a section of it.
    """

    made_by: str = ""
    origin: str = ""
    unknown: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    parent: ConfigObject | None = None
    changed: bool = False

    def __repr__(self) -> str:
        """Return what stands for it in a message, also within a list."""
        return self.origin or self.made_by or self.unknown or "an object"

    @property
    def is_empty(self) -> bool:
        """True for an object that the file only read, of which nothing is known."""
        return not (self.made_by or self.unknown or any(not is_missing(v) for v in self.fields.values()))

    @property
    def is_new(self) -> bool:
        """True for what a class returned, whose other fields have their defaults."""
        return is_class(self.made_by)

    @property
    def root(self) -> ConfigObject:
        """The object that this is a section of, or itself."""
        return self if self.parent is None else self.parent.root


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the file; `names`: those of the function or the module around it."""

    node: ast.FunctionDef
    names: Mapping[str, Any] = field(repr=False)


def maker_of(made_by: str) -> str:
    """Return the last name of the class or function that made an object: `Config` of `Trainer.Config(8)`."""
    return made_by.partition("(")[0].rpartition(".")[2]


def is_class(made_by: str) -> bool:
    """Return True for the name of a class: `Trainer.Config`, as against `llama3_8b`."""
    return maker_of(made_by)[:1].isupper()


def is_missing(value: object) -> bool:
    """Return True for no value, and for an object that was only read."""
    return value is MISSING or (isinstance(value, ConfigObject) and value.is_empty)


def is_known(value: object) -> bool:
    """Return True for a plain value, with everything in it."""
    if isinstance(value, list | tuple | set):
        return all(map(is_known, value))
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    return not isinstance(value, Unknown | ConfigObject | Function)


def truth(value: object) -> bool | None:
    """Return whether a value counts as true; None if that is not known."""
    if isinstance(value, ConfigObject):
        return True if value.is_new else None
    if isinstance(value, Unknown | Function):
        return None
    return bool(value)


def said(value: object) -> str:
    """Return a value in words."""
    if isinstance(value, Unknown):
        return value.text
    if value is MISSING:
        return "nothing"
    if isinstance(value, ConfigObject):
        return f"{value.made_by or value.unknown or value.origin or 'an object'}"
    return repr(value)


def equal(a: object, b: object) -> bool:
    """Return True for values that are equal for certain."""
    if is_missing(a) or is_missing(b):
        return is_missing(a) and is_missing(b)
    if isinstance(a, ConfigObject | Function) or isinstance(b, ConfigObject | Function):
        return a is b
    return type(a) is type(b) and a == b


Say = Callable[[Any, Any], str]  # what is said of a value that is one thing or another


def by_test(test: ast.AST) -> Say:
    """Return what is said of a value that a test decides which is not known."""
    text, line = ast.unparse(test), getattr(test, "lineno", 0)

    def say(a: Any, b: Any) -> str:
        if is_missing(b):
            return f"{said(a)} if {text} (line {line})"
        if is_missing(a):
            return f"{said(b)} unless {text} (line {line})"
        return f"{said(a)} if {text} else {said(b)} (line {line})"

    return say


def merged(a: Any, b: Any, say: Say) -> Any:
    """Return a value that is `a` or `b`, which may be MISSING: Unknown where they differ."""
    if equal(a, b):
        return b if a is MISSING else a
    a, b = (ConfigObject() if _is_section(other) and is_missing(v) else v for v, other in ((a, b), (b, a)))
    if isinstance(a, ConfigObject) and isinstance(b, ConfigObject):
        made_by = a.made_by if a.made_by == b.made_by else ""
        unknown = a.unknown or b.unknown or ("" if a.made_by == b.made_by else say(a, b))
        fields = _merged_names(a.fields, b.fields, say)
        return ConfigObject(made_by, a.origin, unknown, fields, a.parent, a.changed or b.changed)
    return Unknown(say(a, b))


def _is_section(value: object) -> bool:
    """Return True for an object that nothing in the file made: a section of a configuration."""
    return isinstance(value, ConfigObject) and not value.made_by


def _merged_names(a: Mapping[str, Any], b: Mapping[str, Any], say: Say) -> dict[str, Any]:
    names = dict.fromkeys((*a, *b))
    return {name: merged(a.get(name, MISSING), b.get(name, MISSING), say) for name in names}


@dataclass(frozen=True)
class State:
    """The names of all functions that run, and the fields of all objects that they reach, at one place of a file."""

    frames: tuple[Mapping[str, Any], ...]
    objects: Mapping[ConfigObject, tuple[str, Mapping[str, Any]]]

    @classmethod
    def of(cls, frames: Iterable[Mapping[str, Any]]) -> State:
        """Return the state as it is now."""
        held = tuple(map(dict, frames))
        return cls(held, {each: (each.unknown, dict(each.fields)) for each in objects_in(held)})

    @property
    def size(self) -> int:
        """The number of names and fields, which merging two states goes through."""
        return sum(map(len, self.frames)) + sum(len(fields) for _, fields in self.objects.values())

    def restore(self, frames: Iterable[dict[str, Any]]) -> None:
        """Set the objects and the frames to this state."""
        for each, (unknown, fields) in self.objects.items():
            each.unknown, each.fields = unknown, dict(fields)
        for frame, names in zip(frames, self.frames, strict=True):
            frame.clear()
            frame.update(names)

    def merged(self, other: State, say: Say) -> State:
        """Return the state that is this one or the other."""
        objects = {}
        for each in {**self.objects, **other.objects}:
            # an object that only one branch made is as it is now
            one, two = (state.objects.get(each, (each.unknown, each.fields)) for state in (self, other))
            objects[each] = (one[0] or two[0], _merged_names(one[1], two[1], say))
        pairs = zip(self.frames, other.frames, strict=True)
        return State(tuple(_merged_names(a, b, say) for a, b in pairs), objects)


def objects_in(values: object) -> dict[ConfigObject, None]:
    """Return the objects in values, with those in their fields."""
    out: dict[ConfigObject, None] = {}
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, ConfigObject):
            if value not in out:
                out[value] = None
                left += value.fields.values()
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
    return out


def by_path(value: Any, path: str = "") -> dict[str, Any]:
    """Return the fields of an object by path; `?path` for those that are not known.

    A section that a function made has both: the name of the function, and that its other fields are not known.
    """
    return dict(_by_path(value, path, ()))


def _by_path(value: Any, path: str, above: tuple[ConfigObject, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ConfigObject):
        yield from _of_object(value, path, above)
    elif isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _by_path(each, f"{path}.{name}" if path else str(name), above)
    elif isinstance(value, Unknown):
        yield f"{UNKNOWN}{path}", value.text
    elif isinstance(value, Function):
        yield f"{UNKNOWN}{path}", value.node.name
    elif isinstance(value, list | tuple) and any(isinstance(each, ConfigObject) for each in value):
        yield path, [said(each).partition("(")[0] if isinstance(each, ConfigObject) else each for each in value]
        for each in value:
            if isinstance(each, ConfigObject) and each.made_by:
                yield from _by_path(each, f"{path}.{maker_of(each.made_by)}", above)
    elif value is not MISSING:
        yield path, value


def _of_object(value: ConfigObject, path: str, above: tuple[ConfigObject, ...]) -> Iterator[tuple[str, Any]]:
    if value in above or value.is_empty:
        return
    if value.made_by and path:
        yield path, value.made_by
    if value.unknown:
        yield f"{UNKNOWN}{path}", value.unknown
    elif value.made_by and path and not value.is_new:
        yield f"{UNKNOWN}{path}", value.origin  # the function may set other fields
    for name, each in value.fields.items():
        yield from _by_path(each, f"{path}.{name}" if path else name, (*above, value))
