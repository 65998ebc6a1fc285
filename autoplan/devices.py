"""Where a rank runs: which of the GPUs it sees, or the CPU; decided here for the door and for the profiler.

`pick` is a plain function of what one process sees (`Sight`). The ranks then tell one another what they picked through
the key-value store, before any group of theirs exists (`settle`), so that all of them go on or all raise the same
DeviceError: a rank that fails alone would leave the others waiting in the first collective.

In which order a GPU is picked: `device="cuda:1"`, the device that the process group was bound to (`device_id=`), the
device that the model is on, what the process called `torch.cuda.set_device` with, this rank's number on its host.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.errors import DeviceError
from autoplan.runtime import private
from autoplan.runtime.agree import agreed, listed, ranks_text
from autoplan.runtime.failure import exchange, give_back_at_exit, init_process_group, timeout_of, watch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # of the group that is made here, by the types that programs run on
# A rank's number on its host: torchrun, Slurm, Open MPI, MPICH and Intel MPI.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# How many ranks there are on this host.
LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_KEY = "autoplan/device"


@dataclass(frozen=True)
class Sight:
    """What one process sees.

    Attributes:
        num_gpus: visible to it. current: its current CUDA device, 0 unless somebody set it.
        bound: the device that the process group was made with (`device_id=`). model: what all of the model is on.
        backends: of the process group by device type; empty without one.
        environment: variables.
    """

    num_gpus: int = 0
    current: int = 0
    bound: torch.device | None = None
    model: torch.device | None = None
    backends: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None

    def number(self, names: Sequence[str]) -> tuple[str, int] | None:
        """The first of these variables that is set, and its value. DeviceError where it is no number."""
        for name in names:
            text = (self.environment or {}).get(name, "")
            if text:
                if not text.isdigit():
                    raise DeviceError(f"{name}={text!r} is not a number")
                return name, int(text)
        return None

    @property
    def shown(self) -> str:
        """How many GPUs the process sees, and what hides others."""
        hidden = (self.environment or {}).get(VISIBLE)
        text = "no GPU" if not self.num_gpus else f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"
        return f"the process sees {text}" + ("" if hidden is None else f" ({VISIBLE}={hidden!r})")


def sight(model: nn.Module | None = None) -> Sight:
    """What this process sees."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    started = dist.is_initialized()
    return Sight(
        num_gpus,
        # set_device starts CUDA; where nobody did, nobody chose, and a program on the CPU leaves it alone
        torch.cuda.current_device() if num_gpus and torch.cuda.is_initialized() else 0,  # type: ignore[no-untyped-call]
        private.bound_device() if started else None,
        None if model is None else device_of(model),
        backends_of(dist.get_backend_config()) if started else None,
        dict(os.environ),
    )


def backends_of(config: str) -> dict[str, str]:
    """Backend by device type, of what `torch.distributed.get_backend_config` returns ("cpu:gloo,cuda:nccl")."""
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device: backend for device, _, backend in pairs}


def device_of(model: nn.Module) -> torch.device | None:
    """The accelerator that the parameters of a model are on, None if that is the host. DeviceError for several."""
    found = {p.device: name for name, p in reversed(list(model.named_parameters()))}
    away = {device: name for device, name in found.items() if device.type not in ("cpu", "meta")}
    if not away:
        return None
    if len(found) > 1:
        each = ", ".join(f"{name!r} on {device}" for device, name in sorted(found.items(), key=str))
        raise DeviceError(f"the model is on several devices ({each}); move it to one, or leave it on the CPU")
    return next(iter(away))


def read(requested: torch.device | str | None) -> torch.device | None:
    """What `device=` asks for. DeviceError for what is no device that programs run on."""
    if requested is None:
        return None
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as exc:
        raise DeviceError(f"device={requested!r} is no device: use 'cpu', 'cuda' or 'cuda:1'") from exc
    if device.type not in BACKENDS:
        raise DeviceError(f"device={str(device)!r}: programs run on the CPU or on CUDA; use 'cpu', 'cuda' or 'cuda:1'")
    return device


def device_kind(requested: torch.device | None, seen: Sight) -> str:
    """'cpu' or 'cuda' for a cluster that does not say it ('local'): what is asked for, what the model is on, what the
    process group serves, else CUDA where a GPU is visible. A group made for gloo alone means the CPU."""
    if requested is not None:
        return requested.type
    if seen.model is not None:
        return read(seen.model).type  # type: ignore[union-attr]  # it is not None
    if seen.backends is not None and seen.backends.get("cuda") in (None, "gloo", "mpi", "fake"):
        return "cpu"
    return "cuda" if seen.num_gpus else "cpu"


def pick(requested: torch.device | None, kind: str, seen: Sight) -> torch.device:
    """The device of this rank.

    Args:
        requested: by the user. kind: the device type of the cluster.

    Raises: DeviceError: naming what was given, what this rank sees, and what works.
    """
    if requested is not None and requested.type != kind:
        raise DeviceError(
            f"device={str(requested)!r}, but the cluster has {kind} devices; leave device= out, or pass cluster='local'"
        )
    if seen.backends is not None and kind not in seen.backends:
        serves = ", ".join(f"{b} for {d}" for d, b in seen.backends.items())
        mend = "device='cpu'" if "cpu" in seen.backends else "device='cuda'"
        raise DeviceError(
            f"the process group has no backend for {kind} tensors (it has {serves}); pass {mend}, or make the group "
            "with init_process_group('cpu:gloo,cuda:nccl')"
        )
    if kind == "cpu":
        return torch.device("cpu")
    index = _index(requested, seen)
    if index >= seen.num_gpus:
        most = f"'cuda:{seen.num_gpus - 1}'" if seen.num_gpus > 1 else "'cuda:0'"
        raise DeviceError(f"device 'cuda:{index}' is not there: {seen.shown}; the last is {most}")
    return torch.device("cuda", index)


def _index(requested: torch.device | None, seen: Sight) -> int:
    """Which of the visible GPUs."""
    if seen.num_gpus == 0:
        built = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise DeviceError(
            f"the program is to run on CUDA devices, but {seen.shown}{built}; device='cpu' with cluster='local' runs "
            "it on the CPU"
        )
    wanted = None if requested is None else requested.index
    if seen.bound is not None and seen.bound.type == "cuda":
        bound = seen.bound.index or 0
        if wanted not in (None, bound):
            raise DeviceError(
                f"device='cuda:{wanted}', but the process group is bound to cuda:{bound} (device_id=); use that"
            )
        return bound
    if wanted is not None:
        return wanted
    if seen.model is not None and seen.model.type == "cuda":
        return seen.model.index or 0
    if seen.current:
        return seen.current
    local, ranks = seen.number(LOCAL_RANKS), seen.number(LOCAL_WORLDS)
    if local is None or seen.num_gpus == 1:  # of ranks with one visible GPU each, all have number 0
        return seen.current
    if max(local[1], ranks[1] - 1 if ranks is not None else 0) >= seen.num_gpus:
        there = f"{ranks[0]}={ranks[1]}" if ranks is not None else f"{local[0]}={local[1]}"
        raise DeviceError(
            f"{there}, but {seen.shown}: start at most {seen.num_gpus} per host "
            f"(torchrun --nproc-per-node {seen.num_gpus}), give every rank GPUs of its own and call "
            "torch.cuda.set_device, or pass device='cpu' with cluster='local'"
        )
    return local[1]


@dataclass(frozen=True)
class DevicePlace:
    """What a rank tells the others of where it runs.

    Attributes:
        device: as text. gpu: what tells it from every other GPU; "" on the CPU. host: its name.
        backend: of the group for such devices. problem: why there is no device, else "".
    """

    device: str
    gpu: str
    host: str
    backend: str
    problem: str = ""


@dataclass(frozen=True)
class Placement:
    """Where this rank runs, and with whom.

    Attributes:
        on_host, on_device: how many ranks of the job share its host, and its GPU (on the CPU: its host).
    """

    device: torch.device
    on_host: int = 1
    on_device: int = 1


def settle(places: Sequence[DevicePlace], rank: int) -> Placement:
    """What follows from every rank's place. DeviceError, the same on every rank, where they cannot run together."""
    problems = [p.problem or None for p in places]
    if any(problems):
        raise agreed(DeviceError(listed(problems)))
    by_type: dict[str, list[int]] = {}
    by_gpu: dict[str, list[int]] = {}
    for other, place in enumerate(places):
        by_type.setdefault(torch.device(place.device).type, []).append(other)
        by_gpu.setdefault(place.gpu or place.host, []).append(other)
    if len(by_type) > 1:
        each = ", ".join(f"{ranks_text(ranks)} on {kind}" for kind, ranks in sorted(by_type.items()))
        raise agreed(DeviceError(f"the ranks run on different kinds of devices: {each}; pass device='cpu'"))
    for ranks in by_gpu.values():
        first = places[ranks[0]]
        if first.backend == "nccl" and len(ranks) > 1:
            raise agreed(
                DeviceError(
                    f"{ranks_text(ranks)} share {first.device} of host {first.host}, and NCCL takes one rank per GPU: "
                    "start one rank per GPU, pass device='cpu' with cluster='local', or make the group with "
                    "init_process_group('gloo') and pass device='cuda'"
                )
            )
    mine = places[rank]
    return Placement(
        torch.device(mine.device),
        sum(p.host == mine.host for p in places),
        len(by_gpu[mine.gpu or mine.host]),
    )


def start(
    requested: torch.device | str | None, kind: str, timeout_s: float | None, model: nn.Module | None = None
) -> Placement:
    """The device of this rank, made current, and a process group that is watched: the caller's, or one made here (NCCL
    or gloo, by the variables of torchrun; of one rank without them). A collective.

    Raises: DeviceError, the same on every rank; RankFailure if a rank does not come.
    """
    if dist.is_initialized():
        watch(timeout_s)  # and give the groups to come the timeout
        return device_place(requested, kind, timeout_s, model)
    if "RANK" in os.environ:
        store, rank, world = private.rendezvous(timeout_of(timeout_s))
    else:
        store, rank, world = dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # torch's stubs lack it
    placement = _meet(requested, kind, sight(model), store, rank, world, timeout_s)
    # bound to the GPU: the communicator forms now, and those of the mesh are split off it
    init_process_group(
        BACKENDS[kind],
        timeout_s=timeout_s,
        device_id=placement.device if kind == "cuda" else None,
        store=store,
        rank=rank,
        world_size=world,
    )
    give_back_at_exit()
    return placement


def device_place(
    requested: torch.device | str | None, kind: str, timeout_s: float | None = None, model: nn.Module | None = None
) -> Placement:
    """The device of this rank, made current, for the process group that there is. A collective; raises as `start`."""
    store, rank, world = private.default_store(), dist.get_rank(), dist.get_world_size()
    return _meet(requested, kind, sight(model), store, rank, world, timeout_s)


def _meet(
    requested: torch.device | str | None,
    kind: str,
    seen: Sight,
    store: Any,
    rank: int,
    world: int,
    timeout_s: float | None,
) -> Placement:
    host = socket.gethostname()
    backend = (BACKENDS if seen.backends is None else seen.backends).get(kind, "")
    try:
        device = pick(read(requested), kind, seen)
        mine = DevicePlace(str(device), private.gpu_id(device) if kind == "cuda" else "", host, backend)
        if kind == "cuda":
            torch.cuda.set_device(device)
    except DeviceError as error:
        mine = DevicePlace(kind, "", host, backend, str(error))
    places = [mine]
    if world > 1:
        turn = store.add(f"{_KEY}/calls/{rank}", 1)  # every rank's first call meets the first of the others
        timeout = timeout_of(timeout_s).total_seconds()
        texts = exchange(store, rank, world, f"{_KEY}/{turn}", json.dumps(vars(mine)), timeout)
        places = [DevicePlace(**json.loads(text)) for text in texts]
    return settle(places, rank)
