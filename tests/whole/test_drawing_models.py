"""Models that draw random numbers train under every plan as in one process, and evaluate as the module does."""

from __future__ import annotations

import functools
import math
from typing import Any

import draw_models
import pytest
import torch
from draw_models import MODELS, batch, diffusion_loss, made, program
from harness import pool
from random_numbers import number

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph
from autoplan.ops.batch import context_obstacle

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "num_micro_batches": 2, "zero_stage": 3},
    "tp": {"tp": 2, "num_micro_batches": 2, "state_slack": 1.0},
    "pp": {"pp": 2, "num_micro_batches": 4, "recompute": "full"},
    "cp": {"cp": 2, "num_micro_batches": 2},
    "dp-tp": {"dp": 2, "tp": 2, "num_micro_batches": 1, "state_slack": 1.0, "recompute": "full"},
}
QUICK = (("vae", "tp"), ("diffusion", "pp"), ("paths", "dp"), ("discrete", "cp"), ("masked", "dp"))
CUT = ("vae", "paths", "diffusion", "discrete")  # the other one reorders a sequence

Numbers = tuple[list[float], dict[str, torch.Tensor]]


@functools.cache
def _alone(name: str) -> Numbers:
    found: Numbers = pool(1).run(draw_models.trained, name, {"num_micro_batches": 1}, timeout_s=180)[0]
    return found


def _check(name: str, pins: str, compile: str | None = None) -> None:
    world = 4 if pins == "dp-tp" else 2
    losses, gradients = pool(world).run(draw_models.trained, name, PINS[pins], compile, timeout_s=180)[0]
    want, wanted = _alone(name)
    assert all(math.isclose(a, b, rel_tol=1e-11) for a, b in zip(losses, want, strict=True)), (losses, want)
    # every step and every evaluation draws anew; paths are not dropped in evaluation
    assert len(set(want)) == (6 if name == "paths" else 8) and gradients.keys() == wanted.keys()
    for n, g in wanted.items():
        torch.testing.assert_close(gradients[n], g, rtol=1e-10, atol=1e-12 * float(g.abs().max()))


@pytest.mark.parametrize(("name", "pins"), QUICK)
def test_a_plan_draws_what_one_process_draws(name: str, pins: str) -> None:
    _check(name, pins)


@pytest.mark.slow
@pytest.mark.parametrize("pins", list(PINS))
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_under_every_plan(name: str, pins: str) -> None:
    if pins != "cp" or name in CUT:
        _check(name, pins)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vae", "paths"])
def test_draws_in_compiled_blocks(name: str) -> None:
    _check(name, "dp", "aot_eager")


@pytest.mark.parametrize("pins", ["dp", "tp"])
def test_ranks_that_draw_without_their_place_are_seen(pins: str) -> None:
    """The negative control of the comparison above."""
    losses, _ = pool(2).run(draw_models.trained, "discrete", PINS[pins], None, False, timeout_s=180)[0]
    assert abs(losses[0] / _alone("discrete")[0][0] - 1) > 1e-4


def test_the_numbers_are_those_of_the_published_formulas(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module with the same numbers, computed one by one, has the same losses and gradients."""
    model, pm, given, step = made("diffusion"), program("diffusion", {"num_micro_batches": 2}), batch(8), 0

    def numbers(name: str, site: int, shape: Any, *parameters: float) -> torch.Tensor:
        key = (pm.progress.seed, step, 0)
        found = [number(name, key, site, i, *parameters) for i in range(math.prod(shape))]
        return torch.tensor(found, dtype=torch.float64).reshape(shape)

    monkeypatch.setattr(torch, "randint", lambda low, high, size, **_: numbers("integers", 0, size, low, high).long())
    monkeypatch.setattr(torch, "randn_like", lambda like: numbers("normal", 1, like.shape))
    for step in (0, 1 + (1 << 40), 1 + (2 << 40)):  # a step, and two evaluations behind it
        want = diffusion_loss(model(given["x"]), given)
        found = pm.eval_step(given) if step else pm.step(given)
        assert math.isclose(found.item(), want.item(), rel_tol=1e-12)
        if not step:
            want.backward()
            for name, gradient in pm.gradients().items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


def test_what_needs_the_whole_sequence_says_so() -> None:
    """What is drawn before the layers is cut like the batch, in them by the places of tokens."""
    graphs = {name: capture(made(name), batch(4), MODELS[name][1]) for name in ("vae", "diffusion", "masked")}
    assert context_obstacle(graphs["vae"]) is None and context_obstacle(graphs["diffusion"]) is None
    assert (context_obstacle(graphs["masked"]) or "").startswith("no input has a sequence of a length that may change")
    assert all(ModelGraph.from_json(graph.to_json()) == graph for graph in graphs.values())
