"""Context parallelism: every rank has a part of each sequence; attention sees the whole sequence in one of three ways.

A sequence of s tokens is cut into 2 c equal chunks over c ranks. Rank i has chunks i and 2 c - 1 - i, so that all ranks
have the same work under a causal mask (Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2).

gather   keys and values of the whole sequence are gathered, their gradients are reduced and scattered (the same source)
ring     keys and values travel from rank to rank (``autoplan.runtime.ring``)
ulysses  ranks exchange parts of the sequence for parts of the heads, and back after attention (Jacobs et al.,
         DeepSpeed Ulysses, 2023)

Sequences of a fixed number of tokens that attention sees without an order (images, a text and an image joined) are cut
in equal parts instead, run by run (``own_part``). The parts of all ranks are then put together in another order than
that of the sequence, the same one for keys and values, which changes nothing.

Ulysses over u neighbours can be combined with gather or ring over the r = c / u groups of neighbours (Fang, Zhao, USP,
2024; Gu et al., LoongTrain, 2024): the parts of u neighbours, put in order, are the part of one of r ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime import functional
from autoplan.runtime.dropout import Drops
from autoplan.runtime.in_parts import attention_in_parts
from autoplan.runtime.mesh import current_mesh
from autoplan.runtime.parts import Pattern, same_document
from autoplan.runtime.ring import gathered
from autoplan.runtime.sdpa import choose_for, flash, sdpa


def context_length(s: int, axis: str) -> int:
    """Return the number of tokens in this rank's part of a sequence of ``s``."""
    return s // current_mesh().size(axis)


def context_part(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Return this rank's two chunks of ``x`` along ``dim``, concatenated.

    Raises:
        ValueError: the size of ``dim`` is not a multiple of twice the number of ranks.
    """
    mesh = current_mesh()
    ranks, index = mesh.size(axis), mesh.coordinate(axis)
    if ranks == 1:
        return x
    if x.shape[dim] % (2 * ranks):
        raise ValueError(
            f"a sequence of {x.shape[dim]} cannot be cut into {2 * ranks} equal chunks over {ranks} ranks of {axis}"
        )
    return _part(x.chunk(2 * ranks, dim), index, dim)


_Runs = Sequence[tuple[int, int]]  # count and tokens: groups of neighbours of which every rank has an equal part


def own_part(x: torch.Tensor, axis: str, dim: int, runs: _Runs) -> torch.Tensor:
    """Return this rank's part of ``x`` along ``dim``: of every run an equal part of each of its groups of tokens.

    Two sequences that are joined are two runs, the rows of an image that are cut beside its columns many groups.

    Raises:
        ValueError: a group has a number of tokens that is not a multiple of that of the ranks.
    """
    mesh = current_mesh()
    ranks, index = mesh.size(axis), mesh.coordinate(axis)
    if ranks == 1:
        return x
    parts, sizes = [], [count * tokens for count, tokens in runs]
    for (count, tokens), run in zip(runs, x.split_with_sizes(sizes, dim), strict=True):
        if tokens % ranks:
            raise ValueError(f"{tokens} tokens cannot be cut into equal parts over {ranks} ranks of {axis}")
        groups = run.reshape(*run.shape[:dim], count, ranks, tokens // ranks, *run.shape[dim + 1 :])
        parts.append(groups.select(dim + 1, index).flatten(dim, dim + 1))
    return torch.cat(parts, dim)


def whole_of_parts(x: torch.Tensor, axis: str, dim: int, runs: _Runs) -> torch.Tensor:
    """Return the whole of which every rank has `own_part` along ``dim``. Its inverse, without a gradient."""
    mesh = current_mesh()
    ranks = mesh.size(axis)
    if ranks == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous(), group=mesh.group(axis))
    sizes = [count * tokens // ranks for count, tokens in runs]
    out = []
    for (count, tokens), *pieces in zip(runs, *(part.split_with_sizes(sizes, dim) for part in parts), strict=True):
        groups = [piece.unflatten(dim, (count, tokens // ranks)) for piece in pieces]
        out.append(torch.stack(groups, dim + 1).flatten(dim, dim + 2))
    return torch.cat(out, dim)


def context_positions(length: int, axis: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the places of this rank's ``length`` tokens in the whole sequence."""
    whole = torch.arange(length * current_mesh().size(axis), dtype=dtype, device=device)
    return context_part(whole, axis, 0)


def _part(chunks: Sequence[torch.Tensor], index: int, dim: int) -> torch.Tensor:
    return torch.cat((chunks[index], chunks[-1 - index]), dim)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Put the parts of neighbouring ranks in order: [ranks, b, h, 2 l, d] -> [b, h, 2 l ranks, d].

    All first chunks come first, then all second chunks in reverse order of the ranks. Of parts without an order, which
    may have an odd number of tokens, this is some order.
    """
    tokens = parts.shape[3]
    first, second = parts.split_with_sizes((tokens - tokens // 2, tokens // 2), dim=3)
    return torch.cat((*first.unbind(0), *second.flip(0).unbind(0)), dim=2)


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split into parts by rank: the inverse of ``_in_order``."""
    tokens = x.shape[2] // ranks
    chunks = x.split_with_sizes([tokens - tokens // 2] * ranks + [tokens // 2] * ranks, dim=2)
    return torch.stack([_part(chunks, i, 2) for i in range(ranks)])


def whole_sequence(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Return the whole of which every rank has `context_part` along ``dim``. Its inverse, without a gradient."""
    mesh = current_mesh()
    if mesh.size(axis) == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(mesh.size(axis))]
    dist.all_gather(parts, x.contiguous(), group=mesh.group(axis))
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)


class _Gather(torch.autograd.Function):
    """[b, h, 2 l, d] of every rank -> [b, h, 2 l c, d] in sequence order; gradients are reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _in_order(gathered(x, group, ranks))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = _by_rank(grad, ctx.ranks)
        return functional.raw_reduce_scatter(parts.flatten(0, 1), ctx.group, ctx.ranks), None, None


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Exchange [b, h, 2 l, d] -> [b, h / ranks, 2 l ranks, d]: this rank's heads of all ranks' parts, in order."""
    sent = x.reshape(x.shape[0], ranks, -1, *x.shape[2:]).movedim(1, 0)
    return _in_order(functional.raw_all_to_all(sent.flatten(0, 1), group).view(sent.shape))


def _to_sequence(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Exchange heads for a part of the sequence: the inverse of ``_to_heads``."""
    sent = _by_rank(x, ranks)
    parts = functional.raw_all_to_all(sent.flatten(0, 1), group).view(sent.shape)
    return parts.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Exchanges parts of the sequence for parts of the heads (``heads``) or back; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: bool, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
        ctx.heads, ctx.group, ctx.ranks = heads, group, ranks
        return (_to_heads if heads else _to_sequence)(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (_to_sequence if ctx.heads else _to_heads)(grad, ctx.group, ctx.ranks), None, None, None


def to_heads(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Exchange [b, h, 2 l, d] -> [b, h / u, 2 l u, d] by an all-to-all over the u ranks of ``axis``.

    If there are fewer heads than ranks, heads are repeated so that every rank has one; u must then be a multiple of h.

    Raises:
        ValueError: neither of h and u divides the other.
    """
    mesh = current_mesh()
    ranks, heads = mesh.size(axis), x.shape[1]
    if heads % ranks:
        if ranks % heads:
            raise ValueError(f"{heads} heads cannot be spread over {ranks} ranks of {axis}")
        x = x.repeat_interleave(ranks // heads, 1)
    out: torch.Tensor = _Exchange.apply(x, True, mesh.group(axis), ranks)  # type: ignore[no-untyped-call]
    return out


def heads_here(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Return this rank's part of [h, ...] heads as `to_heads` spreads them."""
    mesh = current_mesh()
    ranks = mesh.size(axis)
    if x.shape[0] % ranks:
        x = x.repeat_interleave(ranks // x.shape[0], 0)
    return x.chunk(ranks)[mesh.coordinate(axis)]


def to_sequence(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Exchange [b, h / u, 2 l u, d] -> [b, h, 2 l, d]: the inverse of ``to_heads``."""
    mesh = current_mesh()
    out: torch.Tensor = _Exchange.apply(x, False, mesh.group(axis), mesh.size(axis))  # type: ignore[no-untyped-call]
    return out


def documents_of_keys(seen: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the documents [b, t] of tokens of which those not `seen` are keys of no query: 1, and -2 for these.

    Args:
        seen: [b or 1, 1, 1, t] of bool.
    """
    return (3 * seen.to(torch.int8) - 2).reshape(seen.shape[0], -1).expand(samples, -1)


def gathered_documents(documents: torch.Tensor, axis: str) -> torch.Tensor:
    """Gather [b, 2 l] of every rank -> [b, 2 l c] in the order of the sequence."""
    mesh = current_mesh()
    parts = gathered(documents, mesh.group(axis), mesh.size(axis))
    return _in_order(parts[:, :, None, :, None]).flatten(1)


def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    how: Pattern,
    *,
    axis: str,
    documents: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    drops: Drops | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys of the whole sequence, which are gathered over ``axis``.

    Args:
        q, k, v: [b, h, 2 l, d]: two chunks of l tokens, as ``context_part`` cuts them.
        documents: [b, 2 l], the documents of this rank's tokens.
        sinks: [h], one more score of every query (``autoplan.runtime.sinks``).
        drops: dropout, of all queries and keys of the sequence.

    Returns:
        [b, h, 2 l, e].
    """
    mesh = current_mesh()
    ranks, index = mesh.size(axis), mesh.coordinate(axis)
    keys, values = (_Gather.apply(x, mesh.group(axis), ranks) for x in (k, v))  # type: ignore[no-untyped-call]
    whole = None if documents is None else gathered_documents(documents, axis)
    in_parts = sinks is not None or drops is not None or how.in_parts or how.ahead is not None
    if not how.causal and how.ahead is None:
        both = None if documents is None or whole is None else (documents, whole)
        if in_parts:
            mine = None if drops is None else drops._replace(queries=context_part(drops.queries, axis, 0))
            return attention_in_parts(q, keys, values, how, sinks=sinks, documents=both, drops=mine)
        return sdpa(q, keys, values, mask=None if both is None else same_document(*both)[:, None], scale=how.scale)
    length = q.shape[2] // 2
    out = []
    for chunk, place in zip(q.chunk(2, dim=2), (index, 2 * ranks - 1 - index), strict=True):
        first, end = place * length, (place + 1) * length
        own = None if whole is None else whole[:, first:end]
        seen = end + (how.ahead or 0)
        there = keys[:, :, :seen], values[:, :, :seen]
        if in_parts:
            ids = None if own is None or whole is None else (own, whole[:, :seen])
            mine = None if drops is None else drops.of(slice(first, end), slice(seen))
            out.append(attention_in_parts(chunk, *there, how, first=first, sinks=sinks, documents=ids, drops=mine))
        else:
            out.append(_of_chunk(chunk, *there, how.scale, how.window, own, whole))
    return torch.cat(out, dim=2)


def _of_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None,
    own: torch.Tensor | None,
    whole: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of queries that end with the keys.

    Args:
        own: [b, l], the documents of the queries.
        whole: [b, t and more], the documents of the keys and of the tokens after them.
    """
    end = keys.shape[2]
    first = end - q.shape[2]
    low = 0 if window is None else max(0, first - window + 1)  # no query sees earlier keys
    keys, values = keys[:, :, low:], values[:, :, low:]
    if choose_for(q, keys, values, masked=own is not None, causal="end", window=window is not None) == "flash":
        return flash(q, keys, values, scale=scale, window=window)
    distance = torch.arange(first, end, device=q.device)[:, None] - torch.arange(low, end, device=q.device)[None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if own is not None and whole is not None:
        seen = seen & same_document(own, whole[:, low:end])[:, None]
    return sdpa(q, keys, values, mask=seen, scale=scale)
