"""Sizes and batches to verify a captured graph on: cheap sizes that differ from the example's.

An example whose entries are all equal hides errors: without the causal mask, equal tokens see the same. Such inputs are
drawn at random: tokens below the number of rows of their embedding, labels below the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autoplan.ir.graph import ModelGraph, Node, Value
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_kind, op_record

SymbolSizes = Mapping[str, int]

_SEED = 0
_MASKS = ("attention_mask", "decoder_attention_mask")  # inputs of Hugging Face models: 1 for valid tokens
_POSITIONS = ("position_ids", "decoder_position_ids")
_LEAST_TOKENS = 8


@dataclass
class _Use:
    """The use of the whole numbers of an input: as indices of an embedding, as labels, or both."""

    rows: int | None = None  # number of rows of the smallest embedding that they index
    classes: int | None = None
    ignore_index: int = -100

    @property
    def limit(self) -> int | None:
        """The bound below which the numbers lie; None if it is not known."""
        known = [n for n in (self.rows, self.classes) if n is not None]
        return min(known) if known else None


@dataclass
class _Uses:
    """The uses of a graph's inputs, found by following them through the graph."""

    graph: ModelGraph
    origin: dict[str, set[str]] = field(default_factory=dict)  # top-level value -> the inputs whose numbers it holds
    uses: dict[str, _Use] = field(default_factory=dict)

    def find(self) -> dict[str, _Use]:
        """Return the uses by input."""
        self.origin = {name: {name} for name in self.graph.inputs}
        self.uses = {name: _Use() for name in self.graph.inputs}
        for call in self.graph.calls:
            block = self.graph.blocks[call.block]
            local = {f: self.origin.get(a, set()) for f, a in zip(block.inputs, call.inputs, strict=True)}
            for node in block.nodes:
                self._node(node, block.values, local)
            for name, actual in zip(block.outputs, call.outputs, strict=True):
                self.origin[actual] = local.get(name, set())
        return self.uses

    def _node(self, node: Node, values: Mapping[str, Value], local: dict[str, set[str]]) -> None:
        op = op_record(node.op)
        if op.kind in (OpKind.EMBEDDING, OpKind.LOSS):
            table, index = node.tensor_inputs[:2]
            size = values[table].shape[0 if op.kind is OpKind.EMBEDDING else -1].value
            for name in local.get(index, ()):
                use = self.uses[name]
                if op.kind is OpKind.EMBEDDING and size is not None:
                    use.rows = min(int(size), use.rows or int(size))
                elif size is not None:
                    use.classes, use.ignore_index = int(size), int(node.attrs["ignore_index"])
        elif Trait.KEEPS_NUMBERS in op.traits:
            found = set().union(*(local.get(x, set()) for x in node.tensor_inputs))
            local.update(dict.fromkeys(node.outputs, found))


def sizes_to_try(graph: ModelGraph, example: SymbolSizes) -> Iterator[dict[str, int]]:
    """Yield sizes of batch and sequences, the largest first. They differ from the example's where the model allows it.

    Args:
        example: `s` and `t` of the example, as far as the graph has them.
    """
    symbols = {x for name in graph.inputs for size in graph.values[name].shape for x in size.symbols}
    lengths = {x: n for x, n in example.items() if x in symbols}
    part, seen = 4, []
    while True:
        sizes = {x: _within(graph, x, n * 3 // part, n) for x, n in lengths.items()}
        if len(set(sizes.values())) < len(sizes) and sizes["t"] > max(1, graph.bounds.get("t", (0, None))[0]):
            sizes["t"] -= 1  # two lengths must not be mistaken for one another
        sizes["b"] = 3
        if sizes not in seen:
            seen.append(sizes)
            yield sizes
        if all(n * 3 // part <= _LEAST_TOKENS for n in lengths.values()):
            return
        part *= 2


def _within(graph: ModelGraph, symbol: str, wanted: int, example: int) -> int:
    """Return the length nearest to the wanted one within the bounds of the graph (the example's length is inside)."""
    low, high = graph.bounds.get(symbol, (0, None))
    least = max(low, min(_LEAST_TOKENS, example))
    wanted = max(wanted, least)
    return wanted if high is None else min(wanted, high)


def longest_window(graph: ModelGraph) -> int:
    """Return the largest sliding window of attention; 0 without any.

    Shorter sequences do not show whether the window is there.
    """
    nodes = (n for block in graph.blocks.values() for n in block.nodes if op_kind(n.op) is OpKind.ATTENTION)
    return max((int(n.attrs["window"]) for n in nodes if n.attrs.get("window") is not None), default=0)


def draw_batch(
    graph: ModelGraph, example: Mapping[str, torch.Tensor], sizes: SymbolSizes, *, whole_sample: bool = True
) -> dict[str, torch.Tensor]:
    """Return a batch of these sizes: the example cut or repeated, drawn at random where its entries are all equal.

    If there is a mask, some tokens are not valid (`_pad`), and with `whole_sample` all of the first sample.
    """
    generator = torch.Generator().manual_seed(_SEED)
    uses = _Uses(graph).find()
    batch = {}
    for name, given in example.items():
        shape = [int(size.evaluate(sizes)) for size in graph.values[name].shape]
        tensor = given.detach().cpu()
        for dim, size in enumerate(shape):
            tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
        batch[name] = _drawn(name, tensor, uses[name], generator)
    for name in _MASKS:
        if name in batch:
            _pad(graph, uses, batch, name)
            if whole_sample:  # whose labels count: what a query gets that sees no token is in the loss
                batch[name][0] = 0
    return batch


def has_mask(example: Mapping[str, torch.Tensor]) -> bool:
    """Return True if some tokens of a drawn batch are not valid."""
    return any(name in example for name in _MASKS)


def _drawn(name: str, tensor: torch.Tensor, use: _Use, generator: torch.Generator) -> torch.Tensor:
    if tensor.numel() < 2 or tensor.dtype is torch.bool:
        return tensor
    whole, equal = not tensor.is_floating_point(), bool((tensor == tensor.flatten()[0]).all())
    if not whole:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) if equal else tensor
    if name in _POSITIONS:
        return torch.arange(tensor.shape[-1], dtype=tensor.dtype).expand(tensor.shape).clone() if equal else tensor
    labels = use.classes is not None
    if labels and not equal and tensor.dim() > 1:  # the part that is the prompt may have no label that counts
        equal = not bool((tensor.flatten(1) != use.ignore_index).sum(1).gt(1).any())
    if not equal or use.limit is None or name in _MASKS:
        return tensor
    out = torch.randint(0, use.limit, tensor.shape, generator=generator, dtype=tensor.dtype)
    if labels and tensor.dim() > 1:
        ignored = torch.rand(tensor.shape, generator=generator) < 0.125
        ignored[:, :2] = False  # labels may be shifted by one
        out[ignored] = use.ignore_index
    return out


def _pad(graph: ModelGraph, uses: Mapping[str, _Use], batch: dict[str, torch.Tensor], mask: str) -> None:
    """Mask one token in the middle of the last but one sample: causal attention does not see padding behind it.

    If the example has no padding, the last quarter of the last sample is masked, too. Labels there are ignored.
    """
    shape, length = graph.values[mask].shape, batch[mask].shape[1]
    counts = torch.ones(batch[mask].shape, dtype=torch.bool)
    counts[-2, length // 3] = False
    if bool((batch[mask] == 1).all()):
        counts[-1, length - length // 4 :] = False
    batch[mask] = batch[mask].masked_fill(~counts, 0)
    for name, tensor in batch.items():
        if uses[name].classes is not None and graph.values[name].shape == shape:
            batch[name] = tensor.masked_fill(~counts, uses[name].ignore_index)
