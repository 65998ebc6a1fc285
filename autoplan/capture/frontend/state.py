"""State that a forward hands to the next one in a tensor of its module: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`.

The tensor may be in a list, a dict or a plain object that the module holds. A registered buffer keeps its form: what
it is replaced by is written into it.

A program runs the forward in parts, on parts of the batch, so such a value would depend on the split; in a graph it
would stay what it was. A tensor that a forward only writes, or makes again without reading it (a cache), is no state.
The random generators of Python and numpy are: what a forward draws from them would stay what it was, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.buffers import attributes_restored, held_tensors
from autoplan.capture.frontend.counters import Counters
from autoplan.errors import CaptureError

_T = torch.Tensor
# the same values in another form: a cache that is moved to the device of its input stays what it is
_SAME_VALUES = frozenset(
    (_T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16, _T.cpu, _T.cuda, _T.contiguous, _T.detach,
     torch.detach)
)  # fmt: skip


class _Reads(TorchFunctionMode):
    """Note which of the tensors a function computes with, by `id`: several names may stand for one tensor."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._source = {id(t): id(t) for t in tensors}
        self._kept: list[torch.Tensor] = []  # so that no other object gets the id of one of these
        self.read: set[int] = set()

    def source(self, tensor: torch.Tensor) -> int | None:
        """Return the `id` of the given tensor that has these values, None if it is another."""
        return self._source.get(id(tensor))

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        flat = [x for a in given for x in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(x, torch.Tensor)]
        sources = {source for x in flat if (source := self.source(x)) is not None}
        if not sources or not isinstance(out, (torch.Tensor, list, tuple)):  # asked for a size or a device
            return out
        if function in _SAME_VALUES and isinstance(out, torch.Tensor):
            self._kept.append(out)
            self._source.setdefault(id(out), min(sources))
        elif isinstance(out, torch.Tensor) or any(isinstance(x, torch.Tensor) for x in out):
            self.read |= sources
        return out


@contextmanager
def state_refused(model: nn.Module, counters: Counters) -> Iterator[None]:
    """Watch a forward of the model, and what it does to the numbers of its modules.

    Raises:
        CaptureError: names the tensors that the forward computes with and then replaces, or the generator that it draws
            from.
    """
    generators = _generators(model)
    # here already: torch.export warns of what is still there after the forward
    with attributes_restored(model):
        before, buffers = held_tensors(model), {n for n, _ in model.named_buffers(remove_duplicate=False)}
        counters.start()
        reads = _Reads(before.values())
        with reads, _unseeded(model):
            yield
        after = held_tensors(model)
        counters.end(before, after)
        replaced = [name for name, tensor in before.items() if name in after and after[name] is not tensor]
        state = [n for n in replaced if id(before[n]) in reads.read and reads.source(after[n]) != id(before[n])]
        state = [n for n in state if not (n in buffers and _stored(before[n], after[n]))]
    if state:
        names = ", ".join(map(repr, sorted(state)))
        raise CaptureError(
            f"the forward reads and then replaces {names}: a value that it hands to the next forward would depend on "
            "the split; make it a registered buffer of fixed shape and dtype, compute it outside the model, or leave "
            "the change out (model.eval() where that ends it)"
        )
    drawn = next((name for name, state in _generators(model).items() if state != generators[name]), None)
    if drawn is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} draws random numbers with {drawn}, and the program would have the "
            "same in every step (a layer that is dropped always, or never): leave it out, or give what is drawn as an "
            "input, a tensor with one value per sample"
        )


def _stored(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Write what a registered buffer was replaced by into it, where a trace sees it; False if it has another form."""
    if buffer.shape != value.shape or buffer.dtype != value.dtype:
        return False
    if isinstance(buffer, FakeTensor):
        buffer.copy_(value)
    return True


def _unseeded(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which `torch.manual_seed` raises CaptureError.

    A forward that calls it draws the same in every step, and a program would draw anew.
    """

    def refuse(seed: int) -> None:
        raise CaptureError(
            f"the forward of {type(model).__name__} seeds torch's generator (torch.manual_seed({seed})), to draw the "
            "same in every step, and the program would draw anew: draw the tensor once and register it as a buffer"
        )

    return patch.object(torch, "manual_seed", refuse)


def _generators(model: nn.Module) -> dict[str, Any]:
    """Return the states of the generators that torch does not know, by name, as values that can be compared: the global
    ones, and those that are attributes of modules.

    A forward that seeds them itself (BigBird) draws the same every time, and leaves what the rehearsal before it left.
    """
    found: dict[str, Any] = {"Python's random": random.getstate(), "numpy.random": repr(_words(np.random.get_state()))}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            full = repr(f"{path}.{name}".lstrip("."))
            if isinstance(value, random.Random):
                found[full] = value.getstate()
            elif isinstance(value, np.random.RandomState):
                found[full] = repr(_words(value.get_state()))
            elif isinstance(value, np.random.Generator):
                found[full] = repr(_words(value.bit_generator.state))
    return found


def _words(state: Any) -> list[Any]:
    """Return the state of a generator of numpy with its words as bytes: as text an array is shortened."""
    values = state.values() if isinstance(state, dict) else state
    return [x.tobytes() if isinstance(x, np.ndarray) else x for x in values]
