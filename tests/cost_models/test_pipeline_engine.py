"""What DeepSpeed's engine does otherwise than Megatron: sends of parts, whole sums, buckets, gradients added apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_steps import NODE, NODES, estimate

from autoplan.catalog import load_model
from autoplan.config.parallel import FusedLoss, Mode, ParallelConfig, RunOptions, Sends
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.time.estimate import Estimate
from autoplan.errors import PinError


def test_stages_may_send_parts_of_what_all_tensor_parallel_ranks_hold() -> None:
    """DeepSpeed's pipelines, and Megatron-LM until March 2023: a part over the network, the whole over NVLink."""
    config, slow = ParallelConfig(dp=2, tp=8, pp=4, num_micro_batches=8), NODES.with_(nic=25)

    def steps(sends: Sends, sequence_parallel: bool = False) -> Estimate:
        return estimate(config, slow, RunOptions(sends=sends, sequence_parallel=sequence_parallel))

    costs = Costs(slow, mode=Mode.FUSED, options=RunOptions(sends=Sends.SPLIT, sequence_parallel=False))
    num_bytes = 4096 * 4096 * 2
    pair, node = Group(2, 8), Group(8, 1)
    part = costs.collective_s("send_recv", num_bytes / 8, pair) + costs.collective_s("all_gather", num_bytes, node)
    assert costs.sent_s(num_bytes, pair, node) == part
    whole, split, serial = map(steps, Sends)
    assert split.breakdown["pp_comm"].mid < 0.4 * whole.breakdown["pp_comm"].mid
    sent = [e.breakdown["pp_comm"].mid for e in (split, serial)]
    assert 1.5 < sent[1] / sent[0] < 2.1  # senders wait, too
    assert split.step_time_s.mid < serial.step_time_s.mid < whole.step_time_s.mid
    assert steps(Sends.SPLIT, True).step_time_s == steps(Sends.WHOLE, True).step_time_s  # parts of the sequence already


def test_whole_sums_are_all_reduced_and_kept_beside_the_gradients_of_a_backward() -> None:
    """DeepSpeed's BF16_Optimizer: 2 + 2 + 4 bytes per parameter, and a shard of 12."""
    config = ParallelConfig(dp=8, num_micro_batches=4)
    usual, sums = (estimate(config, options=RunOptions(overlap_zero=False, whole_sums=w)) for w in (False, True))
    params = load_model("llama-3.1-8b").num_params
    kept = [e.stages[0].memory["gradients"].mid / params for e in (usual, sums)]
    assert kept == pytest.approx([4, 6], rel=1e-3)
    added = sums.breakdown["dp_comm"].mid - usual.breakdown["dp_comm"].mid
    reduced = Costs(NODE, mode=Mode.FUSED).collective_s("reduce_scatter", 4 * params, Group(8, 1)).mid
    assert 0.5 * reduced < added < 1.3 * reduced  # an all-reduce is a reduce-scatter and a gather
    assert {n for n, q in usual.breakdown.items() if q != sums.breakdown[n]} == {"dp_comm"}
    other = replace(config, zero_stage=0)
    assert estimate(other, options=RunOptions(whole_sums=True)) == estimate(other)


def test_buckets_of_a_step_have_segments_of_their_own() -> None:
    """DeepSpeed's ZeRO 1: two buckets in 16 bits, and the gradients of the shard in 16 and in 32 bits."""
    config = ParallelConfig(dp=8, num_micro_batches=4)

    def beyond(whole_sums: bool = False) -> float:
        with_it, without = (
            estimate(config, options=RunOptions(zero_bucket=bucket, whole_sums=whole_sums)).stages[0]
            for bucket in (10**8, None)
        )
        assert with_it.allocated_bytes == without.allocated_bytes
        return with_it.memory_bytes.mid - without.memory_bytes.mid

    params = load_model("llama-3.1-8b").num_params
    assert beyond() == pytest.approx(2 * 2e8 + 6 * params / 8, rel=1e-3)
    assert beyond(whole_sums=True) == pytest.approx(
        2e8 + 4 * 128256 * 4096, rel=1e-3
    )  # the largest gradient in 32 bits
    with pytest.raises(PinError, match="zero_bucket=0 must be a whole number"):
        RunOptions(zero_bucket=0)


CONFIG = ParallelConfig(dp=8, num_micro_batches=4)
PARAMS = load_model("llama-3.1-8b").num_params


def added_s(config: ParallelConfig, fused: bool, mode: Mode = Mode.FUSED) -> float:
    return estimate(config, mode=mode, options=RunOptions(fused_accumulation=fused)).breakdown["accumulate"].mid


def test_gradients_that_no_product_adds_are_read_once_and_their_sum_twice() -> None:
    """Products of Megatron's kernels that add them read the sum once more."""
    fused, apart = (added_s(CONFIG, f) for f in (True, False))
    assert apart / fused == pytest.approx((4 + 4 + 2) / 4, rel=0.03)  # sums in 32 bits, gradients in 16
    memory_s = 3 * PARAMS * 10 / NODE.device.memory_bytes_per_s  # three of four micro-batches add
    assert apart == pytest.approx(memory_s / Constants.shipped().memory_share, rel=0.03)
    assert added_s(CONFIG, True, Mode.EAGER) == added_s(CONFIG, False, Mode.EAGER)  # kernels of torch never add
    # shards of ZeRO 2 are as wide as their sums
    two = replace(CONFIG, zero_stage=2)
    more = 8 * (added_s(two, False) - added_s(two, True)) / (apart - fused)
    assert more == pytest.approx((12 - 4) / (10 - 4), rel=0.02)


def test_a_gradient_of_its_own_takes_memory_until_it_is_added() -> None:
    """That of the head, which a backward makes while its activations are there."""
    fused, apart = (
        estimate(CONFIG, options=RunOptions(fused_loss=FusedLoss.FLASH, fused_accumulation=f)).stages[0]
        for f in (True, False)
    )
    assert apart.allocated_bytes.mid - fused.allocated_bytes.mid == pytest.approx(2 * 128256 * 4096, rel=0.05)
