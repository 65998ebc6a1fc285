"""Records of tables and losses: the ops whose vocabulary may be split."""

from __future__ import annotations

from autoplan.errors import CaptureError, FormError
from autoplan.ir.layout import I, P
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.record import OpKind, OpRecord
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps, statistics_bytes
from autoplan.ops.text import OpText
from autoplan.units import DTYPE_BYTES, HALF

# -- embedding ---------------------------------------------------------------------------------------------------------


def _embedding_arguments(a: Args) -> IrResult:
    if a.get("scale_grad_by_freq") or a.get("sparse"):
        raise CaptureError("embedding with scale_grad_by_freq or sparse gradients is not supported; switch them off")
    return IrOp("embedding", (a["weight"], a["indices"]), {"padding_idx": a.get("padding_idx", -1)})


def _vocab_embedding_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of the local row numbers (runtime/embedding.py)."""
    return (f.inputs[1].num_elements * DTYPE_BYTES["int64"],)


def _embedding_text(t: OpText) -> str:
    padding = t.attrs["padding_idx"]
    pad = "" if padding is None or padding < 0 else f", padding_idx={padding}"
    if t.over:
        return f"vocab_parallel_embedding({t.args[1]}, {t.args[0]}, {t.over}{pad})"
    return f"F.embedding({t.args[1]}, {t.args[0]}{pad})"


_PART_OF_TABLE = keeps(form=Form.NEW, extra=_vocab_embedding_extra)


# -- cross entropy -----------------------------------------------------------------------------------------------------


def _loss_arguments(a: Args) -> IrResult:
    if a.get("weight") is not None:
        raise FormError("cross_entropy with class weights is not supported")
    if a.get("reduction", 1) not in (1, 2):
        raise FormError("cross_entropy with reduction='none' is not supported; use 'mean' or 'sum'")
    return IrOp(
        "cross_entropy",
        (a["self"], a["target"]),
        {
            "mean": a.get("reduction", 1) == 1,
            "ignore_index": a.get("ignore_index", -100),
            "label_smoothing": float(a.get("label_smoothing", 0.0)),
        },
    )


def _cross_entropy_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes that `F.cross_entropy` keeps, which the runtime calls on the CPU."""
    logits, target = f.inputs
    smoothed = (target.num_elements,) if f.attrs.get("label_smoothing") else ()  # which targets are ignored
    # log-probabilities, and the total weight of the targets
    return (logits.num_bytes, DTYPE_BYTES[logits.dtype], *smoothed)


def _cross_entropy_workspace(f: OpFacts) -> tuple[int, ...]:
    # backward: the gradient of the log-probabilities beside that of the logits
    return (0, f.inputs[0].num_bytes)


def _vocab_cross_entropy_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of log-sum-exp, and on the CPU of the first local class number (runtime/loss.py).

    Logits and targets are x0 and x1.
    """
    logits, target = f.inputs
    begin = (DTYPE_BYTES["int64"],) if f.device_type == "cpu" else ()
    return (target.num_elements * statistics_bytes(logits.dtype), *begin)


# logits that the sharded loss computes at a time on the CPU, and the largest number of chunks (runtime/loss.py)
_LOSS_CHUNK, _LOSS_CHUNKS = 1 << 18, 256


def _vocab_cross_entropy_workspace(f: OpFacts) -> tuple[int, ...]:
    logits, target = f.inputs
    tokens, wide = target.num_elements, statistics_bytes(logits.dtype)
    per_token = tokens * 6 * wide  # statistics; forward before, backward after the logits are read
    if f.device_type != "cpu":
        return (per_token, 0)
    classes = logits.shape[-1]
    rows = min(tokens, max(_LOSS_CHUNK // classes, -(-tokens // _LOSS_CHUNKS), 1))
    # class numbers and a mask of the local ones; then the shifted logits of a chunk. The backward needs the chunk only
    # if the gradient, which it becomes, has another dtype
    numbers = tokens * (DTYPE_BYTES["int64"] + 1)
    chunk = rows * classes * wide
    return (numbers + per_token + chunk, numbers + tokens * (2 * wide + 1) + (chunk if logits.dtype in HALF else 0))


def _loss_text(t: OpText) -> str:
    extra = f", ignore_index={t.attrs['ignore_index']}"
    if t.attrs["label_smoothing"]:
        extra += f", label_smoothing={t.attrs['label_smoothing']}"
    if t.over:
        return f"vocab_parallel_cross_entropy_sum({t.args[0]}, {t.args[1]}, {t.over}{extra})"
    return f"cross_entropy_sum({t.args[0]}, {t.args[1]}{extra})"


def torch_loss(f: OpFacts) -> SavedRule | None:
    """Return the rule of `F.cross_entropy` on any device; None for a loss over a part of the classes."""
    return None if f.special else _OF_TORCH


_OF_TORCH = keeps("x1<0", form=Form.NEW, extra=_cross_entropy_extra, workspace=_cross_entropy_workspace)
_OF_THE_RUNTIME = keeps(
    "x0<0 x1<0", form=Form.NEW, extra=_vocab_cross_entropy_extra, workspace=_vocab_cross_entropy_workspace
)

# -- connectionist temporal classification -----------------------------------------------------------------------------


def _ctc_arguments(a: Args) -> IrResult:
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    settings = {"blank": a["blank"], "zero_infinity": a["zero_infinity"]}
    return IrOp("ctc_losses", tuple(a[name] for name in names), settings)


def _ctc_states(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of the states of the recursion (of every token, every label and the blanks around it), and of
    the mask of the losses that are infinite.
    """
    tokens, samples, _ = f.inputs[0].shape
    states = samples * tokens * (2 * f.inputs[1].shape[1] + 1) * DTYPE_BYTES[f.inputs[0].dtype]
    return (states, samples) if f.attrs["zero_infinity"] else (states,)


RECORDS = (
    OpRecord(
        "embedding",
        OpKind.EMBEDDING,
        "[v@vocab_embedding,h] * #[*b] -> [*b,h]",
        keeps("x1<0", form=Form.NEW),
        _embedding_text,
        {"aten.embedding.default": _embedding_arguments},
        saved_form=lambda f: _PART_OF_TABLE if f.special else None,
        special={"vocab_embedding": P},
        factor_names={"v": "vocab", "h": "hidden"},
        index_limits=lambda attrs, inputs, outputs: {1: range(inputs[0][0])},
    ),
    OpRecord(
        "cross_entropy_sum",
        OpKind.LOSS,
        "~[t,v@vocab_cross_entropy], #[t] -> []",
        _OF_TORCH,
        _loss_text,
        saved_form=lambda f: _OF_THE_RUNTIME if f.special or f.device_type != "cpu" else None,
        special={"vocab_cross_entropy": I},
        factor_names={"v": "vocab"},
        variable="loss_sum",
        index_limits=lambda attrs, inputs, outputs: {1: range(inputs[0][-1])},
    ),
    OpRecord(
        "ctc_losses",
        OpKind.OTHER,
        "[t!,b,v!], #[b,s!], #[b], #[b] -> [b]",
        keeps("x0<0 x1<0 x2<0 x3<0 y0<0", form=Form.NEW, extra=_ctc_states),
        "F.ctc_loss({0}, {1}, {2}, {3}, {blank}, 'none', {zero_infinity})",
        {"autoplan.ctc_losses.default": _ctc_arguments},
    ),
    # as captured: `autoplan.capture.layers.assemble` turns it into a sum, and a mean into a sum and a division
    OpRecord("cross_entropy", OpKind.LOSS, aten={"aten.cross_entropy_loss.default": _loss_arguments}),
)
