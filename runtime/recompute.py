"""Regions of a block that are recomputed in the backward, and activations that are offloaded to the host.

`torch.utils.checkpoint` drops tensors made *inside* a function, but keeps the function's result if a later operation
needs it. A norm or an activation function makes few tensors inside: its cost is its result, which the next product
keeps. Here the result is dropped as well (as in Megatron-Core's output-discarding recompute of `layernorm` and
`moe_act`):

    def mlp(gate, up):
        return F.silu(gate) * up

    product = self.again("mlp", mlp, gate, up)   # autograd keeps gate and up

How: autograd hands every tensor that it saves to a hook (`torch.autograd.graph.saved_tensors_hooks`). Inside a region
the hook saves an empty, numbered slot instead. Outside, a tensor in the storage of a region's result becomes a slot
with its strides. The first slot that is asked for recomputes the region, which fills all slots. A slot is freed with
the operation that holds it. If a region's arguments are results of other regions, those are recomputed first. No random
generator state is kept: random numbers here are functions of their positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.runtime.side_stream import SideStream, Waiting

Outs = torch.Tensor | tuple[torch.Tensor, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # not simulated: what nearly every call is about


def _local(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or the tensor of the first simulated rank."""
    if type(x) in _PLAIN:
        return x
    parts = getattr(x, "_local_tensors", None)
    return x if parts is None else next(iter(parts.values()))


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    return _local(x).untyped_storage()


def _watch(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _Slot:
    """Stands for a recomputed tensor; `value` is set once its region has been recomputed."""

    __slots__ = ("__weakref__", "region", "value", "view")

    def __init__(self, region: _Region, view: tuple[Any, ...] | None = None) -> None:
        self.region, self.view = region, view
        self.value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.value is None:
            self.region.run()
        if self.value is None:
            raise RuntimeError("a recomputed region did not compute a tensor that its forward computed")
        return self.value if self.view is None else self.value.as_strided(*self.view)


class _Region:
    """One execution of a region: the function and arguments to recompute it, and the slots it fills."""

    def __init__(self, fn: Callable[..., Outs], args: list[tuple[Any, bool]]) -> None:
        self.fn, self.args = fn, args  # per argument: what the outer hook saved, and whether it needs a gradient
        self.inner: list[weakref.ref[_Slot]] = []
        self.outer: list[tuple[int, weakref.ref[_Slot]]] = []

    def pack(self, _: torch.Tensor) -> _Slot:
        slot = _Slot(self)
        self.inner.append(weakref.ref(slot))
        return slot

    def result(self, index: int, x: torch.Tensor) -> _Slot:
        """Return a slot for `x`, which lies in the storage of result `index`."""
        slot = _Slot(self, (tuple(x.shape), x.stride(), _local(x).storage_offset()))
        self.outer.append((index, weakref.ref(slot)))
        return slot

    def let_go(self) -> None:
        for reference in (*self.inner, *(r for _, r in self.outer)):
            if (slot := reference()) is not None:
                slot.value = None

    def run(self) -> None:
        made: list[torch.Tensor] = []

        def keep(x: torch.Tensor) -> None:
            made.append(x.detach())

        args = [_unpack(kept).detach().requires_grad_(needs) for kept, needs in self.args]
        with torch.enable_grad(), saved_tensors_hooks(keep, _nothing):
            outs = self.fn(*args)
        if len(made) != len(self.inner):
            raise RuntimeError(
                f"a recomputed region kept {len(made)} tensors, its forward {len(self.inner)}: it must do the same"
            )
        results = [x.detach() for x in (outs if isinstance(outs, tuple) else (outs,))]
        for reference, value in zip(self.inner, made, strict=True):
            if (slot := reference()) is not None:
                slot.value = value
        for index, reference in self.outer:
            if (slot := reference()) is not None:
                slot.value = results[index]


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Slot):
        return kept.get()
    out: torch.Tensor = kept
    return out


def _nothing(_: Any) -> torch.Tensor:
    raise RuntimeError("the results of a recomputed region are not differentiated")


class Regions:
    """Context of one forward of a block: `run` computes a region that will be recomputed in the backward."""

    def __init__(self) -> None:
        # address of a storage -> the storage (so that the address is not reused), its region, and the index of the
        # result
        self._made: dict[int, tuple[StorageWeakRef, _Region, int]] = {}
        self._regions: list[weakref.ref[_Region]] = []
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Regions:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._made.clear()  # operations with saved tensors hold this object through its hook

    def let_go(self) -> None:
        """Free recomputed tensors; otherwise they stay until a retained graph is freed."""
        for reference in self._regions:
            if (region := reference()) is not None:
                region.let_go()

    def _pack(self, x: torch.Tensor) -> Any:
        found = self._made.get(_storage(x)._cdata)
        if found is None or _gone(found[0]):
            return x
        return found[1].result(found[2], x)

    def run(self, fn: Callable[..., Outs], args: tuple[torch.Tensor, ...], drop_result: bool) -> Outs:
        """Return `fn(*args)` and keep only the arguments (unless `drop_result`, also the result if it is needed)."""
        region = _Region(fn, [(self._pack(x.detach()), x.requires_grad) for x in args])
        self._regions.append(weakref.ref(region))
        with saved_tensors_hooks(region.pack, _unpack):
            outs = fn(*args)
        if drop_result:
            given = {_storage(x)._cdata for x in args}
            for index, out in enumerate(outs if isinstance(outs, tuple) else (outs,)):
                storage = _storage(out)
                if storage._cdata not in given:  # a view of an argument stays anyway
                    self._made[storage._cdata] = (_watch(storage), region, index)
        return outs


class OffloadedActivations:
    """Context of one forward of a block: tensors that autograd saves are offloaded to the host, each storage once.

    A tensor that was changed in place before it was saved is copied alone.

    Like `torch.autograd.graph.save_on_cpu`, but without copying parameters or several views of one storage, or what is
    on the host already. On a CPU it copies too, so that the same code runs everywhere, but not back, since the copy is
    where it is needed. On CUDA the copies run beside the computation (`autoplan.runtime.side_stream`), so an operation
    that changes a tensor in place after autograd saved it would corrupt it.

    Args:
        resident: parameters and buffers, which stay on the device.
        side: where copies run; None: they block.
        before: the context of the block that ran just before in the same forward. Its tensors are fetched, as far as
            there is room, while the backward of this block runs.
    """

    def __init__(
        self,
        resident: Iterable[torch.Tensor],
        side: SideStream | None = None,
        before: OffloadedActivations | None = None,
    ) -> None:
        self._resident = {_storage(x)._cdata for x in resident}
        self._all: list[weakref.ref[Waiting]] = []
        self._moved: dict[int, tuple[StorageWeakRef, _Moved]] = {}
        self._side, self._sent_bytes = side, 0
        self._before = None if before is None else weakref.ref(before)
        self._hooks = saved_tensors_hooks(self._pack, _back)

    def __enter__(self) -> OffloadedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._moved.clear()
        if self._side is not None:
            self._side.end_block(self._sent_bytes)

    def let_go(self) -> None:
        """Free fetched tensors; otherwise they stay until a retained graph is freed."""
        for reference in self._all:
            if (waiting := reference()) is not None:
                waiting.here = waiting.arrived = None

    def _pack(self, x: torch.Tensor) -> Any:
        storage = _storage(x)
        key = storage._cdata
        if key in self._resident or (self._side is not None and x.device.type != self._side.device.type):
            return x
        if x._version:
            # Kernels of recurrent layers compute the gates in place, in parts of one tensor (`unsafe_chunk`). What was
            # copied with another part, before this one was computed, is not this part.
            x = x.detach().clone(memory_format=torch.contiguous_format)
            storage = _storage(x)
            key = storage._cdata
        found = self._moved.get(key)
        if found is None or _gone(found[0]):
            found = self._moved[key] = (_watch(storage), _Moved(x, storage, self))
        return found[1], x.shape, x.stride(), x.storage_offset(), x.dtype

    def send(self, x: torch.Tensor, storage: torch.UntypedStorage) -> Waiting:
        """Copy the storage of `x` to the host: as uint8 [bytes], or like `x` if that is all of it and nothing waits."""
        if self._side is None:
            out = Waiting(_copied(x, storage))
        else:
            out = self._side.send(_bytes_of(x, storage))
            self._sent_bytes += storage.nbytes()
        self._all.append(weakref.ref(out))
        return out

    def get(self, waiting: Waiting, device: torch.device) -> torch.Tensor:
        """Return the storage, fetched to the device."""
        if self._side is None:
            if waiting.here is None:
                waiting.here = waiting.host if device.type == "cpu" else waiting.host.to(device)
            return waiting.here
        before = None if self._before is None else self._before()
        ahead = (*reversed(self._all), *reversed([] if before is None else before._all))
        return self._side.get(waiting, ahead)


def _copied(x: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    if x.nbytes == storage.nbytes():
        whole = x.detach().clone()  # two operations fewer, which count for small tensors
        if whole.stride() == x.stride():  # else x has gaps, or overlaps itself
            return whole
    return _bytes_of(x, storage).to("cpu", copy=True)


def _bytes_of(x: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)


class Offloads:
    """Shared by all blocks of a stage: the stream of their copies, and the most recent block context."""

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._last: weakref.ref[OffloadedActivations] | None = None

    def open(self, resident: Iterable[torch.Tensor], follows: bool) -> OffloadedActivations:
        """Open a context for one forward of a block; `follows`: True if the block before it offloads too."""
        before = self._last() if follows and self._last is not None else None
        out = OffloadedActivations(resident, self._side, before)
        self._last = weakref.ref(out)
        return out


class _Moved:
    """A storage on the host. It is fetched for the first operation that needs it, and stays for the others."""

    def __init__(self, x: torch.Tensor, storage: torch.UntypedStorage, offload: OffloadedActivations) -> None:
        self.device, self._offload = x.device, offload
        self.waiting = offload.send(x, storage)

    def get(self) -> torch.Tensor:
        return self._offload.get(self.waiting, self.device)


def _back(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    moved, shape, stride, offset, dtype = kept
    whole: torch.Tensor = moved.get()
    if whole.dtype is dtype:
        return whole if whole.shape == shape and whole.stride() == stride else whole.as_strided(shape, stride, offset)
    out: torch.Tensor = torch.empty(0, dtype=dtype, device=whole.device).set_(
        whole.untyped_storage(), offset, shape, stride
    )
    return out
