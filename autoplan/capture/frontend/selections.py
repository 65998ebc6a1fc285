"""Rows that a mask selects, where all that matters of them is a cross entropy, or the last one of each sample.

`x[mask]` has as many rows as the data say, and a program has sizes that follow from the batch and the lengths alone.
Two forms that occur in working models need no such size, and become ops on all rows:

- `cross_entropy(x[mask], y[mask])` is the cross entropy of all rows, where the labels outside the mask do not count. So
  models of speech train on the tokens that are not padding, and DeBERTa on the samples that have a label.
- `x[mask].view(samples, -1, width)[:, -1]` is the last selected row of each sample: in BART and T5 the end of a text.

All others are refused when the graph is translated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_NONZERO = (torch.nonzero, torch.Tensor.nonzero)
_VIEWS = frozenset(("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"))
_COPIES = frozenset(("aten.contiguous.default", "aten.clone.default", "aten.alias.default"))
_CASTS = frozenset(("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default"))
_NOT_REDUCED = 0  # the reduction 'none' of a loss
_IGNORED = -100  # the default of a cross entropy


class CaptureSelections(TorchFunctionMode):
    """Let a forward that asks whether `mask.nonzero()` of a vector found anything go on as if it had.

    DeBERTa asks so before its loss. A program in which the number of places is left is refused.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in _NONZERO and isinstance(out, torch.Tensor):
            count: Any = out.shape[0]
            if isinstance(count, torch.SymInt):
                torch._check(count > 0)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class _Selection:
    """Rows [n, *rest] of a tensor [*mask.shape, *rest], those where the mask is true.

    Attributes:
        read: the first op that reads the mask to select.
        casts: the dtypes that the rows are cast to, one after the other.
    """

    rows: fx.Node
    mask: fx.Node
    read: fx.Node
    casts: tuple[torch.dtype, ...]


def without_selections(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Rewrite the selections of a program that need no size.

    Returns:
        notes on what the program does not check, as the module does.
    """
    if not has_unknown_sizes(program):
        return ()
    nodes, notes, changed = list(program.graph.nodes), set[str](), False
    for node in nodes:
        if node.target == _aten.cross_entropy_loss.default:
            made = _whole_cross_entropy(node)
        elif node.target == _aten.select.int and _has_unknown_size(node.all_input_nodes[0]):
            made = _last_of_each_sample(node)
            if made is not None:
                notes.add(
                    "the last selected row of every sample counts (the last <eos>); the model refuses batches whose "
                    "samples have different numbers of them, the program only a sample without any"
                )
        else:
            continue
        if made is not None:
            node.replace_all_uses_with(made)
            program.graph.erase_node(node)
            changed = True
    if changed:
        for node in nodes:
            if str(node.target).startswith("aten._assert_") and any(map(_has_unknown_size, node.all_input_nodes)):
                program.graph.erase_node(node)
        program.graph.eliminate_dead_code()
    return tuple(sorted(notes))


def has_unknown_sizes(program: torch.export.ExportedProgram) -> bool:
    """Return True if a tensor of a program has a size that depends on the data."""
    return any(isinstance(n.meta.get("val"), torch.Tensor) and _has_unknown_size(n) for n in program.graph.nodes)


def _has_unknown_size(node: fx.Node) -> bool:
    """Return True for a tensor with a size, or a number, that depends on the data."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return any(bool(free_unbacked_symbols(size)) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _whole_cross_entropy(node: fx.Node) -> fx.Node | None:
    """Return the cross entropy of all rows; None if it is not one of selected rows and their labels."""
    first, second, *rest = _arguments(node)
    x, labels = _selection(first), _selection(second)
    more = dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), rest, strict=False))
    if x is None or labels is None or more.get("reduction") == _NOT_REDUCED:
        return None
    twice = _computed_twice(x.mask, labels.mask)
    if twice is None or _changes_since({x.read, labels.read, *twice}, node):
        return None
    mask, whole, numbers = x.mask.meta["val"], x.rows.meta["val"], labels.rows.meta["val"]
    if whole.dim() != mask.dim() + 1 or numbers.dim() != mask.dim() or numbers.dtype.is_floating_point:
        return None
    make = _Maker(node)
    logits, target = make.cast(x), make.cast(labels)
    outside = make(_aten.logical_not.default, x.mask)
    target = make(_aten.masked_fill.Scalar, target, outside, more.get("ignore_index", _IGNORED))
    logits = make(_aten.reshape.default, logits, [-1, whole.shape[-1]])
    return make(_aten.cross_entropy_loss.default, logits, make(_aten.reshape.default, target, [-1]), *rest)


def _last_of_each_sample(node: fx.Node) -> fx.Node | None:
    """Return the last row that is selected of every sample; None if that is not what the op takes.

    A sample without any is given a place that there is not, which the gather refuses.
    """
    given, dim, at = _arguments(node)
    while str(given.target) == "aten.slice.Tensor" and _keeps_sizes(given):
        given = given.args[0]
    if (dim, at) != (1, -1) or str(given.target) not in _VIEWS or given.meta["val"].dim() != 3:
        return None
    found = _selection(given.args[0])
    if found is None or found.mask.meta["val"].dim() != 2 or found.rows.meta["val"].dim() != 3:
        return None
    samples, _, width = found.rows.meta["val"].shape
    if tuple(map(str, node.meta["val"].shape)) != (str(samples), str(width)) or _changes_since({found.read}, node):
        return None
    make = _Maker(node)
    length = make(_aten.sym_size.int, found.mask, 1)
    numbers = make(_aten.add.Tensor, make(_aten.arange.default, length), 1)  # 0 is left for samples without any
    last = make(_aten.amax.default, make(_aten.mul.Tensor, make(_aten.to.dtype, found.mask, torch.int64), numbers), [1])
    none = make(_aten.to.dtype, make(_aten.eq.Scalar, last, 0), torch.int64)
    wrong = make(_aten.mul.Tensor, none, make(operator.add, length, 1))
    place = make(_aten.add.Tensor, make(_aten.sub.Tensor, last, 1), wrong)
    place = make(_aten.expand.default, make(_aten.view.default, place, [-1, 1, 1]), [-1, -1, width])
    return make(_aten.squeeze.dim, make(_aten.gather.default, make.cast(found), 1, place), 1)


class _Maker:
    """Makes ops before one of a graph, with its place in the model and the values that they have there."""

    def __init__(self, node: fx.Node) -> None:
        self._node, self._fake = node, node.meta["val"].fake_mode

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Return a new node that calls `target`."""
        with self._node.graph.inserting_before(self._node):
            made = self._node.graph.call_function(target, args)
        with self._fake:
            value = target(*pytree.tree_map_only(fx.Node, lambda x: x.meta["val"], args))
        made.meta = {**self._node.meta, "val": value}
        return made

    def cast(self, selection: _Selection) -> fx.Node:
        """Return the rows of a selection, selected or not, in its dtype."""
        made = selection.rows
        for dtype in selection.casts:
            if made.meta["val"].dtype != dtype:
                made = self(_aten.to.dtype, made, dtype)
        return made


def _changes_since(read: set[fx.Node], last: fx.Node) -> bool:
    """Return True if an op between the first of some nodes and a later one changes a tensor in place."""
    node = last
    while read:
        node = node.prev
        read = read - {node}
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return True
    return False


def _selection(value: Any) -> _Selection | None:
    """Return the selection that a tensor holds, through copies, casts, and views that leave its rows alone."""
    casts: list[torch.dtype] = []
    while isinstance(value, fx.Node) and value.op == "call_function":
        name, rows = str(value.target), (*_arguments(value), None)[0]
        if name in ("aten.index.Tensor", "aten.gather.default"):
            read = _index_by_mask(value) if name == "aten.index.Tensor" else _nonzero_of_gather(value)
            mask = None if read is None else _mask(read)
            return None if mask is None or read is None else _Selection(rows, mask, read, tuple(casts[::-1]))
        if name in _CASTS:
            casts.append(value.meta["val"].dtype)
        elif name not in _COPIES and not (name in _VIEWS and _keeps_sizes(value)):
            return None
        value = rows
    return None


def _mask(read: fx.Node) -> fx.Node | None:
    """Return the mask that an index reads, or a `nonzero()` of a vector."""
    mask: fx.Node = _arguments(read)[1][0] if str(read.target) == "aten.index.Tensor" else _arguments(read)[0]
    is_mask = isinstance(mask, fx.Node) and mask.meta["val"].dtype is torch.bool
    return mask if is_mask and (str(read.target) == "aten.index.Tensor" or mask.meta["val"].dim() == 1) else None


def _index_by_mask(index: fx.Node) -> fx.Node | None:
    """Return an index if it goes by one tensor along the first dims."""
    return None if any(x is not None for x in _arguments(index)[1][1:]) else index


def _nonzero_of_gather(gather: fx.Node) -> fx.Node | None:
    """Return the `nonzero()` whose places, as a column or a row that may be expanded, a gather of whole rows has."""
    rows, dim, places = _arguments(gather)[:3]
    if dim != 0 or rows.meta["val"].shape[1:] != gather.meta["val"].shape[1:]:
        return None
    while str(places.target) in {*_VIEWS, "aten.expand.default"}:
        places = places.args[0]
    return places if str(places.target) == "aten.nonzero.default" else None


def _computed_twice(one: Any, other: Any) -> list[fx.Node] | None:
    """Return the nodes that compute one value twice, none if there is one of it; None if the values may differ."""
    one, other = _uncopied(one), _uncopied(other)
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return [] if type(one) is type(other) and bool(one == other) else None
    if one is other:
        return []
    alike = one.op == "call_function" and one.target == other.target and one.kwargs == other.kwargs
    random = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    if not alike or random or len(one.args) != len(other.args):
        return None
    found = [one, other]
    for pair in zip(one.args, other.args, strict=True):
        below = _computed_twice(*pair)
        if below is None:
            return None
        found += below
    return found


def _uncopied(value: Any) -> Any:
    while isinstance(value, fx.Node) and str(value.target) in _COPIES | _CASTS:
        before = _arguments(value)[0]
        if before.meta["val"].dtype != value.meta["val"].dtype:
            break
        value = before
    return value


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _keeps_sizes(view: fx.Node) -> bool:
    before, after = _arguments(view)[0].meta["val"].shape, view.meta["val"].shape
    return tuple(map(str, before)) == tuple(map(str, after))
