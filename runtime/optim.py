"""Optimizers on shards.

Only optimizers that update each element from its own gradient and state are allowed. They work on local parts, without
DTensor's dispatch, which costs the host several times as much as a small update.

Torch updates operation by operation unless it is told otherwise: AdamW then moves 80 bytes per float32 element where
its one kernel (`fused`) moves 28, and on a GPU makes a temporary as large as all parameters (`foreach`). Of 3.5 million
elements on one core of a CPU, operations took 13 ms and the kernel 2.3, of a model of 21 tensors and 60 thousand
elements 0.54 and 0.08 (medians of 27, torch 2.13). The runtime chooses the kernel where the caller left both open.

The kernel of a CPU walks through parameter, gradient and moments in the order of their memory, whatever their strides
(torch 2.13: a transposed gradient gives a silently wrong update). So contiguous tensors are given to it (`_in_order`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.agree import AgreedValueError
from autoplan.runtime.failure import guarded
from autoplan.runtime.params import local_of
from autoplan.runtime.shards import ForeignUseError
from autoplan.runtime.warned import warn_script

ELEMENTWISE = frozenset("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split())


def check_elementwise(optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
    """Refuse an optimizer that needs whole tensors (LBFGS, Adafactor, Muon, ...) if tensors are sharded.

    An element-wise class of your own declares it by a class attribute `autoplan_elementwise = True`.

    Raises:
        AgreedValueError: (on every rank alike) names the class and the alternatives.
    """
    name = type(optimizer).__name__
    known = type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE
    if sharded and not known and not getattr(optimizer, "autoplan_elementwise", False):
        raise AgreedValueError(
            f"optimizer {name} is not known to be element-wise and tensors are sharded; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or pins={{'tp': 1, 'pp': 1, 'zero_stage': 0}}, "
            "or set the class attribute autoplan_elementwise = True if each element's update depends on that element "
            "only"
        )


class LocalPart(nn.Parameter):
    """A parameter in the groups of an optimizer: this rank's part of one of the model, outside of an update.

    A norm over the gradients of a rank's parts (`clip_grad_norm_` over param_groups, `GradScaler.unscale_`) would be
    another one on every rank. So such a part has a gradient in an update alone, when it is a plain `nn.Parameter`.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """No gradient.

        Raises:
            ForeignUseError: always.
        """
        raise ForeignUseError(_PARTS)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        raise ForeignUseError(_PARTS)


_PARTS = (
    "the parameters in pm.optimizer.param_groups are this rank's parts of the model's, and have gradients during the "
    "update alone: use pm.clip_grad_norm_(max_norm) and pm.grad_norm(), or .grad of pm.named_parameters()"
)


def on_local_shards(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    parameters: Iterable[nn.Parameter],
    *,
    apart: bool = False,
) -> torch.optim.Optimizer:
    """Return `make(parameters)`, with DTensors replaced by plain parameters that share the memory of their local parts.

    The update is the same, element by element. `optimizer.step()` reads the gradients of `parameters` when it begins
    (and after its closure, if there is one) and forgets them when it ends; `optimizer.zero_grad()` drops or zeroes
    them. State and param_groups hold the local parts. Without parameters the optimizer gets a single parameter without
    elements.

    Args:
        apart: True: `parameters` are this rank's parts of the model's, the plain ones too. All of them are replaced,
            and outside of an update they refuse their gradients (`LocalPart`).

    Raises:
        AgreedValueError: (on every rank alike) `make` returned something else than an optimizer.
    """
    given = list(parameters)
    if not given:  # all of this rank's parameters are frozen
        return _made(make, [nn.Parameter(torch.zeros(0))])
    pairs = [(p, _local_parameter(p)) for p in given if apart or isinstance(p, DTensor)]
    replaced = {id(whole): mine for whole, mine in pairs}
    optimizer = _made(make, [replaced.get(id(p), p) for p in given])
    in_one_kernel(optimizer)
    on_cpu = _may_fuse_on_cpu(optimizer)
    if not pairs and not on_cpu:
        return optimizer

    # a fake tensor (in a rehearsal) keeps its class
    parts = _plain(pairs) if apart else []

    def become(kind: type[nn.Parameter]) -> None:
        for mine in parts:
            mine.__class__ = kind

    become(LocalPart)

    @torch.no_grad()  # so that to_local is the local part itself, not a node of autograd
    def read() -> None:
        for whole, mine in pairs:
            _take(whole, mine)
        if on_cpu:
            _in_order(optimizer)

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        become(nn.Parameter)
        read()
        given = args[1] if len(args) > 1 else kwargs.get("closure")  # args begins with the optimizer itself
        if given is None:
            return None

        def closure() -> Any:
            result = given()
            read()
            return result

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def after(*_: Any) -> None:
        for _whole, mine in pairs:
            mine.grad = None  # the memory is freed when the next step drops the gradients
        become(LocalPart)

    drop_local = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        become(nn.Parameter)
        drop_local() if set_to_none else drop_local(set_to_none=False)
        become(LocalPart)
        for whole, _mine in pairs:
            _drop(whole, set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def _made(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return `make(parameters)`, if it is one optimizer."""
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise AgreedValueError(
            f"optimizer returned a {type(made).__name__}; return one torch.optim.Optimizer. Several learning rates are "
            "param_groups; for several optimizers leave optimizer= out and make them of pm.named_parameters()"
        )
    return made


class DroppedGradients:
    """Warns, once, of gradients that nobody used before the next step dropped them.

    A loop that accumulates as PyTorch does, by several backward passes before an update, would train on its last batch
    alone. Gradients are used by `optimizer`'s step, or by whoever calls `used`. A checkpoint that is written before the
    update counts a step whose gradients it does not have: `saved` warns of that.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._pending = self._said = self._between = self._updating = False
        optimizer.register_step_pre_hook(lambda *_: self._update(True))
        optimizer.register_step_post_hook(lambda *_: self._update(False))
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def dropped(*args: Any, **kwargs: Any) -> None:
            self.ended()
            zero_grad(*args, **kwargs)

        optimizer.zero_grad = dropped  # type: ignore[method-assign]

    def _update(self, begins: bool) -> None:
        """Record that an update begins or ends. One with a closure (LBFGS) makes steps, and uses their gradients."""
        self._updating = begins
        self.ended()

    def used(self) -> None:
        """Record that somebody read or used the gradients."""
        self._pending = False

    def ended(self) -> None:
        """Record that the gradients have made their update, or were dropped on purpose."""
        self._pending = self._between = False

    def begin(self) -> None:
        """Begin a step, which drops the gradients of the step before. One that fails makes none: `made` says so."""
        if self._pending and not self._said and not self._updating:
            self._said = True
            warn_script(
                "a second step without an update: step drops the gradients of the step before. To accumulate "
                "gradients, give step a list of batches: pm.step([batch, batch])"
            )
        self._pending = self._between = False

    def made(self) -> None:
        """Record that a step made its gradients."""
        self._pending = self._between = True

    def saved(self, step: int) -> None:
        """Record that a checkpoint is written, after so many steps."""
        if self._between:
            warn_script(
                f"a checkpoint between step and optimizer.step(): it counts step {step} and its samples, and a "
                "training that goes on from it never makes the update. Save after optimizer.step(), or call "
                "pm.zero_grad() before it if the update is left out on purpose"
            )


def in_one_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam and AdamW update with their fused kernel on CUDA and CPUs, unless told otherwise.

    Groups that set `foreach`, `fused`, `capturable` or `differentiable`, or hold parameters on several kinds of device,
    stay as they are; so do subclasses, which may do more in an update. On a CPU the caller gives the kernel contiguous
    tensors (`_in_order`).
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        unset = group.get("foreach") is None and group.get("fused") is None
        plain = not group.get("capturable") and not group.get("differentiable")
        floats = all(p.is_floating_point() for p in group["params"])
        places = {"cuda" if p.is_cuda else p.device.type for p in group["params"]}
        if unset and plain and floats and places in ({"cuda"}, {"cpu"}):
            group["fused"] = True


def _may_fuse_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a group updates on a CPU and has the option of one kernel, which a caller may change later."""
    return any("fused" in g and any(p.device.type == "cpu" for p in g["params"]) for g in optimizer.param_groups)


def _in_order(optimizer: torch.optim.Optimizer) -> None:
    """Make gradients and moments contiguous, for the kernel of a CPU; leave it where a parameter is not contiguous."""
    states = optimizer.state
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        parameters = group["params"]
        if not all([p.is_contiguous() for p in parameters]):  # a list: this runs in every step
            group["fused"] = False
            continue
        for p in parameters:
            grad = p.grad
            if grad is not None and not grad.is_contiguous():
                p.grad = grad.contiguous()
            for name, value in states[p].items() if p in states else ():
                if isinstance(value, torch.Tensor) and not value.is_contiguous():
                    states[p][name] = value.contiguous()


def guard_step(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step` under `guard`, which tells the other ranks of a failure in it."""
    # bound to the optimizer, as schedulers of the learning rate expect
    step = guarded("optimizer.step")(getattr(optimizer.step, "__func__", type(optimizer).step))
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def keep_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.add_param_group` take parameters only from the groups of now, which a caller may arrange anew.

    If the program splits parameters, the optimizer has this rank's parts of them: torch does not see that a parameter
    of `pm.parameters()` is updated already, and would update it twice.
    """
    known = {id(p): p for group in optimizer.param_groups for p in group["params"]}  # kept, so that no id comes again
    add = optimizer.add_param_group

    @functools.wraps(add)
    def added(param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        entries = [given] if isinstance(given, torch.Tensor) else list(given)
        foreign = [e for e in entries if id(e[1] if isinstance(e, tuple) else e) not in known]
        if foreign:
            raise AgreedValueError(
                f"add_param_group: {len(foreign)} of {len(entries)} parameters are not those in "
                "pm.optimizer.param_groups. The program's are all there already: give their groups as param_groups= of "
                "parallelize, or change settings in pm.optimizer.param_groups; for other parameters make another "
                "optimizer"
            )
        add({**param_group, "params": entries})

    optimizer.add_param_group = added  # type: ignore[method-assign]


def _plain(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> list[nn.Parameter]:
    return [mine for _whole, mine in pairs if type(mine) is nn.Parameter]


def _take(whole: nn.Parameter, mine: nn.Parameter) -> None:
    """Let a part have the memory and the gradient of its source."""
    local = local_of(whole)
    if local.data_ptr() != mine.data_ptr():  # fully_shard pads an uneven shard at its first forward
        mine.data = local
    mine.grad = None if whole.grad is None else local_of(whole.grad)


def _drop(whole: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none:
        whole.grad = None
    elif whole.grad is not None:
        local_of(whole.grad).zero_()


def _local_parameter(whole: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(local_of(whole).detach(), requires_grad=whole.requires_grad)
