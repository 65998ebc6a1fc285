"""torch.compile per block: the same step, through graph breaks, recompute, ZeRO and pipelines."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from parity import (
    Case,
    assert_trains_as_one_device,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    reference,
    worst,
)
from parity_matrix import refusal

from autoplan.runtime.compiled import compile_blocks
from autoplan.runtime.model import ParallelModel

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile's own modules

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor on the CPU needs a C++ compiler"
)


@functools.cache
def step(case: Case) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss and gradients of one compiled step on one device, and how many graphs were compiled."""
    torch._dynamo.reset()
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(case.compile)(module, inputs)

    program = compiled(case)
    params, buffers = full_tensors(case, torch.float64)
    with fake_group(1):
        pm = ParallelModel(
            program.spec,
            program.sources,
            params,
            buffers,
            dtype=torch.float64,
            num_micro_batches=case.num_micro_batches,
        )
        assert compile_blocks(pm.stage, count) == len(pm.stage.blocks)
        loss = pm.step(global_batch(case))
        return loss.item(), {n: g.clone() for n, g in pm.gradients().items()}, graphs


CASES = [
    Case("llama", compile="aot_eager", num_micro_batches=2),
    pytest.param(Case("gpt-untied", dropout=0.25, compile="aot_eager", recompute="full"), marks=pytest.mark.exhaustive),
    pytest.param(Case("deepseek", compile="aot_eager"), marks=pytest.mark.exhaustive),
    Case("llama", compile="aot_eager", recompute="offload"),
    pytest.param(Case("llama", compile="inductor"), marks=NEEDS_COMPILER),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_compiled_step_is_the_step(case: Case) -> None:
    """float64: operations that are fused round otherwise in the last bits only."""
    loss, got, graphs = step(case)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(got, want)[0] < 1e-12
    assert graphs >= 3  # it was compiled: embedding, layer before and after attention, head


def test_equal_layers_share_their_code() -> None:
    """Four layers: two graphs around attention, not eight."""
    _, _, graphs = step(CASES[0])
    assert graphs <= 6


PROCESSES = [
    Case("llama", tp=2, compile="aot_eager", labels="unequal"),
    Case("llama", dp=2, zero=3, num_micro_batches=2, compile="aot_eager", recompute="full"),
    Case("gpt", pp=2, num_micro_batches=2, dropout=0.25, compile="aot_eager"),
    pytest.param(Case("llama-tied", dp=2, zero=2, compile="inductor"), marks=NEEDS_COMPILER),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", PROCESSES, ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def test_regions_and_compiled_blocks_exclude_each_other() -> None:
    for how in ("selective", "mlp+norms"):
        message = refusal(Case(compile="aot_eager", recompute=how))
        assert "compiled blocks" in message and "nearest legal: recompute='full'" in message
    assert not refusal(Case(compile="aot_eager", recompute="full"))
