"""The inputs of a capture: a model, an example batch and a loss, and the three as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path

from autoplan.capture.frontend.counters import Counters
from autoplan.capture.frontend.held import HeldParameters
from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.errors import CaptureError
from autoplan.ir.graph import of_the_batch

_TAKEN = ("self", "rng")  # of the methods of a stage, which is called with inputs by name
# Wrappers of other ways to train on several devices, with their package: one that is not installed is none.
_WRAPPERS = frozenset(
    "torch.DataParallel torch.DistributedDataParallel torch.FullyShardedDataParallel lightning._FabricModule "
    "lightning_fabric._FabricModule deepspeed.DeepSpeedEngine".split()
)
LossFn = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


def check_arguments(model: Any, example_inputs: Any, loss_fn: Any) -> None:
    """Raise CaptureError unless these are a module, a mapping from names to tensors, and a function or None."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is of type {type(model).__name__}, not an nn.Module")
    kinds = type(without_compile(model)).__mro__
    if not _WRAPPERS.isdisjoint(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds):
        raise CaptureError(
            f"the model is wrapped in {kinds[0].__name__}, which runs it on several devices itself; give the model "
            "inside it, model.module"
        )
    if not isinstance(example_inputs, Mapping):
        raise CaptureError(
            f"example_inputs is of type {type(example_inputs).__name__}; it must map names to tensors [batch, ...]"
            f"{_as_mapping(model, example_inputs)}"
        )
    if not example_inputs:
        raise CaptureError("example_inputs is empty; it must map names to tensors [batch, ...]")
    for name, tensor in example_inputs.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"example_inputs[{name!r}] is of type {type(tensor).__name__}; example_inputs must map names to "
                "tensors: leave out what the forward has by default, or give a module around the model whose forward "
                "takes tensors alone and gives it the rest"
            )
        if name in _TAKEN or not of_the_batch(name):
            raise CaptureError(f"example_inputs has {name!r}, a name that programs use themselves; rename this input")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"loss_fn is of type {type(loss_fn).__name__}, not a function (outputs, batch) -> scalar")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if hasattr(type(tensor), "__tensor_flatten__"):  # PyTorch's mark of a tensor that is made of others
            raise CaptureError(
                f"{name!r} is a {type(tensor).__name__} ({type(tensor).__module__}), a tensor that stands for several: "
                "quantised, or on several devices. It cannot be split; give plain tensors, for example whole numbers "
                "and their scales as buffers that the forward multiplies"
            )


def _as_mapping(model: nn.Module, given: Any) -> str:
    """Return ', e.g. {...}': the given tensors under the names of the forward's positional arguments."""
    tensors = [given] if isinstance(given, torch.Tensor) else given
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    names = [n for n, p in inspect.signature(without_compile(model).forward).parameters.items() if p.kind in positional]
    fits = isinstance(tensors, (tuple, list)) and all(isinstance(x, torch.Tensor) for x in tensors)
    if not fits or not 0 < len(tensors) <= len(names):
        return ""
    source = "example_inputs" if isinstance(given, torch.Tensor) else "example_inputs[{}]"
    return ": {" + ", ".join(f"{n!r}: {source.format(i)}" for i, n in enumerate(names[: len(tensors)])) + "}"


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given; any other module itself."""
    while isinstance(module, torch._dynamo.OptimizedModule):
        module = module._orig_mod
    return module


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile was given as it is: whole modules, `model.compile()`, a compiled forward or function."""
    with torch.compiler.set_stance("force_eager"):
        yield


class _Recorded(dict[str, torch.Tensor]):
    """A batch that records which of its tensors are read."""

    def __init__(self, batch: Mapping[str, torch.Tensor], read: set[str]) -> None:
        super().__init__(batch)
        self._read = read

    def _all(self) -> None:
        self._read |= set(super().keys())

    def __getitem__(self, key: str) -> torch.Tensor:
        self._read.add(key)
        if key not in self:
            raise KeyError(f"{key!r}; the batch has {', '.join(super().keys())}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._read.add(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def copy(self) -> dict[str, torch.Tensor]:
        self._all()
        return super().copy()


def _scalar(loss: torch.Tensor, where: str) -> torch.Tensor:
    """Return a loss that is one number. Raises CaptureError for another, such as a loss of each sample."""
    if any(not isinstance(size, int) or size != 1 for size in loss.shape):
        raise CaptureError(f"{where} returned a loss of {loss.dim()} dims; the loss is a scalar, such as its mean()")
    return loss


def _only_number(out: Any) -> torch.Tensor | None:
    """Return a result that is a number, or the only number of a tuple such as (logits, loss); else None."""
    found = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor) and x.dim() == 0]
    return found[0] if len(found) == 1 and found[0].is_floating_point() else None


def results_of(out: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in what a model returned that a gradient flows to, by name, each once."""
    found: dict[str, torch.Tensor] = {}
    for path, leaf in tree_flatten_with_path(out)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and all(leaf is not x for x in found.values()):
            found[".".join(map(_key_text, path)) or "output"] = leaf
    return found


def _key_text(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key.key if isinstance(key, MappingKey) else getattr(key, "name", key))


@dataclass
class _Found:
    """Names that a forward leaves behind. An object of its own: torch.export undoes what a forward assigns to a module
    or its lists."""

    names: tuple[str, ...] = ()
    batch: tuple[Any, ...] = ()  # the number of samples, as every input has it


class LossModule(nn.Module):
    """Model and loss as one module: takes tensors in the order of `names` and returns the scalar loss.

    The model gets the inputs that its forward names. An input that neither the forward names nor `loss_fn` reads goes
    to the forward's `**kwargs`, if it has them. That is known only after the first call: `gives_more` says whether to
    call again.

    Args:
        held: the model's own tensors, for code that holds some of them; None: those that it has now.
        counters: they learn which numbers a forward changes.
        any_length: False: a capture is that of the lengths of its example.
        changing: buffers that another capture of the model changes.
        samples: of the batch that is traced; None: few.

    Attributes:
        within: makes the context that the forward runs in.
        with_results: True: `forward` returns a tuple, first the tensors that the model returned besides the loss.
    """

    within: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        loss_fn: LossFn | None,
        held: HeldParameters | None = None,
        counters: Counters | None = None,
        any_length: bool = True,
        changing: frozenset[str] = frozenset(),
        samples: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.any_length: bool = any_length
        self.samples: int | None = samples
        self.changing: frozenset[str] = changing
        # as a method, since a module would be a part of this one, and its tensors the model's
        self._names, self._loss_fn = names, loss_fn.__call__ if isinstance(loss_fn, nn.Module) else loss_fn
        self._held = held or HeldParameters(model)
        self.counters: Counters = counters or Counters(model)
        self._model_names, self._rest = model_input_names(model, names, loss_fn is not None)
        self._read: set[str] = set()
        own = without_compile(model)
        # a forward that does not name it may pass it on itself, beside its **kwargs; its config says the same
        takes_cache = is_hf_model(own) and "use_cache" in inspect.signature(own.forward).parameters
        self._extra: dict[str, Any] = {"use_cache": False} if takes_cache else {}
        self.with_results = False
        self._found = _Found()

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the scalar loss of one micro-batch."""
        self._found.batch = sizes = tuple(t.shape[0] for t in tensors if t.dim())
        for size in sizes[1:]:  # one symbol in a trace: samples of several inputs may be joined, and taken apart again
            torch._check(size == sizes[0])  # type: ignore[no-untyped-call]
        with self._held.replaced(), self.within():
            return self._loss(tensors)

    def _loss(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        batch = dict(zip(self._names, tensors, strict=True))
        out = self.model(**{n: batch[n] for n in self._model_names}, **self._extra)
        found = results_of(out) if self.with_results else {}
        loss = self._loss_of(out, batch)
        if not self.with_results:
            return loss
        self._found.names = tuple(name for name, tensor in found.items() if tensor is not loss)
        return (*(found[name] for name in self._found.names), loss)

    def _loss_of(self, out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self._loss_fn is not None:
            given: Any = self._loss_fn(out, _Recorded(batch, self._read))
            if not isinstance(given, torch.Tensor):
                raise CaptureError(f"loss_fn returned a {type(given).__name__}; return the loss alone, a scalar tensor")
            return _scalar(given, "loss_fn")
        loss = getattr(out, "loss", None)
        loss = out["loss"] if loss is None and isinstance(out, Mapping) and "loss" in out else loss
        loss = _only_number(out) if loss is None else loss
        if loss is None:
            raise CaptureError(
                f"{type(self.model).__name__} returned no loss; pass loss_fn=(outputs, batch) -> scalar, or labels in "
                "example_inputs"
            )
        return _scalar(loss, type(self.model).__name__)

    def batch(self) -> tuple[Any, ...]:
        """Return the number of samples of the last forward, as every input has it: symbols in a trace."""
        return self._found.batch

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the model's tensors that the last forward returned: `logits` of a mapping, `1` of a tuple,
        `output` of a tensor alone, joined by points where they are nested."""
        return self._found.names

    @results.setter
    def results(self, names: tuple[str, ...]) -> None:
        self._found.names = names

    def gives_more(self) -> bool:
        """Return True if `forward` ran without an input that belongs to the model's `**kwargs`; later calls pass it."""
        more = [n for n in self._rest if n not in self._read]
        self._rest = ()
        self._model_names = tuple(n for n in self._names if n in self._model_names or n in more)
        return bool(more)


def model_input_names(
    model: nn.Module, names: tuple[str, ...], own_loss: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs that the model's forward takes by name, and those that its `**kwargs` may take.

    The other inputs go to the loss only. A forward that names none of its inputs gets all of them.

    Args:
        own_loss: True if a function of the user computes the loss, so that some inputs may be for the loss alone.

    Raises:
        CaptureError: if the model takes none of the inputs.
    """
    accepted = inspect.signature(without_compile(model).forward).parameters
    chosen = tuple(n for n in names if n in accepted)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        if not chosen or not own_loss:
            return names, ()
        return chosen, tuple(n for n in names if n not in chosen)
    if not chosen:
        raise CaptureError(
            f"none of the inputs {', '.join(names)} is an argument of "
            f"{type(model).__name__}.forward({', '.join(accepted)})"
        )
    return chosen, ()
