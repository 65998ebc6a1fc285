"""Capture the experts of a mixture as one op: `hidden, top_k_index, top_k_weights -> hidden`, with stacked weights.

A trace of their forward would loop over the experts that were chosen, with sizes that depend on the data. The experts
classes of Hugging Face are found by transformers' own dispatch. A class of the user is registered with one decorator:

    @experts_forward(gate_up="w_in", down="w_out", activation="silu")
    class MyExperts(nn.Module):
        def forward(self, hidden, top_k_index, top_k_weights): ...

Shapes: hidden [tokens, h], index and weights [tokens, top_k], gate_up [experts, 2 f, h] (gate rows first, then up; or
[experts, f, h] if not gated), down [experts, h, f].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from autoplan.capture.frontend.huggingface import configured
from autoplan.errors import CaptureError

_MARK = "_autoplan_experts"
_NAME = "autoplan_capture"
_Module = TypeVar("_Module", bound=type[nn.Module])


@dataclass(frozen=True)
class ExpertsSpec:
    """The attributes that hold the weights of an experts class, and its activation."""

    gate_up: str
    down: str
    activation: str
    gated: bool


def experts_forward(
    *, gate_up: str = "gate_up_proj", down: str = "down_proj", activation: str = "silu", gated: bool = True
) -> Callable[[_Module], _Module]:
    """Return a class decorator that captures the module as one op instead of tracing its forward.

    Args:
        gate_up: attribute that holds [experts, 2 f, h] (gate, then up), or [experts, f, h] with `gated=False`.
        down: attribute that holds [experts, h, f].
        activation: activation of the gate (or of the only projection), by its name in torch.nn.functional.
        gated: True if the first projection is `activation(gate) * up`.
    """

    def mark(cls: _Module) -> _Module:
        setattr(cls, _MARK, ExpertsSpec(gate_up, down, activation, gated))
        return cls

    return mark


@torch.library.custom_op("autoplan::experts", mutates_args=())
def experts_op(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    activation: str,
    gated: bool,
) -> torch.Tensor:
    """Mark the experts in the captured graph. Cannot be run."""
    raise RuntimeError("autoplan::experts is a capture marker and cannot be run")


@experts_op.register_fake
def _(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


def _call(
    module: nn.Module, spec: ExpertsSpec, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Call the op in place of the module's forward. Raises CaptureError unless the shapes fit stacked experts."""
    gate_up, down = getattr(module, spec.gate_up), getattr(module, spec.down)
    name, width = type(module).__name__, hidden.shape[-1]
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape:
        raise CaptureError(
            f"{name}: experts take hidden [tokens, h], index and weights [tokens, top_k]; got {list(hidden.shape)}, "
            f"{list(index.shape)} and {list(weights.shape)}"
        )
    num_experts, _, size = down.shape
    want = ([num_experts, (2 if spec.gated else 1) * size, width], [num_experts, width, size])
    if [list(gate_up.shape), list(down.shape)] != list(want):
        raise CaptureError(
            f"{name}: {spec.gate_up} {list(gate_up.shape)} and {spec.down} {list(down.shape)} should be {want[0]} and "
            f"{want[1]} (gated={spec.gated})"
        )
    result: torch.Tensor = torch.ops.autoplan.experts(
        hidden, index, weights, gate_up, down, num_experts, index.shape[1], size, spec.activation, spec.gated
    )
    return result


def _hugging_face(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run an experts class in transformers' dispatch (its decorator use_experts_implementation sets the flags)."""
    from transformers.integrations.moe import _default_apply_gate

    name, flags = type(module).__name__, vars(module)
    for flag, what in (
        ("has_bias", "biases"),
        ("is_transposed", "transposed weights"),
        ("has_post_expert_norm", "a norm after each expert"),
    ):
        if flags.get(flag):
            raise CaptureError(f"{name}: experts with {what} are not supported")
    gated = bool(flags.get("has_gate", True))
    plain = getattr(type(module), "_apply_gate", None) is _default_apply_gate and flags.get("is_concatenated", True)
    if gated and not plain:
        raise CaptureError(f"{name}: only gated experts of the form activation(gate) * up, gate first, are supported")
    config = flags["config"]
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation is None:
        raise CaptureError(f"{name}: its config names no hidden_act")
    spec = ExpertsSpec("gate_up_proj" if gated else "up_proj", "down_proj", str(activation), gated)
    return _call(module, spec, hidden_states, top_k_index, top_k_weights)


@contextmanager
def capture_experts(model: nn.Module) -> Iterator[None]:
    """Replace the forward of registered classes by the one op, and restore it on exit."""
    marked = [(m, getattr(type(m), _MARK)) for m in model.modules() if hasattr(type(m), _MARK)]
    try:
        for module, spec in marked:
            module.forward = lambda hidden, index, weights, m=module, s=spec: _call(m, s, hidden, index, weights)
        yield
    finally:
        for module, _ in marked:
            module.__dict__.pop("forward", None)


def refuse_separate_experts(model: nn.Module) -> None:
    """Raise CaptureError for experts that are separate modules in a loop, as in Switch Transformers and NLLB.

    Their weights are not stacked, so one op cannot take them. The error names the class.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleDict) and type(module).__name__.endswith("Experts") and len(module) > 1:
            raise CaptureError(
                f"{type(module).__name__} at {path} holds its {len(module)} experts as modules of their own and loops "
                "over those that were hit, so sizes depend on the data; stack their weights in one class and register "
                "it with autoplan.capture.frontend.experts.experts_forward"
            )


@contextmanager
def capture_hf_experts(model: nn.Module) -> Iterator[None]:
    """Capture the experts of a Hugging Face model as one op, through transformers' own dispatch."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _hugging_face)
    with configured(model, "_experts_implementation", _NAME):
        yield
