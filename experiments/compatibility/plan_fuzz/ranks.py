"""The loop of a program, on one of its ranks."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import autoplan
import autoplan.api
from autoplan.captured import capture_verified
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import AutoplanError
from autoplan.runtime.agree import AgreedRuntimeError
from autoplan.runtime.checkpoint.door import CheckpointError
from autoplan.runtime.compression import PowerSGD
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.shards import ForeignUseError
from experiments.compatibility.plan_fuzz.cases import Case, Optimizer, Plan, Step
from experiments.compatibility.plan_fuzz.loop import (
    LEFT_OUT,
    OPTIMIZERS,
    PATTERNS,
    SHRUNK,
    SKIPPED,
    Log,
    Made,
    by_size,
    formed,
    groups_of,
    make_batch,
    make_model,
    odd_sizes,
    part_of,
    reduced,
    schedule_of,
    shrinks,
    task_of,
    transient_of,
)
from experiments.compatibility.plan_fuzz.models import Batch, Task

WHOLE = PowerSGD(rank=1 << 20, start_step=2, min_compression_rate=0.0)
SAFE, HOPELESS = 2.0**6, 2.0**40  # scales of a loss that overflow in no case here, and in every one
ONE_DEVICE = Plan({"tp": 1, "pp": 1, "dp": 1, "num_micro_batches": 1, "recompute": "none"})


class Before(NamedTuple):
    """What other processes did before: starts, and turns of the loop."""

    num_starts: int = 0
    num_turns: int = 0


FRESH = Before()


class Refused(Exception):
    """The program was refused; the text says where."""


def program_job(rank: int, world: int, text: str, folder: str, breaker: str = "", before: Before = FRESH) -> Log:
    """Train as a case says until processes start again; all tensors on rank 0, fingerprints on the others.

    `breaker`: a defect, for tests. `before`: what other processes did.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = Case.from_json(text)
    loops = [_Loop(case, rank, Path(folder), breaker, before=before)]
    if case.twin:
        loops.append(_Loop(twin_of(case), rank, Path(folder) / "twin"))
    for _ in itertools.zip_longest(*(loop.refused_or_run() for loop in loops)):
        pass
    log = loops[0].log
    log.twin = loops[1].log if case.twin else None
    return log if rank == 0 else log.short()


def twin_of(case: Case) -> Case:
    """Return the case of the second program, which takes turns with the first."""
    return replace(case, plan=case.other, other=case.plan, twin=False)


def one_device_job(rank: int, world: int, text: str, folder: str, made: list[Made]) -> Log:
    """Train a case on one device, on the samples that its program took."""
    warnings.simplefilter("ignore")
    loop = _Loop(Case.from_json(text), rank, Path(folder), "", made)
    for _ in loop.run():
        pass
    return loop.log


def initial_state(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Return what the own initialisation of a model on the meta device gives one device."""
    loop = _Loop(case, 0, Path(folder), "", [])
    loop.task, loop.num_moves = task_of(case), 0
    loop.start(ONE_DEVICE, 0)
    found: dict[str, torch.Tensor] = loop.pm.state_dict()
    return found


@dataclass
class _Loop:
    case: Case
    rank: int
    folder: Path
    breaker: str = ""
    made: list[Made] | None = None
    before: Before = FRESH
    log: Log = field(default_factory=Log)

    def refused_or_run(self) -> Iterator[None]:
        """Do all, turn by turn, until it is refused."""
        try:
            yield from self.run()
        except Refused as exc:
            self.log.refused = str(exc)

    def run(self) -> Iterator[None]:
        """Do all, turn by turn."""
        self.task: Task = task_of(self.case)
        self.num_moves = 100 * self.before.num_starts
        self.num_samples = self.num_steps = 0
        own = self.case.next_plan if self.before.num_starts % 2 else self.case.plan
        self.own = own if self.made is None else ONE_DEVICE
        self.start(self.own, self.num_moves)
        if self.before.num_starts:
            self.load(self.folder / "restarts")
        for index, step in enumerate(self.case.steps):
            if index < self.before.num_turns:
                continue
            if self.made is None or self.made[index : index + 1] not in ([], [SKIPPED]):
                self.turn(index, step)
            elif step.before and self.made[index : index + 1]:
                self.evaluate_alone(index, step)
            if step.after == "restart" and self.made is None:
                self.save(self.folder / "restarts", wait=False)
                self.log.restarts = True
                return
            yield
        state = self.pm.state_dict()
        self.log.parameters = {n: x.detach().clone() for n, x in state.items()}
        if self.case.start == "weights" and self.made is None:
            self.pm.save_pretrained(self.folder / "trained")
            if self.rank == 0:
                self.reread(state)
        trained = self.pm.to_module(rank=None)
        if trained is not None:
            other = trained.state_dict()
            self.log.parameters |= transient_of(trained)
            different = [n for n in other if n not in state or not torch.equal(other[n], state[n])]
            if different or set(other) ^ set(state):
                raise AssertionError(
                    f"to_module has other values than state_dict: {different or set(other) ^ set(state)}"
                )

    def reread(self, state: dict[str, Any]) -> None:
        """Compare what transformers reads of a trained model with its state."""
        model = make_model(self.case, self.task)
        again = type(model).from_pretrained(self.folder / "trained", dtype=next(model.parameters()).dtype)  # type: ignore[attr-defined]
        other = again.state_dict()
        different = [n for n, x in state.items() if n not in other or not torch.equal(other[n], x)]
        if different:
            raise AssertionError(f"save_pretrained wrote other values than state_dict: {different}")

    # -- the program ------------------------------------------------------------------------------------------------

    def start(self, plan: Plan, seed: int) -> None:
        """Make the program of a plan, of a module with the weights of a seed."""
        case, task, how = self.case, self.task, self.case.optimizer
        pins = {n: tuple(x) if isinstance(x, list) else x for n, x in plan.pins.items()}
        world = dist.get_world_size() if dist.is_initialized() else 1
        dp = pins.get("dp", world // math.prod(pins.get(n, 1) for n in ("tp", "pp", "cp")))
        size = pins.get("num_micro_batches", 1) * pins.get("micro_batch_size", plan.batch)
        example = formed(make_batch(case, task, 5, *case.example), case.example_form)
        make = OPTIMIZERS[how.kind]
        named: dict[str, Any] = dict(
            optimizer=None if how.own else make,
            loss_fn=task.loss,
            example_inputs=example,
            global_batch_size=max(1, dp) * size,
            precision=case.precision,
            verify=case.verify,
            compile=plan.compile or False,
        )
        if how.groups and not how.own:
            named["param_groups"] = PATTERNS if how.groups == "patterns" else by_size
        if case.compression:
            named["gradient_compression"] = WHOLE if case.compression == "powersgd" else case.compression
        device = Device("made up", 1e12, 1e9, 1 << 34, "made up")
        cluster = Cluster(1, world, device, Level(plan.latency_s, plan.bytes_per_s, "made up"), "cpu")
        model = self.module(seed, named)
        folder = self.folder / f"program{self.num_moves}"
        call = functools.partial(autoplan.parallelize, seed=case.seed, timeout_s=40.0)
        if plan.door == "program":
            named["folder"] = folder
        with _captured_once(case):
            self.pm = self.refusable("parallelize", lambda: call(model, cluster, pins=pins, **named))
        if plan.door != "search":
            named.pop("folder", None)
            given: Any = self.pm.plan
            if plan.door == "file":
                given = folder.with_suffix(".json")
                if self.rank == 0:
                    given.write_text(self.pm.plan.to_json())
            more = {"program": folder} if plan.door == "program" else {"plan": given}
            again = self.module(seed, named)
            self.pm = self.refusable(f"parallelize of a {plan.door}", lambda: call(again, cluster, **more, **named))
        if self.breaker:
            _break(self.pm, self.breaker)
        if case.start == "meta":
            self.pm.load_state_dict(make_model(case, task, seed).state_dict())
        if self.pm.loss_scaler is not None and case.growth_interval:
            self.pm.loss_scaler.growth_interval = case.growth_interval
        self.log.notes.append(str(self.pm.plan).splitlines()[0])
        self.optimizer = make(groups_of(self.pm.named_parameters(), how.groups)) if how.own else self.pm.optimizer
        self.schedule = schedule_of(self.optimizer, case)

    def module(self, seed: int, named: dict[str, Any]) -> nn.Module:
        """Return the module to parallelize, with values or without; `named` gets where they come from."""
        if not self.case.start or (self.made is not None and self.case.start != "init"):
            return make_model(self.case, self.task, seed)
        if self.case.start == "unequal":
            return make_model(self.case, self.task, seed + 13 * self.rank)
        if self.case.start == "weights":
            named["weights"] = self.folder / f"weights{self.num_moves}"
            if self.rank == 0:
                make_model(self.case, self.task, seed).save_pretrained(named["weights"])  # type: ignore[operator]
            dist.barrier()
        with torch.device("meta"):
            return make_model(self.case, self.task, seed)

    def refusable(self, what: str, call: Any) -> Any:
        """Return what a call returns; Refused if it is refused as a user would see it."""
        try:
            return call()
        except (AutoplanError, CheckpointError, ForeignUseError) as exc:
            raise Refused(f"{what}: {exc}") from exc
        except (ValueError, RuntimeError) as exc:
            if type(exc).__name__ in ("AgreedValueError", "AgreedRuntimeError") or _ours(exc):
                raise Refused(f"{what}: {exc}") from exc
            raise

    # -- the loop ---------------------------------------------------------------------------------------------------

    def turn(self, index: int, step: Step) -> None:
        """Do what a step says."""
        pm, case, log = self.pm, self.case, self.log
        sizes = self.sizes(index, step)
        total, num_before = sum(sizes), (len(log.numbers), len(log.outputs))
        if step.before:
            self.evaluate(index, sizes, step.before)
        whole = [make_batch(case, self.task, 10 * index + k, total, step.length) for k in range(step.batches)]
        batches = [formed(part_of(batch, sizes, pm.data_rank), step.form) for batch in whole]
        if step.scale and pm.loss_scaler is not None:
            pm.loss_scaler.scale = step.scale
        try:
            loss = self.refusable("step", lambda: pm.step(batches if len(batches) > 1 else batches[0]))
        except Refused as exc:  # the job goes on
            log.made.append(SKIPPED)
            log.notes.append(str(exc))
            del log.numbers[num_before[0] :], log.outputs[num_before[1] :]
            return
        overflowed = pm.loss_scaler is not None and pm.loss_scaler.skipped
        log.made.append((sizes, pm.num_micro_batches, overflowed))
        self.num_steps, self.num_samples = self.num_steps + 1, self.num_samples + total * len(batches)
        log.numbers.append((f"loss {index}", float(loss)))
        if pm.loss_scaler is not None:
            log.numbers.append((f"scale {index}", pm.loss_scaler.scale))
            if (overflowed and 0 < step.scale <= SAFE) or (not overflowed and step.scale >= HOPELESS):
                raise AssertionError(f"step {index} with a loss scale of {step.scale}: overflowed is {overflowed}")
        if not log.gradients:
            log.gradients = {n: g.clone() for n, g in pm.gradients().items()}
        if step.update == "eval":
            self.evaluate(index, sizes, "eval")
        self.update(index, step)
        if step.after == "eval":
            self.evaluate(index, sizes, "eval")
        elif step.after in ("state dict", "some state"):
            state = pm.state_dict()
            state |= {n: x * SHRUNK for n, x in shrinks(state, step.after).items()}
            if step.after == "some state":
                state = shrinks(state, step.after)
            pm.load_state_dict(state, strict=step.after == "state dict")
        elif step.after == "weights only" and self.made is None:
            self.go_on(self.own, model_only=True)
        elif step.after == "dcp" and self.made is None:
            self.refusable("dcp", lambda: self.through_dcp(self.folder / f"dcp{self.num_moves}.{index}"))
        elif step.after == "optimizer state":
            self.refusable("optimizer state", lambda: self.optimizer.load_state_dict(self.optimizer.state_dict()))
        elif step.after in ("checkpoint", "move") and self.made is None:
            moves = step.after == "move" and self.own is self.case.plan
            self.go_on(self.case.other if moves else self.own)

    def sizes(self, index: int, step: Step) -> tuple[int, ...]:
        """Return the samples of every data-parallel rank."""
        if self.made is not None:
            return (sum(self.made[index][0]),)
        num, world = self.pm.num_micro_batches, self.pm.data_world
        # as many samples as both plans can cut
        case = self.case
        later = {"move": (case.other,), "restart": (case.next_plan, case.plan)}
        others = [p.pins for s in case.steps for p in later.get(s.after, ())]
        unit = math.lcm(num * world, *(p.get("num_micro_batches", 1) * p.get("dp", 1) for p in others))
        each = [step.units * unit // world] * world
        if step.unequal and world > 1:
            for rank in range(world // 2):
                moved = min(each[rank] - num, num * (1 + (index + rank) % 2))
                each[rank] -= moved
                each[world - 1 - rank] += moved
        return tuple(each)

    def evaluate(self, index: int, sizes: tuple[int, ...], what: str) -> None:
        """Compare an evaluation, of all samples or of this rank's."""
        if not self.task.evaluates:
            return
        pm = self.pm
        if what == "odd":
            odd = odd_sizes(self.case, index)
            sizes = (*odd[: pm.data_world - 1], sum(odd[pm.data_world - 1 :]))
        batch = make_batch(self.case, self.task, 10 * index + 9, sum(sizes), self.case.example[1])
        mine = part_of(batch, sizes, pm.data_rank)
        if what in ("eval", "odd"):
            loss = self.refusable("eval_step", lambda: pm.eval_step(mine))
            self.log.numbers.append((f"evaluation {index}", float(loss)))
            return
        each = reduced if what == "reduced" else None
        loss, outputs = self.refusable("eval_outputs", lambda: pm.eval_outputs(mine, rows="all", each=each))
        self.log.numbers.append((f"evaluation {index}", float(loss)))
        self.log.outputs.append({name: x.detach().clone() for name, x in outputs.items()})
        if what == "own outputs" and not self.task.draws:  # which are other numbers in every evaluation
            _, own = self.refusable("eval_outputs", lambda: pm.eval_outputs(mine))
            for name, rows in part_of(outputs, sizes, pm.data_rank).items():
                if own[name].shape != rows.shape or not torch.allclose(own[name], rows, rtol=1e-6, atol=1e-9):
                    raise AssertionError(f"rows='own' of {name} are not those of rows='all'")

    def evaluate_alone(self, index: int, step: Step) -> None:
        """Evaluate as the program did before a step that was refused: the next evaluation draws other numbers."""
        num_before = len(self.log.numbers), len(self.log.outputs)
        self.evaluate(index, (self.case.example[0],), step.before)
        del self.log.numbers[num_before[0] :], self.log.outputs[num_before[1] :]

    def update(self, index: int, step: Step) -> None:
        """Clip and update, or not."""
        pm, how = self.pm, self.case.optimizer
        if step.update == "skip":
            pm.zero_grad() if index % 2 else self.optimizer.zero_grad()
            return
        if step.update == "not finite":
            self.overflow()
            return
        if step.update == "leave out":
            for name, p in pm.named_parameters():
                if fnmatch.fnmatch(name, LEFT_OUT):
                    p.grad = None
        if how.clip:
            self.log.numbers.append((f"norm {index}", self.clip(how)))
        if how.clip_some:
            some = [p for p in pm.parameters() if p.dim() == 1 and p.grad is not None]
            norm = self.refusable("clip some", lambda: nn.utils.clip_grad_norm_(some, how.clip_some)) if some else None
            if norm is not None:
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                self.log.numbers.append((f"some norm {index}", float(norm)))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def clip(self, how: Optimizer) -> float:
        """Clip; return the norm, that is inf if the step overflowed, as an error or not."""
        pm = self.pm
        overflowed = pm.loss_scaler is not None and pm.loss_scaler.skipped
        if how.finite and overflowed:
            self.refuses_to_clip(how.norm_type)
            return math.inf
        return float(pm.clip_grad_norm_(how.clip, how.norm_type, error_if_nonfinite=how.finite))

    def overflow(self) -> None:
        """Let a gradient become infinite, which a norm shows on every rank, and drop all."""
        pm, how = self.pm, self.case.optimizer
        chosen = next(iter(self.log.gradients), "")
        for name, p in pm.named_parameters():
            if name == chosen and p.grad is not None:
                p.grad.mul_(math.inf)
        if math.isfinite(float(pm.grad_norm(how.norm_type))):
            raise AssertionError(f"the norm of {chosen} is finite, and its gradient is not")
        self.refuses_to_clip(how.norm_type)
        pm.zero_grad()

    def refuses_to_clip(self, norm_type: float) -> None:
        """Fail unless clipping says that the norm is not finite."""
        try:
            self.pm.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        except RuntimeError as exc:
            if not isinstance(exc, AgreedRuntimeError) or "cannot be clipped" not in str(exc):
                raise
            return
        raise AssertionError("error_if_nonfinite clipped by a norm that is not finite")

    def through_dcp(self, folder: Path) -> None:
        """Write the parameters by torch.distributed.checkpoint, and read them again, here and without a program."""
        whole, mine = self.pm.state_dict(), {n: p.detach() for n, p in self.pm.named_parameters()}
        dcp.save(mine, checkpoint_id=folder)
        for tensor in mine.values():
            tensor.zero_()
        dcp.load(mine, checkpoint_id=folder)
        found = [self.pm.state_dict()]
        if self.rank == 0:
            dcp_to_torch_save(folder, folder.with_suffix(".pt"))
            found.append(torch.load(folder.with_suffix(".pt")))
        for state in found:
            different = [n for n, x in state.items() if not torch.equal(x.to(whole[n].dtype), whole[n])]
            if different:
                raise AssertionError(f"torch.distributed.checkpoint has other values than state_dict: {different}")

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def go_on(self, plan: Plan, model_only: bool = False) -> None:
        """Save a checkpoint and go on in another program, of a module with other weights."""
        folder = self.folder / f"checkpoints{self.num_moves}"
        self.save(folder)
        before = self.pm, self.optimizer, self.schedule
        self.num_moves += 1
        try:
            self.start(plan, self.num_moves)
        except Refused as exc:
            self.log.notes.append(f"move: {exc}")
            self.pm, self.optimizer, self.schedule = before
            return
        if model_only:
            self.refusable("load_checkpoint", lambda: self.pm.load_checkpoint(folder, model_only=True))
            self.num_steps = self.num_samples = 0
            return
        self.load(folder)

    def states(self) -> dict[str, Any]:
        """Return what a checkpoint has besides the program."""
        states: dict[str, Any] = {"about": Position(self.pm.data_world, self.num_steps, self.num_samples)}
        return states if self.schedule is None else {**states, "schedule": self.schedule}

    def save(self, folder: Path, wait: bool = True) -> None:
        """Write a checkpoint; with `wait` of False, what is in it is overwritten meanwhile."""
        loader = Position(self.pm.data_rank, self.num_steps, self.num_samples)
        more: dict[str, Any] = {"optimizer": self.optimizer} if self.case.optimizer.own else {}
        more |= {"states": self.states(), "data_states": {"loader": loader}}
        saving = self.refusable("save_checkpoint", lambda: self.pm.save_checkpoint(folder, wait=wait, **more))
        if not wait:
            with torch.no_grad():
                for tensor in [*self.pm.parameters(), *self.moments()]:
                    tensor.zero_()
            self.refusable("wait", saving.wait)

    def moments(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer keeps."""
        kept = [x for state in self.optimizer.state.values() for x in state.values()]
        return [x for x in kept if isinstance(x, torch.Tensor)]

    def load(self, folder: Path) -> None:
        """Load a checkpoint; compare what came back of the data."""
        states, loader, called = self.states(), Position(-1, -1, -1), list[int]()
        more: dict[str, Any] = {"optimizer": self.optimizer} if self.case.optimizer.own else {}
        more |= {"states": states, "data_states": {"loader": loader}}
        try:
            self.refusable("load_checkpoint", lambda: self.pm.load_checkpoint(folder, **more))
            alike = True
        except Refused as exc:
            if "on_other_data_ranks" not in str(exc):
                raise
            alike = False
            more["on_other_data_ranks"] = called.append
            self.refusable("load_checkpoint", lambda: self.pm.load_checkpoint(folder, **more))
        about: Position = states["about"]
        self.num_steps, self.num_samples = about.num_steps, about.num_samples
        where = self.pm.data_rank if alike else -1
        if alike != (about.rank == self.pm.data_world) or loader.rank != where:
            raise AssertionError(f"{about} came back on {self.pm.data_world} data-parallel ranks as {loader}")
        if called != ([] if alike else [about.num_samples]):
            raise AssertionError(f"on_other_data_ranks was called with {called} instead of {about.num_samples}")
        found = self.pm.progress.num_steps, self.pm.progress.num_samples
        if found != (self.num_steps, self.num_samples):
            raise AssertionError(f"steps and samples are {found} instead of {about}")


@dataclass
class Position:
    """Where a data-parallel rank is in its data; or, for all, where the job is and how many such ranks it has."""

    rank: int
    num_steps: int
    num_samples: int

    def state_dict(self) -> dict[str, Any]:
        """Return a state with a tensor and plain values."""
        return {"rank": torch.tensor([self.rank]), "counts": [self.num_steps, self.num_samples]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self.rank, (self.num_steps, self.num_samples) = int(state["rank"]), state["counts"]


_graphs: dict[str, Any] = {}


@contextlib.contextmanager
def _captured_once(case: Case) -> Iterator[None]:
    """Let cases of one model share its graph, whose capture takes most of a case's time."""
    parts = (
        case.model,
        case.options,
        case.example,
        case.example_form,
        case.frozen,
        case.precision,
        case.dtype,
        case.seed,
    )
    key, real = repr(parts), capture_verified

    def remembered(*given: Any) -> Any:
        if key not in _graphs:
            _graphs[key] = real(*given)
        return _graphs[key]

    autoplan.api.capture_verified = remembered if not case.verify else real  # type: ignore[attr-defined]
    try:
        yield
    finally:
        autoplan.api.capture_verified = real  # type: ignore[attr-defined]


def _ours(exc: BaseException) -> bool:
    """Return True for an error that autoplan raises itself, not one from inside torch."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else trace.tb_frame.f_code.co_filename
    return bool(re.search(r"/(autoplan|runtime|cost_models)/", where)) and isinstance(exc, ValueError)


def _break(pm: ParallelModel, breaker: str) -> None:
    """Put a defect into a program."""
    if breaker == "gradient":  # one parameter's gradient is scaled
        step = pm.step

        def wrong(batch: Batch | list[Batch]) -> torch.Tensor:
            loss = step(batch)
            for name, p in pm.named_parameters():
                if p.grad is not None and "up.weight" in name:
                    p.grad *= 1.001
            return loss

        pm.step = wrong  # type: ignore[method-assign]
    elif breaker == "disagree":
        evaluate = pm.step
        pm.step = lambda batch: evaluate(batch) * (1 + dist.get_rank() * 1e-3)  # type: ignore[method-assign]
    elif breaker == "fail":
        if dist.get_rank() == 0:
            raise KeyError(breaker)
    else:
        raise ValueError(f"breaker is {breaker!r}; it must be 'gradient', 'disagree' or 'fail'")
