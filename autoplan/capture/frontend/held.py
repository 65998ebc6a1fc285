"""Parameters that code holds past the module that owns them.

A loss over a list of parameters made before the call, or a module that keeps some in a plain list, reads tensors that
torch.export (and torch.func.functional_call) did not replace: the trace would contain their values as constants, and
they would get no gradient from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autoplan.errors import CaptureError


class HeldParameters:
    """The parameters and buffers of a module by identity, as they are before a trace replaces them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._names = {id(tensor): name for name, tensor in tensors}
        self._kept = tensors  # as long as they live, nothing else has their identity

    def replaced(self) -> _Replaced:
        """Return the mode in which each of them stands for what the module has now under its name."""
        now = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        names = {identity: name for identity, name in self._names.items() if identity not in now}
        return _Replaced(self._model, names)


class _Replaced(TorchFunctionMode):
    """Give every torch function the module's present tensors.

    Raises CaptureError while a model is traced, for a leaf that requires gradients and that no trace has replaced.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        super().__init__()
        self._model, self._names = model, names

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; see the class."""
        given = {name: self._present(value) for name, value in (kwargs or {}).items()}
        return func(*(self._present(x) for x in args), **given)

    def _present(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._present(x) for x in value)
        if not self._names or not isinstance(value, torch.Tensor):
            return value
        name = self._names.get(id(value))
        if name is not None:
            module, _, own = name.rpartition(".")
            return getattr(self._model.get_submodule(module), own)
        # fake tensors first: asked for its place in the graph, a view that was changed in place adds operations to it
        foreign = not isinstance(value, FakeTensor) and value.requires_grad and value.is_leaf
        if foreign and torch._guards.detect_fake_mode() is not None:
            raise CaptureError(
                f"the loss or the forward uses a tensor {list(value.shape)} that requires gradients and is not a "
                f"parameter of {type(self._model).__name__}, so it would not be trained: make it a parameter of the "
                "model"
            )
        return value
