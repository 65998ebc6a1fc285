"""ZeRO 0 to 3 against one process, in double precision, and what each stage holds between micro-batches."""

import dataclasses
import functools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import toy_stages
from harness import pool, worker_mesh
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from toy_stages import MLP, NUM_BLOCKS, Stage, batch, make_runner, stage_names, train, train_made

from autoplan.codegen.schedules import schedule_spec
from autoplan.runtime.shard_placement import shard_dim
from autoplan.runtime.zero import (
    ALONE_BYTES,
    ZeroStage,
    _AllReduce,
    apply_zero,
    buckets,
    check_schedule,
    messages,
)
from autoplan.schedules.schedule import SCHEDULES

TIGHT = 1e-12
DP2, PP2, PP2_DP2 = (1, 2), (2, 1), (2, 2)


def assert_close(results):
    assert max(error for result in results for error in result.values()) < TIGHT, results


@pytest.mark.processes
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("shape", [DP2, PP2, PP2_DP2])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_loss_gradients_and_sgd_equal_one_process(shape, zero, count):
    assert_close(pool(shape[0] * shape[1]).run(train, shape, zero, [count] * 2, "sgd"))


@pytest.mark.processes
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("shape", [DP2, PP2_DP2])
def test_adamw_equals_one_process(shape, zero):
    assert_close(pool(shape[0] * shape[1]).run(train, shape, zero, [3] * 3, "adamw"))


@pytest.mark.processes
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("shape", [DP2, PP2_DP2])
def test_recomputed_blocks_equal_one_process(shape, zero):
    assert_close(pool(shape[0] * shape[1]).run(train, shape, zero, [3] * 2, "sgd", True))


# Negative controls: each breaks one thing that the comparison above must notice.


def train_broken(rank: int, world: int, zero: int, fault: str) -> dict[str, float]:
    (part,), runner = made = make_runner(DP2, zero)
    stage, sync = part.module, part.sync
    if fault == "divide":
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
    elif fault == "average":
        runner.run = functools.partial(_averaged, runner.run, stage)
    elif fault == "dropped":
        sync.finish_step = lambda: None
    elif fault == "doubled":
        finish = sync.finish_step
        sync.finish_step = lambda: (finish(), finish())
    return train_made(DP2, [3], "sgd", made)


def _averaged(run, stage, micro_batches):
    losses = run(micro_batches)
    for parameter in stage.parameters():
        parameter.grad /= 2
    return losses


@pytest.mark.processes
@pytest.mark.parametrize(
    ("zero", "fault"), [(0, "average"), (0, "dropped"), (0, "doubled"), (1, "divide"), (2, "divide"), (3, "divide")]
)
def test_a_wrong_reduction_is_noticed(zero, fault):
    results = pool(2).run(train_broken, zero, fault)
    assert all(result["grad"] > 0.1 for result in results), results


@pytest.mark.processes
def test_an_unannounced_last_backward_is_an_error():
    for message in pool(2).run(finish_early):
        assert message == "finish_step without a backward announced as the last: gradients are not reduced"


def finish_early(rank: int, world: int) -> str:
    (part,), _ = make_runner(DP2, 1)
    stage, sync = part.module, part.sync
    inputs = batch(2, 1, 0)[rank][0]
    loss = stage(**inputs)
    sync.before_backward(0, is_last=False)
    loss.backward()
    try:
        sync.finish_step()
    except RuntimeError as error:
        return str(error)
    return "no error"


# What is held between micro-batches.


@dataclasses.dataclass
class Held:
    """Elements of this rank's tensors: parameters and gradients, whole or sharded."""

    whole_parameters: int = 0
    whole_gradients: int = 0
    sharded_gradients: int = 0


def held_after_first_backward(rank: int, world: int, shape: tuple[int, int], zero: int) -> Held:
    (part,), runner = make_runner(shape, zero)
    stage, sync = part.module, part.sync
    found: list[Held] = []
    original = sync.before_backward

    def before_backward(micro_batch: int, is_last: bool) -> None:
        if micro_batch == 1:
            found.append(_held(stage))
        original(micro_batch, is_last)

    sync.before_backward = before_backward
    runner.run(batch(shape[1], 2, 0)[worker_mesh(shape, ("pp", "dp"))["dp"].get_local_rank()])
    return found[0]


def _held(stage: nn.Module) -> Held:
    held = Held()
    for parameter in stage.parameters():
        if not isinstance(parameter, DTensor):
            held.whole_parameters += parameter.numel()
            held.whole_gradients += 0 if parameter.grad is None else parameter.grad.numel()
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # shows the sharded parameters; what is reduced later is unaffected
    for parameter in stage.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            held.sharded_gradients += parameter.grad.to_local().numel()
    return held


@pytest.mark.processes
@pytest.mark.parametrize("shape", [DP2, PP2_DP2])
def test_what_each_stage_holds_after_the_first_backward(shape):
    for zero in range(4):
        for rank, held in enumerate(pool(shape[0] * shape[1]).run(held_after_first_backward, shape, zero)):
            stage = Stage(stage_names(rank // shape[1], shape[0]))
            everything = sum(parameter.numel() for parameter in stage.parameters())
            if zero in (0, 1):
                assert held == Held(everything, everything, 0), (zero, rank, held)
            else:
                assert held.whole_gradients == 0, (zero, rank, held)
                assert 0 < held.sharded_gradients < everything, (zero, rank, held)
                assert held.whole_parameters == (everything if zero == 2 else 0), (zero, rank, held)


# Which dim is sharded.


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((64, 32), 8, 0),
        ((50257, 768), 8, 0),  # 7 rows of padding are less than the copies of another dim
        ((4, 4096, 7168), 32, 1),  # DeepSeek-V3, tp 8, ep 64: 4 local experts with 32 replicas
        ((9, 64), 8, 1),  # 16 rows for 9
        ((8, 64), 7, 0),  # no dim divides
        ((4, 0, 6), 8, 0),
        ((5,), 8, 0),
    ],
)
def test_the_dim_that_is_sharded(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim


class _Experts(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(num, 64, 8)), nn.Parameter(torch.zeros(num, 8, 32))
        self.norm = nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize("apart", [False, True])
def test_few_experts_are_not_padded_to_one_per_replica(apart):
    """Every one of 32 replicas holds a 32nd of 4 experts; with shards of dim 0 the first four would hold an eighth."""
    for rank in (0, 31):
        dist.init_process_group("fake", rank=rank, world_size=64)
        try:
            both = dist.device_mesh.init_device_mesh("cpu", (2, 32), mesh_dim_names=("ep", "edp"))
            stage = WithBlocks(layer=_Experts(4))
            experts = [stage.blocks["layer"].up, stage.blocks["layer"].down]
            whole = dist.device_mesh.init_device_mesh("cpu", (64,), mesh_dim_names=("dp",))
            if apart:
                apply_zero(stage, whole, 3, apart=experts, apart_mesh=both["edp"])
            else:
                apply_zero(stage, both["edp"], 3)
            held = {
                name: p.to_local().untyped_storage().nbytes() for name, p in stage.blocks["layer"].named_parameters()
            }
        finally:
            dist.destroy_process_group()
        assert held == {
            "up": 4 * 64 * 8 * 4 // 32,
            "down": 4 * 8 * 32 * 4 // 32,
            "norm": 64 * 4 // (64 if apart else 32),
        }


# Messages of ZeRO 1 and 2.


def sized(sizes: list[int], dtypes: list[torch.dtype]) -> dict[str, nn.Module]:
    out = {}
    for name, (size, dtype) in zip("abcdef", zip(sizes, dtypes, strict=True), strict=False):
        out[name] = nn.Module()
        out[name].weight = nn.Parameter(torch.zeros(size // dtype.itemsize, dtype=dtype))
    return out


@pytest.mark.parametrize(
    ("sizes", "wide", "limit", "expected"),
    [
        ([8, 8, 8], "", 16, ["ab", "c"]),
        ([24, 8, 8], "", 16, ["a", "bc"]),
        ([8, 24, 8], "", 16, ["a", "b", "c"]),
        ([8, 8, 8], "b", 99, ["a", "b", "c"]),
        ([8, 0, 8], "", 99, ["abc"]),
        ([8, 8, 8], "", 0, ["a", "b", "c"]),
    ],
)
def test_small_neighbours_share_a_message(sizes, wide, limit, expected):
    dtypes = [torch.float64 if name in wide else torch.float32 for name in "abc"]
    blocks = sized(sizes, dtypes)
    same = MixedPrecisionPolicy(cast_forward_inputs=False)
    assert ["".join(names) for names in messages(blocks, dict.fromkeys(blocks, same), limit)] == expected
    other = {name: same if name != "c" else MixedPrecisionPolicy(torch.bfloat16) for name in blocks}
    assert "c" in ["".join(names) for names in messages(blocks, other, limit)]


def sent(rank: int, world: int, zero: int, limit: int | None) -> Counter[str]:
    options = {} if limit is None else {"bucket_bytes": limit}
    with patch.object(toy_stages, "apply_zero", functools.partial(apply_zero, **options)):
        (part,), runner = made = make_runner(DP2, zero)
    with profile() as seen:
        runner.run(batch(2, 2, 0)[rank])
    for p in part.module.parameters():
        p.grad = None
    error = max(train_made(DP2, [2, 2], "sgd", made).values())
    assert error < TIGHT, error
    kinds = {"c10d::_allgather_base_": "gather", "autoplan_exchange::reduce_scatter": "reduce"}
    return Counter(kinds[e.name] for e in seen.events() if e.name in kinds)


@pytest.mark.processes
@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (2, 2)])
def test_zero_1_and_2_send_as_often_as_the_bucket_says(zero, reductions):
    """Two micro-batches of four small blocks: in one message, and each in its own."""
    for limit, count in ((None, 1), (1, NUM_BLOCKS)):
        found = pool(2).run(sent, zero, limit)
        assert found == [Counter(gather=count, reduce=count * reductions)] * 2


# All-reduce of ZeRO 0.


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 8, []),
        ([4, 4, 4], 8, [[4, 4], [4]]),
        ([9, 1, 1], 8, [[9], [1, 1]]),
        ([1, 9, 1], 8, [[1], [9], [1]]),
    ],
)
def test_buckets_keep_the_order_and_the_limit(sizes, limit, expected):
    made = buckets([torch.zeros(size, dtype=torch.int8) for size in sizes], limit)
    assert [[tensor.numel() for tensor in bucket] for bucket in made] == expected


def test_a_large_gradient_is_not_copied_into_a_bucket():
    tensors = [torch.zeros(size, dtype=torch.int8) for size in (1, 4, 2, 5, 1)]
    made = buckets(tensors, 8, alone_bytes=4)
    assert [[tensor.numel() for tensor in bucket] for bucket in made] == [[4], [5], [1, 2, 1]]
    assert made[0][0] is tensors[1]


def test_buckets_hold_one_dtype_each():
    tensors = [torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    assert [[t.dtype for t in bucket] for bucket in buckets(tensors, 100)] == [[torch.float32] * 2, [torch.float64]]


@pytest.mark.processes
@pytest.mark.parametrize("bucket_bytes", [1, 40, 10**6])
def test_the_all_reduce_sums_every_gradient_once(bucket_bytes):
    pool(2).run(sum_gradients, bucket_bytes)


def sum_gradients(rank: int, world: int, bucket_bytes: int) -> None:
    mlp = MLP().to(torch.float64)
    mlp.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    mlp.unused = nn.Parameter(torch.ones(3))
    mlp.low = nn.Parameter(torch.ones(3, dtype=torch.float16))
    mlp.large = nn.Parameter(torch.ones(ALONE_BYTES // 8 + 1, dtype=torch.float64))
    mlp.turned = nn.Parameter(torch.ones(2, ALONE_BYTES // 8, dtype=torch.float64))
    for parameter in mlp.parameters():
        if parameter is not mlp.unused and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, rank + 1)
    for parameter in (mlp.up.weight, mlp.turned):
        parameter.grad = parameter.grad.t().contiguous().t()  # not contiguous
    _AllReduce(mlp, dist.group.WORLD, bucket_bytes).finish_step()
    assert mlp.unused.grad is None and mlp.frozen.grad is None
    for parameter in mlp.parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, torch.full_like(parameter, 3)), parameter


# One data-parallel rank, and refusals.


def test_one_rank_is_left_alone():
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        stage = Stage(stage_names(0, 1))
        sync = apply_zero(stage, mesh, 3)
    finally:
        dist.destroy_process_group()
    assert type(stage) is Stage
    assert not any(isinstance(parameter, DTensor) for parameter in stage.parameters())
    sync.before_backward(0, is_last=True)
    sync.finish_step()
    assert sync.zero is ZeroStage.PARAMETERS


@pytest.mark.parametrize("schedule", [s.name for s in SCHEDULES.values() if s.split_backward and s.torch_class])
def test_zero_3_with_a_split_backward_is_refused(schedule):
    with pytest.raises(ValueError, match="split backward gives silently wrong gradients"):
        check_schedule(3, schedule_spec(schedule))
    check_schedule(2, schedule_spec(schedule))
    check_schedule(3, schedule_spec("1F1B"))


class WithBlocks(nn.Module):
    def __init__(self, **blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)


def outside() -> nn.Module:
    stage = WithBlocks(a=nn.Linear(2, 2))
    stage.extra = nn.Linear(2, 2)
    return stage


def tied() -> nn.Module:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    return WithBlocks(a=a, b=b)


def two_dtypes() -> nn.Module:
    return WithBlocks(a=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half()]))


def scalar() -> nn.Module:
    a = nn.Linear(2, 2)
    a.scale = nn.Parameter(torch.ones(()))
    return WithBlocks(a=a)


@pytest.mark.parametrize(
    ("make", "zero", "message"),
    [
        (nn.Module, 0, "blocks must be a non-empty"),
        (outside, 0, "parameters outside WithBlocks.blocks: extra.weight, extra.bias"),
        (tied, 1, "'weight' of block 'b' is shared with block 'a'"),
        (two_dtypes, 1, "several dtypes .torch.float16, torch.float32"),
        (scalar, 1, "'scale' of block 'a' has no dim to shard"),
        (outside, 4, "4 is not a valid ZeroStage"),
    ],
)
def test_refusals_name_the_cause(make, zero, message):
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match=message):
            apply_zero(make(), mesh, zero)
    finally:
        dist.destroy_process_group()
