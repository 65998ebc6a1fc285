"""A search of two processes: the answer of one, whatever happens to the helper, and no process left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.planning import PROCESSES_VARIABLE
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search import pair, planner
from autoplan.search.candidates import Candidates
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.layout_store import LayoutStore
from autoplan.search.pair import (
    HELPER,
    PLANNER,
    LostHelperError,
    SearchPair,
    even_halves,
    has_free_core,
    helper_pays,
    num_cores,
)
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.progress import Progress


def request(model: str = "llama-3.2-1b", cluster: str = "1x4xh100-sxm5-80gb", **changes: Any) -> PlanRequest:
    # nothing on disk, and layouts of its own
    small = {"seq_len": 4096, "global_batch_size": 32, "pins": {"micro_batch_size": 1}}
    given = {**small, "cache": False, "layouts": LayoutStore(), **changes}
    return PlanRequest(load_model(model), Cluster.parse(cluster), **given)


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every search here starts a helper; their process ids."""
    monkeypatch.setattr(pair, "helper_pays", lambda: True)
    monkeypatch.setattr(planner, "_FEW_TO_SHARE", 0)
    started: list[int] = []
    fork = os.fork

    def counted() -> int:
        child = fork()
        if child:
            started.append(child)
        return child

    monkeypatch.setattr(os, "fork", counted)
    return started


def alone(r: PlanRequest, told: Callable[[Progress], None] | None = None) -> SearchResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "helper_pays", lambda: False)
        return search_plan(r, told)


@cache
def expected() -> object:
    return answer(alone(request()))


def answer(found: SearchResult) -> object:
    """All of an answer but its seconds."""
    certificate = asdict(found.certificate)
    for name in ("solve_time_s", "by_phase_s"):
        del certificate[name]
    each = ((p.config, p.estimate) for p in found.plans)
    plans = [(config, e.step_time_s, e.peak_memory_bytes, e.breakdown) for config, e in each]
    return plans, found.equals, certificate


def gone(child: int) -> bool:
    """True if a process has ended, and was waited for."""
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("model", "cluster", "changes"),
    [
        ("llama-3.2-1b", "1x4xh100-sxm5-80gb", {"pins": {}}),
        ("llama-3.2-1b", "1x4xh100-sxm5-80gb", {"top": 3, "gap": 0.0, "pins": {"pp": 2}}),
        ("llama-3.1-8b", "1x4xh100-sxm5-80gb@host_memory_gb=200", {"pins": {"tp": 2}}),
        ("llama-3.2-1b", "1x4xh100-sxm5-80gb", {"pins": {"cp": 2}}),
        ("mixtral-8x7b", "2x8xh100-sxm5-80gb", {"pins": {"pp": 4, "micro_batch_size": 1}}),
    ],
)
def test_the_answer_is_that_of_one_process(
    model: str, cluster: str, changes: dict[str, Any], helpers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: plans, gap, numbers of candidates. No helper is lost on the way."""
    one = answer(alone(request(model, cluster, **changes)))
    lost: list[LostHelperError] = []
    monkeypatch.setattr(LostHelperError, "__init__", lambda self, *_: lost.append(self))
    assert answer(search_plan(request(model, cluster, **changes))) == one
    assert len(helpers) == 1 and not lost and gone(helpers[0])


def test_points_of_a_sweep_have_the_answer_of_one_process(helpers: list[int]) -> None:
    """They share layouts, whoever solved them."""
    shared, other = LayoutStore(), LayoutStore()
    for batch in (32, 64):
        r = request(global_batch_size=batch, layouts=shared)
        assert answer(search_plan(r)) == answer(alone(request(global_batch_size=batch, layouts=other)))
    assert len(helpers) == 2 and all(map(gone, helpers))


def test_a_helper_that_dies_changes_nothing(helpers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or in the middle of its work; the search is done again by one process."""
    run = pair._run_helper
    monkeypatch.setattr(pair, "_run_helper", lambda _: os._exit(3))
    assert answer(search_plan(request())) == expected()
    monkeypatch.setattr(pair, "_run_helper", run)
    bound, me, calls = Candidates.bound, os.getpid(), Counter[str]()

    def fails(self: Candidates, *args: Any) -> None:
        calls["bound"] += 1
        if os.getpid() != me and calls["bound"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        bound(self, *args)

    monkeypatch.setattr(Candidates, "bound", fails)
    assert answer(search_plan(request())) == expected()
    assert len(helpers) == 2 and all(map(gone, helpers))


def test_a_helper_that_does_something_else_changes_nothing(helpers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither process waits for ever for what the other does not send."""
    expected()
    me, share = os.getpid(), SearchPair.share

    def other(self: SearchPair, items: Any, *args: Any, **how: Any) -> None:
        if os.getpid() != me:
            self.agree(True)
        share(self, items, *args, **how)

    monkeypatch.setattr(SearchPair, "share", other)
    assert answer(search_plan(request())) == expected() and gone(helpers[0])


def test_no_process_to_be_had_changes_nothing(helpers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ends of pipes are closed."""

    def none() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    expected()
    monkeypatch.setattr(os, "fork", none)
    opened = os.listdir("/dev/fd")
    assert answer(search_plan(request())) == expected()
    assert os.listdir("/dev/fd") == opened and not helpers


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_helper_ends_with_the_search(error: type[BaseException], helpers: list[int]) -> None:
    """At Ctrl-C, whose answer is the best plan so far, and at any error."""

    def told(progress: Progress) -> None:
        if progress.best_s is not None:
            raise error

    opened = os.listdir("/dev/fd")
    if error is KeyboardInterrupt:
        assert search_plan(request(), told).certificate.status == Status.INTERRUPTED
    else:
        with pytest.raises(error):
            search_plan(request(), told)
    assert len(helpers) == 1 and gone(helpers[0]) and os.listdir("/dev/fd") == opened


def test_the_helper_ends_at_the_time_limit(helpers: list[int]) -> None:
    """The search does, too, with the best plan so far."""
    found = search_plan(request(time_limit_s=0.0))
    assert found.certificate.status == Status.TIME_LIMIT and found.plans and gone(helpers[0])


def test_a_helper_whose_planner_is_killed_ends() -> None:
    """It holds one end of a pipe here: without it, the pipe is at its end."""
    read, write = os.pipe()
    planner_process = os.fork()
    if planner_process == 0:
        both = SearchPair()
        pair.helper_pays = lambda: True  # of this process
        both.start(lambda: waits(both))
        os._exit(0 if both.agree(True) else 1)
    os.close(write)
    _, status = os.waitpid(planner_process, 0)
    with os.fdopen(read, "rb") as end:
        assert status == 0 and end.read() == b""


def waits(both: SearchPair) -> None:
    for _ in range(2):
        both.agree(True)


def test_who_is_done_goes_on_with_the_items_of_the_other(helpers: list[int]) -> None:
    """From the last one on, where items need nothing that one process alone has; every item is done once."""
    both, me, (read, write) = SearchPair(), os.getpid(), os.pipe()
    did: list[int] = []

    def shared(halves: list[int], waits_for: int, by_either: bool = True) -> dict[int, int]:
        found: dict[int, int] = {}

        def work(item: int) -> None:
            if os.getpid() == me:
                os.write(write, b"x")
            elif not found:  # the helper goes on when the planner has done so many
                os.read(read, waits_for)
            did.append(item)
            found[item] = item * item

        both.share(range(len(halves)), halves, work, found.__getitem__, found.__setitem__, by_either=by_either)
        return found

    def some() -> list[dict[int, int]]:
        first = shared([HELPER, PLANNER, HELPER, HELPER, HELPER], 1)
        return [first, shared([HELPER, PLANNER], 0, by_either=False), shared([HELPER] * 3, 1)]

    both.start(lambda: did.extend(some()[0]))
    try:
        assert some() == [{i: i * i for i in range(number)} for number in (5, 2, 3)]
    finally:
        both.close()
    assert did[0] == 1 and 2 in did and len(helpers) == 1 and gone(helpers[0])


def test_who_has_a_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process with a second core that can be forked, unless it is turned off."""
    monkeypatch.setattr(pair, "_THREADED", ("none_such",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(pair, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(pair, "_LOAD", tmp_path / "loadavg")
    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    assert num_cores() == 2 and helper_pays()
    for quota, cores in (("max 100000", 2), ("150000 100000", 1), ("nonsense", 2), ("200000 100000", 2)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert num_cores() == cores and helper_pays() is (cores == 2)
    for text, free in (("0.1 0.2 0.3 1/99 1234", True), ("9.1 9.2 9.3 2/99 1234", False), ("nonsense", True)):
        (tmp_path / "loadavg").write_text(f"{text}\n")
        assert has_free_core() is free and helper_pays() is free
    with monkeypatch.context() as patch:
        patch.setenv(PROCESSES_VARIABLE, "2")
        (tmp_path / "loadavg").write_text("9.1 9.2 9.3 9/99 1234\n")
        assert not has_free_core() and helper_pays()
    (tmp_path / "loadavg").unlink()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(helper_pays()))
    thread.start()
    thread.join()
    assert found == [False]
    with monkeypatch.context() as patch:
        patch.setattr(pair, "_THREADED", ("os",))
        assert not helper_pays()
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
        assert not helper_pays()
    monkeypatch.setenv(PROCESSES_VARIABLE, "1")
    assert not helper_pays()


def test_halves_weigh_much_the_same() -> None:
    """What was given to one half stays there."""
    known: dict[Any, int] = {"old": HELPER}
    halves = even_halves(["old", "a", "b", "a", "c"], [4.0, 1.0, 3.0, 1.0, 2.0], known)
    assert halves == [HELPER, PLANNER, PLANNER, PLANNER, HELPER]
    assert even_halves(["c", "a"], [1.0, 1.0], known) == [HELPER, PLANNER]


def test_a_helper_that_does_not_run_is_given_up(helpers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, or waiting for a lock that no other thread gives back: the search is done alone."""
    monkeypatch.setattr(pair, "_STUCK_S", 1.5)
    fork = os.fork

    def stopped() -> int:
        child = fork()
        if child:
            os.kill(child, signal.SIGSTOP)
        return child

    monkeypatch.setattr(os, "fork", stopped)
    assert answer(search_plan(request())) == expected()
    assert len(helpers) == 1 and gone(helpers[0])
