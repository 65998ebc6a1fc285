"""The commands of every tutorial run, one after the other in one folder, for a smaller model (`smaller`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from typer.testing import CliRunner

from autoplan import catalog
from autoplan.cli import app

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
COMMANDS = {page: re.findall(r"^    autoplan (.*)$", page.read_text(), flags=re.MULTILINE) for page in PAGES}
IN_DEFAULT = ("platform.md",)  # the others are left to make test-all


def smaller(line: str) -> str:
    """The same options for a model and a cluster that take a second to search."""
    line = re.sub("|".join(rf"(?<= ){re.escape(name)}(?= )" for name in catalog.names()), "gpt2", line)
    line = re.sub(r"--cluster [^@\s]+", "--cluster 4xh100", line)
    line = re.sub(r"--seq-len \S+", "--seq-len 1k", re.sub(r"--global-batch-size \d+", "--global-batch-size 16", line))
    searched = line.startswith(("fit", "plan", "whatif", "size"))
    short = "" if "--global-batch-size" in line or not searched else " --seq-len 1k --global-batch-size 64"
    line = line.replace("--tp 8 --pp 8", "--tp 2 --pp 2").replace("nodes=2,4", "nodes=1,2")
    return re.sub("^fit ", "fit --seconds 2 ", line) + short


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[] if p.name in IN_DEFAULT else pytest.mark.slow, id=p.stem) for p in PAGES]
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS[page]:
        typed, _, file = line.partition(" > ")
        command = smaller(typed)
        result = CliRunner().invoke(app, shlex.split(command), prog_name="autoplan", env={"COLUMNS": "100"})
        assert result.exit_code == 0 and (result.stdout or "--out" in command), (command, result.output[-2000:])
        if file:
            Path(file).write_text(result.stdout)
        for written in re.findall(r"--(?:out|report|csv) (\S+)", command):
            assert Path(written).stat().st_size > 0


def test_pages_have_commands() -> None:
    counts = {page.name: len(lines) for page, lines in COMMANDS.items()}
    assert counts.pop("embed.md") == 0 and min(counts.values()) >= 2 and len(counts) == 5


@pytest.mark.slow
def test_the_python_of_the_tutorial_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "embed.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "predicted: step" in done.stdout and '"zero_optimization"' in done.stdout
