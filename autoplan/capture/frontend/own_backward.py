"""Functions with a backward of their own (subclasses of torch.autograd.Function) inside a model.

A trace holds the ops of their forward; the program's backward is the derivative of those. So the backward that a class
writes must be that derivative. It is run on small random tensors, and a class whose backward is another one (a
straight-through estimator, a clipped gradient) is refused by name. So is a hook on the gradient of a tensor, which no
trace shows.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from autoplan.capture.frontend.frames import place_of_frame
from autoplan.errors import CaptureError

_MOST_PER_DIM = 64
_CLOSE = 1e-6  # relative, in float64; some functions compute in float32 inside
_BASE = torch.autograd.Function


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise CaptureError for a hook that changes gradients: a program has other gradients than the module's tensors."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"module {name or type(module).__name__!r} has a backward hook; remove it")
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient; remove it, and change gradients between step() and "
                "the optimizer's step"
            )


def _refuse_tensor_hook(tensor: torch.Tensor, hook: Any) -> Any:
    place = place_of_frame(traceback.extract_stack()[:-1])
    raise CaptureError(
        f"{place}a hook on the gradient of a tensor, which the program would not run; to change a "
        "gradient use a custom op (torch.library.custom_op with register_autograd) or detach (x.detach() + s * (x - "
        "x.detach()) scales it by s), otherwise remove the hook"
    )


class _Context:
    """The context of a forward that is differentiated by autograd: nothing has to be kept."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Do nothing: outputs of integers have no gradient anyway."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""


@contextmanager
def checked_backwards() -> Iterator[None]:
    """Check every class of the user's or of a library that a trace applies; PyTorch's own classes are trusted.

    The context raises CaptureError for a class whose backward is not the derivative of its forward, or that does not
    run on random tensors, and for a hook on the gradient of a tensor. What PyTorch's checkpoints run under no_grad is
    run as it is: a plan says what is recomputed.
    """
    original = _BASE.__dict__["apply"]
    checked: set[type] = set()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *given = args
            return function(*given)
        if cls.__module__.split(".")[0] not in ("torch", "functorch") and cls not in checked:
            _check(cls, original, args, kwargs)
            checked.add(cls)
        return original.__func__(cls, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(_BASE, "apply", classmethod(apply)))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patches.enter_context(patch.object(torch.Tensor, name, _refuse_tensor_hook))
        yield


def _check(cls: Any, apply: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = f"{cls.__module__}.{cls.__qualname__}"
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(), _same_numbers():
        try:
            inputs = [_random(x) if isinstance(x, torch.Tensor) else x for x in args]
            written = _gradients(inputs, lambda *given: apply.__func__(cls, *given, **kwargs))
            derived = _gradients(inputs, lambda *given: _forward(cls, given, kwargs))
        except Exception as exc:  # a function of somebody else may raise anything
            raise CaptureError(
                f"{name} has a backward of its own, which could not be compared with the derivative of its forward: "
                f"{exc}"
            ) from exc
        if not all(map(_equal, written, derived)):
            raise CaptureError(
                f"{name} has a backward of its own that is not the derivative of its forward, so a trace of it would "
                "train another model; register it as a custom op (torch.library.custom_op with register_autograd)"
            )


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Draw the same random numbers each time, and leave the generator of the caller as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = max((float(x.abs().max()) for x in (a, b) if x.numel()), default=0.0)
    return a.shape == b.shape and bool(((a - b).abs() <= _CLOSE * scale).all())


def _random(x: torch.Tensor) -> torch.Tensor:
    """Return random numbers of the kind and the number of dims of a traced tensor, which is at most as large."""
    sizes: list[Any] = list(x.shape)
    shape = [min(int(d.node.hint if isinstance(d, torch.SymInt) else d), _MOST_PER_DIM) for d in sizes]
    if x.dtype.is_floating_point:
        return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
    if x.dtype is torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(min([2, *shape]), shape, dtype=x.dtype)


def _forward(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if cls.setup_context is not _BASE.setup_context:  # a forward without a context
        return cls.forward(*args, **kwargs)
    context = _Context()
    context.needs_input_grad = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    return cls.forward(context, *args, **kwargs)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _gradients(args: Sequence[Any], function: Any) -> list[torch.Tensor]:
    """Return results and gradients of all floating inputs for a fixed random gradient of the results."""
    given = [x.clone().requires_grad_() if _is_floating(x) else x for x in args]
    trained = [x for x in given if _is_floating(x)]
    torch.default_generator.manual_seed(1)
    results = function(*(x * 1 if _is_floating(x) else x for x in given))
    outs = [y for y in (results if isinstance(results, tuple) else (results,)) if isinstance(y, torch.Tensor)]
    with_gradient = [y for y in outs if y.requires_grad]
    torch.default_generator.manual_seed(2)
    total = sum(((y.double() * torch.rand(y.shape, dtype=torch.float64)).sum() for y in with_gradient), torch.zeros(()))
    if not with_gradient:
        return [y.detach().double() for y in outs]
    found = torch.autograd.grad(total, trained, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(trained, found, strict=True)]
    return [*(y.detach().double() for y in outs), *filled]
