"""Lists as long as the batch, of one number: `torch.tensor([0] * x.shape[0])`.

The number of samples is not fixed in a trace, and Python would make it a number for a list. So such a list is one
object, of which a tensor can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from autoplan.errors import CaptureError

_MAKERS = (torch.tensor, torch.as_tensor)


class RepeatedList:
    """Stands for `[value] * number`."""

    def __init__(self, value: Any, number: torch.SymInt) -> None:
        self.value: Any = value
        self.number: torch.SymInt = number

    def tensor(self, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
        """Return the tensor of these numbers."""
        return torch.full((self.number,), self.value, dtype=dtype, device=device)

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"[{self.value!r}] * x.shape[0] is a list as long as the batch, whose size is not fixed; make a tensor of "
            f"it, or torch.full((x.shape[0],), {self.value!r})"
        )

    __len__: Callable[..., NoReturn] = _refuse
    __iter__: Callable[..., NoReturn] = _refuse
    __getitem__: Callable[..., NoReturn] = _refuse
    __add__: Callable[..., NoReturn] = _refuse
    __radd__: Callable[..., NoReturn] = _refuse


def _times(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def times(self: torch.SymInt, other: Any) -> Any:
        one = isinstance(other, list) and len(other) == 1 and isinstance(other[0], (bool, int, float, torch.SymInt))
        return RepeatedList(other[0], self) if one and self.node.maybe_as_int() is None else plain(self, other)

    return times


@contextmanager
def capture_repeated() -> Iterator[None]:
    """Make lists of a symbolic length in the context of the model's forward."""
    of_left, of_right = (_times(getattr(torch.SymInt, name)) for name in ("__mul__", "__rmul__"))
    with patch.object(torch.SymInt, "__mul__", of_left), patch.object(torch.SymInt, "__rmul__", of_right):
        yield


class CaptureRepeated(TorchFunctionMode):
    """Make tensors of such lists."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _MAKERS and args and isinstance(args[0], RepeatedList):
            return args[0].tensor(*args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))
