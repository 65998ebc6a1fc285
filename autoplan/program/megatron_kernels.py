"""Bytes that hand-written kernels keep for the backward where they differ from those of PyTorch's operations.

`Mode.FUSED` stands for Megatron-LM on Transformer Engine. Besides element-wise operations (`activations._Walk.fuse`):

- a product behind a gather of tensor parallelism keeps the shard, which is gathered again in the backward, after the
  product that makes the gradient of the output (Korthikanti et al., 2022, section 4.2.2);
- a product in 8 bits keeps its input in 8 bits (Transformer Engine's quantized inputs of linear layers);
- cross entropy keeps the softmax in float32, written in place of the logits and turned into their gradient in place
  (Megatron-LM, core/tensor_parallel/cross_entropy.py);
- experts keep the rows sorted by expert, gate and up, their product, and the routing weights, which scale that product;
  their result is not kept (Megatron-LM, core/transformer/moe/experts.py);
- a fused loss, in any mode, keeps the logits as they are and one number per token, and writes their gradient in their
  place (flash-attention, ops/triton/cross_entropy.py); in one with the head's product, the gradient of the hidden
  states is kept instead (Liger, ops/fused_linear_cross_entropy.py);
- PyTorch's loss in eager mode keeps the log-probabilities, that in chunks too, where logits are upcast chunk by chunk
  (torchtune, modules/loss);
- unfused attention, in any mode, keeps queries, keys, values and the softmax, 2 a s^2 b bytes (Korthikanti et al.,
  2022, section 4.1: 5 a s^2 b with dropout, which is not captured).

The product itself adds the gradient of a weight to the buffer of gradients (`gradient_accumulation_fusion`, on by
default; `RunOptions.fused_accumulation`), so that no separate gradient is made; `MemoryModel` counts the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from autoplan.config.context_methods import ContextMethod
from autoplan.config.kernels import FusedLoss
from autoplan.config.parallel import Attention, Mode
from autoplan.ir.graph import Block
from autoplan.ops.attention import (
    biased_rule,
    drawn_bytes,
    needs_causal_mask,
    reads_whole_keys,
    taking_groups,
    unfused_in_megatron,
)
from autoplan.ops.experts import experts_rows
from autoplan.ops.losses import torch_loss
from autoplan.ops.record import OpKind
from autoplan.ops.saved import Form, Gradient, OpFacts, SavedRule
from autoplan.ops.table import op_kind, saved_rule
from autoplan.program import compiled_kernels
from autoplan.program.context_parallel import saved_by
from autoplan.program.statements import Op
from autoplan.units import DTYPE_BYTES

FLOAT8_BYTES = 1
LOSS_CHUNKS = 8  # num_output_chunks of torchtune's losses


@dataclass(frozen=True)
class Kernels:
    """The kernels that a program runs with, as far as saved bytes depend on them.

    Attributes:
        float8: products take inputs of 8 bits or fewer, which are kept as 8 bits (an upper bound).
        method: how attention sees a cut sequence; None if keys are gathered.
        modules: modules that are recomputed (autoplan.program.megatron_modules).
        spread: experts are on several ranks, and tokens travel to them.
        fused_accumulation: see `adds_gradients`.
        fused_norms: norms alone run as kernels of their own, where nothing else is fused.
    """

    mode: Mode = Mode.EAGER
    attention: Attention = Attention.FLASH2
    float8: bool = False
    loss: FusedLoss = FusedLoss.NO
    context: int = 1
    method: ContextMethod | None = None
    modules: tuple[str, ...] = ()
    spread: bool = False
    fused_accumulation: bool = True
    fused_norms: bool = False

    @property
    def compiled(self) -> bool:
        """True if torch.compile decides what a block keeps."""
        return self.mode is Mode.COMPILED

    @property
    def fused(self) -> bool:
        """True if element-wise operations run together in kernels."""
        return self.mode is not Mode.EAGER

    @property
    def megatron(self) -> bool:
        """True for the kernels of Megatron and Transformer Engine."""
        return self.mode is Mode.FUSED

    @property
    def adds_gradients(self) -> bool:
        """True if a product adds the gradient of its weight to a buffer and makes none of its own."""
        return self.megatron and self.fused_accumulation

    @property
    def narrow_logits(self) -> bool:
        """True if the upcast logits of a loss are not stored: its kernel reads the logits as they are."""
        return self.megatron or self.loss.narrow

    @property
    def few_logits(self) -> bool:
        """True if the head's product makes the logits of a part of the tokens at a time, for its loss."""
        return self.loss is FusedLoss.LINEAR

    @property
    def float8_inputs(self) -> bool:
        """True if products keep 8-bit inputs. PyTorch's compiled float8 training keeps the inputs unconverted."""
        return self.megatron and self.float8


def of_op(op: Op, block: Block, kernels: Kernels) -> Kernels:
    """Return the kernels of an operation: attention of keys that every rank has knows of no cut sequence."""
    if op_kind(op.node.op) is not OpKind.ATTENTION or not reads_whole_keys(op.node, block.values):
        return kernels
    return replace(kernels, context=1, method=None)


def rule_of(f: OpFacts, kernels: Kernels) -> SavedRule | None:
    """Return the rule of an operation that keeps something else than `autoplan.ops.saved` says, else None."""
    what = op_kind(f.op)
    if what is OpKind.ATTENTION and (found := _attention_rule(f, kernels)) is not None:
        return found
    if what is OpKind.LOSS and (found := _loss_rule(f, kernels)) is not None:
        return found
    if kernels.compiled:
        return compiled_kernels.compiled_rule(f, kernels.spread)
    if not kernels.megatron:
        return None
    if what is OpKind.ATTENTION:  # our plain form slices windows, and repeats keys where there are masks
        return taking_groups(f)
    if what is OpKind.LOSS:
        return _LOSS
    if what is OpKind.EXPERTS:
        return _EXPERTS_FLOAT8 if kernels.float8 else _EXPERTS
    return None


def _loss_rule(f: OpFacts, kernels: Kernels) -> SavedRule | None:
    """Return the rule of a loss whose kernels are not those of the mode, else None."""
    eager = kernels.mode is Mode.EAGER
    if kernels.loss is FusedLoss.TORCH:
        return torch_loss(f) if eager else None
    if kernels.loss is FusedLoss.CHUNKED and eager:
        return _LOSS_IN_CHUNKS
    return _LOSS_IN_PLACE if kernels.loss.narrow else None


def _attention_rule(f: OpFacts, kernels: Kernels) -> SavedRule | None:
    """Return the rule of attention without a fused kernel, with biases by key, or over a cut sequence, else None."""
    capped = kernels.megatron and unfused_in_megatron(f.attrs)
    if capped or kernels.attention is Attention.UNFUSED:
        return _UNFUSED_ATTENTION
    if f.attrs.get("key_bias") and not kernels.megatron:
        return biased_rule(f, lambda inner: rule_of(inner, kernels) or saved_rule(inner))
    if kernels.method is not None and (kernels.method.ulysses > 1 or not kernels.megatron):
        return saved_by(kernels.method, _gathered, kernels.megatron)
    if kernels.context > 1 and not kernels.megatron:
        return _gathered(kernels.context)
    return None


def _scores(f: OpFacts) -> int:
    """Return the number of elements of attention scores: heads x queries x keys."""
    q, k = f.inputs[:2]
    return q.num_elements // q.shape[-1] * k.shape[2]


def _unfused_extra(f: OpFacts) -> tuple[int, ...]:
    q, k, v = f.inputs[:3]
    scores, width = _scores(f), DTYPE_BYTES[q.dtype]
    repeats = q.shape[1] // k.shape[1]
    grouped = ((k.num_bytes + v.num_bytes) * repeats,) if repeats > 1 else ()
    return (scores * width, *grouped)


def _unfused_workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: the scores before the softmax; backward: gradients of the softmax and of the scores
    size = _scores(f) * DTYPE_BYTES[f.inputs[0].dtype]
    return (size, 2 * size)


def _gathered(ways: int) -> SavedRule:
    return SavedRule((("x0", (0, 1, 2)),), Form.NEW, extra=_gathered_extra(ways))


def _gathered_extra(ways: int) -> Callable[[OpFacts], tuple[int, ...]]:
    """Return the rule of extra bytes of attention over gathered keys (autoplan.runtime.context).

    These are keys and values of the whole sequence, and for both chunks of queries, which together see 2 c + 1 of the
    2 c chunks of keys of c ranks, the output, its log-sum-exp and an additive mask. A kernel that ends a causal mask
    with the keys (flash attention on CUDA, `choose` of runtime/sdpa.py) needs no mask.
    """

    def extra(f: OpFacts) -> tuple[int, ...]:
        q, k, v = f.inputs[:3]
        width, rows = DTYPE_BYTES[q.dtype], q.num_elements // q.shape[-1]
        out = rows * v.shape[-1] * width
        kept = (ways * (k.num_bytes + v.num_bytes), out, rows * max(4, width), *drawn_bytes(f, ways))
        seen = q.shape[2] * k.shape[2] * (2 * ways + 1) // 4
        return (*kept, seen * width) if needs_causal_mask(f, ways * k.shape[2]) else kept

    return extra


def _softmax_bytes(f: OpFacts) -> int:
    logits = f.inputs[0]
    return logits.num_elements * max(4, DTYPE_BYTES[logits.dtype])


def _loss_extra(f: OpFacts) -> tuple[int, ...]:
    tokens = f.inputs[1].num_elements
    return (_softmax_bytes(f), tokens * DTYPE_BYTES["int64"], tokens)  # local class numbers, a mask of the valid ones


def _loss_workspace(f: OpFacts) -> tuple[int, ...]:
    # backward: the gradient in the dtype of the logits, cast from the softmax that was turned into it
    return (0, f.inputs[0].num_elements * DTYPE_BYTES["bfloat16"])


def _chunks_extra(f: OpFacts) -> tuple[int, ...]:
    return (_softmax_bytes(f),)  # the log-probabilities of all chunks


def _chunks_workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: the upcast logits of a chunk; backward: the gradients of its log-probabilities and of these logits, and
    # that of all logits in 16 bits
    chunk = -(-_softmax_bytes(f) // LOSS_CHUNKS)
    return (chunk, 2 * chunk + f.inputs[0].num_elements * DTYPE_BYTES["bfloat16"])


def _lse_extra(f: OpFacts) -> tuple[int, ...]:
    return (f.inputs[1].num_elements * DTYPE_BYTES["float32"],)


def _experts_extra(f: OpFacts) -> tuple[int, ...]:
    return _experts_parts(f, None)


def _experts_extra_float8(f: OpFacts) -> tuple[int, ...]:
    return _experts_parts(f, FLOAT8_BYTES)


def _experts_parts(f: OpFacts, input_bytes: int | None) -> tuple[int, ...]:
    x = experts_rows(f)
    taken = x.width if input_bytes is None else input_bytes
    first = x.inner * (2 if f.attrs.get("gated", True) else 1)
    order = (x.rows * DTYPE_BYTES["int64"], x.rows * DTYPE_BYTES["float32"])  # the permutation, routing weights
    return (x.rows * x.hidden * taken, x.rows * first * x.width, x.rows * x.inner * taken, *order)


EXPERTS_ACTIVATION = 2  # index in `_experts_parts` of the result of the activation function


def _experts_workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: rows before and after they are sorted back; backward: gradients of rows, gate and up, and their product
    x = experts_rows(f)
    return (2 * x.rows * x.hidden * x.width, x.rows * (x.hidden + 3 * x.inner) * x.width)


_UNFUSED_ATTENTION = SavedRule(
    tuple((f"x{k}", (0, 1, 2)) for k in range(4)), Form.NEW, extra=_unfused_extra, workspace=_unfused_workspace
)
_LOSS = SavedRule((), Form.NEW, Gradient.PASS, extra=_loss_extra, workspace=_loss_workspace)
_LOSS_IN_CHUNKS = SavedRule((), Form.NEW, Gradient.PASS, extra=_chunks_extra, workspace=_chunks_workspace)
_LOSS_IN_PLACE = SavedRule((("x0", (0,)),), Form.NEW, Gradient.PASS, extra=_lse_extra)
_EXPERTS = SavedRule((), Form.NEW, extra=_experts_extra, workspace=_experts_workspace)
_EXPERTS_FLOAT8 = SavedRule((), Form.NEW, extra=_experts_extra_float8, workspace=_experts_workspace)


def float8_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of an 8-bit copy."""
    return prod(shape) * FLOAT8_BYTES
