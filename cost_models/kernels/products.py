"""Kernel models of operations on an accelerator: products, attention, experts, from the timings of `gpu`.

Each answers with the seconds of one phase, or None where an operation has no such kernel (`operations` prices it then).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoplan.config.parallel import Attention, Mode, RunOptions
from autoplan.cost_models.hardware.cluster import Device
from autoplan.cost_models.kernels.attention import NARROW_SPEED
from autoplan.cost_models.kernels.gpu import (
    OPERAND_BYTES,
    KernelKind,
    KernelTimings,
    Seconds,
    cast_bytes,
    is_aligned,
    kernel_kind,
    training_speed,
)
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.work import OpWork, Plain
from autoplan.ops.attention import is_in_row_blocks, keys_per_query, unfused_in_megatron
from autoplan.ops.experts import FIRST, FIRST_BIAS, SECOND, expert_sizes
from autoplan.ops.record import OpKind
from autoplan.ops.saved import OpFacts
from autoplan.ops.table import op_kind, op_record
from autoplan.torch_kernels import ROW_BLOCK, grouped_kernel
from autoplan.units import HALF, REAL_PARTS, dtype_bytes

_UNUSUAL_ERROR = 0.15  # added for products in 32 bits, which no published timing covers


def phase_flops(work: OpWork, phase: str) -> float:
    """Return the FLOPs of one phase."""
    if phase == "forward":
        return work.flops
    what = op_kind(work.op)
    if what is OpKind.PRODUCT:
        return work.flops * sum(t.requires_grad for t in work.inputs[:2])
    return work.flops * (2.5 if what is OpKind.ATTENTION else 2.0)


def phase_bytes(work: OpWork, phase: str) -> float:
    """Return the memory traffic of one phase in bytes."""
    if phase == "forward":
        return work.moved_bytes
    what = op_kind(work.op)
    if what is OpKind.PRODUCT:
        return work.moved_bytes * sum(t.requires_grad for t in work.inputs[:2])
    if what is OpKind.EMBEDDING:  # the gradient of the whole table is zeroed and added to
        table = sum(t.num_bytes for t in work.inputs if t.requires_grad)
        return 2.0 * table + 3.0 * sum(t.num_bytes for t in work.outputs)
    return 2.0 * work.moved_bytes


def size_of(sizes: Sequence[int]) -> int:
    return math.prod(sizes) or 1


def dtype_of(work: OpWork) -> str:
    if op_record(work.op).as_view:
        return "any"  # a view touches no data
    floats = [t.dtype for t in (*work.inputs, *work.outputs) if "float" in t.dtype]
    return floats[0] if floats else work.inputs[0].dtype if work.inputs else work.outputs[0].dtype


def _precision(work: OpWork) -> tuple[KernelKind, float, bool]:
    """Return (class, bytes per operand element, True if published timings cover it) of an operation's products."""
    dtype = work.matmul_dtype or REAL_PARTS.get(dtype_of(work), dtype_of(work))
    kind = kernel_kind(dtype)
    if kind is not KernelKind.HALF:
        return kind, OPERAND_BYTES[kind], True
    return kind, float(dtype_bytes(dtype_of(work))), dtype in HALF


def _together(parts: Sequence[Seconds], extra_s: float, usual: bool) -> Seconds:
    """Return the time of kernels one after the other, with traffic between them."""
    return Seconds(
        sum(p.busy_s for p in parts) + extra_s,
        sum(p.launch_s for p in parts),
        max(p.error for p in parts) + (0.0 if usual else _UNUSUAL_ERROR),
        max(p.tag for p in parts) if usual else Tag.ASSUMED,
    )


def _sides(rows: float, columns: float, depth: float, phase: str, left: bool, right: bool) -> list[_Sizes]:
    """Return the products of one phase; the backward has one per operand (`left`, `right`) that needs a gradient."""
    if phase == "forward":
        return [(rows, columns, depth)]
    return [(rows, depth, columns)] * left + [(columns, depth, rows)] * right


def _product_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    if len(work.inputs) < 2 or len(work.outputs[0].shape) < 2 or work.flops <= 0:
        return None
    left, right, out = work.inputs[0], work.inputs[1], work.outputs[0]
    groups = 1 if len(right.shape) <= 2 else size_of(out.shape[:-2])
    columns = out.shape[-1]
    rows = out.num_elements / columns / groups
    depth = work.flops / (2.0 * out.num_elements)
    kind, width, usual = _precision(work)
    aligned = is_aligned(kind, width, depth, columns)
    output_bytes = float(dtype_bytes(out.dtype))
    dtype = work.matmul_dtype or dtype_of(work)
    parts = [
        known.product_s(
            device,
            kind,
            *sizes,
            groups=groups,
            operand_bytes=width,
            output_bytes=output_bytes,
            aligned=aligned,
            speed=training_speed(dtype),
        )
        for sizes in _sides(rows, columns, depth, phase, left.requires_grad, right.requires_grad)
    ]
    # the forward casts its left operand, if no product before did, the backward the gradient once for both products
    width = columns if phase == "backward" else 0.0 if dict(work.attrs).get("cast_before") else depth
    cast = width * rows * groups * cast_bytes(dtype, known.family)
    return _together(parts, cast / (known.memory_share * device.memory_bytes_per_s), usual) if parts else None


# Passes over the scores of attention besides the products, in elements of 16 bits read or written: scale, mask and
# softmax in one kernel, dropout in another one with a mask of 8 bits; in the backward also the gradient for each of
# them.
_SCORE_PASSES = {"forward": 4.5, "backward": 5.5}


def _unfused_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the time of batched products of all scores (a causal mask saves nothing) and of the passes over them."""
    if len(work.inputs) < 3 or len(work.inputs[0].shape) < 3 or work.flops <= 0:
        return None
    query, key = work.inputs[:2]
    heads, queries, keys = size_of(query.shape[:-2]), query.shape[-2], key.shape[-2]
    parts = _products_of_scores(work, phase, device, known, queries, keys)
    if not parts:
        return None
    moved = _SCORE_PASSES[phase] * heads * queries * keys * float(dtype_bytes(query.dtype))
    return _together(parts, moved / (known.memory_share * device.memory_bytes_per_s), True)


def _products_of_scores(
    work: OpWork, phase: str, device: Device, known: KernelTimings, rows: float, keys: float, *, again: bool = False
) -> list[Seconds]:
    """Return the seconds of the products of attention, of some rows of queries with some keys in all heads.

    Args:
        again: the scores are computed once more.
    """
    query, key, value = work.inputs[:3]
    width = float(dtype_bytes(query.dtype))
    scores: _Sizes = (rows, keys, query.shape[-1])
    both: tuple[_Sizes, ...] = scores, (rows, value.shape[-1], keys)
    sizes = [s for each in both for s in _sides(*each, phase, query.requires_grad, key.requires_grad)]
    return [
        known.product_s(
            device,
            KernelKind.HALF,
            *each,
            groups=size_of(query.shape[:-2]),
            operand_bytes=width,
            output_bytes=width,
            aligned=is_aligned(KernelKind.HALF, width, query.shape[-1], value.shape[-1], int(keys)),
        )
        for each in ([scores, *sizes] if again else sizes)
    ]


# Bytes that a score costs where the scores of a block of queries are held at a time: as `_scores`, `_attend_plainly`
# and `_attend_plainly_backward` of runtime/parts.py read and write it in 32 bits, counted; then what a cap adds.
_BLOCK_BYTES = {"forward": 68.0, "backward": 84.0}
_CAP_BYTES = {"forward": 16.0, "backward": 52.0}
# what dropout adds, whose mask is drawn by one operation after the other, in 64 bits
_DROP_BYTES = {"forward": 268.0, "backward": 293.0}


def _in_blocks_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the time of products of blocks of queries with the keys that they see, and of the passes over scores."""
    facts, query = _facts(work), work.inputs[0]
    heads, rows = size_of(query.shape[:-2]), min(ROW_BLOCK, query.shape[-2])
    keys, blocks = keys_per_query(facts), query.shape[-2] / rows
    parts = _products_of_scores(work, phase, device, known, rows, keys, again=phase == "backward")
    moved = _BLOCK_BYTES[phase] + (_CAP_BYTES[phase] if facts.attrs.get("softcap") else 0.0)
    moved += _DROP_BYTES[phase] if facts.attrs.get("p") else 0.0
    moved *= heads * query.shape[-2] * keys
    together = _together(parts, 0.0, False)
    passes_s = moved / (known.memory_share * device.memory_bytes_per_s)
    return replace(together, busy_s=blocks * together.busy_s + passes_s, launch_s=blocks * together.launch_s)


def _facts(work: OpWork) -> OpFacts:
    return OpFacts(work.op, dict(work.attrs), work.inputs, work.outputs, device_type="cuda")


# Attention with dropout in kernels of our own (runtime/triton_attention.py). Their speed over FlashAttention-2, of
# which they are a plain form in Triton: assumed. The backward has two kernels that compute scores and their gradient,
# so seven products for five. A draw of SplitMix64 in 64 bits is so many instructions of 32 bits (counted by hand), of
# which a multiprocessor starts 64 in a cycle (CUDA C++ Programming Guide, arithmetic instructions, integers), at an
# assumed 1.5 GHz; the mask is drawn once forward and twice backward.
_DROPPED_SHARE = 0.65
_DROPPED_AGAIN = {"forward": 1.0, "backward": 7 / 5}
_DRAWN_TIMES = {"forward": 1, "backward": 2}
_DRAW_INSTRUCTIONS = 28.0
_INSTRUCTIONS_PER_S = 64 * 1.5e9
_DROPPED_ERROR = 0.35


def _dropped_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the time of attention with dropout, whose mask is drawn inside the kernels."""
    found = _attention_s(work, phase, device, known, Attention.FLASH2)
    if found is None:
        return None
    query, value = work.inputs[0], work.inputs[2]
    pairs = work.flops / (2.0 * (query.shape[-1] + value.shape[-1]))
    drawn_s = _DRAWN_TIMES[phase] * pairs * _DRAW_INSTRUCTIONS / (_INSTRUCTIONS_PER_S * known.units)
    times = _DROPPED_AGAIN[phase] / _DROPPED_SHARE
    launch_s = found.launch_s * _DRAWN_TIMES[phase]
    return Seconds(times * found.busy_s + drawn_s, launch_s, found.error + _DROPPED_ERROR, Tag.ASSUMED)


# Context parallelism computes attention for one part of the keys after the other, and adds up the results: bytes per
# element and part. Forward: 16 bits read, 32 bits read and written; backward: of queries, keys and values (as in
# context_parallel.py of Transformer Engine).
_JOIN_BYTES = {"forward": 10.0, "backward": 20.0}


def _edges(attrs: Mapping[str, Plain]) -> int:
    """Return how many diagonals cut through tiles: a causal one, or both of a window on two sides."""
    return 2 if attrs.get("ahead") is not None else int(bool(attrs.get("causal")))


def _attention_s(work: OpWork, phase: str, device: Device, known: KernelTimings, kernel: Attention) -> Seconds | None:
    if len(work.inputs) < 3 or len(work.inputs[0].shape) < 3 or work.flops <= 0:
        return None
    query, _, value = work.inputs[:3]
    found = known.attention_s(
        device,
        phase,
        flops=work.flops,
        heads=size_of(query.shape[:-2]),
        queries=query.shape[-2],
        head_dims=query.shape[-1] + value.shape[-1],
        moved=phase_bytes(work, phase),
        edges=_edges(dict(work.attrs)),
        kernel=kernel,
        narrow=NARROW_SPEED if dict(work.attrs).get("narrow") else 1.0,
    )
    parts = dict(work.attrs).get("context_parts", 1)
    if isinstance(parts, int) and parts > 1:
        joined = parts * _JOIN_BYTES[phase] * work.outputs[0].num_elements
        return _together([found], joined / (known.memory_share * device.memory_bytes_per_s), True)
    return found


# The number of streams for products of experts in kernels of their own (Transformer Engine's GroupedLinear:
# nvte_multi_tensor_gemm of transformer_engine/common/gemm/cublaslt_gemm.cu, num_compute_streams).
_STREAMS = 4
# Rows are read and written once on the way to experts of the same rank, and once on the way back.
_ROW_PASSES = 4.0


def has_one_product(work: OpWork, mode: Mode, device: Device) -> bool:
    """Return True if one kernel of torch does the products of all experts, as the emitted programs ask for.

    Megatron and Transformer Engine (`mode` FUSED) start one product per expert, unless a kernel does all of it
    (`RunOptions.fused_experts`).
    """
    if mode is Mode.FUSED or len(work.inputs) <= SECOND:
        return False
    first, last = work.inputs[FIRST], work.inputs[SECOND]
    found, capability = expert_sizes(dict(work.attrs), first.shape, last.shape), device.compute_capability
    sizes = (found.columns, found.hidden, found.inner)
    major = None if capability is None else int(capability)
    return grouped_kernel("cuda", dtype_of(work), major, sizes, found.num)


def _experts_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the time of experts as two grouped products and an activation between them, in kernels of their own."""
    return _grouped_s(work, phase, device, known, streams=_STREAMS)


def _one_product_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the same where one kernel does the products of all experts."""
    return _grouped_s(work, phase, device, known, streams=0)


def _fused_experts_s(work: OpWork, phase: str, device: Device, known: KernelTimings, _: Attention) -> Seconds | None:
    """Return the time of experts in kernels that also apply and cast the activation (cuDNN's in Transformer Engine)."""
    steps = known.steps.with_({"grouped_share": known.steps.fused_grouped_share})
    return _grouped_s(work, phase, device, replace(known, steps=steps), streams=0, fused=True)


def _grouped_s(
    work: OpWork, phase: str, device: Device, known: KernelTimings, *, streams: int, fused: bool = False
) -> Seconds | None:
    """Return the time of experts. Rows are sorted, and spread evenly over the experts of the fullest rank.

    `streams`: over so many streams each expert has products of its own; 0: a kernel does those of all.
    """
    if len(work.inputs) < 5 or work.flops <= 0:
        return None
    hidden, first, last = work.inputs[0], work.inputs[FIRST], work.inputs[SECOND]
    found = expert_sizes(dict(work.attrs), first.shape, last.shape)
    experts, columns, depth, inner = found.num, found.columns, found.hidden, found.inner
    outer = depth
    # rows of all experts of the rank
    rows = known.steps.imbalance * work.flops / (2.0 * (columns * depth + outer * inner))
    kind, width, usual = _precision(work)
    parts = [
        known.product_s(
            device,
            kind,
            *sizes,
            groups=experts,
            operand_bytes=width,
            grouped=True,
            streams=streams,
            aligned=is_aligned(kind, width, n, k),
            speed=training_speed(work.matmul_dtype or dtype_of(work)),
        )
        for n, k, weight in ((columns, depth, first), (outer, inner, last))
        for sizes in _sides(rows / experts, n, k, phase, hidden.requires_grad, weight.requires_grad)
    ]
    if not parts:
        return None
    # Rows are sorted before and after, in both phases alike. The activation reads the output of the first product and
    # writes the input of the second; its backward reads gradient and input and writes the gradient of the input.
    passes = dict(work.attrs).get("row_passes", _ROW_PASSES)
    ordered = (passes if isinstance(passes, float) else _ROW_PASSES) * depth
    activated = columns + inner if phase == "forward" else 2 * columns + inner
    inside = inner if phase == "forward" else columns
    if len(work.inputs) > FIRST_BIAS:
        # the biases of all rows are written, and read with what they are added to; their gradients are sums over rows
        activated += (4 if phase == "forward" else 1) * (columns + outer)
    if fused:
        activated = inside = 0
    cast = (
        rows
        * ((depth if phase == "forward" else outer) + inside)
        * cast_bytes(work.matmul_dtype or dtype_of(work), known.family)
    )
    moved = rows * (ordered + activated) * dtype_bytes(hidden.dtype) + cast
    return _together(parts, moved / (known.memory_share * device.memory_bytes_per_s), usual)


_Sizes = tuple[float, float, float]  # rows, columns, depth
_Model = Callable[[OpWork, str, Device, KernelTimings, Attention], Seconds | None]
_KERNELS: dict[OpKind, _Model] = {
    OpKind.PRODUCT: _product_s,
    OpKind.ATTENTION: _attention_s,
    OpKind.EXPERTS: _experts_s,
}


def is_unfused(work: OpWork, mode: Mode, options: RunOptions) -> bool:
    """Return True for attention by products of all scores and passes over them."""
    if mode is Mode.FUSED and unfused_in_megatron(dict(work.attrs)):
        return True
    return options.attention_in(mode) is Attention.UNFUSED


def model_of(work: OpWork, mode: Mode, device: Device, options: RunOptions) -> _Model | None:
    """Return the kernel model of an operation; None if it has none."""
    kind = op_kind(work.op)
    if kind is OpKind.ATTENTION and is_unfused(work, mode, options):
        return _unfused_s
    if kind is OpKind.ATTENTION and mode is not Mode.FUSED and is_in_row_blocks(_facts(work)):
        return _in_blocks_s
    if kind is OpKind.ATTENTION and mode is not Mode.FUSED and dict(work.attrs).get("p"):
        return _dropped_s
    if kind is OpKind.EXPERTS and options.fused_experts:
        return _fused_experts_s
    if kind is OpKind.EXPERTS and has_one_product(work, mode, device):
        return _one_product_s
    return _KERNELS.get(kind)
