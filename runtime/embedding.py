"""Embedding lookup in a table whose rows are sharded over ranks."""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
from spmd_types import P, V, rules

from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.mesh import Axes, AxisMesh, current_mesh


def vocab_parallel_embedding(
    ids: torch.Tensor, weight_local: torch.Tensor, axes: Axes, padding_idx: int | None = None
) -> torch.Tensor:
    """Look up rows of a table of which this rank holds an even contiguous chunk; the result is P on ``axes``.

    Every rank looks up the ids in its chunk and has zeros for the others, so the caller reduces (to R, I or a shard).

    Args:
        ids: int64 or int32 [*], global row numbers; R or I on ``axes``.
        weight_local: [v / size(axes), h]; V on ``axes``.
        axes: the axis or axes that shard the rows, major to minor.
        padding_idx: the row that gets no gradient, as in ``F.embedding`` (a negative one counts from the end of the
            table).

    Returns:
        [*, h]; an id outside ``range(v)`` gives zeros on every rank.

    Raises:
        ValueError: ids that are not integers, a weight that is not a matrix, or padding_idx outside the table.
    """
    mesh = current_mesh()
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"vocab_parallel_embedding: ids have dtype {ids.dtype}; they must be integers")
    if weight_local.ndim != 2:
        raise ValueError(f"vocab_parallel_embedding: weight has shape {tuple(weight_local.shape)}; it must have 2 dims")
    rows = weight_local.shape[0] * mesh.size(axes)
    if padding_idx is not None:
        if not -rows <= padding_idx < rows:
            raise ValueError(f"vocab_parallel_embedding: padding_idx {padding_idx} is outside a table of {rows} rows")
        padding_idx %= rows
    out: torch.Tensor = _VocabParallelEmbedding.apply(ids, weight_local, mesh, axes, padding_idx)  # type: ignore[no-untyped-call]
    return out


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, mesh: AxisMesh, axes: Axes, padding_idx: int | None
    ) -> torch.Tensor:
        rows = weight.shape[0]
        local = ids - mesh.index_tensor(axes, ids.device) * rows
        outside = (local < 0) | (local >= rows)
        out = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight)
        # -1 marks positions without a gradient for this chunk: rows elsewhere, and the padding row.
        no_gradient = outside if padding_idx is None else outside | (ids == padding_idx)
        ctx.save_for_backward(local.masked_fill(no_gradient, -1))
        ctx.rows = rows
        return out.masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        (local,) = ctx.saved_tensors
        none = local < 0
        # The positions without a gradient add zeros to row 0: no out-of-range index, no second table.
        grad = grad.masked_fill(none.unsqueeze(-1), 0)
        local = local.masked_fill(none, 0)
        return None, torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows, -1, False), None, None, None

    @staticmethod
    def spmd_typecheck(*, ids: torch.Tensor, weight: torch.Tensor, mesh: AxisMesh, axes: Axes) -> Any:
        out = rules.einsum("...,vh->...h", as_constant_beside(ids, weight), weight)
        for key in mesh.type_axes(axes):
            _refuse_varying(ids, key)
            out = rules.reinterpret(out, key, src=V, dst=P)
        return out


def _refuse_varying(ids: torch.Tensor, key: Any) -> None:
    # V ids with a V table would be typed V -> P without complaint: a sum of rows that belong to different ids.
    if spmd_types.get_local_type(ids).get(key) is V:
        raise spmd_types.SpmdTypeError(
            f"vocab_parallel_embedding: ids are V on {key}, which shards the table; every rank there needs all the ids"
        )
