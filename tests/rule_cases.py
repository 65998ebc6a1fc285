"""One small node per op and form for tests/ops/test_rules.py, each with what plain torch computes for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from function_cases import CONVOLUTIONS, FOURIER, GENERIC, RECURRENT, SCANS, STATISTICS
from rule_case import Case, T, X, case, same

from autoplan.ir.symbols import Expr

UNARY = [
    *(same(n, getattr(F, n)) for n in ("silu", "relu", "softplus")),
    *(same(n, getattr(T, n)) for n in ("tanh", "sigmoid", "exp", "cos", "sin", "abs", "erf", "square", "neg")),
    *(same(n, getattr(T, n), f"pos: {X}") for n in ("log", "rsqrt", "sqrt")),
    same("gelu", F.gelu, approximate="none"),
    same("gelu", lambda x: F.gelu(x, approximate="tanh"), approximate="tanh"),
    same("logical_not", T.logical_not, f"bool: {X}", "bool"),
    same("pow_scalar", lambda x: x**2, scalar=2),
    same("pow_scalar", lambda x: x**-0.5, f"pos: {X}", scalar=-0.5),
    same("add_scalar", lambda x: x + 0.5, scalar=0.5),
    same("add_scalar", lambda x: x + 8, scalar=Expr.symbol("s")),
    same("rsub_scalar", lambda x: 1.5 - x, scalar=1.5),
    same("mul_scalar", lambda x: x * -0.25, scalar=-0.25),
    same("div_scalar", lambda x: x / 8, scalar=Expr.symbol("s")),
    *(
        same(f"{n}_scalar", lambda x, n=n: getattr(T, n)(x, 0.25), X, "bool", scalar=0.25)
        for n in ("ne", "eq", "lt", "gt", "le", "ge")
    ),
    same("clamp", lambda x: x.clamp(-1.0, None), min=-1.0, max=None),
    same("clamp", lambda x: x.clamp(None, 0.5), min=None, max=0.5),
    same("to", lambda x: x.double(), f"f32: {X}", dtype="float64"),
    same("to", lambda x: x.double(), f"bool: {X}", "const", dtype="float64"),
    same("to", lambda x: x.float(), X, "f32", dtype="float32"),
    same("detach", lambda x: x.detach(), X, "const"),
    same("clone", lambda x: x.clone()),
    same("dropout", None, p=0.4),
    same("dropout", None, "s, b, hidden", p=0.4),
    same("draw", None, f"const: {X}", "const", distribution="normal", parameters=()),
    same("draw", None, "const: s, b, hidden", "const", distribution="bernoulli", parameters=(0.4,)),
    same("draw", None, "int16: b, s", "int", distribution="integers", parameters=(3, Expr.symbol("s"))),
]

# the second operand: equal, a vector, a column, a scalar, a constant, an outer dim
SECOND = [
    X,
    "kv group head",
    "b, s, 1",
    "[]",
    f"const: {X}",
    "const: s, 1",
    "1, 1, kv group head",
    "b, 1, kv group head",
]
BINARY = [
    *(
        case(n, [X, second], X, getattr(T, n))
        for n in ("add", "sub", "mul", "div")
        for second in (SECOND if n != "div" else [f"pos: {s}" for s in SECOND if "const" not in s])
    ),
    *(case(n, ["s, 1", "1, head"], "s, head", getattr(T, n)) for n in ("add", "mul")),
    *(case(n, ["const: s, 1", "const: 1, head"], "const: s, head", getattr(T, n)) for n in ("add", "mul")),
    case("add", ["b, s, out", "out"], "b, s, out", T.add, bias=True),
    case("div", ["[]", "const: []"], "[]", T.div),
    case("div", ["const: b, s", "pos: b, s"], "b, s", T.div),
    *(case(n, [X, "kv group head"], X, getattr(T, n)) for n in ("maximum", "minimum")),
    *(case(n, [X, "b, s, 1"], X, getattr(T, n)) for n in ("maximum", "minimum")),
    case("pow", [f"pos: {X}", "kv group head"], X, T.pow),
    case("pow", ["pos: []", X], X, T.pow),
    *(case(n, [X, second], f"bool: {X}", getattr(T, n)) for n in ("eq", "ne", "lt") for second in (X, "b, s, 1")),
    *(case(n, ["const: s, 1", "const: head"], "bool: s, head", getattr(T, n)) for n in ("gt", "le", "ge", "lt")),
    *(
        case(n, [f"bool: {X}", f"bool: {second}"], f"bool: {X}", getattr(T, n))
        for n in ("logical_and", "logical_or", "bitwise_and", "bitwise_or")
        for second in (X, "s, 1")
    ),
    case("where", [f"bool: {X}", X, X], X, T.where),
    case("where", ["bool: s, 1", X, "[]"], X, T.where),
    case("where", ["bool: s, head", "[]", "b, 1, 1"], "b, s, head", T.where),
    case("masked_fill", [X, f"bool: {X}"], X, lambda x, m: x.masked_fill(m, 0.5), scalar=0.5),
    case(
        "masked_fill",
        ["const: b, s", "bool: s"],
        "const: b, s",
        lambda x, m: x.masked_fill(m, float("-inf")),
        scalar=float("-inf"),
    ),
    case("masked_fill", [X, "bool: s, 1"], X, lambda x, m: x.masked_fill(m, float("-2")), scalar=-2.0),
]


def _norm(x: torch.Tensor) -> tuple[int, ...]:
    return (x.shape[-1],)


PRODUCTS = [
    case("linear", ["b, s, hidden", "out, hidden"], "b, s, out", F.linear),
    case("linear", ["b, s, hidden", "kv group head, hidden"], "b, s, kv group head", F.linear),
    case("linear", ["b, s, kv group head", "hidden, kv group head"], "b, s, hidden", F.linear),
    case("linear", ["b, s, hidden", "hidden, hidden"], "b, s, hidden", F.linear),  # one factor in both roles
    case("linear", ["b s, hidden", "out, hidden"], "b s, out", F.linear),
    case("linear", ["b, s, 1", "out, 1"], "b, s, out", F.linear),
    case("linear", ["b, s, hidden", "1, hidden"], "b, s, 1", F.linear),
    case("linear", ["hidden", "out, hidden"], "out", F.linear),
    case("linear", ["const: b, s, hidden", "out, hidden"], "b, s, out", F.linear),
    case("linear", ["b, s, hidden", "const: out, hidden"], "b, s, out", F.linear),
    case("matmul", ["b, heads, s, head", "b, heads, head, keys"], "b, heads, s, keys", T.matmul),
    case("matmul", ["b, kv group, s, head", "b, 1, head, keys"], "b, kv group, s, keys", T.matmul),
    case("matmul", ["s, hidden", "heads, hidden, out"], "heads, s, out", T.matmul),
    case("matmul", ["b, s, kv head", "kv head, out"], "b, s, out", T.matmul),
    case("matmul", ["b, s, 1", "1, head"], "b, s, head", T.matmul),
    case(
        "layer_norm",
        ["b, s, hidden", "hidden", "hidden"],
        "b, s, hidden",
        lambda x, w, b: F.layer_norm(x, _norm(x), w, b, 1e-6),
        eps=1e-6,
        weight=True,
        bias=True,
    ),
    case(
        "layer_norm",
        ["b, s, kv head", "kv head"],
        "b, s, kv head",
        lambda x, w: F.layer_norm(x, _norm(x), w),
        eps=1e-5,
        weight=True,
        bias=False,
    ),
    case(
        "layer_norm",
        ["b, s, heads, head"],
        "b, s, heads, head",
        lambda x: F.layer_norm(x, _norm(x)),
        eps=1e-5,
        weight=False,
        bias=False,
    ),
    case(
        "layer_norm",
        ["s, hidden", "hidden"],
        "s, hidden",
        lambda x, b: F.layer_norm(x, _norm(x), None, b),
        eps=1e-5,
        weight=False,
        bias=True,
    ),
    case(
        "rms_norm",
        ["b, s, hidden", "hidden"],
        "b, s, hidden",
        lambda x, w: F.rms_norm(x, _norm(x), w, 1e-5),
        eps=1e-5,
        weight=True,
    ),
    case(
        "rms_norm",
        ["b, kv group, s, head"],
        "b, kv group, s, head",
        lambda x: F.rms_norm(x, _norm(x)),
        eps=None,
        weight=False,
    ),
    case("embedding", ["vocab, hidden", "int16: b, s"], "b, s, hidden", lambda w, i: F.embedding(i, w), padding_idx=-1),
    case(
        "embedding",
        ["vocab, hidden", "int16: b, s"],
        "b, s, hidden",
        lambda w, i: F.embedding(i, w, padding_idx=5),
        padding_idx=5,
    ),
    case("embedding", ["four head, kv head", "int16: s"], "s, kv head", lambda w, i: F.embedding(i, w), padding_idx=-1),
    case(
        "embedding", ["two minor, hidden", "int16: b s"], "b s, hidden", lambda w, i: F.embedding(i, w), padding_idx=-1
    ),
    case(
        "ctc_losses",
        ["s, b, vocab", "int16: b, two", "int8: b", "int3: b"],
        "b",
        lambda x, *given: F.ctc_loss(x, *given, reduction="none", zero_infinity=True),
        blank=0,
        zero_infinity=True,
    ),
    case(
        "cross_entropy_sum",
        ["b s, vocab", "target16: b s"],
        "[]",
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        ignore_index=-100,
        label_smoothing=0.0,
    ),
    case(
        "cross_entropy_sum",
        ["s, vocab", "target16: s"],
        "[]",
        lambda x, t: F.cross_entropy(x, t, reduction="sum", label_smoothing=0.2),
        ignore_index=-100,
        label_smoothing=0.2,
    ),
    case(
        "cross_entropy_sum",
        ["s, two minor", "target16: s"],
        "[]",
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        ignore_index=-100,
        label_smoothing=0.0,
    ),
    case(
        "cross_entropy_sum",
        ["const: b s, vocab", "target16: b s"],
        "const: []",
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        ignore_index=-100,
        label_smoothing=0.0,
    ),
]


def _sdpa(
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    ahead: int | None = None,
    chunk: int | None = None,
    key_bias: bool = False,
) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        """Attention written out: no fused kernel, heads repeated."""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        if window is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-window), float("-inf"))
        if ahead is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(ahead + 1), float("-inf"))
        if chunk is not None:
            numbers = torch.arange(scores.shape[-1]) // chunk
            scores = scores.masked_fill(numbers[:, None] != numbers, float("-inf"))
        for mask in masks:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ v

    return run


def _attention(
    q: str,
    k: str,
    v: str,
    out: str,
    mask: str = "",
    causal: bool = True,
    scale: float | None = None,
    p: float | None = None,
    key_bias: str = "",
    **more: int,
) -> Case:
    ins = [q, k, v, *([key_bias] if key_bias else []), *([mask] if mask else [])]
    if key_bias:
        more["key_bias"] = True
    if p is not None:
        return case("dropped_attention", ins, out, None, p=p, causal=causal, scale=scale, **more)
    return case("attention", ins, out, _sdpa(causal, scale, **more), causal=causal, scale=scale, **more)


GQA = ("b, kv group, s, head", "b, kv, s, head", "b, kv, s, head", "b, kv group, s, head")
ATTENTION = [
    _attention(*GQA),
    _attention(*GQA, causal=False, scale=0.3),
    _attention(*GQA, window=3),
    _attention(*GQA, window=1, scale=0.3),
    _attention(*GQA, window=1000),  # longer than the sequence
    _attention(*GQA, causal=False, window=3, ahead=2, scale=0.3),
    _attention(*GQA, causal=False, window=1000, ahead=1000),
    _attention(*GQA, chunk=3, scale=0.3),
    _attention(*GQA, chunk=4),
    _attention(*GQA, chunk=1000),
    _attention("b, heads, s, head", "b, heads, s, head", "b, heads, s, value", "b, heads, s, value", chunk=5),
    _attention("b, heads, s, head", "b, heads, s, head", "b, heads, s, value", "b, heads, s, value", window=5),
    _attention("b, heads, s, head", "b, heads, s, head", "b, heads, s, value", "b, heads, s, value"),
    _attention(
        "b, heads, s, head", "b, heads, keys, head", "b, heads, keys, value", "b, heads, s, value", causal=False
    ),
    _attention("b, group, s, head", "b, 1, s, head", "b, 1, s, head", "b, group, s, head"),
    _attention("b, 1, s, head", "b, 1, s, head", "b, 1, s, head", "b, 1, s, head"),
    _attention("b, two kv group, s, head", "b, two kv, s, head", "b, two kv, s, head", "b, two kv group, s, head"),
    _attention(*GQA, mask="const: 1, kv group, s, s"),
    _attention(*GQA, mask="const: 1, 1, s, s", causal=False),
    _attention(*GQA, mask="const: s, s", causal=False),
    _attention(*GQA, mask="const: b, 1, s, s"),
    _attention(
        "b, heads, s, head", "b, heads, s, head", "b, heads, s, head", "b, heads, s, head", "const: b, heads, s, s"
    ),
    _attention(*GQA, key_bias="const: 1, kv group, 1, s"),
    _attention(*GQA, key_bias="b, 1, 1, s", window=3, scale=0.3),
    _attention(
        "b, heads, s, head",
        "b, heads, s, head",
        "b, heads, s, value",
        "b, heads, s, value",
        key_bias="const: b, heads, 1, s",
        mask="const: s, s",
        causal=False,
    ),
]

DROPPED = [
    _attention(*GQA, p=0.4),
    _attention(*GQA, p=0.4, window=3),
    _attention(*GQA, p=0.4, causal=False, mask="1, kv group, s, s", scale=0.3),
    _attention(*GQA, p=0.4, mask="bool: b, 1, 1, s", causal=False),
    _attention(
        "b, heads, s, head", "b, heads, keys, head", "b, heads, keys, value", "b, heads, s, value", causal=False, p=0.1
    ),
]

BIG = 2**63 - 1
VIEWS = [
    case("reshape", [X], "b, s, kv group, head", lambda x: x.reshape(2, 8, 8, 4)),
    case("reshape", [X], "b, s, kv, group head", lambda x: x.reshape(2, 8, 2, 16)),
    case("reshape", ["b, s, kv group, head"], X, lambda x: x.reshape(2, 8, 32)),
    case("reshape", ["b, s, hidden"], "b s, hidden", lambda x: x.reshape(16, 8)),
    case("regroup", ["b, s, hidden"], "b, s, s", lambda x: x.view_as(x), dim=2),  # 8 elements of another factor
    case("own_part", ["b, s, hidden"], "b, s, s", lambda x: x, dim=2, runs=((1, 8),)),  # all of it, without cp
    case("reshape", ["b s, hidden"], "b, s, hidden", lambda x: x.reshape(2, 8, 8)),
    case("reshape", ["b, s, kv, head"], "b s kv, head", lambda x: x.reshape(32, 4)),
    case("reshape", ["s, hidden"], "s, 1, hidden, 1", lambda x: x.reshape(8, 1, 8, 1)),
    case("reshape", ["six, four"], "eight, three", lambda x: x.reshape(8, 3)),  # no common refinement
    case(  # those behind the first without one
        "reshape", ["b, kv group, six, four"], "b, kv, group, eight, three", lambda x: x.reshape(2, 2, 4, 8, 3)
    ),
    case("reshape", ["const: b, s, hidden"], "const: b s, hidden", lambda x: x.reshape(16, 8)),
    case("transpose", ["b, s, kv group, head"], "b, kv group, s, head", lambda x: x.transpose(1, 2), dim0=1, dim1=2),
    case("transpose", ["b, s, hidden"], "b, hidden, s", lambda x: x.transpose(-1, -2), dim0=-1, dim1=-2),
    case("transpose", ["s, 1, hidden"], "1, s, hidden", lambda x: x.transpose(0, 1), dim0=0, dim1=1),
    case("permute", ["b, s, kv, head"], "kv, b, head, s", lambda x: x.permute(2, 0, -1, 1), dims=(2, 0, -1, 1)),
    case("unsqueeze", ["b, s, hidden"], "b, 1, s, hidden", lambda x: x.unsqueeze(1), dim=1),
    case("unsqueeze", ["b, s, hidden"], "b, s, hidden, 1", lambda x: x.unsqueeze(-1), dim=-1),
    case("squeeze", ["b, 1, s, hidden"], "b, s, hidden", lambda x: x.squeeze(1), dim=1),
    case("squeeze", ["b, s, 1"], "b, s", lambda x: x.squeeze(-1), dim=-1),
    case("squeeze", ["b, kv, hidden"], "b, kv, hidden", lambda x: x.squeeze(1), dim=1),  # not 1: stays
    case("expand", ["b, kv, 1, s, head"], "b, kv, group, s, head", lambda x: x.expand(2, 2, 4, 8, 4)),
    case("expand", ["s, head"], "b, kv, s, head", lambda x: x.expand(2, 2, 8, 4)),
    case("expand", ["1, s, 1"], "b, s, kv head", lambda x: x.expand(2, 8, 8)),
    case("slice", ["b, s, kv head"], "b, s, three", lambda x: x[:, :, 2:5], dim=-1, start=2, end=5, step=1),
    case("slice", ["b, next, hidden"], "b, s, hidden", lambda x: x[:, 1:], dim=1, start=1, end=BIG, step=1),
    case("slice", ["b, next"], "b, s", lambda x: x[:, :-1], dim=1, start=0, end=-1, step=1),
    case("slice", ["b, next"], "b, s", lambda x: x[:, :8], dim=1, start=0, end=Expr.symbol("s"), step=1),
    case("slice", ["minor, s, kv head"], "four, s, kv head", lambda x: x[::2], dim=0, start=0, end=BIG, step=2),
    case("slice", ["s, hidden"], "s, 1", lambda x: x[:, -1:], dim=1, start=-1, end=BIG, step=1),
    case("select", ["b, s, kv head"], "b, kv head", lambda x: x[:, -1], dim=1, index=-1),
    case("select", ["b, s, kv head, three"], "b, s, kv head", lambda x: x[..., 1], dim=3, index=1),
    case("pad", ["int9: b, s"], "int: b, next", lambda x: F.pad(x, (0, 1), value=-100), pad=(0, 1), value=-100),
    case("pad", ["b, s, kv head"], "b, next, kv head", lambda x: F.pad(x, (0, 0, 1, 0)), pad=(0, 0, 1, 0), value=0),
    case("cat", ["b, s, head", "b, s, four"], "b, s, eight", lambda *x: T.cat(x, -1), dim=-1),
    case("cat", ["b, s, kv head", "b, 1, kv head"], "b, next, kv head", lambda *x: T.cat(x, 1), dim=1),
    case("cat", ["1, s, kv", "1, s, kv", "1, s, kv"], "three, s, kv", lambda *x: T.cat(x, 0), dim=0),
    case("cat", ["b, s, head", "const: b, s, head"], "b, s, eight", lambda *x: T.cat(x, 2), dim=2),
    case("chunk", ["b, s, three kv group head"], [X, X, X], lambda x: x.chunk(3, -1), dim=-1),
    case("chunk", ["b, two s, hidden"], ["b, s, hidden"] * 2, lambda x: x.chunk(2, 1), dim=1),
    case("chunk", ["b, s, three"], ["b, s, 1"] * 3, lambda x: x.chunk(3, 2), dim=2),
    case("chunk", ["s, kv head, nine"], ["s, kv head, six", "s, kv head, three"], lambda x: x.split([6, 3], 2), dim=2),
    case(
        "chunk",
        ["s, kv head, nine"],
        ["s, kv head, four", "s, kv head, four", "s, kv head, 1"],
        lambda x: x.split(4, 2),
        dim=2,
    ),
    case("chunk", ["b, s, hidden"], ["b, s, hidden"], lambda x: x.chunk(1, 2), dim=2),
    *(
        case(n, ["b, s, kv group head"], out, lambda x, n=n, a=a: getattr(x, n)(*a), dims=a[0], keepdim=a[1])
        for n in ("sum", "mean")
        for out, a in (
            ("b, s, 1", ((-1,), True)),
            ("b, s", ((2,), False)),
            ("b, kv group head", ((1,), False)),
            ("b, 1, 1", ((1, -1), True)),
        )
    ),
    case("sum", [X], "[]", lambda x: x.sum(), dims=None, keepdim=False),
    case("mean", [X], "[]", lambda x: x.mean(), dims=None, keepdim=False),
    case("sum", [X], "1, 1, 1", lambda x: x.sum((0, 1, 2), keepdim=True), dims=None, keepdim=True),
    case("mean", [X], "[]", lambda x: x.mean(), dims=(), keepdim=False),
    case("mean", ["const: s, head"], "const: s", lambda x: x.mean(1), dims=(1,), keepdim=False),
    case("softmax", ["b, kv group, s, keys"], "b, kv group, s, keys", lambda x: x.softmax(-1), dim=-1, dtype=None),
    case("softmax", ["b, s, out"], "b, s, out", lambda x: x.softmax(1), dim=1, dtype="float64"),
    case("log_softmax", ["b, s, vocab"], "b, s, vocab", lambda x: x.log_softmax(-1), dim=-1, dtype=None),
    case("topk", ["b s, eight"], ["b s, two", "int: b s, two"], lambda x: x.topk(2, -1), k=2, dim=-1, sorted=True),
    case(
        "topk",
        ["b, nine, kv head"],
        ["b, 1, kv head", "int: b, 1, kv head"],
        lambda x: x.topk(1, 1),
        k=1,
        dim=1,
        sorted=True,
    ),
    case("argmax", ["b, s, eight"], "int: b, s", lambda x: x.argmax(-1), dim=-1, keepdim=False),
    case("argmax", ["b s, eight"], "int: b s, 1", lambda x: x.argmax(1, keepdim=True), dim=1, keepdim=True),
    case("max", ["b, s, eight"], ["b, s", "int: b, s"], lambda x: x.max(-1), dim=-1, keepdim=False),
    case(
        "max",
        ["b, nine, kv head"],
        ["b, 1, kv head", "int: b, 1, kv head"],
        lambda x: x.max(1, True),
        dim=1,
        keepdim=True,
    ),
    case("histc", ["int8: b s, two"], "c32: eight", lambda i: i.float().histc(8, 0, 8), bins=8, min=0, max=8),
    case("weighted_count", ["int8: b s", "b s"], "eight", lambda i, w: w.new_zeros(8).scatter_add(0, i, w), num=8),
    case(
        "weighted_count",
        ["int8: b, s", "const: b, s"],
        "const: eight",
        lambda i, w: w.new_zeros(8).scatter_add(0, i.flatten(), w.flatten()),
        num=8,
    ),
    case("repeat_interleave", ["s"], "s two", lambda x: x.repeat_interleave(2), repeats=2, dim=None),
    case(
        "repeat_interleave", ["b, kv, head"], "b, kv two, head", lambda x: x.repeat_interleave(2, 1), repeats=2, dim=1
    ),
    case("batch_sum", ["eight"], "eight", lambda x: x.clone(), over=("b", "s")),
    case("batch_extreme", ["eight"], "eight", lambda x: x.clone(), over=("b", "s"), largest=True),
    case("batch_part", ["[]"], "[]", lambda x: x.clone(), over=("b", "s")),
    case("gather", ["b s, eight", "int8: b s, two"], "b s, two", lambda x, i: x.gather(1, i), dim=1),
    case("gather", ["b, kv, eight", "int8: b, kv, 1"], "b, kv, 1", lambda x, i: x.gather(-1, i), dim=-1),
    case("scatter", ["b s, eight", "int8: b s, two"], "b s, eight", lambda x, i: x.scatter(1, i, 1), dim=1, scalar=1),
    case("one_hot", ["int8: b, s"], "int: b, s, eight", lambda i: F.one_hot(i, 8), num_classes=8),
    case("bitwise_not", ["bool: b, s"], "bool: b, s", lambda x: ~x),
    case("cumsum", ["b, s, kv head"], "b, s, kv head", lambda x: x.cumsum(-1), dim=-1),
    case("tril", ["kv group, s, keys"], "kv group, s, keys", lambda x: x.tril(-1), diagonal=-1),
    case("triu", ["s, keys"], "s, keys", lambda x: x.triu(1), diagonal=1),
    case("arange", [], "int: s", lambda: T.arange(8), start=0, end=Expr.symbol("s"), dtype="int64"),
    case("arange", [], "int: s", lambda: T.arange(1, 9), start=1, end=Expr.symbol("s") + 1, dtype="int64"),
    case("full", [], "const: s", lambda: T.full((8,), 0.5, dtype=T.float64), scalar=0.5, dtype="float64"),
    case("full", [], "bool: b, s", lambda: T.full((2, 8), True), scalar=1, dtype="bool"),
]

CASES = [
    *UNARY,
    *BINARY,
    *PRODUCTS,
    *ATTENTION,
    *DROPPED,
    *VIEWS,
    *CONVOLUTIONS,
    *RECURRENT,
    *SCANS,
    *STATISTICS,
    *FOURIER,
    *GENERIC,
]
