"""Experts that take a limited number of tokens: who comes first in a sequence is a running sum over it."""

from __future__ import annotations

import models
import pytest
import torch
from parity import (
    SEQ,
    Case,
    assert_trains_as_one_device,
    global_batch,
    graph_of,
    make_model,
    reference,
    run_simulated,
    spread_out,
    worst,
)  # fmt: skip

from autoplan.capture.export import capture
from autoplan.errors import PinError
from autoplan.ops.batch import batch_obstacle, context_obstacle
from autoplan.program.facts import Facts, ModelFacts
from autoplan.program.legality import Scope
from autoplan.search.nearest import check_with_nearest
from experiments.shared.default_plans import read_pins


def test_some_tokens_are_beyond_the_capacity_and_the_program_knows() -> None:
    case = Case("gpt-switch", labels="unequal")
    model, batch = make_model("gpt-switch", 0.0).double(), global_batch(case)
    weights: list[torch.Tensor] = []
    model.blocks[0].router.register_forward_hook(lambda module, args, out: weights.append(out[1]))
    loss = models.gpt_loss(model(batch["ids"]), batch)
    loss.backward()
    assert 0.1 < (weights[0] == 0).double().mean() < 0.9
    got_loss, got = reference(case, torch.float64, batch)
    assert got_loss == pytest.approx(loss.item(), rel=1e-12)
    error, name = worst(got, {n: p.grad for n, p in model.named_parameters()})
    assert error < 1e-12, name
    unlimited = models.make_switch(capacity=SEQ).double()
    assert abs(models.gpt_loss(unlimited(batch["ids"]), batch) - loss) > 1e-4


SIMULATED = [
    Case("gpt-switch", dp=2, num_micro_batches=3, labels="unequal"),
    Case("gpt-switch", tp=2),
    Case("gpt-switch", tp=4, prices="latency", recompute="full"),
    Case("gpt-switch", tp=2, dp=2, pp=2, num_micro_batches=2),
]


@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_equal_to_one_device(case: Case) -> None:
    loss, gradients = run_simulated(case)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    error, name = worst(gradients, want)
    assert error < 1e-12, name


@pytest.mark.parametrize(
    "case",
    spread_out(
        [
            Case("gpt-switch", dp=2, ep=2, num_micro_batches=2, zero=2),
            Case("gpt-switch", tp=2, ep=2, etp=1, labels="unequal"),
            Case("gpt-switch", dp=2, pp=2, num_micro_batches=3, recompute="full"),
        ],
        3,
    ),
    ids=str,
)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def test_a_running_sum_over_a_cut_sequence_is_refused() -> None:
    """Who comes first depends on the parts of the sequence before this one."""
    graph = graph_of("gpt-switch", 0.0)
    assert batch_obstacle(graph) is None
    assert str(context_obstacle(graph)).startswith("cumsum at models.py:")
    with pytest.raises(PinError, match=r"cp=2: cumsum at models.py:\d+ .* nearest legal: cp=1"):
        check_with_nearest(read_pins({"cp": 2}, 2), Facts(2, ModelFacts(graph)), Scope.EXECUTED)


def test_a_running_sum_over_the_whole_batch_is_refused() -> None:
    """Where one expert's places are shared by all samples, they cannot be given out in parts."""
    batch = {k: v for k, v in zip(("ids", "labels"), models.token_batch(2, SEQ).values(), strict=True)}
    graph = capture(models.make_switch(flat=True), batch, models.gpt_loss)
    with pytest.raises(PinError, match=r"cumsum at models.py:\d+ cannot be computed sample by sample"):
        check_with_nearest(read_pins({"dp": 2}, 2), Facts(2, ModelFacts(graph)), Scope.EXECUTED)
