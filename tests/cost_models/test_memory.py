"""Peak memory at the moments of a step."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_work import GRADS, PARAMS, SAVED, SENT, TIED, TRANSIENT, cluster, layer, workload

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import executed_precision, precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.parameters import ParameterMemory
from autoplan.cost_models.memory.ranks import FIRST, LATER, NOTHING, REDUCTION, UPDATE, MemoryModel
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.time.blocks import BlockPricer, op_times
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.work import KeptAtCut, ParamWork, TiedParam, Workload
from autoplan.errors import PinError
from autoplan.schedules.orders import F
from autoplan.schedules.schedule import actions, held_at_backwards, waits
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest


def memory(config: ParallelConfig, work: Workload | None = None, mode: Mode = Mode.EAGER) -> MemoryModel:
    return MemoryModel(work or workload(), config, precision_of("native"), cluster(config.num_devices), mode)


def ranges(*counts: int) -> list[range]:
    out, at = [], 0
    for count in counts:
        out.append(range(at, at + count))
        at += count
    return out


# -- moments -----------------------------------------------------------------------------------------------------------


def test_the_only_backward_has_no_gradients_yet() -> None:
    found = memory(ParallelConfig()).rank(0, ranges(4), [0])
    assert found.moment == FIRST
    assert {k: q.mid for k, q in found.terms.items()} == {
        "parameters": 4 * GRADS, "optimizer": 8 * GRADS, "activations": 4 * SAVED, "transient": TRANSIENT
    }  # fmt: skip


def test_later_backwards_find_all_gradients() -> None:
    found = memory(ParallelConfig(num_micro_batches=2)).rank(0, ranges(4), [0])
    assert found.moment == LATER
    assert found.terms["gradients"].mid == 4 * GRADS and found.terms["activations"].mid == 4 * SAVED


def test_gradients_grow_while_activations_shrink() -> None:
    """Of a model whose last layer keeps next to nothing: the peak is before its first layers run backward."""
    work = workload(unit_saved=(SAVED, SAVED, 1.0, 1.0), unit_transient=(TRANSIENT, TRANSIENT, 0.0, 0.0))
    found = memory(ParallelConfig(), work).rank(0, ranges(4), [0])
    assert found.terms["gradients"].mid == 2 * GRADS and found.terms["activations"].mid == 2 * SAVED


def test_a_whole_gradient_is_there_until_the_one_before_it_is_scattered() -> None:
    """Not longer: while the first layer runs backward, that of a large head is a shard already."""
    large = ParamWork("head.weight", 10 * PARAMS, "float32", True, False)
    head = replace(layer("head"), params=(large,))
    blocks, units = {"layer": layer(), "head": head}, (("layer",),) * 3 + (("head",),)
    for fullest, want in ((0, (10 + 1 + 1) * GRADS / 2 + GRADS), (2, 10 * GRADS / 2 + 10 * GRADS)):
        transient = tuple(100 * GRADS if u == fullest else 0.0 for u in range(4))
        work = workload(unit_saved=(1.0,) * 4, unit_transient=transient, blocks=blocks, units=units)
        found = memory(ParallelConfig(dp=2, zero_stage=2), work).rank(0, ranges(4), [0])
        assert found.moment == FIRST
        assert found.terms["gradients"].mid == want


@pytest.mark.parametrize(("zero", "waits"), [(0, True), (1, False), (3, False)])
def test_the_gradient_of_a_tied_parameter_waits_where_it_is_one(zero: int, waits: bool) -> None:
    """For its other use; copies that ZeRO makes each give their own away."""
    work = workload(unit_saved=(SAVED, SAVED, SAVED, 1.0), tied=(TiedParam(0, 3, TIED),))
    found = memory(ParallelConfig(dp=2, zero_stage=zero, num_micro_batches=2), work).rank(0, ranges(4), [0])
    assert found.moment == LATER
    alone = memory(ParallelConfig(dp=2, zero_stage=zero, num_micro_batches=2), replace(work, tied=()))
    was = alone.rank(0, ranges(4), [0]).terms
    more = (found.terms[name].mid - was[name].mid for name in ("activations", "transient"))
    assert (sum(more) > 0) is waits


@pytest.mark.parametrize(("micro_batches", "fuller"), [(1, False), (2, True)])
def test_the_last_backward_of_zero_1_sends_a_copy_of_a_sum(micro_batches: int, fuller: bool) -> None:
    """Of the head, whose whole gradient is named until its shard is made; with one micro-batch nothing is summed."""
    large = ParamWork("head.weight", 10 * PARAMS, "float32", True, False)
    blocks = {"layer": layer(), "head": replace(layer("head"), params=(large,))}
    work = workload(unit_saved=(1.0,) * 4, blocks=blocks, units=(("layer",),) * 3 + (("head",),))
    config = ParallelConfig(dp=2, zero_stage=1, num_micro_batches=micro_batches)
    found = memory(config, work).rank(0, ranges(4), [0])
    whole, head = 13 * GRADS, 10 * GRADS
    if fuller:
        assert found.moment == LATER
        assert found.terms["gradients"].mid == whole + head + head / 2
        assert found.terms["gathered parameters"].mid == 3 * 4 * PARAMS
    else:
        assert found.terms["gradients"].mid == head + head / 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_adamw_needs_no_temporaries(kind: str) -> None:
    """It is one kernel, on a GPU and on a CPU."""
    work, config = workload(unit_saved=(1.0,) * 4), ParallelConfig()
    found = MemoryModel(work, config, precision_of("fp32"), Cluster.local(1, kind)).rank(0, ranges(4), [0])
    assert found.moment != UPDATE


def test_reduction_needs_its_buffers_when_activations_are_gone() -> None:
    found = memory(ParallelConfig(dp=2, zero_stage=0), workload(unit_saved=(1.0,) * 4)).rank(0, ranges(4), [0])
    assert found.moment == REDUCTION
    assert found.terms["communication buffers"].mid == 4 * GRADS == found.terms["gradients"].mid
    assert found.terms["activations"].mid == 0.0


@pytest.mark.parametrize(("m", "first", "later"), [(1, [1, 1], [0, 0]), (2, [2, 1], [1, 1]), (4, [2, 1], [2, 1])])
def test_micro_batches_held(m: int, first: list[int], later: list[int]) -> None:
    table = actions("1F1B", 2, m)
    assert [held_at_backwards(row) for row in table] == list(zip(first, later, strict=True))


def test_chunks_of_one_rank_are_not_full_at_the_same_time() -> None:
    config = ParallelConfig(pp=2, num_micro_batches=8, schedule="Interleaved1F1B", virtual_stages=2)
    found = memory(config).rank(0, ranges(1, 1, 1, 1), [0] * 4)
    held = max(sum(1 if a.kind.value == "F" else -1 for a in actions("Interleaved1F1B", 2, 8, 2)[0][: i + 1])
               for i in range(32))  # fmt: skip
    assert found.in_flight == held
    assert found.terms["activations"].mid <= held * (SAVED + 2 * SENT)


def test_a_rank_of_a_v_holds_the_first_and_the_last_chunk() -> None:
    config = ParallelConfig(pp=2, num_micro_batches=8, schedule="ZBV", virtual_stages=2)
    outer, inner = memory(config, workload(10)).stages(ranges(1, 2, 3, 4), [0] * 4)
    assert (outer.terms["parameters"].mid, inner.terms["parameters"].mid) == (5 * GRADS, 5 * GRADS)
    uneven = memory(config, workload(10)).stages(ranges(1, 1, 1, 7), [0] * 4)
    assert [rank.terms["parameters"].mid for rank in uneven] == [8 * GRADS, 2 * GRADS]
    assert outer.in_flight == inner.in_flight == 4


def test_what_turns_around_within_a_rank_is_held_once() -> None:
    """Nothing but what is sent: 4 chunks are held on each rank, of which those on rank 0 border on one chunk each; on
    rank 1 the second one works on what the first one sends: 3 of the first and 1 of the second, by its order."""
    config = ParallelConfig(pp=2, num_micro_batches=8, schedule="ZBV", virtual_stages=2)
    work = workload(unit_saved=(0.0,) * 4, unit_transient=(1000.0,) * 4)
    outer, inner = memory(config, work).stages(ranges(1, 1, 1, 1), [0] * 4)
    assert outer.terms["activations"].mid == 4 * SENT
    assert "".join(f"{a.kind.value}{a.chunk}" for a in actions("ZBV", 2, 8, 2)[1][:7]) == "F1F2F1F2I2W2F1"
    assert inner.terms["activations"].mid == 3 * (2 * SENT) + SENT


def test_a_transient_counts_with_what_is_held_at_that_time() -> None:
    """The first chunk runs backward when the second one of the same micro-batch is gone already."""
    config = ParallelConfig(pp=2, num_micro_batches=2, schedule="Interleaved1F1B", virtual_stages=2)
    work = workload(unit_saved=(SAVED, SAVED, 1e5, SAVED), unit_transient=(9e4, 0.0, 0.0, 0.0), cut_bytes=(0.0,) * 3)
    terms = memory(config, work).rank(0, ranges(1, 1, 1, 1), [0] * 4).terms
    held, transient = terms["activations"].mid, terms["transient"].mid
    assert held + transient < 2 * (SAVED + 1e5) + 9e4
    assert held + transient == max(
        sum((SAVED, SAVED, 1e5, SAVED)[b.chunk] for b in row[: i + 1] if b.kind is F)
        - sum((SAVED, SAVED, 1e5, SAVED)[b.chunk] for b in row[:i] if b.kind is not F)
        + (9e4 if a.chunk == 0 else 0.0)
        for row in [actions("Interleaved1F1B", 2, 2, 2)[0]]
        for i, a in enumerate(row)
    )


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("m", "schedule"), [(2, "Interleaved1F1B"), (8, "Interleaved1F1B"), (4, "ZBV")])
def test_states_of_a_chunk_are_there_while_it_runs(m: int, schedule: str, zero: int) -> None:
    """Gradients from its first backward on, under ZeRO 1 as shards after its last, gathered parameters from its first
    forward to its last backward: against a walk over the actions, with one unit per chunk."""
    degrees = {"pp": 2, "dp": 4 if zero else 1, "num_micro_batches": m, "virtual_stages": 2}
    config = ParallelConfig(**degrees, zero_stage=zero, schedule=schedule)
    sizes, saved, gathers = [3e4, 5e3, 1e4, 7e3], (2e3, 1e3, 9e3, 4e3), [2e4, 1e4, 7e3, 1e3]
    left = [x / 4 for x in sizes] if zero else sizes
    work = workload(unit_saved=saved, cut_bytes=(0.0,) * 3, unit_transient=(0.0,) * 4)
    for rank in range(2):
        model = memory(config, work)
        model.grads = model.first_grads = sizes
        model.reduced, model.gathered = left, gathers if zero else [0.0] * 4
        row = actions(schedule, 2, m, 2)[rank]
        held, most, started, ended = 0.0, (0.0,) * 4, set(), [0] * 4
        for a in row:
            if a.kind is F:
                held += saved[a.chunk]
                started.add(a.chunk)
            grads = sum(left[k] if n == m else sizes[k] for k, n in enumerate(ended) if n)
            gathered = sum(model.gathered[k] for k in started if ended[k] < m)
            most = max(most, (held + grads + gathered, held, grads, gathered))
            if a.kind.value in "BW":
                ended[a.chunk] += 1
                held -= saved[a.chunk]
        found = model.rank(rank, ranges(1, 1, 1, 1), [0] * 4).terms
        terms = [found[n].mid if n in found else 0.0 for n in ("activations", "gradients", "gathered parameters")]
        assert sum(terms) == most[0] and (schedule == "ZBV" or tuple(terms) == most[1:])


def test_megatrons_buffer_of_gradients_is_there_with_every_chunk() -> None:
    config = ParallelConfig(pp=2, num_micro_batches=2, schedule="Interleaved1F1B", virtual_stages=2)
    for rank in range(2):
        found = memory(config, mode=Mode.FUSED).rank(rank, ranges(1, 1, 1, 1), [0] * 4)
        assert found.terms["gradients"].mid == 2 * GRADS


def test_tied_parameters_are_held_once_on_one_stage() -> None:
    work = workload(tied=(TiedParam(0, 3, TIED),))
    for zero, mode in ((0, Mode.EAGER), (0, Mode.FUSED), (1, Mode.FUSED)):
        config = ParallelConfig(dp=2, zero_stage=zero, num_micro_batches=2)
        plain, tied = (memory(config, w, mode).rank(0, ranges(4), [0]).terms for w in (workload(), work))
        for name in ("parameters", "optimizer"):
            assert tied[name].mid == plain[name].mid * 3 / 4
        assert tied["gradients"].mid == 3 * GRADS
    # fully_shard: every block its own
    config = ParallelConfig(dp=2, zero_stage=1, num_micro_batches=2)
    plain, tied = (memory(config, w).rank(0, ranges(4), [0]).terms for w in (workload(), work))
    assert plain == tied
    thrice, config = (TiedParam(0, 2, TIED), TiedParam(2, 3, TIED)), ParallelConfig(num_micro_batches=2)
    for tied_params, held in ((thrice, 2), ((TiedParam(0, 0, TIED),), 3)):
        once = memory(config, workload(tied=tied_params)).rank(0, ranges(4), [0]).terms
        assert once["parameters"].mid == held * GRADS
    apart = memory(ParallelConfig(pp=2, num_micro_batches=2), work).stages(ranges(2, 2), [0, 0])
    assert [rank.terms["parameters"].mid for rank in apart] == [2 * GRADS] * 2


def test_two_stages_of_a_rank_have_a_copy_each() -> None:
    """ZBV: the first and the last stage are on the first rank, and each has its own tensor (`runtime.tied`)."""
    config = ParallelConfig(pp=2, num_micro_batches=2, schedule="ZBV", virtual_stages=2)
    plain, tied = (
        memory(config, w).stages(ranges(1, 1, 1, 1), [0] * 4)
        for w in (workload(), workload(tied=(TiedParam(0, 3, TIED),)))
    )
    assert [rank.terms for rank in plain] == [rank.terms for rank in tied]
    assert tied[0].terms["parameters"].mid == 2 * GRADS


# -- as Megatron has it ------------------------------------------------------------------------------------------------


def test_megatron_keeps_parameters_whole_and_gradients_from_the_start() -> None:
    config = ParallelConfig(dp=2, zero_stage=1)
    terms = memory(config, mode=Mode.FUSED).rank(0, ranges(4), [0]).terms
    assert terms["parameters"].mid == terms["gradients"].mid == 4 * GRADS == terms["optimizer"].mid
    assert "gathered parameters" not in terms
    eager = memory(config).rank(0, ranges(4), [0]).terms
    assert eager["parameters"].mid == 2 * GRADS and eager["gathered parameters"].mid == 4 * GRADS
    sharded = memory(replace(config, zero_stage=3), mode=Mode.FUSED).rank(0, ranges(4), [0]).terms
    assert sharded["parameters"].mid == 2 * GRADS and sharded["gathered parameters"].mid == 2 * GRADS
    in_place = memory(replace(config, zero_stage=0), workload(unit_saved=(1.0,) * 4), Mode.FUSED).rank(
        0, ranges(4), [0]
    )
    assert in_place.moment != REDUCTION and "communication buffers" not in in_place.terms


def activations(config: ParallelConfig, work: Workload, mode: Mode = Mode.EAGER, again: int = 0) -> list[float]:
    """By rank, with two units each."""
    chunks = ranges(*(len(work.units) // config.pp // config.virtual_stages,) * config.pp * config.virtual_stages)
    found = memory(config, work, mode).stages(chunks, [again] * len(chunks))
    return [rank.terms["activations"].mid for rank in found]


def test_megatron_lets_go_of_what_was_sent() -> None:
    """And holds what it received, which its layers keep for themselves."""
    config, kept = ParallelConfig(pp=2, num_micro_batches=4), KeptAtCut({}, {"none": SENT})
    assert activations(config, workload()) == [2 * (2 * SAVED + SENT), 2 * SAVED + SENT]
    assert activations(config, workload(), Mode.FUSED) == [4 * SAVED, 2 * SAVED + SENT]
    assert activations(config, workload(kept_at_cuts=(kept,) * 3), Mode.FUSED) == [4 * SAVED, 2 * SAVED]


def test_what_was_received_is_the_tensor_that_the_first_layer_keeps() -> None:
    """If it keeps it: here for its recompute. What was sent likewise is the one that the last layer keeps."""
    config, kept = ParallelConfig(pp=2, num_micro_batches=4), KeptAtCut({"none": SENT / 2}, {"full": SENT})
    work = workload(kept_at_cuts=(kept,) * 3, unit_kept=(SENT,) * 4)
    assert activations(config, work) == [2 * (2 * SAVED + SENT / 2), 2 * SAVED + SENT]
    assert activations(config, work, again=1) == [2 * (SAVED + SENT + SENT / 2), SAVED + SENT]
    assert activations(config, work, again=2) == [2 * (2 * SENT + SENT), 2 * SENT]
    # inside a stage nothing crosses an end: both layers keep their input
    assert activations(replace(config, pp=1), work, again=4) == [4 * SENT]


def test_a_kept_input_that_turned_around_within_a_rank_is_the_output_of_its_other_stage() -> None:
    config = ParallelConfig(pp=2, num_micro_batches=8, schedule="ZBV", virtual_stages=2)
    work = workload(unit_saved=(SENT,) * 4, unit_transient=(1000.0,) * 4, unit_kept=(SENT,) * 4)
    apart = replace(work, kept_at_cuts=(KeptAtCut({}, {"none": SENT}),) * 3)
    (outer, inner), (_, fewer) = activations(config, work), activations(config, apart)
    # 3 micro-batches of the first stage, of which 1 is in the second, too
    assert inner == 3 * (3 * SENT) + 2 * SENT and fewer == 3 * (2 * SENT) + SENT
    assert outer == 8 * SENT


@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.COMPILED, Mode.FUSED])
@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("gpt2", 1), ("mixtral-8x7b", 2)])
def test_layers_keep_what_they_receive(model: str, tp: int, mode: Mode) -> None:
    """As every recompute does that begins with the layer; without, only norms in float32 keep a copy of their own."""
    r = PlanRequest(load_model(model), Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 8, mode=mode)
    point = LayoutCache(r).get(tp, 1)
    assert point is not None and not point.workload.shared
    for size, kept in zip(point.workload.cut_bytes, point.workload.kept_at_cuts, strict=True):
        copies = mode is Mode.EAGER and model != "gpt2"
        assert kept.after["none"] == (0.0 if copies else size) and kept.after["offload"] == 0.0
        assert kept.after["full"] == kept.after["norms"] == size and not any(kept.before.values())


def test_one_tensor_stands_for_the_gradients_of_weights_of_one_shape() -> None:
    block = layer()
    two = replace(block, ops=block.ops * 2)  # as gate and up: one product of twice the size
    for work, count in ((workload(), 1), (workload(8), 1), (workload(block=two), 2)):
        terms = memory(ParallelConfig(), work, Mode.FUSED).rank(0, ranges(len(work.units)), [0]).terms
        assert terms["placeholders of gradients"].mid == count * GRADS
    frozen = replace(block, ops=tuple(replace(o, inputs=(o.inputs[0], replace(o.inputs[1], requires_grad=False)))
                                      for o in block.ops))  # fmt: skip
    assert (
        "placeholders of gradients"
        not in memory(ParallelConfig(), workload(block=frozen), Mode.FUSED).rank(0, ranges(4), [0]).terms
    )
    assert "placeholders of gradients" not in memory(ParallelConfig()).rank(0, ranges(4), [0]).terms


def test_gradients_of_16_bits() -> None:
    wide, narrow = precision_of("fp8"), precision_of("fp8-grad16")
    assert narrow == replace(wide, name="fp8-grad16", grad_bytes=2.0)
    for name in ("int8", "native-grad16", "fp32-grad16", "-grad16"):
        with pytest.raises(PinError, match=f"precision '{name}' is not known; use native, .*, or bf16-grad16"):
            precision_of(name)


def test_moments_of_16_bits() -> None:
    """Beside a float32 master: 8 bytes of state in place of 12, whatever gradients have."""
    for name in ("bf16", "fp8-grad16"):
        wide, short = precision_of(name), precision_of(f"{name}-mom16")
        assert short == replace(wide, name=f"{name}-mom16", state_bytes=8.0) and wide.state_bytes == 12.0
    with pytest.raises(PinError, match=r"precision 'bf16-mom16' is priced, but not executed.*nearest: bf16"):
        executed_precision("bf16-mom16")
    for name in ("native-mom16", "fp32-mom16", "bf16-mom16-grad16", "fp32-rem16", "bf16-rem16-mom16"):
        with pytest.raises(PinError, match=f"precision '{name}' is not known"):
            precision_of(name)


def test_masters_that_share_16_bits_with_parameters() -> None:
    """2 bytes of state less, where the optimizer has masters of its own; none where parameters are the masters."""
    wide, split = precision_of("bf16"), precision_of("bf16-rem16")
    assert (split.state_bytes, split.master_bytes) == (10.0, 2.0) and (wide.state_bytes, wide.master_bytes) == (12.0, 4)
    assert precision_of("fp8-grad16-mom16-rem16").state_bytes == 6.0
    config, weight = ParallelConfig(dp=4, zero_stage=1), ParamWork("w", 1000, "bfloat16", trainable=True)
    for megatron, saved in ((True, 2 * 1000 / 4), (False, 0.0)):
        states = [ParameterMemory(config, p, megatron).of(weight) for p in (wide, split)]
        assert sum(astuple(states[0])) - sum(astuple(states[1])) == saved
    with pytest.raises(PinError, match=r"'fp16-rem16': only a bfloat16 parameter is the upper half.*nearest: fp16$"):
        precision_of("fp16-rem16")
    with pytest.raises(PinError, match=r"'bf16-grad16-rem16' is priced, but not executed.*nearest: bf16-grad16$"):
        executed_precision("bf16-grad16-rem16")


def test_context_and_fragmentation_are_not_allocated_by_tensors() -> None:
    config = ParallelConfig(dp=8, num_micro_batches=2)
    (stage,) = estimated(Pricer(workload(), config, Costs(cluster(8, 8), None, Mode.FUSED)), [4], [0]).stages
    outside = stage.memory["context and communicators"].mid + stage.memory["fragmentation"].mid
    assert 0.0 < outside == pytest.approx(stage.memory_bytes.mid - stage.allocated_bytes.mid)


@settings(max_examples=60)
@given(
    st.sampled_from(["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"]),
    st.integers(0, 3),
    st.sampled_from([Mode.EAGER, Mode.FUSED]),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.floats(0.0, 1.5),
)
def test_the_bytes_of_a_search_are_the_sum_of_the_terms(
    schedule: str, zero: int, mode: Mode, recompute: list[int], guard: float
) -> None:
    """To the last digit, with and without offload, at any moment that is the fullest."""
    virtual = 1 if schedule == "1F1B" else 2
    chunks = ranges(2, 2) if virtual == 1 else ranges(1, 1, 1, 1)
    work = workload(unit_saved=(SAVED, 3 * SAVED, 1.0, SAVED / 3))
    for offload in ((), ("optimizer",)):
        config = ParallelConfig(
            dp=2, pp=2, num_micro_batches=4, zero_stage=zero, schedule=schedule, virtual_stages=virtual, offload=offload
        )
        model, room = MemoryModel(work, config, precision_of("native"), cluster(4, 4), mode), Room(1.0, guard=guard)
        for rank in range(2):
            found = model.rank(rank, chunks, recompute[: len(chunks)])
            words = rank, chunks, recompute[: len(chunks)], NOTHING, guard
            assert model.device_bytes(*words) == room.total_bytes(found.terms)
            assert sum(model.host_bytes(*words)) == room.total_bytes(found.host)


def test_what_the_first_part_of_a_backward_frees_does_not_wait() -> None:
    """Of the last unit, on the rank that has it, under schedules that split backwards."""
    assert waits("ZB-H1", 2, 4)[1] == (((1, 0), (2, 1)), ((2, 1),)) and waits("1F1B", 2, 4)[0] == (((2, 0),), ((2, 0),))
    spent = SAVED / 4

    def freed(rank: int, schedule: str, *cut: int, **kw: Any) -> float:
        c = ParallelConfig(pp=2, num_micro_batches=4, schedule=schedule, virtual_stages=len(cut) // 2, zero_stage=0)
        work = {"cut_bytes": (0.0,) * 3, **kw}
        found = [memory(c, workload(last_spent=n, **work)).rank(rank, ranges(*cut), [0] * len(cut)) for n in (0, spent)]
        was, now = (f.terms for f in found)
        assert {n for n in was if was[n] != now[n]} <= {"activations"}
        return was["activations"].mid - now["activations"].mid

    assert freed(0, "ZB-H1", 2, 2) == freed(1, "1F1B", 2, 2) == freed(1, "ZBV", 1, 1, 1, 1) == 0
    assert freed(1, "ZB-H1", 2, 2) == spent
    # if the last unit keeps most: the micro-batches of its chunk, by action of its rank
    row = actions("InterleavedZeroBubble", 2, 4, 2).held[1]
    held, waiting = row.held(np.array([0.0, 0.0, 0.0, SAVED])), row.waiting(3)
    wanted = held.max() - (held - spent * waiting).max()
    kept = (0.0, 0.0, 0.0, SAVED)
    assert 0 < wanted == freed(1, "InterleavedZeroBubble", 1, 1, 1, 1, unit_saved=kept, unit_kept=kept)


# -- experts, context parallelism --------------------------------------------------------------------------------------


def test_zero_shards_over_context_parallel_ranks_too() -> None:
    config = ParallelConfig(cp=4, zero_stage=3, num_micro_batches=2)
    assert memory(config).rank(0, ranges(4), [0]).terms["parameters"].mid == GRADS


def test_experts_without_replicas_are_neither_gathered_nor_reduced() -> None:
    work = workload(block=layer(expert=True))
    for zero in (0, 1, 3):
        config = ParallelConfig(dp=4, ep=4, zero_stage=zero, num_micro_batches=2)
        terms = memory(config, work).rank(0, ranges(4), [0]).terms
        assert terms["parameters"].mid == 4 * GRADS and "gathered parameters" not in terms
        pricer = Pricer(work, config, Costs(cluster(4), None, Mode.COMPILED))
        assert "dp_comm" not in estimated(pricer, [4], [0]).breakdown


def test_experts_are_reduced_over_their_own_replicas() -> None:
    work = workload(block=layer(expert=True))
    block = work.blocks["layer"]
    for dp, ep, group in ((4, 2, {"expert_replicas": GRADS}), (4, 4, {})):
        config = ParallelConfig(dp=dp, ep=ep, zero_stage=0)
        costs = Costs(cluster(4), None, Mode.COMPILED)
        prices = BlockPricer(work, config, costs, precision_of("native"))
        assert prices.cost(block, op_times(work, costs)["layer"]).reduced_bytes == group
    assert mesh_groups(ParallelConfig(dp=4, ep=2), ())["expert_replicas"].size == 2
