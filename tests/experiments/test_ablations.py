"""Published ablations: every claim that the cost models get right stays right; ablation_table.py has the others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from parity import spread_out
from typer.testing import CliRunner

from autoplan.errors import PinError
from experiments.published import ablation_table, ablations
from experiments.published.ablations import Case, Claim, Ratio, Setup

KNOWN = [
    pytest.param(claim, case, id=f"{claim.name}-{i}")
    for claim in ablation_table.CLAIMS
    for i, case in enumerate(claim.cases)
    if not case.missed
]


@pytest.mark.parametrize(("claim", "case"), spread_out(KNOWN, 8, all_every=4))
def test_the_predicted_ratio_is_the_published_one(claim: Claim, case: Case) -> None:
    rows = claim.rows(case)
    assert rows
    for row in rows:
        assert row.right, (claim.about, row)


def test_what_right_means() -> None:
    """Half of the effect, at least 5 % and at most 10 %; effects of 5 % have a sign."""
    assert Ratio(1.04, 1.0).right and not Ratio(1.06, 1.0).right
    assert Ratio(1.06, 1.12).right and not Ratio(1.05, 1.12).right
    assert Ratio(1.81, 2.0).right and not Ratio(1.79, 2.0).right
    assert Ratio(0.99, 1.04).right and not Ratio(0.99, 1.06).right_sign and not Ratio(0.99, 1.06).right


def test_the_table_prints_what_is_right_and_what_is_missed(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["--only", "tensor_parallelism_of_4", "--markdown", "--json", str(out)]
    app = ablation_table.typer.Typer()
    app.command()(ablation_table.main)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    right, missed, last = result.stdout.splitlines()[2:]
    assert re.fullmatch(r"\| tensor parallelism of 4 beats 8 \| \d\.\d\d \(\d\.\d\d\) \|  \|", right)
    assert re.fullmatch(r"\| tensor parallelism of 4 beats 2 \| \d\.\d\d \(\d\.\d\d\) \| .* too fast \|", missed)
    counts = "1 right, 0 of the wrong sign; 0 of 0 other conditions hold"
    assert re.fullmatch(rf"2 ratios, by \d\.\d% in the median: {counts}", last)
    assert [row["missed"] == "" for row in json.loads(out.read_text())["cases"]] == [True, False]


def test_cases_that_are_missed_for_one_reason_are_one_row() -> None:
    missed = ("a claim", "the reason")
    lines = [
        ablation_table.Line(missed[0], "8", 1.0, 1.2, False, False, missed[1]),
        ablation_table.Line(missed[0], "", None, None, False, False, missed[1]),
        ablation_table.Line(missed[0], "16", 1.3, 1.2, True, False, missed[1]),
        ablation_table.Line(missed[0], "32", 1.2, 1.2, True, True, ""),
    ]
    assert ablation_table.markdown_of(lines).splitlines()[2:] == [
        "| a claim | 8: 1.00 (1.20) wrong sign; does not hold; 16: 1.30 (1.20) | the reason |",
        "| a claim | 32: 1.20 (1.20) |  |",
    ]


@pytest.mark.parametrize("name", ["V-half", "V-min"])
def test_schedules_with_controllable_memory_are_refused(name: str) -> None:
    """AMD Primus (Llama-2 7B, 8 MI300X): 255.1 TFLOP/s and 14.06 GB with V-half, 208.5 and 11.90 with V-min, 235.7 and
    16.26 with 1F1B (Qi et al., Pipeline Parallelism with Controllable Memory, 2024). There are no such schedules here:
    they are refused by name, not priced as others."""
    with pytest.raises(PinError, match=name):
        ablations.priced(Setup("llama-2-7b", "1x8xmi300x-192gb", 4096), 32, pp=8, schedule=name, virtual_stages=2)
