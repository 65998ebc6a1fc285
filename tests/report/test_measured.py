"""A log of steps, and a plan beside it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import loop_jobs
import pytest
import yaml
from harness import pool
from typer.testing import CliRunner

from autoplan.cli import app
from autoplan.errors import PinError
from autoplan.plans.record import Plan
from autoplan.report.measured import compare, read_log

TASK = "gpt2 --cluster 1x4xh100-sxm5-80gb --seq-len 1k --global-batch-size 16 --dp 4"


def cli(line: str) -> Any:
    return CliRunner().invoke(app, line.split(), prog_name="autoplan")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(cli(f"estimate {TASK} --json").stdout)
    return path


def write_log(at: Path, seconds: list[float], **head: Any) -> Path:
    """A log whose steps take these seconds."""
    made = Plan.read(at)
    first = {"autoplan_step_log": 1, "model": "gpt2", "graph": made.graph_hash, "device": "cuda", "world": 4}
    rows = [
        {"step": k, "step_s": s, "tokens_per_s": 16 * 1024 / s, "mfu": 0.1 / s, "peak_bytes": 10_000_000_000}
        for k, s in enumerate(seconds)
    ]
    lines = [{**first, "plan": str(made).splitlines()[0], "predicted": None, **head}, *rows]
    path = at.with_name("log.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_predicted_beside_measured(plan: Path) -> None:
    step = Plan.read(plan).estimate.step_time_s  # type: ignore[union-attr]
    found = compare(Plan.read(plan), write_log(plan, [9.0, 9.0, *[2 * step.mid] * 5]))
    by_name = {f.name: f for f in found.figures}
    assert found.num_rows == 5 and found.notes == ()
    assert by_name["step_s"].ratio == pytest.approx(0.5) and by_name["step_s"].inside is (2 * step.mid <= step.high)
    assert by_name["tokens_per_s"].ratio == pytest.approx(2.0)
    assert compare(Plan.read(plan), write_log(plan, [9.0, 9.0, step.mid])).figures[0].inside


@pytest.mark.parametrize("missing", ["mfu", "tokens_per_s"])
def test_a_figure_that_a_row_lacks_is_left_out(plan: Path, missing: str) -> None:
    """A StepLog with tokens_per_sample, of a program without a prediction, writes no MFU."""
    log = write_log(plan, [9.0, 9.0, 0.5, 0.5, 0.5])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[4][missing] = None
    del lines[5][missing]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cli(f"compare {plan} {log} --json")
    assert done.exit_code == 0, done.output
    names = ["step_s", "tokens_per_s", "mfu", "peak_bytes"]
    assert [f["name"] for f in json.loads(done.stdout)["figures"]] == [name for name in names if name != missing]
    del lines[5]["step_s"]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cli(f"compare {plan} {log}")
    assert done.exit_code == 2 and "step_s is None and must be a number" in done.stderr, done.output


def test_the_command_prints_and_feeds_calibrate(plan: Path, tmp_path: Path) -> None:
    log, out = write_log(plan, [9.0, 9.0, 0.5, 0.5]), tmp_path / "steps.yaml"
    done = cli(f"compare {plan} {log} --calibrate {out}")
    assert done.exit_code == 0 and "step, s" in done.stdout and "The predicted step: compute" in done.stdout, (
        done.output
    )
    (step,) = yaml.safe_load(out.read_text())
    assert step["step_time_s"] == 0.5 and step["degrees"]["dp"] == 4
    done = cli(f"calibrate {out}")
    assert done.exit_code == 0 and "gpt2, measured" in done.stdout, done.output
    data = json.loads(cli(f"compare {plan} {log} --json").stdout)
    assert data["figures"][0]["measured"] == 0.5 and data["num_rows"] == 2


def test_a_plan_of_a_class_says_how_its_model_is_loaded(plan: Path, tmp_path: Path) -> None:
    """As the plans of `parallelize`, which have the name of the module's class."""
    log, out, text = write_log(plan, [9.0, 9.0, 0.5]), tmp_path / "steps.yaml", plan.read_text()
    data = json.loads(text)
    data["asked"]["model"] = "GPT2LMHeadModel"
    other = plan.with_name("of_a_class.json")
    other.write_text(json.dumps(data))
    done = cli(f"compare {other} {log} --calibrate {out}")
    assert done.exit_code == 2 and "add --model" in done.stderr and not out.exists(), done.output
    assert cli(f"compare {other} {log} --calibrate {out} --model gpt2").exit_code == 0
    assert cli(f"calibrate {out}").exit_code == 0


def test_what_does_not_belong_together_is_said(plan: Path, tmp_path: Path) -> None:
    found = compare(Plan.read(plan), write_log(plan, [1.0] * 4, world=8, graph="other", plan="another", device="cpu"))
    said = "another graph", "8 ranks", "another plan: another", "on cpu, the plan is for h100", "a whole process"
    assert all(text in note for text, note in zip(said, found.notes, strict=True))
    assert found.unlike == found.notes[:-1]  # and would teach calibrate a wrong time
    done = cli(f"compare {plan} {write_log(plan, [1.0] * 4, device='cpu')} --calibrate {tmp_path / 'steps.yaml'}")
    assert done.exit_code == 2 and "the steps ran on cpu, the plan is for h100-sxm5-80gb" in done.stderr, done.output
    assert not (tmp_path / "steps.yaml").exists()
    with pytest.raises(PinError, match=r"has 2 rows, of which the first 2 do not count"):
        compare(Plan.read(plan), write_log(plan, [1.0, 1.0]))
    with pytest.raises(PinError, match="is not a log of steps"):
        read_log(plan.with_name("empty")) if plan.with_name("empty").write_text("{}\n") else None
    with pytest.raises(PinError, match="No such file"):
        read_log(tmp_path / "missing")


def test_a_log_without_a_prediction_is_compared(plan: Path) -> None:
    """`StepLog(..., tokens_per_sample=N)` of a program without an estimate: tokens per second, and no MFU."""
    log = write_log(plan, [1.0] * 4)
    head, *rows = map(json.loads, log.read_text().splitlines())
    log.write_text("".join(json.dumps(line) + "\n" for line in (head, *({**row, "mfu": None} for row in rows))))
    assert [f.name for f in compare(Plan.read(plan), log).figures] == ["step_s", "tokens_per_s", "peak_bytes"]


@pytest.mark.parametrize(
    ("line", "value", "message"),
    [
        (0, {"autoplan_step_log": 1}, "line 1 has no 'model'; give the file that autoplan.StepLog wrote"),
        (3, 7, "line 4 is no row of a log, but 7"),
        (3, {"step_s": 1.0}, "line 4: peak_bytes is None and must be a number, as"),
        (4, {"step_s": math.nan, "peak_bytes": 1}, "line 5: step_s is nan and must be a number, as"),
        (4, {"step_s": 1.0, "mfu": "high", "peak_bytes": 1}, "line 5: mfu is 'high' and must be a number or null"),
    ],
)
def test_a_line_that_no_log_has_is_named(plan: Path, line: int, value: object, message: str) -> None:
    log = write_log(plan, [1.0] * 4)
    lines = log.read_text().splitlines()
    lines[line] = json.dumps(value)
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(PinError, match=re.escape(message)):
        read_log(log)


def test_a_log_that_is_no_text_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "train.jsonl"
    log.write_bytes(b"\xff\xfe\n")
    with pytest.raises(PinError, match=r"train\.jsonl is not a text; give the file that autoplan\.StepLog wrote"):
        read_log(log)


def test_arguments_that_nothing_would_use_are_refused(plan: Path, tmp_path: Path) -> None:
    log, out = write_log(plan, [1.0] * 4), tmp_path / "out"
    done = cli(f"compare {plan} {log} --model gpt2")
    assert done.exit_code == 2 and "--model gpt2 is about --calibrate: add --calibrate" in done.stderr
    done = cli(f"compare {plan} {log} --timeline {out}")
    assert done.exit_code == 2 and f"needs a trace of torch.profiler, and {log} is none" in done.stderr
    done = cli(f"compare {plan} {log} --calibrate {out} --model gpt2-xl")  # would teach calibrate a wrong time
    assert done.exit_code == 2 and "gpt2 with 124,439,808 parameters; gpt2-xl has 1,557,611,200" in done.stderr
    assert not out.exists()


def test_a_last_line_that_was_cut_off_is_left_out(plan: Path) -> None:
    log = write_log(plan, [1.0] * 4)
    log.write_text(log.read_text()[:-10])
    assert len(read_log(log)[1]) == 3


@pytest.mark.processes
def test_training_writes_a_log(tmp_path: Path) -> None:
    first, second = pool(2).run(loop_jobs.logged, str(tmp_path))
    text, shown, values, rows = first
    assert rows == second[3] == 4 and second[1] == second[2] == []
    assert len(shown) == 4 and "step 8 | loss" in shown[-1] and "tokens/s" in shown[-1]
    assert ("autoplan/loss", 8) in values and len(values) == 4 * 5
    found = compare(Plan.from_json(text), tmp_path / "train.jsonl")
    assert found.num_rows == 2 and [f.name for f in found.figures] == ["step_s", "tokens_per_s", "mfu", "peak_bytes"]
    assert all(f.measured > 0 for f in found.figures)
