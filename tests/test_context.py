"""Context parallelism: what can be cut along the sequence, what the program then says and sends, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import models
import pytest
import torch
from parity import Case, compiled, global_batch
from torch import nn

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.cost_models.cluster import Cluster, Device, Link
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.planner import search_plan
from autoplan.points import PlanRequest
from autoplan.rules.batch import context_obstacle
from autoplan.runtime.spec import evaluate

SEQ = 16


def cluster(devices: int) -> Cluster:
    return Cluster(1, devices, Device("made up", 1e12, 1e9, 1 << 30, "made up"), Link(1e-6, 1e9, "made up"), "cpu")


@lru_cache(maxsize=8)
def graph(kind: str) -> ModelGraph:
    if kind.startswith("gpt"):
        batch = models.token_batch(2, SEQ)
        model = models.make_gpt(dropout=0.25 if kind == "gpt-dropout" else 0.0)
        return capture(model, {"ids": batch["input_ids"], "labels": batch["labels"]}, models.gpt_loss)
    make = {"llama": models.make_llama, "mixtral": models.make_mixtral, "deepseek": models.make_deepseek}[kind]
    return capture(make(), models.token_batch(2, SEQ))


class Mixing(nn.Module):
    """A layer in which tokens see each other other than by attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head, self.how = nn.Embedding(32, 8), nn.Linear(8, 32), how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.how == "mean over tokens":
            x = x - x.mean(1, keepdim=True)
        elif self.how == "softmax over tokens":
            x = x * x.softmax(1)
        elif self.how == "mean, then squared":
            return self.head(x).mean((0, 1)).square()
        return self.head(x)


def mixing(how: str) -> ModelGraph:
    ids = torch.zeros(2, SEQ, dtype=torch.long)

    def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if how == "mean, then squared":
            return out.sum()
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())

    return capture(Mixing(how), {"ids": ids, "labels": ids}, loss)


@pytest.mark.parametrize("kind", ["llama", "gpt", "mixtral", "deepseek"])
def test_decoders_can_be_cut(kind: str) -> None:
    assert context_obstacle(graph(kind)) is None


@pytest.mark.parametrize(
    ("how", "op"), [("mean over tokens", "sub"), ("softmax over tokens", "softmax"), ("mean, then squared", "square")]
)
def test_what_mixes_tokens_is_refused_by_name(how: str, op: str) -> None:
    """A mean over the tokens of a part is not that of the sequence; alone, without mixing, the model can be cut."""
    found = context_obstacle(mixing(how))
    assert found is not None and "cannot be computed for a part of the sequence" in found
    assert found.startswith((op, "mean")), found
    assert context_obstacle(mixing("not at all")) is None


def test_dropout_needs_the_whole_sequence() -> None:
    found = context_obstacle(graph("gpt-dropout"))
    assert found is not None and found.startswith("dropout at ")


@pytest.mark.parametrize(
    ("kind", "devices", "seq_len", "pins", "why"),
    [
        ("llama", 4, 18, {"cp": 2}, r"seq_len=18 cannot be cut into 4 equal chunks over cp=2; nearest .* seq_len=16$"),
        ("llama", 4, SEQ, {"cp": 8}, r"pin cp=8 does not divide the 4 devices; nearest legal: 4$"),
        ("llama", 4, SEQ, {"cp": 0}, r"pin cp=0: must be a whole number of at least 1"),
        ("gpt-dropout", 4, SEQ, {"cp": 2}, r"pin cp=2: dropout at .* for a part of the sequence; nearest legal: cp=1$"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_why(kind: str, devices: int, seq_len: int, pins: dict[str, Any], why: str) -> None:
    r = PlanRequest(graph(kind), cluster(devices), seq_len, 8, pins, precision="native", executed=True)
    with pytest.raises(PinError, match=why):
        search_plan(r)


def test_a_pinned_program_cuts_once_and_gathers_keys() -> None:
    plan, program = plan_program(graph("llama"), cluster(4), {"cp": 2, "tp": 2}, 8, SEQ)
    assert (plan.config.cp, plan.config.dp) == (2, 1) and " cp=2 " in str(plan)
    assert "cp = 1" not in plan.certificate["restrictions"]
    ((_, text),) = program.sources.items()
    assert text.count("context_part(") == 4  # token ids, labels, cosines and sines
    assert text.count("context='cp'") == 1 and "s = context_length(s, 'cp')" in text
    check_program(program.spec, program.sources, sequence=SEQ)
    assert "context" not in plan_program(graph("llama"), cluster(4), {"tp": 2}, 8, SEQ)[1].sources["stage0.py"]


def test_memory_of_activations_is_shared_out() -> None:
    """Half of what a whole sequence keeps, and the keys and values of the other half."""
    held = {}
    for cp in (1, 2):
        pins = {"cp": cp, "tp": 1, "pp": 1, "recompute": "none", "num_micro_batches": 1}
        r = PlanRequest(graph("llama"), cluster(2), SEQ, 2 // cp, pins, precision="native", executed=True)
        held[cp] = search_plan(r).plans[0].point.workload.unit_saved
    assert 0.5 < sum(held[2]) / sum(held[1]) < 0.75


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
def test_ledger_over_processes() -> None:
    """Keys and values of both passes, as many bytes as the program says."""
    from test_parity_processes import trained

    case = Case("llama", cp=2, num_micro_batches=2)
    got, spec = trained(case, "float32", 1, "sgd"), compiled(case).spec
    size = next(iter(global_batch(case).values())).shape[0] // case.num_micro_batches
    want: Counter[tuple[str, str, int, str]] = Counter()
    for e in spec.ledger:
        if e.axis == "cp":
            want[e.kind, e.axis, evaluate(e.bytes, {"b": size, "s": 16 // case.cp}), e.phase] += case.num_micro_batches
    kinds = Counter(kind for kind, *_ in want.elements())
    assert kinds == {"all_gather": 16, "reduce_scatter": 16}  # of 4 layers, 2 micro-batches, keys and values
    seen = Counter(r for r in got.ledger if r[0] in ("all_gather", "reduce_scatter"))
    assert seen == want
