"""Attention in parts that give their log-sum-exp: with sinks or soft-capped scores, for which torch has no kernel.

What torch has a kernel for is computed by it, anything else in blocks of queries (`autoplan.runtime.parts`), so that
nothing holds all scores, and the backward computes them again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from autoplan.runtime.operators import Operator, define_operators
from autoplan.runtime.parts import Documents, Part, attend, attend_backward, heads_inside, join, wide_of
from autoplan.runtime.private import in_graph
from autoplan.runtime.sinks import gradient_of_sinks, with_sinks

_How = tuple[bool, float, "int | None", "float | None"]  # causal, scale, window, softcap


class Piece(NamedTuple):
    """Keys that queries see: `first` to before `end` of those given, as `part` says."""

    part: Part
    first: int
    end: int


def keys_by_part(
    num_queries: int, num_keys: int, causal: bool, window: int | None, softcap: float | None
) -> tuple[Piece, ...]:
    """Return the pieces of attention of queries; causal ones end with the keys."""
    rows = (0, 1)
    if not causal:
        return (Piece(Part(rows, rows, "full", softcap=softcap), 0, num_keys),)
    before = num_keys - num_queries
    if window is not None and window < num_keys:
        first = max(0, before - window + 1)  # no query sees earlier keys
        return (Piece(Part(rows, rows, "band", before - first, window, softcap), first, num_keys),)
    own = Piece(Part(rows, rows, "causal", softcap=softcap), before, num_keys)
    return (own, Piece(Part(rows, rows, "full", softcap=softcap), 0, before)) if before else (own,)


def attention_in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Attention without all scores in memory.

    Args:
        q: [b, h, s, d]; causal ones end with the keys. k: [b, kv, t, d]. v: [b, kv, t, e].
        scale, window, softcap: as for `autoplan.runtime.attention.attention`.
        sinks: [h] (`autoplan.runtime.sinks`).
        documents: [b, s] of the queries and [b, t] of the keys.

    Returns:
        [b, h, s, e].
    """
    how = causal, 1.0 / math.sqrt(q.shape[3]) if scale is None else scale, window, softcap
    ids = documents or (None, None)
    out: torch.Tensor = _Attention.apply(q, k, v, sinks, *ids, how)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        of_queries: torch.Tensor | None,
        of_keys: torch.Tensor | None,
        how: _How,
    ) -> torch.Tensor:
        function = torch.ops.autoplan_parts.forward if in_graph() else _forward
        out, lse = function(q, k, v, of_queries, of_keys, *how)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, of_queries, of_keys, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, of_queries, of_keys, out, lse = ctx.saved_tensors
        function = torch.ops.autoplan_parts.backward if in_graph() else _backward
        found = function(grad, q, k, v, out, lse, of_queries, of_keys, *ctx.how)
        for_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return (*found, for_sinks, None, None, None)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, [b, h, s, e], and the log-sum-exp of the scores, [b, h, s], float32 or wider."""
    found = []
    for part, first, end in keys_by_part(q.shape[2], k.shape[2], causal, window, softcap):
        keys, values, same = _of_piece(k, v, of_queries, of_keys, first, end)
        found.append(attend(q, keys, values, part, scale, same))
    out, lse = found[0]
    if len(found) == 1:
        return out, lse
    out, lse = out.to(wide_of(q.dtype), copy=True), lse.clone()
    for piece in found[1:]:
        join(out, lse, *piece)
    return out.to(q.dtype), lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    pieces, found = keys_by_part(q.shape[2], k.shape[2], causal, window, softcap), []
    for part, first, end in pieces:
        keys, values, same = _of_piece(k, v, of_queries, of_keys, first, end)
        found.append(attend_backward(grad, q, keys, values, out, lse, part, scale, same))
    if len(pieces) == 1 and pieces[0][1:] == (0, k.shape[2]):
        for_q, for_k, for_v = found[0]
    else:
        for_q, for_k, for_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for (_, first, end), (of_q, of_k, of_v) in zip(pieces, found, strict=True):
            for_q += of_q
            for_k[:, :, first:end] += of_k
            for_v[:, :, first:end] += of_v
    return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype)


def _of_piece(
    k: torch.Tensor,
    v: torch.Tensor,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    first: int,
    end: int,
) -> tuple[torch.Tensor, torch.Tensor, Documents | None]:
    """Return keys and values of a piece, and the documents of its queries and keys."""
    same = None if of_queries is None or of_keys is None else (of_queries, of_keys[:, first:end])
    return k[:, :, first:end], v[:, :, first:end], same


# -- as one operator of a compiled graph, whose compiler would keep the scores of the forward for the backward ---------


def _run_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _forward(*args)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


def _run_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in _backward(*args))


def _like_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return heads_inside(q, v), q.new_empty(q.shape[:3], dtype=wide_of(q.dtype))


def _like_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_HOW = "Tensor? of_queries, Tensor? of_keys, bool causal, float scale, int? window, float? softcap"
_LIBRARY = define_operators(
    "autoplan_parts",
    (
        Operator(
            f"forward(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
            _run_forward,
            _like_forward,
        ),
        Operator(
            "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
            f"{_HOW}) -> (Tensor, Tensor, Tensor)",
            _run_backward,
            _like_backward,
        ),
    ),
)
