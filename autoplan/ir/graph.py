"""ModelGraph: the torch-free form of a captured model.

A ModelGraph is a list of *calls* of *blocks*. A block (embedding, one decoder layer, head and loss) is defined once
however often it occurs; a call gives it its inputs and the full names of its parameters. Every tensor dim is a product
of named *factors* (`heads head_dim`, `b s` after a flatten) whose sizes may be symbolic, so that a sharding can name
the factor that it splits.

    graph = ModelGraph(...)      # made by autoplan.capture, factors filled by autoplan.ops.factors
    check(graph)                 # valid in, valid out: raises GraphError
    print(graph)                 # readable listing
    ModelGraph.from_json(graph.to_json()) == graph
    graph.content_hash           # cache key
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from autoplan.errors import GraphError
from autoplan.ir.dataflow import Dataflow
from autoplan.ir.symbols import Expr, product
from autoplan.units import DTYPE_BYTES, LossUnit, dtype_bytes

GRAPH_SCHEMA_VERSION = 2

# inputs of a captured graph that are not part of the batch: the runtime provides them
LOSS_DENOMINATOR = "loss_denominator"  # the global number of entries in the mean of the loss
LOSS_SHARE = "loss_share"  # one over the number of micro-batches, for values averaged over them
OF_THE_WHOLE_BATCH = "of_the_whole_batch"  # attribute: a number of the node is the size of the whole batch
# attribute: symbols over which the node takes an extreme of this rank's part; the next node takes that over all ranks
OF_PARTS = "of_parts"


# How the ranks of context parallelism share a dim of a fixed number of tokens: each run is (count, tokens), and of each
# of its `count` groups of `tokens` neighbours every rank has an equal part. Two sequences that are joined are two runs.
Runs = tuple[tuple[int, int], ...]


class LossCount(NamedTuple):
    """A denominator of the loss: the value whose labels it counts, and the label that does not count."""

    what: LossUnit
    target: str | None = None
    ignore_index: int = -100


class Result(NamedTuple):
    """A tensor that the model returns besides the loss: its name, and the value of a block in one of its calls."""

    name: str
    call: str
    value: str


def denominator(index: int) -> str:
    """Return the name of the input with a denominator of the loss."""
    return f"{LOSS_DENOMINATOR}{index + 1}" if index else LOSS_DENOMINATOR


_AROUND_LAYERS = re.compile(r"model|embed|head|glue\d+|tables\d*")  # names of calls


def is_around_layers(name: str) -> bool:
    """Return True for the name of a call that is no layer: what is before, between and behind the layers."""
    return _AROUND_LAYERS.fullmatch(name) is not None


def of_the_batch(name: str) -> bool:
    """Return True for an input that is part of the batch."""
    return name != LOSS_SHARE and not name.startswith(LOSS_DENOMINATOR)


_Thing = TypeVar("_Thing")
Dim = tuple[str, ...]  # factor names, major to minor; () is a dim of size 1


@dataclass(frozen=True)
class Value:
    """A tensor: global shape, dtype, whether a gradient flows to it, its dims as factors (None before inference)."""

    name: str
    shape: tuple[Expr, ...]
    dtype: str
    requires_grad: bool
    dims: tuple[Dim, ...] | None = None

    @property
    def num_elements(self) -> Expr:
        """Global number of elements."""
        return product(self.shape)

    @property
    def num_bytes(self) -> Expr:
        """Global bytes."""
        return self.num_elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Node:
    """One op.

    Attributes:
        inputs: names of values (None for an absent optional tensor).
        attrs: plain data or Expr.
    """

    name: str
    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""  # module path relative to the block
    source: str = ""  # file:line in the user's model

    @property
    def tensor_inputs(self) -> tuple[str, ...]:
        """The inputs that are present."""
        return tuple(name for name in self.inputs if name is not None)


@dataclass(frozen=True)
class Block:
    """A unit of repetition, recompute, ZeRO gathering and pipeline cutting."""

    name: str
    inputs: tuple[str, ...]
    params: tuple[str, ...]  # values that are parameters, named relative to the block's module path
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Call:
    """One occurrence of a block.

    Attributes:
        inputs, outputs: top-level values.
        params, buffers: name in the block -> full name.
    """

    name: str
    block: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Mapping[str, str]
    buffers: Mapping[str, str]


@dataclass(frozen=True)
class Parameter:
    """A parameter (or buffer) of the user's model.

    Attributes:
        aliases: further names of the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelGraph:
    """The whole model, forward and loss.

    The loss is a local sum divided by the input `loss_denominator`: the global number of entries in its mean, known
    before the first backward. Further terms may have denominators of their own (`loss_denominator2`, ...). A term that
    couples the tokens of a batch (a loss of routers) is multiplied by the input `loss_share`, if there is one: the mean
    over the micro-batches.

    Attributes:
        output: the top-level value of the (scalar) loss.
        loss_count: what the denominator counts: tokens are the entries of `loss_target` other than `ignore_index`, a
            total is that in `loss_target`.
        more_counts: the counts of further denominators.
        bounds: least and largest length that this graph holds for; with other lengths the forward computes something
            else.
        notes: what a user may not expect of this graph, in sentences.
        results: what the model returns besides the loss, as far as the loss depends on it. Not part of `content_hash`:
            plans do not depend on it.
        positions: the most tokens of a sequence that the config of the model names; None if it names none, or there is
            no config. Not part of the text form: the forward takes longer sequences, too.
        left_out: layers for tokens after the next that this config names, and transformers' modules leave out.
        evaluation: what the module computes in evaluation, where that is another graph; its calls have the names of the
            calls here. Not part of `content_hash`: plans do not depend on it.
        no_evaluation: why there is no such graph although the module computes something else then; "" otherwise.
        parts: factor -> its runs, for models whose attention runs over a fixed number of tokens without an order
            (`autoplan.capture.passes.sequences`). Their sizes are multiples of `s`, whose bounds are one number.
        no_sequence: why there is no sequence that ranks could share, where none has a length; "" otherwise. Not part of
            `content_hash`: plans do not depend on it.
        autocast: the 16-bit dtype and the type of device of the torch.autocast whose casts this graph has; "" without.
        before_autocast: the graph without these casts, if it is known. Not part of the text form.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    values: Mapping[str, Value]
    blocks: Mapping[str, Block]
    calls: tuple[Call, ...]
    params: Mapping[str, Parameter]
    buffers: Mapping[str, Parameter]
    loss_count: LossUnit = LossUnit.NONE
    loss_target: str | None = None
    ignore_index: int = -100
    factors: Mapping[str, Expr] = field(default_factory=dict)
    bounds: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)  # of s and t
    notes: tuple[str, ...] = ()
    more_counts: tuple[LossCount, ...] = ()
    results: tuple[Result, ...] = ()
    positions: int | None = field(default=None, compare=False)
    left_out: int = field(default=0, compare=False)
    evaluation: ModelGraph | None = None
    no_evaluation: str = ""
    parts: Mapping[str, Runs] = field(default_factory=dict)
    no_sequence: str = ""
    autocast: str = ""
    before_autocast: ModelGraph | None = field(default=None, compare=False, repr=False)

    @property
    def loss_counts(self) -> tuple[LossCount, ...]:
        """Return the count behind every denominator of the loss."""
        return (LossCount(self.loss_count, self.loss_target, self.ignore_index), *self.more_counts)

    def of_config(self, config: Mapping[str, Any]) -> ModelGraph:
        """Return the graph with what a Hugging Face config, as plain data, names: positions, and layers for tokens
        after the next."""
        text = config.get("text_config") or {}
        named = {name: config.get(key) or text.get(key) for name, key in _OF_CONFIGS.items()}
        known: dict[str, Any] = {name: value for name, value in named.items() if isinstance(value, int)}
        return replace(self, **known)

    @property
    def num_params(self) -> int:
        """Number of trainable and frozen parameters, tied ones counted once."""
        return sum(p.num_elements for p in self.params.values())

    @property
    def has_target(self) -> bool:
        """True if a second sequence has a length of its own: the symbol `t`."""
        return any("t" in size.symbols for name in self.inputs for size in self.values[name].shape)

    @property
    def sequence_chunks(self) -> int:
        """The chunks of a sequence that a rank of context parallelism has: two, or an equal part of every run."""
        return 1 if self.parts else 2

    def call_counts(self) -> dict[str, int]:
        """Return how often each block occurs."""
        counts: dict[str, int] = {name: 0 for name in self.blocks}
        for call in self.calls:
            counts[call.block] += 1
        return counts

    def flow(self, groups: Sequence[Sequence[str]] | None = None) -> Dataflow:
        """Return the data flow among groups of calls (units or stages of a pipeline), by default among the calls."""
        calls = {c.name: c for c in self.calls}
        of = [[c] for c in self.calls] if groups is None else [[calls[n] for n in group] for group in groups]
        return Dataflow([([v for c in g for v in c.inputs], [v for c in g for v in c.outputs]) for g in of])

    def uses_of(self, block: str) -> list[Call]:
        """Return the calls of a block, in their order."""
        return [call for call in self.calls if call.block == block]

    def free_calls(self) -> frozenset[str]:
        """Return calls that need no parameter, not even through their inputs: every pipeline stage recomputes them."""
        return self._free_calls

    @cached_property
    def _free_calls(self) -> frozenset[str]:
        trained = [i for i, call in enumerate(self.calls) if call.params]
        bound = {*trained, *self.flow().following(trained)}
        return frozenset(call.name for i, call in enumerate(self.calls) if i not in bound)

    def bound_calls(self) -> list[Call]:
        """Return the other calls, in order: each runs on one pipeline stage."""
        free = self.free_calls()
        return [call for call in self.calls if call.name not in free]

    @cached_property
    def tied_params(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        """The parameters that more than one call uses: full name -> ((call, name in block), ...)."""
        uses: dict[str, list[tuple[str, str]]] = {}
        for call in self.calls:
            for local, full in call.params.items():
                uses.setdefault(full, []).append((call.name, local))
        return {name: tuple(where) for name, where in uses.items() if len(where) > 1}

    def factor_sizes(self, env: Mapping[str, int]) -> dict[str, int]:
        """Return all factors as numbers under `env` (b, s, t). GraphError for a size that is not a whole number."""
        out = {}
        for name, size in self.factors.items():
            value = size.evaluate(env)
            if value.denominator != 1:
                raise GraphError(f"factor {name} = {size} is {value}, not a whole number, for {dict(env)}")
            out[name] = int(value)
        return out

    def with_factors(
        self, factors: Mapping[str, Expr], values: Mapping[str, Value], blocks: Mapping[str, Block]
    ) -> ModelGraph:
        """Return the graph with inferred factors."""
        return replace(self, factors=dict(factors), values=dict(values), blocks=dict(blocks))

    def in_order(self) -> ModelGraph:
        """Return the graph with its blocks in the order of calls and everything else sorted by name.

        So a graph does not depend on how it was made: a solver breaks ties by the order of its input.
        """
        called = dict.fromkeys((*(call.block for call in self.calls), *sorted(self.blocks)))
        blocks = {
            name: replace(b, values=_sorted(b.values), nodes=tuple(replace(n, attrs=_sorted(n.attrs)) for n in b.nodes))
            for name in called
            if (b := self.blocks.get(name))
        }
        return replace(
            self,
            values=_sorted(self.values),
            blocks=blocks,
            calls=tuple(replace(c, params=_sorted(c.params), buffers=_sorted(c.buffers)) for c in self.calls),
            params=_sorted(self.params),
            buffers=_sorted(self.buffers),
            factors=_sorted(self.factors),
            bounds=_sorted(self.bounds),
            parts=_sorted(self.parts),
            evaluation=self.evaluation and self.evaluation.in_order(),
        )

    def to_json(self) -> str:
        """Return the text form; equal graphs give equal text."""
        return json.dumps({"schema": GRAPH_SCHEMA_VERSION, "graph": _encode(self)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ModelGraph:
        """Read and check a graph. GraphError for another schema or a broken graph."""
        data = json.loads(text)
        if data.get("schema") != GRAPH_SCHEMA_VERSION:
            raise GraphError(
                f"ModelGraph schema {data.get('schema')!r} cannot be read; this version reads {GRAPH_SCHEMA_VERSION}"
            )
        graph = _decode_graph(data["graph"]).in_order()
        check(graph)
        return graph

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text form of what plans depend on."""
        return hashlib.sha256(self.without_results().to_json().encode()).hexdigest()

    def without_results(self) -> ModelGraph:
        """Return the graph of the loss in training alone."""
        if not (self.results or self.evaluation or self.no_evaluation or self.no_sequence):
            return self
        return replace(self, results=(), evaluation=None, no_evaluation="", no_sequence="")

    def __str__(self) -> str:
        lines = [
            f"model {self.name}: {self.num_params:,} parameters, {len(self.calls)} calls of {len(self.blocks)} blocks"
        ]
        if self.factors:
            lines.append("factors " + ", ".join(f"{k}={v}" for k, v in self.factors.items()))
        lines.append("inputs " + ", ".join(_show(self.values[name]) for name in self.inputs))
        for call in self.calls:
            lines.append(f"  {', '.join(call.outputs)} = {call.block}[{call.name}]({', '.join(call.inputs)})")
        lines.append(f"output {self.output}")
        for block in self.blocks.values():
            lines.append("")
            lines.append(f"block {block.name}({', '.join(_show(block.values[i]) for i in block.inputs)})")
            for p in (*block.params, *block.buffers):
                lines.append(f"  {'param' if p in block.params else 'buffer'} {_show(block.values[p])}")
            for node in block.nodes:
                attrs = ", ".join(f"{k}={v}" for k, v in node.attrs.items())
                args = ", ".join([*(str(i) for i in node.inputs), *([attrs] if attrs else [])])
                outs = ", ".join(_show(block.values[o]) for o in node.outputs)
                lines.append(f"  {outs} = {node.op}({args})")
            lines.append(f"  return {', '.join(block.outputs)}")
        return "\n".join(lines)


def _show(value: Value) -> str:
    if value.dims is None:
        shape = ", ".join(str(s) for s in value.shape)
    else:
        shape = ", ".join(" ".join(d) if d else "1" for d in value.dims)
    return f"{value.name}: {value.dtype}[{shape}]"


def _sorted(things: Mapping[str, _Thing]) -> dict[str, _Thing]:
    return dict(sorted(things.items()))


_RARE = (
    "notes",
    "more_counts",
    "results",
    "evaluation",
    "no_evaluation",
    "parts",
    "no_sequence",
    "autocast",
)  # nearly always empty
# Not part of the text form, by what configs call it
_OF_CONFIGS = {"positions": "max_position_embeddings", "left_out": "num_nextn_predict_layers"}
_NOT_IN_TEXT = (*_OF_CONFIGS, "before_autocast")


def _encode(obj: Any) -> Any:
    if isinstance(obj, Expr):
        return {"expr": str(obj)}
    if isinstance(obj, (Value, Node, Block, Call, Parameter, ModelGraph)):
        fields = {k: _encode(getattr(obj, k)) for k in obj.__dataclass_fields__}
        return {k: v for k, v in fields.items() if k not in _NOT_IN_TEXT and (k not in _RARE or v)}
    if isinstance(obj, Mapping):
        return {k: _encode(v) for k, v in obj.items()}
    if isinstance(obj, (tuple, list)):
        return [_encode(v) for v in obj]
    if isinstance(obj, complex):
        return {"complex": [obj.real, obj.imag]}
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    raise GraphError(f"{obj!r} of type {type(obj).__name__} is not plain data")


def _plain(obj: Any) -> Any:
    if isinstance(obj, dict):
        if set(obj) == {"expr"}:
            return Expr.parse(obj["expr"])
        if set(obj) == {"complex"}:
            return complex(*obj["complex"])
        return {k: _plain(v) for k, v in obj.items()}
    if isinstance(obj, list):
        return tuple(_plain(v) for v in obj)
    return obj


def _decode_value(data: Any) -> Value:
    return Value(**_plain(data))


def _decode_graph(data: Any) -> ModelGraph:
    blocks = {}
    for name, raw in data["blocks"].items():
        blocks[name] = Block(
            name=raw["name"],
            inputs=tuple(raw["inputs"]),
            params=tuple(raw["params"]),
            buffers=tuple(raw["buffers"]),
            outputs=tuple(raw["outputs"]),
            nodes=tuple(Node(**_plain(n)) for n in raw["nodes"]),
            values={k: _decode_value(v) for k, v in raw["values"].items()},
        )
    return ModelGraph(
        name=data["name"],
        inputs=tuple(data["inputs"]),
        output=data["output"],
        values={k: _decode_value(v) for k, v in data["values"].items()},
        blocks=blocks,
        calls=tuple(Call(**_plain(c)) for c in data["calls"]),
        params={k: Parameter(**_plain(v)) for k, v in data["params"].items()},
        buffers={k: Parameter(**_plain(v)) for k, v in data["buffers"].items()},
        loss_count=LossUnit(data["loss_count"]),
        loss_target=data["loss_target"],
        ignore_index=data["ignore_index"],
        factors=_plain(data["factors"]),
        bounds=_plain(data["bounds"]),
        notes=tuple(data.get("notes", ())),
        more_counts=tuple(LossCount(LossUnit(what), *rest) for what, *rest in data.get("more_counts", ())),
        results=tuple(Result(*result) for result in data.get("results", ())),
        evaluation=_decode_graph(data["evaluation"]) if data.get("evaluation") else None,
        no_evaluation=data.get("no_evaluation", ""),
        parts=_plain(data.get("parts", {})),
        no_sequence=data.get("no_sequence", ""),
        autocast=data.get("autocast", ""),
    )


def _check_value(where: str, value: Value, factors: Mapping[str, Expr]) -> None:
    if value.dtype not in DTYPE_BYTES:
        raise GraphError(f"{where}: {value.name} has unknown dtype {value.dtype!r}")
    if value.dims is None:
        return
    if len(value.dims) != len(value.shape):
        raise GraphError(f"{where}: {value.name} has {len(value.shape)} dims but {len(value.dims)} factor lists")
    for i, (dim, size) in enumerate(zip(value.dims, value.shape, strict=True)):
        unknown = [f for f in dim if f not in factors]
        if unknown:
            raise GraphError(f"{where}: {value.name} dim {i} names unknown factor {unknown[0]!r}")
        if product([factors[f] for f in dim]) != size:
            raise GraphError(
                f"{where}: {value.name} dim {i} is {size} but its factors {' '.join(dim)} multiply to another size"
            )


def _check_names(where: str, things: Mapping[str, Value] | Mapping[str, Block] | Mapping[str, Parameter]) -> None:
    for name, thing in things.items():
        if thing.name != name:
            raise GraphError(f"{where}: {name!r} holds something named {thing.name!r}")


def _define(where: str, defined: dict[str, None], names: tuple[str, ...]) -> None:
    for name in names:
        if name in defined:
            raise GraphError(f"{where}: {name!r} is defined twice")
        defined[name] = None


def _check_block(block: Block, factors: Mapping[str, Expr]) -> None:
    where = f"block {block.name}"
    _check_names(where, block.values)
    for value in block.values.values():
        _check_value(where, value, factors)
    defined: dict[str, None] = {}
    _define(where, defined, (*block.inputs, *block.params, *block.buffers))
    for node in block.nodes:
        for name in node.tensor_inputs:
            if name not in defined:
                raise GraphError(f"{where}: {node.name} uses {name!r} before it is defined")
        _define(where, defined, node.outputs)
    missing = [name for name in defined if name not in block.values]
    missing += [name for name in block.outputs if name not in defined]
    if missing:
        raise GraphError(f"{where}: {missing[0]!r} is not a value of the block")


def _check_call(graph: ModelGraph, call: Call) -> None:
    callee, where = graph.blocks[call.block], f"call {call.name}"
    for given, wanted in ((call.inputs, callee.inputs), (call.outputs, callee.outputs)):
        if len(given) != len(wanted):
            raise GraphError(
                f"{where}: {len(given)} values {', '.join(given)} for {', '.join(wanted)} of {callee.name}"
            )
        for actual, formal in zip(given, wanted, strict=True):
            if actual not in graph.values:
                raise GraphError(f"{where}: {actual!r} is not a value of the graph")
            a, f = graph.values[actual], callee.values[formal]
            if (a.shape, a.dtype, a.dims) != (f.shape, f.dtype, f.dims):
                raise GraphError(f"{where}: {_show(a)} passed for {_show(f)}")
    if set(call.params) != set(callee.params) or set(call.buffers) != set(callee.buffers):
        raise GraphError(f"{where} does not bind exactly the parameters of block {call.block}")
    for bound, known in ((call.params, graph.params), (call.buffers, graph.buffers)):
        for local, full in bound.items():
            if full not in known:
                raise GraphError(f"{where} binds {local} of block {call.block} to the unknown {full!r}")
            if callee.values[local].shape != tuple(Expr.of(s) for s in known[full].shape):
                raise GraphError(f"{where}: {full} has another shape than {local} of block {call.block}")


def check(graph: ModelGraph) -> None:
    """Raise GraphError unless every name resolves, is defined before use and once, and factors multiply to sizes."""
    _check_names("top level", graph.values)
    _check_names("blocks", graph.blocks)
    _check_names("parameters", graph.params)
    _check_names("buffers", graph.buffers)
    for value in graph.values.values():
        _check_value("top level", value, graph.factors)
    for block in graph.blocks.values():
        _check_block(block, graph.factors)
    available: dict[str, None] = {}
    _define("top level", available, graph.inputs)
    for name in graph.inputs:
        if name not in graph.values:
            raise GraphError(f"input {name!r} is not a value of the graph")
    for call in graph.calls:
        if call.block not in graph.blocks:
            raise GraphError(f"call {call.name} names unknown block {call.block!r}")
        for name in call.inputs:
            if name not in available:
                raise GraphError(f"call {call.name} uses {name!r} before it is defined")
        _check_call(graph, call)
        _define(f"call {call.name}", available, call.outputs)
    blocks = {call.name: graph.blocks[call.block] for call in graph.calls}
    for result in graph.results:
        if result.call not in blocks or result.value not in blocks[result.call].values:
            raise GraphError(f"result {result.name!r} is not a value of call {result.call!r}: {result.value!r}")
    targets = (("loss target", count.target) for count in graph.loss_counts)
    for what, wanted in (("output", graph.output), *targets):
        if wanted is not None and wanted not in available:
            raise GraphError(f"{what} {wanted!r} is not computed by any call")
    if graph.evaluation is not None:
        check(graph.evaluation)
