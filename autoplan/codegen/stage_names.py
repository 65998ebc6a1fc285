"""The variables of a stage's methods: what the values that calls exchange are called there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import ModelGraph
from autoplan.program.lower import RESERVED, identifier
from autoplan.runtime.spec import SizeSource

_RENAMED = "renamed"  # inputs that cannot be arguments under their own names


class StageNames:
    """Variables of values by name. An input of the batch may have any name, such as `b`, which is the size of it."""

    def __init__(self, graphs: Iterable[ModelGraph]) -> None:
        graphs = list(graphs)
        made = {identifier(v) for graph in graphs for call in graph.calls for v in call.outputs}
        names = FreshNames((*RESERVED, _RENAMED, *made))
        inputs = dict.fromkeys(n for graph in graphs for n in graph.inputs)
        self._inputs = {n: names.fresh(identifier(n)) for n in inputs}

    def of(self, value: str) -> str:
        """Return the variable of an input of the batch or of a call's result."""
        return self._inputs.get(value) or identifier(value)

    def size(self, source: SizeSource) -> str:
        """Return the text of a size that a stage reads of an input."""
        part = f" // {source.times}" if source.times > 1 else ""
        return f"{self.of(source.input)}.shape[{source.dim}]{part}"

    def arguments(self, inputs: Sequence[str], more: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Return the keyword arguments of a method that takes these inputs and `more`, and the first lines of it."""
        args = [f"{n}: Tensor" for n in (*(n for n in inputs if self.of(n) == n), *more)]
        renamed = [n for n in inputs if self.of(n) != n]
        if renamed:
            args.append(f"**{_RENAMED}: Tensor")
        args = ["*", *args] if args and not args[0].startswith("**") else args
        return args, [f"        {self.of(n)} = {_RENAMED}[{n!r}]" for n in renamed]
