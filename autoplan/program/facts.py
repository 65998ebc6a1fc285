"""Facts of model, cluster and run that decide which configurations are legal (`autoplan.program.legality`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from autoplan.config.kernels import ASYNC_TP, COMPILE
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.recompute import MODULES
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.ir.graph import Block, ModelGraph, Node, is_around_layers
from autoplan.ir.symbols import Expr
from autoplan.names import mtp_model
from autoplan.ops.attention import reads_whole_keys
from autoplan.ops.batch import batch_obstacle, context_obstacle
from autoplan.ops.experts import SECOND_BIAS
from autoplan.ops.products import packed_weights
from autoplan.ops.record import OpKind
from autoplan.ops.table import flops, nodes_with, rule_for
from autoplan.program.megatron_modules import modules
from autoplan.program.regions import Flow
from autoplan.stacks.like import Like
from autoplan.units import most


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention op; `where`: its place in the user's model."""

    where: str
    heads: int
    kv_heads: int


def attention_heads(graph: ModelGraph, *, of_sequences: bool = False) -> dict[str, list[AttentionHeads]]:
    """Return the heads of every attention op with fixed numbers of them, by block.

    Args:
        of_sequences: only of those whose keys may be cut over ranks.
    """
    out: dict[str, list[AttentionHeads]] = {}
    for block, node in nodes_with(graph, OpKind.ATTENTION):
        if of_sequences and reads_whole_keys(node, block.values):
            continue
        heads, kv = (block.values[n].shape[1].value for n in node.tensor_inputs[:2])
        if heads is not None and kv is not None:
            where = node.source or f"{block.name}/{node.name}"
            out.setdefault(block.name, []).append(AttentionHeads(where, heads, kv))
    return out


def model_sizes(graph: ModelGraph) -> dict[str, int]:
    """Return the sizes that files of frameworks name, too: `hidden_size`, `num_heads`; without those that differ."""
    widths = {block.values[node.outputs[0]].shape[-1].value for block, node in nodes_with(graph, OpKind.EMBEDDING)}
    heads = {op.heads for found in attention_heads(graph).values() for op in found}
    known: dict[str, set[int | None]] = {"hidden_size": widths, "num_heads": {*heads}}
    return {name: size for name, found in known.items() if len(found) == 1 and (size := next(iter(found))) is not None}


def latent_attention(graph: ModelGraph) -> bool:
    """Return True for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys are wider than values."""
    found = [
        [block.values[n].shape[-1].value for n in node.tensor_inputs[1:3]]
        for block, node in nodes_with(graph, OpKind.ATTENTION)
    ]
    return any(len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1] for sizes in found)


def kv_ranks(graph: ModelGraph, tp: int) -> int:
    """Return the ranks of tp that key-value heads are split over; the others of tp have copies of them."""
    return math.gcd(tp, min((op.kv_heads for found in attention_heads(graph).values() for op in found), default=tp))


def expert_counts(graph: ModelGraph) -> tuple[int, ...]:
    """Return the number of experts of every experts op."""
    return tuple(int(n.attrs["num_experts"]) for _, n in nodes_with(graph, OpKind.EXPERTS))


def inner_sizes(graph: ModelGraph) -> tuple[int, ...]:
    """Return the sizes that are cut where the experts of an op are: their inner size, and that of the second bias."""
    found: list[int] = []
    for block, node in nodes_with(graph, OpKind.EXPERTS):
        found.append(int(node.attrs["intermediate_size"]))
        found += [block.values[n].shape[-1].value or 1 for n in node.tensor_inputs[SECOND_BIAS:]]
    return tuple(found)


MTP_PREFIX = "mtp."  # of the names of layers that predict tokens after the next


def layer_calls(graph: ModelGraph) -> list[str]:
    """Return the layer calls between which a pipeline may be cut (embedding, head, glue and tables are excluded)."""
    return [c.name for c in graph.calls if c.params and not is_around_layers(c.name)]


def num_mtp_layers(graph: ModelGraph) -> int:
    """Return how many of the layers predict tokens after the next (`autoplan.program.multi_token`): the last ones."""
    return sum(name.startswith(MTP_PREFIX) for name in layer_calls(graph))


def pipeline_units(graph: ModelGraph, ends: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the units between which a pipeline may be cut, each as names of calls.

    A unit is a layer and the glue after it; the calls before the first layer belong to its unit. Parameter-free calls,
    which every stage computes for itself, are left out. A model without layers is one unit.

    Args:
        ends: the calls before the first layer (embedding) and after the last one (head, loss) are units of their own,
            as Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split count them.
    """
    layers = set(layer_calls(graph))
    units: list[list[str]] = [[]]
    for name in (call.name for call in graph.bound_calls()):
        if name in layers and any(n in layers for n in units[-1]):
            units.append([])
        units[-1].append(name)
    if ends and layers:
        units = _ends_apart(units, layers)
    return tuple(tuple(unit) for unit in units)


def _ends_apart(units: list[list[str]], layers: Set[str]) -> list[list[str]]:
    first = next(k for k, name in enumerate(units[0]) if name in layers)
    units = [units[0][:first], units[0][first:], *units[1:]]
    last = next(k for k, name in enumerate(units[-1]) if name in layers)
    units = [*units[:-1], units[-1][: last + 1], units[-1][last + 1 :]]
    return [unit for unit in units if unit]


def stage_calls(units: Sequence[Sequence[str]], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the calls of every stage from the number of units per stage."""
    out, at = [], 0
    for count in counts:
        out.append(tuple(n for unit in units[at : at + count] for n in unit))
        at += count
    return tuple(out)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that limit how it can be split, computed from its graph when first asked for."""

    graph: ModelGraph = field(repr=False)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.graph.name

    @cached_property
    def heads(self) -> tuple[tuple[str, int], ...]:
        """(where, number of attention heads) of every attention."""
        return tuple((op.where, op.heads) for found in attention_heads(self.graph).values() for op in found)

    @cached_property
    def packed(self) -> bool:
        """True if some weights are stored in 4 bits."""
        return any(packed_weights(block) for block in self.graph.blocks.values())

    @cached_property
    def dimless(self) -> tuple[str, ...]:
        """Names of parameters without dims, which ZeRO cannot shard."""
        return tuple(name for name, p in self.graph.params.items() if not p.shape)

    @cached_property
    def mixed(self) -> tuple[tuple[str, frozenset[str], frozenset[str]], ...]:
        """(call, dtypes of its trained parameters, of all) of every call whose parameters have several dtypes."""
        found = []
        for call in self.graph.calls:
            params = [self.graph.params[name] for name in call.params.values()]
            every = frozenset(p.dtype for p in params)
            if len(every) > 1:
                found.append((call.name, frozenset(p.dtype for p in params if p.trainable), every))
        return tuple(found)

    @cached_property
    def main_dtype(self) -> str | None:
        """The dtype of most elements of the parameters; None for a model without parameters."""
        return most((p.dtype, p.num_elements) for p in self.graph.params.values())

    @cached_property
    def num_layers(self) -> int:
        """Layers that a pipeline may be cut between; 1 for a model without layers."""
        return len(pipeline_units(self.graph))

    @cached_property
    def num_ends(self) -> int:
        """Pipeline chunks that embedding and head can make by themselves (priced only)."""
        return len(pipeline_units(self.graph, ends=True)) - self.num_layers

    @cached_property
    def batch_obstacle(self) -> str | None:
        """Why the batch cannot be split, or None."""
        return batch_obstacle(self.graph)

    @cached_property
    def context_obstacle(self) -> str | None:
        """Why sequences cannot be cut, or None."""
        return context_obstacle(self.graph)

    def num_tokens(self, seq_len: int) -> int:
        """Return the tokens of a sequence of this length; more than that if the length is that of a part of them."""
        if not self.graph.parts:
            return seq_len
        sizes = (b.values[n.tensor_inputs[0]].shape[2] for b, n in nodes_with(self.graph, OpKind.ATTENTION))
        return max((int(size.evaluate({"s": seq_len})) for size in sizes if size.symbols <= {"s"}), default=seq_len)

    @cached_property
    def num_experts(self) -> int:
        """Number of experts (the greatest common divisor over layers); 0 if there are none."""
        return math.gcd(*expert_counts(self.graph))

    @cached_property
    def inner_size(self) -> int:
        """Inner size of the experts (the greatest common divisor)."""
        return math.gcd(*inner_sizes(self.graph))

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The fewest learned positions, by the symbol of a length (s, t), for models that have any."""
        found: dict[str, int] = {}
        for block, node in nodes_with(self.graph, OpKind.EMBEDDING):
            table, index = (block.values[name] for name in node.tensor_inputs[:2])
            symbols, rows = [name for size in index.shape for name in size.symbols], table.shape[0].value
            if len(symbols) == 1 and rows is not None:
                found[symbols[0]] = min(rows, found.get(symbols[0], rows))
        return found

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules of Megatron's recompute that some layer has (`program.megatron_modules`)."""
        found = {name for b in self.graph.blocks.values() for name in modules(Flow.of_block(b), b.outputs)}
        return tuple(name for name in MODULES if name in found)

    @cached_property
    def _flops(self) -> dict[tuple[str, str], Expr]:
        return {}

    def flops(self, block: Block, node: Node) -> Expr:
        """Return the forward arithmetic of a node as a function of the sizes of the batch; counted once per graph."""
        key, is_mine = (block.name, node.name), self.graph.blocks.get(block.name) is block
        if is_mine and key in self._flops:
            return self._flops[key]
        found = flops(node, block.values, rule_for(node, block.values))
        if is_mine:
            self._flops[key] = found
        return found

    @cached_property
    def block_calls(self) -> tuple[str, ...]:
        """Calls that a mapping of recompute may name: those of blocks with work of their own."""
        return tuple(call.name for call in self.graph.bound_calls())


class _Same:
    """A graph as a dictionary key that is equal only to itself."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.graph is self.graph


@lru_cache(maxsize=8)  # all points of a sweep ask for the same few graphs
def _model_facts(key: _Same) -> ModelFacts:
    return ModelFacts(key.graph)


def facts_of_model(graph: ModelGraph) -> ModelFacts:
    """Return the facts of a model, computed once for every graph."""
    return _model_facts(_Same(graph))


@dataclass(frozen=True)
class Facts:
    """Everything besides the configuration that decides legality. None means unknown, which refuses nothing.

    Attributes:
        devices: number of devices of the cluster.
        batch: sequences per step over all data-parallel ranks.
        gradient_compression: name of the compression of gradients that `parallelize` was given; "": none.
        async_tp, compile: as `autoplan.parallelize` takes them.
        compile_backends: names of backends of torch.compile that `compile` may be, besides True, False and 'auto'.
        as_given: True if the program is made from a graph of the catalog, in the dtypes that this graph has; False if
            the graph was captured in the precision of the plan.
        like: the stack that runs the plan, whose abilities hold; None: anything with a price.
        host_link: False if the speed between devices and their host is not known.
        peers: devices that read each other's memory over NVLink.
    """

    devices: int
    model: ModelFacts | None = None
    batch: int | None = None
    seq_len: int | None = None
    mode: Mode = Mode.EAGER
    precision: str = "native"
    options: RunOptions = field(default_factory=RunOptions)
    host_link: bool = True
    device_name: str = ""
    target_len: int | None = None
    device_type: str = "cpu"
    gradient_compression: str = ""
    async_tp: bool | str = ASYNC_TP
    compile: bool | str = COMPILE
    compile_backends: tuple[str, ...] = ()
    as_given: bool = False
    like: Like | None = None
    peers: int | None = None

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        cluster: Cluster,
        batch: int | None = None,
        seq_len: int | None = None,
        mode: Mode = Mode.EAGER,
        precision: str = "native",
        options: RunOptions | None = None,
        target_len: int | None = None,
        like: Like | None = None,
    ) -> Facts:
        """Return the facts of a task."""
        return cls(
            cluster.num_devices,
            facts_of_model(graph),
            batch,
            seq_len,
            mode,
            precision,
            options or RunOptions(),
            cluster.host_link_bytes_per_s is not None,
            cluster.device.name,
            target_len,
            cluster.device_type,
            like=like,
            peers=cluster.peers,
        )

    def length(self, symbol: str) -> int | None:
        """Return the tokens of a sequence (s) or of a target sequence (t), which by default is as long."""
        return self.seq_len if symbol == "s" or self.target_len is None else self.target_len

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may not expect of the task: sequences beyond the positions of the config, attention whose dropout
        costs more than attention, inputs of one size, layers that the stack adds to the model, notes of the graph."""
        if self.model is None:
            return ()
        graph, longest = self.model.graph, max(self.seq_len or 0, self.target_len or 0)
        found = list[str]()
        if graph.positions is not None and longest > graph.positions:
            found.append(
                f"its config names {graph.positions:,} positions, and sequences have {longest:,} tokens: the price is "
                "right, but a run needs a config for longer sequences"
            )
        if self.seq_len is not None and _has_fixed_inputs(graph):
            found.append(
                f"its inputs have a fixed size: a sequence length of {self.seq_len:,} changes no step, it only says "
                "as how many tokens a sample counts"
            )
        if (rate := _attention_dropout(graph)) is not None:
            found.append(
                f"attention with dropout ({rate:g}) that the model's file writes out is not one op: it is priced as "
                "single operations with all scores in memory, as autoplan runs it"
            )
        said = "its config names" if self.like is None or not self.like.mtp_layers else f"{self.like.name} adds"
        usual = graph.left_out if self.like is None else self.like.mtp_layers or graph.left_out
        if usual and num_mtp_layers(graph) == 0:
            layers = "layer" if usual == 1 else "layers"
            found.append(
                f"{said} {usual} {layers} for tokens after the next, which {mtp_model(graph.name, usual)} prices"
            )
        return (*found, *graph.notes)


def _has_fixed_inputs(graph: ModelGraph) -> bool:
    """Return True if no input has a size that depends on the length of a sequence, as images have none."""
    sizes = (size for name in graph.inputs for size in graph.values[name].shape)
    return all(size.symbols <= {"b"} for size in sizes) and any(graph.values[n].shape for n in graph.inputs)


def _attention_dropout(graph: ModelGraph) -> float | None:
    """Return the rate of the dropout of a softmax; None without one."""
    for block in graph.blocks.values():
        shares = {name for node in block.nodes if node.op == "softmax" for name in node.outputs}
        for node in block.nodes:
            if node.op == "dropout" and shares & set(node.tensor_inputs):
                return float(node.attrs["p"])
    return None
