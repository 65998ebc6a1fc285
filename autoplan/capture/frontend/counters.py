"""Numbers of Python that a forward itself changes and computes with: `self.seen += 1; x * min(1.0, self.seen / 10)`.

A graph has the numbers of its capture, so such a program would compute the first step for ever. A counter that nothing
in the graph depends on is no harm. Which of the two it is, a second capture shows, with the numbers as the forward left
them: a value that has an influence only later (a warm-up of ten steps that is the same in the first two) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.capture.frontend.buffers import HeldTable, attributes_restored, tables
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph


@dataclass(frozen=True)
class _Change:
    """An entry of a table before and after a forward."""

    table: HeldTable
    key: Any
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.table.name_of(self.key)!r} ({self.before} -> {self.after})"


class Counters:
    """The numbers that the last forward of a model changed.

    They are attributes of its modules and of objects that these hold, and entries of dicts and lists in either. What
    is in an object inside of those is not seen. Numbers of a module that makes a tensor without a gradient are left
    out. They belong to a cache (`self.ready = True`, the length that a table was made for), which a capture takes out
    again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[tuple[HeldTable, dict[Any, Any]]] = []
        self._changed: list[_Change] = []

    def start(self) -> None:
        """Note the numbers before a forward."""
        self._before = [(table, table.values()) for table in tables(self._model)]

    def end(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
        """Compare the numbers after a forward with those at its start.

        Args:
            before, after: the tensors that the model held then and holds now, by path (`held_tensors`).
        """
        changed = [
            _Change(table, key, value, now[key])
            for table, then in self._before
            for now in (table.values(),)
            for key, value in then.items()
            if _is_number(value) and _is_number(now.get(key)) and value != now[key]
        ]
        if changed:  # not in the modules that made a tensor without a gradient
            made = [name for name, t in after.items() if t is not before.get(name) and not t.requires_grad]
            caches = {self._module_of(name) for name in made}
            changed = [change for change in changed if self._module_of(f"{change.table.path}.") not in caches]
        self._before, self._changed = [], changed

    def _module_of(self, name: str) -> str:
        """Return the path of the module that holds something of this path."""
        paths: list[str] = [path for path, _ in self._model.named_modules()]
        return max((path for path in paths if not path or name.startswith(f"{path}.")), key=len)

    def refuse_if_used(self, graph: ModelGraph, again: Callable[[], ModelGraph]) -> None:
        """Raise CaptureError, naming the numbers, if a capture after the last forward is another one than its own.

        Args:
            graph: the capture of the last forward.
            again: captures once more.
        """
        changed = self._changed
        if not changed:
            return
        with self._advanced(changed):
            try:
                same = again().content_hash == graph.content_hash
            except CaptureError:
                same = False
        if not same:
            raise CaptureError(
                f"the forward changes and computes with {', '.join(map(str, changed))}: a program would keep what it "
                "is in the capture; give what changes as an input (a tensor with one value per sample), or leave the "
                "change out (model.eval() where that ends it)"
            )

    @contextmanager
    def _advanced(self, changed: list[_Change]) -> Iterator[None]:
        """Give the model the numbers that the forward left.

        A layer that repeats another did not run: where tables of one kind have the same number, all of them get it.
        """
        every = list(tables(self._model))
        with attributes_restored(self._model, every=True):  # torch.export puts copies in the place of containers
            for change in changed:
                for table in every:
                    mine, held = table.entries is change.table.entries, table.values().get(change.key)
                    if mine or (table.kind == change.table.kind and held == change.before and _is_number(held)):
                        table.entries[change.key] = change.after
            yield


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)  # no symbol for a size
