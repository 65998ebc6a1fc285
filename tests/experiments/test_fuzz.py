"""Random programs (experiments.compatibility.fuzz): a few that are the same in every run, and defects that are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph
from autoplan.ops.table import RECORDS
from experiments.compatibility.fuzz import examine as fuzz
from experiments.compatibility.fuzz.examine import Crashed, Unnamed, Wrong, examine
from experiments.compatibility.fuzz.plans import FuzzPlan
from experiments.compatibility.fuzz.programs import HEAD, FuzzProgram
from experiments.compatibility.fuzz.rounds import LEVELS, Counts, draw_and_examine, settings


@pytest.mark.parametrize(("level", "examples"), [("ops", 15), ("models", 12)])
def test_random_programs_compute_what_their_modules_compute(level: str, examples: int) -> None:
    """The command runs more of them, and makes what it finds smaller."""
    counts = Counts()

    @settings(examples, derandomize=True, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        counts.add(draw_and_examine(data, LEVELS[level]))

    run()
    assert counts.numbers["programs"] >= examples and counts.numbers["says nothing"] < examples / 2
    assert counts.numbers["runs equal to the module"] >= examples
    assert level != "ops" or counts.numbers["splits of nodes"] > 100


SOFTMAX = FuzzProgram(
    HEAD + "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.scale = nn.Parameter(torch.randn(8))\n\n"
    "    def forward(self, x):\n"
    "        return (x * self.scale * 2).softmax(-1)\n\n"
    "def loss_fn(out, batch):\n"
    "    return out.square().mean()\n",
    ("x",),
)


def test_the_program_is_equal_without_a_defect() -> None:
    outcome = examine(SOFTMAX, (FuzzPlan(tp=2), FuzzPlan(dp=2)), "2")
    assert len(outcome.equal) == 3 and outcome.num_splits > 5


def test_a_wrong_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> ModelGraph:
        graph = capture(*given)
        blocks = {
            name: replace(
                b, nodes=tuple(replace(n, attrs={"scalar": 3}) if n.op == "mul_scalar" else n for n in b.nodes)
            )
            for name, b in graph.blocks.items()
        }
        assert blocks != graph.blocks
        return replace(graph, blocks=blocks)

    monkeypatch.setattr(fuzz, "capture", wrong)
    with pytest.raises(Wrong, match="class Model"):
        examine(SOFTMAX, ())


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax whose dim may be split: seen at the node, under every plan."""
    wrong = replace(RECORDS["softmax"], rule="[*a] -> [*a]", has=())
    monkeypatch.setitem(RECORDS, "softmax", wrong)  # type: ignore[arg-type]
    with pytest.raises(Wrong, match=r"softmax.* under S\("):
        examine(SOFTMAX, (), "2")


@pytest.mark.parametrize(
    ("error", "found"), [(KeyError("scale"), Crashed), (fuzz.AutoplanError("it does not work"), Unnamed)]
)
def test_an_exception_that_is_no_named_refusal_is_found(
    error: Exception, found: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> ModelGraph:
        raise error

    monkeypatch.setattr(fuzz, "capture", broken)
    with pytest.raises(found):
        examine(SOFTMAX, ())
