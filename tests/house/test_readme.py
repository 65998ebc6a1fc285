"""The example in README.md runs as it stands, and links of all pages lead to files (commands: test_page_commands)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_runs(tmp_path: Path) -> None:
    """Four processes started by torchrun train, print the plan, and leave the program where the text says."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5, done.stdout
    assert "predicted: step" in done.stdout and "on 4 devices" in done.stdout
    assert (tmp_path / "program" / "stage0.py").exists() and (tmp_path / "program" / "plan.json").exists()


def test_the_readme_is_read_in_five_minutes() -> None:
    """Its prose has at most 1,200 words: 240 a minute. Commands, outputs, code and addresses are not counted."""
    prose = re.sub(r"```.*?```|^    [^\n]*|\]\([^)]*\)", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"[A-Za-z0-9][\w.'-]*", prose)) <= 1200


PAGES = [README, README.parent / "ARCHITECTURE.md"]
PAGES += [page for folder in ("docs", "experiments") for page in sorted((README.parent / folder).rglob("*.md"))]
PAGES += [README.parent / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")]


def anchor(line: str) -> str:
    """Return the name that GitHub gives a heading: without punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(README.parent)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            lines = [line for line in file.read_text().splitlines() if "# " in line]
            assert heading in map(anchor, lines), target
