"""Text of target values: JSON, YAML and TOML, with paths for what is nested."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autoplan.errors import PinError
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.setup import Setup
from autoplan.files import json_of


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by path as mappings in mappings."""
    out: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return out


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return mappings in mappings as values by path; an empty mapping is a value."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{path}.")
        else:
            out[path] = value
    return out


def mapping_of(data: object, where: str) -> dict[str, Any]:
    """Return the values of a file. PinError if it holds something else."""
    if not isinstance(data, Mapping):
        raise PinError(f"{where} must hold names and values, not {type(data).__name__}")
    return flat({str(name): value for name, value in data.items()})


def values_of_named(name: str, value: object, where: str) -> dict[str, Any]:
    """Return the values of a file of JSON or YAML that a field names, with paths below the field; empty without one.

    The name is taken from the working directory, else from the folder of the file that names it or one above.

    Raises: PinError if the file is of another syntax.
    """
    if not isinstance(value, str) or not value:
        return {}
    places = (Path(value), *(above / value for above in Path(where).parents))
    found = next((path for path in places if _is_file(path)), None)
    if found is None:
        return {}
    try:
        text = found.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PinError(f"{found}: {error}") from None
    syntax = Yaml() if found.suffix in (".yaml", ".yml") else Json()
    return {f"{name}.{path}": each for path, each in syntax.read(text, str(found)).items()}


def _is_file(path: Path) -> bool:
    """Return True for a file; False also for a text that is no path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def commented(heading: Sequence[str]) -> str:
    """Return lines as comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in heading)


@dataclass(frozen=True)
class Json:
    """JSON; it has no comments, so that the heading is left out."""

    suffix: str = ".json"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the values as JSON."""
        return json.dumps(nested(values), indent=2) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path."""
        try:
            return mapping_of(json_of(text), where)
        except ValueError as error:
            raise PinError(f"{where} is not JSON: {error}") from None


@dataclass(frozen=True)
class Yaml:
    """YAML, with the heading as comments."""

    suffix: str = ".yaml"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the values as YAML."""
        text: str = yaml.safe_dump(nested(values), sort_keys=False, width=1000)
        return commented(heading) + text

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path."""
        try:
            data = yaml.safe_load(text)
        except RecursionError:
            raise PinError(f"{where} is not YAML: it is nested too deep") from None
        except (ValueError, yaml.YAMLError) as error:  # ValueError: of a date or number that PyYAML cannot make
            raise PinError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
        return mapping_of(data, where)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class ReferringYaml(Yaml):
    """YAML in which `${path}` is another value of the file, as in OmegaConf. One that is not there is not known.

    Attributes:
        inside: name of a section that holds the values, in files that have one; empty: there is none.
    """

    inside: str = ""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not known begins with `?`."""
        values = super().read(text, where)
        within = {path: value for path, value in values.items() if self.inside and path.startswith(f"{self.inside}.")}
        values = {path.removeprefix(f"{self.inside}."): value for path, value in (within or values).items()}
        out: dict[str, Any] = {}
        for path, value in values.items():
            found = _followed(value, values)
            known = not isinstance(found, str) or _REFERENCE.search(found) is None
            out[path if known else f"{UNKNOWN}{path}"] = found
        return out


def _followed(value: object, values: Mapping[str, Any], depth: int = 8) -> Any:
    """Return a value with what its references name; a reference to itself stays."""
    if not isinstance(value, str) or depth == 0:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None:
        return _followed(values[whole[1]], values, depth - 1) if whole[1] in values else value
    return _REFERENCE.sub(lambda m: str(_followed(values.get(m[1], m[0]), values, depth - 1)), value)


@dataclass(frozen=True)
class Toml:
    """TOML, a table per section, with the heading as comments."""

    suffix: str = ".toml"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the values as TOML."""
        tables: dict[str, list[str]] = {}
        for path, value in values.items():
            if value is None:  # TOML has no word for it
                continue
            table, _, name = path.rpartition(".")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")  # these values are written as in JSON
        parts = ["\n".join([f"[{table}]", *lines] if table else lines) for table, lines in tables.items()]
        return commented(heading) + "\n" + "\n\n".join(parts) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path."""
        try:
            return mapping_of(tomllib.loads(text), where)
        except tomllib.TOMLDecodeError as error:
            raise PinError(f"{where} is not TOML: {error}") from None
