"""Expressions of Python files, evaluated without running the file: literals, names, arithmetic, plain functions.

What depends on anything else is Unknown, with its text and its line.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from autoplan.exporters.python_values import (
    MISSING,
    ConfigObject,
    Function,
    Unknown,
    by_test,
    is_known,
    is_missing,
    merged,
    truth,
)

MOST = 10_000  # items of a sequence, bits of a number, and turns of a loop that are followed
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLED: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, dict, divmod, float, int, len, list, max, min, pow, range, round)},
    **{f.__name__: f for f in (set, sorted, str, sum, tuple)},
    "enumerate": lambda *given: list(enumerate(*given)),
    "reversed": lambda given: list(reversed(given)),
    "zip": lambda *given: list(zip(*given, strict=False)),
    **{f"math.{f.__name__}": f for f in (math.ceil, math.floor, math.log2, math.prod)},
}
_TYPES: Mapping[str, type] = {t.__name__: t for t in (bool, dict, float, int, list, set, str, tuple)}
# Methods of plain values that change nothing
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        "capitalize count endswith find format index isdigit join lower lstrip partition removeprefix removesuffix "
        "replace rpartition rsplit rstrip split startswith strip title upper".split()
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
_SYMBOLS = ("torch.", "AttnBackend.")  # modules and enumerations whose members are values
_ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
_CONFIGS = ("run.Config", "run.Partial", "nemo_run.Config", "nemo_run.Partial")  # of NeMo-Run
_COPIES = ("copy.deepcopy", "deepcopy", "copy.copy")
_FAILS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError)


class Calls(Protocol):
    """Calls that are followed: the statements of the file."""

    def call(self, function: Function, args: list[Any], named: dict[str, Any]) -> Any:
        """Return what a function of the file returns; MISSING if it cannot be followed."""

    def passed(self, call: ast.Call, args: list[Any]) -> None:
        """Note a call that is not of this file, which may change the objects that it takes."""


class Expressions:
    """Evaluates expressions by the names of the functions that run, the innermost last."""

    def __init__(self, calls: Calls, frames: list[dict[str, Any]]) -> None:
        self._calls = calls
        self._frames = frames
        self._of: Mapping[type[ast.expr], Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._bool,
            ast.Compare: self._compare,
            ast.IfExp: self._either,
            ast.JoinedStr: self._text,
            ast.Dict: self._dict,
            **dict.fromkeys((ast.List, ast.Tuple, ast.Set), self._sequence),
            **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), self._comprehension),
            ast.Call: self._call,
            ast.NamedExpr: self._named,
        }

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        evaluate = self._of.get(type(node))
        if evaluate is None:
            return Unknown.of(node)
        try:
            return evaluate(node)
        except _FAILS:
            return Unknown.of(node)

    def stored(self, node: ast.expr) -> Any:
        """Return the value of an expression for a field: a section that was only read is not known."""
        value = self.value(node)
        if isinstance(value, ConfigObject) and value.is_empty:
            return Unknown(value.origin or Unknown.of(node).text)
        parts = value if isinstance(value, list | tuple) else ()
        return Unknown.of(node) if any(isinstance(each, ConfigObject) and each.is_empty for each in parts) else value

    def known(self, name: str) -> Any:
        """Return what a name stands for; MISSING if the file does not say."""
        names = self._frames[-1]
        return names[name] if name in names else self._frames[0].get(name, MISSING)

    def combined(self, how: ast.operator, a: Any, b: Any) -> Any:
        """Return the result of an operator. Raises: one of the usual errors if it has none."""
        if type(how) not in _BINARY or not (is_known(a) and is_known(b)):
            raise ValueError("not known")
        if isinstance(how, ast.Pow | ast.LShift) and abs(b) > MOST:
            raise ValueError("too large")
        counts = [n for n in (a, b) if isinstance(n, int)]
        if isinstance(how, ast.Mult) and any(hasattr(n, "__len__") for n in (a, b)) and max(counts, default=0) > MOST:
            raise ValueError("too large")
        return _BINARY[type(how)](a, b)

    def section(self, of: ConfigObject, name: str, node: ast.AST) -> Any:
        """Return a field of an object; an empty section where it has none."""
        if name not in of.fields:
            origin = f"{ast.unparse(node)} (line {getattr(node, 'lineno', 0)})"
            of.fields[name] = ConfigObject(origin=origin, parent=of)
        return of.fields[name]

    def _name(self, node: ast.Name) -> Any:
        value = self.known(node.id)
        return Unknown.of(node) if value is MISSING else value

    def _attribute(self, node: ast.Attribute) -> Any:
        text = path_of(node)
        if text is not None and text.startswith(_SYMBOLS) and self.known(text.partition(".")[0]) is MISSING:
            return text
        inner = self.value(node.value)
        if isinstance(inner, ConfigObject):
            return self.section(inner, node.attr, node)
        return Unknown.of(node)

    def _subscript(self, node: ast.Subscript) -> Any:
        inner = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            ends = [None if n is None else self.value(n) for n in (node.slice.lower, node.slice.upper, node.slice.step)]
            return inner[slice(*ends)] if is_known(ends) and isinstance(inner, list | tuple | str) else Unknown.of(node)
        key = self.value(node.slice)
        if isinstance(inner, ConfigObject) and isinstance(key, str):
            return self.section(inner, key, node)
        return inner[key] if isinstance(inner, list | tuple | str | dict) and is_known(key) else Unknown.of(node)

    def _binary(self, node: ast.BinOp) -> Any:
        return self.combined(node.op, self.value(node.left), self.value(node.right))

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            holds = truth(value)
            return Unknown.of(node) if holds is None else not holds
        return _UNARY[type(node.op)](value) if is_known(value) else Unknown.of(node)

    def _bool(self, node: ast.BoolOp) -> Any:
        stops, value = isinstance(node.op, ast.Or), None
        doubt = False
        for each in node.values:
            value = self.value(each)
            holds = truth(value)
            if holds is stops and not doubt:
                return value
            doubt = doubt or holds is None
            if doubt and holds is stops and not stops:
                return False  # `unknown and False`
        return Unknown.of(node) if doubt else value

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for how, each in zip(node.ops, node.comparators, strict=True):
            right = self.value(each)
            if isinstance(how, ast.Is | ast.IsNot) and right is None and isinstance(left, ConfigObject) and left.is_new:
                holds = isinstance(how, ast.IsNot)
            elif is_known(left) and is_known(right):
                holds = _COMPARED[type(how)](left, right)
            else:
                return Unknown.of(node)
            if not holds:
                return False
            left = right
        return True

    def _either(self, node: ast.IfExp) -> Any:
        holds = truth(self.value(node.test))
        if holds is None:
            return merged(self.stored(node.body), self.stored(node.orelse), by_test(node.test))
        return self.value(node.body if holds else node.orelse)

    def _text(self, node: ast.JoinedStr) -> Any:
        out = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value, spec = self.value(part.value), "" if part.format_spec is None else self.value(part.format_spec)
                if not is_known(value) or not is_known(spec) or part.conversion != -1:
                    return Unknown.of(node)
                out.append(format(value, spec))
            else:
                out.append(str(self.value(part)))
        return "".join(out)

    def _dict(self, node: ast.Dict) -> Any:
        out: dict[Any, Any] = {}
        unknown: list[str] = []
        for key, each in zip(node.keys, node.values, strict=True):
            name, value = None if key is None else self.value(key), self.stored(each)
            if key is None and isinstance(value, ConfigObject) and not value.made_by:
                out |= value.fields
                unknown += [value.unknown] * bool(value.unknown)
            elif key is None and isinstance(value, dict):
                out |= value
            elif key is None or not is_known(name):
                unknown.append(Unknown.of(each if key is None else key).text)
            else:
                out[name] = value
        if not unknown and is_known(out):
            return out
        fields = {str(name): value for name, value in out.items()}
        return ConfigObject(unknown=", ".join(unknown), fields=fields, origin=Unknown.of(node).text)

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        out: list[Any] = []
        for each in node.elts:
            value = self.value(each.value if isinstance(each, ast.Starred) else each)
            if isinstance(value, Unknown):
                return Unknown.of(node)
            out += value if isinstance(each, ast.Starred) else [value]
        return out if isinstance(node, ast.List) else tuple(out) if isinstance(node, ast.Tuple) else set(out)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        inner = dict(self._frames[-1])
        self._frames.append(inner)
        try:
            turns = self._turns(node.generators, 0)
            if isinstance(node, ast.DictComp):
                pairs = [(self.value(node.key), self.value(node.value)) for _ in turns]
                return dict(pairs) if is_known(pairs) else Unknown.of(node)
            items = [self.value(node.elt) for _ in turns]
        finally:
            self._frames.pop()
        if any(isinstance(each, Unknown) for each in items):
            return Unknown.of(node)
        return set(items) if isinstance(node, ast.SetComp) else items

    def _turns(self, generators: list[ast.comprehension], at: int) -> Iterator[None]:
        if at == len(generators):
            yield
            return
        for item in self.items(generators[at].iter):
            self.bind(generators[at].target, item)
            holds = [truth(self.value(test)) for test in generators[at].ifs]
            if None in holds:
                raise ValueError("a condition is not known")
            if all(holds):
                yield from self._turns(generators, at + 1)

    def items(self, node: ast.expr) -> list[Any]:
        """Return the items of a sequence. Raises: ValueError if they are not known, or are too many."""
        value = self.value(node)
        if not isinstance(value, list | tuple | range | dict | str | set | type({}.keys()) | type({}.values())):
            raise ValueError("not a sequence that is known")
        items = list(islice(value, MOST + 1))
        if len(items) > MOST:
            raise ValueError("too many items")
        return items

    def bind(self, target: ast.expr, value: Any) -> None:
        """Set a name, or the names of a tuple, to a value."""
        if isinstance(target, ast.Name):
            self._frames[-1][target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = list(value) if isinstance(value, list | tuple | str) else []
            if len(parts) != len(target.elts) or any(isinstance(each, ast.Starred) for each in target.elts):
                parts = [Unknown.of(target)] * len(target.elts)
            for each, part in zip(target.elts, parts, strict=True):
                self.bind(each.value if isinstance(each, ast.Starred) else each, part)

    def _named(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.bind(node.target, value)
        return value

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Any:
        name = path_of(node.func) or ""
        called = self.known(name) if isinstance(node.func, ast.Name) else MISSING
        args, named, unknown = self._arguments(node)
        if name in _CONFIGS and node.args:  # an object that is made later: its class is the first argument
            return ConfigObject(self._name_of(node.args[0]), Unknown.of(node).text, ", ".join(unknown), named)
        if isinstance(called, Function):
            value = MISSING if unknown else self._calls.call(called, args, named)
            if value is not MISSING:
                return value
        elif called is MISSING:
            value = self._plain(node, name, args, named) if not unknown else MISSING
            if value is not MISSING:
                return value
        self._calls.passed(node, args)
        origin = Unknown.of(node).text
        if not name:
            return ConfigObject(unknown=origin, origin=origin)
        fixed = node.args and not node.keywords and is_known(args)
        made_by = f"{name}({', '.join(map(repr, args))})" if fixed else name
        return ConfigObject(made_by=made_by, unknown=", ".join(unknown), fields=named, origin=origin)

    def _name_of(self, node: ast.expr) -> str:
        """Return the name of a class or function, also of one that an argument of the file's function stands for."""
        name = path_of(node) or ""
        known = self.known(name)
        return known.text.partition(" (line")[0] if isinstance(known, Unknown) else name

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any], list[str]]:
        """Return the positional and the named arguments, and the expressions of those that are not known by name."""
        args: list[Any] = []
        named: dict[str, Any] = {}
        unknown: list[str] = []
        for each in node.args:
            value = self.value(each.value if isinstance(each, ast.Starred) else each)
            if isinstance(each, ast.Starred) and not isinstance(value, list | tuple):
                unknown.append(Unknown.of(each).text)
            else:
                args += value if isinstance(each, ast.Starred) else [value]
        for keyword in node.keywords:
            value = self.stored(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
            elif isinstance(value, ConfigObject) and not value.made_by:
                named |= value.fields
                unknown += [value.unknown] * bool(value.unknown)
            else:
                unknown.append(Unknown.of(keyword.value).text)
        return args, named, unknown

    def _plain(self, node: ast.Call, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        """Return the result of a plain function or method; MISSING if it is none."""
        if name == "isinstance" and len(args) == 2:
            return self._is_instance(node, args[0])
        if name in _COPIES and len(args) == 1:
            return self._copied(args[0])
        if name.rpartition(".")[2] == "replace" and name in ("replace", "dataclasses.replace") and len(args) == 1:
            out = self._copied(args[0])
            if isinstance(out, ConfigObject):
                out.fields |= named
            return out
        if name in _ENVIRONMENT:  # as ${X:-8} of a shell script: the default holds
            return args[1] if len(args) == 2 else Unknown.of(node)
        if name == "dict" and not args:
            return named if is_known(named) else ConfigObject(fields=named, origin=Unknown.of(node).text)
        if name in _CALLED:
            usable = is_known([args, named]) or (name in ("enumerate", "zip", "list", "tuple", "len", "reversed"))
            usable = usable and not any(isinstance(each, Unknown | ConfigObject) for each in args)
            return _limited(_CALLED[name](*args, **named)) if usable else Unknown.of(node)
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, args, named)
        return MISSING

    def _method(self, node: ast.Call, func: ast.Attribute, args: list[Any], named: dict[str, Any]) -> Any:
        of_module = (path_of(func.value) or "").partition(".")[0]
        if of_module and self.known(of_module) is MISSING:
            return MISSING
        of = self.value(func.value)
        if isinstance(of, ConfigObject):
            if func.attr == "get" and not of.made_by and args and isinstance(args[0], str) and args[0] in of.fields:
                return of.fields[args[0]]
            return MISSING
        methods = _METHODS.get(type(of), frozenset())
        if func.attr not in methods or not is_known([of, args, named]):
            return Unknown.of(node) if type(of) in _METHODS or isinstance(of, Unknown) else MISSING
        out = getattr(of, func.attr)(*args, **named)
        return list(out) if func.attr in ("items", "keys", "values") else _limited(out)

    def _is_instance(self, node: ast.Call, value: Any) -> Any:
        kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
        names = [path_of(kind) or "" for kind in kinds]
        if is_known(value):
            plain = tuple(_TYPES[name] for name in names if name in _TYPES)
            return isinstance(value, plain)
        if isinstance(value, ConfigObject) and value.is_new and all(name in _TYPES for name in names):
            return False
        return Unknown.of(node)

    def _copied(self, value: Any) -> Any:
        """Return a copy of an object with its sections."""
        if not isinstance(value, ConfigObject) or is_missing(value):
            return value
        fields = {name: self._copied(each) for name, each in value.fields.items()}
        return ConfigObject(made_by=value.made_by, unknown=value.unknown, fields=fields, origin=value.origin)


def _limited(value: Any) -> Any:
    if hasattr(value, "__len__") and len(value) > MOST:
        raise ValueError("too large")
    return value


def path_of(node: ast.AST) -> str | None:
    """Return the path of an attribute, a name, or a text in brackets: `cfg.env_vars["X"]` is `cfg.env_vars.X`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = path_of(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = path_of(node.value)
        return None if inner is None else f"{inner}.{node.slice.value!s}"
    return None
