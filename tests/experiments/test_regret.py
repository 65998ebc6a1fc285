"""Measured regret over sweeps, of results made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.errors import AutoplanError
from experiments.published.regret import choices, read_results, summary_of
from experiments.published.results import Result
from experiments.published.validate import _json_row


def _row(name: str, predicted: float, measured: float = float("nan"), **other: object) -> Result:
    row = Result(name, "campaign", "A", "model", "H100", "8", sweep="one", number_format="bf16", setting=name)
    return replace(row, predicted_s=predicted, measured_s=measured, **other)  # type: ignore[arg-type]


def test_the_fastest_predicted_layout_that_fits_is_chosen() -> None:
    rows = [_row("a", 1.0, 1.2, fits=False), _row("b", 1.1, 1.1), _row("c", 1.3, 1.0), _row("d", 1.4, 1.6)]
    (found,) = choices(rows)
    assert (found.chosen, found.best, found.num_layouts, found.num_excluded) == ("b", "c", 4, 1)
    assert found.regret == pytest.approx(0.1)
    assert found.without_memory == pytest.approx(0.2)  # a
    assert found.of_three == 0.0  # a, b, c
    assert found.of_median == pytest.approx(0.15)


def test_a_layout_that_ran_out_of_memory_is_counted_by_itself() -> None:
    rows = [_row("a", 1.0, out_of_memory=True), _row("b", 1.1, 1.1), _row("c", 1.3, 1.0)]
    (found,) = choices(rows)
    assert found.chosen == "a" and found.regret is None
    with pytest.raises(AutoplanError, match="no sweep"):
        summary_of([found])
    other = [replace(r, sweep="two", out_of_memory=False) for r in rows[1:]]
    summary = summary_of(choices([*rows, *other]))
    assert (summary["num_sweeps"], summary["num_out_of_memory"]) == (2, 1)
    assert summary["chosen"]["worst"] == pytest.approx(0.1)


def test_runs_of_one_layout_are_one_and_other_formats_are_others() -> None:
    again = [_row("a", 1.0, 1.3), replace(_row("again", 1.0, 1.1), setting="a"), _row("b", 1.2, 1.0)]
    (found,) = choices(again)
    assert (found.num_layouts, found.chosen) == (2, "again") and found.regret == pytest.approx(0.1)
    assert not choices([again[0], replace(again[2], number_format="mxfp8")])
    assert not choices([again[0], replace(again[2], reason="refused: why")])


def test_stored_rows_are_read_as_they_were(tmp_path: Path) -> None:
    rows = [_row("a", 1.0, 1.2), _row("b", 1.1, 1.0), _row("c", 1.2, out_of_memory=True)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [_json_row(r) for r in rows]}))
    assert choices(read_results(path)) == choices(rows)
    path.write_text("{}")
    with pytest.raises(AutoplanError, match="not the rows"):
        read_results(path)
