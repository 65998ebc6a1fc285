"""An operation in a module that learns: which of a sample's tensors are inputs, which are parameters.

In every form the first real tensor of the sample, called h, is scaled by a parameter:

    batch        it is stacked from several seeds; arguments that count dims from the front count one more, if the
                 operation then computes of every sample what it did alone
    rows         its rows, and those of all tensors with as many, are joined over several seeds
    every batch  all tensors are stacked
    weights      no tensor is an input; the other real ones are parameters in every form

A form is left out if PyTorch refuses it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.compatibility.torch_ops.samples import Drawn, Entry, spread

FILE = "op_in_a_module.py"  # the name of a program's source in messages
FORMS = ("batch", "rows", "every batch", "weights")
_CAPTURED, _RUN = 7, 14  # samples of the example that is captured, and of the batch that is run
_ROWS = (3, 6)  # seeds whose rows are joined for them
_PLAIN = (bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
_NAMES = {"torch": torch, "nn": nn, "device": torch.device, "inf": float("inf"), "nan": float("nan")}


def loss_of(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a sum of means of squares of all results; of a single number the number itself."""
    total = torch.zeros((), dtype=torch.float64)
    for k, x in enumerate(pytree.tree_leaves(out)):
        if isinstance(x, torch.Tensor) and x.numel():
            x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()
            total = total + (0.5 + k) * (x.square().mean() if x.dim() else x)
    return total


def tensors_of(drawn: Drawn) -> list[torch.Tensor]:
    """Return the tensors among the arguments."""
    return [x for x in pytree.tree_leaves((drawn.args, drawn.kwargs)) if isinstance(x, torch.Tensor)]


def signature(drawn: Drawn) -> str:
    """Return all of a sample but its values."""

    def shown(x: Any) -> str:
        return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return str(pytree.tree_map(shown, (drawn.args, drawn.kwargs)))


@dataclass(frozen=True)
class OpProgram:
    """An operation or module on a sample, as `experiments.compatibility.fuzz.examine` takes it.

    Attributes:
        drawn: the sample of every seed.
        main: the place of the tensor that is scaled; None if the sample has no real tensor.
        inputs: the places of the tensors that are inputs of the model.
    """

    entry: Entry
    drawn: tuple[Drawn, ...]
    form: str
    main: int | None
    inputs: tuple[int, ...]

    @functools.cached_property
    def _leaves(self) -> list[list[torch.Tensor]]:
        return [[x.detach() for x in tensors_of(d)] for d in self.drawn]

    @property
    def rows(self) -> int:
        """The rows of one seed in a batch."""
        return int(self._leaves[0][self.inputs[0]].shape[0]) if self.form == "rows" else 1

    @property
    def captured(self) -> tuple[int, int]:
        """The size of the example that is captured: samples, and the second dim of the first input."""
        return self._size(_ROWS[0] if self.form == "rows" else _CAPTURED)

    @property
    def runs(self) -> tuple[int, int]:
        """The size of the batch that is run."""
        return self._size(_ROWS[1] if self.form == "rows" else _RUN)

    def _size(self, num_seeds: int) -> tuple[int, int]:
        samples = num_seeds * self.rows
        return samples, next((x.shape[1] for x in self.batch((samples, 0)).values() if x.dim() > 1), 1)

    def env(self, size: tuple[int, int]) -> dict[str, int]:
        """Return the sizes of a batch by symbol."""
        return {"b": size[0], "s": size[1], "t": size[1]}

    def batch(self, size: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Return a batch of so many samples: of as many seeds, or of their rows."""
        num = size[0] // self.rows
        joined = torch.cat if self.form == "rows" else torch.stack
        found = {f"x{i}": joined([self._leaves[k][i] for k in range(num)]).contiguous() for i in self.inputs}
        if not found:
            generator = torch.Generator().manual_seed(0)
            found["x"] = torch.randn(num, 3, generator=generator, dtype=torch.float64)
        return found

    @property
    def text(self) -> str:
        """The source of the module."""
        return self._written[0]

    @functools.cached_property
    def _written(self) -> tuple[str, dict[str, Any]]:
        """The source of the module, and what its names stand for."""
        first, text = self.drawn[0], _Text(self)
        given = [text.of(a) for a in first.args] + [f"{k}={text.of(v)}" for k, v in first.kwargs.items()]
        results = ["finish(out)"]
        if text.scaled:
            results.append("0.1 * h")
        if not self.inputs:
            text.init.append("self.other = nn.Parameter(torch.ones(3, dtype=torch.float64))")
            results.append("x * self.other")
        if first.make is not None:
            text.init.append("self.op = make()")
        call = f"out = {'op' if first.make is None else 'self.op'}({', '.join(given)})"
        body = [*text.scaled, call, f"return {', '.join(results)}"]
        lines = [
            f"# {self.entry.name}, {self.form}: {signature(first)}",
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in text.init),
            "",
            f"    def forward(self, {', '.join(self.batch((self.rows, 0)))}):",
            *(f"        {line}" for line in body),
            "",
        ]
        return "\n".join(lines), {**text.space, "op": self.entry.call, "make": first.make, "finish": first.finish}

    @functools.cached_property
    def _space(self) -> dict[str, Any]:
        text, space = self._written
        module = types.ModuleType(FILE.removesuffix(".py"))
        module.__file__ = FILE
        module.__dict__.update(space)
        linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)
        exec(compile(text, FILE, "exec"), module.__dict__)
        return module.__dict__

    def model(self) -> nn.Module:
        """Return a new module; all have the same values."""
        self._space["tensors"] = [x.clone() for x in self._leaves[0]]
        model: nn.Module = self._space["Model"]()
        return model

    @property
    def loss_fn(self) -> Callable[..., torch.Tensor]:
        """The loss of output and batch."""
        return loss_of

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the module itself."""
        names = inspect.signature(model.forward).parameters
        return loss_of(model(**{n: batch[n] for n in names}), batch)


class _Text:
    """The text of the arguments of a call.

    Attributes:
        init: lines of the `__init__` that make the module's tensors.
        scaled: the line that scales the main tensor, if there is one.
        space: values of names in the text.
    """

    def __init__(self, program: OpProgram) -> None:
        self.program = program
        self.init: list[str] = []
        self.scaled: list[str] = []
        self.space: dict[str, Any] = dict(_NAMES)
        self._places = itertools.count()

    def of(self, value: Any) -> str:
        """Return the text of an argument."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is tuple:
            return f"({''.join(f'{self.of(v)}, ' for v in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self.of, value))}]"
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self.of(v)}" for k, v in value.items()) + "}"
        if value is None or value is Ellipsis or type(value) in _PLAIN:
            return repr(value)
        name = f"c{len(self.space)}"
        self.space[name] = value
        return name

    def _tensor(self, x: torch.Tensor) -> str:
        i, program = next(self._places), self.program
        name = f"x{i}" if i in program.inputs else f"self.t{i}"
        if i not in program.inputs:
            real = x.dtype is torch.float64 or x.is_complex()
            self.init.append(
                f"{name} = nn.Parameter(tensors[{i}])" if real else f"self.register_buffer('t{i}', tensors[{i}])"
            )
        if i != program.main:
            return name
        shape = tuple(x.shape[1:] if program.form == "rows" else x.shape)
        self.init.append(f"self.scale = nn.Parameter(torch.ones({shape}, dtype=torch.float64))")
        self.scaled.append(f"h = {name} * self.scale")
        return "h"


def programs(entry: Entry, most: int) -> Iterator[OpProgram]:
    """Yield the operation on at most so many of its samples, each in the first form in which it runs.

    The form that is tried first changes from sample to sample.
    """
    places: dict[str, int] = {}
    for i, drawn in enumerate(entry.samples(0)):
        places.setdefault(signature(drawn), i)
    chosen = spread(list(places.values()), most)
    seeds = [_at(entry, seed, chosen) for seed in range(_RUN)]
    for k, i in enumerate(chosen):
        alike = [found[i] for found in seeds if i in found and signature(found[i]) == signature(seeds[0][i])]
        for form in (*FORMS[k % 3 : 3], *FORMS[: k % 3], "weights"):
            program = _in_form(entry, tuple(alike), form)
            if program is not None and _runs(program):
                yield program
                break


def _at(entry: Entry, seed: int, places: Sequence[int]) -> dict[int, Drawn]:
    last = max(places, default=-1)
    return {i: d for i, d in enumerate(itertools.islice(entry.samples(seed), last + 1)) if i in places}


def _in_form(entry: Entry, drawn: tuple[Drawn, ...], form: str) -> OpProgram | None:
    """Return a sample in a form; None if it has none, or no elements."""
    tensors = tensors_of(drawn[0])
    if tensors and not any(x.numel() for x in tensors):
        return None
    main = next((i for i, x in enumerate(tensors) if x.dtype is torch.float64 and x.numel()), None)
    if form == "weights":
        return OpProgram(entry, drawn, form, main, ())
    if main is None or len(drawn) < (_ROWS[1] if form == "rows" else _RUN):
        return None
    if form == "batch":
        return OpProgram(entry, _behind(entry, drawn, main), form, main, (main,))
    if form == "every batch":
        return OpProgram(entry, drawn, form, main, tuple(range(len(tensors)))) if len(tensors) > 1 else None
    shape = tensors[main].shape
    rows = tuple(i for i, x in enumerate(tensors) if shape and x.shape[:1] == shape[:1])
    return OpProgram(entry, drawn, form, main, rows) if rows else None


def _behind(entry: Entry, drawn: tuple[Drawn, ...], main: int) -> tuple[Drawn, ...]:
    """Return the samples with arguments that count dims from the front moved behind a first dim of samples.

    They are those with which the operation computes of every sample what it did alone; without any, the samples as they
    are.
    """
    first, call = drawn[0], entry.call
    if call is None:
        return drawn
    for by in (0, 1):
        args = tuple(_moved(a, by) for a in first.args)
        kwargs = {k: _moved(v, by) if "dim" in k or "axis" in k else v for k, v in first.kwargs.items()}
        try:
            with torch.no_grad():
                alone = first.finish(call(*first.args, **first.kwargs))
                flat, spec = pytree.tree_flatten((args, kwargs))
                place = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)][main]
                flat[place] = torch.stack([flat[place]] * 2)
                given, named = pytree.tree_unflatten(flat, spec)
                both = first.finish(call(*given, **named))
            pairs = zip(pytree.tree_leaves(alone), pytree.tree_leaves(both), strict=True)
            if all(torch.allclose(torch.stack([a] * 2), b, equal_nan=True) for a, b in pairs):
                return tuple(replace(d, args=_mixed(d.args, args), kwargs=_mixed(d.kwargs, kwargs)) for d in drawn)
        except Exception:  # whatever PyTorch refuses
            continue
    return drawn


def _moved(value: Any, by: int) -> Any:
    """Return a whole number that is not negative, or several, with `by` added; others as they are."""
    if type(value) is int and value >= 0:
        return value + by
    if type(value) in (list, tuple) and all(type(v) is int for v in value):
        return type(value)(_moved(v, by) for v in value)
    return value


def _mixed(own: Any, moved: Any) -> Any:
    """Return arguments with their own tensors and the moved numbers."""
    flat, spec = pytree.tree_flatten(own)
    pairs = zip(flat, pytree.tree_leaves(moved), strict=True)
    return pytree.tree_unflatten([a if isinstance(a, torch.Tensor) else b for a, b in pairs], spec)


class _Draws(TorchDispatchMode):
    """Whether random numbers are drawn inside the mode."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _runs(program: OpProgram) -> bool:
    """Return True if the module learns by finite numbers that are the same in every run, and draws none."""
    try:
        for size in (program.captured, program.runs):
            model, batch = program.model(), program.batch(size)
            with _Draws() as draws:
                loss = program.loss(model, batch)
            if draws.found:
                return False
            loss.backward()
            again = program.loss(model, batch)
            if loss.dim() or not bool(loss.isfinite()) or float(loss.detach()) != float(again.detach()):
                return False
    except Exception:  # whatever PyTorch refuses
        return False
    return True
