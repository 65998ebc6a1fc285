"""Find the functions that go along the sequence step by step (Mamba, RWKV, ...), before a model is traced.

A trace would have every step of such a loop, layer by layer: it takes minutes to hours, and no plan could cut it. Loops
are measured, not recognised by name: the number of operations of such a function grows with the length of the sequence.
The first layer of every kind runs on fake tensors at two lengths, and every operation counts for the function of the
model's file that the layer called for it. State-space layers whose scan is not a loop (Mamba 2) begin with a
convolution along the sequence and sum the logarithms of their decays along it; the function that does so counts, too,
since its trace is long and for few lengths. A function that is found becomes one op (`capture.frontend.scans`). A loop
that stands in the forward of a module itself is refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture.frontend.buffers import attributes_restored
from autoplan.capture.frontend.experts import capture_experts, capture_hf_experts
from autoplan.capture.frontend.huggingface import capture_attention, own_hooks
from autoplan.capture.frontend.masks import Ledger
from autoplan.capture.frontend.scans import Scan, ScanForms, replaced
from autoplan.errors import CaptureError

_log = logging.getLogger(__name__)

_SHORT, _LONG = 17, 1023  # tokens; scans in chunks have chunks of 64 to 256. Odd, as no other size of a model is
_MANY = 1000  # operations of a layer that goes step by step over what is less than a chunk of it (xLSTM)
_GROWTH, _LEAST = 2.0, 100  # a loop: so many times the operations, and at least so many more
_Kind = tuple[str, ...]  # the classes of all modules of a layer


_Region = Scan | None  # None: the forward of a module itself
_Counts = dict[tuple[_Kind, _Region], int]


class _AllSeen(Exception):
    """Raised to end a run once every kind of layer has run."""


class _Found(Exception):
    """A function goes along the sequence: `args` are the function (None: a module's forward) and what it does."""


class _NoFunction(Exception):
    """A function that was found is not a function of tensors; `args[0]` is the error that says why."""


def _region(frame: FrameType | None, files: Collection[str]) -> _Region:
    """Return the outermost function of `files` that the running forward of a module has called; else its method."""
    function: _Region = None
    method: _Region = None
    while frame is not None:
        code, file = frame.f_code, str(frame.f_globals.get("__name__"))
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(own, nn.Module):
            if code.co_name in ("forward", "_call_impl"):
                break
            owners = [c for c in type(own).__mro__ if code.co_name in vars(c)]
            if file in files and owners and getattr(sys.modules[file], owners[0].__name__, None) is owners[0]:
                method = Scan(file, f"{owners[0].__name__}.{code.co_name}")
        elif file in files and _code_of(frame.f_globals.get(code.co_name)) is code:
            function = Scan(file, code.co_name)
        frame = frame.f_back
    return function or method


def _code_of(value: Any) -> Any:
    return getattr(inspect.unwrap(value), "__code__", None) if inspect.isroutine(value) else None


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the operations of the running layer by function.

    It ends the run where a function passes its limit, or sums decays.
    """

    def __init__(self, limits: Mapping[_Kind, _Counts], files: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits, self.files, self.counts = limits, files, _Counts()
        self.running: tuple[str, _Kind] | None = None
        self.where = ""
        self.convolved = set[str]()  # layers with a convolution

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.running is not None:
            self._note(func, args, _region(sys._getframe(1), self.files))
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], region: _Region) -> None:
        assert self.running is not None
        self.where, kind = self.running
        self.counts[kind, region] = count = self.counts.get((kind, region), 0) + 1
        if func.overloadpacket is torch.ops.aten.convolution:
            self.convolved.add(self.where)
        sums = func.overloadpacket is torch.ops.aten.cumsum and args[0].is_floating_point()
        if sums and self.where in self.convolved:
            raise _Found(region, "computes a convolution and cumulative sums along the sequence")
        elif count > self._limit(kind, region):
            raise _Found(
                region,
                "goes along the sequence step by step (its operations grow more than "
                f"{_GROWTH:g} times from {_SHORT} tokens on)",
            )

    def _limit(self, kind: _Kind, region: _Region) -> float:
        before = self.limits.get(kind)
        if before is None:
            return math.inf
        usual = before.get((kind, region), sum(before.values()))  # a function that short sequences do not call
        return max(_GROWTH * usual, usual + _LEAST)


def find_scans(model: nn.Module, run: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> tuple[Scan, ...]:
    """Return the functions of a Hugging Face model's files that go along the sequence.

    The model also runs on longer sequences than the example's if it has places for them. What they show of the forward
    of a module is not an error, since the example may not show it. A model that does not run on fake tensors is left
    to the errors of the capture.

    Args:
        run: calls the model with the inputs in their order, as the capture does (`inputs.LossModule`).

    Raises:
        CaptureError: names a layer that goes along the sequence in the forward of a module itself, or a function that
            does and is not a function of tensors.
    """
    layers, lengths = _layers(model), {t.shape[1] for t in example_inputs.values() if t.ndim > 1}
    given, most = min(lengths, default=0), _most(model)
    images = any(t.ndim > 3 for t in example_inputs.values())
    if not layers or not lengths or images or most < _SHORT or (len(lengths) > 1 and given < 2 * _SHORT):
        return ()
    first = {kind: name for name, kind in reversed(layers.items())}
    probe = _Probe(model, run, example_inputs, {name: kind for kind, name in first.items()}, layers, given)
    counts = probe.count(_SHORT, {})
    if counts is None:
        return ()
    longest = min(_LONG, max(given, most))
    if max(_totals(counts).values(), default=0) > _MANY and longest >= 8 * _SHORT:
        chunk = probe.count(4 * _SHORT, {}) or counts
        counts = {key: min(n, chunk.get(key, n)) for key, n in counts.items()}
    limits: dict[_Kind, _Counts] = {}
    for (kind, region), n in counts.items():
        limits.setdefault(kind, {})[kind, region] = n
    for length in dict.fromkeys((min(given, _LONG), longest)):
        if length >= 2 * _SHORT:
            probe.count(length - 1 + length % 2, limits)
    return tuple(sorted(probe.scans))


def _most(model: nn.Module) -> int:
    """Return the number of tokens that a model has places for; more than any run has if it has no table of them."""
    configs = (getattr(m, "config", None) for m in model.modules())
    tables = (getattr(config, "max_position_embeddings", None) for config in configs)
    return min((n for n in tables if isinstance(n, int)), default=_LONG)


def _totals(counts: _Counts) -> dict[_Kind, int]:
    out: dict[_Kind, int] = {}
    for (kind, _), n in counts.items():
        out[kind] = out.get(kind, 0) + n
    return out


def _layers(model: nn.Module) -> dict[str, _Kind]:
    """Return path -> kind of every layer. Layers are the entries of the outermost module lists."""
    out: dict[str, _Kind] = {}
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name in lists:
        if any(name.startswith(f"{other}.") for other in lists):
            continue
        for k, layer in enumerate(model.get_submodule(name).children()):
            out[f"{name}.{k}"] = tuple(f"{type(m).__module__}.{type(m).__qualname__}" for m in layer.modules())
    return out


@dataclass
class _Repeats:
    """Layers of a kind that has run give what the first one gave, if they get tensors of the same form.

    Attributes:
        results: kind -> the form of what the first layer got, and what it gave.
    """

    results: dict[_Kind, tuple[Any, Any]] = field(default_factory=dict)

    def keep(self, kind: _Kind, args: Any, kwargs: Any, result: Any) -> None:
        """Note a run of the first layer of a kind."""
        self.results[kind] = _form(args, kwargs), result

    def instead(self, forward: Callable[..., Any], kind: _Kind) -> Callable[..., Any]:
        """Return the forward of a later layer of a kind."""

        def run(*args: Any, **kwargs: Any) -> Any:
            known, result = self.results.get(kind, (None, None))
            return result if known is not None and known == _form(args, kwargs) else forward(*args, **kwargs)

        return run


def _form(args: Any, kwargs: Any) -> Any:
    """Return what a call was given, with shapes and dtypes in place of tensors."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    return [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in flat], spec


@dataclass
class _Probe:
    """Runs of the first layer of every kind on fake tensors.

    Attributes:
        layers: path -> kind of the first layer of every kind.
        every: path -> kind of every layer.
        given: the number of tokens of the example.
        scans: what all runs have found.
    """

    model: nn.Module
    run: nn.Module
    example_inputs: Mapping[str, torch.Tensor]
    layers: Mapping[str, _Kind]
    every: Mapping[str, _Kind]
    given: int
    scans: set[Scan] = field(default_factory=set)

    def count(self, length: int, limits: Mapping[_Kind, _Counts], new: _Region = None) -> _Counts | None:
        """Return the operations per kind of layer and function at `length` tokens; None if the model fails.

        Args:
            new: the function that the run before this one found.

        Raises:
            CaptureError: if a layer goes along the sequence in the forward of a module, or `new` is not a function of
                tensors; not at more tokens than the example has.
        """
        model = self.model
        mode, left = _Counted(limits, {type(m).__module__ for m in model.modules()}), set(self.layers)
        repeats = _Repeats()

        def enter(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                mode.running = name, self.layers[name]

            return hook

        def leave(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
                mode.running = None
                repeats.keep(self.layers[name], args, kwargs, result)
                left.discard(name)
                if not left:
                    raise _AllSeen

            return hook

        with ExitStack() as stack:
            stack.enter_context(attributes_restored(model))
            stack.enter_context(own_hooks(model))
            stack.enter_context(capture_experts(model))
            stack.enter_context(capture_attention(model, Ledger()))
            stack.enter_context(capture_hf_experts(model, []))
            for name, kind in self.every.items():
                layer = model.get_submodule(name)
                if name in self.layers:
                    stack.callback(layer.register_forward_pre_hook(enter(name)).remove)
                    stack.callback(layer.register_forward_hook(leave(name), with_kwargs=True).remove)
                elif "forward" not in vars(layer):  # else something has replaced it already
                    stack.enter_context(patch.object(layer, "forward", repeats.instead(layer.forward, kind)))
            forms = ScanForms(tuple(sorted(self.scans)), length)
            stack.enter_context(replaced(forms.found, functools.partial(_stand_in, forms)))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            inputs = [
                torch.zeros((*t.shape[:1], length, *t.shape[2:]) if t.ndim > 1 else t.shape, dtype=t.dtype)
                for t in self.example_inputs.values()
            ]
            try:
                with torch.no_grad(), mode:
                    self.run(*inputs)
            except _AllSeen:
                return mode.counts
            except _Found as found:
                region, what = found.args
                if region in self.scans:  # the model holds the function, so that another of its name changes nothing
                    self.scans.discard(region)
                    region = None
                if region is None and length > max(self.given, _SHORT):
                    return None
                if region is None:
                    raise self._refusal(mode.where, what) from None
                self.scans.add(region)
                new = region
            except _NoFunction as failed:
                if length <= max(self.given, _SHORT):
                    raise failed.args[0] from None
                if new is not None:
                    self.scans.discard(new)
                return None
            except Exception as error:
                _log.debug("%s does not run on fake tensors: %s", type(model).__name__, error)
                return None
            else:
                return mode.counts
        return self.count(length, limits, new)

    def _refusal(self, where: str, what: str) -> CaptureError:
        layer = self.model.get_submodule(where)
        inside = ", ".join(sorted({type(m).__name__ for m in layer.children()}))
        return CaptureError(
            f"{type(self.model).__name__}: {where} ({type(layer).__name__} of {inside}) {what}, in the forward of a "
            "module: only a recurrence that is a function of tensors can be captured, as one operation"
        )


def _stand_in(forms: ScanForms, scan: Scan, function: Any, args: Any, kwargs: Any) -> Any:
    """Return a result of the right form in place of a call of a function that was found."""
    try:
        return forms.of(scan, function, args, kwargs)
    except CaptureError as error:
        raise _NoFunction(error) from error
