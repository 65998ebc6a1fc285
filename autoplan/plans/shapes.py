"""Shapes of JSON values: what a strict reader takes, and the same as a JSON Schema.

A shape is declared once (`autoplan.plans.sections` declares the sections of a plan file); `check_shape` reads by it and
`json_schema` writes it down for others.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.config.keys import check_names
from autoplan.errors import PinError


class JsonShape:
    """A kind of values; as it is, any value."""

    @property
    def words(self) -> str:
        """The kind in words, after `must be`."""
        return "a value"

    def takes(self, value: Any) -> bool:
        """Return True if the value, without what it holds, is of this kind."""
        return True

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return name, value and shape of everything that a value of this kind holds."""
        return ()

    def check_names(self, value: Any, where: str, way_out: str) -> None:
        """Raise PinError for a name in the value that this kind has not, or for one that is missing."""

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema of this kind. `parts`: what it refers to by name is added."""
        return {}


@dataclass(frozen=True)
class Text(JsonShape):
    """A text; `pattern`: of the whole of it, and `kind`: in words."""

    pattern: str = ""
    kind: str = "a text"

    @property
    def words(self) -> str:
        """The kind in words."""
        return self.kind

    def takes(self, value: Any) -> bool:
        """Return True for a text with the pattern."""
        return isinstance(value, str) and (not self.pattern or re.fullmatch(self.pattern, value) is not None)

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"type": "string", **({"pattern": f"^({self.pattern})$"} if self.pattern else {})}


@dataclass(frozen=True)
class OneOf(JsonShape):
    """One of some texts."""

    known: tuple[str, ...]

    @property
    def words(self) -> str:
        """The kind in words."""
        return f"one of {', '.join(self.known)}"

    def takes(self, value: Any) -> bool:
        """Return True for one of the texts."""
        return isinstance(value, str) and value in self.known

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"enum": list(self.known)}


@dataclass(frozen=True)
class Number(JsonShape):
    """A finite number that is not below `least`; booleans are none, and whole numbers are numbers."""

    whole: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def words(self) -> str:
        """The kind in words."""
        least = "" if self.least is None else f" of at least {self.least:g}"
        most = "" if self.most is None else f" and at most {self.most:g}"
        return f"a {'whole ' * self.whole}number{least}{most}"

    def takes(self, value: Any) -> bool:
        """Return True for such a number."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        least = -sys.float_info.max if self.least is None else self.least
        return bool(least <= value <= (sys.float_info.max if self.most is None else self.most))

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        limits = {"minimum": self.least, "maximum": self.most}
        return {
            "type": "integer" if self.whole else "number",
            **{name: value for name, value in limits.items() if value is not None},
        }


class Truth(JsonShape):
    """True or false."""

    @property
    def words(self) -> str:
        """The kind in words."""
        return "true or false"

    def takes(self, value: Any) -> bool:
        """Return True for a boolean."""
        return isinstance(value, bool)

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"type": "boolean"}


class Null(JsonShape):
    """Nothing."""

    @property
    def words(self) -> str:
        """The kind in words."""
        return "null"

    def takes(self, value: Any) -> bool:
        """Return True for None."""
        return value is None

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"type": "null"}


@dataclass(frozen=True)
class Either(JsonShape):
    """A value of one of some kinds, no two of which take the same value."""

    kinds: tuple[JsonShape, ...]

    @property
    def words(self) -> str:
        """The kinds in words."""
        return " or ".join(kind.words for kind in self.kinds)

    def takes(self, value: Any) -> bool:
        """Return True for a value that one of the kinds takes."""
        return any(kind.takes(value) for kind in self.kinds)

    def _of(self, value: Any) -> JsonShape:
        return next(kind for kind in self.kinds if kind.takes(value))

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return what the value holds, as its kind says."""
        return self._of(value).held(value)

    def check_names(self, value: Any, where: str, way_out: str) -> None:
        """Raise PinError as its kind does."""
        self._of(value).check_names(value, where, way_out)

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"anyOf": [kind.schema(parts) for kind in self.kinds]}


@dataclass(frozen=True)
class ListOf(JsonShape):
    """A list whose items have one shape."""

    item: JsonShape

    @property
    def words(self) -> str:
        """The kind in words."""
        return "a list"

    def takes(self, value: Any) -> bool:
        """Return True for a list."""
        return isinstance(value, list | tuple)

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return the items by their place."""
        return [(i, item, self.item) for i, item in enumerate(value)]

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        return {"type": "array", "items": self.item.schema(parts)}


@dataclass(frozen=True)
class TupleOf(JsonShape):
    """A list of some items, each with a shape of its own."""

    items: tuple[JsonShape, ...]

    @property
    def words(self) -> str:
        """The kind in words."""
        return f"a list of {len(self.items)}: {', '.join(item.words for item in self.items)}"

    def takes(self, value: Any) -> bool:
        """Return True for a list of as many items."""
        return isinstance(value, list | tuple) and len(value) == len(self.items)

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return the items by their place."""
        return [(i, item, shape) for i, (item, shape) in enumerate(zip(value, self.items, strict=True))]

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        count = len(self.items)
        items = [item.schema(parts) for item in self.items]
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}


@dataclass(frozen=True)
class NamesTo(JsonShape):
    """An object with any names, or such as `names` takes, whose values have one shape."""

    value: JsonShape = field(default_factory=JsonShape)
    names: Text = field(default_factory=Text)

    @property
    def words(self) -> str:
        """The kind in words."""
        return "an object"

    def takes(self, value: Any) -> bool:
        """Return True for an object."""
        return isinstance(value, Mapping)

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return the values by their names."""
        return [(name, item, self.value) for name, item in value.items()]

    def check_names(self, value: Any, where: str, way_out: str) -> None:
        """Raise PinError for a name that `names` does not take."""
        for name in value:
            if not self.names.takes(name):
                raise PinError(f"{where}: unknown name {name!r}, it must be {self.names.words}; {way_out}")

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema."""
        names = {"propertyNames": self.names.schema(parts)} if self.names.pattern else {}
        return {"type": "object", **names, "additionalProperties": self.value.schema(parts)}


@dataclass(frozen=True)
class Fields(JsonShape):
    """An object with known names.

    Attributes:
        known: the shapes of the values by name.
        needed: the names that are always there.
        name: under which a schema refers to it; empty: it is written out where it stands.
        what: the word for one of its names in errors.
    """

    known: Mapping[str, JsonShape]
    needed: Sequence[str] = ()
    name: str = ""
    what: str = "key"

    @property
    def words(self) -> str:
        """The kind in words."""
        return "an object"

    def takes(self, value: Any) -> bool:
        """Return True for an object."""
        return isinstance(value, Mapping)

    def held(self, value: Any) -> Iterable[tuple[object, Any, JsonShape]]:
        """Return the values by their names."""
        return [(name, item, self.known[name]) for name, item in value.items()]

    def check_names(self, value: Any, where: str, way_out: str) -> None:
        """Raise PinError for an unknown name, with the nearest known one, and for one that is missing."""
        check_names(value, self.known, where, self.what)
        lacking = [name for name in self.needed if name not in value]
        if lacking:
            raise PinError(f"{where} lacks {', '.join(lacking)}; {way_out}")

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema, or a reference to it among the parts."""
        if self.name and self.name in parts:
            return {"$ref": f"#/$defs/{self.name}"}
        own = {
            "type": "object",
            "properties": {name: shape.schema(parts) for name, shape in self.known.items()},
            **({"required": list(self.needed)} if self.needed else {}),
            "additionalProperties": False,
        }
        if not self.name:
            return own
        parts[self.name] = own
        return {"$ref": f"#/$defs/{self.name}"}


ANY, TEXT, SWITCH, NULL, NUMBER, WHOLE = JsonShape(), Text(), Truth(), Null(), Number(), Number(whole=True)
NOT_NEGATIVE = Number(whole=True, least=0)
POSITIVE = Number(whole=True, least=1)


def or_null(shape: JsonShape) -> Either:
    """Return the shape of a value that may be null."""
    return Either((*shape.kinds, NULL) if isinstance(shape, Either) else (shape, NULL))


def check_shape(value: object, shape: JsonShape, where: str, way_out: str) -> None:
    """Raise PinError for the first value of another kind than its shape says, and for names that it has not.

    Args:
        where: the place of the value, with which the message begins.
        way_out: what to do instead, with which it ends.
    """
    if not shape.takes(value):
        raise PinError(f"{where} must be {shape.words}, not {json.dumps(value, default=str)[:80]}; {way_out}")
    shape.check_names(value, where, way_out)
    for name, item, of in shape.held(value):
        check_shape(item, of, f"{where}: {name}", way_out)


def json_schema(shape: JsonShape, title: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the values that a shape takes."""
    parts: dict[str, Any] = {}
    whole = shape.schema(parts)
    defs = {"$defs": dict(sorted(parts.items()))} if parts else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **whole, **defs}
