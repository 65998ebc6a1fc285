"""A graph with adapters: all its parameters frozen, low-rank products beside its linear layers (Hu et al., LoRA, 2021).

    graph = with_adapters(load_model("llama-3.1-8b"), Adapters(16, ("q_proj", "v_proj")))

A layer y = W x becomes y = W x + B A x, with A of `rank` rows and B of `rank` columns; the scale of B A is part of B,
and there is no dropout. Gradients flow only where something trained comes before, so that the first layer is another
block than the others: what lies before its first adapter needs no backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoplan.config.adapters import ALL_LINEAR, USUAL_TARGETS, Adapters
from autoplan.config.numbers import scaled
from autoplan.errors import PinError
from autoplan.ir.graph import Block, Call, ModelGraph, Node, Parameter, Value
from autoplan.ir.symbols import Expr
from autoplan.ops.factors import infer_factors
from autoplan.ops.products import PACKED, adds_bias
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind

_NOTE = "adapters "  # how the note of a graph with adapters begins


@dataclass(frozen=True)
class _Linear:
    """A product of a value with a parameter: the node, the module's path in the block, and whether it is the head's."""

    node: Node
    module: str
    weight: str
    head: bool

    @property
    def name(self) -> str:
        """The last part of the module's path."""
        return self.module.rpartition(".")[2]


def with_adapters(graph: ModelGraph, adapters: Adapters) -> ModelGraph:
    """Return the graph with all parameters frozen and adapters beside its linear layers.

    Raises: PinError if no linear layer has one of the names; it lists the names that there are.
    """
    found = {block.name: list(_linears(block)) for block in graph.blocks.values()}
    names = _targets(graph.name, adapters, [linear for each in found.values() for linear in each])
    maker = _Maker(graph, adapters, {b: [x for x in each if _is_target(x, names)] for b, each in found.items()}, found)
    return maker.run()


def in_4_bits(graph: ModelGraph, adapters: Adapters) -> ModelGraph:
    """Return a graph that has adapters, with its frozen linear layers but the head stored in 4 bits.

    Args:
        adapters: those of the graph, which names their rank and targets in its notes.
    """
    trained: dict[str, set[str]] = {name: set() for name in graph.blocks}
    for call in graph.calls:
        trained[call.block] |= {inside for inside, full in call.params.items() if graph.params[full].trainable}
    blocks = {}
    for name, block in graph.blocks.items():
        held = {x.node.name for x in _linears(block) if not x.head and x.weight not in trained[name]}
        nodes = (replace(n, attrs={**n.attrs, PACKED: True}) if n.name in held else n for n in block.nodes)
        blocks[name] = replace(block, nodes=tuple(nodes))
    before = f"{_NOTE}{replace(adapters, packed=False)}:"
    made = replace(graph, blocks=blocks, notes=tuple(n for n in graph.notes if not n.startswith(before)))
    return replace(made, notes=(*made.notes, adapters_note(made, replace(adapters, packed=True))))


def has_adapters(graph: ModelGraph) -> bool:
    """Return True for a graph that `with_adapters` has made."""
    return any(note.startswith(_NOTE) for note in graph.notes)


def adapters_note(made: ModelGraph, adapters: Adapters) -> str:
    """Return the note of a graph with adapters: what is trained, and what is not stored in 4 bits."""
    trained = sum(p.num_elements for p in made.params.values() if p.trainable)
    note = f"{_NOTE}{adapters}: {scaled(trained)} of {scaled(made.num_params)} parameters are trained"
    if adapters.packed and any(op_kind(n.op) is OpKind.EXPERTS for b in made.blocks.values() for n in b.nodes):
        note += "; the weights of experts stay as they are, only linear layers are stored in 4 bits"
    if adapters.packed:
        note += "; the rest keeps its dtype, but under autocast (PEFT's prepare_model_for_kbit_training: float32)"
    return note


def _linears(block: Block) -> Iterator[_Linear]:
    """Yield the products of a block with one of its parameters."""
    loss = any(op_kind(n.op) is OpKind.LOSS for n in block.nodes)
    products = [n for n in block.nodes if op_kind(n.op) is OpKind.PRODUCT and n.tensor_inputs[1] in block.params]
    for node in products:
        weight = node.tensor_inputs[1]
        # of a block with the loss, the last product makes the logits, and those of its weight others
        head = loss and weight == products[-1].tensor_inputs[1]
        yield _Linear(node, weight.rpartition(".")[0], weight, head)


def _targets(model: str, adapters: Adapters, linears: Sequence[_Linear]) -> tuple[str, ...]:
    there = dict.fromkeys(x.name for x in linears)
    if adapters.targets == (ALL_LINEAR,):
        wanted: tuple[str, ...] = tuple(dict.fromkeys(x.name for x in linears if not x.head))
    elif adapters.targets:
        wanted = tuple(name for name in adapters.targets if any(_is_target(x, (name,)) for x in linears))
        missing = [name for name in adapters.targets if name not in wanted]
        if missing:
            raise PinError(
                f"adapters {adapters}: no linear layer of {model} is named {' or '.join(missing)}; there are "
                f"{', '.join(there) or 'none'}; {ALL_LINEAR} is all but the head"
            )
    else:
        wanted = next((names for names in USUAL_TARGETS if set(names) <= set(there)), ())
    if not wanted:
        raise PinError(
            f"adapters {adapters}: name the linear layers of {model} that have them, for example "
            f"{adapters}:{ALL_LINEAR}; there are {', '.join(there) or 'none'}"
        )
    return wanted


def _is_target(linear: _Linear, names: Sequence[str]) -> bool:
    """Return True for a layer with one of the names, or whose path ends in one."""
    return any(linear.module == name or linear.module.endswith(f".{name}") for name in names)


class _Maker:
    """Makes the graph: blocks once for every set of inputs that a gradient flows to."""

    def __init__(
        self,
        graph: ModelGraph,
        adapters: Adapters,
        targets: dict[str, list[_Linear]],
        linears: dict[str, list[_Linear]],
    ) -> None:
        self.graph, self.adapters, self.targets, self.linears = graph, adapters, targets, linears
        self.made: dict[tuple[str, tuple[bool, ...]], Block] = {}
        self.blocks: dict[str, Block] = {}

    def run(self) -> ModelGraph:
        graph = self.graph
        flows = {name: False for name in graph.inputs}
        values = dict(graph.values)
        params = {name: replace(p, trainable=False) for name, p in graph.params.items()}
        calls: list[Call] = []
        for call in graph.calls:
            block = self._block(graph.blocks[call.block], tuple(flows[v] for v in call.inputs))
            for inside, outside in zip(block.outputs, call.outputs, strict=True):
                flows[outside] = block.values[inside].requires_grad
            bound = dict(call.params)
            for target in self.targets[call.block]:
                for part in ("down", "up"):
                    local, full = (_part(name, part) for name in (target.weight, call.params[target.weight]))
                    bound[local] = full
                    shape = tuple(int(size.value or 0) for size in block.values[local].shape)
                    params[full] = Parameter(full, shape, block.values[local].dtype, trainable=True)
            calls.append(replace(call, block=block.name, params=bound))
        values = {n: replace(v, requires_grad=flows.get(n, False)) for n, v in values.items()}
        made = replace(graph, blocks=self.blocks, calls=tuple(calls), params=params, values=values)
        made = infer_factors(made).in_order()
        return replace(made, notes=(*graph.notes, adapters_note(made, self.adapters)))

    def _block(self, block: Block, given: tuple[bool, ...]) -> Block:
        key = (block.name, given)
        if key not in self.made:
            name = block.name
            while name in self.blocks:
                name = f"{block.name}_{len(self.blocks)}"
            self.made[key] = self.blocks[name] = self._adapted(block, name, given)
        return self.made[key]

    def _adapted(self, block: Block, name: str, given: tuple[bool, ...]) -> Block:
        targets = {x.node.name: x for x in self.targets[block.name]}
        packed = {x.node.name for x in self.linears[block.name] if self.adapters.packed and not x.head}
        values = {v.name: v for v in block.values.values()}
        nodes: list[Node] = []
        params = list(block.params)
        biases = {n.tensor_inputs[0]: n for n in block.nodes if adds_bias(n)}
        waiting: dict[str, Node] = {}  # the node after which a product of an adapter is added -> that product
        for node in block.nodes:
            plain = replace(node, attrs={**node.attrs, PACKED: True}) if node.name in packed else node
            if node.name in targets:
                parts, added = self._parts(targets[node.name], values, params)
                nodes += [plain, *parts]
                waiting[biases.get(node.outputs[0], node).name] = added
            else:
                nodes.append(plain)
            if node.name in waiting:
                nodes += _joined(nodes, node.name, waiting.pop(node.name), values)
        flows = dict(zip(block.inputs, given, strict=True))
        flows |= {n: False for n in (*block.params, *block.buffers)} | dict.fromkeys(params[len(block.params) :], True)
        for node in nodes:
            reached = any(flows[x] for x in node.tensor_inputs)
            flows |= {out: reached and values[out].requires_grad for out in node.outputs}
        return replace(
            block,
            name=name,
            params=tuple(params),
            nodes=tuple(nodes),
            values={n: replace(v, requires_grad=flows[n]) for n, v in values.items()},
        )

    def _parts(self, linear: _Linear, values: dict[str, Value], params: list[str]) -> tuple[list[Node], Node]:
        """Add the parameters of an adapter. Return its two products, and the second of them."""
        node, rank = linear.node, self.adapters.rank
        source, out = values[node.tensor_inputs[0]], values[node.outputs[0]]
        dtype = values[linear.weight].dtype
        made = []
        last = source
        for part, size, inner in (("down", Expr.of(rank), source.shape[-1]), ("up", out.shape[-1], Expr.of(rank))):
            weight, result = _part(linear.weight, part), f"{node.outputs[0]}_{part}"
            values[weight] = Value(weight, (size, inner), dtype, True)
            values[result] = Value(result, (*source.shape[:-1], size), out.dtype, True)
            params.append(weight)
            scope = f"{node.scope}.{part}"
            made.append(Node(result, "linear", (last.name, weight), (result,), {}, scope, node.source))
            last = values[result]
        return made, made[-1]


def _part(weight: str, part: str) -> str:
    """Return the name of a part of the adapter beside a weight."""
    module, _, name = weight.rpartition(".")
    return f"{module}.{part}.{name}" if module else f"{part}.{name}"


def _joined(nodes: list[Node], after: str, added: Node, values: dict[str, Value]) -> list[Node]:
    """Return the addition of an adapter to the result of a node of the list, which gives it the name of that result."""
    at = next(i for i, n in enumerate(nodes) if n.name == after)
    (out,) = nodes[at].outputs
    base = f"{out}_base"
    values[base] = replace(values[out], name=base)
    nodes[at] = replace(nodes[at], outputs=(base,))
    return [Node(f"{out}_sum", "add", (base, added.outputs[0]), (out,), {}, nodes[at].scope, nodes[at].source)]
