"""Which values of a run option autoplan's own runtime executes is said by the option's record, value by value."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.kernels import FusedLoss, Mode
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.program.legality import not_executed
from autoplan.search.planner import PlanRequest


def said(mode: Mode, options: dict[str, Any], like: str | None = None) -> str:
    cluster = Cluster.parse("1x4xh100-sxm5-80gb")
    r = PlanRequest(load_model("gpt2"), cluster, 1024, 16, mode=mode, options=options, like=like)
    return "; ".join(not_executed(ParallelConfig(dp=4, num_micro_batches=4), r.facts))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (Mode.EAGER, {"reruns": "needed"}),  # what the mode does if nothing is said
        (Mode.COMPILED, {"reruns": "whole"}),
        (Mode.EAGER, {"attention": "flash2"}),
        (Mode.COMPILED, {"fused_loss": "torch"}),  # torch.compile makes the same kernels of them
        (Mode.COMPILED, {"fused_loss": "compiled"}),
        (Mode.COMPILED, {"overlap": ["tp"]}),
        (Mode.EAGER, {"document_len": 512}),
    ],
)
def test_a_value_that_is_run_as_it_is_leaves_a_plan_executed(mode: Mode, options: dict[str, Any]) -> None:
    assert said(mode, options) == ""


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        (Mode.COMPILED, {"reruns": "needed"}, "reruns=needed is priced, but not executed; executed: reruns=whole"),
        (Mode.EAGER, {"fused_loss": "compiled"}, "option fused_loss=compiled is priced, but not executed; executed: "),
        (Mode.EAGER, {"attention": "flash1"}, "attention=flash1 is priced, but not executed; executed: attention="),
        (Mode.EAGER, {"overlap": ["tp"]}, "option overlap=tp is priced, but not executed; executed: overlap=none"),
        (
            Mode.EAGER,
            {"launch": "graphs", "overlap_zero": False},
            "options launch=graphs, overlap_zero=no are priced, but not executed; executed: launch=async, "
            "overlap_zero=yes",
        ),
    ],
)
def test_a_value_that_is_not_run_is_named_with_one_that_is(mode: Mode, options: dict[str, Any], reason: str) -> None:
    assert reason in said(mode, options)


def test_plans_like_plain_pytorch_run() -> None:
    """Its own loss holds more, and is priced where it is asked for; the runtime has no such loss in eager mode."""
    assert said(Mode.EAGER, {}, "torch-eager") == said(Mode.COMPILED, {}, "torch-eager") == ""
    assert "the option fused_loss=torch is priced" in said(Mode.EAGER, {"fused_loss": FusedLoss.TORCH}, "torch-eager")
