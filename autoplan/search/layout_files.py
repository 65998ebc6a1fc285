"""Solved layouts on disk, for later processes: by the hash of everything that their problem depends on.

A file holds one layout that was proved to be the best, or that none exists: the SHA-256 of its name and the rest on the
first line, then JSON. The name is the hash of graph, degrees, sizes and prices (`layout_problem.prices_key`), of the
number of micro-batches, the solver and the code. So a file is never wrong: what was written by other code is not found,
and what is damaged, cut off or under another name is ignored and written again. Processes may share a folder.

A layout is all that is kept. It takes milliseconds to read; what is made of it (`autoplan.program.workload`) would take
half as long to read as to make, and bounds depend on everything.

Without a folder that can be read and written, nothing is kept, and nothing said: the plan is the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from autoplan.errors import InfeasibleError
from autoplan.files import cache_folder, code_hash, write_whole
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis, AxisType, I, Layout, P, R, shard
from autoplan.ops.strategies import AxisChoice, Strategy
from autoplan.program.problem import Option, ValueKey
from autoplan.search.intra import IntraSolution
from autoplan.search.layout_store import ById
from autoplan.search.linear import has_highs
from autoplan.versions import __version__

MOST_BYTES = 64 * 2**20  # of all files; then those that were not used for the longest are removed, down to half
_CODE = ("config", "cost_models", "ir", "ops", "program", "schedules", "search", "profiles/kernels", "profiles/links")
_CODE_FILES = ("units.py", "torch_kernels.py")
_PLAIN = (bool, int, float, str, type(None))

SolvedLayout = tuple[tuple[Axis, ...], IntraSolution]


def folder_of_layouts() -> Path:
    """Return the folder of layouts of this user."""
    return cache_folder("layouts")


class LayoutFiles:
    """The layouts in a folder.

    Args:
        folder: None: nothing is read or written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._texts: dict[ById, Any] = {}
        self._trimmed = False

    def get(self, prices: object, number: int, solve: Callable[[], SolvedLayout]) -> SolvedLayout:
        """Return the axes and the layout that `solve` returns, from the folder if it has them.

        Args:
            prices: everything that the problem depends on, but for the number of micro-batches.
            number: micro-batches per step.

        Raises: what `solve` raises; InfeasibleError is kept, too.
        """
        if self.folder is None:
            return solve()
        name = hashlib.sha256(json.dumps([*_versions(), self._plain(prices), number]).encode()).hexdigest()
        kept = self._read(name)
        if kept is None:
            try:
                found = solve()
            except InfeasibleError as error:
                self._write(name, {"infeasible": str(error)})
                raise
            if found[1].status == "optimal":
                self._write(name, layout_data(*found))
            return found
        if "infeasible" in kept:
            raise InfeasibleError(kept["infeasible"])
        return layout_of(kept)

    def _plain(self, value: object) -> Any:
        """Return the content of a key as JSON: of a graph its hash. Raises TypeError for what has no content."""
        if isinstance(value, ById):
            if value not in self._texts:
                held = value.held
                self._texts[value] = held.content_hash if isinstance(held, ModelGraph) else self._plain(held)
            return self._texts[value]
        if isinstance(value, Enum):
            return [type(value).__name__, value.name]
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, tuple | list):
            return [self._plain(each) for each in value]
        if isinstance(value, frozenset | set):
            return sorted(json.dumps(self._plain(each)) for each in value)
        if isinstance(value, Mapping):
            return sorted(json.dumps([self._plain(k), self._plain(v)]) for k, v in value.items())
        if is_dataclass(value):
            return [type(value).__name__, *(self._plain(getattr(value, f.name)) for f in fields(value))]
        raise TypeError(f"{type(value).__name__} has no content that can be hashed")

    # -- files ------------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return what a file holds; None if there is none, or none that is whole."""
        assert self.folder is not None
        path = self.folder / name
        try:
            digest, _, text = path.read_text(encoding="ascii").partition("\n")
        except (OSError, UnicodeError):
            return None
        if digest != _digest(name, text):
            return None
        with suppress(OSError):  # of another user
            os.utime(path)
        found: dict[str, Any] = json.loads(text)
        return found

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        assert self.folder is not None
        text = json.dumps(data, separators=(",", ":"))
        with suppress(OSError):  # see the module: a search needs no folder
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._trimmed:
                self._trimmed = True
                _trim(self.folder)
            write_whole(self.folder / name, f"{_digest(name, text)}\n{text}")


def _digest(name: str, text: str) -> str:
    return hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()


def _trim(folder: Path) -> None:
    """Remove the files that were not used for the longest, if all together are too large. Raises OSError."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process renames or removes files meanwhile
                found.append((entry.stat(), entry.path))
    left = sum(stat.st_size for stat, _ in found)
    if left <= MOST_BYTES:
        return
    for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
        if left <= MOST_BYTES / 2:
            return
        Path(path).unlink(missing_ok=True)
        left -= stat.st_size


@cache
def _versions() -> tuple[str, ...]:
    solver = "highspy" if has_highs() else "pulp"
    return __version__, code_hash(*_CODE, *_CODE_FILES), solver, importlib.metadata.version(solver)


# -- JSON of a layout --------------------------------------------------------------------------------------------------


def layout_data(axes: tuple[Axis, ...], solution: IntraSolution) -> dict[str, Any]:
    """Return a solution as JSON. Numbers are read back bit by bit."""
    numbers = {f.name: getattr(solution, f.name) for f in fields(solution) if f.name != "selection"}
    selection = {choice: _option_data(option) for choice, option in solution.selection.items()}
    return {**numbers, "axes": [[axis.name, axis.size] for axis in axes], "selection": selection}


def layout_of(data: dict[str, Any]) -> SolvedLayout:
    """Return a solution from JSON."""
    axes = tuple(Axis(name, size) for name, size in data["axes"])
    numbers = {name: value for name, value in data.items() if name not in ("axes", "selection")}
    selection = {choice: _option(option) for choice, option in data["selection"].items()}
    return axes, IntraSolution(**{**numbers, "restrictions": tuple(data["restrictions"])}, selection=selection)


def _option_data(option: Option) -> list[Any]:
    values = ([[*key, _text(layout)] for key, layout in pairs] for pairs in (option.requires, option.provides))
    s = option.strategy
    strategy = s and [
        s.name,
        [_text(layout) for layout in s.inputs],
        [_text(layout) for layout in s.outputs],
        [[c.name, _text(c.inputs), _text(c.outputs), c.factor, c.special] for c in s.choices],
        s.num_shards,
    ]
    return [option.name, *values, option.cost_s, option.once_s, option.state_bytes, option.num_sends, strategy]


def _option(data: list[Any]) -> Option:
    name, requires, provides, cost_s, once_s, state_bytes, num_sends, strategy = data
    way = None if strategy is None else _way(*strategy)
    wanted, given = _values(requires), _values(provides)
    return Option(name, wanted, given, cost_s, state_bytes, way, once_s=once_s, num_sends=num_sends)


def _values(data: Iterable[tuple[str, str, str]]) -> tuple[tuple[ValueKey, Layout], ...]:
    return tuple(((block, value), _layout(text)) for block, value, text in data)


def _way(name: str, inputs: list[str], outputs: list[str], choices: list[list[Any]], num_shards: int) -> Strategy:
    each = (AxisChoice(n, _layout(given), _layout(made), factor, form) for n, given, made, factor, form in choices)
    return Strategy(name, tuple(map(_layout, inputs)), tuple(map(_layout, outputs)), tuple(each), num_shards)


def _text(types: tuple[AxisType, ...]) -> str:
    return " ".join(f"S{t.dim}.{t.factor}" if t.is_shard else t.kind_name for t in types)


@lru_cache(maxsize=4096)
def _layout(text: str) -> tuple[AxisType, ...]:
    """Return types as they were written; R, I and P are the objects that others compare by identity."""
    return tuple(map(_axis_type, text.split()))


def _axis_type(text: str) -> AxisType:
    plain = {"R": R, "I": I, "P": P}.get(text)
    return plain or shard(*map(int, text[1:].split(".")))
