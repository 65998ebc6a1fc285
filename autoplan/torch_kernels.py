"""Kernels of torch: limits of theirs that the runtime obeys, and prices and the rules of saved memory know."""

from __future__ import annotations

from collections.abc import Iterable

LARGEST_HEAD = 256  # flash attention on CUDA: larger head dims take another kernel
LARGEST_DROPPED_HEAD = 128  # our kernels of attention with dropout: larger head dims go in blocks of rows
ROW_BLOCK = 512  # queries whose scores attention holds at a time where no kernel of torch gives their log-sum-exp

# columns that hold the bias of keys: three numbers of 16 bits have the digits of one of 32
BIAS_COLUMNS = 3
_BIASED_MULTIPLE = 8  # head dims of kernels on CUDA


def biased_width(keys: int, values: int) -> int:
    """Return the head dim of attention with a bias by key, from those of keys and values (runtime/key_bias.py)."""
    return -(-max(keys + BIAS_COLUMNS, values) // _BIASED_MULTIPLE) * _BIASED_MULTIPLE


def window_blocks(window: int, ahead: int | None, length: int) -> tuple[int, int, int]:
    """Return the queries of a block of attention in a window, and how many more keys it sees before and behind them.

    There are two blocks or more.
    """
    if ahead is None:
        return window, window, 0
    before, behind = min(window - 1, length), min(ahead, length)
    return min(max(before, behind, 1), -(-length // 2)), before, behind


GROUPED_BYTES = 16  # every row and every matrix of grouped products starts at a multiple of this
_MOST_GROUPS = 1023
_GROUPED_ON_CUDA = (9, 10)  # compute capabilities with the kernel; others would wait for the host at each product
_GROUPED_ON_CPU = {"bfloat16": 2, "float16": 2, "float32": 4}


def grouped_kernel(device_type: str, dtype: str, capability: int | None, sizes: Iterable[int], num_groups: int) -> bool:
    """Return True if ``torch.nn.functional.grouped_mm`` can multiply the rows of all experts at once.

    It takes row counts that only the device knows. Otherwise every expert has its own product, of a size that the host
    has to know. The CUDA kernel takes bfloat16 on Hopper and Blackwell; in all other cases torch copies the sizes to
    the host at every product (aten/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`). On a CPU it is a loop over the
    experts.

    Args:
        capability: major compute capability of a CUDA device, None if it is not known.
        sizes: row lengths of all operands.
    """
    width = _GROUPED_ON_CPU.get(dtype)
    fits = width is not None
    if device_type == "cuda":
        fits = dtype == "bfloat16" and capability in _GROUPED_ON_CUDA
    return fits and num_groups <= _MOST_GROUPS and all(n * (width or 0) % GROUPED_BYTES == 0 for n in sizes)
