"""The conversions between types, by mesh-axis name, and a recorder of the collectives that run.

Conversions are the only communication of an emitted program. Each works on the *local* tensor and delegates to
``spmd_types``, which owns the forward/backward pairs and their types:

======================  ==========  ====================  ====================
function                types       forward               backward
======================  ==========  ====================  ====================
all_reduce(dst=I)       P -> I      all-reduce            nothing
all_reduce(dst=R)       P -> R      all-reduce            all-reduce
reduce_scatter          P -> S      reduce-scatter        all-gather
all_gather(dst=R)       S -> R      all-gather            reduce-scatter
all_gather(dst=I)       S -> I      all-gather            slice
to_replicate            I -> R      nothing               all-reduce
slice_(src=I)           I -> S      slice                 all-gather
slice_(src=R)           R -> S      slice                 pad to P
all_to_all              S -> S'     all-to-all            all-to-all
to_partial(src=R)       R -> P      keep on index 0       keep on index 0
to_partial(src=I)       I -> P      keep on index 0       nothing
======================  ==========  ====================  ====================

S on dim d means contiguous even chunks of tensor dim d, chunk i on index i of the axis. An axis of size 1 returns its
argument. Gradients are communicated in the dtype of the forward value. Under ``spmd_types.checker.typecheck()`` tensors
of a wrong type on the axis are refused; only then does :func:`typed` do something.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import spmd_types
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from spmd_types import I, P, PerMeshAxisLocalSpmdType, R, S, Shard, V

# Private torch APIs (see private.py): whether ranks are simulated, and the group behind a name.
from torch.distributed._local_tensor import enabled_local_tensor_mode
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoplan.runtime import functional, recompute
from autoplan.runtime.exchange import sums_by_exchange
from autoplan.runtime.mesh import AxisMesh, current_mesh
from autoplan.runtime.private import mend_simulated_groups

Type = PerMeshAxisLocalSpmdType

mend_simulated_groups()
# spmd_types 0.3.1 calls functional collectives by names that torch deprecates since 2.13. Our users cannot change that.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\._functional_collectives\.(all_gather|reduce_scatter)_tensor` is deprecated",
    category=FutureWarning,
)


class _AllToAll(torch.autograd.Function):
    """S(src_dim) -> S(dst_dim) over a group, by one collective; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, src_dim: int, dst_dim: int) -> torch.Tensor:
        ctx.group, ctx.dims = group, (dst_dim, src_dim)
        ranks = dist.get_world_size(group)
        # parts for and from one rank lie together: along dim 0 they do anyway
        come = functional.raw_all_to_all(x if dst_dim == 0 else torch.cat(x.chunk(ranks, dst_dim)), group)
        return come if src_dim == 0 else torch.cat(come.chunk(ranks), src_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        out: torch.Tensor = _AllToAll.apply(grad, ctx.group, *ctx.dims)  # type: ignore[no-untyped-call]
        return out, None, None, None


def _scattered(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Sum over a group and keep this rank's part along `dim`."""
    ranks = dist.get_world_size(group)
    return functional.raw_reduce_scatter(x if dim == 0 else torch.cat(x.chunk(ranks, dim)), group, ranks)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenate what the ranks of a group have, along `dim`."""
    ranks = dist.get_world_size(group)
    out = functional.raw_all_gather(x, group, ranks)
    return out if dim == 0 else torch.cat(out.chunk(ranks), dim)


class _ReduceScatter(torch.autograd.Function):
    """P -> S(dim) over a group of gloo (`runtime.exchange`); the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(grad, ctx.group, ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    """S(dim) -> R over a group of gloo; the gradient is reduced and scattered (`runtime.exchange`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(grad, ctx.group, ctx.dim), None, None


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose backward returns a contiguous gradient.

    The all-reduce of spmd_types asserts contiguity, but gradients often are not contiguous: the gradient of ``sum`` is
    an expanded scalar.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


spmd_types.register_local_autograd_function(_ContiguousGradient)


def _contiguous_gradient(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call]
    return out


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    # Not Tensor.contiguous(): on a LocalTensor that is an autograd function which the type checker does not know.
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _options(x: torch.Tensor) -> dict[str, Any]:
    # Below fp32 spmd_types needs an explicit dtype for the gradient's reduction; the ledger counts the forward's dtype.
    return {"backward_options": {"op_dtype": x.dtype}}


def _dim(x: torch.Tensor, dim: int, what: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{what}: dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim


def _divisible(x: torch.Tensor, dim: int, axis: str, what: str) -> int:
    dim, parts = _dim(x, dim, what), current_mesh().size(axis)
    if x.shape[dim] % parts != 0:
        raise ValueError(f"{what}: dim {dim} of shape {tuple(x.shape)} does not divide by the size {parts} of {axis!r}")
    return dim


def _check_type(value: Type, name: str, what: str) -> None:
    if value not in (R, I):
        raise ValueError(f"{what}: {name} is {value!r}; it must be one of {(R, I)!r}")


def _converted(
    conversion: Callable[..., torch.Tensor],
    x: torch.Tensor,
    axis: str,
    src: Type | Shard,
    dst: Type | Shard,
    **options: bool,
) -> torch.Tensor:
    """Run a conversion of spmd_types over the axis; an axis of size 1 returns its argument."""
    mesh = current_mesh()
    return x if mesh.size(axis) == 1 else conversion(x, mesh.group(axis), src=src, dst=dst, **_options(x), **options)


def _group_of_gloo(axis: str) -> dist.ProcessGroup | None:
    """Return the group of an axis of several ranks that reduces by an exchange; None also while types are checked."""
    mesh = current_mesh()
    if mesh.size(axis) == 1 or spmd_types.is_type_checking():
        return None
    group = mesh.group(axis)
    return group if sums_by_exchange(group) else None


def all_reduce(x: torch.Tensor, axis: str, dst: Type) -> torch.Tensor:
    """Sum ``x`` over ``axis``: P -> R or P -> I (the backward is an all-reduce, or nothing).

    Args:
        x: the partial sum, any shape; V is accepted and read as P.
        axis: mesh axis or group.
        dst: R if the ranks use the result differently, I if they all do the same work with it.

    Returns:
        The sum, of the shape of ``x``.
    """
    _check_type(dst, "dst", "all_reduce")
    if current_mesh().size(axis) == 1:
        return x
    out = _converted(spmd_types.all_reduce, _contiguous(x), axis, P, dst)
    return _contiguous_gradient(out) if dst is R else out


def extreme(x: torch.Tensor, axis: str, *, largest: bool) -> torch.Tensor:
    """Return the largest or smallest of every element over ``axis``, of the shape of ``x``; without a gradient."""
    mesh = current_mesh()
    if mesh.size(axis) == 1:
        return x
    given = _contiguous(x.detach())
    # the reduction by name that every backend has
    return functional.raw_all_reduce(given, "max" if largest else "min", mesh.group(axis))


def reduce_scatter(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Sum ``x`` over ``axis`` and keep chunk ``index`` of tensor dim ``dim``: P -> S(dim) (backward: all-gather).

    Args:
        x: the partial sum; V is accepted and read as P.
        axis: mesh axis or group.
        dim: tensor dim to scatter, divisible by the size of the axis.

    Returns:
        The chunk: ``x.shape`` with dim ``dim`` divided by the size of the axis.
    """
    dim = _divisible(x, dim, axis, "reduce_scatter")
    group = _group_of_gloo(axis)
    if group is not None:
        out: torch.Tensor = _ReduceScatter.apply(x, group, dim)  # type: ignore[no-untyped-call]
        return out
    return _converted(spmd_types.reduce_scatter, x, axis, P, S(dim))


def all_gather(x: torch.Tensor, axis: str, dim: int, dst: Type) -> torch.Tensor:
    """Concatenate the shards of tensor dim ``dim``: S(dim) -> R or I (backward: reduce-scatter, or slice).

    Args:
        x: the shard.
        axis: mesh axis or group.
        dim: the sharded tensor dim.
        dst: R if the ranks use the result differently, I if they all do the same work with it.

    Returns:
        The whole: ``x.shape`` with dim ``dim`` multiplied by the size of the axis.
    """
    _check_type(dst, "dst", "all_gather")
    dim = _dim(x, dim, "all_gather")
    group = _group_of_gloo(axis) if dst is R else None
    if group is not None:
        out: torch.Tensor = _AllGather.apply(x, group, dim)  # type: ignore[no-untyped-call]
        return out
    return _converted(spmd_types.all_gather, x, axis, S(dim), dst)


def slice_(x: torch.Tensor, axis: str, dim: int, src: Type) -> torch.Tensor:
    """Keep chunk ``index`` of tensor dim ``dim``: R -> S(dim) or I -> S(dim) (backward: pad to P, or all-gather).

    Args:
        x: the whole value.
        axis: mesh axis or group.
        dim: tensor dim to slice, divisible by the size of the axis.
        src: the type of ``x``, R or I.

    Returns:
        The chunk, contiguous: ``x.shape`` with dim ``dim`` divided by the size of the axis.
    """
    _check_type(src, "src", "slice_")
    return _converted(spmd_types.convert, x, axis, src, S(_divisible(x, dim, axis, "slice_")))


def to_replicate(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Convert I -> R: the value stays; in the backward its gradient is summed over ``axis`` by an all-reduce.

    Args:
        x: a value that is the same on every rank of the axis, any shape.
        axis: mesh axis or group.
    """
    if current_mesh().size(axis) == 1:
        return x
    return _contiguous_gradient(_converted(spmd_types.convert, x, axis, I, R))


def all_to_all(x: torch.Tensor, axis: str, src_dim: int, dst_dim: int) -> torch.Tensor:
    """Move the sharding from tensor dim ``src_dim`` to ``dst_dim``: S(src_dim) -> S(dst_dim) (backward: the reverse).

    Args:
        x: the shard.
        axis: mesh axis or group.
        src_dim: the sharded tensor dim, whole in the result.
        dst_dim: another tensor dim, divisible by the size of the axis.

    Returns:
        ``x.shape`` with dim ``src_dim`` multiplied and dim ``dst_dim`` divided by the size of the axis.
    """
    src_dim, dst_dim = _dim(x, src_dim, "all_to_all"), _divisible(x, dst_dim, axis, "all_to_all")
    if src_dim == dst_dim:
        raise ValueError(f"all_to_all: src_dim and dst_dim are both {src_dim}")
    mesh = current_mesh()
    if spmd_types.is_type_checking():  # the same exchange, in a form that no compiler takes into a graph
        return _converted(spmd_types.all_to_all, x, axis, S(src_dim), S(dst_dim))
    if mesh.size(axis) == 1:
        return x
    out: torch.Tensor = _AllToAll.apply(x, mesh.group(axis), src_dim, dst_dim)  # type: ignore[no-untyped-call]
    return out


def to_partial(x: torch.Tensor, axis: str, src: Type) -> torch.Tensor:
    """Keep ``x`` on index 0 of ``axis`` and zeros elsewhere, so that the sum is ``x``: R -> P or I -> P.

    This adds a bias to a row-parallel product only once.

    Args:
        x: the whole value, any shape.
        axis: mesh axis or group.
        src: the type of ``x``, R or I.
    """
    _check_type(src, "src", "to_partial")
    return _converted(spmd_types.convert, x, axis, src, P, expert_mode=True)


def typed(x: torch.Tensor, default: Type | None = None, /, **types: Type) -> torch.Tensor:
    """Assert the types of ``x`` by axis name, or set them on a value that has none; does nothing unless type-checking.

    ``typed(w, I, tp=V)`` is I on every axis of the mesh except V on ``tp``. A value that is V may be asserted P: so a
    local product over a sharded dim becomes a partial sum.

    Args:
        x: a tensor: an input, a parameter, a buffer, or a value to check.
        default: the type on axes that are not named; None leaves their types alone.
        types: R, I, V (also for a shard) or P by axis or group name.

    Returns:
        ``x`` itself.

    Raises:
        spmd_types.SpmdTypeError: ``x`` has another type.
        ValueError: an unknown axis name.
    """
    if not spmd_types.is_type_checking():
        return x
    mesh = current_mesh()
    per_axis = {key: kind for name, kind in types.items() for key in mesh.type_axes(name)}
    if default is None:
        spmd_types.assert_type(x, per_axis)
    else:
        spmd_types.assert_type(x, default, per_axis)
    return x


def vary(x: torch.Tensor, *axes: str) -> torch.Tensor:
    """Declare that an R value stands for each rank's own part of a larger one: R -> V, and V -> P for its gradient.

    So a local expansion of a dim of size 1 becomes a shard of the whole expansion. Does nothing unless type-checking.

    Args:
        x: a value that is R on ``axes``.
        axes: axis or group names.
    """
    if not spmd_types.is_type_checking():
        return x
    mesh = current_mesh()
    for name in axes:
        for atom in mesh.atoms(name):
            if mesh.size(atom) > 1:
                x = spmd_types.reinterpret(x, mesh.group(atom), src=R, dst=V, expert_mode=True)
    return x


def as_constant_beside(x: Any, value: Any) -> Any:
    """For typing hooks: return ``x``, which receives no gradient, with the type of an operand beside ``value``.

    R and I differ only in the gradient, so a constant of either type may stand next to both. spmd_types does this for
    torch operators; its ``rules`` do not.
    """
    beside = spmd_types.get_local_type(value)
    for key, kind in tuple(spmd_types.get_local_type(x).items()):
        wanted = I if beside.get(key) is I else R
        if kind in (R, I) and kind is not wanted:
            x = spmd_types.rules.convert(x, key, src=kind, dst=wanted)
    return x


# ---------------------------------------------------------------------------------------------------------------------
# The recorder of the collectives that run.


class CollectiveRecord(NamedTuple):
    """One executed collective: ``bytes`` is the payload, the full (gathered or unreduced) local tensor on one rank."""

    kind: str
    axis: str
    bytes: int
    phase: Literal["forward", "backward", "recompute"]


_RESULT = -1
# Operator -> (kind, index of the argument that is the full tensor).
_OPS: Mapping[str, tuple[str, int]] = {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_dtensor::shard_dim_alltoall": ("all_to_all", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 0),
    "c10d::scatter_": ("scatter", 1),
    "c10d::send": ("send_recv", 0),
    "autoplan_exchange::reduce_scatter": ("reduce_scatter", 1),
    "autoplan_exchange::sum_of_parts": ("reduce_scatter", 0),
}
OTHER_GROUP = "group "  # begins the axis of a record whose group is no axis of the mesh
_NAMESPACES = frozenset(name.partition("::")[0] for name in _OPS)
_GROUP_ARGUMENTS = ("group_name", "process_group", "group")


@contextmanager
def record_collectives(
    mesh: AxisMesh | None = None, *, between_stages: bool = False
) -> Iterator[list[CollectiveRecord]]:
    """Yield a list that receives a record of every collective executed inside, in forward, backward and recompute.

    It watches the dispatcher, not the functions of this module, so it sees collectives added anywhere. A collective
    over a group that is not an axis of the mesh is recorded under the description of its group. Of point-to-point
    transfers the sends of this rank are recorded, except those between pipeline stages (``pp``), which PyTorch's
    schedules issue (see ``between_stages``). Collectives over a single rank move nothing and are not recorded.

    Enter it inside ``LocalTensorMode`` or ``FakeTensorMode``: they answer collectives themselves and would hide them.

    Args:
        mesh: names the groups; the current mesh by default.
        between_stages: record the sends between pipeline stages, too.

    Raises:
        RuntimeError: no mesh, or ``LocalTensorMode`` was entered inside.
    """
    with _Recorder(mesh if mesh is not None else current_mesh(), between_stages) as recorder:
        yield recorder.records


def recorded_name(mesh: AxisMesh, group: dist.ProcessGroup) -> str:
    """Return the axis under which collectives over a group are recorded."""
    axis = mesh.axis_of_group(group)
    return axis if axis is not None else f"{OTHER_GROUP}{group.group_desc}"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mesh: AxisMesh, between_stages: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._between_stages = between_stages
        self.records: list[CollectiveRecord] = []
        self._mesh = mesh
        self._simulated = enabled_local_tensor_mode() is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._simulated and enabled_local_tensor_mode() is not None:
            raise RuntimeError("enter record_collectives inside LocalTensorMode, which otherwise hides the collectives")
        # Only these namespaces have collectives. Everything else must cost next to nothing.
        if func.namespace not in _NAMESPACES or func._schema.name not in _OPS:
            return func(*args, **kwargs)
        kind, index = _OPS[func._schema.name]
        group = _group_of(func, args, kwargs)
        # In-place collectives overwrite their input but keep its size, so the size may be read afterwards.
        result = func(*args, **kwargs)
        if dist.get_world_size(group) > 1:
            payload = result if index == _RESULT else args[index]
            name = recorded_name(self._mesh, group)
            if self._between_stages or (kind, name) != ("send_recv", "pp"):
                self.records.append(CollectiveRecord(kind, name, _bytes(payload), phase_of_call()))
        return result


def _group_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in _GROUP_ARGUMENTS:
            group = args[i] if i < len(args) else kwargs[argument.name]
            if isinstance(group, str):
                return _resolve_process_group(group)  # type: ignore[arg-type]
            if isinstance(group, dist.ProcessGroup):
                return group
            unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(group)
            return unboxed
    raise RuntimeError(f"collective {func} has no process group among its arguments")


def _bytes(payload: Any) -> int:
    total = 0
    for tensor in tree_leaves(payload):
        if isinstance(tensor, torch.Tensor):
            # Simulated ranks may have shards of different sizes; the largest sets the pace.
            shards = getattr(tensor, "_local_tensors", {0: tensor}).values()
            total += max(shard.numel() * shard.element_size() for shard in shards)
    return total


_REPEATS = (torch.utils.checkpoint.__file__, recompute.__file__)


def phase_of_call() -> Literal["forward", "backward", "recompute"]:
    """Return the phase in which the caller runs, by the autograd engine and the frames above."""
    # Private torch API (see private.py): -1 unless the autograd engine is running this thread.
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    # Inside the engine: a recomputed forward is called by one of two modules, a backward by the engine itself.
    frame = sys._getframe(1)
    engine: Callable[..., Any] = torch.autograd.graph._engine_run_backward
    while frame is not None:
        if frame.f_code.co_filename in _REPEATS:
            return "recompute"
        if frame.f_code is engine.__code__:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"
