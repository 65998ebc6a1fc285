"""The contents of a plan file: the answer of `autoplan plan --json` or `estimate --json`, checked, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.config.choices import CHOICES, plain_option
from autoplan.errors import PinError
from autoplan.files import json_of
from autoplan.plans.document import NEXT, checked_document, is_document, made_for, read_json, tuples, what_differs

if TYPE_CHECKING:
    from autoplan.exporters.door import ConfigFile
    from autoplan.search.request import PlanRequest

NEEDED = ("model", "cluster", "seq_len", "global_batch_size")
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
FOLLOWS = ("num_micro_batches",)  # from the batch, dp and the micro-batch


@dataclass(frozen=True)
class WrittenPlan:
    """A plan that was written down, with what it answers.

    Attributes:
        asked: the arguments of the command that wrote it, by name.
        degrees: the plan, by names of ParallelConfig; what follows from the rest is left out.
        made_for: the model, the cluster and the version that the plan was made for.
        graph: the graph of its model (autoplan.plans.document), if no name stands for it.
        capture: whether this graph is the module, in words (autoplan.verify).
        config: the input of another framework that it was read from, else None.
        request: what it says of the request, as it was written.
    """

    path: Path
    asked: Mapping[str, Any]
    degrees: Mapping[str, Any] = field(repr=False)
    made_for: Mapping[str, Any] = field(repr=False)
    graph: str | None = field(default=None, repr=False)
    capture: str = ""
    config: ConfigFile | None = field(default=None, repr=False)
    request: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check_taken(self) -> None:
        """Raise PinError if this is the input of a framework that refuses it, naming the nearest that it takes."""
        if self.config is not None and self.config.faults:
            raise PinError(f"{self.path}: {'; '.join(self.config.faults)}")

    def but(self, given: Mapping[str, Any], cluster: str = "") -> dict[str, Any]:
        """Return the degrees with others given; None changes nothing.

        What follows from a degree that is given is left open: dp from the rest of the mesh, the stages from pp.

        Args:
            cluster: the cluster if it may be another one than the plan's, which leaves dp open too.
        """
        if cluster not in ("", self.asked.get("cluster")):
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
        data = json_of(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # as the config.json of a model it is refused by name
    ours = is_document(data) or (isinstance(data, Mapping) and {"graph_hash", "config"} <= set(data))
    return written_of(data, path) if ours else None


def read_written(path: Path) -> WrittenPlan:
    """Return the plan file at a path. Raises: PinError that says what is wrong with it."""
    return written_of(read_json(path), path)


def written_of(data: object, path: Path) -> WrittenPlan:
    """Return the plan file with this contents. Raises: PinError that says what is wrong with it."""
    document = checked_document(data, str(path))
    if "asked" not in document or "made_for" not in document:
        raise PinError(f"{path} does not say what was asked (its degrees were given, not searched); {NEXT}")
    asked: Mapping[str, Any] = document["asked"]
    degrees = {name: tuples(value) for name, value in document["plan"].items() if name not in FOLLOWS}
    request = document.get("request", {})
    graph, capture = document.get("graph"), document.get("program", {}).get("capture", "")
    return WrittenPlan(path, asked, degrees, document["made_for"], graph, capture, request=request)


def differences(written: WrittenPlan, request: PlanRequest) -> list[str]:
    """Return how a request differs from the one that a written plan was made for, in words."""
    return what_differs(written.made_for, request_fingerprint(request))


def request_fingerprint(request: PlanRequest) -> dict[str, Any]:
    """Return the facts that identify the model, the cluster and the version of a plan, as JSON data."""
    return made_for(request.graph, request.cluster, None if request.profile is None else request.profile.name)
