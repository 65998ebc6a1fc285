"""Random tensors in a comparison: a module and its graph draw the same numbers, which follow from shapes alone.

The two may draw in another order, so a number depends on the distribution, the shape and the place of its element. A
mode at the level of ATen, below the functions of torch, gives them to the module: all its ops draw as
`autoplan.capture.draws` defines them for the capture. Numbers are float64, as all values of a comparison are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture.draws import FORMS, Sizes
from autoplan.capture.frontend.inplace import same_arguments
from autoplan.runtime.draws import numbers
from autoplan.runtime.random_bits import stream_state


def known_numbers(size: Sizes, distribution: str, dtype: torch.dtype, *parameters: Any) -> torch.Tensor:
    """Return the numbers that stand for a draw of this shape; see `autoplan.capture.draws.Draw`."""
    shape = [int(n) for n in size]
    site = zlib.crc32(repr((distribution, shape)).encode())
    state, first = stream_state(torch.zeros(3, dtype=torch.int64), site), torch.zeros((), dtype=torch.int64)
    wide = torch.float64 if dtype.is_floating_point else dtype
    count = math.prod(shape)
    return numbers(distribution, parameters, state, first, ((count, count, ()),), wide).reshape(shape)


def known_draw(x: torch.Tensor, distribution: str, parameters: tuple[float, ...], *_: Any) -> torch.Tensor:
    """Return the same as `draw` of an emitted program; see `autoplan.runtime.draws.draw`."""
    return known_numbers(x.shape, distribution, x.dtype, *parameters)


def _leaky_with_noise(
    self: torch.Tensor, noise: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *_: Any
) -> torch.Tensor:
    """Compute what torch makes of `rrelu`, which keeps the slopes for the backward."""
    out = FORMS["aten.rrelu.default"](known_numbers, self, lower, upper, training)
    noise.copy_(torch.where(self <= 0, out / torch.where(self == 0, 1, self), 1))
    return out


def known_draws() -> AbstractContextManager[Any]:
    """Return a mode in which everything that torch draws is known, but for what draws from a generator of its own."""
    mode: AbstractContextManager[Any] = _KnownDraws()  # type: ignore[no-untyped-call]
    return mode


class _KnownDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or the definition of what it draws."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or given.pop("generator", None) is not None:
            return func(*args, **dict(kwargs or {}))
        if func is torch.ops.aten.rrelu_with_noise.default:
            return _leaky_with_noise(*args, **given)
        name, in_place = str(func), func._schema.is_mutable
        if in_place:
            name = same_arguments(name.removeprefix("aten.").partition("_.")[0], func) or name
        form = FORMS.get(name)
        if form is None:
            return func(*args, **dict(kwargs or {}))
        made = form(known_numbers, *args, **given)
        return args[0].copy_(made) if in_place else made
