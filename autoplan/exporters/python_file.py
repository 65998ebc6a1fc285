"""Python configurations, read and never run: assignments to attributes and arguments of calls.

    read_python("def f():\n    c = base()\n    c.train.steps = 4 * 25\n    return c", "f.py")    # {"train.steps": 100}

Literals, sums of them, constants of the module, names of the function and other functions of the file are followed.
What is not known is listed with its expression.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autoplan.errors import PinError

UNKNOWN = "?"  # prefix of paths whose value is not known
BY_FUNCTION = "settings of this function"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class _Names:
    """What the names of a file stand for.

    Attributes:
        values: name -> expression.
        functions: name -> function of the file.
        setters: as those of `read_python`.
    """

    values: Mapping[str, ast.expr]
    functions: Mapping[str, ast.FunctionDef]
    setters: Mapping[str, str] | None

    def but(self, values: Mapping[str, ast.expr], without: str) -> _Names:
        """Return a copy with more values, and without a function that is being read."""
        rest = {name: node for name, node in self.functions.items() if name != without}
        return _Names({**self.values, **values}, rest, self.setters)


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
    names = _Names(_constants(tree.body), functions, setters)
    found = {name: _assigned(node, names) for name, node in functions.items()}
    found = {name: values for name, values in found.items() if values}
    if function:
        if function not in functions:
            raise PinError(f"{path} has no function {function!r}; {_place_of(function, tree) or _listed(functions)}")
        return found.get(function, {})
    if len(found) > 1:
        raise PinError(f"{path} has several configurations; name one: {path}:{next(iter(found))} ({', '.join(found)})")
    return next(iter(found.values()), {}) or _assigned(tree, names)


def _listed(functions: Mapping[str, ast.FunctionDef]) -> str:
    return f"it has {', '.join(functions) or 'none'}"


def _place_of(function: str, tree: ast.Module) -> str:
    """Return where a module imports a function from, in words; empty if it does not."""
    for node in (each for each in tree.body if isinstance(each, ast.ImportFrom)):
        for alias in node.names:
            if function == (alias.asname or alias.name):
                return f"it imports {alias.name} from {node.module}; give the file of that module"
    return ""


def _constants(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return what the statements of a module or a function assign to names, once each."""
    out: dict[str, ast.expr | None] = {}
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                out[target.id] = None if target.id in out else node.value
    return {name: value for name, value in out.items() if value is not None}


def _assigned(tree: ast.AST, names: _Names) -> dict[str, Any]:
    """Return the values that a function assigns to attributes or passes by name, in the order of the text."""
    out: dict[str, Any] = {}
    changed = _configurations(tree)
    if isinstance(tree, ast.FunctionDef):
        local = {name: value for name, value in _constants(tree.body).items() if name not in changed}
        names = names.but(local, tree.name)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.Return | ast.Expr)]
    for node in sorted(nodes, key=lambda n: n.lineno):
        if isinstance(node, ast.Assign):
            path = _path(node.targets[0])
            if path is None or path in names.values:  # read where it is used
                continue
            place = path.partition(".")[2]
            out = {name: value for name, value in out.items() if not place or not _below(name, place)}
            out |= _set_here(path, node.value, changed, names)
        elif isinstance(node.value, ast.Call):
            out |= _called(node.value, isinstance(node, ast.Return), changed, names)
    return out


def _set_here(path: str, value: ast.expr, changed: set[str], names: _Names) -> dict[str, Any]:
    """Return what an assignment sets at a path that begins with the name of an object."""
    base = _function_of(value, names)
    if base is not None and "." not in path:
        return _assigned(base, names)
    if "." not in path and not isinstance(value, ast.Call):
        return {}
    out = _values(path.partition(".")[2], value, names)
    if path in changed and isinstance(value, ast.Call) and names.setters is not None:
        out[f"{UNKNOWN}{ast.unparse(value)}"] = BY_FUNCTION  # the configuration that is changed
    return out


def _called(call: ast.Call, returned: bool, changed: set[str], names: _Names) -> dict[str, Any]:
    """Return what a call sets: that is returned, of `update`, or of a function that takes the configuration."""
    path = _path(call.func) or ""
    place = path.removesuffix(".update").partition(".")[2] if path.endswith(".update") else ""
    if returned or place:
        return _values(place, call, names)
    return _set_elsewhere(call, changed, names) if isinstance(call.func, ast.Name) and names.setters is not None else {}


def _below(name: str, place: str) -> bool:
    """Return True for the path of a place or of something below it, which another value of the place replaces."""
    plain = name.removeprefix(UNKNOWN)
    return plain == place or plain.startswith(f"{place}.")


def _function_of(node: ast.expr, names: _Names) -> ast.FunctionDef | None:
    """Return the function of the file that a call without arguments calls."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args or node.keywords:
        return None
    return names.functions.get(node.func.id)


def functions_of(values: Mapping[str, Any]) -> list[str]:
    """Return the calls in a file whose settings are not known."""
    return [path.removeprefix(UNKNOWN) for path, value in values.items() if value == BY_FUNCTION]


def _configurations(tree: ast.AST) -> set[str]:
    """Return the names of the objects whose attributes a function assigns."""
    targets = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    return {path.partition(".")[0] for target in targets if (path := _path(target)) is not None and "." in path}


def _set_elsewhere(call: ast.Call, changed: set[str], names: _Names) -> dict[str, Any]:
    """Return what a call of a function that takes the configuration sets, as far as its name and arguments tell."""
    path, name = _path(call.args[0]) if call.args else None, ast.unparse(call.func)
    if path is None or path.partition(".")[0] not in changed:
        return {}
    for end, set_by_it in (names.setters or {}).items():
        if name.endswith(end) and len(call.args) == 2:
            with suppress(ValueError, TypeError, ArithmeticError):
                return {".".join((*path.split(".")[1:], set_by_it)): _constant(call.args[1], names)}
    return {f"{UNKNOWN}{ast.unparse(call)}": BY_FUNCTION}


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


def _values(path: str, node: ast.expr, names: _Names) -> dict[str, Any]:
    """Return the values of an expression at a path: of a call its name, and its named arguments below."""
    prefix = f"{path}." if path else ""
    node, names = _followed(node, names)
    try:
        value = _constant(node, names)
    except (ValueError, TypeError, ArithmeticError):
        return _of_expression(path, prefix, node, names)
    if isinstance(value, dict) and value:
        return {f"{prefix}{name!s}": each for name, each in value.items()}
    return {path: value} if path else {}


def _followed(node: ast.expr, names: _Names) -> tuple[ast.expr, _Names]:
    """Return what a name stands for, or the expression itself, and the names that may stand in it.

    These are without the ones that were followed: `lr = 2 * lr` is of another `lr`, which is not known.
    """
    while isinstance(node, ast.Name) and node.id in names.values:
        values = dict(names.values)
        node = values.pop(node.id)
        names = replace(names, values=values)
    return node, names


def _constant(node: ast.expr, names: _Names) -> Any:
    """Return the value of literals, names for them and sums of them. ValueError for anything else."""
    node, names = _followed(node, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_constant(node.left, names), _constant(node.right, names))
    return ast.literal_eval(node)


def _of_expression(path: str, prefix: str, node: ast.expr, names: _Names) -> dict[str, Any]:
    if isinstance(node, ast.Dict):
        pairs = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        return {n: v for key, each in pairs for n, v in _values(f"{prefix}{key.value!s}", each, names).items()}
    if isinstance(node, ast.Call) and _path(node.func) is not None:
        return _of_call(path, prefix, node, names)
    text = ast.unparse(node)
    out: dict[str, Any] = {}
    if isinstance(node, ast.List) and node.elts and all(isinstance(each, ast.Call) for each in node.elts):
        out[path] = [ast.unparse(each.func) for each in node.elts if isinstance(each, ast.Call)]
    else:
        known = text.startswith(("torch.", "AttnBackend.")) and _path(node) is not None  # a dtype, a member
        out[path if known else f"{UNKNOWN}{path}"] = text
    return out if path else {}


def _of_call(path: str, prefix: str, node: ast.Call, names: _Names) -> dict[str, Any]:
    """Return the name of what is called at a path, and its named arguments below."""
    alone = node.args and not node.keywords and all(isinstance(each, ast.Constant) for each in node.args)
    out: dict[str, Any] = {path: ast.unparse(node) if alone else _path(node.func)} if path else {}
    for argument in node.keywords:
        if argument.arg is not None:
            out |= _values(f"{prefix}{argument.arg}", argument.value, names)
    return out
