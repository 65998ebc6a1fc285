"""Mesh axes by name.

Emitted programs say ``'tp'`` or ``'dp'``. An :class:`AxisMesh` binds those names at start-up to ranks and process
groups, because the names of process groups are counters that differ between runs. The device grid is a product of
atomic sub-axes, listed major to minor over the ranks. A *group* is a named product of some of them (``'tp'`` =
``('tp0', 'tp1')``) with its own communicator.

Communicators are made with the mesh, on every rank in the same order, and connected before the first step: a
communicator that forms beside running kernels waits for them. Each costs device memory, which the price counts
(`cost_models/memory/communicators.py`), so axes of size 1 have none, and axes that span the same ranks share one (for
the whole world: the default group). ``close`` destroys them.

The same mesh serves real processes (gloo, NCCL), the fake process group, and ``LocalTensorMode``, where one process
simulates all ranks. A value that depends on the rank must then be a tensor that differs per rank
(:meth:`AxisMesh.index_tensor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import MeshAxis, R, V

# Private torch API (see private.py): the only way to build a tensor that differs per simulated rank.
from torch.distributed._local_tensor import rank_map
from torch.distributed.device_mesh import DeviceMesh

from autoplan.runtime import private

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
        only: the axes that need a communicator; the others get none. None: all axes.
        device_type: ``'cpu'`` or ``'cuda'``; by default ``'cuda'`` if there is a GPU and the default process group is
            not one for the CPU.

    Raises:
        ValueError: a name that is unknown or occurs twice, a size below 1, sizes whose product is not the world size,
            or a group out of mesh order.
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self,
        axes: Sequence[tuple[str, int]],
        groups: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]] = (),
        *,
        only: Collection[str] | None = None,
        device_type: str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("AxisMesh needs torch.distributed.init_process_group to have been called")
        self._sizes = _checked_axes(axes)
        self._members: dict[str, tuple[str, ...]] = {name: (name,) for name in self._sizes}
        self._members |= _checked_groups(groups, tuple(self._sizes))
        self._products = {name: math.prod(self._sizes[a] for a in atoms) for name, atoms in self._members.items()}
        # Distance in ranks between neighbours along each atomic axis: the product of the sizes after it.
        names = tuple(self._sizes)
        self._steps = {n: math.prod(self._sizes[m] for m in names[i + 1 :]) for i, n in enumerate(names)}
        if device_type is None:
            # With no backend named, torch picks by device; its own name for that is "undefined".
            on_cpu = dist.get_backend() in ("gloo", "fake", "mpi") or not torch.cuda.is_available()
            device_type = "cpu" if on_cpu else "cuda"
        self.device_type = device_type
        self._groups: dict[str, dist.ProcessGroup] = {}  # by canonical name; only axes larger than 1
        self._alone: dist.ProcessGroup | None = None
        self._made: list[dist.ProcessGroup] = []
        self._meshes: dict[tuple[tuple[str, ...], bool], DeviceMesh] = {}
        first_with: dict[tuple[str, ...], str] = {}
        self._canonical = {n: first_with.setdefault(self._live(n), n) for n in self._members}
        wanted = {self._live(n) for n in (self._members if only is None else only)}
        for live, name in first_with.items():
            if live and live in wanted:
                self._groups[name] = self._form(self._partition(live), name)
                self.submesh(name)
        self._by_group_name = {group.group_name: name for name, group in self._groups.items()}
        self._by_ranks = {tuple(self._own_ranks(live)): name for live, name in first_with.items()}
        self._typed: dict[tuple[str, ...], dict[str, MeshAxis]] = {}  # by untyped axes: a step asks every time
        self._axis_types = {n: MeshAxis.of(self.group(n)) for n in names if self._canonical[n] in self._groups}

    def _live(self, axes: Axes) -> tuple[str, ...]:
        """Return the sub-axes of `axes` that are larger than 1."""
        return tuple(a for a in self.atoms(axes) if self._sizes[a] > 1)

    def _own_ranks(self, atoms: Sequence[str]) -> list[int]:
        """Return the ranks that differ from this one only along the sub-axes `atoms`; the last one varies fastest."""
        own, found = dist.get_rank(), [0]
        for atom, size in self._sizes.items():
            own_step = own // self._steps[atom] % size * self._steps[atom]
            found = found if atom in atoms else [rank + own_step for rank in found]
        for atom in atoms:
            found = [rank + i * self._steps[atom] for rank in found for i in range(self._sizes[atom])]
        return found

    def _partition(self, atoms: Sequence[str]) -> list[list[int]]:
        """Return the ranks of every group along the sub-axes `atoms`."""
        ranks = torch.arange(self.world_size).reshape(tuple(self._sizes.values()))
        names = list(self._sizes)
        inside, outside = ([names.index(n) for n in names if (n in atoms) is there] for there in (True, False))
        size = math.prod(self._sizes[n] for n in atoms)
        groups: list[list[int]] = ranks.permute([*outside, *inside]).reshape(-1, size).tolist()
        return groups

    def _form(self, partition: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup:
        """Return this rank's group of a partition of all ranks. A collective over all ranks."""
        if len(partition) == 1 and len(partition[0]) == self.world_size:
            whole: dist.ProcessGroup = private.default_group()
            return whole
        made = private.form_groups(partition, name)
        assert made is not None  # every rank is in a partition
        self._made.append(made)
        return made

    def group_of_some(self, groups: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        """Return the one of these disjoint groups that contains this rank; None if none does.

        A collective over all ranks, which must pass the same groups. Existing groups are reused.
        """
        mine = next((tuple(g) for g in groups if dist.get_rank() in g), None)
        for axis, members in self._members.items():
            if axis in self._groups and {tuple(g) for g in self._partition(members)} >= {tuple(g) for g in groups}:
                return self._groups[axis] if mine is not None else None
        made = private.form_groups(groups, name)
        if made is not None:
            self._made.append(made)
        return made

    def connect(self, device: torch.device, axis: str = "", pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Connect every communicator, in the same order on all ranks. A collective; does nothing except on CUDA.

        The default group is among them, also if no axis spans all ranks: norms of gradients are summed over it.

        Args:
            axis, pairs: an axis and the indices along it of ranks that send to one another, in an order that is the
                same on all ranks. A send that is not one of a batch has a communicator of its own between two ranks,
                unless the default group is bound to a device.
        """
        if device.type != "cuda":
            return
        token = torch.zeros(1, device=device)
        for group in dict.fromkeys((private.default_group(), *self._groups.values(), *self._made)):
            dist.all_reduce(token, group=group)
        own = self.coordinate(axis) if pairs else 0
        for first, second in pairs:
            if own == first:
                dist.send(token, group=self.group(axis), group_dst=second)
            elif own == second:
                dist.recv(token, group=self.group(axis), group_src=first)
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Destroy the communicators of this mesh, which is then unusable. Call it on all ranks while nothing runs."""
        self._meshes.clear()
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()
        self._groups.clear()

    @property
    def axes(self) -> dict[str, int]:
        """Size of each atomic sub-axis, major to minor."""
        return dict(self._sizes)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Atomic members of each flattened group."""
        return {name: members for name, members in self._members.items() if name not in self._sizes}

    def has(self, name: str) -> bool:
        """Return True if ``name`` is an atomic sub-axis or a group."""
        return name in self._members

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole mesh."""
        return math.prod(self._sizes.values())

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self._sizes.items())
        return f"AxisMesh({sizes}; groups={self.groups})"

    def atoms(self, axes: Axes) -> tuple[str, ...]:
        """Return the atomic sub-axes of ``axes``, major to minor.

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
        """Return the number of ranks along ``axes``."""
        known = self._products.get(axes) if isinstance(axes, str) else None
        return math.prod(self._sizes[a] for a in self.atoms(axes)) if known is None else known

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of ``axis`` that holds this rank.

        Raises:
            ValueError: an unknown name, or an axis that was left out of ``only``.
        """
        name = self.canonical(axis)
        if name not in self._groups:
            if self._live(axis):
                raise ValueError(f"mesh axis {axis!r} was made without a communicator; name it in only=")
            # an axis of size 1: its group is made on first use, which is rare
            if self._alone is None:
                self._alone = private.group_alone(self.world_size)
                self._made.append(self._alone)
            return self._alone
        return self._groups[name]

    def groups_of(self, axes: Axes) -> tuple[dist.ProcessGroup, ...]:
        """Return the fewest process groups that together span ``axes``; none if its size is 1.

        It is a single group if a named group has exactly these sub-axes, in any order (reductions do not depend on it).
        """
        live = {a for a in self.atoms(axes) if self._sizes[a] > 1}
        if not live:
            return ()
        for name, members in self._members.items():
            if {m for m in members if self._sizes[m] > 1} == live:
                return (self.group(name),)
        return tuple(self.group(a) for a in self._sizes if a in live)

    def submesh(self, *axes: str, connected: bool = False) -> DeviceMesh:
        """Return a DeviceMesh with one dim per axis, in this order, over existing groups.

        The mesh is not a slice of a mesh of all axes: torch requires the dims of slices in the order of the ranks.

        Args:
            connected: a single axis of size 1 has a group, too; otherwise it has none.

        Raises:
            ValueError: an unknown name, or a sub-axis named twice.
        """
        self.atoms(axes)
        names = tuple(self._canonical[a] for a in axes)
        grouped = connected or len(names) > 1 or bool(self._live(names))
        key = (names, grouped)
        if key not in self._meshes:
            if grouped:
                ranks = torch.tensor(self._own_ranks(self.atoms(names))).reshape([self.size(a) for a in names])
                groups = [self.group(a) for a in names]
                self._meshes[key] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)
            else:
                self._meshes[key] = private.mesh_without_group(self.device_type, dist.get_rank(), names[0])
        return self._meshes[key]

    def canonical(self, axis: str) -> str:
        """Return the name under which the ledger reports ``axis``: the first axis that spans the same ranks."""
        self.atoms(axis)
        return self._canonical[axis]

    def axis_of_group(self, group: dist.ProcessGroup) -> str | None:
        """Return the (canonical) axis that ``group`` communicates over, found by name or by ranks; None if none."""
        found = self._by_group_name.get(group.group_name)
        return found if found is not None else self._by_ranks.get(tuple(dist.get_process_group_ranks(group)))

    def coordinate(self, axes: Axes, rank: int | None = None) -> int:
        """Return the index of ``rank`` (default: this process) along ``axes``, in ``range(size(axes))``.

        Under LocalTensorMode this process is rank 0: use :meth:`index_tensor` for a value that enters the computation.
        """
        rank = dist.get_rank() if rank is None else rank
        index = 0
        for atom in self.atoms(axes):
            index = index * self._sizes[atom] + rank // self._steps[atom] % self._sizes[atom]
        return index

    def index_tensor(self, axes: Axes, device: torch.device | str) -> torch.Tensor:
        """Return the index along ``axes`` as an int64 tensor of shape [], right per rank also under LocalTensorMode.

        Its type is V on ``axes`` and R on every other axis of the mesh.
        """
        with spmd_types.no_typecheck():
            # full, not tensor: no copy from the host, hence no synchronisation on CUDA.
            index = rank_map(lambda rank: torch.full((), self.coordinate(axes, rank), dtype=torch.int64, device=device))
        if spmd_types.is_type_checking():
            spmd_types.assert_type(index, R, {axis: V for axis in self.type_axes(axes)})
        return index

    def type_axes(self, axes: Axes) -> tuple[MeshAxis, ...]:
        """Return the keys under which spmd_types stores the types of ``axes``: one per atomic sub-axis larger than 1.

        A collective over a flattened group finds its sub-axes by itself, an assertion does not.
        """
        return tuple(self._axis_types[a] for a in self.atoms(axes) if a in self._axis_types)

    def typed(self, untyped: tuple[str, ...] = ()) -> dict[str, MeshAxis]:
        """Return the type axis of every atomic axis larger than 1, but for those that are `untyped`.

        Raises:
            ValueError: a name in ``untyped`` that is not an atomic axis.
        """
        if untyped not in self._typed:
            for name in untyped:
                if name not in self.axes:
                    raise ValueError(f"untyped axis {name!r} is not an atomic axis of {self!r}")
            names = [name for name in self.axes if name not in untyped]
            self._typed[untyped] = {name: found[0] for name in names if (found := self.type_axes(name))}
        return self._typed[untyped]


_current: ContextVar[AxisMesh | None] = ContextVar("autoplan_mesh", default=None)
# Autograd runs the backward of CUDA tensors, and with it every recomputed forward, in its own threads. They see neither
# context variables nor thread-locals of the thread that entered the mesh.
_entered: list[AxisMesh] = []


def current_mesh() -> AxisMesh:
    """Return the mesh of the innermost :func:`use_mesh`.

    Raises:
        RuntimeError: no mesh is in use.
    """
    mesh = _current.get()
    if mesh is None and _entered:
        mesh = _entered[-1]
    if mesh is None:
        raise RuntimeError("no mesh in use: wrap the call in `with use_mesh(mesh):`")
    return mesh


class _Use:
    """Makes a mesh the current one; a class, since a generator costs twice the time, in every step."""

    def __init__(self, mesh: AxisMesh, typed: AbstractContextManager[None] | None) -> None:
        self._mesh, self._typed = mesh, typed

    def __enter__(self) -> AxisMesh:
        if self._typed is not None:
            self._typed.__enter__()
        self._token = _current.set(self._mesh)
        _entered.append(self._mesh)
        return self._mesh

    def __exit__(self, *exc: Any) -> None:
        _entered.remove(self._mesh)
        _current.reset(self._token)
        if self._typed is not None:
            self._typed.__exit__(*exc)


def use_mesh(
    mesh: AxisMesh, *, untyped: Sequence[str] = (), only_checked: bool = False
) -> AbstractContextManager[AxisMesh]:
    """Make ``mesh`` the current one, also for the spmd_types checker.

    Args:
        mesh: the mesh.
        untyped: atomic axes along which the ranks run different programs (the pipeline axis): values have no type on
            them.
        only_checked: tell the checker of it only if it is checking already. That takes longer than all else.

    Raises:
        ValueError: a name in ``untyped`` that is not an atomic axis.
    """
    if only_checked and not spmd_types.is_type_checking():
        return _Use(mesh, None)
    return _Use(mesh, spmd_types.set_current_mesh(mesh.typed(tuple(untyped))))


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
