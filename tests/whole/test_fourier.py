"""Models with Fourier transforms, whose other dims are split, trained in processes, equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import trained_jobs
from fourier_models import CASES
from harness import pool

from autoplan.capture.export import capture
from autoplan.program.facts import ModelFacts

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "num_micro_batches": 2},
    "tp": {"tp": 2, "num_micro_batches": 1, "state_slack": 1.0},
    "pp": {"pp": 2, "num_micro_batches": 2},
}
QUICK = [("fnet", "dp"), ("fno-2d", "dp"), ("gfnet", "tp"), ("afno", "dp")]


def check(name: str, pins: str) -> None:
    for error in pool(2).run(trained_jobs.trained, "fourier_models", name, PINS[pins], timeout_s=180):
        assert error < 1e-12, error


@pytest.mark.parametrize(("name", "pins"), QUICK)
def test_three_steps_equal_one_process(name: str, pins: str) -> None:
    check(name, pins)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pins"), [(n, p) for n in CASES for p in PINS if (n, p) not in QUICK])
def test_three_steps_equal_one_process_at_all_degrees(name: str, pins: str) -> None:
    check(name, pins)


@pytest.mark.parametrize("name", ["fnet-2d", "fno-2d", "autocorrelation"])
def test_a_transform_is_one_operation_and_the_batch_is_split(name: str) -> None:
    case = CASES[name]
    graph = capture(case.model(), case.batch(4, 0), case.loss)
    found = {node.attrs["function"] for b in graph.blocks.values() for node in b.nodes if "fourier" in node.op}
    assert found >= {"fnet-2d": {"fft2"}, "fno-2d": {"rfft2", "irfft2"}, "autocorrelation": {"fftshift"}}[name]
    assert ModelFacts(graph).batch_obstacle is None
