"""Plans in notebooks: tables that show themselves, and the figures of `plan.plot`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import pytest
from made_up_plans import CERTIFICATE, OWN

import autoplan
from autoplan.config.html import table
from autoplan.errors import PinError
from autoplan.plans.record import Plan


@lru_cache(maxsize=1)
def plan() -> Plan:
    return autoplan.plan(
        "gpt2", "4xh100", seq_len=1024, global_batch_size=64, pins={"pp": 2, "micro_batch_size": 8}, top=3
    )


def cells(html: str) -> list[list[str]]:
    """The texts of the rows of all tables."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", html)]


def test_tables_escape_their_texts() -> None:
    assert cells(table("<b>", ("a & b",), [("<script>",)])) == [["a &amp; b"], ["&lt;script&gt;"]]


def test_an_estimate_shows_its_terms() -> None:
    rows = cells(OWN.estimate._repr_html_())
    assert ["compute", "0.0960", "assumed"] in rows and ["step", "0.100", "assumed"] in rows
    assert ["activations", "20.0"] in rows and ["total", "20.0"] in rows
    assert "655 k tokens/s, MFU 40 %; fits" in OWN.estimate._repr_html_()
    small = replace(OWN.estimate, memory_capacity_bytes=1e9)
    assert "does not fit: stage 0 needs 20.0 GB" in small._repr_html_()


def test_a_certificate_shows_its_counts() -> None:
    assert ["bounded out", "1,352"] in cells(CERTIFICATE._repr_html_())
    assert "at most 0.0 % shorter" in CERTIFICATE._repr_html_()
    assert "no bound on the best step" in replace(CERTIFICATE, gap=1.0)._repr_html_()


def test_a_plan_shows_choices_estimate_and_certificate() -> None:
    rows = cells(plan()._repr_html_())
    assert ["pp", "2"] in rows and ["considered", str(plan().certificate["considered"])] in rows
    assert any(row[0] == "stage 1" or "stage 1" in row for row in rows)


def test_figures_hold_the_numbers_of_the_plan() -> None:
    pytest.importorskip("plotly")
    made, found = plan(), plan().plot
    assert made.estimate is not None
    memory = found.memory()
    assert sum(bar.x[0] for bar in memory.data if bar.type == "bar") == pytest.approx(
        made.estimate.stages[0].memory_bytes.mid / 1e9
    )
    assert found.step().data[0].x[-1] == made.estimate.step_time_s.mid
    bars = sum(len(bar.x) for bar in found.timeline().data)
    assert bars == len(made.estimate.events) > 0
    assert list(found.mesh().data[0].z[0]) == [0, 0, 1, 1]
    front = found.pareto().data
    assert front[0].name == "best" and len(made.document["alternatives"]) == sum(len(t.x) for t in front[1:-1]) > 0


def test_what_a_plan_does_not_hold_is_said() -> None:
    pytest.importorskip("plotly")
    read = Plan.from_json(plan().to_json())
    assert read.plot.memory().data
    with pytest.raises(PinError, match="a file does not keep them"):
        read.plot.timeline()
    alone = replace(plan(), document={**plan().document, "alternatives": []})
    with pytest.raises(PinError, match="searched alone; plan with top=10"):
        alone.plot.pareto()
