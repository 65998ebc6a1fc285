"""Capture of everything that draws random numbers: as a few distributions, or refused by name."""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.evaluation import draws
from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.batch import batch_obstacle
from autoplan.runtime.draws import DISTRIBUTIONS
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

LENGTH, WIDTH = 5, 6
Form = Callable[[torch.Tensor], torch.Tensor]


def _filled(x: torch.Tensor) -> torch.Tensor:
    """Noise that is written into memory, whole and in parts."""
    noise, parts, kept = torch.empty_like(x), x.new_zeros(x.shape), x.new_empty(x.shape[0], 1, 1)
    noise.uniform_(0.5, 1.5)
    parts[:, :2].normal_(1.0, 0.1)
    parts[:, 2:].exponential_(2.0)
    kept.bernoulli_(0.7).div_(0.7)
    return x * noise * kept + parts


def _over(x: torch.Tensor) -> torch.Tensor:
    """Noise over values that were computed, one without a gradient, one under no_grad."""
    first = x.detach().clone().normal_()
    with torch.no_grad():
        second = torch.rand_like(x) + x
    return x * first * second


FORMS: dict[str, tuple[Form, dict[str, int]]] = {
    "filled": (_filled, {"uniform": 1, "normal": 1, "exponential": 1, "bernoulli": 1}),
    "over": (_over, {"normal": 1, "uniform": 1}),
    "one for all": (lambda x: x * torch.randn(()) + torch.rand(WIDTH), {"normal": 1, "uniform": 1}),
    "gumbel": (lambda x: F.gumbel_softmax(x, hard=True), {"exponential": 1}),
    "features": (lambda x: F.dropout1d(x, 0.3) + nn.FeatureAlphaDropout(0.2)(x), {"bernoulli": 2}),
    "alpha": (lambda x: F.alpha_dropout(x, 0.1, True), {"bernoulli": 1}),
    "leaky": (lambda x: F.rrelu(x, training=True) + F.rrelu(x), {"uniform": 1}),
    "normal": (lambda x: x * torch.normal(1.0, 0.1, x.shape) + torch.normal(x, 0.1) - x, {"normal": 2}),
    "by a tensor": (lambda x: x * torch.bernoulli(x.sigmoid()), {"uniform": 1}),
    "numbers": (
        lambda x: (
            x * torch.randint(2, 9, (x.shape[0], 1, 1)) + torch.randint_like(x, 3) - torch.empty(WIDTH).random_(5)
        ),
        {"integers": 3},
    ),
    "choices": (lambda x: x * torch.multinomial(x[:, 0].softmax(-1), 2).sum(-1)[:, None, None], {"exponential": 1}),
    "order": (lambda x: x[:, torch.randperm(LENGTH)], {"uniform": 1}),
    "others": (
        lambda x: x * torch.empty_like(x).log_normal_(0.0, 0.1) + torch.empty(WIDTH).geometric_(0.4).to(x.dtype),
        {"normal": 1, "exponential": 1},
    ),
    "distribution": (
        lambda x: torch.distributions.Normal(x, 0.5, validate_args=False).rsample(),
        {"normal": 1},
    ),
}


class Drawing(nn.Module):
    def __init__(self, *forms: Form) -> None:
        super().__init__()
        self.first, self.head, self.forms = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), forms
        self.held = nn.ModuleList(form for form in forms if isinstance(form, nn.Module))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return functools.reduce(operator.add, (self.head(form(x)) for form in self.forms))


def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


EXAMPLE = {"x": torch.randn(4, LENGTH, WIDTH)}


def captured(*forms: Form) -> ModelGraph:
    return capture(Drawing(*forms), EXAMPLE, loss)


def drawn(graph: ModelGraph) -> Counter[str]:
    nodes = (n for call in graph.calls for n in graph.blocks[call.block].nodes if n.op == "draw")
    return Counter(str(n.attrs["distribution"]) for n in nodes)


def test_all_that_torch_draws_is_of_few_distributions() -> None:
    """The graph is the module, with gradients, where both draw the same; and the batch can be split."""
    model = Drawing(*(form for form, _ in FORMS.values()))
    graph = capture(model, EXAMPLE, loss)
    assert drawn(graph) == sum((Counter(found) for _, found in FORMS.values()), Counter())
    assert drawn(graph).keys() <= DISTRIBUTIONS.keys() and batch_obstacle(graph) is None and draws(graph)
    outcome = verify_whole(VerifyTask(model, graph, EXAMPLE, loss))
    assert outcome.done, outcome.text


@pytest.mark.parametrize("name", ["filled", "leaky"])
def test_other_numbers_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison: a form with another parameter."""
    form, changed = {"filled": (_filled, 0.71), "leaky": (FORMS["leaky"][0], 0.3)}[name]
    other = lambda x: F.rrelu(x, upper=changed, training=True) + F.rrelu(x)  # noqa: E731
    model = Drawing(other if name == "leaky" else lambda x: _filled(x) * changed)
    with pytest.raises(CaptureError, match=r"captured graph .* differs|first value"):
        verify_whole(VerifyTask(model, captured(form), EXAMPLE, loss))


def _from_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(WIDTH, generator=torch.Generator())


class Held(nn.Module):
    """Draws from a generator of its own that torch does not know."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.generator.random())


def _seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.randn(WIDTH)


def _masked_by_numpy(x: torch.Tensor) -> torch.Tensor:
    """As SpecAugment in transformers: numpy takes a size that is not known yet for an object, not for a number."""
    mask = np.zeros((1, 4), dtype=bool)
    np.put_along_axis(mask, np.array([[x.shape[0]]]), 1, -1)
    return x * float(mask.sum())


REFUSED: dict[str, tuple[Form, str]] = {
    "kernel": (lambda x: torch.poisson(x.exp()), r"test_drawn_forms\.py:\d+: aten\.poisson\.default .* torch\.rand, "),
    "generator": (_from_generator, r"aten\.randn\.generator .* a generator of its own .* leave the generator out"),
    "in place": (lambda x: x + torch.empty_like(x).normal_(generator=torch.Generator()), "a generator of its own"),
    "Python": (lambda x: x * random.random(), "Python's random"),
    "a mask of NumPy": (_masked_by_numpy, r"test_drawn_forms\.py:\d+ \(np\.put.* the forward computes with numpy \("),
    "NumPy": (lambda x: x * float(np.random.rand()), r"numpy\.random"),
    **{
        f"an attribute, {type(g).__name__}": (Held(g), r"draws random numbers with 'held\.0\.generator'")
        for g in (random.Random(0), np.random.default_rng(0), np.random.RandomState(0))
    },
    "seeded": (_seeded, r"seeds torch's generator .* register it as a buffer"),
    "layers": (lambda x: x if torch.rand([]) < 0.5 else x * 2, "Python reads the value of a tensor"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_no_plan_could_repeat_is_refused(name: str) -> None:
    form, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        captured(form)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x[torch.randperm(x.shape[0])],
        lambda x: x * torch.randint(0, x.shape[0], (x.shape[0], 1, 1)),
        lambda x: x * torch.randn(x.shape[0] + 1, 1, 1)[1:],
    ],
)
def test_a_draw_over_the_batch_is_not_split(form: Form) -> None:
    """A permutation of the samples, the number of one, one more than there are: others in parts of the batch."""
    assert batch_obstacle(captured(form)) is not None


def test_a_generator_of_numpy_is_no_silent_constant() -> None:
    generator = np.random.default_rng(0)
    model = Drawing(lambda x: x * float(generator.random()))
    graph = capture(model, EXAMPLE, loss)
    with pytest.raises(CaptureError):
        verify_whole(VerifyTask(model, graph, EXAMPLE, loss))
