"""Capture a model as it computes in another dtype, without touching its values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoplan.units import most


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype that most parameter elements have; None without any."""
    return most((p.dtype, p.numel()) for p in model.parameters() if p.is_floating_point())


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """Replace the parameters of the model's main dtype by stand-ins of `dtype` without values (fake tensors).

    The graph then describes the model with parameters of that dtype: norms that compute in float32 cast up and back,
    and tables follow the dtype of activations. Parameters of other dtypes and all buffers stay as they are, as under
    FSDP's mixed precision. With None nothing changes.
    """
    main = main_dtype(model)
    if dtype is None or main is None or main == dtype:
        yield model
        return
    modes = [p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    instead: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
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
        yield model
    finally:
        for module, name, p in before:
            module._parameters[name] = p
