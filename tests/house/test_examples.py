"""The example in the docstring of every public name runs and gives what it says (autoplan.__all__)."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).resolve().parents[2]
IN_A_GROUP = ("rehearse", "ParallelModel", "StepLog", "parallelize")  # they make process groups, the first a fake one
NAMES = [name for name in autoplan.__all__ if name != "__version__"]


def failures(name: str, text: str) -> list[str]:
    """What is wrong with the examples of a docstring; that it has none, too."""
    found: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    return found if test.examples else [f"{name} has no example"]


def check(*names: str) -> None:
    """Run the examples of public names, one after the other."""
    for name in names:
        wrong = failures(name, inspect.getdoc(getattr(autoplan, name)) or "")
        assert not wrong, "".join(wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in IN_A_GROUP])
def test_the_example_of_a_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPLAN_PROFILE", "assumed")
    check(name)


def test_examples_that_make_process_groups_run(tmp_path: Path) -> None:
    code = f"import test_examples; test_examples.check(*{IN_A_GROUP})"
    path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, "AUTOPLAN_PROFILE": "assumed", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr


def test_an_example_that_is_wrong_or_missing_is_seen() -> None:
    assert failures("f", "A function.") == ["f has no example"]
    assert "Got:\n    2" in "".join(failures("f", ">>> 1 + 1\n3\n"))
    assert not failures("f", ">>> 1 + 1\n2\n")
