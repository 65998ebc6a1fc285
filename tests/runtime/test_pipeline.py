"""The pipeline runner: numbers of micro-batches and stages, what crosses a boundary, what it holds, what it refuses.

That its gradients equal one process for every ZeRO stage is in test_zero.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import JobError, pool, worker_mesh
from parity import spread_out
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from toy_stages import CARRIED, Stage, batch, make_runner, stage_names, train

from autoplan.codegen.schedules import schedule_spec
from autoplan.errors import PinError
from autoplan.runtime import stages as stages_module
from autoplan.runtime import zero as zero_module
from autoplan.runtime.pipeline import PipelineRunner, PipelineStagePart
from autoplan.runtime.spec import ScheduleSpec
from autoplan.runtime.stages import Carried, SyncedStage
from autoplan.runtime.zero import GradientSync, ZeroStage, apply_zero
from autoplan.schedules.schedule import SCHEDULES

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


EXECUTED = {name: s for name, s in SCHEDULES.items() if s.torch_class is not None and name not in ("GPipe", "1F1B")}


@pytest.mark.processes
@pytest.mark.parametrize("recompute", spread_out([False, True], 3))
@pytest.mark.parametrize(
    ("schedule", "zero"),
    [(name, zero) for name, s in EXECUTED.items() for zero in (0, 1, 2, *(() if s.split_backward else (3,)))],
)
def test_schedules_of_several_stages_per_rank_and_split_backwards(schedule, zero, recompute):
    virtual = EXECUTED[schedule].virtual_stages[0]
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
    received: tuple[list[list[StorageWeakRef]], ...] = ([], [])
    most = [0, 0]
    before_backward = sync.before_backward

    def alive(kind: int) -> int:
        return sum(not all(storage.expired() for storage in storages) for storages in received[kind])

    def count_them(micro_batch: int, is_last: bool) -> None:
        most[:] = [max(most[kind], alive(kind)) for kind in (0, 1)]
        before_backward(micro_batch, is_last)

    def recording(kind: int, receive: Callable[[int], list[dist.P2POp]]) -> Callable[[int], list[dist.P2POp]]:
        def run(chunk: int) -> list[dist.P2POp]:
            ops = receive(chunk)
            # the first tensor: what a stage hands on as it got it lives as long as torch keeps what it sent
            received[kind].append([StorageWeakRef(op.tensor.untyped_storage()) for op in ops[:1]])
            return ops

        return run

    sync.before_backward = count_them
    stage.get_fwd_recv_ops = recording(0, stage.get_fwd_recv_ops)
    stage.get_bwd_recv_ops = recording(1, stage.get_bwd_recv_ops)
    for step in range(2):
        runner.run(batch(1, count, step)[0])
    assert [len(kind) for kind in received] == [2 * count, 2 * count]
    assert alive(0) == alive(1) == 0
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
    runner = PipelineRunner([part], mesh["pp"], schedule=schedule_spec("1F1B"))
    runner.run(batch(1, 2, 0)[0])
    return str(next(iter(stage.parameters())).grad is not None)


@pytest.mark.processes
def test_outputs_that_are_not_contiguous_are_sent():
    assert pool(2).run(run_first_stage_as, Transposed) == ["True", "True"]


class Views(torch.nn.Module):
    """A stage whose outputs are views, or whose inputs get views as gradients: of cat, transpose and expand."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = torch.nn.ModuleDict({"linear": torch.nn.Linear(4 if index == 0 else 12, 4)})

    def forward(self, *carried: torch.Tensor, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not carried:
            h = self.blocks["linear"](x)
            return (
                torch.cat([h, x], -1)[..., 2:6],
                h.transpose(0, 1),
                h.sum(-1, keepdim=True).expand(-1, -1, 4),
                h.sin(),
            )
        a, b, c, d = carried
        return self.blocks["linear"](torch.cat([a, b.transpose(0, 1), c], -1)).square().sum() + d.sum()


def views_error(rank: int, world: int, schedule: str, sendable: Callable[..., object] | None) -> float:
    """The worst relative difference of this stage's gradients from one process."""
    mesh = worker_mesh((2, 1), ("pp", "dp"))
    stages, alone = [Views(0), Views(1)], [Views(0), Views(1)]
    micro_batches = [{"x": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i))} for i in range(3)]
    for inputs in micro_batches:
        alone[1](*alone[0](**inputs), **inputs).backward()
    carried = tuple(Carried(shape, torch.float32) for shape in ((2, 3, 4), (3, 2, 4), (2, 3, 4), (2, 3, 4)))
    sync = apply_zero(stages[rank], mesh["dp"], 0, schedule=schedule_spec(schedule))
    part = PipelineStagePart(rank, stages[rank], sync, carried if rank else (), () if rank else carried)
    right, stages_module._sendable = stages_module._sendable, sendable or stages_module._sendable
    try:
        PipelineRunner([part], mesh["pp"], schedule=schedule_spec(schedule)).run(micro_batches)
    finally:
        stages_module._sendable = right
    pairs = zip(stages[rank].parameters(), alone[rank].parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_activations_and_gradients_that_are_views_are_sent(schedule):
    assert max(pool(2).run(views_error, schedule, None)) < 1e-6


def activations_only(tensors):
    """Gradients, which need none themselves, are left as they are."""
    return tuple(t.contiguous() if t is not None and t.requires_grad else t for t in tensors)


@pytest.mark.processes
@pytest.mark.parametrize(("schedule", "sendable"), [("1F1B", tuple), ("ZB-H1", activations_only)])
def test_views_that_are_sent_as_they_are_fail(schedule, sendable):
    """So the test above can fail, for activations and for gradients (a whole backward accumulates into leaves, which
    copies views; the first part of a split one does not)."""
    with pytest.raises(JobError, match=r"contiguous"):
        pool(2).run(views_error, schedule, sendable)


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


def runner_under(zero: ZeroStage, schedule: ScheduleSpec) -> PipelineRunner:
    return PipelineRunner([PipelineStagePart(0, torch.nn.Module(), GradientSync(zero))], schedule=schedule)


def test_unknown_and_forbidden_schedules_are_refused():
    with pytest.raises(ValueError, match=r"'ZBV': torch has no class 'ZBVZeroBubble'; it has .*ScheduleZBVZeroBubble"):
        runner_under(ZeroStage.GRADIENTS, replace(schedule_spec("ZBV"), torch_class="ZBVZeroBubble"))
    with pytest.raises(PinError, match="'DualPipe' is priced, but not executed; use GPipe, 1F1B"):
        schedule_spec("DualPipe")
    with pytest.raises(ValueError, match="silently wrong gradients"):
        runner_under(ZeroStage.PARAMETERS, schedule_spec("ZBV"))


@pytest.mark.parametrize(("carried_in", "carried_out"), [((), ()), (CARRIED, CARRIED), (CARRIED, ())])
def test_what_is_carried_must_fit_the_place_in_the_pipeline(carried_in, carried_out):
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        with pytest.raises(ValueError, match=r"stage 0 of 2 declares . tensors in and . out"):
            stage = Stage(stage_names(0, 2))
            PipelineRunner(
                [PipelineStagePart(0, stage, GradientSync(ZeroStage.NOTHING), carried_in, carried_out)],
                mesh,
                schedule=schedule_spec("1F1B"),
            )
    finally:
        dist.destroy_process_group()
