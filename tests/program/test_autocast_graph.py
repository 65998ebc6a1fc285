"""Graphs with the casts of torch.autocast: which operations are cast, what is kept, how the precision is read."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from parity import graph_of, make_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autoplan import Cluster, PlanRequest, load_model
from autoplan.capture.export import capture
from autoplan.config.adapters import read_adapters
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph, Node, check
from autoplan.ops.autocast import AutocastRule, autocast_functions, autocast_rule
from autoplan.ops.products import PACKED
from autoplan.ops.table import RECORDS
from autoplan.program.activation_bytes import saved_bytes_of
from autoplan.program.activations import activations
from autoplan.program.adapters import has_adapters, with_adapters
from autoplan.program.autocast import autocast
from autoplan.program.lower import BlockLowering
from autoplan.search.estimate import estimate_config
from autoplan.sweeps.fit import _of_adapters
from experiments.shared.default_plans import make_plan, read_pins

SEQ = 15
# names of IR ops that stand for composites, and ATen ops that autocast sees as the parts that they are made of
OWN_NAMES = {"masked_attention", "biased_attention", "ctc_losses", "cross_entropy_loss", "convolution"}


@pytest.mark.parametrize(("kind", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_lists_are_those_of_torch(kind: str, key: str) -> None:
    """Both ways: what is listed is registered for autocast, and records stand for no registered op without a rule."""
    known = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    there = {n[6:].split(".")[0] for n in known if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)}
    listed = frozenset[str]().union(*autocast_functions(kind).values())
    assert listed - there <= OWN_NAMES
    for record in RECORDS.values():
        names = {target.split(".")[1] for target in record.aten}
        if names & there:
            node = Node("y", record.name, ("x",), ("y",), {"call": "torch.ops.aten.mm.default()"})
            assert autocast_rule(node, kind) is not AutocastRule.NONE, record.name


def test_rules_are_what_torch_does_on_the_cpu() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert torch.softmax(torch.ones(2, 2).bfloat16(), -1).dtype is torch.bfloat16  # float32 on CUDA
        assert torch.nn.functional.mse_loss(*[torch.ones(2).bfloat16()] * 2).dtype is torch.float32
        assert torch.cat([torch.ones(2), torch.ones(2).bfloat16()]).dtype is torch.float32

    def rule(op: str, kind: str) -> AutocastRule:
        return autocast_rule(Node("y", op, ("x",), ("y",)), kind)

    assert rule("matmul", "cpu") is rule("matmul", "cuda") is AutocastRule.LOWER
    assert (rule("softmax", "cpu"), rule("softmax", "cuda")) == (AutocastRule.NONE, AutocastRule.FLOAT32)
    assert rule("cat", "cpu") is AutocastRule.WIDEST
    assert rule("silu", "cuda") is AutocastRule.NONE


def kept_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd keeps under torch.autocast, each storage once, without parameters, buffers and the batch."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    assert loss.dtype is torch.float32
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.values())}
    return sum(storage.nbytes() for at, storage in found.items() if at not in own)


def test_a_model_keeps_what_autograd_keeps_under_autocast() -> None:
    """To the byte: float32 beside the 16-bit copies of inputs and weights of products, each product's its own."""
    graph, env = graph_of("llama", 0.0, "bf16-autocast"), {"b": 2, "s": SEQ}
    check(graph)
    assert graph.blocks["layer"].values[graph.blocks["layer"].outputs[0]].dtype == "float32"
    _, layouts, _ = make_plan(graph, Cluster.local(1), read_pins({}, 1), env)
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    blocks = {n: activations(low, env) for n, low in lowered.items()}
    assert saved_bytes_of(graph.calls, blocks) == kept_bytes(make_model("llama", 0.0), models.token_batch(2, SEQ))


def test_a_norm_casts_back_to_what_it_was_given() -> None:
    """A norm of the residual stream gives float32, one of queries (Qwen3) the 16 bits of their product."""
    graph = autocast(load_model("qwen3-8b"), "bfloat16", "cuda")
    layer = graph.blocks["layer"]
    assert {p.dtype for p in graph.params.values()} == {"float32"}
    made = {n.outputs[0]: n for n in layer.nodes}
    found = []
    for node in layer.nodes:
        weight = next((x for x in node.tensor_inputs if x.endswith("norm.weight")), None)
        if node.op == "mul" and weight is not None:
            normed = next(x for x in node.tensor_inputs if x != weight)
            found.append((weight, layer.values[normed].dtype, layer.values[node.outputs[0]].dtype, made[normed].op))
    want = {"input_layernorm": "float32", "self_attn.q_norm": "bfloat16", "self_attn.k_norm": "bfloat16"}
    want["post_attention_layernorm"] = "float32"
    assert {(name.removesuffix(".weight"), dtype, out) for name, dtype, out, _ in found} == {
        (name, dtype, "float32") for name, dtype in want.items()
    }


def test_the_precision_of_a_request_changes_its_graph_and_back() -> None:
    plain = load_model("gpt2")
    request = PlanRequest(plain, Cluster.parse("1xh100"), 1024, 8, {"dp": 1}, precision="bf16-autocast")
    assert request.graph.autocast == "bfloat16 cuda" and request.graph != plain
    assert replace(request, precision="fp16-autocast").graph.autocast == "float16 cuda"
    assert replace(request, precision="bf16").graph is plain
    again = ModelGraph.from_json(request.graph.to_json())
    assert again == request.graph and replace(request, graph=again).graph is again
    with pytest.raises(PinError, match=r"has the casts of autocast .*; give the model by its name"):
        replace(request, graph=again, precision="bf16")


def test_float32_states_and_products_in_16_bits() -> None:
    """Parameters, gradients and moments are those of float32; products are not."""
    request = PlanRequest(load_model("gpt2"), Cluster.parse("1xh100"), 1024, 8, precision="bf16-autocast")
    config = ParallelConfig(micro_batch_size=1, num_micro_batches=8)
    found, wide = (estimate_config(replace(request, precision=p), config).estimate for p in ("bf16-autocast", "fp32"))
    for part in ("parameters", "gradients", "optimizer"):
        assert found.stages[0].memory[part].mid == wide.stages[0].memory[part].mid
    assert found.step_time_s.mid < wide.step_time_s.mid / 2


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(PinError, match="operation 'experts' is not known under autocast; use precision bf16"):
        PlanRequest(load_model("mixtral-8x7b"), Cluster.parse("1x8xh100"), 1024, 8, precision="bf16-autocast")


class Cuts(nn.Module):
    """A product in a region without autocast beside one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.inside(x)
        return self.outside(y)


def test_products_of_a_region_without_autocast_stay_wide() -> None:
    graph = capture(Cuts(), {"x": torch.ones(2, 3, 4)}, lambda y, batch: y.square().mean())
    made = autocast(graph, "bfloat16", "cpu")
    dtypes = [b.values[n.outputs[0]].dtype for b in made.blocks.values() for n in b.nodes if n.op == "linear"]
    assert dtypes == ["float32", "bfloat16"]


def test_adapters_are_float32_beside_frozen_weights() -> None:
    """LoRA: the frozen model stays in 16 bits, and so does what its layers hand on."""
    graph = autocast(with_adapters(load_model("llama-3.1-8b"), read_adapters("lora:8:q_proj")), "bfloat16", "cuda")
    assert {p.dtype for p in graph.params.values() if p.trainable} == {"float32"}
    assert {p.dtype for p in graph.params.values() if not p.trainable} == {"bfloat16"}
    assert {graph.values[name].dtype for call in graph.calls if "layers" in call.name for name in call.outputs} == {
        "bfloat16"
    }


def test_weights_in_4_bits_leave_float32_around_them() -> None:
    """QLoRA by PEFT: norms and tables are float32, and 4-bit products give what they were given."""
    graph = autocast(with_adapters(load_model("llama-3.1-8b"), read_adapters("qlora:8:q_proj")), "bfloat16", "cuda")
    check(graph)
    kept = {name for name, p in graph.params.items() if p.dtype == "bfloat16"}
    assert kept and all(name.endswith("_proj.weight") for name in kept)
    assert graph.params["model.embed_tokens.weight"].dtype == "float32"
    for block in graph.blocks.values():
        made = {x: n for n in block.nodes for x in n.outputs}
        for node in (n for n in block.nodes if n.attrs.get(PACKED)):
            given = made[node.tensor_inputs[0]]
            after = next(n for n in block.nodes if node.outputs[0] in n.inputs)
            assert block.values[given.outputs[0]].dtype == block.values[node.outputs[0]].dtype == "bfloat16"
            if not node.tensor_inputs[1].endswith("o_proj.weight"):  # attention gives 16 bits
                assert (given.op, after.op, block.values[after.outputs[0]].dtype) == ("to", "to", "float32")


def test_the_state_of_adapters_is_not_that_of_16_bits() -> None:
    """Adapters are 4 + 4 + 8 bytes per parameter, packed weights stay packed."""
    graph = with_adapters(load_model("llama-3.2-1b"), read_adapters("qlora:8:q_proj"))
    request = PlanRequest(graph, Cluster.parse("1xh100"), 1024, 1, precision="bf16-autocast")
    found, half = (estimate_config(replace(request, precision=p), ParallelConfig()) for p in ("bf16-autocast", "bf16"))
    trained = sum(p.num_elements for p in graph.params.values() if p.trainable)
    frozen = {n for call in graph.calls for n in call.params.values() if not n.endswith("_proj.weight")}
    others = sum(graph.params[n].num_elements for n in frozen if not graph.params[n].trainable)
    memory, before = found.estimate.stages[0].memory, half.estimate.stages[0].memory
    assert memory["optimizer"].mid == 8 * trained
    assert memory["parameters"].mid - before["parameters"].mid == 2 * (others + trained)


def test_adapters_as_a_way_to_fit_are_added_before_the_casts() -> None:
    request = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("1x1xrtx4090-24gb"), 2048, 1, {"dp": 1})
    found = dict(_of_adapters(replace(request, precision="bf16-autocast")))
    assert [name.split(":")[0] for name in found] == ["adapters lora", "adapters qlora"]
    assert all(has_adapters(r.graph) and r.graph.autocast == "bfloat16 cuda" for r in found.values())
