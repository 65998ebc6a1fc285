"""The text of a plan: its sections, and their strict reading.

There is one form, whoever writes it: `autoplan plan --json`, `autoplan estimate --json` and `Plan.to_json`.
`autoplan.report.data` lists what every section holds.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.config.choice import choices_of
from autoplan.config.choices import CHOICES, PINS, check_values, plain_option
from autoplan.config.keys import check_names
from autoplan.config.parallel import ParallelConfig, RunOptions
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import PinError
from autoplan.files import json_of
from autoplan.ir.graph import ModelGraph
from autoplan.plans.sections import DOCUMENT, READ_SCHEMA_VERSIONS, SECTIONS
from autoplan.plans.shapes import check_shape
from autoplan.versions import __version__

if TYPE_CHECKING:
    from autoplan.cost_models.hardware.cluster import Cluster
    from autoplan.cost_models.time.estimate import Estimate

NEXT = "use what `autoplan plan ... --json`, `autoplan estimate ... --json` or `Plan.to_json()` writes"


# -- writing -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return quantities, records, mappings and sequences, to any depth, as JSON data."""
    if isinstance(value, Quantity):
        return {"low": value.low, "mid": value.mid, "high": value.high, "evidence": str(value.tag)}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def chosen(record: object, names: str) -> dict[str, Any]:
    """Return some attributes of a record as plain data; `names` with spaces between them."""
    return {name: plain(getattr(record, name)) for name in names.split()}


_ESTIMATE = "step_time_s tokens_per_s tokens_per_s_per_device mfu mfu_causal fits memory_capacity_bytes"
_STAGE = "num_layers num_recomputed in_flight fullest forward_s backward_s memory_bytes"


def estimate_data(e: Estimate, whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an estimate as plain data, without its timeline; `whole` becomes its `run`."""
    return {
        **chosen(e, _ESTIMATE),
        "memory_bytes": [plain(s.memory) for s in e.stages],
        "host_memory_bytes": [plain(s.host_memory) for s in e.stages],
        "host_memory_capacity_bytes": e.host_capacity_bytes if math.isfinite(e.host_capacity_bytes) else None,
        "stages": [chosen(s, _STAGE) for s in e.stages],
        "breakdown_s": plain(e.breakdown),
        "run": whole,
    }


def made_for(graph: ModelGraph, cluster: Cluster, profile: str | None = None) -> dict[str, Any]:
    """Return the facts that identify the model, the cluster and the version of a plan, as JSON data.

    Args:
        profile: name of the measured times that priced it; None: the figures of the cluster.
    """
    model = {"parameters": graph.num_params, "graph": graph.content_hash}
    return {**of_version(), **model, **of_cluster(cluster), "profile": profile}


def of_version() -> dict[str, Any]:
    """Return the part of `made_for` that identifies the version."""
    return {"autoplan": __version__}


def of_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the part of `made_for` that identifies a cluster and its figures."""
    return {"cluster": str(cluster), "cluster_figures": hashlib.sha256(repr(cluster).encode()).hexdigest()}


# -- reading -----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """Return the JSON data of a file. PinError for a file that is missing or is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PinError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise PinError(f"{path} is not JSON ({error}); {NEXT}") from None
    return data_of_text(text, str(path))


def data_of_text(text: str, where: str) -> Any:
    """Return the JSON data of a text. PinError for a text that is not JSON: NaN and Infinity are not.

    Args:
        where: its file, for errors.
    """

    def refused(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json_of(text, refused)
    except ValueError as error:
        raise PinError(f"{where} is not JSON ({error}); {NEXT}") from None


def is_document(data: object) -> bool:
    """Return True for the answer of a command, whether it holds a plan or not."""
    return isinstance(data, Mapping) and {"schema", "command"} <= set(data)


def checked_document(data: object, where: str) -> Mapping[str, Any]:
    """Return a document that holds a plan. PinError names what is wrong with it, with the nearest known name.

    Args:
        where: its file, for errors.
    """
    if not isinstance(data, Mapping) or not is_document(data):
        if isinstance(data, Mapping) and "graph_hash" in data:
            raise PinError(f"{where} is the plan of an older version, which does not hold the task; plan again")
        raise PinError(f"{where} is not the answer of a command; {NEXT}")
    if data["schema"] not in READ_SCHEMA_VERSIONS:
        known = ", ".join(map(str, READ_SCHEMA_VERSIONS))
        raise PinError(f"{where}: schema {data['schema']!r} cannot be read by this version, only {known}; plan again")
    if not isinstance(data.get("plan"), Mapping):
        raise PinError(f"{where} holds no plan: it is the answer of {data.get('command')!r}; {NEXT}")
    data = _in_words(data)
    check_names(data, SECTIONS, where, "section")
    check_names(data["plan"], PINS, f"{where}: plan", "choice")
    check_values(_given(data["plan"]))  # says more of a wrong value than its shape
    check_shape(data, DOCUMENT, where, NEXT)
    _check_batch(data, where)
    if "graph" in data:
        _json_of_graph(data["graph"], where)
    return data


def _in_words(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the words of options that were switches when an older version wrote it."""
    former = [record for record in choices_of(RunOptions) if record.former]
    out = dict(data)
    for section in ("request", "asked"):
        if isinstance(held := data.get(section), Mapping):
            switches = (record for record in former if isinstance(held.get(record.name), bool))
            out[section] = {**held, **{r.name: plain_option(r.value_of(held[r.name])) for r in switches}}
    return out


def _check_batch(data: Mapping[str, Any], where: str) -> None:
    """Raise PinError for a plan whose micro-batches are not the batch of its request: one of the two was changed."""
    plan, batch = data["plan"], data.get("request", {}).get("global_batch_size")
    dp, size, num = (plan.get(name) for name in ("dp", "micro_batch_size", "num_micro_batches"))
    if not all(isinstance(value, int) and value > 0 for value in (batch, dp, size, num)):
        return  # one is not given, or what is wrong with it is said elsewhere
    if dp * size * num != batch:
        fits = f"num_micro_batches={batch // (dp * size)}" if batch % (dp * size) == 0 else "plan again"
        raise PinError(
            f"{where}: its plan has dp={dp}, micro_batch_size={size} and num_micro_batches={num}, which are "
            f"{dp * size * num} sequences; its request has global_batch_size={batch}; nearest: {fits}"
        )


def check_complete(data: Mapping[str, Any], where: str) -> None:
    """Raise PinError for the choices of a plan if some are missing, which would have their defaults."""
    lacking = [c.name for c in CHOICES if c.reported and c.name not in data]
    if lacking:
        raise PinError(f"{where}: its plan lacks {', '.join(lacking)}; {NEXT}")


def config_of_data(data: Mapping[str, Any]) -> ParallelConfig:
    """Return the configuration that `config_data` wrote. PinError for a value that no cluster could make legal."""
    given = _given(data)
    check_values(given)
    if given.get("etp") == given.get("tp", 1):
        given["etp"] = None  # as tp
    return ParallelConfig(**{c.name: given[c.name] for c in CHOICES if c.name in given})


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuples(value) for name, value in data.items()}


def tuples(value: Any) -> Any:
    """Return JSON data with tuples in place of lists."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def estimate_of_data(data: Mapping[str, Any], where: str) -> Estimate:
    """Return the estimate that `estimate_data` wrote, without its timeline. PinError for other data."""
    from autoplan.cost_models.time.estimate import Estimate, StageEstimate  # `autoplan --help` starts without numpy

    try:
        stages = tuple(
            StageEstimate(
                index=i,
                num_layers=stage["num_layers"],
                num_recomputed=stage["num_recomputed"],
                forward_s=_quantity(stage["forward_s"]),
                backward_s=_quantity(stage["backward_s"]),
                in_flight=stage["in_flight"],
                memory=_quantities(memory),
                fullest=stage["fullest"],
                host_memory=_quantities(host),
            )
            for i, (stage, memory, host) in enumerate(
                zip(data["stages"], data["memory_bytes"], data["host_memory_bytes"], strict=True)
            )
        )
        step, host_bytes = _quantity(data["step_time_s"]), data["host_memory_capacity_bytes"]
        return Estimate(
            step_time_s=step,
            breakdown=_quantities(data["breakdown_s"]),
            stages=stages,
            tokens_per_step=float(round(data["tokens_per_s"] * step.mid)),
            host_capacity_bytes=math.inf if host_bytes is None else host_bytes,
            **{n: data[n] for n in ("tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal")},
            memory_capacity_bytes=data["memory_capacity_bytes"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PinError(f"{where}: its estimate cannot be read ({type(error).__name__}: {error}); plan again") from None


def _quantity(data: Mapping[str, Any]) -> Quantity:
    return Quantity(data["low"], data["mid"], data["high"], Tag[data["evidence"].upper()])


def _quantities(data: Mapping[str, Any]) -> dict[str, Quantity]:
    return {name: _quantity(q) for name, q in data.items()}


def what_differs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the entries of `made_for` that have changed, in words."""
    differ = [name for name in now if name in then and now[name] != then[name]]
    return [_DIFFERENCES[name].format(then=then[name], now=now[name]) for name in differ if name in _DIFFERENCES]


_DIFFERENCES: Mapping[str, str] = {
    "autoplan": "it was made by autoplan {then}, this is {now}",
    "parameters": "its model had {then:,} parameters, now {now:,}",
    "graph": "the graph of its model is another one now",
    "cluster": "its cluster was {then}, now {now}",
    "cluster_figures": "the figures of its cluster are other ones now",
    "profile": "it was priced by profile {then}, now by {now} (None: the figures of the cluster)",
}


# -- graphs ------------------------------------------------------------------------------------------------------------


def graph_text(graph: ModelGraph) -> str:
    """Return a graph as one line of text: its JSON text, compressed; equal graphs give equal text."""
    return base64.b64encode(gzip.compress(graph.to_json().encode(), 9, mtime=0)).decode()


def graph_of_text(text: str, content_hash: str, where: str) -> ModelGraph:
    """Return the graph of `graph_text`. PinError if it is damaged or is not the one with this hash."""
    try:
        graph = ModelGraph.from_json(_json_of_graph(text, where))
    except (ValueError, KeyError, TypeError) as error:
        raise PinError(f"{where}: its graph cannot be read ({error}); plan again") from None
    if graph.content_hash != content_hash:
        raise PinError(f"{where}: its graph is not the one that the plan was made for; plan again")
    return graph


def _json_of_graph(text: str, where: str) -> str:
    """Return the JSON text in a text of `graph_text`. PinError if it is damaged: it has a checksum."""
    try:
        return gzip.decompress(base64.b64decode(text, validate=True)).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise PinError(f"{where}: its graph cannot be read ({error}); plan again") from None
