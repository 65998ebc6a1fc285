"""Reading JSON documents that people may edit: every error names the field and the expected value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from autoplan.config.numbers import is_finite
from autoplan.cost_models.work import Plain
from autoplan.errors import ProfileError


@dataclass(frozen=True)
class JsonField:
    """A field of a JSON document, with its source and path for error messages."""

    source: str
    path: str
    value: Any

    def fail(self, expected: str) -> ProfileError:
        """Return the error that names this field and the expected value."""
        return ProfileError(
            f"{self.source}: {self.path or 'the file'} must be {expected}, got {json.dumps(self.value)[:80]}"
        )

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> JsonField:
        """Return the field of this name."""
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        if name not in self.value:
            raise ProfileError(
                f"{self.source}: {self._path(name)} is missing; {self.path or 'the file'} has {', '.join(self.value)}"
            )
        return JsonField(self.source, self._path(name), self.value[name])

    def only(self, *names: str) -> JsonField:
        """Return this object. Raises ProfileError if it has other fields than `names`."""
        for name, field in self.items():
            if name not in names:
                raise ProfileError(f"{self.source}: {field.path} is not known; known: {', '.join(names)}")
        return self

    def items(self) -> list[tuple[str, JsonField]]:
        """Return all fields of an object."""
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        return [(k, JsonField(self.source, f"{self.path}.{k}", v)) for k, v in self.value.items()]

    def each(self) -> list[JsonField]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [JsonField(self.source, f"{self.path}[{i}]", v) for i, v in enumerate(self.value)]

    def text(self, choices: tuple[str, ...] = ()) -> str:
        """Return a text; one of `choices` if any are given."""
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            raise self.fail(f"one of {', '.join(choices)}" if choices else "a text")
        return self.value

    def number(self, *, positive: bool = False) -> float:
        """Return a finite number of at least 0, or above 0 if `positive`."""
        good = isinstance(self.value, (int, float)) and not isinstance(self.value, bool) and is_finite(self.value)
        if not good or self.value < 0 or (positive and self.value == 0):
            raise self.fail("a positive number" if positive else "a number of at least 0")
        return float(self.value)

    def count(self) -> int:
        """Return a whole number of at least 1."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 1:
            raise self.fail("a whole number of at least 1")
        return self.value

    def plain(self) -> Plain:
        """Return a text, number, boolean, null, or a list of whole numbers."""
        if isinstance(self.value, list):
            return tuple(int(f.number()) for f in self.each())
        if self.value is not None and not isinstance(self.value, (str, int, float, bool)):
            raise self.fail("plain data")
        return self.value
