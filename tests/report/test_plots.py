"""Plots in the terminal: what a column, a point and a bar stand for, in ASCII and within the width."""

from __future__ import annotations

import pytest
from command_line import TASK, run, shell
from made_up_plans import shown

from autoplan.cost_models.time.simulation import TimelineEvent
from autoplan.report.plots import bar_plot, pipeline_plot, scatter_plot, show_plot
from autoplan.schedules.orders import ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def gpipe(ranks: int, micro_batches: int) -> list[TimelineEvent]:
    """All forwards of 1 s, then all backwards of 2 s."""
    ahead = micro_batches + ranks - 1
    found = []
    for rank in range(ranks):
        for k in range(micro_batches):
            found.append(TimelineEvent(rank, rank, k, F, rank + k, rank + k + 1.0))
            start = ahead + 2.0 * (ranks - 1 - rank + k)
            found.append(TimelineEvent(rank, rank, k, B, start, start + 2))
    return found


def test_every_column_is_what_runs_then() -> None:
    lines = pipeline_plot(gpipe(2, 2), 7 + 9)
    assert lines[:2] == ["rank 0 Ff...BBbb", "rank 1 .FfBBbb.."]
    assert lines[2] == "F forward, B backward, . waits (small: odd micro-batches); a column is 1.00 s"


def test_of_a_long_step_both_ends_are_drawn() -> None:
    lines = pipeline_plot(gpipe(4, 64), 80)
    assert all(len(line) == 80 for line in lines[:4]) and all(" ~ " in line for line in lines[:4])
    first, last = lines[3].removeprefix("rank 3 ").split(" ~ ")
    assert first.startswith("....FFffFFff"[:4]) and set(last[-8:]) == {"."}
    assert lines[4].startswith("F forward, B backward, . waits (small: odd micro-batches); a column is 0.")


def test_of_many_ranks_some_are_drawn_and_the_rest_is_said() -> None:
    lines = pipeline_plot(gpipe(40, 2), 100)
    assert [line.split()[1] for line in lines[:8]] == [str(k) for k in range(8)]
    assert lines[8] == "... 24 more ranks" and lines[9].startswith("rank 32")
    assert len({len(line) for line in (*lines[:8], *lines[9:17])}) == 1
    assert pipeline_plot([], 80) == []


def test_points_are_where_they_are() -> None:
    lines = scatter_plot([(80.0, 1.0), (40.0, 2.0), (20.0, 4.0)], "GB", "step s", 60)
    assert max(map(len, lines)) <= 60 and lines[0].strip() == "step s"
    assert lines[1].startswith("4.00 |3") and lines[12].startswith("1.00 |") and lines[12].endswith("1")
    (middle,) = [line for line in lines if line.endswith("2")]
    assert 24 < len(middle) < 30  # a third of the way
    assert lines[-1].split() == ["20.0", "GB", "80.0"]
    assert scatter_plot([(1.0, 1.0), (2.0, 2.0)], "x", "y", 60) == []


def test_bars_are_in_proportion() -> None:
    head, small, large = bar_plot([("nodes 1", 1e6), ("nodes 16", 4e6)], "tokens/s", 60)
    assert head.strip() == "tokens/s" and len(large) <= 60
    assert 4 * small.count("#") == pytest.approx(large.count("#"), abs=3)
    assert large.endswith("# 4 M") and small.startswith("nodes 1   #")


def test_a_plot_is_printed_as_it_is() -> None:
    assert shown(lambda out: show_plot(out, ["a [b] " + "#" * 30]), 20) == "\n" + "a [b] " + "#" * 30 + "\n"
    assert shown(lambda out: show_plot(out, [])) == "\n"


def test_commands_draw_what_a_table_cannot_say() -> None:
    """A pipeline by estimate, a sweep of three points by whatif; in ASCII, without colour, in 80 columns."""
    text = run("estimate", *TASK, "--dp", "2", "--pp", "2", "--mbs", "2").stdout
    assert "\nrank 0 F" in text and "\nrank 1 ." in text and "F forward" in text
    assert "\nrank 0 F" not in run("estimate", *TASK, "--dp", "4").stdout
    pins = ("--pin", "tp=1", "--pin", "pp=1", "--vary")
    done = shell("whatif", *TASK, *pins, "nic=100,200,400", COLUMNS="80", PYTHONIOENCODING="ascii", NO_COLOR="1")
    bars = [line for line in done.stdout.splitlines() if line.startswith("nic ") and "#" in line]
    assert len(bars) == 3 and done.stdout.isascii() and "\x1b" not in done.stdout, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
