"""Which connections a rank that fails shuts down: those of gloo's groups, whatever else was opened meanwhile."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from collections.abc import Iterator

import pytest

from autoplan.runtime import connections

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sockets are found by /proc and epoll")


@pytest.fixture
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the connections of this process alone."""
    monkeypatch.setattr(connections, "_noted", {})
    yield


@pytest.mark.usefixtures("nothing_noted")
def test_a_loop_that_began_with_a_group_is_left_alone() -> None:
    """A loop of asyncio is woken by a pair of local sockets; shut down, they woke it without end."""
    accepting = socket.create_server(("127.0.0.1", 0))
    with connections.noted():
        mine = socket.create_connection(accepting.getsockname())
        theirs, _ = accepting.accept()
        watching = select.epoll()  # as gloo's thread has one
        watching.register(mine.fileno())
        loop = asyncio.new_event_loop()
    try:
        wakes = [s for s in vars(loop).values() if isinstance(s, socket.socket)]
        assert mine.fileno() in connections._noted and len(wakes) == 2
        connections.shut_down()
        assert theirs.recv(1) == b""  # the other rank learns of it
        assert select.select(wakes, [], [], 0)[0] == []
    finally:
        loop.close()
        for each in (watching, mine, theirs, accepting):
            each.close()
