"""Ctrl-C, typed in a terminal, ends a real process with the best so far or one line, and leaves no process behind.

In this process: wherever it comes, what was found before it is kept.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import PLAIN, ROOT, TASK
from made_up_plans import CERTIFICATE, OWN, REQUEST, SPLIT
from typer.testing import CliRunner

from autoplan.cli import app
from autoplan.report.sweep_rows import planned_rows
from autoplan.report.waiting import Countdown
from autoplan.search import best_use as uses
from autoplan.search import within_graphs as graphs
from autoplan.search.best_use import best_use
from autoplan.search.planner import PlanRequest, SearchResult, Status
from autoplan.sweeps.explain import explain
from autoplan.sweeps.fit import fit

LONG = ("--cluster", "64x8xh100", "--time-limit", "100", "--gap", "0")
SEARCH = ("plan", "gpt3-175b", *LONG)  # has a plan after a second, and goes on for more than ten
TOO_EARLY = "error: interrupted before there was an answer"
LIMIT_S = 100.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended: exit code, what it wrote to its output, and what stood on the terminal."""

    code: int
    out: str
    terminal: str


def gone(group: int) -> bool:
    """Wait until no process of the group is left: helpers of multiprocessing end a moment after their parent."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def _heeds_ctrl_c() -> None:
    """Undo what a shell does to its background jobs, of which these tests may be one: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def typed(command: Sequence[str], folder: Path, when: Callable[[str, int], bool]) -> Ended:
    """Run a command on a terminal of its own, its output in a file; type Ctrl-C at `when(text so far, its process)`."""
    master, slave = pty.openpty()
    name, output = os.ttyname(slave), folder / "output"
    # A shell that leads a session gets the first terminal that it opens as its own: from there Ctrl-C is a signal.
    line = f'exec "$@" <{name} 2>{name} >{output}'
    environment = {**os.environ, **PLAIN, "TERM": "xterm", "COLUMNS": "200", "AUTOPLAN_PROFILE": "assumed"}
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", *command],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        preexec_fn=_heeds_ctrl_c,
    )
    text, until, sent = b"", time.monotonic() + LIMIT_S, False
    try:
        while process.poll() is None and time.monotonic() < until:
            if select.select([master], [], [], 0.02)[0]:
                text += os.read(master, 65536)
            if not sent and when(text.decode(errors="replace"), process.pid):
                os.write(master, b"\x03")
                sent = True
        assert process.poll() is not None, f"it goes on: {text[-500:]!r}"
        assert sent, f"it ended before Ctrl-C: {text[-500:]!r}"
        while select.select([master], [], [], 0)[0]:
            text += os.read(master, 65536)
        assert gone(process.pid), "processes of its group are left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(slave)
        os.close(master)
    assert "Traceback" not in text.decode(errors="replace")
    return Ended(process.returncode, output.read_text(), text.decode(errors="replace"))


def autoplan(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "autoplan", *words)


def has_a_plan(text: str, process: int) -> bool:
    return "best " in text and "left, best" in text


def test_ctrl_c_gives_the_best_plan_so_far(tmp_path: Path) -> None:
    ended = typed(autoplan(*SEARCH), tmp_path, has_a_plan)
    assert ended.code == 0, ended
    assert ended.out.count("FITS") == 1 and "undecided (interrupted)" in " ".join(ended.out.split())
    assert "\x1b[" not in ended.out


def test_ctrl_c_before_a_plan_is_one_line(tmp_path: Path) -> None:
    ended = typed(autoplan(*SEARCH), tmp_path, lambda text, process: "searching" in text)
    assert (ended.code, ended.out) == (130, "") and TOO_EARLY in ended.terminal


def test_ctrl_c_in_a_sweep_gives_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    task = ("gpt2", "--cluster", "4xh100", "--seq-len", "1k", "--gbs", "16", "--pin", "tp=1", "--pin", "pp=1")
    many = ("--vary", "global_batch_size=16..65536", "--vary", "seq_len=64..1024", "--csv", str(file))
    ended = typed(
        autoplan("whatif", *task, *many),
        tmp_path,
        lambda text, process: re.search("planning: [2-9] of 65 points, about", text) is not None,
    )
    rows = len(file.read_text().splitlines()) - 1
    assert ended.code == 130 and 2 <= rows < 65 and f"interrupted after {rows} of 65 points" in ended.terminal
    assert ended.out.count("dp4") >= rows - 1


def measures(text: str, process: int) -> bool:
    """It has its two ranks, beside a helper of multiprocessing."""
    return len(Path(f"/proc/{process}/task/{process}/children").read_text().split()) >= 3


def test_ctrl_c_ends_the_processes_of_a_profile(tmp_path: Path) -> None:
    """They are in the group that the terminal interrupts, and write no traceback."""
    words = ("profile", "--processes", "2", "--budget", "60", "--out", str(tmp_path / "profile.json"))
    ended = typed(autoplan(*words), tmp_path, measures)
    assert (ended.code, ended.out) == (130, "") and not (tmp_path / "profile.json").exists()
    assert "note: measuring for at most 60 s" in ended.terminal and TOO_EARLY in ended.terminal


def test_ctrl_c_while_modules_load_is_one_line() -> None:
    code = """
import importlib.abc, os, runpy, signal, sys

class Early(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "autoplan.report.flags":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Early())
runpy.run_module("autoplan", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=_heeds_ctrl_c,
    )
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (130, "", [TOO_EARLY])


# -- in this process ---------------------------------------------------------------------------------------------------

FOUND = SearchResult((OWN, SPLIT), CERTIFICATE, REQUEST)
CUT_SHORT = SearchResult((OWN, SPLIT), replace(CERTIFICATE, status=Status.INTERRUPTED), REQUEST)


class Searches:
    """Stands for `search_plan`: gives one result after the other, then Ctrl-C."""

    def __init__(self, *results: SearchResult) -> None:
        self.left, self.num = list(results), 0

    def __call__(self, request: PlanRequest, told: object = None) -> SearchResult:
        self.num += 1
        if not self.left:
            raise KeyboardInterrupt
        return self.left.pop(0)


def test_a_search_on_fewer_nodes_that_is_interrupted_leaves_the_plan_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "fewer_nodes", lambda request: [request.cluster, request.cluster])
    monkeypatch.setattr(uses, "search_plan", searches := Searches(FOUND))
    found = best_use(REQUEST)
    assert found.result.plans == FOUND.plans and found.result.certificate.status == "interrupted"
    assert searches.num == 2
    monkeypatch.setattr(uses, "search_plan", Searches())
    with pytest.raises(KeyboardInterrupt):
        best_use(REQUEST)


@pytest.mark.parametrize("results", [(FOUND,), (FOUND, CUT_SHORT)], ids=["no plan with it", "a plan with it"])
def test_a_search_with_another_setting_that_is_interrupted_ends_it(
    results: tuple[SearchResult, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        option, value, request = "like", "torchtitan", REQUEST

    monkeypatch.setattr(uses, "other_settings", lambda *a: [Other, Other, Other])
    monkeypatch.setattr(uses, "at_degrees", lambda request, config: request)
    monkeypatch.setattr(uses, "search_plan", searches := Searches(*results))
    found = best_use(REQUEST)
    assert found.result.plans == FOUND.plans and found.result.certificate.status == "interrupted"
    assert searches.num == 2


def test_a_search_for_what_graphs_allow_that_is_interrupted_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the degrees of a plan, where the search that Ctrl-C ends has one."""
    monkeypatch.setattr(graphs, "lacks_graphs", lambda request, config: True)
    monkeypatch.setattr(graphs, "module_sets", lambda request, config: ["modules:layernorm", "modules:mlp"])
    monkeypatch.setattr(graphs, "at_degrees", lambda request, config: request)
    found = graphs.within_graphs(FOUND, searches := Searches(CUT_SHORT, FOUND, FOUND))
    assert found.plans == FOUND.plans and found.certificate.status == "interrupted"
    assert searches.num == 1


def test_an_interrupted_plan_is_explained_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "search_plan", searches := Searches(CUT_SHORT))
    found = explain(REQUEST)
    assert found.interrupted and found.planned is OWN and not found.decisions and searches.num == 1


def test_after_an_interrupted_search_no_other_way_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "search_plan", searches := Searches(CUT_SHORT))
    found = fit(REQUEST)
    assert found.interrupted and found.fits and not found.ways and searches.num == 1
    searches = Searches(FOUND, FOUND, CUT_SHORT, FOUND)
    monkeypatch.setattr(uses, "search_plan", searches)
    monkeypatch.setattr("autoplan.sweeps.fit.search_plan", searches)
    assert fit(REQUEST).interrupted and searches.num == 3


def test_what_would_help_is_left_out_if_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    words = ["plan", *TASK, "--pin", "tp=1", "--pin", "pp=1"]
    assert "helps    " in CliRunner().invoke(app, words, env=PLAIN).stdout
    monkeypatch.setattr("autoplan.report.answers.quick_gains", interrupted)
    result = CliRunner().invoke(app, words, env=PLAIN)
    assert result.exit_code == 0 and "FITS" in result.stdout and "helps" not in result.stdout


class Pressing(dict[str, object]):
    """A row; Ctrl-C is pressed while it is written."""

    def values(self) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return super().values()


def test_ctrl_c_while_a_row_is_written_is_heeded_after_it(tmp_path: Path) -> None:
    file, rows = tmp_path / "rows.csv", ((n, Pressing(n=n) if n == 2 else {"n": n}) for n in range(5))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        done, interrupted = planned_rows(rows, ["n"], Countdown(5, "rows"), file, True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted and [n for n, _ in done] == [0, 1, 2]
    assert file.read_text().split() == ["n", "0", "1", "2"]
