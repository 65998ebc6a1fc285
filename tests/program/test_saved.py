"""Activation memory: what the planner predicts from the graph is what autograd keeps in the emitted program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import models
import pytest
import torch
from one_stage import predicted, stage_of
from parity import (
    SEQ,
    Case,
    cluster_of,
    compiled,
    fake_group,
    global_batch,
    part_of,
    run_simulated,
    spread_out,
)
from rule_case import ENV, FACTORS
from rule_case import Case as OpCase
from rule_cases import CASES
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autoplan.capture.export import capture
from autoplan.codegen.emit import Context
from autoplan.codegen.program import compile_program
from autoplan.errors import RuleError
from autoplan.ir.graph import Block, Call, Node
from autoplan.ops.saved import OpFacts, TensorFacts, extra_bytes, workspace_bytes
from autoplan.ops.saved import kept as kept_names
from autoplan.ops.strategies import Strategy
from autoplan.ops.strides import elementwise, is_contiguous, reshaped
from autoplan.ops.table import saved_rule
from autoplan.program.activation_bytes import Activations, peak_bytes_of, saved_bytes_of
from autoplan.program.activations import activations
from autoplan.program.lower import BlockLowering
from autoplan.program.statements import BlockInput, LoweredBlock, Op
from autoplan.runtime import attention as runtime_attention
from autoplan.runtime import sdpa
from autoplan.runtime.attention import attention
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel
from experiments.plans.live_memory import LiveBytes, measure_step
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.op_parity import named, namespace, outputs_of, strategies_of, text_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, of rank 0's where ranks are simulated."""
    return getattr(x, "_local_tensors", {0: x})[0].untyped_storage()


@dataclass
class Kept:
    """Storages that autograd was given, by address, while this was open."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = _storage(x.detach())
        self.storages.setdefault(storage.data_ptr(), storage)  # held, so that no address is given out twice
        return x

    def num_bytes(self, excluded: Iterable[torch.Tensor] = ()) -> int:
        known = {_storage(x).data_ptr() for x in excluded}
        return sum(s.nbytes() for address, s in self.storages.items() if address not in known)


# -- one operation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    with fake_group(1), use_mesh(AxisMesh([("tp", 1)], {})):
        yield


def turn_of(case: OpCase, num_dims: int) -> tuple[int, ...]:
    """How a tensor of another order in memory is turned into the operand: dims reversed, heads and sequence swapped."""
    if case.op == "attention":  # the fused kernel wants the head dim innermost
        return (0, 2, 1, 3)[:num_dims] if num_dims == 4 else tuple(range(num_dims))
    return tuple(reversed(range(num_dims)))


def lowered_of(case: OpCase, turned: bool) -> LoweredBlock:
    """A block of the one operation. `turned`: its inputs are handed in with their dims in another order."""
    node, values = case.node, case.values
    (strategy,) = strategies_of(case, ())
    statements, inputs = [], []
    for name in node.tensor_inputs:
        value, given = values[name], values[name]
        dims = turn_of(case, len(value.shape))
        if turned and dims:
            given = replace(
                value,
                name=f"{name}_in",
                shape=tuple(value.shape[d] for d in dims),
                dims=tuple((value.dims or ())[d] for d in dims),
            )
            turn = Node(f"turn {name}", "permute", (given.name,), (name,), {"dims": dims})
            alone = Strategy("R", ((),), ((),), (), 1)
            statements.append(Op((name,), turn, (given.name,), alone, (value,), (given,)))
        inputs.append(BlockInput(given.name, given, ()))
    outs, ins = tuple(values[n] for n in node.outputs), tuple(values[n] for n in node.tensor_inputs)
    statements.append(Op(node.outputs, node, node.tensor_inputs, strategy, outs, ins))
    block = Block("one", tuple(given.var for given in inputs), (), (), node.outputs, (node,), values)
    return LoweredBlock(
        block, FACTORS, (), "One", tuple(inputs), (), (), tuple(statements), node.outputs, ((),) * len(outs), 0
    )


# a CPU runs recurrent layers step by step and keeps more than the kernel of a GPU, which the table counts
RUNNABLE = [c for c in CASES if c.op not in ("experts", "recurrent")]


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize("case", RUNNABLE, ids=lambda c: c.name)
def test_an_operation_keeps_what_the_table_says(case: OpCase, turned: bool, one_rank: None) -> None:
    """To the byte, and with operands that lie in memory in another order."""
    held = activations(lowered_of(case, turned), ENV)
    (strategy,) = strategies_of(case, ())
    text = text_of(case, strategy, Context(FACTORS, (), {}))
    kept, values, given, made = Kept(), case.values, [], []
    with saved_tensors_hooks(kept.pack, lambda x: x):
        for i, x in enumerate(case.make()):
            dims = turn_of(case, x.dim()) if turned else ()  # each its own inverse
            x = x.permute(dims).contiguous() if dims else x.clone()
            given.append(x.requires_grad_(values[f"x{i}"].requires_grad))
            made.append(x.permute(dims) if dims else x)
        outs = outputs_of(eval(text, {**namespace(ENV), **named(made)}))
    for i, out in enumerate(outs):  # what a block hands out without a gradient is its own
        if not values[f"y{i}"].requires_grad:
            kept.pack(out)
    assert held.saved_bytes == kept.num_bytes([x for x in given if not x.requires_grad]), text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("device", "sharded"), [("cpu", True), ("meta", True), ("meta", False)])
def test_the_runtime_s_loss_needs_what_the_table_says(device: str, sharded: bool, dtype: str) -> None:
    """Forward and backward; `meta` stands for a GPU, which makes nothing as large as the logits but their gradient."""
    tokens, classes = 600, 3000
    logits = torch.zeros(tokens, classes, dtype=getattr(torch, dtype), device=device, requires_grad=True)
    target, kept = torch.zeros(tokens, dtype=torch.int64, device=device), Kept()
    shapes = (TensorFacts((tokens, classes), dtype, True), TensorFacts((tokens,), "int64", False))
    where = "cpu" if device == "cpu" else "cuda"
    special = "vocab_cross_entropy" if sharded else None
    facts = OpFacts("cross_entropy_sum", {}, shapes, (TensorFacts((), "float32", True),), special, where)
    rule = saved_rule(facts)
    forward, backward = workspace_bytes(facts, rule)
    with fake_group(1), use_mesh(AxisMesh([("tp", 1)])), LiveBytes() as live:
        if device == "cpu":
            with saved_tensors_hooks(kept.pack, lambda x: x):
                loss = vocab_parallel_cross_entropy_sum(logits, target, "tp")
            assert kept.num_bytes([logits, target]) == sum(extra_bytes(facts, rule))
        else:  # without addresses, which Kept tells storages by
            loss = (
                vocab_parallel_cross_entropy_sum(logits, target, "tp") if sharded else cross_entropy_sum(logits, target)
            )
        assert live.current_bytes <= sum(extra_bytes(facts, rule)) + 16
        after = live.current_bytes
        assert live.peak_bytes - after <= forward <= (live.peak_bytes - after) * 1.2 + 40 * tokens
        live.reset_peak()
        loss.backward()
        found = live.peak_bytes - after - logits.numel() * logits.element_size()
        assert found <= backward + 128 <= found * 1.2 + 40 * tokens
    assert forward < logits.numel() * logits.element_size() * (0.01 if device == "meta" else 1)


@dataclass(frozen=True)
class OnGpu:
    """Attention on a GPU: arguments besides queries, keys and values, whose heads are 8 and `groups` of 16."""

    name: str
    dtype: str = "bfloat16"
    groups: int = 2
    causal: bool = True
    mask: str = ""  # "bool", "additive" or "documents"
    window: int | None = None
    ahead: int | None = None


ON_GPU = [
    OnGpu("flash takes groups"),
    OnGpu("a mask", mask="bool", causal=False),
    OnGpu("a causal mask", mask="bool"),
    OnGpu("an additive mask", mask="additive", causal=False),
    OnGpu("documents", mask="documents"),
    OnGpu("float32", dtype="float32"),
    OnGpu("as many key heads", groups=8, mask="bool", causal=False),
    OnGpu("documents in windows", mask="documents", window=16),
    OnGpu("documents in windows on both sides", mask="documents", window=9, ahead=8, causal=False),
]


@pytest.mark.parametrize("case", ON_GPU, ids=lambda c: c.name)
def test_attention_on_a_gpu_keeps_repeated_keys_where_its_kernel_takes_no_groups(
    case: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of the GPU's kernel, made on the CPU, whose kernels keep the same."""
    dtype, s, chosen = getattr(torch, case.dtype), 64, []

    def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> str:
        sizes = k.shape[3], v.shape[3]
        square, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
        chosen.append(sdpa.choose("cuda", q.dtype, (9, 0), sizes, grouped=grouped, square=square, **how))
        return chosen[-1]

    for module in (sdpa, runtime_attention):
        monkeypatch.setattr(module, "choose_for", choice)
    q, k, v = (torch.zeros(2, heads, s, 16, dtype=dtype).requires_grad_() for heads in (8, case.groups, case.groups))
    how: dict[str, Any] = {"causal": case.causal, "scale": None, "window": case.window, "ahead": case.ahead}
    facts = [TensorFacts(tuple(x.shape), case.dtype, True) for x in (q, k, v)]
    if case.mask == "documents":
        how["documents"] = torch.zeros(2, s, dtype=torch.int64)
        facts.append(TensorFacts((2, s), "int64"))
    elif case.mask:
        how["mask"] = torch.ones(s, s, dtype=torch.bool if case.mask == "bool" else dtype)
        facts.append(TensorFacts((s, s), "bool" if case.mask == "bool" else case.dtype))
    kept = Kept()
    with fake_group(1), use_mesh(AxisMesh([("tp", 1)])), saved_tensors_hooks(kept.pack, lambda x: x):
        out = attention(q, k, v, **how)
    attrs = {"causal": case.causal, "window": case.window, "ahead": case.ahead, "documents": case.mask == "documents"}
    given = OpFacts("attention", attrs, tuple(facts), (facts[0],), device_type="cuda")
    rule = saved_rule(given)
    sizes = {f"x{i}": fact.num_bytes for i, fact in enumerate(facts)} | {"y0": out.numel() * out.element_size()}
    assert kept.num_bytes() == sum(sizes[n] for n in kept_names(given, rule)) + sum(extra_bytes(given, rule))
    assert ("repeated" in chosen) == (case.groups < 8 and (bool(case.mask) or case.dtype == "float32"))


def test_an_unknown_operation_is_an_error() -> None:
    with pytest.raises(RuleError, match="'fft' has no record"):
        saved_rule(OpFacts("fft", {}, (), ()))


def test_experts_keep_rows_by_expert() -> None:
    """A rank with half of the experts has half of the rows (test_experts.py compares with what is kept)."""
    facts = OpFacts(
        "experts",
        {"num_experts": 8, "top_k": 2, "gated": True},
        (
            TensorFacts((10, 4), "bfloat16", True),
            TensorFacts((10, 2), "int64", False),
            TensorFacts((10, 2), "bfloat16", True),
            TensorFacts((4, 12, 4), "bfloat16", True),  # half of the experts
            TensorFacts((4, 4, 6), "bfloat16", True),
        ),
        (TensorFacts((10, 4), "bfloat16", True),),
        "expert_parallel",
    )
    rule = saved_rule(facts)
    assert rule.extra is not None
    rows = 10 * 2 // 2
    assert sum(rule.extra(facts)) == rows * (2 * 12 + 8)


# -- strides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_strides_are_those_of_torch(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    shape = [(1, 2, 3, 4)[pick(4)] for _ in range(1 + pick(4))]
    x = torch.zeros(shape).permute(*torch.randperm(len(shape), generator=g).tolist())
    if pick(2):
        x = x[..., : max(1, x.shape[-1] - 1)]
    assert is_contiguous(tuple(x.shape), x.stride()) == x.is_contiguous()
    for new in ((x.numel(),), (*x.shape[:-2], -1), (-1, *x.shape[1:]), (1, *x.shape, 1)):
        full = tuple(x.reshape(new).shape)
        got = reshaped(tuple(x.shape), x.stride(), full)
        try:
            view = x.view(full)
        except RuntimeError:
            assert got is None
            continue
        assert got is not None
        want = view.stride()
        assert [s for s, n in zip(got, full, strict=True) if n > 1] == [
            s for s, n in zip(want, full, strict=True) if n > 1
        ]
    y = torch.zeros([n if pick(3) else 1 for n in x.shape])
    for operands, out in (((x,), -x), ((x, y), x * y), ((y, x), y * x)):
        got = elementwise([(tuple(t.shape), t.stride()) for t in operands], tuple(out.shape))
        assert [s for s, n in zip(got, out.shape, strict=True) if n > 1] == [
            s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1
        ]


# -- whole models -----------------------------------------------------------------------------------------------------


FAMILIES = [
    *(("llama", 0.0), ("llama", 0.25), ("gpt-untied", 0.25), ("t5", 0.0), ("skips", 0.0)),
    *(
        pytest.param(family, 0.0, marks=pytest.mark.slow)
        for family in ("llama-tied", "llama-frozen", "gpt", "encdec", "bart")
    ),
]


@pytest.mark.parametrize(("family", "dropout"), FAMILIES)
def test_a_model_keeps_what_is_predicted(family: str, dropout: float) -> None:
    """To the byte, at one rank: the sum over all calls is what autograd is given, parameters and batch left out."""
    case = Case(family=family, dropout=dropout)
    graph, _, blocks = predicted(case, 12)
    kept = Kept()
    with stage_of(case) as (pm, inputs), saved_tensors_hooks(kept.pack, lambda x: x):
        pm.stage(**inputs)
        measured = kept.num_bytes([*pm.stage.parameters(), *pm.stage.buffers(), *inputs.values()])
    # what a frozen embedding hands out needs no gradient and is taken to be kept; a norm without one keeps nothing
    unused = blocks["embed"].saved_bytes if family == "llama-frozen" else 0
    assert saved_bytes_of(graph.calls, blocks) == measured + unused
    each, several = sum(blocks[c.block].saved_bytes for c in graph.calls), ("encdec", "t5", "bart", "skips")
    assert each > measured if family in several else each == measured + unused  # blocks that keep one value


def test_bfloat16_keeps_half_and_what_stays_wide() -> None:
    """Statistics, log-sum-exp and rotary tables in float32, log-probabilities in bfloat16."""
    model, batch = models.make_llama().bfloat16(), models.token_batch(2, SEQ)
    graph, env = capture(model, batch), {"b": 2, "s": SEQ}
    _, layouts, _ = make_plan(graph, cluster_of(1, "bandwidth"), read_pins({}, 1), env)
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    blocks = {n: activations(low, env) for n, low in lowered.items()}
    program = compile_program(graph, layouts)
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, dict(model.named_parameters()), dict(model.named_buffers()))
        with use_mesh(pm.mesh):
            measured = measure_step(
                pm.stage, {**batch, "loss_denominator": torch.tensor(30.0), "rng": torch.tensor([0, 0, 0])}
            )
    assert saved_bytes_of(graph.calls, blocks) == measured.saved_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_what_is_alive_between_forward_and_backward(family: str, recompute: str) -> None:
    """Everything that is alive after the forward, whoever holds it: inputs of the layers under full recompute."""
    case = Case(family=family, recompute=recompute)
    graph, layouts, blocks = predicted(case, 12)
    with stage_of(case) as (pm, inputs), LiveBytes() as live:
        loss = pm.stage(**inputs)
        measured = live.current_bytes - loss.untyped_storage().nbytes()
        alive = live.alive()
    full = {c for c, how in layouts.recompute.items() if how == "full"}
    assert bool(full) == (recompute == "full")
    want = sum(blocks[c.block].kept_bytes for c in graph.calls if c.name in full)
    want += sum(blocks[c.block].saved_bytes for c in graph.calls if c.name not in full)
    assert measured == want, alive


PEAKS = [("llama", "none", 0.0), ("llama", "full", 0.0), ("gpt", "none", 0.0), ("gpt-untied", "full", 0.25)]


@pytest.mark.parametrize(("family", "recompute", "dropout"), PEAKS)
def test_the_peak_is_that_of_the_walk(family: str, recompute: str, dropout: float) -> None:
    """The walk knows every gradient and temporary that torch makes here; small models differ by scalars only."""
    case = Case(family=family, recompute=recompute, dropout=dropout)
    graph, layouts, blocks = predicted(case, 12)
    with stage_of(case) as (pm, inputs):
        measured = measure_step(pm.stage, inputs)
    full = {c for c, how in layouts.recompute.items() if how == "full"}
    gradients = {n: 4 * p.num_elements for n, p in graph.params.items()}
    peak = peak_bytes_of(graph.calls, blocks, full, gradients)
    assert peak == pytest.approx(measured.peak_bytes, rel=0.02), measured.at_peak[:8]


def test_several_uses_of_one_value_count_once() -> None:
    """A value that two calls keep, and one that its maker keeps too."""
    held = Activations(100, 10, 0, 100, (), 0, saved_inputs=(40,), saved_outputs=(20,))
    first = Call("a", "x", ("in",), ("out",), {}, {})
    calls = [first, replace(first, name="b", outputs=("other",)), replace(first, name="c", inputs=("out",), outputs=())]
    assert saved_bytes_of(calls[:2], {"x": held}) == 200 - 40
    ends = replace(held, saved_inputs=(20,), saved_outputs=())
    blocks = {"x": held, "y": ends}
    assert saved_bytes_of([first, replace(calls[2], block="y")], blocks) == 200 - 20


def test_selective_recompute_drops_what_the_core_keeps() -> None:
    """Fused attention gives up its log-sum-exp; its output stays, as the projection's input."""
    graph, _, blocks = predicted(Case(), 12)
    layer = blocks["layer"]
    assert layer.saved_bytes - layer.selective_bytes == 12 * 4 * SEQ * 4  # samples, heads, queries, float32
    assert [graph.blocks["layer"].nodes[k].op for k in layer.selective_ops] == ["attention"]


# -- several ranks ----------------------------------------------------------------------------------------------------


@dataclass
class PerBlock(Kept):
    """What every emitted block keeps, by class name and in order of the calls."""

    found: dict[str, list[int]] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)
    opened: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.opened.append((type(module).__name__, tensors))
        if type(module).__name__ != "Stage":
            self.storages = {}

    def leave(self, module: torch.nn.Module, args: Any, outs: Any) -> None:
        name, tensors = self.opened.pop()
        if name == "Stage":
            return
        for out in outputs_of(outs):
            if not out.requires_grad:
                self.pack(out)
        foreign = [*module.parameters(), *module.buffers(), *(x for x in tensors if not x.requires_grad)]
        self.found.setdefault(name, []).append(self.num_bytes(foreign))


@contextlib.contextmanager
def per_block() -> Iterator[PerBlock]:
    kept = PerBlock()
    handles = [
        register_module_forward_pre_hook(lambda m, args: kept.enter(m, args)),
        register_module_forward_hook(lambda m, args, outs: kept.leave(m, args, outs)),
    ]
    try:
        with saved_tensors_hooks(kept.pack, lambda x: x):
            yield kept
    finally:
        for handle in handles:
            handle.remove()


SHARDED = [
    Case(tp=2, prices="bandwidth"),
    Case(tp=2, prices="latency"),
    Case(tp=4, prices="bandwidth"),
    Case(family="gpt", tp=2, prices="bandwidth"),
    Case(family="gpt", tp=4, prices="latency"),
    Case(family="gpt-untied", tp=2, dp=2, dropout=0.25, num_micro_batches=3),
    Case(family="llama-tied", tp=4, pp=2),
]


@pytest.mark.parametrize("case", spread_out(SHARDED, 3), ids=str)
def test_every_block_keeps_what_is_predicted_on_several_ranks(case: Case) -> None:
    """To the byte and block by block, with sequence parallelism and without, on simulated ranks."""
    batch = part_of(global_batch(case), 0, case.dp * case.num_micro_batches)
    graph, layouts, blocks = predicted(case, len(next(iter(batch.values()))))
    compiled(case)  # captured before what autograd is given is watched
    with per_block() as kept:
        run_simulated(case, torch.float32)
    names = {
        n: BlockLowering(graph, b, layouts.selection, layouts.axes).run().class_name for n, b in graph.blocks.items()
    }
    counts = graph.call_counts()
    for name, class_name in names.items():
        assert set(kept.found[class_name]) == {blocks[name].saved_bytes}, name
        if graph.blocks[name].params:
            assert len(kept.found[class_name]) == counts[name] * case.num_micro_batches
