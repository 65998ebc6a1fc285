"""A rank that raises, dies or hangs: the others end in time and know the reason."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from failing_jobs import (
    answer,
    fail_in_pipeline,
    fail_in_step,
    long_work_of_first,
    misbehave,
    quiet_but_healthy,
    raise_and_live,
    read_beside_foreign_threads,
    unguarded,
)
from harness import PATIENCE, JobError, Pool, end_pools, free_port, pool

from autoplan.runtime import activity, failure
from autoplan.runtime.agree import agreed
from autoplan.runtime.failure import RankFailure, guard, is_broken_collective
from autoplan.runtime.news import Knowledge, News, NewsKind
from autoplan.runtime.optim import guard_step
from autoplan.runtime.peers import Address, Listener, Silence, ask
from autoplan.runtime.ranks import Ranks
from autoplan.runtime.timeouts import timeout_of
from experiments.faults import run as faults
from experiments.faults.worker import Cell

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
# What the process groups of these tests allow a collective; the others must end well before or, if a rank hangs, soon
# after.
TIMEOUT_S = 10.0


@pytest.mark.processes
def test_a_rank_that_raises_and_lives_on_keeps_nobody_waiting(tmp_path):
    live_s = 5 * PATIENCE
    with Pool(3) as workers:
        for rank, (seconds, said, num) in enumerate(workers.run(raise_and_live, 1, 120.0, live_s, tmp_path)):
            assert said.startswith("rank 1 failed: ZeroDivisionError: a stage"), said
            assert num == 3  # two connections, and the socket on which gloo accepts them
            assert rank == 1 or seconds < live_s, seconds


@pytest.mark.processes
@pytest.mark.parametrize(("world", "bad"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_rank_that_raises_is_named_with_its_reason_on_every_rank(world, bad):
    with Pool(world) as workers:
        for rank, (seconds, origin, message) in enumerate(workers.run(fail_in_step, bad, "raise", TIMEOUT_S)):
            assert origin == bad
            assert message.startswith(f"rank {bad} failed: ZeroDivisionError: a batch without tokens"), message
            assert ("[seen by rank" in message) == (rank != bad)
            assert seconds < TIMEOUT_S


@pytest.mark.processes
@pytest.mark.parametrize("bad", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_also_where_it_hosts_the_store(bad):
    with Pool(3) as workers:
        outcomes = workers.run_each(fail_in_step, bad, "die", TIMEOUT_S, timeout_s=30)
    assert [outcome.status for outcome in outcomes] == ["died" if rank == bad else "ok" for rank in range(3)]
    for outcome in (o for o in outcomes if o.status == "ok"):
        seconds, origin, message = outcome.value
        assert origin == bad
        assert message.startswith(f"rank {bad} failed: its process is gone without a word"), message
        assert "in step 1 (all_reduce)" in message
        assert seconds < TIMEOUT_S


@pytest.mark.processes
def test_without_the_guard_the_same_fault_names_nobody():
    with Pool(2) as workers:
        outcomes = workers.run_each(unguarded, 1, timeout_s=30)
    message = outcomes[0].value
    assert is_broken_collective(RuntimeError(message)) and "rank 1" not in message


@pytest.mark.processes
@pytest.mark.parametrize(
    ("bad", "how", "reason"),
    [
        pytest.param(
            0, "stop", "does not answer for 2 s: its process is stopped, or its machine hangs", marks=pytest.mark.slow
        ),
        (1, "hang", "alive, but did not come to the collective in which others wait: in step 1"),
    ],
)
def test_a_silent_rank_is_told_from_a_late_one_after_the_timeout(bad, how, reason):
    with Pool(3) as workers:
        left = [rank for rank in range(3) if rank != bad]
        outcomes = workers.run_each(fail_in_step, bad, how, 3.0, timeout_s=20 * PATIENCE, awaited=left)
    for outcome in outcomes:
        seconds, origin, message = outcome.value
        assert origin == bad and message.startswith(f"rank {bad} failed: {reason}"), message
        assert seconds > 2.5


@pytest.mark.processes
def test_a_rank_that_is_slow_or_answers_nothing_is_not_blamed_while_it_lives():
    for total, news in pool(3).run(quiet_but_healthy, 1.5):
        assert (total, news) == (9.0, [])


@pytest.mark.processes
def test_the_work_of_rank_0_counts_against_no_timeout():
    with Pool(2) as workers:
        results = workers.run(long_work_of_first, True, 1.5)
        assert [result for result, _ in results] == ["planned"] * 2
        assert results[0][1] == [] and results[1][1][0].startswith("rank 1 waits for rank 0: planning, 1 s")
        (_, lines), (message, _) = workers.run(long_work_of_first, False, 1.5)
        assert message.startswith("rank 0 failed: alive, but did not come") and not any("waits" in x for x in lines)


@pytest.mark.processes
def test_a_failure_inside_a_pipeline_reaches_all_four_ranks():
    """The failing process lives on; in groups of a DeviceMesh, too."""
    timeout_s = 3.0
    with Pool(4) as workers:
        for seconds, message in workers.run(fail_in_pipeline, 3, timeout_s):
            assert message.startswith("rank 3 failed: ZeroDivisionError: division by zero"), message
            assert seconds < 3 * timeout_s


SCRIPT = """
    import os, sys, time
    from autoplan.runtime.failure import guard, init_process_group
    import torch, torch.distributed as dist
    init_process_group("gloo", timeout_s=20)
    with guard():
        if dist.get_rank() == 1:
            raise FileNotFoundError("shard 7 of the data set")
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.processes
def test_a_script_ends_on_every_rank_with_the_reason_in_its_traceback(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "script.py"],
            env={**shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 1
            assert "RankFailure: rank 1 failed: FileNotFoundError: shard 7 of the data set" in errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# A sample of docs/faults.md.
FEW = [("kill", "forward", 1), ("stop", "groups", 0), ("raise", "script", 3)]
MORE = [
    ("os._exit", "planning", 2),
    ("stop", "clip", 3),
    ("exit", "state_dict", 2),
    ("raise", "optimizer", 0),
]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("sample", [pytest.param(FEW, id="three"), pytest.param(MORE, id="others")])
def test_survivors_of_faults_at_every_point_of_a_job_name_the_rank(sample: list[tuple[str, str, int]]) -> None:
    results = faults.run_cells([Cell(*cell, timeout_s=4.0) for cell in sample], ROOT, at_once=2)
    for result in results:
        found = faults.judge(result)
        assert (found.right, found.survivors) == (3, 3), "\n".join(result["texts"])
    failed = sample[0][2]
    blind = {**results[0], "texts": [text.replace(f"rank {failed}", "rank 7") for text in results[0]["texts"]]}
    assert faults.judge(blind).named == 0
    bare = {**results[0], "texts": ["RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"] * 4}
    assert (faults.judge(bare).named, faults.judge(bare).ended) == (0, 3)


# One process.


def test_a_process_that_is_gone_is_told_from_one_that_is_silent():
    heard = []
    listener = Listener("127.0.0.1", lambda question: {"heard": heard.append(question)})
    with socket.socket() as mute, socket.socket() as closed:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        closed.bind(("127.0.0.1", 0))
        addresses = {
            1: listener.address,
            2: Address("127.0.0.1", mute.getsockname()[1], ""),
            3: Address("127.0.0.1", closed.getsockname()[1], ""),
        }
        assert ask(addresses, {"x": 1}, 0.5) == {1: {"heard": None}, 2: Silence.NO_ANSWER, 3: Silence.GONE}
    assert heard == [{"x": 1}]
    stranger = Address("127.0.0.1", listener.address.port, "another token")
    assert ask({1: stranger}, {"x": 2}, 0.5) == {1: Silence.NO_ANSWER} and len(heard) == 1
    listener.close()
    broken = Listener("127.0.0.1", lambda question: 1 / 0)  # a fault of the asked one is no end of its process
    assert [ask({1: broken.address}, {}, 0.5) for _ in range(2)] == [{1: Silence.NO_ANSWER}] * 2
    broken.close()
    assert ask({1: listener.address}, {}, 0.5) == {1: Silence.GONE}


def test_which_news_explain_a_broken_collective():
    known = Knowledge()
    known.add(News((3,), NewsKind.EXITED, "ended"))
    assert known.first(exits=False) is None and known.first(exits=True).ranks == (3,)
    known.add(News((2,), NewsKind.SILENT, "quiet"))
    known.add(News((1,), NewsKind.GONE, "gone"))
    known.add(News((0,), NewsKind.RAISED, "raised"))
    assert known.first(exits=True) == News((1,), NewsKind.GONE, "gone")  # of the strongest evidence the first
    other = Knowledge()
    other.learn(json.loads(json.dumps(known.to_plain())))
    assert other.first(exits=True) == known.first(exits=True)


def test_a_brief_question_reads_no_stack(monkeypatch):
    """Python 3.11 has crashed while the stack of a thread that ran on was read, on a rank that was asked often."""
    state = Ranks(None, 0, 2, 60.0, 0)
    assert {"doing", "waits", "works_done"} <= set(state.answer({}))
    monkeypatch.setattr(activity, "of_thread", lambda ident: pytest.fail("the stack was read"))
    assert state.answer({"brief": True})["works_done"] == 0


def test_where_a_thread_is():
    try:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: 1 / 0)
        x.sum().backward()
    except ZeroDivisionError as error:
        place = activity.of_traceback(error.__traceback__)
    assert place.phase == "backward" and place.collective == "" and "test_failure.py" in place.line
    assert "test_failure.py" in activity.of_thread(threading.get_ident()).line
    assert str(activity.of_thread(1)) == ""  # no such thread


def test_a_thread_that_runs_on_is_read_from_another():
    """As often as somebody asks: following frame objects while their thread goes on has crashed Python 3.11."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            sorted(range(1000), key=lambda x: -x)
            [str(x) for x in range(100)]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = [activity.of_thread(thread.ident).line for _ in range(2000)]
    finally:
        done.set()
        thread.join()
    assert {line.split(":")[0] for line in found} == {"test_failure.py"}


@pytest.mark.processes
def test_a_thread_is_read_while_c_makes_others():
    """`faulthandler` reads all threads without their locks, and fell over one that was just being made."""
    with Pool(1) as workers:
        ((made, reads, names),) = workers.run(read_beside_foreign_threads, 1.0)
    assert made > 20 and reads > 20 and names == ["failing_jobs.py"]


def test_no_garbage_is_collected_while_a_stack_is_read(monkeypatch):
    """Its finalizers would let the thread that is read run on."""
    seen = []
    monkeypatch.setattr(activity, "_CODE_AND_LINE", lambda frame: seen.append(gc.isenabled()) or (frame.f_code, 1))
    assert gc.isenabled()
    activity.of_thread(threading.get_ident())
    assert seen and not any(seen) and gc.isenabled()
    gc.disable()
    try:
        activity.of_thread(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_optimizer_is_guarded_and_schedulers_take_it():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    guard_step(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert parameter.item() == 0 and optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(RankFailure, match="division by zero"):
        optimizer.step(lambda: 1 / 0)


def test_a_rank_says_why_before_it_is_ended_from_outside():
    script = """
        import os, signal
        from autoplan.runtime import failure
        with failure._ended_later():
            os.kill(os.getpid(), signal.SIGTERM)
            print("said", flush=True)
        print("went on", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (out.returncode, out.stdout) == (-signal.SIGTERM, "said\n")


def test_errors_of_arguments_pass_the_guard_where_they_may():
    with pytest.raises(ValueError, match="wrong"), guard(passing=(KeyError,)):  # there are no other ranks
        raise ValueError("wrong")
    with pytest.raises(KeyError, match="alike"), guard():
        raise agreed(KeyError("alike"))
    with pytest.raises(RankFailure, match="wrong"), guard():
        raise ValueError("wrong")


def test_without_a_process_group_the_guard_only_names_the_rank():
    with pytest.raises(RankFailure, match=r"^rank 5 failed: KeyError: 'x'$") as caught, guard(5):
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyboardInterrupt), guard(5):
        raise KeyboardInterrupt


def test_a_nested_guard_changes_nothing():
    with pytest.raises(RankFailure, match=r"^rank 5 failed: KeyError: 'x'$"), guard(6), guard(5):
        raise KeyError("x")


def test_broken_collectives_are_told_from_faults_of_this_rank():
    wrapped = RuntimeError("failed to run forward")
    wrapped.__cause__ = dist.DistBackendError("NCCL watchdog")
    assert is_broken_collective(wrapped)
    assert is_broken_collective(RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_broken_collective(RuntimeError("shape mismatch"))
    assert not is_broken_collective(ValueError("Connection closed by peer"))


def test_the_timeout_comes_from_the_argument_then_the_environment(monkeypatch):
    monkeypatch.delenv("AUTOPLAN_TIMEOUT_S", raising=False)
    assert timeout_of().total_seconds() == 600
    monkeypatch.setenv("AUTOPLAN_TIMEOUT_S", "7.5")
    assert timeout_of().total_seconds() == 7.5
    assert timeout_of(3).total_seconds() == 3
    monkeypatch.setenv("AUTOPLAN_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="AUTOPLAN_TIMEOUT_S='soon' must be a positive number of seconds"):
        timeout_of()
    for wrong in (0, -1.0, "a", [1], True, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=f"timeout_s={re.escape(repr(wrong))} must be a positive number of seconds"
        ):
            timeout_of(wrong)


# NCCL, of which there is none here: what the watch does where it would be.


class Communicator:
    """A process group of NCCL whose kernel ends when it is aborted, and its backend."""

    def __init__(self, calls: list[str], name: str, ended: threading.Event | None = None) -> None:
        self.calls, self.name, self.ended = calls, name, ended

    def abort(self) -> None:
        self.calls.append(f"abort {self.name}")
        if self.ended is not None:
            self.ended.set()

    def _get_backend(self, device: torch.device) -> "Communicator":
        assert device.type == "cuda"
        return self

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class World:
    """torch's tables of process groups."""

    def __init__(self, groups: dict[Communicator, str]) -> None:
        self.pg_names = {group: group.name for group in groups}
        self.pg_backend_config = groups
        self.default_pg = None


@pytest.fixture
def two_ranks(monkeypatch):
    """This rank 0 of two, watched; the other one's process is gone."""
    listener = Listener("127.0.0.1", lambda question: {}, backlog=1)
    address = listener.address
    listener.close()
    state = Ranks(None, 0, 2, 60.0, 0, addresses={0: address, 1: address})
    monkeypatch.setattr(failure, "_state", state)
    monkeypatch.setattr(failure, "POLL_S", 0.05)
    monkeypatch.setattr(failure.private, "abort_process_groups", lambda: None)
    watch = threading.Thread(target=failure._watch, args=(state,), daemon=True)
    watch.start()
    yield state
    state.stop.set()
    watch.join()


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_rank_that_waits_for_its_device_is_freed_and_told_why(monkeypatch, two_ranks, raises):
    """The wait for the device ends with the abort: in an error, or as if nothing had happened."""
    calls, ended = [], threading.Event()
    groups = {
        Communicator(calls, "0", ended): "cpu:gloo,cuda:nccl",
        Communicator(calls, "5"): "cuda:nccl",
        Communicator(calls, "7"): "cpu:gloo,cuda:gloo",
    }
    monkeypatch.setattr(dist.distributed_c10d, "_world", World(groups))

    def synchronize():
        assert ended.wait(20), "nobody aborted the communicators"
        if raises:
            raise RuntimeError("CUDA error: unspecified launch failure")

    timer = threading.Timer(0.3, two_ranks.known.add, [News((1,), NewsKind.RAISED, "KeyError: 'x' [in step 3]")])
    timer.start()
    with pytest.raises(RankFailure, match=r"^rank 1 failed: KeyError: 'x' \[in step 3\]") as caught, guard():
        synchronize()
    assert caught.value.rank == 1 and calls == ["start", "abort 5", "abort 0", "end"]
    with pytest.raises(RankFailure, match="rank 1 failed"), guard():
        pytest.fail("nothing runs after the abort")


def test_what_the_device_returned_between_calls_is_not_gone_on_with(monkeypatch, two_ranks):
    """The abort frees the script in `loss.item()`, outside of any call; the next one raises before it does anything."""
    ended = threading.Event()
    monkeypatch.setattr(dist.distributed_c10d, "_world", World({Communicator([], "0", ended): "cuda:nccl"}))
    two_ranks.known.add(News((1,), NewsKind.GONE, "its process is gone"))
    assert ended.wait(20)
    with pytest.raises(RankFailure, match="rank 1 failed: its process is gone"), guard(call="optimizer step"):
        pytest.fail("the parameters would be changed by what the device returned")


def test_without_nccl_the_watch_aborts_nothing(monkeypatch, two_ranks):
    calls = []
    monkeypatch.setattr(dist.distributed_c10d, "_world", World({Communicator(calls, "0"): "cpu:gloo,cuda:gloo"}))
    two_ranks.known.add(News((1,), NewsKind.RAISED, "boom"))
    time.sleep(0.5)
    with guard():
        pass
    assert calls == [] and not two_ranks.aborted


def test_the_rank_that_fails_tells_the_others_before_its_connections_break(monkeypatch, two_ranks):
    calls = []
    monkeypatch.setattr(dist.distributed_c10d, "_world", World({Communicator(calls, "0"): "cuda:nccl"}))
    monkeypatch.setattr(failure, "HEAD_START_S", 0.125)
    monkeypatch.setattr(Ranks, "tell", lambda state: calls.append("tell"))
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: calls.append(seconds))
    monkeypatch.setattr(failure.private, "abort_process_groups", lambda: calls.append("abort all"))
    with pytest.raises(RankFailure, match="rank 0 failed: KeyError"), guard():
        raise KeyError("x")
    assert calls[-3:] == ["tell", 0.125, "abort all"]


ENDS = """
    import os, sys, warnings
    import torch, torch.distributed as dist
    from autoplan import devices
    from autoplan.runtime import failure, private
    from autoplan.runtime.mesh import AxisMesh
    theirs = sys.argv[1] == "theirs"
    if theirs:
        dist.init_process_group("gloo")
    private_give_back = private.give_back_groups
    def told(everything):
        before = len(dist.distributed_c10d._world.pg_map)
        private_give_back(everything)
        left = len(dist.distributed_c10d._world.pg_map)
        print("gave back", before - left, "of", before, flush=True)
    private.give_back_groups = told
    private_abort = private.abort_process_groups
    def aborted():
        print("aborted", flush=True)
        private_abort()
    private.abort_process_groups = aborted
    devices.start(None, "cpu", 20.0)
    mesh = AxisMesh([("dp", 2), ("tp", 1), ("pp", 1)], {}) if dist.get_world_size() == 2 else None
    mesh and mesh.group_of_some([[1]], "some")
    if sys.argv[1] == "raises" and dist.get_rank() == 1:
        raise KeyError("x")
    if mesh is not None:
        with failure.guard():
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
"""


def ended(how: str, world: int, tmp_path: Path) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of every rank of a script."""
    (tmp_path / "script.py").write_text(textwrap.dedent(ENDS))
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), how]
    ranks = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.processes
def test_groups_that_were_made_here_are_given_back_at_the_end(tmp_path):
    assert ended("ours", 1, tmp_path)[0][:2] == (0, "gave back 1 of 1\n")
    found = ended("ours", 2, tmp_path)
    assert [output[:2] for output in found] == [(0, "gave back 1 of 1\n"), (0, "gave back 2 of 2\n")]
    assert not any("destroy_process_group" in errors for *_, errors in found)


@pytest.mark.processes
def test_a_group_of_the_caller_stays_his(tmp_path):
    found = ended("theirs", 2, tmp_path)
    assert [output[:2] for output in found] == [(0, "gave back 0 of 1\n"), (0, "gave back 1 of 2\n")]


@pytest.mark.processes
def test_after_a_failure_nothing_is_waited_for(tmp_path):
    first, second = ended("raises", 2, tmp_path)
    assert first[0] != 0 and "rank 1 failed: KeyError: 'x'" in first[2] and "gave back" not in first[1]
    assert second[0] != 0 and "aborted" in second[1] and "gave back" not in second[1]


# The worker pool itself.


@pytest.mark.processes
def test_the_pool_survives_jobs_and_replaces_itself_after_a_failure():
    end_pools()  # a pool that ran MOST_JOBS would be replaced between these jobs
    first = pool(2).run(answer)
    assert [result[:2] for result in first] == [(0, 2), (1, 2)]
    assert pool(2).run(answer) == first
    used = pool(2)
    with pytest.raises(JobError, match=r"(?s)misbehave failed\nrank 1:\nTraceback.*KeyError: 'on rank one'"):
        used.run(misbehave, "raise")
    assert not used.alive
    for _, _, pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool(2).run(answer) != first


@pytest.mark.processes
def test_the_pool_ends_a_job_that_hangs():
    with Pool(2) as workers:
        workers.run(answer)  # so that the limit below does not count imports
        begun = time.monotonic()
        with pytest.raises(JobError, match="rank 1: no answer"):
            workers.run(misbehave, "hang", timeout_s=0.5)
        assert time.monotonic() - begun < 6 * PATIENCE
        assert not workers.alive


def test_the_phases_of_a_stack_are_functions_that_are_called() -> None:
    """Of a function that is renamed, ranks would no longer say that they run it."""
    here, there = Path(activity.__file__).parents[1], Path(torch.__file__).parent
    modules = ("autograd/graph.py", "nn/modules/module.py", "distributed/distributed_c10d.py")
    folders = (here, here / "runtime", there / "distributed/pipelining")
    files = [*(there / m for m in modules), *(f for folder in folders for f in folder.rglob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    for name in activity.STACK_PHASES:
        assert re.search(rf'(?<!def )(?<!")\b{name}\b(?!")', text) is not None, f"nothing uses {name}"
