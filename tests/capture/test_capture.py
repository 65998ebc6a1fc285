"""Capture: blocks found and captured once, symbols kept, the loss normalised, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from small_stacks import Alternating, Looped, ScaledBlock, Stack, Tupled, TupleStack, UnusedNumber, square_loss
from torch import nn

from autoplan.capture.evaluation import updated_by
from autoplan.capture.export import _capture, capture
from autoplan.capture.frontend import cache
from autoplan.capture.frontend.cache import cached, capture_key
from autoplan.capture.frontend.inputs import LossModule
from autoplan.capture.frontend.scans import Scans
from autoplan.errors import CaptureError, GraphError
from autoplan.ir.graph import ModelGraph, check
from autoplan.ir.symbols import Expr
from autoplan.ops.batch import batch_obstacle
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


def gpt_batch(batch: int = 3, seq: int = 16) -> dict[str, torch.Tensor]:
    made = models.token_batch(batch, seq)
    return {"ids": made["input_ids"], "labels": made["labels"]}


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_identical_layers_are_captured_once(num_layers: int) -> None:
    graph = capture(models.make_llama(num_hidden_layers=num_layers), models.token_batch(3, 16))
    counts = graph.call_counts()
    assert counts["layer"] == num_layers
    assert sum(n > 1 for n in counts.values()) <= 1
    shallow = capture(models.make_llama(num_hidden_layers=1), models.token_batch(3, 16))
    assert sum(len(b.nodes) for b in graph.blocks.values()) == sum(len(b.nodes) for b in shallow.blocks.values())
    model = models.make_llama(num_hidden_layers=num_layers)
    assert {p for c in graph.calls for p in c.params.values()} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_merged_capture_equals_the_whole(family: str) -> None:
    """Capturing layer by layer gives the same graph: the short cut changes nothing."""
    if family == "llama":
        model: nn.Module = models.make_llama()
        args: tuple[Any, ...] = (model, models.token_batch(3, 16), None)
    else:
        args = (models.make_gpt(dropout=0.1), gpt_batch(), models.gpt_loss)
    wrappers = (LossModule(args[0], tuple(args[1]), args[2]) for _ in range(2))
    merged, whole = (_capture(w, args[1], Scans(()), merge=m) for w, m in zip(wrappers, (True, False), strict=True))
    assert merged is not None and whole is not None
    assert merged.blocks == whole.blocks
    strip = [(c.name, c.block, c.params, c.buffers) for c in merged.calls]
    assert strip == [(c.name, c.block, c.params, c.buffers) for c in whole.calls]


def test_symbols_and_loss() -> None:
    graph = capture(models.make_llama(), models.token_batch(3, 16))
    assert [str(s) for s in graph.values["input_ids"].shape] == ["b", "s"]
    assert graph.loss_count == "tokens" and graph.loss_target is not None
    ops = [n.op for b in graph.blocks.values() for n in b.nodes]
    assert "cross_entropy_sum" in ops and "cross_entropy" not in ops
    assert not any(s.symbols - {"b", "s"} for s in graph.factors.values())
    q = graph.blocks["layer"].values["self_attn.q_proj.weight"]
    assert q.dims == (("kv", "group", "head"), ("hidden",))
    check(graph)
    assert ModelGraph.from_json(graph.to_json()) == graph
    assert "attention(" in str(graph)


def test_tied_weights_are_one_parameter_with_two_uses() -> None:
    graph = capture(models.make_gpt(), gpt_batch(), models.gpt_loss)
    assert "tok.weight" in graph.params and "head.weight" not in graph.params
    assert [call for call, _ in graph.tied_params["tok.weight"]] == ["embed", "head"]


def test_the_model_is_left_as_it_was() -> None:
    model = models.make_llama()
    before = model.config._attn_implementation
    capture(model, models.token_batch(2, 8))
    assert model.config._attn_implementation == before
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(type(m).__module__.startswith(("transformers", "torch")) for m in model.modules())


def test_a_layer_that_reads_its_number_is_not_merged() -> None:
    """`index` differs between the layers and is read: identity is disproved, every layer is captured by itself."""
    graph = capture(Stack(ScaledBlock), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
    scalars = [
        n.attrs["scalar"]
        for c in graph.calls
        for n in graph.blocks[c.block].nodes
        if n.op == "div_scalar" and c.name.startswith("layers")
    ]
    assert scalars == [2, 3] or scalars == [1, 2, 3]  # x / 1 is nothing
    assert graph.loss_count == "samples"


def test_a_number_that_is_not_read_does_not_matter() -> None:
    graph = capture(Stack(UnusedNumber), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
    assert graph.call_counts()["layer"] == 3


def test_layers_of_alternating_kinds_are_captured_once_each() -> None:
    """Each kind runs once on fake tensors and once in the export, however many layers there are."""
    ids = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    runs = []
    for num_layers in (3, 9):
        Alternating.runs.clear()
        graph = capture(Stack(Alternating, num_layers), ids, square_loss)
        runs.append(len(Alternating.runs))
    assert runs[0] == runs[1] == 4 and Alternating.__dict__["wide"] is False
    wide = [any(n.op == "cos" for n in graph.blocks[c.block].nodes) for c in graph.calls if "layers" in c.name]
    assert wide == [i % 3 == 2 for i in range(9)] and graph.call_counts()["layer"] == 6
    whole = _capture(LossModule(Stack(Alternating, 9), tuple(ids), square_loss), ids, Scans(()), merge=False)
    assert whole is not None and whole.blocks.keys() == graph.blocks.keys()
    assert [(c.name, c.block, c.params) for c in graph.calls] == [(c.name, c.block, c.params) for c in whole.calls]


def test_a_layer_may_return_more_than_tensors() -> None:
    graph = capture(TupleStack(Tupled), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
    assert graph.call_counts()["layer"] == 3


def test_layers_used_twice() -> None:
    """The second round is one block around the layers' own parameters; each parameter has two uses."""
    graph = capture(Looped(UnusedNumber), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
    assert set(graph.tied_params) == {f"layers.{i}.linear.{p}" for i in range(3) for p in ("weight", "bias")}


class Averaged(ScaledBlock):
    """Keeps a moving average that is not batch norm's."""

    seen: torch.Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)))
        out: torch.Tensor = self.linear(x) - self.seen
        return out


class AveragedApart(Averaged):
    """Keeps it under no_grad, where nothing of the loss reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean((0, 1)))
        out: torch.Tensor = self.linear(x)
        return out


class AveragedData(Averaged):
    """A running mean past autograd, as codebooks are updated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x - self.seen)
        self.seen.data.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return out


class DataDependent(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x  # type: ignore[no-any-return]


class Random(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.poisson(x.exp()))  # type: ignore[no-any-return]


class Several(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * torch.poisson(x.exp()) + torch._standard_gamma(x.exp())
        return out


class Lifted(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * torch.tensor([1.0] * 8192)[:8]
        return out


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DataDependent, r"DataDependent|test_capture\.py:\d+"),
        (
            Random,
            r"test_capture\.py:\d+: aten\.poisson\.default .* draws random numbers.*torch\.rand",
        ),
        (Lifted, r"a constant tensor of 8,192 elements .* register it as a buffer"),
        (Several, r"(?s)2 operations cannot be captured:.*aten\.poisson.*aten\._standard_gamma"),
    ],
)
def test_what_cannot_be_captured_is_named(block: type, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Stack(block), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)


@pytest.mark.parametrize("block", [Averaged, AveragedApart, AveragedData])
def test_a_new_value_of_a_buffer_is_one_node(block: type) -> None:
    ids = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    graph = capture(Stack(block), ids, square_loss)
    assert updated_by(graph) == {f"layers.{i}.seen" for i in range(3)} and len(graph.blocks) == 3
    assert verify_whole(VerifyTask(Stack(block), graph, ids, square_loss)).done


def test_no_loss() -> None:
    with pytest.raises(CaptureError, match="returned no loss; pass loss_fn"):
        capture(models.make_gpt(), gpt_batch())
    with pytest.raises(CaptureError, match=r"none of the inputs x is an argument of GPT\.forward\(ids\)"):
        capture(models.make_gpt(), {"x": torch.zeros(2, 4, dtype=torch.long)}, models.gpt_loss)


class Useless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def test_a_parameter_without_influence_gets_no_gradient() -> None:
    graph = capture(Useless(), {"x": torch.zeros(2, 4)}, square_loss)
    (note,) = graph.notes
    assert "unused.bias, unused.weight do not influence the loss" in note
    assert set(graph.params) == {"used.weight", "used.bias"}
    assert ModelGraph.from_json(graph.to_json()).notes == graph.notes


def test_sum_reduction_counts_nothing() -> None:
    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    assert capture(models.make_gpt(), gpt_batch(), loss).loss_count == "none"


def test_expr_of_shifted_labels() -> None:
    graph = capture(models.make_llama(), models.token_batch(3, 16))
    assert Expr.symbol("s") + 1 in graph.factors.values()  # HF pads the labels by one before it shifts them


# -- cache ------------------------------------------------------------------------------------------------------------


def test_cache(tmp_path: Path) -> None:
    model, batch = models.make_llama(), models.token_batch(2, 16)
    made = []

    def make() -> ModelGraph:
        made.append(1)
        return capture(model, batch)

    first, second = cached(model, batch, make, tmp_path), cached(model, batch, make, tmp_path)
    assert first == second and len(made) == 1
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace("attention", "attentiom"))
    assert cached(model, batch, make, tmp_path) == first and len(made) == 2  # damaged: made anew


def test_a_cache_that_cannot_be_used_keeps_nothing(tmp_path: Path) -> None:
    model, batch = models.make_llama(), models.token_batch(2, 16)
    graph = capture(model, batch)
    (tmp_path / "file").touch()
    assert cached(model, batch, lambda: graph, tmp_path / "file" / "graphs") is graph
    folder = tmp_path / "graphs"
    key = capture_key(model, batch)
    (folder / f"{key}.json").mkdir(parents=True)  # a name that is no file can be neither read nor written
    assert cached(model, batch, lambda: graph, folder) is graph


def test_fingerprint_sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = models.token_batch(2, 16)
    base = capture_key(models.make_llama(), batch)
    assert base == capture_key(models.make_llama(seed=5), batch)  # values do not matter
    changes: list[dict[str, Any]] = [
        {"num_hidden_layers": 3},
        {"rms_norm_eps": 1e-4},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
    ]
    assert len({base, *(capture_key(models.make_llama(**c), batch) for c in changes)}) == len(changes) + 1
    assert capture_key(models.make_llama().eval(), batch) != base
    frozen = models.make_llama()
    next(frozen.parameters()).requires_grad_(False)
    assert capture_key(frozen, batch) != base
    assert capture_key(models.make_llama(), {"input_ids": batch["input_ids"]}) != base
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_own_code", lambda: "another checkout of the same version")
        assert capture_key(models.make_llama(), batch) != base
    assert capture_key(models.make_gpt(), gpt_batch()) is None  # the user's own code: captured every time


def test_the_key_needs_no_installed_autoplan_or_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout on PYTHONPATH has no metadata, and a model of torch's own modules needs no transformers."""
    there = metadata.version

    def version(name: str) -> str:
        if name in ("autoplan", "transformers"):
            raise metadata.PackageNotFoundError(name)
        return there(name)

    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"input": torch.randn(2, 4)}
    before = capture_key(model, batch)
    monkeypatch.setattr(metadata, "version", version)
    assert capture_key(model, batch) not in (None, before)  # the version of transformers is a part where it is there


class Bounded(nn.Module):
    """Positions from a table that the code checks against."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(16, 8), nn.Parameter(torch.zeros(32, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tok(ids) + self.pos[: ids.shape[1]]
        return out


def test_a_bounded_sequence_keeps_its_symbol() -> None:
    graph = capture(Bounded(), {"ids": torch.zeros(2, 8, dtype=torch.long)}, square_loss)
    assert [str(s) for s in graph.values["ids"].shape] == ["b", "s"]


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * torch.arange(2).unsqueeze(1)
        return out


def test_a_fixed_batch_is_refused() -> None:
    with pytest.raises(CaptureError, match="one batch size only"):
        capture(FixedBatch(), {"x": torch.zeros(2, 8)}, square_loss)


# -- may the batch be split -------------------------------------------------------------------------------------------


def cosine_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    flat = out.mean(dim=1)
    return (flat @ flat.transpose(0, 1)).square().mean()


def two_means(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean() + 0.1 * out.abs().mean()


def root_of_mean(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean().sqrt()


def centred(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return (out - out.mean(dim=0, keepdim=True)).square().mean()


def softmax_over_batch(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.softmax(dim=0).square().mean()


class Penalised(nn.Module):
    """A term that does not depend on the batch is counted once, where it is added to the rest. In a root it cannot."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.root = root

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x).square().mean() + self.linear.weight.square().sum()
        return out.sqrt() if self.root else 3.0 * out


@pytest.mark.parametrize("loss", [cosine_loss, root_of_mean, centred, softmax_over_batch])
def test_a_batch_that_cannot_be_split_is_refused(loss: Any) -> None:
    graph = capture(Stack(UnusedNumber), {"ids": torch.zeros(2, 4, dtype=torch.long)}, loss)
    found = batch_obstacle(graph)
    assert found is not None and " at the loss function cannot be computed sample by sample" in found


def test_a_term_without_the_batch() -> None:
    assert batch_obstacle(capture(Penalised(root=False), {"x": torch.zeros(4, 8)})) is None
    found = batch_obstacle(capture(Penalised(root=True), {"x": torch.zeros(4, 8)}))
    assert found is not None and found.startswith("add at test_capture.py")


def test_a_batch_that_can_be_split() -> None:
    stack = capture(Stack(UnusedNumber), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
    assert batch_obstacle(stack) is None
    assert batch_obstacle(capture(Stack(UnusedNumber), {"ids": torch.zeros(2, 4, dtype=torch.long)}, two_means)) is None
    assert batch_obstacle(capture(models.make_llama(), models.token_batch(2, 8))) is None
    assert batch_obstacle(capture(models.make_gpt(dropout=0.1), gpt_batch(), models.gpt_loss)) is None


class _Several(nn.Module):
    """Returns a mapping with what the loss needs, what it does not, and what has no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {
            "states": states,
            "logits": self.head(states[-1]),
            "unused": torch.special.i1e(self.head.bias),  # an op that the capture refuses
            "weight": self.head.weight.square().sum(),
            "note": "no tensor",
        }


def test_results_are_what_the_loss_depends_on() -> None:
    """By name and nested; not the input, not what the loss does not need, not what has no batch dim."""

    def loss(out: Any, batch: Any) -> torch.Tensor:
        return out["logits"].square().mean() + out["weight"]

    graph = capture(_Several(), {"x": torch.zeros(4, 8)}, loss)
    found = {result.name: result for result in graph.results}
    assert found.keys() == {"states.1", "states.2", "states.3", "logits"}
    assert found["states.2"].call == "layers.1" and found["logits"].call == "head"
    assert graph.content_hash == graph.without_results().content_hash
    again = type(graph).from_json(graph.to_json())
    assert again == graph
    broken = replace(graph, results=(found["logits"]._replace(value="nowhere"),))
    with pytest.raises(GraphError, match="result 'logits' is not a value of call"):
        type(graph).from_json(broken.to_json())
