"""ZeRO 0 that reduces its buckets beside the last backward, as on a GPU: the same bits as after it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import pool
from parity import Case, Trained, compiled, spread_out, train_job

import autoplan.runtime.model
from autoplan.runtime import zero
from autoplan.runtime.zero import GradientSync

pytestmark = pytest.mark.processes

BUCKET_BYTES = 8192  # several buckets of these small models
CASES = [
    Case("llama", dp=2, labels="unequal"),
    Case("llama", dp=2, num_micro_batches=3, recompute="full"),
    Case("llama-tied", dp=2, recompute="attention+mlp+norms", num_micro_batches=2),
    Case("gpt", dp=2, tp=2, dropout=0.25, num_micro_batches=2),
    Case("llama-tied", dp=2, pp=2, num_micro_batches=3),
    Case("llama", dp=2, pp=2, num_micro_batches=3, schedule="ZB-H1"),
    Case("llama", dp=2, pp=2, num_micro_batches=6, schedule="Interleaved1F1B", virtual=2),
    Case("mixtral", dp=4, ep=2, num_micro_batches=3),
    Case("llama", dp=2, precision="bf16", num_micro_batches=2),
    Case("llama", dp=2, precision="bf16-grad16", num_micro_batches=2),
    Case("llama", dp=2, precision="fp16", num_micro_batches=2),
    Case("llama", dp=2, compile="aot_eager", num_micro_batches=2),
    Case("llama", dp=2, offload="optimizer"),
]
SPLIT = {"ZB-H1"}  # reduce after the backward whatever the device


def _job(rank: int, world: int, beside: bool, *given: Any) -> tuple[Trained | None, int]:
    """`parity.train_job` with small buckets; how many were on their way before the step was finished."""
    early = 0
    original, started = zero._AllReduce.finish_step, autoplan.runtime.model.apply_zero

    def finish(sync: Any) -> None:
        nonlocal early
        early += sync._next
        original(sync)

    autoplan.runtime.model.reduces_beside = lambda _: beside  # type: ignore[attr-defined]
    autoplan.runtime.model.apply_zero = functools.partial(started, bucket_bytes=BUCKET_BYTES)  # type: ignore[attr-defined]
    zero._AllReduce.finish_step = finish  # type: ignore[method-assign]
    try:
        return train_job(rank, world, *given), early
    finally:
        zero._AllReduce.finish_step = original  # type: ignore[method-assign]
        autoplan.runtime.model.reduces_beside = zero.reduces_beside  # type: ignore[attr-defined]
        autoplan.runtime.model.apply_zero = started  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", spread_out(CASES, 4), ids=str)
def test_the_bits_are_the_same(case):
    program = compiled(case)
    dtype = "float64" if case.precision == "native" else "float32"
    given = (case, program.spec.to_json(), dict(program.sources), dtype, 2, "sgd")
    (mine, early), (truth, late) = (
        pool(case.world).run(_job, beside, *given, timeout_s=180.0)[0] for beside in (True, False)
    )
    assert late == 0 and (early > 2) is (case.schedule not in SPLIT), (early, late)
    assert mine.losses == truth.losses and mine.norm == truth.norm
    for name, expected in truth.parameters.items():
        assert torch.equal(mine.parameters[name], expected), name


def test_a_gradient_that_comes_after_its_reduction_is_an_error():
    for message in pool(2).run(_twice):
        assert message == "a gradient arrived twice in one backward; its sum over ranks would lack a part"


def _twice(rank: int, world: int) -> str:
    stage = torch.nn.Linear(3, 3)
    sync: GradientSync = zero._AllReduce(stage, torch.distributed.group.WORLD, 1, beside=lambda p: p)
    sync.before_backward(0, is_last=True)
    stage(torch.ones(2, 3)).sum().backward()
    try:
        stage(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
