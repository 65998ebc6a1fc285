"""Why attention needs whole sequences, and what would let ranks of context parallelism share them.

Tokens with an order are cut in two chunks per rank; attention then has a causal or another pattern of its own. Tokens
without an order (`ModelGraph.parts`) are cut in equal parts: attention sees the keys of all parts, or keys that are
whole on every rank, and no pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.ir.graph import Block, Node, Value
from autoplan.ir.layout import AxisType, R, shard
from autoplan.ops.attention import shows_keys

_NAMES = ("queries", "keys", "values")
_ORDERED = ("causal", "window", "ahead", "chunk", "documents")  # attributes of attention that sees keys by their place
_BESIDE_KEYS = (("documents", shard(1, 0)), ("sinks", R), ("key_bias", shard(3, 0)))


def whole_attention(node: Node, inputs: Sequence[AxisType], block: Block, length: int) -> str | None:
    """Return why attention cannot be computed for a part of a sequence, or None if it can.

    Args:
        inputs: types of its inputs on the axis of the ranks that share the sequence.
        length: tokens that the symbol `s` stands for, which have no order; 0 if tokens have one.
    """
    values = [block.values[name] for name in node.tensor_inputs]
    cut = [kind.is_shard and kind.dim == 2 for kind in inputs[:3]]
    if length:
        for name in (name for name in _ORDERED if node.attrs.get(name) not in (None, False)):
            return (
                f"{name}={node.attrs[name]} sees keys by their place, and the ranks' parts of joined tokens have none"
            )
        if set(inputs[1:3]) == {R}:
            return _of_whole_keys(node, inputs, values, block, length)
    if not all(cut) or (length and values[0].shape[2] != values[1].shape[2]):
        return _not_alike(values, cut, block, length)
    return _of_key_masks(node, inputs, values, block, length) if length else _of_order(node, inputs, values, block)


def _of_order(node: Node, inputs: Sequence[AxisType], values: Sequence[Value], block: Block) -> str | None:
    if tuple(inputs[3:]) == tuple(kind for name, kind in _BESIDE_KEYS if node.attrs.get(name)):
        return None
    return (
        f"its mask {described(values[-1], block, 0)} is a tensor; is_causal, windows, packed documents and the "
        "attention_mask [batch, tokens] of transformers work"
    )


def _of_key_masks(
    node: Node, inputs: Sequence[AxisType], values: Sequence[Value], block: Block, length: int
) -> str | None:
    if node.attrs.get("sinks"):
        return None if list(inputs[3:]) == [R] else "it has a mask beside its sinks"
    for kind, mask in zip(inputs[3:], values[3:], strict=True):
        if not shows_keys(mask, values[1]) or kind != shard(3, inputs[1].factor):
            return (
                f"its mask {described(mask, block, length)} is not one of keys alone; a mask of bool, "
                "[batch, 1, 1, keys], True for keys that all queries see, works"
            )
    return None


def _of_whole_keys(
    node: Node, inputs: Sequence[AxisType], values: Sequence[Value], block: Block, length: int
) -> str | None:
    if not (inputs[0] == R or (inputs[0].is_shard and inputs[0].dim == 2)):
        return f"its queries {described(values[0], block, length)} are not cut along their tokens"
    for kind, mask in zip(inputs[3:], values[3:], strict=True):
        if not _of_queries(kind, mask, values[0]):
            return f"its mask {described(mask, block, length)} is not cut as its queries are"
    return None


def _of_queries(kind: AxisType, mask: Value, query: Value) -> bool:
    """Return True for a mask that is whole, or cut as the queries are."""
    if not kind.is_shard or mask.dims is None or query.dims is None:
        return kind == R
    return kind.dim == len(mask.dims) - 2 and mask.dims[kind.dim] == query.dims[2]


def _not_alike(values: Sequence[Value], cut: Sequence[bool], block: Block, length: int) -> str:
    named = [f"{name} {described(x, block, length)}" for name, x in zip(_NAMES, values, strict=False)]
    if not any(cut):
        return f"its {named[0]} are not cut along their tokens (dim 2), nor are its keys and values"
    if all(cut):
        return f"its {named[0]} are not as many as its {named[1]}"
    parts, whole = (" and ".join(x for x, is_cut in zip(named, cut, strict=True) if is_cut is y) for y in (True, False))
    return f"ranks would have parts of {parts}, and all of {whole}"


def described(value: Value, block: Block, length: int) -> str:
    """Return shape and dtype of a value, and the line that made it; `length`: see `whole_attention`."""
    maker = next((node for node in block.nodes if value.name in node.outputs), None)
    made = "" if maker is None or not maker.source else f" made at {maker.source}"
    shape = (size.evaluate({"s": length}) if length and size.symbols == {"s"} else size for size in value.shape)
    return f"[{', '.join(map(str, shape))}] of {value.dtype}{made}"
