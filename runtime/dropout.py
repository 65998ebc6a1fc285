"""Dropout whose mask is a function of the element, not of the rank that draws it.

The mask of an element depends only on (seed, step, site, global position). So it is the same on one device and in every
plan, for every micro-batch size, and when a forward is recomputed. torch's generators cannot do that: they number the
elements of the local tensor in the order in which the ranks happen to draw.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) used as a
counter-based generator: output i of the stream with state s is mix(s + i * golden), with Stafford's 64-bit mixer number
13. It is computed in int64 tensor arithmetic, where products wrap around modulo 2**64 on every device. On GPUs one
kernel reads the tensor and writes the result, in forward and backward alike (autoplan.runtime.fused).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import spmd_types
import torch
from spmd_types import R, V, rules

from autoplan.runtime.fused import one_dropout
from autoplan.runtime.mesh import AxisMesh, current_mesh

_FactorAxes = tuple[str, ...] | Literal["batch"]
Factor = tuple[int, int, _FactorAxes] | tuple[int, int, _FactorAxes, str]
"""(local size, global size, the axes that shard it contiguously, major to minor), or 'batch' in place of the axes. Of a
sequence that is cut over ranks also the axis over which it is: every rank has two chunks of it
(`autoplan.runtime.context`), and the axes shard those."""


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
    _check(x, rng, index, mesh)
    out: torch.Tensor = _Dropout.apply(x, rng, mesh, index, p, site)  # type: ignore[no-untyped-call]
    return out


def _check(x: torch.Tensor, rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh) -> None:
    check_generator(rng)
    if math.prod(factor[0] for factor in index) != x.numel():
        raise ValueError(
            f"dropout: the factors {index} do not multiply to the {x.numel()} elements of {tuple(x.shape)}"
        )
    check_index(index, mesh)


def check_generator(rng: torch.Tensor) -> None:
    """Raise TypeError for an rng that is not int64 [3]."""
    if rng.dtype != torch.int64 or rng.shape != (3,):
        raise TypeError(f"dropout: rng is {rng.dtype} of shape {tuple(rng.shape)}; it must be int64 of shape (3,)")


def check_index(index: tuple[Factor, ...], mesh: AxisMesh) -> None:
    """Raise ValueError for two batch factors, or factors that do not fit the mesh."""
    if sum(factor[2] == "batch" for factor in index) > 1:
        raise ValueError(f"dropout: more than one batch factor in {index}")
    for local, whole, axes, *cut in index:
        if axes == "batch":
            continue
        ranks = mesh.size(axes) * math.prod(map(mesh.size, cut))
        if local * ranks != whole or (cut and whole % (2 * mesh.size(cut[0]))):
            over = (*axes, *cut)
            raise ValueError(f"dropout: {over} of size {ranks} cannot shard {whole} into parts of {local}")


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_BITS = 53


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    # int64 shifts copy the sign; the generator needs zeros.
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's output function in place to int64: every temporary here is 4 times a bf16 activation."""
    for bits, factor in _MIX:
        z.bitwise_xor_(_shift(z, bits)).mul_(factor)
    return z.bitwise_xor_(_shift(z, 31))


def _stream(rng: torch.Tensor, site: int) -> torch.Tensor:
    """Return the state of the stream of this (seed, step, site), int64 []."""
    state = _mix_(rng[0] + _GOLDEN)
    state = _mix_(state + (rng[1] + 1) * _GOLDEN)
    return _mix_(state + _signed((site + 1) * _GOLDEN % (1 << 64)))


def _start(rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> torch.Tensor:
    """Return the global position of the first local element, int64 [], but for what `_chunks` adds."""
    start = torch.zeros((), dtype=torch.int64, device=rng.device)
    for (local, _, axes, *cut), stride in zip(index, _strides(index), strict=True):
        if axes == "batch":
            start = start + rng[2] * stride
        elif not cut and mesh.size(axes) > 1:
            start = start + mesh.index_tensor(axes, rng.device) * (local * stride)
    return start


def _chunks(mesh: AxisMesh, index: tuple[Factor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the places of local tokens in a sequence that is cut over ranks, int64 [local], of every such factor."""
    found = []
    for local, whole, axes, *cut in index:
        if axes == "batch" or not cut:
            continue
        here = mesh.index_tensor(axes, device) * local + torch.arange(local, device=device)
        length, rank = whole // (2 * mesh.size(cut[0])), mesh.index_tensor(cut[0], device)
        behind = whole - 2 * length - 2 * length * rank  # between the end of the first chunk and the second one
        found.append(here + rank * length + torch.where(here < length, 0, behind))
    return tuple(found)


def _strides(index: tuple[Factor, ...]) -> list[int]:
    """Return the global stride of each factor; the batch is the most significant digit wherever it stands."""
    strides = [0] * len(index)
    stride = 1
    for i in reversed(range(len(index))):
        if index[i][2] != "batch":
            strides[i] = stride
            stride *= index[i][1]
    return [stride if factor[2] == "batch" else s for factor, s in zip(index, strides, strict=True)]


def _places(
    index: tuple[Factor, ...], chunks: tuple[torch.Tensor, ...], device: torch.device
) -> list[tuple[torch.Tensor, int]]:
    """Return the places of the local digits of every factor, int64 [local], counted from `_start`, and its stride."""
    given = iter(chunks)
    return [
        (next(given) if len(factor) > 3 else torch.arange(factor[0], dtype=torch.int64, device=device), stride)
        for factor, stride in zip(index, _strides(index), strict=True)
    ]


def _golden(times: int) -> int:
    """Return so many times the golden number, modulo 2**64."""
    return _signed(times * _GOLDEN % (1 << 64))


def _counters(first: torch.Tensor | int, places: list[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    """Return ``first`` + golden times the positions of these (places, global stride) factors, int64, flattened."""
    # full, not tensor: no copy from the host
    counter = (torch.full((), first, dtype=torch.int64, device=device) if isinstance(first, int) else first).reshape(1)
    for place, stride in places:
        counter = (counter.unsqueeze(1) + place * _golden(stride)).reshape(-1)
    return counter


def _traced_mask(
    state: torch.Tensor, start: torch.Tensor, chunks: tuple[torch.Tensor, ...], index: tuple[Factor, ...], p: float
) -> torch.Tensor:
    """Return what `_mask` does, as a compiler makes one loop of it.

    It multiplies with the golden number last: inductor computes sums and products of positions symbolically, and
    refuses a constant beyond int64.
    """
    position = start
    for place, stride in _places(index, chunks, state.device):
        position = position.unsqueeze(-1) + place * stride
    drawn = _mix_(state + (position + 1) * _GOLDEN)
    return (_shift(drawn, 64 - _BITS) < kept_below(p)).reshape(-1)


def _mask(
    state: torch.Tensor, start: torch.Tensor, chunks: tuple[torch.Tensor, ...], index: tuple[Factor, ...], p: float
) -> torch.Tensor:
    """Return a flattened bool mask, True where an element is kept."""
    if torch.compiler.is_compiling():
        return _traced_mask(state, start, chunks, index, p)
    places = _places(index, chunks, state.device)
    block = _block(state.device)
    split, columns = len(places), 1
    while split > 0 and columns * index[split - 1][0] <= block:
        split -= 1
        columns *= index[split][0]
    inner = _counters(0, places[split:], state.device)
    outer = _counters(state + (start + 1) * _GOLDEN, places[:split], state.device)
    return _drawn(outer, inner, p, block).reshape(-1)


def _block(device: torch.device) -> int:
    return 1 << 18 if device.type == "cpu" else 1 << 26


def _drawn(outer: torch.Tensor, inner: torch.Tensor, p: float, block: int) -> torch.Tensor:
    """Return [outer, inner], True where the element with the sum of two counters is kept."""
    # In blocks: on the CPU to stay in the cache (5 times as fast), elsewhere to bound the int64 temporaries. Not too
    # many blocks, for FakeTensorMode, where each operation costs the same whatever its size.
    rows = max(block // max(inner.shape[0], 1), -(-outer.shape[0] // 256))
    threshold = kept_below(p)
    parts = [_shift(_mix_(part + inner), 64 - _BITS) < threshold for part in torch.split(outer.unsqueeze(1), rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
        kept = _drawn(rows, self.keys, self.p, _block(rows.device))
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
    check_generator(rng)
    check_index(index, mesh)
    if math.prod(factor[0] for factor in index) != math.prod(heads):
        raise ValueError(f"attention: the factors {index} do not multiply to {heads} samples and heads")
    with spmd_types.no_typecheck():
        pairs: tuple[Factor, ...] = ((num_queries, num_queries, ()), (num_keys, num_keys, ()))
        places = _places((*index, *pairs), (), rng.device)
        first = _stream(rng, site) + (_start(rng, mesh, (*index, *pairs)) + 1) * _GOLDEN
        counters = _counters(first, places[:-2], rng.device).reshape(heads)
        queries, keys = (place * _golden(stride) for place, stride in places[-2:])
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
    for (local, whole, axes, *cut), stride in zip(index, _strides(index), strict=True):
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
        state, start, chunks = _stream(rng, site), _start(rng, mesh, index), _chunks(mesh, index, rng.device)
        ctx.save_for_backward(state, start, *chunks)
        return _apply(x, state, start, chunks, index, p)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        if ctx.fused is not None:
            (rng,) = ctx.saved_tensors
            return _apply_fused(grad, rng, ctx.fused), None, None, None, None, None
        state, start, *chunks = ctx.saved_tensors
        return _apply(grad, state, start, tuple(chunks), ctx.index, ctx.p), None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> Any:
        check_types("dropout", x, rng, mesh, index)
        rules.ignore(rng)
        return rules.einsum("...->...", x, linear_in=(0,))


def check_types(what: str, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> None:
    """Raise SpmdTypeError, while types are checked, if the ranks of `x` differ otherwise than the index says."""
    types = spmd_types.get_local_type(x)
    for factor in index:
        for key in () if factor[2] == "batch" else mesh.type_axes((*factor[2], *factor[3:])):
            if types.get(key) is not V:
                raise spmd_types.SpmdTypeError(
                    f"{what}: index says that {key} shards x, whose type there is {types.get(key)}"
                )
    for rng_key, kind in spmd_types.get_local_type(rng).items():
        if kind is V and types.get(rng_key) is not V:
            raise spmd_types.SpmdTypeError(
                f"{what}: rng is V on {rng_key} but x is {types.get(rng_key)}: its ranks would differ"
            )
        if kind is not V and kind is not R and kind is not spmd_types.I:
            raise spmd_types.SpmdTypeError(f"{what}: rng is {kind} on {rng_key}")


def _apply_fused(x: torch.Tensor, rng: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
    out: torch.Tensor = torch.ops.autoplan_fused.dropout(x.contiguous(), rng.contiguous(), *arguments)
    return out


def _apply(
    x: torch.Tensor,
    state: torch.Tensor,
    start: torch.Tensor,
    chunks: tuple[torch.Tensor, ...],
    index: tuple[Factor, ...],
    p: float,
) -> torch.Tensor:
    kept = _mask(state, start, chunks, index, p).reshape(x.shape)
    return torch.where(kept, x * _scale(p), 0)
