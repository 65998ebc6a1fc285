"""Capture batch norm in training mode: statistics of the whole micro-batch, and the running statistics it updates.

A layer becomes plain operations with two of autoplan's own: the mean over a micro-batch, however many ranks share it,
and the update of the running statistics. Counters of batches are part of that update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from autoplan.errors import CaptureError


@torch.library.custom_op("autoplan::batch_mean", mutates_args=())
def batch_mean(x: torch.Tensor, dims: list[int], number: int) -> torch.Tensor:
    """Mark the mean over dims, which stay with size 1; `number`: of elements in each mean. Cannot be run."""
    raise RuntimeError("autoplan::batch_mean is a capture marker and cannot be run")


@batch_mean.register_fake
def _(x: torch.Tensor, dims: list[int], number: int) -> torch.Tensor:
    return x.new_empty([1 if dim in dims else size for dim, size in enumerate(x.shape)])


@torch.library.custom_op("autoplan::running_statistics", mutates_args=())
def mark_running_statistics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    running: list[torch.Tensor],
    momentum: float | None,
    number: int,
) -> torch.Tensor:
    """Mark the update of the running mean, variance and number of batches by a micro-batch. Cannot be run."""
    raise RuntimeError("autoplan::running_statistics is a capture marker and cannot be run")


@mark_running_statistics.register_fake
def _(mean: torch.Tensor, variance: torch.Tensor, running: Any, momentum: Any, number: int) -> torch.Tensor:
    return mean.new_empty(())


# what it does is not in its result
torch.fx.node.has_side_effect(torch.ops.autoplan.running_statistics.default)


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
    """Replace batch norm in training mode by its operations, and leave the counters of batches to its update."""

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
            if given.arguments["training"]:
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
        momentum: float,
        eps: float,
        cudnn_enabled: bool = True,
    ) -> torch.Tensor:
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(wide.dim()) if dim != 1]
        number = math.prod(wide.shape[dim] for dim in dims)
        mean = torch.ops.autoplan.batch_mean(wide, dims, number)
        centered = wide - mean
        variance = torch.ops.autoplan.batch_mean(centered.square(), dims, number)
        if running_mean is not None and running_var is not None:
            layer = self.layers.of("running_mean", running_mean)
            count = None if layer is None else layer._buffers.get("num_batches_tracked")
            running = [running_mean, running_var, *([] if count is None else [count])]
            means = [x.detach().flatten() for x in (mean, variance)]
            factor = None if id(layer) in self.layers.cumulative else momentum
            torch.ops.autoplan.running_statistics(*means, running, factor, number)
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        scale = torch.rsqrt(variance + eps)
        scale = scale if weight is None else scale * weight.reshape(shape)
        out: torch.Tensor = centered * scale
        out = out if bias is None else out + bias.reshape(shape)
        return out.to(input.dtype)


@contextmanager
def capture_batch_norm(model: nn.Module) -> Iterator[None]:
    """Capture batch norm in training mode inside the context, on one process as on many (nn.SyncBatchNorm)."""
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
        stack.enter_context(_Training(layers))
        yield
