"""Optimizer state and parameters on the host: the same training, bit for bit, and where everything lies."""

from __future__ import annotations

import json
from dataclasses import replace

import mixed_jobs
import offload_jobs
import pytest
import torch
from harness import pool
from parity import (
    SEQ,
    Case,
    assert_trains_as_one_device,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    graph_of,
    model_of,
    part_of,
    spread_out,
    train_job,
    train_reference,
    trained,
)

from autoplan.config.offload import read_offload, state_offload
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.offload import HostShards
from autoplan.runtime.spec import ProgramSpec
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest
from experiments.shared.default_plans import read_pins

pytestmark = pytest.mark.usefixtures("one_thread")
ignored = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


PROCESSES = [
    Case("llama", dp=2, num_micro_batches=3, labels="unequal", offload="optimizer"),
    Case("llama-tied", dp=2, tp=2, zero=1, num_micro_batches=2, offload="optimizer"),
    Case("llama", dp=2, tp=2, zero=2, num_micro_batches=3, labels="unequal", offload="optimizer"),
    Case("qwen2-mixed", dp=2, cp=2, zero=3, num_micro_batches=2, recompute="full", offload="optimizer"),
    Case("gpt", pp=2, stages=(1, 3), num_micro_batches=4, dropout=0.25, offload="optimizer"),
    Case("deepseek", dp=2, ep=2, pp=2, zero=1, num_micro_batches=3, offload="optimizer"),
    Case("llama", dp=2, zero=3, num_micro_batches=3, labels="unequal", offload="parameters"),
    Case("llama-tied", dp=2, tp=2, zero=2, num_micro_batches=3, offload="parameters"),
    Case("gpt-untied", pp=2, dp=2, zero=1, num_micro_batches=6, schedule="ZB-H1", offload="parameters"),
    Case("mixtral", dp=4, ep=2, zero=3, num_micro_batches=3, offload="parameters"),
    Case("deepseek", dp=2, ep=2, zero=3, num_micro_batches=2, offload="parameters"),
    Case("llama-tied", dp=4, zero=3, zero_replicas=2, num_micro_batches=3, offload="parameters"),
    Case("llama", dp=2, tp=2, zero=3, num_micro_batches=2, offload="activations+parameters"),
]


@ignored
@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(PROCESSES, 7), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


@pytest.mark.parametrize("precision", ["native", "bf16", "bf16-grad16", "fp16", "fp32"])
def test_one_rank_trains_alike_bit_by_bit(precision: str) -> None:
    """Where the optimizer lies changes no number; float32 masters have no memory on the device."""
    found = []
    for offload in ("none", "optimizer"):
        case = Case(num_micro_batches=3, precision=precision, offload=offload)
        program = compiled(case)
        dtype = "float64" if precision == "native" else "float32"
        with fake_group(1):
            found.append(
                train_job(0, 1, case, program.spec.to_json(), dict(program.sources), dtype, 3, "adamw")  # type: ignore[arg-type]
            )
    plain, moved = found
    assert plain is not None and moved is not None
    assert plain.losses == moved.losses and plain.norm == moved.norm
    for tensors in ("gradients", "parameters"):
        a, b = getattr(plain, tensors), getattr(moved, tensors)
        assert set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


@ignored
@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    spread_out(
        [
            Case("llama", dp=2, zero=0, precision="bf16", num_micro_batches=3, offload="optimizer"),
            Case("llama-tied", dp=2, zero=1, precision="bf16", num_micro_batches=2, offload="optimizer"),
            Case("gpt-untied", dp=2, zero=3, precision="fp16", num_micro_batches=3, offload="optimizer"),
            Case("llama", dp=2, zero=2, precision="bf16-grad16", num_micro_batches=3, offload="parameters"),
            Case("llama", dp=2, zero=3, precision="fp16", num_micro_batches=2, offload="parameters"),
            Case("llama-frozen", dp=2, zero=3, precision="bf16", num_micro_batches=2, offload="parameters"),
        ],
        5,
    ),
    ids=str,
)
def test_ranks_train_alike_bit_by_bit(case: Case) -> None:
    plain, moved = (trained(c, "float32") for c in (replace(case, offload="none"), case))
    assert plain.losses == moved.losses and plain.norm == moved.norm
    assert all(torch.equal(moved.parameters[n], p) for n, p in plain.parameters.items())
    assert all(torch.equal(moved.gradients[n], g) for n, g in plain.gradients.items())


@ignored
@pytest.mark.processes
@pytest.mark.parametrize(("zero", "offload"), [(0, "optimizer"), (2, "optimizer"), (3, "parameters")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(zero: int, offload: str) -> None:
    case = Case("llama", dp=2, zero=zero, precision="fp16", num_micro_batches=2, offload=offload)
    program = compiled(case)
    for found in pool(2).run(mixed_jobs.overflow, case, program.spec.to_json(), dict(program.sources), 1):
        assert found["skipped"] == [False, True, False, False]
        assert found["changed"] == [True, False, True, True]
        assert found["norm_is_inf"] == found["skipped"]


@ignored
@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", dp=2, zero=0, num_micro_batches=2, offload="optimizer"),
        Case("llama", dp=2, zero=3, num_micro_batches=2, offload="optimizer"),
        Case("llama", dp=2, zero=0, num_micro_batches=2, precision="bf16", offload="optimizer"),
    ],
    ids=str,
)
def test_copies_go_to_the_host_and_back(case: Case) -> None:
    """Every shard is two tensors: equal when a step ran, different when the optimizer did; gradients are on the host
    alone."""
    program = compiled(case)
    for found in pool(2).run(offload_jobs.held, case, program.spec.to_json(), dict(program.sources)):
        assert found["gradients_here"] == 0
        resident = case.precision == "native"  # else masters have no memory on the device
        for fresh, stale in zip(found["fresh"], found["stale"], strict=True):
            assert all(fresh) and all(stale) and bool(fresh) == resident


@ignored
@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("zero", "offload"), [(0, "optimizer"), (1, "optimizer"), (2, "parameters"), (3, "optimizer")])
def test_what_lies_where_is_what_the_memory_model_says(zero: int, offload: str, precision: str) -> None:
    """To the byte, on the device and on the host, after a step."""
    case = Case("llama", dp=2, zero=zero, num_micro_batches=2, precision=precision, offload=offload)
    program = compiled(case)
    found = pool(2).run(offload_jobs.held, case, program.spec.to_json(), dict(program.sources))
    request = PlanRequest(
        graph_of("llama", 0.0, precision),
        Cluster.parse("local", 2, "cpu").with_(memory_gb=1.0),
        SEQ,
        12,
        {**case.pins, "micro_batch_size": 3},
        precision=precision,
        executed=True,
    )
    state = state_offload({"offload": offload})
    planned = LayoutCache(request).pricer(
        ParallelConfig(dp=2, zero_stage=zero, micro_batch_size=3, num_micro_batches=2, offload=state)
    )
    assert planned is not None
    model = planned.memory
    assert sum(model.states) == 0
    for rank in found:
        assert rank["device"] == sum(model.stored)
        assert rank["host"] == sum(model.hosted)


@pytest.mark.processes
def test_without_copying_back_training_goes_wrong() -> None:
    """The comparisons above would notice."""
    case = Case("llama", dp=2, num_micro_batches=2, offload="optimizer")
    program = compiled(case)
    losses = pool(2).run(offload_jobs.without_copying_back, case, program.spec.to_json(), dict(program.sources))[0]
    want = train_reference(case, torch.float64, 3, "adamw").losses
    assert losses[0] == pytest.approx(want[0], rel=1e-12)
    assert all(abs(a - b) > 1e-3 for a, b in zip(losses[1:], want[1:], strict=True))


@ignored
@pytest.mark.processes
@pytest.mark.parametrize(
    ("zero", "offload"), spread_out([(0, "optimizer"), (2, "optimizer"), (3, "parameters")], 3, unpack=True)
)
def test_a_restart_goes_on_where_it_stopped(zero: int, offload: str) -> None:
    """`state_dict` and `load_state_dict` of model and optimizer."""
    case = Case("llama-tied", dp=2, zero=zero, num_micro_batches=2, offload=offload)
    program = compiled(case)
    for losses in pool(2).run(offload_jobs.restart, case, program.spec.to_json(), dict(program.sources)):
        assert losses[:4] == losses[4:]


@ignored
@pytest.mark.processes
def test_a_users_loop_is_the_same() -> None:
    """Through `autoplan.parallelize`."""
    pins = {"dp": 2, "zero_stage": 1, "num_micro_batches": 2}
    plain = pool(2).run(mixed_jobs.train, "bf16", {**pins, "offload": "none"}, timeout_s=120)
    moved = pool(2).run(mixed_jobs.train, "bf16", {**pins, "offload": "optimizer"}, timeout_s=120)
    assert [r[:2] for r in plain] == [r[:2] for r in moved]
    assert "offload=optimizer" in moved[0][2] and "offload" not in plain[0][2]


def test_the_program_says_what_is_on_the_host() -> None:
    spec = compiled(Case(dp=2, zero=3, offload="parameters")).spec
    assert spec.offload == ("parameters",)
    assert ProgramSpec.from_json(spec.to_json()) == spec
    older = json.loads(spec.to_json())
    del older["offload"]
    assert ProgramSpec.from_json(json.dumps(older)) == replace(spec, offload=())


def test_activations_are_offloaded_by_either_name() -> None:
    both = [Case(offload="activations"), Case(recompute="offload")]
    assert compiled(both[0]).sources == compiled(both[1]).sources
    assert compiled(both[0]).spec == compiled(both[1]).spec


def test_what_cannot_be_offloaded_is_refused() -> None:
    program = compiled(Case())
    params, buffers = full_tensors(Case(), torch.float64)
    wrong = replace(program.spec, offload=("parameters",))
    with fake_group(1), pytest.raises(ValueError, match="parameters on the host need ZeRO 1 to 3"):
        ParallelModel(wrong, program.sources, params, buffers, dtype=torch.float64)
    unknown = replace(program.spec, offload=("gradients",))
    with fake_group(1), pytest.raises(ValueError, match="offload of 'gradients' is not known; use optimizer"):
        ParallelModel(unknown, program.sources, params, buffers, dtype=torch.float64)


def test_pins_of_offload() -> None:
    assert read_offload("none") == () and read_offload(("optimizer", "activations")) == ("activations", "optimizer")
    assert read_offload("optimizer+parameters") == ("parameters",)
    config = read_pins({"offload": "activations+optimizer"}, 2)
    assert config.offload == ("optimizer",) and config.recompute == "offload"
    for pins, why in (
        ({"offload": "gradients"}, "use none, or some of activations, optimizer, parameters"),
        ({"offload": "none+optimizer"}, "is not supported"),
        ({"offload": 3}, "is not supported"),
        (
            {"offload": "parameters", "zero_stage": 0},
            "need ZeRO 1 to 3 over several ranks",
        ),
        ({"offload": "parameters", "tp": 2, "zero_stage": 3}, "need ZeRO 1 to 3 over several ranks"),
        ({"offload": "activations", "recompute": "full"}, "a layer has one kind of recompute"),
    ):
        with pytest.raises(PinError, match=why):
            read_pins(pins, 2)


def test_an_optimizer_may_run_right_after_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copies of the parameters are queued: the host waits for them, too, not only for gradients."""
    case, waits = Case(num_micro_batches=2, offload="optimizer"), list[torch.device]()
    monkeypatch.setattr("autoplan.runtime.offload._wait", waits.append)
    program, cpu = compiled(case), torch.device("cpu")
    with fake_group(1):
        pm = model_of(case, program.spec.to_json(), dict(program.sources), torch.float64)
        batch = part_of(global_batch(case), 0, 1)
        pm.step(batch)
        assert waits == [cpu]
        pm.eval_step(batch)
        assert waits == [cpu] * 2


def test_host_shards_of_a_parameter_without_a_gradient() -> None:
    """None on the device is None on the host: the optimizer leaves it out."""
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    host = HostShards([used, unused])
    used.grad = torch.full((3,), 2.0)
    host.take_gradients()
    assert used.grad is None and host.of(unused).grad is None
    grad = host.of(used).grad
    assert grad is not None and torch.equal(grad, torch.full((3,), 2.0))
    unused.grad, used.grad = torch.ones(3), None
    host.take_gradients()
    assert host.of(used).grad is None and host.of(unused).grad is not None
