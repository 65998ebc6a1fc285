"""What every operation keeps for its backward: the table of activation memory.

Sources: `tools/autograd/derivatives.yaml` of PyTorch 2.13 for its own operations (decomposed as in eager mode),
`autoplan/runtime/{attention,dropout,embedding,loss}.py` for ours. An operation that is not here is an error.

A rule is written `"x0<1 x1<0 y0<0"`: input 0 is kept if input 1 needs a gradient, input 1 if input 0 does, output 0 if
input 0 does. What an operation keeps besides its inputs and outputs (statistics, log-sum-exp, a masked copy of the
indices), and what it needs only while it runs, are functions of its local shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from autoplan.errors import RuleError
from autoplan.ir.graph import Block
from autoplan.units import DTYPE_BYTES

_HALF = ("bfloat16", "float16")


class Form(Enum):
    """How the outputs relate to the memory of the inputs."""

    VIEW = "view"  # the same storage (a reshape that torch cannot express as a view copies)
    DENSE = "dense"  # new, in the order of memory of the operands (element-wise operations)
    NEW = "new"  # new and contiguous


class Gradient(Enum):
    """The gradient that the backward hands to an input that is not broadcast."""

    NEW = "new"
    PASS = "pass"  # the gradient of the output itself, or a view of it


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A local tensor."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def num_elements(self) -> int:
        """Element count."""
        out = 1
        for size in self.shape:
            out *= size
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes if dense."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """One operation on one rank. `special`: the sharded form of the strategy (vocab_embedding, ...)."""

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    special: str | None = None
    device_type: str = "cpu"

    @property
    def has_backward(self) -> bool:
        """True if a gradient flows through it."""
        return any(t.requires_grad for t in self.inputs)


Sizes = Callable[[OpFacts], tuple[int, ...]]


@dataclass(frozen=True)
class SavedRule:
    """What an operation keeps.

    keeps: (kept tensor, inputs one of which must need a gradient), e.g. ("x0", (1,)).
    extra: bytes of further tensors, each a storage of its own, kept if any input needs a gradient.
    workspace: bytes that are needed only while it runs: (forward, backward), results not included.
    """

    keeps: tuple[tuple[str, tuple[int, ...]], ...]
    form: Form = Form.DENSE
    gradient: Gradient = Gradient.NEW
    extra: Sizes | None = None
    workspace: Sizes | None = None


def _rule(
    keeps: str = "",
    form: Form = Form.DENSE,
    gradient: Gradient = Gradient.NEW,
    extra: Sizes | None = None,
    workspace: Sizes | None = None,
) -> SavedRule:
    out = []
    for word in keeps.split():
        found = re.fullmatch(r"([xy]\d)<([\d,]+)", word)
        if found is None:
            raise RuleError(f"{word!r} is not a kept tensor; write x0<1,2 or y0<0")
        out.append((found.group(1), tuple(int(i) for i in found.group(2).split(","))))
    return SavedRule(tuple(out), form, gradient, extra, workspace)


def _statistics(dtype: str) -> int:
    """Bytes of one mean, variance or log-sum-exp: accumulated in float32 below it."""
    return max(4, DTYPE_BYTES[dtype])


# -- what is kept besides inputs and outputs ---------------------------------------------------------------------------


def _layer_norm_extra(f: OpFacts) -> tuple[int, ...]:
    x = f.inputs[0]
    rows = x.num_elements // x.shape[-1]
    # the CPU kernel writes the statistics in the dtype of the input unless the weight is wider
    parts = [t.dtype for t in f.inputs]
    width = DTYPE_BYTES[x.dtype] if f.device_type == "cpu" else _statistics(x.dtype)
    width = max([width, *(DTYPE_BYTES[d] for d in parts)])
    return (rows * width, rows * width)  # mean, reciprocal standard deviation


def _rms_norm_extra(f: OpFacts) -> tuple[int, ...]:
    x = f.inputs[0]
    width = _statistics(x.dtype)
    rows = x.num_elements // x.shape[-1] * width
    if f.device_type != "cpu":
        return (rows,)  # one kernel: reciprocal root mean square
    # composed on the CPU: below float32 the input is cast up; the scaled input is kept for the weight's gradient
    wide = x.num_elements * width
    cast = (wide,) if x.dtype in _HALF else ()
    weighted = (wide,) if len(f.inputs) > 1 and f.inputs[1].requires_grad else ()
    return (rows, *cast, *weighted)


def _lse(f: OpFacts) -> tuple[int, ...]:
    """Fused attention: the log-sum-exp of every query (Dao, FlashAttention-2, 2023)."""
    q = f.inputs[0]
    return (q.num_elements // q.shape[-1] * _statistics(q.dtype),)


def _own_mask_extra(f: OpFacts) -> tuple[int, ...]:
    """The mask combined with the causal one by the runtime, or made from bool to float by torch."""
    q, k, _, mask = f.inputs[:4]
    documents = bool(f.attrs.get("documents"))
    shape = [mask.shape[0], 1, 1, 1] if documents else [1] * (4 - len(mask.shape)) + list(mask.shape)
    if f.attrs.get("causal") or documents:
        shape[2:] = [q.shape[2], k.shape[2]]
    size = DTYPE_BYTES[q.dtype if mask.dtype == "bool" or documents else mask.dtype]
    for s in shape:
        size *= s
    return (*_lse(f), size)


def _written_out_extra(f: OpFacts) -> tuple[int, ...]:
    """Attention composed of matrix products, as torch's CPU backend does where head and value dims differ.

    Kept: scaled queries and keys, the softmax, and its copy for the second product.
    """
    q, k = f.inputs[:2]
    width = _statistics(q.dtype)
    scores = q.num_elements // q.shape[-1] * k.shape[2] * width
    repeated = k.num_elements // k.shape[1] * q.shape[1] * width
    return (q.num_elements * width, repeated, scores)


def _learned_mask_extra(f: OpFacts) -> tuple[int, ...]:
    """The same, where a gradient goes to the mask: besides, which scores the runtime took out of it for causality."""
    q, k = f.inputs[:2]
    return (*_written_out_extra(f), *((q.shape[2] * k.shape[2],) if f.attrs.get("causal") else ()))


def _windowed_extra(f: OpFacts) -> tuple[int, ...]:
    """Queries in blocks of the window, keys and values in blocks of two, as sequences of their own, and what attention
    keeps of those (`autoplan.runtime.attention._windowed`)."""
    window = int(f.attrs["window"])
    num_blocks = -(-f.inputs[0].shape[2] // window)

    def blocks(t: TensorFacts, times: int) -> TensorFacts:
        b, heads, _, d = t.shape
        return replace(t, shape=(b * num_blocks, heads, times * window, d))

    q, k, v = f.inputs[:3]
    ins = blocks(q, 1), blocks(k, 2), blocks(v, 2)
    if f.device_type == "cpu" and q.shape[-1] != v.shape[-1]:
        return (ins[2].num_bytes, *_written_out_extra(replace(f, inputs=ins)))
    mask = TensorFacts((ins[0].shape[0], 1, window, 2 * window), "bool", False)
    out = replace(ins[0], shape=(*ins[0].shape[:3], v.shape[3]))
    of_blocks = replace(f, inputs=(*ins, mask), attrs={**f.attrs, "causal": False, "documents": False})
    return (*(t.num_bytes for t in (*ins, out)), *_own_mask_extra(of_blocks))


def _learned_mask_workspace(f: OpFacts) -> tuple[int, int]:
    """Scores with and without the mask; their gradient before and after the softmax."""
    scores = _written_out_extra(f)[2]
    forward, backward = _attention_workspace(f)
    return (forward + 2 * scores, backward + 2 * scores)


def _vocab_embedding_extra(f: OpFacts) -> tuple[int, ...]:
    """The local row numbers (runtime/embedding.py)."""
    return (f.inputs[1].num_elements * DTYPE_BYTES["int64"],)


def _cross_entropy_extra(f: OpFacts) -> tuple[int, ...]:
    """Of `F.cross_entropy`, on every device. Ours on GPUs keeps the logits, as large, and needs less while it runs."""
    logits, target = f.inputs
    smoothed = (target.num_elements,) if f.attrs.get("label_smoothing") else ()  # which targets are ignored
    # log-probabilities, and the total weight of the targets
    return (logits.num_bytes, DTYPE_BYTES[logits.dtype], *smoothed)


def _vocab_cross_entropy_extra(f: OpFacts) -> tuple[int, ...]:
    """Log-sum-exp; on the CPU where the local classes begin. Logits and targets are x0 and x1 (runtime/loss.py)."""
    logits, target = f.inputs
    begin = (DTYPE_BYTES["int64"],) if f.device_type == "cpu" else ()
    return (target.num_elements * _statistics(logits.dtype), *begin)


def _dropout_extra(f: OpFacts) -> tuple[int, ...]:
    """State and start of the counter-based generator; on a GPU its inputs, which the micro-batch has (dropout.py)."""
    return (8, 8) if f.attrs["p"] and f.device_type == "cpu" else ()


# -- what is needed only while it runs ---------------------------------------------------------------------------------


def _units(forward: int, backward: int) -> Sizes:
    """Multiples of the first output's bytes."""

    def sizes(f: OpFacts) -> tuple[int, ...]:
        unit = f.outputs[0].num_bytes
        return (forward * unit, backward * unit)

    return sizes


def _cross_entropy_workspace(f: OpFacts) -> tuple[int, ...]:
    # backward: the gradient of the log-probabilities beside that of the logits
    return (0, f.inputs[0].num_bytes)


# logits that the sharded loss computes at a time on the CPU, and how many times at most (runtime/loss.py)
_LOSS_CHUNK, _LOSS_CHUNKS = 1 << 18, 256


def _vocab_cross_entropy_workspace(f: OpFacts) -> tuple[int, ...]:
    logits, target = f.inputs
    tokens, wide = target.num_elements, _statistics(logits.dtype)
    per_token = tokens * 6 * wide  # statistics; forward before, backward after the logits are read
    if f.device_type != "cpu":
        return (per_token, 0)
    classes = logits.shape[-1]
    rows = min(tokens, max(_LOSS_CHUNK // classes, -(-tokens // _LOSS_CHUNKS), 1))
    # class numbers and which are here; then the shifted logits of a chunk, in the backward only where the gradient,
    # which they become, has another dtype
    numbers = tokens * (DTYPE_BYTES["int64"] + 1)
    chunk = rows * classes * wide
    return (numbers + per_token + chunk, numbers + tokens * (2 * wide + 1) + (chunk if logits.dtype in _HALF else 0))


def _attention_workspace(f: OpFacts) -> tuple[int, ...]:
    q, k, v = f.inputs[:3]
    rows = q.num_elements // q.shape[-1] * _statistics(q.dtype)
    if f.device_type == "cpu":
        return (0, rows)
    # FlashAttention-2: the gradient of the queries is summed in float32; grouped heads get their own key and value
    # gradients first
    repeated = (k.num_bytes + v.num_bytes) * (q.shape[1] // k.shape[1]) if q.shape[1] != k.shape[1] else 0
    # a mask that is learned: its gradient before it is summed over what it is broadcast to
    learned = len(f.inputs) > 3 and f.inputs[3].requires_grad
    scores = q.num_elements // q.shape[-1] * k.shape[2] * DTYPE_BYTES[q.dtype] if learned else 0
    return (0, rows + q.num_elements * 4 + repeated + scores)


# int64 numbers that one block of the mask needs at a time on the CPU (runtime/dropout.py)
_DROPOUT_BLOCK = 1 << 18


def _dropout_workspace(f: OpFacts) -> tuple[int, ...]:
    if not f.attrs["p"] or f.device_type != "cpu":  # elsewhere one kernel draws and applies the mask
        return (0, 0)
    x = f.inputs[0]
    # the mask while it is drawn; then the mask and the scaled input
    both = x.num_elements + max(3 * 8 * min(x.num_elements, _DROPOUT_BLOCK), x.num_bytes)
    return (both, both)


def experts_rows(f: OpFacts) -> tuple[int, int, int, int]:
    """Rows (a token once per expert that takes it), hidden and inner size, bytes of an element.

    Tokens are taken to be spread evenly over the experts, so that a rank with a part of them has that part of the rows.
    """
    hidden, index, _, _, down = f.inputs[:5]
    here, total = down.shape[0], int(f.attrs.get("num_experts") or down.shape[0])
    return -(-index.num_elements * here // total), hidden.shape[-1], down.shape[-1], DTYPE_BYTES[hidden.dtype]


def _experts_extra(f: OpFacts) -> tuple[int, ...]:
    """Besides tokens and routing weights (autoplan.runtime.experts): which token each row is, and the first product.
    Not counted: 4 bytes per expert, behind which row its rows end, where all experts are one product."""
    rows, _, inner, width = experts_rows(f)
    first = inner * (2 if f.attrs.get("gated", True) else 1)
    return (rows * DTYPE_BYTES["int64"], rows * first * width)


def _experts_workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: activated gate and its product with up, that and what the experts return, or this and the same weighted;
    # backward: activated gate, its product with up, gradients of both, of the gate and of the first product, or
    # gradients that arrive and, of what is between the products, the first two and its gradient
    rows, hidden, inner, width = experts_rows(f)
    return (rows * 2 * max(inner, hidden) * width, rows * max(6 * inner, 4 * inner + hidden) * width)


# -- the table ---------------------------------------------------------------------------------------------------------

_SELF = _rule("x0<0")
_RESULT = _rule("y0<0")
_NOTHING = _rule()
_EXTREMUM = _rule("x0<0,1 x1<0,1", workspace=_units(0, 2))
_VIEW = _rule(form=Form.VIEW, gradient=Gradient.PASS)
_PART = _rule(form=Form.VIEW)  # its gradient is padded with zeros
_LINEAR = _rule("x0<1 x1<0", form=Form.NEW)
_MADE = _rule(form=Form.NEW)

RULES: dict[str, SavedRule] = {
    **dict.fromkeys("silu gelu softplus".split(), _SELF),
    **dict.fromkeys("log cos sin abs".split(), _rule("x0<0", workspace=_units(0, 1))),
    **dict.fromkeys("erf square pow_scalar clamp".split(), _rule("x0<0", workspace=_units(0, 2))),
    **dict.fromkeys("relu tanh sigmoid exp".split(), _RESULT),
    **dict.fromkeys("rsqrt sqrt".split(), _rule("y0<0", workspace=_units(0, 1))),
    **dict.fromkeys("neg mul_scalar div_scalar rsub_scalar clone to".split(), _NOTHING),
    "add_scalar": _rule(gradient=Gradient.PASS),
    "detach": _VIEW,
    **dict.fromkeys("logical_not ne_scalar eq_scalar lt_scalar gt_scalar le_scalar ge_scalar".split(), _NOTHING),
    **dict.fromkeys("eq ne lt gt le ge logical_and logical_or bitwise_and bitwise_or bitwise_not".split(), _NOTHING),
    "add": _rule(gradient=Gradient.PASS),
    "sub": _rule(gradient=Gradient.PASS),
    "mul": _rule("x1<0 x0<1"),
    "div": _rule("x1<0,1 x0<1", workspace=_units(0, 1)),
    "pow": _rule("x0<0,1 x1<0,1 y0<1", workspace=_units(0, 2)),
    "maximum": _EXTREMUM,
    "minimum": _EXTREMUM,
    "where": _rule("x0<1,2"),
    "masked_fill": _rule("x1<0"),
    "linear": _LINEAR,
    "matmul": _LINEAR,
    "layer_norm": _rule("x0<0,1,2 x1<0,1,2 x2<0,1,2", form=Form.NEW, extra=_layer_norm_extra),
    "rms_norm": _rule("x0<0,1 x1<0,1", extra=_rms_norm_extra, workspace=_units(1, 2)),
    "embedding": _rule("x1<0", form=Form.NEW),
    "vocab_embedding": _rule(form=Form.NEW, extra=_vocab_embedding_extra),
    "cross_entropy_sum": _rule("x1<0", form=Form.NEW, extra=_cross_entropy_extra, workspace=_cross_entropy_workspace),
    "vocab_cross_entropy": _rule(
        "x0<0 x1<0", form=Form.NEW, extra=_vocab_cross_entropy_extra, workspace=_vocab_cross_entropy_workspace
    ),
    "attention": _rule(
        "x0<0,1,2 x1<0,1,2 x2<0,1,2 x3<0,1,2 y0<0,1,2", Form.NEW, extra=_lse, workspace=_attention_workspace
    ),
    "attention_own_mask": _rule(
        "x0<0,1,2 x1<0,1,2 x2<0,1,2 y0<0,1,2", Form.NEW, extra=_own_mask_extra, workspace=_attention_workspace
    ),
    "attention_windowed": _rule("", Form.NEW, extra=_windowed_extra, workspace=_attention_workspace),
    "attention_written_out": _rule("x2<0,1,2", Form.NEW, extra=_written_out_extra, workspace=_attention_workspace),
    "attention_learned_mask": _rule("x2<0,1,2", Form.NEW, extra=_learned_mask_extra, workspace=_learned_mask_workspace),
    "dropout": _rule(form=Form.NEW, extra=_dropout_extra, workspace=_dropout_workspace),
    "softmax": _rule("y0<0", form=Form.NEW),
    "log_softmax": _rule("y0<0", form=Form.NEW),
    "sum": _rule(form=Form.NEW, gradient=Gradient.PASS),  # an expanded view of it
    "mean": _MADE,
    "cumsum": _MADE,
    "tril": _MADE,
    "triu": _MADE,
    "one_hot": _MADE,
    "histc": _MADE,
    "weighted_count": _rule("x0<1", form=Form.NEW),
    "repeat_interleave": _MADE,
    "batch_sum": _rule(form=Form.NEW, gradient=Gradient.PASS),
    "batch_part": _rule(form=Form.NEW, gradient=Gradient.PASS),
    "topk": _rule("y1<0", form=Form.NEW),
    "argmax": _MADE,
    "max": _rule("y1<0", form=Form.NEW),
    "gather": _rule("x0<0 x1<0", form=Form.NEW),
    "scatter": _rule("x1<0", form=Form.NEW),
    "pad": _rule(form=Form.NEW, gradient=Gradient.PASS),
    "cat": _rule(form=Form.NEW, gradient=Gradient.PASS),
    "arange": _MADE,
    "full": _MADE,
    **dict.fromkeys("reshape transpose permute unsqueeze squeeze".split(), _VIEW),
    **dict.fromkeys("slice select chunk expand".split(), _PART),
    "experts": _rule("x0<0,2,3,4 x2<0,2,3,4", form=Form.NEW, extra=_experts_extra, workspace=_experts_workspace),
}


def rule_name(f: OpFacts) -> str:
    """Which line of the table holds for an operation: that of its name, or of a form that keeps something else."""
    if f.special in RULES:
        return f.special
    if f.op == "attention":
        if f.attrs.get("window") is not None and f.attrs["window"] < f.inputs[0].shape[2]:
            return "attention_windowed"
        if f.device_type == "cpu" and f.inputs[0].shape[-1] != f.inputs[2].shape[-1]:
            return "attention_written_out"
        if f.device_type == "cpu" and len(f.inputs) > 3 and f.inputs[3].requires_grad:
            return "attention_learned_mask"
        own = f.attrs.get("causal") or f.attrs.get("documents")
        if len(f.inputs) > 3 and (f.inputs[3].dtype == "bool" or own):
            return "attention_own_mask"
    return f.op


def backward_reads_params(block: Block) -> bool:
    """False if a backward of the block needs none of its parameters, as that of an embedding: only shapes."""
    stored = set(block.params)  # and what shares their memory
    for node in block.nodes:
        rule, used = RULES.get(node.op), [i for i, x in enumerate(node.inputs) if x in stored]
        if used and (rule is None or any(f"x{i}" == name for name, _ in rule.keeps for i in used)):
            return True
        if used and rule is not None and rule.form is Form.VIEW:
            stored |= set(node.outputs)
    return False


def saved_rule(f: OpFacts) -> SavedRule:
    """The rule of an operation. RuleError names the line to write."""
    name = rule_name(f)
    found = RULES.get(name)
    if found is None:
        raise RuleError(
            f"what {name!r} keeps for its backward is not known; add one line to autoplan.ops.saved.RULES, e.g. "
            f"{name!r}: _rule('x0<0') if it is element-wise and needs its input"
        )
    return found


def kept(f: OpFacts, rule: SavedRule) -> list[str]:
    """Which of x0, x1, ..., y0, ... an operation keeps, given who needs a gradient."""
    grads = [t.requires_grad for t in f.inputs]
    return [
        name
        for name, needs in rule.keeps
        if any(i < len(grads) and grads[i] for i in needs) and (name[0] == "y" or int(name[1:]) < len(grads))
    ]


def extra_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, ...]:
    """Bytes of what is kept besides inputs and outputs, one entry per storage."""
    return rule.extra(f) if rule.extra is not None and f.has_backward else ()


def workspace_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, int]:
    """(forward, backward) bytes needed only while it runs, besides its results."""
    if rule.workspace is None:
        return (0, 0)
    forward, backward = rule.workspace(f)
    return (forward, backward if f.has_backward else 0)
