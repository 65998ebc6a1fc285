"""The parameters and buffers of a rank, and the whole states of the model that they are parts of.

Every use of a parameter belongs to a block of a stage. Tied parameters have several uses, and copies of their own where
the uses differ or ZeRO gathers each block by itself. Users see the first copy, and all others follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.offload import HostShards
from autoplan.runtime.params import buffer_owner, local_of, shard_param, unshard
from autoplan.runtime.shards import Shards, trained_as_captured
from autoplan.runtime.spec import BufferSpec, ParamSpec, ProgramSpec
from autoplan.runtime.state import IncompatibleKeys, check_state, gather_updated_buffers, like
from autoplan.runtime.whole import CPU, broadcast_whole, of_shards, own_shard

StoredDtype = Callable[[ParamSpec], torch.dtype]


class ModelState:
    """A rank's part of a model's state.

    Args:
        spec: the program. mesh: its mesh.
        stages: this rank's modules by stage index.
        shards: shows parameters as parts of the whole ones.
        device: where the program runs.
        aliases: further names of tied parameters.
        extra: persistent buffers and other state that the loss does not need, by name.
        buffers: the buffers of the stages as they were given, by name.
        order: names of all parameters in the order of the model, which is that of `places` on every rank.
        dtype: the dtype of floating values, if it is not the captured one.
        stored: returns the dtype in which a parameter is stored.

    Attributes:
        host: copies of the trained shards on the host, if the optimizer's state is offloaded.
        transient: buffers that forwards write to and that are not persistent, so that `state_dict` lacks them, as those
            of modules do; without values.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        mesh: AxisMesh,
        stages: Mapping[int, nn.Module],
        shards: Shards,
        *,
        device: torch.device,
        aliases: Mapping[str, tuple[str, ...]],
        extra: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        order: Iterable[str],
        dtype: torch.dtype | None,
        stored: StoredDtype,
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.stages = stages
        self.device = device
        self.aliases: dict[str, tuple[str, ...]] = dict(aliases)
        self.extra: dict[str, Any] = dict(extra)
        updated = (b.name for stage in spec.stages for b in stage.buffers if b.updated and b.name not in extra)
        self.transient: dict[str, torch.Tensor] = {n: torch.empty_like(buffers[n], device="meta") for n in updated}
        self.dtype = dtype
        self.host: HostShards | None = None
        self._shards, self._stored = shards, stored
        self._owners = self._find_owners({name: i for i, name in enumerate(order)})
        self._pending = [each for each in self._owners if any(mesh.size(axis) > 1 for axis in each[0].reduce_axes)]
        self._copied = len({p.name for p, _ in self._owners}) < len(self._owners)  # a tied parameter has copies here

    def _find_owners(self, position: Mapping[str, int]) -> list[tuple[ParamSpec, nn.Module]]:
        """Return each parameter of this rank once, with its block (blocks, not tensors: ZeRO replaces the tensors).

        They come by their position in the model; blocks have them in the order of their use.
        """
        seen: set[int] = set()
        out: list[tuple[ParamSpec, nn.Module]] = []
        for index in self.stages:
            for p in self.spec.stages[index].params:
                block = self.stages[index].get_submodule(f"blocks.{p.block}")
                parameter = block.get_parameter(p.attr)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    out.append((p, block))
        return sorted(out, key=lambda each: position[each[0].name])

    def places(self) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
        """Yield each parameter object of this rank once, with the spec of its first use."""
        for p, block in self._owners:
            yield p, block._parameters[p.attr]  # type: ignore[misc]  # None only for absent ones

    def trained_otherwise(self) -> str | None:
        """Return the error for a parameter of the program that is frozen, or trained again, since it was made, or None.

        No collective sums the gradient of one that was frozen.
        """
        for p, parameter in self.places():
            if self.held(parameter).requires_grad is not p.trainable:
                return trained_as_captured(p.name, p.trainable)
        return None

    def pending(self) -> list[tuple[nn.Parameter, ParamSpec]]:
        """Return the parameters whose gradients are still parts of sums over ranks after the backward."""
        return [(block._parameters[p.attr], p) for p, block in self._pending]  # type: ignore[misc]  # as in `places`

    @property
    def whole_here(self) -> bool:
        """True if this rank holds the whole model, and no parameter is shown as a part."""
        return self._shards.whole

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates: the parameter itself, or its copy on the host."""
        return parameter if self.host is None else self.host.of(parameter)

    def shown(self, spec: ParamSpec, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of `places` as users see it: as part of the whole one."""
        return self._shards.of(spec, self.held(parameter), parameter)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (original name, this rank's shard as users see it), each name once."""
        for p, parameter in self.first_copies():
            yield p.name, self.shown(p, parameter)

    def first_copies(self) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
        """Yield from `places`, but only the first copy of each tied parameter."""
        seen: set[str] = set()
        for p, parameter in self.places():
            if p.name not in seen:
                seen.add(p.name)
                yield p, parameter

    def follow_first_copies(self) -> None:
        """Give all copies of a tied parameter the values of the first copy, which is the one that users see."""
        if not self._copied:
            return
        first = {p.name: parameter for p, parameter in self.first_copies()}
        with torch.no_grad():
            for p, parameter in self.places():
                source, copy = self.held(first[p.name]), self.held(parameter)
                if copy is not source:
                    local_of(copy).copy_(local_of(source))

    def full_tensors(self, pick: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return what `pick` chooses of every parameter, whole, on the host of every rank (a collective)."""
        mine = self._own_tensors(pick)
        return mine if self.mesh.size("pp") == 1 else self._of_all_stages(mine)

    def _own_tensors(self, pick: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the full tensors of this rank's stages."""
        mine: dict[str, torch.Tensor] = {}
        for p, parameter in self.places():
            tensor = pick(self.held(parameter))
            if tensor is None or (p.name in mine and not p.shards and not isinstance(parameter, DTensor)):
                continue
            local = local_of(tensor).detach()
            if isinstance(parameter, DTensor):
                local = of_shards(local, parameter, self.device)
            full = unshard(local, p, self.mesh, self.device)  # a collective, also for other copies of a tied parameter
            if p.name not in mine:
                mine[p.name] = full.clone() if full.device == tensor.device else full  # never a view of the parameter
        return mine

    def _of_all_stages(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full tensors of all stages; the pipeline rank that holds a stage broadcasts its tensors."""
        out: dict[str, torch.Tensor] = {}
        group = self.mesh.group("pp")
        for index, stage in enumerate(self.spec.stages):
            params = {p.name: p for p in reversed(stage.params) if p.name not in out}
            names = [name for name in dict.fromkeys(p.name for p in stage.params) if name in params]
            present = torch.tensor([name in mine for name in names], dtype=torch.int32, device=self.device)
            source = self._rank_of_stage(index)
            if names:
                dist.broadcast(present, source, group=group)
            for name, there in zip(names, present.tolist(), strict=True):
                if not there:
                    continue
                p = params[name]
                here = index in self.stages
                out[name] = mine[name].contiguous() if here else torch.empty(p.shape, dtype=self._stored(p))
                broadcast_whole(out[name], source, self.device, group)
        return out

    def whole(self, name: str) -> torch.Tensor:
        """Return one parameter or persistent buffer, whole, on the host of every rank (a collective)."""
        home = next((i for i, stage in enumerate(self.spec.stages) for p in stage.params if p.name == name), None)
        if home is None:
            return self._whole_buffer(name)
        p = next(p for p in self.spec.stages[home].params if p.name == name)
        full = torch.empty(p.shape, dtype=self._stored(p))
        if home in self.stages:
            p, parameter = next((p, t) for p, t in self.first_copies() if p.name == name)
            local = local_of(self.held(parameter)).detach()
            if isinstance(parameter, DTensor):
                local = of_shards(local, parameter, self.device)
            full = unshard(local, p, self.mesh, self.device).contiguous()
        if self.mesh.size("pp") > 1:
            full = full.clone() if home in self.stages else full
            broadcast_whole(full, self._rank_of_stage(home), self.device, self.mesh.group("pp"))
        return full

    def _whole_buffer(self, name: str) -> torch.Tensor:
        updated = any(b.updated and b.name == name for stage in self.spec.stages for b in stage.buffers)
        if not updated:
            found: torch.Tensor = self.extra[name].to(CPU)
            return found
        only = {name: self.extra[name]}
        return gather_updated_buffers(self.spec, self.stages, only, self.mesh, self.dtype, self.device)[name]

    def _rank_of_stage(self, index: int) -> int:
        return dist.get_global_rank(self.mesh.group("pp"), self.spec.rank_of(index))

    def state_dict(self) -> dict[str, Any]:
        """Return full parameters and persistent buffers by original name, on the host of every rank (a collective)."""
        out: dict[str, Any] = dict(self.full_tensors(lambda p: p))
        for name, others in self.aliases.items():
            for other in others:
                out[other] = out[name]
        out |= {n: v.to(CPU) if isinstance(v, torch.Tensor) else v for n, v in self.extra.items()}
        return {**out, **gather_updated_buffers(self.spec, self.stages, self.extra, self.mesh, self.dtype, self.device)}

    def transient_buffers(self) -> dict[str, torch.Tensor]:
        """Return the values of `transient`, on the host of every rank (a collective)."""
        return gather_updated_buffers(self.spec, self.stages, self.transient, self.mesh, self.dtype, self.device)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Load full tensors by original name (a collective), as `ParallelModel.load_state_dict` says."""
        keys = check_state(self.spec.model, state, self.shapes(), strict, self.device)
        with torch.no_grad():
            for p, parameter in self.places():
                names = [n for n in (p.name, *self.aliases.get(p.name, ())) if n in state]
                if names:
                    self._load(p, parameter, state[names[-1]])
            for name, old in self.extra.items():
                if name in state:
                    self.extra[name] = like(state[name], old)
            for b, held in self.buffers():
                if b.name in state and b.name in self.extra:
                    held.copy_(like(state[b.name], held))
        return keys

    def buffers(self) -> Iterator[tuple[BufferSpec, torch.Tensor]]:
        """Yield the buffers of this rank's stages with the tensor that the stage computes with."""
        for index, stage in self.stages.items():
            for b in self.spec.stages[index].buffers:
                yield b, getattr(buffer_owner(stage, b), b.attr)

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of everything in `state_dict`, of all stages."""
        out: dict[str, tuple[int, ...] | None] = {}
        for stage in self.spec.stages:
            for p in stage.params:
                out |= dict.fromkeys((p.name, *self.aliases.get(p.name, ())), p.shape)
        for name, value in self.extra.items():
            out[name] = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        return out

    def _load(self, p: ParamSpec, parameter: nn.Parameter, full: torch.Tensor) -> None:
        """Copy this rank's part of a full tensor into a parameter; the part is cut on the full tensor's device."""
        local = shard_param(full.detach().reshape(p.shape), p, self.mesh.size, self.mesh.coordinate)
        if isinstance(parameter, DTensor):
            local = own_shard(local, parameter)
        if self.host is not None and self.held(parameter) is not parameter:
            self.host.load(parameter, local)
        else:
            local_of(parameter).copy_(local)
