"""Every conversion against the meaning of its types on one tensor, values and gradients, and the record of collectives.

The meaning: a value of type R or I is the same on every rank, S(d) is cut along dim d, P is a sum. So a conversion is
right iff its local results mean what its local arguments meant, and likewise for the gradients, whose types are the
duals.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import spmd_types
import torch
import torch.distributed as dist
from harness import pool
from spmd_types import SpmdTypeError
from spmd_types.checker import typecheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, get_local_tensor_mode_list, rank_map
from torch.utils.checkpoint import checkpoint

from autoplan.runtime.convert import (
    CollectiveRecord,
    I,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    record_collectives,
    reduce_scatter,
    slice_,
    to_partial,
    to_replicate,
    typed,
)
from autoplan.runtime.mesh import AxisMesh, current_mesh, use_mesh

# spmd_types 0.3.1 calls functional collectives by names that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

SHAPE = (4, 8, 12)
FULL_BYTES = 4 * 8 * 12 * 8


@contextlib.contextmanager
def mesh_of(axes: list[tuple[str, int]], groups: dict[str, tuple[str, ...]] | None = None) -> Iterator[AxisMesh]:
    """A mesh over the fake process group."""
    world = 1
    for _, size in axes:
        world *= size
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        mesh = AxisMesh(axes, groups or {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


def randn(*key: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    seed = 0
    for k in key:
        seed = seed * 1009 + k + 1
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shard(whole: torch.Tensor, kind: Any, index: int, size: int) -> torch.Tensor:
    """The local tensor on ``index`` of a value of this type ('R', 'I', 'P' or the dim of a shard)."""
    if isinstance(kind, int):
        return whole.chunk(size, kind)[index].contiguous()
    if kind == "P":
        parts = [randn(7, i, shape=tuple(whole.shape)) for i in range(size - 1)]
        parts.append(whole - sum(parts, torch.zeros_like(whole)))
        return parts[index]
    return whole.clone()


def unshard(locals_: list[torch.Tensor], kind: Any) -> torch.Tensor:
    if isinstance(kind, int):
        return torch.cat(locals_, kind)
    if kind == "P":
        return torch.stack(locals_).sum(0)
    for other in locals_[1:]:
        assert torch.equal(other, locals_[0])
    return locals_[0]


DUAL: dict[Any, Any] = {"R": "P", "P": "R", "I": "I", 0: 0, 1: 1, 2: 2}


@dataclass(frozen=True)
class Case:
    name: str
    src: Any
    dst: Any
    run: Callable[[torch.Tensor, str], torch.Tensor]
    forward: str | None
    backward: str | None


CASES = [
    Case("all_reduce_R", "P", "R", lambda x, a: all_reduce(x, a, R), "all_reduce", "all_reduce"),
    Case("all_reduce_I", "P", "I", lambda x, a: all_reduce(x, a, I), "all_reduce", None),
    Case("to_replicate", "I", "R", lambda x, a: to_replicate(x, a), None, "all_reduce"),
    Case("to_partial_R", "R", "P", lambda x, a: to_partial(x, a, R), None, None),
    Case("to_partial_I", "I", "P", lambda x, a: to_partial(x, a, I), None, None),
    *(
        case
        for d in range(3)
        for case in (
            Case(
                f"reduce_scatter_{d}", "P", d, lambda x, a, d=d: reduce_scatter(x, a, d), "reduce_scatter", "all_gather"
            ),
            Case(f"all_gather_R_{d}", d, "R", lambda x, a, d=d: all_gather(x, a, d, R), "all_gather", "reduce_scatter"),
            Case(f"all_gather_I_{d}", d, "I", lambda x, a, d=d: all_gather(x, a, d - 3, I), "all_gather", None),
            Case(f"slice_R_{d}", "R", d, lambda x, a, d=d: slice_(x, a, d - 3, R), None, None),
            Case(f"slice_I_{d}", "I", d, lambda x, a, d=d: slice_(x, a, d, I), None, "all_gather"),
            Case(f"all_to_all_{d}0", d, 0, lambda x, a, d=d: all_to_all(x, a, d, 0), "all_to_all", "all_to_all"),
            Case(f"all_to_all_{d}1", d, 1, lambda x, a, d=d: all_to_all(x, a, d, 1), "all_to_all", "all_to_all"),
            Case(f"all_to_all_{d}2", d, 2, lambda x, a, d=d: all_to_all(x, a, d, 2), "all_to_all", "all_to_all"),
        )
        if case.src != case.dst
    ),
]
MESHES: dict[str, tuple[list[tuple[str, int]], dict[str, tuple[str, ...]], str]] = {
    "2": ([("tp", 2)], {}, "tp"),
    "4": ([("tp", 4)], {}, "tp"),
    "2x2_major": ([("dp", 2), ("tp", 2)], {}, "dp"),
    "2x2_minor": ([("dp", 2), ("tp", 2)], {}, "tp"),
    "2x2_group": ([("tp0", 2), ("tp1", 2)], {"tp": ("tp0", "tp1")}, "tp"),
    # The ranks of the group are not contiguous.
    "2x2x2_strided": ([("ep0", 2), ("tp", 2), ("ep1", 2)], {"ep": ("ep0", "ep1")}, "ep"),
}


def payload(kind: str, case: Case, size: int) -> int:
    """By hand: the full local tensor of each collective. A shard of an all-to-all is one part of the value."""
    return FULL_BYTES // size if kind == "all_to_all" else FULL_BYTES


def noncontiguous(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_conversions_mean_what_their_types_say(mesh_name: str) -> None:
    axes, groups, axis = MESHES[mesh_name]
    with mesh_of(axes, groups) as mesh, LocalTensorMode(mesh.world_size) as ranks_mode:
        size = mesh.size(axis)
        others = tuple(a for a in mesh.axes if a not in mesh.atoms(axis))
        fibres: dict[int, list[int]] = {}
        for rank in range(mesh.world_size):
            fibres.setdefault(mesh.coordinate(others, rank) if others else 0, []).append(rank)

        for case in CASES:

            def local(kind: Any, salt: int, rank: int) -> torch.Tensor:
                fibre = mesh.coordinate(others, rank) if others else 0
                part = shard(randn(salt, fibre), kind, mesh.coordinate(axis, rank), size)
                return noncontiguous(part)

            x = rank_map(lambda rank, k=case.src: local(k, 1, rank)).requires_grad_()
            with record_collectives() as records:
                y = case.run(x, axis)
                grad = rank_map(lambda rank, k=DUAL[case.dst]: local(k, 2, rank))
                (gx,) = torch.autograd.grad(y, x, grad)
            assert isinstance(y, LocalTensor) and isinstance(gx, LocalTensor)
            with ranks_mode.disable():
                for fibre, ranks in fibres.items():
                    means = unshard([y._local_tensors[r] for r in ranks], case.dst)
                    torch.testing.assert_close(means, randn(1, fibre), atol=1e-13, rtol=0)
                    means = unshard([gx._local_tensors[r] for r in ranks], DUAL[case.src])
                    torch.testing.assert_close(means, randn(2, fibre), atol=1e-13, rtol=0)
            expected = [
                CollectiveRecord(kind, axis, payload(kind, case, size), phase)  # type: ignore[arg-type]
                for kind, phase in ((case.forward, "forward"), (case.backward, "backward"))
                if kind is not None
            ]
            assert records == expected, case.name


def test_expanded_gradients_are_accepted() -> None:
    # The gradient of sum() is a scalar expanded with strides 0, which collectives do not take.
    with mesh_of([("tp", 2)]), LocalTensorMode(2):
        for case in CASES:
            x = rank_map(lambda rank, k=case.src: shard(randn(1), k, rank, 2)).requires_grad_()
            case.run(x, "tp").sum().backward()
            assert x.grad is not None, case.name


def test_axes_of_size_one_cost_nothing() -> None:
    with mesh_of([("one", 1), ("tp", 2)], {"alias": ("one", "tp"), "unit": ("one",)}) as mesh, LocalTensorMode(2):
        assert mesh.canonical("alias") == "tp" and mesh.group("alias") is mesh.group("tp")
        x = rank_map(lambda rank: randn(rank)).requires_grad_()
        with record_collectives() as records:
            for case in CASES:
                for axis in ("one", "unit"):
                    assert case.run(x, axis) is x
                # Somebody else's collective over one rank moves nothing either.
                dist.all_reduce(torch.ones(2), group=mesh.group("one"))
        assert records == []
        assert (mesh.index_tensor("one", "cpu")._local_tensors[1]).item() == 0  # type: ignore[attr-defined]


def test_reduced_precision_is_communicated_as_it_is() -> None:
    with mesh_of([("tp", 2)]), LocalTensorMode(2):
        for case in CASES:
            x = rank_map(lambda rank, k=case.src: shard(randn(1), k, rank, 2).bfloat16()).requires_grad_()
            with record_collectives() as records:
                y = case.run(x, "tp")
                y.sum().backward()
            assert y.dtype == torch.bfloat16
            assert all(4 * r.bytes == payload(r.kind, case, 2) for r in records), case.name


def test_phases_and_foreign_collectives_are_recorded() -> None:
    with mesh_of([("dp", 2), ("tp", 2)]) as mesh, LocalTensorMode(4):

        def layer(x: torch.Tensor) -> torch.Tensor:
            return all_gather(x.sin(), "tp", 0, R).sin()

        x = rank_map(lambda rank: randn(rank)).requires_grad_()
        with record_collectives() as records:
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        got = [(r.kind, r.axis, r.phase) for r in records]
        assert got == [
            ("all_gather", "tp", "forward"),
            ("all_gather", "tp", "recompute"),
            ("reduce_scatter", "tp", "backward"),
        ]
        assert all(r.bytes == 2 * FULL_BYTES for r in records)

        same_ranks = dist.new_group(dist.get_process_group_ranks(mesh.group("dp")))
        with record_collectives() as records:
            y = rank_map(lambda rank: torch.ones(5))
            dist.all_reduce(y, group=same_ranks)
            dist.broadcast(y, 0, group=mesh.group("tp"))
            dist.all_reduce(y)
        assert records[:2] == [
            CollectiveRecord("all_reduce", "dp", 20, "forward"),
            CollectiveRecord("broadcast", "tp", 20, "forward"),
        ]
        assert records[2].axis.startswith("group")


def test_recorder_outside_the_simulation_refuses() -> None:
    # It may raise on entering the simulation or at its first operation.
    mode = LocalTensorMode(2)
    try:
        with (
            mesh_of([("tp", 2)]),
            pytest.raises(RuntimeError, match="inside LocalTensorMode"),
            record_collectives(),
            mode,
        ):
            all_reduce(rank_map(lambda rank: randn(rank)), "tp", I)
    finally:
        if mode in get_local_tensor_mode_list():  # entered half way: every later test would run in it
            get_local_tensor_mode_list().remove(mode)
            mode.disable_()


def test_fake_tensors_have_the_right_shapes_and_bytes() -> None:
    with mesh_of([("tp", 4)]), FakeTensorMode():
        for case in CASES:
            x = torch.empty(shard(torch.zeros(SHAPE, device="meta"), case.src if case.src != "P" else "R", 0, 4).shape)
            x = x.double().requires_grad_()
            with record_collectives() as records:
                y = case.run(x, "tp")
                y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
            assert [r.kind for r in records] == [k for k in (case.forward, case.backward) if k]
            assert all(r.bytes == payload(r.kind, case, 4) for r in records), case.name


def test_types_of_conversions() -> None:
    names = {"R": R, "I": I, "P": P}
    for axes, groups, axis in MESHES.values():
        with mesh_of(axes, groups) as mesh, typecheck():
            keys = mesh.type_axes(axis)
            for case in CASES:
                src, dst = names.get(case.src, V), names.get(case.dst, V)
                x = typed(torch.randn(SHAPE).requires_grad_(), R, **{axis: src})
                y = case.run(x, axis)
                assert [spmd_types.get_local_type(y)[k] for k in keys] == [dst] * len(keys), case.name
                typed(y, R, **{axis: dst})
                for wrong in {R, I, V, P} - {src} - ({V} if src is P else set()):
                    x = typed(torch.randn(SHAPE).requires_grad_(), R, **{axis: wrong})
                    with pytest.raises(SpmdTypeError):
                        case.run(x, axis)


def test_index_tensor_per_rank_and_type() -> None:
    with mesh_of([("pp", 2), ("dp", 2), ("tp", 2)], {"ep": ("pp", "tp")}) as mesh:
        assert [mesh.coordinate("dp", r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
        assert [mesh.coordinate("ep", r) for r in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
        assert [mesh.coordinate(("tp", "pp"), r) for r in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]
        assert mesh.size(("tp", "dp")) == 4 and mesh.world_size == 8
        assert len(mesh.groups_of(("tp", "pp"))) == 1 and len(mesh.groups_of(("dp", "tp"))) == 2
        with LocalTensorMode(8):
            index = mesh.index_tensor(("tp", "pp"), "cpu")
            assert isinstance(index, LocalTensor) and index.dtype == torch.int64 and index.shape == ()
            assert [index._local_tensors[r].item() for r in range(8)] == [0, 2, 0, 2, 1, 3, 1, 3]
        with use_mesh(mesh, untyped=("pp",)), typecheck():
            index = mesh.index_tensor("tp", "cpu")
            typed(index, tp=V, dp=R)
            assert len(spmd_types.get_local_type(index)) == 2


def test_bad_arguments_name_the_value() -> None:
    with mesh_of([("dp", 2), ("tp", 2)]) as mesh:
        x = torch.zeros(4, 3)
        for call, words in [
            (lambda: all_reduce(x, "tpp", R), "'tpp'"),
            (lambda: all_reduce(x, "tp", V), "dst"),
            (lambda: slice_(x, "tp", 1, R), "(4, 3)"),
            (lambda: slice_(x, "tp", 0, P), "src"),
            (lambda: reduce_scatter(x, "tp", 1), "(4, 3)"),
            (lambda: all_gather(x, "tp", 2, R), "dim 2"),
            (lambda: all_to_all(x, "tp", 0, 0), "both 0"),
            (lambda: mesh.size(("tp", "tp")), "twice"),
            (lambda: AxisMesh([("a", 2), ("b", 3)]), "6 ranks"),
            (lambda: AxisMesh([("a", 4), ("a", 1)]), "'a'"),
            (lambda: AxisMesh([("a", 4), ("b", 0)]), "size 0"),
            (lambda: AxisMesh([("a", 2), ("b", 2)], {"c": ("b", "a")}), "mesh order"),
            (lambda: AxisMesh([("a", 2), ("b", 2)], {"c": ("d",)}), "'d'"),
            (lambda: AxisMesh([("a", 2), ("b", 2)], {"a": ("b",)}), "'a'"),
            (lambda: AxisMesh([("a", 4)], {"c": ()}), "'c'"),
        ]:
            with pytest.raises(ValueError) as error:
                call()
            assert words in str(error.value)
    with pytest.raises(RuntimeError, match="no mesh in use"):
        current_mesh()
    with pytest.raises(RuntimeError, match="init_process_group"):
        AxisMesh([("a", 1)])


def _conversions_on_two_processes(rank: int, world: int) -> int:
    mesh = AxisMesh([("dp", 1), ("tp", world)], {"all": ("dp", "tp")})
    with use_mesh(mesh):
        for case in CASES:
            x = noncontiguous(shard(randn(1), case.src, rank, 2)).requires_grad_()
            with record_collectives() as records:
                y = case.run(x, "tp")
                (gx,) = torch.autograd.grad(y, x, noncontiguous(shard(randn(2), DUAL[case.dst], rank, 2)))
            assert [r.kind for r in records] == [k for k in (case.forward, case.backward) if k], (case.name, records)
            assert all(r.bytes == payload(r.kind, case, 2) and r.axis == "tp" for r in records), case.name
            for got, kind, salt in ((y.detach(), case.dst, 1), (gx, DUAL[case.src], 2)):
                # The values by other means than those under test.
                everyone: list[Any] = [None, None]
                dist.all_gather_object(everyone, got.contiguous())
                torch.testing.assert_close(unshard(everyone, kind), randn(salt), atol=1e-13, rtol=0)
    return len(CASES)


@pytest.mark.processes
def test_conversions_over_gloo() -> None:
    assert pool(2).run(_conversions_on_two_processes) == [len(CASES)] * 2


def test_threads_of_autograd_see_the_mesh() -> None:
    # The backward of CUDA tensors, and what it recomputes, runs in threads that autograd starts.
    with mesh_of([("tp", 2)]) as mesh, ThreadPoolExecutor(1) as threads:
        assert threads.submit(current_mesh).result() is mesh
        assert threads.submit(all_gather, torch.ones(2), "tp", 0, R).result().shape == (4,)
