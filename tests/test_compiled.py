"""torch.compile per block: the same step, through graph breaks, recompute, ZeRO and pipelines."""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass

import pytest
import torch
from harness import pool
from parity import (
    Case,
    assert_trains_as_one_device,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    model_of,
    part_of,
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
    torch._dynamo.utils.counters.clear()
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
        assert compile_blocks(pm.stage, case.compile) == len(pm.stage.blocks)
        loss = pm.step(global_batch(case))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
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
    assert graphs >= 3  # it was compiled: embedding, layer, head


def test_equal_layers_share_their_code() -> None:
    """Four layers are one graph, attention and loss inside: as many graphs as kinds of blocks."""
    source = "".join(compiled(CASES[0]).sources.values())
    _, _, graphs = step(CASES[0])
    assert graphs == len(re.findall(r"^class \w+\(Block\)", source, re.MULTILINE))


@dataclass(frozen=True)
class Compiled:
    """Of one rank: loss, gradients, how many graphs there are, and why they end where they do."""

    loss: float
    gradients: dict[str, torch.Tensor]
    num_graphs: int
    breaks: tuple[str, ...]


def compiled_job(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> Compiled:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pm = model_of(case, spec_json, sources, torch.float64)
    loss = pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world)).item()
    counted = torch._dynamo.utils.counters
    return Compiled(loss, pm.gradients(), counted["stats"]["unique_graphs"], tuple(counted["graph_break"]))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "apart"),
    [
        (Case("llama", tp=2, compile="aot_eager"), ()),
        (Case("gpt", tp=2, compile="aot_eager", prices="latency"), ()),
        (Case("qwen2-mixed", tp=2, compile="aot_eager"), ()),
        pytest.param(Case("deepseek", tp=2, compile="aot_eager"), ("experts",), marks=pytest.mark.exhaustive),
        (Case("llama", cp=2, compile="aot_eager", context_method="ring"), ("attention",)),
        pytest.param(Case("llama", tp=2, compile="inductor"), (), marks=NEEDS_COMPILER),
    ],
    ids=str,
)
def test_collectives_and_attention_do_not_break_the_graph_of_a_block(case: Case, apart: tuple[str, ...]) -> None:
    program = compiled(case)
    found = pool(case.world).run(compiled_job, case, program.spec.to_json(), dict(program.sources), timeout_s=180.0)[0]
    want_loss, want = reference(case)
    assert found.loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(found.gradients, want)[0] < 1e-12
    assert found.num_graphs >= 3
    named = {name for name in ("attention", "experts", "dropout") if name in "".join(found.breaks)}
    assert named == set(apart)
    assert bool(found.breaks) is bool(apart), found.breaks


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
