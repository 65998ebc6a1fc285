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

from autoplan.capture.passes.whole_values import WholeValues, whole_values, without_unread
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Block, Call, Dim, ModelGraph, Node, Runs, Value, check
from autoplan.ir.symbols import Expr, product
from autoplan.ops.batch import context_obstacle
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.sequence_parts import in_short, joint, num_tokens, runs_of, sliced
from autoplan.ops.table import op_has, op_kind
from autoplan.ops.views import INT_MAX, OWN_PART, REGROUP

_S = Expr.symbol("s")


def with_sequence(graph: ModelGraph) -> ModelGraph:
    """Return the graph with a sequence that ranks can share, or with the reason why there is none.

    A graph that has a sequence stays as it is. Sequences beside the first are cut from their start if they can be, else
    where they meet it (`autoplan.capture.passes.whole_values`).
    """
    if any("s" in size.symbols for size in graph.factors.values()) or "s" in graph.bounds:
        return graph
    obstacles: list[str] = []
    joints = list(_joints(graph))
    for tokens, way in _ways(graph, joints):
        if isinstance(way, str):
            obstacles.append(f"of {tokens} tokens that attend to each other: {way}")
            continue
        reasons = list[str]()
        for late in dict.fromkeys((frozenset[str](), _beside_the_longest(way, joints, graph.factors))):
            found = _Rewrite(graph, way, late).run()
            obstacle = found if isinstance(found, str) else context_obstacle(found)
            if obstacle is None and not isinstance(found, str):
                check(found)
                return found.in_order()
            reasons.append(obstacle or "")
        obstacles.append(f"of {tokens} tokens that attend to each other: {reasons[0]}")
    return replace(graph, no_sequence=obstacles[0] if obstacles else _NO_TOKENS)


_NO_TOKENS = (
    "no input has a sequence of a length that may change, and no attention has a fixed number of keys that are its "
    "queries, too"
)


def _ways(graph: ModelGraph, joints: Sequence[_Joint]) -> Iterator[tuple[int, dict[str, Runs] | str]]:
    """Yield sets of factors that may be cut, with their runs, the most promising first.

    Before each the number of tokens that attend to each other. A text in place of a set says why there is none.
    """
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


def _beside_the_longest(
    way: Mapping[str, Runs], joints: Sequence[_Joint], factors: Mapping[str, Expr]
) -> frozenset[str]:
    """Return the factors that are cut, but for those of the longest sequence of joined ones; none if none is joined."""
    wholes = {each.whole for each in joints if each.complete}
    pieces = {dim for each in joints if each.complete for dim in each.pieces} - wholes
    found = [dim for dim in pieces if not way.keys().isdisjoint(dim)]
    longest = max(found, key=lambda dim: (math.prod(factors[f].value or 0 for f in dim), dim), default=None)
    return frozenset() if longest is None else frozenset(way) - set(longest)


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
    """Makes the sizes of some factors multiples of `s`, with nodes that take parts of what is made whole.

    Attributes:
        late: factors of sequences that stay whole, on every rank, until they meet what is cut.
    """

    graph: ModelGraph
    parts: Mapping[str, Runs]
    late: frozenset[str] = frozenset()
    whole: dict[str, str] = field(default_factory=dict)  # factor that is cut -> that of the same size which is not
    stays: WholeValues = field(default_factory=WholeValues)

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
        self.stays = whole_values(graph, self.parts, self.late)
        blocks = {n: self._block(b, is_free=True in kinds.get(n, ())) for n, b in graph.blocks.items()}
        values = {name: self._kept(value, name in self.stays.top) for name, value in graph.values.items()}
        calls = self._with_parts(values, blocks)
        return replace(
            graph,
            factors=self.factors,
            values=values,
            blocks=blocks,
            calls=calls,
            bounds={**graph.bounds, "s": (self.length, self.length)},
            parts=dict(self.parts),
        )

    def _with_parts(self, values: dict[str, Value], blocks: dict[str, Block]) -> tuple[Call, ...]:
        """Return the calls, with further ones that take parts of whole values for the calls that are to get them."""
        taken, calls = FreshNames((*values, *blocks, *(call.name for call in self.graph.calls))), list[Call]()
        new: dict[str, str] = {}
        for call in self.graph.calls:
            stays, formals = self.stays.of_block(call.block), self.graph.blocks[call.block].inputs
            needed = [a for a, f in zip(call.inputs, formals, strict=True) if a in self.stays.top and f not in stays]
            for name in (n for n in dict.fromkeys(needed) if n not in new):
                block = self._taking(self.graph.values[name], taken)
                part = new[name] = taken.fresh(f"{name}_part")
                blocks[block.name] = block
                values[part] = replace(block.values[block.outputs[0]], name=part)
                calls.append(Call(block.name, block.name, (name,), (part,), {}, {}))
            calls.append(replace(call, inputs=tuple(new[n] if n in needed else n for n in call.inputs)))
        return tuple(calls)

    def _taking(self, value: Value, names: FreshNames) -> Block:
        """Return a block that takes the rank's part of a value."""
        whole = self._as_whole(replace(value, name="whole"))
        nodes, made = self._steps(replace(value, name="whole"), whole, FreshNames(["whole"]), "")
        held = {x.name: x for x in (whole, *made)}
        return Block(names.fresh("parts"), ("whole",), (), (), (made[-1].name,), tuple(nodes), held)

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

    def _kept(self, value: Value, stays: bool) -> Value:
        """Return a value in its new sizes; `stays`: it is whole on every rank."""
        return self._as_whole(value) if stays else self._shaped(value)

    def _steps(
        self, value: Value, whole: Value, names: FreshNames, source: str, form: str = OWN_PART
    ) -> tuple[list[Node], list[Value]]:
        """Return nodes that make the rank's part of a value from the whole, one dim after the other, and their results.

        Args:
            form: OWN_PART; REGROUP: the rank has all of it, under other names of its factors.
        """
        last, nodes, made = whole, list[Node](), list[Value]()
        for at in self._cut(value.dims):
            part = names.fresh(f"{value.name.rpartition('.')[2]}_part")
            dims = (*(value.dims or ())[: at + 1], *(whole.dims or ())[at + 1 :])
            attrs = {"dim": at} if form == REGROUP else {"dim": at, "runs": self._runs(value, at)}
            nodes.append(Node(part, form, (last.name,), (part,), attrs, "", source))
            last = self._shaped(replace(value, name=part, dims=dims))
            made.append(last)
        return nodes, made

    def _put_together(self, value: Value, names: FreshNames) -> tuple[list[Node], list[Value]]:
        """Return nodes that give a value that is whole the names of factors that are not cut, and their results."""
        whole, last, nodes, made = self._as_whole(value), value, list[Node](), list[Value]()
        for at in self._cut(value.dims):
            name = names.fresh(f"{value.name.rpartition('.')[2]}_whole")
            dims = (*(whole.dims or ())[: at + 1], *(value.dims or ())[at + 1 :])
            nodes.append(Node(name, REGROUP, (last.name,), (name,), {"dim": at}, "", ""))
            last = self._shaped(replace(value, name=name, dims=dims))
            made.append(last)
        return nodes, made

    def _block(self, block: Block, *, is_free: bool) -> Block:
        """Return the block; what it makes of nothing that is cut is whole, and its users take parts of it.

        Args:
            is_free: its calls make whole sequences, of which parts are taken later.
        """
        made = _BlockInParts(self, block, is_free)
        for name in (*block.params, *block.buffers, *(made.whole if is_free else ())):
            if self._cut(block.values[name].dims):
                made.take(name, "")
        for node in block.nodes:
            made.add(node)
        return made.result()

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


class _BlockInParts:
    """Makes a block anew, with nodes that take the rank's part of what is whole.

    Attributes:
        whole: values that stay whole in it.
        taken: what is whole -> the rank's part of it.
    """

    def __init__(self, rewrite: _Rewrite, block: Block, is_free: bool) -> None:
        self.rewrite, self.block, self.is_free = rewrite, block, is_free
        self.names, self.stays = FreshNames(block.values), rewrite.stays.of_block(block.name)
        self.whole = self.stays & set(block.inputs) if is_free else self.stays
        self.values = {name: rewrite._kept(value, name in self.whole) for name, value in block.values.items()}
        self.taken: dict[str, str] = {}
        self.nodes: list[Node] = []

    def take(self, name: str, source: str) -> None:
        """Add nodes that take the rank's part of a value, which is whole."""
        value, form = self.block.values[name], REGROUP if self.is_free else OWN_PART
        self.values[name] = self.rewrite._as_whole(value)
        steps, made = self.rewrite._steps(value, self.values[name], self.names, source, form)
        self.nodes += steps
        self.values |= {x.name: x for x in made}
        self.taken[name] = made[-1].name

    def add(self, node: Node) -> None:
        """Add a node of the block, with the parts that it reads and those of what it makes whole."""
        cut = self.rewrite._cut
        if node.name in self.rewrite.stays.nodes_of(self.block.name):
            self.nodes.append(node)
            return
        for name in dict.fromkeys(node.tensor_inputs):
            if name in self.whole and name not in self.taken:
                self.take(name, node.source)
        inputs = tuple(n if n is None else self.taken.get(n, n) for n in node.inputs)
        self.nodes.append(replace(self.rewrite._sliced(node, self.block), inputs=inputs))
        if op_has(node.op, Trait.FILLS) or any(cut(self.values[n].dims) for n in inputs if n is not None):
            return
        for name in node.outputs:
            if cut(self.block.values[name].dims):
                self.take(name, node.source)

    def result(self) -> Block:
        """Return the block without parts that nothing reads."""
        outputs = tuple(self._handed_out(name) for name in self.block.outputs)
        return without_unread(replace(self.block, nodes=tuple(self.nodes), values=self.values, outputs=outputs))

    def _handed_out(self, name: str) -> str:
        """Return what the block hands out for an output: the whole, if it stays so outside, else the rank's part."""
        if self.is_free and name in self.stays:
            if name in self.taken:
                return name
            steps, made = self.rewrite._put_together(self.values[name], self.names)
            self.nodes += steps
            self.values |= {x.name: x for x in made}
            return made[-1].name
        return name if name in self.whole else self.taken.get(name, name)
