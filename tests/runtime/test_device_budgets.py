"""What every operation of the runtime costs a GPU, counted without one: kernels, bytes, waits of the host.

`BUDGETS` states for each operation how many kernels it may launch and how many bytes it may move per element, forward
and backward. A change that is over its budget fails; one that is well under it (`_SLACK`) fails too, so that the table
stays what it says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import models
import pytest
import spmd_types
import torch
import torch.distributed as dist
from device_counter import DeviceCounter
from harness import pool
from parity import spread_out
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import autoplan
from autoplan.runtime import convert, fused, program
from autoplan.runtime.attention import attention
from autoplan.runtime.context import context_part, own_part, to_heads, to_sequence
from autoplan.runtime.convert import I, R
from autoplan.runtime.draws import draw
from autoplan.runtime.dropout import dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.experts import experts
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.norm import power_sum, scale_
from autoplan.runtime.optim import on_local_shards
from autoplan.runtime.parts import join
from autoplan.runtime.precision import Copies, LossScaler, MixedPrecision
from autoplan.runtime.spec import ParamSpec
from autoplan.runtime.statistics import running_statistics, update_buffer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

TOKENS, HIDDEN = 1 << 12, 1 << 10
BF16 = torch.bfloat16
Made = tuple[Callable[..., torch.Tensor], list[torch.Tensor], int]
"""A function, its tensors, and the number of elements that bytes are counted per."""


@contextlib.contextmanager
def a_mesh() -> Iterator[AxisMesh]:
    """Rank 0 of two tensor-parallel ranks; collectives go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = AxisMesh([("tp", 2)], {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


@dataclass(frozen=True)
class Budget:
    """Kernels and bytes per element, forward and backward; and collectives. ``device``: where they are counted."""

    forward_kernels: int
    forward_bytes: float
    backward_kernels: int
    backward_bytes: float
    collectives: int = 0
    device: Literal["cpu", "meta"] = "meta"


def on_meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _dropout() -> Made:
    rng = on_meta(3, dtype=torch.int64, grad=False)
    index = ((4, 4, "batch"), (TOKENS // 4, TOKENS // 4, ()), (HIDDEN, 2 * HIDDEN, ("tp",)))
    x = on_meta(TOKENS, HIDDEN)
    return lambda x: dropout(x, 0.1, rng, 3, index), [x], x.numel()


def _draw(x: torch.Tensor) -> torch.Tensor:
    rng = on_meta(3, dtype=torch.int64, grad=False)
    index = ((4, 4, "batch"), (TOKENS // 4, TOKENS // 4, ()), (HIDDEN, 2 * HIDDEN, ("tp",)))
    return draw(x, "normal", (), rng, 3, index)


CLASSES = 1 << 12


def _loss(sharded: bool, smoothing: float = 0.0, dtype: torch.dtype = BF16) -> Callable[[], Made]:
    def make() -> Made:
        logits, target = on_meta(TOKENS, CLASSES, dtype=dtype), on_meta(TOKENS, dtype=torch.int64, grad=False)
        if sharded:
            loss = lambda x: vocab_parallel_cross_entropy_sum(x, target, "tp", label_smoothing=smoothing)  # noqa: E731
        else:
            loss = lambda x: cross_entropy_sum(x, target, label_smoothing=smoothing)  # noqa: E731
        return loss, [logits], logits.numel()

    return make


def _embedding() -> Made:
    ids = on_meta(TOKENS, dtype=torch.int64, grad=False)
    table = on_meta(4 * TOKENS, HIDDEN)
    return lambda w: vocab_parallel_embedding(ids, w, "tp"), [table], TOKENS * HIDDEN


def _attention(groups: int, masked: bool) -> Callable[[], Made]:
    def make() -> Made:
        q, k, v = (torch.zeros(1, heads, 128, 64, requires_grad=True) for heads in (8, groups, groups))
        mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=q.device).tril() if masked else None
        return lambda q, k, v: attention(q, k, v, causal=not masked, scale=None, mask=mask), [q, k, v], q.numel()

    return make


def _moved(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Made]:
    def make() -> Made:
        x = on_meta(TOKENS, HIDDEN)
        return function, [x], x.numel()

    return make


def _heads(there: bool) -> Callable[[], Made]:
    def make() -> Made:
        x = on_meta(1, 16, TOKENS, HIDDEN // 16)  # [b, h, s, d]
        return lambda x: (to_heads if there else to_sequence)(x, "tp"), [x], x.numel()

    return make


def _experts() -> Made:
    """Four experts of half the hidden size inside, two per token; bytes are per element of a chosen row."""
    tokens, hidden, inner, num = 1 << 10, 64, 32, 4
    x, first, down = (torch.zeros(n) for n in ((tokens, hidden), (num, 2 * inner, hidden), (num, hidden, inner)))
    index = (torch.arange(2 * tokens, device=x.device) % num).view(tokens, 2)
    weights = torch.ones(tokens, 2, device=x.device)
    tensors = [t.requires_grad_() for t in (x, weights, first, down)]
    call = functools.partial(experts, activation="silu", gated=True)
    return lambda x, w, first, down: call(x, index, w, first, down), tensors, 2 * tokens * hidden


def _statistics() -> Made:
    """Running statistics of batch norm, by channel; there is no backward."""
    mean, variance, *running = (on_meta(HIDDEN, dtype=torch.float32, grad=False) for _ in range(4))
    batches = on_meta(dtype=torch.int64, grad=False)

    def update(*given: torch.Tensor) -> None:
        running_statistics(*given, *running, batches, momentum=0.1, number=64)

    return update, [mean, variance], HIDDEN  # type: ignore[return-value]


def _join() -> Made:
    """One part of a ring's softmax joined to what was there."""
    shape = (1, 16, TOKENS, HIDDEN // 16)
    out, part = (on_meta(*shape, dtype=torch.float32, grad=False) for _ in range(2))
    lse, part_lse = (on_meta(*shape[:3], dtype=torch.float32, grad=False) for _ in range(2))
    return lambda: join(out, lse, part, part_lse), [], out.numel()  # type: ignore[return-value]


def _without_gradient(function: Callable[[torch.Tensor], object]) -> Callable[[], Made]:
    def run(x: torch.Tensor) -> None:
        function(x)

    x = on_meta(TOKENS, HIDDEN, grad=False)
    return lambda: (run, [x], x.numel())  # type: ignore[return-value]


def _update(value: torch.Tensor) -> torch.Tensor:
    return update_buffer(value, torch.empty_like(value), torch.nn.Module(), "held")


OPERATIONS: dict[str, tuple[Callable[[], Made], Budget]] = {
    # Bytes of bf16: 2 to read and 2 to write an element. torch's own dropout writes a mask of 1 byte, too.
    "dropout": (_dropout, Budget(1, 4, 1, 4)),
    # kernels: one that reads the logits, the others one number per token
    "cross entropy": (_loss(False), Budget(14, 2, 1, 4)),
    "cross entropy, smoothed": (_loss(False, 0.1), Budget(19, 2, 1, 4)),
    "cross entropy, float32": (_loss(False, dtype=torch.float32), Budget(14, 4, 1, 8)),
    "vocabulary-parallel cross entropy": (_loss(True), Budget(14, 2, 1, 4, collectives=2)),
    # read and written, zeroed where another rank has the row; the gradient of the table is four times as large here
    "vocabulary-parallel embedding": (_embedding, Budget(12, 8, 7, 14)),
    "all-reduce to R": (_moved(lambda x: convert.all_reduce(x, "tp", R)), Budget(0, 0, 0, 0, collectives=2)),
    "all-reduce to I": (_moved(lambda x: convert.all_reduce(x, "tp", I)), Budget(0, 0, 0, 0, collectives=1)),
    # communication moves bytes of its own; what is not along dim 0 is laid out anew
    "reduce-scatter, dim 0": (_moved(lambda x: convert.reduce_scatter(x, "tp", 0)), Budget(0, 0, 0, 0, collectives=2)),
    "reduce-scatter, dim 1": (_moved(lambda x: convert.reduce_scatter(x, "tp", 1)), Budget(1, 4, 1, 4, collectives=2)),
    "all-gather, dim 0": (_moved(lambda x: convert.all_gather(x, "tp", 0, R)), Budget(0, 0, 0, 0, collectives=2)),
    "all-gather, dim 1": (_moved(lambda x: convert.all_gather(x, "tp", 1, R)), Budget(1, 8, 1, 8, collectives=2)),
    "slice, dim 0": (_moved(lambda x: convert.slice_(x, "tp", 0, I)), Budget(1, 3, 0, 0, collectives=1)),
    "slice, dim 1": (_moved(lambda x: convert.slice_(x, "tp", 1, I)), Budget(1, 3, 1, 4, collectives=1)),
    "to replicate": (_moved(lambda x: convert.to_replicate(x, "tp")), Budget(0, 0, 0, 0, collectives=1)),
    "to partial, from I": (_moved(lambda x: convert.to_partial(x, "tp", I)), Budget(1, 4, 0, 0)),
    "to partial, from R": (_moved(lambda x: convert.to_partial(x, "tp", R)), Budget(1, 4, 1, 4)),
    "context part": (_moved(lambda x: context_part(x, "tp", 0)), Budget(1, 2, 3, 5)),
    "own part": (_moved(lambda x: own_part(x, "tp", 0, ((1, 2048), (1, 2048)))), Budget(1, 2, 5, 7)),
    # laid out by rank before it is sent, and in the order of the sequence afterwards
    "context, to heads": (_heads(True), Budget(2, 6, 3, 8, collectives=2)),
    "context, to sequence": (_heads(False), Budget(3, 8, 2, 6, collectives=2)),
    "all-to-all": (_moved(lambda x: convert.all_to_all(x, "tp", 0, 1)), Budget(1, 4, 1, 4, collectives=2)),
    # float32, several passes where one could do: `out` twice read and written, a product between
    # float32 queries, keys, values and result, and again with gradients; keys of a group are not repeated. On the CPU:
    # on meta torch writes the scores out.
    "attention, causal": (_attention(8, False), Budget(1, 16, 1, 32, device="cpu")),
    "attention, grouped": (_attention(2, False), Budget(1, 10, 1, 20, device="cpu")),
    "attention, grouped, masked": (_attention(2, True), Budget(4, 12.3, 1, 21, device="cpu")),
    # float32: rows of tokens, read by products, and the rows between these; the sum over choices; weights
    "experts": (_experts, Budget(21, 47.6, 25, 106.2, device="cpu")),
    # int64 of two streams, mixed by some ten kernels each, and float32; nothing of it is one kernel yet
    "draw": (_without_gradient(_draw), Budget(118, 714, 0, 0)),
    # of bf16: the value is read, the copy written
    "update of a buffer": (_without_gradient(_update), Budget(1, 4, 0, 0)),
    "extreme of ranks": (
        _without_gradient(lambda x: convert.extreme(x, "tp", largest=True)),
        Budget(0, 0, 0, 0, collectives=1),
    ),
    "running statistics": (_statistics, Budget(9, 72.1, 0, 0)),
    "ring: join": (_join, Budget(12, 29.2, 0, 0)),
}
_SLACK = 0.75


@dataclass(frozen=True)
class Counted:
    """What an operation costs."""

    forward: DeviceCounter
    backward: DeviceCounter
    elements: int


def count(make: Callable[[], Made], device: Any = "meta") -> Counted:
    """Forward and backward of one operation, its gradient arriving contiguous and the parameters' fresh."""
    with a_mesh():
        function, tensors, elements = make()
        with DeviceCounter(device) as forward:
            out = function(*tensors)
        gradient = None if out is None else torch.empty_like(out)
        with DeviceCounter(device) as backward:
            if gradient is not None:
                torch.autograd.grad(out, [t for t in tensors if t.requires_grad], gradient)
    return Counted(forward, backward, elements)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_its_budget(name: str) -> None:
    make, budget = OPERATIONS[name]
    counted = count(make, budget.device)
    for which, counter, kernels, per_element in (
        ("forward", counted.forward, budget.forward_kernels, budget.forward_bytes),
        ("backward", counted.backward, budget.backward_kernels, budget.backward_bytes),
    ):
        assert counter.syncs == [], f"{which}: {counter.report()}"
        said = f"{which}, {counter.moved_bytes / counted.elements:.2f} bytes per element: {counter.report('kernel')}"
        assert _SLACK * kernels <= counter.num_kernels <= kernels, said
        # and what is per row: indices, statistics
        assert _SLACK * per_element <= counter.moved_bytes / counted.elements <= per_element + 0.1, said
    collectives = len(counted.forward.of("collective")) + len(counted.backward.of("collective"))
    assert collectives == budget.collectives, counted.forward.report("collective")


def test_every_operation_of_an_emitted_program_has_a_budget() -> None:
    """All that emitted text may call: the first words of the rows, or why there is none."""
    without = {
        "parameter": "a declaration",
        "context_length": "a number",
        "context_positions": "an arange, and a context part of it",
        "typed": "only type-checked",
        "vary": "only type-checked",
        "scan": "runs a model's own function",
    }
    otherwise = {
        "all_gather": "all-gather",
        "all_reduce": "all-reduce to R",
        "all_to_all": "all-to-all",
        "context_part": "context part",
        "own_part": "own part",
        "cross_entropy_sum": "cross entropy",
        "reduce_scatter": "reduce-scatter",
        "extreme": "extreme of ranks",
        "running_statistics": "running statistics",
        "update_buffer": "update of a buffer",
        "slice_": "slice",
        "to_partial": "to partial",
        "to_replicate": "to replicate",
        "vocab_parallel_cross_entropy_sum": "vocabulary-parallel cross entropy",
        "vocab_parallel_embedding": "vocabulary-parallel embedding",
    }
    rows = {name.partition(",")[0] for name in OPERATIONS}
    called = {name for name in program.__all__ if callable(getattr(program, name)) and not name[0].isupper()}
    assert {otherwise.get(name, name) for name in called - set(without)} <= rows
    assert set(without) <= set(program.__all__)


@pytest.mark.parametrize("lacking", ["the package triton", "a C compiler", "Python.h", "nothing"])
def test_what_triton_needs_is_looked_for(lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU without it runs by torch's operators, and says so once."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if lacking == "the package triton" else object())
    monkeypatch.setattr("shutil.which", lambda name: None if lacking == "a C compiler" else f"/bin/{name}")
    where = tmp_path / "none" if lacking == "Python.h" else tmp_path
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": str(where)})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fused.has_triton.cache_clear()
    try:
        gpu = torch.device("cuda")
        if lacking == "nothing":
            assert fused.one_kernel(gpu)
        else:
            with pytest.warns(UserWarning, match=lacking):
                assert not fused.one_kernel(gpu)
            assert not fused.one_kernel(gpu), "once"
        assert not fused.one_kernel(torch.device("cpu"))
    finally:
        fused.has_triton.cache_clear()


def test_the_budget_sees_an_operation_that_is_not_fused() -> None:
    """Negative control: the same mask and product by torch's operators."""

    def make() -> Made:
        x, draws = on_meta(TOKENS, HIDDEN), on_meta(TOKENS, HIDDEN, dtype=torch.float32, grad=False)
        return lambda x: torch.where(draws < 0.9, x * (1 / 0.9), 0), [x], x.numel()

    counted = count(make)
    assert counted.forward.num_kernels > 1
    assert counted.forward.moved_bytes / counted.elements > 8


# -- a whole step ------------------------------------------------------------------------------------------------------


def count_step(rank: int, world: int, layers: int, pins: dict[str, Any], precision: str) -> tuple[int, str]:
    """Waits of the host in a step of a small Llama (forward, backward, clipping, AdamW), and where they are."""
    alone = world == 1 and not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        batch = models.token_batch(4, 16)
        pm = autoplan.parallelize(
            models.make_llama(num_hidden_layers=layers),
            "local",
            example_inputs=batch,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            pins=pins,
            precision=precision,
        )
        assert pm.optimizer is not None
        mine = {k: v[: 4 // pm.data_world] for k, v in batch.items()}

        def step() -> None:
            pm.step(mine)
            pm.clip_grad_norm_(1.0)
            pm.optimizer.step()

        step()  # what is made once is made
        steps = [state["step"] for state in pm.optimizer.state.values()]  # torch keeps these on the host
        with DeviceCounter(host=[*mine.values(), *steps]) as counter:
            step()
        assert counter.num_kernels > 60 * layers
        return len(counter.syncs), counter.report()
    finally:
        if alone:
            dist.destroy_process_group()
            spmd_types._mesh_axis._reset()


PLAIN = {"num_micro_batches": 2}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_once_whatever_its_depth(precision: str) -> None:
    """For the count of valid labels; nothing in layers, micro-batches, clipping or the optimizer waits."""
    (few, _), (many, where) = (count_step(0, 1, layers, PLAIN, precision) for layers in (2, 4))
    assert few == many == 1, where
    assert "runtime/batch.py" in where, where


@pytest.mark.processes
@pytest.mark.parametrize(
    "pins", spread_out([{"tp": 2}, {"dp": 2, "zero_stage": 2}, {"pp": 2, "num_micro_batches": 2}], 2), ids=str
)
def test_a_step_of_two_ranks_waits_once_whatever_its_depth(pins: dict[str, Any]) -> None:
    for (few, _), (many, where) in zip(
        *(pool(2).run(count_step, layers, pins, "fp32") for layers in (2, 4)), strict=True
    ):
        assert few == many == 1, where


# -- what works on all parameters -------------------------------------------------------------------------------------

Parameters = list[torch.nn.Parameter]


def _with_gradients(count: int, device: str) -> Parameters:
    out = [torch.nn.Parameter(torch.ones(64, 8, device=device)) for _ in range(count)]
    for p in out:
        p.grad = torch.ones_like(p)
    return out


def _copies(count: int, device: str) -> tuple[Parameters, Copies]:
    masters = _with_gradients(count, device)
    places = []
    for p in masters:
        block = torch.nn.Module()
        block.register_parameter("weight", p)
        spec = ParamSpec("block", "weight", "weight", (64, 8), ((64,), (8,)), "bfloat16", True, (), (), ())
        places.append((spec, block))
    return masters, Copies(places, MixedPrecision(BF16, BF16))


def _refreshed(count: int, device: str) -> Callable[[], Any]:
    return _copies(count, device)[1].refresh


def _collected(count: int, device: str) -> Callable[[], Any]:
    masters, copies = _copies(count, device)
    for i, p in enumerate(masters):
        p.grad = None if i % 2 else p.grad
        copies.leaf(p).grad = torch.ones(64, 8, dtype=torch.bfloat16, device=device)
    return copies.collect


def _unscaled(count: int, device: str) -> Callable[[], Any]:
    parameters = _with_gradients(count, device)
    return lambda: LossScaler().unscale_(parameters, torch.device(device), 1)


def _clipped(count: int, device: str) -> Callable[[], Any]:
    gradients = [p.grad for p in _with_gradients(count, device) if p.grad is not None]
    return lambda: scale_(gradients, power_sum(gradients, 2, torch.device(device)))


def _stepped(count: int, device: str) -> Callable[[], Any]:
    """AdamW on this rank's shards of DTensors, as the runtime lets torch run it on a GPU: fused."""
    whole = [
        torch.nn.Parameter(DTensor.from_local(p.detach(), _mesh_of_one(), (Shard(0),), run_check=False))
        for p in _with_gradients(count, device)
    ]
    optimizer = on_local_shards(lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True), whole)

    def step() -> None:
        for p in whole:
            p.grad = torch.ones_like(p)
        with DeviceCounter(device) as inside:  # type: ignore[arg-type]
            optimizer.step()
        counted.append(inside)

    counted: list[DeviceCounter] = []
    step()  # makes the state

    def once() -> DeviceCounter:
        step()
        return counted[-1]

    return once


@functools.cache
def _mesh_of_one() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


OF_ALL_PARAMETERS: dict[str, tuple[Callable[[int, str], Callable[[], Any]], int, int]] = {
    # kernels for 32 parameters of 512 elements, and waits of the host
    "16-bit copies": (_refreshed, 1, 0),
    "gradients of 16-bit copies": (_collected, 2, 0),
    "unscaled gradients": (_unscaled, 6, 1),  # one on all of them; whether any is not finite is what the host waits for
    "clipped gradients": (_clipped, 5, 0),
    "AdamW on shards": (_stepped, 2, 0),
}


@pytest.mark.parametrize("name", OF_ALL_PARAMETERS)
def test_what_works_on_all_parameters_launches_a_few_kernels(name: str) -> None:
    """As many for 32 parameters as for 4."""
    make, budget, waits = OF_ALL_PARAMETERS[name]
    kernels = []
    with a_mesh():
        for count in (4, 32):
            run = make(count, "cpu")
            with DeviceCounter("cpu") as counter:
                inside = run()
            found = inside if isinstance(inside, DeviceCounter) else counter
            assert len(found.syncs) == waits, found.report("sync")
            kernels.append(found.num_kernels)
    assert kernels[0] == kernels[1], found.report("kernel")
    assert _SLACK * budget <= kernels[1] <= budget, found.report("kernel")
