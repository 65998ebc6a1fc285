"""Where nodes of a traced program were made: lines of the user's code, and calls of modules."""

from __future__ import annotations

import re
from typing import Any, cast

from torch import fx

from autoplan.capture.frontend import inputs


def source_of(node: fx.Node) -> str:
    """Return 'file:line' of the user's code that made the node (base name only)."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if found and found[-1][0] == inputs.__file__:
        return "the loss function"  # torch records no frame inside it, only the call
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


def place_in_model(node: fx.Node) -> str:
    """Return what an error says of where a node was made: its line, and its module where the line is PyTorch's."""
    where, scope = source_of(node), scope_of(node)
    found = re.findall(r'File "([^"]+)", line', node.meta.get("stack_trace") or "")
    return f"{where}, in module {scope!r}" if scope and found and "/torch/nn/" in found[-1] else where


def source_within(module: fx.GraphModule, region: Any) -> str:
    """Return 'file:line' of the first line of the user's code that a region runs."""
    sub = cast(fx.GraphModule, module.get_submodule(str(region.target)))
    for node in sub.graph.nodes:
        frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        own = [f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in frames if "/torch/" not in file]
        if own:
            return own[-1]
    return ""


def scope_of(node: fx.Node) -> str:
    """Return the path of the module whose forward made the node, relative to the user's model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""


def calls_of(node: fx.Node) -> tuple[str, ...] | None:
    """Return the calls of modules that made the node, from outside inwards: `block@1`, `block.conv@1`.

    The number counts the calls of a module, from 0. None: outside the user's model, as what a loss function makes.
    """
    stack = [(key, str(path)) for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()]
    inside = [(key, path.removeprefix("model.")) for key, path in stack if path.startswith("model.")]
    calls = tuple(f"{path}@{key.rpartition('@')[2] if '@' in key else 0}" for key, path in inside)
    return calls if calls or any(path == "model" for _, path in stack) else None
