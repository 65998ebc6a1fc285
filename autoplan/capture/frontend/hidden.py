"""Parameters of layers that a trace will not enter, kept from torch.export.

torch.export makes a fake tensor, a placeholder and a table entry for every parameter of a model, a few milliseconds
each. A layer that repeats an earlier one becomes one opaque op, which reads none of its own. While a model is traced,
such layers show no parameters and no buffers. A forward that asks for one of them all the same (a penalty on all
parameters, an unexpected use of a layer) ends the trace, and the model is traced once more with nothing hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from autoplan.errors import CaptureError

_TABLES = ("_parameters", "_buffers")


class HiddenRead(CaptureError):
    """A hidden parameter was read; the model is to be traced once more with nothing hidden."""


class Hidden:
    """The modules and values that one trace hides.

    Attributes:
        running: the forward of the model is running: a read of what is hidden matters.
        read: something hidden was read.
    """

    def __init__(self) -> None:
        self.running: bool = False
        self.read: bool = False

    def refuse(self) -> NoReturn:
        """End the trace."""
        self.read = True
        raise HiddenRead("the forward reads a parameter of a layer that repeats another one")

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark that the forward of the model runs inside the context."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    @contextmanager
    def layers(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Hide the parameters and buffers of these layers, and show them again on exit."""
        with ExitStack() as stack:
            for module in {id(m): m for layer in layers for m in layer.modules()}.values():
                for table in _TABLES:
                    given = module.__dict__[table]
                    if any(x is not None for x in given.values()):
                        module.__dict__[table] = _Table(given, self)
                        stack.callback(module.__dict__.__setitem__, table, given)
            yield


class _Table(dict[str, torch.Tensor | None]):
    """A stand-in for the parameters or buffers of a hidden layer: it is empty, and reading it ends the trace."""

    def __init__(self, given: Mapping[str, torch.Tensor | None], hidden: Hidden) -> None:
        super().__init__()
        self._names, self._hidden = frozenset(given), hidden


def _refusing(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def read(self: _Table, *args: Any) -> Any:
        of_one = bool(args) and isinstance(args[0], str)
        if self._hidden.running and (not of_one or args[0] in self._names):
            self._hidden.refuse()
        return plain(self, *args)

    return read


for _name in (
    "__contains__ __getitem__ __setitem__ __delitem__ __iter__ __len__ __or__ __ror__ __eq__ get pop setdefault update "
    "keys values items copy"
).split():
    setattr(_Table, _name, _refusing(_name))
