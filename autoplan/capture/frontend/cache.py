"""Captured graphs on disk, keyed by the hash of everything they depend on.

Only models made of installed packages (torch, transformers) are cached: by their version, and by the functions that are
bound to their names now (`bound_code`). A model with classes or functions of the user is captured every time, since no
cheap key covers every function its forward may call; a stale capture would be a silently wrong program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from autoplan.capture.frontend.bound_code import PACKAGES, bound_code, plain_value
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.errors import GraphError
from autoplan.files import cache_folder, code_hash, keep_cached, read_cached
from autoplan.ir.graph import GRAPH_SCHEMA_VERSION, ModelGraph
from autoplan.versions import __version__, installed


def _own_code() -> str:
    """Return the hash of the code that captures and of the rules it uses."""
    return code_hash("capture", "ops", "ir")


def capture_key(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> str | None:
    """Return the SHA-256 of everything that a capture depends on.

    Returns:
        None if the key cannot be known: the model has classes, functions or attributes of the user.
    """
    internal = set(nn.Module().__dict__)
    modules, classes = [], set[type]()
    for name, module in model.named_modules():
        cls = type(module)
        if cls.__module__.split(".")[0] not in PACKAGES or "forward" in module.__dict__:
            return None
        try:
            attributes = {k: plain_value(v) for k, v in module.__dict__.items() if k not in internal}
        except TypeError:
            return None
        hooks = sum(len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks"))
        if hooks:
            return None
        classes |= {cls, *(type(v) for v in module.__dict__.values() if hasattr(v, "to_dict"))}
        modules.append([name, f"{cls.__module__}.{cls.__qualname__}", module.training, attributes])
    try:
        code = bound_code(classes)
    except TypeError:
        return None
    owners: dict[int, str] = {}
    tensors = []
    for kind, pairs in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", all_buffers(model, remove_duplicate=False)),
    ):
        for name, t in pairs:
            tensors.append([kind, name, list(t.shape), str(t.dtype), t.requires_grad, owners.setdefault(id(t), name)])
    versions = {"autoplan": __version__, **installed()}  # transformers may not be there
    inputs = {n: [list(t.shape[1:]), str(t.dtype)] for n, t in example_inputs.items()}
    key = [GRAPH_SCHEMA_VERSION, _own_code(), versions, code, modules, tensors, inputs, list(example_inputs)]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def cached(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    make: Callable[[], ModelGraph],
    folder: Path | None = None,
) -> ModelGraph:
    """Return the stored graph of this model and these inputs; otherwise call `make()` and store its graph.

    A damaged file is replaced, never used. Where the folder cannot be read or written, nothing is stored.
    """
    key = capture_key(model, example_inputs)
    if key is None:
        return make()
    path = (folder or cache_folder("graphs")) / f"{key}.json"
    text = read_cached(path)
    if text is not None:
        with suppress(GraphError, KeyError, TypeError, ValueError):
            stored = json.loads(text)
            graph = ModelGraph.from_json(stored["graph"])
            if graph.content_hash == stored["content_hash"]:
                return graph
    graph = make()
    keep_cached(path, json.dumps({"content_hash": graph.content_hash, "graph": graph.to_json()}))
    return graph
