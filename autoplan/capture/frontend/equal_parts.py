"""Capture `x.split(y.shape[0])` where it makes a fixed number of equal parts, whatever the batch size.

Heads of attention that are joined along the batch, and taken apart again (the Set Transformer), are written so. PyTorch
would count the parts at the size of the example, and fix the batch size by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_SPLITS = (torch.split, torch.Tensor.split)


def _arguments(tensor: Any, size: Any = None, dim: int = 0, **named: Any) -> tuple[Any, Any, int]:
    return tensor, named.get("split_size", named.get("split_size_or_sections", size)), dim


class CaptureParts(TorchFunctionMode):
    """Replace splits into parts of a symbolic size that divides the dim by a number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _SPLITS:
            x, size, dim = _arguments(*args, **(kwargs or {}))
            if isinstance(size, torch.SymInt):
                count = x.shape[dim] // size
                number = count if isinstance(count, int) else count.node.maybe_as_int()
                if number is not None and statically_known_true(number * size == x.shape[dim]):
                    return x.unflatten(dim, (number, size)).unbind(dim % x.dim())
        return function(*args, **(kwargs or {}))
