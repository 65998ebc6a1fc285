"""The work of attention as a run sets it up: within documents, and in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from autoplan.config.parallel import RunOptions
from autoplan.cost_models.hardware.parts import Device
from autoplan.cost_models.work import OpWork

# Speed of products in 8 bits over 16: FlashAttention-3 reaches 1.2 PFLOP/s against 740 TFLOP/s on H100 (Shah et al.,
# 2024, arXiv 2407.08608, of heads of 256). The backward is assumed to gain as much.
NARROW_SPEED = 1.6


def as_run(work: OpWork, device: Device, options: RunOptions) -> OpWork:
    """Return the attention of packed documents, and marked `narrow` if it multiplies in 8 bits where the device can."""
    work = _within_documents(work, options)
    narrow = options.narrow_attention and "float8" in device.peak_flops_by_dtype
    return replace(work, attrs=(*work.attrs, ("narrow", True))) if narrow else work


def _within_documents(work: OpWork, options: RunOptions) -> OpWork:
    """Return attention of a packed sequence: a query sees keys of its own document, and other tiles are skipped."""
    document_len = options.document_len
    if document_len is None or len(work.inputs) < 2 or len(work.inputs[1].shape) < 3:
        return work
    keys = work.inputs[1].shape[-2]
    return work if keys <= document_len else replace(work, flops=work.flops * document_len / keys)
