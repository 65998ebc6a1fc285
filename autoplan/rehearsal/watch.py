"""Observation of a rank at the dispatcher: live bytes of its tensors, arithmetic of its products, and collectives."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autoplan.runtime.convert import phase_of_call

_aten = torch.ops.aten
_PRODUCTS = frozenset((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution))
_ATTENTION = frozenset(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that watches everything inside. Enter it inside FakeTensorMode.

    Attributes:
        live_bytes, peak_bytes: of all tensors made inside, now and at most; a storage counts once and while it lives.
        flops: FLOPs by (what, phase): what is `products` or `attention`, phase forward, backward or recompute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: int = 0
        self.peak_bytes: int = 0
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def leave_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do not count these tensors, nor views of them: whole parameters, which no rank has."""
        for storage in [tensor.untyped_storage() for tensor in tensors.values()]:
            if storage._cdata not in self._outside:
                self._outside.add(storage._cdata)
                # the address is another storage's afterwards
                weakref.finalize(storage, self._outside.discard, storage._cdata)

    def start(self) -> None:
        """Begin to look for the peak."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _PRODUCTS:
            count: Callable[..., int] = flop_registry[packet]
            self.flops["products", phase_of_call()] += count(*args, **kwargs, out_val=out)
        elif packet is _aten.convolution_backward:
            self.flops["products", phase_of_call()] += _convolution_gradients_flops(args)
        elif packet is _aten._grouped_mm:
            self.flops["products", phase_of_call()] += _grouped_flops(args[0].shape, args[1].shape)
        elif packet in _ATTENTION:
            self.flops["attention", phase_of_call()] += _attention_flops(packet, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):  # not the shell of a DTensor, whose local part is one
                self._hold(tensor)
        return out

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._outside:
            return
        size = storage.nbytes()
        self._sizes[key] = 0
        self._resized(key, size)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def _resized(self, key: int, num_bytes: int) -> None:
        if key in self._sizes:
            self.live_bytes += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Follow storages that are emptied and filled again, as declared and gathered parameters are.

        The storage of a fake tensor keeps its first size whatever `resize_` says, so that its size is told from here.
        """
        kind = torch.UntypedStorage
        resize, sizes = kind.resize_, {name: getattr(kind, name) for name in ("size", "nbytes")}

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage._cdata, size)
            return out

        def told(name: str) -> Callable[[torch.UntypedStorage], int]:
            return lambda storage: self._size(storage, sizes[name])

        replaced: dict[str, Any] = {"resize_": followed, **{name: told(name) for name in sizes}}
        for name, function in replaced.items():
            setattr(kind, name, function)
        try:
            yield
        finally:
            for name, function in {"resize_": resize, **sizes}.items():
                setattr(kind, name, function)

    def _size(self, storage: torch.UntypedStorage, first: Callable[[torch.UntypedStorage], int]) -> int:
        known = self._sizes.get(storage._cdata)
        return first(storage) if known is None else known


def _attention_flops(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Return the FLOPs of attention, of a causal mask the half that it leaves.

    Those of a backward are what flash attention computes (5 products for 2 of the forward).
    """
    forward = packet is _aten._scaled_dot_product_flash_attention_for_cpu
    count: Callable[..., int] = sdpa_flop_count if forward else sdpa_backward_flop_count
    causal, tensors = (4, args[:3]) if forward else (7, args[:4])
    masked = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
    return count(*(x.shape for x in tensors)) / (2 if masked else 1)


def _convolution_gradients_flops(args: tuple[Any, ...]) -> float:
    """Return the FLOPs of the gradients of data and weights, given the arguments of `convolution_backward`.

    Each has as many as the forward. torch's own formula counts that of weights as if there was one group.
    """
    (grad, x, weight), transposed, wanted = args[:3], args[7], args[10][:2]
    each = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return float(each * sum(wanted))


def _grouped_flops(left: Sequence[int], right: Sequence[int]) -> float:
    """Return the FLOPs of a product of experts: rows [r, k] by [g, k, n], or [k, r] by [r, n]."""
    if len(left) == 3:
        return 2.0 * left[1] * left[2] * right[-1]
    return 2.0 * left[0] * left[1] * right[-1]
