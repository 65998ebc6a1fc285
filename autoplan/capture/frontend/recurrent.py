"""Capture nn.LSTM, nn.GRU and nn.RNN as one op each.

PyTorch's trace of one is a loop over the tokens, for one length. As one op it is what PyTorch runs, for every length,
and can be split over the batch. With dropout between its layers, each layer is an op.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.marker import empty_like_each, marker
from autoplan.errors import CaptureError

_KINDS = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))


def recurrent_like(x: torch.Tensor, state: list[torch.Tensor], weights: object, kind: str, biases: bool, layers: int,
                   bidirectional: bool, batch_first: bool) -> list[torch.Tensor]:  # fmt: skip
    """Return empty results of recurrent layers: the output, and the state after the last token."""
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:-1], width), *empty_like_each(state)]


# recurrent layers: the output, and the state after the last token
marker(
    "recurrent(Tensor x, Tensor[] state, Tensor[] weights, str kind, bool biases, SymInt layers, bool bidirectional, "
    "bool batch_first) -> Tensor[]",
    recurrent_like,
)


def runs_dropout(function: Any, args: Sequence[Any]) -> bool:
    """Return True for a call of PyTorch's recurrent layers that drops values between its layers."""
    if getattr(function, "__name__", "") not in _KINDS or len(args) != 9:
        return False
    layers, dropout, training = args[5:8] if _is_packed(args) else args[4:7]
    return bool(dropout and training and layers > 1)


def _is_packed(args: Sequence[Any]) -> bool:
    """Return True for the arguments of packed sequences: data, batch sizes, state, weights, and the rest."""
    return isinstance(args[3], (list, tuple))


def layer_by_layer(function: Callable[..., Any], args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Compute several recurrent layers one after the other, with dropout between them, as PyTorch does.

    Args:
        function: of one layer.
        args: those of PyTorch's function of all layers.
    """
    x, *sizes, state, weights, biases, layers, dropout, _, bidirectional = args if _is_packed(args) else args[:-1]
    last = [] if sizes else args[-1:]  # whether the batch is the first dim
    states = list(state) if isinstance(state, (tuple, list)) else [state]
    rows, each = 2 if bidirectional else 1, len(weights) // layers
    after = []
    for k in range(layers):
        x = F.dropout(x, dropout, True) if k else x
        mine = [s[k * rows : (k + 1) * rows] for s in states]
        given = mine if isinstance(state, (tuple, list)) else mine[0]
        part = weights[k * each : (k + 1) * each]
        x, *left = function(x, *sizes, given, part, biases, 1, 0.0, True, bidirectional, *last)
        after.append(left)
    return (x, *(torch.cat(parts) for parts in zip(*after, strict=True)))


class _AsOneOp(TorchFunctionMode):
    """Replace PyTorch's functions of recurrent layers by the one op."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _KINDS or kwargs or len(args) != 9:
            return function(*args, **(kwargs or {}))
        if _is_packed(args) or args[0].dim() != 3:
            raise CaptureError(
                f"{name} is supported for a tensor [batch, tokens, features] (or tokens first), and for what "
                "pack_padded_sequence makes of one"
            )
        x, state, weights, biases, layers, _, _, bidirectional, batch_first = args
        if runs_dropout(function, args):
            with self:
                return layer_by_layer(function, args)
        states = list(state) if isinstance(state, (tuple, list)) else [state]
        return tuple(
            torch.ops.autoplan.recurrent(x, states, list(weights), name, biases, layers, bidirectional, batch_first)
        )


@contextmanager
def capture_recurrent() -> Iterator[type[_AsOneOp]]:
    """Yield what captures recurrent layers as one op in the context of the model's forward."""
    with warnings.catch_warnings():
        # torch.export says so of the parameters that these modules hold in a list, too
        held = r"(self\.[\w.]*_flat_weights\[\d+\](, )?)+"
        warnings.filterwarnings("ignore", rf"The tensor attributes? {held} (was|were) assigned during export")
        yield _AsOneOp
