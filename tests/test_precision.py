"""Mixed precision on real processes, against the same by hand in plain torch (tests/mixed.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mixed import ByHand, by_hand
from parity import Case, trained, worst

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the worker processes: sums of 16-bit numbers depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What changes nothing inside a micro-batch: its 16-bit gradients are the same bits, and what adds them is float32.
SAME_BITS = [
    Case("llama", precision="bf16", num_micro_batches=3, labels="unequal"),
    Case("gpt", precision="bf16", num_micro_batches=2, recompute="full"),
    *[Case("llama", dp=2, zero=zero, precision="bf16", num_micro_batches=3, labels="unequal") for zero in range(4)],
    Case("gpt", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=1, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=3, precision="bf16", num_micro_batches=2, recompute="full"),
    Case("llama-frozen", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-frozen", dp=2, zero=2, precision="bf16"),
    Case("llama", pp=2, precision="bf16", num_micro_batches=3, stages=(3, 1)),
    Case("gpt-untied", pp=2, dp=2, zero=1, precision="bf16", num_micro_batches=3, labels="unequal"),
    Case("llama", precision="bf16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=0, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=1, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", precision="fp16", num_micro_batches=3, labels="unequal"),
    Case("llama", dp=2, zero=0, precision="fp16", num_micro_batches=2),
    Case("gpt-untied", dp=2, zero=3, precision="fp16", num_micro_batches=3),
    Case("llama", dp=2, zero=2, precision="fp32", num_micro_batches=3),
]


def compare(case: Case, want: ByHand) -> tuple[float, float]:
    """Largest relative differences of the first gradients and of the parameters after three steps."""
    got = trained(case, "float32")
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert got.norm == pytest.approx(want.norm, rel=1e-6)
    assert {t.dtype for t in got.gradients.values()} == {torch.float32}
    assert {got.parameters[n].dtype for n in want.parameters} == {torch.float32}
    parameters = {n: got.parameters[n] for n in want.parameters}
    return worst(got.gradients, want.gradients)[0], worst(parameters, want.parameters)[0]


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_training_equals_the_same_by_hand(case: Case) -> None:
    scale = 2.0**16 if case.precision == "fp16" else 1.0
    print(gradient_parameter := compare(case, by_hand(case, scale=scale)))
    gradient, parameter = compare(case, by_hand(case, scale=scale))
    assert gradient < 1e-6
    assert parameter < 1e-6
