"""The device of a rank: one of the GPUs it sees, or the CPU. The door and the profiler use it.

`pick` is a plain function of what one process sees (`Sight`). The ranks then tell one another their picks through the
key-value store, before any of their groups exists (`settle`), so that all of them go on or all raise the same
DeviceError: a rank that fails alone would leave the others waiting in the first collective.

A GPU is picked by the first of these that is given: `device="cuda:1"`, the device that the process group is bound to
(`device_id=`), the model's device, the argument of `torch.cuda.set_device`, this rank's number on its host.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autoplan.errors import DeviceError
from autoplan.runtime import private
from autoplan.runtime.agree import agreed, listed, ranks_text
from autoplan.runtime.failure import exchange_texts, give_back_at_exit, init_process_group, watch
from autoplan.runtime.timeouts import timeout_of

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # backends of the group that is made here, by device type
# Variables with a rank's number on its host: torchrun, Slurm, Open MPI, MPICH and Intel MPI.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# Variables with the number of ranks on this host.
LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Variables with the number of processes that a launcher started together: Slurm (one srun), Open MPI, MPICH, Intel MPI.
STARTED_TOGETHER = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
VISIBLE = "CUDA_VISIBLE_DEVICES"
_KEY = "autoplan/device"


@dataclass(frozen=True)
class Sight:
    """The devices that one process sees.

    Attributes:
        num_gpus: number of GPUs visible to it.
        current: its current CUDA device, 0 unless it was set.
        bound: the device that the process group was made with (`device_id=`).
        model: the device of all of the model; None for the host.
        backends: backends of the process group by device type; None without a group.
        environment: the environment variables.
    """

    num_gpus: int = 0
    current: int = 0
    bound: torch.device | None = None
    model: torch.device | None = None
    backends: Mapping[str, str] | None = None
    environment: Mapping[str, str] | None = None

    def number(self, names: Sequence[str]) -> tuple[str, int] | None:
        """Return the first of these variables that is set, and its value. Raises DeviceError if it is not a number."""
        for name in names:
            text = (self.environment or {}).get(name, "")
            if text:
                if not text.isdigit():
                    raise DeviceError(f"{name}={text!r} is not a number")
                return name, int(text)
        return None

    @property
    def shown(self) -> str:
        """The number of GPUs that the process sees, and the variable that hides others, in words."""
        hidden = (self.environment or {}).get(VISIBLE)
        text = "no GPU" if not self.num_gpus else f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"
        return f"the process sees {text}" + ("" if hidden is None else f" ({VISIBLE}={hidden!r})")


def sight(model: nn.Module | None = None) -> Sight:
    """Return the devices and settings that this process sees."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    started = dist.is_initialized()
    return Sight(
        num_gpus,
        # set_device starts CUDA; if CUDA has not started, no device was set, and programs on the CPU do not start it
        torch.cuda.current_device() if num_gpus and torch.cuda.is_initialized() else 0,  # type: ignore[no-untyped-call]
        private.bound_device() if started else None,
        None if model is None else device_of(model),
        backends_of(dist.get_backend_config()) if started else None,
        dict(os.environ),
    )


def backends_of(config: str) -> dict[str, str]:
    """Return the backends by device type, from `torch.distributed.get_backend_config()` ("cpu:gloo,cuda:nccl")."""
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device: backend for device, _, backend in pairs}


def device_of(model: nn.Module) -> torch.device | None:
    """Return the accelerator of a model's parameters; None if they are on the host. Raises DeviceError for several."""
    found = {p.device: name for name, p in reversed(list(model.named_parameters()))}
    away = {device: name for device, name in found.items() if device.type not in ("cpu", "meta")}
    if not away:
        return None
    if len(found) > 1:
        each = ", ".join(f"{name!r} on {device}" for device, name in sorted(found.items(), key=str))
        raise DeviceError(f"the model is on several devices ({each}); move it to one, or leave it on the CPU")
    return next(iter(away))


def read(requested: torch.device | str | None) -> torch.device | None:
    """Return the device that `device=` names. Raises DeviceError if programs do not run on such a device."""
    if requested is None:
        return None
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as exc:
        raise DeviceError(f"device={requested!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from exc
    if device.type not in BACKENDS:
        raise DeviceError(f"device={str(device)!r}: programs run on the CPU or on CUDA; use 'cpu', 'cuda' or 'cuda:1'")
    return device


def device_kind(requested: torch.device | None, seen: Sight) -> str:
    """Return 'cpu' or 'cuda' for a cluster that does not say it ('local').

    The first that is known decides: the requested device, the model's device, the devices of the process group, else
    CUDA if a GPU is visible. A group made for gloo alone means the CPU.
    """
    if requested is not None:
        return requested.type
    if seen.model is not None:
        return read(seen.model).type  # type: ignore[union-attr]  # it is not None
    if seen.backends is not None and seen.backends.get("cuda") in (None, "gloo", "mpi", "fake"):
        return "cpu"
    return "cuda" if seen.num_gpus else "cpu"


def pick(requested: torch.device | None, kind: str, seen: Sight) -> torch.device:
    """Return the device of this rank.

    Args:
        requested: the user's choice.
        kind: the device type of the cluster.
        seen: what this process sees.

    Raises:
        DeviceError: names what was given, what this rank sees, and what works.
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
        raise DeviceError(f"device 'cuda:{index}' does not exist: {seen.shown}; the last is {most}")
    return torch.device("cuda", index)


def _index(requested: torch.device | None, seen: Sight) -> int:
    """Return the number of the visible GPU to use."""
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
    if local is None or seen.num_gpus == 1:  # ranks that see one GPU each see it as number 0
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
    """The device that a rank reports to the others.

    Attributes:
        device: as text.
        gpu: identifies the GPU among all others; "" on the CPU.
        host: name of the host.
        backend: backend of the process group for such devices.
        problem: why there is no device, else "".
    """

    device: str
    gpu: str
    host: str
    backend: str
    problem: str = ""


@dataclass(frozen=True)
class Placement:
    """The device of this rank, and how many ranks share it.

    Attributes:
        on_host: number of ranks of the job on its host.
        on_device: number of ranks of the job on its GPU (on the CPU: on its host).
    """

    device: torch.device
    on_host: int = 1
    on_device: int = 1


def settle(places: Sequence[DevicePlace], rank: int) -> Placement:
    """Return the placement of this rank. Raises DeviceError, the same on every rank, if they cannot run together."""
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


def size_of_job(environment: Mapping[str, str]) -> int:
    """Return the number of processes that train together, by the variables of torchrun; 1 without them.

    Raises:
        DeviceError: one of them is missing, or not a number that it can be.
    """
    given = {name: environment[name] for name in _RENDEZVOUS if name in environment}
    missing = [name for name in _RENDEZVOUS if name not in environment]
    lone = "WORLD_SIZE" in given and given["WORLD_SIZE"] != "1" and "RANK" not in given
    if missing and (lone or "RANK" in given):
        known = "RANK" if "RANK" in given else "WORLD_SIZE"
        verb = "is" if len(missing) == 1 else "are"
        raise DeviceError(
            f"{known}={given[known]}, but {', '.join(missing)} {verb} not set: start the "
            f"script with torchrun, which sets all of them, or unset {known} to train by one process"
        )
    if "RANK" not in given:
        return 1
    limits = {"WORLD_SIZE": (1, None), "RANK": (0, "WORLD_SIZE"), "MASTER_PORT": (0, None)}
    numbers: dict[str, int] = {}
    for name, (least, below) in limits.items():
        numbers[name] = int(given[name]) if given[name].isdecimal() else -1
        if numbers[name] < least or (below is not None and numbers[name] >= numbers[below]):
            wanted = f"of at least {least}" + (f" and below {below}={given[below]}" if below is not None else "")
            raise DeviceError(f"{name}={given[name]!r} must be a whole number {wanted}; torchrun sets it")
    return numbers["WORLD_SIZE"]


def start(
    requested: torch.device | str | None, kind: str, timeout_s: float | None, model: nn.Module | None = None
) -> Placement:
    """Pick the device of this rank, make it current, and start or take over the process group. A collective.

    The group is the caller's, or one made here: NCCL or gloo, by the variables of torchrun, or of one rank if there
    are none. It is watched for failures.

    Raises:
        DeviceError: the same on every rank.
        RankFailure: if a rank does not come.
    """
    if dist.is_initialized():
        watch(timeout_s)  # also sets the timeout of later groups
        return device_place(requested, kind, timeout_s, model)
    alone = private.Meeting(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]  # torch's stubs lack it
    job = private.rendezvous(timeout_of(timeout_s)) if "RANK" in os.environ else alone
    if job is alone:
        _warn_of_others()
    placement = _meet(requested, kind, sight(model), job, timeout_s)
    # bound to the GPU: the communicator forms here, and the mesh splits its own off it
    init_process_group(
        BACKENDS[kind],
        timeout_s=timeout_s,
        device_id=placement.device if kind == "cuda" else None,
        store=job.store,
        rank=job.rank,
        world_size=job.world,
    )
    give_back_at_exit()
    return placement


def _warn_of_others() -> None:
    """Warn if a launcher started several processes but gave them no RANK: each of them would train by itself."""
    found = Sight(environment=os.environ).number(STARTED_TOGETHER)
    if found is not None and found[1] > 1:
        warnings.warn(
            f"{found[0]}={found[1]}, but RANK is not set: this process trains by itself, and so does each of the "
            "others. To train together start torchrun once per node, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT",
            stacklevel=3,
        )


def device_place(
    requested: torch.device | str | None, kind: str, timeout_s: float | None = None, model: nn.Module | None = None
) -> Placement:
    """Pick this rank's device and make it current, for an existing process group. A collective; raises as `start`."""
    job = private.Meeting(private.default_store(), dist.get_rank(), dist.get_world_size())
    return _meet(requested, kind, sight(model), job, timeout_s)


def _meet(
    requested: torch.device | str | None, kind: str, seen: Sight, job: private.Meeting, timeout_s: float | None
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
    if job.world > 1:
        turn = job.store.add(f"{_KEY}/calls/{job.rank}", 1)  # the first call of every rank meets the others' first
        timeout = timeout_of(timeout_s).total_seconds()
        texts = exchange_texts(*job, f"{_KEY}/{turn}", json.dumps(vars(mine)), timeout)
        places = [DevicePlace(**json.loads(text)) for text in texts]
    return settle(places, job.rank)
