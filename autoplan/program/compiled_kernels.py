"""Bytes that operations of a compiled block keep where a compiler looks into them, which keeps something else.

`Mode.COMPILED` stands for torch.compile of every block (`autoplan.runtime.compiled`). Inductor takes some operations
apart before it decides what is kept (:mod:`autoplan.program.partition`; `torch/_inductor/decomposition.py`, PyTorch
2.13):

- a norm keeps its input and its statistics, in float32 for narrower dtypes but for a layer norm on the CPU;
- `F.cross_entropy`, to which the runtime's loss comes down on the CPU, keeps the logits as they came, the maximum and
  the logarithm of the sum of exponentials of every token; over a sharded vocabulary the logarithm of the sum, the
  number of each target on this rank, whether it is there and whether it counts; where a product gives float32 logits as
  they are read, the probabilities in their place and whether a target counts. The loss of a GPU is one operator, as
  without a compiler;
- a lookup in a part of a table keeps, besides the number of each row, whether it is there;
- dropout on the CPU keeps its mask; on a GPU it is one operator;
- experts on one rank whose products are one kernel (bfloat16) keep what each product read and made: rows sorted by
  expert, gate and up, their product, the order of the rows both ways, and routing weights in float32. Experts spread
  over ranks are one operator, as without a compiler.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.ops.experts import experts_rows
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import OpFacts, SavedRule, keeps, statistics_bytes
from autoplan.ops.table import op_has, op_kind, saved_rule
from autoplan.units import DTYPE_BYTES, HALF

_INT64, _FLOAT32 = DTYPE_BYTES["int64"], DTYPE_BYTES["float32"]
_FUSED = frozenset(
    (
        *(OpKind.ELEMENTWISE, OpKind.VIEW, OpKind.REDUCTION, OpKind.JOIN),
        *(OpKind.NORM, OpKind.SOFTMAX, OpKind.FACTORY),
    )
)
_IN_GRAPH = "bfloat16"  # experts in this dtype are plain operations of the graph (`runtime.expert_products.IN_GRAPH`)


def compiled_rule(f: OpFacts, spread: bool) -> SavedRule | None:
    """Return the rule of an operation that keeps something else than `autoplan.ops.saved` says, else None.

    Args:
        spread: experts are on several ranks.
    """
    kind, known = op_kind(f.op), saved_rule(f)
    if kind is OpKind.NORM:
        return replace(known, extra=_norm_extra)
    if kind is OpKind.LOSS and f.device_type == "cpu":
        extra = _vocab_loss_extra if f.special else _loss_extra
        return replace(known, keeps=keeps("x0<0 x1<0").keeps, extra=extra)
    if kind is OpKind.EMBEDDING and f.special:
        return replace(known, extra=_vocab_embedding_extra)
    if kind is OpKind.EXPERTS and not spread and not f.special and f.inputs[0].dtype == _IN_GRAPH:
        return replace(known, keeps=keeps("x2<0,2,3,4").keeps, extra=_experts_extra)
    if kind is OpKind.ELEMENTWISE and op_has(f.op, Trait.DROPS) and f.device_type == "cpu":
        return replace(known, extra=_dropout_extra)
    return None


def fused(f: OpFacts) -> bool:
    """Return True if a kernel of the compiler may take an operation in, with its neighbours."""
    if f.device_type != "cpu" and op_has(f.op, Trait.DROPS):
        return False
    return op_kind(f.op) in _FUSED or (op_kind(f.op) is OpKind.LOSS and f.device_type == "cpu")


def again(f: OpFacts) -> bool:
    """Return True if the backward may compute an operation again. Concatenations only take others in."""
    return fused(f) and op_kind(f.op) is not OpKind.JOIN


def softmax_sums(f: OpFacts) -> int:
    """Return the bytes of the maximum and the sum of exponentials of every row, from which a softmax follows again."""
    out = f.outputs[0]
    rows = out.num_elements // out.shape[int(f.attrs["dim"])]
    return 2 * rows * statistics_bytes(out.dtype)


def _norm_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of the statistics, which are those of a GPU's kernel; of a layer norm, of the device's."""
    extra = saved_rule(f).extra
    own = f if f.op == "layer_norm" else replace(f, device_type="cuda")
    return () if extra is None else extra(own)


def _loss_extra(f: OpFacts) -> tuple[int, ...]:
    tokens = f.inputs[1].num_elements * statistics_bytes(f.inputs[0].dtype)
    return (tokens, tokens)


def _vocab_loss_extra(f: OpFacts) -> tuple[int, ...]:
    tokens = f.inputs[1].num_elements
    if f.inputs[0].dtype not in HALF and not f.attrs.get("again"):
        return (tokens,)
    return (tokens * _FLOAT32, tokens * _INT64, tokens, tokens)


def _vocab_embedding_extra(f: OpFacts) -> tuple[int, ...]:
    rows = f.inputs[1].num_elements
    return (rows * _INT64, rows)


def _dropout_extra(f: OpFacts) -> tuple[int, ...]:
    return (f.inputs[0].num_elements,) if f.attrs["p"] else ()


def _experts_extra(f: OpFacts) -> tuple[int, ...]:
    x, tokens = experts_rows(f), f.inputs[0].num_elements // f.inputs[0].shape[-1]
    first = x.inner * (2 if f.attrs.get("gated", True) else 1)
    order = (x.rows * _INT64, x.rows * _INT64, tokens * _INT64, x.rows * _FLOAT32)
    return (x.rows * x.hidden * x.width, x.rows * first * x.width, x.rows * x.inner * x.width, *order)
