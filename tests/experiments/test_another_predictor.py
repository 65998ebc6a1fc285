"""experiments/published/side_by_side.py: autoplan and another predictor on published steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import autoplan
from experiments.published import side_by_side

CALCULON = """
import json, sys
_, command, model, execution, system, answer = sys.argv
assert command == "llm" and model.endswith("models/megatron-22B.json") and system.endswith("a100_80g.json"), sys.argv
json.dump({"total_time": 1.42 if "full" in execution else 1.21}, open(answer, "w"))
"""


def test_the_commands_are_those_of_the_paper() -> None:
    lines = [
        " ".join(side_by_side.autoplan_command(step, full)) for step in side_by_side.STEPS for full in (True, False)
    ]
    assert len(set(lines)) == 8 and all(line.startswith("autoplan estimate ") for line in lines)
    for step in side_by_side.STEPS:  # tensor parallel over a node, one replica; layers divide into the stages
        layers = sum(call.block == "layer" for call in autoplan.load_model(step.model).calls)
        assert step.nodes == step.pp and layers % (step.pp * step.virtual_stages) == 0


@pytest.mark.slow
def test_a_table_of_measured_and_predicted_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "calculon").write_text(CALCULON)
    monkeypatch.setattr(side_by_side, "STEPS", side_by_side.STEPS[:1])
    app = side_by_side.typer.Typer()
    app.command()(side_by_side.main)
    done = CliRunner().invoke(app, ["--calculon", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "| gpt-22b | 8 | full | 1.42 |" in done.stdout and "| 1.42 | +0.0% |" in done.stdout
    assert "Calculon: mean error 5.0%, worst +10.0%" in done.stdout and "of 2 measured steps" in done.stdout
    (tmp_path / "bin" / "calculon").write_text("raise SystemExit('no such model')")
    failed = CliRunner().invoke(app, ["--calculon", str(tmp_path)])
    assert failed.exit_code == 2 and "no such model" in failed.output
