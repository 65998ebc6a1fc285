"""Run code that was written for another floating dtype in float64 arithmetic, so that rounding hides no difference.

A float32 model and its captured graph differ by rounding that grows with depth, and a tolerance for it would hide real
differences. In float64 both compute the same function to about 1e-13. Upcasting the parameters is not enough: models
cast to float32 in their norms and routers, and the graph has dropped the casts that change nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.capture.frontend.recurrent import layer_by_layer, runs_dropout
from autoplan.capture.frontend.written_out import written_attention
from autoplan.verify.drawn import known_draws

WIDE = torch.float64
_READ_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # of a C descriptor
_CASTS = frozenset((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16))
_DRAWING = frozenset((F.dropout, torch.dropout, F.scaled_dot_product_attention))
# functions of torch, written in Python, whose bodies drop values: a mode sees a call of them as one
_DRAWING_INSIDE = frozenset((F.multi_head_attention_forward,))
# functions that make tensors of numbers in the code: the numbers are rounded as in the model and in the graph
_OF_NUMBERS = frozenset(
    (torch.tensor, torch.scalar_tensor, torch.full, torch.arange, torch.linspace, torch.logspace, torch.full_like)
) | {torch.Tensor.new_full, torch.Tensor.new_tensor}
_LIKE = frozenset((torch.full_like, torch.Tensor.new_full, torch.Tensor.new_tensor))


def thinned(p: float) -> float:
    """Return the factor that stands for dropout with probability `p`; it differs from no dropout and from other p."""
    return 1.0 - p / 2


class Wide(TorchFunctionMode):
    """A mode that makes every floating tensor inside it float64.

    Args:
        shown: the dtype that code inside sees of float64 tensors: the model's, whose `finfo` and comparisons it was
            captured with.
    """

    def __init__(self, shown: torch.dtype) -> None:
        super().__init__()
        self.shown = shown

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` in float64; see the class."""
        given = dict(kwargs or {})
        if func == _READ_DTYPE:
            # the checks of torch.utils.checkpoint compare with dtypes that its hooks read outside of the mode
            checks = sys._getframe(1).f_globals.get("__name__") == "torch.utils.checkpoint"
            return func(*args) if checks else self._shown(func(*args))
        if func is torch.autograd.backward:
            return self._backward(*args, **given)
        if func in _DRAWING:
            return self._without_drawing(func, args, given)
        if runs_dropout(func, args):
            with self:
                return layer_by_layer(func, args)
        if func in _DRAWING_INSIDE:
            with self:
                return _body_of(func)(*args, **given)
        if func in _OF_NUMBERS:
            if func in _LIKE and given.get("dtype") is None and args[0].dtype is WIDE:
                given["dtype"] = self.shown
            return _widened(func(*args, **given))
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _grouped_mm(*args, **given)
        if func in _CASTS:
            return args[0].to(WIDE)
        widest = {name: WIDE if _narrow(value) else value for name, value in given.items()}
        return _widened(func(*(WIDE if _narrow(x) else x for x in args), **widest))

    def _without_drawing(self, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Call a function with dropout, which is a fixed factor here, also inside attention's kernel."""
        if func is not F.scaled_dot_product_attention:
            return _dropout(*args, **given)
        if not (given.get("dropout_p") or any(args[4:5])):
            return _widened(func(*args, **given))
        with self:
            return written_attention(*args, **given)

    def _shown(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that the model sees for this one."""
        return self.shown if dtype is WIDE else dtype

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Run torch's backward inside the mode, which torch's own call would leave: layers may recompute in it."""
        outs = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors or (None,) * len(outs)
        grads = tuple(torch.ones_like(t) if g is None else g for t, g in zip(outs, given, strict=True))
        keep = create_graph if retain_graph is None else retain_graph
        engine: Callable[..., Any] = torch.autograd.graph._engine_run_backward
        with self:
            engine(outs, grads, keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True)


@functools.cache
def _body_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask whether a mode takes its call, which then sees what it calls."""
    assert isinstance(func, FunctionType)
    names = {**func.__globals__, "has_torch_function": lambda *_: False}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _narrow(x: object) -> bool:
    return isinstance(x, torch.dtype) and x.is_floating_point and x is not WIDE


def _widened(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out.to(WIDE) if out.is_floating_point() and out.dtype is not WIDE else out
    if isinstance(out, (tuple, list)) and any(isinstance(x, torch.Tensor) and _narrow(x.dtype) for x in out):
        return pytree.tree_map_only(torch.Tensor, _widened, out)
    return out


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **more: Any) -> Any:
    p = p if more.get("train", training) else 0.0
    if p == 0.0:
        return input
    return input.mul_(thinned(p)) if inplace else input * thinned(p)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Compute the kernel of experts, which has no float64 form, one product per expert.

    With b [experts, k, n], rows of `a` from offs[i - 1] to offs[i] are multiplied by b[i]. With two matrices, columns
    of `a` are multiplied by the same rows of `b`.
    """
    if offs is None or a.dim() != 2 or b.dim() not in (2, 3) or bias is not None:
        raise NotImplementedError("grouped products of other than rows with matrices, in float64")
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    rest = b.shape[0] - sum(sizes) if b.dim() == 2 else a.shape[0] - sum(sizes)
    if b.dim() == 2:
        pairs = zip(torch.split(a, [*sizes, rest], 1)[:-1], torch.split(b, [*sizes, rest])[:-1], strict=True)
        return torch.stack([left @ right for left, right in pairs])
    parts = [part @ b[i] for i, part in enumerate(torch.split(a, [*sizes, rest])[:-1])]
    return torch.cat([*parts, a.new_zeros(rest, b.shape[2])])


def wide_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with its real numbers in float64."""
    return {n: x.to(WIDE) if x.is_floating_point() else x for n, x in batch.items()}


@contextmanager
def wide(shown: torch.dtype) -> Iterator[None]:
    """Compute in float64 with gradients on, dropout as a fixed factor and other random numbers that are known.

    Random number generators are restored.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), known_draws(), Wide(shown):
        yield
