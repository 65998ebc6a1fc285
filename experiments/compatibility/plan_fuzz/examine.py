"""What becomes of a case: its program on real processes beside the module in one."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from autoplan.profiler.processes import ProcessOutcome
from experiments.compatibility.plan_fuzz.cases import Case
from experiments.compatibility.plan_fuzz.loop import Alone, Log, Made, task_of
from experiments.compatibility.plan_fuzz.ranks import FRESH, Before, initial_state, one_device_job, program_job, twin_of

EQUAL, REFUSED, FINDING = "equal", "refused", "finding"
_AS_FAR = 1.5  # as one process in 16 bits is off the truth: so far a program may be
_LEAST = 1e-6  # of the largest tensor: what a tensor of rounding errors is compared with
# a refusal names a value, a line of a model, or what the user wrote in quotes
_NAMES = re.compile(
    r"\w+=\S+|'[^']+'|\w+ at \w+|\d+ (tokens|samples|devices|micro-batches|layers|batch)|\w+ is \S+|\w+ \(\d+,"
)


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences: of losses and norms, of gradients, of parameters. None: not compared."""

    loss: float
    gradient: float | None
    parameter: float | None


def tolerance_of(case: Case) -> Tolerance:
    """Return what a case must be equal to."""
    if case.compression in ("bf16", "fp16"):
        return Tolerance(2e-2, 2e-2 if case.precision == "native" else 6e-2, None)
    if case.precision.startswith("fp16"):
        return Tolerance(4e-3, 1e-2, None)
    if case.precision != "native":
        return Tolerance(2e-2, 6e-2, None)
    if case.dtype == "bfloat16":
        return Tolerance(3e-2, 8e-2, None)
    if case.dtype == "float32":
        return Tolerance(2e-5, 2e-4, 2e-4)
    if task_of(case).exact:
        return Tolerance(1e-10, 1e-9, 1e-8)
    return Tolerance(5e-6, 5e-5, 5e-5)  # norms, routers and losses of transformers are in float32


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        outcome: EQUAL, REFUSED or FINDING.
        kind: a short text that is the same for the same finding or refusal.
        text: all of it.
        notes: the plans that ran.
    """

    outcome: str
    kind: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    num_steps: int = 0
    seconds: float = 0.0


class Pool(Protocol):
    """Processes in one group."""

    def run_each(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[ProcessOutcome]:
        """Run `fn(rank, world, *args)` on every rank; return what became of each."""


class Examiner:
    """Runs cases.

    Args:
        pool_of: world size -> its processes.
        timeout_s: of a case.
        breaker: a defect that every program gets (`ranks.program_job`).
    """

    def __init__(self, pool_of: Callable[[int], Pool], timeout_s: float = 120.0, breaker: str = "") -> None:
        self._pool_of, self._timeout_s, self._breaker = pool_of, timeout_s, breaker

    def examine(self, case: Case) -> Verdict:
        """Return what becomes of a case."""
        began = time.monotonic()
        found = self._examine(case)
        return replace(found, seconds=time.monotonic() - began)

    def _examine(self, case: Case) -> Verdict:
        mine = self._log(case)
        if isinstance(mine, Verdict):
            return mine
        twin = None if mine.twin is None else self._compared(twin_of(case), mine.twin)
        if twin is not None and twin.outcome == FINDING:
            return replace(twin, text=f"the second program: {twin.text}", notes=(*twin.notes, *mine.notes))
        return self._compared(case, mine)

    def _compared(self, case: Case, mine: Log) -> Verdict:
        steps = sum(bool(sizes) for sizes, *_ in mine.made)
        if steps:
            truth = self._truth(case, mine)
            if isinstance(truth, Verdict):
                return truth
            why = _difference(case, mine, truth)
            if why.startswith("gradient") and narrow_of(case) is not None:
                narrow = self._narrow(case, mine)
                if isinstance(narrow, Verdict):
                    return narrow
                why = _difference(case, mine, truth, narrow)
            if why:
                return Verdict(FINDING, why.split(":")[0], why, tuple(mine.notes))
        for note in [
            mine.refused,
            *(n.removeprefix("move: ") for n in mine.notes if n.startswith(("move: ", "step: "))),
        ]:
            if note and not _NAMES.search(note.split(":", 1)[1]):
                return Verdict(FINDING, "a refusal names nothing", note, tuple(mine.notes), steps)
        if mine.refused:
            return Verdict(REFUSED, _kind(mine.refused), mine.refused, tuple(mine.notes), steps)
        return Verdict(EQUAL, notes=tuple(mine.notes), num_steps=steps)

    def _log(self, case: Case) -> Log | Verdict:
        """Return what a case did on all its processes."""
        mine, before = Log(), FRESH
        with tempfile.TemporaryDirectory() as folder:
            while True:
                world = case.next_world if before.num_starts % 2 else case.world
                args = case.to_json(), folder, self._breaker, before
                ranks = self._pool_of(world).run_each(program_job, *args, timeout_s=self._timeout_s)
                if _failures(ranks):
                    return _of_failures(ranks)
                logs: list[Log] = [one.value for one in ranks]
                mine = mine.joined(logs[0])
                refusals = [log.refused for log in logs]
                if len(set(refusals)) > 1:
                    return Verdict(FINDING, "ranks are refused differently", "\n".join(refusals), tuple(mine.notes))
                different = _disagreement(logs)
                if different:
                    return Verdict(FINDING, "ranks disagree", different, tuple(mine.notes))
                if not mine.restarts:
                    return mine
                before = Before(before.num_starts + 1, len(mine.made))

    def _narrow(self, case: Case, mine: Log) -> Log | Verdict:
        """Return the first gradients of the module in one process, all of it in 16 bits."""
        if task_of(case).draws:
            return Log()
        how = alone_job, case.to_json(), list(mine.made), narrow_of(case)
        found = self._pool_of(1).run_each(*how, timeout_s=self._timeout_s)
        if _failures(found):
            return Verdict(FINDING, "one process fails in 16 bits", str(found[0].value))
        log: Log = found[0].value
        return log

    def _truth(self, case: Case, mine: Log) -> Log | Verdict:
        made = list(mine.made)
        with tempfile.TemporaryDirectory() as folder:
            if task_of(case).draws:
                how = one_device_job, case.to_json(), folder, made
            else:
                how = alone_job, case.to_json(), made  # type: ignore[assignment]
            found = self._pool_of(1).run_each(*how, timeout_s=self._timeout_s)
        if _failures(found):
            return Verdict(FINDING, "one process fails", str(found[0].value))
        log: Log = found[0].value
        return log


def narrow_of(case: Case) -> torch.dtype | None:
    """Return the dtype of 16 bits that a case computes in, if it does."""
    if case.precision.startswith("fp16"):
        return torch.float16
    return torch.bfloat16 if case.precision != "native" or case.dtype == "bfloat16" else None


def alone_job(rank: int, world: int, text: str, made: list[Made], narrow: torch.dtype | None = None) -> Log:
    """Train the module of a case in one process; `narrow`: in 16 bits, for the first gradients alone."""
    case = Case.from_json(text)
    alone = Alone(case, task_of(case), narrow=narrow)
    if case.start == "init":
        with tempfile.TemporaryDirectory() as folder:
            alone.initial = initial_state(case, folder)
    return alone.run(made)


def _kind(text: str) -> str:
    return re.sub(r"\d+", "N", " ".join(text.split()))[:150]


def _failures(found: Sequence[ProcessOutcome]) -> dict[int, ProcessOutcome]:
    """Return the ranks that did not give a result."""
    return {rank: one for rank, one in enumerate(found) if one.status != "ok"}


def _of_failures(ranks: Sequence[ProcessOutcome]) -> Verdict:
    texts = [f"rank {rank} {one.status}: {one.value or ''}" for rank, one in _failures(ranks).items()]
    raised = [str(one.value).strip().splitlines()[-1] for one in ranks if one.status == "raised"]
    if raised:  # the error of the rank where it began, not of those that waited for it
        kind = re.sub(r"^[\w.]*RankFailure: |rank \d+ failed: | \[in \w+ \d+\]$", "", min(raised, key=_waited))
    else:
        kind = "hangs" if any(one.status == "hangs" for one in ranks) else "a rank died or failed"
    return Verdict(FINDING, _kind(kind), "\n".join(texts))


def _waited(text: str) -> bool:
    return "RankFailure" in text and not re.search(r"rank \d+ failed: \w*(Error|Exception)", text)


def _disagreement(logs: Sequence[Log]) -> str:
    first = logs[0].short()
    for rank, log in enumerate(logs[1:], 1):
        for mine, theirs in zip(first.numbers, log.numbers, strict=False):
            if repr(mine) != repr(theirs):
                return f"{mine[0]} is {mine[1]!r} on rank 0 and {theirs[1]!r} on rank {rank}"
        if (first.made, len(first.numbers)) != (log.made, len(log.numbers)):
            return f"rank 0 and {rank} made other steps: {first.made}, {log.made}"
        if first.notes != log.notes:
            return f"rank 0 and {rank} have other plans, gradients, parameters or outputs: {first.notes}, {log.notes}"
    twins = [log.twin for log in logs if log.twin is not None]
    return _disagreement(twins) if twins else ""


def _difference(case: Case, mine: Log, truth: Log, narrow: Log | None = None) -> str:
    """Return what differs from the truth; empty if nothing.

    `narrow`: what one process found in 16 bits. Where values round across a jump of a derivative (ReLU, a maximum), its
    gradients are off by more than products round, and a program's may be as far off as that.
    """
    tol = tolerance_of(case)
    if len(mine.numbers) > len(truth.numbers) or (not mine.refused and len(mine.numbers) != len(truth.numbers)):
        return f"other numbers: {mine.numbers} instead of {truth.numbers}"
    floating = case.precision != "native" or case.compression in ("bf16", "fp16") or case.dtype == "bfloat16"
    for (name, got), (other, want) in zip(mine.numbers, truth.numbers, strict=False):
        limit = tol.loss * (1 + 3 * ("norm" in name or (floating and not name.endswith(" 0"))))
        limit = 0.0 if name.startswith("scale") else limit
        if name != other or not (got == want or abs(got - want) <= limit * max(abs(want), 1e-3)):
            return f"{name.rstrip('0123456789 ')}: {name} is {got!r} instead of {want!r} ({other})"
    if mine.gradients and tol.gradient is not None:
        compare, limit = _together if floating else _worst, tol.gradient
        if narrow is not None and narrow.gradients:
            limit = max(limit, _AS_FAR * _distance(narrow.gradients, truth.gradients))
        why = compare(mine.gradients, truth.gradients, limit)
        if why:
            return f"gradient: {why}"
    for number, (one, two) in enumerate(zip(mine.outputs, truth.outputs, strict=False)):
        why = _worst(one, {n: two[n] for n in one if n in two}, 10 * tol.loss) or ("" if one else "none")
        if why:
            return f"outputs: evaluation {number}: {why}"
    if tol.parameter is not None and mine.parameters and not mine.refused:
        why = _worst(mine.parameters, truth.parameters, tol.parameter)
        if why:
            return f"parameters: {why}"
    return ""


def _together(mine: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], limit: float) -> str:
    """Return the difference of all tensors together; empty if it is small."""
    if set(mine) != set(truth):
        return f"names: {sorted(set(mine) ^ set(truth))} are only in one of both"
    whole = sum(float(g.double().square().sum()) for g in truth.values())
    error = _distance(mine, truth)
    if error > limit:
        return f"all: off by {error:.1e}"
    for name, want in truth.items():
        norm = float(want.double().norm())
        error = float((mine[name].double() - want.double()).norm())
        if norm**2 > 1e-6 * whole and error > 5 * limit * norm:
            return f"{name} is off by {error / norm:.1e}"
    return ""


def _distance(mine: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    """Return the relative difference of all tensors together."""
    off = sum(float((mine[n].double() - g.double()).square().sum()) for n, g in truth.items())
    whole = sum(float(g.double().square().sum()) for g in truth.values())
    return (off / max(whole, 1e-30)) ** 0.5


def _worst(mine: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], limit: float) -> str:
    """Return the first tensor that differs; empty if none does."""
    if set(mine) != set(truth):
        return f"names: {sorted(set(mine) ^ set(truth))} are only in one of both"
    largest = max((float(t.double().abs().max()) for t in truth.values() if t.numel()), default=0.0)
    for name, want in truth.items():
        got = mine[name]
        if got.shape != want.shape:
            return f"shape of {name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
        if not want.numel():
            continue
        scale = max(float(want.double().abs().max()), _LEAST * largest)
        error = float((got.double() - want.double()).abs().max())
        if not error <= limit * scale + 1e-300:
            return f"{name} is off by {error:.1e} of {scale:.1e}"
    return ""
