"""Turn in-place ops into ops that make new tensors, where nobody can see the difference.

Two forms occur in working models. An op on a tensor that the model has just made (`weights /= weights.sum()`) is the
same op out of place. A tensor that is allocated and filled slice by slice is a `cat`. Anything else would require to
know who else holds the memory, and is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.aliases import Aliases, is_element, is_mark
from autoplan.errors import CaptureError
from autoplan.ops.arguments import IrOp

ALLOCATIONS = frozenset(
    {"aten.new_empty.default", "aten.empty.memory_format", "aten.empty_like.default", "aten.new_zeros.default"}
)
FILLED = {"aten.new_zeros.default": 0}  # the value of elements that are never written, for allocations that have one
_MOST_WRITES = 256  # of a program that is made functional
_DATA = cast(Any, torch.Tensor.data).__get__


@dataclass(eq=False)
class Assembly:
    """A tensor that is being filled slice by slice along one dim: (start, stop as text) -> (stop, value).

    With a `step` a slice is every `step`-th place to the end of the dim, from its start on. `data`: True if slices
    may be of its data, into which no gradient is written.
    """

    node: fx.Node
    dim: int | None = None
    step: int = 1
    data: bool = False
    parts: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    name: str = ""  # the finished value

    @property
    def complete(self) -> bool:
        """True once every element is written, so that a slice of it reads."""
        return bool(self.name) or self.pieces() is not None

    def pieces(self) -> list[str] | None:
        """Return the values along the dim, in order; None while there is a gap or an overlap."""
        at: Any = 0
        out = []
        if self.step > 1:
            values = {start: value for (start, _), (_, value) in self.parts.items()}
            return [values[i] for i in range(self.step)] if values.keys() == set(range(self.step)) else None
        for (start, _), (stop, value) in sorted(self.parts.items(), key=lambda part: part[0]):
            if not _same(start, at):
                return None
            at = stop
            out.append(value)
        return out if self.dim is not None and _same(at, self.node.meta["val"].shape[self.dim]) else None


@dataclass(frozen=True)
class Window:
    """A slice of an assembly along `dim`. `stop`: a number or the symbolic size; `one`: a single index, without the
    dim; `step`: with another than 1 the slice goes to the end, and every other start takes as many places."""

    of: Assembly
    dim: int
    start: int
    stop: Any
    one: bool = False
    step: int = 1


@dataclass(frozen=True)
class Constant:
    """A tensor of one number that the model makes in its forward."""

    value: bool | int | float
    dtype: str


@dataclass(eq=False)
class ConstantTensor:
    """A small tensor that the model makes in its forward. `meta`: a fake one; `names`: layer -> its value there."""

    values: tuple[bool | int | float, ...]
    meta: Any
    names: dict[str, str] = field(default_factory=dict)


class CaptureData(TorchFunctionMode):
    """Read `x.data` as `x.detach()`, which a trace sees."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0].detach() if function == _DATA else function(*args, **(kwargs or {}))


@dataclass(eq=False)
class Painted:
    """A tensor of fixed size, or a view of one, into whose parts the model writes numbers: what it holds so far.

    `names`: (layer, version of the memory) -> its value there.
    """

    values: torch.Tensor
    names: dict[tuple[str, int], str] = field(default_factory=dict)

    def part(self, node: fx.Node) -> Painted:
        """Return the part that a slice or an index takes."""
        op = cast(torch._ops.OpOverload, node.target)
        return Painted(op(self.values, *node.args[1:]))


def painted(node: fx.Node, most: int) -> Painted | None:
    """Return an allocation as a painted tensor if numbers are written into parts cut along more than one dim.

    Parts along one dim are an `Assembly`, which may also be filled with tensors, of any size.
    """
    shape, value = node.meta["val"].shape, FILLED.get(str(node.target))
    fixed = all(isinstance(size, int) for size in shape)
    if value is None or not fixed or node.meta["val"].numel() > most or _cuts_before_fill(node) < 2:
        return None
    return Painted(torch.full(tuple(shape), value, dtype=node.meta["val"].dtype))


def cuts_at_fixed_places(node: fx.Node) -> bool:
    """Return True for a slice or an index whose places are numbers."""
    cuts = str(node.target) in ("aten.slice.Tensor", "aten.select.int")
    return cuts and all(isinstance(x, int) for x in node.args[1:])


def _cuts_before_fill(node: fx.Node) -> int:
    """Return the most slices and indices, at fixed places, between a tensor and a part that is filled with a number."""
    most = 0
    for user in node.users:
        target = str(user.target)
        if target.startswith("aten.fill_."):
            continue
        if cuts_at_fixed_places(user):
            filled = any(str(u.target).startswith("aten.fill_.") for u in user.users)
            deeper = _cuts_before_fill(user)
            most = max(most, 1 + deeper if deeper else int(filled))
    return most


def can_be_functional(program: torch.export.ExportedProgram) -> bool:
    """Return True if ops of the graph change tensors, and none of them one that enters or leaves a layer.

    The marks of layers hand on copies, so that a change behind one would not be seen before it. Nor may a tensor be
    changed past autograd, through `detach` or under no_grad, but for buffers: it keeps the gradient that it had before,
    and a functional program would cut it off. Nor may there be very many of them, each of which becomes several ops (a
    mask that is written token by token).
    """
    found = _mutable(program)
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    writers = [node for graph in graphs for node in graph.nodes if node.target in found]
    changed, aliases = [x for node in writers for x in _changed(node)], Aliases()
    return 0 < len(writers) <= _MOST_WRITES and not any(
        _of_a_mark(x, aliases) or _past_autograd(x, program, aliases) for x in changed
    )


def _changed(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes into: mostly the first, that of the name `out` in others."""
    arguments = cast(torch._ops.OpOverload, node.target)._schema.arguments
    given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in written if isinstance(x, fx.Node)]


def _past_autograd(value: fx.Node, program: torch.export.ExportedProgram, aliases: Aliases) -> bool:
    """Return True for real numbers in the memory of others behind a detach, or from outside a region (of no_grad).

    Buffers are none of these others.
    """
    given = _given_to_regions(program)

    def of_buffers(node: fx.Node) -> bool:
        return all(n.name in program.graph_signature.inputs_to_buffers for n in _roots(node, program, aliases))

    past = (n for n in aliases.behind(value) if str(n.target) == "aten.detach.default" or n in given)
    return any(n.meta["val"].dtype.is_floating_point and not of_buffers(n) for n in past)


def _roots(node: fx.Node, program: torch.export.ExportedProgram, aliases: Aliases) -> set[fx.Node]:
    """Return the nodes that made the memory of a value, or the inputs of the program that it is, through regions."""
    given, writes, found, left = _given_to_regions(program), _mutable(program), set[fx.Node](), [node]
    while left:
        n = left.pop()
        inside = _region_of(cast(fx.Node, n.args[0]), program) if is_element(n) else None
        if n in given:
            left.append(given[n])
        elif inside is not None:
            left.append(next(x for x in inside.nodes if x.op == "output").args[0][cast(int, n.args[1])])
        elif n.target in writes:
            left += _changed(n)
        elif near := aliases.memory_of(n):
            left += near
        else:
            found.add(n)
    return found


def _given_to_regions(program: torch.export.ExportedProgram) -> dict[fx.Node, fx.Node]:
    """Return what every input of a region without gradients is outside of it."""
    out: dict[fx.Node, fx.Node] = {}
    for region in program.graph.nodes:
        inside = _region_of(region, program)
        if inside is not None:
            inputs = [n for n in inside.nodes if n.op == "placeholder"]
            out |= {n: x for n, x in zip(inputs, region.args[2:], strict=True) if isinstance(x, fx.Node)}
    return out


def _of_a_mark(value: fx.Node, aliases: Aliases) -> bool:
    """Return True for a tensor that may be in the memory of one that enters or leaves a layer."""
    elements = (n for n in aliases.behind(value) if is_element(n))
    return any(is_mark(cast(fx.Node, element.args[0])) for element in elements)


def _mutable(program: torch.export.ExportedProgram) -> set[torch._ops.OpOverload]:
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    return {t for t in targets if isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable}


def changed_in_place(name: str) -> str:
    """Return why a change of a buffer is refused in a program whose in-place ops cannot be written otherwise."""
    return (
        f"buffer {name!r} is changed in the forward, which cannot be written as a new value of it: besides it, the "
        "forward changes a tensor in place that it was given, or that autograd keeps, or very many; write x = x.add(y) "
        "for x.add_(y) there, call eval() on that module, or leave the change out"
    )


def refuse_shared(program: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Raise CaptureError for a buffer of several names that the program changes in place: which PyTorch cannot mend."""
    held, aliases = program.graph_signature.inputs_to_buffers, Aliases()
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    several = {name: others for others in names.values() if len(others) > 1 for name in others}
    for graph in {program.graph, *(n.graph for n in _given_to_regions(program))}:
        for node in (n for n in graph.nodes if n.target in _mutable(program)):
            for root in {r for x in _changed(node) for r in _roots(x, program, aliases)}:
                name = held.get(root.name, "").removeprefix("model.")
                if root.graph is program.graph and name in several:
                    mine = several[name]
                    raise CaptureError(
                        f"buffer {mine[0]!r} is changed in the forward and is that of {len(mine)} places "
                        f"({', '.join(mine)}); give each place a module of its own"
                    )


def new_values(program: torch.export.ExportedProgram) -> dict[str, fx.Node]:
    """Return the buffers that a program where every op makes a new tensor updates, with their new values."""
    (given,) = next(n for n in program.graph.nodes if n.op == "output").args
    specs = program.graph_signature.output_specs
    found = zip(specs, cast(Sequence[Any], given), strict=True)
    return {str(spec.target): node for spec, node in found if spec.kind is OutputKind.BUFFER_MUTATION}


def needed_unread(program: torch.export.ExportedProgram) -> set[fx.Node]:
    """Return nodes that a program needs although nothing may read what they return.

    They are regions that write into what they are given, and the marks of layers in which buffers are updated.
    """
    writing = _writing_regions(program)
    impure = {n for n in program.graph.nodes if n.op == "call_function" and n.is_impure() and not is_mark(n)}
    updates = impure | writing | set(new_values(program).values())
    found, inside = set[str](), list[str]()
    for node in program.graph.nodes:
        if is_mark(node, "begin"):
            inside.append(str(node.args[-1]))
        elif is_mark(node, "end"):
            inside.pop()
        elif node in updates:
            found.update(inside)
    return writing | {n for n in program.graph.nodes if is_mark(n) and n.args[-1] in found}


def _writing_regions(program: torch.export.ExportedProgram) -> set[fx.Node]:
    """Return the regions without gradients that write into what they are given.

    Where nothing reads what such a region returns, it is dead code to a graph.
    """
    given, writes, aliases, found = _given_to_regions(program), _mutable(program), Aliases(), set[fx.Graph]()
    for inside in {n.graph for n in given}:
        changed = (x for node in inside.nodes if node.target in writes for x in _changed(node))
        if any(n in given for x in changed for n in aliases.behind(x)):
            found.add(inside)
    return {n for n in program.graph.nodes if _region_of(n, program) in found}


def _region_of(node: fx.Node, program: torch.export.ExportedProgram) -> fx.Graph | None:
    """Return the graph of a region without gradients, if a node is one."""
    wrapped = node.target is torch.ops.higher_order.wrap_with_set_grad_enabled
    if not wrapped or not isinstance(node.args[1], fx.Node):
        return None
    return cast(fx.GraphModule, program.graph_module.get_submodule(str(node.args[1].target))).graph


def without_mutation(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the same program where every op makes a new tensor: PyTorch knows who else sees the memory.

    A slice that is written becomes an op on the whole tensor, so `Assembly` comes first, which makes fewer of them.

    Raises:
        CaptureError: says at which op PyTorch fails (std_mean of dims with `keepdim`, for one).
    """
    for graph in [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]:
        _detach_regions(graph)
        _drop_out_of_place(graph)
    # composite ops are kept whole, so those that write are to be decomposed here
    composite = {op: op.decompose for op in _mutable(program) if op._can_decompose()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found: torch.export.ExportedProgram = program.run_decompositions(composite)
        except Exception as exc:  # PyTorch raises errors of any type
            why = " ".join(str(exc).split("Original traceback")[0].split())
            raise CaptureError(
                f"PyTorch cannot write the in-place operations of the model as ones that make new tensors ({why}): "
                "write x = x.add(y) for x.add_(y)"
            ) from exc
    return found


def _detach_regions(graph: fx.Graph) -> None:
    """Detach what regions without gradients compute: a program where every op makes a new tensor has no regions."""
    for region in list(graph.nodes):
        if region.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or region.args[0]:
            continue
        inside = cast(fx.GraphModule, region.args[1].graph.owning_module.get_submodule(str(region.args[1].target)))
        given = next(n for n in inside.graph.nodes if n.op == "output").args[0]
        for element in [user for user in region.users if is_element(user)]:
            made, value = given[element.args[1]], element.meta.get("val")
            if made.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue  # a value that the region passes through keeps its gradient
            with graph.inserting_after(element):
                cut = graph.call_function(torch.ops.aten.detach.default, (element,))
            cut.meta = dict(element.meta)
            element.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def _drop_out_of_place(graph: fx.Graph) -> None:
    """Write dropout in place as one that makes a tensor, and a copy: else PyTorch takes it apart, down to its draw."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.dropout_.default:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.aten.dropout.default, node.args)
            copied = graph.call_function(torch.ops.aten.copy_.default, (node.args[0], made))
        made.meta, copied.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)


def _same(a: Any, b: Any) -> bool:
    """Return True for equal numbers or the same symbolic size; sizes that are not known to be equal are different."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or (not isinstance(a, int) and not isinstance(b, int) and bool(a.node.expr == b.node.expr))


def window(source: Assembly | Window, node: fx.Node, where: str) -> Assembly | Window:
    """Resolve a slice of an assembly. Raises CaptureError unless it is a whole slice along one dim at fixed places."""
    given: tuple[Any, ...] = node.args[1:]
    place, start, stop, step = given + (0, 0, None, 1)[len(given) :]
    dim = int(place) % source_rank(source)
    size = source_size(source, dim)
    start, stop = start or 0, size if stop is None or (isinstance(stop, int) and stop >= 2**62) else stop
    if (start, step) == (0, 1) and _same(stop, size):
        return source
    to_end = _same(stop, size) or (isinstance(stop, int) and isinstance(size, int) and stop >= size)
    fixed = isinstance(start, int) and start >= 0 and (to_end or (isinstance(stop, int) and stop >= 0))
    if not fixed or isinstance(source, Window) or not (step == 1 or (to_end and _in_turn(size, start, step))):
        raise CaptureError(f"{where}: a tensor filled slice by slice must be cut along one dim at fixed places")
    return Window(source, dim, int(start), size if to_end else int(stop), step=step)


def _in_turn(size: Any, start: int, step: int) -> bool:
    """Return True if every start below the step takes as many places."""
    return isinstance(size, int) and start < step and size % step == 0


def place(source: Assembly | Window, node: fx.Node, where: str) -> Window:
    """Resolve one fixed index along a dim of an assembly. Raises CaptureError if the index is not a constant."""
    dim, index = cast(tuple[int, int], node.args[1:3])
    if isinstance(source, Window) or not isinstance(index, int) or index < 0:
        raise CaptureError(f"{where}: a tensor filled slice by slice must be cut along one dim at fixed places")
    return Window(source, dim % source_rank(source), index, index + 1, one=True)


def source_rank(source: Assembly | Window) -> int:
    """Return the number of dims."""
    return len((source if isinstance(source, Assembly) else source.of).node.meta["val"].shape)


def source_size(source: Assembly | Window, dim: int) -> Any:
    """Return the size of a dim."""
    if isinstance(source, Window) and source.dim == dim:
        return (source.stop - source.start + source.step - 1) // source.step
    return (source if isinstance(source, Assembly) else source.of).node.meta["val"].shape[dim]


def record_fill(place: Window, value: str, where: str) -> None:
    """Record `slice.copy_(value)`."""
    whole = place.of
    as_before = not whole.parts or (whole.dim, whole.step) == (place.dim, place.step)
    if whole.name or not as_before:
        raise CaptureError(
            f"{where}: a tensor filled slice by slice must be filled completely, along one dim, before it is used"
        )
    whole.dim, whole.step = place.dim, place.step
    whole.parts[place.start, str(place.stop)] = (place.stop, value)


def _fill_gaps(whole: Assembly, fill: Callable[[torch.Tensor], str]) -> None:
    """Fill the places between written slices, and behind them, where they are numbers."""
    meta, dim, at = whole.node.meta["val"], cast(int, whole.dim), 0
    starts = sorted((start, stop) for (start, _), (stop, _) in whole.parts.items() if isinstance(stop, int))
    size = meta.shape[dim]
    if len(starts) < len(whole.parts) or not isinstance(size, int):
        return
    for start, stop in [*starts, (size, size)]:
        if start > at:
            whole.parts[at, str(start)] = (start, fill(meta.narrow(dim, at, start - at)))
        at = max(at, stop)


def finish(found: Assembly | Window, like: torch.Tensor, where: str, emit: Callable[[IrOp, torch.Tensor], str]) -> str:
    """Return the value of a tensor that is used: of one that is new, what it was made of, else its parts joined.

    A slice has what was written into it alone, or what the tensor was made of if nothing was.

    Args:
        like: a fake tensor like it.
        where: the place of the use.
        emit: makes an op whose result is like a fake tensor, and returns its name.
    """
    if isinstance(found, Window):
        return _read(found, like, where, emit)
    found.name = found.name or _joined(found, where, emit)
    return found.name


def _read(found: Window, like: torch.Tensor, where: str, emit: Callable[[IrOp, torch.Tensor], str]) -> str:
    whole, filler = found.of, FILLED.get(str(found.of.node.target))
    if not whole.parts and not whole.name and filler is not None:
        return emit(IrOp("full", (), {"scalar": filler}), like)
    part = whole.parts.get((found.start, str(found.stop)))
    if part is not None and (whole.dim, whole.step, False) == (found.dim, found.step, found.one):
        return part[1]
    raise CaptureError(
        f"{where}: a slice of a tensor that is filled slice by slice is used before the rest is written; use what is "
        "written into it, or fill a list and join it with torch.stack or torch.cat"
    )


def _joined(whole: Assembly, where: str, emit: Callable[[IrOp, torch.Tensor], str]) -> str:
    meta, filler = whole.node.meta["val"], FILLED.get(str(whole.node.target))
    if not whole.parts and filler is not None:
        return emit(IrOp("full", (), {"scalar": filler}), meta)
    if filler is not None and whole.step == 1:
        _fill_gaps(whole, lambda meta: emit(IrOp("full", (), {"scalar": filler}), meta))
    pieces = whole.pieces()
    if pieces is None:
        raise CaptureError(f"{where}: a tensor is used before all of it is written")
    dim, step = cast(int, whole.dim), whole.step
    if step == 1:
        return emit(IrOp("cat", tuple(pieces), {"dim": dim}), meta)
    side_by_side = meta.unflatten(dim, (-1, step))
    one = side_by_side.narrow(dim + 1, 0, 1)
    parts = tuple(emit(IrOp("unsqueeze", (piece,), {"dim": dim + 1}), one) for piece in pieces)
    joined = emit(IrOp("cat", parts, {"dim": dim + 1}), side_by_side)
    return emit(IrOp("reshape", (joined,), {}), meta)


def out_of_place(target: str, node: fx.Node, aliases: Aliases) -> str | None:
    """Return the op without side effect that an in-place op equals here; None if anybody could see the difference.

    Later code uses the result of the in-place op. So nobody sees the difference if nothing that may be in the same
    memory is used later, and the memory is neither the model's nor an input. If a layer was given it, that holds for
    what every layer that repeats it is given, too.
    """
    name = target.removeprefix("aten.").partition(".")[0]
    changed = node.args[0] if node.args else None
    in_place = name.endswith("_") and not name.endswith("__")
    if not in_place or not isinstance(changed, fx.Node):
        return None
    if not aliases.is_used_up(changed, node):
        return None
    return same_arguments(name[:-1], cast(torch._ops.OpOverload, node.target))


def same_arguments(name: str, op: torch._ops.OpOverload) -> str | None:
    """Return the overload of `aten.name` that takes what `op` takes; None if there is none.

    Mostly it has the same name, but that of pow_.Scalar is pow.Tensor_Scalar: in pow.Scalar the base is a number.
    """
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    named = op._overloadname
    for given in (name, f"{name}_functional"):  # normal_ is normal_functional: the arguments of normal are others
        packet = getattr(torch.ops.aten, given, None)
        for overload in sorted(packet.overloads() if packet else (), key=lambda overload: overload != named):
            if [(a.name, str(a.type)) for a in getattr(packet, overload)._schema.arguments] == wanted:
                return f"aten.{given}.{overload}"
    return None


def promoted(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of the op without side effect if it is another: an in-place op casts to that of its argument."""
    values = [n.meta["val"] for n in node.all_input_nodes]
    changed, *others = [v for v in values if isinstance(v, torch.Tensor)]
    found = [torch.result_type(changed, other) for other in others]
    return next((dtype for dtype in found if dtype != changed.dtype), None)
