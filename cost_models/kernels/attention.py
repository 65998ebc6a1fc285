"""The work of attention as a run sets it up: within documents, and in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from autoplan.config.parallel import Mode, RunOptions
from autoplan.cost_models.hardware.parts import Device
from autoplan.cost_models.work import OpWork
from autoplan.ops.attention import with_columns
from autoplan.ops.saved import OpFacts

# Speed of products in 8 bits over 16: FlashAttention-3 reaches 1.2 PFLOP/s against 740 TFLOP/s on H100 (Shah et al.,
# 2024, arXiv 2407.08608, of heads of 256). The backward is assumed to gain as much.
NARROW_SPEED = 1.6


def as_run(work: OpWork, device: Device, options: RunOptions, mode: Mode) -> OpWork:
    """Return the attention of packed documents, and marked `narrow` if it multiplies in 8 bits where the device can.

    A bias by key is columns of queries and keys, but for Transformer Engine, whose kernels take slopes (`alibi_slopes`
    of its DotProductAttention).
    """
    work = _within_documents(work if mode is Mode.FUSED else _with_columns(work), options)
    narrow = options.narrow_attention and "float8" in device.peak_flops_by_dtype
    return replace(work, attrs=(*work.attrs, ("narrow", True))) if narrow else work


def _within_documents(work: OpWork, options: RunOptions) -> OpWork:
    """Return attention of a packed sequence: a query sees keys of its own document, and other tiles are skipped."""
    document_len = options.document_len
    if document_len is None or len(work.inputs) < 2 or len(work.inputs[1].shape) < 3:
        return work
    keys = work.inputs[1].shape[-2]
    return work if keys <= document_len else replace(work, flops=work.flops * document_len / keys)


def _with_columns(work: OpWork) -> OpWork:
    """Return attention with a bias by key as it runs, which first copies queries, keys and values."""
    attrs = dict(work.attrs)
    if not attrs.get("key_bias"):
        return work
    there = with_columns(OpFacts(work.op, attrs, work.inputs, work.outputs))
    widths = [sum(t.shape[-1] for t in inputs[1:3]) for inputs in (there.inputs, work.inputs)]
    copied = sum(t.num_bytes for t in (*there.inputs[:3], *work.inputs[:3]))
    return replace(
        work,
        inputs=there.inputs,
        outputs=there.outputs,
        flops=work.flops * widths[0] / widths[1],
        moved_bytes=float(sum(t.num_bytes for t in (*there.inputs, *there.outputs))),
        attrs=(*((k, x) for k, x in work.attrs if k != "key_bias"), ("copied_bytes", float(copied))),
    )
