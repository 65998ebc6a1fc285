"""The host's time to start the kernels of a pass: modules, operations, experts, compiled blocks, a host that waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fused_steps import NODE, estimate, fused_workload, layer_of

from autoplan.config.parallel import Attention, Launch, Mode, ParallelConfig, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.kernels.operations import roofline_s
from autoplan.cost_models.kernels.products import has_one_product
from autoplan.cost_models.routing import Routing
from autoplan.cost_models.time.host import adds_s, host_s
from autoplan.cost_models.work import BlockWork, CommWork, OpWork
from autoplan.ops.experts import HOST_OPS
from autoplan.ops.record import OpKind
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_kind, op_record


def linear() -> OpWork:
    x, w = TensorFacts((8, 64), "bfloat16", True), TensorFacts((64, 64), "bfloat16", True)
    return OpWork("linear", (x, w), (x,), (), 2.0 * 8 * 64 * 64, 1e4)


def test_the_host_starts_kernels_not_views_and_experts_cost_their_own() -> None:
    tensor = TensorFacts((8, 64), "bfloat16", True)
    add, view = OpWork("add", (tensor, tensor), (tensor,), (), 1.0, 1.0), OpWork("reshape", (tensor,), (), (), 0, 0)
    frozen = OpWork("mul", (replace(tensor, requires_grad=False),), (tensor,), (), 1.0, 1.0)
    experts = replace(linear(), op="experts")
    narrow = replace(linear(), attrs=(("matmul_dtype", "float8"),))
    ops, c = (linear(), add, view, frozen, experts), Constants.shipped()

    def seconds(
        mode: Mode, launch: Launch = Launch.ASYNC, phase: str = "forward", some: tuple[OpWork, ...] = ops
    ) -> float:
        return host_s(BlockWork("b", some, (), ()), phase, Costs(NODE, None, mode, RunOptions(launch=launch))).mid

    assert seconds(Mode.EAGER) == pytest.approx((3 + HOST_OPS["forward"]) * c.host_eager_s)
    assert seconds(Mode.EAGER, phase="backward") == pytest.approx((2 * 2 + HOST_OPS["backward"]) * c.host_eager_s)
    assert seconds(Mode.FUSED) == pytest.approx(c.host_fused_s + c.host_experts_s)
    assert seconds(Mode.FUSED, Launch.BLOCKING) == pytest.approx(3 * c.host_blocking_s + c.host_experts_s)
    left = c.host_experts_s - c.host_router_s  # graphs hold the router and what prepares the dispatch
    assert 0 < left < c.host_experts_s
    assert seconds(Mode.FUSED, Launch.GRAPHS) == pytest.approx(left)
    assert seconds(Mode.FUSED, Launch.ROUTER_GRAPHS) == pytest.approx(c.host_fused_s + left)
    assert seconds(Mode.FUSED, Launch.FULL_GRAPHS) == 0.0
    assert seconds(Mode.FUSED, some=(narrow,)) == pytest.approx(c.host_fp8 * c.host_fused_s)
    routing = replace(linear(), op="topk")  # no module: an operation of its own
    assert seconds(Mode.FUSED, some=(routing,)) == seconds(Mode.EAGER, some=(routing,)) == c.host_eager_s
    row, weight = experts.inputs[0], TensorFacts((4, 64, 64), "bfloat16", True)
    four = replace(experts, inputs=(row, row, row, weight, weight), attrs=(("matmul_dtype", "float8"),))
    wide = replace(four, attrs=())
    assert seconds(Mode.FUSED, some=(wide,)) == pytest.approx(c.host_experts_s + 4 * c.host_expert_s)
    assert seconds(Mode.FUSED, some=(four,)) == pytest.approx(c.host_fp8 * (c.host_experts_s + 4 * c.host_expert_s))
    assert seconds(Mode.EAGER, Launch.BLOCKING, some=(experts,)) == pytest.approx(c.host_experts_s)
    # one kernel does the products of all experts on Hopper in bfloat16, if nothing is fused by Megatron
    assert seconds(Mode.EAGER, some=(wide,)) == pytest.approx(HOST_OPS["forward"] * c.host_eager_s)
    in_32_bits = replace(wide, inputs=tuple(replace(t, dtype="float32") for t in wide.inputs))
    assert seconds(Mode.EAGER, some=(in_32_bits,)) == pytest.approx((HOST_OPS["forward"] + 4 * 2) * c.host_eager_s)
    some = BlockWork("b", ops, (), ())
    assert host_s(some, "forward", Costs(Cluster.local(2))).mid == 0.0  # a CPU runs what it starts
    sent = tuple(CommWork("x", "all_reduce", 1e6, "tp", "forward", routing=r) for r in (None, Routing(2)))
    # graphs hold those that are not made for experts
    for launch, more in ((Launch.ASYNC, 2), (Launch.ROUTER_GRAPHS, 2), (Launch.GRAPHS, 1), (Launch.FULL_GRAPHS, 0)):
        costs = Costs(NODE, None, Mode.FUSED, RunOptions(launch=launch))
        for phase, n in (("forward", more), ("backward", 0)):
            with_them, without = (host_s(replace(some, comms=c), phase, costs).mid for c in (sent, ()))
            assert with_them - without == pytest.approx(n * c.host_comm_s)


def test_a_compiled_block_is_called_once_a_pass() -> None:
    """Kernels that a compiler makes start with the call; products start by themselves."""
    tensor = TensorFacts((8, 64), "bfloat16", True)
    add, c = OpWork("add", (tensor, tensor), (tensor,), (), 1.0, 1.0), Constants.shipped()
    frozen = replace(add, inputs=tuple(replace(t, requires_grad=False) for t in add.inputs))

    def seconds(ops: tuple[OpWork, ...], phase: str, mode: Mode = Mode.COMPILED) -> float:
        return host_s(BlockWork("b", ops, (), ()), phase, Costs(NODE, None, mode)).mid

    assert seconds((linear(), add), "forward") == pytest.approx(c.host_call_s + c.host_eager_s)
    assert seconds((linear(), add), "backward") == pytest.approx(c.host_call_s + 2 * c.host_eager_s)
    assert seconds((add,), "forward") == seconds((frozen,), "backward") == 0.0  # while the device is busy
    assert seconds((linear(), add), "forward", Mode.EAGER) == pytest.approx(2 * c.host_eager_s)


def test_where_one_kernel_of_torch_does_the_products_of_experts() -> None:
    """The same rule as in the runtime (`autoplan.torch_kernels`); Megatron's products are one per expert."""
    row, gate_up, down = (TensorFacts(s, "bfloat16", True) for s in ((512, 64), (8, 256, 64), (8, 64, 128)))
    work = OpWork("experts", (row, row, row, gate_up, down), (row,), (), 4.0 * 512 * 64 * 128 * 3, 1e6)
    hopper, ampere = NODE.device, Cluster.parse("1x8xa100-sxm4-80gb").device
    assert has_one_product(work, Mode.EAGER, hopper) and has_one_product(work, Mode.COMPILED, hopper)
    assert not has_one_product(work, Mode.FUSED, hopper) and not has_one_product(work, Mode.EAGER, ampere)
    times = {mode: roofline_s(work, "forward", hopper, mode).mid for mode in (Mode.EAGER, Mode.FUSED)}
    assert times[Mode.EAGER] < times[Mode.FUSED]  # whose products start and end by themselves


def started(model: str, kind: str = "layer") -> list[str]:
    """What the host starts for a block, where modules are Megatron's."""
    work = fused_workload(model)
    block = layer_of(work) if kind == "layer" else work.blocks[work.units[-1][-1]]
    counted = [op.op for k, op in enumerate(block.ops) if k not in block.joined_ops]
    return [op for op in counted if not op_record(op).as_view and op_kind(op) is not OpKind.ELEMENTWISE]


def test_modules_of_megatron_start_their_products_together() -> None:
    """linear_qkv with its norm, attention, linear_proj, linear_fc1 with its norm, linear_fc2: gated or not, grouped
    heads or not, a layer is five modules; the same products one by one are eight."""
    for model in ("llama-3.1-8b", "gpt3-175b"):
        names = started(model)
        products = [op for op in names if op in ("linear", "matmul")]
        assert len(products) == 4 and names.count("attention") == 1 and len(names) == 5, (model, names)
    assert started("llama-3.1-8b", "head")[0] == "linear"
    work = layer_of(fused_workload("llama-3.1-8b"))
    c = Constants.shipped()
    together, apart = (
        host_s(replace(work, joined_ops=joined), "forward", Costs(NODE, None, Mode.FUSED)).mid
        for joined in (work.joined_ops, frozenset[int]())
    )
    assert together == pytest.approx(5 * c.host_fused_s) and 8 * c.host_fused_s < apart < 9 * c.host_fused_s
    eager = Costs(NODE, None, Mode.EAGER)  # nobody joins what is written op by op
    alone = replace(work, joined_ops=frozenset())
    assert host_s(work, "forward", eager).mid == host_s(alone, "forward", eager).mid


def test_a_host_that_waits_for_each_kernel_pays_for_each() -> None:
    """GPT, forward: two norms, four products, attention (two products, softmax, dropout), and four kernels of additions
    and GeLU; backward: two per product, six of attention. Llama: rotary embeddings are ten operations, keys, values and
    up no products of their own. Gradients of 12 parameters, or of 6, are added up: DeepSpeed's casts them first."""
    c = Constants.shipped()

    def kernels(model: str, phase: str, **options: Any) -> float:
        block = replace(layer_of(fused_workload(model)), comms=())
        costs = Costs(NODE, None, Mode.FUSED, RunOptions(launch=Launch.BLOCKING, **options))
        seconds = adds_s(block, 4, costs) if phase == "adds" else host_s(block, phase, costs)
        return seconds.mid / c.host_blocking_s

    unfused = Attention.UNFUSED
    for model, forward, backward, num_parameters in (("gpt3-175b", 14, 20, 12), ("llama-2-7b", 22, 28, 6)):
        assert kernels(model, "forward", attention=unfused) == pytest.approx(forward)
        assert kernels(model, "backward", attention=unfused) == pytest.approx(backward)
        assert kernels(model, "forward", attention=Attention.FLASH2) == pytest.approx(forward - 3)
        assert kernels(model, "adds") == 0
        apart = kernels(model, "adds", fused_accumulation=False)
        assert apart == pytest.approx(num_parameters * 3 / 4)
        assert kernels(model, "adds", fused_accumulation=False, whole_sums=True) == pytest.approx(2 * num_parameters)
    block = layer_of(fused_workload("gpt3-175b"))
    assert adds_s(block, 4, Costs(NODE, None, Mode.FUSED, RunOptions(fused_accumulation=False))).mid == 0
    waits = RunOptions(launch=Launch.BLOCKING, fused_accumulation=False)
    assert adds_s(block, 4, Costs(Cluster.local(2), None, Mode.EAGER, waits)).mid == 0  # a CPU runs what it starts


def test_keys_values_and_up_read_what_queries_and_gate_have_cast() -> None:
    """Of the seven products of a layer, three read a value that another one has cast. In 16 bits nothing is cast."""
    for precision, again in (("fp8", 3), ("bf16", 0)):
        layer = layer_of(fused_workload("llama-3.1-8b", precision=precision))
        products = [op for op in layer.ops if op_kind(op.op) is OpKind.PRODUCT]
        marked = [dict(op.attrs).get("cast_before", False) for op in products]
        assert len(products) == 7 and sum(marked) == again, precision
        assert not marked[0] and not marked[-1]


def test_small_micro_batches_wait_for_the_host_and_large_ones_do_not() -> None:
    """Micro-batches of 128 tokens: the floor; of 8,192: the device's own time."""
    fast, slow = (Constants.shipped().with_({"host_fused_s": s}) for s in (1e-6, 4e-4))
    config = ParallelConfig(dp=8, zero_stage=1, num_micro_batches=16)
    for seq_len, bound in ((128, True), (8192, False)):
        fast_s, slow_s = (estimate(config, constants=c, seq_len=seq_len).step_time_s.mid for c in (fast, slow))
        assert (slow_s > 2 * fast_s) if bound else (slow_s < 1.01 * fast_s), (slow_s, fast_s)
    launched = estimate(config, constants=slow, seq_len=128).breakdown["launch"].mid
    assert launched > 0 and "launch" not in estimate(config, options=RunOptions(launch=Launch.GRAPHS)).breakdown
    blocking = estimate(config, options=RunOptions(launch=Launch.BLOCKING), seq_len=8192)
    assert blocking.breakdown["launch"].mid > 0  # in turn, however long the kernels are
