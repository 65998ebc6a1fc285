"""Compare a captured graph with its module by running both: the loss and every gradient, in float64, in this process.

The module runs as its user would run it (training or evaluation as it is, with its loss), on float64 copies of its
parameters and buffers: nothing of it changes. The graph runs as the program of one device, through the same emitter,
text and kernels as any plan of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from autoplan.capture.frontend.host import HOST
from autoplan.capture.frontend.huggingface import is_hf_model, own_hooks
from autoplan.capture.frontend.inputs import LossFn, LossModule
from autoplan.capture.passes.cast import main_dtype
from autoplan.capture.passes.lengths import example_lengths
from autoplan.errors import AutoplanError, CaptureError, GraphError
from autoplan.ir.graph import ModelGraph
from autoplan.verify.cost import LIMIT_S, USUAL_S, Cost, cost_of
from autoplan.verify.one_device import OneDevice, bind, compile_one_device, load_stage, run
from autoplan.verify.sample import draw_batch, longest_window, sizes_to_try
from autoplan.verify.wide import WIDE, wide

# Relative to the loss, and to the largest element of a gradient. Equal functions differ by the rounding of float64,
# 1e-15 to 1e-13 (experiments/verification.py); the smallest mistakes that were made, an epsilon of 1e-5 for 1e-6 in a
# norm, by 1e-6.
TOLERANCE = 1e-8
# Of the largest element of all gradients: what is zero but for rounding (a bias of keys) is not compared with itself.
ROUNDING = 1e-12
_NOISE = 0.1


@dataclass(frozen=True)
class Outcome:
    """What verification found: `done`, or not; `text` is for the plan."""

    done: bool
    text: str


class NotComparable(Exception):
    """The module could not be run for the comparison; the message says why. Never leaves this package."""


@dataclass(frozen=True)
class Task:
    """A graph, and what it is to be compared with.

    Attributes:
        example: as it was captured with. loss_fn: likewise.
        dtype: the dtype it was captured to compute in; None: that of the model.
    """

    model: nn.Module
    graph: ModelGraph
    example: Mapping[str, torch.Tensor]
    loss_fn: LossFn | None = None
    dtype: torch.dtype | None = None

    @property
    def shown(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.dtype or main_dtype(self.model) or torch.get_default_dtype()


@dataclass(frozen=True)
class Tensors:
    """Float64 copies of a model's parameters and buffers, by name."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Of every parameter that has one; afterwards none has."""
        found = {}
        for name, p in self.parameters.items():
            if p.grad is not None:
                found[name], p.grad = p.grad, None
        return found


def copies_of(model: nn.Module, moved: bool = True) -> Tensors:
    """Float64 copies, on the host, where both are run. Where all elements are equal, as norms and biases begin, they
    are moved by up to a tenth unless `moved` is False: zeros hide whether they are used, ones which of two norms they
    belong to."""
    generator = torch.Generator().manual_seed(0)

    def copied(t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        if not t.is_floating_point():
            return t.to(HOST, copy=True)
        t = t.to(HOST, WIDE, copy=True)
        if moved and t.numel() and bool(t.isfinite().all()) and bool((t == t.flatten()[0]).all()):
            size = t.flatten()[0].abs().item() or 1.0
            t += _NOISE * size * torch.rand(t.shape, generator=generator, dtype=WIDE)
        return t

    return Tensors(
        {n: nn.Parameter(copied(p), requires_grad=p.requires_grad) for n, p in model.named_parameters()},
        {n: copied(b) for n, b in model.named_buffers()},
    )


class _Step(LossModule):
    """Forward and backward in one call: a forward that is computed again in the backward needs the same tensors."""

    backward = True

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The loss; gradients are in the parameters' `grad`."""
        loss = super().forward(*tensors)
        if self.backward:
            torch.autograd.backward(loss)
        return loss


def run_module(
    task: Task, tensors: Tensors, batch: Mapping[str, torch.Tensor], backward: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the module. NotComparable if it cannot run so."""
    names = tuple(task.example)
    step = _Step(task.model, names, task.loss_fn)
    step.backward = backward
    state: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in tensors.parameters.items()}
    state |= {f"model.{n}": b.clone() for n, b in tensors.buffers.items()}  # the forward may change them
    try:
        with own_hooks(task.model) if is_hf_model(task.model) else nullcontext(), wide(task.shown):
            loss = functional_call(step, state, tuple(batch[n] for n in names))
            if step.gives_more():
                tensors.take_gradients()
                loss = functional_call(step, state, tuple(batch[n] for n in names))
    except Exception as exc:  # of any kind: the model is the user's
        raise NotComparable(f"the module cannot run in float64 on {_shown(batch)}: {_first_line(exc)}") from exc
    gradients = tensors.take_gradients()
    if not bool(loss.isfinite()) or not all(bool(g.isfinite().all()) for g in gradients.values()):
        raise NotComparable(f"loss or gradients of the module are not finite on {_shown(batch)}")
    return loss.detach(), gradients


def run_graph(
    task: Task, stage: nn.Module, compiled: OneDevice, tensors: Tensors, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the program of one device. CaptureError if it cannot run where the module can."""
    try:
        bind(stage, compiled.program, tensors.parameters, tensors.buffers)
        with wide(task.shown):
            loss = run(stage, task.graph, batch, WIDE)
            torch.autograd.backward(loss)
    except AutoplanError:
        raise
    except Exception as exc:
        raise CaptureError(
            f"the captured graph of {task.graph.name} cannot run on {_shown(batch)}, on which the module can: "
            f"{_first_line(exc)}. {ADVICE}"
        ) from exc
    return loss.detach(), tensors.take_gradients()


ADVICE = (
    "This is an error of autoplan's capture: please report it with the model. verify=False trains with the graph as it "
    "is"
)


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"


def _shown(batch: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{n} {list(x.shape)}" for n, x in batch.items())


def _wide_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: x.to(WIDE) if x.is_floating_point() else x for n, x in batch.items()}


def compare(task: Task, sizes: Mapping[str, int], moved: bool = True) -> Outcome:
    """Run both on one batch and compare. `moved`: see `copies_of`.

    Raises: CaptureError naming the first value that differs; NotComparable.
    """
    batch = _wide_batch(draw_batch(task.graph, task.example, sizes))
    tensors = copies_of(task.model, moved)
    loss, gradients = run_module(task, tensors, batch)
    compiled = compile_one_device(task.graph)
    got_loss, got = run_graph(task, load_stage(compiled.text), compiled, tensors, batch)
    trained = [n for n, p in task.graph.params.items() if p.trainable]
    error = abs(float(got_loss - loss)) / max(abs(float(loss)), ROUNDING)
    wrong = differing(trained, got, gradients)
    if not error <= TOLERANCE or wrong:
        from autoplan.verify.first import explain  # what is needed only here

        raise CaptureError(explain(task, compiled, tensors, batch, (float(got_loss), float(loss)), wrong))
    window = _window(task)
    unseen = f"; windows of {window:,} tokens are longer" if window >= sizes.get("s", math.inf) else ""
    shown = ", ".join(f"{x}={n}" for x, n in sorted(sizes.items()))
    count = f"{len(trained)} gradients" if len(trained) != 1 else "1 gradient"
    return Outcome(True, f"in float64: loss and {count} within {TOLERANCE:g} of the module ({shown}{unseen})")


@dataclass(frozen=True)
class Wrong:
    """A gradient that differs: its largest element in the graph and the module, and of their difference."""

    name: str
    got: float
    want: float
    error: float


def differing(names: list[str], got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[Wrong]:
    """The gradients that are not equal up to the tolerance; a parameter without one has zeros."""

    def largest(t: torch.Tensor | None) -> float:
        return 0.0 if t is None or not t.numel() else float(t.abs().max())

    whole, out = max((largest(g) for g in want.values()), default=0.0), []
    for name in names:
        mine, theirs = got.get(name), want.get(name)
        error = largest(
            mine - theirs if mine is not None and theirs is not None else mine if theirs is None else theirs
        )
        if not error <= TOLERANCE * largest(theirs) + ROUNDING * whole:
            out.append(Wrong(name, largest(mine), largest(theirs), error))
    return out


def choose_sizes(task: Task, limit_s: float) -> tuple[dict[str, int] | None, Cost | None]:
    """The longest sequences that usually cost little, longer ones where a window needs them; None and the least cost
    where all exceed the limit or the memory."""
    s, t = example_lengths(task.model, task.example)
    example = {"s": s, **({} if t is None else {"t": t})}
    window, least = _window(task), None
    found: list[tuple[dict[str, int], float]] = []
    for sizes in sizes_to_try(task.graph, example):
        try:
            least = cost_of(task.graph, sizes)
        except GraphError:  # a shape that is whole for some lengths only
            continue
        if least.seconds <= limit_s and least.fits:
            found.append((sizes, least.seconds))
    if not found:
        return None, least
    chosen = next((sizes for sizes, seconds in found if seconds <= USUAL_S), found[-1][0])
    longer = [sizes for sizes, _ in found if sizes.get("s", 0) > window]
    return (longer[-1] if longer and chosen.get("s", 0) <= window else chosen), least


def _window(task: Task) -> int:
    """The longest sliding window of the graph or, where it may have been lost, of a Hugging Face config."""
    wanted = getattr(getattr(task.model, "config", None), "sliding_window", None)
    return max(longest_window(task.graph), wanted if isinstance(wanted, int) else 0)


def verify_whole(task: Task, limit_s: float = LIMIT_S) -> Outcome:
    """Compare graph and module at sizes that cost at most `limit_s`; an outcome that is not done says why.

    Raises: CaptureError for a graph that is not the module.
    """
    tensors = (*task.model.named_parameters(), *task.model.named_buffers())
    without = [n for n, p in tensors if p.is_meta or isinstance(p, FakeTensor)]
    if without:
        return Outcome(False, f"{without[0]} has no values")
    sizes, cost = choose_sizes(task, limit_s)
    if sizes is None:
        return Outcome(False, f"it would take about {cost} on this host")
    return compare_or_say(task, sizes)


def compare_or_say(task: Task, sizes: Mapping[str, int]) -> Outcome:
    """`compare`, or why it cannot be done. Where the module cannot run so, with its values exactly as they are."""
    try:
        return compare(task, sizes)
    except NotComparable:
        try:
            return compare(task, sizes, moved=False)
        except NotComparable as exc:
            return Outcome(False, str(exc))
