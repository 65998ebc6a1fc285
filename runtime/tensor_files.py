"""Tensors in files of the safetensors format, written in one pass and read slice by slice.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape and the place of the
bytes), and the elements of all tensors one after the other, row-major and little endian. Nothing is unpickled. A header
is checked against the size of its file before anything of it is used. Source of the format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from autoplan.files import WrittenFile, write_pieces

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 16 << 20  # read at a time
_ALIGNMENT = 8
_LONGEST_HEADER = 1 << 30

Ranges = Sequence[tuple[int, int]]  # per dim: first index, and the one after the last


class TensorFileError(ValueError):
    """A file that is not what the safetensors format or its reader asks for."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: what is known of it before `values` makes it, which happens when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of its elements in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, NewTensor], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a file of tensors; one at a time is in memory.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
        TensorFileError: a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise TensorFileError(f"{name}: {tensor.dtype} cannot be stored; use one of {', '.join(map(str, NAMES))}")
        begin, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little")
        yield header
        for name, tensor in tensors.items():
            values = tensor.values()
            if values.dtype != tensor.dtype or tuple(values.shape) != tensor.shape:
                raise TensorFileError(
                    f"{name} is {values.dtype} of shape {tuple(values.shape)}; {tensor.dtype} of shape {tensor.shape} "
                    "was to be written"
                )
            if tensor.num_bytes:
                yield bytes_of(values)

    return write_pieces(path, pieces())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as bytes, row-major; a tensor on the host that is contiguous is not copied."""
    if sys.byteorder != "little":
        raise TensorFileError("tensors can be written on little-endian machines only")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype, its shape, and where in the file its elements begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """The tensors of a file, by name.

    Attributes:
        entries: what the header says of each. metadata: its texts.

    Raises:
        OSError: the file cannot be read.
        TensorFileError: it is not a safetensors file, or is shorter or longer than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise TensorFileError(f"{path}: {size} bytes are too few for a header of {length} bytes")
            text = file.read(length)
        try:
            header = json.loads(text)
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            self.entries: dict[str, Entry] = {name: _entry(name, raw, 8 + length, size) for name, raw in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise TensorFileError(f"{path}: the header cannot be read: {exc}") from exc
        end = max((e.begin + _num_bytes(e) for e in self.entries.values()), default=8 + length)
        if end != size:
            raise TensorFileError(f"{path} has {size} bytes; its header describes {end}")

    def read_into(self, name: str, out: torch.Tensor, ranges: Ranges | None = None) -> None:
        """Copy a tensor, or of each dim a range, into `out`, which may be strided and of another dtype.

        At most BLOCK_BYTES are in memory besides (or one row, if that is longer and has no dims).
        """
        entry = self.entries[name]
        ranges = [(0, size) for size in entry.shape] if ranges is None else list(ranges)
        if len(ranges) != len(entry.shape) or any(
            not 0 <= a <= b <= size for (a, b), size in zip(ranges, entry.shape, strict=True)
        ):
            raise TensorFileError(f"{self.path}: {name} has shape {entry.shape}; {ranges} is not inside it")
        if tuple(out.shape) != tuple(b - a for a, b in ranges):
            raise TensorFileError(f"{self.path}: {ranges} of {name} do not have the shape {tuple(out.shape)}")
        if out.numel():
            with self.path.open("rb") as file, torch.no_grad():
                _copy(file, entry.begin, entry.shape, entry.dtype, ranges, out)

    def read(self, name: str, ranges: Ranges | None = None) -> torch.Tensor:
        """Return a tensor, or of each dim a range, on the host."""
        entry = self.entries[name]
        shape = entry.shape if ranges is None else [b - a for a, b in ranges]
        out = torch.empty(tuple(shape), dtype=entry.dtype)
        self.read_into(name, out, ranges)
        return out

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor whose pages are read from the file when they are used, and can be dropped at any time.

        Writing to it changes memory alone.
        """
        entry = self.entries[name]
        size = _num_bytes(entry)
        if not size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = np.memmap(self.path, dtype=np.uint8, mode="c", offset=entry.begin, shape=(size,))
        return torch.from_numpy(raw).view(entry.dtype).reshape(entry.shape)


def _entry(name: str, raw: Mapping[str, Any], start: int, size: int) -> Entry:
    dtype, shape = DTYPES[raw["dtype"]], tuple(int(n) for n in raw["shape"])
    begin, end = (start + int(n) for n in raw["data_offsets"])
    entry = Entry(dtype, shape, begin)
    if min(shape, default=0) < 0 or not start <= begin <= end <= size or end - begin != _num_bytes(entry):
        raise ValueError(f"{name} of shape {shape} cannot lie at {raw['data_offsets']} of {size - start} bytes")
    return entry


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _copy(
    file: BinaryIO, begin: int, shape: Sequence[int], dtype: torch.dtype, ranges: Ranges, out: torch.Tensor
) -> None:
    if not shape:
        out.copy_(_read(file, begin, (), dtype))
        return
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first, last = ranges[0]
    if len(shape) > 1 and row_bytes > BLOCK_BYTES:
        for index in range(first, last):
            _copy(file, begin + index * row_bytes, shape[1:], dtype, ranges[1:], out[index - first])
        return
    step = max(1, BLOCK_BYTES // row_bytes)
    inner = tuple(slice(a, b) for a, b in ranges[1:])
    for index in range(first, last, step):
        num = min(step, last - index)
        block = _read(file, begin + index * row_bytes, (num, *shape[1:]), dtype)
        out[index - first : index - first + num].copy_(block[(slice(None), *inner)])


def _read(file: BinaryIO, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    raw = bytearray(math.prod(shape) * dtype.itemsize)
    file.seek(begin)
    if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]  # a buffered file
        raise TensorFileError(f"{file.name} ends before its header says")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def stored_names(names: Iterable[str]) -> str:
    """Return a few names for a message."""
    given = sorted(names)
    return ", ".join(given[:4]) + (f" and {len(given) - 4} more" if len(given) > 4 else "")
