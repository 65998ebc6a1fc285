"""Functions of Python files: the values of their arguments, where they come from, and whether they are called."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from autoplan.exporters.python_values import ConfigObject, is_known


def names_of(functions: Mapping[str, ast.FunctionDef]) -> str:
    return f"it has {', '.join(functions) or 'none'}"


def imported_from(function: str, tree: ast.Module) -> str:
    """Return where a module imports a function from, in words; empty if it does not."""
    for node in (each for each in tree.body if isinstance(each, ast.ImportFrom)):
        for alias in node.names:
            if function == (alias.asname or alias.name):
                return f"it imports {alias.name} from {node.module}; give the file of that module"
    return ""


def is_called(name: str, tree: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(func, ast.Name) and func.id == name for func in calls)


def configurations(
    found: Mapping[str, Mapping[str, Any]], functions: Mapping[str, ast.FunctionDef], tree: ast.Module, made: bool
) -> list[str]:
    """Return the functions that are configurations, of all with the values that they set.

    Args:
        made: True: a function that another one of them calls, and whose object that returns, is none.
    """
    helpers = [name for name in found if name.startswith("_") and is_called(name, tree)]
    out = [name for name, values in found.items() if values and name not in helpers]
    if not made:
        return out
    called = {name for name in out for other in out if name != other and is_called(name, functions[other])}
    return [name for name in out if name not in called]


def defaults_of(a: ast.arguments) -> dict[str, ast.expr]:
    """Return the defaults of the arguments of a function that have one."""
    places = [each.arg for each in (*a.posonlyargs, *a.args)]
    out = dict(zip(places[len(places) - len(a.defaults) :], a.defaults, strict=True))
    named = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    return out | {each.arg: value for each, value in named if value is not None}


def others_of(a: ast.arguments, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the value of `**others` of a function for the arguments that have no name of their own."""
    return {} if a.kwarg is None else {a.kwarg.arg: rest if is_known(rest) else ConfigObject(fields=rest)}
