"""General shapes to measure, from which the shapes of any model are interpolated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from autoplan.cost_models.work import OpWork, Plain
from autoplan.ops.saved import TensorFacts
from autoplan.profiler.ops import MeasureTask
from autoplan.units import HALF


def _work(
    op: str, inputs: Sequence[TensorFacts], outputs: Sequence[TensorFacts], flops: float, **attrs: Plain
) -> OpWork:
    moved = float(sum(t.num_bytes for t in (*inputs, *outputs)))
    return OpWork(op, tuple(inputs), tuple(outputs), tuple(sorted(attrs.items())), flops, moved)


def linear_task(m: int, k: int, n: int, dtype: str) -> MeasureTask:
    """Return the task x[m, k] times a weight[n, k]."""
    x, w = TensorFacts((m, k), dtype, True), TensorFacts((n, k), dtype, True)
    return MeasureTask(
        _work("linear", (x, w), (TensorFacts((m, n), dtype, True),), 2.0 * m * k * n),
        "F.linear(x0, x1)",
        frozenset({1}),
    )


def attention_task(b: int, h: int, s: int, d: int, dtype: str) -> MeasureTask:
    """Return the task of causal attention over [b, h, s, d], each operand a transposed view of [b, s, h, d]."""
    t = TensorFacts((b, h, s, d), dtype, True)
    flops = 2.0 * b * h * s * s * d
    return MeasureTask(
        _work("attention", (t, t, t), (t,), flops, causal=True),
        "attention(x0, x1, x2, causal=True, scale=None)",
        orders={i: (0, 2, 1, 3) for i in range(3)},
    )


_T = TypeVar("_T")
_POINTWISE: Mapping[str, tuple[int, str]] = {  # op -> number of inputs, text
    "add": (2, "x0 + x1"),
    "mul": (2, "x0 * x1"),
    "silu": (1, "F.silu(x0)"),
    "gelu": (1, "F.gelu(x0)"),
    "relu": (1, "F.relu(x0)"),
    "cos": (1, "torch.cos(x0)"),
    "mul_scalar": (1, "x0 * 0.5"),
    "clone": (1, "x0.clone()"),
}
_VIEWS: Mapping[str, tuple[tuple[int, ...], str]] = {  # op -> shape of its result from (4, 8, 16), text
    "reshape": ((32, 16), "x0.reshape(32, 16)"),
    "transpose": ((4, 16, 8), "x0.transpose(1, 2)"),
    "unsqueeze": ((4, 1, 8, 16), "x0.unsqueeze(1)"),
    "slice": ((4, 8, 8), "x0[..., :8]"),
    "expand": ((4, 8, 16), "x0.expand(4, 8, 16)"),
}


def pointwise_task(op: str, elements: int, dtype: str) -> MeasureTask:
    """Return the task of an element-wise op over `elements`."""
    count, text = _POINTWISE[op]
    t = TensorFacts((elements,), dtype, True)
    return MeasureTask(_work(op, (t,) * count, (t,), float(elements)), text)


def view_task(op: str, dtype: str) -> MeasureTask:
    """Return the task of a view; its time does not depend on the size."""
    shape, text = _VIEWS[op]
    t = TensorFacts((4, 8, 16), dtype, True)
    work = OpWork(op, (t,), (TensorFacts(shape, dtype, True),), (), 0.0, 0.0)
    return MeasureTask(work, text)


def norm_task(op: str, rows: int, columns: int, dtype: str) -> MeasureTask:
    """Return the task of layer_norm, rms_norm or softmax over the last dim of [rows, columns]."""
    x, w = TensorFacts((rows, columns), dtype, True), TensorFacts((columns,), dtype, True)
    if op == "softmax":
        return MeasureTask(_work(op, (x,), (x,), float(rows * columns), dim=-1), "torch.softmax(x0, dim=-1)")
    extra = (w, w) if op == "layer_norm" else (w,)
    args = "".join(f", x{i + 1}" for i in range(len(extra)))
    text = f"F.{op}(x0, ({columns},){args}, eps=1e-05)"
    return MeasureTask(_work(op, (x, *extra), (x,), float(rows * columns)), text, frozenset(range(1, len(extra) + 1)))


def cat_task(rows: int, columns: int, dtype: str) -> MeasureTask:
    """Return the task of joining two halves along the last dim, as rotary embeddings do."""
    t, out = TensorFacts((rows, columns), dtype, True), TensorFacts((rows, 2 * columns), dtype, True)
    return MeasureTask(_work("cat", (t, t), (out,), float(2 * rows * columns), dim=-1), "torch.cat([x0, x1], dim=-1)")


def mean_task(rows: int, columns: int, dtype: str) -> MeasureTask:
    """Return the task of a mean over the last dim, as norms without a fused kernel do."""
    t, out = TensorFacts((rows, columns), dtype, True), TensorFacts((rows, 1), dtype, True)
    return MeasureTask(_work("mean", (t,), (out,), float(rows), dims="[-1]", keepdim=True), "x0.mean(-1, keepdim=True)")


def embedding_task(tokens: int, vocab: int, hidden: int, dtype: str) -> MeasureTask:
    """Return the task of looking up rows of a table."""
    table, ids = TensorFacts((vocab, hidden), dtype, True), TensorFacts((tokens,), "int64")
    work = _work("embedding", (table, ids), (TensorFacts((tokens, hidden), dtype, True),), float(tokens * hidden))
    return MeasureTask(work, "F.embedding(x1, x0)", frozenset({0}), {1: range(vocab)})


def loss_task(tokens: int, vocab: int, dtype: str) -> MeasureTask:
    """Return the task of the cross entropy of logits[tokens, vocab]."""
    logits, target = TensorFacts((tokens, vocab), dtype, True), TensorFacts((tokens,), "int64")
    out = TensorFacts((), "float32" if dtype in HALF else dtype, True)
    work = _work("cross_entropy_sum", (logits, target), (out,), float(tokens * vocab))
    return MeasureTask(work, "cross_entropy_sum(x0, x1, ignore_index=-100)", bounds={1: range(vocab)})


def adamw_task(elements: int, dtype: str) -> MeasureTask:
    """Return the task of one AdamW update; bytes as in `Costs.optimizer_s`.

    They are the gradient and parameter, and two moments read and written.
    """
    t = TensorFacts((elements,), dtype)
    work = OpWork("optimizer_adamw", (t,), (), (), 12.0 * elements, 7.0 * t.num_bytes)
    return MeasureTask(work, "")


def accumulate_task(elements: int, dtype: str) -> MeasureTask:
    """Return the task of adding a gradient to the existing one; bytes as in `Costs.accumulate_s`."""
    t = TensorFacts((elements,), dtype)
    work = OpWork("grad_accumulate", (t,), (), (), float(elements), 3.0 * t.num_bytes)
    return MeasureTask(work, "")


def every_step_tasks(dtype: str) -> list[MeasureTask]:
    """Return the tasks that every step has beside the model's operations: the optimizer, adding gradients."""
    return [make(1 << k, dtype) for make in (adamw_task, accumulate_task) for k in (8, 12, 16, 20, 22)]


def _cheap(task: MeasureTask, max_flops: float, max_bytes: float) -> bool:
    return task.work.flops <= max_flops and task.num_bytes <= max_bytes


def lattice(dtype: str, max_flops: float, max_bytes: float) -> list[MeasureTask]:
    """Return tasks on a grid of powers of two up to these limits.

    Coarse ones come first, so that a short budget covers all of the range.
    """
    widths = (64, 256, 1024, 4096)
    linear = [
        linear_task(m, k, n, dtype) for m, k, n in _grid((64, 256, 1024, 4096), widths, widths) if 1 / 16 <= k / n <= 16
    ]
    linear += [linear_task(m, k, n, dtype) for m, k, n in _grid((128, 512, 2048), (128, 512, 2048), (128, 512, 2048))]
    attention = [
        attention_task(b, h, s, d, dtype)
        for s in (32, 128, 512, 2048)
        for b, h, d in ((1, 4, 64), (2, 8, 64), (4, 2, 32), (1, 8, 128))
    ]
    sizes = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
    small = [pointwise_task(op, n, dtype) for op in _POINTWISE for n in sizes]
    small += [norm_task(op, r, c, dtype) for op in ("layer_norm", "rms_norm", "softmax") for r, c in _ROWS]
    small += [make(r, c, dtype) for make in (cat_task, mean_task) for r, c in _ROWS]
    small += [view_task(op, dtype) for op in _VIEWS]
    small += [
        embedding_task(t, v, h, dtype)
        for t, v, h in ((128, 512, 64), (512, 1024, 256), (512, 4096, 256), (1024, 8192, 512), (2048, 32000, 256))
    ]
    small += [
        loss_task(t, v, dtype)
        for t, v in ((128, 512), (256, 2048), (512, 4096), (1024, 4096), (512, 16000), (1024, 16000), (512, 32000))
    ]
    small += every_step_tasks(dtype)
    return [t for t in _interleave(small, linear, attention) if _cheap(t, max_flops, max_bytes)]


_ROWS = ((64, 64), (256, 256), (1024, 256), (1024, 1024), (4096, 1024))


def held_out(dtype: str, max_flops: float, max_bytes: float) -> list[MeasureTask]:
    """Return tasks whose sizes are not powers of two, to check the interpolation against."""
    tasks = [
        linear_task(m, k, n, dtype)
        for m, k, n in (
            (96, 160, 96), (160, 384, 768), (384, 96, 384), (384, 768, 192), (640, 320, 320), (768, 768, 768),
            (768, 192, 1536), (1280, 640, 160), (1536, 384, 384), (192, 1536, 384), (1536, 1536, 384), (320, 1792, 768),
        )
    ]  # fmt: skip
    tasks += [
        attention_task(b, h, s, d, dtype)
        for b, h, s, d in ((1, 6, 96, 64), (2, 3, 192, 64), (1, 4, 384, 64), (3, 2, 768, 32), (1, 2, 1536, 64))
    ]
    tasks += [pointwise_task(op, n, dtype) for op in _POINTWISE for n in (3000, 100_000, 1_500_000)]
    tasks += [
        norm_task(op, r, c, dtype)
        for op in ("layer_norm", "rms_norm", "softmax")
        for r, c in ((96, 192), (384, 768), (1536, 384))
    ]
    tasks += [make(r, c, dtype) for make in (cat_task, mean_task) for r, c in ((96, 192), (384, 768), (1536, 384))]
    tasks += [embedding_task(t, v, h, dtype) for t, v, h in ((384, 3000, 192), (768, 12000, 320))]
    tasks += [loss_task(t, v, dtype) for t, v in ((192, 1500), (768, 6000), (384, 12000))]
    tasks += [make(n, dtype) for make in (adamw_task, accumulate_task) for n in (3000, 100_000, 1_500_000)]
    return [t for t in tasks if _cheap(t, max_flops, max_bytes)]


def _grid(ms: Sequence[int], ks: Sequence[int], ns: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for m in ms:
        for k in ks:
            for n in ns:
                yield m, k, n


def _interleave(*lists: Sequence[MeasureTask]) -> list[MeasureTask]:
    """Spread the lists over one another evenly, so that a prefix covers all of them."""
    ranked = [((i + 0.5) / len(tasks), j, t) for j, tasks in enumerate(lists) for i, t in enumerate(spread(tasks))]
    return [t for _, _, t in sorted(ranked, key=lambda r: (r[0], r[1]))]


def spread(tasks: Sequence[_T]) -> list[_T]:
    """Return the tasks in a fixed order in which every prefix is spread over the list.

    The order takes steps of a number that is coprime to the length.
    """
    n = len(tasks)
    step = next((p for p in range(int(n * 0.618) or 1, n) if math.gcd(p, n) == 1), 1)
    return [tasks[i * step % n] for i in range(n)]
