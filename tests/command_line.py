"""The command line in this process and in one of its own, for tests."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from typer.testing import CliRunner, Result

from autoplan.cli import app

ROOT = Path(__file__).resolve().parents[1]
TASK = ("gpt2", "--cluster", "1x4xh100-sxm5-80gb", "--seq-len", "1k", "--global-batch-size", "16")
PLAIN = {"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}


@lru_cache(maxsize=64)
def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env=PLAIN, prog_name="autoplan")


def shell(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoplan", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_line_error(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and "Traceback" not in result.output
    return line
