"""Capture functions that go along the sequence (`capture.frontend.recurrences`) as one op each.

Such a function, like the scan of Mamba or the delta rule of Qwen3-Next, takes tensors and plain values and returns
tensors. Its trace would be a loop for one length. As one op it is the function itself, for every length: the program
calls it by its name, with its own loops, kernels and derivative. What a record would say of it is found by running it
on small tensors (`capture.frontend.scan_trials`).
"""

from __future__ import annotations

import dis
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from autoplan.capture.frontend.marker import marker
from autoplan.capture.frontend.scan_trials import ResultForm, ScanFacts, Trial, result_form
from autoplan.errors import CaptureError
from autoplan.ops.text import literal


@dataclass(frozen=True, order=True)
class Scan:
    """A function of a model's file that goes along the sequence: its file as Python imports it, and its name there.

    A method of a module has the name `Class.method`.
    """

    file: str
    name: str

    @property
    def path(self) -> str:
        """Return the path from which the function is imported."""
        return f"{self.file}.{self.name}"


def _like(xs: list[torch.Tensor], function: str, call: str, facts: str, sizes: list[Any], ranks: list[int],
          dtypes: str) -> list[torch.Tensor]:  # fmt: skip
    out, rest = [], list(sizes)
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        out.append(xs[0].new_empty(rest[:rank], dtype=getattr(torch, dtype)))
        del rest[:rank]
    return out


# function: its path
# call: its arguments as text, with {i} for tensor i
# facts: what was found by trial, as JSON
# sizes, ranks, dtypes: the sizes of all results, one after the other; the number of dims of every result; their dtypes
_GIVEN = "Tensor[] xs, str function, str call, str facts, SymInt[] sizes, SymInt[] ranks, str dtypes"
marker(f"scan({_GIVEN}) -> Tensor[]", _like)


@dataclass
class Scans:
    """The functions that one capture captures as one op each.

    Attributes:
        found: where they stand.
        notes: sentences about how they can be split.
    """

    found: tuple[Scan, ...]
    notes: list[str] = field(default_factory=list)
    _known: dict[object, str] = field(default_factory=dict)  # facts of equal calls

    @contextmanager
    def active(self) -> Iterator[None]:
        """Capture the functions as ops inside the context."""
        with replaced(self.found, self._as_op):
            yield

    def _as_op(self, where: Scan, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = FunctionCall.of(where, function, args, kwargs)
        form = call.result_form(None)
        key = (where, call.text, *((tuple(map(str, x.shape)), x.dtype) for x in call.tensors))
        if key not in self._known:
            facts = call.trial.facts(call.tensors, form)
            self._known[key] = json.dumps(facts.plain())
            self._note(where, facts)
        sizes = [d for shape, _ in form.tensors for d in shape]
        ranks = [len(shape) for shape, _ in form.tensors]
        dtypes = " ".join(str(dtype).removeprefix("torch.") for _, dtype in form.tensors)
        outs = torch.ops.autoplan.scan(call.tensors, where.path, call.text, self._known[key], sizes, ranks, dtypes)
        return form.rebuild(outs)

    def _note(self, where: Scan, facts: ScanFacts) -> None:
        ways = " and ".join(facts.split) or "nothing"
        note = f"{where.name} is one operation, the function of {where.file}; it can be split over {ways}"
        if note not in self.notes:
            self.notes.append(note)


@dataclass(frozen=True)
class ScanForms:
    """Stand-ins for functions that go along the sequence, where only the form of what they give matters.

    Attributes:
        length: the number of tokens.
    """

    found: tuple[Scan, ...]
    length: int
    _known: dict[object, ResultForm] = field(default_factory=dict)  # of equal calls

    @contextmanager
    def active(self) -> Iterator[None]:
        """Give empty tensors in place of the functions' results inside the context."""
        with replaced(self.found, self.of):
            yield

    def of(self, where: Scan, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a result of the right form of a call.

        Raises:
            CaptureError: if the function is not one of tensors.
        """
        call = FunctionCall.of(where, function, args, kwargs)
        key = (where, call.text, *((x.shape, x.dtype) for x in call.tensors))
        if key not in self._known:
            self._known[key] = call.result_form(self.length)
        form = self._known[key]
        return form.rebuild([torch.empty(shape, dtype=dtype) for shape, dtype in form.tensors])


@contextmanager
def replaced(
    found: Sequence[Scan], by: Callable[[Scan, Callable[..., Any], Sequence[Any], Any], Any]
) -> Iterator[None]:
    """Replace the functions by `by(scan, function, args, kwargs)`, and restore them on exit."""
    with ExitStack() as stack:
        for where in found:
            owner, name = _owner(where)
            stack.enter_context(patch.object(owner, name, _replacement(where, vars(owner)[name], by)))
        yield


def _replacement(where: Scan, function: Callable[..., Any], by: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return by(where, function, args, kwargs)

    return run


def _owner(where: Scan) -> tuple[Any, str]:
    """Return the module or class that holds a function, and its name there."""
    *classes, name = where.name.split(".")
    return functools.reduce(getattr, classes, sys.modules[where.file]), name


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function: its tensors, its other arguments as text, and how to run it on other tensors."""

    where: Scan
    tensors: list[torch.Tensor]
    text: str
    trial: Trial

    @staticmethod
    def of(where: Scan, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
        """Read the arguments of a call.

        Raises:
            CaptureError: for an argument that is neither a tensor nor a plain value.
        """
        if "." in where.name:  # a method; whether it needs its module shows when it runs without
            args = (None, *args[1:])
        plain = inspect.unwrap(function)
        signature = inspect.signature(plain)
        bound = signature.bind(*args, **_read(where, plain, signature, kwargs))
        leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors:
            raise CaptureError(f"{where.path} is given no tensor")
        writer = _Writer(where)
        defaults = {n: p.default for n, p in signature.parameters.items()}
        parts, named = [], False
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                parts += [writer.text(name, v) for v in value]
            elif not isinstance(value, torch.Tensor) and _is(value, defaults[name]):
                named = True
            else:
                named = named or kind is inspect.Parameter.KEYWORD_ONLY
                text = writer.text(name, value)
                parts.append(f"{name}={text}" if named else text)
        if writer.count != len(tensors):
            raise CaptureError(f"{where.path} is given tensors in an order that cannot be written")
        reach = max((v for v in (*leaves, *defaults.values()) if type(v) is int), default=0)
        trial = Trial(where.path, plain, leaves, spec, reach, [sys.modules[where.file]])
        return FunctionCall(where, tensors, ", ".join(parts), trial)

    def result_form(self, length: int | None) -> ResultForm:
        """Return the form of the result; sizes of `length` are those of the sequence if sizes are plain numbers."""
        return result_form(self.trial, self.tensors, length)


_PACKED = ("cu_seqlens", "seq_idx")  # the documents of a packed sequence, which only kernels of others keep apart


def _read(
    where: Scan, plain: Callable[..., Any], signature: inspect.Signature, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the named arguments that a function reads: models hand on many more.

    Raises:
        CaptureError: for the documents of a packed sequence.
    """
    parameters = signature.parameters
    named = {n: v for n, v in kwargs.items() if n in parameters}
    given = [n for n in _PACKED if kwargs.get(n) is not None]
    if given:
        raise CaptureError(f"{where.path} is given {given[0]}: packed sequences are not supported in recurrent layers")
    rest = [p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    more = [n for n, v in kwargs.items() if n not in parameters and v is not None]
    reads = {i.argval for i in dis.get_instructions(plain) if i.opname.startswith("LOAD")}
    if more and rest and rest[0] in reads:
        raise CaptureError(f"{where.path} is given {', '.join(more)}, which it does not name; it cannot be captured")
    return named


def _is(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


@dataclass
class _Writer:
    """A writer of arguments that counts the tensors it meets."""

    where: Scan
    count: int = 0

    def text(self, name: str, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            self.count += 1
            return f"{{{self.count - 1}}}"
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            parts = [self.text(name, v) for v in value]
            inside = ", ".join(parts) + ("," if len(parts) == 1 else "")
            return f"[{', '.join(parts)}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, torch.dtype):
            return str(value)
        if value is None or type(value) in (bool, int, float, str):
            return literal(value).replace("{", "{{").replace("}", "}}")
        raise CaptureError(
            f"{self.where.path} is given {name}, a {type(value).__name__}; only a function of tensors and plain values "
            "can be captured as one operation"
        )
