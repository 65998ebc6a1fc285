"""Work of the operations of a block: local shapes in numbers, arithmetic and traffic under one strategy.

The intra-op program prices its options with these, and the workload of a whole plan consists of the same works, so that
both agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.config.context_methods import ContextMethod
from autoplan.config.precision import PRECISIONS, Precision
from autoplan.cost_models.hardware.parts import Group
from autoplan.cost_models.network.groups import axis_groups
from autoplan.cost_models.work import OpWork, Plain
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis, Layout
from autoplan.ir.symbols import Expr
from autoplan.ops.attention import reads_whole_keys, seen_share, with_documents
from autoplan.ops.record import WITHOUT_AUTOCAST, OpKind
from autoplan.ops.saved import OpFacts, TensorFacts
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import op_kind, op_record
from autoplan.program.context_parallel import exchanged
from autoplan.program.facts import facts_of_model, layer_calls
from autoplan.program.megatron_kernels import Kernels
from autoplan.program.statements import Collective
from autoplan.units import DTYPE_BYTES, most

_FLOATS = frozenset(("float64", "float32", "bfloat16", "float16"))
_IGNORED_ATTRS = frozenset(("scale", "bias", WITHOUT_AUTOCAST))
_NARROW = (OpKind.PRODUCT, OpKind.EXPERTS)


class OpCosts:
    """Sizes and works of one graph on given sub-axes for one micro-batch and sequence length.

    Args:
        env: `b` and `s`, the part of the sequence on one context-parallel rank.
        context: context-parallel degree; attention sees the keys of the whole sequence.
        precision: dtypes of computations that the model does in its own parameters' dtype.
        device_type: device whose kernels run; they differ in what they keep for the backward.
        kernels: kernels as far as they differ in what they keep; None runs op by op.
        methods: context-parallel method of every block; blocks without one gather keys.
    """

    def __init__(
        self,
        graph: ModelGraph,
        axes: Sequence[Axis],
        env: Mapping[str, int],
        *,
        context: int = 1,
        precision: Precision = PRECISIONS["native"],
        device_type: str = "cpu",
        kernels: Kernels | None = None,
        methods: Mapping[str, ContextMethod] | None = None,
    ) -> None:
        self.graph = graph
        self.axes: tuple[Axis, ...] = tuple(axes)
        self.env: dict[str, int] = dict(env)
        self.context = context
        self.precision = precision
        self.device_type = device_type
        self.kernels: Kernels = kernels or Kernels()
        self.methods: dict[str, ContextMethod] = dict(methods or {})
        self.sizes: dict[str, int] = graph.factor_sizes(env)
        self.groups: dict[tuple[int, ...], Group] = axis_groups([a.size for a in self.axes])
        self.remapped: dict[str, str] = _dtype_map(graph, precision)
        # only products of layers take 8 or 4 bits: the head keeps the dtype of activations (recipes of Transformer
        # Engine in Megatron-LM; torchtitan's float8 leaves out "output"). Without layers all products take them
        layers = set(layer_calls(graph))
        self._narrow = {c.block for c in graph.calls if c.name in layers or not layers}
        self._local: dict[tuple[str, str, Layout], tuple[int, ...]] = {}
        self._facts = facts_of_model(graph)
        self._flops: dict[tuple[str, str], float] = {}

    @property
    def fused(self) -> bool:
        """True if element-wise operations run in kernels together."""
        return self.kernels.fused

    def number(self, size: Expr) -> float:
        """Return a symbolic size as a number."""
        return float(size.evaluate(self.env))

    def dtype(self, value: Value) -> str:
        """Return the dtype in which a value is computed."""
        return self.remapped.get(value.dtype, value.dtype)

    def width(self, value: Value) -> int:
        """Return the bytes of one element."""
        return DTYPE_BYTES[self.dtype(value)]

    def sent_width(self, collective: Collective) -> float:
        """Return the bytes of one sent element. Gradients that are summed once per step have their own width."""
        if collective.per == "step" and self.precision.grad_bytes is not None:
            return self.precision.grad_bytes
        return DTYPE_BYTES[self.remapped.get(collective.dtype, collective.dtype)]

    def local(self, block: str, value: Value, layout: Layout) -> tuple[int, ...]:
        """Return the local shape of a value of a block."""
        key = (block, value.name, layout)
        found = self._local.get(key)
        if found is None:
            shape = []
            for dim in value.dims or ():
                size = 1
                for factor in dim:
                    size *= self.sizes[factor]
                shape.append(size)
            for axis, kind in zip(self.axes, layout, strict=True):
                if kind.is_shard:
                    shape[kind.dim] //= axis.size
            found = self._local[key] = tuple(shape)
        return found

    def num_bytes(self, block: str, value: Value, layout: Layout) -> float:
        """Return the local bytes of a value."""
        total = self.width(value)
        for size in self.local(block, value, layout):
            total *= size
        return float(total)

    def flops(self, block: Block, node: Node) -> float:
        """Return the forward arithmetic of a node on all ranks of the intra-op mesh together."""
        key = (block.name, node.name)
        found = self._flops.get(key)
        if found is None:
            found = self.number(self._facts.flops(block, node))
            # attention sees the keys of the whole sequence; causal halves are balanced over the ranks
            if op_kind(node.op) is OpKind.ATTENTION:
                found *= self.shares_of_keys(block, node) * seen_share(node, self.num_keys(block, node))
            self._flops[key] = found
        return found

    def num_keys(self, block: Block, node: Node) -> float:
        """Return the number of keys of the whole sequence that attention may see."""
        return self.number(block.values[node.tensor_inputs[1]].shape[2]) * self.shares_of_keys(block, node)

    def shares_of_keys(self, block: Block, node: Node) -> int:
        """Return the number of ranks whose keys attention sees."""
        return 1 if reads_whole_keys(node, block.values) else self.context

    def op_work(self, block: Block, node: Node, strategy: Strategy, bias: bool = False) -> OpWork:
        """Return the work of one op on one rank.

        Args:
            bias: the op includes the addition of a vector along the last dim.
        """
        op = op_record(node.op)
        if op.kind is OpKind.ATTENTION and self.shares_of_keys(block, node) > 1:
            node = with_documents(node, block.values)
        attends = op.kind is OpKind.ATTENTION and self.shares_of_keys(block, node) > 1
        inputs = [
            self._tensor(block, name, layout, keys=attends and 0 < k < 3, attends=attends and k < 3)
            for k, (name, layout) in enumerate(zip(node.tensor_inputs, strategy.inputs, strict=True))
        ]
        outputs = [
            self._tensor(block, name, layout) for name, layout in zip(node.outputs, strategy.outputs, strict=True)
        ]
        method = self.methods.get(block.name) if attends else None
        if method is not None and method.ulysses > 1:
            outputs = [replace(t, shape=exchanged(t.shape, method)) for t in outputs]
        if bias:
            inputs.append(TensorFacts(outputs[0].shape[-1:], outputs[0].dtype, outputs[0].requires_grad))
        moved = 0.0 if op.as_view else float(sum(t.num_bytes for t in (*inputs, *outputs)))
        flops = self.flops(block, node) / strategy.num_shards
        attrs = self._attrs(block, node, method)
        if op.inside is not None:
            found = op.inside(OpFacts(node.op, node.attrs, tuple(inputs), tuple(outputs)))
            attrs, moved = (*attrs, ("kernels", found.kernels)), found.moved_bytes
        return OpWork(node.op, tuple(inputs), tuple(outputs), attrs, flops, moved)

    def matmul_dtype(self, block: Block, kind: OpKind) -> str | None:
        """Return the number format of the products of an op of this kind, if it is not that of its inputs."""
        return self.precision.matmul if kind in _NARROW and block.name in self._narrow else None

    def _attrs(self, block: Block, node: Node, method: ContextMethod | None) -> tuple[tuple[str, Plain], ...]:
        """Return the attributes besides shapes that the time of an op depends on."""
        given = ((k, self._plain(v)) for k, v in node.attrs.items() if k not in _IGNORED_ATTRS and v is not None)
        attrs, kind = tuple(sorted(given)), op_kind(node.op)
        matmul = self.matmul_dtype(block, kind)
        if matmul is not None:
            attrs = (*attrs, ("matmul_dtype", matmul))
        if kind is OpKind.ATTENTION and self.context > 1 and reads_whole_keys(node, block.values):
            attrs = (*attrs, ("context_whole", True))
        elif kind is OpKind.ATTENTION:
            parts = self.context if method is None else method.ranks if method.is_ring else 1
            attrs = (*attrs, ("context_parts", parts)) if parts > 1 else attrs
        return attrs

    def _tensor(
        self, block: Block, name: str, layout: Layout, keys: bool = False, attends: bool = False
    ) -> TensorFacts:
        value = block.values[name]
        shape = self.local(block.name, value, layout)
        method = self.methods.get(block.name) if attends else None
        if method is not None and method.ulysses > 1:
            shape = exchanged(shape, method)
        if keys and self.context > 1:
            ways = self.context if method is None else method.ranks
            shape = (*shape[:2], shape[2] * ways, *shape[3:])
        return TensorFacts(shape, self.dtype(value), value.requires_grad)

    def _plain(self, value: object) -> Plain:
        if isinstance(value, Expr):
            return self.number(value)
        if isinstance(value, (tuple, list)):
            return str([self._plain(v) for v in value])
        return value if isinstance(value, (str, int, float, bool)) else str(value)


def _dtype_map(graph: ModelGraph, precision: Precision) -> dict[str, str]:
    """Map the dtype of most parameters to `precision.compute`; values that the model upcasts keep their dtype.

    A graph with the casts of autocast has the dtypes that it computes in.
    """
    if precision.compute is None or graph.autocast:
        return {}
    main = most((p.dtype, p.num_elements) for p in graph.params.values() if p.dtype in _FLOATS)
    return {} if main is None else {main: precision.compute}
