"""The loss that a step returns: a number, for which there is no backward any more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

_DONE = (
    "this loss has no graph: pm.step(batch) has done the backward, so leave out loss.backward(), loss / k and "
    "GradScaler.scale (pm.step([batch, batch]) accumulates, precision='fp16' scales the loss). A further term of the "
    "loss belongs into loss_fn= of autoplan.parallelize, or into the model; pm.eval_step(batch) does a forward alone"
)
_ASKS_GRADIENT = (torch.Tensor.backward, torch.Tensor.requires_grad_, torch.autograd.grad)
_KEEPING = frozenset(  # functions whose result is a loss, too, if it has no dims
    getattr(of, name)
    for of in (torch, torch.Tensor)
    for name in ("add", "sub", "mul", "div", "true_divide", "neg", "sum", "mean", "clone",
                 "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
                 "__rdiv__", "__neg__", "to", "float", "double", "half", "bfloat16", "cpu", "cuda")
    if hasattr(of, name) and callable(getattr(of, name))
)  # fmt: skip


class LossTensor(torch.Tensor):
    """A tensor without dims that raises an error where a script asks it for a gradient, as loops of PyTorch do.

    So do the sums, products and quotients of it that have no dims either. It is stored, pickled and copied as a plain
    tensor. It has the name of one: loggers know tensors by the name of their class, and so does text that torch.fx
    writes.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute as with plain tensors; mark a result without dims as this class.

        Raises:
            RuntimeError: `func` asks for a gradient.
        """
        if func in _ASKS_GRADIENT:
            raise RuntimeError(_DONE)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in _KEEPING or type(result) is not torch.Tensor or result.dim() or not result.is_floating_point():
            return result
        return step_loss(result)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Say that the backward is done.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_DONE)

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text of a plain tensor."""
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        """Return the text of a plain tensor."""
        return format(self._plain(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        plain: Any = self._plain()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Return a plain copy."""
        return copy.deepcopy(self._plain(), memo)


LossTensor.__module__, LossTensor.__qualname__, LossTensor.__name__ = "torch", "Tensor", "Tensor"


def step_loss(total: torch.Tensor) -> torch.Tensor:
    """Return a loss, [], as what a step returns."""
    if type(total) is not torch.Tensor:  # a fake one, of a rehearsal
        return total
    made: torch.Tensor = torch.Tensor._make_subclass(LossTensor, total.detach())
    return made
