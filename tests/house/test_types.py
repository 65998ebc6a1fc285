"""Every public type of the package is complete, as pyright sees them (`pyright --verifytypes autoplan`)."""

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


def verified(package: str, folder: Path) -> Mapping[str, Any]:
    """Return what `pyright --verifytypes` says about a package in `folder`.

    pyright does not follow an editable install, so that the folder is on its path, and in this mode it looks for other
    packages with the first `python` of PATH, whatever `--pythonpath` says.
    """
    pytest.importorskip("pyright")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "No py.typed" not in done.stdout
    found: Mapping[str, Any] = json.loads(done.stdout)["typeCompleteness"]
    return found


def unknown(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what is said of the symbols whose types a type checker would have to guess."""
    wrong = [s for s in found["symbols"] if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    return {s["name"]: [d["message"] for d in s["diagnostics"]] for s in wrong}


@pytest.mark.slow
def test_all_types_of_the_package_are_complete() -> None:
    found = verified("autoplan", ROOT)
    assert not unknown(found)
    assert found["completenessScore"] == 1
    homes = {f"{getattr(autoplan, name).__module__}.{name}" for name in autoplan.__all__ if name != "__version__"}
    assert {s["name"] for s in found["symbols"]} >= homes


@pytest.mark.slow
def test_what_is_not_known_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "guessed"
    package.mkdir()
    (package / "py.typed").touch()
    text = "import torch\n\ndef whole(x: torch.Tensor) -> None: ...\ndef bare(x) -> None: ...\n"
    (package / "__init__.py").write_text(f"{text}class Layer(torch.nn.Module): ...\n")
    assert set(unknown(verified("guessed", tmp_path))) == {"guessed.bare"}
