"""Buffers that a forward updates in training: as one process that runs each whole micro-batch in sequence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import buffer_models
import pytest
import torch
from buffer_models import MODELS, WIDTH, Stacked, batch, loss, made
from harness import pool
from torch import nn
from torch.nn.utils import parametrizations

from autoplan.capture.evaluation import updated_by
from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.codegen.program import Program, compile_program
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.batch import batch_obstacle
from autoplan.program.op_costs import OpCosts
from autoplan.program.workload import workload
from autoplan.runtime.convert import CollectiveRecord
from autoplan.runtime.spec import evaluate_terms
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.simulated import SimulatedStep, run_simulated

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "zero_stage": 3, "num_micro_batches": 2},
    "tp": {"tp": 2, "num_micro_batches": 2, "state_slack": 1.0},
    "pp": {"pp": 2, "num_micro_batches": 2},
    "cp": {"cp": 2, "num_micro_batches": 2},
    "recompute": {"dp": 2, "num_micro_batches": 2, "recompute": "full"},
    "offload": {"dp": 2, "num_micro_batches": 2, "offload": "activations"},
    "dp-tp": {"dp": 2, "tp": 2, "num_micro_batches": 2, "state_slack": 1.0},
    "interleaved": {"pp": 2, "num_micro_batches": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "ZB-H1": {"pp": 2, "num_micro_batches": 4, "schedule": "ZB-H1"},
    "ZBV": {"pp": 2, "num_micro_batches": 4, "schedule": "ZBV", "virtual_stages": 2},
    "DualPipeV": {"pp": 2, "num_micro_batches": 4, "schedule": "DualPipeV", "virtual_stages": 2},
}
WITHOUT_ROWS = ("counter", "teacher", "spectral", "spectral-hook")  # buffers that no rows of a batch enter
QUICK = (
    ("codebook", "dp"),
    ("observed", "dp"),
    ("averaged", "recompute"),
    ("normalizer", "tp"),
    ("spectral", "tp"),
    ("router", "pp"),
    ("counter", "pp"),
)


def _check(name: str, pins: str, compile: str | None = None) -> None:
    for error, apart in pool(4 if pins == "dp-tp" else 2).run(
        buffer_models.trained, name, PINS[pins], compile, timeout_s=180
    ):
        assert error < 1e-10
        if "dp" in PINS[pins] and name not in WITHOUT_ROWS:
            assert apart > 1e-3  # a program whose ranks see their own rows would be found


@pytest.mark.parametrize(("name", "pins"), QUICK)
def test_three_steps_equal_one_process(name: str, pins: str) -> None:
    _check(name, pins)


@pytest.mark.slow
@pytest.mark.parametrize("pins", list(PINS))
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_under_every_plan(name: str, pins: str) -> None:
    if (name, pins) not in QUICK:
        _check(name, pins)


@pytest.mark.parametrize(("pins", "then"), [({"pp": 2}, {"dp": 2}), ({"dp": 2}, {"pp": 2})], ids=str)
def test_what_is_not_persistent_comes_back(pins: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    pool(2).run(buffer_models.resumed, str(tmp_path), pins, then, timeout_s=180)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averaged", "codebook", "observed"])
def test_in_compiled_blocks(name: str) -> None:
    _check(name, "dp", "aot_eager")


@pytest.mark.parametrize("name", list(MODELS))
def test_the_batch_can_be_split_and_the_model_is_left_as_it_was(name: str) -> None:
    model = made(name)
    before = {n: b.clone() for n, b in model.named_buffers()}
    graph = capture(model, batch(4), loss)
    assert batch_obstacle(graph) is None and updated_by(graph) == before.keys()
    done = verify_whole(VerifyTask(model, graph, batch(4), loss), limit_s=60.0)
    assert done.done and f"and {len(before)} buffer" in done.text
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_an_update_that_is_lost_or_another_is_found() -> None:
    model, changed = made("averaged"), made("averaged")
    graph = capture(model, batch(4), loss)
    for layer in changed.layers:  # type: ignore[union-attr]
        layer.forward = layer.linear.forward  # type: ignore[union-attr,operator]
    with pytest.raises(CaptureError, match="is not the module"):
        verify_whole(VerifyTask(changed, graph, batch(4), loss), limit_s=60.0)


class Twice(nn.Module):
    """Reads and changes its buffers twice in a forward: a mean, and a weight with spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def centered(self, y: torch.Tensor) -> torch.Tensor:
        before = y - self.mean
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)))
        return before * (y - self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.centered(self.linear(x)) + self.centered(self.linear(2 * x))


def test_reads_before_between_and_after_updates_are_those_of_the_module() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    graph = capture(model, batch(4), loss)
    assert batch_obstacle(graph) is None and len(updated_by(graph)) == 3
    assert verify_whole(VerifyTask(model, graph, batch(4), loss), limit_s=60.0).done


# -- what is refused ---------------------------------------------------------------------------------------------------


class Elsewhere(Stacked):
    """Reads in front of the layers what it changes behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean

    def after(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x


class Median(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("middle", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.middle.copy_(y.detach().flatten(0, 1).median(0)[0])
        return y - self.middle


class Decayed(nn.Module):
    """Changes a parameter under no_grad, where nothing reads what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return y


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.seen = torch.cat([self.seen, y.detach().mean((0, 1)).unsqueeze(0)])
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Elsewhere,
            r"buffer 'mean' is changed .* used in 2 places \(embed, head\), which may be on different pipeline",
        ),
        (Decayed, r"parameter 'linear\.weight' is changed in the forward by aten\.mul_"),
        (Growing, r"reads and then replaces 'seen'.* registered buffer of fixed shape and dtype"),
    ],
)
def test_what_cannot_be_updated_is_named(model: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model().double(), batch(4), loss)


def test_what_is_no_sum_or_extreme_splits_no_batch() -> None:
    graph = capture(Median().double(), batch(4), loss)
    assert "cannot be computed sample by sample" in str(batch_obstacle(graph))
    assert verify_whole(VerifyTask(Median().double(), graph, batch(4), loss), limit_s=60.0)


def test_a_gradient_through_an_extreme_is_refused() -> None:
    class Scaled(Median):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            most = y.amax((0, 1))
            self.middle.copy_(most.detach())
            return y / most

    with pytest.raises(CaptureError, match=r"test_buffers\.py:\d+: .* extreme over the batch.*detach"):
        capture(Scaled().double(), batch(4), loss)


# -- one rank ----------------------------------------------------------------------------------------------------------


def test_a_loss_keeps_the_sum_that_a_buffer_takes_whole() -> None:
    """The running mean of a term of the loss: the loss adds the parts up over micro-batches, the buffer is of one."""

    class Tracked(Median):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            self.middle.lerp_(y.square().mean((0, 1)).detach(), 0.1)
            return y

    graph = capture(Tracked().double(), batch(4), lambda out, batch: out.square().mean())
    assert batch_obstacle(graph) is None and updated_by(graph) == {"middle"}


def _compiled(graph: ModelGraph, pins: dict[str, Any]) -> tuple[Any, Program]:
    world = pins.get("dp", 1) * pins.get("tp", 1)
    cluster = Cluster(1, world, Device("made up", 1e12, 1e9, 1 << 36, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    config = read_pins({"num_micro_batches": 1, "recompute": "none", "state_slack": 1.0, **pins}, world)
    _, layouts, _ = make_plan(graph, cluster, config, {"b": 4, "s": buffer_models.LENGTH, "t": 1})
    return layouts, compile_program(graph, layouts)


@pytest.mark.parametrize("name", ["codebook", "observed"])
def test_what_is_sent_is_priced_and_listed(name: str) -> None:
    graph = capture(made(name), batch(4), loss)
    layouts, program = _compiled(graph, {"dp": 2})
    model, records = made(name), list[CollectiveRecord]()
    sizes = {"b": 4, "s": buffer_models.LENGTH, "t": 1}
    step = SimulatedStep({n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers()), batch())
    run_simulated(program, step, records=records)
    sent = Counter((r.kind, r.phase, r.bytes) for r in records)
    listed = [e for e in program.spec.ledger if e.per == "micro_batch"]
    assert sent == Counter((e.kind, e.phase, evaluate_terms(e.bytes, sizes)) for e in listed) and len(records) >= 2
    work = workload(graph, layouts.selection, OpCosts(graph, layouts.axes, sizes))
    priced = Counter[tuple[str, str, int]]()
    for block, times in graph.call_counts().items():
        priced.update([(c.kind, c.phase, round(c.num_bytes)) for c in work.blocks[block].comms] * times)
    assert all(priced[what] == count for what, count in sent.items())


def test_types_of_a_split_program_are_checked() -> None:
    import spmd_types

    ids = {"x": torch.zeros(2, 4, dtype=torch.long)}
    program = _compiled(capture(buffer_models.Tokens(), ids, lambda out, batch: out.square().mean()), {"tp": 2})[1]
    check_program(program.spec, program.sources)
    broken = {
        name: text.replace("update_buffer(", "update_buffer(to_partial(", 1) for name, text in program.sources.items()
    }
    found = {n: t.replace(", average, self", ", 'tp', src=R), average, self", 1) for n, t in broken.items()}
    assert found != program.sources
    with pytest.raises(spmd_types.SpmdTypeError, match=r"update_buffer: its new value is .*P on"):
        check_program(program.spec, found)


def test_a_recompute_reads_the_old_value_and_updates_nothing() -> None:
    _, program = _compiled(capture(made("averaged"), batch(4), loss), {"dp": 2})
    text, _, _ = program.sources["stage0.py"].partition("def evaluate")
    assert "held = ('average',)" in text and "average: Tensor" in text and "self.average" not in text
