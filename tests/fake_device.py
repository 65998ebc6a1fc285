"""A device that works off a queue, as CUDA does, simulated: operations run on the CPU, its clocks say what they took.

Under `with FakeDevice(...)` every operation of torch but a view takes the host `launch_s` and the device
`kernel_s(operation, elements of its result)`, after what was queued before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.profiler.ops import DeviceTimer


class FakeEvent:
    """As `torch.cuda.Event(enable_timing=True)`: milliseconds."""

    def __init__(self, device: FakeDevice) -> None:
        self.of, self.at = device, 0.0

    def record(self) -> None:
        stream = self.of.stream
        self.at = self.of.busy[stream] = max(self.of.busy[stream], self.of.host)

    def query(self) -> bool:
        return self.of.host >= self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


class FakeDevice(TorchDispatchMode):
    """Clocks of the host and of the device's streams, in seconds; `flush_s`: overwriting its cache once."""

    host: float
    busy: dict[str, float]
    stream: str

    def __init__(
        self,
        launch_s: float,
        kernel_s: Callable[[str, int], float] = lambda _, __: 0.0,
        flush_s: float = 50e-6,
    ) -> None:
        super().__init__()
        self.launch_s, self.kernel_s, self.flush_s = launch_s, kernel_s, flush_s
        self.host, self.busy, self.stream = 0.0, {"main": 0.0, "side": 0.0}, "main"

    def queue(self, seconds: float, launch_s: float | None = None) -> None:
        """A kernel of so many seconds behind what is queued on the stream."""
        self.host += self.launch_s if launch_s is None else launch_s
        self.busy[self.stream] = max(self.busy[self.stream], self.host) + seconds

    def synchronize(self) -> None:
        """The host waits."""
        self.host = max(self.host, *self.busy.values())

    @contextmanager
    def side(self) -> Iterator[None]:
        """Another stream."""
        self.stream = "side"
        try:
            yield
        finally:
            self.stream = "main"

    def wait(self, event: FakeEvent) -> None:
        """The stream does."""
        self.busy[self.stream] = max(self.busy[self.stream], event.at)

    def timer(self) -> DeviceTimer:
        """A timer of this device."""
        return DeviceTimer(
            lambda: FakeEvent(self), lambda: self.queue(self.flush_s, 0.0), self.synchronize, lambda: self.host
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        self.queue(self.kernel_s(func.name(), first.numel() if isinstance(first, torch.Tensor) else 1))
        return result
