"""Text of target values in scripts: flags of a command in a shell script, and Python.

Python is read, never run: assignments to attributes and arguments of calls, as far as they are literals. What is not
is listed, since its value is not known.
"""

from __future__ import annotations

import ast
import pprint
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import commented

UNKNOWN = "?"  # prefix of paths whose value is an expression
_BY_FUNCTION = "settings of this function"


@dataclass(frozen=True)
class Name:
    """A name of Python, or a call of one without arguments, as a value."""

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
        """Return the values by path. A flag that is given twice has its last value, as for argparse."""
        try:
            tokens = shlex.split(re.sub(r"\\\n", " ", text), comments=True)
        except ValueError as error:
            raise PinError(f"{where} is not a shell script: {error}") from None
        out: dict[str, Any] = {}
        flag: str | None = None
        for token in (part for word in tokens for part in _parts(word)):
            variable = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.+)", token)
            if token.startswith("--") and len(token) > 2:
                name, equals, value = token.partition("=")
                flag = _LAUNCHER.get(name, name.removeprefix("--").replace("-", "_"))
                out[flag] = _literal(value) if equals else True
            elif variable is not None:
                out[f"{_ENV}{variable[1]}"], flag = _literal(variable[2]), None
            elif flag is not None and token not in _ENDS and not token.startswith("$"):
                known = out[flag]
                value_read = _literal(token)
                out[flag] = (
                    value_read if known is True else [*(known if isinstance(known, list) else [known]), value_read]
                )
                if flag.startswith("launch."):  # one value; the script follows
                    flag = None
            else:
                flag = None
        return out


_ENDS = (")", "(", "&&", "|", ";", "torchrun", "srun", "python")


def _parts(word: str) -> Iterator[str]:
    """Return the words of a token: a parenthesis that begins or ends an array stands alone."""
    if re.fullmatch(r"[A-Z_]+=\(.*", word):
        word = word.partition("(")[2]
    tail = word.endswith(")") and "(" not in word
    if word.rstrip(")") if tail else word:
        yield word[:-1] if tail else word
    if tail:
        yield ")"


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
        return read_python(text, where)


def read_python(text: str, where: str, setters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values that a function of a module assigns.

    Args:
        where: its path, `:function` if it has several.
        setters: as those of `Python`.
    """
    path, function = where, ""
    if re.search(r"\.py:\w+$", where):
        path, _, function = where.rpartition(":")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PinError(f"{path} is not Python: {error.msg} (line {error.lineno})") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {name: _assigned(node, setters) for name, node in functions.items()}
    found = {name: values for name, values in found.items() if values}
    if function:
        if function not in functions:
            raise PinError(f"{path} has no function {function!r}; it has {', '.join(functions) or 'none'}")
        return found.get(function, {})
    if len(found) > 1:
        raise PinError(f"{path} has several configurations; name one: {path}:{next(iter(found))} ({', '.join(found)})")
    return next(iter(found.values()), {}) or _assigned(tree, setters)


def _written(value: Any) -> str:
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False).replace("\n", "\n        ")


def _call(target: str, name: str, below: Mapping[str, Any]) -> list[str]:
    if name == "dict.update":
        return [f"    {target}.update(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]
    return [f"    {target} = {name}(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]


def _assigned(tree: ast.AST, setters: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the values that a function assigns to attributes or passes by name, in the order of the text."""
    out: dict[str, Any] = {}
    changed = set[str]() if setters is None else _configurations(tree)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.Return | ast.Expr)]
    for node in sorted(nodes, key=lambda n: n.lineno):
        if isinstance(node, ast.Assign):
            path = _path(node.targets[0])
            if path is not None and ("." in path or isinstance(node.value, ast.Call)):
                out |= _values(path.partition(".")[2], node.value)
            if path in changed and isinstance(node.value, ast.Call):  # the configuration that is changed
                out[f"{UNKNOWN}{ast.unparse(node.value)}"] = _BY_FUNCTION
        elif isinstance(node.value, ast.Call):
            path = _path(node.value.func) or ""
            place = path.removesuffix(".update").partition(".")[2] if path.endswith(".update") else ""
            if isinstance(node, ast.Return) or place:
                out |= _values(place, node.value)
            elif isinstance(node.value.func, ast.Name):
                out |= _set_elsewhere(node.value, changed, setters or {})
    return out


def functions_of(values: Mapping[str, Any]) -> list[str]:
    """Return the calls in a file whose settings are not known."""
    return [path.removeprefix(UNKNOWN) for path, value in values.items() if value == _BY_FUNCTION]


def _configurations(tree: ast.AST) -> set[str]:
    """Return the names of the objects whose attributes a function assigns."""
    targets = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    return {path.partition(".")[0] for target in targets if (path := _path(target)) is not None and "." in path}


def _set_elsewhere(call: ast.Call, changed: set[str], setters: Mapping[str, str]) -> dict[str, Any]:
    """Return what a call of a function that takes the configuration sets, as far as its name and arguments tell."""
    path, name = _path(call.args[0]) if call.args else None, ast.unparse(call.func)
    if path is None or path.partition(".")[0] not in changed:
        return {}
    for end, set_by_it in setters.items():
        if name.endswith(end) and len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
            return {".".join((*path.split(".")[1:], set_by_it)): call.args[1].value}
    return {f"{UNKNOWN}{ast.unparse(call)}": _BY_FUNCTION}


def _path(node: ast.AST) -> str | None:
    """Return the path of an attribute, a name, or a text in brackets: `cfg.env_vars["X"]` is `cfg.env_vars.X`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _path(node.value)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = _path(node.value)
        return None if inner is None else f"{inner}.{node.slice.value!s}"
    else:
        return None
    return None if inner is None else f"{inner}.{node.attr}"


def _values(path: str, node: ast.expr) -> dict[str, Any]:
    """Return the values of an expression at a path: of a call its name, and its named arguments below."""
    prefix = f"{path}." if path else ""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return _of_expression(path, prefix, node)
    if isinstance(value, dict) and value:
        return {f"{prefix}{name!s}": each for name, each in value.items()}
    return {path: value} if path else {}


def _of_expression(path: str, prefix: str, node: ast.expr) -> dict[str, Any]:
    if isinstance(node, ast.Dict):
        pairs = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        return {n: v for key, each in pairs for n, v in _values(f"{prefix}{key.value!s}", each).items()}
    if isinstance(node, ast.Call) and (name := _path(node.func)) is not None:
        alone = node.args and not node.keywords and all(isinstance(each, ast.Constant) for each in node.args)
        out = {path: ast.unparse(node) if alone else name} if path else {}
        for argument in node.keywords:
            if argument.arg is not None:
                out |= _values(f"{prefix}{argument.arg}", argument.value)
        return out
    text = ast.unparse(node)
    known = text.startswith(("torch.", "AttnBackend.")) and _path(node) is not None  # a dtype, a member
    return {path if known else f"{UNKNOWN}{path}": text} if path else {}
