"""Jobs under torchrun that lose a rank, in every phase, and go on from the last checkpoint with the same losses.

    python -m experiments.state.restarts --write docs/restarts.md   # all cells; finished ones are kept beside --out

The job is the script of docs/training.md (Failures) as it stands, in float64, started by `torchrun --max-restarts`.
One rank gets SIGKILL in one phase. The job must end well, and every loss that it prints, also of steps that it repeats,
must be that of the same job without a failure, to the last bit. In the last row a whole agent is killed (torchrun and
its rank, as when a machine is lost), and the job goes on with one rank under another plan: the losses that follow agree
to 1e-12.

    python -m experiments.state.restarts rank CELL SCRIPT           # one rank, started by torchrun
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoplan.files import write_whole
from experiments.faults.worker import before

ROOT = Path(__file__).resolve().parents[2]
PLANS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO 3, dp 2": {"dp": 2, "zero_stage": 3},
    "tp 2": {"tp": 2, "num_micro_batches": 2},
}
LOSS = re.compile(r"^step (\d+): loss (\S+)$", re.MULTILINE)
LOST = "an agent is lost"
TIMED_OUT = 124
NUM_STEPS, DIES_AT = 12, 5


@dataclass(frozen=True)
class Place:
    """A phase of the job: what is called then (module, attribute), at which call, and on which ranks."""

    owner: str
    name: str
    call: int
    ranks: tuple[int, ...] = (0, 1)
    after: bool = False
    beside: bool = False  # checkpoints are written beside the training
    earlier: str = ""  # a phase in which the rank died before, so that this one is of a second life


_FILES = "autoplan.runtime.checkpoint.storage", "write_tensors"
_DOOR = "autoplan.runtime.checkpoint.door"
# of the second checkpoint, so that there is an older one
PLACES: Mapping[str, Place] = {
    "planning": Place("autoplan.api", "plan_program", 1, (0,)),
    "making the program": Place("autoplan.api", "ParallelModel", 1),
    "forward": Place("autoplan.runtime.pipeline.PipelineRunner", "run", DIES_AT),
    "backward": Place("autoplan.runtime.model", "reduce_deferred", DIES_AT),
    "norm of the gradient": Place("autoplan.runtime.state_methods", "norm_of_all", DIES_AT),
    "optimizer": Place("torch.optim.AdamW", "step", DIES_AT),
    "checkpoint: before it is gathered": Place(_DOOR, "content_of", 2),
    "checkpoint: before its file": Place(*_FILES, 2),
    "checkpoint: after its file": Place(*_FILES, 2, after=True),
    "checkpoint: before its manifest": Place(_DOOR, "write_manifest", 2, (0,)),
    "checkpoint: before it has its name": Place(_DOOR, "move_folder", 2, (0,)),
    "checkpoint: before the old one is removed": Place(_DOOR, "remove_old", 3, (0,)),
    "checkpoint beside the training: before its file": Place(*_FILES, 2, beside=True),
    "checkpoint beside the training: after its file": Place(*_FILES, 2, after=True, beside=True),
    "loading a checkpoint": Place(_DOOR, "load", 1, earlier="forward"),
}


@dataclass(frozen=True)
class Cell:
    """One run: the plan, the phase ("": nothing happens), and the rank that is killed."""

    plan: str
    where: str
    rank: int

    def to_json(self) -> str:
        """Return the cell as text."""
        return json.dumps(asdict(self))


def cells() -> list[Cell]:
    """All runs."""
    out = [Cell(plan, where, rank) for plan in PLANS for where, place in PLACES.items() for rank in place.ranks]
    return out + [Cell(plan, LOST, 1) for plan in PLANS]


def script() -> str:
    """Return the job: the script of docs/training.md."""
    found = re.search(r"## Failures.*?```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


# -- one rank ---------------------------------------------------------------------------------------------------------


def run_rank(cell: Cell, path: str) -> None:
    """Run the script as a rank of torchrun, and die where the cell says."""
    import autoplan

    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world = int(os.environ["WORLD_SIZE"])
    place = PLACES.get(cell.where)
    # the plan is pinned, so that it is the same in every life; a world that has shrunk gets one of its own
    pins = PLANS[cell.plan] if world == 2 else {}
    autoplan.parallelize = functools.partial(autoplan.parallelize, pins=pins, verify=False)  # type: ignore[misc]
    if place is not None and place.beside:
        given = autoplan.ParallelModel.save_checkpoint
        autoplan.ParallelModel.save_checkpoint = functools.partialmethod(given, wait=False)  # type: ignore[method-assign, assignment]
    if place is not None and rank == cell.rank:
        if place.earlier and life == 0:
            _arm(PLACES[place.earlier])
        elif life == (1 if place.earlier else 0):
            _arm(place)
    if cell.where == LOST and world == 2:
        before(_owner("autoplan.runtime.pipeline.PipelineRunner"), "run", _say_and_wait, DIES_AT)
    runpy.run_path(path, run_name="__main__")


def _say_and_wait() -> None:
    """Say that the step is reached; the launcher then kills this process with its agent, the second one."""
    if int(os.environ["GROUP_RANK"]) == 1:
        Path("here").write_text(str(os.getpid()))
        time.sleep(600)


def _owner(path: str) -> Any:
    import importlib

    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def _arm(place: Place) -> None:
    owner = _owner(place.owner)
    if not place.after:
        before(owner, place.name, _die, place.call)
        return
    given, calls = getattr(owner, place.name), [0]

    @functools.wraps(given)
    def inside(*args: Any, **kwargs: Any) -> Any:
        out = given(*args, **kwargs)
        calls[0] += 1
        if calls[0] == place.call:
            _die()
        return out

    setattr(owner, place.name, inside)


def _die() -> None:
    print("killed here", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


# -- one job ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its exit code, the losses by step in the order printed, and how often a rank was killed."""

    code: int
    losses: tuple[tuple[int, float], ...]
    num_killed: int
    text: str


def run_job(cell: Cell, folder: Path, timeout_s: float = 240.0) -> Outcome:
    """Run the job in a folder under torchrun, and kill what the cell says."""
    (folder / "train.py").write_text(script())
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    environment |= {"AUTOPLAN_PROFILE": "assumed", "AUTOPLAN_TIMEOUT_S": "60"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.5"]
    rank = ["-m", "experiments.state.restarts", "rank", cell.to_json(), "train.py"]
    if cell.where == LOST:
        return _lose_agent([*launch], rank, folder, environment, timeout_s)
    with _log(folder, "0") as log:
        command = [*launch, "--standalone", "--nproc-per-node", "2", *rank]
        agent = _start(command, folder, environment, log)
    try:
        code = agent.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
    finally:
        _end(agent)
    return _outcome(code, folder)


def _start(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End an agent, and with SIGTERM its ranks, if it is still there."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(40)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def _log(folder: Path, name: str) -> Any:
    return (folder / f"log{name}").open("wb")


def _outcome(code: int, folder: Path, num_killed: int = 0) -> Outcome:
    text = (folder / "log0").read_text(errors="replace")
    losses = tuple((int(step), float(loss)) for step, loss in LOSS.findall(text))
    return Outcome(code, losses, num_killed + text.count("killed here"), text)


def _lose_agent(
    launch: Sequence[str], rank: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> Outcome:
    """Run two agents with one rank each, and kill one with its rank once the job has reached a step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = "last_call_timeout=12,keep_alive_interval=1,keep_alive_max_attempt=3,timeout=120"
    meet = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "restarts"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
    environment = {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []
    try:
        for name in ("0", "1"):
            with _log(folder, name) as log:
                agents.append(_start([*launch, *meet, *rank], folder, environment, log))
            time.sleep(2.0)  # the first one hosts the meeting: the job cannot lose it
        end = time.monotonic() + timeout_s
        while not (folder / "here").exists() and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(0.5)
        worker = int((folder / "here").read_text())
        os.kill(agents[1].pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        code = agents[0].wait(max(1.0, end - time.monotonic()))
        logs = [(folder / f"log{i}").read_text(errors="replace") for i in range(2)]
        (folder / "log0").write_text("\n".join(logs))
        return _outcome(code, folder, 1)
    finally:
        for agent in agents:
            _end(agent)


def verdict(cell: Cell, truth: Outcome, found: Outcome) -> list[str]:
    """Return what is wrong with a run; empty if nothing is."""
    out = [] if found.code == 0 else [f"exit code {found.code}"]
    wanted = dict(truth.losses)
    expected = 2 if cell.where in PLACES and PLACES[cell.where].earlier else 1
    if found.num_killed != expected:
        out.append(f"{found.num_killed} kills instead of {expected}")
    if {step for step, _ in found.losses} != set(wanted) or len(wanted) != NUM_STEPS:
        out.append(f"steps {sorted({step for step, _ in found.losses})}")
    near: Callable[[float, float], bool] = (
        (lambda a, b: abs(a / b - 1) < 1e-12) if cell.where == LOST else (lambda a, b: a == b)
    )
    wrong = [step for step, loss in found.losses if not near(loss, wanted.get(step, 0.0) or 1.0)]
    return out + ([f"other losses in steps {wrong}"] if wrong else [])


# -- the table --------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, list[str]]) -> str:
    """Return the document."""
    lines = [
        "# Restarts",
        "",
        "Generated by `python -m experiments.state.restarts --write docs/restarts.md`; do not edit.",
        "",
        "Two ranks under `torchrun --max-restarts 3` run the script of [training.md](training.md#failures) in float64.",
        "A rank gets SIGKILL in one phase, each rank in turn (some phases are rank 0's alone). A number counts jobs",
        "that ended well, with every printed loss, also of repeated steps, equal to the last bit to that of the job",
        f"without a failure. *{LOST}*: torchrun is killed with its rank, the other agent goes on with one rank under",
        "another plan (dp 1), and the losses agree to 1e-12.",
        "",
        "| phase | " + " | ".join(PLANS) + " |",
        "|---|" + "---|" * len(PLANS),
    ]
    for where in [*PLACES, LOST]:
        row = []
        for plan in PLANS:
            mine = [Cell(plan, where, rank) for rank in (PLACES[where].ranks if where in PLACES else (1,))]
            run = [results[c.to_json()] for c in mine if c.to_json() in results]
            row.append(f"{sum(not wrong for wrong in run)} of {len(run)}" if run else "")
        lines.append(f"| {where} | " + " | ".join(row) + " |")
    good = sum(not wrong for wrong in results.values())
    lines += ["", f"{len(results)} of {len(cells())} jobs run, {good} of {len(results)} went on with the same losses."]
    lines += [f"- {key}: {'; '.join(wrong)}" for key, wrong in results.items() if wrong]
    return "\n".join(lines) + "\n"


def check(cell: Cell, truth: Outcome) -> list[str]:
    """Run a cell in a folder of its own; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        return verdict(cell, truth, run_job(cell, Path(folder)))


def truth_of(plan: str) -> Outcome:
    """Run the job without a failure and return its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_job(Cell(plan, "", 0), Path(folder))
    if found.code or len(found.losses) != NUM_STEPS:
        raise RuntimeError(f"the job failed without a fault:\n{found.text[-4000:]}")
    return found


def main() -> None:
    """Run the cells that have not been run, and write the table."""
    if sys.argv[1:2] == ["rank"]:
        return run_rank(Cell(**json.loads(sys.argv[2])), sys.argv[3])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the document to write")
    parser.add_argument("--out", type=Path, default=Path("restarts.json"), help="results so far; continued")
    arguments = parser.parse_args()
    results: dict[str, list[str]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    truths: dict[str, Outcome] = {}
    for cell in cells():
        if cell.to_json() not in results:
            if cell.plan not in truths:
                truths[cell.plan] = truth_of(cell.plan)
            results[cell.to_json()] = check(cell, truths[cell.plan])
            print(cell, results[cell.to_json()] or "good", flush=True)
            write_whole(arguments.out, json.dumps(results, indent=1))
    if arguments.write is not None:
        write_whole(arguments.write, table(results))


if __name__ == "__main__":
    main()
