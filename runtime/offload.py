"""Optimizer state and parameters in the memory of the host (ZeRO-Offload).

`optimizer`: of every trained shard of this rank a copy lies on the host, and that copy is what the optimizer is given
(`ParallelModel.parameters`): its moments and its step are on the host. When a step has summed its gradients they are
moved there, and before the next one what the optimizer wrote is copied back:

| | on the device | on the host |
|---|---|---|
| parameters | what the forward computes with | a copy (of mixed precision the float32 master) |
| gradients | until they are summed and unscaled | from then on, for clipping and the optimizer |
| optimizer | - | moments, step |

A float32 master that no block computes with (mixed precision without shards: `autoplan.runtime.precision.Copies`) gives
up its memory on the device; its 16-bit copy is read from the host. A master that `fully_shard` gathers from stays.

`parameters`: what `fully_shard` shards (ZeRO 1 to 3) lies on the host altogether, by its CPUOffloadPolicy: a shard is
copied to the device before every gather, a shard of gradients to the host after every reduction; the optimizer works on
both there. What it does not shard (experts without replicas) is as above.

On a CPU "device" and "host" are both its memory. The first form copies between distinct tensors all the same; torch's
policy finds its shards where they are. Pinned memory, copies beside computing, and collectives of gradients that are on
the host are for GPUs and were not run on one. There the host waits once a step, for the gradients; parameters follow
each other in the stream that computes, and what the optimizer changes next it changes behind that wait.

Source: Ren et al., ZeRO-Offload, 2021, section 3 (what goes where) and 4.2 (the order of copies); they hide copies of
gradients behind the backward, here none is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.params import local_of

OPTIMIZER, PARAMETERS = "optimizer", "parameters"
# What a program may keep on the host beside activations (`recompute` says those, by block); the second includes the
# first.
STATE_OFFLOADS = (OPTIMIZER, PARAMETERS)

HOST = torch.device("cpu")


def check_offload(offload: Iterable[str]) -> tuple[str, ...]:
    """The same. ValueError for what is not of OFFLOADS."""
    for name in offload:
        if name not in STATE_OFFLOADS:
            raise ValueError(f"offload of {name!r} is not known; use {' or '.join(STATE_OFFLOADS)}")
    return tuple(offload)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned where a GPU will read it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.device.type == "cuda")
    out.copy_(x)
    return out


def like_shard(local: torch.Tensor, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`local` on `device`, laid out over ranks as `shard` is: what can be gathered there."""
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
    grad: torch.Tensor | None = None  # on the host, made when there is one


class HostShards:
    """The trained shards of a rank on the host, beside those on its device.

    Args:
        parameters: on the device, of this rank; each once.
        released: ids of those that nothing computes with; their memory on the device is given up.
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
        """The host's part of a shard (this rank's, a plain tensor); of what is not here the parameter itself."""
        pair = self._pairs.get(id(parameter))
        return parameter if pair is None else pair.host

    @property
    def sources(self) -> Mapping[int, torch.Tensor]:
        """By id of the parameters that have no memory on the device: their values."""
        return {key: pair.host.detach() for key, pair in self._pairs.items() if pair.released}

    def drop_gradients(self) -> None:
        """Forget those of the step before."""
        for pair in self._pairs.values():
            pair.host.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move all gradients to the host. A parameter without one has none there either."""
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
        """Copy what the optimizer left to the device, but for what is released."""
        for pair in self._pairs.values():
            if not pair.released:
                local_of(pair.device).copy_(pair.host, non_blocking=True)  # the stream that computes waits for it

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Set the values of one, everywhere."""
        pair = self._pairs[id(parameter)]
        pair.host.copy_(local)
        if not pair.released:
            local_of(parameter).copy_(local)


def _wait(device: torch.device) -> None:
    """Until what was copied from a device is there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
