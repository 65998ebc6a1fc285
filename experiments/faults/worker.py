"""Ranks of a small job that break as told, for run.py; this file is both the launcher and the training script.

    python worker.py launch          # cells as JSON lines on stdin, what became of the ranks on stdout
    torchrun ... worker.py rank CELL FOLDER      # one rank, started by somebody else

The launcher imports everything once and forks the ranks of each cell, which then run as a script does: an exception
that nobody catches goes through sys.excepthook, and the interpreter ends in the usual way.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

import autoplan
import autoplan.api
import autoplan.runtime.model_state

WORLD = 4
PINS = {"tp": 2, "pp": 2, "num_micro_batches": 2, "micro_batch_size": 2}
# Place -> what of autoplan.api is called then: after planning, and before the process groups of the mesh are made.
_IN_PARALLELIZE = {"parallelize": "_tensors", "groups": "ParallelModel"}
FAULTY_STEP = 1  # the second
PLANNING_S = 1.5  # how long rank 0 seems to plan where a rank fails meanwhile


@dataclass(frozen=True)
class Cell:
    """One run: which rank fails, how and where, and the timeout of collectives."""

    how: str
    where: str
    rank: int
    timeout_s: float

    def to_json(self) -> str:
        """Return the cell as text."""
        return json.dumps(asdict(self))


class Net(torch.nn.Module):
    """Two layers after an embedding: enough for two stages, each of them split over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Layer(torch.nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def strike(how: str) -> None:
    """Break this process."""
    print(f"struck by {how}", file=sys.stderr, flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ZeroDivisionError("the injected fault")
    elif how == "exit":
        sys.exit(3)
    elif how == "os._exit":
        os._exit(3)


def before(owner: Any, name: str, act: Callable[[], None], call: int = 1) -> None:
    """Have `act` run before the `call`-th call of `owner.name`."""
    given, calls = getattr(owner, name), [0]

    @functools.wraps(given)
    def inside(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            act()
        return given(*args, **kwargs)

    setattr(owner, name, inside)


class Faulty(torch.optim.SGD):
    """SGD whose step may break."""

    autoplan_elementwise = True
    act: Callable[[], None] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Break if told to, else update."""
        if self.act is not None:
            type(self).act, act = None, self.act
            act()
        return super().step(*args, **kwargs)


def train(rank: int, cell: Cell, folder: Path) -> None:
    """A user's script, of which one rank breaks."""
    torch.set_num_threads(1)
    here = rank == cell.rank
    act = functools.partial(strike, cell.how)
    if cell.where == "planning":
        _break_while_planning(rank, cell, folder)
    if here and cell.where in _IN_PARALLELIZE:
        before(autoplan.api, _IN_PARALLELIZE[cell.where], act)
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8))
    batch = {"ids": ids, "labels": ids}
    pm = autoplan.parallelize(
        Net(),
        "local",
        example_inputs=batch,
        loss_fn=loss_fn,
        global_batch_size=4,
        pins=PINS,
        optimizer=functools.partial(Faulty, lr=0.1),
        timeout_s=cell.timeout_s,
    )
    assert pm.optimizer is not None
    for step in range(FAULTY_STEP + 2):
        if here and step == FAULTY_STEP:
            _arm(pm, cell.where, act)
        pm.step(batch)
        pm.clip_grad_norm_(1.0)
        pm.optimizer.step()
        pm.state_dict()
    print("trained to the end", file=sys.stderr, flush=True)


def _break_while_planning(rank: int, cell: Cell, folder: Path) -> None:
    sign = folder / "planning"
    if rank == 0:
        before(autoplan.api, "plan_program", lambda: (sign.touch(), time.sleep(PLANNING_S)))  # type: ignore[arg-type, func-returns-value]
        if cell.rank == 0:
            before(autoplan.api, "plan_program", lambda: (sign.touch(), strike(cell.how)))  # type: ignore[arg-type, func-returns-value]
    elif rank == cell.rank:

        def lurk() -> None:
            while not sign.exists():
                time.sleep(0.02)
            time.sleep(0.3)
            strike(cell.how)

        threading.Thread(target=lurk, daemon=True).start()


def _arm(pm: autoplan.ParallelModel, where: str, act: Callable[[], None]) -> None:
    if where == "script":
        act()
    elif where == "forward":
        last = list(pm.stage.get_submodule("blocks").children())[-1]
        last.register_forward_pre_hook(lambda *_: act())
    elif where == "backward":
        next(pm._trained()).register_hook(lambda _: act())
    elif where == "clip":
        before(pm, "_grad_norm", act)
    elif where == "optimizer":
        Faulty.act = staticmethod(act)
    elif where == "state_dict":
        before(autoplan.runtime.model_state, "unshard", act, call=2)


def launch() -> None:
    """Run the cells that come in, one after the other."""
    gc.freeze()  # what is imported stays shared with the ranks
    for line in sys.stdin:
        cell = Cell(**json.loads(line))
        folder = tempfile.mkdtemp()  # no context manager: the forked ranks end through it
        print(json.dumps(_run(cell, Path(folder))), flush=True)
        shutil.rmtree(folder)


def _run(cell: Cell, folder: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(WORLD):
        (folder / f"rank{rank}").touch()
    begin = time.monotonic()
    children = [_fork(rank, cell, folder, port) for rank in range(WORLD)]
    statuses, ended = [""] * WORLD, [0.0] * WORLD
    deadline, struck = begin + 180, False
    while time.monotonic() < deadline:
        if not struck and "struck by" in (folder / f"rank{cell.rank}").read_text(errors="replace"):
            # twice the timeout, and what is waited for answers
            struck, deadline = True, time.monotonic() + 2 * cell.timeout_s + 30
        for rank, pid in enumerate(children):
            if not statuses[rank]:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[rank], ended[rank] = _words(status), time.monotonic() - begin
        if all(s or rank == cell.rank for rank, s in enumerate(statuses)):
            break
        time.sleep(0.02)
    for rank, pid in enumerate(children):
        if not statuses[rank]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            statuses[rank] = "stopped" if rank == cell.rank and cell.how == "stop" else "never ended"
    texts = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(WORLD)]
    return {"cell": asdict(cell), "statuses": statuses, "texts": texts, "seconds": ended}


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _fork(rank: int, cell: Cell, folder: Path, port: int) -> int:
    launcher, pid = os.getpid(), os.fork()
    if pid == 0:
        if sys.platform == "linux":  # the kernel ends this process with the launcher, also where it is stopped
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)
        out = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for ours, theirs in ((null, 0), (out, 1), (out, 2)):
            os.dup2(ours, theirs)
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in here.items()})
        train(rank, cell, folder)
        sys.exit(0)
    return pid


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch()
    else:
        train(int(os.environ["RANK"]), Cell(**json.loads(sys.argv[2])), Path(sys.argv[3]))
