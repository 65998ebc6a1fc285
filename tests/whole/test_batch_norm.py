"""Batch norm in training mode: statistics of the whole micro-batch over all ranks, running statistics alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import batch_norm_models
import plain_models
import pytest
import torch
from batch_norm_models import Net, batch, loss
from harness import pool
from torch import nn

from autoplan.capture.export import capture
from autoplan.codegen.program import compile_program
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import CaptureError
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
    "tp": {"tp": 2, "num_micro_batches": 1, "state_slack": 1.0},
    "pp": {"pp": 2, "num_micro_batches": 2},
    "recompute": {"dp": 2, "num_micro_batches": 2, "recompute": "full"},
}


@pytest.mark.parametrize("name", list(PINS))
def test_two_steps_equal_one_process(name: str) -> None:
    for error in pool(2).run(batch_norm_models.trained, PINS[name], timeout_s=180):
        assert error < 1e-9


FORMS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "rows": (nn.BatchNorm1d, (4,)),
    "1d": (nn.BatchNorm1d, (4, 6)),
    "2d": (nn.BatchNorm2d, (4, 6, 5)),
    "3d": (nn.BatchNorm3d, (4, 3, 2, 2)),
    "synchronised": (nn.SyncBatchNorm, (4, 6, 5)),
}


class Form(nn.Module):
    def __init__(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.norm, self.head = nn.Parameter(torch.randn(shape)), norm, nn.Linear(shape[-1], 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(x * self.scale))
        return out.flatten(1)[:, :8]


@pytest.mark.parametrize("given", [{}, {"affine": False}, {"track_running_stats": False}], ids=["", "plain", "none"])
@pytest.mark.parametrize("name", list(FORMS))
def test_forms(name: str, given: dict[str, Any]) -> None:
    kind, shape = FORMS[name]
    torch.manual_seed(0)
    model, example = Form(kind(4, **given), shape).double(), {"x": torch.randn(4, *shape).double()}
    example["labels"] = batch(4)["labels"]
    graph = capture(model, example, loss)
    assert verify_whole(VerifyTask(model, graph, example, loss), limit_s=60.0).done
    if not given:
        plain_models.assert_equal(model, example, loss, ("tp 2", "dp 2 ZeRO 3"))


def test_evaluation_mode_updates_nothing() -> None:
    graph = capture(Net().double().eval(), batch(), loss)
    ops = {n.op for b in graph.blocks.values() for n in b.nodes}
    assert ops.isdisjoint(("batch_sum", "running_statistics"))


def test_half_precision_has_statistics_in_float32() -> None:
    example = {n: x.bfloat16() if x.is_floating_point() else x for n, x in batch().items()}
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 8)).bfloat16()
    graph = capture(model, {"input": example["x"], "labels": example["labels"]}, loss)
    values = [b.values[n.outputs[0]] for b in graph.blocks.values() for n in b.nodes if n.op == "batch_sum"]
    assert len(values) == 2 and {v.dtype for v in values} == {"float32"}


def test_a_norm_in_two_places_is_refused() -> None:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.units[1].norm = self.units[0].norm

    with pytest.raises(CaptureError, match=r"units\.0\.norm\..*give each place a module of its own"):
        capture(Shared().double(), batch(), loss)


def test_one_element_per_channel_is_refused() -> None:
    from autoplan.runtime.statistics import running_statistics

    one = torch.ones(3)
    with pytest.raises(ValueError, match="more than 1 element per channel"):
        running_statistics(one, one, one.clone(), one.clone(), momentum=0.1, number=1)


def test_what_is_sent_is_priced_and_listed() -> None:
    """Four sums per norm: mean and variance, forward and backward."""
    graph = capture(Net(1).double(), batch(), loss)
    cluster = Cluster(1, 2, Device("made up", 1e12, 1e9, 1 << 36, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    config = read_pins({"dp": 2, "num_micro_batches": 1, "recompute": "none", "state_slack": 1.0}, 2)
    _, layouts, _ = make_plan(graph, cluster, config, {"b": 4, "s": 1, "t": 1})
    program, model, records = compile_program(graph, layouts), Net(1).double(), list[CollectiveRecord]()
    step = SimulatedStep({n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers()), batch())
    run_simulated(program, step, records=records)
    sent = Counter((r.kind, r.phase, r.bytes) for r in records)
    listed = [e for e in program.spec.ledger if e.per == "micro_batch"]
    assert sent == Counter((e.kind, e.phase, evaluate_terms(e.bytes, {"b": 4, "s": 1, "t": 1})) for e in listed)
    assert len(records) == 12
    work = workload(graph, layouts.selection, OpCosts(graph, layouts.axes, {"b": 4, "s": 1, "t": 1}))
    priced = Counter((c.kind, c.phase, round(c.num_bytes)) for b in work.blocks.values() for c in b.comms)
    assert all(priced[what] == count for what, count in sent.items())
