"""Activations that wait on the host: copies beside computing are ordered by events alone, and hold one block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from one_stage import stage_of
from parity import Case
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.runtime.program import Block, copy_beside_computing
from autoplan.runtime.recompute import OffloadedActivations, Offloads
from autoplan.runtime.side_stream import SideStream, Waiting

CPU = torch.device("cpu")
SIZE = 8


@dataclass
class FakeStream:
    """A stream that runs nothing: which of the operations so far are done before the next one on it starts."""

    name: str
    done: set[int] = field(default_factory=set)

    def record_event(self) -> frozenset[int]:
        return frozenset(self.done)

    def wait_event(self, event: frozenset[int]) -> None:
        self.done |= event


class DeafStream(FakeStream):
    """Negative control: waits for nothing."""

    def wait_event(self, event: frozenset[int]) -> None:
        pass


@dataclass
class _Memory:
    alive: StorageWeakRef
    is_host: bool
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)


class Races(TorchDispatchMode):
    """Every operation against those it must run behind: a read behind the writes of its memory, a write behind all that
    touched it, and on the computing stream whatever comes after memory was given back behind all that touched it.

    Host memory may be given back at any time: its allocator on CUDA asks the streams that copied.
    """

    def __init__(self, compute: FakeStream | None = None, side: FakeStream | None = None) -> None:
        super().__init__()
        self.compute, self.stream_of_copies = compute or FakeStream("compute"), side or FakeStream("copies")
        self.stream = self.compute
        self.found: list[str] = []
        self.log: list[tuple[str, str, tuple[int, ...]]] = []  # stream, operation, addresses of what it writes
        self.copies: list[bool] = []  # of each: returns at once
        self._memory: dict[int, _Memory] = {}

    def side(self) -> SideStream:
        return SideStream(self.stream_of_copies, lambda: self.stream, self._use, CPU)

    @contextlib.contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def host(self, x: torch.Tensor) -> None:
        """`x` is in the memory of the host."""
        self._of(x).is_host = True

    def _of(self, x: torch.Tensor) -> _Memory:
        storage = x.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is None or found.alive.expired():
            if found is not None:
                self._given_back(found)
            found = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), False)
        return found

    def _given_back(self, memory: _Memory) -> None:
        if not memory.is_host and not (memory.writes | memory.reads) <= self.compute.done:
            self.found.append("memory was given back too early")
        memory.writes, memory.reads = set(), set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stream is self.compute:
            for memory in self._memory.values():
                if memory.alive.expired():
                    self._given_back(memory)
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("copy_", "clone"):
            self.copies.append(bool((kwargs or {}).get("non_blocking") or args[2:] == (True,)))
        if func.is_view or func.overloadpacket.__name__ in ("detach", "set_", "empty"):
            return out
        number, name = len(self.log), func.overloadpacket.__name__
        given = [a for a in args if isinstance(a, torch.Tensor)]
        writes = [
            a for a, s in zip(args, func._schema.arguments, strict=False)
            if isinstance(a, torch.Tensor) and s.alias_info is not None and s.alias_info.is_write
        ]  # fmt: skip
        for x in given:
            memory = self._of(x)
            written = any(x is w for w in writes)
            behind = memory.writes | memory.reads if written else memory.writes
            if not behind <= self.stream.done:
                self.found.append(f"{name} on {self.stream.name} runs beside {sorted(behind - self.stream.done)}")
            (memory.writes if written else memory.reads).add(number)
        made = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        for x in made:
            self._of(x).writes.add(number)
        self.log.append((self.stream.name, name, tuple(x.untyped_storage()._cdata for x in (*writes, *made))))
        self.stream.done.add(number)
        return out


@pytest.fixture(autouse=True)
def _hosts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Waiting.__init__

    def known(self: Waiting, host: torch.Tensor) -> None:
        make(self, host)
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(mode, Races):
                mode.host(host)

    monkeypatch.setattr(Waiting, "__init__", known)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sigmoid(x @ w) * torch.exp(-x)) + x


def weights() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, SIZE, generator=g, dtype=torch.float64).requires_grad_() for _ in range(4)]


def passes(side: SideStream | None, num: int = 1, see: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    """Losses and gradients of some forwards through four layers, their backwards after all of them."""
    ws, offloads = weights(), Offloads(side)
    losses = []
    for k in range(num):
        x = torch.full((SIZE, SIZE), 0.1 * (k + 1), dtype=torch.float64)
        for i, w in enumerate(ws):
            with offloads.open([w], follows=i > 0):
                x = layer(x, w)
            see()
        losses.append(x.square().mean())
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(w.grad for w in ws if w.grad is not None)]


@pytest.mark.parametrize("num", [1, 2])
def test_copies_are_ordered_by_events(num: int) -> None:
    """No race, and the values are those without copies."""
    want = passes(None, num)
    with Races() as races:
        got = passes(races.side(), num)
    assert races.found == []
    assert sum(stream == "copies" for stream, _, _ in races.log) >= 2 * 4 * num  # there and back
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("deaf", ["compute", "copies"])
def test_a_stream_that_does_not_wait_is_found(deaf: str) -> None:
    """Negative control: uses before the copy is there, memory given back while it is copied; copies before there is
    something to copy."""
    with Races(**{"compute" if deaf == "compute" else "side": DeafStream(deaf)}) as races:
        passes(races.side())
    assert any(f"on {deaf} runs beside" in text for text in races.found)
    assert (deaf == "compute") == any("given back too early" in text for text in races.found)


def test_what_is_on_the_host_stays_there() -> None:
    """A number that a product saves, say: it would come back on the device."""
    stream = FakeStream("compute")
    side = SideStream(FakeStream("copies"), lambda: stream, lambda _: contextlib.nullcontext(), torch.device("meta"))
    x, number = torch.ones(3, requires_grad=True), torch.tensor(2.0)
    with OffloadedActivations([], side) as moved:
        assert moved._pack(number) is number
        out = x * number
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and moved._all == []


def test_the_host_waits_for_nothing() -> None:
    """Every copy is one that returns at once; without a side stream they block (control)."""
    with Races() as races:
        passes(races.side(), 2)
    assert len(races.copies) == sum(stream == "copies" for stream, _, _ in races.log)
    assert all(races.copies)
    with Races() as races:
        passes(None)
    assert len(races.copies) >= 4 and not any(races.copies)


def test_the_block_before_comes_back_while_one_runs() -> None:
    """When a block's backward begins all but the last one's copies have been asked for, not further ones; and what is
    on the way or back is at most one block."""
    with Races() as races:
        side = races.side()
        get, send = side.get, side.send
        asked: list[tuple[int, int]] = []  # at each use: copies to the device so far, of them used
        most = back = used = 0
        fetched: set[int] = set()

        def measured_send(storage: torch.Tensor) -> Waiting:
            nonlocal most
            out = send(storage)
            if side.limit_bytes:
                most = max(most, sum(x.numel() for x, _ in side._leaving))
            return out

        def measured_get(waiting: Waiting, ahead: Any) -> torch.Tensor:
            nonlocal back, used
            out = get(waiting, ahead)
            if id(waiting) not in fetched:
                fetched.add(id(waiting))
                used += 1
            back = max(back, side._bytes_back())
            asked.append((len([1 for s, n, _ in races.log if s == "copies"]) - sends, used))
            return out

        side.send, side.get = measured_send, measured_get  # type: ignore[method-assign]
        ws, offloads = weights(), Offloads(side)
        x = torch.full((SIZE, SIZE), 0.1, dtype=torch.float64)
        for i, w in enumerate(ws):
            with offloads.open([w], follows=i > 0):
                x = layer(x, w)
        sends = sum(stream == "copies" for stream, _, _ in races.log)
        x.sum().backward()
    assert side.limit_bytes > 0
    assert most <= side.limit_bytes and back <= side.limit_bytes
    assert used == sends == asked[-1][0]  # every storage came back once
    ahead = [copied - taken for copied, taken in asked]
    per_block = sends // len(ws)
    assert max(ahead) <= per_block and sum(a > 0 for a in ahead) > len(ahead) // 2


def test_blocks_of_different_passes_do_not_follow() -> None:
    """The first block of a stage, and one behind a block that keeps its activations, fetch nothing ahead."""

    class Layer(Block):
        def __init__(self, recompute: str) -> None:
            super().__init__(recompute=recompute)
            self.w = torch.nn.Parameter(torch.eye(2))

    blocks = [Layer(how) for how in ("offload", "offload", "none", "offload")]
    copy_beside_computing(torch.nn.Sequential(*blocks), CPU)
    assert [b._follows for b in blocks] == [False, True, False, False]
    assert len({id(b._offloads) for b in blocks}) == 1
    offloads = Offloads()
    first, second = (offloads.open([], follows) for follows in (False, True))
    third = offloads.open([], False)
    assert [o._before is None for o in (first, second, third)] == [True, False, True]


def test_what_nobody_uses_is_waited_for() -> None:
    """A graph that goes while its tensors are on their way back: their memory is not given out before."""
    with Races() as races:
        side = races.side()
        w = weights()[0]
        outs = []
        offloads = Offloads(side)
        x = torch.full((SIZE, SIZE), 0.1, dtype=torch.float64)
        for i in range(2):
            with offloads.open([w], follows=i > 0):
                outs.append(layer(x, w))
        torch.autograd.grad(outs[1].sum(), w)  # brings back those of the first, too
        assert side._coming
        del outs
        torch.autograd.grad(layer(x, w).sum(), w)
        with OffloadedActivations([w], side):
            out = layer(x, w)
        torch.autograd.grad(out.sum(), w)
        assert not side._coming
    assert races.found == []


def test_a_kept_graph_is_copied_again() -> None:
    with Races() as races:
        side, w = races.side(), weights()[0]
        x = torch.full((SIZE, SIZE), 0.1, dtype=torch.float64)
        with OffloadedActivations([w], side) as moved:
            out = layer(x, w).sum()
        (want,) = torch.autograd.grad(out, w, retain_graph=True)
        before = len(races.log)
        moved.let_go()
        (got,) = torch.autograd.grad(out, w)
    assert races.found == [] and torch.equal(got, want)
    assert any(stream == "copies" for stream, _, _ in races.log[before:])


@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
def test_a_model_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a Llama on the host, two passes in flight: gradients to the bit, no race, and every block but the
    first of a pass fetches the one before it."""
    case = Case(recompute="offload")
    grads = []
    for beside in (False, True):
        with Races() as races:
            side = races.side()
            monkeypatch.setattr(SideStream, "of", lambda _, side=side if beside else None: side)
            with stage_of(case) as (pm, inputs):
                losses = [pm.stage(**inputs) for _ in range(2)]
                for loss in losses:
                    loss.backward()
                grads.append({n: p.grad for n, p in pm.stage.named_parameters()})
                follows = [b._follows for b in pm.stage.blocks.values() if b.recompute == "offload"]
        assert races.found == [] and follows == [False, True, True, True]
        assert any(stream == "copies" for stream, _, _ in races.log) is beside
    assert all(torch.equal(g, grads[1][n]) for n, g in grads[0].items())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_that_are_computed_in_place_are_offloaded_as_they_are(kind: type[nn.Module]) -> None:
    """Kernels of recurrent layers compute parts of one tensor in place, each before it is saved: none is another's."""
    torch.manual_seed(0)
    layer = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True).double()
    found = []
    for offloads in (False, True):
        x = torch.linspace(-1, 1, 3 * 4 * 5, dtype=torch.float64).view(3, 4, 5).requires_grad_()
        with OffloadedActivations(layer.parameters()) if offloads else contextlib.nullcontext():
            out, _ = layer(x)
        found.append(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
