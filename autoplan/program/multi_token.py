"""A graph with multi-token prediction (MTP): layers that predict the tokens after the next.

    graph = with_mtp(load_model("deepseek-v3"), 1)       # `load_model("deepseek-v3@mtp=1")` does the same

Layer k (1, 2, ...) gets what the layer before it gave, and the embedding of the token k places further on: norms of
both, put together, a product back to the hidden size, and a decoder layer like the last one. The final norm (one more)
and the head follow, whose loss is that of the token k + 1 places further on. Embedding and head are the model's own.
The losses of all depths count 0.1 of their mean beside the loss of the next token.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); megatron/core/transformer/multi_token_prediction.py, whose layers
take the hidden state behind the final norm, here the one before it, as in the paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.config.numbers import scaled
from autoplan.errors import GraphError
from autoplan.ir.graph import (
    LOSS_DENOMINATOR,
    Block,
    Call,
    LossCount,
    ModelGraph,
    Node,
    Parameter,
    Value,
    denominator,
)
from autoplan.ir.symbols import Expr
from autoplan.names import mtp_model
from autoplan.ops.factors import infer_factors
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.ops.views import INT_MAX
from autoplan.program.facts import MTP_PREFIX, layer_calls, num_mtp_layers
from autoplan.units import LossUnit

LOSS_WEIGHT = 0.1  # Megatron's mtp_loss_scaling_factor; DeepSeek-V3 has 0.3, and 0.1 from 10T tokens on
_BLOCK = "mtp"


def with_mtp(graph: ModelGraph, num_layers: int) -> ModelGraph:
    """Return the graph with layers that predict the tokens after the next.

    Raises:
        GraphError: the model is no decoder with an embedding of tokens, layers, and one head with its loss, or has such
            layers already; the message says what is missing.
    """
    if num_mtp_layers(graph):
        raise _cannot(graph, f"it has {num_mtp_layers(graph)} such layers")
    maker = _Maker(graph, _ends(graph))
    return maker.run(num_layers)


def _cannot(graph: ModelGraph, why: str) -> GraphError:
    needed = "they need one embedding of tokens, layers that follow one another, and one head with its loss"
    return GraphError(f"layers for tokens after the next cannot be added to {graph.name}: {why}; {needed}")


@dataclass(frozen=True)
class _Ends:
    """The calls of a decoder that its further layers repeat.

    Attributes:
        tokens: the input with the tokens.
        hidden, before: the top-level values that the last layer gives and gets.
        target: the top-level value with the labels that the head reads.
        product: the product of the head that makes the logits.
        term: the value of the head that is the loss over its denominator.
        norm: the nodes between the last layer and that product.
    """

    embedding: Call
    layer: Call
    head: Call
    tokens: str
    hidden: str
    before: str
    target: str
    product: Node
    norm: tuple[Node, ...]
    term: str


def _ends(graph: ModelGraph) -> _Ends:
    """Return the calls of a decoder that its further layers repeat. GraphError if it is none."""
    calls = {call.name: call for call in graph.calls}
    layers = layer_calls(graph)
    if not layers:
        raise _cannot(graph, "it has no layers")
    layer, (embedding, tokens), (head, target) = calls[layers[-1]], _embedding(graph, layers[0]), _head(graph)
    block = graph.blocks[head.block]
    before, hidden = _states(graph, embedding, layer, head)
    products = [n for n in block.nodes if op_kind(n.op) is OpKind.PRODUCT and n.tensor_inputs[1] in block.params]
    if not products:
        raise _cannot(graph, f"{head.name} has no product with a parameter")
    norm = _between(block, _inside(head, block, hidden), products[-1].tensor_inputs[0])
    if any(op_kind(n.op) is OpKind.PRODUCT for n in norm):
        raise _cannot(graph, f"{head.name} has more than a norm before its logits")
    return _Ends(embedding, layer, head, tokens, hidden, before, target, products[-1], norm, _mean(graph, head))


def _states(graph: ModelGraph, embedding: Call, layer: Call, head: Call) -> tuple[str, str]:
    """Return the values that the last layer gets and gives, each shaped as the embedding."""
    shapes = {graph.values[name].shape for name in embedding.outputs}
    handed = [name for name in layer.outputs if name in head.inputs]
    if len(handed) != 1 or {graph.values[handed[0]].shape} != shapes:
        raise _cannot(graph, f"{head.name} does not read one hidden state of {layer.name}, shaped as the embedding")
    made = {name for call in graph.calls if call.params for name in call.outputs}
    before = [n for n in layer.inputs if n in made and {graph.values[n].shape} == shapes]
    if len(before) != 1 or layer.outputs != (handed[0],):
        raise _cannot(graph, f"{layer.name} gets or gives more than a hidden state")
    return before[0], handed[0]


def _embedding(graph: ModelGraph, first_layer: str) -> tuple[Call, str]:
    """Return the call before the layers that looks up the tokens, and the input that they are."""
    before = itertools.takewhile(lambda call: call.name != first_layer, graph.calls)
    found = [(call, tokens) for call in before if call.params and (tokens := _embedded(graph, call)) is not None]
    if len(found) != 1:
        raise _cannot(graph, f"{len(found)} calls before the first layer embed an input")
    return found[0]


def _head(graph: ModelGraph) -> tuple[Call, str]:
    """Return the call with the loss, and the labels that it reads."""
    head = next(call for call in graph.calls if graph.output in call.outputs)
    losses = [n for n in graph.blocks[head.block].nodes if op_kind(n.op) is OpKind.LOSS]
    target = graph.loss_target
    if head.outputs != (graph.output,) or len(losses) != 1 or target is None or target not in head.inputs:
        raise _cannot(graph, f"its loss is more than one, or not that of {head.name} alone")
    return head, target


def _mean(graph: ModelGraph, head: Call) -> str:
    """Return the value of the head that is its loss over the number of tokens."""
    block = graph.blocks[head.block]
    losses = {n.outputs[0] for n in block.nodes if op_kind(n.op) is OpKind.LOSS}
    divided = _inside(head, block, LOSS_DENOMINATOR) if LOSS_DENOMINATOR in head.inputs else None
    means = [n for n in block.nodes if n.op == "div" and n.inputs[0] in losses and n.inputs[1] == divided]
    if len(means) != 1 or graph.loss_count is not LossUnit.TOKENS:
        raise _cannot(graph, "its loss is no mean over tokens")
    return means[0].outputs[0]


def _embedded(graph: ModelGraph, call: Call) -> str | None:
    """Return the input of the model whose rows a call looks up."""
    block = graph.blocks[call.block]
    given = dict(zip(block.inputs, call.inputs, strict=True))
    for node in block.nodes:
        if op_kind(node.op) is OpKind.EMBEDDING and given.get(node.tensor_inputs[1]) in graph.inputs:
            return given[node.tensor_inputs[1]]
    return None


def _inside(call: Call, block: Block, value: str) -> str:
    return dict(zip(call.inputs, block.inputs, strict=True))[value]


def _between(block: Block, start: str, end: str) -> tuple[Node, ...]:
    """Return the nodes that lead from a value to another, in order."""
    makers = {out: node for node in block.nodes for out in node.outputs}
    needed: set[str] = set()
    waiting = [end]
    while waiting:
        name = waiting.pop()
        if name != start and name in makers and makers[name].name not in needed:
            needed.add(makers[name].name)
            waiting += makers[name].tensor_inputs
    return tuple(n for n in block.nodes if n.name in needed)


@dataclass
class _Body:
    """Nodes and values of a block that is being made."""

    inputs: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    @staticmethod
    def of(block: Block) -> _Body:
        held = list(block.inputs), list(block.params), list(block.buffers)
        return _Body(*held, list(block.nodes), dict(block.values))

    def block(self, name: str, outputs: tuple[str, ...]) -> Block:
        inputs, params, buffers = (tuple(part) for part in (self.inputs, self.params, self.buffers))
        return Block(name, inputs, params, buffers, outputs, tuple(self.nodes), self.values)

    def add_input(self, name: str, like: Value) -> str:
        self.inputs.append(name)
        self.values[name] = replace(like, name=name)
        return name

    def add(self, op: str, inputs: tuple[str, ...], like: Value, path: str, attrs: Mapping[str, object] = {}) -> str:
        """Add a node; return its result, which is like a value but for the name."""
        self.nodes.append(Node(path, op, inputs, (path,), dict(attrs), path))
        self.values[path] = replace(like, name=path)
        return path

    def add_nodes(self, nodes: Sequence[Node], block: Block, given: Mapping[str, str], path: str) -> dict[str, str]:
        """Add nodes of a block as parts of the module `path`; return all their values by the names they had there.

        Args:
            given: the names here of values that are here already; parameters and buffers are added.
        """
        names = dict(given)

        def here(name: str) -> str:
            if name not in names:
                held = name in block.params or name in block.buffers
                names[name] = new = f"{path}{'.' if held else '_'}{name}"
                self.values[new] = replace(block.values[name], name=new)
                self.params += [new] if name in block.params else []
                self.buffers += [new] if name in block.buffers else []
            return names[name]

        for node in nodes:
            self.nodes.append(
                replace(
                    node,
                    name=f"{path}_{node.name}",
                    inputs=tuple(None if n is None else here(n) for n in node.inputs),
                    outputs=tuple(here(n) for n in node.outputs),
                    scope=f"{path}.{node.scope}" if node.scope else path,
                )
            )
        return names


class _Maker:
    """Makes the graph, depth after depth."""

    def __init__(self, graph: ModelGraph, ends: _Ends) -> None:
        self.graph, self.ends = graph, ends
        self.values, self.params, self.buffers = dict(graph.values), dict(graph.params), dict(graph.buffers)
        self.blocks = dict(graph.blocks)
        self.free: list[Call] = []  # calls without parameters: shifted tokens and labels
        self.layers: list[Call] = []
        self.counts = list(graph.more_counts)

    def run(self, num_layers: int) -> ModelGraph:
        graph, ends = self.graph, self.ends
        self._add_layer_block()
        hidden, targets = ends.hidden, []
        for depth in range(1, num_layers + 1):
            hidden = self._layer(depth, hidden)
            targets.append(self._target(depth))
        head, inputs = self._head(targets)
        calls = [head if call is ends.head else call for call in graph.calls]
        at = calls.index(head)
        calls[at:at] = [*self.free, *self.layers]
        made = replace(
            graph,
            name=mtp_model(graph.name, num_layers),
            inputs=(*graph.inputs, *inputs),
            values=self.values,
            blocks=self.blocks,
            calls=tuple(calls),
            params=self.params,
            buffers=self.buffers,
            more_counts=tuple(self.counts),
        )
        made = infer_factors(made).in_order()
        more, layers = scaled(made.num_params - graph.num_params), "layers" if num_layers > 1 else "layer"
        note = f"{num_layers} more {layers} for tokens after the next: {more} parameters, {LOSS_WEIGHT} of the loss"
        return replace(made, notes=(*made.notes, note))

    def _shifted(self, source: str, places: int, fill: float, name: str) -> str:
        """Add the call that moves (batch, sequence) to the left. Return its result."""
        value, body = self.graph.values[source], _Body()
        given = body.add_input("given", value)
        wider = replace(value, shape=(*value.shape[:-1], value.shape[-1] + Expr.of(places)), dims=None)
        padded = body.add("pad", (given,), wider, "padded", {"pad": (0, places), "value": fill})
        slicing = {"dim": len(value.shape) - 1, "start": places, "end": INT_MAX, "step": 1}
        out = body.add("slice", (padded,), replace(value, dims=None), "shifted", slicing)
        self.blocks[name] = body.block(name, (out,))
        self.values[name] = replace(value, name=name, dims=None)
        self.free.append(Call(name, name, (source,), (name,), {}, {}))
        return name

    def _target(self, depth: int) -> str:
        """Add the calls that make the labels of a depth, as those of the next token are made."""
        graph, target = self.graph, self.ends.target
        makers = {out: call for call in graph.calls for out in call.outputs}
        name = f"mtp_labels{depth}"
        if target in graph.inputs:
            return self._shifted(target, depth, graph.ignore_index, name)
        call = makers[target]
        if call.params or len(call.inputs) != 1 or call.inputs[0] not in graph.inputs or len(call.outputs) != 1:
            raise _cannot(graph, f"its labels are not made of one input by {call.name} alone")
        shifted = self._shifted(call.inputs[0], depth, graph.ignore_index, f"{name}_given")
        self.values[name] = replace(self.values[target], name=name, dims=None)
        self.free.append(replace(call, name=name, inputs=(shifted,), outputs=(name,)))
        return name

    def _add_layer_block(self) -> None:
        """Add the block of a further layer: embedding, norms, the product of both, and a layer like the last."""
        graph, ends = self.graph, self.ends
        body, head = _Body(), graph.blocks[ends.head.block]
        width = graph.values[ends.hidden].shape[-1]
        hidden = body.add_input("hidden", graph.values[ends.hidden])
        tokens = body.add_input("tokens", graph.values[ends.tokens])
        embedded = self._inlined(body, ends.embedding, {ends.tokens: tokens}, "embed")
        normed = []
        for path, value in (("enorm", embedded[ends.embedding.outputs[0]]), ("hnorm", hidden)):
            start = _inside(ends.head, head, ends.hidden)
            normed.append(body.add_nodes(ends.norm, head, {start: value}, path)[ends.product.tensor_inputs[0]])
        like = body.values[hidden]
        wide = replace(like, shape=(*like.shape[:-1], width + width))
        both = body.add("cat", tuple(normed), wide, "both", {"dim": -1})
        weight = Value("eh_proj.weight", (width, width + width), like.dtype, True)
        body.params.append(weight.name)
        body.values[weight.name] = weight
        joined = body.add("linear", (both, weight.name), like, "eh_proj")
        out = self._inlined(body, ends.layer, {ends.before: joined}, "layer")[ends.hidden]
        self.blocks[_BLOCK] = body.block(_BLOCK, (out,))

    def _inlined(self, body: _Body, call: Call, given: Mapping[str, str], path: str) -> dict[str, str]:
        """Add the nodes of a call; its other inputs are those of the block, under their names at the top.

        Returns: the names in the block of the call's results, by their names at the top.
        """
        block = self.graph.blocks[call.block]
        known = {}
        for inside, top in zip(block.inputs, call.inputs, strict=True):
            known[inside] = given[top] if top in given else self._input(body, top)
        made = body.add_nodes(block.nodes, block, known, path)
        return {top: made[inside] for inside, top in zip(block.outputs, call.outputs, strict=True)}

    def _input(self, body: _Body, top: str) -> str:
        return top if top in body.inputs else body.add_input(top, self.graph.values[top])

    def _layer(self, depth: int, hidden: str) -> str:
        """Add the call of a further layer. Return its result."""
        graph, ends, block, name = self.graph, self.ends, self.blocks[_BLOCK], f"{MTP_PREFIX}{depth - 1}"
        params, buffers = {}, {}
        for local in block.params:
            part, _, rest = local.partition(".")
            params[local] = full = ends.embedding.params[rest] if part == "embed" else f"{name}.{local}"
            if part != "embed":
                trained = part != "layer" or graph.params[ends.layer.params[rest]].trainable
                self._new_param(full, block.values[local], trained)
        for local in block.buffers:
            part, _, rest = local.partition(".")
            like = (ends.embedding if part == "embed" else ends.layer).buffers[rest]
            buffers[local] = full = like if part == "embed" else f"{name}.{local}"
            self.buffers[full] = replace(graph.buffers[like], name=full)
        given = {"hidden": hidden, "tokens": self._shifted(ends.tokens, depth, 0, f"mtp_tokens{depth}")}
        out = f"{name}.out"
        self.values[out] = replace(graph.values[ends.hidden], name=out)
        self.layers.append(Call(name, _BLOCK, tuple(given.get(n, n) for n in block.inputs), (out,), params, buffers))
        return out

    def _new_param(self, full: str, value: Value, trainable: bool) -> None:
        shape = tuple(int(size.value or 0) for size in value.shape)
        self.params[full] = Parameter(full, shape, value.dtype, trainable)

    def _head(self, targets: Sequence[str]) -> tuple[Call, tuple[str, ...]]:
        """Return the call of the head with the losses of all depths, and the inputs that are their denominators."""
        graph, ends = self.graph, self.ends
        old = graph.blocks[ends.head.block]
        body = _Body.of(old)
        hidden, target = (_inside(ends.head, old, name) for name in (ends.hidden, ends.target))
        divided = _inside(ends.head, old, LOSS_DENOMINATOR)
        term = _between(old, hidden, ends.term)
        own = {name for node in ends.norm for name in node.tensor_inputs if name in old.params}
        weight = LOSS_WEIGHT / len(targets)
        total, inputs, params, new = old.outputs[0], list(ends.head.inputs), dict(ends.head.params), []
        for depth, (layer, labels) in enumerate(zip(self.layers, targets, strict=True), 1):
            path, denominator_name = f"mtp{depth}", denominator(len(self.counts) + 1)
            self.counts.append(LossCount(graph.loss_count, labels, graph.ignore_index))
            self.values[denominator_name] = replace(graph.values[LOSS_DENOMINATOR], name=denominator_name)
            new.append(denominator_name)
            given = {name: name for name in (*old.inputs, *old.params, *old.buffers) if name not in own}
            for inside, top, like in (
                (hidden, layer.outputs[0], ends.hidden),
                (target, labels, ends.target),
                (divided, denominator_name, LOSS_DENOMINATOR),
            ):
                given[inside] = body.add_input(f"{path}_{inside}", graph.values[like])
                inputs.append(top)
            made = body.add_nodes(term, old, given, path)
            for name in own:
                params[made[name]] = f"{layer.name}.final_norm.{name}"
                self._new_param(params[made[name]], old.values[name], graph.params[ends.head.params[name]].trainable)
            loss = made[ends.term]
            weighed = body.add("mul_scalar", (loss,), body.values[total], f"{path}_weighed", {"scalar": weight})
            total = body.add("add", (total, weighed), body.values[total], f"{path}_total")
        self.blocks[ends.head.block] = body.block(ends.head.block, (total,))
        return replace(ends.head, inputs=tuple(inputs), params=params), tuple(new)
