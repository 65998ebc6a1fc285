"""Text of target values in scripts: flags of a command in a shell script, and Python.

Both are read, never run. What depends on values that the file does not hold is listed with its expression.
"""

from __future__ import annotations

import pprint
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.exporters.python_file import read_python
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.setup import Setup
from autoplan.exporters.shell import BREAK, shell_words
from autoplan.exporters.syntax import commented


@dataclass(frozen=True)
class Name:
    """A name of Python, or a call of one without arguments, as a value."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Code:
    """An expression of Python as a value, of names that the function has."""

    text: str

    def __repr__(self) -> str:
        return self.text


# -- shell -------------------------------------------------------------------------------------------------------------

_ENV = "env."  # paths of environment variables
_LAUNCHER = {"--nnodes": "launch.nnodes", "--nproc-per-node": "launch.nproc_per_node"}
_LAUNCHER |= {"--nproc_per_node": "launch.nproc_per_node"}


@dataclass(frozen=True)
class Flags:
    """A shell script that starts a command with flags. Paths: the flag with `_` for `-`, `env.NAME`, `launch.NAME`.

    `true` is a flag without a value; false is not written. Values of a list stand one after the other.
    """

    launch: Callable[[Setup], list[str]]
    suffix: str = ".sh"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", commented(heading).rstrip("\n")]
        lines += [f"export {path.removeprefix(_ENV)}={v}" for path, v in values.items() if path.startswith(_ENV)]
        lines.append("PLAN_ARGS=(")
        for path, value in values.items():
            if path.startswith((_ENV, "launch.")) or value is False:
                continue
            each = [] if value is True else value if isinstance(value, list) else [value]
            flag = "--" + path.replace("_", "-")
            lines.append("    " + shlex.join([flag, *map(str, each)]))
        return "\n".join([*lines, ")", *self.launch(about)]) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path. A flag that is given twice has its last value, as for argparse.

        The path of a flag whose value the script does not set begins with `?`, as does one that stands in a branch
        whose test is not known.
        """
        out: dict[str, Any] = {}
        flag: str | None = None
        for word in shell_words(text, where):
            token = word.text
            variable = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.+)", token)
            if token.startswith("--") and len(token) > 2:
                name, equals, value = token.partition("=")
                flag = _LAUNCHER.get(name, name.removeprefix("--").replace("-", "_"))
                _set(out, flag, _literal(value) if equals else True, word.sure)
            elif variable is not None:
                out[f"{_ENV}{variable[1]}"], flag = _literal(variable[2]), None
            elif flag is not None and token not in _ENDS and not _ARRAY.fullmatch(token):
                known = out.get(flag, out.get(UNKNOWN + flag))
                value_read = _literal(token)
                new = value_read if known is True else [*(known if isinstance(known, list) else [known]), value_read]
                _set(out, flag, new, word.sure)
                if flag.startswith("launch."):  # one value; the script follows
                    flag = None
            else:
                flag = None
        return out


_ENDS = (BREAK, ")", "(", "torchrun", "srun", "python")
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}\)?")  # the flags of another array


def _set(out: dict[str, Any], flag: str, value: Any, sure: bool) -> None:
    """Set the value of a flag; one that is not known replaces what was known before."""
    known = sure and "$" not in str(value)
    out.pop(f"{UNKNOWN}{flag}" if known else flag, None)
    if known or not flag.startswith("launch."):
        out[flag if known else f"{UNKNOWN}{flag}"] = value


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# -- Python ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Python:
    """A function that changes a configuration and returns it.

    Attributes:
        head: returns the lines before the assignments, and the name of the configuration.
        calls: path -> class: the values below it are arguments of one call.
        setters: end of the name of a function that sets one field of its first argument -> the field; None for files
            whose functions set nothing else than what the target's fields and defaults say.
    """

    head: Callable[[Setup, Mapping[str, Any]], tuple[list[str], str]]
    calls: Mapping[str, str]
    setters: Mapping[str, str] | None = field(default=None, hash=False)
    suffix: str = ".py"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the module."""
        head, variable = self.head(about, values)
        lines, called = [commented(heading), *head], set()
        for path, value in values.items():
            place = next((each for each in self.calls if path.startswith(f"{each}.")), None)
            if place is None:
                lines.append(f"    {variable}.{path} = {_written(value)}")
            elif place not in called:
                called.add(place)
                below = {p.removeprefix(f"{place}."): v for p, v in values.items() if p.startswith(f"{place}.")}
                lines += _call(f"{variable}.{place}", self.calls[place], below)
        return "\n".join([*lines, f"    return {variable}"]) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`.

        So does a call of another function that takes the configuration, whose settings are not known.
        """
        return read_python(text, where, self.setters)


@dataclass(frozen=True)
class PythonCall:
    """A function that returns one object, made by nested calls.

    Attributes:
        head: lines before the function.
        name: the class of the object.
        modules: class -> module.
    """

    head: tuple[str, ...]
    name: str
    modules: Mapping[str, str]
    suffix: str = ".py"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the module. A value of type Name is a class, whose arguments are below its path."""
        used = sorted({self.name, *(v.text for v in values.values() if isinstance(v, Name))})
        imports = [f"from {self.modules[name]} import {name}" for name in used]
        lines = [f"    return {self.name}("]
        for path, value in values.items():
            inside = next((p for p, v in values.items() if isinstance(v, Name) and path.startswith(f"{p}.")), None)
            if isinstance(value, Name):
                below = {p.removeprefix(f"{path}."): v for p, v in values.items() if p.startswith(f"{path}.")}
                given = ", ".join(f"{k}={v!r}" for k, v in below.items())
                lines.append(f"        {path}={value.text}({given}),")
            elif inside is None:
                lines.append(f"        {path}={value!r},")
        return "\n".join([commented(heading), *imports, *self.head, *lines, "        **settings,", "    )"]) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`."""
        return read_python(text, where, made=self.name)


def _written(value: Any) -> str:
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False).replace("\n", "\n        ")


def _call(target: str, name: str, below: Mapping[str, Any]) -> list[str]:
    if name == "dict.update":
        return [f"    {target}.update(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]
    return [f"    {target} = {name}(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]
