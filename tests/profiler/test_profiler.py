"""Measuring: every operation of a model runs by itself as emitted, ranks agree, budgets hold, results are kept."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import profiler_jobs
import pytest
import torch
import torch.distributed as dist
from harness import pool
from models import gpt_loss, make_gpt, make_llama, make_mixtral, token_batch
from torch import nn

from autoplan.capture.export import capture
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.collective_kinds import MEASURED_COLLECTIVES
from autoplan.cost_models.profile import OVERHEADS, LinkRecord, MeasuredOp, Profile, Timing
from autoplan.errors import ProfileError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis
from autoplan.ops.table import op_record
from autoplan.profiler.calm import disturbed_parts, with_loads, without_parts
from autoplan.profiler.job import Job
from autoplan.profiler.lattice import (
    adamw_task,
    attention_task,
    embedding_task,
    held_out,
    lattice,
    linear_task,
    spread,
    view_task,
)
from autoplan.profiler.links import _Meshes, layouts
from autoplan.profiler.ops import Clock, MeasureTask, cache_bytes, compiled, make_input, measure_op
from autoplan.profiler.overheads import _Runs
from autoplan.profiler.run import (
    cached_profile,
    keep_profile,
    machine_key,
    measure,
    measure_in_job,
    resolve,
    store_profile,
)
from autoplan.profiler.show import summary
from autoplan.profiler.tasks import model_tasks
from autoplan.program.op_costs import OpCosts
from autoplan.runtime.mesh import AxisMesh, use_mesh

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
ENV = {"b": 2, "s": 16}


@pytest.fixture
def alone() -> Iterator[None]:
    """A mesh of one process, as dropout wants."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with use_mesh(AxisMesh([("all", 1)])):
            yield
    finally:
        dist.destroy_process_group()


def gpt() -> ModelGraph:
    tokens = token_batch(2, 16)
    return capture(
        make_gpt(dropout=0.1, num_layers=1), {"ids": tokens["input_ids"], "labels": tokens["labels"]}, gpt_loss
    )


def llama() -> ModelGraph:
    return capture(make_llama(num_hidden_layers=1), token_batch(2, 16))


def run(task: MeasureTask) -> list[torch.Tensor]:
    inputs = [make_input(t, task, i, CPU) for i, t in enumerate(task.work.inputs)]
    result = compiled(task, CPU)(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("model", [gpt, llama])
@pytest.mark.parametrize("degree", [1, 2])
def test_operations_of_a_model_give_what_their_work_says(model: object, degree: int, alone: None) -> None:
    graph = model()  # type: ignore[operator]
    axes = (Axis("tp", 2),) if degree == 2 else ()
    tasks = model_tasks(OpCosts(graph, axes, ENV))
    nodes = {n.op for block in graph.blocks.values() for n in block.nodes}
    assert {t.work.op for t in tasks} == nodes
    for task in tasks:
        outs = run(task)
        found = [(tuple(o.shape), str(o.dtype).removeprefix("torch.")) for o in outs]
        assert found == [(t.shape, t.dtype) for t in task.work.outputs], f"{task.work.key}: {task.text}"
        if not task.work.has_backward:
            continue
        assert any(o.requires_grad for o in outs) == any(t.requires_grad for t in task.work.outputs), task.work.key
    keys = [t.work.key for t in tasks]
    assert len(set(keys)) == len(keys)


def test_shards_are_measured_too() -> None:
    graph = gpt()
    shapes = {
        t.work.inputs[1].shape for t in model_tasks(OpCosts(graph, (Axis("tp", 2),), ENV)) if t.work.op == "linear"
    }
    assert {(128, 32), (64, 32), (32, 128), (32, 64)} <= shapes


def test_inputs_lie_in_memory_as_in_the_model() -> None:
    tasks = model_tasks(OpCosts(gpt(), (), ENV))
    (attention,) = (t for t in tasks if t.work.op == "attention")
    q = make_input(attention.work.inputs[0], attention, 0, CPU)
    assert not q.is_contiguous() and q.transpose(1, 2).is_contiguous()
    # the kernel writes [b, s, h, d], so that its output is a view with the heads inside and joining them copies nothing
    back = next(t for t in tasks if t.work.op == "transpose" and t.work.inputs[0].shape == (2, 4, 16, 8))
    assert back.orders == {0: (0, 2, 1, 3)}
    assert run(back)[0].is_contiguous()


def test_measure_op(alone: None) -> None:
    clock, cache = Clock(CPU), 1 << 16
    for task in (
        linear_task(8, 16, 8, "float32"),
        attention_task(1, 2, 8, 4, "float32"),
        view_task("reshape", "float32"),
    ):
        record = measure_op(task, clock, cache, limit_s=0.01)
        assert record.work == task.work and record.backward_s is not None
        for t in (record.forward_s, record.backward_s):
            assert 0 < t.low <= t.median <= t.high and t.repeats >= 2
    frozen = linear_task(8, 16, 8, "float32")
    inputs = tuple(dataclasses.replace(t, requires_grad=False) for t in frozen.work.inputs)
    frozen = dataclasses.replace(frozen, work=dataclasses.replace(frozen.work, inputs=inputs))
    assert measure_op(frozen, clock, cache, limit_s=0.01).backward_s is None
    assert measure_op(adamw_task(100, "float32"), clock, cache, limit_s=0.01).backward_s is None
    assert measure_op(embedding_task(8, 32, 4, "float32"), clock, cache, limit_s=0.01).backward_s is not None


def test_an_operation_that_fails_is_an_error(alone: None) -> None:
    task = dataclasses.replace(linear_task(8, 16, 8, "float32"), text="F.linear(x1, x0.T)")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure_op(task, Clock(CPU), 1 << 16, limit_s=0.01)


def test_ranks_repeat_together_where_a_host_was_late(alone: None) -> None:
    class Timer:
        lead, late, runs = 1, False, 0

        def measure(self, work: Callable[[], object], warm: object) -> tuple[float, object]:
            self.runs += 1
            self.late = self.lead < 4
            self.lead *= 2 if self.late else 1
            return 1.0 / self.runs, work()

    timer = Timer()
    job = Job(CPU, time.monotonic() + 60.0, timer=timer)  # type: ignore[arg-type]
    assert job.wall(lambda: None) == pytest.approx(1 / 3) and timer.runs == 3 and timer.lead == 4
    assert job.until(0.5).timer is timer


def test_lattice() -> None:
    tasks = lattice("float32", 1e8, 1e7)
    names = [op_record(t.work.op).measured_as for t in tasks]
    classes = set(names)
    assert {"linear", "attention", "elementwise", "transcendental", "norm", "view", "embedding"} <= classes
    assert set(names[: len(names) // 3]) >= {
        "linear",
        "attention",
        "elementwise",
    }
    assert all(t.work.flops <= 1e8 and t.num_bytes <= 1e7 for t in tasks)
    mine, others = {t.work.key for t in tasks}, [t.work.key for t in held_out("float32", 1e8, 1e7)]
    assert len(mine) == len(tasks) and not mine & set(others)
    assert {op_record(t.work.op).measured_as for t in held_out("float32", 1e8, 1e7)} >= classes - {"view"}


def test_group_layouts() -> None:
    assert layouts(2) == [(2, 1)]
    assert layouts(4) == [(2, 1), (2, 2), (4, 1)]
    assert set(layouts(6)) == {(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)}


class Tagger(nn.Module):
    """A recurrent network over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.out = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(ids), lengths, True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], True, total_length=ids.shape[1])
        return nn.functional.cross_entropy(self.out(states).flatten(0, 1), labels.flatten())


def test_parts_of_experts_and_layers_by_length_are_measured(alone: None) -> None:
    """Their numbers were drawn like those of any integer input: experts of other ranks, a length of zero."""
    tokens = token_batch(2, 16)
    experts = model_tasks(OpCosts(capture(make_mixtral(), tokens), (Axis("tp", 2),), ENV))
    batch = {"ids": torch.ones(2, 6, dtype=torch.long), "lengths": torch.tensor([6, 4])}
    graph = capture(Tagger(), {**batch, "labels": batch["ids"]})
    tasks = [t for t in experts if t.work.op == "experts"] + model_tasks(OpCosts(graph, (), {"b": 2, "s": 6}))
    assert any(t.work.inputs[3].shape[0] == 2 for t in tasks if t.work.op == "experts"), "a part of four experts"
    assert any(t.work.op == "recurrent" for t in tasks)
    profile = measure_in_job(tasks, 60.0, general=False, progress=False)
    assert profile.failed == {} and set(profile.by_key) == {t.work.key for t in tasks}


def test_links_measured_beside_other_work_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    fast, slow = (LinkRecord("all_reduce", 2, 1, 64, Timing(s, s, s, 9)) for s in (1e-4, 2e-2))
    none = Profile("mine", "cpu", 2, 1)
    busy = replace(none, links=(slow, replace(slow, num_bytes=1024)), overheads={"step_s": 1.0})
    busy = replace(busy, machine=with_loads(none, busy, 14.0))
    assert disturbed_parts(busy, 8.0, 2) == [] == disturbed_parts(busy, 0.1, 64), "nearly as busy, or never busy"
    parts = disturbed_parts(busy, 0.5, 2)
    assert parts == ["links", "overheads"] and disturbed_parts(replace(busy, device_type="cuda"), 0.5, 2) == []
    store_profile(busy, "mine")
    known = without_parts(busy, parts)
    assert (known.links, known.overheads) == ((), {})
    again = replace(known, links=(fast,))
    again = replace(again, machine={**again.machine, **with_loads(known, again, 0.5)})
    store_profile(again, "mine")
    kept = cached_profile("mine")
    assert kept is not None and kept.links == (fast,), "no time of the busy machine is left"
    assert kept.overheads == {"step_s": 1.0}, "what was not measured again stays"
    assert disturbed_parts(kept, 0.5, 2) == ["overheads"]


def test_cache_bytes_is_plausible() -> None:
    assert 1 << 17 <= cache_bytes(CPU) <= 1 << 32


def test_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    key = machine_key(2, "cpu", 1)
    assert key.startswith("cpu-") and key.endswith("-w2-t1-m5") and cached_profile(key) is None
    path = store_profile(Profile(key, "cpu", 2, 1, overheads={"step_s": 1e-3}), key)
    store_profile(Profile(key, "cpu", 2, 1, overheads={"clip_s": 1e-4}), key)
    kept = cached_profile(key)
    assert kept is not None and kept.overheads == {"step_s": 1e-3, "clip_s": 1e-4}
    assert Profile.load(key).name == key
    path.write_text('{"schema": 1}')
    assert cached_profile(key) is None and not path.exists()


def test_times_that_cannot_be_kept_are_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept, so that the next run measures again"):
        keep_profile(Profile("mine", "cpu", 2, 1), "mine")
    assert cached_profile("mine") is None


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    monkeypatch.delenv("AUTOPLAN_PROFILE", raising=False)
    assert resolve() == "measure"
    monkeypatch.setenv("AUTOPLAN_PROFILE", "assumed")
    assert resolve() is None
    Profile("here", "cpu", 1, 1).save(tmp_path / "here.json")
    monkeypatch.setenv("AUTOPLAN_PROFILE", str(tmp_path / "here.json"))
    found = resolve()
    assert isinstance(found, Profile) and found.name == "here"
    monkeypatch.setenv("AUTOPLAN_PROFILE", "nowhere")
    with pytest.raises(ProfileError, match="'nowhere' is not known"):
        resolve()


def test_number_of_processes() -> None:
    with pytest.raises(ProfileError, match="at least 1 process, got 0"):
        measure(processes=0)


@pytest.mark.processes
def test_ranks_leave_out_the_same() -> None:
    """What is too large for the least memory, and what one rank cannot run, with its reason on all."""
    first, second = pool(2).run(profiler_jobs.measure_unlike)
    assert first == second
    measured, failed = first
    assert measured == ["0"]
    assert sorted(failed.values()) == ["RuntimeError: no kernel for this", "too large for this machine's memory"]


@pytest.mark.processes
def test_the_cpu_is_not_measured_for_a_gpu() -> None:
    found = pool(2).run(profiler_jobs.measured_on, "cuda")
    assert found[0] == found[1]
    assert found[0].startswith("DeviceError: the program is to run on CUDA devices, but the process sees no GPU")
    assert pool(2).run(profiler_jobs.measured_on, "cpu") == ["measured"] * 2


@pytest.mark.processes
def test_ranks_measure_together() -> None:
    texts = pool(2).run(profiler_jobs.measure, 6.0, True, timeout_s=120.0)
    assert texts[0] == texts[1]
    profile = Profile.from_json(texts[0])
    assert profile.world_size == 2 and profile.num_threads == 1
    assert linear_task(32, 64, 32, "float32").work.key in profile.by_key
    missing = {
        kind for kind in MEASURED_COLLECTIVES if any(f"no time for {kind} over 2" in note for note in profile.notes)
    }
    assert profile.links and {r.kind for r in profile.links} | missing == set(MEASURED_COLLECTIVES)
    assert all(name in OVERHEADS for name in profile.overheads)
    assert any("no time for" in note for note in profile.notes)  # a few seconds are not enough, and it says so
    summary(profile)


def test_operations_of_one_size_are_not_measured_one_after_the_other(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of a shared machine drifts: whatever is compared is measured all over the time that there is."""
    numbers = list(range(400))
    for start in (0, 100, 300):  # each quarter has some of every quarter
        part = spread(numbers)[start : start + 100]
        assert min(sum(n // 100 == k for n in part) for k in range(4)) >= 20
    assert sorted(spread(numbers)) == numbers
    tasks = [adamw_task(100 + size, "float32") for size in range(12)]
    measured: list[MeasureTask] = []

    def measure_one(task: MeasureTask, *_: object) -> MeasuredOp:
        measured.append(task)
        return measure_op(task, *_)  # type: ignore[arg-type]

    monkeypatch.setattr("autoplan.profiler.run.measure_op", measure_one)
    profile = measure_in_job(tasks, 20.0, general=False, progress=False)
    assert measured == spread(tasks) != tasks and len(profile.ops) == len(tasks)


def test_the_default_dtype_of_a_script_is_not_that_of_the_measurement(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages that are timed state float32; with `torch.set_default_dtype(torch.float64)` they computed another."""
    seen: list[torch.dtype] = []

    def measure_one(task: MeasureTask, *_: object) -> MeasuredOp:
        seen.append(torch.get_default_dtype())
        return measure_op(task, *_)  # type: ignore[arg-type]

    monkeypatch.setattr("autoplan.profiler.run.measure_op", measure_one)
    torch.set_default_dtype(torch.float64)
    try:
        measure_in_job([adamw_task(100, "float32")], 20.0, general=False, progress=False)
        assert seen == [torch.float32] and torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.processes
def test_what_is_known_is_not_measured_again() -> None:
    first, second = pool(2).run(profiler_jobs.measure_again)[0]
    assert len(first) == 1 and len(second) == 2 and set(first) < set(second)


@pytest.mark.processes
def test_measure_spawns_and_ends_its_processes() -> None:
    profile = measure("spawned", budget_s=1.0, tasks=[linear_task(8, 16, 8, "float32")], progress=False)
    assert profile.name == "spawned" and profile.world_size == 1 and not profile.links
    assert linear_task(8, 16, 8, "float32").work.key in profile.by_key


def test_communicators_of_measurements_are_given_back() -> None:
    """On a GPU each takes hundreds of megabytes, which the training needs."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    groups = dist.distributed_c10d._world.pg_map
    try:
        job = Job(CPU, time.monotonic() + 60.0)
        with _Meshes(job) as meshes:
            meshes.over(2, 1)
            assert meshes.over(2, 2) is meshes.over(2, 2) and len(groups) == 3
        assert len(groups) == 1
        runs = _Runs(job, Profile("none", "cpu", 4, 1), host=False)
        runs.model(2, dp=2, pp=2, zero_stage=0)
        assert len(groups) == 3
        runs.close()
        assert len(groups) == 1
    finally:
        dist.destroy_process_group()


def test_what_is_measured_is_random() -> None:
    """Zeros and ones draw less power than training, at higher clocks: operands, and the product for the clock."""
    task = linear_task(64, 64, 64, "bfloat16")
    for operand in (make_input(t, task, i, CPU).float() for i, t in enumerate(task.work.inputs)):
        assert operand.std().item() == pytest.approx(1.0, abs=0.1) and operand.unique().numel() > 100
    lookup = embedding_task(256, 32, 4, "float32")
    (ids,) = (i for i, t in enumerate(lookup.work.inputs) if t.dtype == "int64")
    assert make_input(lookup.work.inputs[ids], lookup, ids, CPU).unique().numel() > 10


@pytest.mark.processes
def test_one_group_alone() -> None:
    results = pool(4).run(profiler_jobs.share)
    assert all(r == results[0] for r in results)
    found, left, none = results[0]
    alone = {(r.group_size, r.stride, r.num_bytes) for r in found if r.alone_s is not None}
    assert alone == {(2, 1, 4096), (2, 2, 4096)} and len(found) == 6  # a group of all ranks shares with none
    assert left == [] and none == ["2 of 2 collectives of one group alone"]
    assert all(r.alone_s.median < 1.0 and r.time_s.median == 1.0 for r in found if r.alone_s is not None)


@pytest.mark.processes
def test_a_collective_beside_products() -> None:
    first, second = pool(2).run(profiler_jobs.interfere)
    assert first == second and set(first) <= set(OVERHEADS)
    assert 0 <= first["overlap_fraction"] <= 1
    assert first["overlap_compute_slowdown"] >= 1 and first["overlap_collective_slowdown"] >= 1


def two_nodes(
    folder: Path, *command: str, budget_s: float, timeout_s: float = 100.0, cluster: str = "cluster.yaml"
) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun with a process each on this machine, as on two nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "AUTOPLAN_CACHE": str(folder),
        "AUTOPLAN_TIMEOUT_S": str(timeout_s),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    agents = []
    for rank in range(2):
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        agent += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        agent += [*command, "profile", "pair", "--budget", str(budget_s), "--write-cluster", cluster]
        with (folder / f"node{rank}.log").open("w") as log:
            agents.append(subprocess.Popen(agent, env=environment, stdout=log, stderr=log, text=True, cwd=folder))
    return agents


def ended(agents: list[subprocess.Popen[str]]) -> list[int]:
    """Exit codes; none is left running. torchrun ends its processes when it is told to end."""
    try:
        first = agents[0].wait(timeout=120.0)
        if first:
            agents[1].terminate()
        return [first, agents[1].wait(timeout=120.0)]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.processes
def test_two_nodes_under_torchrun(tmp_path: Path) -> None:
    agents = two_nodes(tmp_path, "-m", "autoplan", budget_s=3.0)
    codes, logs = ended(agents), [(tmp_path / f"node{i}.log").read_text() for i in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    profile = Profile.from_json((tmp_path / "profiles" / "pair.json").read_text())
    assert profile.world_size == 2 and profile.hardware["nodes"] == 2 and profile.hardware["ranks_per_node"] == 1
    assert profile.links and all(r.crosses_nodes(1) for r in profile.links)
    assert profile.machine["nodes"] == 2 and len(profile.machine["clocks_after"]) == 2
    assert socket.gethostname() not in profile.to_json()
    assert "written to" in logs[0] and "written to" not in logs[1]  # rank 0 writes
    cluster = Cluster.parse(str(tmp_path / "cluster.yaml"))
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device_type) == (2, 1, "cpu")


@pytest.mark.processes
def test_no_rank_waits_for_one_that_cannot_write(tmp_path: Path) -> None:
    agents = two_nodes(tmp_path, "-m", "autoplan", budget_s=60.0, cluster="missing/cluster.yaml")
    try:
        codes = [agent.wait(timeout=100.0) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    logs = [(tmp_path / f"node{i}.log").read_text() for i in range(2)]
    assert 0 not in codes and all("error: cannot write missing/cluster.yaml: there is no folder" in x for x in logs)
    assert not (tmp_path / "profiles").exists()


@pytest.mark.processes
@pytest.mark.parametrize("how", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_node_that_fails_is_named(how: str, tmp_path: Path) -> None:
    job = str(Path(__file__).parents[1] / "profiler_dies.py")
    # a node that hangs is waited for; one that dies is seen at once, and a busy machine may be slow to let the two meet
    agents = two_nodes(tmp_path, job, how, budget_s=60.0, timeout_s=20.0 if how == "hangs" else 60.0)
    codes, logs = ended(agents), [(tmp_path / f"node{i}.log").read_text() for i in range(2)]
    assert 0 not in codes
    assert f"on node {socket.gethostname()} (node rank 1)" in logs[0], logs[0]
    assert not (tmp_path / "profiles").exists()


def test_source_and_target_may_have_one_length_each() -> None:
    """What is measured on the first run on a machine is that of both lengths."""
    (asked,) = pool(1).run(profiler_jobs.asked_by_parallelize)
    assert asked > 0
