"""Programs with the casts of torch.autocast, against torch.autocast around the model in one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from harness import pool
from mixed import by_hand, error_of, errors_of, exact_gradients, gradient_job, gradients_by_hand, largest_factor
from parity import SEQ, Case, compiled, settled_bytes, spread_out, trained, worst

from autoplan.runtime.spec import evaluate_terms

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]


# What changes nothing inside a micro-batch: its gradients are the same bits, and all sums are float32.
SAME_BITS = [
    Case("llama", precision="bf16-autocast", num_micro_batches=3, labels="unequal"),
    Case("gpt", precision="bf16-autocast", num_micro_batches=2, recompute="full"),
    *[Case("llama", dp=2, zero=zero, precision="bf16-autocast", num_micro_batches=3) for zero in range(4)],
    Case("llama-tied", dp=2, zero=1, precision="bf16-autocast", num_micro_batches=2),
    Case("llama-frozen", dp=2, zero=2, precision="bf16-autocast"),
    Case("llama", pp=2, precision="bf16-autocast", num_micro_batches=3, stages=(3, 1)),
    Case("gpt-untied", pp=2, schedule="ZB-H1", precision="bf16-autocast", num_micro_batches=6),
    Case("llama", dp=2, precision="fp16-autocast", num_micro_batches=3),
    Case("llama", precision="bf16-autocast", num_micro_batches=2, compile="aot_eager"),
]


@pytest.mark.parametrize("case", spread_out(SAME_BITS, 4), ids=str)
def test_training_equals_autocast(case: Case) -> None:
    want = by_hand(case, scale=2.0**16 if case.precision.startswith("fp16") else 1.0)
    got = trained(case, "float32")
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert {t.dtype for t in got.gradients.values()} == {torch.float32}
    assert worst(got.gradients, want.gradients)[0] < 1e-6
    assert worst({n: got.parameters[n] for n in want.parameters}, want.parameters)[0] < 1e-6


def test_what_is_sent_is_what_the_ledger_says() -> None:
    """Operands of products travel in their 16 bits."""
    case = Case(tp=2, num_micro_batches=2, precision="bf16-autocast")
    env, want = {"b": 6, "s": SEQ}, Counter[tuple[str, str, int, str]]()
    for e in compiled(case).spec.ledger:
        want[e.kind, e.axis, evaluate_terms(e.bytes, env), e.phase] += 2 if e.per == "micro_batch" else 1
    seen = Counter(r for r in trained(case, "float32", 1).ledger if r[1] == "tp")
    seen.subtract([("all_reduce", "tp", settled_bytes(1), "forward")])  # of all ranks: do the batches fit?
    assert +seen == want
    assert ("all_gather", "tp", 6 * SEQ * 32 * 2, "forward") in want


# What changes the order of 16-bit sums inside a micro-batch (limits: tests/whole/test_precision.py).
OTHER_ORDER = [
    Case("llama", tp=2, precision="bf16-autocast", labels="unequal"),
    Case("gpt-untied", tp=2, precision="bf16-autocast", num_micro_batches=2, prices="latency"),
    Case("llama", cp=2, zero=2, precision="bf16-autocast"),
    Case("llama", dp=2, tp=2, pp=2, zero=1, precision="bf16-autocast", num_micro_batches=2),
]


@pytest.mark.parametrize("case", spread_out(OTHER_ORDER, 2), ids=str)
def test_no_less_exact_than_autocast(case: Case) -> None:
    """Against float64 the gradients of the parallel program are as good as those of autocast on one device."""
    program = compiled(case)
    got = pool(case.world).run(gradient_job, case, program.spec.to_json(), dict(program.sources), 2, timeout_s=120)[0]
    for step, gradients in enumerate(got):
        exact, alone = exact_gradients(case, step), gradients_by_hand(case, step)
        assert error_of(gradients, exact) < 1.25 * error_of(alone, exact)
        factor, name = largest_factor(errors_of(gradients, exact), errors_of(alone, exact))
        assert factor < 2.0, name
