"""Capture a model as it computes in another dtype, without touching its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoplan.units import most


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype that most parameter elements have; None without any."""
    return most((p.dtype, p.numel()) for p in model.parameters() if p.is_floating_point())


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """Replace the parameters of the model's main dtype by stand-ins of `dtype` without values (fake tensors).

    The graph then describes the model with parameters of that dtype: norms that compute in float32 cast up and back,
    and tables follow the dtype of activations. Inputs of the main dtype are cast where the model takes them, and the
    loss reads them as they are. Parameters of other dtypes and all buffers stay as they are. All of this is what FSDP's
    mixed precision does. What a buffer of the main dtype is added to has its dtype (positions from a table);
    `_OneDtype` casts it where torch takes it only in the dtype of the parameters. With None nothing changes.
    """
    main = main_dtype(model)
    if dtype is None or main is None or main == dtype:
        yield model
        return
    modes = [p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    instead: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        found: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda x: x.to(dtype) if x.dtype == main else x, (args, dict(kwargs))
        )
        return found

    # torch's recurrent layers compare dtypes themselves, and states that the model makes are float32
    casting = {model, *(m for m in model.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase))}
    hooks = [m.register_forward_pre_hook(cast, with_kwargs=True) for m in casting]
    try:
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is None or p.dtype != main:
                    continue
                if id(p) not in instead:  # tied parameters share one stand-in
                    with mode:
                        empty = torch.empty(p.shape, dtype=dtype, device=p.device)
                        instead[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
                before.append((module, name, p))
                module._parameters[name] = instead[id(p)]
        with _OneDtype(main, dtype):
            yield model
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, p in before:
            module._parameters[name] = p


# Functions whose tensors must have one dtype, which torch finds out where it computes, not always where it traces; and
# how many of them, or None for all. Masks are not among them, nor is batch norm, whose statistics are float32 beside
# 16-bit values.
_ONE_DTYPE: Mapping[Any, int | None] = {
    F.scaled_dot_product_attention: 3,
    F.multi_head_attention_forward: 3,
    **dict.fromkeys(
        (
            F.linear, F.bilinear, F.layer_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d,
            F.conv_transpose2d, F.conv_transpose3d, F.prelu, torch.layer_norm, torch.group_norm, torch.matmul, torch.mm,
            torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__,
            torch.Tensor.mm, torch.Tensor.bmm,
        )
    ),
}  # fmt: skip
_QUERIES = ("query", "key", "value")  # by name


class _OneDtype(TorchFunctionMode):
    """Casts values of the main dtype to the compute dtype for a function that takes them in one dtype alone."""

    def __init__(self, main: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self._main, self._dtype = main, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ONE_DTYPE:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if {self._main, self._dtype} <= {x.dtype for x in tensors}:
                args, kwargs = self._cast(_ONE_DTYPE[func], args, kwargs)
        return func(*args, **kwargs)

    def _cast(self, num: int | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        made: dict[int, torch.Tensor] = {}  # each once, since queries, keys and values may be one tensor

        def cast(x: torch.Tensor) -> torch.Tensor:
            if x.dtype == self._main and id(x) not in made:
                made[id(x)] = x.to(self._dtype)
            return made.get(id(x), x)

        first, rest = args[:num], () if num is None else args[num:]
        chosen = {n: x for n, x in kwargs.items() if num is None or n in _QUERIES}
        first, chosen = tree_map_only(torch.Tensor, cast, (first, chosen))
        return (*first, *rest), {**kwargs, **chosen}
