"""Communicators of a mesh: which are made, in which order on every rank, and that they are given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mesh_jobs
import pytest
import torch
import torch.distributed as dist
from harness import pool
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoplan.runtime import private
from autoplan.runtime.mesh import AxisMesh, use_mesh

WORLD = 64
# hybrid ZeRO beside pipeline and tensor parallelism, as `autoplan.config.mesh` writes it
AXES = [("pp", 2), ("rdp", 1), ("sdp", 4), ("cp", 1), ("tp", 8)]
GROUPS = {
    "dp": ("rdp", "sdp"),
    "replicas": ("rdp", "sdp", "cp"),
    "shards": ("sdp", "cp"),
    "data": ("sdp", "tp"),
    "all": ("pp", "rdp", "sdp", "cp", "tp"),
}


@contextmanager
def rank_of(rank: int, world: int = WORLD) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made_on(rank: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The groups that a rank makes, its own and those it has no part in."""
    found: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        found.append(tuple(ranks))
        return new_group(ranks, **options)

    with rank_of(rank), monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        mesh = AxisMesh(AXES, GROUPS)
        for name in ("pp", "dp", "tp", "data"):
            assert dist.get_process_group_ranks(mesh.group(name)) == mesh._own_ranks(mesh.atoms(name))
            assert mesh.submesh(name).mesh.tolist() == mesh._own_ranks(mesh.atoms(name))
    return found


def test_each_group_once_in_one_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own mesh makes 184 of the axes alone: 128 of them of one rank."""
    first = made_on(0, monkeypatch)
    assert len(first) == 32 + 16 + 8 + 2  # pp, dp, tp, data; that of the world is the default group
    assert len(set(first)) == len(first) and min(map(len, first)) > 1
    assert all(made_on(rank, monkeypatch) == first for rank in (5, 41, 63))


def test_axes_of_one_rank_have_no_communicator() -> None:
    with rank_of(3, 8):
        mesh = AxisMesh([("pp", 1), ("dp", 8), ("tp", 1)])
        assert mesh.submesh("tp").size() == 1
        assert mesh.group("dp") is private.default_group()  # which spans the same ranks
        assert mesh._made == []
        assert dist.get_process_group_ranks(mesh.group("tp")) == [3]
        assert mesh.group("pp") is mesh.group("tp") and mesh._made == [mesh.group("pp")]


def test_only_what_is_sent_over_has_a_communicator() -> None:
    with rank_of(6, 8):
        mesh = AxisMesh([("outer", 2), ("group", 2), ("inner", 2)], only=["group"])
        assert mesh._made == [mesh.group("group")] and dist.get_process_group_ranks(mesh.group("group")) == [4, 6]
        with use_mesh(mesh), pytest.raises(ValueError, match="'outer' was made without a communicator"):
            mesh.group("outer")


def test_meshes_of_several_axes_follow_their_order() -> None:
    with rank_of(21):
        mesh = AxisMesh(AXES, GROUPS)
        both = mesh.submesh("tp", "sdp")
        assert both.mesh.tolist() == [[tp + 8 * dp for dp in range(4)] for tp in range(8)]
        assert both.get_group("tp") is mesh.group("tp") and both.get_group("sdp") is mesh.group("sdp")
        with pytest.raises(ValueError, match="same sub-axis twice"):
            mesh.submesh("tp", "data")


def test_groups_beside_the_axes_are_shared() -> None:
    with rank_of(9):
        mesh = AxisMesh(AXES, GROUPS)
        pairs = [[rank, rank + 32] for rank in range(32)]
        assert mesh.group_of_some(pairs, "tied") is mesh.group("pp")
        assert mesh.group_of_some([[0, 1]], "other") is None
        made = mesh.group_of_some([[9, 40], [10, 41]], "other")
        assert made is not None and dist.get_process_group_ranks(made) == [9, 40]


def test_groups_are_given_back() -> None:
    with rank_of(9):
        before = len(dist.distributed_c10d._world.pg_map)
        mesh = AxisMesh(AXES, GROUPS)
        assert len(dist.distributed_c10d._world.pg_map) == before + 4
        mesh.close()
        assert len(dist.distributed_c10d._world.pg_map) == before
        AxisMesh(AXES, GROUPS).close()  # and can be made anew


def connected_on(rank: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ranks of every group that a rank connects, in order, if its device were a GPU."""
    found: list[list[int]] = []
    zeros = torch.zeros
    with rank_of(rank), monkeypatch.context() as patch:
        mesh = AxisMesh(AXES, {n: g for n, g in GROUPS.items() if n != "all"})
        mesh.group_of_some([[other, other + 1] for other in range(0, WORLD, 2)], "tied")
        patch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
        patch.setattr(torch.cuda, "synchronize", lambda device: found.append([]))
        patch.setattr(dist, "all_reduce", lambda _, group: found.append(dist.get_process_group_ranks(group)))
        mesh.connect(torch.device("cpu"))
        assert found == []  # gloo connects when a group is made
        mesh.connect(torch.device("cuda", 0))
    return found


def test_every_communicator_is_connected_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the axes, of other groups, and of all ranks, over which norms go; then the host waits once."""
    first, last = connected_on(0, monkeypatch), connected_on(63, monkeypatch)
    assert first[0] == list(range(WORLD)) and first[-1] == []
    assert [0, 1] in first and [0, 32] in first and list(range(8)) in first
    assert len(first) == len({tuple(ranks) for ranks in first}) == 7
    # position by position the groups are alike, or two ranks would wait for each other
    assert [len(ranks) for ranks in last] == [len(ranks) for ranks in first]
    assert all(63 in ranks for ranks in last[:-1])


def test_stages_that_send_are_connected_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank meets its neighbours in the same order, so that no two wait for each other: a simulation of all."""
    pairs, calls = [(0, 1), (0, 3), (1, 2), (2, 3)], dict[int, list[tuple[int, int]]]()
    zeros = torch.zeros
    for rank in range(4):
        calls[rank] = []
        with rank_of(rank, 4), monkeypatch.context() as patch:
            mesh = AxisMesh([("pp", 4)])
            patch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
            patch.setattr(torch.cuda, "synchronize", lambda device: None)
            patch.setattr(dist, "all_reduce", lambda _, group: None)
            patch.setattr(dist, "send", lambda _, group, group_dst, rank=rank: calls[rank].append((rank, group_dst)))
            patch.setattr(dist, "recv", lambda _, group, group_src, rank=rank: calls[rank].append((group_src, rank)))
            mesh.connect(torch.device("cuda", 0), "pp", pairs)
    met = []
    while any(calls.values()):
        ready = [c[0] for c in calls.values() if c and all(calls[r][:1] == [c[0]] for r in c[0])]
        assert ready, f"deadlock: {calls}"
        met.append(ready[0])
        for rank in ready[0]:
            calls[rank].pop(0)
    assert sorted(met) == pairs


class _Bound:
    """What `split_group` was asked for, where the default group is bound to a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[list[int]]] = []
        new_group = dist.new_group
        monkeypatch.setattr(private, "bound_device", lambda: torch.device("cuda:0"))
        monkeypatch.setattr(dist, "new_group", lambda *a, **k: pytest.fail("every rank would split for every group"))

        def split_group(split_ranks: list[list[int]], group_desc: str) -> Any:
            self.calls.append(split_ranks)
            mine = next((g for g in split_ranks if dist.get_rank() in g), None)
            return None if mine is None else new_group(mine, group_desc=group_desc)

        monkeypatch.setattr(dist, "split_group", split_group)


def test_bound_to_a_device_an_axis_is_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for rank in (0, 37):
        with rank_of(rank), monkeypatch.context() as patch:
            bound = _Bound(patch)
            AxisMesh(AXES, GROUPS)
            seen.append(bound.calls)
    assert len(seen[0]) == 4 and seen[0] == seen[1]
    assert all(sorted(r for g in groups for r in g) == list(range(WORLD)) for groups in seen[0])


@pytest.mark.processes
def test_groups_made_again_carry_values() -> None:
    assert pool(4).run(mesh_jobs.made_twice) == [mesh_jobs.WANTED] * 4
