"""Python configurations, read and never run: assignments to attributes and arguments of calls.

    read_python("def f():\n    c = base()\n    c.train.steps = 4 * 25\n    return c", "f.py")    # {"train.steps": 100}

Statements are followed in their order: assignments, tests and loops of known values, functions of the file. What a test
decides that is not known, or a loop without an end in sight, is not known, and is listed with its expression and line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters.python_expressions import MOST, Expressions, path_of
from autoplan.exporters.python_functions import configurations, defaults_of, imported_from, names_of, others_of
from autoplan.exporters.python_values import (
    BY_FUNCTION,
    MADE_BY,
    MISSING,
    UNKNOWN,
    ConfigObject,
    Function,
    Say,
    State,
    Unknown,
    by_path,
    by_test,
    equal,
    is_class,
    is_known,
    maker_of,
    merged,
    objects_in,
    said,
    truth,
)

_STATEMENTS = 20_000  # that are followed in one function, with those that it calls
_DEPTH = 20  # of calls
_PASSES = 4  # of the body of a loop whose turns are not known, until it changes nothing more
_CHANGING = frozenset("append clear extend insert pop remove reverse setdefault sort update".split())
_HARMLESS = frozenset("json logger logging os pprint print yaml repr str len hasattr getattr asdict".split())


@dataclass(frozen=True)
class _Signal:
    """How a statement ends its block: `return`, `raise`, `break`, `continue`, or `doubt` if that is not known."""

    kind: str
    value: Any = MISSING


@dataclass
class _Frame:
    """A function that runs: the states in which a test that is not known may have ended it, with what it returned."""

    name: str
    early: list[tuple[State, Any, Say]] = field(default_factory=list)


def read_python(
    text: str, where: str, setters: Mapping[str, str] | None = None, made: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values that a function of a module assigns.

    Args:
        where: its path, `:function` if it has several.
        setters: as those of `scripts.Python`.
        made: classes; if given, the values are the arguments and attributes of the only object of one of them.
    """
    return {name: value for name, value in _read(text, where, setters, made).items() if name != MADE_BY}


def read_made(text: str, where: str, made: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return what made the only object of some classes or functions, and its values as `read_python` does.

    The first is empty if the file makes none.
    """
    values = _read(text, where, None, made)
    return str(values.pop(MADE_BY, "")), values


def _read(text: str, where: str, setters: Mapping[str, str] | None, made: Sequence[str]) -> dict[str, Any]:
    """Return the values of `read_python`, with what made the object of some classes."""
    path, function = where, ""
    if re.search(r"\.py:\w+$", where):
        path, _, function = where.rpartition(":")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PinError(f"{path} is not Python: {error.msg} (line {error.lineno})") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function:
        if function not in functions:
            raise PinError(
                f"{path} has no function {function!r}; {imported_from(function, tree) or names_of(functions)}"
            )
        return _Reader(tree, setters, made).function(functions[function])
    found = {name: _Reader(tree, setters, made).function(node) for name, node in functions.items()}
    found = {name: found[name] for name in configurations(found, functions, tree, bool(made))}
    if len({str(values) for values in found.values()}) > 1:
        raise PinError(f"{path} has several configurations; name one: {path}:{next(iter(found))} ({', '.join(found)})")
    return next(iter(found.values()), {}) or _Reader(tree, setters, made).script()


def functions_of(values: Mapping[str, Any]) -> list[str]:
    """Return the calls in a file whose settings are not known."""
    return [path.removeprefix(UNKNOWN) for path, value in values.items() if value == BY_FUNCTION]


class _Reader:
    """Follows the statements of a file."""

    def __init__(self, tree: ast.Module, setters: Mapping[str, str] | None, made: Sequence[str]) -> None:
        self._tree, self._setters, self._made = tree, setters, made
        self._names: list[dict[str, Any]] = [{"__name__": "module"}]
        self._frames = [_Frame("")]
        self._left, self._spent = _STATEMENTS, False  # spent: no further calls are followed
        self._any = False  # True in the body of a loop whose turns are not known
        self._passed: list[tuple[ConfigObject, str]] = []  # configurations that went into unknown functions
        self._expressions = Expressions(self, self._names)
        self._of: Mapping[type[ast.stmt], Callable[[Any], _Signal | None]] = {
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented,
            ast.Expr: self._expression,
            ast.Delete: self._delete,
            ast.If: self._if,
            ast.Match: self._match,
            ast.For: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.Try: self._try,
            ast.FunctionDef: self._define,
            ast.Return: lambda node: _Signal("return", None if node.value is None else self._value(node.value)),
            ast.Raise: lambda node: _Signal("raise"),
            ast.Break: lambda node: _Signal("break"),
            ast.Continue: lambda node: _Signal("continue"),
        }

    # -- results -------------------------------------------------------------------------------------------------------

    def function(self, node: ast.FunctionDef) -> dict[str, Any]:
        """Return the values of a function that is called without arguments; what it must be given is an object."""
        self._block(self._tree.body)
        self._left, self._spent, self._passed = _STATEMENTS, False, []
        names = self._bound(node, [], {}, required=False)
        names = {} if names is None else names
        return self._result(self._run(node, names), names)

    def script(self) -> dict[str, Any]:
        """Return the values of a module that is run."""
        self._names[0]["__name__"] = "__main__"
        self._block(self._tree.body)
        return self._result(MISSING, self._names[0])

    def _result(self, value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of what a function returns, or else of the objects that it changed."""
        every = objects_in([names, self._names[0], value])
        changed = list(dict.fromkeys(each.root for each in every if each.changed))
        roots = changed
        if self._made:
            roots = [each for each in every if maker_of(each.made_by) in self._made]
            if len({str(by_path(each)) for each in roots}) > 1:
                raise PinError(f"the file makes several {' and '.join(self._made)}, with different arguments; keep one")
            roots = roots[:1]
            if roots and (by_path(roots[0]) or not roots[0].is_new):
                return {MADE_BY: roots[0].made_by, **self._values_of(roots, changed)}
        elif isinstance(value, ConfigObject) and not value.is_empty:
            roots = [value]
        return self._values_of(roots, changed)

    def _values_of(self, roots: list[ConfigObject], changed: list[ConfigObject]) -> dict[str, Any]:
        """Return the values of objects, and what else may have set some of them."""
        out: dict[str, Any] = {}
        for root in roots:
            out |= by_path(root)
            if self._setters is not None and root.changed and not root.is_new and (root.made_by or root.unknown):
                out.pop(UNKNOWN, None)
                out[f"{UNKNOWN}{root.origin.rpartition(' (line')[0]}"] = BY_FUNCTION
        return out | self._changed_elsewhere(roots, changed)

    def _changed_elsewhere(self, roots: list[ConfigObject], changed: list[ConfigObject]) -> dict[str, Any]:
        """Return the calls and the objects that may have set fields of the result that are not known."""
        held = objects_in(roots)
        calls = [call for each, call in self._passed if each.root in held and each.root.changed]
        parts = [each.unknown for each in changed if each.unknown and each not in held and not self._made]
        return {f"{UNKNOWN}{text}": BY_FUNCTION for text in (*calls, *parts)}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, function: Function, args: list[Any], named: dict[str, Any]) -> Any:
        """Return what a function of the file returns; MISSING if it cannot be followed."""
        names = self._bound(function.node, args, named, required=True)
        running = [frame.name for frame in self._frames]
        if names is None or function.node.name in running or len(running) > _DEPTH or self._spent:
            return MISSING
        around = {} if function.names is self._names[0] else function.names
        value = self._run(function.node, {**around, **names})
        return None if value is MISSING else value

    def passed(self, call: ast.Call, args: list[Any]) -> None:
        """Note a call that is not of this file, which may change the configuration that it takes first."""
        name = path_of(call.func) or ""
        known = self._expressions.known(name.partition(".")[0])
        of_object = known is not MISSING and not isinstance(known, Function)
        first = args[0] if args else None
        if not isinstance(first, ConfigObject) or is_class(name) or of_object or name.partition(".")[0] in _HARMLESS:
            return
        for end, field_set in (self._setters or {}).items():
            if name.endswith(end) and len(args) == 2 and is_known(args[1]):
                self._set(first, field_set, args[1])
                return
        self._passed.append((first, ast.unparse(call)))

    def _run(self, node: ast.FunctionDef, names: dict[str, Any]) -> Any:
        """Follow a function, and return what it returns; MISSING without a return."""
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node)):
            return Unknown(f"{node.name}() (line {node.lineno})")
        frame = _Frame(node.name)
        self._names.append(names)
        self._frames.append(frame)
        signal = self._block(node.body)
        value = MISSING if signal is None else signal.value
        for state, early, say in reversed(frame.early):
            now = State.of(self._names)
            value = early if equal(early, value) else merged(early, value, say)
            state.merged(now, say).restore(self._names)
        self._frames.pop()
        self._names.pop()
        return value

    def _bound(
        self, node: ast.FunctionDef, args: list[Any], named: Mapping[str, Any], required: bool
    ) -> dict[str, Any] | None:
        """Return the names of a function for its arguments; None if they do not fit, or some are missing.

        Args:
            required: False: arguments without a default that are not given are objects of which nothing is known.
        """
        a = node.args
        places, only = [each.arg for each in (*a.posonlyargs, *a.args)], [each.arg for each in a.kwonlyargs]
        out = dict(zip(places, args, strict=False))
        rest = {name: value for name, value in named.items() if name not in (*places, *only)}
        if (len(args) > len(places) and a.vararg is None) or (rest and a.kwarg is None) or set(out) & set(named):
            return None
        out |= {name: value for name, value in named.items() if name not in rest}
        defaults = defaults_of(a)
        missing = [name for name in (*places, *only) if name not in out]
        if required and not set(missing) <= set(defaults):
            return None
        for name in missing:
            given = ConfigObject(origin=f"{name} (line {node.lineno})")
            out[name] = self._value(defaults[name]) if name in defaults else given
        more = {} if a.vararg is None else {a.vararg.arg: list(args[len(places) :])}
        return out | more | others_of(a, rest)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Any:
        return self._expressions.value(node)

    def _block(self, body: list[ast.stmt]) -> _Signal | None:
        """Follow statements until one ends the block."""
        for node in body:
            self._left -= 1
            self._spent = self._spent or self._left < 0
            follow = self._of.get(type(node))
            signal = None if follow is None else follow(node)
            if signal is not None:
                return signal
        return None

    def _define(self, node: ast.FunctionDef) -> None:
        self._names[-1][node.name] = Function(node, self._names[-1])

    def _assign(self, node: ast.Assign) -> None:
        value = self._assigned(node.value, node.targets[0])
        for target in node.targets:
            self._assign_to(target, value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign_to(node.target, self._assigned(node.value, node.target))

    def _assigned(self, node: ast.expr, target: ast.expr) -> Any:
        """Return the value that is assigned: to a name any object, to a field one of which something is known.

        What an unknown function makes of an object that it takes, under the same name, is this object.
        """
        if not isinstance(target, ast.Name):
            return self._expressions.stored(node)
        value = self._value(node)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
            before = self._expressions.known(target.id)
            followed = not isinstance(value, ConfigObject) or value.origin != Unknown.of(node).text
            if node.args[0].id == target.id and isinstance(before, ConfigObject) and not followed:
                return value if is_class(value.made_by) else before
        return value

    def _augmented(self, node: ast.AugAssign) -> None:
        before = self._value(node.target)
        try:
            value = self._expressions.combined(node.op, before, self._value(node.value))
        except (ArithmeticError, TypeError, ValueError):
            value = Unknown.of(node)
        self._assign_to(node.target, value)

    def _assign_to(self, target: ast.expr, value: Any) -> None:
        """Set a name, a field or an item."""
        if isinstance(target, ast.Attribute):
            self._set_in(target.value, target.attr, value)
        elif isinstance(target, ast.Subscript):
            key = self._value(target.slice)
            self._set_in(target.value, key if is_known(key) else Unknown.of(target), value)
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, list | tuple):
            if len(value) == len(target.elts):
                for each, part in zip(target.elts, value, strict=True):
                    self._assign_to(each, part)
        else:
            self._expressions.bind(target, value)

    def _set_in(self, of: ast.expr, key: Any, value: Any) -> None:
        """Set a field of an object, or an item of a plain value, which all names of it then have."""
        inner = self._place(of)
        if isinstance(inner, ConfigObject):
            if isinstance(key, Unknown):
                inner.unknown = inner.unknown or key.text
            else:
                self._set(inner, str(key), value)
        elif isinstance(inner, dict | list):
            new: Any = inner.copy()
            if is_known(value) and not isinstance(key, Unknown):
                try:
                    new[key] = value
                except (IndexError, TypeError):
                    new = Unknown.of(of)
            elif isinstance(inner, dict):
                new = ConfigObject(fields={str(name): each for name, each in inner.items()})
                new.fields |= {} if isinstance(key, Unknown) else {str(key): value}
                new.unknown = key.text if isinstance(key, Unknown) else ""
            else:
                new = Unknown.of(of)
            self._replace(of, inner, new)

    def _replace(self, of: ast.expr, old: Any, new: Any) -> None:
        """Set what holds a plain value, and the names that are the same value, to another."""
        for names in self._names:
            names.update({name: new for name, value in names.items() if value is old})
        self._assign_to(of, new)

    def _place(self, node: ast.expr) -> Any:
        """Return what an expression on the left stands for; a value that is not known becomes an object."""
        if isinstance(node, ast.Attribute):
            outer = self._place(node.value)
            if isinstance(outer, ConfigObject):
                return self._object_in(outer, node.attr, node)
        elif isinstance(node, ast.Subscript):
            outer, key = self._place(node.value), self._value(node.slice)
            if isinstance(outer, ConfigObject) and isinstance(key, str):
                return self._object_in(outer, key, node)
        elif isinstance(node, ast.Name):
            value = self._expressions.known(node.id)
            if value is MISSING or isinstance(value, Unknown):
                text = value.text if isinstance(value, Unknown) else ""
                self._names[-1][node.id] = ConfigObject(origin=Unknown.of(node).text, unknown=text)
            return self._expressions.known(node.id)
        value = self._value(node)
        return ConfigObject(unknown=value.text) if isinstance(value, Unknown) else value

    def _object_in(self, outer: ConfigObject, name: str, node: ast.expr) -> Any:
        """Return a section of an object; a preset that is a word, or nothing, becomes a section of that name."""
        value = self._expressions.section(outer, name, node)
        if value is None or isinstance(value, str | Unknown):
            made_by, unknown = (value or "", "") if not isinstance(value, Unknown) else ("", value.text)
            value = outer.fields[name] = ConfigObject(made_by, unknown=unknown, parent=outer)
        return value

    def _set(self, of: ConfigObject, name: str, value: Any) -> None:
        of.fields[name] = value
        of.changed = of.root.changed = True

    def _expression(self, node: ast.Expr) -> None:
        """Follow a call: of a method that changes its object, of `setattr`, or of any function."""
        call = node.value
        if not isinstance(call, ast.Call):
            return
        name = path_of(call.func)
        if name == "setattr" and len(call.args) == 3:
            key = self._value(call.args[1])
            key = key if isinstance(key, str) else Unknown.of(call)
            return self._set_in(call.args[0], key, self._expressions.stored(call.args[2]))
        if isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGING:
            of = self._place(call.func.value) if call.func.attr == "update" else self._value(call.func.value)
            if isinstance(of, ConfigObject) and call.func.attr == "update":
                return self._update(of, call)
            if isinstance(of, ConfigObject) and call.func.attr in ("append", "extend"):
                return self._added(of, call)
            if isinstance(of, dict | list | set):
                return self._changed(call, call.func, of)
        self._value(call)

    def _added(self, of: ConfigObject, call: ast.Call) -> None:
        """Set objects that a list of a configuration gets as its sections, by their classes."""
        for each in map(self._value, call.args):
            for item in each if isinstance(each, list | tuple) else [each]:
                if isinstance(item, ConfigObject) and item.made_by:
                    self._set(of, maker_of(item.made_by), item)

    def _update(self, of: ConfigObject, call: ast.Call) -> None:
        """Set the fields of an object that `update` names."""
        args = [self._value(each) for each in call.args]
        given: dict[str, Any] = {}
        for each in args:
            if isinstance(each, dict):
                given |= each
            elif isinstance(each, ConfigObject) and not each.made_by:
                given |= each.fields
                of.unknown = of.unknown or each.unknown
            else:
                of.unknown = of.unknown or Unknown.of(call).text
        for keyword in call.keywords:
            if keyword.arg is None:
                of.unknown = of.unknown or Unknown.of(call).text
            else:
                given[keyword.arg] = self._expressions.stored(keyword.value)
        for name, value in given.items():
            self._set(of, str(name), value)

    def _changed(self, call: ast.Call, func: ast.Attribute, of: Any) -> None:
        """Follow a method that changes a list, a mapping or a set."""
        args = [self._value(each) for each in call.args]
        new: Any = of.copy()
        try:
            if call.keywords or any(isinstance(each, Unknown) for each in args):
                raise ValueError("not known")
            getattr(new, func.attr)(*args)
        except (AttributeError, LookupError, TypeError, ValueError):
            new = Unknown.of(call)
        self._replace(func.value, of, new)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._names[-1].pop(target.id, None)
            elif isinstance(target, ast.Attribute):
                inner = self._place(target.value)
                if isinstance(inner, ConfigObject):
                    inner.fields.pop(target.attr, None)

    # -- branches and loops --------------------------------------------------------------------------------------------

    def _if(self, node: ast.If) -> _Signal | None:
        holds = truth(self._value(node.test))
        if holds is not None:
            return self._block(node.body if holds else node.orelse)
        return self._either(node.body, node.orelse, by_test(node.test))

    def _either(self, body: list[ast.stmt], other: list[ast.stmt], say: Say) -> _Signal | None:
        """Follow two blocks of which one is run, and merge what they do."""
        before = State.of(self._names)
        self._left -= before.size  # the names that are copied and merged
        first = self._block(body)
        one = State.of(self._names)
        before.restore(self._names)
        second = self._block(other)
        two = State.of(self._names)
        kinds = [None if signal is None else signal.kind for signal in (first, second)]
        if first is None and second is None:
            one.merged(two, say).restore(self._names)
            return None
        if kinds[1] == "raise":
            one.restore(self._names)
            return first
        if kinds[0] == "raise":
            return second
        if {"break", "continue", "doubt"} & set(kinds):
            one.merged(two, say).restore(self._names)
            return None if self._any else _Signal("doubt")
        early = self._frames[-1].early
        if first is not None:
            early.append((one, first.value, say))
            return second
        early.append((two, MISSING if second is None else second.value, lambda a, b: say(b, a)))
        one.restore(self._names)
        return None

    def _match(self, node: ast.Match) -> _Signal | None:
        """Follow a match as the tests that it stands for."""
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            pattern: ast.pattern = case.pattern
            options = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
            test: ast.expr = ast.Name(f"match {ast.unparse(pattern)}", ast.Load())
            values = [each.value for each in options if isinstance(each, ast.MatchValue)]
            if len(values) == len(options):
                test = ast.Compare(node.subject, [ast.In()], [ast.Tuple(list(values), ast.Load())])
            if case.guard is not None:
                test = ast.BoolOp(ast.And(), [test, case.guard])
            if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and case.guard is None:
                chain = case.body
            else:
                branch = ast.If(ast.copy_location(test, pattern), case.body, chain)
                chain = [ast.fix_missing_locations(ast.copy_location(branch, pattern))]
        return self._block(chain)

    def _for(self, node: ast.For) -> _Signal | None:
        return self._loop(lambda: self._each_turn(node))

    def _while(self, node: ast.While) -> _Signal | None:
        return self._loop(lambda: self._turns(node))

    def _loop(self, follow: Callable[[], _Signal | None]) -> _Signal | None:
        around, self._any = self._any, False
        signal = follow()
        self._any = around
        return signal

    def _each_turn(self, node: ast.For) -> _Signal | None:
        before = State.of(self._names)
        try:
            items = self._expressions.items(node.iter)
        except ValueError:
            self._any_turns(node, node.iter, before)
            return None
        for item in items:
            self._assign_to(node.target, item)
            signal = self._block(node.body)
            if self._left < 0 or (signal is not None and signal.kind == "doubt"):
                self._any_turns(node, node.iter, before)
                return None
            if signal is not None and signal.kind == "break":
                return None
            if signal is not None and signal.kind != "continue":
                return signal
        return self._block(node.orelse)

    def _turns(self, node: ast.While) -> _Signal | None:
        before = State.of(self._names)
        for _ in range(MOST):
            holds = truth(self._value(node.test))
            signal = self._block(node.body) if holds else None
            if holds is None or self._left < 0 or (signal is not None and signal.kind == "doubt"):
                break
            if not holds:
                return self._block(node.orelse)
            if signal is not None and signal.kind == "break":
                return None
            if signal is not None and signal.kind != "continue":
                return signal
        self._any_turns(node, node.test, before)
        return None

    def _any_turns(self, node: ast.For | ast.While, head: ast.expr, before: State) -> None:
        """Follow a loop whose turns are not known: what its body changes is not known."""
        word = "for" if isinstance(node, ast.For) else "while"
        text = f"set in the loop `{word} {ast.unparse(head)}` (line {node.lineno})"
        before.restore(self._names)
        self._any = True
        for _ in range(_PASSES):
            start = State.of(self._names)
            self._spent = self._spent or self._left < start.size
            if isinstance(node, ast.For):
                for name in (each for each in ast.walk(node.target) if isinstance(each, ast.Name)):
                    self._names[-1][name.id] = Unknown(f"{name.id} (line {node.lineno})")
            self._left = max(self._left, 0) + len(node.body)
            signal = self._block(node.body)
            after = State.of(self._names)
            if signal is not None and signal.kind == "return":
                self._frames[-1].early.append((after, signal.value, lambda a, b: text))
            after.merged(start, lambda a, b: text).restore(self._names)

    def _with(self, node: ast.With) -> _Signal | None:
        for item in node.items:
            value = self._value(item.context_expr)
            if item.optional_vars is not None:
                self._assign_to(item.optional_vars, value)
        return self._block(node.body)

    def _try(self, node: ast.Try) -> _Signal | None:
        """Follow the body, and as an alternative every handler in its place."""
        signal: _Signal | None = None
        whole = [*node.body, *node.orelse]
        for handler in node.handlers:
            kind = "an error" if handler.type is None else ast.unparse(handler.type)
            line = handler.lineno

            def say(a: Any, b: Any, kind: str = kind, line: int = line) -> str:
                return f"{said(a)}, or {said(b)} after {kind} (line {line})"

            signal = self._either(whole, handler.body, say)
            whole = []  # the other handlers change what is left
        if not node.handlers:
            signal = self._block(whole)
        return signal or self._block(node.finalbody)
