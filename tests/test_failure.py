"""A rank that raises, dies or hangs: the others end in time and know the reason."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from failing_jobs import GRACE_S, answer, fail_in_pipeline, fail_in_step, misbehave
from harness import JobError, Pool, free_port, pool

from autoplan.runtime import failure
from autoplan.runtime.failure import RankFailure, guard, is_broken_collective, timeout_of

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[1]
# What the process groups of these tests allow a collective; the others must end well before or, if a rank hangs, soon
# after.
TIMEOUT_S = 10.0


@pytest.mark.processes
@pytest.mark.parametrize(("world", "bad"), [(2, 0), (3, 2)])
def test_a_rank_that_raises_is_named_with_its_reason_on_every_rank(world, bad):
    with Pool(world) as workers:
        for rank, (seconds, origin, message) in enumerate(workers.run(fail_in_step, bad, "raise", TIMEOUT_S)):
            assert origin == bad
            assert message.startswith(f"rank {bad} failed: ZeroDivisionError: a batch without tokens"), message
            assert ("[seen by rank" in message) == (rank != bad)
            assert seconds < TIMEOUT_S


@pytest.mark.processes
def test_a_killed_rank_is_named_by_its_silence():
    with Pool(3) as workers:
        outcomes = workers.run_each(fail_in_step, 1, "die", TIMEOUT_S, timeout_s=30)
    assert [outcome.status for outcome in outcomes] == ["ok", "died", "ok"]
    for outcome in (outcomes[0], outcomes[2]):
        seconds, origin, message = outcome.value
        assert origin == 1
        assert message.startswith("rank 1 failed: killed, or hangs: no report within 1.5 s"), message
        assert seconds < TIMEOUT_S


@pytest.mark.processes
def test_when_the_rank_that_hosts_the_store_is_killed_the_others_still_end():
    with Pool(2) as workers:
        outcomes = workers.run_each(fail_in_step, 0, "die", TIMEOUT_S, timeout_s=30)
    assert [outcome.status for outcome in outcomes] == ["died", "ok"]
    seconds, origin, message = outcomes[1].value
    assert origin is None
    assert message.startswith("the rank that hosts the key-value store (usually 0) is gone"), message
    assert seconds < TIMEOUT_S


@pytest.mark.processes
def test_a_hanging_rank_is_named_after_the_timeout():
    with Pool(2) as workers:
        outcomes = workers.run_each(fail_in_step, 1, "hang", 3.0, timeout_s=30)
    seconds, origin, message = outcomes[0].value
    assert (origin, outcomes[1].status) == (1, "died")
    assert "killed, or hangs: no report" in message
    assert "Timed out waiting 3000ms" in message
    assert 3 <= seconds < 3 + GRACE_S + 3


@pytest.mark.processes
def test_a_failure_inside_a_pipeline_reaches_all_four_ranks():
    """The failing process lives on, so that only the timeout frees the others; in groups of a DeviceMesh, too."""
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


# One process.


def test_without_a_process_group_the_guard_only_names_the_rank():
    with pytest.raises(RankFailure, match=r"^rank 5 failed: KeyError: 'x'$") as caught, guard(5):
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyboardInterrupt), guard(5):
        raise KeyboardInterrupt
    failure.report_failure(KeyError("x"))
    assert failure.failure_reason() is None


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
    with pytest.raises(ValueError, match="AUTOPLAN_TIMEOUT_S must be a number of seconds, not 'soon'"):
        timeout_of()
    with pytest.raises(ValueError, match="must be positive"):
        timeout_of(0)


# The worker pool itself.


@pytest.mark.processes
def test_the_pool_survives_jobs_and_replaces_itself_after_a_failure():
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
            workers.run(misbehave, "hang", timeout_s=2)
        assert time.monotonic() - begun < 6
        assert not workers.alive
