"""The values of a model's parameters: from a folder of weights, or from its own initialisation, one tensor at a time.

Weights are safetensors files, as Hugging Face's `save_pretrained` writes them: one file, or several with an index. A
name in them is the parameter's, or becomes it by the conversions that transformers itself uses (renaming, merged
experts, fused or split projections). A tensor that needs no conversion is mapped into memory, and a rank reads the part
that it holds; of one that needs a conversion all sources are read, and forgotten after it.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.errors import CaptureError, PinError
from autoplan.pretrained.own_values import Init as Init
from autoplan.pretrained.own_values import OwnValues
from autoplan.runtime.tensor_files import TensorFile, TensorFileError, stored_names
from autoplan.runtime.values import MadeTensors

logger: logging.Logger = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass
class _Source:
    """The source of a tensor of the model: keys of the files, and the conversion, if they are not the tensor itself.

    Attributes:
        keys: (key, the pattern of the conversion that it matched), in the order that the conversion expects.
        first: the name that the conversion goes by: the first of its results.
    """

    keys: list[tuple[str, str]] = field(default_factory=list)
    converter: Any = None
    first: str = ""


class Weights:
    """The tensors of a folder of weights, by the names of a model.

    Args:
        folder: of the files.
        model: the model; a Hugging Face model also gives the conversions.

    Raises:
        CaptureError: no weights there, or files that are damaged or missing.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._model = model
        self._files: dict[str, TensorFile] = {}
        try:
            for path in _paths(folder):
                file = TensorFile(path)
                self._files |= dict.fromkeys(file.entries, file)
        except (OSError, TensorFileError) as exc:
            raise CaptureError(f"weights={str(folder)!r} cannot be read: {exc}") from exc
        self._sources = (
            self._hf_sources() if is_hf_model(model) else {key: _Source([(key, key)]) for key in self._files}
        )

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    @property
    def names(self) -> set[str]:
        """The names of the tensors that it has."""
        return set(self._sources)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if only its conversion knows it."""
        source = self._sources[name]
        (key, _), *_ = source.keys
        return None if source.converter is not None else self._files[key].entries[key].shape

    def dtypes_of(self, name: str) -> set[torch.dtype]:
        """Return the dtypes in the files of a tensor, or of those that it is made of."""
        return {self._files[key].entries[key].dtype for key, _ in self._sources[name].keys}

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        if source.converter is None:
            (key, _), *_ = source.keys
            return self._files[key].mapped(key)
        converter = copy.deepcopy(source.converter)
        for key, pattern in source.keys:
            converter.add_tensor(source.first, key, pattern, self._files[key].mapped(key))
        found = converter.convert(source.first, model=self._model, config=self._model.config)
        value = found[name]
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor

    def _hf_sources(self) -> dict[str, _Source]:
        """Follow transformers' own renaming and conversions (core_model_loading.py, version 5)."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model: Any = self._model
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = model.state_dict()
        out: dict[str, _Source] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            if pattern is None:
                out[name] = _Source([(key, key)])
                continue
            converter = of_pattern[pattern]
            names = [name.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
            source = out.setdefault(name, _Source(converter=converter, first=name))
            source.keys.append((key, pattern))
            out |= dict.fromkeys(names, source)
        return out


def _paths(folder: Path) -> list[Path]:
    """Return the files of weights in a folder. Raises OSError if there are none."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        names = sorted(set(index["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise TensorFileError(f"{INDEX} names files outside of the folder")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not folder.is_dir():
        raise FileNotFoundError(
            "there is no such folder; give one that save_pretrained wrote (of a model of the Hub "
            "huggingface_hub.snapshot_download makes one)"
        )
    raise FileNotFoundError(f"it has neither {INDEX} nor {SINGLE}")


def is_empty(model: nn.Module) -> bool:
    """Return True if a parameter or buffer is on the meta device."""
    return any(t.is_meta for _, t in (*model.named_parameters(), *all_buffers(model)))


def check_init(model: nn.Module, weights: object, init: object, seed: object) -> None:
    """Raise PinError for a seed that is none, or an initialisation of a model that has its values."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**63:
        raise PinError(f"seed={seed!r} must be a whole number of 64 bits")
    if init is not None and weights is None and not is_empty(model):
        raise PinError(
            "init= gives values to a model on the meta device, and all tensors of this one have theirs; leave init= "
            "out, or make the model under torch.device('meta')"
        )


def values_of(
    model: nn.Module, weights: Path | None, init: Init | None, seed: int
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return the parameters and the buffers of a model by name, made when they are asked for.

    A tensor comes from the weights if they have it, else from the model if it has values there, else from the model's
    initialisation, which is the same on every rank.

    Args:
        weights: a folder of weights, or None.
        init: gives all parameters and buffers of a model their values, in place; None: Hugging Face's
            `initialize_weights`, else `reset_parameters` of every module that has one.
        seed: of random values.

    Raises:
        CaptureError: a tensor that nothing gives values to, or an initialisation that cannot be recorded.
    """
    stored = Weights(weights, model) if weights is not None else None
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers = dict(all_buffers(model))
    in_files = _in_files(model, parameters, buffers, stored) if stored is not None else {}
    wanted = {n for n, t in (*parameters.items(), *buffers.items()) if n not in in_files and t.is_meta}
    own: OwnValues | None = None
    if wanted:
        own = OwnValues(model, wanted, init, seed)
        parameters, buffers = ({n: own.tensors[n] for n in tensors} for tensors in (parameters, buffers))

    def make(name: str) -> torch.Tensor:
        tensor = parameters[name] if name in parameters else buffers[name]
        if name in in_files and stored is not None:
            return stored[in_files[name]].to(tensor.dtype)
        return own[name] if own is not None and name in wanted else tensor.detach()

    return (
        MadeTensors({n: p.dtype for n, p in parameters.items()}, make),
        MadeTensors({n: b.dtype for n, b in buffers.items()}, make),
    )


def _in_files(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    stored: Weights,
) -> dict[str, str]:
    """Return the name under which the weights have each tensor: of a tied parameter any of its names.

    Raises:
        CaptureError: a parameter that they lack, of another shape, or quantized.
    """
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    out: dict[str, str] = {}
    absent = []
    for name, tensor in (*parameters.items(), *buffers.items()):
        found = next((n for n in aliases.get(id(tensor), [name]) if n in stored), None)
        if found is None:
            absent += [name] if name in parameters else []
            continue
        out[name] = found
        packed = stored.dtypes_of(found) - _FLOATS - {tensor.dtype}
        if tensor.is_floating_point() and packed:
            raise CaptureError(
                f"weights={str(stored.folder)!r}: {found} is in {_texts(packed)}, as quantized weights are, whose "
                f"scales are not applied here; give weights in {_texts(_FLOATS)}"
            )
        shape = stored.shape_of(found)
        if shape not in (None, tuple(tensor.shape)):
            raise CaptureError(
                f"weights={str(stored.folder)!r}: {found} has shape {shape}, and the model's {tuple(tensor.shape)}"
            )
    if absent:
        raise CaptureError(f"weights={str(stored.folder)!r} lack {stored_names(absent)}")
    unused = stored.names - {*out.values(), *(n for names in aliases.values() for n in names)}
    if unused:
        logger.warning("weights=%r have %s, which the model lacks", str(stored.folder), stored_names(unused))
    return out


def _texts(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))
