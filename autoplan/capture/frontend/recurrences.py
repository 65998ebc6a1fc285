"""Find layers that go along the sequence step by step (Mamba, RWKV, xLSTM, ...), before they are traced.

A trace would have every step of such a loop, layer by layer: it takes minutes to hours, and no plan could cut it. Loops
are measured, not recognised by name: the number of operations of such a layer grows with the length of the sequence.
The first layer of every kind runs on fake tensors at two lengths; the second run stops when the growth shows.
State-space layers whose scan is not a loop (Mamba 2) begin with a convolution along the sequence, which has no rule
here. They are refused here, too, since their traces also take minutes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture.frontend.experts import capture_experts, capture_hf_experts
from autoplan.capture.frontend.huggingface import capture_attention, own_hooks
from autoplan.capture.frontend.masks import Ledger
from autoplan.errors import CaptureError

_log = logging.getLogger(__name__)

_SHORT, _LONG = 16, 1024  # tokens; scans in chunks have chunks of 64 to 256
_GROWTH, _LEAST = 2.0, 100  # a loop: so many times the operations, and at least so many more
_Kind = tuple[str, ...]  # the classes of all modules of a layer


class _AllSeen(Exception):
    """Every kind of layer has run."""


class _Found(Exception):
    """A layer does what cannot be captured; `args[0]` says what."""


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the operations of the running layer, and stops it at the limit of its kind."""

    def __init__(self, limits: Mapping[_Kind, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits, self.counts = limits, dict[_Kind, int]()
        self.running: tuple[str, _Kind] | None = None
        self.where = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.running is not None:
            self.where, kind = self.running
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if func.overloadpacket is torch.ops.aten.convolution:
                raise _Found("computes a convolution along the sequence")
            if self.counts[kind] > self.limits.get(kind, math.inf):
                raise _Found(
                    "goes along the sequence step by step (its operations grow more than "
                    f"{_GROWTH:g} times from {_SHORT} tokens on)"
                )
        return func(*args, **(kwargs or {}))


def refuse_loops(model: nn.Module, run: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError that names the layer of a Hugging Face model that goes along the sequence step by step.

    A model that does not run on fake tensors is left to the errors of the capture.

    Args:
        run: calls the model with the inputs in their order, as the capture does (`inputs.LossModule`).
    """
    longest = min(t.shape[1] for t in example_inputs.values() if t.ndim > 1)
    layers = _layers(model)
    if not layers or longest < 2 * _SHORT:
        return
    counts = _count(model, run, example_inputs, layers, _SHORT, {})
    if counts is not None:
        limits = {kind: max(_GROWTH * n, n + _LEAST) for kind, n in counts.items()}
        _count(model, run, example_inputs, layers, min(_LONG, longest), limits)


def _layers(model: nn.Module) -> dict[str, _Kind]:
    """Return path -> kind for the first layer of every kind. Layers are the entries of the outermost module lists."""
    out: dict[str, _Kind] = {}
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name in lists:
        if any(name.startswith(f"{other}.") for other in lists):
            continue
        for k, layer in enumerate(model.get_submodule(name).children()):
            kind = tuple(f"{type(m).__module__}.{type(m).__qualname__}" for m in layer.modules())
            if kind not in out.values():
                out[f"{name}.{k}"] = kind
    return out


def _count(
    model: nn.Module,
    run: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    layers: Mapping[str, _Kind],
    length: int,
    limits: Mapping[_Kind, float],
) -> dict[_Kind, int] | None:
    """Return the operations per kind of layer at `length` tokens; None if the model fails.

    Raises:
        CaptureError: if a layer goes along the sequence.
    """
    mode, left = _Counted(limits), set(layers)

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mode.running = name, layers[name]

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mode.running = None
            left.discard(name)
            if not left:
                raise _AllSeen

        return hook

    with ExitStack() as stack:
        stack.enter_context(own_hooks(model))
        stack.enter_context(capture_experts(model))
        stack.enter_context(capture_attention(model, Ledger()))
        stack.enter_context(capture_hf_experts(model))
        for name in layers:
            layer = model.get_submodule(name)
            for handle in (layer.register_forward_pre_hook(enter(name)), layer.register_forward_hook(leave(name))):
                stack.callback(handle.remove)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        inputs = [
            torch.zeros((*t.shape[:1], length, *t.shape[2:]) if t.ndim > 1 else t.shape, dtype=t.dtype)
            for t in example_inputs.values()
        ]
        try:
            with torch.no_grad(), mode:
                run(*inputs)
        except _AllSeen:
            return mode.counts
        except _Found as found:
            layer = model.get_submodule(mode.where)
            inside = ", ".join(sorted({type(m).__name__ for m in layer.children()}))
            raise CaptureError(
                f"{type(model).__name__}: {mode.where} ({type(layer).__name__} of {inside}) {found}: recurrent and "
                "state-space layers cannot be captured"
            ) from None
        except Exception as error:
            _log.debug("%s does not run on fake tensors: %s", type(model).__name__, error)
            return None
    return mode.counts
