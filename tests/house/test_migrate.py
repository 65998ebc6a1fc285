"""The loops of docs/migrate.md run as they stand, on two processes and on one, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"
LOOPS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("text", LOOPS, ids=["nanogpt", "ddp"])
def test_a_loop_of_the_page_runs(text: str, num: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)] if num > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *start, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"(?:iter|epoch) \d+: loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0], done.stdout
    if "val loss" in text:
        assert len(re.findall(r"val loss \d", done.stdout)) == 2 and "saved" in done.stdout
