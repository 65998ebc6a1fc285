"""What becomes of a program: it is captured, run on one device and under plans, and compared with the module itself."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from autoplan.capture.evaluation import updated_by
from autoplan.capture.export import capture
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.errors import AutoplanError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has
from autoplan.verify.check import TOLERANCE, differing
from autoplan.verify.one_device import compile_one_device, load_stage
from autoplan.verify.runs import VerifyTask, copies_of, run_graph
from autoplan.verify.wide import wide
from experiments.compatibility.fuzz.nodes import WrongNode, cases, check_splits
from experiments.compatibility.fuzz.plans import FuzzPlan
from experiments.compatibility.one_by_one import crash
from experiments.shared.simulated import SimulatedStep, run_simulated

_MOVED = 1e-10  # relative, of every parameter
_SENSITIVE = 1e-6  # relative change of a result under it: a place where the function jumps, or rounding grows
_LEAST = 1e-3  # of a loss whose terms cancel
# a refusal names a line of the program, an op, a value in quotes, or a choice of the plan with its value
_NAMES = re.compile(
    r"\w\.py:\d+|the loss function|how large the batch is|a multiple of \d|torch\.\w+\(|'[\w.]+'|aten\.\w+|dim \d|"
    r"\w+=\w+|\w+ at \w+"
)
Size = tuple[int, int]  # samples and tokens


class Examined(Protocol):
    """A module with its loss and batches."""

    @property
    def text(self) -> str:
        """The source that messages show."""

    @property
    def captured(self) -> Size:
        """The size of the example that is captured."""

    @property
    def runs(self) -> Size:
        """The size of the batch that is run, if the graph holds for it; else that of the example is."""

    @property
    def loss_fn(self) -> Callable[..., torch.Tensor]:
        """The loss of output and batch."""

    def env(self, size: Size) -> dict[str, int]:
        """Return the sizes of a batch by symbol."""

    def model(self) -> nn.Module:
        """Return a new module in float64; all have the same values."""

    def batch(self, size: Size, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return a batch."""

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the module itself."""


class Finding(AssertionError):
    """A defect. The message has the program."""


class Wrong(Finding):
    """Numbers that are not the module's."""


class Crashed(Finding):
    """Another exception than a refusal."""


class Unnamed(Finding):
    """A refusal that names no op, line, value or choice."""


@dataclass(frozen=True)
class Truth:
    """Loss and gradients of a module, and the buffers that its forward changed, or that a program updates."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def differs(self, other: Truth, trained: Sequence[str]) -> str:
        """Return what differs from the truth; empty if nothing."""
        if not abs(other.loss - self.loss) <= TOLERANCE * max(abs(self.loss), _LEAST):
            return f"loss {other.loss:.9g} instead of {self.loss:.9g}"
        wrong = differing(list(trained), other.gradients, self.gradients)
        texts = [f"gradient of {w.name} off by {w.error:.1e} of {w.want:.1e}" for w in wrong]
        texts += [f"buffer {name} is not updated" for name in self.buffers.keys() - other.buffers.keys()]
        for name, got in other.buffers.items():
            if name not in self.buffers:  # its new value is the old one
                continue
            want = self.buffers[name]
            error, scale = (float(x.abs().max()) for x in (got.double() - want.double(), want.double()))
            if got.shape != want.shape or not error <= TOLERANCE * max(scale, _LEAST):
                texts.append(f"buffer {name} off by {error:.1e} of {scale:.1e}")
        return "; ".join(texts)


@dataclass(frozen=True)
class Outcome:
    """What became of a program: what was equal, and what was refused why. `skipped`: why it says nothing."""

    equal: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    num_splits: int = 0
    skipped: str = ""


def truth_of(program: Examined, size: Size, moved: bool = False, drawn: bool = False) -> Truth | None:
    """Return what the module computes; None if it does not learn, or not by finite numbers.

    Args:
        moved: every parameter is moved a little.
        drawn: random numbers are those that are known (`autoplan.verify.drawn`).
    """
    model, batch = program.model(), program.batch(size, seed=1)
    before = {n: b.clone() for n, b in model.named_buffers()}
    if moved:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + _MOVED * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    try:
        with wide(torch.float64) if drawn else contextlib.nullcontext():
            loss = program.loss(model, batch)
            loss.backward()
    except Exception:  # whatever PyTorch refuses
        return None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: b.detach() for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    wholly = all(bool(t.isfinite().all()) for t in (loss, *found.values(), *buffers.values()))
    if not found or loss.dim() or not wholly:
        return None
    return Truth(float(loss.detach()), found, buffers)


def _sensitive(program: Examined, size: Size, truth: Truth, drawn: bool) -> bool:
    other = truth_of(program, size, moved=True, drawn=drawn)
    if other is None or abs(other.loss - truth.loss) > _SENSITIVE * max(abs(truth.loss), _LEAST):
        return True
    gradients = {n: g for n, g in truth.gradients.items() if g.numel()}
    largest = max((float(g.abs().max()) for g in gradients.values()), default=0.0)
    return any(
        float((other.gradients[n] - g).abs().max()) > _SENSITIVE * float(g.abs().max()) + 1e-9 * largest
        for n, g in gradients.items()
    ) or any(
        n not in other.buffers
        or float((other.buffers[n].double() - b.double()).abs().max()) > _SENSITIVE * max(float(b.abs().max()), _LEAST)
        for n, b in truth.buffers.items()
    )


def _refused(program: Examined, where: str, exc: AutoplanError) -> tuple[str, str]:
    if not _NAMES.search(str(exc)):
        raise Unnamed(f"{where} is refused without a name: {exc}\n{program.text}") from exc
    return where, " ".join(str(exc).split())


def _fits(graph: ModelGraph, env: Mapping[str, int], batch: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the graph holds for a batch of these sizes."""
    for symbol, (least, most) in graph.bounds.items():
        if not least <= env[symbol] <= (most or env[symbol]):
            return False
    return all(
        [int(d.evaluate(env)) for d in graph.values[n].shape] == list(x.shape)
        for n, x in batch.items()
        if n in graph.inputs
    )


def examine(program: Examined, plans: Sequence[FuzzPlan], mesh: str = "") -> Outcome:
    """Return what became of a program.

    Args:
        plans: what it is run under, beside one device.
        mesh: where all splits of its nodes are run; empty: nowhere.

    Raises:
        Finding: numbers or an exception that must not be.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _examine(program, plans, mesh)


def _examine(program: Examined, plans: Sequence[FuzzPlan], mesh: str) -> Outcome:
    if truth_of(program, program.captured) is None:
        return Outcome(skipped="it does not learn")
    model = program.model()
    random_state, before = random.getstate(), _state(model)
    try:
        graph = capture(model, program.batch(program.captured), program.loss_fn)
    except AutoplanError as exc:
        return Outcome(refused=(_refused(program, "capture", exc),))
    except Exception as exc:
        raise Crashed(f"capture: {crash(exc)}\n{program.text}") from exc
    finally:
        random.setstate(random_state)
    changed = [n for n, x in _state(model).items() if not torch.equal(x, before[n])]
    if changed:
        raise Wrong(f"the capture has changed {', '.join(changed)} of the module\n{program.text}")
    drawn, updates = _is_drawn(graph), bool(updated_by(graph))
    sizes = program.runs, program.captured
    size = next((x for x in sizes if _fits(graph, program.env(x), program.batch(x))), None)
    truth = None if size is None else truth_of(program, size, drawn=drawn)
    if size is None or truth is None or _sensitive(program, size, truth, drawn):
        return Outcome(skipped="it jumps, or holds for no batch")
    batch, trained = program.batch(size, seed=1), [n for n, p in graph.params.items() if p.trainable]
    equal, refused = [], []
    for plan in (FuzzPlan(), *plans):
        if updates:  # one process that runs each whole micro-batch in sequence is not run here
            plan = replace(plan, num_micro_batches=1)
        if size[0] % (plan.dp * plan.num_micro_batches):
            continue
        try:
            if drawn and plan == FuzzPlan():
                why = truth.differs(_with_known_numbers(program, graph, batch), trained)
                truth = _simulated(program, graph, plan, size, batch)  # of its own numbers
            else:
                why = truth.differs(_simulated(program, graph, plan, size, batch), trained)
        except AutoplanError as exc:
            refused.append(_refused(program, str(plan), exc))
        except Exception as exc:
            raise Crashed(f"{plan}: {crash(exc)}\n{program.text}") from exc
        else:
            if why:
                raise Wrong(f"{plan}: {why}\n{program.text}")
            equal.append(str(plan))
    num = _splits(program, graph, size, batch, mesh) if mesh else 0
    return Outcome(tuple(equal), tuple(refused), num)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}


def _is_drawn(graph: ModelGraph) -> bool:
    """Return True if a graph draws random numbers, also for dropout."""
    return any(op_has(node.op, Trait.RANDOM) for block in graph.blocks.values() for node in block.nodes)


def _with_known_numbers(program: Examined, graph: ModelGraph, batch: Mapping[str, torch.Tensor]) -> Truth:
    """Return what the program of one device computes with the random numbers that the module has in `truth_of`."""
    task = VerifyTask(program.model(), graph, batch, program.loss_fn)
    compiled = compile_one_device(graph)
    ran = run_graph(task, load_stage(compiled.text), compiled, copies_of(task.model, moved=False), batch)
    return Truth(float(ran.loss), ran.gradients, ran.buffers)


def _simulated(
    program: Examined, graph: ModelGraph, plan: FuzzPlan, size: Size, batch: Mapping[str, torch.Tensor]
) -> Truth:
    """Return what the program of a plan computes, and the buffers that it updates."""
    model, (samples, tokens) = program.model(), size
    env = program.env((samples // (plan.dp * plan.num_micro_batches), tokens))
    emitted, updated = plan.compiled(graph, env), dict[str, torch.Tensor]()
    params = {n: p.detach() for n, p in model.named_parameters()}
    step = SimulatedStep(params, dict(all_buffers(model)), batch, plan.num_micro_batches)
    loss, gradients = run_simulated(emitted, step, updated=updated)
    return Truth(loss, gradients, updated)


def _splits(program: Examined, graph: ModelGraph, size: Size, batch: Mapping[str, torch.Tensor], mesh: str) -> int:
    model = program.model()
    tensors = {**{n: p.detach() for n, p in model.named_parameters()}, **dict(all_buffers(model))}
    try:
        return check_splits(list(cases(graph, program.env(size), tensors, batch)), mesh)
    except WrongNode as exc:
        raise Wrong(f"{exc}\n{program.text}") from exc
    except Exception as exc:
        raise Crashed(f"splits of nodes: {crash(exc)}\n{program.text}") from exc
