"""Random tensors of a forward: every ATen op that draws, in terms of few distributions whose numbers no plan changes.

`FORMS` has the one definition of every such op. The capture traces it with a marker that becomes the op `draw`; the
comparison of a capture with its module (`autoplan.verify.drawn`) runs it with numbers that both know. Some are the
definitions of torch: a normal number times a deviation plus a mean. Others are equivalent:

- choices by weights w are the largest w / e for exponential e (Efraimidis and Spirakis, Weighted random sampling with a
  reservoir, Information Processing Letters 97, 2006), which is what torch computes too;
- a permutation is the order of uniform numbers;
- geometric numbers are rounded exponential ones, Cauchy's are tangents (Devroye, Non-uniform random variate generation,
  1986, sections X.2 and II.2).

Like torch's own, what is drawn by parameters that are tensors has no gradient in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import fx

from autoplan.capture.frontend.inplace import same_arguments
from autoplan.capture.frontend.marker import marker

Sizes = Sequence[Any]  # of numbers and symbolic sizes


class Draw(Protocol):
    """Makes random numbers of a shape and dtype; distributions and parameters are those of `autoplan.runtime.draws`."""

    def __call__(self, size: Sizes, distribution: str, dtype: torch.dtype, *parameters: Any) -> torch.Tensor:
        """Return the numbers."""


marker(
    "draw(SymInt[] size, str distribution, ScalarType dtype, float[] parameters, SymInt[] bounds) -> Tensor",
    lambda size, distribution, dtype, parameters, bounds: torch.empty(size, dtype=dtype),
)


def _marked(size: Sizes, distribution: str, dtype: torch.dtype, *parameters: Any) -> torch.Tensor:
    """Return what stands for a draw in a captured graph."""
    whole = distribution == "integers"
    floats, bounds = ([], list(parameters)) if whole else ([float(p) for p in parameters], [])
    out: torch.Tensor = torch.ops.autoplan.draw(list(size), distribution, dtype, floats, bounds)
    return out


# -- what ops draw -----------------------------------------------------------------------------------------------------


def _scaled(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    x = x if factor == 1 else x * factor
    return x if shift == 0 else x + shift


def _made(distribution: str) -> Callable[..., torch.Tensor]:
    def form(draw: Draw, size: Sizes, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return draw(size, distribution, dtype or torch.get_default_dtype())

    return form


def _made_like(distribution: str) -> Callable[..., torch.Tensor]:
    def form(draw: Draw, self: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return draw(self.shape, distribution, dtype or self.dtype)

    return form


def _randint(draw: Draw, low: Any, high: Any, size: Sizes, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return draw(size, "integers", dtype or torch.int64, low, high)


def _randint_like(draw: Draw, self: torch.Tensor, low: Any, high: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return draw(self.shape, "integers", dtype or self.dtype, low, high)


def _below(draw: Draw, self: torch.Tensor, high: int) -> torch.Tensor:
    return draw(self.shape, "integers", self.dtype, 0, high)


def _bernoulli(draw: Draw, self: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    return draw(self.shape, "bernoulli", self.dtype, p)


def _bernoulli_tensor(draw: Draw, self: torch.Tensor, p: torch.Tensor | None = None) -> torch.Tensor:
    share = self if p is None else p
    wide = share.dtype if share.dtype in (torch.float32, torch.float64) else torch.float32
    return (draw(self.shape, "uniform", wide) < share.detach()).to(self.dtype)


def _uniform(draw: Draw, self: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return _scaled(draw(self.shape, "uniform", self.dtype), high - low, low)


def _normal(draw: Draw, self: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return _scaled(draw(self.shape, "normal", self.dtype), std, mean)


def _normal_of_size(
    draw: Draw, mean: float, std: float, size: Sizes, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _scaled(draw(size, "normal", dtype or torch.get_default_dtype()), std, mean)


def _normal_of_tensors(draw: Draw, mean: Any, std: Any = 1.0) -> torch.Tensor:
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    given = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    size = sum(given[1:], given[0]).shape
    dtype = given[0].dtype if len(given) == 1 else torch.promote_types(given[0].dtype, given[1].dtype)
    out: torch.Tensor = draw(size, "normal", dtype) * std + mean
    return out


def _log_normal(draw: Draw, self: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _normal(draw, self, mean, std).exp()


def _exponential(draw: Draw, self: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return _scaled(draw(self.shape, "exponential", self.dtype), 1 / lambd, 0)


def _cauchy(draw: Draw, self: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return _scaled(torch.tan((draw(self.shape, "uniform", self.dtype) - 0.5) * math.pi), sigma, median)


def _geometric(draw: Draw, self: torch.Tensor, p: float) -> torch.Tensor:
    wide = self.dtype if self.dtype.is_floating_point else torch.get_default_dtype()
    trials = draw(self.shape, "exponential", wide) * (-1 / math.log1p(-p) if p < 1 else 0.0)
    return trials.ceil().clamp(min=1).to(self.dtype)


def _permutation(draw: Draw, n: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return draw([n], "uniform", torch.float64).argsort().to(dtype or torch.int64)


def _choices(draw: Draw, self: torch.Tensor, num_samples: Any, replacement: bool = False) -> torch.Tensor:
    weights = self.detach()
    if num_samples == 1:
        return (weights / draw(self.shape, "exponential", self.dtype)).argmax(-1, keepdim=True)
    if not replacement:
        return (weights / draw(self.shape, "exponential", self.dtype)).topk(num_samples).indices
    size = (*self.shape[:-1], num_samples, self.shape[-1])
    return (weights.unsqueeze(-2) / draw(size, "exponential", self.dtype)).argmax(-1)


def _features(x: torch.Tensor) -> Sizes:
    return [*x.shape[:2], *[1] * (x.dim() - 2)]


def _feature_dropout(draw: Draw, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return input
    kept = draw(_features(input), "bernoulli", input.dtype, 1 - p)
    return input * (kept / (1 - p) if p < 1 else kept)


def _alpha_dropout(draw: Draw, input: torch.Tensor, p: float, train: bool, features: bool = False) -> torch.Tensor:
    """Klambauer, Unterthiner, Mayr, Hochreiter: Self-normalizing neural networks, NeurIPS 2017."""
    if not train or p == 0:
        return input
    kept = draw(_features(input) if features else input.shape, "bernoulli", input.dtype, 1 - p)
    if p == 1:
        return input * kept
    low = -1.7580993408473766  # minus scale times alpha of SELU
    slope = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    return input * (kept * slope) + ((kept - 1) * (-low * slope) + -low * slope * p)


def _rrelu(
    draw: Draw, self: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> torch.Tensor:
    if not training:
        return F.leaky_relu(self, (lower + upper) / 2)
    slope = draw(self.shape, "uniform", self.dtype) * (upper - lower) + lower
    return torch.where(self <= 0, self * slope, self)


FORMS: Mapping[str, Callable[..., torch.Tensor]] = {
    "aten.rand.default": _made("uniform"),
    "aten.rand_like.default": _made_like("uniform"),
    "aten.randn.default": _made("normal"),
    "aten.randn_like.default": _made_like("normal"),
    "aten.randint.default": lambda draw, high, size, **how: _randint(draw, 0, high, size, **how),
    "aten.randint.low": _randint,
    "aten.randint_like.default": lambda draw, self, high, **how: _randint_like(draw, self, 0, high, **how),
    "aten.randint_like.low_dtype": _randint_like,
    "aten.random.to": _below,
    "aten.bernoulli.default": _bernoulli_tensor,
    "aten.bernoulli.Tensor": _bernoulli_tensor,
    "aten.bernoulli.p": _bernoulli,
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal,
    "aten.normal.float_float": _normal_of_size,
    **{f"aten.normal.{given}": _normal_of_tensors for given in ("Tensor_float", "float_Tensor", "Tensor_Tensor")},
    "aten.log_normal.default": _log_normal,
    "aten.exponential.default": _exponential,
    "aten.cauchy.default": _cauchy,
    "aten.geometric.default": _geometric,
    "aten.randperm.default": _permutation,
    "aten.multinomial.default": _choices,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.alpha_dropout.default": _alpha_dropout,
    "aten.feature_alpha_dropout.default": partial(_alpha_dropout, features=True),
    "aten.rrelu.default": _rrelu,
}
_MARKED = {name: partial(form, _marked) for name, form in FORMS.items()}


def drawn_form(target: str, node: fx.Node) -> Callable[..., torch.Tensor] | None:
    """Return the definition of an op that draws, of the node's arguments; None if it has none, as with a generator."""
    return None if has_generator(node) else _MARKED.get(target)


def drawn_in_place(node: fx.Node) -> str | None:
    """Return the op that makes as a new tensor what a node writes into its first argument, if that is drawn."""
    op, name = node.target, str(node.target).removeprefix("aten.").partition("_.")
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or not name[1] or has_generator(node):
        return None
    found = same_arguments(name[0], op)
    return found if found in FORMS else None


def has_generator(node: fx.Node) -> bool:
    """Return True if a node draws from a generator of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    places = [i for i, argument in enumerate(target._schema.arguments) if argument.name == "generator"]
    given = [node.args[i] for i in places if i < len(node.args)]
    return any(x is not None for x in (*given, node.kwargs.get("generator")))
