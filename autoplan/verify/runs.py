"""Run a module and its captured graph in float64, on copies of its tensors: losses, gradients, and buffers after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from autoplan.capture.evaluation import updated_by
from autoplan.capture.frontend.alone import in_one_process
from autoplan.capture.frontend.buffers import all_buffers, attributes_restored
from autoplan.capture.frontend.host import HOST
from autoplan.capture.frontend.huggingface import own_hooks
from autoplan.capture.frontend.inputs import LossFn, LossModule, uncompiled
from autoplan.capture.passes.cast import main_dtype
from autoplan.errors import AutoplanError, CaptureError
from autoplan.ir.graph import ModelGraph
from autoplan.runtime.params import buffer_owner
from autoplan.verify.one_device import OneDevice, bind_params, run_one_device
from autoplan.verify.wide import WIDE, wide

# How far the elements of a tensor with all equal elements are moved apart, relative to their size.
_NOISE = 0.1
ADVICE = (
    "This is an error of autoplan's capture: please report it with the model. verify=False trains with the graph as it "
    "is"
)


class NotComparable(Exception):
    """The module could not be run for the comparison; the message says why. Never leaves this package."""


@dataclass(frozen=True)
class VerifyTask:
    """A graph, and the module that it is compared with.

    Attributes:
        example, loss_fn: the arguments of the capture.
        dtype: the dtype that the capture computes in; None: the model's.
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
class WideTensors:
    """Float64 copies of a model's parameters and buffers, by name."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of every parameter that has one, and remove it from the parameter."""
        found = {}
        for name, p in self.parameters.items():
            if p.grad is not None:
                found[name], p.grad = p.grad, None
        return found


@dataclass(frozen=True)
class Ran:
    """What a run gave: the loss, the gradients, and the registered buffers that it changed in place or should have."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def copies_of(model: nn.Module, moved: bool = True) -> WideTensors:
    """Return float64 copies on the host, where both are run.

    A tensor of equal elements, as in new norms and biases, is moved by up to a tenth unless `moved` is False. Zeros
    would hide whether the graph uses them, and ones which of two norms they belong to.
    """
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

    return WideTensors(
        {n: nn.Parameter(copied(p), requires_grad=p.requires_grad) for n, p in model.named_parameters()},
        {n: copied(b) for n, b in all_buffers(model)},
    )


class _Step(LossModule):
    """Forward and backward in one call, as a forward that is recomputed in the backward needs the same tensors."""

    backward = True

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss; gradients are in the parameters' `grad`."""
        loss: torch.Tensor = super().forward(*tensors)
        if self.backward:
            torch.autograd.backward(loss)
        return loss


def _places_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by every place that has one of them: the names of tied tensors, but one name of each module.

    Of a module with two names functional_call puts back what the second name had, which is the tensor of the call.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {id(named[name]): tensor for name, tensor in tensors.items() if name in named}
    held = (
        (f"{path}.{name}" if path else name, t)
        for path, m in module.named_modules()
        for name, t in (*m._parameters.items(), *m._buffers.items())
    )
    return {**tensors, **{name: given[id(t)] for name, t in held if id(t) in given}}


def run_module(task: VerifyTask, tensors: WideTensors, batch: Mapping[str, torch.Tensor], backward: bool = True) -> Ran:
    """Return what the module gives. Raises NotComparable if it cannot run in float64.

    Its buffers are those that it changed in place, and those that the graph updates.

    Neither the batch nor what the module keeps (a cache, a history) changes, whatever its forward does to them.
    """
    names = tuple(task.example)
    step = _Step(task.model, names, task.loss_fn)
    step.backward = backward
    parameters = {f"model.{n}": p for n, p in tensors.parameters.items()}

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        buffers = {f"model.{n}": b.clone() for n, b in tensors.buffers.items()}
        given = tuple(batch[n].clone() for n in names)
        with attributes_restored(task.model, every=True):
            places = _places_of(step, {**parameters, **buffers})
            loss: torch.Tensor = functional_call(step, places, given, tie_weights=False)
        held = {f"model.{n}": n for n, _ in task.model.named_buffers()}
        changed = {n for full, n in held.items() if not _same(buffers[full], tensors.buffers[n])}
        # a buffer that was replaced is written back into `places`
        return loss, {n: places[full] for full, n in held.items() if n in changed | updated_by(task.graph)}

    try:
        with in_one_process(), own_hooks(task.model), uncompiled(), wide(task.shown):
            loss, buffers = run()
            if step.gives_more():
                tensors.take_gradients()
                loss, buffers = run()
    except Exception as exc:  # of any type: the model is the user's
        raise NotComparable(f"the module cannot run in float64 on {_shown(batch)}: {_first_line(exc)}") from exc
    gradients = tensors.take_gradients()
    if not bool(loss.isfinite()) or not all(bool(g.isfinite().all()) for g in gradients.values()):
        raise NotComparable(f"loss or gradients of the module are not finite on {_shown(batch)}")
    return Ran(loss.detach(), gradients, {n: b.detach() for n, b in buffers.items()})


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for equal tensors; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def run_graph(
    task: VerifyTask,
    stage: nn.Module,
    compiled: OneDevice,
    tensors: WideTensors,
    batch: Mapping[str, torch.Tensor],
    backward: bool = True,
) -> Ran:
    """Return what the program of one device gives. Raises CaptureError if it fails where the module runs."""
    (spec,), updated = compiled.program.spec.stages, updated_by(task.graph)
    buffers = {n: b.clone() if n in updated else b for n, b in tensors.buffers.items()}
    try:
        bind_params(stage, compiled.program, tensors.parameters, buffers)
        with wide(task.shown):
            loss = run_one_device(stage, task.graph, {n: x.clone() for n, x in batch.items()}, WIDE)
            if backward:
                torch.autograd.backward(loss)
    except AutoplanError:
        raise
    except Exception as exc:
        raise CaptureError(
            f"the captured graph of {task.graph.name} cannot run on {_shown(batch)}, on which the module can: "
            f"{_first_line(exc)}. {ADVICE}"
        ) from exc
    after = {b.name: getattr(buffer_owner(stage, b), b.attr) for b in spec.buffers if b.updated}
    return Ran(loss.detach(), tensors.take_gradients(), after)


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"


def _shown(batch: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{n} {list(x.shape)}" for n, x in batch.items())


@dataclass(frozen=True)
class Wrong:
    """A gradient or buffer that differs: the largest element in the graph, in the module, and of their difference."""

    name: str
    got: float
    want: float
    error: float
