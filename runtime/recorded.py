"""Calls that give tensors on the meta device their values, and which tensors have some after them.

A tensor of the meta device takes no memory, but has a storage, which tells views of one tensor from other tensors. Of a
storage all may be written, or a part: then a mask of its elements is kept until all are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# In-place operators whose result does not depend on what the tensor was; all others change what it has.
_OVERWRITING = frozenset(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_ "
    "_foreach_copy_ _foreach_zero_".split()
)


def is_on_meta(value: Any) -> bool:
    """Return True for a tensor on the meta device."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def storage_of(tensor: torch.Tensor) -> int:
    """Return what views of one tensor have in common."""
    # Private torch API (see private.py): tells views of a tensor from other values.
    return int(tensor.untyped_storage()._cdata)


def snapshot(value: Any) -> Any:
    """Return a tensor as it is now: with values, which may change later, or its shape and place in the storage."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if is_on_meta(value) else value.detach().clone()


@dataclass(frozen=True)
class RecordedCall:
    """A call of an operator, or of a function that fills a tensor.

    Attributes:
        func: what is called with args and kwargs.
        out: what it returned; None if that is nothing new.
        index: its place in the recording.
        random: it draws random numbers.
        reads: tensors on the meta device whose values it needs.
        writes: tensors on the meta device that have values after it.
        read: storages of all tensors among its arguments.
        written: storages of `writes`.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    index: int
    random: bool
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    read: frozenset[int] = field(init=False)
    written: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        given = filter(is_on_meta, tree_leaves((self.args, self.kwargs)))
        object.__setattr__(self, "read", frozenset(map(storage_of, given)))
        object.__setattr__(self, "written", frozenset(map(storage_of, self.writes)))

    @staticmethod
    def written_arguments(func: Any, args: Any, kwargs: Any, kept: bool = False) -> list[Any]:
        """Return the arguments that an operator writes; `kept`: those that it also reads."""
        out = []
        name = func._schema.name.partition("::")[2]
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                overwritten = argument.kwarg_only or name in _OVERWRITING
                out += [] if kept and overwritten else tree_leaves(given)
        return out


def call_of(func: Any, given: tuple[Any, Any], out: Any, index: int) -> RecordedCall:
    """Return the call of an operator with (args, kwargs); they and the result are as they were then."""
    args, kwargs = given
    changed = RecordedCall.written_arguments(func, args, kwargs)
    unread = set(map(id, changed)) - set(map(id, RecordedCall.written_arguments(func, args, kwargs, kept=True)))
    name = func._schema.name.partition("::")[2]
    of_shape = name.endswith("_like") or name.startswith("new_")
    reads = [] if of_shape else [t for t in tree_leaves((args, kwargs)) if is_on_meta(t) and id(t) not in unread]
    writes = [t for t in (*changed, *tree_leaves(out)) if is_on_meta(t)]
    random = torch.Tag.nondeterministic_seeded in func.tags
    return RecordedCall(func, args, kwargs, out, index, random, tuple(reads), tuple(writes))


def gives_no_values(func: Any) -> bool:
    """Return True for operators that make views or empty tensors, or change how a tensor lies in its storage."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return is_view or torch.Tag.inplace_view in func.tags or name.startswith(("empty", "new_empty", "resize_", "set_"))


class FilledParts:
    """The parts of storages that have values."""

    def __init__(self) -> None:
        self._whole: set[int] = set()
        self._parts: dict[int, torch.Tensor] = {}

    def add(self, call: RecordedCall) -> None:
        """Follow a call: what it makes of tensors without values is no value."""
        clean = all(map(self.has, call.reads))
        for tensor in call.writes:
            self._put(tensor, clean)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if all elements of a tensor have values."""
        key = storage_of(tensor)
        if key in self._whole or tensor.numel() == 0:
            return True
        mask = self._parts.get(key)
        return mask is not None and mask.numel() == _elements(tensor) and bool(_part(mask, tensor).all())

    def _put(self, tensor: torch.Tensor, clean: bool) -> None:
        key = storage_of(tensor)
        if tensor.numel() == 0 or (clean and key in self._whole):
            return
        if _is_whole(tensor):
            self._whole.discard(key)
            self._parts.pop(key, None)
            if clean:
                self._whole.add(key)
            return
        mask = self._parts.get(key)
        if mask is None or mask.numel() != _elements(tensor):
            mask = torch.full((_elements(tensor),), key in self._whole, device="cpu")
        _part(mask, tensor).fill_(clean)
        self._whole.discard(key)
        self._parts[key] = mask
        if bool(mask.all()):
            self._whole.add(key)
            del self._parts[key]


def _elements(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()


def _part(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is all of its storage, in any order."""
    stride = tensor.stride()
    by_stride = sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], -tensor.shape[dim]))
    return tensor.numel() == _elements(tensor) and tensor.permute(by_stride).is_contiguous()
