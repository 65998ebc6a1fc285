"""Dropout whose mask is a function of the element, not of the rank that draws it (autoplan.runtime.random_bits).

On GPUs one kernel reads the tensor and writes the result, in forward and backward alike (autoplan.runtime.fused).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import spmd_types
import torch
from spmd_types import R, V, rules

from autoplan.runtime.fused import one_dropout
from autoplan.runtime.mesh import AxisMesh, current_mesh
from autoplan.runtime.random_bits import (
    GOLDEN,
    Factor,
    check_factors,
    check_random_types,
    counters_of,
    cut_places,
    drawn,
    drawn_of_both,
    first_position,
    global_strides,
    golden,
    mix_,
    places_of,
    stream_state,
    upper_bits,
)


def dropout(
    x: torch.Tensor,
    p: float,
    rng: torch.Tensor | None,
    site: int,
    index: tuple[Factor, ...],
    *,
    training: bool = True,
) -> torch.Tensor:
    """Zero each element of ``x`` with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Args:
        x: any floating tensor.
        p: in [0, 1]; 0 returns ``x``.
        rng: int64 [3]: seed, step, and the global number of the first sample of this micro-batch on this rank. None
            (in an evaluation) returns ``x``.
        site: number of this dropout in the program; sites draw independently.
        index: the factors of ``x`` in order, so that ``x.reshape([f[0] for f in index])`` is valid. At most one is the
            batch, whose global position is ``rng[2]`` + local position and whose global size is not used.
        training: False returns ``x``.

    Returns:
        A tensor of the shape, dtype and type of ``x`` (P too: the same mask on every rank is linear).

    Raises:
        ValueError: p outside [0, 1], factors that do not multiply to ``x.numel()`` or do not fit the mesh, or two batch
            factors.
        TypeError: an rng that is not int64 [3].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}; it must be in [0, 1]")
    if not training or p == 0.0 or rng is None:
        return x
    mesh = current_mesh()
    check_factors("dropout", x.shape, rng, index, mesh)
    out: torch.Tensor = _Dropout.apply(x, rng, mesh, index, p, site)  # type: ignore[no-untyped-call]
    return out


_BITS = 53


def _is_kept(counters: torch.Tensor, p: float) -> torch.Tensor:
    return upper_bits(mix_(counters), _BITS) < kept_below(p)


class Drops(NamedTuple):
    """The pairs of queries and keys that attention drops: those of a tensor [b, h, s, t] that `dropout` would drop.

    Attributes:
        p: probability.
        counters: the counter of the generator at the first pair of every sample and head, int64 [b, h].
        queries, keys: what a query and a key add to it, int64 [s] and [t].
    """

    p: float
    counters: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    def of(self, queries: slice, keys: slice) -> Drops:
        """Return those of some of the queries and keys."""
        return self._replace(queries=self.queries[queries], keys=self.keys[keys])

    def kept(self) -> torch.Tensor:
        """Return a mask, True where a pair is kept, bool [b, h, s, t]."""
        rows = (self.counters.unsqueeze(-1) + self.queries).reshape(-1)
        kept = drawn_of_both(rows, self.keys, lambda counters: _is_kept(counters, self.p))
        return kept.reshape(*self.counters.shape, self.queries.shape[0], self.keys.shape[0])

    @property
    def scale(self) -> float:
        """The factor of what is kept."""
        return _scale(self.p)


def drops(
    p: float,
    rng: torch.Tensor,
    site: int,
    index: tuple[Factor, ...],
    heads: tuple[int, int],
    lengths: tuple[int, int],
) -> Drops:
    """Return the dropout of attention's probabilities; queries and keys stand in the order of the sequence, and whole.

    Args:
        rng, site: as for `dropout`.
        index: the factors of samples and heads.
        heads: local numbers of samples and heads, to which the factors multiply.
        lengths: global numbers of queries and keys.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"attention: dropout_p is {p}; it must be in [0, 1]")
    mesh, (num_queries, num_keys) = current_mesh(), lengths
    check_factors("attention", heads, rng, index, mesh)
    with spmd_types.no_typecheck():
        pairs: tuple[Factor, ...] = ((num_queries, num_queries, ()), (num_keys, num_keys, ()))
        places = places_of((*index, *pairs), (), rng.device)
        first = stream_state(rng, site) + (first_position(rng, mesh, (*index, *pairs)) + 1) * GOLDEN
        counters = counters_of(first, places[:-2], rng.device).reshape(heads)
        queries, keys = (place * golden(stride) for place, stride in places[-2:])
    if spmd_types.is_type_checking():
        known = spmd_types.get_local_type(rng)
        shards = [key for factor in index if factor[2] != "batch" for key in mesh.type_axes(factor[2])]
        types = dict(known)
        types.update((key, V) for key in shards)
        spmd_types.assert_type(counters, types)
        for counts in (queries, keys):
            spmd_types.assert_type(counts, R)
    return Drops(p, counters, queries, keys)


def _merged(digits: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return sizes and strides of these (size, stride) digits, major to minor; globally contiguous ones are merged."""
    sizes, strides = [1], [0]
    for local, stride in digits:
        if sizes[-1] == 1 or strides[-1] == local * stride:
            sizes[-1], strides[-1] = sizes[-1] * local, stride
        elif local > 1:
            sizes.append(local)
            strides.append(stride)
    return sizes, strides


def kept_below(p: float) -> int:
    """Return the threshold below which the upper 53 bits of an element's draw keep it."""
    return round((1.0 - p) * (1 << _BITS))


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _fused_arguments(mesh: AxisMesh, index: tuple[Factor, ...], p: float, site: int) -> tuple[Any, ...] | None:
    """Return the arguments of `torch.ops.autoplan_fused.dropout` after the tensor and its rng.

    None where places of tokens are not those of digits: an odd number of ranks shares two chunks of a sequence.
    """
    first, batch_stride, digits = 0, 0, list[tuple[int, int]]()
    for (local, whole, axes, *cut), stride in zip(index, global_strides(index), strict=True):
        if axes == "batch":
            batch_stride = stride
            digits.append((local, stride))
            continue
        here = mesh.coordinate(axes) * local
        if cut:
            ranks, rank = mesh.size(cut[0]), mesh.coordinate(cut[0])
            length = whole // (2 * ranks)
            behind = 2 * length * (ranks - 1 - rank)
            if local == 2 * length:
                digits.append((2, (length + behind) * stride))
                local = length
            elif length % max(local, 1):
                return None
            here += rank * length + (behind if here >= length else 0)
        digits.append((local, stride))
        first += here * stride
    return (site, *_merged(digits), first, batch_stride, kept_below(p), _scale(p))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...], p: float, site: int
    ) -> torch.Tensor:
        # The backward draws the mask a second time. It does not consult the mesh: it may run in another thread.
        ctx.index, ctx.p = index, p
        ctx.fused = _fused_arguments(mesh, index, p, site) if one_dropout(x.device) else None
        if ctx.fused is not None:
            ctx.save_for_backward(rng)
            return _apply_fused(x, rng, ctx.fused)
        state, start = stream_state(rng, site), first_position(rng, mesh, index)
        cut = cut_places(mesh, index, rng.device)
        ctx.save_for_backward(state, start, *cut)
        return _apply(x, state, start, cut, index, p)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        if ctx.fused is not None:
            (rng,) = ctx.saved_tensors
            return _apply_fused(grad, rng, ctx.fused), None, None, None, None, None
        state, start, *cut = ctx.saved_tensors
        return _apply(grad, state, start, tuple(cut), ctx.index, ctx.p), None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> Any:
        check_random_types("dropout", x, rng, index, mesh)
        rules.ignore(rng)
        return rules.einsum("...->...", x, linear_in=(0,))


def _apply_fused(x: torch.Tensor, rng: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
    out: torch.Tensor = torch.ops.autoplan_fused.dropout(x.contiguous(), rng.contiguous(), *arguments)
    return out


def _apply(
    x: torch.Tensor,
    state: torch.Tensor,
    start: torch.Tensor,
    cut: tuple[torch.Tensor, ...],
    index: tuple[Factor, ...],
    p: float,
) -> torch.Tensor:
    kept = drawn(state, start, index, lambda counters: _is_kept(counters, p), cut).reshape(x.shape)
    return torch.where(kept, x * _scale(p), 0)
