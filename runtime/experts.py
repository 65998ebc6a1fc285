"""Experts of a mixture on local tensors: rows sorted by expert, one product per expert, summed back by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import P, V, rules
from torch.nn import functional

from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.mesh import Axes, AxisMesh, current_mesh


def experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str,
    gated: bool,
    axes: Axes | None = None,
    dispatch: str | None = None,
    inner: str | None = None,
) -> torch.Tensor:
    """The chosen experts of every token, weighted and summed: dropless, no token is left out and none is padded.

    ``out[t] = sum_j weights[t, j] * down[e] @ act(gate_up[e] @ hidden[t])`` with ``e = index[t, j]``; gated:
    ``act(gate) * up`` of the two halves of the first product. This rank adds nothing for experts that are on other
    ranks of ``axes``, so that the result is P on ``axes``; with inner rows of ``gate_up`` and columns of ``down``
    sharded it is a pending sum, too.

    Args:
        hidden: [t, h].
        index: int64 [t, k], of all experts.
        weights: [t, k].
        gate_up: [e, 2 f, h] (``gated``; gate, then up) or [e, f, h]; e local experts, a contiguous part of all.
        down: [e, h, f].
        activation: its name in ``torch.nn.functional``.
        gated: the first product is a gate and what it scales.
        axes: the axis or axes that shard the experts, major to minor, and whose ranks have the same tokens; None if all
            are here.
        dispatch: the axis that shards the experts and whose ranks have tokens of their own: rows travel to the ranks of
            their experts and back. Not together with ``axes``. The gradients of ``gate_up`` and ``down`` are then those
            of the tokens of all its ranks.
        inner: the axis that splits the inner size of these experts, whose ranks have tokens of their own, too: what
            arrives at one of them goes to all, and what they make of it is summed. Only with ``dispatch``.

    Returns:
        [t, h], in the dtype of ``hidden``.

    Raises:
        ValueError: shapes that do not belong together, an index that is not int64, or an unknown activation.
    """
    t, h, e, f = *hidden.shape[-2:], down.shape[0], down.shape[-1]
    if hidden.ndim != 2 or index.shape != weights.shape or index.ndim != 2 or index.shape[0] != t:
        raise ValueError(
            f"experts: hidden, index and weights have shapes {tuple(hidden.shape)}, {tuple(index.shape)} and "
            f"{tuple(weights.shape)}; they must be [t, h], [t, k] and [t, k]"
        )
    want = ((e, (1 + gated) * f, h), (e, h, f))
    if (tuple(gate_up.shape), tuple(down.shape)) != want:
        raise ValueError(
            f"experts: gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be {want[0]} and {want[1]} "
            f"(gated={gated})"
        )
    if index.dtype != torch.int64:
        raise ValueError(f"experts: index has dtype {index.dtype}; it must be int64")
    act = getattr(functional, activation, None)
    if act is None:
        raise ValueError(f"experts: torch.nn.functional has no activation {activation!r}")
    if dispatch is not None and axes is not None:
        raise ValueError(f"experts: sharded over {axes!r} and dispatched over {dispatch!r}; one of both")
    if inner is not None and dispatch is None:
        raise ValueError(f"experts: split over {inner!r}, but no token travels to them")
    apart = tuple(a for a in (dispatch, inner) if a is not None and current_mesh().size(a) > 1)
    if apart and spmd_types.is_type_checking():
        typed: torch.Tensor = _TypesOfDispatched.apply(hidden, index, weights, gate_up, down, current_mesh(), apart)  # type: ignore[no-untyped-call]
        return typed
    if apart and dispatch is not None:
        return _dispatched(hidden, index, weights, gate_up, down, act, gated, dispatch, inner)
    mesh = None if axes is None else current_mesh()
    out: torch.Tensor = _Experts.apply(hidden, index, weights, gate_up, down, act, gated, mesh, axes)  # type: ignore[no-untyped-call]
    return out


def _dispatched(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
    axis: str,
    inner: str | None,
) -> torch.Tensor:
    """A token once per expert that it chose, sorted by expert, to the rank that has it; results the same way back."""
    mesh = current_mesh()
    group, ranks, num_local = mesh.group(axis), mesh.size(axis), gate_up.shape[0]
    flat = index.flatten()
    chosen = flat.argsort(stable=True)
    here = torch.bincount(flat, minlength=ranks * num_local)
    if here.numel() > ranks * num_local:
        raise ValueError(f"experts: an index is beyond the {ranks * num_local} experts of {ranks} ranks")
    token = chosen // index.shape[1]
    rows, sent = hidden.index_select(0, token), here.view(ranks, -1).sum(1).tolist()
    come: list[int] = []
    if ranks > 1:
        here = _exchange(here, [num_local] * ranks, [num_local] * ranks, group)  # for each of my experts, by rank
        come = here.view(ranks, -1).sum(1).tolist()
        rows = _Exchange.apply(rows, sent, come, group)  # type: ignore[no-untyped-call]
    if inner is not None:
        rows = _of_all_parts(rows, here, num_local, gate_up, down, act, gated, inner)
    else:
        rows = _sorted_rows(rows, here, num_local, gate_up, down, act, gated)
    if ranks > 1:
        rows = _Exchange.apply(rows, come, sent, group)  # type: ignore[no-untyped-call]
    back = rows.index_select(0, chosen.argsort()).view(*index.shape, -1)  # not index_add, which would keep its rows
    return (back * weights.unsqueeze(-1)).to(hidden.dtype).sum(1)


def _sorted_rows(
    rows: torch.Tensor,
    counts: torch.Tensor,
    num_local: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
) -> torch.Tensor:
    """Rows through their experts; `counts` says how many are of the first, the second, ... of each source in turn."""
    sources = counts.numel() // num_local
    local = torch.arange(num_local, device=counts.device).repeat(sources).repeat_interleave(counts)
    ones = torch.ones(local.shape[0], 1, dtype=rows.dtype, device=rows.device)
    out: torch.Tensor = _Experts.apply(rows, local.unsqueeze(1), ones, gate_up, down, act, gated, None, None)  # type: ignore[no-untyped-call]
    return out


def _of_all_parts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    num_local: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
    axis: str,
) -> torch.Tensor:
    """Rows through experts of which each rank of an axis has a part: to all of them, and the sum of what comes back."""
    group, ways = current_mesh().group(axis), current_mesh().size(axis)
    each = [counts.numel()] * ways
    theirs = _exchange(counts.repeat(ways), each, each, group)
    sent, come = [rows.shape[0]] * ways, theirs.view(ways, -1).sum(1).tolist()
    every = _Exchange.apply(rows.repeat(ways, 1), sent, come, group)  # type: ignore[no-untyped-call]
    made = _sorted_rows(every, theirs, num_local, gate_up, down, act, gated)
    parts: torch.Tensor = _Exchange.apply(made, come, sent, group)  # type: ignore[no-untyped-call]
    return parts.view(ways, *rows.shape).sum(0)


def _exchange(rows: torch.Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(come), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), come, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    """Rows to and from every rank of a group, as many as each has for the other; gradients the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.come, ctx.group = sent, come, group
        return _exchange(rows, sent, come, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad, ctx.come, ctx.sent, ctx.group), None, None, None


def _products(x: torch.Tensor, counts: list[int], matrices: torch.Tensor) -> torch.Tensor:
    """Rows of every expert times its matrix: [rows, i], [e, i, o] -> [rows, o]."""
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for rows, matrix, to in zip(torch.split(x, counts), matrices, torch.split(out, counts), strict=True):
        torch.mm(rows, matrix, out=to)
    return out


def _outer(a: torch.Tensor, b: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Of every expert, the sum over its rows of the outer products: [rows, i], [rows, o] -> [e, i, o]."""
    out = a.new_empty(len(counts), a.shape[1], b.shape[1])
    for left, right, to in zip(torch.split(a, counts), torch.split(b, counts), out, strict=True):
        torch.mm(left.T, right, out=to)  # of no rows: zeros
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor],
        gated: bool,
        mesh: AxisMesh | None,
        axes: Axes | None,
    ) -> torch.Tensor:
        num_local = gate_up.shape[0]
        local = index.flatten()
        if mesh is not None and axes is not None:
            local = local - mesh.index_tensor(axes, index.device) * num_local
        local = local.masked_fill((local < 0) | (local >= num_local), num_local)  # elsewhere: behind the last
        counts = torch.bincount(local, minlength=num_local + 1)[:num_local].tolist()
        chosen = local.argsort(stable=True)[: sum(counts)]  # places in [t, k], by expert, then by token
        token, share = chosen // index.shape[1], weights.flatten()[chosen].unsqueeze(1)
        first = _products(hidden[token], counts, gate_up.mT)
        inner = _activated(first, act, gated)
        rows = _products(inner, counts, down.mT)
        out = torch.zeros_like(hidden).index_add_(0, token, (rows * share).to(hidden.dtype))
        ctx.save_for_backward(hidden, weights, gate_up, down, chosen, first)
        ctx.counts, ctx.act, ctx.gated = counts, act, gated
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, gate_up, down, chosen, first = ctx.saved_tensors
        need_hidden, _, need_weights, need_first, need_down = ctx.needs_input_grad[:5]
        counts, token = ctx.counts, chosen // weights.shape[1]
        share = weights.flatten()[chosen].unsqueeze(1)
        arrived = grad[token]
        with torch.enable_grad():  # the activation's own derivative
            given = first.detach().requires_grad_()
            inner = _activated(given, ctx.act, ctx.gated)
        behind = _products(arrived, counts, down)  # of the inner rows, before the routing weight
        for_weights = for_down = for_first = for_hidden = None
        if need_weights:  # <grad, down inner> = <down^T grad, inner>
            each = (behind * inner.detach()).sum(1).to(weights.dtype)
            for_weights = weights.new_zeros(weights.numel()).index_copy_(0, chosen, each).view_as(weights)
        if need_down:
            for_down = _outer((arrived * share).to(arrived.dtype), inner.detach(), counts)
        if need_hidden or need_first:
            (behind,) = torch.autograd.grad(inner, given, (behind * share).to(inner.dtype))
            if need_first:
                for_first = _outer(behind, hidden[token], counts)
            if need_hidden:
                for_hidden = torch.zeros_like(hidden).index_add_(0, token, _products(behind, counts, gate_up))
        return for_hidden, None, for_weights, for_first, for_down, None, None, None, None

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        mesh: AxisMesh | None,
        axes: Axes | None,
    ) -> Any:
        out = rules.einsum("th,tk,tk,exh,ehf->th", hidden, as_constant_beside(index, hidden), weights, gate_up, down)
        for key in () if mesh is None or axes is None else mesh.type_axes(axes):
            if spmd_types.get_local_type(hidden).get(key) is V:
                raise spmd_types.SpmdTypeError(
                    f"experts: tokens are V on {key}, which shards the experts; every rank there needs all its tokens"
                )
            out = rules.reinterpret(out, key, src=V, dst=P)
        return out


def _activated(first: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> torch.Tensor:
    if not gated:
        return act(first)
    gate, up = first.chunk(2, -1)
    return act(gate) * up


class _TypesOfDispatched(torch.autograd.Function):
    """What `_dispatched` is to the type checker, where no row travels: a fake group answers whatever was in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        mesh: AxisMesh,
        apart: tuple[str, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weights, gate_up, down)
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, gate_up, down = map(torch.zeros_like, ctx.saved_tensors)
        return hidden, None, weights, gate_up, down, None, None

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        mesh: AxisMesh,
        apart: tuple[str, ...],
    ) -> Any:
        for key in (key for axis in apart for key in mesh.type_axes(axis)):
            for name, x in (("tokens", hidden), ("indices", index), ("routing weights", weights)):
                if spmd_types.get_local_type(x).get(key) is not V:
                    raise spmd_types.SpmdTypeError(
                        f"experts: {name} are not V on {key}, over which experts are spread; ranks there would each "
                        "send the same rows"
                    )
        return rules.einsum("th,tk,tk,exh,ehf->th", hidden, as_constant_beside(index, hidden), weights, gate_up, down)
