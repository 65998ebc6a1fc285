"""The connections of gloo's groups, which a rank that fails closes by itself.

gloo closes them when nothing holds a group any more. A rank that raised and lives on (its script caught the exception,
or is a notebook) holds its groups, and gloo's own `abort` and `shutdown` leave them open (torch 2.13): the other ranks
would wait for the timeout. So the sockets of every group that is made here are noted, and shut down at a failure. The
other ranks see what they see of a process that ended.

Noted are the sockets that gloo's thread watches by an epoll of its own, new since the group began to be made, and shut
down are those of TCP. A thread of the user that begins a loop of asyncio at that moment has an epoll, too, with a pair
of local sockets that wake it: shut down, they would wake it without end. Where there is no /proc (macOS), and in groups
of the caller, the others wait for the timeout. A socket that was closed meanwhile is told by its inode.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_FILES = Path("/proc/self/fd")
_INFO = Path("/proc/self/fdinfo")
_FAMILIES = frozenset((socket.AF_INET, socket.AF_INET6))
_noted: dict[int, str] = {}  # descriptor -> its target, "socket:[inode]"


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note the connections of the groups that are made inside."""
    before = _open_files()
    yield
    new = {number: target for number, target in _open_files().items() if before.get(number) != target}
    watched = {at for number, target in new.items() if target == "anon_inode:[eventpoll]" for at in _watched(number)}
    _noted.update((n, target) for n, target in new.items() if n in watched and target.startswith("socket:"))


def spare(port: int) -> None:
    """Leave the connections with an end at this port alone: those of the key-value store, which has an epoll, too."""
    for number in list(_noted):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            ends = [connection.getsockname()]
            with contextlib.suppress(OSError):  # it only accepts connections
                ends.append(connection.getpeername())
            if any(end[1] == port for end in ends):
                del _noted[number]


def shut_down() -> None:
    """Shut down the connections that were noted. Collectives of this rank, and of others with it, fail from now on."""
    there = _open_files()
    for number, target in _noted.items():
        if there.get(number) != target:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            # gloo ends the process if the socket on which it accepts connections fails
            accepts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in _FAMILIES and not accepts:
                connection.shutdown(socket.SHUT_RDWR)
    _noted.clear()


def forget() -> None:
    """Leave the connections alone, in a forked process: they are its parent's."""
    _noted.clear()


def _open_files() -> dict[int, str]:
    """Return the targets of this process's open files by descriptor; none where there is no /proc."""
    found = {}
    for number in os.listdir(_FILES) if _FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            found[int(number)] = os.readlink(_FILES / number)
    return found


def _watched(epoll: int) -> list[int]:
    """Return the descriptors that an epoll watches."""
    try:
        text = (_INFO / str(epoll)).read_text()
    except OSError:
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
