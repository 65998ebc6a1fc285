"""Records of attention: scaled dot products, with masks, documents, sliding windows, chunks; with dropout, too.

Attention with dropout of its probabilities is an op of its own: its mask has a place in the program, and it runs in
parts (runtime/in_parts.py), by kernels of our own on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from autoplan.errors import RuleError
from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering
from autoplan.ops.language import Labels, OpRule, Role, bind, parse
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.saved import (
    Form,
    OpFacts,
    SavedRule,
    TensorFacts,
    extra_bytes,
    keeps,
    kept,
    statistics_bytes,
    workspace_bytes,
)
from autoplan.ops.text import OpText
from autoplan.torch_kernels import LARGEST_DROPPED_HEAD, LARGEST_HEAD, ROW_BLOCK, biased_width, window_blocks
from autoplan.units import DTYPE_BYTES, HALF

DROPPED = "dropped_attention"  # the op with dropout
DOCUMENT_DTYPE = "int8"  # of documents that are made of a mask of keys (`documents_of_keys` of runtime/context.py)

# -- capture -----------------------------------------------------------------------------------------------------------


def _named(a: Args, tensors: tuple[str | None, ...], attrs: dict[str, Any]) -> IrResult:
    """Return attention, with dropout if there is any."""
    if p := float(a.get("dropout_p") or 0.0):
        return IrOp(DROPPED, tensors, {"p": p, **attrs})
    return IrOp("attention", tensors, attrs)


def _arguments(a: Args) -> IrResult:
    tensors: tuple[str | None, ...] = (a["query"], a["key"], a["value"])
    if a.get("attn_mask") is not None:
        tensors = (*tensors, a["attn_mask"])
    return _named(a, tensors, {"causal": bool(a.get("is_causal", False)), "scale": a.get("scale")})


def _biased_attention(a: Args) -> IrResult:
    tensors: tuple[str | None, ...] = (a["query"], a["key"], a["value"], a["bias"])
    return _named(a, tensors, {"causal": a["causal"], "scale": a.get("scale")})


def _masked_attention(a: Args) -> IrResult:
    tensors: tuple[str | None, ...] = (a["query"], a["key"], a["value"])
    attrs = {"causal": a["causal"], "scale": a.get("scale")}
    if a.get("documents") is not None:
        tensors, attrs["documents"] = (*tensors, a["documents"]), True
    if a.get("sinks") is not None:
        tensors, attrs["sinks"] = (*tensors, a["sinks"]), True
    if a.get("key_bias") is not None:
        tensors, attrs["key_bias"] = (*tensors, a["key_bias"]), True
    attrs |= {name: a[name] for name in ("window", "ahead", "chunk", "softcap") if a.get(name) is not None}
    return _named(a, tensors, attrs)


# -- layouts and arithmetic --------------------------------------------------------------------------------------------

_LINE = parse("[b,kv g,s!,d!], [b,kv,t!,d!], [b,kv,t!,e!] -> [b,kv g,s!,e!]")


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    heads, kv = ins[0][1], ins[1][1]
    group = heads.divide(kv)
    if group is None:
        raise RuleError(f"{node.name}: {heads} query heads are not a multiple of {kv} key-value heads")
    sizes = {"kv": kv, "g": group}
    rule = bind(_LINE, ins[:3], outs, sizes)

    def tidy(dims: tuple[Labels, ...]) -> tuple[Labels, ...]:
        return tuple(tuple(x for x in dim if x not in sizes or sizes[x].value != 1) for dim in dims)

    inputs = [tidy(dims) for dims in rule.inputs]
    roles = list(rule.roles)
    if node.attrs.get("documents") and len(ins[3]) == 2:  # the document of every token
        inputs.append((("b",), ("s",)))
        roles.append(Role.OTHER)
    if node.attrs.get("sinks"):
        inputs.append(tidy((("kv", "g"),)))
        roles.append(Role.OTHER)
    for mask in ins[len(inputs) :]:  # bias by key, additive or boolean mask: broadcast against [b, heads, s, t]
        names: list[Labels] = [("b",), tuple(x for x in ("kv", "g") if sizes[x].value != 1), ("s",), ("t",)]
        skip = 4 - len(mask)
        inputs.append(tuple(() if size.value == 1 else names[skip + i] for i, size in enumerate(mask)))
        roles.append(Role.OTHER)
    return OpRule(tuple(inputs), tuple(tidy(d) for d in rule.outputs), tuple(roles), rule.whole, sizes=sizes)


def _flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return the flops of q k^T and p v, 2 per multiply-add; half under a causal mask."""
    q, k, v = ins[:3]
    points = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]) * 2
    return points.scale(Fraction(1, 2)) if node.attrs.get("causal") else points


def reads_whole_keys(node: Node, values: Mapping[str, Value]) -> bool:
    """Return True for attention whose keys have not the length of the sequence, so that no ranks have parts of them."""
    return "s" not in values[node.tensor_inputs[1]].shape[2].symbols


def shows_keys(mask: Value, key: Value) -> bool:
    """Return True for a mask [b or 1, 1, 1, t] of bool: it says which keys are seen, by all queries and heads."""
    if mask.dims is None or key.dims is None or mask.dtype != "bool" or len(mask.dims) != 4:
        return False
    return mask.dims[1:3] == ((), ()) and mask.dims[3] == key.dims[2]


def with_documents(node: Node, values: Mapping[str, Value]) -> Node:
    """Return attention over a cut sequence as it runs: a mask that says which keys are seen is taken as documents.

    Keys that nobody sees are a document of their own (`autoplan.runtime.attention`).
    """
    if len(node.tensor_inputs) != 4 or any(node.attrs.get(name) for name in _BESIDE):
        return node
    _, key, _, mask = (values[name] for name in node.tensor_inputs)
    return replace(node, attrs={**node.attrs, "documents": True}) if shows_keys(mask, key) else node


def seen_share(node: Node, num_keys: float) -> float:
    """Return the part of the arithmetic that `flops` counts which windows and chunks leave.

    A causal window: query i sees keys i - window + 1 to i, s w - w^2 / 2 points of the causal s^2 / 2. On both sides:
    all but the corners before and after it, of s^2. Chunks: a causal square each.
    """
    n, sizes = num_keys, (node.attrs.get(name) for name in ("window", "ahead", "chunk"))
    window, ahead, chunk = (None if size is None else float(size) for size in sizes)
    if chunk is not None and chunk < n:
        return (n // chunk * chunk**2 + (n % chunk) ** 2) / n**2
    if ahead is not None and window is not None:
        corners = (max(0.0, n - window), max(0.0, n - 1 - ahead))
        return 1.0 - sum(x * (x + 1) for x in corners) / 2 / n**2
    return 1.0 if window is None or window >= n else 1.0 - (1.0 - window / n) ** 2


def _as_run(f: OpFacts, num_keys: int | None = None) -> OpFacts:
    """Return attention without the attributes that hide nothing, as `Pattern.within` of runtime/parts.py does.

    Args:
        num_keys: of the whole sequence; None: those of the input.
    """
    f = with_columns(f)
    n = f.inputs[1].shape[2] if num_keys is None else num_keys
    window, ahead, chunk = (f.attrs.get(name) for name in ("window", "ahead", "chunk"))
    if f.attrs.get("documents") and chunk is not None:
        window, chunk = chunk, None
    if chunk is not None and chunk >= n:
        chunk = None
    if ahead is None or ahead >= n - 1:
        window, ahead = (None, None) if window is None or window >= n else (window, ahead)
    return replace(f, attrs={**f.attrs, "window": window, "ahead": ahead, "chunk": chunk})


_BESIDE = ("documents", "sinks", "key_bias")  # attributes of inputs after queries, keys and values, in this order


def _place_of_bias(f: OpFacts) -> int:
    return 2 + sum(bool(f.attrs.get(name)) for name in _BESIDE)


def with_columns(f: OpFacts) -> OpFacts:
    """Return attention with a bias by key as it runs: as columns of queries and keys (runtime/key_bias.py)."""
    if not f.attrs.get("key_bias"):
        return f
    q, k, v, *beside = f.inputs
    at = _place_of_bias(f) - 3
    times = 1 if beside[at].shape[1] == 1 else q.shape[1] // k.shape[1]
    width = biased_width(k.shape[3], v.shape[3])
    wide = (
        replace(x, shape=(x.shape[0], n * x.shape[1], x.shape[2], width)) for x, n in ((q, 1), (k, times), (v, times))
    )
    inputs = (*wide, *beside[:at], *beside[at + 1 :])
    outs = tuple(replace(out, shape=(*out.shape[:3], width)) for out in f.outputs)
    return replace(f, inputs=inputs, outputs=outs, attrs={**f.attrs, "key_bias": False})


def _is_in_parts(f: OpFacts) -> bool:
    """Return True for attention that torch has no kernel for (runtime/in_parts.py)."""
    return any(f.attrs.get(name) for name in ("sinks", "softcap", "chunk", "p"))


def unfused_in_megatron(attrs: Mapping[str, Any]) -> bool:
    """Return True for capped scores, which neither Transformer Engine nor cuDNN has.

    NeMo computes them by plain operations (`Gemma2DotProductAttention` of nemo/collections/llm/gpt/model/gemma2.py).
    """
    return bool(attrs.get("softcap"))


def computed_on_cpu(f: OpFacts) -> tuple[OpKind, float]:
    """Return as what torch's CPU backend computes it, attention or plain products, and the FLOPs of its forward.

    A mask halves nothing there, and windows are blocks (`_in_blocks`); attention in parts has blocks of rows.
    """
    f = _as_run(f)
    if _is_in_parts(f):
        kind = OpKind.PRODUCT if is_in_row_blocks(f) else OpKind.ATTENTION
        return kind, 2.0 * f.inputs[0].num_elements // f.inputs[0].shape[-1] * keys_per_query(f) * _widths(f)
    there = _in_blocks(f) if _is_windowed(f) else f
    q, k, v = there.inputs[:3]
    flops = 2.0 * (q.num_elements // q.shape[-1]) * k.shape[2] * (q.shape[-1] + v.shape[-1])
    if _is_composed(there):
        return OpKind.PRODUCT, flops
    masked = len(there.inputs) > 3
    return OpKind.ATTENTION, flops / 2 if f.attrs.get("causal") and not masked else flops


# -- memory ------------------------------------------------------------------------------------------------------------


def _lse(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of fused attention's log-sum-exp of every query (Dao, FlashAttention-2, 2023)."""
    q = f.inputs[0]
    return (q.num_elements // q.shape[-1] * statistics_bytes(q.dtype),)


def _repeats(f: OpFacts) -> int:
    """Return how often the runtime repeats keys and values for a kernel that takes no grouped heads; 1 if it does not.

    On CUDA that is every kernel but flash attention, which takes 16 bits and no masks (`choose` of runtime/sdpa.py).
    """
    q, k, v = f.inputs[:3]
    if f.device_type == "cpu" or q.dtype not in (*HALF, "float32"):
        return 1
    aligned = not f.attrs.get("causal") or q.shape[2] == k.shape[2]
    by_flash = q.dtype in HALF and len(f.inputs) == 3 and q.shape[3] == v.shape[3] <= LARGEST_HEAD and aligned
    return 1 if by_flash else q.shape[1] // k.shape[1]


def needs_causal_mask(f: OpFacts, num_keys: int) -> bool:
    """Return True if attention of queries that end with the keys is given a mask (`choose` of runtime/sdpa.py).

    Flash attention on CUDA takes 16 bits and causal masks that end with the keys, but no documents.

    Args:
        num_keys: of the whole sequence.
    """
    f = _as_run(f, num_keys)
    q, k, v = f.inputs[:3]
    if _is_in_parts(f) or f.attrs["ahead"] is not None:
        return False
    if f.attrs.get("documents") or not f.attrs.get("causal"):
        return bool(f.attrs.get("documents"))
    return f.device_type == "cpu" or q.dtype not in HALF or max(k.shape[3], v.shape[3]) > LARGEST_HEAD


def _repeated(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of keys and values for all query heads."""
    return tuple(_repeats(f) * t.num_bytes for t in f.inputs[1:3])


def _own_mask_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of a mask that the runtime combines with the causal one, or that torch makes a float."""
    q, k, _, mask = f.inputs[:4]
    documents = bool(f.attrs.get("documents"))
    shape = [mask.shape[0], 1, 1, 1] if documents else [1] * (4 - len(mask.shape)) + list(mask.shape)
    if f.attrs.get("causal") or documents:
        shape[2:] = [q.shape[2], k.shape[2]]
    size = DTYPE_BYTES[q.dtype if mask.dtype == "bool" or documents else mask.dtype]
    for s in shape:
        size *= s
    return (*_lse(f), size)


def _is_composed(f: OpFacts) -> bool:
    """Return True if torch's CPU backend composes it of matrix products: head and value dims differ, a learned mask."""
    return f.device_type == "cpu" and (f.inputs[0].shape[-1] != f.inputs[2].shape[-1] or _learns_mask(f))


def _learns_mask(f: OpFacts) -> bool:
    return len(f.inputs) > 3 and f.inputs[3].requires_grad and not f.attrs.get("sinks")


def drawn_bytes(f: OpFacts, ways: int = 1) -> tuple[int, ...]:
    """Return the bytes of the counters of a mask that is drawn, of every head, query and key; none without dropout.

    Args:
        ways: ranks that the sequence is cut over; each has the counters of all queries and keys.
    """
    q, k = f.inputs[:2]
    sizes = (q.shape[0] * q.shape[1], ways * q.shape[2], ways * k.shape[2]) if f.attrs.get("p") else ()
    return tuple(DTYPE_BYTES["int64"] * size for size in sizes)


def _scores_bytes(f: OpFacts) -> int:
    """Return the bytes of the scores of attention that is composed of matrix products."""
    q, k = f.inputs[:2]
    return q.num_elements // q.shape[-1] * k.shape[2] * statistics_bytes(q.dtype)


def _copies_values(f: OpFacts) -> bool:
    """Return True if composed attention copies values: to float32, or for all query heads."""
    q, k = f.inputs[:2]
    return q.dtype in HALF or q.shape[1] != k.shape[1]


def _composed_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of attention composed of matrix products.

    Kept: scaled queries and keys, their softmax, copied values, and what a learned mask takes from causality.
    """
    q, k, v = f.inputs[:3]
    width, times = statistics_bytes(q.dtype), q.shape[1] // k.shape[1]
    sizes = [q.num_elements * width, times * k.num_elements * width, _scores_bytes(f)]
    sizes += [times * v.num_elements * width] if _copies_values(f) else []
    return (*sizes, *((q.shape[2] * k.shape[2],) if _learns_mask(f) and f.attrs.get("causal") else ()))


def _composed_workspace(f: OpFacts) -> tuple[int, int]:
    """Return the bytes of scores before the softmax and of its rows without a key, and of the gradients of both."""
    return (2 * _scores_bytes(f), 2 * _scores_bytes(f))


def _in_blocks(f: OpFacts) -> OpFacts:
    """Return attention in a window as it runs: blocks of queries, and of the keys and values near them.

    Blocks are sequences of their own (`autoplan.runtime.attention._windowed`).
    """
    f, length = _as_run(f), f.inputs[0].shape[2]
    size, before, behind = window_blocks(f.attrs["window"], f.attrs["ahead"], length)
    num_blocks = -(-length // size)

    def blocks(t: TensorFacts, length: int) -> TensorFacts:
        b, heads, _, d = t.shape
        return replace(t, shape=(b * num_blocks, heads, length, d))

    q, *keys = f.inputs[:3]
    near = before + size + behind
    ins = blocks(q, size), *(blocks(t, near) for t in keys)
    mask = TensorFacts((ins[0].shape[0], 1, size, near), "bool", False)
    return replace(f, inputs=(*ins, mask), attrs={**f.attrs, "causal": False, "documents": False})


def _is_windowed(f: OpFacts) -> bool:
    return _as_run(f).attrs["window"] is not None


def _windowed_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of attention in a window: its blocks, and what attention keeps of them."""
    there = _in_blocks(f)
    q, k, v = there.inputs[:3]
    alone = q.dtype in HALF and not f.attrs.get("documents")
    keys, values = (_blocks_bytes(f, t) for t in (k, v))
    if _is_composed(there):
        return (*_composed_extra(there), *(() if _copies_values(there) else (values,)))
    read = (keys, values) if alone or _repeats(there) == 1 else _repeated(there)
    out = () if _has_views(f) else (replace(q, shape=(*q.shape[:3], v.shape[3])).num_bytes,)
    return (q.num_bytes, *read, *out, *_own_mask_extra(there))


def _has_views(f: OpFacts) -> bool:
    """Return True where blocks of one sample are views: of keys and values, which overlap, and of the result.

    Windows alone are taken by flash attention on most GPUs, without blocks: for them all blocks are an upper bound.
    """
    alone = f.inputs[0].dtype in HALF and not f.attrs.get("documents") and f.device_type != "cpu"
    return f.inputs[0].shape[0] == 1 and not alone


def _blocks_bytes(f: OpFacts, blocks: TensorFacts) -> int:
    """Return the bytes of blocks of keys or values."""
    if not _has_views(f):
        return blocks.num_bytes
    num_blocks, heads, _, d = blocks.shape
    attrs = _as_run(f).attrs
    size, before, behind = window_blocks(attrs["window"], attrs["ahead"], f.inputs[0].shape[2])
    return replace(blocks, shape=(1, heads, before + num_blocks * size + behind, d)).num_bytes


def _windowed_workspace(f: OpFacts) -> tuple[int, int]:
    there = _in_blocks(f)
    return _composed_workspace(there) if _is_composed(there) else _workspace(f)


def _workspace(f: OpFacts) -> tuple[int, int]:
    q, k, v = f.inputs[:3]
    rows = q.num_elements // q.shape[-1] * statistics_bytes(q.dtype)
    if f.device_type == "cpu":
        return (0, rows)
    # FlashAttention-2: the gradient of the queries is summed in float32; grouped heads get their own key and value
    # gradients first
    repeated = (k.num_bytes + v.num_bytes) * (q.shape[1] // k.shape[1]) if q.shape[1] != k.shape[1] else 0
    # a learned mask: its gradient before it is summed over the broadcast dims
    scores = q.num_elements // q.shape[-1] * k.shape[2] * DTYPE_BYTES[q.dtype] if _learns_mask(f) else 0
    return (0, rows + q.num_elements * 4 + repeated + scores)


PLAIN_ATTENTION = keeps("x0<0,1,2 x1<0,1,2 x2<0,1,2 x3<0,1,2 y0<0,1,2", Form.NEW, extra=_lse, workspace=_workspace)
_OWN_MASK = keeps("x0<0,1,2 x1<0,1,2 x2<0,1,2 y0<0,1,2", Form.NEW, extra=_own_mask_extra, workspace=_workspace)
_REPEATED = keeps(
    "x0<0,1,2 x3<0,1,2 y0<0,1,2", Form.NEW, extra=lambda f: (*_lse(f), *_repeated(f)), workspace=_workspace
)
_OWN_MASK_REPEATED = keeps(
    "x0<0,1,2 y0<0,1,2", Form.NEW, extra=lambda f: (*_own_mask_extra(f), *_repeated(f)), workspace=_workspace
)
# without and with a result that is a view of the blocks
_WINDOWED = [keeps(out, Form.NEW, extra=_windowed_extra, workspace=_windowed_workspace) for out in ("", "y0<0,1,2")]
# without and with copied values
_COMPOSED = [
    keeps(values, Form.NEW, extra=_composed_extra, workspace=_composed_workspace) for values in ("x2<0,1,2", "")
]


def is_in_row_blocks(f: OpFacts) -> bool:
    """Return True for attention in parts that holds scores of a block of queries at a time (`_kernel` of parts.py).

    On CUDA flash attention takes all but documents, capped scores and 32 bits; windows on most GPUs.
    """
    f = _as_run(f)
    if not _is_in_parts(f):
        return False
    q, k, v = f.inputs[:3]
    if f.attrs.get("p"):
        return f.device_type == "cpu" or not _takes_dropped(f)
    if f.attrs.get("documents") or f.attrs.get("softcap") or (f.device_type == "cpu" and f.attrs["window"] is not None):
        return True
    return f.device_type != "cpu" and (q.dtype not in HALF or max(k.shape[3], v.shape[3]) > LARGEST_HEAD)


def _takes_dropped(f: OpFacts) -> bool:
    """Return True if our kernels of a GPU take attention with dropout (runtime/dropped_attention.py)."""
    q, k, v = f.inputs[:3]
    narrow = q.dtype in HALF and max(k.shape[3], v.shape[3]) <= LARGEST_DROPPED_HEAD
    return narrow and not f.attrs.get("softcap")


def _has_mask(f: OpFacts) -> bool:
    """Return True for attention with a mask of its own, a tensor."""
    return len(f.inputs) > 3 + sum(bool(f.attrs.get(name)) for name in _BESIDE)


def keys_per_query(f: OpFacts) -> float:
    """Return the number of keys that a query of attention in parts is multiplied with, on average.

    Of a cut sequence the queries are a part, from all over it.
    """
    f, keys = _as_run(f), f.inputs[1].shape[2]
    window, ahead = f.attrs["window"] or keys, f.attrs["ahead"]
    if not f.attrs.get("causal") and ahead is None:
        return keys
    length = f.attrs["chunk"] or keys
    in_rows, total = is_in_row_blocks(f), 0.0
    for here, times in ((length, keys // length), (keys % length, 1)):
        if not in_rows:
            total += times * here * here / 2
            continue
        for first in range(0, here, ROW_BLOCK):
            last = min(first + ROW_BLOCK, here)
            total += times * (last - first) * (min(here, last + (ahead or 0)) - max(0, first - window + 1))
    return total / keys


def _widths(f: OpFacts) -> int:
    return f.inputs[0].shape[-1] + f.inputs[2].shape[-1]


def _in_parts_workspace(f: OpFacts) -> tuple[int, int]:
    """Return the bytes of scores, their mask and probabilities of a block of queries, and of their gradients.

    Where a kernel holds none, those of the part that it computes, and of its gradients.
    """
    f, chunk = _as_run(f), _as_run(f).attrs["chunk"]
    if not is_in_row_blocks(f):
        if chunk is None:
            return _workspace(f)
        q, k, v = (replace(t, shape=(*t.shape[:2], min(chunk, t.shape[2]), t.shape[3])) for t in f.inputs[:3])
        part = replace(f, inputs=(q, k, v, *f.inputs[3:]))
        forward, backward = _workspace(part)
        rows = q.num_elements // q.shape[-1]
        made = rows * (v.shape[-1] * DTYPE_BYTES[q.dtype] + statistics_bytes(q.dtype))
        return (forward + made, backward + q.num_bytes + k.num_bytes + v.num_bytes)
    q, k = f.inputs[:2]
    rows = min(ROW_BLOCK, q.shape[2], chunk or ROW_BLOCK)
    keys = min(k.shape[2], chunk or k.shape[2])
    if f.attrs["window"] is not None:
        keys = min(keys, rows + f.attrs["window"] + (f.attrs["ahead"] or 0))
    pairs = q.shape[0] * q.shape[1] * rows * keys
    scores = pairs * statistics_bytes(q.dtype)
    if not f.attrs.get("p"):
        return (2 * scores, 4 * scores)
    drawn = 3 * DTYPE_BYTES["int64"] * min(pairs, _DRAWN_BLOCK[f.device_type == "cpu"])
    return (scores + pairs + max(drawn, scores), 4 * scores + pairs)


# pairs whose mask is drawn at a time, on a GPU and on the CPU (runtime/dropout.py)
_DRAWN_BLOCK = (1 << 26, 1 << 18)


def _in_parts_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of the log-sum-exp of every query, and of what a mask is drawn from."""
    return (*_lse(f), *drawn_bytes(f))


_KEPT_IN_PARTS = "x0<0,1,2 x1<0,1,2 x2<0,1,2 y0<0,1,2"
_IN_PARTS = keeps(_KEPT_IN_PARTS, Form.NEW, extra=_in_parts_extra, workspace=_in_parts_workspace)
# with a mask of its own, which is read again
_IN_PARTS_MASKED = keeps(f"x3<0,1,2,3 {_KEPT_IN_PARTS}", Form.NEW, extra=_in_parts_extra, workspace=_in_parts_workspace)


def biased_rule(f: OpFacts, rule_of: Callable[[OpFacts], SavedRule]) -> SavedRule:
    """Return the rule of attention with a bias by key: it keeps its columns, and a result of their width.

    Args:
        rule_of: gives the rule of the attention that runs, on the columns.
    """
    inner = with_columns(f)
    rule = rule_of(inner)
    tensors = {f"x{i}": t for i, t in enumerate(inner.inputs)} | {"y0": inner.outputs[0]}
    at = _place_of_bias(f)  # other operands beside it are kept as they are given
    given = {f"x{i}": f"x{i + (i >= at)}" for i in range(3, len(inner.inputs))}
    names = kept(inner, rule)
    sizes = (*(tensors[name].num_bytes for name in names if name not in given), *extra_bytes(inner, rule))
    made = sum(t.num_bytes for t in inner.inputs[:3])
    forward, backward = workspace_bytes(inner, rule)
    keeps = tuple((given[name], (0, 1, 2)) for name in names if name in given)
    return SavedRule(keeps, Form.NEW, extra=lambda _: sizes, workspace=lambda _: (forward, backward + made))


def _form(f: OpFacts) -> SavedRule | None:
    if f.attrs.get("key_bias"):
        return biased_rule(f, lambda inner: _form(inner) or PLAIN_ATTENTION)
    f = _as_run(f)
    if _is_in_parts(f):
        return _IN_PARTS_MASKED if _has_mask(f) else _IN_PARTS
    if _is_windowed(f):
        return _WINDOWED[_has_views(f) and not _is_composed(_in_blocks(f))]
    if _is_composed(f):
        return _COMPOSED[_copies_values(f)]
    if _repeats(f) > 1:
        return _OWN_MASK_REPEATED if _has_own_mask(f) else _REPEATED
    return _OWN_MASK if _has_own_mask(f) else None


def _has_own_mask(f: OpFacts) -> bool:
    own = f.attrs.get("causal") or f.attrs.get("documents")
    if _is_in_parts(f):
        return False
    return len(f.inputs) > 3 and bool(f.inputs[3].dtype == "bool" or own)


def taking_groups(f: OpFacts) -> SavedRule:
    """Return the rule of kernels that take grouped heads in all dtypes, together with masks or windows."""
    f = _as_run(f)
    return _OWN_MASK if f.attrs["window"] is None and _has_own_mask(f) else PLAIN_ATTENTION


def _text(t: OpText) -> str:
    names = [*(name for name in _BESIDE if t.attrs.get(name)), "mask"]
    mask = "".join(f", {name}={given}" for name, given in zip(names, t.args[3:], strict=False))
    scale = t.attrs["scale"]
    more = ("window", "ahead", "chunk", "softcap")
    pattern = "".join(f", {name}={t.attrs[name]!r}" for name in more if t.attrs.get(name) is not None)
    dropped = f", dropout_p={t.attrs['p']!r}, rng=rng" if "p" in t.attrs else ""
    how = f"causal={t.attrs['causal']}, scale={scale!r}{pattern}{dropped}"
    return f"attention({', '.join(t.args[:3])}{mask}, {how}{t.over})"


def _record(name: str, aten: Mapping[str, Lowering], *traits: Trait) -> OpRecord:
    return OpRecord(
        name,
        OpKind.ATTENTION,
        _rule,
        PLAIN_ATTENTION,
        _text,
        aten,
        flops=_flops,
        saved_form=_form,
        factor_names={"kv": "kv", "g": "group", "d": "head", "e": "head"},
        variable="attended",
        has=(Trait.RUNS_ON_DEVICE, *traits),
    )


RECORDS = (
    _record(
        "attention",
        {
            "aten.scaled_dot_product_attention.default": _arguments,
            "autoplan.masked_attention.default": _masked_attention,
            "autoplan.biased_attention.default": _biased_attention,
        },
    ),
    _record(DROPPED, {}, Trait.RANDOM, Trait.DROPS),
)
