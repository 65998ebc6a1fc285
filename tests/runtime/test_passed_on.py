"""Failures are passed on from rank to rank, before connections break."""

from __future__ import annotations

import threading

import pytest

from autoplan.runtime import failure
from autoplan.runtime.news import News, NewsKind
from autoplan.runtime.peers import Listener, hops_of_news, told_by
from autoplan.runtime.ranks import Ranks


@pytest.mark.parametrize(("world", "hops"), [(1, 0), (2, 1), (17, 1), (18, 2), (1024, 4), (4096, 5)])
def test_news_reach_all_ranks_in_few_hops(world: int, hops: int) -> None:
    assert hops_of_news(world, 8) == hops
    for rank in {0, world // 3, world - 1}:
        told = told_by(rank, world, 8)
        assert rank not in told and len(set(told)) == len(told) <= 36
        assert all(0 <= other < world for other in told)


def test_a_rank_that_is_told_passes_it_on_before_it_breaks_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    aborted = threading.Event()

    def abort(groups: object) -> None:
        calls.append("abort")
        aborted.set()

    listener = Listener("127.0.0.1", lambda question: calls.append("told") or {"doing": ""}, backlog=8)
    state = Ranks(None, 0, 3, 60.0, 0, addresses=dict.fromkeys(range(3), listener.address))
    state.known.add(News((1,), NewsKind.RAISED, "KeyError: 'x'"))
    monkeypatch.setattr(failure, "POLL_S", 0.05)
    monkeypatch.setattr(failure.private, "nccl_groups", lambda: ["a group"])
    monkeypatch.setattr(failure.private, "abort_communicators", abort)
    watch = threading.Thread(target=failure._watch, args=(state,), daemon=True)
    watch.start()
    assert aborted.wait(20)
    state.stop.set()
    watch.join()
    listener.close()
    assert calls[: calls.index("abort")].count("told") == 2


def test_connections_last_until_the_farthest_rank_has_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    listener = Listener("127.0.0.1", lambda question: {}, backlog=64)
    state = Ranks(None, 0, 1024, 60.0, 0, addresses=dict.fromkeys(range(1024), listener.address))
    monkeypatch.setattr(failure, "_state", state)
    monkeypatch.setattr(failure.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(failure.dist, "get_world_size", lambda: 1024)
    monkeypatch.setattr(failure.private, "nccl_groups", lambda: ["a group"])
    monkeypatch.setattr(failure.private, "abort_process_groups", lambda: None)
    monkeypatch.setattr(failure.time, "sleep", slept.append)
    failure._leave(failure.RankFailure(0, "KeyError: 'x'"))
    listener.close()
    assert slept == [failure.HEAD_START_S + 3 * failure.POLL_S]
