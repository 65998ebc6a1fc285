"""All tensors of a model that are not parameters: registered buffers, and tensors that are plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_GONE = object()


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes, by path: `self.freqs = torch.outer(...)`."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }


def all_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield registered buffers, then tensors that are plain attributes, as `nn.Module.named_buffers` does."""
    yield from model.named_buffers(remove_duplicate=remove_duplicate)
    yield from plain_tensors(model).items()


@contextmanager
def attributes_restored(model: nn.Module, every: bool = False) -> Iterator[None]:
    """Restore on exit the tensors that a forward puts into its modules, such as a state: those of a trace are fake.

    Args:
        every: also what is no tensor, but may hold some.
    """
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            _restore(vars(module), attributes, every)
            _restore(module._buffers, buffers, every)


def _restore(now: dict[str, Any], then: dict[str, Any], every: bool) -> None:
    """Give the tensors of a table, or all its values, what they were, and take out those that it did not have."""
    for name in dict.fromkeys((*now, *then)):
        value, before = now.get(name, _GONE), then.get(name, _GONE)
        if value is before or not (every or any(isinstance(x, torch.Tensor) for x in (value, before))):
            continue
        if before is _GONE:
            del now[name]
        else:
            now[name] = before
