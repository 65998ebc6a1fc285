"""Reports in HTML: one file, nothing from elsewhere, and figures that hold the numbers of the answer."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, TASK, one_line_error, run
from made_up_plans import OWN, REQUEST, SPLIT

from autoplan.config import numbers
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.pages import figures
from autoplan.pages.page import page
from autoplan.pages.sections import PARTS, sections
from autoplan.plans.document import estimate_data
from autoplan.report.drawn import link_text, mesh_data
from autoplan.report.drawn_sweeps import drawn_whatif
from autoplan.report.measured import Comparison, Figure, comparison_data, shown_row
from autoplan.sweeps.whatif import RunTask

SEVERAL = ("plan", "gpt2", "--cluster", "16xh100", "--seq-len", "1k", "--global-batch-size", "64", "--tokens", "10B")
PINNED = (*SEVERAL, "--pin", "pp=4", "--pin", "tp=2", "--pin", "micro_batch_size=2", "--pin", "schedule=1F1B")


@lru_cache(maxsize=1)
def planned(folder: Path) -> tuple[dict[str, Any], str]:
    """The JSON answer and the report of one plan with four stages."""
    file = folder / "plan.html"
    result = run(*PINNED, "--json", "--report", str(file))
    assert result.exit_code == 0, result.output
    assert f"note: wrote {file}" in result.stderr
    return json.loads(result.stdout), file.read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return planned(tmp_path_factory.mktemp("report"))


def specs(text: str) -> dict[str, dict[str, Any]]:
    """The figures of a report by title."""
    found = re.findall(r'role="img" aria-label="([^"]*)".*?class="spec">(.*?)</script>', text, flags=re.DOTALL)
    return {title: json.loads(spec) for title, spec in found}


class Outside(HTMLParser):
    """Whatever an element would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag} {n}={v}" for n, v in attrs if n in ("src", "href", "data", "action") and v and v[0] != "#"
        ]


def test_a_report_is_one_small_file_that_loads_nothing(report: tuple[dict[str, Any], str]) -> None:
    _, text = report
    reader = Outside()
    reader.feed(text)
    assert reader.found == [] and len(text.encode()) < 3e6
    assert "default-src 'none'" in text and "@import" not in text
    assert not re.search(
        r"fetch\(|XMLHttpRequest|WebSocket", text.split('id="library"')[0] + text.rsplit("<script>", 1)[1]
    )


def test_a_report_has_every_part(report: tuple[dict[str, Any], str]) -> None:
    _, text = report
    heads = re.findall(r"<h2>(.*?)</h2>", text)
    wanted = "Answer Plan Mesh Memory Step Pipeline,Other plans,Sensitivity Failures Assumptions Exports Data"
    assert heads == [h for part in wanted.split(",") for h in ([part] if part == "Other plans" else part.split())]
    for words in (
        "--tensor-model-parallel-size 2",
        "AWS us-east-1 on demand",
        "as of 2026-11-09",
        "autoplan estimate gpt2",
    ):
        assert words in text, words


def test_figures_hold_the_numbers_of_the_answer(report: tuple[dict[str, Any], str]) -> None:
    data, text = report
    found = specs(text)
    estimate = data["estimate"]
    memory = found["Memory of every stage by term"]
    drawn = {trace["name"]: trace["x"] for trace in memory["data"]}
    for k, stage in enumerate(estimate["memory_bytes"]):
        assert {n: drawn[n][k] for n in stage} == {n: q["mid"] / 1e9 for n, q in stage.items()}
    (line,) = memory["layout"]["shapes"]
    assert line["x0"] == estimate["memory_capacity_bytes"] / 1e9
    (step,) = found["The step of the busiest rank, term by term"]["data"]
    assert (
        sum(step["x"][:-1]) == pytest.approx(step["x"][-1], rel=1e-3)
        and step["x"][-1] == estimate["step_time_s"]["mid"]
    )
    pipeline = found["The pipeline of one step"]
    bars = sum(len(trace["x"]) for trace in pipeline["data"])
    assert bars == 2 * 4 * data["plan"]["num_micro_batches"]  # forward and backward, on four ranks
    assert all(width > 0 for trace in pipeline["data"] for width in trace["x"])
    assert [b["label"] for b in pipeline["layout"]["updatemenus"][0]["buttons"]] == [
        "all ranks",
        *(f"rank {k}" for k in range(4)),
    ]


def test_other_plans_say_why_they_lost(report: tuple[dict[str, Any], str]) -> None:
    data, text = report
    found = specs(text)["Plans by time and memory"]["data"]
    best = next(trace for trace in found if trace["name"] == "best")
    assert best["y"] == [data["estimate"]["step_time_s"]["mid"]]
    others = {
        trace["name"]: [(y, why) for y, (_, why) in zip(trace["y"], trace["customdata"], strict=True)]
        for trace in found
        if trace["mode"] == "markers"
    }
    slower, pinned = others.get("slower", []), others["pinned"]
    assert all(y > best["y"][0] and re.fullmatch(r"\+[\d.]+ % step time", why) for y, why in slower)
    assert all(
        re.fullmatch(r"[+-][\d.]+ % step time; not searched, since (\w+=\d+(, )?)+ was given", w) for _, w in pinned
    )
    (changed,) = {w.split("since ")[1] for _, w in pinned if "tp=" in w}
    assert changed == "tp=2 was given"


def test_the_tornado_moves_both_ways(report: tuple[dict[str, Any], str]) -> None:
    low, high = specs(report[1])["Cost of the tokens if a figure is 20 % off"]["data"]
    of = dict(zip(low["y"], zip(low["x"], high["x"], strict=True), strict=True))
    assert of["price of a device hour"] == (pytest.approx(-20), pytest.approx(20))
    assert of["MFU"] == (pytest.approx(25), pytest.approx(-100 / 6))
    assert of["bandwidth of the memory"][0] > 0 > of["bandwidth of the memory"][1]
    assert of["days between failures of a device"][0] > 0 > of["days between failures of a device"][1]


def test_ranks_stand_where_the_mesh_puts_them(report: tuple[dict[str, Any], str]) -> None:
    data, text = report
    (mesh,) = specs(text)["Ranks on nodes"]["data"]
    assert [len(row) for row in mesh["z"]] == [8, 8]
    for rank in range(16):  # numbered pp, dp, tp, major to minor
        row, column = divmod(rank, 8)
        assert mesh["z"][row][column] == rank // 4
        assert mesh["hovertext"][row][column] == f"rank {rank}: pp={rank // 4} dp={rank // 2 % 2} tp={rank % 2}"
    assert data["plan"]["dp"] == 2


def test_groups_name_the_links_they_use() -> None:
    cluster = Cluster.parse("16xh100")
    assert (
        link_text(cluster, 8).startswith("scale-up, 450 GB/s")
        and link_text(cluster, 9) == "network, 400 Gbit/s per device"
    )
    groups = {g["name"]: g for g in mesh_data(REQUEST, SPLIT.config)["groups"]}
    assert {n: (g["size"], g["stride"], g["reach"]) for n, g in groups.items()} == {"dp": (2, 2, 4), "tp": (2, 1, 2)}


def test_specs_are_figures_of_plotly(report: tuple[dict[str, Any], str]) -> None:
    """The library refuses names of properties that it does not know."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    made = {**specs(report[1]), **{f.title: f.spec for s in sections(sweep()) for f in s.blocks if f.kind == "figure"}}
    made |= {f.title: f.spec for s in sections(sized()) for f in s.blocks if f.kind == "figure"}
    made |= {f.title: f.spec for s in sections(compared()) for f in s.blocks if f.kind == "figure"}
    assert len(made) >= 12
    for spec in made.values():
        graph_objects.Figure(spec)


def sweep() -> dict[str, Any]:
    result = run("whatif", *TASK, "--vary", "nodes=1,2", "--vary", "global_batch_size=16,32", "--pin", "tp=1", "--json")
    return {**json.loads(result.stdout), "drawn": drawn_whatif(REQUEST, [], RunTask(1e9))}


def sized() -> dict[str, Any]:
    row = {"kind": "h100", "nodes": 1, "num_devices": 8, "days": 10.0, "usd": 1e4, "mfu": 0.4, "meets": True}
    slow = {**row, "nodes": 2, "num_devices": 16, "days": 6.0, "usd": 1.2e4}
    unknown = {**row, "days": None, "usd": None, "mfu": None, "meets": False}
    best = {"kind": "h100", "num_devices": 8, "days": 10.0, "usd": 1e4}
    rows = [row, slow, unknown]
    return {"command": "size", "rows": rows, "deadline_days": 12, "budget_usd": 2e4, "fewest": best, "cheapest": None}


def compared() -> dict[str, Any]:
    step = Figure("step_s", 1.0, 0.8, 1.3, 1.1, (1.0, 1.2))
    found = Comparison("gpt2", 3, (step,), ("another version",), {"compute": 1.0})
    return {**comparison_data(found), "drawn": {"rows": [shown_row(step)]}}


def test_a_sweep_is_drawn_over_what_was_varied() -> None:
    answer = sweep()
    (part,) = [s for s in sections(answer) if s.title == "Sweep"]
    step = part.blocks[0]
    (trace,) = step.spec["data"]
    assert (trace["x"], trace["y"]) == (["16", "32"], ["1", "2"])
    rows = {(str(r["nodes"]), str(r["global_batch_size"])): r["step_time_s"] for r in answer["rows"]}
    assert trace["z"] == [[rows[y, x] for x in trace["x"]] for y in trace["y"]]
    one = {**answer, "vary": {"nodes": [1, 2]}, "rows": [r for r in answer["rows"] if r["global_batch_size"] == 16]}
    (curve,) = next(s for s in sections(one) if s.title == "Sweep").blocks[0].spec["data"]
    assert curve["x"] == [1, 2] and curve["error_y"]["array"][0] > 0


def test_points_without_a_plan_stay_empty() -> None:
    rows = [
        {"nodes": 1, "batch": 2, "status": "does not fit", "step_time_s": None, "plan": None},
        {"nodes": 2, "batch": 2, "status": "ok", "step_time_s": 1.5, "plan": "dp2"},
    ]
    (trace,) = figures.heatmap(rows, "batch", "nodes", "step_time_s", "s")["data"]
    assert trace["z"] == [[None], [1.5]] and trace["hovertext"][0] == ["does not fit"]


def test_values_are_written_as_people_write_them() -> None:
    rows = [{"nic": 400.0, "nodes": 2, "status": "ok", "step_time_s": 1.5, "plan": "dp2"}]
    drawn = figures.heatmap(rows, "nic", "nodes", "step_time_s", "step, s")
    (trace,) = drawn["data"]
    assert (trace["x"], trace["y"], trace["z"]) == (["400"], ["2"], [[1.5]])
    assert trace["hovertext"] == [["step, s: 1.50<br>dp2"]]
    titles = [drawn["layout"][name]["title"]["text"] for name in ("xaxis", "yaxis")]
    assert titles == ["nic, Gbit/s per device", "nodes"]
    alternative = {"value": "optimizer", "sentence": "costs more", "status": "ok", "cost": 0.1}
    data = {"decisions": [{"name": "offload", "value": [], "alternatives": [alternative]}]}
    (section,) = [s for s in sections(data) if s.title == "Choices"]
    assert section.blocks[0].rows[0][:3] == ("offload", "none", "optimizer")  # type: ignore[union-attr]


def test_a_long_step_is_drawn_on_some_ranks_and_whole() -> None:
    events = [[rank, rank, k, "FORWARD", k, k + 1.0] for rank in range(64) for k in range(500)]
    (trace,) = figures.timeline(events)["data"]
    assert len(trace["x"]) <= 6500 and {"rank 0", "rank 63"} <= set(trace["y"])
    assert trace["y"].count("rank 63") == 500


def test_an_answer_of_another_kind_has_its_own_parts() -> None:
    first, *others = sections(compared())
    assert [first.title, *(s.title for s in others)] == ["Predicted and measured", "Data"]
    assert any(b.kind == "table" and b.rows[0][:2] == ("step, s", "1") for b in first.blocks)
    assert [s.title for s in sections({"estimate": estimate_data(OWN.estimate)})] == [
        "Answer",
        "Memory",
        "Step",
        "Data",
    ]
    assert len({part.title for part in PARTS}) == len(PARTS)


def test_explanations_and_capacity_tables_have_reports(tmp_path: Path) -> None:
    file = tmp_path / "explain.html"
    words = ("--only", "zero_stage", "--no-settings", "--seconds", "1", "--report", str(file))
    assert run("explain", *TASK, *words).exit_code == 0
    heads = re.findall(r"<h2>(.*?)</h2>", file.read_text())
    assert heads[:4] == ["Answer", "Plan", "Choices", "Mesh"] and "Assumptions" in heads
    task = tmp_path / "task.yaml"
    task.write_text("models: [gpt2]\nclusters: [4xh100, 8xh100]\ntokens: 1B\nseq_len: 512\nglobal_batch_size: 16\n")
    file = tmp_path / "capacity.html"
    assert run("capacity", str(task), "--report", str(file)).exit_code == 0
    text = file.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Answer", "Sweep", "Assumptions", "Data"]
    assert specs(text)["days"]["data"][0]["x"] == ["4xh100", "8xh100"]
    assert "<h1>capacity: task.yaml</h1>" in text and "2 of 2 rows have a plan." in text
    days = [
        row["days_with_failures"]
        for row in json.loads(html.unescape(text.rsplit("<pre>")[-1].split("</pre>")[0]))["rows"]
    ]
    best = ("4xh100", "8xh100")[days.index(min(days))]
    assert f"{best}: {numbers.days(min(days))}, $" in text and "price of a device and hour" in text


def test_two_plans_are_set_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "two.html"
    assert run("explain", *TASK, "--pin", "zero_stage=1", "--vs", "tp=2", "--report", str(file)).exit_code == 0
    text = file.read_text()
    (answer,) = [p for p in re.findall(r'<p class="good">(.*?)</p>', text) if p.startswith("The other plan ")]
    assert (
        "per step" in answer
        and "data-parallel communication, exposed" in text
        and "dp_comm" not in text.split("<pre>")[0]
    )
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    (step,) = [row for row in cells if row[:1] == ["step"]]
    own, other, more = (float(cell) for cell in step[1:])
    assert more == pytest.approx(other - own, abs=0.02 * own)


def test_a_size_says_its_question_and_its_answer(tmp_path: Path) -> None:
    file = tmp_path / "size.html"
    words = ("--devices", "h100,a100-sxm4-80gb", "--tokens", "1B", "--deadline", "30d", "--seq-len", "512")
    assert run("size", "gpt2", *words, "--global-batch-size", "16", "--report", str(file)).exit_code == 0
    text = file.read_text()
    assert "<h1>size of a run: gpt2</h1>" in text
    assert re.search(r"are the fewest (known )?that train on 1 B tokens in 30.0 d\.", text)
    assert "h100-sxm5-80gb, price of a device and hour" in text and "a100-sxm4-80gb, link scale-up" in text
    (figure,) = [f for title, f in specs(text).items() if title == "Cost against days"]
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["deadline"]


def test_texts_cannot_leave_their_place() -> None:
    """A name with signs of HTML is shown as it is, also in the data of a figure."""
    evil = "</script><b onclick=x>"
    answer = {**compared(), "model": evil}
    answer["drawn"] = {"rows": [(evil, *answer["drawn"]["rows"][0][1:])]}
    text = page(answer)
    assert evil not in text and "\\u003c/script\\u003e" in text and "&lt;/script&gt;" in text
    assert next(iter(specs(text).values()))["data"][0]["y"] == [evil]


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = one_line_error(run("plan", *TASK, "--report", str(tmp_path / "no" / "plan.html")), 2)
    assert "there is no folder" in line
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "plotly" else real(name, *more)
    )
    line = one_line_error(run("plan", *TASK, "--report", str(tmp_path / "plan.html")), 2)
    assert "a report needs plotly, which is not installed: pip install 'autoplan[report]'" in line
    assert not (tmp_path / "plan.html").exists()


def test_a_report_of_an_estimate_that_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "estimate.html"
    small = ("gpt2", "--cluster", "1x4xh100-sxm5-80gb@memory_gb=2", *TASK[3:])
    assert run("estimate", *small, "--report", str(file)).exit_code == 3
    assert '<p class="bad">Does not fit: ' in file.read_text()


def test_a_report_loads_no_torch_and_a_plan_no_report() -> None:
    code = (
        "import sys\nfrom autoplan.cli import app\n"
        f"app({['plan', *TASK, '--pin', 'tp=1']!r}, standalone_mode=False)\n"
        "print(sorted(m for m in ('torch', 'plotly', 'jinja2', 'autoplan.pages.page') if m in sys.modules))\n"
        f"app({['plan', *TASK, '--pin', 'tp=1', '--report', '/dev/null']!r}, standalone_mode=False)\n"
        "print(sorted(m for m in ('torch', 'plotly', 'autoplan.pages.page') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ["[]", "['autoplan.pages.page']"]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_every_figure(width: int, report: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    check_drawn(report[1], width, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("kind", ["sweep", "sized", "compared"])
def test_a_browser_draws_the_figures_of_other_commands(kind: str, tmp_path: Path) -> None:
    check_drawn(page({"sweep": sweep, "sized": sized, "compared": compared}[kind]()), 390, tmp_path)


def check_drawn(text: str, width: int, tmp_path: Path) -> None:
    """Offline, without a word on the console; no figure is wider than the window, and no text of one is cut off."""
    (tmp_path / "plan.html").write_text(text)
    script = """<script>onload = () => setTimeout(() => {
      const inner = document.querySelector("iframe").contentDocument.documentElement;
      document.body.dataset.ready = inner.dataset.ready;
      document.body.dataset.wide = inner.scrollWidth;
      const cut = [...inner.querySelectorAll("div.figure")].flatMap((figure) => {
        const at = figure.getBoundingClientRect();
        return [...figure.querySelectorAll("svg text")].filter((text) => {
          const mine = text.getBoundingClientRect();
          return mine.width && (mine.right > at.right + 1 || mine.left < at.left - 1);
        }).map((text) => text.textContent);
      });
      document.body.dataset.cut = cut.join("; ");
    }, 9000)</script>"""
    frame = f'<body><iframe src="plan.html" width="{width}" height="900"></iframe>{script}'
    (tmp_path / "frame.html").write_text(frame)
    command = [str(CHROMIUM), *QUIET, "--disable-component-update", "--disable-sync", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1400,1000", "--virtual-time-budget=20000"]
    command += ["--enable-logging=stderr", "--dump-dom", f"file://{tmp_path}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    assert f'data-ready="{len(specs(text))}"' in done.stdout
    (wide,) = re.findall(r'data-wide="(\d+)"', done.stdout)
    assert int(wide) <= width
    assert re.findall(r'data-cut="(.*?)"', done.stdout) == [""]
