"""Parts without elements: the positions of an axis to which a model gives no dims, joined with those of its others."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def without_empty_parts(program: torch.export.ExportedProgram) -> None:
    """Take tensors that have no element, whatever the lengths are, out of what joins them with others."""
    for graph in [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]:
        for node in [n for n in graph.nodes if n.target is torch.ops.aten.cat.default]:
            parts: Any = node.args[0]
            full = [part for part in parts if not _is_empty(part)]
            if full and len(full) < len(parts):
                node.args = (full, *node.args[1:])
        for node in reversed(list(graph.nodes)):
            if _is_empty(node) and not node.users and _only_computes(node):
                graph.erase_node(node)


def _is_empty(node: fx.Node) -> bool:
    """Return True for one tensor of which a dim is 0, as a number."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def _only_computes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
