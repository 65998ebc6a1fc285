"""Questions between ranks over their own sockets: whether they live, what they do, what they know of failures.

This is apart from the collectives and the key-value store, because both end or hang together with the rank in question:
rank 0 usually hosts the store, and a call to the store of a stopped process never returns. A question is one line of
JSON over a new TCP connection, the answer another. Three outcomes tell the state of a process:

- It answers: it lives, whatever its main thread waits for (a separate thread answers).
- The connection is refused: the process is gone, as the kernel of its machine reports.
- Nothing comes, or the connection ends without an answer: the process is stopped, its machine hangs, a C call holds
  Python's lock for that long, or the process is just ending. In the last case the next question is refused.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from typing import Any

# Connections opened at the same time by one question to many.
_AT_ONCE = 256
# Seconds that a connection may take to bring its question; the others wait meanwhile.
_QUESTION_S = 1.0
logger: logging.Logger = logging.getLogger(__name__)


class Silence(enum.Enum):
    """Why a rank gave no answer."""

    GONE = "gone"
    NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Address:
    """The address at which a rank answers. `token`: a secret of the job; questions of strangers are ignored."""

    host: str
    port: int
    token: str

    def to_json(self) -> str:
        """Return the address as text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Address:
        """Return the address that `to_json` wrote."""
        return cls(**json.loads(text))


class Listener:
    """Answers the questions of other ranks, one after the other, from its own thread until `close`.

    A rank that asks itself has therefore taken note of everything that it was told before.

    Args:
        host: IP address of this machine on which to listen.
        answer: question -> answer, both plain mappings; must not block.
        backlog: connections that may wait to be accepted.
    """

    def __init__(self, host: str, answer: Callable[[dict[str, Any]], Mapping[str, Any]], backlog: int = 128) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(backlog)
        self.address: Address = Address(host, self._socket.getsockname()[1], os.urandom(16).hex())
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, name="autoplan-answers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                self._one(connection)
            except Exception:
                logger.exception("this rank could not answer another one, which may take it for silent")

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_QUESTION_S)
            question = json.loads(_read_line(connection))
            if question.pop("token", None) == self.address.token:
                connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def close(self) -> None:
        """Stop answering; later questions are refused."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._thread.join()
        self._socket.close()

    def drop(self) -> None:
        """Close this process's copy of the socket after a fork: the child must not keep a dead parent's port open."""
        self._socket.close()


def _read_line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionResetError("closed before the end of the line")
        received += piece
    return received


def ask(
    addresses: Mapping[int, Address], question: Mapping[str, Any], timeout_s: float
) -> dict[int, dict[str, Any] | Silence]:
    """Ask ranks at the same time and return each one's answer, within about `timeout_s` seconds. Starts no thread."""
    found: dict[int, dict[str, Any] | Silence] = {}
    ranks = list(addresses)
    for first in range(0, len(ranks), _AT_ONCE):
        found.update(_ask_some({r: addresses[r] for r in ranks[first : first + _AT_ONCE]}, question, timeout_s))
    return found


@dataclass
class _Call:
    """One open question."""

    rank: int
    socket: socket.socket
    question: bytes
    received: bytes = b""

    def advance(self) -> dict[str, Any] | Silence | None:
        """Send or receive what is possible without waiting; return the outcome, or None if it is still open."""
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return Silence.GONE if error == errno.ECONNREFUSED else Silence.NO_ANSWER
        try:
            if self.question:
                self.question = self.question[self.socket.send(self.question) :]
                return None
            piece = self.socket.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            return Silence.NO_ANSWER
        self.received += piece
        if not self.received.endswith(b"\n"):
            return None if piece else Silence.NO_ANSWER
        try:
            answer: dict[str, Any] = json.loads(self.received)
        except ValueError:
            return Silence.NO_ANSWER  # another program has the port now
        return answer


def _ask_some(
    addresses: Mapping[int, Address], question: Mapping[str, Any], timeout_s: float
) -> dict[int, dict[str, Any] | Silence]:
    found: dict[int, dict[str, Any] | Silence] = dict.fromkeys(addresses, Silence.NO_ANSWER)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        try:
            for rank, address in addresses.items():
                line = json.dumps({**question, "token": address.token}).encode() + b"\n"
                sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
                sock.setblocking(False)
                refused = sock.connect_ex((address.host, address.port))
                if refused not in (0, errno.EINPROGRESS):
                    found[rank] = Silence.GONE if refused == errno.ECONNREFUSED else Silence.NO_ANSWER
                    sock.close()
                    continue
                selector.register(sock, selectors.EVENT_WRITE, _Call(rank, sock, line))
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    call: _Call = key.data
                    outcome = call.advance()
                    if outcome is not None:
                        found[call.rank] = outcome
                        selector.unregister(call.socket)
                        call.socket.close()
                    elif not call.question:
                        selector.modify(call.socket, selectors.EVENT_READ, call)
        finally:
            for key in list(selector.get_map().values()):
                key.data.socket.close()
    return found


def route_to(host: str, port: int) -> str:
    """Return the IP address of this machine from which packets to `host` leave; nothing is sent.

    Raises:
        OSError: `host` is not known or there is no route to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def told_by(rank: int, world: int, reach: int) -> Sequence[int]:
    """Return the ranks that `rank` tells of a failure, on the ring of all ranks and without itself.

    They are up to `reach` on either side, nearest first, then one on either side at each double of that distance.
    """
    near = list(range(1, min(reach, world) + 1))
    far = takewhile(lambda step: step <= world // 2, (reach << k for k in count(1)))
    places = ((place % world) for step in (*near, *far) for place in (rank + step, rank - step))
    return [r for r in dict.fromkeys(places) if r != rank]


@functools.cache
def hops_of_news(world: int, reach: int) -> int:
    """Return the number of times that a failure is told until the last rank knows of it, if all of `told_by` pass it
    on.
    """
    steps = told_by(0, world, reach)
    known, newest, hops = {0}, {0}, 0
    while newest:
        newest = {(rank + step) % world for rank in newest for step in steps} - known
        known |= newest
        hops += bool(newest)
    return hops
