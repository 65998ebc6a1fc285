"""The rows of docs/hf_classes.md are read back as they were written."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from experiments.compatibility.one_by_one import read_page

PAGE = Path(__file__).parents[2] / "docs" / "hf_classes.md"


def test_rows_are_those_that_the_page_counts() -> None:
    found = Counter(row.outcome for row in read_page(PAGE).values())
    (counts,) = re.findall(r"^\| all \|(.*)\|$", PAGE.read_text(), re.M)
    outcomes = ("equal", "refused", "wrong", "crashed", "not run")
    assert [found[outcome] for outcome in outcomes] == [int(number) for number in counts.split("|")]
