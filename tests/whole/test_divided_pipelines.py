"""Pipelines of models without lists of layers, trained in processes, equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import trained_jobs
from divided_models import CASES
from harness import pool

PINS: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "num_micro_batches": 2},
    "recompute": {"pp": 2, "num_micro_batches": 2, "recompute": "full"},
    "pp-dp": {"pp": 2, "dp": 2, "num_micro_batches": 2},
    "pp-dp-zero": {"pp": 2, "dp": 2, "num_micro_batches": 2, "zero_stage": 2, "schedule": "GPipe"},
    "virtual": {"pp": 2, "num_micro_batches": 2, "virtual_stages": 2, "schedule": "Interleaved1F1B"},
}
QUICK = [("attributes", "pp"), ("residual", "recompute"), ("u-net", "pp"), ("unlike", "pp-dp")]
SLOW = [
    *((name, pins) for name in CASES for pins in ("pp", "recompute", "pp-dp", "pp-dp-zero")),
    *((name, "virtual") for name in ("residual", "u-net", "unlike")),
]


def check(name: str, pins: str) -> None:
    world = 2 * PINS[pins].get("dp", 1)
    for error in pool(world).run(trained_jobs.trained, "divided_models", name, PINS[pins], timeout_s=180):
        assert error < 1e-12, error


@pytest.mark.parametrize(("name", "pins"), QUICK)
def test_three_steps_equal_one_process(name: str, pins: str) -> None:
    check(name, pins)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pins"), [case for case in SLOW if case not in QUICK])
def test_three_steps_equal_one_process_at_all_degrees(name: str, pins: str) -> None:
    check(name, pins)
