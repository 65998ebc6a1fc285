"""Refuse derivatives that a forward takes itself, by their line: forces, Jacobians, gradient penalties."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.frames import place_of_frame
from autoplan.errors import CaptureError

_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_TRANSFORMS = ("Grad", "Jvp")


class RefuseDerivatives(TorchFunctionMode):
    """Raise CaptureError for `torch.autograd.grad` and the like, and inside `torch.func.grad`, `jacrev`, `jvp`, ..."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = f"torch.autograd.{function.__name__}" if function in _FUNCTIONS else ""
        if not name and torch._C._functorch.maybe_current_level() is not None:
            transform = torch._C._functorch.peek_interpreter_stack()
            if transform is not None and transform.key().name in _TRANSFORMS:
                name = "a transform of torch.func (grad, vjp, jacrev, jvp, ...)"
        if name:
            raise CaptureError(
                f"{place_of_frame(traceback.extract_stack()[:-1])}the forward or the loss takes derivatives itself by "
                f"{name}, and a program has those of its loss by its parameters alone; write the derivative out in "
                "torch's operations, or leave it out"
            )
        return function(*args, **(kwargs or {}))
