"""Captured graphs on disk, keyed by the hash of everything they depend on.

Only models made of installed packages (torch, transformers) are cached: their version identifies their code. A model
with classes of the user is captured every time, since no cheap key covers every function its forward may call; a stale
capture would be a silently wrong program.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture.frontend.buffers import all_buffers
from autoplan.errors import GraphError
from autoplan.files import cache_folder, code_hash, write_whole
from autoplan.ir.graph import GRAPH_SCHEMA_VERSION, ModelGraph

_PACKAGES = ("torch", "transformers")
_NOT_IN_DICT = ("_attn_implementation", "_experts_implementation")  # left out of a config's dict by transformers
_PLAIN = (bool, int, float, str, type(None))


def _own_code() -> str:
    """Return the hash of the code that captures and of the rules it uses."""
    return code_hash("capture", "ops", "ir")


def _plain(value: Any) -> Any:
    """Return the JSON form of an attribute. Raises TypeError if its content cannot be read."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(v)) for v in value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if type(value).__module__.split(".")[0] == "transformers" and hasattr(value, "to_dict"):
        own = {name: getattr(value, name, None) for name in _NOT_IN_DICT}
        return _plain({**value.to_dict(), **own})
    name = getattr(value, "__qualname__", None)
    if name is not None and getattr(value, "__module__", "").split(".")[0] in _PACKAGES and "<" not in name:
        return f"{value.__module__}.{name}"  # a function or class of an installed package
    raise TypeError(f"{type(value).__name__} has no content that can be hashed")


def capture_key(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> str | None:
    """Return the SHA-256 of everything that a capture depends on.

    Returns:
        None if the key cannot be known: the model has classes or attributes of the user.
    """
    internal = set(nn.Module().__dict__)
    modules = []
    for name, module in model.named_modules():
        cls = type(module)
        if cls.__module__.split(".")[0] not in _PACKAGES or "forward" in module.__dict__:
            return None
        try:
            attributes = {k: _plain(v) for k, v in module.__dict__.items() if k not in internal}
        except TypeError:
            return None
        hooks = sum(len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks"))
        if hooks:
            return None
        modules.append([name, f"{cls.__module__}.{cls.__qualname__}", module.training, attributes])
    owners: dict[int, str] = {}
    tensors = []
    for kind, pairs in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", all_buffers(model, remove_duplicate=False)),
    ):
        for name, t in pairs:
            tensors.append([kind, name, list(t.shape), str(t.dtype), t.requires_grad, owners.setdefault(id(t), name)])
    versions = {p: importlib.metadata.version(p) for p in (*_PACKAGES, "autoplan")}
    inputs = {n: [list(t.shape[1:]), str(t.dtype)] for n, t in example_inputs.items()}
    key = [GRAPH_SCHEMA_VERSION, _own_code(), versions, modules, tensors, inputs, list(example_inputs)]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def cached(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    make: Callable[[], ModelGraph],
    folder: Path | None = None,
) -> ModelGraph:
    """Return the stored graph of this model and these inputs; otherwise call `make()` and store its graph.

    A damaged file is replaced, never used.
    """
    key = capture_key(model, example_inputs)
    if key is None:
        return make()
    path = (folder or cache_folder("graphs")) / f"{key}.json"
    if path.exists():
        try:
            stored = json.loads(path.read_text())
            graph = ModelGraph.from_json(stored["graph"])
            if graph.content_hash == stored["content_hash"]:
                return graph
        except (GraphError, KeyError, ValueError):
            path.unlink(missing_ok=True)
    graph = make()
    store_capture(path, json.dumps({"content_hash": graph.content_hash, "graph": graph.to_json()}))
    return graph


def store_capture(path: Path, text: str) -> None:
    """Write a file of the cache. Readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
