"""Summaries of published steps: errors by group, feasibility, order within sweeps, the table, the pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autoplan.errors import AutoplanError
from experiments.published import pictures as published_pictures
from experiments.published import summary as published_summary
from experiments.published import validate as tool


def result(predicted: float, measured: float, campaign: str = "c", **fields: Any) -> tool.Result:
    priced = {"predicted_s": predicted, "low_s": 0.8 * predicted, "high_s": 1.2 * predicted, "measured_s": measured}
    fields.setdefault("setting", f"of {predicted}")
    return tool.Result("id", campaign, "A", "m", "d", "8", **{**priced, **fields})


def test_errors_of_a_group() -> None:
    refused = tool.Result("id", "c", "A", "m", "d", "8", "no 3 of 4")
    errors = tool.Errors.of([result(1.1, 1.0), result(0.9, 1.0), result(2.0, 1.0), refused])
    assert (errors.num_rows, errors.num_priced) == (4, 3)
    assert errors.mean == pytest.approx(0.4) and errors.bias == pytest.approx(1 / 3)
    assert errors.median == pytest.approx(0.1) and errors.p90 == pytest.approx(1.0)
    assert errors.coverage == pytest.approx(2 / 3) and errors.width == pytest.approx(0.4)
    assert tool.reasons([refused, replace(refused, reason="no 5 of 6")]) == [("no N of N", 2)]
    assert tool.reasons([replace(refused, reason="no FP4 on 2 H100")]) == [("no FP4 on N H100", 1)]
    groups = tool.grouped([result(1.1, 1.0), result(1.3, 1.0, "e"), result(1.3, 1.0, "e")], lambda r: r.campaign)
    assert list(groups) == ["e", "c"] and tool.macro_mean(groups) == pytest.approx(0.2)
    assert math.isnan(tool.Errors.of([refused]).mean)


def test_what_is_stated_but_not_priced_counts_as_an_error_of_100_per_cent() -> None:
    refused = tool.Result("id", "c", "A", "m", "d", "8", "refused: too wide")
    unstated = replace(refused, campaign="e", reason="hidden is not stated", stated=False)
    out = result(1.0, math.nan, out_of_memory=True, fits=False)
    errors = tool.Errors.of([result(1.2, 1.0), refused, unstated, out])
    assert (errors.num_rows, errors.num_stated, errors.num_priced) == (4, 3, 2)
    assert errors.mean == pytest.approx(0.2) and errors.mean_with_unpriced == pytest.approx(0.6)
    assert tool.macro_mean(tool.grouped([result(1.2, 1.0), refused, unstated], lambda r: r.campaign)) == pytest.approx(
        0.6
    )
    assert tool.Errors.of([refused]).mean_with_unpriced == 1.0


def test_feasibility_weighs_what_ran_and_what_did_not_alike() -> None:
    ran = [result(1.0, 1.0), result(1.0, 1.0), result(1.0, 1.0, fits=False)]
    out = [result(1.0, math.nan, out_of_memory=True, fits=fits) for fits in (True, False)]
    found = tool.Feasibility.of([*ran, *out, tool.Result("id", "c", "A", "m", "d", "8", "refused")])
    assert found == tool.Feasibility(3, 2, 2, 1) and found.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert math.isnan(tool.Feasibility.of(ran).balanced_accuracy)


def test_order_within_sweeps_counts_pairs_that_differ_enough() -> None:
    found = [result(1.0, 1.0, sweep="a"), result(2.0, 1.2, sweep="a"), result(1.5, 1.21, sweep="a")]
    # 1.2 and 1.21 are too near to rank; another sweep is not compared with
    assert tool.ranked_pairs([*found, result(9.0, 0.1, sweep="b")]) == {"c": tool.Ranking(1, 2, 2)}
    wrong = [result(2.0, 1.0, sweep="a"), result(1.0, 1.2, sweep="a")]
    assert tool.ranked_pairs(wrong) == {"c": tool.Ranking(1, 1, 0)}
    other = [*found, result(1.6, 0.5, sweep="a", number_format="mxfp8")]
    assert tool.ranked_pairs(other) == {"c": tool.Ranking(1, 2, 2, 3, 1)}  # reported apart
    again = [result(1.0, 1.0, sweep="a"), result(1.0, 2.0, sweep="a")]  # one setting, measured twice
    assert tool.ranked_pairs(again) == {}


def test_the_table_of_the_readme_is_generated(tmp_path: Path) -> None:
    refused = tool.Result("id", "e", "A", "m", "d", "8", "refused")
    summary = tool.summary_of([result(1.1, 1.0), result(0.9, 1.0), result(1.0, 1.0, "e"), refused])
    table = published_summary.markdown(summary, {"c": 0.123})
    assert "| c | 2 | 100.0% | 10.0% | 12.3% | 10.0% | +0% | 100.0% |" in table
    assert "| e | 2 | 50.0% | 50.0% |  | 0.0% | +0% | 100.0% |" in table
    assert "Macro average over campaigns: **30.0%**" in table
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{published_summary.BEGIN}\nold\n{published_summary.END}\nafter\n")
    published_summary.insert(readme, table)
    text = readme.read_text()
    assert "old" not in text and table in text and text.startswith("before\n") and text.endswith("\nafter\n")
    published_summary.insert(readme, table)
    assert readme.read_text() == text and list(tmp_path.iterdir()) == [readme]
    readme.write_text("no marks")
    with pytest.raises(AutoplanError, match="once each"):
        published_summary.insert(readme, table)


def test_the_pictures_show_every_step_and_name_the_worst(tmp_path: Path) -> None:
    """A mark for each step, also where its error is beyond the edge; 800 steps stay below 200 kB."""
    rows = [replace(result(1 + i / 4000, 1.0), experts=i % 2 == 0) for i in range(799)]
    far = replace(result(5.0, 1.0, "e"), id="far", experts=False)
    shown = published_pictures.write(
        [*rows, far, tool.Result("id", "e", "A", "m", "d", "8", "refused")], tmp_path / "a.md"
    )
    assert "| far |" in shown and "+400%" in shown and shown.count("\n| ") == 9
    for name in published_pictures.NAMES:
        path = tmp_path / "images" / name
        root = ElementTree.parse(path).getroot()
        kinds = Counter(element.get("class") for element in root.iter())
        assert kinds["e"] == 401 and kinds["d"] == 401  # with the key
        assert path.stat().st_size < 200_000 and f"images/{name}" in shown
        width = float(root.get("viewBox", "").split()[2])
        places = [float(e.get("cx", 0)) for e in root.iter() if e.get("class") == "d"]
        assert min(places) > 0 and max(places) < width
    assert "of 800 published training steps" in shown and published_pictures.write([], tmp_path / "b.md") == ""


def test_a_readme_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    readme = tmp_path / "README.md"
    readme.write_text(f"{published_summary.BEGIN}\nold\n{published_summary.END}\n")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(AutoplanError, match="No space left"):
        published_summary.insert(readme, "new")
    assert "old" in readme.read_text() and list(tmp_path.iterdir()) == [readme]


def test_the_shipped_constants_say_what_they_are_worth() -> None:
    """Held-out errors of every campaign, fitted constants of at least three of them, intervals that hold 1."""
    data = json.loads((Path(__file__).resolve().parents[2] / "profiles" / "constants.json").read_text())
    assert len(published_summary.held_out_errors()) >= 10
    fitted = {name: entry for name, entry in data["constants"].items() if entry["fitted"]}
    assert fitted and all(len(entry["groups"]) >= 3 and entry["standard_error"] > 0 for entry in fitted.values())
    assert data["error"]["in_sample"] < data["error"]["held_out"] < data["error"]["before"]


def test_memory_errors_by_kind() -> None:
    memory = {"predicted_bytes": 9e9, "measured_bytes": 10e9, "memory_kind": "GiB", "memory_comparable": True}
    errors = tool.memory_errors([result(1.0, 1.0, **memory), result(1.0, 1.0)])
    assert list(errors) == ["c: GiB"]
    assert errors["c: GiB"].num_rows == 1 and errors["c: GiB"].bias == pytest.approx(-0.1)
