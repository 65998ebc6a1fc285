"""The command for the day there is a GPU runs here too: every part, tiny, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu import run
from experiments.gpu.rows import Row, append_row
from experiments.gpu.run import PARTS, TOTAL_S, run_part

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "experiments.on_gpu", "--device", "cpu", "--quick"]


def _run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--folder", str(folder), "--json", str(folder / "all.json"), *more]
    limits = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=1150, env={**os.environ, **limits})


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_every_part_runs_without_a_gpu(tmp_path):
    done = _run(tmp_path, "--limit-s", "1100")  # not what it may take on a GPU, but an end, on slow machines too
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "all.json").read_text())
    rows = found["cases"]
    assert [r for r in rows if r["passed"] is False] == []
    parts = {r["part"] for r in rows}
    assert parts == {part.name for part in PARTS} == set(found["environment"]["seconds"])
    assert len([r for r in rows if r["passed"]]) >= 40
    assert found["environment"]["torch"] and found["environment"]["date"]
    assert (tmp_path / "profile.json").is_file()


def test_what_breaks_in_a_part_is_a_row_that_failed(tmp_path):
    """Without the profile of the part before it, `predicted` says so; the part after it runs; the command fails."""
    done = _run(tmp_path, "--only", "predicted", "--only", "nccl")
    assert done.returncode == 1
    rows = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert [r["part"] for r in rows] == ["predicted", *["nccl"] * 5]
    assert rows[0]["passed"] is False and "no profile" in rows[0]["note"]
    assert all(r["passed"] for r in rows[1:])
    assert "5 passed, 1 failed, 0 to read; all rows in " in done.stdout


def test_parts_run_at_once(tmp_path):
    """With `--together` those whose times do not matter, then the others; the JSON has the rows of all."""
    done = _run(tmp_path, "--together", "--only", "masks", "--only", "sync", "--only", "nccl", "--limit-s", "300")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert sorted({r["part"] for r in rows}) == ["masks", "nccl", "sync"] and rows[-1]["part"] == "nccl"
    assert any(r["passed"] for r in rows if r["part"] == "masks")


def test_a_part_that_is_killed_keeps_its_rows(tmp_path):
    """Rows that were written stay, also where the last one broke off."""
    row = Row("masks", "causal", {"ms": 1.5}, True)
    append_row(tmp_path / "masks.rows", row)
    with (tmp_path / "masks.rows").open("a") as out:
        out.write('{"part": "mas')
    part = next(p for p in PARTS if p.name == "masks")
    rows, problem = run_part(part, "cpu", True, tmp_path, -9.9)
    assert rows == [row] and "did not end within" in problem


def test_the_parts_are_expected_to_end_in_time():
    """With the start of their processes, and within the ten minutes that the command may take."""
    assert sum(p.expected_s + run._START_S for p in PARTS) < TOTAL_S <= 570


def test_a_part_that_has_no_time_is_told(tmp_path):
    done = _run(tmp_path, "--only", "ranks", "--limit-s", "16")
    assert done.returncode == 1
    rows = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert rows[-1]["passed"] is False and ("no time left" in rows[-1]["note"] or "not end" in rows[-1]["note"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--only", "nothing"], "unknown part 'nothing'"), (["--device", "cuda"], "torch sees no GPU")],
)
def test_bad_arguments(tmp_path, arguments, told):
    done = _run(tmp_path, *arguments)
    assert done.returncode == 2 and told in done.stderr
