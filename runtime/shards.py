"""Parameters as PyTorch users know them: DTensors that say which elements of the whole parameter a rank holds.

The emitted blocks and `fully_shard` compute with plain local shards. `ParallelModel.parameters` returns
`ParameterShard`s over the same memory: DTensors with the shape of the model's own parameter and the true placements, so
that a norm, a `full_tensor` or `torch.distributed.checkpoint` sees the whole parameter.

A dim is an ordered product of factors, and a shard cuts one of them. With the dim as a mixed-radix number, an axis cuts
one digit. The digits before it that are not cut yet make the `split_factor` of a `_StridedShard` (1: a plain `Shard`).
ZeRO cuts one dim of the local shard (`shard_placement.shard_dim`); its axes are the last of the mesh.

Uses that a DTensor cannot express are refused by name (`ForeignUseError`) instead of giving wrong results:

- A pipeline stage holds only some of the parameters. A reduction over its gradients, such as the norm in
  `torch.nn.utils.clip_grad_norm_`, is not the model's.
- A hook on a parameter would never run: the backward of a step passes through the blocks.
- Experts under token dispatch lie on other axes than the other parameters: nothing adds the two up.
- Optimizer states of several stages have equal keys in a checkpoint unless the key names the parameter.

The number in a result (`item`, `float`, `if`, an f-string) is that of the whole tensor on every rank, so that all ranks
ask for it together. DTensor itself (torch 2.13) gives each rank the norm or the sum of its own part.

`pm.optimizer` works on local parts; its `state_dict` shows the moments as shards too (`show_states`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# Private torch API (see private.py): a DTensor over existing memory, without its checks and copies.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Private torch API (see private.py): a dim whose outer factors are not cut.
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_iter, tree_map

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.offload import like_shard
from autoplan.runtime.params import local_of
from autoplan.runtime.spec import ParamSpec


class ForeignUseError(RuntimeError):
    """A use of a shard whose result would hold for this rank's part, not for the model."""


def trained_as_captured(name: str, trained: bool) -> str:
    """Return the error for a parameter that is frozen, or trained again, after the program was made."""
    was, now = ("trained", "freeze") if trained else ("frozen", "train")
    instead = "set its gradient to None after pm.step(), in pm.named_parameters(), or " if trained else ""
    return (
        f"{name} was {was} when the program was made, and the program goes on with that: {instead}{now} it in the "
        "module and call autoplan.parallelize again (pm.save_checkpoint, then load_checkpoint with model_only=True, "
        "keep the values)"
    )


@dataclass(frozen=True)
class Origin:
    """The source of a shard.

    Attributes:
        name: name of the parameter in the model; "" for a result computed from several parameters.
        num_stages: number of pipeline stages; if there are several, the others hold other parameters.
    """

    name: str
    num_stages: int = 1


_INSTEAD = "use pm.grad_norm() and pm.clip_grad_norm_(max_norm), or full_tensor() of a single parameter or gradient"

# Reductions without torch.Tag.reduction (torch 2.13).
_MORE_REDUCTIONS = ("_foreach_norm", "_foreach_max", "dot", "vdot", "linalg_norm")


def _reduces(func: Any) -> bool:
    return torch.Tag.reduction in func.tags or func.overloadpacket.__name__ in _MORE_REDUCTIONS


def _refuse_lost_change(func: Any, args: Any) -> None:
    """Raise ForeignUseError for a change of a copy that stands for a part of a tensor."""
    if func._schema.is_mutable and isinstance(args[0], TensorShard) and args[0].is_copied_part:
        raise ForeignUseError(
            f"{func.overloadpacket.__name__} on a part of {args[0].origin.name or 'a parameter'}, which lies on "
            "several ranks: the part is a copy here, so that the change would be lost; change the whole tensor "
            "(p.grad.mul_(distribute_tensor(mask, p.device_mesh, p.placements)))"
        )


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not func._schema.is_mutable


def _same_memory(a: DTensor, b: DTensor) -> bool:
    return bool(a._local_tensor.untyped_storage()._cdata == b._local_tensor.untyped_storage()._cdata)


class TensorShard(DTensor):
    """A DTensor that knows its origin: a parameter's shard, its gradient, or a result computed from them."""

    origin: Origin
    is_copied_part: bool = False  # a view of a whole tensor that had to be gathered: a change of it would be lost

    @classmethod
    def of(cls, local: torch.Tensor, spec: Any, origin: Origin, requires_grad: bool = False) -> Self:
        """Wrap `local`, whose layout over the ranks is `spec` (a DTensorSpec); the memory is shared."""
        make: Any = cls
        out: Self = make(local, spec, requires_grad=requires_grad)
        out.origin = origin
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, TensorShard)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return cast(TensorShard, given[0].detach()).full_tensor().item()
        origin = given[0].origin
        if any(t.origin != origin for t in given):
            origin = replace(origin, name="")
        if any(t.device_mesh != given[0].device_mesh for t in given):
            raise ForeignUseError(
                f"{func.overloadpacket.__name__} over parameters of experts, which are spread over ranks of their own, "
                f"together with others; {_INSTEAD}"
            )
        if origin.num_stages > 1 and _reduces(func):
            name = func.overloadpacket.__name__
            raise ForeignUseError(
                f"{name} over {origin.name or 'several parameters'}: this rank holds one of {origin.num_stages} "
                f"pipeline stages, so that the result would not be the model's; {_INSTEAD}"
            )
        _refuse_lost_change(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if torch.Tag.inplace in func.tags and isinstance(args[0], torch.Tensor):
            return args[0]

        is_view = _is_view(func) and isinstance(args[0], TensorShard)

        def same_origin(x: Any) -> Any:
            if type(x) is not DTensor:
                return x
            made = TensorShard.of(x._local_tensor, x._spec, origin, x.requires_grad)
            made.is_copied_part = is_view and (args[0].is_copied_part or not _same_memory(made, args[0]))
            return made

        return tree_map(same_origin, out)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor, on every rank of the mesh (a collective).

        Raises:
            ForeignUseError: `grad_placements` for an interleaved cut.
        """
        if not any(isinstance(p, _StridedShard) for p in self.placements):
            return super().full_tensor(grad_placements=grad_placements)
        # torch 2.13 refuses to gather a dim whose inner factor is cut and whose other factors are cut too
        if grad_placements is not None:
            raise ForeignUseError(f"full_tensor(grad_placements=...) of {self.origin.name}, whose cut is interleaved")
        return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def __format__(self, spec: str) -> str:
        """Format a result of one number, as Tensor does; torch refuses it to subclasses."""
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)  # type: ignore[no-untyped-call]

    # -- torch.distributed.checkpoint: a shard of an interleaved dim is several boxes of the whole tensor -------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        self._check_key(fqn)
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.size()),
            )
            for box, _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, at in self._boxes():
            if box.offsets == index.offset:
                return self._local_tensor.detach()[at]
        raise ValueError(f"{self.origin.name}: this rank holds nothing at {index.offset}")

    def _boxes(self) -> Iterator[tuple[ChunkStorageMetadata, tuple[slice, ...]]]:
        """Yield each box of the whole tensor that this rank holds, and its place in the local tensor."""
        runs = [_runs(held) for held in held_indices(self.shape, self.device_mesh, self.placements)]
        for box in product(*runs):
            offsets, sizes = torch.Size(start for start, _, _ in box), torch.Size(size for _, size, _ in box)
            yield ChunkStorageMetadata(offsets, sizes), tuple(slice(at, at + size) for _, size, at in box)

    def _check_key(self, fqn: str) -> None:
        if self.origin.num_stages > 1 and (not self.origin.name or self.origin.name not in fqn):
            raise ForeignUseError(
                f"checkpoint key {fqn!r} does not name the parameter {self.origin.name!r}: other pipeline stages would "
                "write other tensors under the same key; use the names of pm.named_parameters() in the keys"
            )


class _Whole(torch.autograd.Function):
    """The whole tensor of a shard; its gradient, the same on all ranks, is cut in the same way."""

    @staticmethod
    def forward(ctx: Any, shard: TensorShard) -> torch.Tensor:
        ctx.shard = shard
        local, mesh = shard._local_tensor.detach(), shard.device_mesh
        whole = local.new_zeros(shard.shape)
        whole[_grid(shard)] = local
        for axis, placement in enumerate(shard.placements):
            if not isinstance(placement, Replicate):
                dist.all_reduce(whole, group=mesh.get_group(axis))  # the other ranks have zeros there
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        shard: TensorShard = ctx.shard
        return TensorShard.of(grad[_grid(shard)].contiguous(), shard._spec, shard.origin)


def _grid(shard: DTensor) -> tuple[torch.Tensor, ...]:
    held = held_indices(shard.shape, shard.device_mesh, shard.placements)
    return torch.meshgrid(*(h.to(shard._local_tensor.device) for h in held), indexing="ij")


class ParameterShard(TensorShard):
    """A parameter (`source`, which the blocks or the optimizer compute with), shown as part of the whole.

    `grad` shows the gradient of the source in the same way; assigning it assigns the source's gradient.
    """

    source: nn.Parameter

    @staticmethod
    def over(source: nn.Parameter, spec: Any, origin: Origin) -> ParameterShard:
        """Show `source` (plain, or a DTensor over ZeRO's axes) as laid out by `spec`."""
        out = ParameterShard.of(local_of(source.detach()), spec, origin, source.requires_grad)
        out.source = source
        out._is_param = True  # isinstance(out, nn.Parameter), as nn.Parameter itself marks tensors of other types
        if source.requires_grad:
            hook: Any = torch.Tensor.register_post_accumulate_grad_hook
            hook(out, _hand_over)
        return out

    @property
    def data(self) -> TensorShard:
        """The values without a graph, over the same memory. Assigning it assigns the values of the source."""
        slot: Any = torch.Tensor.data
        found: TensorShard = slot.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        local = self._local_of(value, "the new values of {} have", "; pm.load_state_dict takes whole tensors")
        with torch.no_grad():
            local_of(self.source).copy_(local)

    @property
    def requires_grad(self) -> bool:
        """Whether the program trains the parameter, as it did in the capture."""
        slot: Any = torch.Tensor.requires_grad
        return bool(slot.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            raise ForeignUseError(trained_as_captured(self.origin.name, self.requires_grad))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse another `requires_grad` than that of the capture; return self."""
        self.requires_grad = requires_grad
        return self

    def _local_of(self, value: torch.Tensor, says: str, more: str = "") -> torch.Tensor:
        """Return the local part of a tensor that is laid out as this one; else ForeignUseError, which begins `says`."""
        if not isinstance(value, DTensor) or value.shape != self.shape or value.placements != self.placements:
            has = says.format(self.origin.name)
            raise ForeignUseError(f"{has} {_form_of(value)}, and must have {_form_of(self)}{more}")
        return value.to_local()

    def register_hook(self, hook: Any) -> Any:
        """Refuse every hook: a backward of `pm.step` passes through the blocks, not through this tensor.

        Raises:
            ForeignUseError: always.
        """
        raise ForeignUseError(
            f"a hook on {self.origin.name} would never run in pm.step(): the blocks compute with local parts; read or "
            "change .grad after pm.step(), when gradients are complete"
        )

    register_post_accumulate_grad_hook = register_hook

    def refresh(self) -> None:
        """Follow the source if its memory moved: fully_shard pads an uneven shard at its first forward."""
        local = local_of(self.source.detach())
        if local.data_ptr() != self._local_tensor.data_ptr():
            self._local_tensor = local

    @property
    def grad(self) -> TensorShard | None:
        """This rank's part of the gradient of the whole parameter."""
        found = self.source.grad
        return None if found is None else TensorShard.of(local_of(found), self._spec, self.origin)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.source.grad = None
            return
        local = self._local_of(value, "the gradient of {} has")
        self.source.grad = like_shard(local, self.source, local.device)


def _form_of(value: torch.Tensor) -> str:
    """Return the shape of a tensor and how it is laid out, for messages."""
    how = f"placements {value.placements}" if isinstance(value, DTensor) else "no placements (it is no DTensor)"
    return f"shape {tuple(value.shape)} and {how}"


def _hand_over(shard: ParameterShard) -> None:
    """Add the gradient of a user's own backward (a penalty on parameters) to the source's gradient."""
    slot: Any = torch.Tensor.grad
    mine = slot.__get__(shard)
    slot.__set__(shard, None)
    if mine.placements != shard.placements:
        mine = mine.redistribute(placements=shard.placements)
    if shard.grad is None:
        shard.grad = mine
    else:
        local_of(shard.source.grad).add_(mine.to_local())  # type: ignore[arg-type]  # there is one


_SAME_PLAN = (
    "pm.optimizer takes what pm.optimizer.state_dict() gave under the same plan; pm.save_checkpoint and "
    "pm.load_checkpoint go from one plan to another"
)


def show_states(optimizer: torch.optim.Optimizer, shown: Sequence[tuple[torch.Tensor, nn.Parameter]]) -> None:
    """Let `optimizer.state_dict()` hold shards of the whole moments, and `load_state_dict` accept them.

    Args:
        optimizer: an optimizer over local parts.
        shown: pairs of an optimizer's parameter and the parameter that is shown for it (`Shards.of`).
    """
    by_id = {id(local): whole for local, whole in shown if isinstance(whole, ParameterShard)}

    def show(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        params = _parameters(optimizer)
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        out = dict(state["state"])
        for number, local in zip(numbers, params, strict=True):
            whole = by_id.get(id(local))
            if whole is not None and number in out:
                out[number] = {
                    key: TensorShard.of(value, retyped(whole._spec, value.dtype), whole.origin)
                    if isinstance(value, torch.Tensor) and value.shape == local.shape and value.dim()
                    else value
                    for key, value in out[number].items()
                }
        return {**state, "state": out}

    def hide(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        params = _parameters(optimizer)
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        if len(numbers) != len(params):
            raise ForeignUseError(
                f"the state of the optimizer has {len(numbers)} parameters, and this rank {len(params)}: {_SAME_PLAN}"
            )
        of_number = dict(zip(numbers, params, strict=True))
        local = {
            number: {key: _own_part(key, value, of_number.get(number), by_id) for key, value in values.items()}
            for number, values in state["state"].items()
        }
        return {**state, "state": local}

    optimizer.register_state_dict_post_hook(show)
    optimizer.register_load_state_dict_pre_hook(hide)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _own_part(key: str, value: Any, local: torch.Tensor | None, by_id: Mapping[int, ParameterShard]) -> Any:
    """Return this rank's part of what the state of an optimizer holds for the parameter `local`.

    Raises:
        ForeignUseError: it is of another parameter, or laid out otherwise; torch itself would take it.
    """
    whole = by_id.get(id(local))
    if whole is None or local is None or not isinstance(value, torch.Tensor) or not value.dim():
        return local_of(value) if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        name = value.origin.name if isinstance(value, TensorShard) else whole.origin.name
        fits = name == whole.origin.name and value.shape == whole.shape and value.placements == whole.placements
    else:  # what has another shape than the parameter is this rank's own
        fits = value.shape == local.shape or value.shape != whole.shape
    if not fits:
        raise ForeignUseError(
            f"the state of the optimizer has for {whole.origin.name} {key} of {_form_of(value)}, and the program "
            f"{_form_of(whole)}: {_SAME_PLAN}"
        )
    return local_of(value)


def retyped(layout: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the same layout for a tensor of another dtype."""
    meta = cast(TensorMeta, layout.tensor_meta)
    return DTensorSpec(layout.mesh, layout.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def held_indices(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[torch.Tensor]:
    """Return, per dim of a tensor of `shape`, the indices that this rank holds, in the order of its local tensor."""
    held = [torch.arange(size) for size in shape]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of {mesh}")
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim, num = placement.dim, mesh.size(axis)  # type: ignore[attr-defined]  # all others are shards
        outer = getattr(placement, "split_factor", 1)
        here = held[dim]
        if outer == 1:
            parts = here.chunk(num)
            held[dim] = parts[coordinate[axis]] if coordinate[axis] < len(parts) else here[:0]
        else:
            held[dim] = here.reshape(outer, num, -1)[:, coordinate[axis]].reshape(-1)
    return held


def _runs(held: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the contiguous runs of indices: (first index, length, where the run begins in `held`)."""
    if not held.numel():
        return []
    breaks = (held[1:] - held[:-1] != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), held.numel()]
    return [(int(held[a]), b - a, a) for a, b in zip(starts, ends, strict=True)]


def placements_of(spec: ParamSpec, mesh: AxisMesh, axes: Sequence[str]) -> list[Placement]:
    """Return how the atomic sub-axes `axes` of a mesh, in that order, split a parameter (without ZeRO)."""
    cuts: dict[tuple[int, int], list[str]] = {}
    for s in spec.shards:  # major to minor
        cuts.setdefault((s.dim, s.position), []).extend(mesh.atoms(s.axis))
    digits: list[list[tuple[str, int]]] = []  # per dim, major to minor: (axis or "", size)
    for dim, factors in enumerate(spec.factor_shape):
        mine: list[tuple[str, int]] = []
        for position, size in enumerate(factors):
            atoms = cuts.get((dim, position), [])
            mine += [(a, mesh.size(a)) for a in atoms]
            mine.append(("", size // math.prod(mesh.size(a) for a in atoms)))
        digits.append(mine)
    out: list[Placement] = []
    for axis in axes:
        cut = [i for i, mine in enumerate(digits) if any(a == axis for a, _ in mine)]
        if not cut:
            out.append(Replicate())
            continue
        (dim,) = cut
        at = next(i for i, (a, _) in enumerate(digits[dim]) if a == axis)
        outer = math.prod(size for _, size in digits[dim][:at])
        del digits[dim][at]
        out.append(Shard(dim) if outer == 1 else _StridedShard(dim, split_factor=outer))
    return out


class Shards:
    """Shows a rank's parameters as `ParameterShard`s, or unchanged if the program splits none.

    Args:
        mesh: the mesh of the program.
        params: every ParamSpec of the program, of all stages.
        split: True if ZeRO shards parameters.
    """

    def __init__(self, mesh: AxisMesh, params: Sequence[ParamSpec], split: bool) -> None:
        self._mesh = mesh
        self._num_stages = mesh.size("pp")
        cut = any(mesh.size(s.axis) > 1 for p in params for s in p.shards)
        self.whole: bool = self._num_stages == 1 and not cut and not split
        self._shown: dict[int, ParameterShard] = {}

    def of(self, spec: ParamSpec, source: nn.Parameter, sharded: nn.Parameter) -> nn.Parameter:
        """Return the parameter shown for `source`; `sharded`: the same on its device, a DTensor if ZeRO shards it."""
        if self.whole:
            return source
        found = self._shown.get(id(source))
        if found is None:
            found = self._shown[id(source)] = self._show(spec, source, sharded)
        found.refresh()
        return cast(nn.Parameter, found)  # isinstance says so

    def _show(self, spec: ParamSpec, source: nn.Parameter, sharded: nn.Parameter) -> ParameterShard:
        over = sharded.device_mesh if isinstance(sharded, DTensor) else None
        names = () if over is None else tuple(over.mesh_dim_names or ())
        taken = set(self._mesh.atoms(names)) if names else set()
        axes = [a for a, size in self._mesh.axes.items() if a != "pp" and a not in taken and size > 1]
        if not axes and over is None:
            axes = [next(a for a in self._mesh.axes if a != "pp")]
        mesh = self._mesh.submesh(*axes, *names)  # the ranks of this pipeline stage
        placements = placements_of(spec, self._mesh, axes)
        if isinstance(sharded, DTensor):
            placements += sharded.placements
        meta = TensorMeta(torch.Size(spec.shape), _contiguous(spec.shape), source.dtype)
        layout = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
        return ParameterShard.over(source, layout, Origin(spec.name, self._num_stages))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
