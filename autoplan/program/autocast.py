"""A graph as torch.autocast runs it: parameters and the residual stream in float32, products in 16 bits.

    graph = autocast(load_model("llama-3.1-8b"), "bfloat16", "cuda")

The graph is taken as one of float32 parameters, whatever its own main dtype is. Casts become operations of the graph,
so that prices, activations and programs contain them. What autocast casts is in `autoplan.ops.autocast`; it casts

- a value anew for every operation that takes it, as autocast does (three products of one value keep three copies);
- a parameter once per call of a block: autocast caches casts of trained parameters.

Beside adapters (`autoplan.program.adapters`) frozen weights keep their dtype, and trained ones are float32, as PEFT
makes them. If linear layers are stored in 4 bits, all other parameters are float32 (`prepare_model_for_kbit_training`),
and a product in 4 bits gives the dtype that it was given (bitsandbytes' Linear4bit), mostly float32.

A cast to the main dtype in a norm that is written out (`y.to(x.dtype)` after `x.float()`) follows the dtype that x has
here; any other is one to float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.config.precision import Precision
from autoplan.errors import PinError
from autoplan.ir.graph import Block, Call, ModelGraph, Node, Parameter, Value
from autoplan.ops.autocast import NOT_KNOWN, AutocastRule, autocast_rule
from autoplan.ops.products import PACKED, adds_bias, packed_weights
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_has, op_kind
from autoplan.program.adapters import has_adapters
from autoplan.units import DTYPE_BYTES, HALF, most

_WIDE = "float32"
_FLOATS = (_WIDE, *HALF)  # autocast leaves float64 as it is
# views and element-wise operations stand between the cast up and the cast back of a norm
_WITHIN_NORMS = (OpKind.ELEMENTWISE, OpKind.VIEW)


def of_precision(graph: ModelGraph, precision: Precision, device_type: str) -> ModelGraph:
    """Return the graph as it runs in a precision: with the casts of autocast if the precision has it, else without.

    Raises: PinError if the graph has other casts, and is not known without them.
    """
    wanted = "" if precision.autocast is None else f"{precision.autocast} {device_type}"
    if graph.autocast == wanted:
        return graph
    plain = without_autocast(graph)
    return plain if precision.autocast is None else autocast(plain, precision.autocast, device_type)


def without_autocast(graph: ModelGraph) -> ModelGraph:
    """Return the graph before the casts of autocast. Raises PinError if it is not known, as in the file of a plan."""
    if not graph.autocast:
        return graph
    if graph.before_autocast is None:
        raise PinError(
            f"the graph of {graph.name} has the casts of autocast ({graph.autocast}), and the one without them is not "
            "known; give the model by its name, or the precision that it was planned in"
        )
    return graph.before_autocast


def autocast(graph: ModelGraph, dtype: str, device_type: str) -> ModelGraph:
    """Return the graph with float32 parameters and the casts of torch.autocast(device_type, dtype).

    Raises: PinError for a model with operations whose casts are not known.
    """
    main = most((p.dtype, p.num_elements) for p in graph.params.values() if p.dtype in _FLOATS)
    made = _autocast(graph, _Casts(graph.name, main or _WIDE, dtype, device_type, _kept(graph)))
    return replace(made, before_autocast=graph)


def _kept(graph: ModelGraph) -> frozenset[str]:
    """Return the parameters that keep their dtype: frozen ones beside adapters; if some are in 4 bits, these alone."""
    if not has_adapters(graph):
        return frozenset()
    packed = {b.name: packed_weights(b) for b in graph.blocks.values()}
    in_4_bits = frozenset(call.params[name] for call in graph.calls for name in packed[call.block])
    return in_4_bits or frozenset(name for name, p in graph.params.items() if not p.trainable)


def weights_of(graph: ModelGraph, block: Block) -> frozenset[str]:
    """Return the values of a block that are parameters, or casts of them that autocast makes."""
    if not graph.autocast:
        return frozenset(block.params)
    made = (n.outputs[0] for n in block.nodes if op_has(n.op, Trait.CAST) and n.inputs[0] in block.params)
    return frozenset((*block.params, *made))


def _autocast(graph: ModelGraph, casts: _Casts) -> ModelGraph:
    dtypes = {name: casts.wide(graph.values[name].dtype) for name in graph.inputs}
    blocks: dict[str, Block] = {}
    made: dict[tuple[str, tuple[str, ...], frozenset[str]], Block] = {}
    calls: list[Call] = []
    for call in graph.calls:
        kept = frozenset(local for local, full in call.params.items() if full in casts.kept)
        key = call.block, tuple(dtypes[name] for name in call.inputs), kept
        if key not in made:
            name = call.block
            while name in blocks:
                name = f"{call.block}_{len(blocks)}"
            made[key] = blocks[name] = _BlockMaker(graph.blocks[call.block], key[1], kept, casts).run(name)
        block = made[key]
        for inside, outside in zip(block.outputs, call.outputs, strict=True):
            dtypes[outside] = block.values[inside].dtype
        calls.append(replace(call, block=block.name))

    def stored(tensors: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {n: p if n in casts.kept else replace(p, dtype=casts.wide(p.dtype)) for n, p in tensors.items()}

    found = replace(
        graph,
        blocks=blocks,
        calls=tuple(calls),
        values={name: replace(v, dtype=dtypes.get(name, casts.wide(v.dtype))) for name, v in graph.values.items()},
        params=stored(graph.params),
        buffers=stored(graph.buffers),
        evaluation=None if graph.evaluation is None else _autocast(graph.evaluation, casts),
        autocast=f"{casts.dtype} {casts.device_type}",
    )
    return found.in_order()


class _Casts:
    """The dtypes of a graph before and under autocast, and the parameters that keep theirs."""

    def __init__(self, model: str, main: str, dtype: str, device_type: str, kept: frozenset[str]) -> None:
        self.model, self.main, self.dtype, self.device_type, self.kept = model, main, dtype, device_type, kept

    def wide(self, dtype: str) -> str:
        """Return the dtype of a value in the model with float32 parameters."""
        return _WIDE if dtype == self.main else dtype


class _BlockMaker:
    """Makes a block under autocast from the dtypes of its inputs."""

    def __init__(self, block: Block, given: Sequence[str], kept: frozenset[str], casts: _Casts) -> None:
        self.block, self.casts = block, casts
        self.maker = {out: node for node in block.nodes for out in node.outputs}
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.cast_params: dict[tuple[str, str], str] = {}  # parameter and dtype -> its cast
        for name, dtype in zip(block.inputs, given, strict=True):
            self.values[name] = replace(block.values[name], dtype=dtype)
        for name in (*block.params, *block.buffers):
            before = block.values[name]
            self.values[name] = before if name in kept else replace(before, dtype=casts.wide(before.dtype))

    def run(self, name: str) -> Block:
        for node in self.block.nodes:
            self._add(node)
        return replace(self.block, name=name, nodes=tuple(self.nodes), values=self.values)

    def _add(self, node: Node) -> None:
        if node.op in NOT_KNOWN:
            raise PinError(
                f"{self.casts.model}: the operation {node.op!r} is not known under autocast; use precision bf16, which "
                "computes everything in 16 bits"
            )
        if node.attrs.get(PACKED):
            self._add_packed(node)
            return
        rule = AutocastRule.LOWER if self._is_bias_of_product(node) else autocast_rule(node, self.casts.device_type)
        if adds_bias(node) and self.maker[node.tensor_inputs[0]].attrs.get(PACKED):
            rule = AutocastRule.NONE  # it is part of the product, whose result is cast
        target = self._target(rule, node)
        inputs = tuple(x if x is None or target is None else self._cast(x, target, node) for x in node.inputs)
        outs = [self._result(node, inputs, out, rule) for out in node.outputs]
        attrs = dict(node.attrs)
        if isinstance(attrs.get("dtype"), str) and attrs["dtype"] in _FLOATS:
            attrs["dtype"] = outs[0]
        self.nodes.append(replace(node, inputs=inputs, attrs=attrs))
        for out, dtype in zip(node.outputs, outs, strict=True):
            self.values[out] = replace(self.block.values[out], dtype=dtype)

    def _add_packed(self, node: Node) -> None:
        """Add a product with a weight in 4 bits: of 16-bit inputs, its result cast to the dtype that it was given."""
        (out,), (given, weight) = node.outputs, node.tensor_inputs
        dtype, value = self.values[given].dtype, self.block.values[out]
        inputs = self._cast(given, self.casts.dtype, node), weight
        if dtype == self.casts.dtype:
            self.nodes.append(replace(node, inputs=inputs))
            self.values[out] = replace(value, dtype=dtype)
            return
        narrow = self._fresh(f"{out}_{self.casts.dtype}")
        self.values |= {narrow: replace(value, name=narrow, dtype=self.casts.dtype), out: replace(value, dtype=dtype)}
        self.nodes.append(replace(node, inputs=inputs, outputs=(narrow,)))
        cast = f"{out}_{dtype}"
        self.nodes.append(Node(cast, "to", (narrow,), (out,), {"dtype": dtype}, node.scope, node.source))

    def _is_bias_of_product(self, node: Node) -> bool:
        """Return True for the addition of a parameter to a product, as `addmm` is captured, whose operands are cast."""
        if node.op != "add" or len(node.tensor_inputs) < 2:
            return False
        product, bias = node.tensor_inputs
        before = self.maker.get(product)
        made_at = before is not None and op_kind(before.op) is OpKind.PRODUCT and before.source == node.source
        return made_at and bias in self.block.params

    def _target(self, rule: AutocastRule, node: Node) -> str | None:
        """Return the dtype that floating inputs of a node are cast to; None: they stay as they are."""
        if rule is AutocastRule.LOWER:
            return self.casts.dtype
        if rule is AutocastRule.FLOAT32:
            return _WIDE
        return _widest(self._of(node.tensor_inputs)) if rule is AutocastRule.WIDEST else None

    def _of(self, names: Sequence[str]) -> list[Value]:
        return [self.values[name] for name in names]

    def _cast(self, name: str, dtype: str, node: Node) -> str:
        """Return the name of a value in a dtype: itself, or its cast, which is added before the node."""
        value = self.values[name]
        if value.dtype == dtype or value.dtype not in _FLOATS:
            return name
        held = name in self.block.params
        if held and (name, dtype) in self.cast_params:
            return self.cast_params[name, dtype]
        out = self._fresh(f"{name}_{dtype}" if held else f"{node.name}_{name}_{dtype}")
        self.values[out] = replace(value, name=out, dtype=dtype)
        cast = Node(out, "to", (name,), (out,), {"dtype": dtype}, node.scope, node.source)
        # a bias is part of the product before it, which the emitted text writes as one call
        at = next(i for i, n in enumerate(self.nodes) if node.inputs[0] in n.outputs) if adds_bias(node) else None
        self.nodes.insert(len(self.nodes) if at is None else at, cast)
        if held:
            self.cast_params[name, dtype] = out
        return out

    def _fresh(self, name: str) -> str:
        found, count = name, 1
        while found in self.values or found in self.block.values:
            found, count = f"{name}_{count}", count + 1
        return found

    def _result(self, node: Node, inputs: Sequence[str | None], out: str, rule: AutocastRule) -> str:
        """Return the dtype of an output."""
        before = self.block.values[out].dtype
        if before not in _FLOATS:
            return before
        if op_has(node.op, Trait.CAST):
            source = self._cast_back(node) if before == self.casts.main else None
            return self.casts.wide(before) if source is None else self.values[source].dtype
        if rule is AutocastRule.LOWER:
            return self.casts.dtype
        usual = self._promoted(node, [self.block.values[x] for x in node.tensor_inputs])
        if usual != before or isinstance(node.attrs.get("dtype"), str) or op_has(node.op, Trait.TAKES_DTYPE):
            return self.casts.wide(before)
        return self._promoted(node, self._of([x for x in inputs if x is not None])) or self.casts.wide(before)

    @staticmethod
    def _promoted(node: Node, values: Sequence[Value]) -> str | None:
        """Return the dtype that PyTorch gives the result of operands; None without floating ones.

        A norm has the dtype of what it norms.
        """
        return _widest(values[:1] if op_kind(node.op) is OpKind.NORM else values)

    def _cast_back(self, node: Node) -> str | None:
        """Return the value that was cast up to float32 before and whose dtype this cast leads back to; None without."""
        return self._behind(node.inputs[0], self.block.values[node.outputs[0]])

    def _behind(self, name: str | None, out: Value) -> str | None:
        node = None if name is None else self.maker.get(name)
        if node is None or op_kind(node.op) not in _WITHIN_NORMS:
            return None
        if op_has(node.op, Trait.CAST):
            source = self.block.values[node.tensor_inputs[0]]
            return source.name if source.dtype == self.casts.main and source.shape == out.shape else None
        found = (self._behind(x, out) for x in node.inputs)
        return next((x for x in found if x is not None), None)


def _widest(values: Sequence[Value]) -> str | None:
    """Return the dtype that PyTorch promotes floating operands to: those with dims decide, if there are any."""
    floats = [v for v in values if v.dtype in _FLOATS or v.dtype == "float64"]
    dtypes = {v.dtype for v in ([v for v in floats if v.shape] or floats)}
    if len(dtypes & set(HALF)) == len(HALF):
        return _WIDE  # neither holds the other
    return max(sorted(dtypes), key=DTYPE_BYTES.__getitem__, default=None)
