"""Measure real operations on this device as they run in a training step: the text that codegen emits, back to back.

A sample is a chain of calls on one thread, divided by their number, so that it includes dispatch but not timers. The
chain rotates over copies of the operands that are as warm as in a step:

- Parameters are used once per micro-batch: their copies together exceed the last-level cache, unless they are tiny, as
  in a model that fits the cache.
- The activation that an op reads in the forward was just written: two copies, warm.
- Tensors that the backward reads were saved long ago: their copies are cold again. Gradients arrive warm.

On CUDA the caches are put into the same state. The L2 is overwritten before every sample; then the tensors that a step
would have just written (the activation of a forward, the gradients of a backward) are read again. Parameters, saved
activations and all tensors of an optimizer stay cold: between two uses of them a step moves more than the L2 holds.

The backward is one call of the engine for the whole chain: per node, without the fixed cost of starting it. The engine
also spends time on every output with a given gradient, and on every activation that is a leaf here and a node in a
step; this time is calibrated and subtracted.

A device with a queue has two times: its own, by events, and the host's to fill the queue (`DeviceTimer.issue`). The
host's is measured on a chain that starts with the device idle and is too short to fill the queue, which would make the
host wait.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.cost_models.profile import MeasuredOp, Timing
from autoplan.cost_models.work import OpWork
from autoplan.ops.saved import TensorFacts
from autoplan.runtime import program
from autoplan.runtime.optim import in_one_kernel
from autoplan.units import MIB

_MIN_REPEATS, _MAX_REPEATS = 7, 200
# Measuring time of one phase of one shape: wanted, and the most. A device's events scatter less than a host's clock,
# and a shape has four phases there: of 300 shapes the profile of a model would take several minutes.
_TARGET_S, _LIMIT_S = 0.03, 0.3
_QUEUED_TARGET_S, _QUEUED_LIMIT_S = 0.006, 0.1
_MAX_CHAIN = 32
_MAX_LEAD = 256  # of overwriting the L2, 10 to 30 ms; the queue of launches holds about 1,000
_MAX_LAUNCHES = 600  # launches of a chain that is timed on the host
# Such a chain is long whatever the operation's size: of two links, each has half the time in which autograd's thread
# wakes. It ends after so many seconds of the device or bytes, but has so many links if memory allows.
_HOST_CHAIN_S, _LEAST_HOST_CHAIN = 0.01, 8
_HOST_CHAIN_BYTES = 0.5  # share of the free memory; a link has the results and gradients of a call
_KERNELS = 3  # kernels per operation of torch in its forward or its backward, at most: assumed
_MANY = 512  # parameters whose gradients are accumulated
_MANY_QUEUED = 128  # the same where launches are timed
_DEFAULT_CACHE_BYTES = 32 * MIB


@dataclass(frozen=True)
class MeasureTask:
    """An operation to measure. The mappings are keyed by the position of an input.

    Attributes:
        text: its right-hand side in x0, x1, ...
        parameters: positions of inputs that are parameters.
        bounds: the numbers that the integer input may have.
        orders: dims from major to minor in memory; without an entry: contiguous.
        broadcast: dims of stride 0.
        names: sizes that the text uses, by name.
    """

    work: OpWork
    text: str
    parameters: frozenset[int] = frozenset()
    bounds: Mapping[int, range] = field(default_factory=dict)
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    broadcast: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of the inputs and outputs of one call."""
        return sum(t.num_bytes for t in (*self.work.inputs, *self.work.outputs))


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level cache: the GPU's L2, or the CPU's largest; 32 MiB if it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    units = {"K": 1024, "M": MIB}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) * units.get(text[-1], 1))
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free for measuring."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # some systems lack these
        return 1024 * MIB


class DeviceTimer:
    """A timer of a device with a queue: its seconds of work by two events, with caches as stated, and the host's.

    The host must be ahead, or its launches are what is timed: the L2 is overwritten repeatedly until that takes longer
    than queueing the work. A sample is late if its first event has passed before all work is queued; then the
    repetitions double. Events are as `torch.cuda.Event`: `query` says whether the device has passed it, `elapsed_time`
    is in milliseconds.

    Args:
        event: makes an event that records times.
        flush: queues one overwriting of the L2.
        synchronize: waits for the device.
        now: the host's clock, in seconds.
    """

    def __init__(
        self,
        event: Callable[[], Any],
        flush: Callable[[], object],
        synchronize: Callable[[], object],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.event = event
        self.flush = flush
        self.synchronize = synchronize
        self.now = now
        self.lead: int = 1
        self.late: bool = False  # True if the last sample needs a longer lead

    def measure(self, work: Callable[[], Any], warm: Callable[[], object] | None) -> tuple[float, Any]:
        """Run `work` once, after `warm` has read tensors into the cache; return its seconds and its result."""
        begin, end = self.event(), self.event()
        self.keep_busy()
        if warm is not None:
            warm()
        begin.record()
        result = work()
        end.record()
        self.judge(begin)
        self.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3, result

    def keep_busy(self) -> None:
        """Give the host a lead: keep the device busy until the work to measure is queued."""
        for _ in range(self.lead):
            self.flush()

    def judge(self, begin: Any) -> None:
        """Check, once all work is queued, whether that was late: the device has passed `begin` already."""
        self.late = bool(begin.query()) and self.lead < _MAX_LEAD
        if self.late:
            self.lead *= 2

    def issue(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the host's seconds to queue `work` once, not to do it, and its result.

        The device is idle before and after. `work` must not wait for anything nor fill the queue.
        """
        self.synchronize()
        start = self.now()
        result = work()
        seconds = self.now() - start
        self.late = False
        self.synchronize()
        return seconds, result


def cuda_timer(device: torch.device) -> DeviceTimer:
    """Return the timer of a CUDA device; it keeps four times the L2 in memory."""
    spare = torch.empty(4 * cache_bytes(device), dtype=torch.int8, device=device)
    return DeviceTimer(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        spare.zero_,
        lambda: torch.cuda.synchronize(device),
    )


class Clock:
    """A clock for pieces of work on this device.

    On one CPU thread: the CPU time of that thread, so that the load of other programs does not count. On several
    threads: wall time. On CUDA: by `DeviceTimer`, `timer` if one is given.
    """

    def __init__(self, device: torch.device, timer: DeviceTimer | None = None) -> None:
        self.device = device
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._timer = cuda_timer(device) if timer is None and device.type == "cuda" else timer

    @property
    def name(self) -> str:
        """The name of the clock for the record."""
        if self._timer is not None:
            return (
                "CUDA events, L2 flushed, then warmed with what the step has just written; launches by the host's clock"
            )
        return "CPU time of the thread" if self._now is time.thread_time else "wall time"

    @property
    def target_s(self) -> float:
        """Seconds of measuring that are wanted for one phase of one shape."""
        return _QUEUED_TARGET_S if self.queued else _TARGET_S

    @property
    def limit_s(self) -> float:
        """The most seconds that measuring one phase of one shape may take."""
        return _QUEUED_LIMIT_S if self.queued else _LIMIT_S

    @property
    def late(self) -> bool:
        """True if the last sample must be repeated with a longer lead of the host."""
        return self._timer is not None and self._timer.late

    @property
    def queued(self) -> bool:
        """True if the host fills a queue that the device works off, and so has a time of its own."""
        return self._timer is not None

    def issue(self, work: Callable[[], Any], _: Iterable[torch.Tensor] = ()) -> tuple[float, Any]:
        """Queue `work` once; return the host's seconds and the result. Only if `queued`."""
        if self._timer is None:
            raise ValueError(f"{self.device} has no queue: its `measure` includes the time of the host")
        return self._timer.issue(work)

    @cached_property
    def edges(self) -> tuple[float, float, float]:
        """The seconds of autograd per output with a given gradient, per leaf, and to start.

        Zeros for a device with a queue. On a CPU the start is 0: its share is in the other two.
        """
        return (0.0, 0.0, 0.0) if self.queued else (*self._edges(self.measure), 0.0)

    @cached_property
    def host_edges(self) -> tuple[float, float, float]:
        """The seconds of a host that fills a queue. On CUDA the engine runs on its own thread, which must wake."""
        samples: dict[int, float] = {}
        for count in (1, _MAX_CHAIN):
            samples[count] = self._backward_s(self.issue, lambda a, _: a.neg(), 1, count)
        start = max(0.0, (_MAX_CHAIN * samples[1] - samples[_MAX_CHAIN]) / (_MAX_CHAIN - 1))
        return (*self._edges(self.issue, start), start)

    def _backward_s(
        self, measure: _Measure, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], num_leaves: int, count: int
    ) -> float:
        """Return the median seconds of the backward of `count` small graphs together."""

        def ones() -> torch.Tensor:
            return torch.ones(16, device=self.device, requires_grad=True)

        samples = []
        for _ in range(30):
            leaves = [[ones() for _ in range(2)] for _ in range(count)]
            outs = [make(a, b) for a, b in leaves]
            wanted = [x for pair in leaves for x in pair[:num_leaves]]
            incoming = [torch.ones(16, device=self.device)] * len(outs)
            samples.append(measure(lambda o=outs, w=wanted, g=incoming: torch.autograd.grad(o, w, g))[0])
        return statistics.median(samples)

    def _edges(self, measure: _Measure, start_s: float = 0.0) -> tuple[float, float]:
        """Return the seconds per output and per leaf."""
        constant = torch.ones(16, device=self.device)

        def backward_s(make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], num_leaves: int) -> float:
            return (self._backward_s(measure, make, num_leaves, _MAX_CHAIN) - start_s) / _MAX_CHAIN

        node = (backward_s(lambda a, _: a.neg().neg().neg().neg().neg(), 1) - backward_s(lambda a, _: a.neg(), 1)) / 4
        leaf = backward_s(lambda a, b: a + b, 2) - backward_s(lambda a, _: a + constant, 1)
        both = backward_s(lambda a, _: a.neg(), 1) - node
        leaf = min(max(0.0, leaf), both)
        return max(0.0, both - leaf), leaf

    def measure(self, work: Callable[[], Any], warm: Iterable[torch.Tensor] = ()) -> tuple[float, Any]:
        """Run `work` once; return its seconds and its result.

        `warm`: tensors that are in the cache by then (on CPUs the caller's repetitions see to that).
        """
        if self._timer is not None:
            return self._timer.measure(work, lambda: _read(warm))
        start = self._now()
        result = work()
        return self._now() - start, result


_Measure = Callable[..., tuple[float, Any]]  # Clock.measure or Clock.issue


def _read(tensors: Iterable[torch.Tensor]) -> None:
    """Bring tensors into the cache: reading allocates in the L2 as writing does."""
    for t in tensors:
        t.detach().sum()


def timing(samples: Sequence[float]) -> Timing:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Timing(median, low, high, len(samples))


def make_input(t: TensorFacts, task: MeasureTask, position: int, device: torch.device) -> torch.Tensor:
    """Return a random tensor with the shape, dtype and memory order of an input."""
    dtype: torch.dtype = getattr(torch, t.dtype)
    zero = task.broadcast.get(position, ())
    shape = [1 if d in zero else size for d, size in enumerate(t.shape)]
    order = task.orders.get(position, tuple(range(len(shape))))
    stored = [shape[d] for d in order]
    if dtype.is_floating_point:
        x = torch.randn(stored, dtype=torch.float32, device=device).to(dtype)
    elif dtype is torch.bool:
        x = torch.rand(stored, device=device) < 0.9
    else:
        legal = task.bounds.get(position, range(2)) or range(1)
        x = torch.randint(legal.start, legal.stop, stored, dtype=dtype, device=device)
    x = x.permute([order.index(d) for d in range(len(order))])
    if zero:
        x = x.expand(t.shape)
    return x.requires_grad_(t.requires_grad and dtype.is_floating_point)


class _Namespace:
    site = 0

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}


def compiled(task: MeasureTask, device: torch.device) -> Callable[..., Any]:
    """Return the text of a task as a function of its inputs."""
    names: dict[str, Any] = {name: getattr(program, name) for name in program.__all__}
    names |= {"device": device, "rng": torch.tensor([7, 11, 5], device=device), "self": _Namespace(), **task.names}
    args = ", ".join(f"x{i}" for i in range(len(task.work.inputs)))
    function: Callable[..., Any] = eval(f"lambda {args}: {task.text}", names)
    return function


def _differentiable(result: Any) -> list[torch.Tensor]:
    outs = list(result) if isinstance(result, (tuple, list)) else [result]
    return [o for o in outs if o.requires_grad]


class _Chain:
    """The inputs of a chain of calls, and its two phases."""

    def __init__(self, task: MeasureTask, device: torch.device, cache: int) -> None:
        self.task, self.function = task, compiled(task, device)
        self.length = max(2, min(_MAX_CHAIN, -(-5 * cache // (4 * max(1, task.num_bytes)))))

        def copies(count: int, positions: list[int]) -> list[list[torch.Tensor]]:
            return [[make_input(task.work.inputs[i], task, i, device) for i in positions] for _ in range(count)]

        every = range(len(task.work.inputs))
        self.fixed = [i for i in every if i in task.parameters]
        self.moving = [i for i in every if i not in task.parameters]
        self.parameters = copies(self.length, self.fixed)
        self.cold = copies(self.length, self.moving)
        self.warm = [self._args(i, self.cold[i % 2]) for i in range(self.length)]
        self.late = [self._args(i, self.cold[i]) for i in range(self.length)]
        self.gradients: list[list[torch.Tensor]] = []
        self.written = [x for copy in self.cold[:2] for x in copy]  # written by the op before, in a step

    def _args(self, index: int, moving: list[torch.Tensor]) -> list[torch.Tensor]:
        found = dict(zip((*self.fixed, *self.moving), (*self.parameters[index], *moving), strict=True))
        return [found[i] for i in sorted(found)]

    def leaves(self, length: int) -> list[list[torch.Tensor]]:
        """Return arguments of so many calls, of which each has leaves of its own; values repeat beyond the chain's."""
        again = range(len(self.late), length)
        return self.late[:length] + [
            [x.detach().requires_grad_(x.requires_grad) for x in self.late[i % len(self.late)]] for i in again
        ]

    def forward(self, args: list[list[torch.Tensor]]) -> list[Any]:
        function = self.function
        return [function(*a) for a in args]

    def backward(self, measure: _Measure, edges: tuple[float, float, float], length: int) -> float | None:
        """Return the seconds of the backward of `length` calls; None if nothing is differentiable."""
        late = self.leaves(length)
        results = self.forward(late)
        outs = [_differentiable(r) for r in results]
        if not outs[0]:
            return None
        if not self.gradients:
            self.gradients = [[torch.randn_like(o) for o in outs[i]] for i in range(2)]
        flat = [o for group in outs for o in group]
        incoming = [g for i in range(len(outs)) for g in self.gradients[i % 2]]
        wanted = [a for args in late for a in args if a.requires_grad]
        del results, outs
        output_s, leaf_s, start_s = edges
        leaves = sum(self.task.work.inputs[i].requires_grad for i in self.moving) * length
        arrived = [g for gradients in self.gradients for g in gradients]
        seconds, _ = measure(lambda: torch.autograd.grad(flat, wanted, incoming, allow_unused=True), arrived)
        # parameters stay leaves in a step; at least a fifth, however short the operation
        return max(seconds - start_s - output_s * len(flat) - leaf_s * leaves, seconds / 5)

    def queued_length(self, device_s: float, free_bytes: int) -> int:
        """Return the number of calls that the host is timed for; their launches fit the queue.

        `device_s`: the device's seconds for one.
        """
        operations = _Operations()
        with operations:
            self.forward(self.warm[:1])
        launched = _MAX_LAUNCHES // (_KERNELS * max(1, operations.count))
        held = int(_HOST_CHAIN_BYTES * free_bytes) // max(1, 2 * self.task.num_bytes)
        return max(1, min(_MAX_CHAIN, launched, held, max(_LEAST_HOST_CHAIN, int(_HOST_CHAIN_S / device_s))))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A mode that counts the operations of torch inside it."""

    count: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _samples(run: Callable[[], float | None], length: int, limit_s: float, clock: Clock) -> list[float]:
    """Return samples: repeat until enough time was measured, within limits.

    The first sample warms up and does not count, nor do late ones.
    """
    found: list[float] = []
    spent, begin = 0.0, time.perf_counter()
    while len(found) < _MAX_REPEATS:
        seconds = run()
        if seconds is None:
            return []
        if clock.late:
            continue
        found.append(max(seconds, 1e-9) / length)
        spent += seconds
        elapsed = time.perf_counter() - begin
        if (len(found) > _MIN_REPEATS and spent >= clock.target_s) or (len(found) > 2 and elapsed >= limit_s):
            break
    return found[1:]


def measure_op(task: MeasureTask, clock: Clock, cache: int, limit_s: float | None = None) -> MeasuredOp:
    """Measure the forward and backward time of one operation. Errors of the operation are passed on."""
    limit_s = clock.limit_s if limit_s is None else limit_s
    update = _UPDATES.get(task.work.op)
    if update is not None:
        return update(task, clock, cache, limit_s)
    chain = _Chain(task, clock.device, cache)
    enabled = gc.isenabled()
    gc.disable()  # a collection inside a chain must not count for the op
    try:

        def forward() -> float:
            seconds, results = clock.measure(lambda: chain.forward(chain.warm), chain.written)
            del results
            return seconds

        def backward() -> float | None:
            return chain.backward(clock.measure, clock.edges, chain.length)

        chain.function(*chain.warm[0])  # warm up: allocator, code
        forwards = _samples(forward, chain.length, limit_s, clock)
        backwards = _samples(backward, chain.length, limit_s, clock) if task.work.has_backward else []
        host = ([], []) if not clock.queued else _host_samples(chain, clock, limit_s, max(forwards + backwards))
    finally:
        if enabled:
            gc.enable()
    return MeasuredOp(task.work, timing(forwards), *(timing(found) if found else None for found in (backwards, *host)))


def _host_samples(chain: _Chain, clock: Clock, limit_s: float, device_s: float) -> tuple[list[float], list[float]]:
    """Return the host's seconds per call, forward and backward; a call takes the device `device_s`."""
    length = chain.queued_length(device_s, memory_bytes(clock.device))
    warm = [chain.warm[i % chain.length] for i in range(length)]

    def forward() -> float:
        seconds, results = clock.issue(lambda: chain.forward(warm))
        del results
        return seconds

    forwards = _samples(forward, length, limit_s, clock)
    if not chain.task.work.has_backward:
        return forwards, []
    return forwards, _samples(lambda: chain.backward(clock.issue, clock.host_edges, length), length, limit_s, clock)


def _measure_adamw(task: MeasureTask, clock: Clock, cache: int, limit_s: float) -> MeasuredOp:
    """Measure AdamW over several tensors of this size, per tensor."""
    (t,) = task.work.inputs
    length = max(1, min(_MAX_CHAIN, -(-2 * cache // (4 * t.num_bytes))))
    params = [torch.nn.Parameter(make_input(t, task, 0, clock.device)) for _ in range(length)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    in_one_kernel(optimizer)
    optimizer.step()
    return MeasuredOp(
        task.work,
        timing(_samples(lambda: clock.measure(optimizer.step)[0], length, limit_s, clock)),
    )


def _measure_accumulate(task: MeasureTask, clock: Clock, cache: int, limit_s: float) -> MeasuredOp:
    """Measure what accumulating a gradient adds to a backward, against a first one, whose gradient is just stored."""
    (t,) = task.work.inputs
    length = max(2, min(_MANY, -(-3 * cache // (4 * t.num_bytes))))  # all gradients together exceed the cache
    params = [make_input(t, task, 0, clock.device).requires_grad_() for _ in range(length)]

    def backward(accumulates: bool, measure: _Measure, count: int) -> float:
        for p in params:
            if not accumulates:
                p.grad = None
        # scaled, so that every gradient is a tensor of its own, as from a product
        outs = [p * 1.0 for p in params[:count]]
        gradients = [torch.ones_like(o) for o in outs]
        return measure(lambda: torch.autograd.backward(outs, gradients))[0]

    def more(measure: _Measure, count: int) -> Timing:
        backward(False, measure, count)
        while clock.late:  # the host is behind: repeat with a longer lead
            backward(False, measure, count)
        pairs = [(backward(True, measure, count), backward(False, measure, count)) for _ in range(_MIN_REPEATS)]
        begin = time.perf_counter()
        while len(pairs) < 5 * _MIN_REPEATS and time.perf_counter() - begin < limit_s:
            pairs.append((backward(True, measure, count), backward(False, measure, count)))
        first = statistics.median(f for _, f in pairs)
        return timing([max(a - first, 1e-9) / count for a, _ in pairs])

    host = more(clock.issue, min(length, _MANY_QUEUED)) if clock.queued else None
    return MeasuredOp(task.work, more(clock.measure, length), host_forward_s=host)


# work that is not an op of the graph (autoplan.ops.making)
_UPDATES = {"optimizer_adamw": _measure_adamw, "grad_accumulate": _measure_accumulate}
