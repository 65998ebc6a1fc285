"""Sequences of a fixed number of tokens that ranks share in equal parts, run by run, and where they are joined.

A model of images or videos attends over a fixed number of tokens: the patches of an image, often joined with the tokens
of a text. Such attention has no order: a permutation of its queries permutes the result, and one of its keys changes
nothing. So each rank may have a part of every sequence, and what joins two of them (`cat`) joins the parts: its runs
(`ModelGraph.parts`) are those of both. `split` and slices at the joints give the parts back. Runs belong to a factor,
and values that meet have the same factors, so parts of one form never meet parts of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoplan.ir.graph import Block, Dim, Node, Runs
from autoplan.ir.layout import AxisType
from autoplan.ir.symbols import Expr
from autoplan.ops.views import INT_MAX

Parts = Mapping[str, Runs]


def num_tokens(runs: Runs) -> int:
    """Return the number of tokens of all runs."""
    return sum(count * tokens for count, tokens in runs)


def in_short(runs: Sequence[tuple[int, int]]) -> Runs:
    """Return the runs with equal neighbours as one."""
    out: list[tuple[int, int]] = []
    for count, tokens in runs:
        if out and out[-1][1] == tokens:
            count += out.pop()[0]
        out.append((count, tokens))
    return tuple(out)


def runs_of(dim: Dim, factors: Mapping[str, Expr], parts: Parts) -> Runs | None:
    """Return the runs of a dim, or None if it has no factor that is shared, several, or factors of a batch."""
    cut = [i for i, name in enumerate(dim) if name in parts]
    others = [factors[name].value for name in dim if name not in parts]
    if len(cut) != 1 or None in others:
        return None
    sizes = [size for size in others if size is not None]
    before, behind = math.prod(sizes[: cut[0]]), math.prod(sizes[cut[0] :])
    inside = tuple((count, tokens * behind) for count, tokens in parts[dim[cut[0]]])
    if len(inside) == 1:
        return ((before * inside[0][0], inside[0][1]),)
    return in_short(inside * before)


def joint(node: Node, block: Block) -> tuple[Dim, list[Dim]] | None:
    """Return the joined dim of a `cat` or `split` of a block, and those of its pieces in order; None for other ops."""
    if node.op not in ("cat", "chunk"):
        return None
    ends = (node.outputs, node.tensor_inputs) if node.op == "cat" else (node.tensor_inputs, node.outputs)
    dims = [block.values[name].dims or () for names in ends for name in names]
    at = node.attrs["dim"] % len(dims[0])
    return dims[0][at], [each[at] for each in dims[1:]]


def sliced(node: Node, block: Block) -> tuple[Dim, Dim, Expr, Expr] | None:
    """Return the dim of a slice before and behind it, and where the slice starts and ends; None for other ops."""
    if node.op != "slice" or node.attrs["step"] != 1:
        return None
    before, behind = block.values[node.tensor_inputs[0]], block.values[node.outputs[0]]
    at = node.attrs["dim"] % len(before.shape)
    start, end = (x if isinstance(x, Expr) else Expr.of(x) for x in (node.attrs["start"], node.attrs["end"]))
    size = before.shape[at]
    end = size if end == Expr.of(INT_MAX) else end
    if before.dims is None or behind.dims is None:
        return None
    return before.dims[at], behind.dims[at], start, end


def _within(runs: Runs, start: int, end: int) -> Runs | None:
    """Return the runs between two tokens; None if one of them is not at a joint."""
    out, at = list[tuple[int, int]](), 0
    for count, tokens in runs:
        first, last = (min(max(0, place - at), count * tokens) for place in (start, end))
        if first % tokens or last % tokens:
            return None
        out += [((last - first) // tokens, tokens)] * (last > first)
        at += count * tokens
    return in_short(out)


def at_joints(
    node: Node, block: Block, inputs: Sequence[AxisType], factors: Mapping[str, Expr], parts: Parts, length: int
) -> bool:
    """Return True for a `cat`, `split` or slice along a shared dim that joins parts, or takes them apart at the joints.

    Args:
        inputs: types of the inputs on the axis of the ranks that share the sequences.
        length: tokens that the symbol `s` stands for.
    """
    found = joint(node, block)
    if found is not None:
        at = node.attrs["dim"] % len(block.values[node.outputs[0]].shape)
        if any(not kind.is_shard or kind.dim != at for kind in inputs):
            return False
        whole, pieces = found
        runs = [runs_of(dim, factors, parts) for dim in pieces]
        known = [run for run in runs if run is not None]
        return len(known) == len(runs) and in_short([r for run in known for r in run]) == runs_of(whole, factors, parts)
    part = sliced(node, block)
    if part is None or any(kind.dim != node.attrs["dim"] % len(block.values[node.outputs[0]].shape) for kind in inputs):
        return False
    before, behind, *places = part
    runs_before = runs_of(before, factors, parts)
    if runs_before is None:
        return False
    start, end = (int(place.evaluate({"s": length})) for place in places)
    start, end = (place + num_tokens(runs_before) if place < 0 else place for place in (start, end))
    return _within(runs_before, start, end) == runs_of(behind, factors, parts)
