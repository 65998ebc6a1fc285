"""The clock of time limits: on a busy machine, waiting for a core counts a third."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autoplan.search import clock
from autoplan.search.clock import now_s  # before tests replace it


def test_most_of_the_waiting_for_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, wall = tmp_path / "schedstat", [100.0]
    monkeypatch.setattr(clock, "_SCHEDSTAT", file)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: wall[0]))
    file.write_text("5000000000 3000000000 17\n", encoding="ascii")
    began = now_s()
    wall[0] += 12.0  # of which the thread has waited 9 s for a core, and 3 s it ran or waited for something else
    file.write_text("8000000000 12000000000 40\n", encoding="ascii")
    assert now_s() - began == pytest.approx(3.0 + 9.0 / 3)


@pytest.mark.parametrize("text", [None, "", "1", "a b c"])
def test_where_the_system_does_not_say_all_time_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    monkeypatch.setattr(clock, "_SCHEDSTAT", tmp_path / "schedstat")
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: 7.0))
    if text is not None:
        (tmp_path / "schedstat").write_text(text, encoding="ascii")
    assert now_s() == 7.0
