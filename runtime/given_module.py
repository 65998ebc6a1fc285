"""The module that a program was made of: its form without values, to give the trained module back."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoplan.runtime.agree import AgreedRuntimeError
from autoplan.runtime.given_numbers import GivenNumbers
from autoplan.runtime.shards import trained_as_captured
from autoplan.runtime.warned import warn_script

_HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # they run, or are read through, whatever they hold
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class GivenModule:
    """A copy of a module without the memory of its parameters and persistent buffers, its other buffers on the host.

    Tied parameters stay tied.

    Args:
        buffers: values of its buffers by name, for those that are on the meta device and in no state.
        loss_fn: the loss function that was captured with the module, if there was one.

    Attributes:
        numbers: the numbers that the module and the loss function read.
        reason: why Python cannot copy the module, and what to do instead; empty if it can.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Mapping[str, torch.Tensor] | None = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.numbers: GivenNumbers = GivenNumbers(model, loss_fn)
        self._trained = [
            (prefix, weakref.ref(module), {n: p.requires_grad for n, p in module._parameters.items() if p is not None})
            for prefix, module in model.named_modules()
            if module._parameters
        ]
        self._children = [(name, weakref.ref(module), held) for name, module in model.named_modules()
                          if (held := _children(module))]  # fmt: skip
        self._late: list[tuple[str, weakref.ref[Any], _Form]] = [
            (name, weakref.ref(held), _form(held)) for name, held in (*model.named_modules(), *model.named_parameters())
        ]
        self._evaluated = "" if model.training else _first_that_trains_otherwise(model)
        self._modes = [(name, weakref.ref(m), m.training) for name, m in model.named_modules() if _otherwise_in_eval(m)]
        self._form: nn.Module | None = None
        self.reason: str = ""
        try:
            self._form = copy.deepcopy(model, _copied(model, buffers or {}))
        except Exception as exc:  # of anything that the user's module holds: a lock, an open file, a tensor of a graph
            self.reason = (
                f"{type(model).__name__} cannot be copied ({type(exc).__name__}: {exc}); build it again and load "
                "pm.state_dict() into it"
            )

    def changed(self) -> str | None:
        """Return what the program has otherwise than the module has it now, as an error for the user: a number, another
        layer, or whether a parameter is trained; None if nothing is."""
        for prefix, reference, trained in self._trained:
            if (module := reference()) is None:
                continue
            for name, p in module._parameters.items():
                if p is not None and p.requires_grad is not trained.get(name, p.requires_grad):
                    return trained_as_captured(f"{prefix}.{name}".lstrip("."), trained[name])
        return self._other_layer() or self.numbers.changed()

    def _other_layer(self) -> str | None:
        """Return what is another module now, or a new one in a container, as an error; modules may be gone."""
        for prefix, reference, held in self._children:
            for name, child in () if (module := reference()) is None else module._modules.items():
                was, kind = held.get(name, (_gone, "not there"))
                if child is None or child is was() or (was is _gone and not isinstance(module, _CONTAINERS)):
                    continue
                return (
                    f"{f'{prefix}.{name}'.lstrip('.')} is another module now ({type(child).__name__}) than when the "
                    f"program was made ({kind}), and the program goes on with that: put it back, or call "
                    "autoplan.parallelize again (pm.save_checkpoint, then load_checkpoint with model_only=True, keep "
                    "the values)"
                )
        return None

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Record that the program was given other values, `values` by name, as the module may be."""
        self._late = []
        self.numbers.loaded(values)

    def warn_before_step(self, first: bool) -> None:
        """Warn, once, of what happened to the module after the program was made, which has no part in it: before the
        first step of values that were loaded into it and hooks that were registered, before any of another mode."""
        if first:
            self._warn_of_late_changes()
        self._warn_of_other_mode()

    def _warn_of_late_changes(self) -> None:
        late, self._late = self._late, []
        for name, reference, (version, hooks, dtype) in late:
            held = reference()
            if held is None:
                continue
            now = _form(held)
            if now[2] != dtype:
                warn_script(
                    f"{name} was converted from {dtype} to {now[2]} after autoplan.parallelize, which had copied it: "
                    "convert the model before that, or give precision= to autoplan.parallelize"
                )
                return
            if now[0] != version:
                warn_script(
                    f"{name} was written to after autoplan.parallelize, which had copied it: if its values are others, "
                    "the program has the old ones. Load weights before autoplan.parallelize, or give them to "
                    "pm.load_state_dict"
                )
                return
            if now[1] > hooks:
                warn_script(
                    f"a hook was registered on {name or 'the model'} after autoplan.parallelize: the program does not "
                    "run it. Register hooks of forwards before that; gradients are in pm.named_parameters() after "
                    "pm.step()"
                )
                return

    def _warn_of_other_mode(self) -> None:
        """Warn, once, if a module that computes something else in evaluation was set to another mode than the program
        has."""
        for name, reference, training in self._modes:
            if (module := reference()) is not None and module.training is not training:
                was, now = ("train", "eval") if training else ("eval", "train")
                warn_script(
                    f"{name or 'the model'} ({type(module).__name__}) was set to {now} mode after "
                    f"autoplan.parallelize, and the program goes on in {was} mode: set modes before "
                    "autoplan.parallelize. pm.eval_step(batch) evaluates in eval mode by itself"
                )
                self._modes = []
                return

    def warn_of_eval_mode(self) -> None:
        """Warn, once, if the module was in evaluation when the program was made, and computes something else in it."""
        if self._evaluated:
            warn_script(
                "the model was in eval mode when the program was made, as from_pretrained returns it, and the program "
                f"trains in that mode ({self._evaluated}): call model.train() before autoplan.parallelize"
            )
            self._evaluated, self._modes = "", []

    def filled(self, state: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> nn.Module:
        """Return a module with the values of a full state, and of buffers that are in no state, on the host.

        Raises:
            RuntimeError: the module cannot be copied, or the state lacks some of its keys or has others.
        """
        if self._form is None:
            raise RuntimeError(self.reason)
        made = copy.deepcopy(self._form)
        forget_stale_warning(made)
        with torch.no_grad():
            made.load_state_dict(
                {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}, assign=True
            )
        for name, value in buffers.items():
            owner, _, attr = name.rpartition(".")
            made.get_submodule(owner)._buffers[attr] = value.clone()
        _tie_again(made, self._form)
        return made


def _children(module: nn.Module) -> dict[str, tuple[weakref.ref[nn.Module], str]]:
    return {name: (weakref.ref(child), type(child).__name__) for name, child in module.named_children()}


def _gone() -> None:
    """Stand for a reference to nothing."""


_Form = tuple[int, int, torch.dtype | None]


def _form(held: nn.Module | nn.Parameter) -> _Form:
    """Return the number of changes of a parameter that torch counted, the number of hooks of it or a module, and its
    dtype."""
    if isinstance(held, nn.Module):
        hooks = (hook for table in _HOOKS_OF_MODULES for hook in getattr(held, table).values())
        return 0, sum(not _is_own(hook) for hook in hooks), None
    version = 0 if held.is_inference() else held._version
    return version, sum(len(getattr(held, table) or ()) for table in _HOOKS_OF_PARAMETERS), held.dtype


def _first_that_trains_otherwise(model: nn.Module) -> str:
    """Return the first module in evaluation that drops values in training, or keeps statistics, and what; or ''."""
    for name, module in model.named_modules():
        if not module.training and (kept := _otherwise_in_eval(module)):
            return f"{name} {kept}"
    return ""


def _otherwise_in_eval(module: nn.Module) -> str:
    """Return what a module does in evaluation in place of dropping values, or of taking statistics; or ''."""
    rates = [x for n, x in vars(module).items() if "drop" in n and isinstance(x, float)]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates.append(module.p)
    if any(rate > 0 for rate in rates):
        return "drops nothing"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
        return "keeps its statistics"
    return ""


def _copied(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[int, Any]:
    """Return what stands for tensors in a copy of a module: parameters and what is in its state have no memory."""
    memo: dict[int, Any] = {id(p): _without_memory(p) for p in model.parameters()}
    kept = {id(t) for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers() if id(b) in kept}
    for name, b in model.named_buffers():
        if id(b) not in kept and b.device.type != "cpu":
            value = buffers[name] if b.is_meta else b.detach()
            memo[id(b)] = value.to("cpu")
    return memo


def _without_memory(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)


def _tie_again(made: nn.Module, form: nn.Module) -> None:
    """Let the names of one parameter of `form` name one parameter of `made` again; `assign` made one for each."""
    first: dict[int, nn.Parameter] = {}
    for prefix, module in form.named_modules(remove_duplicate=False):
        mine = made.get_submodule(prefix)
        for name, p in module._parameters.items():
            held = mine._parameters.get(name)
            if p is not None and held is not None:
                held.requires_grad_(p.requires_grad)
                mine._parameters[name] = first.setdefault(id(p), held)


def given_back(
    given: GivenModule | None,
    state: Callable[[], dict[str, Any]],
    buffers: Callable[[], dict[str, torch.Tensor]],
    rank: int | None,
) -> nn.Module | None:
    """Return the module with the full state that `state` returns (a collective) on one rank, or on all; None elsewhere.

    `buffers` returns those that change and are in no state (a collective).

    Raises:
        AgreedRuntimeError: (on all ranks) there is no module, or it cannot be copied.
    """
    if given is None or given.reason:
        raise AgreedRuntimeError(
            "this program was not made of a module; load pm.state_dict() into one" if given is None else given.reason
        )
    values, others = state(), buffers()
    mine = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    return given.filled(values, others) if mine else None


class _Stale:
    """The hooks of `warn_when_stale`. A copy is silent, and so is one that was pickled; pickling itself warns."""

    def __init__(self, model: nn.Module | None = None, pm: Any = None) -> None:
        self._name = type(model).__name__
        self._model = None if model is None else weakref.ref(model)
        self._trained = None if pm is None else weakref.ref(pm)
        self._fresh_at = 0  # steps of the training whose values the module has
        self._said: set[str] = set()
        self._asked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._of_optimizers: RemovableHandle | None = None

    def watch_optimizers(self) -> None:
        """Look at every optimizer of this process before its first update, while the module is there."""
        if self._model is not None and (model := self._model()) is not None:
            self._of_optimizers = register_optimizer_step_pre_hook(self.before_update)
            weakref.finalize(model, self.end).atexit = False

    def end(self) -> None:
        """Look at no further optimizers."""
        if self._of_optimizers is not None:
            self._of_optimizers.remove()

    def before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Warn of an update of the module's own parameters, which have no gradients: it does nothing."""
        model = None if self._model is None else self._model()
        if model is None or self._trained is None or self._trained() is None or optimizer in self._asked:
            return
        self._asked.add(optimizer)
        own = {id(p) for p in model.parameters()}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if mine and all(p.grad is None for p in mine):
            warn_script(
                f"this {type(optimizer).__name__} has the parameters of the {self._name} that was given to "
                "autoplan.parallelize, which get no gradients, and its steps do nothing: the program trains its own. "
                "Give optimizer= to autoplan.parallelize, or make the optimizer of pm.parameters()"
            )

    def before_clipping(self) -> None:
        """Warn of a clipping of the module's own parameters, which have no gradients: it does nothing."""
        model = None if self._model is None else self._model()
        if model is not None and self._num_steps() and all(p.grad is None for p in type(model).parameters(model)):
            self._warn_once(
                f"the parameters of the {self._name} that was given to autoplan.parallelize get no gradients, and to "
                "clip them does nothing: the program trains its own. Call pm.clip_grad_norm_(max_norm) after pm.step, "
                "or clip the gradients of pm.named_parameters()"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warn_script(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stale:
        return _Stale()

    def __reduce__(self) -> tuple[Any, ...]:
        self._say("pm.to_module() returns the trained module, which can be pickled")
        return _Stale, ()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Warn in a forward."""
        self._say("pm.to_module() returns the trained module, pm.eval_step(batch) the loss of a batch")

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warn in `state_dict`, which also `save_pretrained` calls."""
        self._say(
            "pm.state_dict() returns the trained values, pm.to_module() the trained module; pm.save_pretrained(folder) "
            "writes those of a Hugging Face model"
        )

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Take note that the module has other values now: those of the training so far, or what the user wants."""
        self._fresh_at = self._num_steps()
        self._said.clear()

    def _num_steps(self) -> int:
        of = None if self._trained is None else self._trained()
        return 0 if of is None else int(of.progress.num_steps)

    def _say(self, instead: str) -> None:
        """Warn once of the values, and with what to do instead; not before the training has moved on from them."""
        if self._num_steps() > self._fresh_at and instead not in self._said:
            self._said.add(instead)
            old = "when they were loaded last" if self._fresh_at else "before autoplan.parallelize"
            text = f"this {self._name} has the values that it had {old}; {instead}"
            warn_script(text, every_rank=True)


class _Parameters:
    """The method `parameters` of a module that sees when torch clips what it yields. Copies of the module have torch's.

    It holds no reference to the module, which is freed when the script has none.
    """

    def __init__(self, model: nn.Module, stale: _Stale) -> None:
        self._model, self._stale = weakref.ref(model), stale

    def __call__(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        model = self._model()
        return iter(()) if model is None else self._yielded(type(model).parameters(model, recurse))

    def _yielded(self, parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
        compiling = torch.compiler.is_compiling()
        if not compiling and sys._getframe(1).f_globals.get("__name__") == nn.utils.clip_grad.__name__:
            self._stale.before_clipping()
        yield from parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        model: Any = self._model()
        return _Parameters(memo.get(id(model), model), _Stale())

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model(), "parameters")


def warn_when_stale(model: nn.Module, pm: Any) -> None:
    """Warn if `model` is run, read or pickled after `pm`, which was made of it, was trained: it has its old values.

    Warn, too, if an optimizer updates the parameters of `model`, or torch clips their gradients, as in a loop of torch.
    """
    forget_stale_warning(model)
    stale, hooked = _Stale(model, pm), cast("Any", model)  # torch's last two functions have no types
    hooked.register_forward_pre_hook(stale.before_forward)
    hooked.register_state_dict_pre_hook(stale.before_state_dict)
    hooked.register_load_state_dict_post_hook(stale.after_load)
    model.__dict__.setdefault("parameters", _Parameters(model, stale))
    stale.watch_optimizers()


def forget_stale_warning(model: nn.Module) -> None:
    """Remove the hooks of `warn_when_stale`, if there are any."""
    for hooks in (model._forward_pre_hooks, model._state_dict_pre_hooks, model._load_state_dict_post_hooks):
        for key in [key for key, hook in hooks.items() if _is_own(hook)]:
            cast("Any", hooks.pop(key)).__self__.end()
    if isinstance(model.__dict__.get("parameters"), _Parameters):
        del model.__dict__["parameters"]


def _is_own(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), _Stale)
