"""State that a forward hands to the next one in a tensor of its module: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`.

A program runs the forward in parts, on parts of the batch, so such a value would depend on the split; in a graph it
would stay what it was. A tensor that a forward only writes, or makes again without reading it (a cache), is no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.buffers import all_buffers, attributes_restored
from autoplan.errors import CaptureError

_T = torch.Tensor
# the same values in another form: a cache that is moved to the device of its input stays what it is
_SAME_VALUES = frozenset(
    (_T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16, _T.cpu, _T.cuda, _T.contiguous, _T.detach,
     torch.detach)
)  # fmt: skip


class _Reads(TorchFunctionMode):
    """Note which of the tensors a function computes with."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._name_of = {id(t): name for name, t in tensors.items()}
        self._kept: list[torch.Tensor] = []  # so that no other object gets the id of one of these
        self.read: set[str] = set()

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the tensor with these values, None if it is another."""
        return self._name_of.get(id(tensor))

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        flat = [x for a in given for x in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(x, torch.Tensor)]
        names = {name for x in flat if (name := self.name_of(x)) is not None}
        if not names or not isinstance(out, (torch.Tensor, list, tuple)):  # asked for a size or a device
            return out
        if function in _SAME_VALUES and isinstance(out, torch.Tensor):
            self._kept.append(out)
            self._name_of.setdefault(id(out), min(names))
        elif isinstance(out, torch.Tensor) or any(isinstance(x, torch.Tensor) for x in out):
            self.read |= names
        return out


@contextmanager
def state_refused(model: nn.Module) -> Iterator[None]:
    """Watch a forward of the model.

    Raises:
        CaptureError: names the tensors that the forward computes with and then replaces.
    """
    with attributes_restored(model):  # here already: torch.export warns of what is still there after the forward
        before = dict(all_buffers(model, remove_duplicate=False))
        reads = _Reads(before)
        with reads:
            yield
        after = dict(all_buffers(model, remove_duplicate=False))
        replaced = [name for name, tensor in before.items() if name in after and after[name] is not tensor]
        state = [name for name in replaced if name in reads.read and reads.name_of(after[name]) != name]
    if state:
        names = ", ".join(map(repr, sorted(state)))
        raise CaptureError(
            f"the forward reads and then replaces {names}: a value that it hands to the next forward would depend on "
            "the split; compute it outside the model, or leave the change out (model.eval() where that ends it)"
        )
