"""The methods of ParallelModel that read and write its state and gradients, whole or part by part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.agree import AgreedRuntimeError, AgreedValueError, agree
from autoplan.runtime.checkpoint.contents import Training, TrainingProgress, Updated, named, updated_of
from autoplan.runtime.checkpoint.door import CheckpointError, Checkpoints, Resumed, Saving, root_of
from autoplan.runtime.checkpoint.states import Given, Stateful
from autoplan.runtime.failure import guarded
from autoplan.runtime.given_module import GivenModule, given_back
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.model_state import ModelState
from autoplan.runtime.norm import check_finite, limit_of, norm_of_all, order_of, scale_
from autoplan.runtime.offload import HostShards
from autoplan.runtime.optim import DroppedGradients
from autoplan.runtime.params import local_of
from autoplan.runtime.precision import LossScaler
from autoplan.runtime.replicas import Replicas
from autoplan.runtime.settings import clipping, optimizer_settings
from autoplan.runtime.spec import ParamSpec, ProgramSpec
from autoplan.runtime.state import IncompatibleKeys

_Read = TypeVar("_Read")
_FORWARD = "pm.step(batch) does forward and backward, pm.eval_step(batch) and pm.eval_outputs(batch) a forward alone"
_MODULE = "pm.to_module() returns the trained module, pm.named_parameters() and pm.state_dict() have its tensors"
_DTYPE = "precision= of autoplan.parallelize says what it computes in"
_DEVICE = "device= of autoplan.parallelize says where it runs"
_INSTEAD: Mapping[str, str] = {  # of what a module has, or DistributedDataParallel
    **dict.fromkeys(("forward", "backward"), _FORWARD),
    **dict.fromkeys(("module", "modules", "named_modules", "children", "generate"), _MODULE),
    **dict.fromkeys(("half", "bfloat16", "float", "double"), _DTYPE),
    **dict.fromkeys(("to", "cuda", "cpu"), f"{_DEVICE}, {_DTYPE}"),
    "no_sync": "pm.step([batch, batch]) accumulates, and reduces gradients once",
    "requires_grad_": "freeze parameters of the module before autoplan.parallelize",
}


class TrainingPoint(NamedTuple):
    """The progress of a training at a time of `time.perf_counter`, in seconds."""

    num_steps: int
    num_samples: int
    at_s: float


class StateMethods:
    """The methods of ParallelModel that handle its state and gradients. It sets the attributes."""

    spec: ProgramSpec
    mesh: AxisMesh
    device: torch.device
    optimizer: torch.optim.Optimizer | None
    loss_scaler: LossScaler | None
    progress: TrainingProgress
    data_rank: int
    data_world: int
    given: GivenModule | None
    exporter: Any  # an Exporter, if the model is one of transformers' (autoplan.pretrained)
    _state: ModelState
    _replicas: Replicas
    _checkpoints: Checkpoints
    _dropped: DroppedGradients | None
    _host: HostShards | None
    _updated: list[tuple[str, torch.Tensor, torch.Tensor]]  # name, tensor of self.optimizer, as shown
    # since the start or the last load, after which ranks may bring other batches
    _num_own_steps: int
    _num_evaluations: int
    _num_evaluations_of_step: int
    _clipping: str | None = None  # arguments of the last clipping
    _same_groups: bool = False  # the groups of the optimizer are the same on all ranks
    last_load: TrainingPoint | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: hooks of the optimizer, process groups and progress would be shared."""
        raise TypeError(
            "a ParallelModel is a rank's part of a running program and cannot be copied or pickled (copy.deepcopy, "
            "torch.save, AveragedModel): pm.to_module(None) returns the trained module on every rank, pm.state_dict() "
            "its tensors; an average is kept of each of pm.named_parameters()"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what a module does when it is called."""
        raise TypeError(f"a ParallelModel is not called: {_FORWARD}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what there is in place of an attribute of modules or of DistributedDataParallel."""
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{instead}", name=name, obj=self)

    @guarded("full_tensors")
    def full_tensors(self, pick: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return full tensors by original name, on the host of every rank (a collective). `pick` chooses parameter or
        gradient. The tensors come one by one: a device holds one bucket at a time (`autoplan.runtime.whole`)."""
        self._gradients_used()
        return self._state.full_tensors(pick)

    def _leave_out_gradients(self) -> None:
        """Drop gradients on purpose: nobody misses them."""
        if self._dropped is not None:
            self._dropped.ended()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for _, parameter in self._state.places():
            parameter.grad = None
        if self._host is not None:
            self._host.drop_gradients()

    def _gradients_used(self) -> None:
        if self._dropped is not None:
            self._dropped.used()

    @guarded("state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return full parameters and persistent buffers under the original model's names, on every rank (a collective).

        The tensors are on the host, whatever the model runs on (as FSDP's full state with `cpu_offload`): every rank's
        host holds the whole model, its device one bucket at a time. `load_state_dict` takes them from any device.
        """
        return self._state.state_dict()

    @guarded("to_module")
    def to_module(self, rank: int | None = 0) -> nn.Module | None:
        """Return the module that was given in with the trained values, on the host of one rank (a collective).

        Args:
            rank: the rank that gets it; None: every rank. The others return None.

        Raises:
            RuntimeError: the module cannot be copied, or the program was not made of a module (on all ranks alike).
        """
        return given_back(self.given, self._state.state_dict, self._state.transient_buffers, rank)

    @guarded("gradients")
    def gradients(self) -> dict[str, torch.Tensor]:
        """Return full gradients under the original names, on the host of every rank (a collective)."""
        self._gradients_used()
        return self._state.full_tensors(lambda p: p.grad)

    @guarded("grad_norm")
    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the gradient, each logical element once, on every rank; inf if the step is skipped.

        Args:
            norm_type: p of the p-norm, above 0; inf: the greatest absolute value.
        """
        order = self._from_all(lambda: order_of(norm_type))
        return self._grad_norm(order)

    def _from_all(self, read: Callable[[], _Read]) -> _Read:
        """Return what `read` makes of arguments of a norm, or raise its error once the other ranks have their norm.

        They may have been given other arguments, and wait for this rank's part. The next step compares arguments.
        """
        try:
            return read()
        except AgreedValueError:
            self._grad_norm(2.0)
            raise

    def _grad_norm(self, order: float) -> torch.Tensor:
        self._gradients_used()
        if self.loss_scaler is not None and self.loss_scaler.skipped:
            return torch.full((), float("inf"), dtype=torch.float64, device=self.device)
        mine = (grad for p, grad in self._gradients() if self._replicas.counts_here(p))
        return norm_of_all(mine, order, self.device, self.mesh.world_size)

    @guarded("clip_grad_norm_")
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before, as torch does.

        Args:
            max_norm, norm_type: as torch's; at least 0, and above 0. The same on all ranks, or the next step raises an
                error.
            error_if_nonfinite: raise an error if the norm is infinite or NaN. This waits for the device.

        Raises:
            ValueError: a limit or an order that is none, on this rank.
            RuntimeError: a norm that is not finite, if asked for. All ranks raise it, gradients are unchanged.
        """
        self._clipping = clipping(max_norm, norm_type, error_if_nonfinite)
        limit, order = self._from_all(lambda: (limit_of(max_norm), order_of(norm_type)))
        norm = self._grad_norm(order)
        if error_if_nonfinite:
            check_finite(norm, order, skipped=self.loss_scaler is not None and self.loss_scaler.skipped)
        scale_((grad for _, grad in self._gradients()), torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def _settings(self) -> dict[str, str]:
        """Return what all ranks must have been given alike; the arguments of a clipping only once."""
        found = optimizer_settings(self.optimizer) if self.optimizer is not None and self._same_groups else {}
        found["seed"], found["number of steps"] = str(self.progress.seed), str(self.progress.num_steps)
        if self.loss_scaler is not None:
            found["state of the loss scaler"] = str(self.loss_scaler.state_dict())
        if self._clipping is not None:
            found["clip_grad_norm_ of the step before"], self._clipping = self._clipping, None
        return found

    def _gradients(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield this rank's part of each gradient once, from where the optimizer finds it."""
        for p, parameter in self._state.places():
            grad = self._state.held(parameter).grad
            if grad is not None:
                yield p, local_of(grad)

    @guarded("load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load full tensors by original name, as `nn.Module.load_state_dict` does (a collective).

        Args:
            state: as `state_dict` returns it, equal on all ranks; of a tied parameter's names the last one counts.
            strict: True if missing and unexpected keys are errors.

        Returns: missing and unexpected keys.
        Raises:
            RuntimeError: missing or unexpected keys if `strict`, or other shapes; all ranks raise it, and nothing is
                loaded.
            ValueError: the ranks were given different states.
        """
        loaded = self._state.load_state_dict(state, strict)
        if self.given is not None:
            self.given.loaded({name: value for name, value in self._state.extra.items() if name in state})
        return loaded

    @guarded("save_pretrained")
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model for Hugging Face's `from_pretrained`, under the names of its own files (a collective).

        Rank 0 writes, one tensor after the other; no rank holds more than one of them whole (of one conversion).

        Raises:
            RuntimeError: the model that was parallelized is none of transformers', or the folder cannot be written.
        """
        if self.exporter is None:
            raise AgreedRuntimeError(
                f"{self.spec.model} is not a model of transformers; use pm.state_dict(), pm.save_checkpoint(), or what "
                "pm.to_module() has (on rank 0)"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.exporter.write(Path(folder), self._state.whole, rank, self.device)

    @guarded("save_checkpoint")
    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        states: Mapping[str, Stateful] | None = None,
        data_states: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        wait: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Saving:
        """Write a checkpoint of the whole training into a folder of its step; call it after an update, on every rank.

        It holds parameters, buffers, the optimizer, the loss scaler, the random generators and `progress`. Each rank
        writes its own parts, and `load_checkpoint` takes them under any other plan. The checkpoint is complete or not
        there (`autoplan.runtime.checkpoint.folders`).

        Args:
            folder: of all checkpoints; all ranks see it.
            states: further objects by name that have the same state on all ranks, such as schedulers of the learning
                rate.
            data_states: objects by name that have another state on every data-parallel rank, such as data loaders; the
                same on ranks with one `data_rank`.
            keep: number of checkpoints to keep; None: all.
            wait: False: copy everything to the host and write it beside the next steps. The next call, or `wait()` of
                what is returned, waits for it and raises its error.
            optimizer: one that you made of `parameters()`; None: `self.optimizer`.

        Raises:
            CheckpointError: (on all ranks) it could not be written, or ranks that must have one state have several;
                older ones are unchanged, and the job can go on.
        """
        if self._dropped is not None and (optimizer is None or optimizer is self.optimizer):
            self._dropped.saved(self.progress.num_steps)
        with torch.inference_mode(False):  # parts of tensors that are made in inference mode cannot be detached
            given = Given(_or_empty(states), _or_empty(data_states))
            return self._checkpoints.save(self._training(optimizer), root_of(folder), given, keep, wait)

    @guarded("load_checkpoint")
    def load_checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        states: Mapping[str, Stateful] | None = None,
        data_states: Mapping[str, Stateful] | None = None,
        on_other_data_ranks: Callable[[int], Any] | None = None,
        step: int | None = None,
        older: bool = False,
        model_only: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Resumed | None:
        """Load a checkpoint that a program of this model wrote under any plan; call it on every rank.

        Gradients of a step before it are dropped.

        Args:
            folder, states, data_states, optimizer: as for `save_checkpoint`.
            on_other_data_ranks: called with the index of the next sample (`progress.num_samples`) if the checkpoint is
                of another number of data-parallel ranks, in place of loading `data_states`; without it, those are an
                error then.
            step: which one; None: the newest that is complete, that is, the last one written (of a training that went
                back to an earlier step too).
            older: True: if the newest is damaged, warn and load the newest that is not, for a job that nobody watches.
            model_only: load parameters and buffers, and leave the rest of the training as it is.

        Returns: what was loaded, or None if the folder has no checkpoint and `step` is None.
        Raises:
            CheckpointError: (on all ranks) it is damaged or does not fit; nothing is changed, and the text names an
                older one.
        """
        with torch.inference_mode(False):  # moments that are made in inference mode could not be updated outside of it
            training = self._training(optimizer)
            given = Given(_or_empty(states), _or_empty(data_states), on_other_data_ranks)
            resumed = self._checkpoints.load(training, root_of(folder), given, step, model_only, older)
        self._num_own_steps = self._num_evaluations = self._num_evaluations_of_step = 0
        if resumed is not None:
            self._leave_out_gradients()
            if self.given is not None:
                self.given.loaded(self._state.extra)
        if resumed is not None and not model_only:
            self.last_load = TrainingPoint(self.progress.num_steps, self.progress.num_samples, time.perf_counter())
        return resumed

    def _training(self, given: torch.optim.Optimizer | None) -> Training:
        """Return the parts of a checkpoint, with the given optimizer or the program's own."""
        optimizer, problem = given or self.optimizer, None
        updated: list[Updated] = []
        if optimizer is not None:
            try:
                updated = updated_of(optimizer, self._updated if given is None else named(self._state))
            except ValueError as exc:
                problem = str(exc)
        agree(problem, self.device, CheckpointError)
        ranks = self.data_rank, self.data_world
        return Training(self._state, self.progress, optimizer, updated, self.loss_scaler, *ranks)


def _or_empty(states: Mapping[str, Stateful] | None) -> Mapping[str, Stateful]:
    return {} if states is None else states
