"""In-place ops as what they compute, where nobody can see the difference.

Two forms occur in models that work: an op on a tensor the model has just made (`weights /= weights.sum()`), which is
the same as the op out of place; and a tensor that is allocated and filled slice by slice, which is a `cat`. Anything
else would need to know who else holds the memory, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from autoplan.cost_models.errors import CaptureError

ALLOCATIONS = frozenset({"aten.new_empty.default", "aten.empty.memory_format", "aten.empty_like.default"})
_MARKERS = ("autoplan.block_begin", "autoplan.block_end", "autoplan.block_repeat")


@dataclass(eq=False)
class Assembly:
    """A tensor that is being filled slice by slice along one dim: (start, stop) -> value."""

    node: fx.Node
    dim: int | None = None
    parts: dict[tuple[int, int], str] = field(default_factory=dict)
    name: str = ""  # of the finished value

    @property
    def complete(self) -> bool:
        """True once every element is written, so that a slice of it is a reading one."""
        return bool(self.name) or self.pieces() is not None

    def pieces(self) -> list[str] | None:
        """The values along the dim, in order; None while there is a gap or an overlap."""
        at, out = 0, []
        for (start, stop), value in sorted(self.parts.items()):
            if start != at:
                return None
            at = stop
            out.append(value)
        return out if self.dim is not None and at == self.node.meta["val"].shape[self.dim] else None


@dataclass(frozen=True)
class Window:
    """A slice of an assembly."""

    of: Assembly
    dim: int
    start: int
    stop: int


def window(source: Assembly | Window, node: fx.Node, where: str) -> Assembly | Window:
    """What a slice of an assembly is. CaptureError for slices that are not whole and along one dim."""
    given: tuple[Any, ...] = node.args[1:]
    place, start, stop, step = given + (0, 0, None, 1)[len(given) :]
    dim = int(place) % source_rank(source)
    size = source_size(source, dim)
    start, stop = start or 0, size if stop is None or (isinstance(stop, int) and stop >= 2**62) else stop
    if (start, step) == (0, 1) and (stop is size or stop == size):
        return source
    if not all(isinstance(x, int) and x >= 0 for x in (start, stop)) or step != 1 or isinstance(source, Window):
        raise CaptureError(f"{where}: a tensor filled slice by slice must be cut along one dim at fixed places")
    return Window(source, dim, int(start), min(int(stop), int(size)))


def source_rank(source: Assembly | Window) -> int:
    """Number of dims."""
    return len((source if isinstance(source, Assembly) else source.of).node.meta["val"].shape)


def source_size(source: Assembly | Window, dim: int) -> Any:
    """Size of a dim."""
    if isinstance(source, Window) and source.dim == dim:
        return source.stop - source.start
    return (source if isinstance(source, Assembly) else source.of).node.meta["val"].shape[dim]


def fill(place: Window, value: str, where: str) -> None:
    """`slice.copy_(value)`."""
    whole = place.of
    if whole.name or whole.dim not in (None, place.dim):
        raise CaptureError(f"{where}: a tensor filled slice by slice must be complete, along one dim, before use")
    whole.dim = place.dim
    whole.parts[place.start, place.stop] = value


def _is_view(node: fx.Node) -> bool:
    """True if the result may share memory with an input."""
    if getattr(node.target, "__name__", "") == "getitem":
        return _is_view(cast(fx.Node, node.args[0]))
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def out_of_place(target: str, node: fx.Node) -> str | None:
    """The op without side effect that an in-place op equals here, or None if somebody could see the difference."""
    name, dot, overload = target.removeprefix("aten.").partition(".")
    changed = node.args[0] if node.args else None
    if not name.endswith("_") or not isinstance(changed, fx.Node) or changed.op != "call_function":
        return None
    made = changed
    while getattr(made.target, "__name__", "") == "getitem":
        made = cast(fx.Node, made.args[0])
    if str(made.target).startswith(_MARKERS) or _is_view(changed):
        return None
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for user in changed.users:
        # the tracer lets later code use the in-place op's result: a later use of the old one means a second holder
        if user is not node and (order[user] > order[node] or _is_view(user)):
            return None
    return f"aten.{name[:-1]}{dot}{overload}"
