"""Random tensors whose values are functions of the element, not of the rank that draws it.

Their bits are those of `autoplan.runtime.random_bits`.

So noise, masks and timesteps that a forward draws are the same under every plan. They depend on no input and have no
gradient. Samples are numbered over the whole step: a tensor without the batch is the same for all micro-batches, as one
process draws it once.

Uniform numbers are multiples of 2**-24 in float32 and of 2**-53 in float64, from the same bits. Normal ones are those
of Box and Muller (A note on the generation of random normal deviates, Annals of Mathematical Statistics 29, 1958), of
two streams; exponential ones are the logarithm of a uniform number by inversion (Devroye, Non-uniform random variate
generation, 1986, section II.2). A logarithm is taken of numbers in (0, 1/2] or by log1p, so that both tails are as fine
as the dtype: nothing is infinite, and nothing exponential is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from spmd_types import rules

from autoplan.runtime.mesh import AxisMesh, current_mesh
from autoplan.runtime.random_bits import (
    Factor,
    as_int64,
    check_factors,
    check_random_types,
    cut_places,
    drawn,
    first_position,
    mix_,
    stream_state,
    upper_bits,
)

Parameters = tuple[float, ...]


def draw(
    x: torch.Tensor,
    distribution: str,
    parameters: Parameters,
    rng: torch.Tensor | None,
    site: int,
    index: tuple[Factor, ...],
) -> torch.Tensor:
    """Return random numbers.

    Args:
        x: has the shape, dtype and type of the result; its values are not read.
        distribution: a key of `DISTRIBUTIONS`.
        parameters: of the distribution, by its record.
        rng: int64 [3]: seed, step, and the global number of the first sample of this micro-batch on this rank.
        site: number of this draw in the program; sites draw independently.
        index: the factors of ``x`` in order (see `autoplan.runtime.dropout.dropout`).

    Raises:
        ValueError: a distribution that is not known, parameters that it does not have, factors that do not fit, or no
            rng.
        TypeError: an rng that is not int64 [3], or a dtype that the distribution does not have.
    """
    found = DISTRIBUTIONS.get(distribution)
    if found is None:
        raise ValueError(f"draw: no distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    wrong = found.problem(parameters)
    if wrong:
        raise ValueError(f"draw: {distribution} with {parameters}: {wrong}")
    if rng is None:
        raise ValueError("draw: no rng: this pass of the program was compiled as one that draws nothing")
    if found.floating and not x.dtype.is_floating_point:
        raise TypeError(f"draw: {distribution} numbers are floating, not {x.dtype}")
    mesh = current_mesh()
    check_factors("draw", x.shape, rng, index, mesh)
    out: torch.Tensor = _Draw.apply(x, rng, mesh, index, distribution, parameters, site)  # type: ignore[no-untyped-call]
    return out


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rng: torch.Tensor,
        mesh: AxisMesh,
        index: tuple[Factor, ...],
        distribution: str,
        parameters: Parameters,
        site: int,
    ) -> torch.Tensor:
        state, start = stream_state(rng, site), first_position(rng, mesh, index)
        cut = cut_places(mesh, index, rng.device)
        out = numbers(distribution, parameters, state, start, index, x.dtype, cut).reshape(x.shape)
        ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        return (None,) * 7

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> Any:
        check_random_types("draw", x, rng, index, mesh)
        rules.ignore(rng)
        return rules.einsum("...->...", x)


def numbers(
    distribution: str,
    parameters: Parameters,
    state: torch.Tensor,
    start: torch.Tensor,
    index: tuple[Factor, ...],
    dtype: torch.dtype,
    cut: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Return the numbers of elements from the state of their stream on, flattened; arguments as for `drawn`."""
    make = DISTRIBUTIONS[distribution].make
    second = mix_(state + _SECOND) - state  # from the counters of one stream to those of another
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.no_grad():
        return drawn(state, start, index, lambda each: make(_Bits(each, second, wide, dtype), *parameters), cut)


_SECOND = as_int64(0xD1B54A32D192ED03)  # any odd constant
_NUMERATOR = 52  # bits of a number whose logarithm is taken


@dataclass(frozen=True)
class _Bits:
    """The bits of elements, and the dtypes to compute in (`wide`) and to return (`dtype`)."""

    counters: torch.Tensor
    second: torch.Tensor
    wide: torch.dtype
    dtype: torch.dtype

    def first(self, num: int) -> torch.Tensor:
        """Return `num` bits of every element as a whole number."""
        return upper_bits(mix_(self.counters.clone()), num)

    def other(self, num: int) -> torch.Tensor:
        """Return `num` further bits of every element as a whole number."""
        return upper_bits(mix_(self.counters + self.second), num)

    def uniform(self, whole: Callable[[int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return numbers of [0, 1), all multiples of the smallest step below 1 that the dtype has."""
        num = _MANTISSA.get(dtype, 24)
        return whole(num).to(dtype) * 2.0**-num

    def exponential(self) -> torch.Tensor:
        """Return minus the logarithm of a number of (0, 1), to the precision of the dtype at both ends."""
        whole = self.first(_NUMERATOR)
        low = whole < 1 << (_NUMERATOR - 1)
        near = (torch.where(low, whole, (1 << _NUMERATOR) - 1 - whole).to(self.wide) + 0.5) * 2.0**-_NUMERATOR
        return -torch.where(low, near.log(), (-near).log1p())


_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _uniform(bits: _Bits) -> torch.Tensor:
    return bits.uniform(bits.first, bits.dtype)


def _normal(bits: _Bits) -> torch.Tensor:
    angle = bits.uniform(bits.other, bits.wide) * math.tau
    return ((2.0 * bits.exponential()).sqrt() * angle.cos()).to(bits.dtype)


def _exponential(bits: _Bits) -> torch.Tensor:
    found = bits.exponential()
    # float16 would round some of them to 0
    return (found.clamp(min=2.0**-24) if bits.dtype is torch.float16 else found).to(bits.dtype)


def _bernoulli(bits: _Bits, probability: float) -> torch.Tensor:
    return (bits.first(53) < round(probability * (1 << 53))).to(bits.dtype)


def _integers(bits: _Bits, low: float, high: float) -> torch.Tensor:
    # of 63 bits, so that no number is more frequent than others by more than (high - low) / 2**63
    return (bits.first(63) % int(high - low) + int(low)).to(bits.dtype)


def _share(parameters: Parameters) -> str:
    return "" if 0.0 <= parameters[0] <= 1.0 else "the probability must be in [0, 1]"


def _range(parameters: Parameters) -> str:
    return "" if parameters[0] < parameters[1] else "the first must be below the second"


def _fine(parameters: Parameters) -> str:
    return ""


@dataclass(frozen=True)
class Distribution:
    """What is known of a distribution.

    Attributes:
        make: its numbers, from bits and parameters.
        parameters: their names.
        check: says what is wrong with parameters of the right number; empty if nothing is.
        floating: False if whole and boolean dtypes hold its numbers.
    """

    make: Callable[..., torch.Tensor]
    parameters: tuple[str, ...] = ()
    check: Callable[[Parameters], str] = _fine
    floating: bool = True

    def problem(self, parameters: Parameters) -> str:
        """Return what is wrong with parameters; empty if nothing is."""
        if len(parameters) != len(self.parameters):
            return f"its parameters are ({', '.join(self.parameters)})"
        return self.check(parameters)


DISTRIBUTIONS: Mapping[str, Distribution] = {
    "uniform": Distribution(_uniform),
    "normal": Distribution(_normal),
    "exponential": Distribution(_exponential),
    "bernoulli": Distribution(_bernoulli, ("probability",), _share, floating=False),
    "integers": Distribution(_integers, ("low", "high"), _range, floating=False),
}
