"""The pipeline runner: numbers of micro-batches and stages, what crosses a boundary, what it holds, what it refuses.

That its gradients equal one process for every ZeRO stage is in test_zero.py.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import JobError, pool, worker_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from toy_stages import CARRIED, Stage, batch, make_runner, stage_names, train

from autoplan.runtime import zero as zero_module
from autoplan.runtime.pipeline import PipelineRunner, PipelineStagePart
from autoplan.runtime.private import SyncedStage
from autoplan.runtime.zero import GradientSync, ZeroStage, apply_zero

TIGHT = 1e-12


def assert_close(results):
    assert max(error for result in results for error in result.values()) < TIGHT, results


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_four_stages(count):
    assert_close(pool(4).run(train, (4, 1), 0, [count] * 2, "sgd"))


@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 3])
def test_the_number_of_micro_batches_may_change_between_steps(zero):
    assert_close(pool(4).run(train, (2, 2), zero, [3, 1, 4, 3], "sgd"))


SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")


@pytest.mark.processes
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "zero"), [*itertools.product([*SEVERAL, "ZB-H1"], (0, 1, 2)), ("Interleaved1F1B", 3)]
)
def test_schedules_of_several_stages_per_rank_and_split_backwards(schedule, zero, recompute):
    virtual = 2 if schedule in SEVERAL else 1
    assert_close(pool(4).run(train, (2, 2), zero, [4, 6, 4], "sgd", recompute, schedule, virtual))


@pytest.mark.processes
def test_what_fsdp_does_by_itself_under_a_split_backward_fails():
    """So the test above can fail: parameters are gone before the second part of the last backward."""
    with pytest.raises(JobError, match=r"not allocated yet|KeyError: <AccumulateGrad"):
        pool(4).run(train_synced_as_full, "ZBV")


class SyncedAsFull(zero_module._ShardedSplit):
    """Leaves the reductions to FSDP's hooks, which run when the gradients of the inputs are there."""

    def before_backward(self, micro_batch: int, is_last: bool) -> None:
        zero_module._Sharded.before_backward(self, micro_batch, micro_batch == 3)

    def after_backward(self, is_last: bool) -> None:
        pass


def train_synced_as_full(rank: int, world: int, schedule: str) -> dict[str, float]:
    right, zero_module._ShardedSplit = zero_module._ShardedSplit, SyncedAsFull
    try:
        return train(rank, world, (2, 2), 1, [4], "sgd", schedule=schedule, virtual=2)
    finally:
        zero_module._ShardedSplit = right


@pytest.mark.processes
@pytest.mark.parametrize(("count", "in_flight"), [(6, [4, 3, 2, 1]), (4, [4, 3, 2, 1]), (3, [3, 3, 3, 3])])
def test_received_activations_live_only_while_in_flight(count, in_flight):
    for stage, (inputs, gradients) in enumerate(pool(4).run(most_buffers, count)):
        assert inputs == (in_flight[stage] if stage > 0 else 0), stage
        assert gradients <= 1, stage


def most_buffers(rank: int, world: int, count: int) -> tuple[int, int]:
    """The most micro-batches with receive buffers at once: for activations, for gradients."""
    (part,), runner = make_runner((world, 1), 0)
    sync, (stage,) = part.sync, runner._stages
    most = [0, 0]
    original = sync.before_backward

    def before_backward(micro_batch: int, is_last: bool) -> None:
        for i, received in enumerate((stage.args_recv_info, stage.grad_recv_info)):
            now = sum(any(info.buffer is not None for info in infos) for infos in received.values())
            most[i] = max(most[i], now)
        original(micro_batch, is_last)

    sync.before_backward = before_backward
    for step in range(2):
        runner.run(batch(1, count, step)[0])
    left = [info.buffer for kind in (stage.args_recv_info, stage.grad_recv_info) for i in kind.values() for info in i]
    assert all(buffer is None for buffer in left)
    return most[0], most[1]


@pytest.mark.processes
def test_a_zero_3_pipeline_gathers_each_block_twice_per_micro_batch_and_keeps_none():
    for left, num_gathers in pool(4).run(gathers_of_zero_3, 4):
        assert left == [0, 0, 0]
        assert num_gathers == 2 * 4 * 2  # blocks of a stage, micro-batches, forward and backward


def gathers_of_zero_3(rank: int, world: int, count: int) -> tuple[list[int], int]:
    """The parameters that each backward but the last left gathered, and the number of gathers of the step."""
    (part,), runner = make_runner((2, 2), 3)
    stage = part.module
    left: list[int] = []
    num_gathers = 0
    backward, gather = SyncedStage.backward_one_chunk, _fsdp_param_group.foreach_all_gather

    def backward_one_chunk(self, chunk, *args, **kwargs):
        backward(self, chunk, *args, **kwargs)
        left.append(sum(not isinstance(parameter, DTensor) for parameter in stage.parameters()))

    def foreach_all_gather(*args, **kwargs):
        nonlocal num_gathers
        num_gathers += 1
        return gather(*args, **kwargs)

    SyncedStage.backward_one_chunk = backward_one_chunk
    _fsdp_param_group.foreach_all_gather = foreach_all_gather
    try:
        runner.run(batch(2, count, 0)[worker_mesh((2, 2), ("pp", "dp"))["dp"].get_local_rank()])
    finally:
        SyncedStage.backward_one_chunk, _fsdp_param_group.foreach_all_gather = backward, gather
    return left[:-1], num_gathers


class WrongShape(Stage):
    def forward(self, *carried, **inputs):
        h, embedded, touched = super().forward(*carried, **inputs)
        return h[:, :-1], embedded, touched


class Transposed(Stage):
    """Returns tensors that are not contiguous, which neither gloo nor NCCL sends."""

    def forward(self, *carried, **inputs):
        return tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in super().forward(*carried, **inputs))


def run_first_stage_as(rank: int, world: int, kind: type[Stage]) -> str:
    mesh = worker_mesh((2, 1), ("pp", "dp"))
    stage = (kind if rank == 0 else Stage)(stage_names(rank, 2))
    sync = apply_zero(stage, mesh["dp"], 0)
    part = PipelineStagePart(rank, stage, sync, CARRIED if rank else (), () if rank else CARRIED)
    runner = PipelineRunner([part], mesh["pp"])
    runner.run(batch(1, 2, 0)[0])
    return str(next(iter(stage.parameters())).grad is not None)


@pytest.mark.processes
def test_outputs_that_are_not_contiguous_are_sent():
    assert pool(2).run(run_first_stage_as, Transposed) == ["True", "True"]


@pytest.mark.processes
def test_an_output_of_another_shape_than_declared_is_an_error_where_it_is_made():
    with pytest.raises(JobError, match=r"ValueError: stage 0 returned \[\(\(2, 5, 5\), torch.float64\)"):
        pool(2).run(run_first_stage_as, WrongShape)


def runner_of(output: torch.Tensor) -> PipelineRunner:
    class Constant(torch.nn.Module):
        def forward(self, **inputs):
            return output

    return PipelineRunner([PipelineStagePart(0, Constant(), GradientSync(ZeroStage.NOTHING))])


def test_a_loss_must_be_one_number():
    with pytest.raises(ValueError, match=r"0-dim loss, it returned shape \(3,\)"):
        runner_of(torch.zeros(3, requires_grad=True)).run([{}])


def test_a_loss_in_a_tuple_is_a_loss():
    (loss,) = runner_of((torch.ones((), requires_grad=True),)).run([{}])
    assert loss == 1 and not loss.requires_grad


def test_no_micro_batch_is_an_error():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        runner_of(torch.zeros(())).run([])


def runner_under(zero: ZeroStage, schedule: str) -> PipelineRunner:
    return PipelineRunner([PipelineStagePart(0, torch.nn.Module(), GradientSync(zero))], schedule=schedule)


def test_unknown_and_forbidden_schedules_are_refused():
    with pytest.raises(ValueError, match="'ZBVZeroBubble' is not one of 1F1B"):
        runner_under(ZeroStage.GRADIENTS, "ZBVZeroBubble")
    with pytest.raises(ValueError, match="silently wrong gradients"):
        runner_under(ZeroStage.PARAMETERS, "ZBV")


@pytest.mark.parametrize(("carried_in", "carried_out"), [((), ()), (CARRIED, CARRIED), (CARRIED, ())])
def test_what_is_carried_must_fit_the_place_in_the_pipeline(carried_in, carried_out):
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        with pytest.raises(ValueError, match=r"stage 0 of 2 declares . tensors in and . out"):
            stage = Stage(stage_names(0, 2))
            PipelineRunner(
                [PipelineStagePart(0, stage, GradientSync(ZeroStage.NOTHING), carried_in, carried_out)], mesh
            )
    finally:
        dist.destroy_process_group()
