"""Programs of models whose attention sees chunks, or a window on both sides, train as one device."""

from __future__ import annotations

import pytest
from parity import Case, assert_trains_as_one_device, compiled, graph_of, spread_out

from autoplan.catalog import load_model
from autoplan.ops.batch import context_obstacle
from autoplan.ops.record import OpKind
from autoplan.ops.table import nodes_with

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]

CASES = [
    Case("chunks", cp=2, context_method="ring"),
    Case("sides", cp=2, context_method="gather", recompute="full"),
    Case("chunks", tp=2, dp=2, zero=3, num_micro_batches=2, labels="unequal"),
    Case("sides", cp=2, context_method="ulysses"),
    Case("chunks", cp=4, context_method="ulysses2xring2"),
    Case("sides", cp=4, context_method="ulysses2xgather2"),
    Case("chunks", cp=2, context_method="gather", tp=2, num_micro_batches=2),
    Case("sides", cp=2, context_method="ring", num_micro_batches=2),
    Case("chunks", pp=2, cp=2, context_method="ulysses", num_micro_batches=2),
    Case("sides-padded", cp=2, context_method="ring"),
    Case("chunks-packed", cp=2, context_method="ring"),
    Case("sides-padded", dp=2, zero=1, recompute="full"),
    Case("chunks-left", cp=2, context_method="gather"),
    Case("sides", tp=2, pp=2, num_micro_batches=2),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("case", spread_out(CASES, 7), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("chunks", {(True, None, 5, None), (True, None, None, None)}),
        ("sides", {(False, 3, None, 2), (False,) + (None,) * 3}),
    ],
)
def test_every_layer_is_one_op(family: str, want: set[tuple[bool, int | None, int | None, int | None]]) -> None:
    nodes = [node for _, node in nodes_with(graph_of(family, 0.0), OpKind.ATTENTION)]
    found = {(n.attrs["causal"], *(n.attrs.get(name) for name in ("window", "chunk", "ahead"))) for n in nodes}
    assert found == want and all(len(n.inputs) == 3 for n in nodes)
    text = compiled(Case(family, cp=2, context_method="ring")).sources["stage0.py"]
    assert text.count("ring='cp'") == len(nodes) and ("chunk=5" in text or "window=3, ahead=2" in text)
    assert text.count("context_positions(s, 'cp', ") == (family == "chunks") * len(nodes)  # of the temperatures


def test_llama_4_can_be_cut_along_the_sequence() -> None:
    """With its rotations, which are complex, and the temperatures of layers without."""
    assert context_obstacle(load_model("llama-4-scout")) is None
