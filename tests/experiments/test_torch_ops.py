"""PyTorch's database of operations (experiments.compatibility.torch_ops): a few of it, and a rule that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.ops.table import RECORDS
from experiments.compatibility.one_by_one import EQUAL, NOT_RUN, REFUSED, WRONG, Row
from experiments.compatibility.torch_ops.examine import REFUSALS, RUNS, SPLITS, WHOLE, examine_entry
from experiments.compatibility.torch_ops.page import page
from experiments.compatibility.torch_ops.programs import programs
from experiments.compatibility.torch_ops.samples import Entry, entries


@pytest.fixture(scope="module")
def database() -> dict[str, Entry]:
    return {entry.name: entry for entry in entries()}


def test_the_database_is_there(database: dict[str, Entry]) -> None:
    groups = [entry.group for entry in database.values()]
    assert groups.count("operation") > 500 and groups.count("module") > 100


@pytest.mark.parametrize("name", ["cumsum", "nn.Linear"])
def test_equal(name: str, database: dict[str, Entry]) -> None:
    row = examine_entry(database[name], 2)
    counts = dict(row.parity)
    assert row.outcome == EQUAL and int(counts[RUNS]) >= 5 and int(counts[SPLITS]) > 10


def test_dims_are_counted_behind_the_samples(database: dict[str, Entry]) -> None:
    """A sum along the first dim of a sample is one along the second dim of a batch, which dp may split."""
    stacked = [p for p in programs(database["cumsum"], 4) if p.form == "batch"]
    assert any("op(h, 1)" in p.text and "'1'" in p.text for p in stacked)


def test_what_is_refused_or_not_run_says_why(database: dict[str, Entry]) -> None:
    refused, random = (examine_entry(database[name], 1) for name in ("equal", "rand_like"))
    assert refused.outcome == REFUSED and "aten.equal.default needs the values" in refused.why
    assert random.outcome in (NOT_RUN, REFUSED) and random.why
    memory = examine_entry(database["empty"], 1)
    assert memory.outcome == NOT_RUN and "memory" in memory.why


def test_a_wrong_rule_is_found(database: dict[str, Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(RECORDS["cumsum"], rule="[*a] -> [*a]", has=())
    monkeypatch.setitem(RECORDS, "cumsum", wrong)  # type: ignore[arg-type]
    row = examine_entry(database["cumsum"], 2)
    assert row.outcome == WRONG and row.is_defect and "cumsum" in row.why


def test_the_page() -> None:
    rows = [
        Row("operation", "sin", EQUAL, parity=(("programs", "2"), (RUNS, "6"), (SPLITS, "9"))),
        Row("operation", "cat", EQUAL, parity=((RUNS, "3"), (WHOLE, "1"), (REFUSALS, "1"), ("a | b", "1"))),
        Row("operation", "equal", REFUSED, "reads values", parity=((REFUSALS, "2"), ("reads values", "2"))),
        Row("module", "nn.Linear", WRONG, "Wrong: loss 1 instead of 2\nclass Model"),
    ]
    text = page(rows, absent=5)
    assert "5 further operations and modules were not tried" in text
    assert "2 programs, 9 equal runs, 9 equal splits" in text
    assert "| operations | 2 | 1 | 0 | 0 | 0 |" in text and "| modules | 0 | 0 | 1 | 0 | 0 |" in text
    assert "- nn.Linear: wrong, Wrong: loss 1 instead of 2\n" in text
    assert "| reads values | equal |" in text and r"| a \| b | cat |" in text
    assert text.endswith("## Equal\n\ncat, sin\n")
