"""What a plan file holds: the answer of `autoplan plan --json` or `estimate --json`, checked, as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.config.choices import CHOICES, PINS, plain_option
from autoplan.errors import PinError

if TYPE_CHECKING:
    from autoplan.search.layouts import PlanRequest

READ_SCHEMA_VERSIONS = (1,)
_NEXT = "use what `autoplan plan ... --json` or `autoplan estimate ... --json` prints"
_NEEDED = ("model", "cluster", "seq_len", "global_batch_size")
# A choice that is given -> choices of the plan that were made for another value of it
_REOPENS: Mapping[str, tuple[str, ...]] = {
    "cluster": ("dp", "zero_replicas"),
    "tp": ("dp", "etp", "zero_replicas", "context_method"),
    "cp": ("dp", "zero_replicas", "context_method"),
    "pp": ("dp", "stages", "recompute", "zero_replicas"),
    "schedule": ("stages", "recompute", "virtual_stages"),
    "virtual_stages": ("stages", "recompute", "schedule"),
    "stages": ("recompute",),
}
_BALANCED = ("dp", "etp", "stages")  # have a good value without being given
_FOLLOWS = ("num_micro_batches",)  # from the batch, dp and the micro-batch


@dataclass(frozen=True)
class WrittenPlan:
    """A plan that was written down, with what it answers.

    Attributes:
        asked: the arguments of the command that wrote it, by name.
        degrees: the plan, by names of ParallelConfig; what follows from the rest is left out.
        made_for: the model, the cluster and the version that the plan was made for.
    """

    path: Path
    asked: Mapping[str, Any]
    degrees: Mapping[str, Any] = field(repr=False)
    made_for: Mapping[str, Any] = field(repr=False)

    def but(self, given: Mapping[str, Any], cluster: str = "") -> dict[str, Any]:
        """Return the degrees with others given; None changes nothing.

        What follows from a degree that is given is left open: dp from the rest of the mesh, the stages from pp.

        Args:
            cluster: the cluster if it may be another one than the plan's, which leaves dp open too.
        """
        if cluster not in ("", self.asked["cluster"]):
            kept = {name: v for name, v in self.degrees.items() if name not in _REOPENS["cluster"]}
            return replace(self, degrees=kept).but(given)
        typed = {name: value for name, value in given.items() if value is not None}
        return {**{n: v for n, v in self.degrees.items() if n not in self._opened(typed)}, **typed}

    def dropped(self, given: Mapping[str, Any]) -> list[str]:
        """Return the choices of the plan that `but` leaves open and that are not their defaults, as `name=value`."""
        typed = {name: value for name, value in given.items() if value is not None}
        default = {record.name: record.default for record in CHOICES}
        lost = {n: self.degrees[n] for n in self._opened(typed) if n not in _BALANCED and n not in typed}
        used = {n: v for n, v in lost.items() if v not in (default[n], None) and (not isinstance(v, tuple) or any(v))}
        return [f"{n}={plain_option(v)}" for n, v in used.items()]

    def _opened(self, typed: Mapping[str, Any]) -> list[str]:
        """Return the choices that were made for another value of a choice that is given."""
        names = {name for cause, opened in _REOPENS.items() if cause in typed for name in opened}
        kept = {"recompute"} if not isinstance(self.degrees.get("recompute"), tuple) else set()
        return [name for name in self.degrees if name in names - kept]


def find_written(text: str) -> WrittenPlan | None:
    """Return the plan file at this path; None if the text is another name of a model.

    Raises: PinError for an answer of a command without a plan, and for a plan file that cannot be read.
    """
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError:
        return None  # as the config.json of a model it is refused by name
    return written_of(data, path) if isinstance(data, Mapping) and _is_ours(data) else None


def read_written(path: Path) -> WrittenPlan:
    """Return the plan file at a path. Raises: PinError that says what is wrong with it."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise PinError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise PinError(f"{path} is not JSON ({error}); {_NEXT}") from None
    return written_of(data, path)


def _is_ours(data: Mapping[str, Any]) -> bool:
    return {"schema", "command"} <= set(data) or {"graph_hash", "config"} <= set(data)


def written_of(data: object, path: Path) -> WrittenPlan:
    """Return the plan file with this contents. Raises: PinError that says what is wrong with it."""
    if not isinstance(data, Mapping) or not _is_ours(data):
        raise PinError(f"{path} is not the answer of a command; {_NEXT}")
    if "graph_hash" in data:
        raise PinError(f"{path} is the plan of an emitted program, which does not hold the task; {_NEXT}")
    if data["schema"] not in READ_SCHEMA_VERSIONS:
        known = ", ".join(map(str, READ_SCHEMA_VERSIONS))
        raise PinError(f"{path}: schema {data['schema']!r} cannot be read by this version, only {known}; plan again")
    if not isinstance(data.get("plan"), Mapping):
        raise PinError(f"{path} holds no plan: it is the answer of {data.get('command')!r}; {_NEXT}")
    if not isinstance(data.get("asked"), Mapping) or not isinstance(data.get("made_for"), Mapping):
        raise PinError(f"{path} does not say what was asked (it was made from Python, or by an older version); {_NEXT}")
    missing = [name for name in _NEEDED if not isinstance(data["asked"].get(name), str)]
    if missing:
        raise PinError(f"{path} does not say the {missing[0]} that was asked; {_NEXT}")
    unknown = sorted(set(data["plan"]) - set(PINS))
    if unknown:
        raise PinError(f"{path}: {unknown[0]!r} is no choice of a plan; known: {', '.join(PINS)}")
    degrees = {name: _tuples(value) for name, value in data["plan"].items() if name not in _FOLLOWS}
    return WrittenPlan(path, data["asked"], degrees, data["made_for"])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def made_for(request: PlanRequest) -> dict[str, Any]:
    """Return by what the model, the cluster and the version of a plan are recognised, as JSON data."""
    from autoplan import __version__

    graph, cluster = request.graph, request.cluster
    return {
        "autoplan": __version__,
        "parameters": graph.num_params,
        "graph": graph.content_hash,
        "cluster": str(cluster),
        "cluster_figures": hashlib.sha256(repr(cluster).encode()).hexdigest(),
    }


def differences(written: WrittenPlan, request: PlanRequest) -> list[str]:
    """Return what of a request is not what a written plan was made for, in words."""
    now, then = made_for(request), written.made_for
    differ = [name for name in now if name in then and now[name] != then[name]]
    return [_DIFFERENCES[name].format(then=then[name], now=now[name]) for name in differ if name in _DIFFERENCES]


_DIFFERENCES: Mapping[str, str] = {
    "autoplan": "it was made by autoplan {then}, this is {now}",
    "parameters": "its model had {then:,} parameters, now {now:,}",
    "graph": "the graph of its model is another one now",
    "cluster": "its cluster was {then}, now {now}",
    "cluster_figures": "the figures of its cluster are other ones now",
}
