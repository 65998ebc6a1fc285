"""Communicators: the price counts those that the runtime makes, and its bytes meet what was published."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoplan
from autoplan.config.mesh import ParallelDims, folds, tensor_axes
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.parts import Group
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.work import MessageKind, ParamWork, TiedParam, Workload
from autoplan.runtime import private
from autoplan.runtime.mesh import AxisMesh
from autoplan.units import GIB, MIB

CPUS, CONTEXT = Cluster.local(2, "cpu"), 0.6 * GIB


def priced(
    cluster: Cluster,
    axes: tuple[tuple[str, int], ...] = (),
    experts: bool = False,
    messages: tuple[MessageKind, ...] = (),
    tied: tuple[TiedParam, ...] = (),
) -> FixedMemory:
    """What the price reads of a workload."""
    work = SimpleNamespace(axes=axes, has_expert_parameters=experts, messages=frozenset(messages), tied=tied)
    return FixedMemory(cast(Workload, work), cluster)


@contextmanager
def made(rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The ranks of every communicator that a rank has while this holds, without those of one rank."""
    found: list[tuple[int, ...]] = []
    form = private.form_groups

    def formed(*arguments: Any) -> dist.ProcessGroup | None:
        group = form(*arguments)
        if group is not None:
            found.append(tuple(dist.get_process_group_ranks(group)))
        return group

    with monkeypatch.context() as patch:
        patch.setattr(private, "form_groups", formed)
        yield found


def around(rank: int, span: tuple[Group, ...]) -> tuple[int, ...]:
    """The ranks that differ from one along sub-axes."""
    ranks = [rank]
    for group in span:
        ranks = [
            r - r // group.stride % group.size * group.stride + i * group.stride
            for r in ranks
            for i in range(group.size)
        ]
    return tuple(sorted(set(ranks)))


def configurations() -> Iterator[tuple[ParallelConfig, int]]:
    """Every kind of mesh of at most 16 ranks, with the ranks of tp that have key-value heads of their own."""
    for pp, dp, cp, tp in itertools.product((1, 2), (1, 2, 4), (1, 4), (1, 4)):
        for kv, ep, etp, copies, method in itertools.product(
            (1, 2), (1, 2, 4), (None, 1), (1, 2), (None, "ring", "ulysses2xring2")
        ):
            c = ParallelConfig(
                pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, zero_replicas=copies, zero_stage=1, context_method=method
            )
            legal = c.num_devices <= 16 and dp % copies == 0 and (method is not None) == (cp > 1)
            if (
                legal
                and (tp > 1 or kv == 1)
                and folds(dp, cp, tp, ep, c.expert_tp, 2 if method == "ulysses2xring2" else 1, copies)
            ):
                yield c, kv


def test_the_price_counts_the_groups_that_the_runtime_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pp, dp, cp with products of methods, tp with two sub-axes, ep and etp, hybrid ZeRO."""
    compared, most = 0, 0
    for c, kv in list(configurations())[::3]:
        experts, tensor = c.ep > 1 or c.etp is not None, tensor_axes(c.tp, kv)
        mesh, world = ParallelDims(c, tensor, experts).mesh, c.num_devices
        rank = world - 1
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            with made(rank, world, monkeypatch) as found:
                AxisMesh([(a.name, a.size) for a in mesh.axes], mesh.groups, device_type="cpu")
        finally:
            dist.destroy_process_group()
        wanted = priced(CPUS, tuple((a.name, a.size) for a in tensor if c.tp > 1), experts).communicators(c)
        whole = [tuple(range(world))] * (world > 1)
        assert sorted(around(rank, span) for span in wanted) == sorted([*whole, *found]), c
        compared, most = compared + 1, max(most, len(wanted))
    assert compared > 60 and most >= 8


# gpt2 ties embedding and head: with four stages, first and last have a group of their own
PLANS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "tied, pipeline": ("gpt2", "1x8xh100-sxm5-80gb", 1024, 32, {"pp": 4, "tp": 1, "zero_stage": 1, "schedule": "1F1B"}),
    "hybrid ZeRO": ("gpt2", "2x4xh100-sxm5-80gb", 1024, 16, {"dp": 8, "zero_stage": 2, "zero_replicas": 2}),
    "tp0 x tp1": ("llama-3.2-1b", "2x8xh100-sxm5-80gb", 1024, 2, {"tp": 16, "pp": 1}),
    "experts": (
        *("mixtral-8x7b", "4x8xh100-sxm5-80gb", 1024, 32),
        {"tp": 2, "pp": 1, "cp": 1, "ep": 4, "etp": 1, "zero_stage": 3, "offload": "none", "recompute": "full"},
    ),
}


@pytest.mark.parametrize(
    "name", [*list(PLANS)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLANS)[1:])]
)
def test_a_whole_program_makes_no_other_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsed rank makes until its first update, beside what the price of its plan counted."""
    model, cluster, seq_len, batch, pins = PLANS[name]
    plan = autoplan.plan(
        model, cluster, seq_len=seq_len, global_batch_size=batch, pins=pins, precision="bf16", compile=False
    )
    asked: list[tuple[FixedMemory, ParallelConfig]] = []
    of = FixedMemory.of

    def counted(self: FixedMemory, config: ParallelConfig) -> Any:
        asked.append((self, config))
        return of(self, config)

    world = plan.config.num_devices
    monkeypatch.setattr(FixedMemory, "of", counted)
    with made(world - 1, world, monkeypatch) as found:
        assert autoplan.rehearse(plan, "last").differences == ()
    memory, config = asked[-1]
    assert config.num_devices == world
    wanted = sorted(around(world - 1, span) for span in memory.communicators(config))
    assert wanted == sorted([tuple(range(world)), *found])
    assert ((0, world - 1) in wanted or len(wanted) > 2) and all(len(ranks) > 1 for ranks in wanted)


def test_tied_parameters_need_a_group_where_no_axis_has_it() -> None:
    tied = (TiedParam(0, 3, ParamWork("w", 25, "float32", True)),)

    def count(pp: int, schedule: str = "1F1B", virtual: int = 1) -> int:
        c = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual, num_micro_batches=8)
        without = len(priced(CPUS).communicators(c))
        return len(priced(CPUS, tied=tied).communicators(c)) - without

    assert (count(1), count(2), count(4)) == (0, 0, 1)
    assert count(4, "ZBV", 2) == 0  # the first rank has the last stage, too


# -- bytes -------------------------------------------------------------------------------------------------------------


def of(cluster: str, *messages: MessageKind, **degrees: int) -> int:
    """Bytes beside the CUDA context."""
    found = priced(Cluster.parse(cluster), messages=messages).of(ParallelConfig(**degrees))
    assert found.low < found.mid < found.high and str(found.tag) == "assumed"
    return round(found.mid - CONTEXT)


def test_bytes_of_a_communicator_are_those_that_were_published() -> None:
    """NVIDIA/nccl issues 964 (A100, 544 MiB for two), 2363 (B300, 512 MiB of slots), 1685 (all-to-all of 8 H100)."""
    assert of("1x2xa100-sxm4-80gb", dp=2) == 544 * MIB
    assert of("1x8xb200-sxm-180gb", dp=8) == (512 + 64 * 12) * MIB
    plain, sent = (of("1x8xh100-sxm5-80gb", *m, dp=8, ep=8) for m in ((), (MessageKind("all_to_all", "ep", None),)))
    assert plain == 544 * MIB and sent - plain == pytest.approx(3.28e9, rel=0.15)


def test_groups_across_nodes_have_two_channels_for_each_network_card() -> None:
    one, eight = (of(f"{n}xh100-sxm5-80gb", dp=16) for n in ("16x1", "2x8"))
    assert one == (64 // 16 + 2 * 12) * MIB and eight == (64 + 16 * 12) * MIB
    assert of("16x8xh100-sxm5-80gb", dp=128) == eight  # rings do not grow with the group


def test_nothing_on_cpus_and_the_context_alone_on_one_gpu() -> None:
    assert priced(CPUS).of(ParallelConfig(dp=2)).high == 0
    assert of("1x1xh100-sxm5-80gb") == 0


def test_messages_need_connections_to_peers_within_reach() -> None:
    """Of a ring to one neighbour, of a pipeline to both, of an all-to-all to all; across nodes two channels each."""
    gpus, cp = "4x8xh100-sxm5-80gb", {"cp": 4, "dp": 8}
    peer = 32 * 12 * MIB
    assert of(gpus, MessageKind("send_recv", "cp", None), **cp) - of(gpus, **cp) == peer
    assert of(gpus, MessageKind("all_to_all", "cp", None), **cp) - of(gpus, **cp) == 3 * peer
    two = (MessageKind("all_to_all", "cp", (2, 1)), MessageKind("send_recv", "cp", (2, 2)))
    assert of(gpus, *two, **cp) - of(gpus, **cp) == 2 * peer
    wide = {"ep": 16, "dp": 32}
    assert of(gpus, MessageKind("all_to_all", "ep", None), **wide) - of(gpus, **wide) == 7 * 2 * 12 * MIB
    inside = of("1x8xh100-sxm5-80gb", pp=8)
    assert inside == 544 * MIB + 2 * peer  # the stages are the world
    assert of("1x2xh100-sxm5-80gb", pp=2) == 544 * MIB + peer
