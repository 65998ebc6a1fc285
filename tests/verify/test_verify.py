"""A captured graph is run and compared with its module: right ones pass, and each kind of silent error is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
from harness import pool
from torch import nn

import autoplan
from autoplan.capture.export import capture
from autoplan.capture.passes.cast import computing_in
from autoplan.errors import CaptureError, PinError
from autoplan.ir.graph import Block, ModelGraph, Node
from autoplan.ir.symbols import Expr
from autoplan.verify import check, door, shallow
from autoplan.verify.check import Verification, verify_whole
from autoplan.verify.door import check_verify, verify_capture
from autoplan.verify.runs import VerifyTask
from autoplan.verify.sample import draw_batch, sizes_to_try
from autoplan.verify.shallow import verify_shallow
from autoplan.verify.wide import wide

SEQ = 16


def task_of(family: str, dropout: float = 0.0, precision: str = "native") -> VerifyTask:
    model, batch = parity.make_model(family, dropout), parity.names_of(family, models.token_batch(2, SEQ))
    loss = None if parity.is_hf(family) else parity.LOSSES.get(family, models.gpt_loss)
    dtype = torch.bfloat16 if precision == "bf16" else None
    return VerifyTask(model, parity.graph_of(family, dropout, precision), batch, loss, dtype)


def captured(model: nn.Module, batch: dict[str, torch.Tensor], loss: Any) -> VerifyTask:
    return VerifyTask(model, capture(model, batch, loss), batch, loss)


def with_block(graph: ModelGraph, name: str, change: Callable[[Block], Block]) -> ModelGraph:
    return replace(graph, blocks={**graph.blocks, name: change(graph.blocks[name])})


def with_node(graph: ModelGraph, wanted: Callable[[Node], bool], change: Callable[[Node], Node]) -> ModelGraph:
    """The first such node changed."""
    for name, block in graph.blocks.items():
        for i, node in enumerate(block.nodes):
            if wanted(node):
                nodes = (*block.nodes[:i], change(node), *block.nodes[i + 1 :])
                return with_block(graph, name, lambda b, n=nodes: replace(b, nodes=n))
    raise AssertionError("no such node")


def attrs(**changed: Any) -> Callable[[Node], Node]:
    return lambda node: replace(node, attrs={**node.attrs, **changed})


# -- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dropout", "precision"),
    [
        ("gpt", 0.1, "native"),
        ("llama", 0.25, "native"),  # in the kernel of attention, which draws by itself
        ("deepseek", 0.0, "native"),
        pytest.param("bart-padded", 0.0, "native", marks=pytest.mark.slow),
        ("llama", 0.0, "bf16"),
        pytest.param("gpt-balanced-aux", 0.1, "native", marks=pytest.mark.slow),
    ],
)
def test_a_right_capture_is_verified(family: str, dropout: float, precision: str) -> None:
    outcome = verify_whole(task_of(family, dropout, precision))
    assert outcome.done and "within 1e-08 of the module (b=3, s=12" in outcome.text


def test_a_forward_that_is_computed_again_in_the_backward() -> None:
    model = models.make_llama(attn_implementation="eager")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    assert verify_whole(captured(model, models.token_batch(2, SEQ), None)).done


def make_megatron() -> nn.Module:
    from transformers import MegatronBertConfig, MegatronBertForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True,
    )  # fmt: skip
    return MegatronBertForCausalLM(MegatronBertConfig(**settings))


def test_attention_that_adds_its_mask_itself() -> None:
    """Right, or an error; and without the mask an error, whatever capture does today."""
    try:
        task = captured(make_megatron(), models.token_batch(2, SEQ), None)
        assert verify_whole(task).done
    except CaptureError:
        return
    lost = with_node(task.graph, *LOST_MASK)
    with pytest.raises(CaptureError, match=r"first value that differs is the attention of bert.encoder.layer.0"):
        verify_whole(replace(task, graph=lost))


# -- what is wrong ----------------------------------------------------------------------------------------------------

LOST_MASK = (lambda n: n.op == "attention", attrs(causal=False))
OTHER_SCALE = (lambda n: n.op == "attention", attrs(scale=0.25))
OTHER_EPS = (lambda n: n.op == "add_scalar" and float(n.attrs["scalar"]) == 1e-6, attrs(scalar=1e-5))
OTHER_DROPOUT = (lambda n: n.op == "dropout", attrs(p=0.2))
LOST_WINDOW = (lambda n: n.attrs.get("window") is not None, attrs(window=None))
LOST_PADDING = (
    lambda n: n.attrs.get("documents") is True,
    lambda n: replace(n, inputs=n.inputs[:3], attrs={**n.attrs, "documents": None}),
)


@pytest.mark.parametrize(
    ("family", "dropout", "error", "first"),
    [
        ("llama", 0.0, LOST_MASK, r"attention of model.layers.0.self_attn \(\w+.py:\d+\): its norm is \d"),
        ("llama", 0.0, OTHER_SCALE, r"attention of model.layers.0.self_attn"),
        ("llama", 0.0, OTHER_EPS, r"add_scalar of model.layers.0.input_layernorm .*: its norm is .*, in the module"),
        ("gpt", 0.1, OTHER_DROPOUT, r"dropout|mul_scalar"),
        ("mistral", 0.0, LOST_WINDOW, r"attention of model.layers.0.self_attn"),
        # the masked_fill before it makes a value that the module does not have
        ("mistral-padded", 0.0, LOST_PADDING, r"masked_fill of model.layers.0.self_attn"),
    ],
    ids=["mask", "scale", "epsilon", "dropout", "window", "padding"],
)
def test_a_wrong_operation_is_named(family: str, dropout: float, error: Any, first: str) -> None:
    task = task_of(family, dropout)
    with pytest.raises(CaptureError, match=rf"is not the module: its loss is .* that differs is the {first}"):
        verify_whole(replace(task, graph=with_node(task.graph, *error)))


def test_an_example_of_equal_tokens_hides_nothing() -> None:
    """As `default_example` makes it: all attend to the same, so without the mask the loss would be the same."""
    model, ids = models.make_llama(), torch.zeros(2, SEQ, dtype=torch.long)
    task = captured(model, {"input_ids": ids, "labels": ids}, None)
    assert verify_whole(task).done
    with pytest.raises(CaptureError, match=r"attention of model.layers.0.self_attn"):
        verify_whole(replace(task, graph=with_node(task.graph, *LOST_MASK)))


class Plain(nn.Module):
    """A buffer and two norms that are not trained yet, and a mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.norm1(x)) + self.shift
        y = y + y.sum(1, keepdim=True) / x.shape[1]
        out: torch.Tensor = self.last(self.norm2(y).tanh())
        return out


def square_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def plain_task() -> VerifyTask:
    return captured(Plain(), {"x": torch.zeros(2, SEQ, 8)}, square_loss)


def without_buffer(graph: ModelGraph) -> ModelGraph:
    def other(node: Node) -> Node:
        return replace(node, op="add_scalar", inputs=node.inputs[:1], attrs={"scalar": 0.0})

    return with_node(graph, lambda n: "shift" in n.inputs, other)


def baked(graph: ModelGraph) -> ModelGraph:
    sized = lambda n: n.op == "div_scalar" and n.attrs["scalar"] == Expr.symbol("s")  # noqa: E731
    return with_node(graph, sized, attrs(scalar=SEQ))


def swapped(graph: ModelGraph) -> ModelGraph:
    names = {"norm1.weight": "norm2.weight", "norm2.weight": "norm1.weight"}
    others = [{local: names.get(full, full) for local, full in c.params.items()} for c in graph.calls]
    calls = (replace(c, params=params) for c, params in zip(graph.calls, others, strict=True))
    return replace(graph, calls=tuple(calls))


def detached(graph: ModelGraph) -> ModelGraph:
    """The first projection gets no gradient: the forward is what it was."""
    (name,) = (n for n, b in graph.blocks.items() if any(node.op == "tanh" for node in b.nodes))
    block = graph.blocks[name]
    at = next(i for i, n in enumerate(block.nodes) if n.op == "tanh")
    node = block.nodes[at]
    value = replace(block.values[str(node.inputs[0])], name="apart")
    nodes = [*block.nodes]
    nodes[at : at + 1] = [Node("apart", "detach", node.inputs, ("apart",)), replace(node, inputs=("apart",))]
    return with_block(graph, name, lambda b: replace(b, nodes=tuple(nodes), values={**b.values, "apart": value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_buffer, r"first value that differs is the .*\(test_verify.py:\d+\)"),
        (baked, r"first value that differs is the div_scalar of first \(test_verify.py:\d+\)"),
        (swapped, r"first value that differs is the layer_norm of norm1"),
        (detached, r"All values of the forward agree; the first gradient that differs is that of norm2\.\w+: its "
                   r"largest element is 0, in the module \d"),
    ],
)  # fmt: skip
def test_a_wrong_graph(change: Callable[[ModelGraph], ModelGraph], message: str) -> None:
    task = plain_task()
    assert verify_whole(task).done
    with pytest.raises(CaptureError, match=message):
        verify_whole(replace(task, graph=change(task.graph)))


class Mean(Plain):
    """Divides by what it computes without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.norm1(x)) + self.shift
        with torch.no_grad():
            size = y.square().mean(-1, keepdim=True) + 1.0
        out: torch.Tensor = self.last(self.norm2(y / size).tanh())
        return out


def test_padding_on_the_left_is_that_of_the_module() -> None:
    """It predicts the first valid token."""
    model, batch = models.make_llama(), models.token_batch(4, SEQ, seed=1)
    batch["attention_mask"] = torch.arange(SEQ) >= torch.arange(4)[:, None]
    batch["attention_mask"] = batch["attention_mask"].long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert verify_whole(captured(model, batch, None)).done


def test_regions_without_gradients() -> None:
    """What they make has none in the program either; and where it has, it is found."""
    task = captured(Mean(), {"x": torch.zeros(2, SEQ, 8)}, square_loss)
    assert verify_whole(task).done
    flowing = with_node(task.graph, lambda n: n.op == "detach", lambda n: replace(n, op="clone"))
    with pytest.raises(CaptureError, match=r"the first gradient that differs is that of first\.\w+"):
        verify_whole(replace(task, graph=flowing))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class OwnBackward(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Tripled.apply(self.first(x)))


def test_a_backward_of_the_models_own() -> None:
    with pytest.raises(CaptureError, match=r"Tripled has a backward of its own that is not the derivative"):
        captured(OwnBackward(), {"x": torch.zeros(2, SEQ, 8)}, square_loss)


def test_a_loss_that_keeps_a_count() -> None:
    """It is no error of the capture."""
    calls = [0]

    def warming_up(out: torch.Tensor, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return out.mean() * min(1.0, calls[0] / 100)

    with pytest.raises(CaptureError, match=r"^two calls of Linear and its loss .* keeps a value for the next call"):
        verify_whole(captured(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, warming_up))


def test_a_graph_that_cannot_run() -> None:
    task = plain_task()
    graph = with_node(task.graph, lambda n: n.op == "sum", attrs(dims=(7,)))
    with pytest.raises(CaptureError):
        verify_whole(replace(task, graph=graph))


def test_a_sample_of_nothing_but_padding() -> None:
    """What its queries get, which see no token, is zero in the module: only such a sample shows that it is not lost."""
    task = task_of("mistral-padded")
    assert verify_whole(task).done
    lost = with_node(
        task.graph,
        lambda n: n.op == "masked_fill",
        lambda n: replace(n, op="mul_scalar", inputs=n.inputs[:1], attrs={"scalar": 1.0}),
    )
    with pytest.raises(CaptureError, match=r"is not the module: its loss is"):
        verify_whole(replace(task, graph=lost))


def test_a_sample_of_nothing_but_padding_on_which_the_module_is_not_finite() -> None:
    def mean_of_means(out: Any, batch: Any) -> torch.Tensor:
        valid = batch["attention_mask"]
        return ((out.logits.square().mean(-1) * valid).sum(1) / valid.sum(1)).mean()

    batch = parity.names_of("mistral-padded", models.token_batch(2, SEQ))
    del batch["labels"]
    outcome = verify_whole(captured(parity.make_model("mistral-padded", 0.0), batch, mean_of_means))
    assert outcome.done and "(b=3, s=12; no sample of nothing but padding)" in outcome.text


# -- what is run ------------------------------------------------------------------------------------------------------


def test_batches() -> None:
    task = task_of("bart-padded")
    ones = {n: torch.ones_like(x) for n, x in task.example.items()}
    batch = draw_batch(task.graph, ones, {"b": 3, "s": 12, "t": 8})
    assert {n: tuple(x.shape) for n, x in batch.items()} == {
        "input_ids": (3, 12), "labels": (3, 8), "attention_mask": (3, 12), "decoder_attention_mask": (3, 8)
    }  # fmt: skip
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 96 and batch["input_ids"].unique().numel() > 9
    assert batch["attention_mask"].sum(1).tolist() == [0, 11, 9]  # some do not count
    assert batch["decoder_attention_mask"].sum(1).tolist() == [0, 7, 6] and (batch["labels"][0] >= 0).sum() > 4
    batch = draw_batch(task.graph, ones, {"b": 3, "s": 12, "t": 8}, whole_sample=False)
    assert batch["attention_mask"].sum(1).tolist() == [12, 11, 9]
    assert (batch["labels"][-1, 6:] == -100).all() and batch["labels"].max() < 96
    given = {**ones, "input_ids": torch.arange(2 * SEQ).view(2, SEQ)}
    kept = draw_batch(task.graph, given, {"b": 3, "s": 12, "t": 8})["input_ids"]
    assert torch.equal(kept, given["input_ids"][[0, 1, 0], :12])  # the caller's, where they tell something


def test_labels_that_do_not_count() -> None:
    """The labels of a prompt: what is left of them would give no loss."""
    task = task_of("llama")
    labels = torch.full((2, SEQ), -100)
    labels[:, -1] = 5
    batch = draw_batch(task.graph, {**task.example, "labels": labels}, {"b": 3, "s": 8})
    assert (batch["labels"] >= 0).sum() > 12


def test_the_window_of_a_config_that_does_not_say_it() -> None:
    """transformers raises an error where the layers of a config have windows of their own."""

    class Config:
        sliding_window = 8

        def __getattribute__(self, name: str) -> Any:
            if name == "sliding_window":
                raise RuntimeError("'sliding_window' is a per-layer attribute")
            return super().__getattribute__(name)

    task = plain_task()
    task.model.config = Config()  # type: ignore[assignment]
    assert check._window(task) == 8


def test_sizes_are_not_those_of_the_example() -> None:
    graph = task_of("llama").graph
    assert list(sizes_to_try(graph, {"s": 64})) == [{"s": n, "b": 3} for n in (48, 24, 12, 8)]
    bounded = replace(graph, bounds={"s": (20, None)})
    assert {x["s"] for x in sizes_to_try(bounded, {"s": 20})} == {20}
    two = task_of("bart-padded").graph
    assert all(x["s"] != x["t"] for x in sizes_to_try(two, {"s": 16, "t": 16}))


def test_arithmetic_is_float64() -> None:
    x = torch.rand(3, dtype=torch.float64)
    with wide(torch.bfloat16):
        assert x.dtype is torch.bfloat16  # what the model is made for
        made = [x.float(), x.to(torch.float16), torch.softmax(x, 0, dtype=torch.float32), torch.zeros(2), x * 0.1]
        rounded = torch.full((), 0.1, dtype=x.dtype)
    assert all(t.dtype is torch.float64 for t in made) and torch.equal(made[0], x) and torch.equal(made[1], x)
    assert float(rounded) == float(torch.tensor(0.1, dtype=torch.bfloat16))


class Stateful(nn.Module):
    """Counts its calls in a buffer that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.dropout(self.linear(x))
        return out


def test_the_model_is_left_as_it_was() -> None:
    model = Stateful()
    hooks: list[int] = []
    model.linear.register_forward_hook(lambda *_: hooks.append(1))
    model.linear.weight.grad = torch.ones(8, 8)
    before = {n: p for n, p in model.named_parameters()}
    values = {n: t.clone() for n, t in model.state_dict().items()}
    task, random = captured(model, {"x": torch.zeros(2, SEQ, 8)}, square_loss), torch.random.get_rng_state()
    assert verify_whole(task).done
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p is before[n] for n, p in model.named_parameters()) and model.training
    assert all(torch.equal(t, values[n]) and t.dtype is values[n].dtype for n, t in model.state_dict().items())
    assert model.linear.bias.grad is None and torch.equal(model.linear.weight.grad, torch.ones(8, 8))
    assert len(model.linear._forward_hooks) == 1


class Hiding(Stateful):
    """Leaves the count out of what is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            self.seen = self.seen.detach()
            return self.linear(x)  # type: ignore[no-any-return]
        self.seen += 1
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_buffer_that_the_graph_leaves_as_it_was_is_found() -> None:
    task = captured(Hiding(), {"x": torch.zeros(2, SEQ, 8)}, square_loss)
    with pytest.raises(CaptureError, match=r"a forward leaves 1 buffer with other values; of seen, .* by up to 1"):
        verify_whole(task)


class TwoNames(nn.Module):
    """A norm that is an attribute and in a list, a block that is a layer twice, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 8), self.norm)
        self.layers = nn.ModuleList([block, block])
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.body[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.norm(self.tied(x))
        return out


def test_a_module_with_two_names_is_left_as_it_was() -> None:
    model = TwoNames()
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters(remove_duplicate=False)}
    assert verify_whole(captured(model, {"x": torch.zeros(2, SEQ, 8)}, square_loss)).done
    for name, p in model.named_parameters(remove_duplicate=False):
        same, value = before[name]
        assert p is same and p.dtype is torch.float32 and torch.equal(p, value)


# -- what is not run --------------------------------------------------------------------------------------------------


class OnlyFloat32(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("no kernel for float64")
        return super().forward(x)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    task = captured(OnlyFloat32(), {"x": torch.zeros(2, SEQ, 8)}, square_loss)
    said = verify_capture(task, folder=tmp_path)
    assert said.startswith("capture not verified: the module cannot run in float64") and "no kernel" in said
    with pytest.raises(CaptureError, match=r"verify='required', but .* no kernel for float64; verify=True trains"):
        verify_capture(task, "required", tmp_path)
    assert verify_capture(task, False, tmp_path) == "capture not verified: verify=False"
    assert "it would take about" in verify_whole(plain_task(), 0.0).text
    for choice in (True, False, "required"):
        assert check_verify(choice) == choice
    for wrong in ("require", 1, None):
        with pytest.raises(PinError, match="use True, False or 'required'"):
            check_verify(wrong)


def test_what_was_verified_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, ran = task_of("llama"), []

    def counted(task: VerifyTask, limit_s: float) -> Verification:
        ran.append(1)
        return verify_whole(task, limit_s)

    monkeypatch.setattr(door, "verify_whole", counted)
    first = verify_capture(task, folder=tmp_path)
    assert first.startswith("capture verified in float64") and verify_capture(task, folder=tmp_path) == first
    assert len(ran) == 1
    with pytest.raises(CaptureError, match="attention of"):  # another graph of the same model
        verify_capture(replace(task, graph=with_node(task.graph, *LOST_MASK)), folder=tmp_path)
    monkeypatch.setattr(door, "code_hash", lambda *_: "another checkout")
    assert verify_capture(task, folder=tmp_path) == first and len(ran) == 3
    for file in (tmp_path / "verified").iterdir():
        file.write_text("{")
    assert verify_capture(task, folder=tmp_path) == first and len(ran) == 4  # damaged: anew
    (tmp_path / "file").touch()
    assert verify_capture(task, folder=tmp_path / "file") == first and len(ran) == 5  # nothing can be kept there
    own = plain_task()  # code that no version tells
    for _ in range(2):
        verify_capture(own, folder=tmp_path)
    assert len(ran) == 7


# -- fewer layers -----------------------------------------------------------------------------------------------------


def test_fewer_layers_of_the_same_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without values: two dense layers and the first with experts."""
    with torch.device("meta"):
        model = models.make_llama(num_hidden_layers=7)
    task = captured(model, models.token_batch(2, SEQ), None)
    outcome = verify_shallow(task, check.LIMIT_S)
    assert outcome.done and outcome.text.startswith("on 2 of 7 layers of the same config, in float64: loss and 21 grad")
    other = with_node(task.graph, lambda n: n.op == "silu", lambda n: replace(n, op="relu"))
    unlike = verify_shallow(replace(task, graph=other), check.LIMIT_S)
    assert not unlike.done and "captured in other blocks" in unlike.text

    def lossy(*args: Any) -> ModelGraph:
        return with_node(capture(*args), *LOST_MASK)

    monkeypatch.setattr(shallow, "capture", lossy)
    broken = replace(task, graph=with_node(task.graph, *LOST_MASK))
    with pytest.raises(CaptureError, match=r"attention of model.layers.0.self_attn"):
        verify_shallow(broken, check.LIMIT_S)


# -- the door ---------------------------------------------------------------------------------------------------------


def lossy_capture(rank: int, world: int, verify: bool | str) -> str:
    """What every rank is told where capture loses the mask of attention."""
    from autoplan.capture.frontend import cache

    model, batch = models.make_llama(), models.token_batch(2, SEQ)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache, "cached", lambda *_: with_node(capture(model, batch), *LOST_MASK))
        try:
            pm = autoplan.parallelize(model, "local", example_inputs=batch, pins={"tp": world}, verify=verify)
        except CaptureError as exc:
            return str(exc)
    return f"{pm.plan.capture} {'not verified' in str(pm.plan)} {'not verified' in pm.plan.to_json()}"


@pytest.mark.processes
def test_all_ranks_hear_of_it() -> None:
    told = pool(2).run(lossy_capture, True)
    assert told[0] == told[1] and "is the attention of model.layers.0.self_attn" in told[0]
    assert pool(2).run(lossy_capture, False) == ["capture not verified: verify=False True True"] * 2


def test_precision_of_the_capture() -> None:
    """What was captured to compute in 16 bits is the same function."""
    model, batch = models.make_gpt(), models.token_batch(2, SEQ)
    given = {"ids": batch["input_ids"], "labels": batch["labels"]}
    with computing_in(model, torch.float16):
        graph = capture(model, given, models.gpt_loss)
    assert verify_whole(VerifyTask(model, graph, given, models.gpt_loss, torch.float16)).done
    half = models.make_llama().bfloat16()
    assert verify_whole(captured(half, batch, None)).done


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([[True, False, True, True]] * 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) @ self.mask.float()
        return out


def _weighted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    positive = torch.tensor(3.3)
    return nn.functional.binary_cross_entropy_with_logits(output, batch["labels"].float(), pos_weight=positive)


def test_a_mask_as_numbers_is_as_wide_as_all_others() -> None:
    """`.float()` of bools and of whole numbers, in a forward and in a loss."""
    model, batch = _Masked(), {"x": torch.randn(3, 4), "labels": torch.randint(0, 2, (3, 4)).bool()}
    for loss in (_weighted, lambda output, batch: (output * batch["labels"].long().float()).mean()):
        graph = capture(model, batch, loss)
        assert verify_whole(VerifyTask(model, graph, batch, loss), limit_s=60.0).done
