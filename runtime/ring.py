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
from autoplan.runtime.mesh import current_mesh
from autoplan.runtime.private import group_named, in_graph
from autoplan.runtime.sdpa import HALVES, multiple_of_head, padded
from autoplan.torch_kernels import LARGEST_HEAD

Documents = tuple[torch.Tensor, torch.Tensor]  # the documents of queries and keys, [b, l] and [b, t]

_BLOCK = 512  # queries whose scores are held at a time if no kernel can be used


@dataclass(frozen=True)
class Part:
    """Queries and keys of one product, in chunks (0, 1 or both of a rank's two chunks).

    Attributes:
        kind: ``full`` (all see all), ``causal`` (aligned at the start), or ``band`` (a query sees the keys from
            ``distance`` 0 to below ``window``, where query 0 is ``offset`` tokens after key 0).
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: str
    offset: int = 0
    window: int = 0


def parts_of(index: int, source: int, ranks: int, length: int, causal: bool, window: int | None) -> tuple[Part, ...]:
    """Return the products of rank ``index`` with the keys of rank ``source``; chunks have ``length`` tokens."""
    if not causal:
        return (Part((0, 2), (0, 2), "full"),)
    if window is None:  # chunks are in order: a rank's two are causal together, the second sees all earlier ones
        if source == index:
            return (Part((0, 2), (0, 2), "causal"),)
        return (Part((0, 2), (0, 1), "full") if source < index else Part((1, 2), (0, 2), "full"),)
    mine, theirs = (index, 2 * ranks - 1 - index), (source, 2 * ranks - 1 - source)
    out = []
    for i, place in enumerate(mine):
        for j, other in enumerate(theirs):
            apart = (place - other) * length  # distance between equal places in both chunks
            nearest, farthest = max(0, apart - length + 1), apart + length - 1
            if apart < 0 or nearest >= window:
                continue
            if apart == 0 and window >= length:
                out.append(Part((i, i + 1), (j, j + 1), "causal"))
            elif apart > 0 and farthest < window:
                out.append(Part((i, i + 1), (j, j + 1), "full"))
            else:
                out.append(Part((i, i + 1), (j, j + 1), "band", apart, window))
    return tuple(out)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    axis: str,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys of the whole sequence, which come around the ring of ``axis``.

    Args:
        q: [b, h, 2 l, d]: two chunks of l tokens, as ``context_part`` cuts them.
        k: [b, kv, 2 l, d]; v: [b, kv, 2 l, e]; kv a divisor of h.
        causal, scale, window: as for ``autoplan.runtime.attention.attention``; a window needs ``causal``.
        documents: [b, 2 l], the documents of this rank's tokens.

    Returns:
        [b, h, 2 l, e].
    """
    mesh = current_mesh()
    ring = _Ring(mesh.group(axis), mesh.size(axis), mesh.coordinate(axis))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    ids = None if documents is None else gathered(documents, ring.group, ring.ranks)
    out: torch.Tensor = _RingAttention.apply(q, k, v, ring, causal, scale, window, ids)  # type: ignore[no-untyped-call]
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


def same_document(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Compare [b, l] with [b, t] -> [b, l, t], True where a query sees a key (``documents`` of ``attention``)."""
    return torch.where(queries < 0, ~queries, queries)[:, :, None] == keys[:, None, :]


def _documents(ids: torch.Tensor | None, ring: _Ring, source: int, part: Part, length: int) -> Documents | None:
    """Return the documents of a part's queries and keys."""
    if ids is None:
        return None
    spans = ((ids[ring.index], part.queries), (ids[source], part.keys))
    rows, columns = (x[:, span[0] * length : span[1] * length] for x, span in spans)
    return rows, columns


def _chunks(x: torch.Tensor, span: tuple[int, int], length: int) -> torch.Tensor:
    return x[:, :, span[0] * length : span[1] * length]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: _Ring,
        causal: bool,
        scale: float,
        window: int | None,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        how = ring, causal, scale, window
        result, lse = _operator("forward", q, k, v, ids, how) if in_graph() else _forward(q, k, v, ids, *how)
        ctx.save_for_backward(q, k, v, result, lse, ids)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, ids = ctx.saved_tensors
        back = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if in_graph():
            found = _operator("backward", grad, q, k, v, out, lse, ids, back, ctx.how)
        else:
            found = _backward(grad, q, k, v, out, lse, ids, back, *ctx.how)
        return (*found, None, None, None, None, None)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor | None,
    ring: _Ring,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, [b, h, 2 l, e], and the log-sum-exp of all scores, [b, h, 2 l], float32 or wider."""
    length = q.shape[2] // 2
    wide = _wide(q.dtype)
    out = _heads_inside(q, v, wide).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    for source, buffer in ring.rotate(_packed(k, v)):
        keys, values = _unpacked(buffer, k, v)
        for part in parts_of(ring.index, source, ring.ranks, length, causal, window):
            rows, mine, ends = (_chunks(x, part.queries, length) for x in (q, out, lse))
            there, given = (_chunks(x, part.keys, length) for x in (keys, values))
            same = _documents(ids, ring, source, part, length)
            _join(mine, ends, *attend(rows, there, given, part, scale, same))
    return out.to(q.dtype), lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ids: torch.Tensor | None,
    back: bool,
    ring: _Ring,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. Not `back`: those of k and v are not needed, and not summed over ranks."""
    length = q.shape[2] // 2
    wide = lse.dtype
    for_q = torch.zeros_like(q, dtype=wide)
    own = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)  # gradients of own keys and values
    behind: list[dist.Work] = []  # gradients of other ranks' keys and values follow them, a step later
    received = k.new_empty(0)
    for source, buffer in ring.rotate(_packed(k, v)):
        keys, values = _unpacked(buffer, k, v)
        mine = own if source == ring.index else torch.zeros_like(own)
        for_k, for_v = _unpacked(mine, k, v)
        for part in parts_of(ring.index, source, ring.ranks, length, causal, window):
            arrived, rows, result, ends = (_chunks(x, part.queries, length) for x in (grad, q, out, lse))
            there, given = (_chunks(x, part.keys, length) for x in (keys, values))
            same = _documents(ids, ring, source, part, length)
            found = attend_backward(arrived, rows, there, given, result, ends, part, scale, same)
            _chunks(for_q, part.queries, length).add_(found[0])
            _chunks(for_k, part.keys, length).add_(found[1])
            _chunks(for_v, part.keys, length).add_(found[2])
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


def _heads_inside(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new result, [b, h, s, e], in memory [b, s, h, e]: the product behind it reads rows without a copy."""
    b, h, s, _ = q.shape
    return q.new_empty(b, s, h, v.shape[3], dtype=dtype or q.dtype).transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


# -- as one operator of a compiled graph, which cannot hold sends and receives ----------------------------------------

_LIBRARY = torch.library.Library("autoplan_ring", "DEF")  # type: ignore[no-untyped-call]
_HOW = "str group, int index, bool causal, float scale, int? window"
_SCHEMAS = (
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? ids, {_HOW}) -> (Tensor, Tensor)",
    "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? ids, bool back, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor)",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _operator(name: str, *args: Any) -> Any:
    """Call the operator with the tensors of `_forward` or `_backward`; the last of `args` are their other arguments."""
    ring, causal, scale, window = args[-1]
    operator = getattr(torch.ops.autoplan_ring, name)
    return operator(*args[:-1], ring.group.group_name, ring.index, causal, scale, window)


def _ring_of(name: str, index: int) -> _Ring:
    group = group_named(name)
    return _Ring(group, dist.get_world_size(group), index)


def _run_forward(q: Any, k: Any, v: Any, ids: Any, group: str, index: int, *how: Any) -> Any:
    return _forward(q, k, v, ids, _ring_of(group, index), *how)


def _run_backward(*args: Any) -> Any:
    tensors, (group, index, *how) = args[:8], args[8:]
    given: tuple[Any, ...] = (*tensors, _ring_of(group, index), *how)
    for_q, for_k, for_v = _backward(*given)
    return for_q, for_k.clone(), for_v.clone()  # an operator's results share no memory


def _like_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _heads_inside(q, v), q.new_empty(q.shape[:3], dtype=_wide(q.dtype))


def _like_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


for _name, _run, _like in (("forward", _run_forward, _like_forward), ("backward", _run_backward, _like_backward)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autoplan_ring::{_name}", _like, lib=_LIBRARY)


def _join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Join the result of a part into `out` and `lse`, in place. Rows that saw no key have lse -inf and weight 0."""
    new = torch.logaddexp(lse, part_lse)
    base = new.masked_fill(new == -math.inf, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(part * (part_lse - base).exp_().unsqueeze(-1))
    lse.copy_(new)


# -- one part ---------------------------------------------------------------------------------------------------------


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, same: Documents | None) -> str:
    """Name the fused kernel of torch (one that gives the log-sum-exp) that takes this part; "" if none does."""
    if part.kind == "band" or same is not None:
        return ""
    if q.device.type == "cpu":
        return "cpu"
    widest = max(k.shape[3], v.shape[3])
    return "cuda" if q.device.type == "cuda" and q.dtype in HALVES and widest <= LARGEST_HEAD else ""


def _head_size(kernel: str, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the head dim that the kernel sees, the same for keys and values."""
    size = max(k.shape[3], v.shape[3])
    return multiple_of_head(size) if kernel == "cuda" else size


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float, same: Documents | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one part alone.

    Args:
        q: [b, h, l, d]. k: [b, kv, t, d]. v: [b, kv, t, e].
        same: documents of queries and keys: a query sees keys of its own document only. None: no documents.

    Returns:
        [b, h, l, e], and the log-sum-exp of the scores, [b, h, l] (float32 for halves).
    """
    kernel = _kernel(q, k, v, part, same)
    if not kernel:
        return _attend_plainly(q, k, v, part, scale, same)
    size, causal = _head_size(kernel, k, v), part.kind == "causal"
    given = [padded(x, size) for x in (q, k, v)]
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=scale)
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
    same: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what one part adds to the gradients of q, k and v, given `out` and `lse` of all parts together."""
    kernel = _kernel(q, k, v, part, same)
    if not kernel:
        return _attend_plainly_backward(grad, q, k, v, out, lse, part, scale, same)
    size, causal = _head_size(kernel, k, v), part.kind == "causal"
    grad, q_, k_, v_, out = (padded(x, size) for x in (grad, q, k, v, out))
    if kernel == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_, k_, v_, out, lse, 0.0, causal, scale=scale
        )
    else:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, so no generator state
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q_, k_, v_, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none,
            scale=scale,
        )  # fmt: skip
    return found[0][..., : q.shape[3]], found[1][..., : k.shape[3]], found[2][..., : v.shape[3]]


def _seen(part: Part, first: int, rows: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Return [rows, keys], True where query `first` + row sees the key; None if all see all."""
    if part.kind == "full":
        return None
    query = torch.arange(first, first + rows, device=device)[:, None] + part.offset
    distance = query - torch.arange(keys, device=device)[None]
    return distance >= 0 if part.kind == "causal" else (distance >= 0) & (distance < part.window)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Reshape [b, h, ...] -> [b, groups, h / groups, ...]."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    part: Part,
    rows: slice,
    scale: float,
    wide: torch.dtype,
    same: Documents | None,
) -> torch.Tensor:
    """Return the scores of the query rows `rows`, [b, kv, g, rows, t]; -inf where a query does not see a key."""
    grouped = _grouped(q[:, :, rows], k.shape[1])
    scores = (grouped @ k.unsqueeze(2).mT).to(wide) * scale
    seen = _seen(part, rows.start, rows.stop - rows.start, k.shape[2], q.device)
    if same is not None:
        own = same_document(same[0][:, rows], same[1])[:, None, None]
        seen = own if seen is None else own & seen
    return scores if seen is None else scores.masked_fill_(~seen, -math.inf)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float, same: Documents | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float32 if q.dtype in HALVES else q.dtype
    outs, ends = [], []
    for first in range(0, q.shape[2], _BLOCK):
        here = slice(first, min(first + _BLOCK, q.shape[2]))
        scores = _scores(q, k, part, here, scale, wide, same)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
        outs.append((shares.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2))
        ends.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(ends, 2)


def _attend_plainly_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    scale: float,
    same: Documents | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, groups = lse.dtype, k.shape[1]
    for_q, for_k, for_v = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    for first in range(0, q.shape[2], _BLOCK):
        here = slice(first, min(first + _BLOCK, q.shape[2]))
        scores = _scores(q, k, part, here, scale, wide, same)
        shares = (scores - _grouped(lse[:, :, here], groups).unsqueeze(-1)).exp_()
        arrived = _grouped(grad[:, :, here], groups)
        for_v += (shares.to(grad.dtype).mT @ arrived).sum(2)
        of_shares = (arrived @ v.unsqueeze(2).mT).to(wide) - _grouped(delta[:, :, here], groups).unsqueeze(-1)
        of_scores = (shares * of_shares * scale).to(q.dtype)
        for_q.append((of_scores @ k.unsqueeze(2)).flatten(1, 2))
        for_k += (of_scores.mT @ _grouped(q[:, :, here], groups)).sum(2)
    return torch.cat(for_q, 2), for_k, for_v
