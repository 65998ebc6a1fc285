"""Pairs of features on real processes, many at once, and the document of them (docs/parity.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import parity_matrix
import pytest
from parity import Case, Trained, spread_out
from parity_matrix import TOGETHER, Result, case_of, cell, check, pairs, refusal, render

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"
PAIRS = list(pairs())
EVERY, EVERY_IN_ALL = 134, 10  # of so many pairs one is in make test and in make test-all, over all features


def marks(position: int) -> tuple[pytest.MarkDecorator, ...]:
    if position % EVERY == 0:
        return ()
    return (
        (pytest.mark.slow,)
        if position % EVERY_IN_ALL == 0 or position % (EVERY // 2) == 0
        else (pytest.mark.exhaustive,)
    )


@pytest.mark.parametrize("pair", [pytest.param(p, marks=marks(i)) for i, p in enumerate(PAIRS)], ids=" x ".join)
def test_pair_is_equal_or_refused(pair: tuple[str, str]) -> None:
    result = check(case_of(*pair))
    assert result.refused or result.equal, result


@pytest.mark.parametrize(
    "case",
    spread_out(TOGETHER, 22, all_every=2),
    ids=str,
)
def test_many_at_once(case: Case) -> None:
    result = check(case)
    assert result.equal, result


@pytest.mark.slow
def test_the_document_is_true() -> None:
    """It names every pair, and refuses what the search refuses, in its words. That the others run is tested above."""
    found = {pair: Result(refusal(case_of(*pair))) for pair in PAIRS}
    fresh = render(found, {case: Result() for case in TOGETHER}).splitlines()
    written = DOCUMENT.read_text().splitlines()
    assert len(written) == len(fresh)
    assert [a for a, b in zip(written, fresh, strict=True) if a != b and "largest relative differences" not in a] == []
    assert len(fresh) > 40 and sum(bool(r.refused) for r in found.values()) < len(found) / 10


def test_another_answer_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the reference of other labels."""
    wanted: Callable[..., Trained] = parity_matrix.wanted
    monkeypatch.setattr(parity_matrix, "wanted", lambda family, dropout, _: wanted(family, dropout, "unequal"))
    result = check(case_of("dp", "tp"))
    assert not result.equal and not result.refused
    assert cell(result, {}) == "**NO**"
    assert cell(Result(gradient=1e-9), {}) == "**NO**" and cell(Result(gradient=1e-14), {}) == "yes"
