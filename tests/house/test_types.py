"""The types of everything that a user reaches through `import autoplan` are complete, as pyright sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autoplan

ROOT = Path(__file__).resolve().parents[2]


def known(symbol: Mapping[str, Any]) -> bool:
    """Return True if no type checker has to guess the type of a symbol."""
    return bool(symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"])


@pytest.mark.slow
def test_the_types_of_the_door_are_complete() -> None:
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "autoplan"]
    done = subprocess.run(
        [*command, "--ignoreexternal", "--outputjson"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # pyright does not follow an editable install
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "No py.typed" not in done.stdout
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    homes = tuple(f"{getattr(autoplan, name).__module__}.{name}" for name in autoplan.__all__ if name != "__version__")
    door = [s for s in symbols if s["name"] in homes or s["name"].startswith(tuple(f"{home}." for home in homes))]
    wrong = {s["name"]: [d["message"] for d in s["diagnostics"]] for s in door if not known(s)}
    assert not wrong
    assert {s["name"] for s in door} >= set(homes)
    assert any(not known(s) for s in symbols)  # it does see what is not known, in the rooms behind the door
