"""Tensors by name that are made when they are asked for: a model that is larger than the memory of a process starts.

`MadeTensors` is a mapping that keeps nothing. `Recording` is one way to make values: the initialisation of a model on
the meta device is run once, without values, and recorded. What it does to a single tensor is then run again with
values, on the host, for one tensor at a time. The seed of a random operation depends on its place in the recording
alone, so that a tensor has the same values on every rank and under every plan. The idea is that of torchdistx's
deferred initialisation (https://pytorch.org/torchdistx/latest/deferred_init.html).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class MadeTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each made anew whenever it is asked for.

    Args:
        dtypes: of all tensors, by name.
        make: returns a tensor.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], make: Callable[[str], torch.Tensor]) -> None:
        self.dtypes: dict[str, Any] = dict(dtypes)
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.dtypes:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def dtypes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors, without making any."""
    return dict(tensors.dtypes) if isinstance(tensors, MadeTensors) else {name: t.dtype for name, t in tensors.items()}


def joined(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a mapping of both, without making any tensor."""
    return MadeTensors({**dtypes_of(other), **dtypes_of(one)}, lambda name: one[name] if name in one else other[name])


@dataclass(frozen=True)
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    index: int

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the meta device that it reads."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if _on_meta(t)]

    def written(self) -> list[torch.Tensor]:
        """Return the tensors on the meta device that it writes or makes."""
        made = [t for t in tree_leaves(self.out) if _on_meta(t)]
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.args[i] if i < len(self.args) else self.kwargs.get(argument.name)
                made += [t for t in tree_leaves(given) if _on_meta(t)]
        return made


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _storage(tensor: torch.Tensor) -> int:
    # Private torch API (see private.py): tells views of a tensor from other values.
    return int(tensor.untyped_storage()._cdata)


class Recording(TorchDispatchMode):
    """Records what is done to tensors on the meta device while it is active.

    Args:
        seed: of all random operations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = tree_map(_snapshot, (args, kwargs))
        out = func(*args, **kwargs)
        if any(_on_meta(t) for t in tree_leaves((args, kwargs, out))):
            self._calls.append(_Call(func, kept[0], kept[1], out, len(self._calls)))
        return out

    def gives(self, tensor: torch.Tensor) -> bool:
        """Return True if something was written to a tensor."""
        key = _storage(tensor)
        return any(key in map(_storage, call.written()) for call in self._calls if call.func._schema.is_mutable)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the meta device with its values, on the host."""
        wanted, calls = {_storage(tensor)}, []
        for call in reversed(self._calls):
            written = set(map(_storage, call.written()))
            if written & wanted:
                calls.append(call)
                wanted |= written | set(map(_storage, call.tensors()))
        real: dict[int, torch.UntypedStorage] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == "meta" else value
            if not _on_meta(value):
                return value
            key = _storage(value)
            if key not in real:
                size = value.untyped_storage().nbytes()
                real[key] = torch.empty(size, dtype=torch.uint8).untyped_storage()
            out = torch.empty(0, dtype=value.dtype)
            return out.set_(real[key], value.storage_offset(), value.shape, value.stride())

        with torch.no_grad():
            for call in reversed(calls):
                args, kwargs = tree_map(on_host, (call.args, call.kwargs))
                with torch.random.fork_rng(devices=[]):
                    if torch.Tag.nondeterministic_seeded in call.func.tags:
                        torch.manual_seed(self._seed_of(call.index))
                    out = call.func(*args, **kwargs)
                for was, now in zip(tree_leaves(call.out), tree_leaves(out), strict=True):
                    if _on_meta(was) and _storage(was) not in real:
                        on_host(was).copy_(now)
            found: torch.Tensor = on_host(tensor.detach())
        return found

    def _seed_of(self, index: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed} {index}".encode()).digest()[:8], "big") >> 1


def _snapshot(value: Any) -> Any:
    """Return a copy of a tensor with values, which may change after the call."""
    if isinstance(value, torch.Tensor) and not _on_meta(value):
        return value.detach().clone()
    return value
