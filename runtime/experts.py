"""The experts of a mixture on local tensors: sort rows by expert, multiply, and sum back by token.

The products of all experts are one kernel if there is one (:func:`grouped_kernel`), else one product per expert. Number
of times the host waits for the device in a forward (never in the backward or in a recomputed forward):

| experts | one kernel | a product each |
|---|---|---|
| all here | 0 | 1 |
| sharded over ranks that have the same tokens | 1 | 1 |
| under token dispatch | 1 | 1 |

Rows are held once per choice: [t k, h] and [t k, f] for the choices whose expert is on this rank. The sum over the k
choices of a token reads the rows in place and needs no further copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import P, V, rules
from torch.nn import functional

from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.host_copies import to_host
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
    """Apply the chosen experts of every token, weight and sum the results. Dropless: no token is left out or padded.

    ``out[t] = sum_j weights[t, j] * down[e] @ act(gate_up[e] @ hidden[t])`` with ``e = index[t, j]``; gated:
    ``act(gate) * up`` of the two halves of the first product. This rank adds nothing for experts on other ranks of
    ``axes``, so the result is P on ``axes``. It is also a pending sum where the inner rows of ``gate_up`` and the
    columns of ``down`` are sharded.

    Args:
        hidden: [t, h].
        index: int64 [t, k], over all experts.
        weights: [t, k].
        gate_up: [e, 2 f, h] (``gated``; gate, then up) or [e, f, h]; e local experts, a contiguous part of all.
        down: [e, h, f].
        activation: its name in ``torch.nn.functional``.
        gated: True if the first product is a gate and the value it scales.
        axes: the axis or axes (major to minor) that shard the experts and whose ranks have the same tokens; None if all
            experts are here.
        dispatch: the axis that shards the experts and whose ranks have different tokens (token dispatch): rows travel
            to the ranks of their experts and back. Not together with ``axes``. The gradients of ``gate_up`` and
            ``down`` then cover the tokens of all ranks of this axis.
        inner: the axis that splits the inner size f of these experts and whose ranks have different tokens, too: rows
            that arrive at one rank go to all, and the partial results are summed. Only with ``dispatch``.

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
    out: torch.Tensor = _Experts.apply(hidden, index, weights, gate_up, down, act, gated, mesh, axes, None)  # type: ignore[no-untyped-call]
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
    """Send each token once per chosen expert to the expert's rank, rows sorted by expert, and bring the results back.

    If experts are split over `inner`, the rows that arrive go to all parts, and their partial results come back and are
    summed. All row counts are exchanged first and copied to the host once.
    """
    mesh = current_mesh()
    ranks, ways = mesh.size(axis), 1 if inner is None else mesh.size(inner)
    num_local = gate_up.shape[0]
    total = ranks * num_local
    by_expert, chosen = index.flatten().sort(stable=True)
    here = torch.searchsorted(by_expert, torch.arange(total + 1, device=index.device)).diff()
    there = theirs = here  # there: rows by (source rank, local expert); theirs: the same for every part
    if ranks > 1:
        there = _exchange(here, [num_local] * ranks, [num_local] * ranks, mesh.group(axis))
        theirs = there
    if inner is not None:
        theirs = _exchange(there.repeat(ways), [total] * ways, [total] * ways, mesh.group(inner))
    known = to_host(torch.cat((here, there, theirs)))
    if sum(known[:total]) != chosen.numel():
        raise ValueError(f"experts: an index is beyond the {total} experts of {ranks} ranks")
    sent, come = _sums(known[:total], num_local), _sums(known[total : 2 * total], num_local)
    parts = _sums(known[2 * total :], total)
    rows: torch.Tensor = _Spread.apply(hidden, chosen, index.shape[1])  # type: ignore[no-untyped-call]
    if ranks > 1:
        rows = _Exchange.apply(rows, sent, come, mesh.group(axis))  # type: ignore[no-untyped-call]
    each, shape = [rows.shape[0]] * ways, rows.shape
    if inner is not None:
        rows = _Exchange.apply(rows.repeat(ways, 1), each, parts, mesh.group(inner))  # type: ignore[no-untyped-call]
    grouped = in_one_product(rows, gate_up, down)
    order, groups = _of_sources(theirs, known[2 * total :], num_local, grouped)
    rows = _Experts.apply(rows, order.unsqueeze(1), None, gate_up, down, act, gated, None, None, groups)  # type: ignore[no-untyped-call]
    if inner is not None:
        rows = _Exchange.apply(rows, parts, each, mesh.group(inner))  # type: ignore[no-untyped-call]
        rows = rows.view(ways, *shape).sum(0)
    if ranks > 1:
        rows = _Exchange.apply(rows, come, sent, mesh.group(axis))  # type: ignore[no-untyped-call]
    out: torch.Tensor = _Combine.apply(rows, weights, chosen)  # type: ignore[no-untyped-call]
    return out


def _sums(counts: list[int], size: int) -> list[int]:
    return [sum(counts[i : i + size]) for i in range(0, len(counts), size)]


def _exchange(rows: torch.Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(come), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), come, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of rows within a group, with a row count for each pair of ranks; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.come, ctx.group = sent, come, group
        return _exchange(rows, sent, come, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad, ctx.come, ctx.sent, ctx.group), None, None, None


class _Spread(torch.autograd.Function):
    """[t, h] -> [t k, h]: one row per choice, in the order `chosen` of places in [t, k]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, chosen: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(chosen)
        ctx.tokens, ctx.k = hidden.shape[0], k
        return hidden.index_select(0, chosen // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        return _by_token(grad, chosen, ctx.tokens, ctx.k), None, None


class _Combine(torch.autograd.Function):
    """Rows [t k, h] in the order `chosen` of places in [t, k], and weights [t, k] -> [t, h]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, chosen)
        return _by_token(rows, chosen, weights.shape[0], weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weights, chosen = ctx.saved_tensors
        for_rows = for_weights = None
        arrived = grad.index_select(0, chosen // weights.shape[1])
        if ctx.needs_input_grad[1]:
            for_weights = _of_weights(arrived, rows, weights, chosen)
        if ctx.needs_input_grad[0]:
            for_rows = arrived.mul_(weights.flatten()[chosen].unsqueeze(1))
        return for_rows, for_weights, None


def _by_token(
    rows: torch.Tensor, chosen: torch.Tensor, t: int, k: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, h] -> [t, h]: sum the rows of every token, in the order of its choices and in at least float32.

    One kernel reads every row once, without atomics: the same bits in every run (`index_add` on CUDA adds in the order
    of arrival, and rounds 16-bit sums after every addition).

    Args:
        chosen: the place of every row in [t, k]; no place occurs twice.
        weights: [t, k], the scale of the row at each place; None: unscaled.
    """
    places, order = chosen.sort()
    starts = torch.searchsorted(places, torch.arange(0, t * k, k, device=chosen.device))
    if weights is not None:  # rounded like a model that adds rows one by one: a sum of two has its bits
        rows = torch.mul(rows, weights.flatten()[chosen].unsqueeze(1), out=torch.empty_like(rows))
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # its CPU kernel does not round 16-bit sums to nearest
        return functional.embedding_bag(order, rows.float(), starts, mode="sum").to(rows.dtype)
    return functional.embedding_bag(order, rows, starts, mode="sum")


def _of_weights(a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Gradient of routing weights, [t, k]: dot products of matching rows of `a` and `b`; 0 at places without a row."""
    each = (a * b).sum(1).to(weights.dtype)
    return weights.new_zeros(weights.numel()).index_copy_(0, chosen, each).view_as(weights)


# -- products ----------------------------------------------------------------------------------------------------------

_GROUPED_BYTES = 16  # every row and every matrix starts at a multiple of this
_MOST_GROUPS = 1023
_GROUPED_ON_CUDA = (9, 10)  # compute capabilities with the kernel; others would wait for the host at each product


def grouped_kernel(
    device_type: str, dtype: torch.dtype, capability: int | None, sizes: Iterable[int], num_groups: int
) -> bool:
    """Return True if ``torch.nn.functional.grouped_mm`` can multiply the rows of all experts at once.

    It takes row counts that only the device knows. Otherwise every expert has its own product, of a size that the host
    has to know. The CUDA kernel takes bfloat16 on Hopper and Blackwell; in all other cases torch copies the sizes to
    the host at every product (aten/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`). On a CPU it is a loop over the
    experts.

    Args:
        capability: major compute capability of a CUDA device, None if it is not known.
        sizes: row lengths of all operands.
    """
    if device_type == "cuda":
        fits = dtype == torch.bfloat16 and capability in _GROUPED_ON_CUDA
    else:
        fits = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return fits and num_groups <= _MOST_GROUPS and all(n * dtype.itemsize % _GROUPED_BYTES == 0 for n in sizes)


def in_one_product(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Apply `grouped_kernel` to these operands."""
    capability = None
    if x.device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(x.device)[0]
    begins = (int(m.storage_offset()) for m in (gate_up, down))
    plain = gate_up.dtype == down.dtype == x.dtype and gate_up.is_contiguous() and down.is_contiguous()
    sizes = (x.shape[1], gate_up.shape[1], down.shape[2], *begins)
    return plain and grouped_kernel(x.device.type, x.dtype, capability, sizes, gate_up.shape[0])


@dataclass(frozen=True)
class _Groups:
    """Rows sorted by expert.

    Attributes:
        ends: int32, index after the last row of each expert; None: one product per expert.
        counts: rows of each expert, if the host knows them.
    """

    ends: torch.Tensor | None
    counts: list[int] | None

    def products(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of every expert by its matrix: [rows, i], [e, i, o] -> [rows, o]."""
        if self.ends is not None and (x.device.type != "cuda" or x.shape[0]):
            return functional.grouped_mm(x, matrices, offs=self.ends)
        out = x.new_empty(x.shape[0], matrices.shape[2])
        for rows, matrix, to in zip(self._split(x), matrices, self._split(out), strict=True):
            torch.mm(rows, matrix, out=to)
        return out

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sum the outer products over the rows of every expert: [rows, i], [rows, o] -> [e, i, o]."""
        if self.ends is not None and (a.device.type != "cuda" or a.shape[0]):
            return self._without_garbage(functional.grouped_mm(a.T, b, offs=self.ends))
        left, right = self._split(a), self._split(b)
        out = a.new_empty(len(left), a.shape[1], b.shape[1])
        for x, y, to in zip(left, right, out, strict=True):
            torch.mm(x.T, y, out=to)  # zeros if it has no rows
        return out

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.counts is not None:
            return torch.split(x, self.counts)
        if self.ends is None:
            raise RuntimeError("experts: rows of no known expert")
        return (x,) * self.ends.shape[0]  # there are no rows

    def _without_garbage(self, out: torch.Tensor) -> torch.Tensor:
        """Zero the results of experts without rows, which Blackwell's kernel does not initialise (pytorch issue
        172439).
        """
        if out.device.type != "cuda" or self.ends is None:
            return out
        if self.counts is None:
            return out.masked_fill_((self.ends.diff(prepend=self.ends.new_zeros(1)) == 0)[:, None, None], 0.0)
        for matrix, count in zip(out, self.counts, strict=True):
            if count == 0:
                matrix.zero_()
        return out


def _by_expert(
    index: torch.Tensor, num_local: int, mesh: AxisMesh | None, axes: Axes | None, grouped: bool
) -> tuple[torch.Tensor, _Groups]:
    """Sort the places in [t, k] by local expert, then by token; places of experts on other ranks are left out.

    If experts are sharded, the host waits for the number of rows even if one kernel does all products: otherwise every
    rank would hold rows for all t k choices instead of for its share of them.
    """
    local = index.flatten()
    if mesh is not None and axes is not None:
        local = local - mesh.index_tensor(axes, index.device) * num_local
    local = local.masked_fill((local < 0) | (local >= num_local), num_local)  # other ranks' experts sort last
    by_expert, chosen = local.sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(num_local, device=index.device), right=True, out_int32=True)
    complaint = f"experts: an index is beyond the {num_local} experts"
    if grouped and axes is None:
        torch._assert_async(ends[-1] == index.numel(), complaint)  # without a host wait
        return chosen, _Groups(ends, None)
    counts = to_host(ends.diff(prepend=ends.new_zeros(1)))
    if axes is None and sum(counts) != index.numel():
        raise ValueError(complaint)
    return chosen[: sum(counts)], _Groups(ends if grouped else None, counts)


def _of_sources(counts: torch.Tensor, known: list[int], num_local: int, grouped: bool) -> tuple[torch.Tensor, _Groups]:
    """Sort rows by expert that are already sorted by expert within each source.

    Args:
        counts: rows per (source, expert), the experts of one source after another.
        known: `counts` on the host.
    """
    sources, num_rows = counts.numel() // num_local, sum(known)
    experts_ = torch.arange(num_local, device=counts.device).repeat(sources)
    order = experts_.repeat_interleave(counts, output_size=num_rows).argsort(stable=True)
    ends = counts.view(sources, -1).sum(0).cumsum(0).to(torch.int32) if grouped else None
    return order, _Groups(ends, [sum(known[e::num_local]) for e in range(num_local)])


class _Experts(torch.autograd.Function):
    """The experts' computation.

    `groups`: given if rows are dispatched tokens. Then `index` [rows, 1] orders them by expert, and `weights` is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor],
        gated: bool,
        mesh: AxisMesh | None,
        axes: Axes | None,
        groups: _Groups | None,
    ) -> torch.Tensor:
        chosen, k = index.flatten(), index.shape[1]
        if groups is None:
            chosen, groups = _by_expert(index, gate_up.shape[0], mesh, axes, in_one_product(hidden, gate_up, down))
        first = groups.products(hidden.index_select(0, chosen // k), gate_up.mT)
        rows = groups.products(_activated(first, act, gated), down.mT)
        ctx.save_for_backward(hidden, weights, gate_up, down, chosen, first, groups.ends)
        ctx.counts, ctx.act, ctx.gated, ctx.k = groups.counts, act, gated, k
        return _by_token(rows, chosen, hidden.shape[0], k, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, gate_up, down, chosen, first, ends = ctx.saved_tensors
        need_hidden, _, need_weights, need_first, need_down = ctx.needs_input_grad[:5]
        groups, token = _Groups(ends, ctx.counts), chosen // ctx.k
        share = None if weights is None else weights.flatten()[chosen].unsqueeze(1)
        arrived = grad.index_select(0, token)
        with torch.enable_grad():  # to differentiate the activation
            given = first.detach().requires_grad_()
            inner = _activated(given, ctx.act, ctx.gated)
        behind = groups.products(arrived, down)  # gradient of the inner rows, before the routing weight
        for_weights = for_down = for_first = for_hidden = None
        if need_weights:  # <grad, down inner> = <down^T grad, inner>
            for_weights = _of_weights(behind, inner.detach(), weights, chosen)
        if share is not None:
            arrived, behind = arrived.mul_(share), behind.mul_(share)
        if need_down:
            for_down = groups.outer(arrived, inner.detach())
        del arrived
        if need_hidden or need_first:
            (behind,) = torch.autograd.grad(inner, given, behind)
            if need_first:
                for_first = groups.outer(behind, hidden.index_select(0, token))
            if need_hidden:
                for_hidden = _by_token(groups.products(behind, gate_up), chosen, hidden.shape[0], ctx.k)
        return for_hidden, None, for_weights, for_first, for_down, None, None, None, None, None

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
    """Stands for `_dispatched` under the type checker. It sends no row: a fake group returns uninitialised counts."""

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
