"""Peak bytes of live tensors, counted: on a CPU there is no allocator to ask, and RSS keeps what was freed."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Bytes of all tensor storages that exist at one time, each once.

        with StorageCounter(parameters) as live:
            step()
        live.peak_bytes

    Storages made inside are found among the results of operators and forgotten when they die. FSDP gives memory back by
    resizing storages, which is no operator: `UntypedStorage.resize_` is watched too. What libraries allocate for
    themselves (gloo's buffers, a kernel's scratch) is not seen.

    Args:
        existing: tensors that are there from the beginning.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in existing:
            self._note(tensor)
        self.start_bytes = self.live_bytes
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> StorageCounter:
        original, mine = self._resize, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            mine._note_storage(storage)
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        inner = getattr(tensor, "_local_tensor", None)  # a DTensor's own storage is none
        if inner is None and hasattr(tensor, "elem"):  # functional collectives' AsyncCollectiveTensor
            inner = tensor.elem
        tensor = tensor if inner is None else inner
        if tensor.device.type != "meta":
            self._note_storage(tensor.untyped_storage())

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            reference, before = known
        else:
            reference, before = weakref.ref(storage, lambda _, key=key: self._forget(key)), 0
        self._known[key] = (reference, size)
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        reference, size = self._known[key]
        if reference() is None:  # else the address was given to another storage in between
            del self._known[key]
            self.live_bytes -= size


def resident_bytes() -> tuple[int, int]:
    """This process's resident memory now and at its highest since `forget_peak` (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def forget_peak() -> None:
    """Give freed memory back to the system and start a new peak of `resident_bytes`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
