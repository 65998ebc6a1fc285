"""Experts on rows of tokens: pick the rows of a token's choices, multiply, sum back by token; and the backward of that.

No function here has a gradient: the autograd functions of :mod:`autoplan.runtime.experts` call them, by themselves or
as operators of a compiled graph (:mod:`autoplan.runtime.expert_operators`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from autoplan.runtime.expert_forms import ExpertForm
from autoplan.runtime.expert_products import Groups


@dataclass(frozen=True)
class Chosen:
    """The rows of one call of experts.

    Attributes:
        places: [rows], the places in [t, k] of the choices whose expert is here, by expert.
        weights: [t, k], routing weights; None: 1, as of dispatched rows.
        k: number of choices of a token.
        form: the form of the experts.
    """

    places: torch.Tensor
    weights: torch.Tensor | None
    k: int
    form: ExpertForm

    @property
    def taken(self) -> torch.Tensor | None:
        """The routing weights if they scale what experts take."""
        return self.weights if self.form.scales_inputs else None

    @property
    def given(self) -> torch.Tensor | None:
        """The routing weights if they scale what experts give."""
        return None if self.form.scales_inputs else self.weights


@dataclass(frozen=True)
class Needs:
    """The gradients that a backward needs, by operand."""

    hidden: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


Gradients = tuple[torch.Tensor | None, ...]
"""Gradients of hidden, weights, gate_up, down, gate_up_bias and down_bias; None for each that is not needed."""


def forward(
    hidden: torch.Tensor,
    chosen: Chosen,
    groups: Groups,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of experts by token, [t, h], and the results of the first product, which the backward needs."""
    form, places = chosen.form, chosen.places
    matrices = form.forward_matrices(gate_up)
    first = groups.products(of_tokens(hidden, places, chosen.k, chosen.taken), matrices, gate_up_bias)
    rows = groups.products(form.between(first), form.forward_matrices(down), down_bias)
    return by_token(rows, places, hidden.shape[0], chosen.k, chosen.given), first


def backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    chosen: Chosen,
    groups: Groups,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    first: torch.Tensor,
    need: Needs,
) -> Gradients:
    """Return the gradients of the operands of `forward` from that of its sums."""
    places, form, taken, given = chosen.places, chosen.form, chosen.taken, chosen.given
    arrived = of_tokens(grad, places, chosen.k)
    inner, pull = form.differentiated(first)
    behind = groups.products(arrived, form.backward_matrices(down))  # of the inner rows, before the routing weight
    for_weights = for_down = for_down_bias = None
    if need.weights and given is not None:  # <grad, down inner + bias> = <down^T grad, inner> + <grad, bias>
        for_weights = of_weights(behind, inner, given, places)
        if down_bias is not None:
            for_weights += of_weights(arrived, groups.by_row(down_bias, arrived.shape[0]), given, places)
    if given is not None:
        share = given.flatten()[places].unsqueeze(1)
        arrived, behind = arrived.mul_(share), behind.mul_(share)
    if need.down:
        for_down = _outer(groups, form, inner, arrived)
    if need.down_bias:
        for_down_bias = groups.sums(arrived)
    del arrived
    for_first = for_first_bias = for_hidden = None
    needs_inputs = need.hidden or (need.weights and taken is not None)
    if needs_inputs or need.gate_up or need.gate_up_bias:
        behind = pull(behind)
    del inner, pull
    if need.gate_up:
        for_first = _outer(groups, form, of_tokens(hidden, places, chosen.k, taken), behind)
    if need.gate_up_bias:
        for_first_bias = groups.sums(behind)
    if needs_inputs:
        rows = groups.products(behind, form.backward_matrices(gate_up))
        if need.weights and taken is not None:
            for_weights = of_weights(rows, of_tokens(hidden, places, chosen.k), taken, places)
        if need.hidden:
            for_hidden = by_token(rows, places, hidden.shape[0], chosen.k, taken)
    return for_hidden, for_weights, for_first, for_down, for_first_bias, for_down_bias


def _outer(groups: Groups, form: ExpertForm, taken: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of weights from the rows that they took and the gradient of what they gave."""
    return groups.outer(taken, grad) if form.transposed else groups.outer(grad, taken)


def of_tokens(hidden: torch.Tensor, chosen: torch.Tensor, k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[t, h] -> [rows, h]: the token of every row, scaled by the weight [t, k] at its place, in the token's dtype."""
    rows = hidden.index_select(0, chosen // k)
    return rows if weights is None else rows.mul_(weights.flatten()[chosen].unsqueeze(1))


def by_token(
    rows: torch.Tensor, chosen: torch.Tensor, t: int, k: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, h] -> [t, h]: sum the rows of every token, in the order of its choices and in at least float32.

    One kernel reads every row once, without atomics: the same bits in every run (`index_add` on CUDA adds in the order
    of arrival, and rounds 16-bit sums after every addition).

    Args:
        chosen: the place of every row in [t, k]; no place occurs twice.
        weights: [t, k], the scale of the row at each place; None: unscaled.
    """
    if chosen.shape[0] == t * k:  # a row at every place: its inverse needs no sort
        order = torch.empty_like(chosen).scatter_(0, chosen, torch.arange(t * k, device=chosen.device))
        starts = torch.arange(0, t * k, k, device=chosen.device)
    else:
        places, order = chosen.sort()
        starts = torch.searchsorted(places, torch.arange(0, t * k, k, device=chosen.device))
    if weights is not None:  # rounded like a model that adds rows one by one: a sum of two has its bits
        rows = torch.mul(rows, weights.flatten()[chosen].unsqueeze(1), out=torch.empty_like(rows))
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # its CPU kernel does not round 16-bit sums to nearest
        return functional.embedding_bag(order, rows.float(), starts, mode="sum").to(rows.dtype)
    return functional.embedding_bag(order, rows, starts, mode="sum")


def of_weights(a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Gradient of routing weights, [t, k]: dot products of matching rows of `a` and `b`; 0 at places without a row."""
    each = (a * b).sum(1).to(weights.dtype)
    return weights.new_zeros(weights.numel()).index_copy_(0, chosen, each).view_as(weights)
