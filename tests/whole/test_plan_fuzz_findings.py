"""Cases that the fuzz of plans found (experiments.compatibility.plan_fuzz), made small: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
from plan_fuzz_processes import Processes

from experiments.compatibility.plan_fuzz.cases import Case, Optimizer, Plan, Step
from experiments.compatibility.plan_fuzz.examine import EQUAL, Examiner

pytestmark = pytest.mark.processes

LAYERS = {"layers": 4}


def split(dp: int, schedule: str, recompute: Any, **more: Any) -> Plan:
    """A pipeline of two ranks whose backward is split, under ZeRO 2."""
    pins = {"dp": dp, "pp": 2, "schedule": schedule, "zero_stage": 2, "recompute": recompute}
    return Plan({**pins, "num_micro_batches": 4, "micro_batch_size": 1, **more})


FOUND = {
    # All gradients of the recomputed blocks arrived in the first parts, so that the last pass had none to add up.
    "copies, recomputed": Case(world=8, options=LAYERS, plan=split(4, "ZB-H1", "full", zero_replicas=2)),
    # Passes had the gradients of some blocks of a message only: shards of other parameters were added.
    "copies, some recomputed": Case(
        world=8, options=LAYERS, plan=split(4, "ZB-H1", {"blocks.0": "full", "blocks.3": "full"}, zero_replicas=2)
    ),
    # Gradients that arrived in the first part were float32 already, the others bf16.
    "16 bits, some recomputed": Case(
        world=4, options=LAYERS, precision="bf16", plan=split(2, "ZB-H1", {"blocks.2": "full"}), steps=(Step(), Step())
    ),
    # A schedule that was pinned and a search that chose no pipeline: nothing was reduced, which was an error.
    "a schedule without a pipeline": Case(
        world=2, plan=Plan({"dp": 2, "pp": 1, "schedule": "ZB-H1", "zero_stage": 1}), steps=(Step(), Step())
    ),
    # The moment of a parameter without dims came back as a plain tensor, beside gradients that are DTensors.
    "a number's moment": Case(
        world=4,
        options={"number": True},
        optimizer=Optimizer("plain adamw", own=True),
        plan=Plan({"dp": 4}),
        other=Plan({"dp": 2, "tp": 2}),
        steps=(Step(after="move"), Step()),
    ),
    # Positions from a table in float32 beside activations in 16 bits: the norm behind them failed in every step.
    "a table in float32": Case(options={"sinus": True}, precision="bf16", plan=Plan({"dp": 1, "tp": 2})),
    # Its layers keep less than nothing, by themselves: a bound of memory said that no cut of it fits on any device.
    "layers that share what they keep": Case(
        model="divided",
        options={"kind": "convolutions"},
        plan=Plan({"dp": 2, "tp": 1, "pp": 1, "zero_stage": 3, "offload": "parameters"}),
    ),
    # PyTorch's hook reads the first dim of every gradient once it compresses.
    "a number under PowerSGD": Case(
        options={"number": True}, compression="powersgd", plan=Plan({"dp": 2}), steps=(Step(), Step(), Step())
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_was_found_is_equal(case: Case) -> None:
    found = Examiner(Processes).examine(case)
    assert found.outcome == EQUAL, found.text
