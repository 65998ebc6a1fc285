"""Programs of a model with sinks in its attention train as one device."""

from __future__ import annotations

import pytest
from parity import Case, assert_trains_as_one_device, compiled, graph_of, spread_out

from autoplan.ops.record import OpKind
from autoplan.ops.table import nodes_with

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]

CASES = [
    Case("sinks", cp=2, context_method="ring"),
    Case("sinks", tp=2, dp=2, zero=3, num_micro_batches=2, labels="unequal"),
    Case("sinks", cp=2, context_method="gather", recompute="full"),
    Case("sinks", cp=2, context_method="ulysses"),
    Case("sinks", cp=4, context_method="ulysses2xring2"),
    Case("sinks", cp=4, context_method="ulysses2xgather2"),
    Case("sinks", cp=2, tp=2, context_method="ring", num_micro_batches=2),
    Case("sinks", tp=4),  # fewer key-value heads
    Case("sinks", pp=2, tp=2, num_micro_batches=2),
    Case("sinks-packed", cp=2, context_method="ring"),
    Case("sinks-packed", cp=2, context_method="gather"),
    Case("sinks-packed", tp=2),
    Case("sinks-padded", dp=2, zero=1, recompute="full"),
    Case("sinks-left", cp=2, context_method="ulysses"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("case", spread_out(CASES, 7), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def test_every_layer_is_one_op_with_its_sinks() -> None:
    nodes = [node for _, node in nodes_with(graph_of("sinks-left", 0.0), OpKind.ATTENTION)]
    assert len(nodes) > 1 and all(n.attrs["sinks"] for n in nodes)
    assert {n.attrs.get("window") for n in nodes} == {None, 5}
    text = compiled(Case("sinks-packed", cp=2, context_method="ring")).sources["stage0.py"]
    assert text.count("documents=") == text.count("sinks=") == len(nodes)
