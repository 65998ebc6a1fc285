"""The rows of docs/hf_classes.md are read back as they were written."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from experiments.compatibility.one_by_one import Row, escaped, read_page, table

PAGE = Path(__file__).parents[2] / "docs" / "hf_classes.md"


def test_rows_are_those_that_the_page_counts() -> None:
    found = Counter(row.outcome for row in read_page(PAGE).values())
    (counts,) = re.findall(r"^\| all \|(.*)\|$", PAGE.read_text(), re.M)
    outcomes = ("equal", "refused", "wrong", "crashed", "not run")
    assert [found[outcome] for outcome in outcomes] == [int(number) for number in counts.split("|")]


def test_rows_survive_a_page(tmp_path: Path) -> None:
    rows = [
        Row("causal", "A", "equal", "mask: 1 of 5 | 2 batches", parity=(("mask", "wrong"), ("both masks", "not run"))),
        Row("image", "B", "refused", "no"),
        Row("causal", "C", "equal"),
    ]
    page = tmp_path / "page.md"
    page.write_text("\n".join(["| all | 1 | 2 |", "", *table(rows, ["tokens alone", "mask", "both masks"], ["B"])]))
    again = read_page(page)
    assert list(again.values()) == [replace(r, why=escaped(r.why)) for r in rows]
    assert table(again.values(), ["tokens alone", "mask", "both masks"], ["B"]) == page.read_text().splitlines()[2:]
