"""Give models that attend over a fixed number of tokens a sequence that ranks can share: the symbol `s`.

A transformer of images or videos has no length that a batch could change: its tokens are the patches of an image, whose
size the example has. Where no input has a length, this pass looks for the longest attention and for a factor of its
queries, such as the rows of an image, along which the whole model could be computed in parts (`context_obstacle`). All
factors that are joined with it, as those of a text, are cut likewise (`autoplan.ops.sequence_parts`). Their sizes
become multiples of `s`, the largest number that all ranks can share evenly: from there on the length of the sequence is
a symbol as in any language model, whose bounds are the one number that it was in the example.

What holds all tokens and depends on no input, a table of positions, stays whole where it is stored or made, and a node
`own_part` takes the rank's part of it. A model that cannot be computed in parts stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Block, Dim, ModelGraph, Node, Runs, Value, check
from autoplan.ir.symbols import Expr, product
from autoplan.ops.batch import context_obstacle
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.sequence_parts import in_short, joint, num_tokens, runs_of, sliced
from autoplan.ops.table import op_has, op_kind
from autoplan.ops.views import INT_MAX, OWN_PART, REGROUP

_S = Expr.symbol("s")


def with_sequence(graph: ModelGraph) -> ModelGraph:
    """Return the graph with a sequence that ranks can share, or with the reason why there is none.

    A graph that has a sequence stays as it is.
    """
    if any("s" in size.symbols for size in graph.factors.values()) or "s" in graph.bounds:
        return graph
    obstacles: list[str] = []
    for tokens, way in _ways(graph):
        found: ModelGraph | str = _Rewrite(graph, way).run() if not isinstance(way, str) else way
        obstacle = found if isinstance(found, str) else context_obstacle(found)
        if obstacle is None and not isinstance(found, str):
            check(found)
            return found.in_order()
        obstacles.append(f"of {tokens} tokens that attend to each other: {obstacle}")
    return replace(graph, no_sequence=obstacles[0] if obstacles else _NO_TOKENS)


_NO_TOKENS = (
    "no input has a sequence of a length that may change, and no attention has a fixed number of keys that are its "
    "queries, too"
)


def _ways(graph: ModelGraph) -> Iterator[tuple[int, dict[str, Runs] | str]]:
    """Yield sets of factors that may be cut, with their runs, the most promising first.

    Before each the number of tokens that attend to each other. A text in place of a set says why there is none.
    """
    joints = list(_joints(graph))
    for dim, tokens in _attended(graph).items():
        for name in _by_promise(dim, graph.factors):
            chosen = _closed(name, joints, graph.factors)
            if isinstance(chosen, str):
                yield tokens, chosen
            else:
                yield tokens, _with_runs(chosen, joints, graph.factors)


def _attended(graph: ModelGraph) -> dict[Dim, int]:
    """Return the dims of queries that attend to as many keys, with their number, the longest first."""
    found = dict[Dim, int]()
    for block in graph.blocks.values():
        for node in block.nodes:
            if op_kind(node.op) is OpKind.ATTENTION:
                query, key = (block.values[name] for name in node.tensor_inputs[:2])
                size = query.shape[2].value
                if query.dims is not None and size and size == key.shape[2].value:
                    found[query.dims[2]] = size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _by_promise(dim: Dim, factors: Mapping[str, Expr]) -> list[str]:
    """Return the factors of a dim: those that more powers of two divide first, then those that are slower in memory."""
    sizes = {name: factors[name].value or 0 for name in dim}
    return sorted((name for name in dim if sizes[name] > 1), key=lambda name: -(sizes[name] & -sizes[name]))


@dataclass(frozen=True)
class _Joint:
    """A dim, and its pieces in order; of a slice one piece, which says nothing about the whole.

    Attributes:
        source: the line of the model.
    """

    whole: Dim
    pieces: tuple[Dim, ...]
    complete: bool
    source: str


def _joints(graph: ModelGraph) -> Iterator[_Joint]:
    free = graph.free_calls()  # what they join is whole, and ranks take parts of it later
    for block in (graph.blocks[name] for name in dict.fromkeys(c.block for c in graph.calls if c.name not in free)):
        for node in block.nodes:
            found = joint(node, block)
            if found is not None:
                yield _Joint(found[0], tuple(found[1]), True, node.source)
            part = sliced(node, block)
            if part is not None:
                yield _Joint(part[0], (part[1],), False, node.source)


def _closed(name: str, joints: Sequence[_Joint], factors: Mapping[str, Expr]) -> frozenset[str] | str:
    """Return the factor with all that are cut if it is, or why one of them cannot be."""
    chosen, grows = {name}, True
    while grows:
        grows = False
        for each in joints:
            cut = not chosen.isdisjoint(each.whole)
            if not cut and not (each.complete and any(not chosen.isdisjoint(dim) for dim in each.pieces)):
                continue
            for dim in (each.whole, *each.pieces):
                if not chosen.isdisjoint(dim):
                    continue
                options = _by_promise(dim, factors)
                if not options:
                    what = "joined with" if each.complete else "sliced to"
                    return f"they are {what} a single token, as that of a class, at {each.source}"
                chosen.add(options[0])
                grows = True
    return frozenset(chosen)


def _with_runs(chosen: frozenset[str], joints: Sequence[_Joint], factors: Mapping[str, Expr]) -> dict[str, Runs] | str:
    """Return the runs of every factor that is cut, or why one has none."""
    out: dict[str, Runs] = {name: ((1, factors[name].value or 0),) for name in chosen}
    for _ in joints:  # what is joined may be joined again
        before = dict(out)
        for each in joints:
            if not each.complete or len(each.whole) != 1 or each.whole[0] not in chosen:
                continue
            pieces = [runs_of(dim, factors, out) for dim in each.pieces]
            out[each.whole[0]] = in_short([run for piece in pieces if piece is not None for run in piece])
        if out == before:
            break
    for each in joints:
        joined = each.whole[0] if each.complete and len(each.whole) == 1 else ""
        if joined in chosen and num_tokens(out[joined]) != factors[joined].value:
            return f"what is joined at {each.source} has parts that do not add up"
    return out


@dataclass
class _Rewrite:
    """Makes the sizes of some factors multiples of `s`, with nodes that take parts of what is made whole."""

    graph: ModelGraph
    parts: Mapping[str, Runs]
    whole: dict[str, str] = field(default_factory=dict)  # factor that is cut -> that of the same size which is not

    def __post_init__(self) -> None:
        self.length = math.gcd(*(tokens for runs in self.parts.values() for _, tokens in runs))
        self.factors = dict(self.graph.factors)
        for name, runs in self.parts.items():
            self.factors[name] = _S * (num_tokens(runs) // self.length)

    def run(self) -> ModelGraph | str:
        """Return the graph, or why there is none: no input has the length, or a block makes both wholes and parts."""
        graph, free = self.graph, self.graph.free_calls()
        kinds: dict[str, set[bool]] = {}
        for call in graph.calls:
            kinds.setdefault(call.block, set()).add(call.name in free)
        shared = [n for n, b in graph.blocks.items() if len(kinds.get(n, ())) > 1 and self._is_cut(b)]
        if shared:
            return f"block {shared[0]} makes both tables of all tokens and parts of them"
        if not any(self._cut(graph.values[name].dims) for name in graph.inputs):
            return f"no input has them: {', '.join(graph.inputs)}"
        blocks = {n: self._block(b, is_free=True in kinds.get(n, ())) for n, b in graph.blocks.items()}
        return replace(
            graph,
            factors=self.factors,
            values={name: self._shaped(value) for name, value in graph.values.items()},
            blocks=blocks,
            bounds={**graph.bounds, "s": (self.length, self.length)},
            parts=dict(self.parts),
        )

    def _is_cut(self, block: Block) -> bool:
        return any(self._cut(value.dims) for value in block.values.values())

    def _cut(self, dims: tuple[Dim, ...] | None) -> list[int]:
        """Return the dims with a factor that is cut."""
        return [i for i, dim in enumerate(dims or ()) if not self.parts.keys().isdisjoint(dim)]

    def _shaped(self, value: Value) -> Value:
        return replace(value, shape=tuple(product([self.factors[f] for f in dim]) for dim in value.dims or ()))

    def _as_whole(self, value: Value) -> Value:
        """Return the value with factors of its own where others of the same name are cut."""
        for name in (f for dim in value.dims or () for f in dim if f in self.parts and f not in self.whole):
            self.whole[name] = FreshNames(self.factors).fresh(f"{name}_whole")
            self.factors[self.whole[name]] = self.graph.factors[name]
        return self._shaped(
            replace(value, dims=tuple(tuple(self.whole.get(f, f) for f in d) for d in value.dims or ()))
        )

    def _runs(self, value: Value, at: int) -> Runs | None:
        return runs_of((value.dims or ())[at], self.graph.factors, self.parts)

    def _cut_up_to(self, at: int, value: Value, whole: Value, name: str) -> Value:
        """Return a value that is cut up to this dim, and behind it as one that is whole."""
        dims = (*(value.dims or ())[: at + 1], *(whole.dims or ())[at + 1 :])
        return self._shaped(replace(value, name=name, dims=dims))

    def _block(self, block: Block, *, is_free: bool) -> Block:
        """Return the block; what it makes of nothing that is cut is whole, and its users take parts of it.

        Args:
            is_free: its calls make whole sequences, of which parts are taken later.
        """
        names = FreshNames(block.values)
        values = {name: self._shaped(value) for name, value in block.values.items()}
        taken: dict[str, str] = {}  # what is whole -> the rank's part of it
        nodes: list[Node] = []

        def take(name: str, source: str) -> None:
            value = block.values[name]
            values[name] = self._as_whole(value)
            for at in self._cut(value.dims):
                last = taken.get(name, name)
                part = taken[name] = names.fresh(f"{name.rpartition('.')[2]}_part")
                values[part] = self._cut_up_to(at, value, values[last], part)
                attrs = {"dim": at} if is_free else {"dim": at, "runs": self._runs(value, at)}
                nodes.append(Node(part, REGROUP if is_free else OWN_PART, (last,), (part,), attrs, "", source))

        for name in (*block.params, *block.buffers):
            if self._cut(block.values[name].dims):
                take(name, "")
        for node in block.nodes:
            given = [taken.get(name, name) for name in node.tensor_inputs]
            inputs = tuple(n if n is None else taken.get(n, n) for n in node.inputs)
            nodes.append(replace(self._sliced(node, block), inputs=inputs))
            cut = any(self._cut(values[name].dims) for name in given)
            if not cut and not op_has(node.op, Trait.FILLS):
                for name in node.outputs:
                    if self._cut(block.values[name].dims):
                        take(name, node.source)
        outputs = tuple(taken.get(name, name) for name in block.outputs)
        return replace(block, nodes=tuple(nodes), values=values, outputs=outputs)

    def _sliced(self, node: Node, block: Block) -> Node:
        """Return a slice along a dim that is cut with its ends as multiples of `s`."""
        found = sliced(node, block)
        if found is None or not self._cut((found[0],)):
            return node
        ends = {}
        for name in ("start", "end"):
            place = node.attrs[name]
            if isinstance(place, int) and place != INT_MAX and place % self.length == 0:
                ends[name] = _S * (place // self.length)
        return replace(node, attrs={**node.attrs, **ends})
