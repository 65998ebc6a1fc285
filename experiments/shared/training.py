"""Whole training steps of several contenders in the same processes: compared with one process, then timed in turn."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from experiments.shared.in_turn import TOLERANCE, Contender, grads_of, slowest, time_together
from experiments.shared.measure import Timings, compare, max_relative_difference

NUM_CHECKED = 3  # steps that are compared before anything is timed
# One kernel, as programs choose by themselves: no contender is slower by torch's default of one per operation.
# With AdamW's default of 1e-8 an element with a gradient of rounding errors moves by the whole learning rate.
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, fused=True)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trainer(Contender):
    """One way to train a model on these processes.

    step: forward, backward and optimizer; the loss. gradients, parameters: whole ones by the names of the plain model,
    all of them or those of this rank's pipeline stage (collectives).
    """

    parameters: Callable[[], Tensors] = field(kw_only=True)


@dataclass(frozen=True)
class Reference:
    """What one process with the whole batch does: its losses, the gradients of the first step, the parameters left."""

    losses: list[float]
    gradients: Tensors
    parameters: Tensors


def train_alone(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Reference:
    """NUM_CHECKED steps of a Hugging Face model (in place) on one batch."""
    optimizer, losses, first = OPTIMIZER(model.parameters()), [], {}
    for step in range(NUM_CHECKED):
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        if step == 0:
            first = {n: g.clone() for n, g in grads_of(model).items()}
        optimizer.step()
    return Reference(losses, first, {n: p.detach() for n, p in model.named_parameters()})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of all ranks (a collective if it is a DTensor)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def program(pm: Any, batch: Mapping[str, torch.Tensor]) -> Trainer:
    """A ParallelModel with its optimizer; `batch` is this data-parallel rank's part."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = pm.step(batch)
        pm.optimizer.step()
        return loss

    return Trainer(step, pm.gradients, parameters=pm.state_dict)


def check(name: str, contender: Trainer, truth: Reference) -> float:
    """Train NUM_CHECKED steps; the worst relative difference of losses, gradients and parameters.

    Raises:
        ValueError: it is above TOLERANCE; says where.
    """
    found: dict[str, float] = {"loss": 0.0}
    for step, expected in enumerate(truth.losses):
        loss = contender.step().detach().clone()
        if contender.share is not None:
            dist.all_reduce(loss)
            loss *= contender.share
        found["loss"] = max(found["loss"], abs(float(loss) - expected) / abs(expected))
        if step == 0:
            found["gradients"] = _difference(contender.gradients(), truth.gradients)
    found["parameters"] = _difference(contender.parameters(), truth.parameters)
    for kind, difference in found.items():
        if not difference <= TOLERANCE:
            raise ValueError(f"{name}: {kind} differ by {difference:.1e} from one process (tolerance {TOLERANCE:.0e})")
    return max(found.values())


def _difference(mine: Tensors, truth: Tensors) -> float:
    """Worst over the names and ranks. ValueError if no rank has some of the names."""
    missing = torch.tensor([name not in mine for name in truth], dtype=torch.int32)
    dist.all_reduce(missing, op=dist.ReduceOp.MIN)
    if int(missing.sum()):
        absent = [name for name, gone in zip(truth, missing.tolist(), strict=True) if gone]
        raise ValueError(f"no rank has {absent[0]!r}")
    here = {n: x for n, x in mine.items() if n in truth}
    return slowest([max_relative_difference(here, {n: truth[n] for n in here})])[0]


def _timed(contenders: Mapping[str, Trainer], budget_s: float) -> dict[str, Timings]:
    """As `time_together`, with the processor time of all ranks."""
    times = time_together(contenders, budget_s)
    for t in times.values():
        total = torch.tensor(t.cpu_s, dtype=torch.float64)
        dist.all_reduce(total)
        t.cpu_s = total.tolist()
    return times


def measure(
    contenders: Mapping[str, Trainer], truth: Reference, pairs: Sequence[tuple[str, str]], budget_s: float
) -> list[dict[str, Any]]:
    """Check all contenders, time them, and compare those of each pair (program, by hand)."""
    differences = {name: check(name, c, truth) for name, c in contenders.items()}
    times = _timed(contenders, budget_s)
    rows = []
    for mine, theirs in pairs:
        ratio = compare(times[mine], times[theirs])
        rows.append(
            {
                "program": mine,
                "by_hand": theirs,
                "program_s": times[mine].median_s,
                "by_hand_s": times[theirs].median_s,
                "repeats": len(times[mine].wall_s),
                "ratio": asdict(ratio),
                "ratio_text": str(ratio),
                "differences": {n: differences[n] for n in (mine, theirs)},
            }
        )
    return rows


def part_of(batch: Mapping[str, torch.Tensor], index: int, count: int) -> Tensors:
    """Part `index` of `count` equal ones, along the batch dim."""
    size = len(next(iter(batch.values()))) // count
    return {n: copy.copy(x[index * size : (index + 1) * size]) for n, x in batch.items()}


def table_of(cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Results of `measure` as a table; a case has a name and its rows. Rows with peak_bytes (of both) show them."""
    table = Table(title=title)
    left = ("model", "program", "by hand")
    peaks = any("peak_bytes" in r for case in cases for r in case["rows"])
    more = ("MB",) if peaks else ()
    for heading in (*left, "n", "ms", "by hand ms", "program / by hand", "fastest", "cpu", "diff", *more):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for case in cases:
        before = None
        for k, r in enumerate(case["rows"]):
            table.add_row(
                "" if k else case["name"],
                "" if r["program"] == before else r["program"],
                r["by_hand"],
                str(r["repeats"]),
                f"{1e3 * r['program_s']:.1f}",
                f"{1e3 * r['by_hand_s']:.1f}",
                r["ratio_text"],
                f"{r['ratio']['best']:.3f}",
                f"{r['ratio']['cpu']:.3f}",
                f"{max(r['differences'].values()):.0e}",
                *(["{:.1f}, {:.1f}".format(*(b / 1e6 for b in r["peak_bytes"]))] if peaks else []),
            )
            before = r["program"]
        table.add_section()
    return table
