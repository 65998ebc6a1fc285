"""Optimizer state and parameters in the memory of the host (ZeRO-Offload).

`optimizer`: every trained shard of this rank has a copy on the host, which the optimizer gets
(`ParallelModel.parameters`): its moments and its step are on the host. When a step has summed its gradients, they are
moved there; before the next step the optimizer's results are copied back:

| | on the device | on the host |
|---|---|---|
| parameters | what the forward computes with | a copy (of mixed precision the float32 master) |
| gradients | until they are summed and unscaled | from then on, for clipping and the optimizer |
| optimizer | - | moments, step |

A float32 master that no block computes with (mixed precision without shards: `autoplan.runtime.precision.Copies`) gives
up its memory on the device, and its 16-bit copy is read from the host. A master that `fully_shard` gathers from stays.

`parameters`: everything that `fully_shard` shards (ZeRO 1 to 3) lies on the host, by its CPUOffloadPolicy. A shard is
copied to the device before every gather, and a shard of gradients to the host after every reduction. The optimizer
works on both there. Parameters that it does not shard (experts without replicas) are treated as under `optimizer`.

On a CPU "device" and "host" are both its memory. `optimizer` still copies between distinct tensors; torch's policy
finds its shards where they are. Pinned memory, copies beside computation, and collectives of gradients on the host are
for GPUs and were not run on one. There the host waits once per step, for the gradients, and at the end of an
evaluation. Parameters are copied one after the other in the computing stream, and the optimizer changes them next only
after that wait.

Source: Ren et al., ZeRO-Offload, 2021, section 3 (what goes where) and 4.2 (the order of copies). They hide the copies
of gradients behind the backward; here none is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.params import local_of

OPTIMIZER, PARAMETERS = "optimizer", "parameters"
# State that a program may keep on the host, besides activations (`recompute` offloads those, by block). The second kind
# includes the first.
STATE_OFFLOADS = (OPTIMIZER, PARAMETERS)

_HOST = torch.device("cpu")


def check_offload(offload: Iterable[str]) -> tuple[str, ...]:
    """Return `offload` as a tuple. Raises ValueError for an entry that is not in STATE_OFFLOADS."""
    for name in offload:
        if name not in STATE_OFFLOADS:
            raise ValueError(f"offload of {name!r} is not known; use {' or '.join(STATE_OFFLOADS)}")
    return tuple(offload)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, pinned if `x` is on a GPU."""
    out = torch.empty(x.shape, dtype=x.dtype, device=_HOST, pin_memory=x.device.type == "cuda")
    out.copy_(x)
    return out


def like_shard(local: torch.Tensor, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `local` on `device`, laid out over ranks as `shard` is, so that it can be gathered there."""
    local = local.to(device)
    if not isinstance(shard, DTensor):
        return local
    return DTensor.from_local(
        local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


@dataclass
class _Pair:
    device: nn.Parameter
    host: nn.Parameter
    released: bool
    grad: torch.Tensor | None = None  # on the host, made with the first gradient


class HostShards:
    """The trained shards of a rank on the host, beside those on its device.

    Args:
        parameters: this rank's parameters on the device, each once.
        released: ids of parameters that nothing computes with; their memory on the device is freed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], released: Set[int] = frozenset()) -> None:
        self._pairs: dict[int, _Pair] = {}
        for p in parameters:
            host = nn.Parameter(on_host(local_of(p).detach()))
            self._pairs[id(p)] = _Pair(p, host, id(p) in released)
            if id(p) in released:
                local_of(p).untyped_storage().resize_(0)

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return ((pair.device, pair.host) for pair in self._pairs.values())

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the host's part of this rank's shard (a plain tensor), or the parameter itself if not offloaded."""
        pair = self._pairs.get(id(parameter))
        return parameter if pair is None else pair.host

    @property
    def sources(self) -> Mapping[int, torch.Tensor]:
        """Values of parameters whose device memory is freed, keyed by id(parameter)."""
        return {key: pair.host.detach() for key, pair in self._pairs.items() if pair.released}

    def drop_gradients(self) -> None:
        """Drop the gradients of the previous step."""
        for pair in self._pairs.values():
            pair.host.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move all gradients to the host. A parameter without a gradient has none there either."""
        devices = set()
        for pair in self._pairs.values():
            if pair.device.grad is None:
                pair.host.grad = None
                continue
            found = local_of(pair.device.grad).detach()
            if pair.grad is None:
                pair.grad = on_host(found)
            else:
                pair.grad.copy_(found, non_blocking=True)
            pair.host.grad = pair.grad
            devices.add(found.device)
        for device in devices:
            _wait(device)
        for pair in self._pairs.values():
            pair.device.grad = None

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Copy the optimizer's results to the device, except for released parameters."""
        for pair in self._pairs.values():
            if not pair.released:
                local_of(pair.device).copy_(pair.host, non_blocking=True)  # the computing stream waits for it

    def wait_until_given(self) -> None:
        """Wait until the device has read the parameters, which an optimizer may change next.

        After a step nothing is left to wait for: `take_gradients` has waited for what was queued behind the copies.
        """
        for device in {local_of(pair.device).device for pair in self._pairs.values()}:
            _wait(device)

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Set the values of one parameter, on host and device."""
        pair = self._pairs[id(parameter)]
        pair.host.copy_(local)
        if not pair.released:
            local_of(parameter).copy_(local)


def _wait(device: torch.device) -> None:
    """Wait until copies from a device have arrived."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
