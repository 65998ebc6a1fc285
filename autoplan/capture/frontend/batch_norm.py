"""Capture batch norm in training mode: statistics of the whole micro-batch, and the running statistics it updates.

A layer is one op of the trace (`autoplan.ops.statistics` says what it becomes). Counters of batches are part of its
update of the running statistics.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.marker import marker
from autoplan.errors import CaptureError

# Batch norm in training mode.
# running: the running mean, variance and number of batches, where there are any
# momentum: None if the running statistics are means over all batches
# number: of elements that a mean is taken of
# statistics: shape of mean and variance: that of `x` with size 1 in all dims but that of channels
# wide: computed in float32, for numbers of 16 bits
marker(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor[] running, float? momentum, float eps, SymInt number, "
    "SymInt[] statistics, bool wide) -> Tensor",
    lambda x, *rest: torch.empty_like(x),
)
# the update of running statistics is not in its result
torch.fx.node.has_side_effect(torch.ops.autoplan.batch_norm.default)


_SIGNATURES = {
    F.batch_norm: inspect.signature(F.batch_norm),
    torch.batch_norm: inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()
        ]
    ),
}


@dataclass
class _Layers:
    """The batch norms of a model. `cumulative`: those whose running statistics are means over all batches."""

    modules: Sequence[nn.Module]
    cumulative: set[int] = field(default_factory=set)

    def of(self, name: str, tensor: object) -> nn.Module | None:
        """Return the module that holds this tensor as a buffer of this name."""
        found = (m for m in self.modules if tensor is not None and m._buffers.get(name) is tensor)
        return next(found, None)


class _Training(TorchFunctionMode):
    """Replace batch norm in training mode by the one op, and leave the counters of batches to its update."""

    def __init__(self, layers: _Layers) -> None:
        super().__init__()
        self.layers = layers

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        signature = _SIGNATURES.get(function)
        if signature is not None:
            given = signature.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["input"].dim() > 1:
                return self._normalised(**given.arguments)
        elif function is torch.Tensor.add_ and self.layers.of("num_batches_tracked", args[0]) is not None:
            return args[0]
        return function(*args, **(kwargs or {}))

    def _normalised(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        training: bool,
        momentum: float | None,
        eps: float,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:
        running = list[torch.Tensor]()
        if running_mean is not None and running_var is not None:
            layer = self.layers.of("running_mean", running_mean)
            count = None if layer is None else layer._buffers.get("num_batches_tracked")
            running = [running_mean, running_var, *([] if count is None else [count])]
            momentum = None if id(layer) in self.layers.cumulative else momentum
        sizes = [(size, 1) if dim == 1 else (1, size) for dim, size in enumerate(input.shape)]
        statistics, number = [size for size, _ in sizes], math.prod(size for _, size in sizes)
        wide = input.dtype in (torch.float16, torch.bfloat16)
        out: torch.Tensor = torch.ops.autoplan.batch_norm(
            input, weight, bias, running, momentum, eps, number, statistics, wide
        )
        return out


@contextmanager
def capture_batch_norm(model: nn.Module) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Capture batch norm in training mode inside the context, on one process as on many (nn.SyncBatchNorm).

    Yields:
        what makes the context of the model's forward.
    """
    layers = _Layers([m for m in model.modules() if "running_mean" in m._buffers])
    with ExitStack() as stack:
        for module in layers.modules:
            if not isinstance(module, _BatchNorm):
                continue
            if isinstance(module, nn.SyncBatchNorm):
                stack.enter_context(patch.object(module, "forward", _BatchNorm.forward.__get__(module)))
            if module.momentum is None and module.training:
                if module.num_batches_tracked is None:
                    raise CaptureError("batch norm with momentum=None needs its counter of batches")
                layers.cumulative.add(id(module))
                stack.enter_context(patch.object(module, "momentum", 0.0))
        yield partial(_Training, layers)
