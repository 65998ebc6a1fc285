"""torch.compile per block: the same step, through graph breaks, recompute, ZeRO and pipelines."""

from __future__ import annotations

import functools
import inspect
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

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
    graph_of,
    model_of,
    part_of,
    reference,
    spread_out,
    worst,
)
from parity_matrix import refusal

import autoplan.runtime.compiled
import autoplan.runtime.convert
from autoplan.config.kernels import ASYNC_TP, COMPILE
from autoplan.config.pins import Pins
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import PinError
from autoplan.planning import SoFar, cheapest_program, plan_program, ways_to_run
from autoplan.plans.record import Plan
from autoplan.program.facts import Facts
from autoplan.program.legality import check_pins
from autoplan.runtime.compiled import compile_blocks, compiles_by_itself
from autoplan.runtime.dropout import dropout
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel
from experiments.shared.measure import saved_bytes

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
    pytest.param(Case("gpt-untied", dropout=0.25, compile="aot_eager", recompute="full"), marks=pytest.mark.slow),
    pytest.param(Case("deepseek", compile="aot_eager"), marks=pytest.mark.slow),
    Case("llama", compile="aot_eager", recompute="offload"),
    pytest.param(Case("sinks", compile="aot_eager", num_micro_batches=2), marks=pytest.mark.slow),
    pytest.param(Case("gemma2", compile="aot_eager", recompute="full"), marks=pytest.mark.slow),
    pytest.param(Case("chunks", compile="aot_eager", num_micro_batches=2), marks=pytest.mark.slow),
    pytest.param(Case("sides", compile="aot_eager"), marks=pytest.mark.slow),
    pytest.param(Case("sinks", compile="inductor"), marks=(NEEDS_COMPILER, pytest.mark.slow)),
    pytest.param(Case("llama", compile="inductor"), marks=NEEDS_COMPILER),
]


@pytest.mark.parametrize("case", spread_out(CASES, 2), ids=str)
def test_a_compiled_step_is_the_step(case: Case) -> None:
    """float64: operations that are fused round otherwise in the last bits only."""
    loss, got, graphs = step(case)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(got, want)[0] < 1e-12
    assert graphs >= 3  # it was compiled: embedding, layer, head


def kept(case: Case) -> int:
    """Bytes that autograd keeps in the second step of a case on one device, without parameters."""
    torch._dynamo.reset()
    program = compiled(replace(case, compile=None))
    with fake_group(1):
        pm = model_of(case, program.spec.to_json(), dict(program.sources), torch.float64)
        pm.step(global_batch(case))
        return saved_bytes(lambda: pm.step(global_batch(case)), pm.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sinks", "gemma2"])
def test_scores_of_blocks_of_queries_are_not_kept(family: str) -> None:
    """A compiler that saw inside would keep them, since the backward computes them as the forward does."""
    alone, partitioned = (kept(Case(family, compile=how)) for how in (None, "aot_eager_decomp_partition"))
    assert partitioned < 1.02 * alone


def test_compiled_blocks_keep_less_than_their_operations() -> None:
    """A whole step; what each block keeps is compared with its price in test_partition.py."""
    alone, partitioned = (kept(Case("llama", compile=how)) for how in (None, "aot_eager_decomp_partition"))
    assert 0.5 * alone < partitioned < 0.95 * alone


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
    spread_out(
        [
            (Case("llama", tp=2, compile="aot_eager"), ()),
            (Case("gpt", tp=2, compile="aot_eager", prices="latency"), ()),
            (Case("qwen2-mixed", tp=2, compile="aot_eager"), ()),
            (Case("gpt", tp=2, dropout=0.25, compile="aot_eager", prices="latency"), ()),
            (Case("gpt", tp=2, compile="aot_eager"), ()),  # with all-to-alls
            (Case("llama", tp=2, dropout=0.25, compile="aot_eager"), ()),
            (Case("deepseek", tp=2, compile="aot_eager"), ()),
            (Case("mixtral", dp=4, ep=2, zero=3, num_micro_batches=3, compile="aot_eager"), ()),
            (Case("mixtral", tp=2, ep=2, etp=1, num_micro_batches=2, compile="aot_eager", recompute="full"), ()),
            (Case("mixtral", dp=2, ep=2, compile="aot_eager"), ()),
            pytest.param(Case("mixtral", dp=2, ep=2, compile="inductor"), (), marks=NEEDS_COMPILER),
            (Case("mixtral", dp=2, tp=2, ep=2, etp=2, compile="aot_eager"), ()),
            (Case("llama", cp=2, compile="aot_eager", context_method="ring"), ()),
            (Case("llama", cp=2, dropout=0.25, compile="aot_eager", context_method="ring"), ()),
            (Case("llama", cp=2, compile="aot_eager", context_method="ulysses"), ()),
            (Case("llama", cp=2, compile="aot_eager", context_method="gather"), ()),
            pytest.param(Case("llama", tp=2, compile="inductor"), (), marks=NEEDS_COMPILER),
        ],
        8,
        unpack=True,
    ),
    ids=str,
)
def test_collectives_and_attention_do_not_break_the_graph_of_a_block(case: Case, apart: tuple[str, ...]) -> None:
    program = compiled(case)
    found = pool(case.world).run(compiled_job, case, program.spec.to_json(), dict(program.sources), timeout_s=180.0)[0]
    want_loss, want = reference(case)
    assert found.loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(found.gradients, want)[0] < 1e-12
    assert found.num_graphs >= 3
    named = {name for name in ("all_to_all", "attention", "experts", "dropout") if name in "".join(found.breaks)}
    assert named == set(apart)
    assert bool(found.breaks) is bool(apart), found.breaks


@NEEDS_COMPILER
@pytest.mark.parametrize("batches", [(8,), pytest.param((8, 6, 7), marks=pytest.mark.slow)])
def test_dropout_is_one_loop_of_a_compiled_block(batches: tuple[int, ...]) -> None:
    """In forward and backward, with the bits of what runs op by op; the constants of positions stay within int64."""
    torch._dynamo.reset()
    torch._inductor.metrics.reset()
    node = torch.compiler.allow_in_graph(dropout)  # as compile_blocks does
    rng = torch.tensor([7, 3, 2**40])

    def around(x: torch.Tensor, batch: int, drop: Callable[..., torch.Tensor]) -> torch.Tensor:
        index = ((batch, batch, "batch"), (512, 512, ()), (1024, 2048, ("tp",)))
        return drop(x * 2, 0.1, rng, 3, index) * 3

    compiled_around = torch.compile(functools.partial(around, drop=node), fullgraph=True)
    with fake_group(2), use_mesh(AxisMesh([("tp", 2)], {})):
        for batch in batches:  # compiled for 8, then for all sizes
            x, grad = (torch.randn(batch, 512, 1024).requires_grad_(k == 0) for k in range(2))
            outs = [around(x, batch, dropout), compiled_around(x, batch)]
            grads = [torch.autograd.grad(out, x, grad)[0] for out in outs]
            assert torch.equal(*outs) and torch.equal(*grads) and 0.85 < float((grads[0] != 0).float().mean()) < 0.95
    # forward: the state of the stream, then all elements; backward: all elements
    assert torch._inductor.metrics.generated_kernel_count == 3 * min(len(batches), 2)


@pytest.mark.parametrize("precision", ["bf16", "native"])
def test_experts_of_one_rank_are_in_the_graph(precision: str) -> None:
    """In bfloat16 their products are one kernel, and the host needs no counts; in float32 they are an operator.

    What is compiled is as near to float64 as what is not.
    """
    case = Case("mixtral", compile="aot_eager", precision=precision)
    program, errors = compiled(case), []
    params, buffers = full_tensors(case, torch.float32)
    _, want = reference(replace(case, precision="native"))
    with fake_group(1):
        for compiles in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            own = {name: p.clone() for name, p in params.items()}
            pm = ParallelModel(program.spec, program.sources, own, dict(buffers))
            if compiles:
                compile_blocks(pm.stage, "aot_eager")
            pm.step(global_batch(case))
            errors.append(worst(pm.gradients(), want)[0])
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"] and counted["stats"]["unique_graphs"] >= 3, counted["graph_break"]
    assert 0 < errors[1] < 1.2 * errors[0] < 0.2


PROCESSES = [
    Case("llama", tp=2, compile="aot_eager", labels="unequal"),
    Case("llama", dp=2, zero=3, num_micro_batches=2, compile="aot_eager", recompute="full"),
    Case("gpt", pp=2, num_micro_batches=2, dropout=0.25, compile="aot_eager"),
    pytest.param(Case("llama-tied", dp=2, zero=2, compile="inductor"), marks=NEEDS_COMPILER),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(PROCESSES, 2), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def test_regions_and_compiled_blocks_exclude_each_other() -> None:
    for how in ("selective", "mlp+norms"):
        message = refusal(Case(compile="aot_eager", recompute=how))
        assert "compiled blocks" in message and "nearest legal: recompute='full'" in message
    assert not refusal(Case(compile="aot_eager", recompute="full"))


@dataclass(frozen=True)
class AsyncTp:
    """Of all graphs that inductor made: gathers before products, and reduce-scatters behind them, of all there are."""

    gathers: int
    gathers_before_products: int
    scatters: int
    scatters_behind_products: int


@dataclass(frozen=True)
class Rewritten:
    """A step of rank 0, and the operators of async TP in its graphs."""

    loss: float
    gradients: dict[str, torch.Tensor]
    operators: tuple[str, ...]


def reduced_as_by_nccl(patch: pytest.MonkeyPatch) -> None:
    """Let conversions call reduce-scatter, as over NCCL; over gloo they exchange and sum."""
    patch.setattr(autoplan.runtime.convert, "sums_by_exchange", lambda group: False)


def async_job(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> AsyncTp:
    """What torch's async TP finds to take apart in the graphs of a program. Not replaced: a CPU cannot run that."""
    import torch._inductor.fx_passes.micro_pipeline_tp as found_by

    found = [0] * 4

    def look(graph: torch.fx.Graph) -> None:
        gathers, scatters = found_by.find_all_gather_patterns(graph), found_by.find_reduce_scatter_patterns(graph)
        inputs = [s.input_node for s in scatters if s.input_node.target == torch.ops.aten.reshape.default]
        for k, n in enumerate(
            (
                len(gathers),
                sum(bool(found_by._find_consumer_matmuls(g.res_node)) for g in gathers),
                len(scatters),
                sum(found_by._find_producer_matmul(node) is not None for node in inputs),
            )
        ):
            found[k] += n

    torch._dynamo.reset()
    pm = model_of(replace(case, compile=None), spec_json, sources, torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(post_grad_custom_post_pass=look):
        reduced_as_by_nccl(patch)
        compile_blocks(pm.stage, "inductor")
        pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world))
    return AsyncTp(*found)


@pytest.mark.slow
@pytest.mark.processes
@NEEDS_COMPILER
def test_async_tp_finds_what_it_takes_apart() -> None:
    """Gathers stand right before products and products right before reduce-scatters, in what inductor is given."""
    case = Case("llama", tp=2, compile="inductor")
    program = compiled(case)
    found = pool(2).run(async_job, case, program.spec.to_json(), dict(program.sources), timeout_s=400.0)[0]
    assert found.gathers_before_products >= 4 and found.scatters_behind_products >= 2, found


def rewritten_job(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> Rewritten:
    """A step whose graphs are rewritten for async TP; the fallbacks of its operators, which gather, run on the CPU."""
    from torch._inductor.fx_passes import post_grad
    from torch.distributed import _symmetric_memory as torch_s

    library, found = torch.library.Library("symm_mem", "IMPL", "CPU"), list[str]()
    library.impl("fused_all_gather_matmul", torch_s._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", torch_s._fused_matmul_reduce_scatter_fallback)
    rewrite = post_grad.micro_pipeline_tp_pass

    def watched(graph: torch.fx.Graph) -> None:
        rewrite(graph)
        found.extend(str(n.target) for n in graph.nodes if "symm_mem" in str(n.target))

    torch._dynamo.reset()
    pm = model_of(replace(case, compile=None), spec_json, sources, torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch_s._test_mode():
        reduced_as_by_nccl(patch)
        patch.setattr(autoplan.runtime.compiled, "share_memory", lambda group: None)
        patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        patch.setattr(post_grad, "micro_pipeline_tp_pass", watched)
        with torch._inductor.config.patch(force_disable_caches=True):
            compile_blocks(pm.stage, "inductor", [pm.mesh.group("tp")])
            loss = pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world)).item()
    library._destroy()
    return Rewritten(loss, pm.gradients(), tuple(found))


@pytest.mark.slow
@pytest.mark.processes
@NEEDS_COMPILER
def test_a_step_rewritten_for_async_tp_is_the_step() -> None:
    """Reduce-scatters are taken apart; gathers of so few columns are not (torch leaves them below 1,024)."""
    case = Case("llama", tp=2, compile="inductor")
    program = compiled(case)
    found = pool(2).run(rewritten_job, case, program.spec.to_json(), dict(program.sources), timeout_s=400.0)[0]
    want_loss, want = reference(case)
    assert found.loss == pytest.approx(want_loss, rel=1e-12)
    assert worst(found.gradients, want)[0] < 1e-12
    assert sum("fused_matmul_reduce_scatter" in name for name in found.operators) >= 2, found.operators


EAGER = ("aot_eager", "inductor")


@pytest.mark.parametrize(
    ("compile", "device_type", "message"),
    [
        (False, "cuda", "needs torch.compile, but compile=False; nearest legal: compile=True"),
        ("aot_eager", "cuda", "needs torch.compile, but compile='aot_eager'; nearest legal: compile=True"),
        (True, "cpu", "the cluster has cpu devices"),
    ],
)
def test_async_tp_needs_inductor_on_cuda(compile, device_type, message) -> None:
    with pytest.raises(PinError, match=message):
        check_pins(Pins(), Facts(2, device_type=device_type, async_tp=True, compile=compile, compile_backends=EAGER))
    check_pins(Pins(), Facts(2, device_type=device_type, compile=compile, compile_backends=EAGER))
    check_pins(Pins(), Facts(2, device_type="cuda", async_tp=True))
    facts = Facts(2, device_type=device_type, async_tp="auto", compile=compile, compile_backends=EAGER)
    check_pins(Pins(), facts)
    with pytest.raises(PinError, match="async_tp='yes' is not known; use True, False or 'auto'"):
        check_pins(Pins(), Facts(2, async_tp="yes"))


Way = tuple[bool, bool]
OP_BY_OP, COMPILED, IN_PIECES = (False, False), (True, False), (True, True)


def _planned(steps_s: dict[Way, float]) -> Callable[[bool, bool, SoFar], tuple[Plan, Any]]:
    """What `parallelize` plans with: steps of these prices, or a refusal."""
    known = [math.inf]

    def planned(compiled: bool, async_tp: bool, so_far: SoFar) -> tuple[Plan, Any]:
        assert so_far.step_s == min(known)
        seconds = steps_s.get((compiled, async_tp))
        known.append(math.inf if seconds is None else seconds)
        if seconds is None:
            raise PinError(f"refused, compiled={compiled}")
        step = SimpleNamespace(step_time_s=Quantity.spread(seconds, 0.0, Tag.ASSUMED))
        return cast(Plan, SimpleNamespace(estimate=step, compiled=compiled, async_tp=async_tp)), None

    return planned


@pytest.mark.parametrize(
    ("steps_s", "chosen"),
    [
        ({OP_BY_OP: 2.0, COMPILED: 1.0}, COMPILED),
        ({OP_BY_OP: 1.0, COMPILED: 2.0, IN_PIECES: 1.5}, OP_BY_OP),
        ({OP_BY_OP: 1.0}, OP_BY_OP),
        ({COMPILED: 1.0}, COMPILED),
        ({OP_BY_OP: 3.0, COMPILED: 2.0, IN_PIECES: 1.0}, IN_PIECES),
        ({OP_BY_OP: 3.0, COMPILED: 2.0, IN_PIECES: 2.0}, COMPILED),  # nothing to hide
    ],
)
def test_blocks_run_the_way_that_is_cheapest(steps_s: dict[Way, float], chosen: Way) -> None:
    plan = cheapest_program(_planned(steps_s), (OP_BY_OP, COMPILED, IN_PIECES))[0]
    assert (plan.compiled, plan.async_tp) == chosen
    with pytest.raises(PinError, match="compiled=False"):
        cheapest_program(_planned({}), (OP_BY_OP, COMPILED))


def test_the_price_decides_where_it_is_asked() -> None:
    ways = functools.partial(ways_to_run, device_type="cuda", compiles=True, devices=8)
    assert ways("auto", False) == [OP_BY_OP, COMPILED]
    assert ways("auto", "auto") == [OP_BY_OP, COMPILED, IN_PIECES]
    assert ways(True, "auto") == ways("inductor", "auto") == [COMPILED, IN_PIECES]
    assert ways(True, True) == [IN_PIECES]
    assert ways("aot_eager", "auto") == [COMPILED]
    assert ways(False, "auto") == [OP_BY_OP]
    assert ways_to_run("auto", "auto", "cpu", compiles=False, devices=8) == [OP_BY_OP]
    assert ways_to_run("auto", "auto", "cuda", compiles=False, devices=8) == [OP_BY_OP]  # without Triton
    assert ways("auto", "auto", devices=1) == [OP_BY_OP, COMPILED]  # nobody to hide the sending from


@pytest.mark.parametrize("of", [autoplan.parallelize, autoplan.plan])
def test_the_price_decides_unless_the_caller_does(of: Callable[..., Any]) -> None:
    """What a call and a check of legality take by default is declared once."""
    given = inspect.signature(of).parameters
    assert (given["compile"].default, given["async_tp"].default) == (COMPILE, ASYNC_TP) == ("auto", "auto")
    assert (Facts(2).compile, Facts(2).async_tp) == (COMPILE, ASYNC_TP)


def test_unknown_ways_to_compile_are_refused() -> None:
    with pytest.raises(PinError, match=r"compile='aot_eager' is not known; use True, False or 'auto'$"):
        check_pins(Pins(), Facts(2, compile="aot_eager"))  # a plan knows no backends
    with pytest.raises(
        PinError,
        match=r"compile='indcutor' .* or a backend of torch\.compile; did you mean 'inductor'",
    ):
        check_pins(Pins(), Facts(2, compile="indcutor", compile_backends=EAGER))


def test_async_tp_is_planned_within_nvlink_only() -> None:
    """The plan says that it hides collectives, and what it costs is the price with that overlap."""
    graph = graph_of("llama", 0.0)
    nvlink, pcie = (Cluster.parse(text) for text in ("1x4xh100-sxm5-80gb", "1x4xh100-pcie-80gb"))
    plan, _ = plan_program(graph, nvlink, {"tp": 2}, 8, 64, compiled=True, async_tp=True)
    assert plan.async_tp and " compiled async-tp" in str(plan)
    assert Plan.from_json(plan.to_json()).async_tp
    assert not plan_program(graph, nvlink, {"tp": 1}, 8, 64, compiled=True, async_tp=True)[0].async_tp
    with pytest.raises(PinError, match=r"tp=2 with overlap of tp in compiled blocks: .* nearest legal: tp=1"):
        plan_program(graph, pcie, {"tp": 2}, 8, 64, compiled=True, async_tp=True)
    searched, _ = plan_program(graph, pcie, {}, 8, 64, compiled=True, async_tp=True)
    assert searched.config.tp == 1


def test_a_cpu_compiles_nothing_by_itself(monkeypatch) -> None:
    monkeypatch.setattr(autoplan.runtime.compiled, "has_triton", lambda: True)
    assert not compiles_by_itself(torch.device("cpu"))
    assert compiles_by_itself(torch.device("cuda"))
    monkeypatch.setattr(autoplan.runtime.compiled, "has_triton", lambda: False)
    assert not compiles_by_itself(torch.device("cuda"))
