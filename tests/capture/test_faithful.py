"""A program computes what the model does, or the model is refused: what capture could silently lose."""

from __future__ import annotations

import functools
import inspect
import linecache
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from harness import pool
from parity import SEQ, cluster_of, fake_group, worst
from small_stacks import Stack, square_loss
from torch import nn

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.ops import OPS, Arguments, lower
from autoplan.capture.passes.cast import computing_in
from autoplan.errors import CaptureError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.arguments import Args, IrOp
from autoplan.runtime import model as runtime_model
from autoplan.runtime.failure import RankFailure
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.optim import check_elementwise, on_local_shards
from autoplan.runtime.program import load_module
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

DIM = 8
Loss = Callable[[Any, Any], torch.Tensor]


class Model(nn.Module):
    """A few products around an operation."""

    def __init__(self, op: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.op = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), op
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, DIM]."""
        return self.last(self.op(self, self.first(x)).tanh() @ self.weight)


def mean_square(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def graph_of(model: nn.Module, batch: dict[str, torch.Tensor], loss: Loss | None = mean_square) -> ModelGraph:
    return capture(model, {n: x[:2] for n, x in batch.items()}, loss)


def run(
    model: nn.Module,
    graph: ModelGraph,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype | None = torch.float64,
    num_micro_batches: int = 1,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the program of one device."""
    size, length = next(iter(batch.values())).shape[:2]
    _, program = plan_program(graph, cluster_of(1, "bandwidth"), {"num_micro_batches": num_micro_batches}, size, length)
    with fake_group(1):
        tensors = dict(model.named_parameters()), dict(all_buffers(model))
        pm = ParallelModel(program.spec, program.sources, *tensors, num_micro_batches=num_micro_batches, dtype=dtype)
        loss = float(pm.step(batch))
        return loss, {n: g.clone() for n, g in pm.gradients().items()}


def assert_equal(model: nn.Module, batch: dict[str, torch.Tensor], loss: Loss = mean_square) -> None:
    model = model.double()
    got_loss, got = run(model, graph_of(model, batch, loss), batch)
    want = loss(model(batch["x"]), batch)
    want.backward()
    assert got_loss == pytest.approx(want.item(), rel=1e-12)
    error, name = worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert error < 1e-12, name


def assert_stack_equal(model: Stack) -> None:
    """Of layers over the embeddings of tokens; every parameter has a gradient."""
    torch.manual_seed(0)
    model, batch = model.double(), {"ids": torch.randint(16, (2, 4))}
    loss, gradients = run(model, capture(model, batch, square_loss), batch)
    want = square_loss(model(batch["ids"]), batch)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-11, atol=1e-14)


def given(batch: int = 4, seq: int = 6) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, seq, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


# -- what a forward changes --------------------------------------------------------------------------------------------


class ChangesItsInput(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        x[:, :2] = 0.5
        return super().forward(x)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("loss", [mean_square, lambda out, batch: (out - batch["x"]).square().mean()])
def test_an_input_that_the_forward_changes(loss: Loss, num_micro_batches: int) -> None:
    """The loss function sees it as the forward has left it; the user's batch stays as it is."""
    model, batch = ChangesItsInput(lambda m, x: x).double(), given()
    graph = graph_of(model, batch, loss)
    example = {n: x[:2].clone() for n, x in batch.items()}
    assert verify_whole(VerifyTask(model, graph, example, loss), limit_s=60.0).done
    assert torch.equal(example["x"], batch["x"][:2])
    got_loss, got = run(model, graph, batch, num_micro_batches=num_micro_batches)
    assert torch.equal(batch["x"], given()["x"])
    want = loss(model(batch["x"]), batch)
    want.backward()
    assert got_loss == pytest.approx(want.item(), rel=1e-12)
    error, name = worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert error < 1e-12, name


# -- arguments of operations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda m, x: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), m.weight, beta=0.5, alpha=3.0).view_as(x),
        lambda m, x: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), m.weight, beta=0, alpha=2.0).view_as(x),
        lambda m, x: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), m.weight, beta=2.0, alpha=2.0).view_as(x),
        lambda m, x: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), m.weight).view_as(x),
        lambda m, x: torch.rsub(x, 2.0, alpha=3.0),
        lambda m, x: x * x.float().sum(-1, keepdim=True, dtype=torch.float64),
        lambda m, x: x + (x > 0).sum(-1, keepdim=True, dtype=torch.float64) / 7,
        lambda m, x: F.rms_norm(x, (DIM,)),
        # forms that no record covers
        lambda m, x: F.rms_norm(x.unflatten(-1, (2, 4)), (2, 4)).flatten(2),
        lambda m, x: x.cumsum(-1, dtype=torch.float32).double(),
        lambda m, x: torch.sub(x, x.tanh(), alpha=2),
    ],
)
def test_arguments_of_operations(op: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    assert_equal(Model(op), given())


def test_what_a_rule_does_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is at its default, or shows in the result."""

    def rule(a: Args) -> IrOp:
        return IrOp("tanh", (a["self"],), {})

    monkeypatch.setitem(OPS, "aten.made_up.default", rule)
    for more, refused in (({}, False), ({"size": 3}, False), ({"alpha": 1}, False), ({"alpha": 2}, True)):
        a = Arguments()
        a.update({"self": "x", **more})
        if refused:
            with pytest.raises(CaptureError, match="made_up with alpha=2 is not supported"):
                lower("aten.made_up.default", a, {"alpha": 1})
        else:
            assert lower("aten.made_up.default", a, {"alpha": 1}) == IrOp("tanh", ("x",), {})


# -- sizes that the forward asks for ----------------------------------------------------------------------------------


def test_a_program_is_for_the_lengths_it_was_captured_for() -> None:
    model = Model(lambda m, x: x / (2.0 if x.shape[1] > 6 else 1.0)).double()
    short, long = given(seq=6), given(seq=9)
    assert graph_of(model, short).bounds == {"s": (0, 6)} and graph_of(model, long).bounds == {"s": (7, None)}
    for batch in (short, long):
        assert_equal(model, batch)
        model.zero_grad()
    with pytest.raises(
        PinError, match=r"sequences of 9 tokens: the forward of Model depends .* nearest legal: seq_len=6"
    ):
        plan_program(graph_of(model, short), cluster_of(1, "bandwidth"), {}, 4, 9)
    _, program = plan_program(graph_of(model, long), cluster_of(1, "bandwidth"), {}, 4, 9)
    with fake_group(1):
        tensors = dict(model.named_parameters()), dict(model.named_buffers())
        pm = ParallelModel(program.spec, program.sources, *tensors, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"sequences of 6 tokens: .* program is valid for 7 or more"):
            pm.step(short)


def test_a_model_that_asks_for_the_size_of_the_batch_is_refused() -> None:
    model = Model(lambda m, x: 2 * x if x.shape[0] >= 4 else x).double()
    with pytest.raises(CaptureError, match=r"Model asks how large the batch is .*that of up to 3"):
        graph_of(model, given())


def test_the_size_of_the_batch_may_be_asked_where_it_changes_nothing() -> None:
    def op(m: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= 64 or x.shape[0] * 96 * 2 / 1024**3 > 2:
            x = x.contiguous()
        return 2 * x

    model = Model(op).double()
    assert graph_of(model, given()).bounds == {}
    assert_equal(model, given())


def test_parts_without_elements() -> None:
    def op(m: Any, x: torch.Tensor) -> torch.Tensor:
        """Rotations of an axis without dims and of one with all, as Bria joins them."""
        places = torch.arange(x.shape[1], dtype=x.dtype)
        parts = [
            torch.outer(places, torch.arange(n, dtype=x.dtype)).cos().repeat_interleave(2, 1) for n in (0, DIM // 2)
        ]
        return x * torch.cat(parts, -1)

    assert_equal(Model(op).double(), given())


# -- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [[*range(7), *range(40, 49)], [*range(7), *range(3, 12)], [*range(5, 21)]])
def test_documents_begin_where_a_position_does_not_follow(positions: list[int]) -> None:
    """As transformers has it: also where the next document does not begin at 0."""
    model, batch = models.make_llama(), models.token_batch(4, SEQ)
    batch["position_ids"] = torch.tensor(positions).expand(4, -1)
    loss, got = run(model, graph_of(model, batch, None), batch, None)
    whole = model(**batch, use_cache=False).loss
    whole.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(whole.item(), rel=1e-6) and worst(got, want)[0] < 1e-5


# -- means in 16 bits -------------------------------------------------------------------------------------------------


def test_a_mean_in_16_bits_does_not_overflow() -> None:
    """Its sum would: 60 x 8 values of about 1,600."""
    model = Model(lambda m, x: x)
    with torch.no_grad():
        model.last.bias += 40.0
    batch = {"x": given(4, 60)["x"].float()}
    with computing_in(model, torch.float16):
        graph = capture(model, {"x": batch["x"][:2].half()}, mean_square)
    _, program = plan_program(graph, cluster_of(1, "bandwidth"), {"num_micro_batches": 2}, 4, 60, precision="fp16")
    ((_, text),) = program.sources.items()
    assert "dtype=torch.float32" in text
    with fake_group(1):
        pm = ParallelModel(program.spec, program.sources, dict(model.named_parameters()), {}, num_micro_batches=2)
        loss = float(pm.step({"x": batch["x"].half()}))
    assert loss == pytest.approx(mean_square(model(batch["x"]), None).item(), rel=3e-3)


# -- emitted files ----------------------------------------------------------------------------------------------------


def test_the_text_that_was_sent_runs_whatever_stands_in_the_file(tmp_path: Path) -> None:
    """Ranks on one machine share the folder, and so may two jobs: the file may change after it was compared."""
    path = tmp_path / "stage0.py"
    path.write_text("number = 0\n")
    for number in range(1, 4):  # the same path again: nothing of the last text is left
        text = f"number = {number}\n\ndef fail():\n    raise ValueError(number, {number})\n"
        module = load_module(path, "stage_of_a_test", text)
        assert (module.number, module.__file__) == (number, str(path))
        assert f"(number, {number})" in inspect.getsource(module.fail)
        with pytest.raises(ValueError) as failed:
            module.fail()
        linecache.checkcache()  # as traceback does
        shown = "".join(traceback.format_exception(failed.value))
        assert f'File "{path}", line 4' in shown and f"raise ValueError(number, {number})" in shown


def test_a_program_is_what_was_broadcast_and_lies_in_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    """Another job writes its own program to the same folder right after this one has written."""
    model = Model(lambda m, x: x)
    _, program = plan_program(graph_of(model, given()), cluster_of(1, "bandwidth"), {}, 4, 6)
    replaced = []

    def replace_then_load(path: Path, name: str, text: str) -> Any:
        assert path.read_text() == text  # written, for who opens it
        path.write_text(text.replace("import *", "import missing"))
        replaced.append(path)
        return load_module(path, name, text)

    monkeypatch.setattr(runtime_model, "load_module", replace_then_load)
    with fake_group(1):
        ParallelModel(program.spec, program.sources, dict(model.named_parameters()), {}, folder=tmp_path)
    assert replaced
    with pytest.raises(ImportError, match="missing"):  # what reading the file again would run
        load_module(replaced[0], "stage_of_a_test", replaced[0].read_text())


def test_a_program_without_a_folder_writes_no_file_and_shows_its_lines(monkeypatch: Any) -> None:
    """A process that is killed would leave a temporary folder behind."""
    model = Model(lambda m, x: x)
    _, program = plan_program(graph_of(model, given()), cluster_of(1, "bandwidth"), {}, 4, 6)

    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file is made")

    for name in ("mkstemp", "mkdtemp"):
        monkeypatch.setattr(tempfile, name, made)
    with fake_group(1):
        given_parameters = dict(model.named_parameters())
        stages = [ParallelModel(program.spec, program.sources, given_parameters, {}).stage for _ in range(2)]
    (text,) = program.sources.values()
    linecache.checkcache()  # as traceback does
    for stage in stages:
        assert inspect.getsource(type(stage)) in text
    paths = [str(inspect.getsourcefile(type(stage))) for stage in stages]
    assert paths[0] != paths[1] and not any(Path(path).exists() for path in paths)


# -- what is not trained ----------------------------------------------------------------------------------------------


def test_an_optimizer_of_no_parameters() -> None:
    """Of a pipeline stage that is frozen."""
    made = on_local_shards(functools.partial(torch.optim.AdamW, lr=0.1), [])
    check_elementwise(made, sharded=True)
    made.zero_grad()
    made.step()
    assert sum(p.numel() for group in made.param_groups for p in group["params"]) == 0


def frozen_stage(rank: int, world: int) -> tuple[bool, float]:
    """Whether the state is the model's, and its loss; the second stage has nothing to train."""
    import autoplan

    model = models.make_llama()
    model.register_parameter("aside", nn.Parameter(torch.ones(3), requires_grad=False))
    for name, p in model.named_parameters():
        if "layers.2" in name or "layers.3" in name or name in ("model.norm.weight", "lm_head.weight"):
            p.requires_grad_(False)
    batch = models.token_batch(4, SEQ)
    pm = autoplan.parallelize(
        model,
        autoplan.Cluster.local(world, "cpu"),
        example_inputs=batch,
        pins={"pp": world, "tp": 1, "stages": [2, 2], "num_micro_batches": 2, "recompute": "none"},
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        global_batch_size=4,
    )
    losses = []
    for _ in range(3):
        losses.append(pm.step(batch).item())
        pm.optimizer.step()
    model.load_state_dict(pm.state_dict())  # strict
    assert losses[0] == pytest.approx(models.make_llama()(**batch).loss.item(), rel=1e-5)
    return losses[2] < losses[0], model(**batch).loss.item()


@pytest.mark.processes
def test_a_frozen_stage_trains_the_others() -> None:
    found = pool(2).run(frozen_stage, timeout_s=120)
    assert found[0] == found[1] and found[0][0]


# -- a mean over samples ----------------------------------------------------------------------------------------------


def unequal(rank: int, world: int, loss: Loss) -> str:
    """What a batch of 2 samples on rank 0 and 4 on rank 1 says."""
    import autoplan

    given = models.token_batch(6, SEQ)
    batch = {"ids": given["input_ids"], "labels": given["labels"]}
    pm = autoplan.parallelize(
        models.make_gpt(),
        autoplan.Cluster.local(world, "cpu"),
        example_inputs={n: x[:2] for n, x in batch.items()},
        loss_fn=loss,
        pins={"dp": world, "num_micro_batches": 1},
        global_batch_size=4,
    )
    mine = {n: x[2:] if rank else x[:2] for n, x in batch.items()}
    try:
        return f"{pm.step(mine).item():.5f}"
    except (ValueError, RankFailure) as error:
        return str(error)


@pytest.mark.processes
def test_ranks_with_different_numbers_of_samples() -> None:
    """A mean over valid labels is right; one over samples is refused, on all ranks."""
    given = models.token_batch(6, SEQ)
    batch = {"ids": given["input_ids"], "labels": given["labels"]}
    want = models.gpt_loss(models.make_gpt()(batch["ids"]), batch)
    assert pool(2).run(unequal, models.gpt_loss, timeout_s=120) == [f"{want.item():.5f}"] * 2
    told = pool(2).run(unequal, models.mean_and_penalty, timeout_s=120)
    assert told[0] == told[1] and "2 data-parallel ranks have different numbers of samples" in told[0]
