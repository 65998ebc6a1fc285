"""Scaled-dot-product attention on local heads."""

from __future__ import annotations

import spmd_types
import torch
from torch.nn import functional

from autoplan.runtime import dropout
from autoplan.runtime.context import (
    documents_of_keys,
    gathered_attention,
    gathered_documents,
    heads_here,
    to_heads,
    to_sequence,
)
from autoplan.runtime.in_parts import attention_in_parts
from autoplan.runtime.key_bias import with_key_bias
from autoplan.runtime.mesh import current_mesh
from autoplan.runtime.parts import Pattern, same_document
from autoplan.runtime.random_bits import Factor, check_random_types
from autoplan.runtime.ring import ring_attention
from autoplan.runtime.sdpa import choose_for, flash, sdpa
from autoplan.torch_kernels import window_blocks

CUTS = ("gather", "ring", "ulysses")  # arguments of `attention`: the axis over which the sequence is cut


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng: torch.Tensor | None = None,
    site: int = 0,
    index: tuple[Factor, ...] = (),
    window: int | None = None,
    ahead: int | None = None,
    chunk: int | None = None,
    documents: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    key_bias: torch.Tensor | None = None,
    gather: str | None = None,
    ring: str | None = None,
    ulysses: str | None = None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, with grouped heads if there are fewer k/v heads than q heads.

    Heads and batch may be sharded (V); the sequence and the head dim must be whole. Not linear: P is refused.

    Args:
        q: [b, h, s, d].
        k: [b, kv, t, d], kv a divisor of h; head i of q reads head ``i * kv // h``.
        v: [b, kv, t, e].
        causal: True if query i sees keys ``0..i`` (aligned at the start, as in torch when s != t).
        scale: factor of the scores; None is ``1 / sqrt(d)``.
        mask: bool (True takes part) or additive, broadcastable to [b, h, s, t]; applied besides ``causal``.
        dropout_p: probability with which a share of the softmax is dropped, and the others scaled by 1 / (1 - p); the
            mask is that of `autoplan.runtime.dropout` on all shares, [b, h, s, t], the same in every plan.
        rng, site: as for `dropout`; without rng (in an evaluation) nothing is dropped.
        index: the factors of samples and heads, as for `dropout`.
        window: query i sees keys ``i - window + 1..i``; needs ``causal`` or ``ahead``, s == t and no mask.
        ahead: query i sees keys up to ``i + ahead``; needs ``window``, and not ``causal``.
        chunk: a query sees keys of its own chunk of so many tokens, the first of which begins with the sequence; needs
            what a window needs, and none. With ``documents`` these are the chunks, and none is longer.
        documents: [b, s] integers, the document of every token: a token sees tokens of its own document. -1 - i: a
            token that nobody sees, but that sees document i. Every token must see one. Or [b or 1, 1, 1, s] of bool,
            True for tokens that all see, False for those that nobody sees. Needs s == t and no mask.
        sinks: [h], a score per head that takes part in the softmax of every query and has no value
            (``autoplan.runtime.sinks``). Needs no mask, and s == t if causal.
        softcap: scores are ``softcap * tanh(score / softcap)``; needs what sinks need.
        key_bias: [b or 1, h or 1, 1, t], added to the scores (``autoplan.runtime.key_bias``); of a sequence that is
            cut, those of this rank's keys. Needs no softcap.
        gather, ring, ulysses: the axis over which the sequence is cut, and how attention sees all of it
            (``autoplan.runtime.context``). ulysses over the minor part of the axis can be combined with one of the
            others over the major part. Needs s == t and no mask.

    Returns:
        [b, h, s, e].

    Raises:
        ValueError: wrong number of dims, head counts that do not divide, a rate beyond 0 to 1, a window, documents,
            sinks or softcap with an argument that they exclude, or both ring and gather.
    """
    _check_heads(q, k, v)
    if not dropout_p and _none_of(window, ahead, chunk, softcap, documents, sinks, key_bias, gather, ring, ulysses):
        return _at_once(q, k, v, causal, scale, mask)
    if key_bias is not None:
        if softcap is not None:
            raise ValueError(f"attention: softcap={softcap} with a key_bias, which would be capped, too; give a mask")
        size = v.shape[3]
        q, k, v, scale = with_key_bias(q, k, v, key_bias, scale)
        out = attention(
            q, k, v, causal=causal, scale=scale, mask=mask, dropout_p=dropout_p, rng=rng, site=site, index=index,
            window=window, ahead=ahead, chunk=chunk, documents=documents, sinks=sinks, gather=gather, ring=ring,
            ulysses=ulysses,
        )  # fmt: skip
        return out[..., :size]
    if documents is not None and documents.dtype == torch.bool:
        documents = documents_of_keys(documents, q.shape[0])
    how = Pattern(causal, scale, window, ahead, chunk, softcap)
    _check_pattern(q, k, how, mask)
    _check_documents(q, documents, mask)
    _check_in_parts(q, k, sinks, softcap, causal, mask)
    cut = _cut_axes(q, k, mask, gather, ring, ulysses)
    length = q.shape[2]
    for axis in cut:  # not math.prod, at which compiled blocks would break their graph
        length *= current_mesh().size(axis)
    how = how.within(length, documents is not None)
    drops = None
    if dropout_p and rng is not None:
        if spmd_types.is_type_checking():
            check_random_types("attention", q, rng, index, current_mesh())
        num_keys = length if cut else k.shape[2]
        drops = dropout.drops(dropout_p, rng, site, index, (q.shape[0], q.shape[1]), (length, num_keys))
    if ulysses is not None and ulysses in cut:
        q, k, v = (to_heads(x, ulysses) for x in (q, k, v))
        documents = None if documents is None else gathered_documents(documents, ulysses)
        sinks = None if sinks is None else heads_here(sinks, ulysses)
        if drops is not None:
            drops = drops._replace(counters=heads_here(drops.counters.T, ulysses).T.clone())
        return to_sequence(_by_keys(q, k, v, how, cut, gather, ring, documents, sinks, mask, drops), ulysses)
    return _by_keys(q, k, v, how, cut, gather, ring, documents, sinks, mask, drops)


def _none_of(*given: object) -> bool:
    for each in given:  # noqa: SIM110 - compiled blocks would break their graph at a generator
        if each is not None:
            return False
    return True


def _by_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    how: Pattern,
    cut: list[str],
    gather: str | None,
    ring: str | None,
    documents: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    drops: dropout.Drops | None,
) -> torch.Tensor:
    """Attention of these heads; see `attention`. The sequence is cut over the axes of `cut` but for that of Ulysses."""
    if ring in cut:
        return ring_attention(q, k, v, how, axis=ring, documents=documents, sinks=sinks, drops=drops)
    if gather in cut:
        return gathered_attention(q, k, v, how, axis=gather, documents=documents, sinks=sinks, drops=drops)
    if sinks is not None or drops is not None or how.in_parts:
        both = None if documents is None else (documents, documents)
        own = None if mask is None else mask[(None,) * (4 - mask.ndim)]
        return attention_in_parts(q, k, v, how, first=0, sinks=sinks, documents=both, mask=own, drops=drops)
    if how.window is not None:
        return _windowed(q, k, v, how, how.window, documents)
    if documents is not None:
        mask = same_document(documents, documents)[:, None]
    return _at_once(q, k, v, how.causal, how.scale, mask)


def _at_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of whole sequences by one kernel of torch."""
    if causal and mask is not None:  # SDPA takes one or the other
        return sdpa(q, k, v, mask=_causal(mask, q.shape[2], k.shape[2]), scale=scale)
    return sdpa(q, k, v, mask=mask, causal=causal, scale=scale)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"attention: q, k, v need 4 dims; they have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups != 0 or v.shape[1] != groups:
        raise ValueError(
            f"attention: the {heads} query heads must be a multiple of the {groups} key heads, "
            f"of which there must be as many as value heads, {v.shape[1]}"
        )


def _check_pattern(q: torch.Tensor, k: torch.Tensor, how: Pattern, mask: torch.Tensor | None) -> None:
    if how.chunk is not None and (how.window is not None or how.ahead is not None):
        raise ValueError(f"attention: chunk={how.chunk} with window={how.window}, ahead={how.ahead}; give one of them")
    if how.ahead is not None and (how.causal or how.window is None or how.ahead < 0):
        raise ValueError(
            f"attention: ahead={how.ahead} must not be negative, and needs a window and causal=False, not "
            f"window={how.window} and causal={how.causal}"
        )
    name, size = ("chunk", how.chunk) if how.window is None else ("window", how.window)
    one_sided = how.ahead is None
    if size is not None and (size < 1 or (one_sided and not how.causal) or mask is not None or not _is_square(q, k)):
        raise ValueError(
            f"attention: {name}={size} must be at least 1, and needs {'causal ' if one_sided else ''}attention without "
            f"a mask, with as many keys as queries, not {k.shape[2]} for {q.shape[2]}"
        )


def _is_square(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[2] == k.shape[2]


def _check_documents(q: torch.Tensor, documents: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    if documents is None:
        return
    if documents.shape != q.shape[::2]:
        wanted, given = tuple(q.shape[::2]), tuple(documents.shape)
        raise ValueError(f"attention: documents must have the shape [b, s] of the queries, {wanted}, not {given}")
    if mask is not None:
        raise ValueError("attention: documents with a mask beside them; put the documents into the mask instead")


def _check_in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    sinks: torch.Tensor | None,
    softcap: float | None,
    causal: bool,
    mask: torch.Tensor | None,
) -> None:
    if sinks is None and softcap is None:
        return
    what = "sinks" if sinks is not None else "soft-capped scores"
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"attention: sinks must have the shape [{q.shape[1]}], one per head, not {tuple(sinks.shape)}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"attention: softcap={softcap} must be positive")
    if mask is not None or (causal and q.shape[2] != k.shape[2]):
        raise ValueError(
            f"attention: {what} take no mask, and if causal as many keys as queries, not {k.shape[2]} for {q.shape[2]}"
        )


def _cut_axes(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    gather: str | None,
    ring: str | None,
    ulysses: str | None,
) -> list[str]:
    """Return the axes over which the sequence is cut on this mesh. Raises ValueError for arguments that exclude it."""
    if ring is not None and gather is not None:
        raise ValueError(f"attention: give a ring over {ring!r} or a gather over {gather!r}, not both")
    cut = [a for a in (ulysses, ring, gather) if a is not None and current_mesh().size(a) > 1]
    if cut and (mask is not None or q.shape[2] != k.shape[2]):
        raise ValueError(
            f"attention: a sequence that is cut over {cut[0]!r} takes no mask, and needs as many keys as queries, not "
            f"{k.shape[2]} for {q.shape[2]}"
        )
    return cut


def _causal(mask: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """Return the mask without the keys after each query."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _windowed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Pattern, window: int, documents: torch.Tensor | None
) -> torch.Tensor:
    """Attention with a window: by flash if it applies, else in blocks of as many queries as the window is long.

    A block of queries sees its own block of keys and those near it, so the arithmetic grows with s * window instead of
    s^2. Blocks become a part of the batch dim.
    """
    if choose_for(q, k, v, masked=documents is not None, causal="end", window=True) == "flash":
        return flash(q, k, v, scale=how.scale, window=window, ahead=how.ahead)
    b, heads, s, _ = q.shape
    size, before, behind = window_blocks(window, how.ahead, s)
    num_blocks = -(-s // size)
    after = num_blocks * size - s

    def blocks(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
        padded = functional.pad(x, (0, 0, before, after + behind))
        return padded.unfold(2, before + size + behind, size).permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = torch.arange(num_blocks * size, device=q.device).view(num_blocks, size, 1)
    key = query[:, :1] - before + torch.arange(before + size + behind, device=q.device)
    distance = query - key
    near = (distance >= -(how.ahead or 0)) & (distance < window)
    seen = near & (key >= 0) & ((key < s) | (query >= s))  # queries of the padding see some key, too
    seen = seen.repeat(b, 1, 1)[:, None]
    if documents is not None:
        beyond = torch.iinfo(documents.dtype).max  # a document of its own: every query sees a key
        rows = functional.pad(documents, (0, after), value=beyond).unfold(1, size, size)
        columns = functional.pad(documents, (before, after + behind), value=beyond)
        columns = columns.unfold(1, before + size + behind, size)
        seen = seen & same_document(rows.flatten(0, 1), columns.flatten(0, 1))[:, None]
    out = sdpa(blocks(q, 0, 0), blocks(k, before, behind), blocks(v, before, behind), mask=seen, scale=how.scale)
    out = out.reshape(b, num_blocks, heads, size, v.shape[3]).transpose(1, 2)
    return out.flatten(2, 3)[:, :, :s]
