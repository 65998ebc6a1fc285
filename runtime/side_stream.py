"""Copies between a device and its host beside the device's computation: a separate stream, events, one block ahead.

    forward     compute  block 0 | block 1 | block 2 | ...        a copy waits for the event of what made its tensor
                copies     out 0 |  out 1  |  out 2  |
    backward    compute  block 2 | block 1 | block 0              a use waits for the event of its copy
                copies     in 1  |  in 0   |

The host waits for none of them. Tensors that have not left yet, and tensors that have come back, count against one
limit each: the bytes of the fullest block so far. So a pass holds no more memory than one that copies while nothing
computes. Beyond the limit, in the forward the computation waits for the oldest copy, and in the backward a copy waits
until tensors of the running block are freed. (Plain double buffers, as in torchtune's OffloadActivations, would hold
two blocks.)

All device memory belongs to the computing stream, so that the allocator can reuse it without asking other streams: the
computing stream waits for a copy before the memory that is copied from, or to, may be freed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Event = Any  # of torch.cuda, or of a test: only passed from one stream to another that waits for it


class Stream(Protocol):
    """The part of `torch.cuda.Stream` that is used."""

    def record_event(self) -> Event:
        """Return an event that is reached when everything queued so far is done."""

    def wait_event(self, event: Event) -> None:
        """Let everything that is queued later wait for the event."""


class Waiting:
    """An offloaded storage: its copy on the host, and on the device once it is fetched."""

    __slots__ = ("__weakref__", "arrived", "here", "host")

    def __init__(self, host: torch.Tensor) -> None:
        self.host: torch.Tensor = host
        self.here: torch.Tensor | None = None
        self.arrived: Event | None = None  # None: the computing stream has waited for it


class SideStream:
    """One stream for copies in both directions, in the order of the requests.

    Args:
        stream: where copies run.
        current: returns the stream on which the caller computes.
        use: a context in which operations go to a stream.
        device: device of the copied tensors. On CUDA the host's memory is pinned; otherwise copies would block.
    """

    def __init__(
        self,
        stream: Stream,
        current: Callable[[], Stream],
        use: Callable[[Any], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        self._stream = stream
        self._current = current
        self._use = use
        self.device = device
        self._leaving: deque[tuple[torch.Tensor, Event]] = deque()  # the oldest first
        self._back: list[weakref.ref[Waiting]] = []
        self._coming: list[tuple[weakref.ref[Waiting], torch.Tensor, Event]] = []  # nobody has waited for these
        self.limit_bytes: int = 0  # bytes of the fullest block so far

    @classmethod
    def of(cls, device: torch.device) -> SideStream | None:
        """Return a side stream of a CUDA device; None for other devices, where nothing runs beside the host."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return cls(stream, lambda: torch.cuda.current_stream(device), torch.cuda.stream, device)

    # -- forward ----------------------------------------------------------------------------------------------------

    def send(self, storage: torch.Tensor) -> Waiting:
        """Start to copy a whole storage (uint8, [bytes]) to the host."""
        host = torch.empty(storage.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._stream.wait_event(self._current().record_event())
        with self._use(self._stream):
            host.copy_(storage, non_blocking=True)
        self._leaving.append((storage, self._stream.record_event()))
        while len(self._leaving) > 1 and sum(x.numel() for x, _ in self._leaving) > self.limit_bytes > 0:
            self._let_oldest_go()
        return Waiting(host)

    def end_block(self, sent_bytes: int) -> None:
        """End a block's forward; `sent_bytes`: bytes of everything that it sent."""
        self.limit_bytes = max(self.limit_bytes, sent_bytes)

    def _let_oldest_go(self) -> None:
        _, event = self._leaving.popleft()
        self._current().wait_event(event)

    # -- backward ---------------------------------------------------------------------------------------------------

    def get(self, waiting: Waiting, ahead: Sequence[weakref.ref[Waiting]]) -> torch.Tensor:
        """Return the storage on the device, ready for work queued from now on.

        Then start copies of `ahead`, in this order, as far as there is room.
        """
        while self._leaving:
            self._let_oldest_go()
        self._fetch(waiting)
        if waiting.arrived is not None:
            self._current().wait_event(waiting.arrived)
            waiting.arrived = None
        here = waiting.here
        if here is None:
            raise RuntimeError("a copy to the device was lost")
        self._drop_unused()
        room = self.limit_bytes - self._bytes_back()
        for reference in ahead:
            following = reference()
            if following is None or following.here is not None:
                continue
            room -= following.host.numel()
            if room < 0:
                break
            self._fetch(following)
        return here

    def _fetch(self, waiting: Waiting) -> None:
        if waiting.here is not None:
            return
        here = torch.empty(waiting.host.shape, dtype=torch.uint8, device=self.device)
        self._stream.wait_event(self._current().record_event())  # queued work may still use its memory
        with self._use(self._stream):
            here.copy_(waiting.host, non_blocking=True)
        event = self._stream.record_event()
        waiting.here, waiting.arrived = here, event
        reference = weakref.ref(waiting)
        self._back.append(reference)
        self._coming.append((reference, here, event))

    def _drop_unused(self) -> None:
        """Forget used copies, and free copies that nobody will use (their graph is gone) once they are waited for."""
        coming = []
        for reference, here, event in self._coming:
            waiting = reference()
            if waiting is None or waiting.here is not here:
                self._current().wait_event(event)
            elif waiting.arrived is not None:
                coming.append((reference, here, event))
        self._coming = coming

    def _bytes_back(self) -> int:
        self._back = [r for r in self._back if (waiting := r()) is not None and waiting.here is not None]
        alive = [waiting.here for r in self._back if (waiting := r()) is not None]
        return sum(here.numel() for here in alive if here is not None)
