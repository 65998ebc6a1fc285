"""Recurrent layers over samples of different lengths, packed on each rank.

How many tokens there are is in the data, so that a compiler and a simulation of ranks must not see inside: the layers
are one operator. Its backward computes the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import _VF
from torch.nn.utils import rnn

from autoplan.runtime.operators import Operator, define_operators
from autoplan.runtime.private import autograd_inside

_GIVEN = (
    "Tensor x, Tensor lengths, Tensor[] state, Tensor[] weights, str kind, bool biases, int layers, "
    "bool bidirectional, bool batch_first"
)


def packed_layers(
    kind: str,
    x: torch.Tensor,
    lengths: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *settings: bool | int,
) -> tuple[torch.Tensor, ...]:
    """Run layers of PyTorch over the first tokens of every sample.

    Args:
        kind: name of PyTorch's function, such as lstm.
        settings: whether there are biases, the number of layers, whether they have two directions, and whether the
            batch is the first dim.

    Returns:
        The output, zero behind the length of a sample, and the state after the last of its tokens.
    """
    return tuple(torch.ops.autoplan_recurrent.packed(x, lengths, list(state), list(weights), kind, *settings))


def _packed(
    x: torch.Tensor,
    lengths: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    kind: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    rows = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first, enforce_sorted=False)
    there, back = rows.sorted_indices, rows.unsorted_indices
    assert there is not None and back is not None, "an order of samples"
    given = [s.index_select(1, there) for s in state]
    first = given if kind == "lstm" else given[0]
    settings = (biases, layers, 0.0, True, bidirectional)
    found, *after = getattr(_VF, kind)(rows.data, rows.batch_sizes, first, list(weights), *settings)
    again = rnn.PackedSequence(found, rows.batch_sizes, there, back)
    out, _ = rnn.pad_packed_sequence(again, batch_first, total_length=x.shape[1 if batch_first else 0])
    return [out.contiguous(), *(s.index_select(1, back) for s in after)]


def _like(x: torch.Tensor, lengths: torch.Tensor, state: Sequence[torch.Tensor], weights: Any, kind: str, biases: bool,
          layers: int, bidirectional: bool, batch_first: bool) -> list[torch.Tensor]:  # fmt: skip
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:-1], width), *(s.new_empty(s.shape) for s in state)]


def _backward(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    lengths: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *settings: Any,
) -> list[torch.Tensor]:
    """Return the gradients of x, of the state and of the weights."""
    leaves = [t.detach().requires_grad_() for t in (x, *state, *weights)]
    count = 1 + len(state)
    with autograd_inside():
        outs = _packed(leaves[0], lengths, leaves[1:count], leaves[count:], *settings)
    return [g.contiguous() for g in torch.autograd.grad(outs, leaves, list(gradients))]


def _like_backward(gradients: Any, x: torch.Tensor, lengths: Any, state: Any, weights: Any, *_: Any) -> Any:
    return [t.new_empty(t.shape) for t in (x, *state, *weights)]


_LIBRARY = define_operators(
    "autoplan_recurrent",
    (
        Operator(f"packed({_GIVEN}) -> Tensor[]", _packed, _like),
        Operator(f"packed_backward(Tensor[] gradients, {_GIVEN}) -> Tensor[]", _backward, _like_backward),
    ),
)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, lengths, state, weights, *ctx.settings = inputs
    ctx.count, ctx.shapes = len(state), [o.shape for o in output]
    ctx.save_for_backward(x, lengths, *state, *weights)


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    x, lengths, *rest = ctx.saved_tensors
    state, weights = rest[: ctx.count], rest[ctx.count :]
    given = [x.new_zeros(s) if g is None else g for g, s in zip(gradients, ctx.shapes, strict=True)]
    found = torch.ops.autoplan_recurrent.packed_backward(given, x, lengths, state, weights, *ctx.settings)
    of_state, of_weights = found[1 : 1 + ctx.count], found[1 + ctx.count :]
    return (found[0], None, of_state, of_weights, *[None] * len(ctx.settings))


torch.library.register_autograd("autoplan_recurrent::packed", _gradients, setup_context=_keep, lib=_LIBRARY)
