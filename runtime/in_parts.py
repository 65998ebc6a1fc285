"""Attention in parts that give their log-sum-exp, for which torch has no kernel: with dropout whose mask is alike in
every plan, with sinks or soft-capped scores, in chunks, or over gathered keys in a window on both sides.

What torch has a kernel for is computed by it, anything else in blocks of queries (`autoplan.runtime.parts`), so that
nothing holds all scores, and the backward computes them again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from autoplan.runtime.dropout import Drops
from autoplan.runtime.operators import Operator, define_operators
from autoplan.runtime.parts import (
    DROPS_ARGUMENTS,
    PATTERN_ARGUMENTS,
    Documents,
    PairInputs,
    Part,
    Pattern,
    Span,
    attend,
    attend_backward,
    documents_in,
    drops_in,
    drops_of,
    heads_inside,
    join,
    mask_of,
    parts_between,
    tokens_in,
    wide_of,
)
from autoplan.runtime.private import in_graph
from autoplan.runtime.sinks import gradient_of_sinks, with_sinks

# the rate of dropout; where the queries begin among the keys; causal, scale, window, ahead, chunk, softcap
_How = tuple[float, int, bool, float, "int | None", "int | None", "int | None", "float | None"]


def parts_of_queries(first: int, num_queries: int, num_keys: int, how: Pattern) -> tuple[Part, ...]:
    """Return the parts of attention of queries, the first of which has the place `first` among the keys."""
    whole = (0, num_queries), (0, num_keys)
    if not how.causal and how.ahead is None:
        return (Part(*whole, "full", softcap=how.softcap),)
    return tuple(parts_between((first, first + num_queries), whole[1], how))


def attention_in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    how: Pattern,
    *,
    first: int | None = None,
    sinks: torch.Tensor | None = None,
    documents: Documents | None = None,
    mask: torch.Tensor | None = None,
    drops: Drops | None = None,
) -> torch.Tensor:
    """Attention without all scores in memory.

    Args:
        q: [b, h, s, d]. k: [b, kv, t, d]. v: [b, kv, t, e].
        first: place of the first query among the keys; None: queries end with the keys.
        sinks: [h] (`autoplan.runtime.sinks`).
        documents: [b, s] of the queries and [b, t] of the keys.
        mask: bool (True takes part) or added to the scores, [b or 1, h or 1, s or 1, t or 1]; without sinks.
        drops: dropout of these queries and keys.

    Returns:
        [b, h, s, e].
    """
    causal, scale, *rest = how
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    given = k.shape[2] - q.shape[2] if first is None else first, causal, scale, *rest
    ids = documents or (None, None)
    p, *drawn = drops or (0.0, None, None, None)
    out: torch.Tensor = _Attention.apply(q, k, v, sinks, mask, *ids, *drawn, (p, *given))  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        of_queries: torch.Tensor | None,
        of_keys: torch.Tensor | None,
        counters: torch.Tensor | None,
        query_counts: torch.Tensor | None,
        key_counts: torch.Tensor | None,
        how: _How,
    ) -> torch.Tensor:
        function: Any = torch.ops.autoplan_parts.forward if in_graph() else _forward
        beside = (mask, of_queries, of_keys, counters, query_counts, key_counts)
        out: torch.Tensor
        out, lse = function(q, k, v, *beside, *how)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *beside)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse, *beside = ctx.saved_tensors
        function: Any = torch.ops.autoplan_parts.backward if in_graph() else _backward
        *found, for_mask = function(grad, q, k, v, out, lse, ctx.needs_input_grad[4], *beside, *ctx.how)
        for_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return (*found, for_sinks, for_mask if ctx.needs_input_grad[4] else None, *(None,) * 6)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    counters: torch.Tensor | None,
    query_counts: torch.Tensor | None,
    key_counts: torch.Tensor | None,
    p: float,
    first: int,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, [b, h, s, e], and the log-sum-exp of the scores, [b, h, s], float32 or wider."""
    pattern, drops = Pattern(*how), drops_of(p, counters, query_counts, key_counts)
    parts, wide = parts_of_queries(first, q.shape[2], k.shape[2], pattern), wide_of(q.dtype)
    if _is_whole(parts, q, k):
        return attend(q, k, v, parts[0], how[1], _beside(parts[0], mask, of_queries, of_keys, drops))
    once = _are_apart([part.queries for part in parts])
    out = heads_inside(q, v, None if once else wide).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    for part in parts:
        rows, mine, ends = (tokens_in(x, part.queries) for x in (q, out, lse))
        there, given = (tokens_in(x, part.keys) for x in (k, v))
        found = attend(rows, there, given, part, how[1], _beside(part, mask, of_queries, of_keys, drops))
        if once:
            mine.copy_(found[0])
            ends.copy_(found[1])
        else:
            join(mine, ends, *found)
    return out.to(q.dtype), lse


def _beside(
    part: Part,
    mask: torch.Tensor | None,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    drops: Drops | None,
) -> PairInputs:
    own = None if mask is None else mask_of(mask, slice(*part.queries), slice(*part.keys))
    return PairInputs(documents_in(part, of_queries, of_keys), own, drops_in(part, drops))


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    learns_mask: bool,
    mask: torch.Tensor | None,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    counters: torch.Tensor | None,
    query_counts: torch.Tensor | None,
    key_counts: torch.Tensor | None,
    p: float,
    first: int,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v and the mask; of the mask an empty tensor unless it `learns_mask`."""
    drops = drops_of(p, counters, query_counts, key_counts)
    parts = parts_of_queries(first, q.shape[2], k.shape[2], Pattern(*how))
    for_mask = torch.zeros_like(mask, dtype=lse.dtype) if learns_mask and mask is not None else None
    if _is_whole(parts, q, k):
        beside = _beside(parts[0], mask, of_queries, of_keys, drops)
        summed = list(attend_backward(grad, q, k, v, out, lse, parts[0], how[1], beside, for_mask))
    else:
        once = [_are_apart([part.queries for part in parts])] + 2 * [_are_apart([part.keys for part in parts])]
        summed = [torch.zeros_like(x, dtype=None if o else lse.dtype) for x, o in zip((q, k, v), once, strict=True)]
        for part in parts:
            arrived, rows, result, ends = (tokens_in(x, part.queries) for x in (grad, q, out, lse))
            there, given = (tokens_in(x, part.keys) for x in (k, v))
            beside = _beside(part, mask, of_queries, of_keys, drops)
            own = None if for_mask is None else mask_of(for_mask, slice(*part.queries), slice(*part.keys))
            found = attend_backward(arrived, rows, there, given, result, ends, part, how[1], beside, own)
            for total, span, more in zip(summed, (part.queries, part.keys, part.keys), found, strict=True):
                tokens_in(total, span).add_(more)
            del found, more
    of_mask = q.new_empty(0) if for_mask is None or mask is None else for_mask.to(mask.dtype)
    return summed[0].to(q.dtype), summed[1].to(k.dtype), summed[2].to(v.dtype), of_mask


def _is_whole(parts: Sequence[Part], q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True for one part of all queries and keys."""
    return len(parts) == 1 and (parts[0].queries, parts[0].keys) == ((0, q.shape[2]), (0, k.shape[2]))


def _are_apart(spans: Sequence[Span]) -> bool:
    """Return True if no token is in two of the spans."""
    return all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(spans)))


# -- as one operator of a compiled graph, whose compiler would keep the scores of the forward for the backward ---------


def _run_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _forward(*args)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


def _run_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in _backward(*args))


def _like_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return heads_inside(q, v), q.new_empty(q.shape[:3], dtype=wide_of(q.dtype))


def _like_backward(
    grad: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Any,
    lse: Any,
    learns_mask: bool,
    mask: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    of_mask = mask.new_empty(mask.shape) if learns_mask and mask is not None else q.new_empty(0)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), of_mask)


_HOW = f"Tensor? mask, Tensor? of_queries, Tensor? of_keys, {DROPS_ARGUMENTS}, int first, {PATTERN_ARGUMENTS}"
_LIBRARY = define_operators(
    "autoplan_parts",
    (
        Operator(
            f"forward(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
            _run_forward,
            _like_forward,
        ),
        Operator(
            "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool learns_mask, "
            f"{_HOW}) -> (Tensor, Tensor, Tensor, Tensor)",
            _run_backward,
            _like_backward,
        ),
    ),
)
