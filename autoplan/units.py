"""Units. GB is 1e9 bytes, GiB is 2**30: they are never mixed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import TypeVar

_Kind = TypeVar("_Kind", bound=Hashable)

GB = 10**9
GIB = 2**30
MIB = 2**20
TERA = 10**12
MICRO = 1e-6
ORDER_OF_SUMS = 1e-9  # sums in another order are equal up to this share

DTYPE_BYTES: dict[str, int] = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
HALF = ("bfloat16", "float16")
REAL_PARTS = {"complex128": "float64", "complex64": "float32"}  # of a complex number; a product has four of theirs
DEVICE_TYPES = ("cpu", "cuda")


class LossUnit(StrEnum):
    """What a denominator of the loss counts."""

    TOKENS = "tokens"  # valid labels
    SAMPLES = "samples"
    TOTAL = "total"  # the sum over a value of the batch: a mask, weights
    NONE = "none"  # nothing: the loss is a sum


def most(sizes: Iterable[tuple[_Kind, int]]) -> _Kind | None:
    """Return the kind with the largest sum of sizes, the first of equal ones; None without any."""
    sums: dict[_Kind, int] = {}
    for kind, size in sizes:
        sums[kind] = sums.get(kind, 0) + size
    return max(sums, key=sums.__getitem__, default=None)


def bytes_text(size: float) -> str:
    """Return a number of bytes with four digits, in GB, MB, kB or bytes, so that none but 0 reads as 0.

    Example:
        >>> bytes_text(12.3456e9), bytes_text(3.2e5), bytes_text(12)
        ('12.35 GB', '320 kB', '12 bytes')
    """
    for unit, name in ((GB, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} bytes"


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises KeyError, with the known names, for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise KeyError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
