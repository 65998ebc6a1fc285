"""Operators that are one kernel on a GPU: ``torch.ops.autoplan_fused.*``, written in Triton (triton_kernels.py).

Where there is no Triton the callers compute the same from torch's operators: on the CPU always. On ``meta`` the
operators stand for the GPU's: that is how kernels and bytes are counted without one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

__all__ = ["one_kernel"]

_LIBRARY = torch.library.Library("autoplan_fused", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "dropout(Tensor x, Tensor rng, int site, int[] sizes, int[] strides, int first, int batch_stride, int kept, "
    "float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def one_kernel(device: torch.device) -> bool:
    """True if the operators here are to be used for tensors on this device."""
    return device.type == "meta" or (device.type == "cuda" and _has_triton())


def _kernels() -> Any:
    return importlib.import_module("autoplan.runtime.triton_kernels")  # imports triton


@torch.library.impl(_LIBRARY, "dropout", "CUDA")
def _dropout_cuda(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    with torch.cuda.device(x.device):
        out: torch.Tensor = _kernels().dropout(x, *rest)
        return out


@torch.library.register_fake("autoplan_fused::dropout", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _dropout_fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
