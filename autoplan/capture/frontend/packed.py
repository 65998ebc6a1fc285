"""Capture packed sequences of recurrent layers: `pack_padded_sequence`, a layer, `pad_packed_sequence`.

PyTorch packs the tokens of samples of different lengths without their padding, so that the sizes depend on the data.
Here the padded tensor and the lengths stay together, and the layer is one op of both, whose program packs them on its
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.utils import rnn

from autoplan.capture.frontend.marker import marker
from autoplan.capture.frontend.recurrent import layer_by_layer, recurrent_like
from autoplan.errors import CaptureError

# recurrent layers over the first tokens of every sample; results behind them are zero
marker(
    "packed_recurrent(Tensor x, Tensor lengths, Tensor[] state, Tensor[] weights, str kind, bool biases, "
    "SymInt layers, bool bidirectional, bool batch_first) -> Tensor[]",
    lambda x, lengths, *rest: recurrent_like(x, *rest),
)


@dataclass(frozen=True)
class PackedSamples:
    """Stands for a packed sequence: the padded tensor, and the lengths of the samples."""

    padded: torch.Tensor
    lengths: torch.Tensor
    batch_first: bool

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f".{name} of a packed sequence has a size that depends on the data; compute with what pad_packed_sequence "
            "returns"
        )


def pack(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSamples:
    """Stand for `pack_padded_sequence`. The order of the samples changes nothing here."""
    if not isinstance(lengths, torch.Tensor):
        raise CaptureError(
            "pack_padded_sequence is given lengths that are numbers, which a graph would keep for every batch; give a "
            "tensor [batch]"
        )
    return PackedSamples(input, lengths.long(), batch_first)


def pad(
    sequence: PackedSamples, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `pad_packed_sequence`."""
    out, place = sequence.padded, 1 if sequence.batch_first else 0
    if total_length is None or not statically_known_true(total_length == out.shape[place]):
        raise CaptureError(
            "pad_packed_sequence makes sequences as long as the longest of a batch, and a graph has one length for all "
            f"batches; give total_length=x.shape[{place}] of the x that was packed"
        )
    if padding_value != 0.0:
        tokens = torch.arange(out.shape[place], device=out.device)
        tokens, lengths = tokens.unsqueeze(1 - place), sequence.lengths.unsqueeze(place)
        out = out.masked_fill((tokens >= lengths).unsqueeze(-1), padding_value)
    return out if batch_first == sequence.batch_first else out.transpose(0, 1), sequence.lengths


def _run(layer: nn.RNNBase, given: PackedSamples, state: Any) -> tuple[PackedSamples, Any]:
    """Call a recurrent layer with a packed sequence."""
    weights, kind = [w for w in layer._flat_weights if w is not None], layer.mode.lower()
    x, batch_first = given.padded.to(weights[0].dtype), given.batch_first
    if state is None:
        rows, samples = layer.num_layers * (2 if layer.bidirectional else 1), x.shape[0 if batch_first else 1]
        widths = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * (kind == "lstm")
        made = [x.new_zeros(rows, samples, width) for width in widths]
        state = made if kind == "lstm" else made[0]

    def run(x: torch.Tensor, state: Any, weights: Sequence[torch.Tensor], biases: bool, layers: int, *rest: Any) -> Any:
        states = list(state) if isinstance(state, (tuple, list)) else [state]
        return torch.ops.autoplan.packed_recurrent(
            x, given.lengths, states, list(weights), kind, biases, layers, *rest[2:]
        )

    settings = (x, state, weights, layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional)
    drops = layer.dropout and layer.training and layer.num_layers > 1
    args: tuple[Any, ...] = (*settings, batch_first)
    out, *after = layer_by_layer(run, args) if drops else run(*args)
    found = PackedSamples(out, given.lengths, batch_first)
    return found, tuple(after) if kind == "lstm" else after[0]


def _forward(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        return _run(self, input, hx) if isinstance(input, PackedSamples) else plain(self, input, hx)

    return forward


# Bodies that PyTorch's functions have while a model is traced, whose modules import them by name: they see the globals
# of PyTorch's own.
def _pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from autoplan.capture.frontend import packed

    return packed.pack(input, lengths, batch_first, enforce_sorted)


def _pad(sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None) -> Any:
    from autoplan.capture.frontend import packed

    return packed.pad(sequence, batch_first, padding_value, total_length)


@contextmanager
def _with_body(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    assert isinstance(function, FunctionType) and isinstance(other, FunctionType)
    before, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def capture_packed() -> Iterator[None]:
    """Keep packed sequences padded in the context of the model's forward."""
    with ExitStack() as stack:
        stack.enter_context(_with_body(rnn.pack_padded_sequence, _pack))
        stack.enter_context(_with_body(rnn.pad_packed_sequence, _pad))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(patch.object(kind, "forward", _forward(kind.forward)))
        yield
