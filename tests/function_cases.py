"""Cases of functions along a sequence, statistics, convolutions, transforms, and operations without a record."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from rule_case import ENV, Case, T, X, case, same
from torch.nn.utils import rnn

from autoplan.ir.symbols import Expr


def _conv(x: T.Tensor, w: T.Tensor, *bias: T.Tensor, **more: Any) -> T.Tensor:
    return F.conv1d(x, w, *bias, padding=1, **more)


def _lstm(x: T.Tensor, *rest: T.Tensor) -> Any:
    return T.lstm(x, rest[:2], rest[2:], True, 2, 0.0, True, False, True)


def _gru(x: T.Tensor, state: T.Tensor, *weights: T.Tensor) -> Any:
    return T.gru(x, state, weights, False, 1, 0.0, True, True, False)


def _packed_lstm(x: T.Tensor, *rest: T.Tensor) -> Any:
    layer = T.nn.LSTM(8, 8, bidirectional=True, batch_first=True).double()
    names = [n for n, _ in layer.named_parameters()]
    rows = rnn.pack_padded_sequence(x, rest[-1], batch_first=True, enforce_sorted=False)
    out, state = T.func.functional_call(layer, dict(zip(names, rest[2:-1], strict=True)), (rows, rest[:2]))
    return rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], *state


RECURRENT = [
    case(
        "recurrent",
        ["b, s, hidden", *["two, b, value"] * 2, *["four value, hidden", "four value, value", *["four value"] * 2] * 2],
        ["b, s, value", "two, b, value", "two, b, value"],
        _lstm,
        **dict(kind="lstm", biases=True, layers=2, bidirectional=False, batch_first=True, states=2),
    ),
    case(
        "recurrent",
        ["s, b, hidden", "two, b, head", *["three head, hidden", "three head, head"] * 2],
        ["s, b, minor", "two, b, head"],
        _gru,
        **dict(kind="gru", biases=False, layers=1, bidirectional=True, batch_first=False, states=1),
    ),
    case(
        "recurrent",
        [
            "b, s, hidden",
            *["two, b, value"] * 2,
            *["four value, hidden", "four value, value", *["four value"] * 2] * 2,
            "count8: b",
        ],
        ["b, s, two value", "two, b, value", "two, b, value"],
        _packed_lstm,
        **dict(kind="lstm", biases=True, layers=1, bidirectional=True, batch_first=True, states=2, by_length=True),
    ),
]


def grouped_scan(x: T.Tensor, decay: T.Tensor, gate: T.Tensor) -> T.Tensor:
    """Stand for a function along the sequence, [b, s, heads, head], with a gate for every group of heads."""
    return (x * decay[:, None] * gate.repeat_interleave(x.shape[2] // gate.shape[2], 2)).cumsum(1)


SCANS = [
    case(
        "scan",
        ["b, s, kv group, head", "kv group", "b, s, kv, head"],
        "b, s, kv group, head",
        grouped_scan,
        **dict(function="function_cases.grouped_scan", call="{0}, {1}, gate={2}", length_of=(0, 1), starts=(5.0, 0.0)),
        **dict(rule="[f0, x0d1!, f1 f1x4, f2], [f1 f1x4], [f0, x2d1!, f1, f2] -> [f0, x3d1!, f1 f1x4, f2]"),
        **dict(flops=3.0, moved=80.0, kept=16.0, keeps=(0, 1)),
    )
]

# tests/whole/test_batch_norm.py has what becomes of the buffers
STATISTICS = [
    case(
        "running_statistics",
        ["const: hidden", "const: hidden", "const: hidden", "const: hidden"],
        "const: []",
        lambda mean, *rest: mean.new_zeros(()),
        **dict(momentum=0.1, scalar=Expr.of(8)),
    ),
    # tests/whole/test_buffers.py, as well
    case("update_buffer", ["const: hidden", "const: hidden"], "const: hidden", lambda value, held: value.clone()),
]

_KERNEL = {"stride": (1,), "padding": (1,), "dilation": (1,), "transposed": False, "output_padding": (0,)}
CONVOLUTIONS = [
    case("convolution", ["b, hidden, s", "out, hidden, three"], "b, out, s", _conv, **_KERNEL, groups=1),
    case("convolution", ["b, hidden, s", "out, hidden, three", "out"], "b, out, s", _conv, **_KERNEL, groups=1),
    case(
        "convolution",
        ["b, hidden, s", "hidden, 1, three", "hidden"],
        "b, hidden, s",
        lambda x, w, c: _conv(x, w, c, groups=8),
        **_KERNEL,
        groups=8,
    ),
    case(  # several of each channel
        "convolution",
        ["b, hidden, s", "hidden two, 1, three", "hidden two"],
        "b, hidden two, s",
        lambda x, w, c: _conv(x, w, c, groups=8),
        **_KERNEL,
        groups=8,
    ),
    case(  # one of several channels, transposed
        "convolution",
        ["b, eight, s", "eight, 1, three"],
        "b, four, s",
        lambda x, w: F.conv_transpose1d(x, w, padding=1, groups=4),
        **{**_KERNEL, "transposed": True},
        groups=4,
    ),
    case(
        "convolution",
        ["b, eight, s", "four, two, three"],
        "b, four, s",
        lambda x, w: _conv(x, w, groups=4),
        **_KERNEL,
        groups=4,
    ),
    case(
        "convolution",
        ["b, hidden, s", "out, hidden, three"],
        "b, out, s",
        _conv,
        **{**_KERNEL, "padding": "same"},
        groups=1,
    ),
    case(
        "convolution",
        ["b, hidden, s", "hidden, out, three"],
        "b, out, s",
        lambda x, w: F.conv_transpose1d(x, w, padding=1),
        **{**_KERNEL, "transposed": True},
        groups=1,
    ),
]

GENERIC = [
    same("pointwise", F.mish, call="torch.ops.aten.mish.default({0})", rule="[*a] -> [*a]", keeps="x0<0", num_extra=0),
    case(
        "pointwise",
        [X, X],
        X,
        T.atan2,
        call="torch.ops.aten.atan2.default({0}, {1})",
        rule="[*a], [*a] -> [*a]",
        keeps="x0<0,1 x1<0,1",
        num_extra=0,
    ),
    case(
        "function",
        ["b, s, eight"],
        "b, s, eight",
        lambda x: x.flip(2),
        call="torch.ops.aten.flip.default({0}, [2])",
        rule="[f0, f1, x0d2!] -> [f0, f1, x1d2!]",
        keeps="",
        num_extra=0,
    ),
    case(
        "function",
        ["b, s, eight"],
        "b, s",
        lambda x: x.logsumexp(2),
        call="torch.ops.aten.logsumexp.default({0}, [2])",
        rule="[f0, f1, x0d2!] -> [f0, f1]",
        keeps="x0<0 y0<0",
        num_extra=0,
    ),
    case("constant", [], "const: four", lambda: T.arange(4.0).double(), values=(0.0, 1, 2, 3), dtype="float64"),
    case(
        "scatter_add",
        ["b s, eight", "int8: b s, two", "b s, two"],
        "b s, eight",
        lambda x, i, y: x.scatter_add(1, i, y),
        dim=1,
    ),
]


def _fourier(function: str, x: str, y: str, **given: Any) -> Case:
    """The transform `torch.fft.<function>` of x with these arguments."""
    plain = {k: [n.evaluate(ENV) for n in v] if k == "sizes" and v else v for k, v in given.items()}
    sizes, dims, norm = (plain.get(name) for name in ("sizes", "dims", "norm"))
    words = {"s": sizes and [int(n) for n in sizes], "dim": dims}
    if function[-1] not in "2n":
        words = {"n": words["s"] and words["s"][0], "dim": dims[0]}
    attrs = {"function": function, "sizes": None, "dims": None, "norm": None} | given
    return case("fourier", [x], y, lambda v: getattr(T.fft, function)(v, norm=norm, **words), **attrs)


FOURIER = [
    _fourier("fft", "b, s, kv head", "complex: b, s, kv head", dims=(-1,)),
    _fourier("ifft", "complex: b, s, kv head", "complex: b, s, kv head", dims=(1,), norm="ortho"),
    _fourier("rfft", "b, s, kv head", "complex: b, five, kv head", dims=(1,)),
    _fourier("irfft", "complex: b, five, kv head", "b, s, kv head", dims=(1,), sizes=(Expr.symbol("s"),)),
    _fourier("fft", "b, keys, kv head", "complex: b, six, kv head", dims=(1,), sizes=(Expr.of(6),), norm="forward"),
    _fourier("fft2", "b, kv group, keys", "complex: b, kv group, keys", dims=(-2, -1)),
    _fourier("rfft2", "b, keys, eight, kv head", "complex: b, keys, five, kv head", dims=(1, 2), norm="ortho"),
    _fourier("irfft2", "complex: b, kv head, four, five", "b, kv head, four, eight", dims=(-2, -1)),
    _fourier("fftn", "b, keys", "complex: b, keys"),
    _fourier("irfftn", "complex: b, kv head, five", "b, kv head, eight", sizes=(Expr.of(8),)),
    case("fourier_shift", [X], X, lambda x: T.fft.fftshift(x, (1,)), function="fftshift", dims=(1,)),
    case("fourier_shift", [X], X, T.fft.ifftshift, function="ifftshift", dims=None),
]
