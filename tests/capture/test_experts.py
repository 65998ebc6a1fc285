"""Mixtures of experts: captured as one op, the right sums, the right splits; their routers run as captured."""

from __future__ import annotations

from typing import Any

import expert_models
import models
import pytest
import torch
import torch.nn.functional as F
from harness import pool
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.experts import experts_forward
from autoplan.catalog import active_params
from autoplan.codegen.emit import Context, op_text
from autoplan.errors import CaptureError
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis
from autoplan.ir.symbols import Expr, product
from autoplan.ops.batch import batch_obstacle
from autoplan.ops.saved import OpFacts, TensorFacts, extra_bytes
from autoplan.ops.saved import kept as saved_names
from autoplan.ops.strategies import Strategy, strategies
from autoplan.ops.table import flops, rule_for, saved_rule
from autoplan.program.statements import Op
from autoplan.runtime.experts import experts as runtime_experts
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask
from experiments.shared.op_parity import cut, join, namespace


def run_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *biases: torch.Tensor,
    first: int = 0,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """Experts written out, every one for every token; those of this rank begin at `first`."""
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        one, two = (w[e] if transposed else w[e].T for w in (gate_up, down))
        inner = hidden @ one + (biases[0][e] if biases else 0.0)
        if gated:
            gate, up = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, -1)
        inner = F.silu(gate) * up if gated else F.silu(inner)
        share = (weights * (index == e + first)).sum(-1, keepdim=True).to(hidden.dtype)
        out = out + share * (inner @ two + (biases[1][e] if biases else 0.0))
    return out


def interpret(graph: ModelGraph, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of a captured graph on one device, op by op as the emitter writes them."""
    env = dict(zip("bs", batch["input_ids"].shape, strict=True))
    sizes, ctx = graph.factor_sizes(env), Context(graph.factors, (), {})
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    top: dict[str, Any] = {**batch, "loss_denominator": (batch["labels"][:, 1:] != -100).sum().float()}

    def run(block: Block, node: Node, local: dict[str, torch.Tensor]) -> Any:
        if node.op == "experts":
            return run_experts(*(local[n] for n in node.tensor_inputs))
        (strategy,) = strategies(node, block.values, graph.factors, (), sizes)
        args = [f"x{i}" for i in range(len(node.tensor_inputs))]
        op = Op(
            node.outputs, node, tuple(args), strategy, tuple(block.values[n] for n in node.outputs),
            tuple(block.values[n] for n in node.tensor_inputs),
        )  # fmt: skip
        named = {a: local[n] for a, n in zip(args, node.tensor_inputs, strict=True)}
        return eval(op_text(op, ctx, 0), {**namespace(env), **named})

    for call in graph.calls:
        block = graph.blocks[call.block]
        local = {formal: top[actual] for actual, formal in zip(call.inputs, block.inputs, strict=True)}
        local |= {n: tensors[full] for n, full in (*call.params.items(), *call.buffers.items())}
        for node in block.nodes:
            out = run(block, node, local)
            local |= zip(node.outputs, out if len(node.outputs) > 1 else (out,), strict=True)
        top |= {actual: local[formal] for actual, formal in zip(call.outputs, block.outputs, strict=True)}
    result: torch.Tensor = top[graph.output]
    return result


@pytest.mark.parametrize("make", [models.make_mixtral, models.make_qwen3_moe, models.make_deepseek])
def test_the_captured_graph_computes_the_model(make: Any) -> None:
    """Router, in-place ops and experts as captured give the loss and the gradients of the untouched model."""
    model, batch = make(), models.token_batch(2, 16)
    graph = capture(model, batch)
    wanted = model(**batch).loss
    loss = interpret(graph, model, batch)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    names, params = zip(*model.named_parameters(), strict=True)
    left = torch.autograd.grad(wanted, params, allow_unused=True)
    right = torch.autograd.grad(loss, params, allow_unused=True)
    for name, a, b in zip(names, left, right, strict=True):
        assert (a is None) == (b is None), name
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("make", "num_moe"), [(models.make_mixtral, 4), (models.make_qwen3_moe, 4), (models.make_deepseek, 3)]
)
def test_one_node_per_experts_module(make: Any, num_moe: int) -> None:
    model = make()
    graph = capture(model, models.token_batch(2, 16))
    blocks = {b.name: [n for n in b.nodes if n.op == "experts"] for b in graph.blocks.values()}
    assert sum(len(blocks[c.block]) for c in graph.calls) == num_moe
    assert len(graph.blocks) == 5 + (num_moe < 4)  # layers of one kind are captured once
    assert batch_obstacle(graph) is None
    (block, node), *_ = [(graph.blocks[b], n) for b, ns in blocks.items() for n in ns]
    e, f, h = node.attrs["num_experts"], node.attrs["intermediate_size"], 32
    assert (node.attrs["top_k"], f, node.attrs["gated"], node.attrs["activation"]) == (2, 24, True, "silu")
    gate_up, down = (block.values[n] for n in node.tensor_inputs[3:])
    assert [s.value for s in gate_up.shape] == [e, 2 * f, h] and [s.value for s in down.shape] == [e, h, f]
    assert (gate_up.dims or ())[0] == (down.dims or ())[0] == ("experts",)
    assert (gate_up.dims or ())[1][1:] == (down.dims or ())[2]  # gate and up are split alike, with down's columns
    tokens = product([Expr.symbol("b"), Expr.symbol("s")])
    assert flops(node, block.values, rule_for(node, block.values)) == tokens * (2 * 2 * 3 * h * f)
    stored = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert active_params(graph) == graph.num_params - stored * (e - 2) // e


FACTORS = {n: Expr.of(k) for n, k in dict(tokens=8, top=2, experts=4, two=2, f=6, hidden=4).items()}
SIZES = {n: e.value or 0 for n, e in FACTORS.items()}


FORMS: dict[str, dict[str, bool]] = {
    "gate first": {},
    "not gated": {"gated": False},
    "interleaved": {"interleaved": True},
    "transposed": {"transposed": True},
    "biases": {"biased": True},
    "biases, transposed, interleaved": {"biased": True, "transposed": True, "interleaved": True},
    "biases, transposed, not gated": {"biased": True, "transposed": True, "gated": False},
}


def experts_node(
    gated: bool = True, interleaved: bool = False, transposed: bool = False, biased: bool = False
) -> tuple[Node, dict[str, Value]]:
    rows = ("f two" if interleaved else "two f") if gated else "f"
    dims = {
        "hidden": "tokens, hidden",
        "index": "tokens, top",
        "weights": "tokens, top",
        "gate_up": f"experts, hidden, {rows}" if transposed else f"experts, {rows}, hidden",
        "down": "experts, f, hidden" if transposed else "experts, hidden, f",
        **({"gate_up_bias": f"experts, {rows}", "down_bias": "experts, hidden"} if biased else {}),
        "out": "tokens, hidden",
    }
    values = {}
    for name, text in dims.items():
        mine = tuple(tuple(dim.split()) for dim in text.split(","))
        shape = tuple(product([FACTORS[x] for x in dim]) for dim in mine)
        values[name] = Value(name, shape, "int64" if name == "index" else "float64", name != "index", mine)
    attrs = {"num_experts": 4, "top_k": 2, "intermediate_size": 6, "gated": gated, "activation": "silu"}
    attrs |= {name: True for name, given in (("interleaved", interleaved), ("transposed", transposed)) if given}
    return Node("out", "experts", tuple(n for n in dims if n != "out"), ("out",), attrs), values


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_split_of_experts_computes_them(form: dict[str, bool]) -> None:
    """Tokens, experts and inner size: shards run by themselves give the outputs and gradients of the whole."""
    node, values = experts_node(**form)
    of_form = {name: value for name, value in form.items() if name != "biased"}
    degree = 2
    axes = (Axis("tp", degree),)
    g = torch.Generator().manual_seed(0)
    shapes = {n: [s.value or 0 for s in v.shape] for n, v in values.items()}
    whole = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in shapes.items()}
    whole["index"] = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(8)])
    names = list(node.tensor_inputs)
    trained = [n for n in names if n != "index"]
    leaves = {n: whole[n].clone().requires_grad_(n in trained) for n in names}
    wanted = run_experts(*leaves.values(), **of_form)
    gradient = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, [leaves[n] for n in trained], gradient)
    found = {s.name: s for s in strategies(node, values, FACTORS, axes, SIZES)}
    assert set(found) == {"R", "I", "S(tokens)", "S(experts)", "S(f)"}
    for name, s in found.items():
        parts = {n: cut(whole[n], values[n], layout, axes, SIZES, 0) for n, layout in zip(names, s.inputs, strict=True)}
        grads_out = cut(gradient, values["out"], tuple(t.gradient() for t in s.outputs[0]), axes, SIZES, 1)
        outs, grads = {}, {n: {} for n in trained}
        for rank in range(degree):
            local = {n: parts[n][rank,].clone().requires_grad_(n in trained) for n in names}
            first = rank * (4 // degree) if name == "S(experts)" else 0
            operands = dict(local)
            if name == "S(f)" and "down_bias" in operands:
                operands["down_bias"] = operands["down_bias"] / degree
            out = run_experts(*operands.values(), first=first, **of_form)
            outs[rank,] = out.detach()
            mine = torch.autograd.grad(out, [local[n] for n in trained], grads_out[rank,])
            for n, x in zip(trained, mine, strict=True):
                grads[n][rank,] = x
        torch.testing.assert_close(join(outs, values["out"], s.outputs[0], axes, SIZES), wanted.detach(), msg=name)
        for n, want in zip(trained, gradients, strict=True):
            layout = tuple(t.gradient() for t in s.inputs[names.index(n)])
            torch.testing.assert_close(join(grads[n], values[n], layout, axes, SIZES), want, msg=f"{name}: {n}")


def text_of(strategy: Strategy, axes: tuple[Axis, ...] = (), **form: bool) -> str:
    node, values = experts_node(**form)
    ins = tuple(values[n] for n in node.tensor_inputs)
    op = Op(("out",), node, node.tensor_inputs, strategy, (values["out"],), ins)
    return op_text(op, Context(FACTORS, axes, {}), 0)


def test_the_text_says_where_experts_are() -> None:
    node, values = experts_node()
    axes = (Axis("tp", 2),)
    found = {s.name: text_of(s, axes) for s in strategies(node, values, FACTORS, axes, SIZES)}
    call = "experts(hidden, index, weights, gate_up, down, activation='silu', gated=True"
    assert found["S(experts)"] == f"{call}, axes='tp')"
    assert found["S(f)"] == f"typed({call}), tp=P)"
    assert found["R"] == found["I"] == found["S(tokens)"] == f"{call})"


def test_the_text_of_parts_of_experts_adds_a_bias_once() -> None:
    """Parts of an expert add their share of the second bias; ranks with other experts all of it."""
    form = {"biased": True, "interleaved": True}
    node, values = experts_node(**form)
    axes = (Axis("tp", 2),)
    found = {s.name: text_of(s, axes, **form) for s in strategies(node, values, FACTORS, axes, SIZES)}
    more = "activation='silu', gated=True, interleaved=True"
    call = "experts(hidden, index, weights, gate_up, down, gate_up_bias, down_bias"
    assert found["S(f)"] == f"typed({call} / 2, {more}), tp=P)"
    assert found["S(experts)"] == f"{call}, {more}, axes='tp')"
    assert found["S(tokens)"] == f"{call}, {more})"


# -- as they run -------------------------------------------------------------------------------------------------------


def of_tokens(num: int, gated: bool = True, dtype: torch.dtype = torch.float64, chosen: int = 4) -> list[torch.Tensor]:
    """hidden, index (of the first `chosen` of 4 experts), weights, gate_up and down."""
    g = torch.Generator().manual_seed(num)
    sizes = ((num, 6), None, (num, 2), (4, 10 if gated else 5, 6), (4, 6, 5))
    out = [torch.zeros(0) if s is None else torch.randn(s, generator=g, dtype=dtype) for s in sizes]
    picked = [torch.randperm(chosen, generator=g)[:2] for _ in range(num)]
    out[1] = torch.stack(picked) if picked else torch.zeros(0, 2, dtype=torch.int64)
    return [x.requires_grad_(x.is_floating_point()) for x in out]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("num", [9, 1, 0])
def test_rows_by_expert_are_every_expert_for_every_token(num: int, gated: bool) -> None:
    """Outputs and all gradients in float64, also where some experts, or all, get no token."""
    tensors = of_tokens(num, gated, chosen=3)
    hidden, index, weights, first, down = tensors
    wanted = torch.zeros_like(hidden)
    for e in range(4):
        inner = hidden @ first[e].T
        inner = F.silu(inner[:, :5]) * inner[:, 5:] if gated else F.silu(inner)
        wanted = wanted + (weights * (index == e)).sum(-1, keepdim=True) * (inner @ down[e].T)
    got = runtime_experts(*tensors, activation="silu", gated=gated)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    trained = [x for x in tensors if x.requires_grad]
    arrived = torch.ones_like(wanted)
    for a, b in zip(*(torch.autograd.grad(x, trained, arrived) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_experts_keep_what_the_table_says() -> None:
    """Beside inputs: which token each row is, and the first product; tokens spread evenly."""
    tensors = of_tokens(8)
    tensors[1] = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]] * 2)
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = runtime_experts(*tensors, activation="silu", gated=True)
    facts = [TensorFacts(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad) for x in (*tensors, out)]
    f = OpFacts("experts", {"num_experts": 4, "top_k": 2, "gated": True}, tuple(facts[:5]), (facts[5],))
    rule = saved_rule(f)
    given = {x.untyped_storage().data_ptr(): k for k, x in enumerate(tensors)}
    assert {f"x{given[p]}" for p in kept if p in given} - {"x3", "x4"} == set(saved_names(f, rule))  # but parameters
    assert sum(n for p, n in kept.items() if p not in given) == sum(extra_bytes(f, rule)) == 8 * 2 * (8 + 2 * 5 * 8)


def test_experts_in_16_bits_stay_in_16_bits() -> None:
    """Routing weights in 32 bits (DeepSeek) do not widen what comes out, and get their own gradient."""
    tensors = of_tokens(9, dtype=torch.bfloat16)
    tensors[2] = tensors[2].detach().float().requires_grad_()
    out = runtime_experts(*tensors, activation="silu", gated=True)
    out.sum().backward()
    assert out.dtype is torch.bfloat16 and tensors[2].grad is not None and tensors[2].grad.dtype is torch.float32
    wide = runtime_experts(*(x.detach().double() if x.is_floating_point() else x for x in tensors), activation="silu",
                           gated=True)  # fmt: skip
    torch.testing.assert_close(out.double(), wide, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: [*t[:1], t[1].int(), *t[2:]], r"index has dtype torch\.int32; it must be int64"),
        (lambda t: [*t[:2], t[2][:-1], *t[3:]], r"index and weights have shapes \(9, 6\), \(9, 2\) and \(8, 2\)"),
        (lambda t: [*t[:3], t[3][:, :5], *t[4:]], r"gate_up \(4, 5, 6\) and down \(4, 6, 5\) must be \(4, 10, 6\)"),
    ],
)
def test_experts_of_the_wrong_shape_are_refused_by_name(change: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        runtime_experts(*change(of_tokens(9)), activation="silu", gated=True)
    with pytest.raises(ValueError, match=r"torch\.nn\.functional has no activation 'swoosh'"):
        runtime_experts(*of_tokens(9), activation="swoosh", gated=True)


# -- experts of the user's own -----------------------------------------------------------------------------------------


@experts_forward(gate_up="w_in", down="w_out", activation="silu")
class MyExperts(nn.Module):
    def __init__(self, num_experts: int = 4, dim: int = 8, size: int = 12) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_experts, 2 * size, dim))
        self.w_out = nn.Parameter(torch.randn(num_experts, dim, size))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("capture must not trace this")


class MyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), MyExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        out: torch.Tensor = x + self.experts(flat, index, weights).view_as(x)
        return out


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MyLayer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def square_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def test_registered_experts() -> None:
    model = MyModel()
    graph = capture(model, {"x": torch.zeros(2, 4, 8)}, square_loss)
    ops = {b.name: [n.op for n in b.nodes] for b in graph.blocks.values()}
    assert [ops[c.block].count("experts") for c in graph.calls if "." in c.name] == [1, 1, 1]
    assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "w_out", nn.Parameter(torch.zeros(4, 12, 8))), r"w_in .* should be \[4, 16, 8\]"),
        (lambda e: setattr(e, "w_in", nn.Parameter(torch.zeros(4, 12, 8))), r"gated=True"),
    ],
)
def test_experts_of_another_shape_are_refused(change: Any, message: str) -> None:
    model = MyModel()
    change(model.layers[0].experts)
    with pytest.raises(CaptureError, match=message):
        capture(model, {"x": torch.zeros(2, 4, 8)}, square_loss)


# -- experts that are not the one op -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*expert_models.STACKED, *expert_models.ROUNDED])
def test_stacked_experts_of_every_form_are_the_one_op(name: str) -> None:
    """Loss and gradients in float64; the weights are those of the module, as they lie in it."""
    model, batch = expert_models.made(name), expert_models.batch_of()
    graph = capture(model, batch, expert_models.loss)
    assert sum(n.op == "experts" for b in graph.blocks.values() for n in b.nodes) == 2
    assert not graph.notes
    assert {n: p.shape for n, p in graph.params.items()} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    outcome = verify_whole(VerifyTask(model, graph, batch, expert_models.loss), limit_s=60.0)
    assert outcome.done, outcome.text


def test_the_form_of_gpt_oss() -> None:
    """Biases are inputs, the numbers of the gate are those of the config; tokens times top_k price its products."""
    graph = capture(expert_models.made("biases, transposed, interleaved, clamped"), expert_models.batch_of(),
                    expert_models.loss)  # fmt: skip
    block, node = next((b, n) for b in graph.blocks.values() for n in b.nodes if n.op == "experts")
    assert dict(node.attrs) == {
        "num_experts": 4, "top_k": 2, "intermediate_size": 24, "activation": "clamped_swiglu", "gated": True,
        "interleaved": True, "transposed": True, "alpha": 1.7, "limit": 0.5,
    }  # fmt: skip
    first, second, *biases = (block.values[n].dims for n in node.tensor_inputs[3:])
    assert first is not None and second is not None
    assert first[2] == (*second[1], first[2][1]) and biases == [(first[0], first[2]), (second[0], second[2])]
    tokens = product([Expr.symbol("b"), Expr.symbol("s")])
    assert flops(node, block.values, rule_for(node, block.values)) == tokens * (2 * 2 * 3 * 16 * 24)
    stored = sum(p.num_elements for n, p in graph.params.items() if ".experts." in n)
    assert active_params(graph) == graph.num_params - stored // 2


@pytest.mark.parametrize("name", [*expert_models.NORMED, *expert_models.LOOPS])
def test_other_experts_compute_every_token(name: str) -> None:
    """Loss and gradients in float64; the graph says that it is slow, and what makes it fast."""
    model, batch = expert_models.made(name), expert_models.batch_of()
    graph = capture(model, batch, expert_models.loss)
    assert not any(n.op == "experts" for b in graph.blocks.values() for n in b.nodes)
    (note,) = graph.notes
    assert "every expert computes every token" in note and "autoplan.experts_forward" in note
    outcome = verify_whole(VerifyTask(model, graph, batch, expert_models.loss), limit_s=60.0)
    assert outcome.done, outcome.text
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_two_ranks_share_experts_in_a_loop() -> None:
    for loss, gradients, source in pool(2).run(expert_models.errors, "AsLitgpt", {"tp": 2}, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-10
        assert ", 'tp'" in source


_GPT_OSS = "biases, transposed, interleaved, clamped"
_FOLDED = {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero_stage": 3}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "pins", "said"),
    [
        (_GPT_OSS, 2, {"tp": 2, "ep": 1}, ", 'tp'"),
        (_GPT_OSS, 2, {"ep": 2}, "dispatch='ep')"),
        (_GPT_OSS, 2, {"dp": 2, "ep": 1, "zero_stage": 3}, "limit=0.5)"),
        *((name, 4, _FOLDED, "dispatch='ep', inner='etp')") for name in expert_models.STACKED),
    ],
)
def test_ranks_share_experts_of_every_form(name: str, ranks: int, pins: dict[str, Any], said: str) -> None:
    for loss, gradients, source in pool(ranks).run(expert_models.errors, name, pins, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-10
        assert said in source


def test_experts_whose_tokens_meet_are_refused() -> None:
    model = expert_models.Model(expert_models.Coupled)
    with pytest.raises(CaptureError, match=r"Coupled loops over .* it computes something else .*experts_forward"):
        capture(model, expert_models.batch_of(), expert_models.loss)
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_experts_beside_other_places_are_refused() -> None:
    class Places(expert_models.AsMixtral):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat, _, index = self.choose(x)
            tokens, _ = torch.where(index == 0)
            return x + flat[tokens].sum() + tokens.sort().values[0]

    with pytest.raises(CaptureError, match=r"Places does not run on random numbers .*has no attribute 'sort'"):
        capture(expert_models.Model(Places), expert_models.batch_of(), expert_models.loss)


def test_the_values_of_an_activation_decide_its_name() -> None:
    """Aria's experts are gated by silu whatever their config says."""
    experts = expert_models.AriaExperts(expert_models.config(hidden_act="gelu"))
    graph = capture(expert_models.Model(lambda: expert_models.Routed(experts)), expert_models.batch_of(),
                    expert_models.loss)  # fmt: skip
    assert {n.attrs["activation"] for b in graph.blocks.values() for n in b.nodes if n.op == "experts"} == {"silu"}


def test_the_bias_that_balances_deepseeks_experts_chooses_and_nothing_else() -> None:
    """DeepSeek-V3 has no loss of routers: a buffer is added to the scores that choose, not to those that weigh."""
    model, batch = models.make_deepseek(), models.token_batch(2, 16)
    graph = capture(model, batch)
    before = interpret(graph, model, batch)
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and any("e_score_correction_bias" in n for n in graph.buffers)
    generator = torch.Generator().manual_seed(0)
    for bias in biases:
        bias.copy_(torch.randn(bias.shape, generator=generator))
    loss, wanted = interpret(graph, model, batch), model(**batch).loss
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    assert abs(loss - before) > 1e-3
    torch.testing.assert_close(loss - before, wanted - before, atol=1e-5, rtol=1e-2)
