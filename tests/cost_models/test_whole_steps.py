"""What whole steps add to kernels and collectives: the host, older attention, power, kernels that run together, what
hides behind what, and the constants that say how much."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fused_steps import NODE, NODES, estimate, fused_workload, layer_of

from autoplan.catalog import load_model
from autoplan.config.parallel import Attention, Dispatcher, FusedLoss, Launch, Mode, ParallelConfig, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.kernels.operations import op_s
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.work import BlockWork, OpWork
from autoplan.errors import PinError, ProfileError
from autoplan.ops.saved import TensorFacts
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest


def attention(queries: int = 4096, dtype: str = "bfloat16") -> OpWork:
    one = TensorFacts((1, 32, queries, 128), dtype, True)
    flops = 4.0 * 32 * queries * queries * 128 / 2
    return OpWork("attention", (one,) * 3, (one,), (("causal", True),), flops, 4.0 * one.num_bytes)


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_older_attention_is_slower_and_the_more_so_on_newer_devices() -> None:
    def seconds(device: str, kernel: Attention, phase: str = "forward") -> float:
        options = RunOptions(attention=kernel)
        return op_s(attention(), phase, Cluster.parse(f"1x8x{device}").device, None, Mode.FUSED, options).mid

    for device in ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"):
        for phase in ("forward", "backward"):
            times = [seconds(device, k, phase) for k in (Attention.FUSED, Attention.FLASH2, Attention.FLASH1)]
            assert times == sorted(times)
            assert seconds(device, Attention.UNFUSED, phase) > 2 * times[0]
    slower = [seconds(d, Attention.FLASH2) / seconds(d, Attention.FUSED) for d in ("a100-sxm4-80gb", "h100-sxm5-80gb")]
    assert slower[0] == pytest.approx(1.0) and 1.5 < slower[1] < 2.0  # 0.56 of the speed (published pairs)


def test_attention_in_parts_adds_their_results() -> None:
    whole = attention(65536)
    works = [replace(whole, attrs=(("causal", True), ("context_parts", n))) for n in (1, 2, 8)]
    times = [op_s(work, "forward", NODE.device, None, Mode.FUSED).mid for work in works]
    assert times[0] == op_s(whole, "forward", NODE.device, None, Mode.FUSED).mid
    joined = 10.0 * whole.outputs[0].num_elements / NODE.device.memory_bytes_per_s / Constants.shipped().memory_share
    assert times[1] - times[0] == pytest.approx(2 * joined) and times[2] - times[0] == pytest.approx(8 * joined)


def test_modes_bring_their_own_attention() -> None:
    assert RunOptions().attention_in(Mode.FUSED) is Attention.FUSED
    assert RunOptions().attention_in(Mode.EAGER) is RunOptions().attention_in(Mode.COMPILED) is Attention.FLASH2
    assert RunOptions(attention=Attention.UNFUSED).attention_in(Mode.FUSED) is Attention.UNFUSED


def test_a_power_cap_slows_products_by_the_exponent() -> None:
    big = OpWork(
        "linear", (TensorFacts((16384, 16384), "bfloat16", True),) * 2,
        (TensorFacts((16384, 16384), "bfloat16", True),), (), 2.0 * 16384**3, 3 * 2 * 16384.0**2,
    )  # fmt: skip
    capped = Cluster.parse("1x8xh100-sxm5-80gb@power=500")
    assert capped.device.power_w == 500
    slow_s, fast_s = (op_s(big, "forward", c.device, None, Mode.FUSED).mid for c in (capped, NODE))
    assert slow_s / fast_s == pytest.approx((700 / 500) ** Constants.shipped().power_exponent, rel=0.02)


def bytes_together(block: BlockWork, phase: str, ops: frozenset[str]) -> float:
    return sum(dict(o.attrs).get(f"fused_{phase}_bytes", 0) for o in block.ops if o.op in ops)  # type: ignore[misc]


def test_what_runs_together_reads_and_writes_once() -> None:
    """Llama's gate: silu(gate) * up reads two tensors and writes one; GPT's gelu reads one and writes one."""
    swiglu = layer_of(fused_workload("llama-3.1-8b"))
    inner, token = 14336, 2
    forward = next(
        2 * dict(o.attrs)["fused_forward_bytes"]
        for o in swiglu.ops
        if o.op == "silu"  # type: ignore[operator]
    )  # silu and mul, half each
    assert forward == 3 * 1024 * inner * token
    backward = next(2 * dict(o.attrs)["fused_backward_bytes"] for o in swiglu.ops if o.op == "silu")  # type: ignore[operator]
    assert backward == 5 * 1024 * inner * token  # its gradient and both inputs read, two gradients written
    gelu = next(o for o in layer_of(fused_workload("gpt3-175b")).ops if o.op == "gelu")
    kernel = [o for o in layer_of(fused_workload("gpt3-175b")).ops if dict(o.attrs).get("fused_forward_bytes")]
    assert gelu in kernel
    wide = 4 * 12288 * 1024 * token
    assert dict(gelu.attrs)["fused_forward_bytes"] <= 2 * wide


def test_a_fused_loss_reads_logits_as_they_are_and_writes_their_gradient_in_place() -> None:
    """8,192 tokens of Llama's vocabulary: 2.1 GB of logits. Without it they are cast to 4 bytes, which the loss keeps
    and which get a gradient; with it 2 bytes are kept and become their own gradient."""
    config = ParallelConfig(dp=8, zero_stage=3, recompute="full")
    logits = 8192 * 128256
    for mode in (Mode.EAGER, Mode.COMPILED, Mode.FUSED):
        plain, fused = (
            estimate(config, options=RunOptions(fused_loss=loss), mode=mode, seq_len=8192)
            for loss in (FusedLoss.NO, FusedLoss.FLASH)
        )
        assert fused.step_time_s.mid < plain.step_time_s.mid
        held = {name: max(s.allocated_bytes.mid for s in e.stages) for name, e in (("plain", plain), ("fused", fused))}
        # Megatron's own loss keeps 4 bytes in place of the logits; then gradients of the head, not the loss, are most
        least = 1.0 if mode is Mode.FUSED else 2.5
        assert held["plain"] - held["fused"] > least * logits, (mode, held)
        activations = fused.stages[0].memory["activations"].mid + fused.stages[0].memory["transient"].mid
        assert activations > 2 * logits * 0.7, (mode, activations)  # they are not for nothing


def test_the_losses_of_pytorch_torchtune_and_liger_hold_what_they_hold() -> None:
    """Bytes per logit at the peak. PyTorch: log-probabilities, their gradient and that of the logits, 4 each; in chunks
    of an eighth the first and a quarter of the others; with the head's product in the loss none but hidden states."""
    config = ParallelConfig(dp=8, zero_stage=3, recompute="full")
    held, kept = {}, 16 * 2048 * 2 / 128256  # the inputs of layers
    for loss in FusedLoss:
        e = estimate(config, options=RunOptions(fused_loss=loss), mode=Mode.EAGER, seq_len=8192, model="llama-3.2-1b")
        both = (s.memory["activations"].mid + s.memory["transient"].mid for s in e.stages)
        held[loss] = max(both) / (8192 * 128256)
    assert held[FusedLoss.LINEAR] < 2  # a layer holds most
    assert held[FusedLoss.FLASH] == pytest.approx(2.5 + kept, abs=0.2)
    assert held[FusedLoss.TORCH] == pytest.approx(12 + kept, rel=0.05)
    assert held[FusedLoss.CHUNKED] == pytest.approx(4 + 1 + 2 + kept, rel=0.1)
    assert held[FusedLoss.NO] == pytest.approx(8 + kept, rel=0.05)


def test_a_loss_reads_its_logits_more_than_once() -> None:
    logits = TensorFacts((4096, 128256), "float32", True)
    loss = OpWork("cross_entropy_sum", (logits,), (TensorFacts((), "float32", True),), (), 1e9, float(logits.num_bytes))
    bandwidth = NODE.device.memory_bytes_per_s * Constants.shipped().memory_share
    for mode, fused, passes in (
        (Mode.FUSED, FusedLoss.NO, 8 + 2),
        (Mode.FUSED, FusedLoss.COMPILED, 4 + 1),
        (Mode.FUSED, FusedLoss.FLASH, 1 + 2),
        (Mode.FUSED, FusedLoss.ONLINE, 3 + 2),
        (Mode.EAGER, FusedLoss.NO, 4 + 3),
        (Mode.EAGER, FusedLoss.TORCH, 4 + 3),
        (Mode.EAGER, FusedLoss.CHUNKED, 7 + 11),
        (Mode.EAGER, FusedLoss.LINEAR, 3 + 0),
        (Mode.COMPILED, FusedLoss.CHUNKED, 2 + 2),
        (Mode.COMPILED, FusedLoss.NO, 2 + 2),
        (Mode.COMPILED, FusedLoss.COMPILED, 2 + 2),
    ):
        options = RunOptions(fused_loss=fused)
        both = sum(op_s(loss, phase, NODE.device, None, mode, options).mid for phase in ("forward", "backward"))
        assert both == pytest.approx(passes * logits.num_bytes / bandwidth, rel=0.05)


def test_a_norm_is_one_kernel_however_it_is_written() -> None:
    """RMSNorm as Hugging Face writes it (to float32, square, mean, rsqrt, two products, back): with the addition before
    it two tensors are read and two written, not the 36 bytes per element of its operations one by one."""
    block = layer_of(fused_workload("llama-3.1-8b"))
    norms = frozenset(("to", "pow_scalar", "mean", "rsqrt"))
    per_element = bytes_together(block, "forward", norms) / (1024 * 4096)
    assert 0 < per_element < 12
    alone = sum(o.moved_bytes for o in block.ops if o.op in norms) / (1024 * 4096)
    assert alone > 40


def test_the_head_keeps_16_bits() -> None:
    work = fused_workload("llama-3.1-8b", precision="fp8")
    dtypes = {
        name: {dict(o.attrs).get("matmul_dtype") for o in block.ops if o.op == "linear"}
        for name, block in work.blocks.items()
    }
    assert dtypes.pop("head") == {None} and {"float8"} in dtypes.values()


# -- what hides --------------------------------------------------------------------------------------------------------


def test_overlap_hides_the_share_that_the_constants_say() -> None:
    config = ParallelConfig(tp=8, num_micro_batches=8)
    plain, hidden = (estimate(config, options=RunOptions(overlap=o)) for o in (frozenset(), frozenset({"tp"})))
    share = Constants.shipped().tp_hidden
    assert hidden.breakdown["tp_comm"].mid == pytest.approx((1 - share) * plain.breakdown["tp_comm"].mid)


def test_8_bit_products_are_gathered_in_8_bits_by_transformer_engine() -> None:
    config = ParallelConfig(tp=8, num_micro_batches=8)

    def tp_s(precision: str, mode: Mode) -> float:
        request = PlanRequest(load_model("llama-3.1-8b"), NODE, 8192, 8, precision=precision, mode=mode)
        return estimate_config(request, config).estimate.breakdown["tp_comm"].mid

    assert 0.6 < tp_s("fp8", Mode.FUSED) / tp_s("bf16", Mode.FUSED) < 0.9  # what is reduced keeps 16 bits
    assert tp_s("fp8", Mode.COMPILED) == pytest.approx(tp_s("bf16", Mode.COMPILED), rel=0.05)


def test_weights_of_8_bit_products_may_be_gathered_in_8_bits() -> None:
    config = ParallelConfig(dp=64, zero_stage=3)
    slow = NODES.with_(nic=25)

    def gathered_s(narrow: bool, precision: str) -> float:
        options = RunOptions(narrow_gather=narrow)
        request = PlanRequest(load_model("llama-3.1-8b"), slow, 2048, 64, precision=precision, options=options)
        return estimate_config(request, config).estimate.breakdown["dp_comm"].mid

    assert gathered_s(True, "fp8") < 0.85 * gathered_s(False, "fp8")
    assert gathered_s(True, "bf16") == gathered_s(False, "bf16")


def test_a_ring_hides_behind_the_attention_that_it_feeds() -> None:
    config = ParallelConfig(cp=8, num_micro_batches=2)
    for seq_len, hidden in ((131072, True), (2048, False)):
        plain, ring = (
            estimate(
                config, NODES.with_(nodes=1), RunOptions(overlap=o, launch=Launch.GRAPHS), seq_len=seq_len
            ).breakdown.get("cp_comm")
            for o in (frozenset(), frozenset({"cp"}))
        )
        assert plain is not None and plain.mid > 0
        assert (ring is None or ring.mid == 0) if hidden else (ring is not None and 0 < ring.mid < plain.mid)


def test_exchanges_of_experts_hide_behind_as_much_computing_as_there_is() -> None:
    """Half a block's computing hides nearly all of them over NVLink; over a slow network the rest stays."""
    config = ParallelConfig(dp=64, ep=64, num_micro_batches=4)
    half = Constants.shipped().with_({"ep_hidden": 0.5})

    def exchanged_s(nic: int, overlap: frozenset[str], contention: float, config: ParallelConfig = config) -> float:
        options = RunOptions(overlap=overlap, dispatcher=Dispatcher.FLEX, launch=Launch.FULL_GRAPHS)
        found = estimate(
            config,
            NODES.with_(nic=nic),
            options,
            mode=Mode.FUSED,
            model="qwen3-30b-a3b",
            constants=half.with_({"contention": contention}),
        )
        return found.breakdown["ep_comm"].mid

    for nic, least, most in ((3200, 0.0, 0.2), (50, 0.7, 0.97)):
        plain = exchanged_s(nic, frozenset(), 0.0)
        beside, slowed = (exchanged_s(nic, frozenset({"ep"}), c) for c in (0.0, 0.2))
        assert least * plain <= beside < most * plain
        assert slowed == pytest.approx(beside + 0.2 * (plain - beside))  # what hides slows the computing down
    both = replace(config, pp=2, dp=32, ep=32, schedule="DualPipe", num_micro_batches=8)
    once = replace(both, schedule="1F1B")
    hidden = [exchanged_s(100, frozenset({"ep"}), 0.0, c) / exchanged_s(100, frozenset(), 0.0, c) for c in (both, once)]
    assert hidden[0] < hidden[1] < 1  # all computing hides them where a forward always runs beside a backward


def test_transfers_of_an_interleaved_schedule_may_overlap() -> None:
    config = ParallelConfig(
        dp=8, pp=8, num_micro_batches=16, schedule="Interleaved1F1B", virtual_stages=4, micro_batch_size=2
    )
    plain, hidden = (estimate(config, NODES, RunOptions(overlap=o)) for o in (frozenset(), frozenset({"pp"})))
    assert hidden.breakdown["pp_comm"].mid < 0.5 * plain.breakdown["pp_comm"].mid
    once = replace(config, schedule="1F1B", virtual_stages=1)
    plain, hidden = (estimate(once, NODES, RunOptions(overlap=o)) for o in (frozenset(), frozenset({"pp"})))
    assert hidden.step_time_s.mid == plain.step_time_s.mid  # nothing else to do in the meantime


def test_virtual_stages_give_zero_more_to_hide_behind() -> None:
    """The other chunks' micro-batches of the last round come after a chunk's gradients are there."""
    slow = NODES.with_(nic=50)
    exposed = []
    for virtual in (1, 2, 4):
        schedule = "1F1B" if virtual == 1 else "Interleaved1F1B"
        config = ParallelConfig(tp=4, dp=4, pp=4, num_micro_batches=8, virtual_stages=virtual, schedule=schedule)
        exposed.append(estimate(config, slow, constants=Constants()).breakdown["dp_comm"].mid)
    assert exposed[0] > 1.2 * exposed[1] and exposed[1] > 1.1 * exposed[2] > 0


@pytest.mark.parametrize(("stage", "slows", "other"), [(3, "block_contention", "contention"), (1, "contention", "")])
def test_what_hides_slows_down_what_it_hides_behind(stage: int, slows: str, other: str) -> None:
    """Within a node ZeRO's traffic hides behind the layers, and a share of its time is paid all the same."""
    config = ParallelConfig(dp=8, zero_stage=stage)
    plain = Constants().with_({slows: 0.0, **({other: 0.9} if other else {})})
    free, shared = (estimate(config, constants=plain.with_({slows: c})) for c in (0.0, 0.3))
    hardly = estimate(config, NODE.with_(scaleup=2000), constants=plain.with_({slows: 0.3}))
    added = shared.step_time_s.mid - free.step_time_s.mid
    assert added > 0.001 * free.step_time_s.mid
    assert hardly.breakdown["dp_comm"].mid < shared.breakdown["dp_comm"].mid
    whole = estimate(config, constants=plain.with_({slows: 1.0})).step_time_s.mid  # as if nothing hid
    assert added == pytest.approx(0.3 * (whole - free.step_time_s.mid), rel=1e-6)
    same = estimate(config, constants=plain.with_({other: 0.1})) if other else free
    assert same.step_time_s == free.step_time_s


def test_zero_that_does_not_overlap_is_paid_in_full() -> None:
    """Megatron without --overlap-grad-reduce and --overlap-param-gather."""
    config = ParallelConfig(dp=8, num_micro_batches=4)
    beside, after = (estimate(config, options=RunOptions(overlap_zero=o)) for o in (True, False))
    costs = Costs(NODE, mode=Mode.FUSED)
    params = load_model("llama-3.1-8b").num_params
    moved = [
        costs.collective_s(kind, n * params, Group(8, 1)).mid for kind, n in (("all_gather", 2), ("reduce_scatter", 4))
    ]
    assert after.breakdown["dp_comm"].mid == pytest.approx(sum(moved), rel=0.1)  # layer by layer: smaller messages
    assert beside.breakdown["dp_comm"].mid < 0.5 * after.breakdown["dp_comm"].mid
    assert RunOptions().overlap_zero and RunOptions().overlap_gather
    gathers = estimate(config, options=RunOptions(overlap_gather=False)).breakdown["dp_comm"].mid
    assert beside.breakdown["dp_comm"].mid + 0.5 * moved[0] < gathers < after.breakdown["dp_comm"].mid


def test_zero_0_reduces_beside_the_backward() -> None:
    """Megatron's --overlap-grad-reduce without a distributed optimizer, and emitted programs."""
    config = ParallelConfig(dp=8, num_micro_batches=4, zero_stage=0)
    beside, after = (estimate(config, options=RunOptions(overlap_zero=o)) for o in (True, False))
    costs = Costs(NODE, mode=Mode.FUSED)
    whole = costs.collective_s("all_reduce", 4 * load_model("llama-3.1-8b").num_params, Group(8, 1)).mid
    assert after.breakdown["dp_comm"].mid == pytest.approx(whole, rel=0.05)
    assert 0 < beside.breakdown["dp_comm"].mid < 0.5 * whole
    assert beside.breakdown["dp_comm"].tag is after.breakdown["dp_comm"].tag is not Tag.EXACT
    assert beside.step_time_s.mid < after.step_time_s.mid
    for mode in (Mode.EAGER, Mode.COMPILED):
        one, other = (estimate(config, options=RunOptions(overlap_zero=o), mode=mode) for o in (True, False))
        assert one.breakdown["dp_comm"].mid < 0.5 * other.breakdown["dp_comm"].mid
        split = replace(config, pp=2, dp=4, schedule="ZB-H1")
        one, other = (estimate(split, options=RunOptions(overlap_zero=o), mode=mode) for o in (True, False))
        assert one.step_time_s == other.step_time_s
    sharded = estimate(replace(config, zero_stage=1))  # gathers too, and has less to reduce
    assert beside.breakdown["dp_comm"].mid == pytest.approx(sharded.breakdown["dp_comm"].mid, rel=0.5)


def test_zero_0_reduces_after_a_split_backward() -> None:
    """Emitted programs reduce beside a backward in one piece only (`runtime.zero.apply_zero`)."""
    work, config = fused_workload("llama-3.1-8b"), ParallelConfig(dp=4, pp=2, num_micro_batches=4, zero_stage=0)
    costs = Costs(NODE, Profile("p", "cuda", 8, 1))
    whole = Pricer(work, config, costs)
    chunks, none = (16, 16), (0, 0)
    assert not any(b.reduced_bytes for b in whole.blocks.values())
    split = whole.under("ZB-H1", 1)
    assert any(b.reduced_bytes for b in split.blocks.values())
    alone = Pricer(work, replace(config, schedule="ZB-H1"), costs)
    assert split.step_s(chunks, none) == alone.step_s(chunks, none)
    assert whole.under("GPipe", 1).blocks is whole.blocks


def test_zero_3_parameter_by_parameter_costs_latency_and_hides_nothing() -> None:
    """DeepSpeed until 2022: what is sent is the same, in more and smaller messages with a copy per rank."""
    config = ParallelConfig(dp=8, num_micro_batches=2, zero_stage=3)
    usual, by_tensor = (estimate(config, options=RunOptions(zero_by_tensor=b)) for b in (False, True))
    costs, sent = Costs(NODE, mode=Mode.FUSED), 0.0
    for parameter in load_model("llama-3.1-8b").params.values():
        size = 2.0 * math.prod(parameter.shape)
        for kind, factor in (("all_gather", 2), ("all_gather", 2), ("reduce_scatter", 4)):
            sent += costs.collective_s(kind, size * factor / 2, Group(8, 1)).mid + 8 * 5e-6
    assert by_tensor.breakdown["dp_comm"].mid == pytest.approx(2 * sent, rel=0.02)
    assert usual.breakdown["dp_comm"].mid < 0.5 * by_tensor.breakdown["dp_comm"].mid
    whole = replace(config, zero_stage=1)
    assert estimate(whole, options=RunOptions(zero_by_tensor=True)).step_time_s == estimate(whole).step_time_s


def test_attention_stays_within_packed_documents() -> None:
    device = NODE.device

    work = attention(8192)

    def seconds(options: RunOptions) -> float:
        return op_s(work, "forward", device, None, Mode.FUSED, options).mid

    whole, short = seconds(RunOptions()), seconds(RunOptions(document_len=256))
    assert short < 0.2 * whole
    assert seconds(RunOptions(document_len=8192)) == seconds(RunOptions(document_len=1 << 20)) == whole
    unfused = RunOptions(attention=Attention.UNFUSED)  # all scores are there, whatever a mask hides
    assert seconds(replace(unfused, document_len=256)) == seconds(unfused)
    for bad in (0, -1, 2.5, True):
        with pytest.raises(PinError, match=f"document_len={bad} must be a whole number of at least 1 token"):
            RunOptions(document_len=bad)  # type: ignore[arg-type]


def test_all_layers_recomputed_cost_the_same_however_it_is_said() -> None:
    """ZeRO 3 over a slow network: its traffic hides behind what is computed again, layer by layer."""
    slow = NODES.with_(nic=50)
    config = ParallelConfig(dp=64, zero_stage=3, recompute="full")
    full = estimate(config, slow, seq_len=2048)
    listed, most = (estimate(replace(config, recompute=(n,)), slow, seq_len=2048) for n in (32, 31))
    assert full.step_time_s == listed.step_time_s and full.breakdown == listed.breakdown
    assert most.step_time_s.mid <= full.step_time_s.mid
    none = estimate(replace(config, recompute="none"), slow, seq_len=2048)
    forward_s = none.stages[0].forward_s.mid
    assert full.step_time_s.mid - none.step_time_s.mid < 0.8 * forward_s  # a part of it hides traffic


# -- options and constants ---------------------------------------------------------------------------------------------


def test_bad_options_and_constants_are_named(tmp_path: Path) -> None:
    with pytest.raises(PinError, match=r"overlap of 'dp' is not known; use tp, ep, pp, cp"):
        RunOptions(overlap=frozenset({"dp"}))
    with pytest.raises(ProfileError, match=r"constant 'speed' is not known; known are sustained_ampere"):
        Constants().with_({"speed": 1.0})
    with pytest.raises(ProfileError, match=r"memory_share=3.0 is a share"):
        Constants(memory_share=3.0)
    with pytest.raises(ProfileError, match=r"host_eager_s=-1.0 must be a finite number"):
        Constants(host_eager_s=-1.0)
    path = tmp_path / "constants.json"
    with pytest.raises(ProfileError, match="cannot be read"):
        Constants.load(path)
    path.write_text(json.dumps({"constants": {"overlap": "much"}}))
    with pytest.raises(ProfileError, match=r"overlap='much' is not a number"):
        Constants.load(path)
    path.write_text(json.dumps({"constants": {"overlap": 10**400}}))
    with pytest.raises(ProfileError, match="overlap is too large"):
        Constants.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ProfileError, match="cannot be read: it is nested too deep"):
        Constants.load(path)
    path.write_text(json.dumps({"constants": {"overlap": {"value": 0.7, "n": 12}, "tp_hidden": 0.2}}))
    loaded = Constants.load(path)
    assert (loaded.overlap, loaded.tp_hidden) == (0.7, 0.2)
    assert hash(loaded) == hash(Constants.load(path)) and loaded == Constants.load(path)


def test_the_shipped_constants_are_all_there() -> None:
    """Each by name with where it comes from; nothing in the file that the model does not have."""
    assert Constants.shipped().values.keys() == Constants().values.keys()
    assert Constants.shipped().sustained("ada", "fp8") == Constants.shipped().sustained_ampere
    assert Constants.shipped().sustained("blackwell", "fp4") == Constants.shipped().sustained_blackwell_fp8


def test_what_is_stated_is_what_was_wrong_elsewhere(tmp_path: Path) -> None:
    """Catalog prices of devices that timings hold: the interval of held-out runs, by class of model."""
    path = tmp_path / "constants.json"
    intervals = {
        "dense": {"low": 0.9, "high": 1.2, "covered": 0.9},
        "experts": {"low": 0.7, "high": 1.5},
        "host": {"low": 0.5, "high": 2.0},
        "dense of blackwell": {"low": 0.8, "high": 1.4},
        "network": {"low": 0.6, "high": 1.7},
    }
    path.write_text(json.dumps({"constants": {}, "step_intervals": intervals}))
    constants = Constants.load(path)
    step = estimate(ParallelConfig(dp=8), constants=constants).step_time_s
    assert (step.low, step.high) == (pytest.approx(0.9 * step.mid), pytest.approx(1.2 * step.mid))
    waits = estimate(ParallelConfig(dp=8), constants=constants, seq_len=128)
    assert waits.breakdown["launch"].mid > 0.2 * waits.step_time_s.mid  # for the host: a class of its own
    assert waits.step_time_s.low == pytest.approx(0.5 * waits.step_time_s.mid)
    experts = estimate(ParallelConfig(dp=8, ep=8), constants=constants, model="mixtral-8x7b").step_time_s
    assert experts.high == pytest.approx(1.5 * experts.mid)
    young = Cluster.parse("1x8xb200-sxm-180gb")  # of a family with an interval of its own, which experts lack
    step = estimate(ParallelConfig(dp=8), young, constants=constants).step_time_s
    assert (step.low, step.high) == (pytest.approx(0.8 * step.mid), pytest.approx(1.4 * step.mid))
    experts = estimate(ParallelConfig(dp=8, ep=8), young, constants=constants, model="mixtral-8x7b").step_time_s
    assert experts.high == pytest.approx(1.5 * experts.mid)
    slow = Cluster.parse("2x8xh100-sxm5-80gb@nic=10")  # a tenth of the usual network, which gradients wait for
    step = estimate(ParallelConfig(dp=16), slow, constants=constants)
    assert step.breakdown["dp_comm"].mid > 0.15 * step.step_time_s.mid > 0.0
    assert step.step_time_s.high == pytest.approx(1.7 * step.step_time_s.mid)
    path.write_text(json.dumps({"constants": {}, "step_intervals": {"dense": {"low": 0.9, "high": 1.2}}}))
    step = estimate(ParallelConfig(dp=16), slow, constants=Constants.load(path)).step_time_s
    assert step.high == pytest.approx(1.2 * step.mid)  # of a file that does not know the class
    other = estimate(ParallelConfig(dp=8), Cluster.parse("1x8xmi300x-192gb"), constants=constants).step_time_s
    assert other.high > 1.3 * other.mid  # no timings hold it
    path.write_text(json.dumps({"constants": {}, "step_intervals": {"dense": {"low": 1.1, "high": 1.2}}}))
    with pytest.raises(ProfileError, match=r"the interval dense, from 1.1 to 1.2, must contain 1"):
        Constants.load(path)
