"""Ring attention: keys and values travel from rank to rank while each rank attends to those it holds.

Every rank has chunks i and 2 c - 1 - i of 2 c (``autoplan.runtime.context``). In step r rank i holds the keys and
values of rank i - r: it sends them on, receives the next ones, and meanwhile attends. The results of the steps are
joined by the log-sum-exp of their scores (online softmax; Liu, Zaharia, Abbeel, Ring Attention with Blockwise
Transformers, 2023):

    lse = log(e^lse_1 + e^lse_2),    out = out_1 e^(lse_1 - lse) + out_2 e^(lse_2 - lse)

The backward needs only the final out and lse: with them the probabilities of any part are ``exp(scores - lse)``. Keys
and values go around once more, followed by their gradients, to which each rank adds its share. A gradient ends at the
rank that owns the keys and values. Key-value heads travel as they are, not repeated for the query heads they serve.

Under a causal mask only pairs of chunks that see each other are computed (:func:`parts_of`): 2 c of a rank's 4 c pairs,
the same number on every rank. A window excludes further pairs, but keys and values still travel all the way. Before the
first step all ranks learn which document every token of the sequence belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime import functional
from autoplan.runtime.dropout import Drops
from autoplan.runtime.mesh import current_mesh
from autoplan.runtime.operators import Operator, define_operators
from autoplan.runtime.parts import (
    DROPS_ARGUMENTS,
    PATTERN_ARGUMENTS,
    PairInputs,
    Part,
    Pattern,
    attend,
    attend_backward,
    documents_in,
    drops_in,
    drops_of,
    heads_inside,
    join,
    parts_between,
    tokens_in,
    wide_of,
)
from autoplan.runtime.private import group_named, in_graph
from autoplan.runtime.sinks import gradient_of_sinks, with_sinks


def parts_of(index: int, source: int, ranks: int, tokens: int, how: Pattern) -> tuple[Part, ...]:
    """Return the products of rank ``index`` with the keys of rank ``source``; both have ``tokens``, in two chunks.

    Their number is even, or there is no order.
    """
    length = tokens // 2
    first, second, both = (0, length), (length, tokens), (0, tokens)
    if not how.causal and how.ahead is None:
        return (Part(both, both, "full", softcap=how.softcap),)
    if how.window is None and how.chunk is None and how.causal:
        # chunks are in order: a rank's two are causal together, the second sees all earlier ones
        if source == index:
            return (Part(both, both, "causal", softcap=how.softcap),)
        queries, keys = (both, first) if source < index else (second, both)
        return (Part(queries, keys, "full", softcap=how.softcap),)
    out = []
    for i, place in enumerate((index, 2 * ranks - 1 - index)):
        for j, other in enumerate((source, 2 * ranks - 1 - source)):
            rows, columns = ((x * length, (x + 1) * length) for x in (place, other))
            out += [part.behind(i * length, j * length) for part in parts_between(rows, columns, how)]
    return tuple(out)


def ring_attention(
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
    """Attention of this rank's queries over the keys of the whole sequence, which come around the ring of ``axis``.

    Args:
        q: [b, h, 2 l, d]: two chunks of l tokens, as ``context_part`` cuts them.
        k: [b, kv, 2 l, d]; v: [b, kv, 2 l, e]; kv a divisor of h.
        documents: [b, 2 l], the documents of this rank's tokens.
        sinks: [h], one more score of every query (``autoplan.runtime.sinks``).
        drops: dropout, of all queries and keys of the sequence.

    Returns:
        [b, h, 2 l, e].
    """
    mesh = current_mesh()
    ring = _Ring(mesh.group(axis), mesh.size(axis), mesh.coordinate(axis))
    known = how._replace(scale=1.0 / math.sqrt(q.shape[-1])) if how.scale is None else how
    ids = None if documents is None else gathered(documents, ring.group, ring.ranks)
    p, *drawn = drops or (0.0, None, None, None)
    out: torch.Tensor = _RingAttention.apply(q, k, v, sinks, ids, *drawn, (ring, p, *known))  # type: ignore[no-untyped-call]
    return out


def gathered(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Gather [b, ...] of every rank -> [ranks, b, ...], without gradients."""
    return functional.raw_all_gather(x, group, ranks).view(ranks, *x.shape)


@dataclass(frozen=True)
class _Ring:
    group: dist.ProcessGroup
    ranks: int
    index: int

    def pass_on(self, sent: torch.Tensor, received: torch.Tensor, tag: int = 0) -> list[dist.Work]:
        """Start to send to the next rank and to receive from the previous one."""
        after, before = (self.index + 1) % self.ranks, (self.index - 1) % self.ranks
        works: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
            ]
        )
        return works

    def rotate(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (rank, its packed keys and values), from this rank on backwards, while the next ones are received.

        A buffer is overwritten two steps later.
        """
        buffers = [torch.empty_like(own) for _ in range(min(2, self.ranks - 1))]
        here = own
        for step in range(self.ranks):
            last = step == self.ranks - 1
            works = [] if last else self.pass_on(here, buffers[step % 2])
            yield (self.index - step) % self.ranks, here
            _wait(works)
            if not last:
                here = buffers[step % 2]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpacked(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a packed buffer with the shapes of `k` and `v`."""
    return x[: k.numel()].view(k.shape), x[k.numel() :].view(v.shape)


def _beside(ids: torch.Tensor | None, drops: Drops | None, ring: _Ring, source: int, part: Part) -> PairInputs:
    """Return what stands beside a part's queries and keys."""
    documents = None if ids is None else documents_in(part, ids[ring.index], ids[source])
    if drops is not None:
        here, there = (_chunks_of(x, i, ring.ranks) for x, i in ((drops.queries, ring.index), (drops.keys, source)))
        drops = drops_in(part, drops._replace(queries=here, keys=there))
    return PairInputs(documents, drops=drops)


def _chunks_of(x: torch.Tensor, index: int, ranks: int) -> torch.Tensor:
    """Return the two chunks of rank `index` of a sequence."""
    chunks = x.chunk(2 * ranks)
    return torch.cat((chunks[index], chunks[-1 - index]))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        ids: torch.Tensor | None,
        counters: torch.Tensor | None,
        query_counts: torch.Tensor | None,
        key_counts: torch.Tensor | None,
        how: tuple[Any, ...],
    ) -> torch.Tensor:
        beside = (ids, counters, query_counts, key_counts)
        result, lse = _operator("forward", q, k, v, *beside, how) if in_graph() else _forward(q, k, v, *beside, *how)
        if sinks is not None:
            result, lse = with_sinks(result, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, result, lse, *beside)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse, *beside = ctx.saved_tensors
        back = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if in_graph():
            found = _operator("backward", grad, q, k, v, out, lse, back, *beside, ctx.how)
        else:
            found = _backward(grad, q, k, v, out, lse, back, *beside, *ctx.how)
        for_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return (*found, for_sinks, *(None,) * 5)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor | None,
    counters: torch.Tensor | None,
    query_counts: torch.Tensor | None,
    key_counts: torch.Tensor | None,
    ring: _Ring,
    p: float,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, [b, h, 2 l, e], and the log-sum-exp of all scores, [b, h, 2 l], float32 or wider."""
    tokens, drops = q.shape[2], drops_of(p, counters, query_counts, key_counts)
    wide = wide_of(q.dtype)
    out = heads_inside(q, v, wide).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    for source, buffer in ring.rotate(_packed(k, v)):
        keys, values = _unpacked(buffer, k, v)
        for part in parts_of(ring.index, source, ring.ranks, tokens, Pattern(*how)):
            rows, mine, ends = (tokens_in(x, part.queries) for x in (q, out, lse))
            there, given = (tokens_in(x, part.keys) for x in (keys, values))
            beside = _beside(ids, drops, ring, source, part)
            join(mine, ends, *attend(rows, there, given, part, how[1], beside))
    return out.to(q.dtype), lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    back: bool,
    ids: torch.Tensor | None,
    counters: torch.Tensor | None,
    query_counts: torch.Tensor | None,
    key_counts: torch.Tensor | None,
    ring: _Ring,
    p: float,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. Not `back`: those of k and v are not needed, and not summed over ranks."""
    tokens, drops = q.shape[2], drops_of(p, counters, query_counts, key_counts)
    wide = lse.dtype
    for_q = torch.zeros_like(q, dtype=wide)
    own = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)  # gradients of own keys and values
    behind: list[dist.Work] = []  # gradients of other ranks' keys and values follow them, a step later
    received = k.new_empty(0)
    for source, buffer in ring.rotate(_packed(k, v)):
        keys, values = _unpacked(buffer, k, v)
        mine = own if source == ring.index else torch.zeros_like(own)
        for_k, for_v = _unpacked(mine, k, v)
        for part in parts_of(ring.index, source, ring.ranks, tokens, Pattern(*how)):
            arrived, rows, result, ends = (tokens_in(x, part.queries) for x in (grad, q, out, lse))
            there, given = (tokens_in(x, part.keys) for x in (keys, values))
            beside = _beside(ids, drops, ring, source, part)
            found = attend_backward(arrived, rows, there, given, result, ends, part, how[1], beside)
            tokens_in(for_q, part.queries).add_(found[0])
            tokens_in(for_k, part.keys).add_(found[1])
            tokens_in(for_v, part.keys).add_(found[2])
        if not back or source == ring.index:
            continue
        _wait(behind)
        if received.numel():  # empty at first, when this rank is the first to add to them
            mine += received
        sent, received = mine.to(k.dtype), k.new_empty(own.numel())
        behind = ring.pass_on(sent, received, tag=1)
    _wait(behind)
    if received.numel():
        own += received
    for_k, for_v = _unpacked(own, k, v)
    return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype)


# -- as one operator of a compiled graph, which cannot hold sends and receives ----------------------------------------


def _operator(name: str, *args: Any) -> Any:
    """Call the operator with the tensors of `_forward` or `_backward`; the last of `args` are their other arguments."""
    ring, *how = args[-1]
    operator = getattr(torch.ops.autoplan_ring, name)
    return operator(*args[:-1], ring.group.group_name, ring.index, *how)


def _ring_of(name: str, index: int) -> _Ring:
    group = group_named(name)
    return _Ring(group, dist.get_world_size(group), index)


def _run_forward(*args: Any) -> Any:
    tensors, (group, index, *how) = args[:7], args[7:]
    given: tuple[Any, ...] = (*tensors, _ring_of(group, index), *how)
    return _forward(*given)


def _run_backward(*args: Any) -> Any:
    tensors, (group, index, *how) = args[:11], args[11:]
    given: tuple[Any, ...] = (*tensors, _ring_of(group, index), *how)
    for_q, for_k, for_v = _backward(*given)
    return for_q, for_k.clone(), for_v.clone()  # an operator's results share no memory


def _like_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return heads_inside(q, v), q.new_empty(q.shape[:3], dtype=wide_of(q.dtype))


def _like_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


_COUNTS, _, _RATE = DROPS_ARGUMENTS.rpartition(", ")
_BESIDE = f"Tensor? ids, {_COUNTS}"
_HOW = f"str group, int index, {_RATE}, {PATTERN_ARGUMENTS}"
_LIBRARY = define_operators(
    "autoplan_ring",
    (
        Operator(
            f"forward(Tensor q, Tensor k, Tensor v, {_BESIDE}, {_HOW}) -> (Tensor, Tensor)",
            _run_forward,
            _like_forward,
        ),
        Operator(
            "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool back, "
            f"{_BESIDE}, {_HOW}) -> (Tensor, Tensor, Tensor)",
            _run_backward,
            _like_backward,
        ),
    ),
)
