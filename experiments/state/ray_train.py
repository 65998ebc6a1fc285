"""The launch file for Ray Train, run for real on this machine: the same losses as torchrun, also after a lost worker.

    pip install "ray[train]"
    python -m experiments.state.ray_train

`autoplan launch PLAN --for ray` writes the driver of a plan for two CPU processes; the job is the script of
docs/training.md (Failures) as it stands, in float64. It is run as it is, and once more with a worker that gets SIGKILL
in its fifth forward: Ray starts the workers again, and the script goes on from its last checkpoint. Every printed loss
must be that of the same script under torchrun, to the last bit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import typer
from rich.table import Table

import autoplan
from autoplan.files import write_whole
from autoplan.report.launch import launch_text
from experiments.shared.measure import make_console, run_command
from experiments.state.restarts import NUM_STEPS, ROOT, script

LOSS = re.compile(r"\bstep (\d+): loss (\S+)")  # Ray puts the name of the worker before a line
TIMEOUT_S = 3600.0
# the worker of rank 1 dies in its fifth forward, in its first life
_DYING = """
import os, pathlib, runpy
from experiments.state.restarts import PLACES, _arm
if int(os.environ["RANK"]) == 1 and not pathlib.Path("died").exists():
    pathlib.Path("died").touch()
    _arm(PLACES["forward"])
runpy.run_path("train.py", run_name="__main__")
"""


def losses_of(command: list[str], folder: Path) -> list[tuple[int, float]]:
    """Run a command in a folder; return the losses that it printed, by step, in their order.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    environment |= {"AUTOPLAN_PROFILE": "assumed", "RAY_TRAIN_V2_ENABLED": "1", "RAY_DEDUP_LOGS": "0"}
    environment |= {"RAY_worker_niceness": "0"}  # Ray gives its workers 15: beside other work they get nowhere
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return [(int(step), float(loss)) for step, loss in LOSS.findall(done.stdout)]


def run() -> None:
    """Run the job under torchrun, under Ray Train, and under Ray Train with a worker that is lost."""
    if importlib.util.find_spec("ray") is None:
        raise typer.BadParameter('Ray is not installed: pip install "ray[train]"')
    plan = autoplan.plan(
        "gpt2", autoplan.Cluster.local(2, "cpu"), seq_len=1024, global_batch_size=4, pins={"dp": 2}, compile=False
    )
    table = Table("job", "losses printed", "steps", "as torchrun's", "repeated steps")
    wrong = False
    with tempfile.TemporaryDirectory() as root:
        truth: dict[int, float] = {}
        for name in ("torchrun", "Ray Train", "Ray Train, a worker is killed"):
            folder = Path(root, str(len(table.rows)))
            folder.mkdir()
            write_whole(folder / "train.py", script())
            write_whole(folder / "dying.py", _DYING)
            write_whole(folder / "plan.json", plan.to_json())
            job = "dying.py" if "killed" in name else "train.py"
            write_whole(folder / "driver.py", launch_text(folder / "plan.json", "ray", script=job))
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
            found = losses_of([sys.executable, *(torchrun if name == "torchrun" else ["driver.py"])], folder)
            truth = truth or dict(found)
            same = sum(truth.get(step) == loss for step, loss in found)
            steps = {step for step, _ in found}
            lost = "killed" in name and not (folder / "died").exists()
            wrong |= same < len(found) or len(steps) != NUM_STEPS or lost
            table.add_row(name, str(len(found)), str(len(steps)), str(same), str(len(found) - len(steps)))
    make_console().print(table)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(run)
