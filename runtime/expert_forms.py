"""The forms of experts: how their weights lie, and the function between their two products.

The function has one argument, or two if experts are gated: the gate and what it scales. By name it is

    of one argument    a function of `torch.nn.functional`, or one of `ACTIVATIONS`
    gated              one of `GATES`, or a function of one argument: f(gate) * up

A gate may take numbers of the model: `alpha` and `limit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]
Pull = Callable[[torch.Tensor], torch.Tensor]
"""From the gradient of a function's result to that of its argument."""


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Activation] = {"relu2": _relu2, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu}


@dataclass(frozen=True)
class Gate:
    """A function of gate and up, and the names of its numbers."""

    function: Callable[..., torch.Tensor]
    numbers: tuple[str, ...] = ()


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _silu_clamped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _silu_in_float32(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


GATES: Mapping[str, Gate] = {
    "clamped_swiglu": Gate(_clamped_swiglu, ("alpha", "limit")),  # GPT-OSS, MiniMax-M3
    "clamped_silu": Gate(_clamped_silu, ("limit",)),  # DeepSeek-V4
    "silu_clamped": Gate(_silu_clamped, ("limit",)),  # Step 3.7
    "silu_in_float32": Gate(_silu_in_float32),  # Beam
}


def activation(name: str) -> Activation | None:
    """Return the function of one argument of this name; None if there is none."""
    return ACTIVATIONS.get(name) or getattr(functional, name, None)


@dataclass(frozen=True)
class ExpertForm:
    """The form of experts with inner size f and hidden size h.

    Attributes:
        activation: name of the function between the products (see the module).
        gated: the first product is a gate and the value it scales.
        interleaved: columns of the first product alternate between both; else all of the gate come first.
        transposed: weights are [e, h, 2 f] and [e, f, h], else [e, 2 f, h] and [e, h, f]; not gated: f instead of 2 f.
        scales_inputs: routing weights scale what an expert takes, not what it gives.
        alpha, limit: numbers of the function.

    Raises:
        ValueError: a function that is not known, or numbers that are not those it takes.
    """

    activation: str
    gated: bool
    interleaved: bool = False
    transposed: bool = False
    scales_inputs: bool = False
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        gate = GATES.get(self.activation) if self.gated else None
        if gate is None and activation(self.activation) is None:
            more = f", and gates are {', '.join(GATES)}" if self.gated else ""
            raise ValueError(f"experts: torch.nn.functional has no activation {self.activation!r}{more}")
        given = tuple(n for n in ("alpha", "limit") if getattr(self, n) is not None)
        wanted = gate.numbers if gate is not None else ()
        if given != wanted:
            raise ValueError(
                f"experts: {self.activation} takes {' and '.join(wanted) or 'no numbers'}; got "
                f"{' and '.join(given) or 'none'}"
            )

    def shapes(self, num: int, inner: int, hidden: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of both weights."""
        columns = (1 + self.gated) * inner
        if self.transposed:
            return (num, hidden, columns), (num, inner, hidden)
        return (num, columns, hidden), (num, hidden, inner)

    def forward_matrices(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights as [e, i, o], which rows [n, i] are multiplied by."""
        return weights if self.transposed else weights.mT

    def backward_matrices(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights as [e, o, i], which gradients of rows [n, o] are multiplied by."""
        return weights.mT if self.transposed else weights

    def between(self, first: torch.Tensor) -> torch.Tensor:
        """Return the inputs [n, f] of the second product from the results of the first."""
        gate = GATES.get(self.activation) if self.gated else None
        one = activation(self.activation)
        if not self.gated and one is not None:
            return one(first)
        left, right = self._halves(first)
        if gate is not None:
            return gate.function(left, right, *(getattr(self, name) for name in gate.numbers))
        if one is None:
            raise RuntimeError(f"experts: no activation {self.activation!r}")
        return one(left) * right

    def _halves(self, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the gate and of what it scales."""
        left, right = (first[..., ::2], first[..., 1::2]) if self.interleaved else first.chunk(2, -1)
        return left, right

    def differentiated(self, first: torch.Tensor) -> tuple[torch.Tensor, Pull]:
        """Return `between(first)`, and the function from its gradient to that of `first`.

        The gate that most models have is written out, with the operations that autograd would run, since a call of
        autograd for one small product costs the host more than they do.
        """
        if self.gated and self.activation == "silu":
            return self._silu(first)
        with torch.enable_grad():
            made = first.detach().requires_grad_()
            inner = self.between(made)
        return inner.detach(), lambda grad: torch.autograd.grad(inner, made, grad)[0]

    def _silu(self, first: torch.Tensor) -> tuple[torch.Tensor, Pull]:
        gate, up = self._halves(first)
        open_ = functional.silu(gate)

        def pull(grad: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(first)
            for_gate, for_up = self._halves(out)
            torch.mul(grad, open_, out=for_up)
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=for_gate)
            return out

        return open_ * up, pull
