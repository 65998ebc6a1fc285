"""Whether a model fits on a cluster, and what would make it fit.

    found = fit(PlanRequest(graph, Cluster.parse("rtx4090-24gb"), 4096, 8))
    found.fits, found.asked.planned, found.ways

Every way is tried by a search of its own: other sequences, recompute, the host's memory, adapters, more devices. A way
that does not fit says how much its closest plan needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.adapters import ALL_LINEAR, Adapters, read_adapters
from autoplan.cost_models.hardware.catalog import entries, entry
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError, InfeasibleError, PinError
from autoplan.program.adapters import in_4_bits, with_adapters
from autoplan.program.autocast import without_autocast
from autoplan.search.best_use import Use, best_use
from autoplan.search.certificate import Status
from autoplan.search.infeasible import InfeasibleReport
from autoplan.search.planner import Certificate, Planned, PlanRequest, StoppedError, estimate_config, search_plan
from autoplan.search.request import least_memory_first, offloaded, space_of, without_activations

WAY_S = 10.0  # seconds for one way
_RANK = 16  # of adapters that are tried
_MOST_SHORTER, _MOST_LARGER = 5, 6  # halvings of the sequence, doublings of the devices
_NUM_CLOSEST = 4  # candidates that are priced to show what the closest plan needs


@dataclass(frozen=True)
class Way:
    """One way to train the model, and the best plan with it.

    Attributes:
        name: what is different, in a few words; empty for what was asked.
        status: "fits", "does not fit", "illegal", or "stopped": no plan was found in time, so one may fit.
        shortage: what the closest plan needs, if it does not fit.
    """

    name: str
    request: PlanRequest
    status: str
    planned: Planned | None = None
    certificate: Certificate | None = None
    shortage: InfeasibleReport | None = None
    reason: str = ""

    @property
    def interrupted(self) -> bool:
        """Return True if Ctrl-C ended the search of this way."""
        return self.certificate is not None and self.certificate.status == Status.INTERRUPTED


@dataclass(frozen=True)
class Fit:
    """Whether a model fits, and ways to make it fit.

    Attributes:
        asked: the task as it was asked: every plan of the space may be used. Its request leaves nodes idle where `plan`
            would (`autoplan.search.best_use`).
        closest: if nothing fits, a plan with as little memory as was found, with its terms; else None.
        ways: ways that were tried, in the order of what they change.
        interrupted: True if Ctrl-C ended it, so that some ways are missing.
    """

    asked: Way
    ways: tuple[Way, ...]
    closest: Planned | None = None
    interrupted: bool = False

    @property
    def fits(self) -> bool | None:
        """True, False, or None if that was not decided in time."""
        return {"fits": True, "does not fit": False}.get(self.asked.status)


def fit(
    request: PlanRequest,
    *,
    ways: bool = True,
    seconds: float = WAY_S,
    told: Callable[[str], None] = lambda what: None,
) -> Fit:
    """Return whether a model fits, and which ways there are.

    Args:
        ways: False: only yes or no.
        seconds: time limit of one search; of the first that of the request, if it is longer.
        told: called before each search.

    Raises: PinError if the task is illegal.

    Example:
        >>> from autoplan import Cluster, PlanRequest, fit, load_model
        >>> found = fit(PlanRequest(load_model("gpt2"), Cluster.parse("1xh100"), 1024, 4), ways=False)
        >>> found.fits, found.asked.planned.config.dp
        (True, 1)
    """
    told("what was asked")
    asked = _tried("", replace(request, time_limit_s=max(seconds, request.time_limit_s)), best_use)
    if asked.status == "illegal":
        raise PinError(asked.reason)
    found: list[Way] = []
    interrupted = asked.interrupted
    try:
        _try_ways(asked.request, found, seconds, told, ways and not interrupted)
    except KeyboardInterrupt:
        interrupted = True
    closest = None if asked.status == "fits" else _closest(request)
    return Fit(asked, tuple(found), closest, interrupted)


def _try_ways(request: PlanRequest, found: list[Way], seconds: float, told: Callable[[str], None], ways: bool) -> None:
    """Try all ways, and add them to `found`."""
    for maker in (_of_plan, _shorter, _of_adapters, _more_devices) if ways else ():
        mine: list[Way] = []
        for name, made in maker(request):
            told(name)
            way = _tried(name, replace(made, time_limit_s=seconds, patient=False))
            if way.interrupted:
                raise KeyboardInterrupt
            mine += [way] if way.status != "illegal" else []
            if way.status == "fits" and maker in _ONE_OF:
                break
        found += mine[-1:] if maker in _ONE_OF else mine


def _as_asked(request: PlanRequest) -> Use:
    result = search_plan(request)
    return Use(result.request, result)


def _tried(name: str, request: PlanRequest, use: Callable[[PlanRequest], Use] = _as_asked) -> Way:
    """Return what a search says. `use`: finds the plans and the request that they answer."""
    try:
        found = use(replace(request, top=1, patient=False))
    except StoppedError as error:
        return Way(name, request, "stopped", reason=str(error))
    except InfeasibleError as error:
        return Way(name, request, "does not fit", shortage=getattr(error, "report", None), reason=str(error))
    except AutoplanError as error:
        return Way(name, request, "illegal", reason=str(error))
    return Way(name, found.request, "fits", found.result.plans[0], found.result.certificate)


_Ways = Iterator[tuple[str, PlanRequest]]


def _of_plan(r: PlanRequest) -> _Ways:
    """Yield what a plan can do about memory, one thing at a time."""
    kept: dict[str, Mapping[str, Any]] = {
        "nothing recomputed, nothing on the host": {"recompute": "none", "offload": "none"},
        "all layers recomputed, nothing on the host": {"recompute": "full", "offload": "none"},
    }
    if r.cluster.offloads:
        kept |= {
            "optimizer state on the host": {"offload": "optimizer"},
            "parameters and optimizer state on the host": {"offload": "parameters"},
            "activations and optimizer state on the host": {"offload": "activations+optimizer"},
        }
    for name, pins in kept.items():
        if not set(pins) & set(r.pins):
            yield name, replace(r, pins={**r.pins, **pins})


def _shorter(r: PlanRequest) -> _Ways:
    """Yield shorter sequences, and as many more of them that a step has as many tokens."""
    for k in range(1, _MOST_SHORTER + 1):
        if r.seq_len % 2**k or r.target_len is not None:
            return
        length = r.seq_len // 2**k
        changed = replace(r, seq_len=length, global_batch_size=r.global_batch_size * 2**k)
        yield f"sequences of {length:,} tokens, {changed.global_batch_size:,} of them", changed


def _of_adapters(r: PlanRequest) -> _Ways:
    """Yield LoRA and QLoRA; for a model with adapters its frozen weights in 4 bits, if they are not."""
    model = without_autocast(r.graph)  # each request casts for itself
    if r.adapters is not None:
        there = read_adapters(r.adapters)
        if not there.packed:
            packed = replace(there, packed=True)
            yield f"adapters {packed}", replace(r, graph=in_4_bits(model, there), adapters=str(packed))
        return
    lora = Adapters(_RANK)
    try:
        graph = with_adapters(model, lora)
    except PinError:  # the model calls its layers by other names
        lora = Adapters(_RANK, (ALL_LINEAR,))
        try:
            graph = with_adapters(model, lora)
        except PinError:
            return  # it has no linear layers
    yield f"adapters {lora}", replace(r, graph=graph, adapters=str(lora))
    packed = Adapters(_RANK, (ALL_LINEAR,), packed=True)
    yield f"adapters {packed}", replace(r, graph=with_adapters(model, packed), adapters=str(packed))


def _more_devices(r: PlanRequest) -> _Ways:
    """Yield larger clusters: a node is filled first, then there are more. A batch has a sequence for every device."""
    if r.cluster.fabric is not None or r.cluster.device_type == "cpu":
        return
    asked = r.global_batch_size
    for _ in range(_MOST_LARGER):
        cluster = larger(r.cluster)
        batch = max(r.global_batch_size, cluster.num_devices)
        more = f", {batch:,} sequences" if batch != asked else ""
        r = replace(r, cluster=cluster, global_batch_size=batch)
        yield f"{cluster.num_devices} devices ({cluster}){more}", r


def larger(cluster: Cluster) -> Cluster:
    """Return the cluster with twice the devices: in the node up to its usual number, else in more nodes."""
    usual = entry(cluster.device.name).devices_per_node if cluster.device.name in entries() else 1
    if cluster.num_nodes == 1 and 2 * cluster.devices_per_node <= usual:
        return cluster.with_(devices_per_node=2 * cluster.devices_per_node)
    return cluster.with_(nodes=2 * cluster.num_nodes)


# Ways of which each has more of the same: the first that fits says what is needed, the last that nothing of it helps
_ONE_OF = (_shorter, _more_devices)


def _closest(request: PlanRequest) -> Planned | None:
    """Return a plan with little memory and everything recomputed, whether it fits or not."""
    least = sorted(space_of(request).candidates, key=least_memory_first)[:_NUM_CLOSEST]
    found: list[Planned] = []
    on_host = (without_activations(each) for c in least for each in offloaded(request, c))
    for candidate in dict.fromkeys((*least, *on_host)):
        how = {} if "recompute" in request.pins else {"recompute": "full"}
        try:
            found.append(estimate_config(request, candidate.but(**how)))
        except AutoplanError:
            continue  # no layout at this tp
    return min(found, key=lambda p: p.estimate.peak_memory_bytes.mid, default=None)
