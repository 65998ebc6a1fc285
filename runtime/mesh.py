"""Mesh axes by name.

Emitted programs say ``'tp'`` or ``'dp'``; an :class:`AxisMesh` binds those names at start-up to ranks and process
groups, because the names of process groups are counters that differ between runs. The device grid is a product of
atomic sub-axes, listed major to minor over the ranks; a *group* is a named product of some of them (``'tp'`` =
``('tp0', 'tp1')``) with one communicator of its own.

The same mesh serves real processes (gloo, NCCL), the fake process group, and ``LocalTensorMode``, where one process
plays all ranks: whatever depends on the rank must then be a tensor that differs per rank
(:meth:`AxisMesh.index_tensor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import MeshAxis, R, V

# Private torch API (see private.py): the only way to build a tensor that differs per simulated rank.
from torch.distributed._local_tensor import rank_map
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Axes = str | tuple[str, ...]
"""One axis name, or several from major to minor."""


class AxisMesh:
    """A device mesh of named atomic sub-axes with named flattened groups.

    Build it once per process, after ``init_process_group`` and outside ``FakeTensorMode`` (torch's DeviceMesh reads
    values while it is built). Every rank must build the same mesh: creating a group is a collective.

    Args:
        axes: (name, size) of the atomic sub-axes, major to minor over the ranks: the last one varies fastest.
        groups: (name, atomic names) of the flattened groups. The atomic names must be in mesh order, since torch sorts
            the ranks of a group.
        device_type: ``'cpu'`` or ``'cuda'``; by default ``'cuda'`` if there is a GPU and the default process group
            is not one for the CPU.

    Raises:
        ValueError: a name twice or unknown, a size below 1, a product of sizes that is not the world size, or a group
            out of mesh order.
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    device_mesh: DeviceMesh

    def __init__(
        self,
        axes: Sequence[tuple[str, int]],
        groups: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]] = (),
        *,
        device_type: str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("AxisMesh needs torch.distributed.init_process_group to have been called")
        self._sizes = _checked_axes(axes)
        self._members: dict[str, tuple[str, ...]] = {name: (name,) for name in self._sizes}
        self._members |= _checked_groups(groups, tuple(self._sizes))
        # Ranks per step of each atomic axis: the product of the sizes after it.
        names = tuple(self._sizes)
        self._steps = {n: math.prod(self._sizes[m] for m in names[i + 1 :]) for i, n in enumerate(names)}
        if device_type is None:
            # With no backend named, torch picks by device; its own name for that is "undefined".
            on_cpu = dist.get_backend() in ("gloo", "fake", "mpi") or not torch.cuda.is_available()
            device_type = "cpu" if on_cpu else "cuda"
        self.device_mesh = init_device_mesh(device_type, tuple(self._sizes.values()), mesh_dim_names=names)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._canonical: dict[str, str] = {}
        self._bind_groups()
        self._axis_types = {n: MeshAxis.of(self._groups[n]) for n in names if self._sizes[n] > 1}

    def _bind_groups(self) -> None:
        # Groups that span the same ranks share one communicator: each NCCL communicator costs device memory.
        first_with: dict[tuple[str, ...], str] = {}
        for name, members in self._members.items():
            live = tuple(m for m in members if self._sizes[m] > 1)
            owner = first_with.setdefault(live, name)
            self._canonical[name] = owner
            if owner != name:
                self._groups[name] = self._groups[owner]
            elif len(members) == 1:
                self._groups[name] = self.device_mesh.get_group(name)
            else:
                self._groups[name] = self.device_mesh[members]._flatten(name).get_group()
        self._by_group_name = {self._groups[n].group_name: n for n in self._canonical.values()}
        self._by_ranks = {tuple(dist.get_process_group_ranks(self._groups[n])): n for n in self._canonical.values()}

    @property
    def axes(self) -> dict[str, int]:
        """Size of each atomic sub-axis, major to minor."""
        return dict(self._sizes)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Atomic members of each flattened group."""
        return {name: members for name, members in self._members.items() if name not in self._sizes}

    def has(self, name: str) -> bool:
        """True if ``name`` is an atomic sub-axis or a group."""
        return name in self._members

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole mesh."""
        return math.prod(self._sizes.values())

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self._sizes.items())
        return f"AxisMesh({sizes}; groups={self.groups})"

    def atoms(self, axes: Axes) -> tuple[str, ...]:
        """The atomic sub-axes of ``axes``, major to minor.

        Raises:
            ValueError: an unknown name, or an atomic axis named twice.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        found: list[str] = []
        for name in names:
            if name not in self._members:
                raise ValueError(f"unknown mesh axis {name!r}; this mesh has {sorted(self._members)}")
            found.extend(self._members[name])
        if len(set(found)) != len(found):
            raise ValueError(f"mesh axes {names!r} name the same sub-axis twice: {found}")
        return tuple(found)

    def size(self, axes: Axes) -> int:
        """Number of ranks along ``axes``."""
        return math.prod(self._sizes[a] for a in self.atoms(axes))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of ``axis`` that holds this rank.

        Raises:
            ValueError: an unknown name.
        """
        self.atoms(axis)
        return self._groups[axis]

    def groups_of(self, axes: Axes) -> tuple[dist.ProcessGroup, ...]:
        """The fewest process groups that together span ``axes``; none when its size is 1.

        One group when a named group has exactly these sub-axes, whatever their order (reductions do not see it).
        """
        live = {a for a in self.atoms(axes) if self._sizes[a] > 1}
        if not live:
            return ()
        for name, members in self._members.items():
            if {m for m in members if self._sizes[m] > 1} == live:
                return (self._groups[name],)
        return tuple(self._groups[a] for a in self._sizes if a in live)

    def submesh(self, axis: str) -> DeviceMesh:
        """A mesh of one dim over the ranks of ``axis``.

        Raises:
            ValueError: an unknown name.
        """
        live = [a for a in self.atoms(axis) if self._sizes[a] > 1] or [self.atoms(axis)[-1]]
        if len(live) == 1:
            return self.device_mesh[live[0]]
        return self.device_mesh[self._canonical[axis]]  # flattened when its group was made

    def canonical(self, axis: str) -> str:
        """The name under which the ledger reports ``axis``: the first axis that spans the same ranks."""
        self.atoms(axis)
        return self._canonical[axis]

    def axis_of_group(self, group: dist.ProcessGroup) -> str | None:
        """The (canonical) axis that ``group`` communicates over, by name or else by ranks; None if there is none."""
        found = self._by_group_name.get(group.group_name)
        return found if found is not None else self._by_ranks.get(tuple(dist.get_process_group_ranks(group)))

    def coordinate(self, axes: Axes, rank: int | None = None) -> int:
        """Index of ``rank`` (default: this process) along ``axes``, in ``range(size(axes))``.

        Under LocalTensorMode this process is rank 0: use :meth:`index_tensor` for a value that enters the computation.
        """
        rank = dist.get_rank() if rank is None else rank
        index = 0
        for atom in self.atoms(axes):
            index = index * self._sizes[atom] + rank // self._steps[atom] % self._sizes[atom]
        return index

    def index_tensor(self, axes: Axes, device: torch.device | str) -> torch.Tensor:
        """Index along ``axes`` as an int64 tensor of shape [], right per rank also under LocalTensorMode.

        Its type is V on ``axes`` and R on every other axis of the mesh.
        """
        with spmd_types.no_typecheck():
            # full, not tensor: no copy from the host, hence no synchronisation on CUDA.
            index = rank_map(lambda rank: torch.full((), self.coordinate(axes, rank), dtype=torch.int64, device=device))
        if spmd_types.is_type_checking():
            spmd_types.assert_type(index, R, {axis: V for axis in self.type_axes(axes)})
        return index

    def type_axes(self, axes: Axes) -> tuple[MeshAxis, ...]:
        """The keys under which spmd_types stores the types of ``axes``: one per atomic sub-axis larger than 1.

        A collective over a flattened group finds its sub-axes by itself, an assertion does not.
        """
        return tuple(self._axis_types[a] for a in self.atoms(axes) if a in self._axis_types)


_current: ContextVar[AxisMesh | None] = ContextVar("autoplan_mesh", default=None)
# Autograd runs the backward of CUDA tensors, and with it every recomputed forward, in threads of its own, which see
# neither context variables nor thread-locals of the thread that entered the mesh.
_entered: list[AxisMesh] = []


def current_mesh() -> AxisMesh:
    """The mesh of the innermost :func:`use_mesh`.

    Raises:
        RuntimeError: no mesh is in use.
    """
    mesh = _current.get()
    if mesh is None and _entered:
        mesh = _entered[-1]
    if mesh is None:
        raise RuntimeError("no mesh in use: wrap the call in `with use_mesh(mesh):`")
    return mesh


@contextmanager
def use_mesh(mesh: AxisMesh, *, untyped: Sequence[str] = ()) -> Iterator[AxisMesh]:
    """Make ``mesh`` the current one, also for the spmd_types checker.

    Args:
        mesh: the mesh.
        untyped: atomic axes along which the ranks run different programs, so that values have no type on them; the
            pipeline axis.
    """
    for name in untyped:
        if name not in mesh.axes:
            raise ValueError(f"untyped axis {name!r} is not an atomic axis of {mesh!r}")
    typed = {name: mesh.type_axes(name)[0] for name, size in mesh.axes.items() if size > 1 and name not in untyped}
    token = _current.set(mesh)
    _entered.append(mesh)
    try:
        with spmd_types.set_current_mesh(typed):
            yield mesh
    finally:
        _entered.remove(mesh)
        _current.reset(token)


def _checked_axes(axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in axes:
        if not name.isidentifier():
            raise ValueError(f"mesh axis name {name!r} is not an identifier")
        if name in sizes:
            raise ValueError(f"mesh axis {name!r} is listed twice")
        if size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size}; it must be at least 1")
        sizes[name] = size
    if not sizes:
        raise ValueError("a mesh needs at least one axis; got none")
    world = dist.get_world_size()
    if math.prod(sizes.values()) != world:
        raise ValueError(f"mesh axes {sizes} make {math.prod(sizes.values())} ranks, the world has {world}")
    return sizes


def _checked_groups(
    groups: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]], atomic: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    pairs = cast(Iterable[tuple[str, Sequence[str]]], groups.items() if isinstance(groups, Mapping) else groups)
    place: Callable[[str], int] = atomic.index
    checked: dict[str, tuple[str, ...]] = {}
    for name, members in pairs:
        if not name.isidentifier():
            raise ValueError(f"group name {name!r} is not an identifier")
        if name in checked or name in atomic:
            raise ValueError(f"group {name!r} has the name of another axis or group")
        if isinstance(members, str) or not members:
            raise ValueError(f"group {name!r} needs a non-empty list of atomic axes; got {members!r}")
        for member in members:
            if member not in atomic:
                raise ValueError(f"group {name!r} has the unknown atomic axis {member!r}; the mesh has {list(atomic)}")
        order = [place(m) for m in members]
        if order != sorted(set(order)):
            raise ValueError(f"group {name!r} lists {list(members)}, which is not in mesh order {list(atomic)}")
        checked[name] = tuple(members)
    return checked
