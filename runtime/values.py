"""Tensors by name that are made when they are asked for: a model that is larger than the memory of a process starts.

`MadeTensors` is a mapping that keeps nothing. `Recording` is one way to make values: the initialisation of a model on
the meta device is run once, without values, and recorded. What it does to a single tensor is then run again with
values, on the host, for one tensor at a time. The seed of a random operation depends on its place in the recording
alone, so that a tensor has the same values on every rank and under every plan. The idea is that of torchdistx's
deferred initialisation (https://pytorch.org/torchdistx/latest/deferred_init.html).

Operators are recorded where torch dispatches them. Three things never get there, and are seen as calls of Python
(`_Functions`): tensors of numbers (`torch.tensor(numbers, device="meta")`); the functions of torch.nn.init that do
nothing on the meta device (`trunc_normal_`, `orthogonal_`, `sparse_`, `dirac_`), each of which is recorded as one
call; and arrays of numpy. What asks for values (`.item()`, `.cpu()`, a mask) gets them, from the recording so far.
A tensor is read only where calls have written it (`recorded.FilledParts`).
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoplan.runtime.recorded import (
    FilledParts,
    RecordedCall,
    call_of,
    gives_no_values,
    is_on_meta,
    snapshot,
    storage_of,
)


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


class NoValuesError(RuntimeError):
    """An initialisation needs what a recording on the meta device cannot give."""


class Recording(TorchDispatchMode):
    """Records what is done to tensors on the meta device while it is active.

    Args:
        seed: of all random operations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._calls: list[RecordedCall] = []
        self._written = FilledParts()
        self._functions = _Functions(self)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            kept = tree_map(snapshot, (args, kwargs))
            try:
                out = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as exc:
                given = [t for t in tree_leaves(kept) if is_on_meta(t)]
                if not given:
                    raise
                if not all(map(self.gives, given)):
                    raise NoValuesError(f"asks for the values of a tensor that has none yet ({func}: {exc})") from exc
                return self._evaluated(func, args, kwargs)
            if any(map(is_on_meta, tree_leaves((kept, out)))) and not gives_no_values(func):
                self._add(call_of(func, kept, tree_map(snapshot, out), len(self._calls)))
            return out

    def record_function(self, func: FunctionType, arguments: Mapping[str, Any]) -> None:
        """Record a function that fills its first argument, whatever that was."""
        args = tuple(tree_map(snapshot, list(arguments.values())))
        self._add(RecordedCall(func, args, {}, None, len(self._calls), True, (), args[:1]))

    def gives(self, tensor: torch.Tensor) -> bool:
        """Return True if all of a tensor was written, by what had values itself."""
        return self._written.has(tensor)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the meta device with its values, on the host. Raises NoValuesError if it has none."""
        (found,) = self._values_of([tensor.detach()])
        return found

    def _add(self, call: RecordedCall) -> None:
        self._calls.append(call)
        self._written.add(call)

    def _evaluated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator makes of values: what runs not at all without them."""
        given = [t for t in tree_leaves((args, kwargs)) if is_on_meta(t)]
        host = dict(zip(map(id, given), self._values_of([t.detach() for t in given]), strict=True))
        real_args, real_kwargs = tree_map(_to_host, tree_map(lambda x: host.get(id(x), x), (args, kwargs)))
        out = self._run(func, real_args, real_kwargs, len(self._calls))
        if any(is_on_meta(t) for t in RecordedCall.written_arguments(func, args, kwargs)):
            raise NoValuesError(f"needs values for {func}")
        to_host = not is_on_meta(out) and (func._schema.is_mutable or kwargs.get("device") is not None)
        return out if to_host else tree_map(self._constant, out)

    def _constant(self, value: Any) -> Any:
        """Return a tensor on the meta device that has the values of one on the host."""
        if not isinstance(value, torch.Tensor):
            return value
        out = torch.empty_like(value, device="meta")
        copy: Any = torch.ops.aten.copy_.default
        self._add(call_of(copy, ((out, value), {}), out, len(self._calls)))
        return out

    def _values_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not all(map(self.gives, tensors)):
            raise NoValuesError("asks for the values of a tensor that has none")
        wanted, calls = set(map(storage_of, tensors)), []
        for call in reversed(self._calls):
            if not wanted.isdisjoint(call.written):
                calls.append(call)
                wanted |= call.written | call.read
        real: dict[int, torch.UntypedStorage] = {}

        def on_host(value: Any) -> Any:
            if not is_on_meta(value):
                return _to_host(value)
            key = storage_of(value)
            if key not in real:
                size = value.untyped_storage().nbytes()
                real[key] = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
            out = torch.empty(0, dtype=value.dtype, device="cpu")
            return out.set_(real[key], value.storage_offset(), value.shape, value.stride())

        with torch.no_grad(), torch._C.DisableTorchFunction():
            for call in reversed(calls):
                args, kwargs = tree_map(on_host, (call.args, call.kwargs))
                out = self._run(call.func, args, kwargs, call.index if call.random else None)
                if call.out is None:
                    continue
                for was, now in zip(tree_leaves(call.out), tree_leaves(out), strict=True):
                    if is_on_meta(was) and storage_of(was) not in real:
                        on_host(was).copy_(now)
            return [on_host(t) for t in tensors]

    def _run(self, func: Any, args: Any, kwargs: Any, index: int | None) -> Any:
        """Call a function; one that draws random numbers has its place in the recording."""
        with torch.random.fork_rng(devices=[]):
            if index is not None:
                digest = hashlib.sha256(f"{self._seed} {index}".encode()).digest()
                torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return func(*args, **kwargs)


def _to_host(value: Any) -> Any:
    """Return what an argument is on the host: numbers of a generator would be others for everyone who asks."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "meta" else value
    return None if isinstance(value, torch.Generator) else value


class _Functions(TorchFunctionMode):
    """Sees calls of Python that torch does not dispatch, or that do nothing on the meta device.

    Args:
        recording: has them recorded.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        of_numbers = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.Tensor.new)
        self._seen: dict[Any, Callable[[Any, Any, Any], Any]] = {
            **dict.fromkeys(of_numbers, self._of_numbers),
            torch.Tensor.numpy: self._array,
            torch.Tensor.__array__: self._array,
            torch.Tensor.is_meta.__get__: self._is_meta,  # type: ignore[attr-defined]
            torch.Tensor.device.__get__: self._device,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self._seen.get(func)
        return func(*args, **(kwargs or {})) if seen is None else seen(func, args, kwargs or {})

    def _of_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write the numbers into the tensor that is made of them without any."""
        out = func(*args, **kwargs)
        given = [*args[isinstance(getattr(func, "__objclass__", None), type) :], *kwargs.values()]
        data = kwargs.get("data", kwargs.get("obj", given[0] if given else None))
        sizes = func is torch.Tensor.new and (len(given) != 1 or isinstance(data, (int, torch.Size)))
        if is_on_meta(out) and not is_on_meta(data) and not sizes:
            with torch.no_grad():
                out.detach().copy_(torch.as_tensor(data, dtype=out.dtype, device="cpu"))
        return out

    def _array(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        return func(tensor.detach().cpu() if is_on_meta(tensor) else tensor, *rest, **kwargs)

    def _is_meta(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Answer as if tensors had values, except to torch; a function of torch.nn.init that asks is recorded."""
        if not func(*args, **kwargs):
            return False
        frame = _asker()
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch.nn.init":
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._recording.record_function(
                FunctionType(code, frame.f_globals), {name: frame.f_locals[name] for name in names}
            )
        return module.partition(".")[0] == "torch"

    def _device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse `tensor.device.type != "meta"`: what then does nothing would leave the values of before."""
        out = func(*args, **kwargs)
        frame = _asker()
        if out.type == "meta" and "meta" in frame.f_code.co_consts and _reads_next(frame, "type"):
            raise NoValuesError(
                f"asks whether a tensor is on the meta device ({frame.f_code.co_filename}:{frame.f_lineno}), and may "
                "leave it as it was"
            )
        return out


def _asker() -> FrameType:
    """Return the frame whose code asked a tensor."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    assert frame is not None
    return frame


def _reads_next(frame: FrameType, attribute: str) -> bool:
    """Return True if the next instruction of a frame reads an attribute."""
    later = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "EXTENDED_ARG")
    following = next(later, None)
    return following is not None and following.opname == "LOAD_ATTR" and following.argval == attribute
