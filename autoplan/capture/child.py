"""Run a function in a forked process: an operator on sizes that it does not expect may end the process it runs in."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

_LIMIT_S = 60.0


def in_child(function: Callable[[], Any], limit_s: float = _LIMIT_S) -> Any:
    """Return the result of `function`, which can be pickled; None if its process dies or takes longer than `limit_s`.

    Raises:
        Exception: what the function raised.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads do not run in the child
        read, write = os.pipe()
        child = os.fork()
    if child == 0:
        os.close(read)
        _answer(function, write)
    os.close(write)
    try:
        data = _received(read, time.monotonic() + limit_s)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)  # it has answered, or will not
        os.waitpid(child, 0)
    if not data:
        return None
    raised, result = pickle.loads(data)  # written by our own child
    if raised:
        raise result
    return result


def _answer(function: Callable[[], Any], write: int) -> None:
    """Send the result of `function` and end the process, without anything that the parent does at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)  # the threads of the parent are not in this process
        try:
            data = pickle.dumps((False, function()))
        except Exception as exc:
            data = pickle.dumps((True, exc))
        left = memoryview(data)
        while left:
            left = left[os.write(write, left) :]  # a pipe may take a part only
    finally:
        os._exit(0)


def _received(read: int, end_s: float) -> bytes:
    """Return all that is written until the pipe is closed; nothing if that is not done by `end_s`."""
    parts: list[bytes] = []
    while select.select([read], [], [], max(0.0, end_s - time.monotonic()))[0]:
        part = os.read(read, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""
