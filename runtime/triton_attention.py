"""Triton kernels of attention with dropout (autoplan.runtime.dropped_attention); imported only if Triton is installed.

FlashAttention-2 (Dao, 2023) with the mask of `autoplan.runtime.dropout` drawn in every tile: one kernel for the result
and its log-sum-exp, one for the gradient of queries, one for those of keys and values. A program of the last adds up
the query heads of a key head, so nothing is added atomically and gradients are the same in every run.
"""

# kernels are written in Triton's language, whose arguments have no Python types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoplan.runtime.triton_kernels import _mix

_VARYING = ["queries", "keys", "offset", "least", "end"]  # lengths and places, for which nothing is compiled anew


@triton.jit
def _tile(x_at, rows, stride, length, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of [length, COLUMNS]; zeros behind them."""
    columns = tl.arange(0, BLOCK)
    inside = (rows < length)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(x_at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _put(x_at, x, rows, stride, length, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = (rows < length)[:, None] & (columns < COLUMNS)[None, :]
    at = x_at + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, x.to(x_at.dtype.element_ty), mask=inside)


@triton.jit
def _documents(ids_at, places, length, OF_QUERIES: tl.constexpr):
    ids = tl.load(ids_at + places, mask=places < length, other=0)
    return tl.where(ids < 0, ~ids, ids) if OF_QUERIES else ids


@triton.jit
def _counts(at, places, length):
    return tl.load(at + places, mask=places < length, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _scores(
    q,
    k,
    row,
    column,
    queries,
    keys,
    row_ids,
    column_ids,
    mask_at,
    mask_strides,
    offset,
    least,
    end,
    SCALE: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return the scores of a tile; -inf where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=COMPUTE) * tl.full((), SCALE, COMPUTE)
    seen = (row < queries)[:, None] & (column < keys)[None, :]
    if MASK != "":
        at = row.to(tl.int64)[:, None] * mask_strides[2] + column.to(tl.int64)[None, :] * mask_strides[3]
        mask = tl.load(mask_at + at, mask=seen, other=0)
        if MASK == "added":
            scores += mask.to(COMPUTE)
        else:
            seen = seen & (mask != 0)
    if BOUNDED:
        distance = row[:, None] + offset - column[None, :]
        seen = seen & (distance >= least) & (distance < end)
    if DOCUMENTS:
        seen = seen & (row_ids[:, None] == column_ids[None, :])
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    q_at,
    k_at,
    v_at,
    out_at,
    lse_at,
    query_ids_at,
    key_ids_at,
    mask_at,
    counters_at,
    query_counts_at,
    key_counts_at,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    out_strides,
    heads,
    group,
    queries,
    keys,
    offset,
    least,
    end,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_VALUES: tl.constexpr,
):
    head = tl.program_id(1)
    sample, own = head // heads, head % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _tile(q_at + sample.to(tl.int64) * q_strides[0] + own * q_strides[1], row, q_strides[2], queries, WIDTH, WIDE)
    k_at += sample.to(tl.int64) * k_strides[0] + own // group * k_strides[1]
    v_at += sample.to(tl.int64) * v_strides[0] + own // group * v_strides[1]
    mask_at += sample.to(tl.int64) * mask_strides[0] + own * mask_strides[1]
    counter = tl.load(counters_at + head).to(tl.uint64, bitcast=True)
    drawn = counter + _counts(query_counts_at, row, queries)
    row_ids = row
    if DOCUMENTS:
        row_ids = _documents(query_ids_at + sample.to(tl.int64) * queries, row, queries, True)
    top = tl.full((ROWS,), float("-inf"), COMPUTE)
    total = tl.zeros((ROWS,), COMPUTE)
    found = tl.zeros((ROWS, WIDE_VALUES), COMPUTE)
    low, high = 0, keys
    if BOUNDED:
        low = tl.maximum(0, tl.program_id(0) * ROWS + offset - end + 1) // COLUMNS * COLUMNS
        high = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + offset - least)
    for at in range(low, high, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        k = _tile(k_at, column, k_strides[2], keys, WIDTH, WIDE)
        column_ids = column
        if DOCUMENTS:
            column_ids = _documents(key_ids_at + sample.to(tl.int64) * keys, column, keys, False)
        scores = _scores(
            q, k, row, column, queries, keys, row_ids, column_ids, mask_at, mask_strides, offset, least, end,
            SCALE, BOUNDED, DOCUMENTS, MASK, COMPUTE,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - base[:, None])
        before = tl.exp(top - base)
        total = total * before + tl.sum(shares, 1)
        kept = (_mix(drawn[:, None] + _counts(key_counts_at, column, keys)[None, :]) >> 11) < KEPT
        v = _tile(v_at, column, v_strides[2], keys, VALUES, WIDE_VALUES)
        shares = tl.where(kept, shares, 0.0).to(v.dtype)
        found = found * before[:, None] + tl.dot(shares, v, input_precision="ieee", out_dtype=COMPUTE)
        top = higher
    none = total == 0.0
    found = found * (tl.full((), DROP_SCALE, COMPUTE) / tl.where(none, 1.0, total))[:, None]
    lse = tl.where(none, float("-inf"), top + tl.log(tl.where(none, 1.0, total)))
    tl.store(lse_at + head.to(tl.int64) * queries + row, lse, mask=row < queries)
    out_at += sample.to(tl.int64) * out_strides[0] + own * out_strides[1]
    _put(out_at, found, row, out_strides[2], queries, VALUES, WIDE_VALUES)


@triton.jit
def _of_scores(
    scores,
    lse,
    delta,
    grad,
    v,
    drawn,
    counts,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP_SCALE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return the dropped probabilities of a tile, and the gradient of the products of queries and keys."""
    shares = tl.exp(scores - lse[:, None])
    kept = (_mix(drawn[:, None] + counts[None, :]) >> 11) < KEPT
    factor = tl.where(kept, tl.full((), DROP_SCALE, COMPUTE), 0.0)
    of_shares = tl.dot(grad, tl.trans(v), input_precision="ieee", out_dtype=COMPUTE) * factor
    return shares * factor, shares * (of_shares - delta[:, None]) * tl.full((), SCALE, COMPUTE)


@triton.jit(do_not_specialize=_VARYING)
def _for_queries(
    grad_at,
    q_at,
    k_at,
    v_at,
    for_q_at,
    lse_at,
    delta_at,
    query_ids_at,
    key_ids_at,
    mask_at,
    counters_at,
    query_counts_at,
    key_counts_at,
    grad_strides,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    heads,
    group,
    queries,
    keys,
    offset,
    least,
    end,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_VALUES: tl.constexpr,
):
    head = tl.program_id(1)
    sample, own = head // heads, head % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _tile(q_at + sample.to(tl.int64) * q_strides[0] + own * q_strides[1], row, q_strides[2], queries, WIDTH, WIDE)
    grad_at += sample.to(tl.int64) * grad_strides[0] + own * grad_strides[1]
    grad = _tile(grad_at, row, grad_strides[2], queries, VALUES, WIDE_VALUES)
    k_at += sample.to(tl.int64) * k_strides[0] + own // group * k_strides[1]
    v_at += sample.to(tl.int64) * v_strides[0] + own // group * v_strides[1]
    mask_at += sample.to(tl.int64) * mask_strides[0] + own * mask_strides[1]
    at_row = head.to(tl.int64) * queries + row
    lse = tl.load(lse_at + at_row, mask=row < queries, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(delta_at + at_row, mask=row < queries, other=0.0)
    drawn = tl.load(counters_at + head).to(tl.uint64, bitcast=True) + _counts(query_counts_at, row, queries)
    row_ids = row
    if DOCUMENTS:
        row_ids = _documents(query_ids_at + sample.to(tl.int64) * queries, row, queries, True)
    for_q = tl.zeros((ROWS, WIDE), COMPUTE)
    low, high = 0, keys
    if BOUNDED:
        low = tl.maximum(0, tl.program_id(0) * ROWS + offset - end + 1) // COLUMNS * COLUMNS
        high = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + offset - least)
    for at in range(low, high, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        k = _tile(k_at, column, k_strides[2], keys, WIDTH, WIDE)
        v = _tile(v_at, column, v_strides[2], keys, VALUES, WIDE_VALUES)
        column_ids = column
        if DOCUMENTS:
            column_ids = _documents(key_ids_at + sample.to(tl.int64) * keys, column, keys, False)
        scores = _scores(
            q, k, row, column, queries, keys, row_ids, column_ids, mask_at, mask_strides, offset, least, end,
            SCALE, BOUNDED, DOCUMENTS, MASK, COMPUTE,
        )  # fmt: skip
        counts = _counts(key_counts_at, column, keys)
        _, of_scores = _of_scores(scores, lse, delta, grad, v, drawn, counts, KEPT, SCALE, DROP_SCALE, COMPUTE)
        for_q += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee", out_dtype=COMPUTE)
    _put(for_q_at + head.to(tl.int64) * queries * WIDTH, for_q, row, WIDTH, queries, WIDTH, WIDE)


@triton.jit(do_not_specialize=_VARYING)
def _for_keys(
    grad_at,
    q_at,
    k_at,
    v_at,
    for_k_at,
    for_v_at,
    lse_at,
    delta_at,
    query_ids_at,
    key_ids_at,
    mask_at,
    counters_at,
    query_counts_at,
    key_counts_at,
    grad_strides,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    heads,
    group,
    queries,
    keys,
    offset,
    least,
    end,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_VALUES: tl.constexpr,
):
    key_head = tl.program_id(1)
    groups = heads // group
    sample, own = key_head // groups, key_head % groups
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k_at += sample.to(tl.int64) * k_strides[0] + own * k_strides[1]
    v_at += sample.to(tl.int64) * v_strides[0] + own * v_strides[1]
    k = _tile(k_at, column, k_strides[2], keys, WIDTH, WIDE)
    v = _tile(v_at, column, v_strides[2], keys, VALUES, WIDE_VALUES)
    counts = _counts(key_counts_at, column, keys)
    column_ids = column
    if DOCUMENTS:
        column_ids = _documents(key_ids_at + sample.to(tl.int64) * keys, column, keys, False)
    for_k = tl.zeros((COLUMNS, WIDE), COMPUTE)
    for_v = tl.zeros((COLUMNS, WIDE_VALUES), COMPUTE)
    low, high = 0, queries
    if BOUNDED:
        low = tl.maximum(0, tl.program_id(0) * COLUMNS - offset + least) // ROWS * ROWS
        high = tl.minimum(queries, (tl.program_id(0) + 1) * COLUMNS - 1 - offset + end).to(tl.int32)
    for each in range(0, group):
        query_head = own * group + each
        head = sample * heads + query_head
        of_head = q_at + sample.to(tl.int64) * q_strides[0] + query_head * q_strides[1]
        grad_of_head = grad_at + sample.to(tl.int64) * grad_strides[0] + query_head * grad_strides[1]
        mask_of_head = mask_at + sample.to(tl.int64) * mask_strides[0] + query_head * mask_strides[1]
        counter = tl.load(counters_at + head).to(tl.uint64, bitcast=True)
        for at in range(low, high, ROWS):
            row = at + tl.arange(0, ROWS)
            q = _tile(of_head, row, q_strides[2], queries, WIDTH, WIDE)
            grad = _tile(grad_of_head, row, grad_strides[2], queries, VALUES, WIDE_VALUES)
            at_row = tl.cast(head, tl.int64) * queries + row
            lse = tl.load(lse_at + at_row, mask=row < queries, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            delta = tl.load(delta_at + at_row, mask=row < queries, other=0.0)
            drawn = counter + _counts(query_counts_at, row, queries)
            row_ids = row
            if DOCUMENTS:
                row_ids = _documents(query_ids_at + sample.to(tl.int64) * queries, row, queries, True)
            scores = _scores(
                q, k, row, column, queries, keys, row_ids, column_ids, mask_of_head, mask_strides, offset, least, end,
                SCALE, BOUNDED, DOCUMENTS, MASK, COMPUTE,
            )  # fmt: skip
            shares, of_scores = _of_scores(scores, lse, delta, grad, v, drawn, counts, KEPT, SCALE, DROP_SCALE, COMPUTE)
            for_v += tl.dot(tl.trans(shares.to(grad.dtype)), grad, input_precision="ieee", out_dtype=COMPUTE)
            for_k += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision="ieee", out_dtype=COMPUTE)
    _put(for_k_at + key_head.to(tl.int64) * keys * WIDTH, for_k, column, WIDTH, keys, WIDTH, WIDE)
    _put(for_v_at + key_head.to(tl.int64) * keys * VALUES, for_v, column, VALUES, keys, VALUES, WIDE_VALUES)


@triton.jit(do_not_specialize=_VARYING)
def _for_mask(
    grad_at,
    q_at,
    k_at,
    v_at,
    for_mask_at,
    lse_at,
    delta_at,
    query_ids_at,
    key_ids_at,
    mask_at,
    counters_at,
    query_counts_at,
    key_counts_at,
    grad_strides,
    q_strides,
    k_strides,
    v_strides,
    mask_strides,
    samples,
    mask_heads,
    heads,
    group,
    queries,
    keys,
    offset,
    least,
    end,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_VALUES: tl.constexpr,
):
    """Add up the gradient of a tile of the mask over the samples, and the heads, that share it."""
    each = tl.program_id(2)
    first_sample, first_head = each // mask_heads, each % mask_heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counts = _counts(key_counts_at, column, keys)
    row_counts = _counts(query_counts_at, row, queries)
    for_mask = tl.zeros((ROWS, COLUMNS), COMPUTE)
    for sample in range(first_sample, samples, tl.num_programs(2) // mask_heads):
        for own in range(first_head, heads, mask_heads):
            head = tl.cast(sample, tl.int64) * heads + own
            of_head = q_at + tl.cast(sample, tl.int64) * q_strides[0] + own * q_strides[1]
            q = _tile(of_head, row, q_strides[2], queries, WIDTH, WIDE)
            grad_of_head = grad_at + tl.cast(sample, tl.int64) * grad_strides[0] + own * grad_strides[1]
            grad = _tile(grad_of_head, row, grad_strides[2], queries, VALUES, WIDE_VALUES)
            k_of_head = k_at + tl.cast(sample, tl.int64) * k_strides[0] + own // group * k_strides[1]
            k = _tile(k_of_head, column, k_strides[2], keys, WIDTH, WIDE)
            v_of_head = v_at + tl.cast(sample, tl.int64) * v_strides[0] + own // group * v_strides[1]
            v = _tile(v_of_head, column, v_strides[2], keys, VALUES, WIDE_VALUES)
            lse = tl.load(lse_at + head * queries + row, mask=row < queries, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            delta = tl.load(delta_at + head * queries + row, mask=row < queries, other=0.0)
            drawn = tl.load(counters_at + head).to(tl.uint64, bitcast=True) + row_counts
            row_ids, column_ids = row, column
            if DOCUMENTS:
                row_ids = _documents(query_ids_at + tl.cast(sample, tl.int64) * queries, row, queries, True)
                column_ids = _documents(key_ids_at + tl.cast(sample, tl.int64) * keys, column, keys, False)
            mask_of_head = mask_at + tl.cast(sample, tl.int64) * mask_strides[0] + own * mask_strides[1]
            scores = _scores(
                q, k, row, column, queries, keys, row_ids, column_ids, mask_of_head, mask_strides, offset, least, end,
                SCALE, BOUNDED, DOCUMENTS, MASK, COMPUTE,
            )  # fmt: skip
            _, of_scores = _of_scores(scores, lse, delta, grad, v, drawn, counts, KEPT, 1.0, DROP_SCALE, COMPUTE)
            for_mask += of_scores
    inside = (row < queries)[:, None] & (column < keys)[None, :]
    at = for_mask_at + (tl.cast(each, tl.int64) * queries + row)[:, None] * keys + column[None, :]
    tl.store(at, for_mask.to(for_mask_at.dtype.element_ty), mask=inside)


def _compute(x: torch.Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _wide(size: int) -> int:
    return 16 if size <= 16 else 1 << (size - 1).bit_length()


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    """Return [b, h, s, d] whose rows are contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _of_mask(mask: torch.Tensor | None, counts: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], str]:
    """Return a mask as the kernels read it, its strides (0 in dims that it repeats), and how it is applied."""
    if mask is None:
        return counts, (0, 0, 0, 0), ""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return (mask.view(torch.uint8), strides, "seen") if mask.dtype == torch.bool else (mask, strides, "added")


def forward_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    documents: tuple[torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    distances: tuple[int, int, int] | None,
    scale: float,
    kept: int,
    drop_scale: float,
) -> torch.Tensor:
    """Write attention into `out` [b, h, s, e] and return the log-sum-exp [b, h, s]; see `dropped_attention`."""
    b, heads, queries, width = q.shape
    keys, values = k.shape[2], v.shape[3]
    lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    q, k, v = (_rows_together(x) for x in (q, k, v))
    mask, mask_strides, how_masked = _of_mask(mask, counts[0])
    rows, columns = (128, 64) if max(width, values) <= 64 else (64, 64)
    _forward[(triton.cdiv(queries, rows), b * heads)](
        q,
        k,
        v,
        out,
        lse,
        *(documents or counts[:2]),  # not read without documents
        mask,
        *counts,
        _strides(q),
        _strides(k),
        _strides(v),
        mask_strides,
        _strides(out),
        heads,
        heads // k.shape[1],
        queries,
        keys,
        *(distances or (0, 0, 0)),
        KEPT=kept,
        SCALE=scale,
        DROP_SCALE=drop_scale,
        WIDTH=width,
        VALUES=values,
        BOUNDED=distances is not None,
        DOCUMENTS=documents is not None,
        MASK=how_masked,
        COMPUTE=_compute(q),
        ROWS=rows,
        COLUMNS=columns,
        WIDE=_wide(width),
        WIDE_VALUES=_wide(values),
    )
    return lse


def backward_kernels(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    documents: tuple[torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    distances: tuple[int, int, int] | None,
    scale: float,
    kept: int,
    drop_scale: float,
    for_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; see `dropped_attention`.

    Args:
        delta: [b, h, s], the sums of grad times out.
        for_mask: the gradient of the mask is added to it, which has as many queries and keys.
    """
    b, heads, queries, width = q.shape
    keys, values = k.shape[2], v.shape[3]
    grad, q, k, v = (_rows_together(x) for x in (grad, q, k, v))
    for_q, for_k, for_v = (x.new_empty(x.shape) for x in (q, k, v))
    read, mask_strides, how_masked = _of_mask(mask, counts[0])
    beside = (*(documents or counts[:2]), read, *counts)
    sizes = (heads, heads // k.shape[1], queries, keys, *(distances or (0, 0, 0)))
    strides = (*(_strides(x) for x in (grad, q, k, v)), mask_strides)
    rows, columns = (64, 64) if max(width, values) <= 64 else (32, 64)  # less than the 99 KB of small GPUs
    how = {
        "KEPT": kept,
        "SCALE": scale,
        "DROP_SCALE": drop_scale,
        "WIDTH": width,
        "VALUES": values,
        "BOUNDED": distances is not None,
        "DOCUMENTS": documents is not None,
        "MASK": how_masked,
        "COMPUTE": _compute(q),
        "ROWS": rows,
        "COLUMNS": columns,
        "WIDE": _wide(width),
        "WIDE_VALUES": _wide(values),
    }
    ends = (lse.contiguous(), delta.contiguous())
    _for_queries[(triton.cdiv(queries, rows), b * heads)](grad, q, k, v, for_q, *ends, *beside, *strides, *sizes, **how)
    _for_keys[(triton.cdiv(keys, columns), b * k.shape[1])](
        grad, q, k, v, for_k, for_v, *ends, *beside, *strides, *sizes, **how
    )
    if for_mask is not None:
        found, sharing = for_mask.new_empty(for_mask.shape), for_mask.shape[:2]
        grid = (triton.cdiv(queries, rows), triton.cdiv(keys, columns), sharing[0] * sharing[1])
        _for_mask[grid](grad, q, k, v, found, *ends, *beside, *strides, b, sharing[1], *sizes, **how)
        for_mask.add_(found)
    return for_q, for_k, for_v
