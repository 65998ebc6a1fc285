"""Capture a model on an accelerator or on the meta device as if it were on the host, without copying its values.

A forward that moves a module to the device of its input moves nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

HOST, EMPTY = torch.device("cpu"), torch.device("meta")


def examples_on_host(example_inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors on the host."""
    return {
        n: torch.zeros(x.shape, dtype=x.dtype) if x.device == EMPTY else x if x.device == HOST else x.detach().to(HOST)
        for n, x in example_inputs.items()
    }


@contextmanager
def no_moves() -> Iterator[None]:
    """Leave out what moves or casts a module in a forward, as `self.head.to(x.device)`, where nothing moves.

    torch puts the same tensors in their own place, which an export does not let it do.
    """
    original: Any = nn.Module._apply

    def apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kinds = {(t.dtype, t.device) for t in (*self.parameters(recurse), *self.buffers(recurse))}
        moved = (function(torch.empty((), dtype=dtype, device=device)) for dtype, device in kinds)
        return self if {(t.dtype, t.device) for t in moved} == kinds else original(self, function, recurse)

    with patch.object(nn.Module, "_apply", apply):
        yield


def _on_host(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a host tensor in place of one on another device. Only a buffer keeps its values."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter and tensor.device != EMPTY:
        return tensor.detach().to(HOST)
    with mode:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


@contextmanager
def module_on_host(model: nn.Module) -> Iterator[None]:
    """Replace tensors on other devices by host tensors; the graph has no devices, and examples are given on the host.

    Parameters and what is on the meta device become stand-ins without values (fake tensors), buffers with values become
    copies. A loss may then read the examples beside what the model returns. Tensors that the model keeps
    outside its parameters and buffers stay where they are. Everything is restored on exit.
    """
    others = [t for t in (*model.parameters(), *model.buffers()) if t.device != HOST]
    if not others:
        yield
        return
    modes = [p.fake_mode for p in (*model.parameters(), *model.buffers()) if isinstance(p, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    instead = {id(t): _on_host(t, mode) for t in others}  # tied parameters share one stand-in
    before: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in list(held.items()):
                    if tensor is not None and id(tensor) in instead:
                        before.append((held, name, tensor))  # type: ignore[arg-type]  # of parameters, too
                        held[name] = instead[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor
