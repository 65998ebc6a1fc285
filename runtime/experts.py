"""The experts of a mixture on local tensors: sort rows by expert, multiply, and sum back by token.

The products of all experts are one kernel if there is one (:mod:`autoplan.runtime.expert_products`), else one product
per expert. Number of times the host waits for the device in a forward (never in the backward or in a recomputed
forward):

| experts | one kernel | a product each |
|---|---|---|
| all here | 0 | 1 |
| sharded over ranks that have the same tokens | 1 | 1 |
| under token dispatch | 1 | 1 |

Rows are held once per choice: [t k, h] and [t k, f] for the choices whose expert is on this rank. The sum over the k
choices of a token reads the rows in place and needs no further copy.
"""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
from spmd_types import P, V, rules
from torch.nn import functional

from autoplan.runtime import expert_operators as operators
from autoplan.runtime import expert_rows
from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.expert_exchange import Route, RowsByRank, count_rows
from autoplan.runtime.expert_forms import ExpertForm
from autoplan.runtime.expert_products import IN_GRAPH, Groups, TracedGroups, by_expert, in_one_product, of_sources
from autoplan.runtime.expert_rows import Chosen, Needs, by_token, of_tokens, of_weights
from autoplan.runtime.mesh import Axes, AxisMesh, current_mesh
from autoplan.runtime.private import in_graph


def experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str,
    gated: bool,
    interleaved: bool = False,
    transposed: bool = False,
    scales_inputs: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    axes: Axes | None = None,
    dispatch: str | None = None,
    inner: str | None = None,
) -> torch.Tensor:
    """Apply the chosen experts of every token, weight and sum the results. Dropless: no token is left out or padded.

    ``out[t] = sum_j weights[t, j] * down[e] @ act(gate_up[e] @ hidden[t])`` with ``e = index[t, j]``; gated:
    ``act(gate) * up`` of the two halves of the first product. Biases are added to both products. Other forms:
    :class:`autoplan.runtime.expert_forms.ExpertForm`. This rank adds nothing for experts on other ranks of ``axes``, so
    the result is P on ``axes``. It is also a pending sum where the inner rows of ``gate_up`` and the columns of
    ``down`` are sharded; each rank then gives its share of ``down_bias``.

    Args:
        hidden: [t, h].
        index: int64 [t, k], over all experts.
        weights: [t, k].
        gate_up: [e, 2 f, h] (``gated``; gate, then up) or [e, f, h]; e local experts, a contiguous part of all.
        down: [e, h, f].
        gate_up_bias: [e, 2 f] or [e, f]; given together with ``down_bias``, or both not.
        down_bias: [e, h], or under ``inner`` the columns of it that this rank adds.
        activation, gated, interleaved, transposed, scales_inputs, alpha, limit: the form of the experts.
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
    form = ExpertForm(activation, gated, interleaved, transposed, scales_inputs, alpha, limit)
    biases = _checked(hidden, index, weights, gate_up, down, gate_up_bias, down_bias, form)
    if dispatch is not None and axes is not None:
        raise ValueError(f"experts: shard over {axes!r} or dispatch over {dispatch!r}, not both")
    if inner is not None and dispatch is None:
        raise ValueError(f"experts: split over {inner!r}, which needs token dispatch; give dispatch too")
    apart = tuple(a for a in (dispatch, inner) if a is not None and current_mesh().size(a) > 1)
    if apart and spmd_types.is_type_checking():
        typed: torch.Tensor = _TypesOfDispatched.apply(  # type: ignore[no-untyped-call]
            hidden, index, weights, gate_up, down, *(biases or (None, None)), current_mesh(), apart
        )
        return typed
    if apart and dispatch is not None:
        return _dispatched(hidden, index, weights, gate_up, down, biases, form, dispatch, inner)
    mesh = None if axes is None else current_mesh()
    out: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        hidden, index, weights, gate_up, down, *(biases or (None, None)), form, mesh, axes, None
    )
    return out


def _checked(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    form: ExpertForm,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the biases, if any. Raises ValueError for operands that do not belong together."""
    t, h, e, f = *hidden.shape[-2:], down.shape[0], down.shape[1 if form.transposed else 2]
    if hidden.ndim != 2 or index.shape != weights.shape or index.ndim != 2 or index.shape[0] != t:
        raise ValueError(
            f"experts: hidden, index and weights have shapes {tuple(hidden.shape)}, {tuple(index.shape)} and "
            f"{tuple(weights.shape)}; they must be [t, h], [t, k] and [t, k]"
        )
    want = form.shapes(e, f, h)
    if (tuple(gate_up.shape), tuple(down.shape)) != want:
        raise ValueError(
            f"experts: gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} must be {want[0]} and {want[1]} "
            f"(gated={form.gated}, transposed={form.transposed})"
        )
    if index.dtype != torch.int64:
        raise ValueError(f"experts: index has dtype {index.dtype}; it must be int64")
    if gate_up_bias is None and down_bias is None:
        return None
    if gate_up_bias is None or down_bias is None:
        raise ValueError("experts: biases are added to both products; give gate_up_bias and down_bias")
    return gate_up_bias, down_bias


def _dispatched(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    form: ExpertForm,
    axis: str,
    inner: str | None,
) -> torch.Tensor:
    """Send each token once per chosen expert to the expert's rank, rows sorted by expert, and bring the results back.

    If experts are split over `inner`, the rows that arrive go to all parts, and their partial results come back and are
    summed; each part adds its own columns of the second bias. All row counts are exchanged first and copied to the host
    once.
    """
    mesh, num_local = current_mesh(), gate_up.shape[0]
    if biases is not None and inner is not None:
        before = mesh.coordinate(inner) * biases[1].shape[1]
        behind = hidden.shape[1] - before - biases[1].shape[1]
        biases = (biases[0], functional.pad(biases[1], (before, behind)))
    taken, given = (weights, None) if form.scales_inputs else (None, weights)
    ranks, ways = mesh.size(axis), 1 if inner is None else mesh.size(inner)
    group = mesh.group(axis) if ranks > 1 else None
    several = None if inner is None else mesh.group(inner)
    there: Route | None
    parts: Route | None
    if in_graph():
        chosen, there, parts, order, groups = operators.dispatch(index, num_local, group, several)
    else:
        found = count_rows(index, num_local, ranks, group, ways, several)
        chosen, there = found.chosen, None if group is None else RowsByRank(found.sent, found.come, group)
        parts = None if several is None else RowsByRank([sum(found.come)] * ways, found.parts, several)
        order, groups = of_sources(found.theirs, found.known, num_local, in_one_product(hidden, gate_up, down))
    rows: torch.Tensor = _Spread.apply(hidden, taken, chosen, index.shape[1])  # type: ignore[no-untyped-call]
    if there is not None:
        rows = _Exchange.apply(rows, there, False)  # type: ignore[no-untyped-call]
    shape = rows.shape
    if parts is not None:
        rows = _Exchange.apply(rows.repeat(ways, 1), parts, False)  # type: ignore[no-untyped-call]
    rows = _Experts.apply(  # type: ignore[no-untyped-call]
        rows, order.unsqueeze(1), None, gate_up, down, *(biases or (None, None)), form, None, None, groups
    )
    if parts is not None:
        rows = _Exchange.apply(rows, parts, True)  # type: ignore[no-untyped-call]
        rows = rows.view(ways, *shape).sum(0)
    if there is not None:
        rows = _Exchange.apply(rows, there, True)  # type: ignore[no-untyped-call]
    out: torch.Tensor = _Combine.apply(rows, given, chosen, *index.shape)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of rows along a way, or back; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: Route, back: bool) -> torch.Tensor:
        ctx.way, ctx.back = way, back
        return way.move(rows, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.way.move(grad, not ctx.back), None, None


class _Spread(torch.autograd.Function):
    """[t, h] -> [t k, h]: one row per choice, in the order `chosen` of places in [t, k], scaled by weights [t, k]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weights: torch.Tensor | None, chosen: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden if weights is not None else None, weights, chosen)
        ctx.tokens, ctx.k = hidden.shape[0], k
        return of_tokens(hidden, chosen, k, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weights, chosen = ctx.saved_tensors
        for_weights = None
        if ctx.needs_input_grad[1]:
            for_weights = of_weights(grad, of_tokens(hidden, chosen, ctx.k), weights, chosen)
        return by_token(grad, chosen, ctx.tokens, ctx.k, weights), for_weights, None, None


class _Combine(torch.autograd.Function):
    """Rows [t k, h] in the order `chosen` of places in [t, k], scaled by weights [t, k] -> [t, h]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, chosen: torch.Tensor, t: int, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(rows if weights is not None else None, weights, chosen)
        ctx.k = k
        return by_token(rows, chosen, t, k, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        rows, weights, chosen = ctx.saved_tensors
        for_rows = for_weights = None
        arrived = of_tokens(grad, chosen, ctx.k)
        if ctx.needs_input_grad[1]:
            for_weights = of_weights(arrived, rows, weights, chosen)
        if ctx.needs_input_grad[0]:
            for_rows = arrived if weights is None else arrived.mul_(weights.flatten()[chosen].unsqueeze(1))
        return for_rows, for_weights, None, None, None


# -- computation -------------------------------------------------------------------------------------------------------


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
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        form: ExpertForm,
        mesh: AxisMesh | None,
        axes: Axes | None,
        groups: Groups | None,
    ) -> torch.Tensor:
        places, ctx.form, ctx.k = index.flatten(), form, index.shape[1]
        if groups is None:
            grouped = in_one_product(hidden, gate_up, down) and (gate_up.dtype == IN_GRAPH or not in_graph())
            places, groups = _by_expert(index, gate_up.shape[0], mesh, axes, grouped)
        chosen, operands = Chosen(places, weights, ctx.k, form), (gate_up, down, gate_up_bias, down_bias)
        run = operators.traced_forward if operators.traced(groups) else expert_rows.forward
        out, first = run(hidden, chosen, groups, *operands)
        ctx.counts, held = groups.counts, groups.held if isinstance(groups, TracedGroups) else None
        ctx.save_for_backward(hidden, weights, gate_up, down, down_bias, places, first, groups.ends, held)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weights, gate_up, down, down_bias, places, first, ends, held = ctx.saved_tensors
        chosen = Chosen(places, weights, ctx.k, ctx.form)
        groups = Groups(ends, ctx.counts) if held is None else TracedGroups(ends, None, held)
        need_hidden, _, *needs = ctx.needs_input_grad[:7]
        run = operators.traced_backward if operators.traced(groups) else expert_rows.backward
        found = run(grad, hidden, chosen, groups, gate_up, down, down_bias, first, Needs(need_hidden, *needs))
        return found[0], None, *found[1:], *(None,) * 4

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        mesh: AxisMesh | None,
        axes: Axes | None,
    ) -> Any:
        out = _type_of_result(hidden, index, weights, gate_up, down, gate_up_bias, down_bias)
        for key in () if mesh is None or axes is None else mesh.type_axes(axes):
            if spmd_types.get_local_type(hidden).get(key) is V:
                raise spmd_types.SpmdTypeError(
                    f"experts: tokens are V on {key}, which shards the experts; every rank there needs all its tokens"
                )
            out = rules.reinterpret(out, key, src=V, dst=P)
        return out


def _by_expert(
    index: torch.Tensor, num_local: int, mesh: AxisMesh | None, axes: Axes | None, grouped: bool
) -> tuple[torch.Tensor, Groups]:
    """Sort the places in [t, k] by local expert (`expert_products.by_expert`), here or as an operator of a graph."""
    if mesh is None or axes is None:
        if in_graph() and not grouped:
            return operators.traced_by_expert(index, num_local, None, 1)
        return by_expert(index, num_local, None, 1, grouped)
    if in_graph():
        return operators.traced_by_expert(index, num_local, mesh.coordinate(axes) * num_local, mesh.size(axes))
    first = mesh.index_tensor(axes, index.device) * num_local
    return by_expert(index, num_local, first, mesh.size(axes), grouped)


def _type_of_result(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *of_experts: torch.Tensor | None
) -> Any:
    """Return the type of a sum over choices and experts. Sizes of experts are letters of their own, whatever form."""
    given = [x for x in of_experts if x is not None]
    letters = ("eab", "ecd", "ef", "eg")[: len(given)]
    return rules.einsum(f"th,tk,tk,{','.join(letters)}->th", hidden, as_constant_beside(index, hidden), weights, *given)


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
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        mesh: AxisMesh,
        apart: tuple[str, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weights, gate_up, down, gate_up_bias, down_bias)
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *others = (None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)
        return hidden, None, *others, None, None

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
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
        return _type_of_result(hidden, index, weights, gate_up, down, gate_up_bias, down_bias)
