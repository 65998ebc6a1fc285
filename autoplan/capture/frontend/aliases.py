"""Which results of a graph may be in the same memory, as the schemas of its ops and the marks of its layers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

_MARKERS = ("autoplan.block_begin", "autoplan.block_end", "autoplan.block_repeat")


def is_mark(node: fx.Node, kind: str = "") -> bool:
    """Return True for a mark of a layer; of this kind: begin, end or repeat."""
    return str(node.target).startswith(f"autoplan.block_{kind}" if kind else _MARKERS)


def has_tensor(node: fx.Node) -> bool:
    """Return True for a node that returns a tensor, alone or among others."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor)


def is_element(node: fx.Node) -> bool:
    """Return True for an element of a node that returns several values."""
    return getattr(node.target, "__name__", "") == "getitem"


def _closure(nodes: Sequence[fx.Node], more: Callable[[fx.Node], Sequence[fx.Node]]) -> set[fx.Node]:
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += more(node)
    return found


@dataclass
class Aliases:
    """The answers so far for the graphs of one program, which must not change meanwhile."""

    _near: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _holders: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    _marks: dict[fx.Graph, list[fx.Node]] = field(default_factory=dict)
    _used_up: dict[tuple[fx.Node, fx.Node], bool] = field(default_factory=dict)

    def behind(self, value: fx.Node) -> set[fx.Node]:
        """Return the value and every other whose memory it may be a view of."""
        return _closure([value], self.memory_of)

    def memory_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose memory the result of `node` may be, as the schema of its op says.

        An op that changes its argument counts as one that makes a new tensor, which it becomes.
        """
        if node not in self._near:
            self._near[node] = self._read(node)
        return self._near[node]

    def _read(self, node: fx.Node) -> list[fx.Node]:
        if is_element(node):
            source, index = cast(tuple[fx.Node, int], node.args)
            if not is_mark(source):
                return self.memory_of(source)
            given = cast(list[fx.Node], source.args[0])
            return self._of_a_repeat(source, index) if is_mark(source, "repeat") else [given[index]]
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return list(node.all_input_nodes)
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return []
        shared = [a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments]
        return [x for x, is_shared in zip(node.args, shared, strict=False) if is_shared and isinstance(x, fx.Node)]

    def _marks_of(self, graph: fx.Graph) -> list[fx.Node]:
        if graph not in self._marks:
            self._marks[graph] = [node for node in graph.nodes if is_mark(node)]
        return self._marks[graph]

    def _of_a_repeat(self, repeat: fx.Node, index: int) -> list[fx.Node]:
        """Return `memory_of` for result `index` of a layer that repeats another, read from that other layer."""
        first = repeat.args[3]
        end = next(n for n in self._marks_of(repeat.graph) if is_mark(n, "end") and n.args[1] == first)
        out = []
        for node in self.behind(cast(list[fx.Node], end.args[0])[index]):
            if node.op != "call_function":
                out.append(node)
            elif is_element(node) and is_mark(mark := cast(fx.Node, node.args[0]), "begin"):
                out += [cast(list[fx.Node], repeat.args[0])[cast(int, node.args[1])]] if mark.args[1] == first else []
        return out

    def holders(self, node: fx.Node) -> set[fx.Node]:
        """Return the node and every other whose result may be in the same memory."""

        def near(one: fx.Node) -> list[fx.Node]:
            views = [u for user in one.users for u in (*user.users, user) if one in self.memory_of(u)]
            return [*(self.memory_of(one) if one.op == "call_function" else ()), *views]

        if node not in self._holders:
            self._holders[node] = _closure([node], near)
        return self._holders[node]

    def is_used_up(self, changed: fx.Node, at: fx.Node) -> bool:
        """Return True if what node `at` does to the memory of `changed` is seen nowhere but in its result."""
        key = changed, at
        if key not in self._used_up:
            self._used_up[key] = self._seen_nowhere(changed, at)
        return self._used_up[key]

    def _seen_nowhere(self, changed: fx.Node, at: fx.Node) -> bool:
        holders = self.holders(changed)
        for holder in holders:
            if holder.op != "call_function" or any(
                at < user and not _only_its_form(holder, user) for user in holder.users
            ):
                return False
        for holder in holders:
            if not is_element(holder):
                continue
            mark, index = cast(tuple[fx.Node, int], holder.args)
            if is_mark(mark, "begin"):
                repeats = [n for n in self._marks_of(mark.graph) if is_mark(n, "repeat") and n.args[3] == mark.args[1]]
                if not all(self.is_used_up(cast(list[fx.Node], r.args[0])[index], r) for r in repeats):
                    return False
        return True


def _only_its_form(value: fx.Node, user: fx.Node) -> bool:
    """Return True for a layer that repeats another and takes the shape and dtype of a result from `value`."""
    return is_mark(user, "repeat") and value not in cast(list[fx.Node], user.args[0])
