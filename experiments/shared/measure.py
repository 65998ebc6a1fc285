"""What the experiments share: interleaved timing, bytes that autograd saves, and how results are shown and stored."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch.autograd.graph import saved_tensors_hooks

from autoplan.config.planning import NO_CACHE_VARIABLE


@dataclass
class Timings:
    """Seconds of the repetitions of one contender, in the order they ran."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median wall time."""
        return statistics.median(self.wall_s)


@dataclass(frozen=True)
class Ratio:
    """How one contender compares with another that ran beside it.

    median: of the wall times' ratio, repetition by repetition. low, high: its quartiles. best: ratio of the two fastest
    repetitions. cpu: median ratio of processor time, which a busy machine distorts less than wall time.
    """

    median: float
    low: float
    high: float
    best: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    min_repeats: int = 5,
    max_repeats: int = 60,
    warmup: int = 2,
    repeats: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Timings]:
    """Time functions in turn, A B, B A, A B, ..., so that whatever else the machine does meets all of them.

    Args:
        contenders: name -> what to time.
        budget_s: about how long all repetitions may take together.
        repeats: a fixed number of repetitions (several processes must agree on it) in place of the budget.
        before: called before every one, not timed (a barrier).
    """
    out = {name: Timings() for name in contenders}
    names = list(contenders)
    start = 0.0
    for i in range(-warmup, repeats or max_repeats):
        if i == 0:
            start = time.perf_counter()
        if repeats is None and i >= min_repeats and time.perf_counter() - start > budget_s:
            break
        for name in names if i % 2 == 0 else names[::-1]:
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            if i >= 0:
                out[name].cpu_s.append(time.process_time() - cpu)
                out[name].wall_s.append(time.perf_counter() - wall)
    return out


def compare(mine: Timings, theirs: Timings) -> Ratio:
    """Ratio of two contenders of one `interleave`."""
    ratios = sorted(a / b for a, b in zip(mine.wall_s, theirs.wall_s, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    cpu = statistics.median(a / b for a, b in zip(mine.cpu_s, theirs.cpu_s, strict=True))
    return Ratio(statistics.median(ratios), low, high, min(mine.wall_s) / min(theirs.wall_s), cpu)


def saved_bytes(step: Callable[[], object], excluded: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward of one step, each storage once, without `excluded` (parameters)."""
    known = {t.untyped_storage().data_ptr() for t in excluded}
    kept: dict[int, torch.Tensor] = {}  # holds them, so that no address is given out twice

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.detach())
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in known)


def max_relative_difference(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Worst over names of max|a - b| / max|b|. KeyError if the names differ."""
    if set(mine) != set(theirs):
        raise KeyError(f"only one side has {sorted(set(mine) ^ set(theirs))[:3]}")
    worst = 0.0
    for name, b in theirs.items():
        scale = float(b.abs().max())
        worst = max(worst, float((mine[name] - b).abs().max()) / (scale if scale > 0 else 1.0))
    return worst


def environment() -> dict[str, Any]:
    """Return what the figures depend on, without naming the machine."""
    return {
        "cpu_count": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }


def describe(env: Mapping[str, Any]) -> str:
    """One line for a table's title."""
    return f"{env['cpu_count']} cores, torch {env['torch']}, {env['threads']} thread(s), load {env['load_average']:.1f}"


def make_console() -> Console:
    """A console that keeps tables whole where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def run_command(main: Callable[..., None]) -> None:
    """Run a typer command with plain tracebacks. Its searches, and those of its processes, keep no layouts on disk.

    What is measured does not depend on earlier runs.
    """
    os.environ.setdefault(NO_CACHE_VARIABLE, "1")
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()


def limit_time(seconds: float) -> None:
    """End this process with a traceback and a non-zero exit code if it still runs after `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)


def write_json(path: Path | None, command: str, env: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Store the results, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"command": command, "environment": env, "cases": cases}, indent=1) + "\n")
