"""Operators that are one kernel on a GPU: ``torch.ops.autoplan_fused.*``, written in Triton (triton_kernels.py).

Without Triton dropout is one kernel of CUDA C++ (cuda_source.py). Elsewhere, and always on the CPU, the callers compute
the same from torch's operators. On ``meta`` the operators
stand for the GPU's: this is how kernels and bytes are counted without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoplan.runtime import cuda_source

_LIBRARY = torch.library.Library("autoplan_fused", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    # x with the mask of autoplan.runtime.dropout, drawn at positions first + rng[2] * batch_stride + the sum of (digit
    # * stride) over the digits of the element's number in the mixed radix `sizes`
    "dropout(Tensor x, Tensor rng, int site, int[] sizes, int[] strides, int first, int batch_stride, int kept, "
    "float scale) -> Tensor",
    # `_statistics` and `_gradient` of autoplan.runtime.loss
    "loss_statistics(Tensor logits, Tensor target, int first, int total, int ignore_index, bool summed) -> Tensor",
    "loss_gradient(Tensor logits, Tensor target, Tensor log_sum_exp, Tensor grad, int first, int total, "
    "int ignore_index, float label_smoothing) -> Tensor",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _lacking() -> str | None:
    """Return the name of something that Triton needs to build kernels and this machine lacks; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ((compiler,) if compiler else ("gcc", "clang"))):
        return f"the C compiler {compiler} that CC names" if compiler else "a C compiler, gcc or clang"
    scheme = sysconfig.get_default_scheme()  # as Triton chooses: headers are not in Debian's local tree
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.exists():
        return f"{header}, of Python's development package"
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (7, 0):
        return "a GPU of compute capability 7.0 or more"
    return None


@functools.cache
def has_triton() -> bool:
    """Return True if Triton kernels (including inductor's) can be built here. Warns once if they cannot."""
    lacking = _lacking()
    if lacking is not None:
        warnings.warn(
            f"losses run by many kernels instead of one each, and no block is compiled by itself: this machine lacks "
            f"{lacking}",
            stacklevel=2,
        )
    return lacking is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile does not look into it
def one_kernel(device: torch.device) -> bool:
    """Return True if these operators are to be used for tensors on this device. Warns once of a GPU without Triton."""
    return device.type == "meta" or (device.type == "cuda" and has_triton())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile does not look into it
def one_dropout(device: torch.device) -> bool:
    """Return True if dropout is one kernel on this device. Warns once of a GPU where it is not."""
    return one_kernel(device) or (device.type == "cuda" and cuda_source.works(device))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile does not look into it
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for other devices, and where no GPU is to be seen.

    torch's own function breaks the graph of a compiled block: its result is not a tensor.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _kernels(name: str) -> Any:
    if name == "dropout" and not has_triton():
        return cuda_source
    return importlib.import_module("autoplan.runtime.triton_kernels")  # imports triton


def _on_cuda(name: str) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch.cuda.device(x.device):
            out: torch.Tensor = getattr(_kernels(name), name)(x, *rest)
            return out

    return run


def _like_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _statistics_like(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty((3 + rest[-1], logits.shape[0]), dtype=dtype)


_SHAPES = {"dropout": _like_first, "loss_statistics": _statistics_like, "loss_gradient": _like_first}
for _name, _shape in _SHAPES.items():
    _LIBRARY.impl(_name, _on_cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autoplan_fused::{_name}", _shape, lib=_LIBRARY)
