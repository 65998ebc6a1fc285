"""Attention of some queries over some keys, with the log-sum-exp of their scores, so that several parts can be joined.

    lse = log(e^lse_1 + e^lse_2),    out = out_1 e^(lse_1 - lse) + out_2 e^(lse_2 - lse)

The backward of a part needs only the out and lse of all parts together: with them its probabilities are
``exp(scores - lse)``. Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from autoplan.runtime.dropout import Drops
from autoplan.runtime.dropped_attention import adds_up, dropped_backward, dropped_forward, takes_dropped
from autoplan.runtime.sdpa import HALVES, choose_for, multiple_of_head, padded
from autoplan.torch_kernels import LARGEST_HEAD, ROW_BLOCK

Documents = tuple[torch.Tensor, torch.Tensor]  # the documents of queries and keys, [b, l] and [b, t]


Span = tuple[int, int]  # the first token, and the one behind the last


class Pattern(NamedTuple):
    """Which keys a query sees, besides documents, and what becomes of scores (`autoplan.runtime.attention`)."""

    causal: bool
    scale: float | None = None
    window: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    @property
    def in_parts(self) -> bool:
        """True for patterns of whole sequences that are computed in parts, as no kernel of torch has them."""
        return self.softcap is not None or self.chunk is not None

    def within(self, length: int, documents: bool) -> Pattern:
        """Return the pattern without what hides nothing in a sequence of `length`.

        Documents that are chunks say themselves where each begins; a window of their length keeps what is computed
        near the diagonal.
        """
        window, ahead, chunk = self.window, self.ahead, self.chunk
        if documents and chunk is not None:
            window, chunk = chunk, None
        if chunk is not None and chunk >= length:
            chunk = None
        if ahead is None or ahead >= length - 1:
            window, ahead = (None, None) if window is None or window >= length else (window, ahead)
        return self._replace(window=window, ahead=ahead, chunk=chunk)


# a pattern as the last arguments of an operator, whose scale is known
PATTERN_ARGUMENTS = "bool causal, float scale, int? window, int? ahead, int? chunk, float? softcap"
DROPS_ARGUMENTS = "Tensor? counters, Tensor? query_counts, Tensor? key_counts, float p"  # `drops_of`


def drops_of(
    p: float, counters: torch.Tensor | None, queries: torch.Tensor | None, keys: torch.Tensor | None
) -> Drops | None:
    """Return the dropout of an operator's arguments; None without counters."""
    return None if counters is None or queries is None or keys is None else Drops(p, counters, queries, keys)


@dataclass(frozen=True)
class Part:
    """Queries and keys of one product, by their places in the tensors that hold them.

    Attributes:
        kind: ``full`` (all see all), ``causal`` (aligned at the start), or ``band`` (a query sees the keys from
            ``distance`` ``-ahead`` to below ``window``, where query 0 is ``offset`` tokens after key 0).
        softcap: scores are ``softcap * tanh(score / softcap)``. None: as they are.
    """

    queries: Span
    keys: Span
    kind: str
    offset: int = 0
    window: int = 0
    ahead: int = 0
    softcap: float | None = None

    def behind(self, queries: int, keys: int) -> Part:
        """Return the part of tensors that begin with so many more queries and keys."""
        (a, b), (first, end) = self.queries, self.keys
        return replace(self, queries=(a + queries, b + queries), keys=(first + keys, end + keys))


def parts_between(queries: Span, keys: Span, how: Pattern) -> Iterator[Part]:
    """Yield the products of queries and keys at these places of a sequence, counted from the first of each.

    Every pair of which the query sees the key is in one part.
    """
    for rows, columns in _by_chunk(queries, keys, how.chunk):
        for part in _near(rows, columns, how):
            yield part.behind(-queries[0], -keys[0])


def _by_chunk(queries: Span, keys: Span, chunk: int | None) -> Iterator[tuple[Span, Span]]:
    """Yield the queries and the keys of every chunk; all of them without chunks."""
    if chunk is None:
        yield queries, keys
        return
    for first in range(queries[0] // chunk * chunk, queries[1], chunk):
        rows, columns = ((max(a, first), min(b, first + chunk)) for a, b in (queries, keys))
        yield rows, columns


def _near(queries: Span, keys: Span, how: Pattern) -> Iterator[Part]:
    """Yield the parts of queries that see all keys, or those near enough."""
    (a, b), (first, end) = queries, keys
    before = b + end if how.window is None else how.window - 1  # the farthest keys that a query sees on either side
    after = 0 if how.causal else b + end if how.ahead is None else how.ahead
    first, end = max(first, a - before), min(end, b + after)
    a, b = max(a, first - after), min(b, end + before)
    if a >= b or first >= end:
        return
    if b - 1 - first <= before and end - 1 - a <= after:
        yield Part((a, b), (first, end), "full", softcap=how.softcap)
    elif how.causal and b - 1 - first <= before:
        yield Part((a, end), (a, end), "causal", softcap=how.softcap)
        for rows, columns in (((a, end), (first, a)), ((end, b), (first, end))):
            if rows[0] < rows[1] and columns[0] < columns[1]:
                yield Part(rows, columns, "full", softcap=how.softcap)
    else:
        yield Part((a, b), (first, end), "band", a - first, before + 1, after, how.softcap)


def tokens_in(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span, of [b, h, s, ...]."""
    return x[:, :, span[0] : span[1]]


def documents_in(part: Part, of_queries: torch.Tensor | None, of_keys: torch.Tensor | None) -> Documents | None:
    """Return the documents of a part's queries and keys, of [b, s] and [b, t]."""
    if of_queries is None or of_keys is None:
        return None
    return of_queries[:, part.queries[0] : part.queries[1]], of_keys[:, part.keys[0] : part.keys[1]]


def drops_in(part: Part, drops: Drops | None) -> Drops | None:
    """Return the dropout of a part's queries and keys."""
    return None if drops is None else drops.of(slice(*part.queries), slice(*part.keys))


def same_document(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compare [b, l] with [b, t] -> [b, l, t], True where a query sees a key (``documents`` of ``attention``)."""
    return torch.where(queries < 0, ~queries, queries)[:, :, None] == keys[:, None, :]


def join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join the result of a part into `out` and `lse`, in place. Rows that saw no key have lse -inf and weight 0."""
    new = torch.logaddexp(lse, part_lse)
    base = new.masked_fill(new == -math.inf, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(part * (part_lse - base).exp_().unsqueeze(-1))
    lse.copy_(new)


def heads_inside(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new result, [b, h, s, e], in memory [b, s, h, e]: the product behind it reads rows without a copy."""
    b, h, s, _ = q.shape
    return q.new_empty(b, s, h, v.shape[3], dtype=dtype or q.dtype).transpose(1, 2)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


class PairInputs(NamedTuple):
    """What stands beside the queries and keys of a part.

    Attributes:
        documents: a query sees keys of its own document only.
        mask: bool (True takes part) or added to the scores, [b or 1, h or 1, l or 1, t or 1].
        drops: the dropout of the probabilities.
    """

    documents: Documents | None = None
    mask: torch.Tensor | None = None
    drops: Drops | None = None


ALONE = PairInputs()


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, beside: PairInputs) -> str:
    """Name the fused kernel (one that gives the log-sum-exp) that takes this part; "" if none does.

    ``dropped`` is our own, all others are torch's.
    """
    if part.softcap is not None:
        return ""
    if beside.drops is not None:
        return "dropped" if takes_dropped(q, k, v) else ""
    if beside.mask is not None or beside.documents is not None:
        return ""
    if part.kind == "band":
        whole = part.offset == 0 and q.shape[2] == k.shape[2]
        return "window" if whole and choose_for(q, k, v, masked=False, causal="end", window=True) == "flash" else ""
    if q.device.type == "cpu":
        return "cpu"
    widest = max(k.shape[3], v.shape[3])
    return "cuda" if q.device.type == "cuda" and q.dtype in HALVES and widest <= LARGEST_HEAD else ""


def _head_size(kernel: str, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the head dim that the kernel sees, the same for keys and values."""
    size = max(k.shape[3], v.shape[3])
    return size if kernel == "cpu" else multiple_of_head(size)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float, beside: PairInputs = ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one part alone.

    Args:
        q: [b, h, l, d]. k: [b, kv, t, d]. v: [b, kv, t, e].

    Returns:
        [b, h, l, e], and the log-sum-exp of the scores, [b, h, l] (float32 for halves).
    """
    kernel = _kernel(q, k, v, part, beside)
    if not kernel:
        return _attend_plainly(q, k, v, part, scale, beside)
    if kernel == "dropped" and beside.drops is not None:
        return dropped_forward(q, k, v, beside.drops, distances(part), scale, beside.documents, beside.mask)
    size, causal = _head_size(kernel, k, v), part.kind == "causal"
    given = [padded(x, size) for x in (q, k, v)]
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=scale)
    elif kernel == "window":
        inside = [x.transpose(1, 2) for x in given]
        out, lse = torch.ops.aten._flash_attention_forward(
            *inside, None, None, q.shape[2], k.shape[2], 0.0, part.ahead == 0, False,
            scale=scale, window_size_left=part.window - 1, window_size_right=part.ahead,
        )[:2]  # fmt: skip
        out = out.transpose(1, 2)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)[:2]
    return out[..., : v.shape[3]], lse


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    scale: float,
    beside: PairInputs = ALONE,
    for_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what one part adds to the gradients of q, k and v, given `out` and `lse` of all parts together.

    Args:
        for_mask: the gradient of the mask is added to it.
    """
    kernel = _kernel(q, k, v, part, beside)
    if not kernel or not adds_up(for_mask, q, k):
        return _attend_plainly_backward(grad, q, k, v, out, lse, part, scale, beside, for_mask)
    if kernel == "dropped" and beside.drops is not None:
        given = beside.drops, distances(part), scale, beside.documents, beside.mask, for_mask
        return dropped_backward(grad, q, k, v, out, lse, *given)
    size, causal = _head_size(kernel, k, v), part.kind == "causal"
    grad, q_, k_, v_, out = (padded(x, size) for x in (grad, q, k, v, out))
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_, k_, v_, out, lse, 0.0, causal, scale=scale
        )
    else:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, so no generator state
        if kernel == "window":
            inside = [x.transpose(1, 2) for x in (grad, q_, k_, v_, out)]
            found = torch.ops.aten._flash_attention_backward(
                *inside, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, part.ahead == 0, none, none,
                scale=scale, window_size_left=part.window - 1, window_size_right=part.ahead,
            )  # fmt: skip
            found = tuple(x.transpose(1, 2) for x in found)
        else:
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q_, k_, v_, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none,
                scale=scale,
            )  # fmt: skip
    return found[0][..., : q.shape[3]], found[1][..., : k.shape[3]], found[2][..., : v.shape[3]]


def distances(part: Part) -> tuple[int, int, int] | None:
    """Return (offset, least, end): query i sees key j if i + offset - j is at least `least` and below `end`.

    None: every query sees every key.
    """
    if part.kind == "full":
        return None
    return (0, 0, 1 << 31) if part.kind == "causal" else (part.offset, -part.ahead, part.window)


def keys_seen(part: Part, rows: slice, keys: int) -> slice:
    """Return the keys, of 0 to `keys`, that any of the query rows `rows` may see."""
    low, high = 0, keys
    if part.kind == "causal":
        high = min(keys, rows.stop)
    elif part.kind == "band":
        low = min(keys, max(0, rows.start + part.offset - part.window + 1))
        high = max(low, min(keys, rows.stop + part.offset + part.ahead))
    return slice(low, high)


def _seen(part: Part, rows: slice, keys: slice, device: torch.device) -> torch.Tensor | None:
    """Return [rows, keys], True where a query sees a key; None if all see all."""
    if part.kind == "full":
        return None
    query = torch.arange(rows.start, rows.stop, device=device)[:, None] + part.offset
    distance = query - torch.arange(keys.start, keys.stop, device=device)[None]
    return distance >= 0 if part.kind == "causal" else (distance >= -part.ahead) & (distance < part.window)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Reshape [b, h, ...] -> [b, groups, h / groups, ...]."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def mask_of(mask: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
    """Return the mask of some queries and keys, a view."""
    if mask.shape[2] > 1:
        mask = mask[:, :, queries]
    return mask[..., keys] if mask.shape[3] > 1 else mask


def _grouped_mask(mask: torch.Tensor, groups: int) -> torch.Tensor:
    return mask.unsqueeze(1) if mask.shape[1] == 1 else _grouped(mask, groups)


def _dropped(drops: Drops | None, rows: slice, keys: slice, shape: torch.Size) -> torch.Tensor | None:
    """Return the pairs of some rows and keys that are dropped, [b, kv, g, rows, keys]; None without dropout."""
    return None if drops is None else drops.of(rows, keys).kept().logical_not_().view(shape)


def _drop_(x: torch.Tensor, drops: Drops | None, dropped: torch.Tensor | None) -> torch.Tensor:
    """Drop some of the probabilities, or of their gradients, in place."""
    return x if drops is None or dropped is None else x.mul_(drops.scale).masked_fill_(dropped, 0.0)


def _blocks(part: Part, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows of queries, and the keys that they may see."""
    for first in range(0, queries, ROW_BLOCK):
        rows = slice(first, min(first + ROW_BLOCK, queries))
        yield rows, keys_seen(part, rows, keys)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    part: Part,
    rows: slice,
    keys: slice,
    scale: float,
    wide: torch.dtype,
    beside: PairInputs,
    sloped: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores of some query rows and keys, [b, kv, g, rows, keys]; -inf where a query does not see a key.

    If `sloped`, also the derivative of capped scores by those that are not; None without a cap.
    """
    grouped = _grouped(q[:, :, rows], k.shape[1])
    scores, slope = (grouped @ k[:, :, keys].unsqueeze(2).mT).to(wide), None
    if part.softcap is None:
        scores = scores.mul_(scale)
    else:
        scores = scores.mul_(scale / part.softcap).tanh_()
        slope = scores.square().neg_().add_(1.0) if sloped else None
        scores = scores.mul_(part.softcap)
    seen, mask = _seen(part, rows, keys, q.device), beside.mask
    if beside.documents is not None:
        own = same_document(beside.documents[0][:, rows], beside.documents[1][:, keys])[:, None, None]
        seen = own if seen is None else own & seen
    if mask is not None:
        mask = _grouped_mask(mask_of(mask, rows, keys), k.shape[1])
        if mask.dtype == torch.bool:
            seen = mask if seen is None else mask & seen
        else:
            scores = scores.add_(mask)
    return scores if seen is None else scores.masked_fill_(~seen, -math.inf), slope


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float, beside: PairInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    out, ends = heads_inside(q, v), []
    for rows, keys in _blocks(part, q.shape[2], k.shape[2]):
        scores, _ = _scores(q, k, part, rows, keys, scale, wide_of(q.dtype), beside)
        lse = scores.logsumexp(-1)
        shares = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
        shares = _drop_(shares, beside.drops, _dropped(beside.drops, rows, keys, shares.shape))
        out[:, :, rows] = (shares.to(v.dtype) @ v[:, :, keys].unsqueeze(2)).flatten(1, 2)
        ends.append(lse.flatten(1, 2))
    return out, torch.cat(ends, 2)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return 0 for queries that see no key."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _attend_plainly_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    scale: float,
    beside: PairInputs,
    for_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, groups = lse.dtype, k.shape[1]
    for_q, for_k, for_v = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    delta, lse = (grad.to(wide) * out.to(wide)).sum(-1), _finite(lse)
    for rows, keys in _blocks(part, q.shape[2], k.shape[2]):
        scores, slope = _scores(q, k, part, rows, keys, scale, wide, beside, sloped=True)
        shares = scores.sub_(_grouped(lse[:, :, rows], groups).unsqueeze(-1)).exp_()
        arrived = _grouped(grad[:, :, rows], groups)
        of_shares = (arrived @ v[:, :, keys].unsqueeze(2).mT).to(wide)
        dropped = _dropped(beside.drops, rows, keys, shares.shape)
        read = shares if dropped is None else _drop_(shares.clone(), beside.drops, dropped)
        for_v[:, :, keys] += (read.to(grad.dtype).mT @ arrived).sum(2)
        of_shares = _drop_(of_shares, beside.drops, dropped)
        of_shares -= _grouped(delta[:, :, rows], groups).unsqueeze(-1)
        of_scores = of_shares.mul_(shares)
        if for_mask is not None:
            _add_summed(mask_of(for_mask, rows, keys), of_scores.flatten(1, 2))
        of_scores = of_scores.mul_(scale)
        of_scores = (of_scores if slope is None else of_scores.mul_(slope)).to(q.dtype)
        for_q.append((of_scores @ k[:, :, keys].unsqueeze(2)).flatten(1, 2))
        for_k[:, :, keys] += (of_scores.mT @ _grouped(q[:, :, rows], groups)).sum(2)
    return torch.cat(for_q, 2), for_k, for_v


def _add_summed(total: torch.Tensor, found: torch.Tensor) -> None:
    """Add [b, h, rows, keys] to a total that may have size 1 in some of the dims."""
    total.add_(found.sum_to_size(total.shape))
