"""Write a trained model as Hugging Face's `from_pretrained` reads it, one tensor at a time.

The names in the files are those that `save_pretrained` of the model would write: transformers' own conversions are
reverted tensor by tensor (a fused tensor of experts becomes the tensors of each). No rank holds more than what one
conversion needs. A new meta model, made from the config, stands for the names; the model itself is not kept.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.files import write_whole
from autoplan.pretrained.weights import INDEX, SINGLE
from autoplan.runtime.agree import AgreedRuntimeError, agree
from autoplan.runtime.tensor_files import NewTensor, write_tensors

_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
SHARD_BYTES = 5_000_000_000  # of a file, as transformers' default
Whole = Callable[[str], torch.Tensor]  # the whole tensor of a name; a collective


class ExportError(AgreedRuntimeError):
    """A model that could not be written, on all ranks alike."""


@dataclass
class _Group:
    """Tensors of the model that are written together, since one conversion needs them all.

    Attributes:
        names: of the model. written: name in the file -> shape and dtype.
        convert: from the tensors of the model to those of the file.
    """

    names: list[str]
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    written: dict[str, torch.Tensor]


class Exporter:
    """Writes the tensors of a model under the names of its `save_pretrained`.

    Args:
        model: the model; its names and config are used, not its values.
    """

    def __init__(self, model: nn.Module) -> None:
        hf: Any = model
        self._config: Any = copy.deepcopy(hf.config)
        self._generation: Any = getattr(model, "generation_config", None)
        self._shapes = {n: torch.empty_like(t, device="meta") for n, t in model.state_dict().items()}
        tied = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        params = dict(model.named_parameters(remove_duplicate=False))
        self._first = {n: tied[id(params[n])] if n in params else n for n in self._shapes}
        self._conversions = _reversed(model)

    def write(self, folder: Path, whole: Whole, rank: int, device: torch.device) -> None:
        """Write everything into a folder; a collective of all ranks, of which the first one writes.

        Raises:
            ExportError: (on all ranks) the folder cannot be written.
        """
        names = [n for n in self._shapes if self._first[n] == n]  # a tied parameter once, as transformers writes it
        groups = list(self._groups(names))
        files = list(_files(groups))
        problem: str | None = None
        pending = [name for of_file in files for group in of_file for name in group.names]

        def next_of(name: str) -> torch.Tensor:
            assert pending[0] == name
            value = whole(name)
            pending.pop(0)
            return value.to(self._shapes[name].dtype)  # of mixed precision it is the float32 master

        if rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._write(folder, files, next_of)
            except OSError as exc:
                problem = f"{exc.filename or folder}: {exc.strerror}"
        for name in list(pending):  # the other ranks; the first one after an error too
            whole(name)
        agree(problem and f"the model was not written: {problem}", device, ExportError)

    def _write(self, folder: Path, files: list[list[_Group]], whole: Whole) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        # Files of an earlier model must not be read as this one's, nor together with some of its own if this fails.
        for name in (INDEX, SINGLE) if len(files) > 1 else (INDEX,):
            (folder / name).unlink(missing_ok=True)
        for i, groups in enumerate(files):
            name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            tensors: dict[str, NewTensor] = {}
            for group in groups:
                tensors |= _of_group(group, whole)
            write_tensors(folder / name, tensors, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.num_bytes for t in tensors.values())
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_whole(folder / INDEX, json.dumps(index, indent=2))
        for path in folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in weight_map.values():
                path.unlink()
        self._config.save_pretrained(folder)
        if self._generation is not None:
            self._generation.save_pretrained(folder)

    def _groups(self, names: list[str]) -> Iterator[_Group]:
        """Yield the groups, as `revert_weight_conversion` of transformers makes them (core_model_loading.py)."""
        from transformers.core_model_loading import WeightConverter, apply_converters, apply_renamings

        converters = [c for c in self._conversions if isinstance(c, WeightConverter)]
        renamings = [c for c in self._conversions if not isinstance(c, WeightConverter)]
        of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for name in names:
            renamed, pattern = apply_converters(name, converters)
            if pattern is None:
                renamed = apply_renamings(name, renamings)
                found[renamed] = (None, [(name, renamed)])
            else:
                found.setdefault(renamed, (of_pattern[pattern], []))[1].append((name, pattern))
        for first, (converter, keys) in found.items():
            convert = _converting(converter, first, keys, renamings, self._config)
            written = convert({name: self._shapes[name] for name, _ in keys})
            yield _Group([name for name, _ in keys], convert, written)


def _converting(
    converter: Any, first: str, keys: list[tuple[str, str]], renamings: list[Any], config: Any
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    from transformers.core_model_loading import apply_renamings

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if converter is None:
            return {first: tensors[keys[0][0]]}
        mine = copy.deepcopy(converter)
        for name, pattern in keys:
            mine.add_tensor(first, name, pattern, tensors[name])
        out = {}
        for target, value in mine.convert(first, model=None, config=config).items():
            out[apply_renamings(target, renamings)] = value[0] if isinstance(value, list) else value
        return out

    return convert


def _of_group(group: _Group, whole: Whole) -> Mapping[str, NewTensor]:
    """Return the tensors of a group, which are made when the first of them is written and kept until the last."""
    made: dict[str, torch.Tensor] = {}

    def value(name: str) -> Callable[[], torch.Tensor]:
        def make() -> torch.Tensor:
            if not made:
                made.update(group.convert({n: whole(n) for n in group.names}))
            return made.pop(name)

        return make

    return {n: NewTensor(t.dtype, tuple(t.shape), value(n)) for n, t in group.written.items()}


def _files(groups: list[_Group]) -> Iterator[list[_Group]]:
    """Yield the groups of each file: in order, of at most SHARD_BYTES unless one group is larger."""
    mine: list[_Group] = []
    size = 0
    for group in groups:
        num_bytes = sum(t.numel() * t.element_size() for t in group.written.values())
        if mine and size + num_bytes > SHARD_BYTES:
            yield mine
            mine, size = [], 0
        mine.append(group)
        size += num_bytes
    if mine:
        yield mine


def _reversed(model: nn.Module) -> list[Any]:
    """Return the conversions from the model's names to those of its files, as transformers' `save_pretrained` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    hf: Any = model
    found = getattr(model, "_weight_conversions", None)
    if found is None:
        found = [c for c in get_model_conversion_mapping(hf, add_legacy=False) if not isinstance(c, PrefixChange)]
    return [conversion.reverse_transform() for conversion in found[::-1]]
