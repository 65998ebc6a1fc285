"""Dataclasses with tensors, as layers return them: pytree takes them for leaves, and would not see the tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils import _pytree as pytree


class _Opened:
    """An instance of a dataclass, as a node of a tree whose children are its fields."""

    def __init__(self, of: Any) -> None:
        self.of = of


def opened(tree: Any) -> Any:
    """Return a tree in which dataclasses that pytree does not know are nodes: unflattened, they are new instances."""
    return pytree.tree_map(lambda leaf: _Opened(leaf) if _is_unknown(leaf) else leaf, tree)


def _is_unknown(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and hasattr(leaf, "__dict__")


def _flatten(node: _Opened) -> tuple[list[Any], Any]:
    held = vars(node.of)
    return [opened(value) for value in held.values()], (type(node.of), tuple(held))


def _unflatten(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Opened, _flatten, _unflatten)
