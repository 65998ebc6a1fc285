"""Contenders that do the same step on the same local processes: compared with one process, then timed in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from autoplan.profiler.processes import run_ranks
from experiments.shared.measure import (
    Timings,
    compare,
    describe,
    environment,
    interleave,
    make_console,
    max_relative_difference,
    write_json,
)
from experiments.shared.models import Size

TOLERANCE = 1e-4  # fp32, another order of additions


@dataclass(frozen=True)
class Contender:
    """One way to do a forward and a backward.

    step: does it, returns the loss. gradients: the whole gradients by name after it. share: None if every rank returns
    the loss of the whole batch, otherwise what the sum of the ranks' losses is to be multiplied by.
    """

    step: Callable[[], torch.Tensor]
    gradients: Callable[[], dict[str, torch.Tensor]]
    share: float | None = None


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients a module holds, by name."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def reference(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a Hugging Face model in one process."""
    loss = model(**batch, use_cache=False).loss
    torch.autograd.backward(loss)
    return float(loss), grads_of(model)


def slowest(values: list[float]) -> list[float]:
    """Element by element the largest over the ranks (a collective)."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    out: list[float] = tensor.tolist()
    return out


def check(
    contenders: Mapping[str, Contender],
    truth: tuple[float, dict[str, torch.Tensor]],
    where: object,
    *,
    parts: bool = False,
) -> dict[str, float]:
    """One step of every contender against one process: worst relative difference of a gradient, over the ranks.

    Args:
        truth: loss and gradients of one process (`reference`).
        where: named in errors.
        parts: a rank may hold the gradients of some parameters only (a stage of a pipeline).

    Raises:
        ValueError: a loss or a gradient differs by more than `TOLERANCE`.
        KeyError: the parameters are not those of the model.
    """
    loss, gradients = truth
    differences = {}
    for name, contender in contenders.items():
        got = contender.step().detach().clone()
        if contender.share is not None:
            dist.all_reduce(got)
            got *= contender.share
        found = contender.gradients()
        expected = {n: gradients[n] for n in found} if parts else gradients
        differences[name] = slowest([max_relative_difference(found, expected)])[0]
        if abs(float(got) - loss) > TOLERANCE * abs(loss) or differences[name] > TOLERANCE:
            raise ValueError(
                f"{name} at {where}: loss {float(got)}, one process {loss}; gradients differ by {differences[name]:.1e}"
            )
    return differences


def time_together(contenders: Mapping[str, Contender], budget_s: float) -> dict[str, Timings]:
    """Time the contenders in turn, 5 to 60 times each; a repetition takes as long as its slowest rank."""
    steps = {name: contender.step for name, contender in contenders.items()}
    start = time.perf_counter()
    for step in steps.values():
        step()
    repeats = max(5, min(60, int(budget_s / slowest([time.perf_counter() - start])[0])))  # alike on every rank
    times = interleave(steps, budget_s=budget_s, repeats=repeats, before=dist.barrier)
    for t in times.values():
        t.wall_s = slowest(t.wall_s)
    return times


def results_of(
    times: Mapping[str, Timings], differences: Mapping[str, float], pairs: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what is reported of every contender; pairs: contender -> the one it is compared with."""
    out: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        out[name] = {"median_s": t.median_s, "difference": differences[name], "repeats": len(t.wall_s)}
        if name in pairs:
            ratio = compare(t, times[pairs[name]])
            out[name] |= {"ratio": asdict(ratio), "ratio_text": str(ratio)}
    return out


def table_of(cases: Sequence[Mapping[str, Any]], title: str, ratio: str = "program / by hand") -> Table:
    """`results_of` several models as a table."""
    table = Table(title=title)
    for heading in ("model", "contender", "n", "ms", ratio, "gradients to one process"):
        table.add_column(heading, justify="left" if heading in ("model", "contender") else "right", no_wrap=True)
    for c in cases:
        for k, (name, r) in enumerate(c["contenders"].items()):
            table.add_row(
                "" if k else c["name"], name, str(r["repeats"]), f"{1e3 * r['median_s']:.1f}",
                r.get("ratio_text", ""), f"{r['difference']:.0e}",
            )  # fmt: skip
        table.add_section()
    return table


def run_sizes(
    measure_rank: Callable[..., Any],
    model: str,
    sizes: Sequence[Size],
    processes: int,
    budget_s: float,
    timeout_s: float,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Call ``measure_rank(rank, world, size, budget_s, folder)`` on local processes for every size.

    Returns:
        The environment, and per size its name, its fields and the results of rank 0 (alike on all).
    """
    env = {**environment(), "threads": 1, "processes": processes, "backend": "gloo"}
    cases = []
    for size in sizes:
        with make_console().status(f"{model} {size}"), tempfile.TemporaryDirectory() as folder:
            results = run_ranks(measure_rank, processes, size, budget_s, folder, timeout_s=timeout_s)
        cases.append({"name": f"{model} {size}", "size": asdict(size), "contenders": results[0]})
    return env, cases


def report(
    command: str,
    env: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    path: Path | None,
    make_table: Callable[[Sequence[Mapping[str, Any]], str], Table],
) -> None:
    """Print the table and store the results if a path was given."""
    make_console().print(make_table(cases, f"{env['processes']} processes, gloo; {describe(env)}"))
    write_json(path, command, env, cases)
