"""The example in README.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.processes
def test_the_example_runs(tmp_path: Path) -> None:
    """Four processes started by torchrun print the same losses and the plan, and leave the program where it says."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    losses: dict[str, set[str]] = {}
    for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", done.stdout):
        losses.setdefault(step, set()).add(loss)
    assert len(losses) == 10 and all(len(same) == 1 for same in losses.values()), done.stdout
    assert "dp=2 tp=2 pp=1 zero=3" in done.stdout
    assert (tmp_path / "program" / "stage0.py").exists()
