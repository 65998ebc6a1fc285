"""Local processes: what is said of each, and that none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoplan.profiler.processes import ProcessOutcome, RankError, answer_of, outcomes, problems, run_ranks


def test_what_became_of_each_process() -> None:
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(4)]
    answer_of(pairs[0][1], pow, 2, 5)
    answer_of(pairs[1][1], int, "two")
    answer_of(pairs[2][1], lambda: lambda: None)  # what it returns does not pickle
    pairs[2][1].close()
    pairs[3][1].close()
    right, wrong, unsent, dead = outcomes([here for here, _ in pairs], 5.0)
    assert right == ProcessOutcome("ok", 32) and dead == ProcessOutcome("died")
    assert wrong.status == "raised" and "ValueError" in wrong.value
    assert unsent.status == "raised" and "pickle" in unsent.value
    text = problems([right, wrong, dead], 5.0)
    assert text.startswith("rank 1:\nTraceback") and text.endswith("rank 2: the process died")


def test_after_a_failure_the_others_have_little_time_left() -> None:
    (silent, _open), (here, there) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    there.close()
    begin = time.monotonic()
    assert outcomes([silent, here], 60.0, grace_s=0.1) == [ProcessOutcome("hangs"), ProcessOutcome("died")]
    assert time.monotonic() - begin < 30.0
    assert problems([ProcessOutcome("hangs")], 60.0) == "rank 0: no answer (limit 60 s)"


def _ends(rank: int, world: int, how: str) -> tuple[int, int]:
    if rank == 1 and how == "raises":
        raise ValueError("of rank 1")
    if rank == 1 and how == "dies":
        os._exit(3)
    return rank, world


@pytest.mark.processes
def test_ranks_answer_or_are_named_and_end() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    others = set(multiprocessing.active_children())  # of the pool that another test's file keeps
    assert run_ranks(_ends, 2, "well", timeout_s=120.0, num_threads=3) == [(0, 2), (1, 2)]
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: of rank 1"):
        run_ranks(_ends, 2, "raises", timeout_s=120.0)
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(_ends, 2, "dies", timeout_s=120.0)
    assert set(multiprocessing.active_children()) <= others and os.environ.get("OMP_NUM_THREADS") == before


def _holds_interrupts(rank: int, world: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_rank_sees_an_interrupt_even_while_it_starts() -> None:
    """In a fresh process: the first one that it spawns brings a helper along, which once undid the hold."""
    code = """
from autoplan.profiler.processes import run_ranks
from test_processes import _holds_interrupts
if __name__ == "__main__":
    print(run_ranks(_holds_interrupts, 2, timeout_s=60))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "[True, True]\n", done
