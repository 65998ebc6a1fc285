"""What a program would do on a GPU, counted without one: waits of the host, kernels, and the bytes that they move.

    with DeviceCounter() as counter:                # "cpu" stands for the accelerator; or "meta", or "cuda" (fake)
        loss = program(batch)
        loss.backward()
    assert counter.syncs == [], counter.report("sync")
    counter.num_kernels, counter.read_bytes, counter.written_bytes

Counted are
- sync: what makes the host wait for the device: `.item()` and all that calls it, `.tolist()`, `.cpu()`, shapes that
  depend on data (`nonzero`, masks as indices, `unique`, `bincount`, `repeat_interleave`), and blocking copies from or
  to host memory (`torch.tensor(3, device=...)`, `x[[0, 2]]`). `data_dependent_shapes` are those among them.
- kernel: what launches work on the device: no views, no allocations. A fused operator (`torch.library`) is one.
- collective: of torch.distributed.

Bytes are those of the distinct elements of what an operator takes and returns; of operators that look up or scatter,
those of the elements touched. A `where` names the innermost line outside torch; of an operator that autograd's own
backward runs that is the line that called `backward`.

On the CPU nothing tells host tensors from tensors that stand for the device's. Host tensors are those given as `host`,
those made by a factory without `device=` or with the literal "cpu", those that `.cpu()` and `.to("cpu")` return, and
what is computed from host tensors alone. `.to(device)` of them with a `torch.device` is the copy to the device. On
`meta` and for fake "cuda" tensors the tensors say themselves where they are. A fake "cuda" tensor that requires a
gradient aborts torch's CPU build (it has no guard of CUDA devices): use "meta" for backwards.

Not seen: what a library waits for inside itself, and kernels beyond the first of an operator but for those of
`_SEVERAL` and of the foreach operators.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Kind = Literal["sync", "kernel", "collective"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. ``shape_depends``: its output's shape depends on data. Bytes are those of the kernel."""

    kind: Kind
    name: str
    where: str
    num_kernels: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    shape_depends: bool = False


# Operators that allocate, look at metadata or do what has been counted already.
_NO_KERNEL = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize set_ lift lift_fresh "
    "detach detach_ alias is_same_size record_stream _local_scalar_dense item is_pinned _pin_memory pin_memory "
    "sym_size sym_stride sym_numel sym_storage_offset size stride numel storage_offset is_contiguous is_strides_like "
    "_has_compatible_shallow_copy_type _version _assert_tensor_metadata requires_grad_ retain_grad is_complex "
    "_foobar _nested_get_values squeeze_ unsqueeze_ transpose_ t_ as_strided_ swapaxes_".split()
)
# Out of place these first copy what they then change.
_SEVERAL = {
    name: 2
    for name in "masked_fill scatter scatter_add index_put index_add index_copy index_fill select_scatter "
    "slice_scatter scatter_reduce cumsum embedding_dense_backward nll_loss_backward slice_backward "
    "select_backward".split()
}
# Of their first argument these read or change only as many elements as the argument at this place has, or the result
# (None): not the whole table.
_TOUCHED: dict[str, int | None] = {
    "gather": None,
    "index_select": None,
    "index": None,
    "embedding": None,
    "take": None,
    "nll_loss_forward": 1,
    "scatter_": 2,
    "scatter_add_": 2,
    "index_add_": 3,
    "index_copy_": 3,
    "index_put_": 2,
}
# What they write they do not read before.
_WRITE_ONLY = frozenset("fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_".split())
_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_TO_HOST = frozenset({torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__array__})
_LISTS = frozenset({torch.Tensor.tolist})
# multi_tensor_apply: tensors and blocks of 65,536 elements per launch, by the number of lists
_FOREACH_TENSORS, _FOREACH_BLOCKS, _FOREACH_CHUNK = (110, 64, 48, 36, 30), 320, 1 << 16


class DeviceCounter:
    """Counts while it is entered; see the module. May be entered again and goes on counting.

    Args:
        device: type of the device that stands for the accelerator: "cpu", "meta" or "cuda" (fake tensors).
        host: with "cpu", tensors that would be on the host (a batch before the step).
    """

    def __init__(self, device: Literal["cpu", "meta", "cuda"] = "cpu", host: Iterable[torch.Tensor] = ()) -> None:
        self.device, self.events = device, list[Event]()
        self._host = WeakIdKeyDictionary()
        for tensor in host:
            self._host[tensor] = True
        self._host_call = False  # the operators that now run work on host tensors alone
        self._stack: list[ExitStack] = []

    def __enter__(self) -> DeviceCounter:
        stack = ExitStack()
        for owner in (torch.cuda, torch.accelerator):
            stack.enter_context(patch.object(owner, "synchronize", self._synchronize))
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            stack.enter_context(patch.object(owner, "synchronize", self._synchronize))
        functions = _Functions(self)
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", functions.run_backward))
        stack.enter_context(_Dispatch(self))
        stack.enter_context(functions)
        self._stack.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().__exit__(*error)

    # -- results ----------------------------------------------------------------------------------------------------

    def of(self, kind: Kind) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    @property
    def syncs(self) -> list[Event]:
        """Where the host would wait."""
        return self.of("sync")

    @property
    def data_dependent_shapes(self) -> list[Event]:
        """The waits for the shape of a result."""
        return [event for event in self.syncs if event.shape_depends]

    @property
    def num_kernels(self) -> int:
        """Launches, collectives not among them."""
        return sum(event.num_kernels for event in self.events)

    @property
    def read_bytes(self) -> int:
        """What the kernels read."""
        return sum(event.read_bytes for event in self.of("kernel"))

    @property
    def written_bytes(self) -> int:
        """What the kernels write."""
        return sum(event.written_bytes for event in self.of("kernel"))

    @property
    def moved_bytes(self) -> int:
        """What the kernels read and write."""
        return self.read_bytes + self.written_bytes

    def report(self, kind: Kind = "sync") -> str:
        """The events of a kind: how often, which operator, which line, bytes."""
        lines = Counter[tuple[str, str]]()
        moved = Counter[tuple[str, str]]()
        for event in self.of(kind):
            lines[event.name, event.where] += event.num_kernels if kind == "kernel" else 1
            moved[event.name, event.where] += event.read_bytes + event.written_bytes
        rows = [f"{n:5d} {name:40s} {moved[name, at]:12d} B  {at}" for (name, at), n in lines.most_common()]
        return "\n".join([f"{sum(lines.values())} of kind {kind}", *rows])

    # -- seeing -----------------------------------------------------------------------------------------------------

    def _synchronize(self, *args: Any, **kwargs: Any) -> None:
        self._add("sync", "synchronize")

    def _add(self, kind: Kind, name: str, **more: Any) -> None:
        self.events.append(Event(kind, name, _where(), **more))

    def on_host(self, tensor: torch.Tensor) -> bool:
        """True if the tensor would be in host memory."""
        if tensor.device.type != self.device:
            return tensor.device.type == "cpu"
        return tensor in self._host

    def _mark(self, out: Any) -> Any:
        """``out`` with its tensors known to be on the host."""
        for tensor in _tensors(out):
            self._host[tensor] = True
        return out

    def function(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of torch's Python interface."""
        given = _tensors((args, kwargs))
        devices = [t for t in given if not self.on_host(t)]
        if func in _FROM_VALUES and not (func is not torch.Tensor.new_tensor and given):
            return self._from_values(func, args, kwargs)
        if func in _TO_HOST or func is torch.Tensor.to or func is torch.as_tensor or func is torch.asarray:
            return self._moved(func, args, kwargs)
        if func in _LISTS and devices and self.device == "cpu":  # elsewhere its operators tell
            self._add("sync", func.__name__)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and devices:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) or (isinstance(i, torch.Tensor) and i.dim() and self.on_host(i)) for i in index):
                self._add("sync", f"{func.__name__} with an index of the host")
        if (
            func is torch.Tensor.copy_
            and self.device == "cpu"
            and len({self.on_host(t) for t in given}) == 2
            and not _non_blocking(args[1:], kwargs)
        ):
            self._add("sync", "copy_ between host and device")
        made_here = not given and self.device == "cpu" and isinstance(kwargs.get("device", "cpu"), str)
        before, self._host_call = self._host_call, self._host_call or (not devices and (bool(given) or made_here))
        try:
            out = func(*args, **kwargs)
        finally:
            host, self._host_call = self._host_call, before
        return self._mark(out) if host and self.device == "cpu" else out

    def _from_values(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """``torch.tensor(values, device=...)``: the host's values are copied to the device."""
        where = args[0].device if func is torch.Tensor.new_tensor else kwargs.get("device")
        host = self.on_host(args[0]) if func is torch.Tensor.new_tensor else where is None or isinstance(where, str)
        if self.device != "cpu":
            host = where is None or torch.device(where).type == "cpu"
        if not host:
            self._add("sync", f"{func.__name__} of values of the host")
        before, self._host_call = self._host_call, True
        try:
            out = func(*args, **kwargs)
        finally:
            self._host_call = before
        return self._mark(out) if host and self.device == "cpu" else out

    def _moved(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """``.to(...)``, ``.cpu()``: on a CPU that stands for the device nothing is copied, here it is said."""
        target = _target(args[1:], kwargs) if func not in _TO_HOST else "cpu"
        if self.device != "cpu" or target is None:
            before, self._host_call = self._host_call, self._host_call or self.on_host(args[0])
            try:
                out = func(*args, **kwargs)
            finally:
                self._host_call = before
            return self._mark(out) if self.device == "cpu" and self.on_host(args[0]) else out
        was = self.on_host(args[0])
        now = self.on_host(target) if isinstance(target, torch.Tensor) else isinstance(target, str)
        if was != now and not _non_blocking(args[1:], kwargs):
            self._add("sync", f"{func.__name__} {'host' if now else 'device'}")
        out = func(*args, **kwargs)
        if was == now or not isinstance(out, torch.Tensor):
            return self._mark(out) if now else out
        out = out.view_as(out) if out is args[0] else out  # another tensor than the one on the other side
        if now:
            self._host[out] = True
        return out

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of an operator."""
        name = func._schema.name.split("::")[-1]
        space = func.namespace
        if self._host_call and self.device == "cpu":
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if self.device != "cpu" and given and all(t.device.type == "cpu" for t in given) and name != "_to_copy":
            return func(*args, **kwargs)
        self._note_sync(func, name, args, kwargs, given)
        if space in ("c10d", "_c10d_functional", "c10d_functional"):
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):
                self._add("collective", name)
            if name.startswith(("barrier", "monitored_barrier")):
                self._add("sync", name)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        made = _tensors(out)
        if not made and not func._schema.is_mutable:
            return out
        if func.is_view or name in _NO_KERNEL or space == "prim":
            return out
        if self.device != "cpu" and made and all(t.device.type == "cpu" for t in made):
            return out
        read, written = _bytes(func, name, args, kwargs, made)
        self._add(
            "kernel",
            f"{space}.{name}",
            num_kernels=_launches(name, args),
            read_bytes=read,
            written_bytes=written,
        )
        return out

    def _note_sync(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> None:
        shaped = torch.Tag.dynamic_output_shape in func.tags
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            shaped = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            if shaped and name == "index_put_":  # of one value on the host: masked_fill
                shaped = not (args[2].numel() == 1 and (self.on_host(args[2]) or args[2].dim() == 0))
        elif name == "repeat_interleave":
            shaped = kwargs.get("output_size") is None
        elif name == "_to_copy":
            wanted = torch.device(kwargs.get("device") or args[0].device).type
            if (wanted == "cpu") != (args[0].device.type == "cpu") and not kwargs.get("non_blocking"):
                self._add("sync", f"_to_copy {args[0].device.type} to {wanted}")
            return
        elif name == "copy_" and self.device != "cpu":
            kinds = {t.device.type == "cpu" for t in given[:2]}
            if len(kinds) == 2 and given[1].dim() and not (len(args) > 2 and args[2]):
                self._add("sync", "copy_ between host and device")
            return
        if shaped or torch.Tag.data_dependent_output in func.tags:
            self._add("sync", name, shape_depends=shaped)


class _Dispatch(TorchDispatchMode):
    def __init__(self, counter: DeviceCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._counter.operator(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Torch takes a mode off while its handler runs: backwards written in Python are seen by putting it back."""

    def __init__(self, counter: DeviceCounter) -> None:
        super().__init__()
        self._counter = counter
        self._run_backward = torch.autograd._engine_run_backward
        self._handling = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self._handling = self._handling, True
        try:
            return self._counter.function(func, args, kwargs or {})
        finally:
            self._handling = before

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the one door to autograd's engine."""
        if not self._handling:
            return self._run_backward(*args, **kwargs)
        self._handling = False
        try:
            with self:
                return self._run_backward(*args, **kwargs)
        finally:
            self._handling = True


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | torch.device | str | None:
    """Where ``.to(*args, **kwargs)`` goes; None if it names no device."""
    for value in (*args[:1], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.Tensor | torch.device | str):
            return value
    return None


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    flags = [value for value in args if isinstance(value, bool)]
    return bool(kwargs.get("non_blocking") or flags[:1] == [True])


def _elements(tensor: torch.Tensor) -> int:
    """Distinct elements: expanded dims count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or n == 0)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_elements(t) * t.element_size() for t in tensors)


def _bytes(func: Any, name: str, args: Any, kwargs: dict[str, Any], made: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes that an operator reads and writes."""
    changed: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors(value)
            if not argument.kwarg_only and name not in _WRITE_ONLY:
                read += _tensors(value)
        else:
            read += _tensors(value)
    fresh = [t for t in made if not any(t is c for c in changed)]
    read_bytes, written_bytes = _size({id(t): t for t in read}.values()), _size(changed) + _size(fresh)
    if name in _TOUCHED and args:
        place = _TOUCHED[name]
        by = made[0] if place is None else args[place]
        touched = (by.numel() if isinstance(by, torch.Tensor) else 0) * args[0].element_size()
        whole = _size([args[0]])
        read_bytes += min(touched, whole) - whole
        written_bytes += min(touched, whole) - whole if changed else 0
    return read_bytes, written_bytes


def _launches(name: str, args: Any) -> int:
    if not name.startswith(("_foreach", "_amp_foreach")):
        return _SEVERAL.get(name, 1)
    lists = [
        value for value in args if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor)
    ]
    blocks = sum(-(-t.numel() // _FOREACH_CHUNK) for t in lists[0]) if lists else 1
    tensors = _FOREACH_TENSORS[min(len(lists), len(_FOREACH_TENSORS)) - 1]
    return max(-(-len(lists[0]) // tensors) if lists else 1, -(-blocks // _FOREACH_BLOCKS), 1)


_TORCH = str(Path(torch.__file__).parent)
_GLUE = ("_python_dispatch.py", "overrides.py", "_ops.py", "_compile.py", "eval_frame.py", "function.py", "graph.py")
_HERE = str(Path(__file__))


def _where() -> str:
    """file:line of the innermost frame outside torch; and before it the innermost one inside, if there is one."""
    frame, inside = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH) and not file.endswith(_GLUE):
            inside = inside or f" (in torch{file[len(_TORCH) :]}:{frame.f_lineno})"
        elif file not in (_HERE, __file__) and not file.startswith((_TORCH, "<")) and "unittest" not in file:
            return f"{file}:{frame.f_lineno}{inside}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"?{inside}"
