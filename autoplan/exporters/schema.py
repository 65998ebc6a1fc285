"""The fields of targets as their sources have them: profiles/targets/NAME.json, with source and version.

What is written is checked against them, and what a file leaves out has their defaults.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autoplan.errors import PinError
from autoplan.stacks.records import version_of, year_of

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}


@dataclass(frozen=True)
class TargetField:
    """One field of a target.

    Attributes:
        kinds: names of its types; empty for any.
        whole: True if a number with a fraction of zero (5e8) counts as an integer.
        values: the values that it takes; empty for any.
        default: what it is if nothing is said; None if that follows from other fields.
        since, until: years between which it exists.
    """

    kinds: tuple[str, ...] = ()
    values: tuple[Any, ...] = field(default=(), hash=False)
    default: Any = None
    since: float = 0.0
    until: float = 9999.0
    whole: bool = False

    def reason(self, value: Any) -> str | None:
        """Return why a value is not one of the field, or None."""
        if value is None:
            return None
        if self.whole and "int" in self.kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        kinds = tuple(kind for name in self.kinds for kind in _KINDS[name])
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"must be of type {' or '.join(self.kinds)}"
        if self.values and not all(each in self.values for each in (value if isinstance(value, list) else [value])):
            return f"must be one of {', '.join(map(str, self.values))}"
        return None


@dataclass(frozen=True)
class Schema:
    """The fields of a target.

    Attributes:
        source: where they were read.
        releases: release -> month YY.MM.
        closed: sections all of whose fields are known, so that another one is an error.
        open: paths below which anything may stand.
        idle: patterns of fields that change neither time nor memory beyond what the model itself says.
    """

    name: str
    source: str
    releases: Mapping[str, str] = field(hash=False)
    entries: Mapping[str, TargetField] = field(hash=False, repr=False)
    closed: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @staticmethod
    @lru_cache(maxsize=32)
    def load(name: str) -> Schema:
        """Return the schema of the target with this name."""
        data = json.loads(files("autoplan.profiles").joinpath("targets", f"{name}.json").read_text(encoding="utf-8"))
        entries = {path: _entry(path, each, bool(data.get("whole_floats"))) for path, each in data["fields"].items()}
        closed, open_, idle = (tuple(data[name]) for name in ("closed", "open", "idle"))
        return Schema(name, data["source"], data["releases"], entries, closed, open_, idle)

    def default(self, path: str) -> Any:
        """Return the default of a field; None if it has none."""
        return self.entries[path].default if path in self.entries else None

    def is_idle(self, path: str, value: Any) -> bool:
        """Return True if a value at a path changes neither time nor memory: one of those fields, or the default."""
        entry = self.entries.get(path)
        if entry is None or any(fnmatchcase(path, pattern) for pattern in self.idle):
            return True
        return value in ("auto", None, []) or (entry.default is not None and value == entry.default)

    def is_section(self, path: str) -> bool:
        """Return True for a path that is no field, but has fields below it."""
        return path not in self.entries and any(name.startswith(f"{path}.") for name in self.entries)

    def knows(self, path: str) -> bool:
        """Return True for a field of the target, of any version."""
        return path in self.entries or any(path == each or path.startswith(f"{each}.") for each in self.open)

    def exists(self, path: str, year: float) -> bool:
        """Return True if a field exists in a year."""
        return path in self.entries and self.entries[path].since <= year < self.entries[path].until

    def faults(self, values: Mapping[str, Any], year: float, every: bool = False) -> list[str]:
        """Return the faults of values that the target would not take, with the nearest that it takes.

        Args:
            every: True: a field that is not known is a fault anywhere, not only in a closed section.
        """
        found = (self._fault(path, value, year, every) for path, value in values.items())
        return [text for text in found if text is not None]

    def _fault(self, path: str, value: Any, year: float, every: bool) -> str | None:
        entry = self.entries.get(path)
        if entry is None:
            inside = path.rpartition(".")[0] in self.closed
            if self.knows(path) or not (every or inside):
                return None
            return f"{path} is not a field of {self.name}; {_nearest(path, self.entries)}"
        if not entry.since <= year < entry.until:
            when = f"since {version_of(entry.since)}" if year < entry.since else f"before {version_of(entry.until)}"
            return f"{path} is a field of {self.name} only {when}"
        reason = entry.reason(value)
        return None if reason is None else f"{path}={value!r} {reason}"

    def check(self, values: Mapping[str, Any], year: float) -> None:
        """Raise PinError if the target would not take these values."""
        found = self.faults(values, year, every=True)
        if found:
            raise PinError("; ".join(found))


def _nearest(path: str, known: Mapping[str, TargetField]) -> str:
    """Return a hint at the nearest field, or at where fields of such names are."""
    near = difflib.get_close_matches(path, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else "nothing near is; the fields: profiles/targets"


_KEYS = ("type", "values", "default", "since", "until")


def _entry(path: str, data: Mapping[str, Any], whole: bool) -> TargetField:
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}; what is known of a field: {', '.join(_KEYS)}")
    kinds = data.get("type", ())
    return TargetField(
        (kinds,) if isinstance(kinds, str) else tuple(kinds),
        tuple(data.get("values", ())),
        data.get("default"),
        year_of(data["since"]) if "since" in data else 0.0,
        year_of(data["until"]) if "until" in data else 9999.0,
        whole,
    )
