"""The values that a model's own initialisation gives it, or a function of the user's, on the meta device.

What it does is recorded, without values, and done again for each tensor when it is asked for.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.errors import CaptureError
from autoplan.runtime.values import NoValuesError, Recording

logger: logging.Logger = logging.getLogger(__name__)

Init = Callable[[nn.Module], Any]
REMEDY = (
    "pass init= (a function of the model that fills all of it in place) or weights= (a folder of safetensors), or "
    "build the model on the CPU"
)


class OwnValues:
    """The tensors on the meta device of a model by name, each made when it is asked for.

    What the initialisation of a model of transformers leaves as its constructor made it comes from the constructor: the
    model is built once more from its config, without values.

    Args:
        wanted: the names of the tensors.
        init: fills the model; None: its own initialisation.
        seed: of random values.

    Attributes:
        tensors: all of the model after the initialisation, which may put others in place of those before.

    Raises:
        CaptureError: a tensor that nothing gives values to, or an initialisation that cannot be recorded.
    """

    def __init__(self, model: nn.Module, wanted: Collection[str], init: Init | None, seed: int) -> None:
        before = _tensors(model)
        recording = recorded(model, init, seed)
        now = _tensors(model)
        for name, tensor in before.items():
            if name not in now or _form(now[name]) != _form(tensor):
                became = f"one of another shape or dtype, {_form(now[name])}" if name in now else "nothing"
                raise CaptureError(f"the initialisation puts {became} in place of {name!r}, {_form(tensor)}; {REMEDY}")
        self.tensors = now
        self._made_by = {n: (recording, now[n]) for n in wanted if not now[n].is_meta or recording.gives(now[n])}
        lacking = [n for n in now if n in wanted and n not in self._made_by]
        if lacking and init is None and is_hf_model(model):
            self._made_by |= _of_constructor(model, lacking, seed)
        for name in lacking:
            if name not in self._made_by:
                raise CaptureError(_no_values(model, name, init))

    def __getitem__(self, name: str) -> torch.Tensor:
        recording, tensor = self._made_by[name]
        if not tensor.is_meta:
            return tensor.detach()
        try:
            return recording.values(tensor).to(self.tensors[name].dtype)
        except RuntimeError as exc:  # such as an orthogonal matrix of 16 bits, which torch cannot make anywhere
            raise CaptureError(f"{name!r}: its initialisation fails: {exc}; {REMEDY}") from exc


def _of_constructor(model: nn.Module, names: Collection[str], seed: int) -> dict[str, tuple[Recording, torch.Tensor]]:
    """Return those of some tensors that the constructor of a model of transformers gives values."""
    try:
        again, recording = _built_again(model, seed)
    except Exception:  # whatever transformers says: the error is that the tensors have no values
        logger.debug("%s cannot be built again", type(model).__name__, exc_info=True)
        return {}
    there, here = _tensors(again), _tensors(model)
    return {
        n: (recording, there[n])
        for n in names
        if n in there and there[n].shape == here[n].shape and (not there[n].is_meta or recording.gives(there[n]))
    }


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(all_buffers(model))}


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"


def recorded(model: nn.Module, init: Init | None, seed: int) -> Recording:
    """Run the initialisation of a model on the meta device. Raises CaptureError if that is not possible."""
    recording = Recording(seed)
    what = "the initialisation" if init is None else "init"
    with _refused(model, what), torch.no_grad(), _host_seeded(seed), _kept(model, init), recording:
        _initialise(model, init)
    return recording


def _built_again(model: nn.Module, seed: int) -> tuple[nn.Module, Recording]:
    """Build a model of transformers anew on the meta device, recorded from its first tensor on."""
    recording = Recording(seed)
    hf: Any = model
    with torch.no_grad(), _host_seeded(seed):
        with recording, torch.device("meta"):
            again: nn.Module = type(hf)(copy.deepcopy(hf.config))
        with _untied(again), recording:
            _initialise(again, None)
    return again, recording


@contextmanager
def _refused(model: nn.Module, what: str) -> Iterator[None]:
    """Say which module cannot be initialised on the meta device, and what to do."""
    try:
        yield
    except NoValuesError as exc:
        raise CaptureError(f"{what} {exc}{_place(model, exc)}; {REMEDY}") from exc
    except (RuntimeError, NotImplementedError) as exc:
        raise CaptureError(f"{what} cannot run on the meta device{_place(model, exc)}: {exc}; {REMEDY}") from exc


def _initialise(model: nn.Module, init: Init | None) -> None:
    if init is not None:
        init(model)
    elif is_hf_model(model):
        hf: Any = model
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        hf.initialize_weights()
    else:
        for module in _children_first(model, set()):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                reset()


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once in the order of constructors: a module's own initialisation comes after its parts'."""
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    seen.add(module)
    yield module


@contextmanager
def _kept(model: nn.Module, init: Init | None) -> Iterator[None]:
    """Keep what has values from the model's own initialisation, which finds tied parameters as transformers does."""
    if init is not None:
        yield
        return
    real = [tensor for name, tensor in _tensors(model).items() if not tensor.is_meta and _has_values(model, name)]
    before = [t.detach().clone() for t in real]
    try:
        with _untied(model):
            yield
    finally:
        for tensor, values in zip(real, before, strict=True):
            tensor.detach().copy_(values)


def _has_values(model: nn.Module, name: str) -> bool:
    """Return True unless a tensor of the host was never filled: in a model of transformers that began on meta.

    Its initialisation, which marks what it fills, did not run there, and `torch.FloatTensor(4)` is on the host.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    tensor = getattr(owner, name.rpartition(".")[2])
    return not is_hf_model(model) or any(getattr(x, "_is_hf_initialized", False) for x in (owner, tensor))


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Give the other names of tied parameters tensors of their own, as they have when transformers initialises them.

    It ties them afterwards: of an output layer tied to the embedding, the values are the embedding's.
    """
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    put: list[tuple[Any, str, nn.Parameter]] = []
    for name, source in tied.items():
        p = parameters.get(name)
        if p is not None and p.is_meta and source != name and p is parameters.get(source):
            path, _, attribute = name.rpartition(".")
            table: Any = model.get_submodule(path)._parameters
            put.append((table, attribute, p))
            table[attribute] = nn.Parameter(torch.empty_like(p), requires_grad=p.requires_grad)
    try:
        yield
    finally:
        for table, attribute, p in put:
            table[attribute] = p


@contextmanager
def _host_seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of the host, which an initialisation may copy to the meta device, alike on all ranks."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _place(model: nn.Module, error: BaseException) -> str:
    """Return where an error was: the innermost module whose code, or code with it at hand, raised it."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held = [paths[id(value)] for value in frame.f_locals.values() if id(value) in paths]
        found = held[-1] if held else found
    return f" (in {found!r})" if found else ""


def _no_values(model: nn.Module, name: str, init: Init | None) -> str:
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    by = "init does not give it any" if init is not None else f"{owner} has no reset_parameters() that gives it any"
    return f"{name!r} is on the meta device and has no values, and {by}, or not to all of it; {REMEDY}"
