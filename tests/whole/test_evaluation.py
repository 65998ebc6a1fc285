"""Evaluation of models that compute something else in training: as the module in eval(), and it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import batch_norm_models
import buffer_models
import evaluation_models
import pytest
import spmd_types
import torch
import torch.nn.functional as F
from buffer_models import MODELS, WIDTH, Stacked, batch, made
from harness import pool
from torch import nn

import autoplan
from autoplan.capture.export import capture, capture_evaluation
from autoplan.codegen.check import check_program
from autoplan.codegen.program import Program, compile_program
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.ir.graph import ModelGraph
from autoplan.ops.batch import uses_batch_size
from autoplan.runtime.spec import ProgramSpec
from autoplan.verify.evaluation import verified_evaluation
from autoplan.verify.runs import VerifyTask
from experiments.shared.default_plans import make_plan, read_pins

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "zero_stage": 3, "num_micro_batches": 2},
    "tp": {"tp": 2, "num_micro_batches": 2, "state_slack": 1.0},
    "pp": {"pp": 2, "num_micro_batches": 2},
    "cp": {"cp": 2, "num_micro_batches": 2},
    "recompute": {"dp": 2, "num_micro_batches": 2, "recompute": "full"},
    "dp-tp": {"dp": 2, "tp": 2, "num_micro_batches": 2, "state_slack": 1.0},
    "interleaved": {"pp": 2, "num_micro_batches": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2},
}
QUICK = (("codebook", "dp"), ("normalizer", "pp"), ("spectral", "tp"))


def _check(name: str, pins: str, rows: int, compile: str | None = None) -> None:
    world = 4 if pins == "dp-tp" else 2
    errors = pool(world).run(buffer_models.evaluated, name, PINS[pins], rows, compile, timeout_s=180)
    assert max(errors) < 1e-12


@pytest.mark.parametrize(("name", "pins"), QUICK)
def test_an_evaluation_is_the_module_in_eval_and_changes_nothing(name: str, pins: str) -> None:
    _check(name, pins, 3)


@pytest.mark.slow
@pytest.mark.parametrize("pins", list(PINS))
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_under_every_plan(name: str, pins: str) -> None:
    _check(name, pins, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averaged", "codebook", "spectral"])
def test_in_compiled_blocks(name: str) -> None:
    _check(name, "dp", 4, "aot_eager")


@pytest.mark.parametrize("pins", ["dp", "tp"])
def test_batch_norm_has_its_running_statistics(pins: str) -> None:
    assert max(pool(2).run(batch_norm_models.evaluated, PINS[pins], 3, timeout_s=180)) < 1e-12


@pytest.mark.parametrize("pins", [{"pp": 2}, {"cp": 2}, {"tp": 2, "recompute": "full"}], ids=str)
def test_other_heads_tables_layers_and_buffers_than_in_training(pins: dict[str, Any]) -> None:
    errors = pool(2).run(evaluation_models.evaluated, {"num_micro_batches": 2, **pins}, timeout_s=180)
    assert max(errors) < 1e-12


# -- one rank ----------------------------------------------------------------------------------------------------------


class Auxiliary(Stacked):
    """A second head that only training has, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1, self.training)
        return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)


def loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first, *others = out if isinstance(out, tuple) else (out,)
    error = (first - batch["y"]).square().mean()
    for other in others:
        error = error + 0.3 * (other - batch["y"]).square().mean()
    return error


def _program(model: nn.Module, **given: Any) -> Any:
    return autoplan.parallelize(
        model,
        "local",
        example_inputs=batch(4),
        loss_fn=loss,
        global_batch_size=4,
        pins={"num_micro_batches": 2},
        **given,
    )


@pytest.mark.usefixtures("one_process")
def test_a_head_of_training_alone_is_left_out() -> None:
    torch.manual_seed(0)
    model = Auxiliary().double()
    pm, given = _program(model), batch(4)
    assert pm.spec.evaluation is not None and pm.step(given) > pm.eval_step(given)
    with torch.no_grad():
        assert math.isclose(pm.eval_step(given), loss(pm.to_module().eval()(given["x"]), given), rel_tol=1e-12)


@pytest.mark.usefixtures("one_process")
def test_dropout_alone_needs_no_second_graph() -> None:
    class Dropped(Stacked):
        def after(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.1, self.training)

    pm = _program(Dropped().double())
    assert pm.spec.evaluation is None and not pm.spec.no_evaluation
    assert "evaluate" not in pm.source["stage0.py"]


class Further(Stacked):
    """Has a layer in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Linear(WIDTH, WIDTH)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x if self.training else self.further(x)
        return out


class Listed(Stacked):
    """Cannot be captured in evaluation."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x * len(x.tolist())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Further, r"uses the parameter further\.(bias|weight) in head, where training does not"),
        (Listed, r"the module in eval\(\) cannot be captured: "),
    ],
)
def test_what_cannot_be_evaluated_trains_and_is_refused_by_name(model: type[Stacked], reason: str) -> None:
    pm, given = _program(model().double()), batch(4)
    before = pm.step(given)
    with pytest.raises(ValueError, match=rf"{reason}.*evaluate pm\.to_module\(\) instead"):
        pm.eval_step(given)
    assert pm.step(given) == before


def test_a_graph_that_is_not_the_module_in_eval_is_left_out() -> None:
    model, changed = made("codebook"), made("codebook")
    graph = capture(model, batch(4), loss)
    task = VerifyTask(model, graph, batch(4), loss)
    assert verified_evaluation(task, 60.0, lambda: graph) is graph
    changed.head.forward = lambda x: F.linear(x, changed.head.weight)  # type: ignore[assignment,union-attr,arg-type]
    found = verified_evaluation(VerifyTask(changed, graph, batch(4), loss), 60.0, lambda: graph)
    assert found.evaluation is None and "the captured evaluation gives the loss" in found.no_evaluation


def _compiled(graph: ModelGraph, tp: int) -> Program:
    cluster = Cluster(1, tp, Device("made up", 1e12, 1e9, 1 << 36, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    config = read_pins({"num_micro_batches": 1, "recompute": "none", "state_slack": 1.0, "tp": tp}, tp)
    return compile_program(graph, make_plan(graph, cluster, config, {"b": 4, "s": buffer_models.LENGTH, "t": 1})[1])


def test_the_text_form_and_the_types_of_an_evaluation() -> None:
    ids = {"x": torch.zeros(2, 4, dtype=torch.long)}
    graph = capture(buffer_models.Tokens(), ids, lambda out, batch: out.square().mean())
    assert ModelGraph.from_json(graph.to_json()) == graph
    program = _compiled(graph, 2)
    assert ProgramSpec.from_json(program.spec.to_json()) == program.spec
    check_program(program.spec, program.sources)
    text = program.sources["stage0.py"]
    begin = text.index("def evaluate(self, hidden")
    broken = text[:begin] + text[begin:].replace("return ", "return 1 * to_partial(hidden, 'tp', src=R) + ", 1)
    with pytest.raises(spmd_types.SpmdTypeError):
        check_program(program.spec, {"stage0.py": broken})


def test_the_second_graph_is_no_part_of_what_a_plan_is_made_for() -> None:
    graph = capture(made("codebook"), batch(4), buffer_models.loss)
    assert graph.evaluation is not None and graph.without_results().evaluation is None
    assert graph.content_hash == graph.without_results().content_hash
    same = capture_evaluation(graph, made("codebook"), batch(4), buffer_models.loss)
    assert same == graph


def test_a_program_knows_whether_data_ranks_need_equal_numbers_of_samples() -> None:
    for name in ("normalizer", "codebook"):
        assert uses_batch_size(capture(made(name), batch(4), buffer_models.loss)) is (name == "normalizer")
