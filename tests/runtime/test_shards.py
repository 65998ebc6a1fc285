"""Parameters of a program are DTensors with their true placements: torch's own functions see the whole model, or are
refused by name."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import shard_jobs
import torch
from harness import pool
from parity import Case, compiled, fake_group, reference, spread_out, worst
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from autoplan.runtime.shards import ForeignUseError, Origin, ParameterShard, _runs, placements_of
from autoplan.runtime.spec import ParamSpec, ShardSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]


def run(job: Any, case: Case) -> list[Any]:
    program = compiled(case)
    return pool(case.world).run(job, case, program.spec.to_json(), dict(program.sources), timeout_s=120)


WHOLE = [
    Case("llama", tp=2, dp=2, zero=3),
    Case("llama", dp=2, cp=2, zero=1),
    Case("gpt-untied", tp=2, dp=2, zero=2),
    Case("llama", dp=4, zero=3, zero_replicas=2),
    Case("gpt", dp=2, tp=2, zero=3),
    Case("mixtral-of-two", dp=4, zero=3),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(WHOLE, 3), ids=str)
def test_torch_sees_the_whole_model(case: Case) -> None:
    """clip_grad_norm_, full_tensor and checkpoints of `pm.parameters()`, on all ranks alike."""
    for found in run(shard_jobs.use, case):
        assert found["refused"] == "" == found["by_number"]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-12)
        assert found["clipped"][0] == pytest.approx(found["clipped"][1], rel=1e-5)
        assert found["saved"] and found["loaded"]


@pytest.mark.processes
def test_what_a_dtensor_cannot_say_is_refused_by_name() -> None:
    """The stages of a pipeline hold different parameters."""
    for found in run(shard_jobs.use, Case("llama-tied", tp=2, pp=2)):
        assert "one of 2 pipeline stages" in found["refused"] and "pm.clip_grad_norm_" in found["refused"]
        assert found["clipped"][0] == pytest.approx(found["clipped"][1], rel=1e-5)
        assert found["saved"] and found["loaded"]
        assert "does not name the parameter" in found["by_number"]


@pytest.mark.processes
@pytest.mark.parametrize("case", [Case("llama", dp=2, zero=1), Case("llama", tp=2)], ids=str)
def test_a_change_of_a_part_is_not_lost(case: Case) -> None:
    """Torch gathers a row of a tensor that is split by rows, and would change the copy."""
    for said in run(shard_jobs.changed_parts, case):
        assert "" in said and any("mul_ on a part of " in text and "would be lost" in text for text in said)


@pytest.mark.processes
@pytest.mark.parametrize("family", ["mixtral", "mixtral-of-two"])  # shards of dim 0, and of dim 1
def test_experts_have_a_mesh_of_their_own(family: str) -> None:
    """Norms over both meshes are refused by name; each parameter and the checkpoint are whole all the same."""
    results = run(shard_jobs.use, Case(family, dp=4, ep=2, zero=3))
    assert all("over parameters of experts" in found["refused"] for found in results)
    assert all("pm.clip_grad_norm_" in found["refused"] for found in results)
    assert all(found["saved"] and found["loaded"] for found in results)


PARTS = [Case("llama", tp=2), Case("llama", dp=2, zero=3), Case("gpt", dp=2, zero=1)]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(PARTS, 3), ids=str)
def test_a_number_is_that_of_the_whole_tensor_on_every_rank(case: Case) -> None:
    """`p.grad.norm().item()` and the like, by which ranks decide what to do next."""
    for found in run(shard_jobs.numbers, case):
        assert all(mine == pytest.approx(wanted, rel=1e-9, abs=1e-15) for mine, wanted in found)


@pytest.mark.processes
@pytest.mark.parametrize("case", [*spread_out(PARTS, 3), Case("llama", pp=2)], ids=str)
def test_gradients_of_an_optimizers_parts_are_refused_outside_of_an_update(case: Case) -> None:
    """A norm over `pm.optimizer.param_groups` would be another one on every rank."""
    for said, error, missing in run(shard_jobs.parts_of_optimizer, case):
        assert all("this rank's parts of the model's" in each and "pm.clip_grad_norm_" in each for each in said)
        assert error == 0 and missing == 0


ORDERS = [0.5, 1.0, 2.0, 3.5, math.inf]
NORMS = [
    Case("llama-tied", tp=2, pp=2),
    Case("gpt", dp=2, tp=2, zero=1),  # tied weights
    Case("mixtral", dp=4, ep=2, zero=3),
    Case("llama", dp=2, cp=2, zero=2),
    Case("llama", tp=2, dp=2, zero=3),
    Case("llama-tied", pp=2, dp=2, zero=0, num_micro_batches=2),
    Case("llama", dp=4, zero=3, zero_replicas=2),
    Case("mixtral-of-two", dp=4, ep=2, zero=1),
    Case("llama", dp=2, zero=1, offload="optimizer"),
    Case("llama", dp=2, zero=3, offload="optimizer+parameters"),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(NORMS, 3), ids=str)
def test_norms_of_any_order_are_those_of_torch_on_one_process(case: Case) -> None:
    _, gradients = reference(case)
    for found, said in pool(case.world).run(
        shard_jobs.norms, case, compiled(case).spec.to_json(), dict(compiled(case).sources), ORDERS, timeout_s=120
    ):
        for order, (norm, after, clipped) in zip(ORDERS, found, strict=True):
            copies = {n: torch.nn.Parameter(torch.zeros_like(g)) for n, g in gradients.items()}
            for name, p in copies.items():
                p.grad = gradients[name].clone()
            limit = 0.5 * float(torch.nn.utils.get_total_norm(gradients.values(), order))
            wanted = torch.nn.utils.clip_grad_norm_(copies.values(), limit, norm_type=order)
            assert norm == pytest.approx(float(wanted), rel=1e-11), order
            smaller = {n: p.grad for n, p in copies.items() if p.grad is not None}
            assert after == pytest.approx(float(torch.nn.utils.get_total_norm(smaller.values(), order)), rel=1e-11)
            assert after == pytest.approx(limit, rel=1e-3), order  # torch adds 1e-6 to the norm
            assert worst(clipped, smaller)[0] < 1e-11, order
        assert all(each.startswith("AgreedValueError: norm_type=") for each in said[:2])
        assert ["AgreedRuntimeError: the norm of order" in each for each in said[2:]] == [True] * len(ORDERS)


OWN = [Case("llama", tp=2, dp=2, zero=3), Case("llama-tied", tp=2, pp=2), Case("gpt", dp=2, tp=2, zero=3)]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(OWN, 3), ids=str)
def test_an_optimizer_of_ones_own(case: Case) -> None:
    assert max(run(shard_jobs.own_optimizer, case)) < 1e-14


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out([Case("llama", tp=2, dp=2, zero=3), Case("llama", tp=2, pp=2)], 2), ids=str)
def test_moments_are_shards_too(case: Case) -> None:
    """A checkpoint of `pm.optimizer.state_dict()` holds whole moments, and comes back; by numbers, which mean another
    parameter on every stage, it is refused."""
    for said, error in run(shard_jobs.optimizer_state, case):
        assert ("does not name the parameter" in said) == (case.pp > 1)
        assert error == 0


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(PARTS, 3), ids=str)
def test_moments_that_are_not_of_this_rank_are_refused(case: Case) -> None:
    """torch compares no shapes: whole moments would update parts of parameters, by memory that belongs to others."""
    for whole, turned, own in run(shard_jobs.foreign_states, case):
        assert "under the same plan" in whole and "no placements" in whole
        assert "under the same plan" in turned and own == ""


@pytest.mark.processes
def test_a_penalty_on_parameters_reaches_their_gradients() -> None:
    assert max(run(shard_jobs.penalty, Case("llama", tp=2, dp=2, zero=3))) < 1e-12


def test_placements_are_the_digits_of_a_dim() -> None:
    """Query rows kv x g x d over tp0 (kv), tp1 (g); fused rows 3 x h; the cut of an inner factor is strided."""

    class Mesh:
        axes: ClassVar = {"tp0": 2, "tp1": 2}

        def atoms(self, axis: str) -> tuple[str, ...]:
            return ("tp0", "tp1") if axis == "tp" else (axis,)

        def size(self, axis: str) -> int:
            return {"tp": 4}.get(axis, 2)

    def spec(factors: tuple[int, ...], *shards: ShardSpec) -> ParamSpec:
        return ParamSpec("b", "w", "w", (math.prod(factors),), (factors,), "float32", True, shards, (), ())

    def found(*args: Any) -> list[Any]:
        return placements_of(spec(*args), Mesh(), ("tp0", "tp1"))  # type: ignore[arg-type]

    assert found((2, 4, 8), ShardSpec("tp0", 0, 0)) == [Shard(0), Replicate()]
    assert found((2, 4, 8), ShardSpec("tp0", 0, 0), ShardSpec("tp1", 0, 1)) == [Shard(0), Shard(0)]
    assert found((2, 4, 8), ShardSpec("tp1", 0, 1)) == [Replicate(), _StridedShard(0, split_factor=2)]
    assert found((3, 8), ShardSpec("tp", 0, 1)) == [_StridedShard(0, split_factor=3)] * 2
    assert found((8,), ShardSpec("tp1", 0, 0), ShardSpec("tp0", 0, 0)) == [_StridedShard(0, split_factor=2), Shard(0)]


def test_runs_of_indices() -> None:
    assert _runs(torch.tensor([4, 5, 6, 10, 11, 20])) == [(4, 3, 0), (10, 2, 3), (20, 1, 5)]
    assert _runs(torch.tensor([], dtype=torch.int64)) == []


def test_a_stage_refuses_every_reduction_and_nothing_else() -> None:
    """Negative control: with one stage the same calls pass."""
    with fake_group(1):
        for num_stages, refused in ((1, False), (2, True)):
            p = shard_of(torch.ones(4), num_stages)
            calls = [
                lambda t: torch.linalg.vector_norm(t), lambda t: t.norm(), lambda t: t.sum(), lambda t: t.isnan().any(),
                lambda t: torch._foreach_norm([t]), lambda t: (t * 2).pow(2).sum(), lambda t: t.abs().max(),
            ]  # fmt: skip
            for call in calls:
                if refused:
                    with pytest.raises(ForeignUseError, match="one of 2 pipeline stages"):
                        call(p.detach())
                else:
                    call(p.detach())
            assert torch.equal(p.detach().mul_(3).full_tensor(), torch.full((4,), 3.0))


def shard_of(values: torch.Tensor, num_stages: int) -> ParameterShard:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    layout = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(values.shape, values.stride(), values.dtype))
    return ParameterShard.over(torch.nn.Parameter(values), layout, Origin("w", num_stages))


def test_gradients_are_those_of_the_source() -> None:
    with fake_group(1):
        p = shard_of(torch.ones(4), 1)
        assert p.grad is None and isinstance(p, torch.nn.Parameter)
        p.source.grad = torch.full((4,), 2.0)
        assert p.grad is not None and torch.equal(p.grad.full_tensor(), p.source.grad)
        p.grad.mul_(2)
        assert p.source.grad.tolist() == [4.0] * 4
        p.grad = p.grad + 1
        assert p.source.grad.tolist() == [5.0] * 4
        with pytest.raises(ForeignUseError, match="no DTensor"):
            p.grad = torch.ones(4)
        for register in (p.register_hook, p.register_post_accumulate_grad_hook):
            with pytest.raises(ForeignUseError, match="would never run"):
                register(lambda _: None)
        torch.optim.SGD([p], lr=1.0).zero_grad()
        assert p.source.grad is None


def test_values_are_those_of_the_source() -> None:
    """`p.data = ...` is not lost on a tensor that only shows the parameter."""
    with fake_group(1):
        p = shard_of(torch.ones(4), 1)
        p.data = p.data * 3
        assert p.source.tolist() == [3.0] * 4 == p.full_tensor().tolist()
        p.data.clamp_(max=2.0)
        assert p.source.tolist() == [2.0] * 4
        for values in (torch.ones(4), (p.data * 1)[:2]):
            with pytest.raises(ForeignUseError, match=r"new values of w have shape \(.*must have shape \(4,\)"):
                p.data = values


def test_what_is_trained_stays_so() -> None:
    """The program computes the gradients of its capture, whatever somebody sets on a tensor that shows a parameter."""
    with fake_group(1):
        p = shard_of(torch.ones(4), 1)
        assert p.requires_grad_() is p and p.requires_grad
        for change in (lambda: p.requires_grad_(False), lambda: setattr(p, "requires_grad", False)):
            with pytest.raises(ForeignUseError, match="w was trained when the program was made"):
                change()
        assert p.requires_grad and p.source.requires_grad
