"""Products of all experts at once: equal to a product each, without a wait for the device, summed in one order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import pool
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoplan.ops.saved import OpFacts, TensorFacts, workspace_bytes
from autoplan.ops.table import saved_rule
from autoplan.runtime import experts as module
from autoplan.runtime.experts import experts
from autoplan.runtime.host_copies import kept_copies, to_host
from autoplan.torch_kernels import grouped_kernel
from experiments.plans.live_memory import LiveBytes

EXPERTS, HIDDEN, INNER = 4, 16, 8


class Ops(TorchDispatchMode):
    """Names of all operations that run inside, also those of backwards and of autograd functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def of_tokens(
    num: int,
    dtype: torch.dtype = torch.float32,
    chosen: int = EXPERTS,
    gated: bool = True,
    weights: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """hidden, index (of the first `chosen` experts), weights, gate_up and down, at sizes that are aligned."""
    g = torch.Generator().manual_seed(num)
    sizes = ((num, HIDDEN), (num, 2), (EXPERTS, INNER * (1 + gated), HIDDEN), (EXPERTS, HIDDEN, INNER))
    x, w, first, down = (torch.randn(s, generator=g).to(dtype) for s in sizes)
    picked = [torch.randperm(chosen, generator=g)[:2] for _ in range(num)]
    index = torch.stack(picked) if picked else torch.zeros(0, 2, dtype=torch.int64)
    w = w.to(weights or dtype)
    return [x.requires_grad_(), index, w.requires_grad_(), first.requires_grad_(), down.requires_grad_()]


def run(tensors: list[torch.Tensor], gated: bool = True) -> list[torch.Tensor]:
    """Output and gradients of all that is trained."""
    out = experts(*tensors, activation="silu", gated=gated)
    arrived = torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [x for x in tensors if x.requires_grad], arrived)]


@contextlib.contextmanager
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as m:
        m.setattr(module, "in_one_product", lambda *_: False)
        yield


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("num", [11, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_is_the_loop(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num: int, gated: bool) -> None:
    """To the bit on a CPU, also where some experts, or all, have no token: six products, and none of an expert."""
    tensors = of_tokens(num, dtype, chosen=3, gated=gated)
    with Ops() as ops:
        got = run(tensors, gated)
    assert ops.seen.count("_grouped_mm") == 6 and "mm" not in ops.seen
    with one_by_one(monkeypatch), Ops() as ops:
        want = run(tensors, gated)
    assert "_grouped_mm" not in ops.seen and "mm" in ops.seen
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_grouped_is_the_sum_over_experts() -> None:
    """Against every expert for every token in float64, with routing weights of another dtype than the rows."""
    tensors = of_tokens(13)
    tensors[2] = tensors[2].detach().double().requires_grad_()
    got = run(tensors)
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in tensors]
    x, index, w, first, down = wide
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        gate, up = (x @ first[e].T).chunk(2, -1)
        out = out + (w * (index == e)).sum(-1, keepdim=True) * ((torch.nn.functional.silu(gate) * up) @ down[e].T)
    arrived = torch.linspace(-1, 1, out.numel()).double().view_as(out)
    want = [out, *torch.autograd.grad(out, [x, w, first, down], arrived)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def test_grouped_products_of_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, transposed weights and gates of their own, also where experts, or all, have no token."""
    form: dict[str, Any] = {
        "activation": "clamped_swiglu", "gated": True, "interleaved": True, "transposed": True, "alpha": 1.7,
        "limit": 0.5,
    }  # fmt: skip
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        for num in (11, 1, 0):
            for more in ({}, {"scales_inputs": True}):
                x, index, w, first, down = of_tokens(num, dtype, chosen=3)
                first, down = (m.detach().mT.contiguous().requires_grad_() for m in (first, down))
                biases = [torch.linspace(-1, 1, EXPERTS * n).view(EXPERTS, n).to(dtype) for n in (2 * INNER, HIDDEN)]
                tensors = [x, index, w, first, down, *(b.requires_grad_() for b in biases)]
                found = []
                for products in ("grouped", "one by one"):
                    with (
                        one_by_one(monkeypatch) if products == "one by one" else contextlib.nullcontext(),
                        Ops() as ops,
                    ):
                        out = experts(*tensors, **form, **more)
                        arrived = torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)
                        trained = [t for t in tensors if t.requires_grad]
                        found.append([out, *torch.autograd.grad(out, trained, arrived)])
                    assert ("_grouped_mm" in ops.seen) is (products == "grouped")
                for a, b in zip(*found, strict=True):  # one adds a bias before it rounds, the other after
                    assert a.shape == b.shape and not a.isnan().any()
                    assert not b.numel() or (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(
    ("activation", "numbers"),
    [("silu", {}), ("clamped_silu", {"limit": 0.5}), ("clamped_swiglu", {"alpha": 1.7, "limit": 0.5})],
)
def test_experts_need_what_the_table_says(activation: str, numbers: dict[str, float], biased: bool) -> None:
    """Most bytes alive at once besides what is kept (forward) and the gradients of operands (backward)."""
    num, hidden, inner = 512, 64, 96
    sizes = [(num, hidden), (num, 2), (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)]
    sizes += [(EXPERTS, 2 * inner), (EXPERTS, hidden)] if biased else []
    x, w, *rest = (torch.randn(s).requires_grad_() for s in sizes)
    tensors = [x, torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(num)]), w, *rest]
    with LiveBytes() as live:
        out = experts(*tensors, activation=activation, gated=True, **numbers)
        kept, found = live.current_bytes, [live.peak_bytes - live.current_bytes]
        live.reset_peak()
        gradients = sum(t.numel() * 4 for t in tensors if t.requires_grad)
        out.backward(torch.ones_like(out))
        found.append(live.peak_bytes - kept - gradients)
    facts = [TensorFacts(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in (*tensors, out)]
    attrs = {"num_experts": EXPERTS, "top_k": 2, "gated": True, "activation": activation}
    f = OpFacts("experts", attrs, tuple(facts[:-1]), (facts[-1],))
    for measured, said in zip(found, workspace_bytes(f, saved_rule(f)), strict=True):
        assert 0.8 < measured / said < 1.1, (measured / said, found)


def test_numbers_of_a_gate_are_those_it_takes() -> None:
    tensors = of_tokens(3)
    with pytest.raises(ValueError, match=r"clamped_swiglu takes alpha and limit; got limit"):
        experts(*tensors, activation="clamped_swiglu", gated=True, limit=1.0)
    with pytest.raises(ValueError, match=r"silu takes no numbers; got alpha"):
        experts(*tensors, activation="silu", gated=True, alpha=1.0)
    with pytest.raises(ValueError, match=r"no activation 'clamped_silu'"):
        experts(*tensors, activation="clamped_silu", gated=False, limit=1.0)
    with pytest.raises(ValueError, match=r"give gate_up_bias and down_bias"):
        experts(*tensors, torch.zeros(EXPERTS, 2 * INNER), activation="silu", gated=True)


def test_sums_over_choices_are_rounded_once() -> None:
    """16-bit rows are summed in 32 bits: 256 + 1 + 1 loses both ones where every sum is rounded."""
    rows = torch.tensor([256.0, 1.0, 1.0, 3.0, 5.0, 7.0], dtype=torch.bfloat16)[:, None].expand(-1, 8).contiguous()
    chosen = torch.tensor([2, 0, 1, 5, 3, 4])
    got = module.by_token(rows, chosen, 2, 3)
    assert got[:, 0].tolist() == [258.0, 15.0]
    assert (rows[0] + rows[1] + rows[2])[0] == 256.0  # control


def test_16_bit_sums_are_rounded_to_the_nearest() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        rows, chosen = torch.randn(60, 16, generator=g).to(dtype), torch.randperm(60, generator=g)
        want = rows[chosen.argsort()].double().view(20, 3, 16).sum(1).to(dtype)
        assert torch.equal(module.by_token(rows, chosen, 20, 3), want)


def test_one_order_of_sums() -> None:
    """No operation adds in the order of arrival: what CUDA does with atomics is not among those that run."""
    with Ops() as ops:
        run(of_tokens(9, torch.bfloat16, weights=torch.float32))
    assert not {"index_add", "index_add_", "scatter_add", "scatter_add_", "bincount", "index_put_"} & set(ops.seen)
    assert ops.seen.count("_embedding_bag_forward_only") == 2  # of rows forward, of their gradients backward


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of tensors without values: no size depends on what they hold, and the host reads none."""
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(x.detach()).requires_grad_(x.requires_grad) for x in of_tokens(9, torch.bfloat16)]
        shapes = [x.shape for x in run(tensors)]
        assert shapes == [x.shape for x in (tensors[0], *tensors[:1], *tensors[2:])]
        with one_by_one(monkeypatch), pytest.raises(DataDependentOutputException):
            run(tensors)  # negative control


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "sizes", "groups", "fits"),
    [
        ("cuda", torch.bfloat16, 9, (4096, 14336), 8, True),
        ("cuda", torch.bfloat16, 10, (4096, 14336), 1023, True),
        ("cuda", torch.bfloat16, 8, (4096, 14336), 8, False),  # would copy sizes to the host at every product
        ("cuda", torch.bfloat16, 12, (4096, 14336), 8, False),
        ("cuda", torch.bfloat16, None, (4096, 14336), 8, False),
        ("cuda", torch.float16, 9, (4096, 14336), 8, False),
        ("cuda", torch.float32, 9, (4096, 14336), 8, False),
        ("cuda", torch.bfloat16, 9, (4096, 1412), 8, False),  # 2824 bytes
        ("cuda", torch.bfloat16, 9, (4096, 1416), 8, True),
        ("cuda", torch.bfloat16, 9, (4096, 14336), 1024, False),
        ("cpu", torch.bfloat16, None, (16, 8), 4, True),
        ("cpu", torch.float32, None, (16, 4), 4, True),
        ("cpu", torch.float32, None, (16, 6), 4, False),
        ("cpu", torch.float64, None, (16, 8), 4, False),
    ],
)
def test_where_one_product_does(
    device: str, dtype: torch.dtype, capability: int | None, sizes: tuple[int, ...], groups: int, fits: bool
) -> None:
    assert grouped_kernel(device, str(dtype).removeprefix("torch."), capability, sizes, groups) is fits


def test_weights_that_begin_between_multiples_have_a_product_each() -> None:
    """A view into a larger buffer, one element further."""
    x, _, _, first, down = of_tokens(3)
    assert module.in_one_product(x, first, down)
    buffer = torch.zeros(first.numel() + 8)
    for place, fits in ((0, True), (1, False), (4, True)):
        assert module.in_one_product(x, buffer[place : place + first.numel()].view(first.shape), down) is fits
    assert not module.in_one_product(x, first.mT.contiguous().mT, down)


def test_an_index_beyond_the_experts_is_refused() -> None:
    for dtype, error in ((torch.float32, RuntimeError), (torch.float64, ValueError)):  # without a wait, and with one
        tensors = of_tokens(5, dtype)
        for wrong in (EXPERTS, -1):
            tensors[1][2, 1] = wrong
            with pytest.raises(error, match=r"experts: an index is beyond the 4 experts"):
                run(tensors)


# -- copies to the host ------------------------------------------------------------------------------------------------


def test_a_repeated_forward_has_the_copies_of_the_first() -> None:
    """Call by call, from the first on at every repetition; outside, every call copies."""
    forward, again = kept_copies()
    with forward:
        assert [to_host(torch.tensor([k]), k, 1) for k in (1, 2)] == [[1], [2]]
    for _ in range(2):
        with again:
            assert [to_host(torch.tensor([k]), k, 1) for k in (8, 9)] == [[1], [2]]
    assert to_host(torch.tensor([3]), 3, 1) == [3]
    other, _ = kept_copies()
    with again, other:  # inside another one
        assert to_host(torch.tensor([4]), 4, 1) == [4]


def waits(rank: int, world: int, kind: str, dtype: torch.dtype) -> dict[str, list[str]]:
    """What the host waits for in a forward and a backward with a forward that is computed again; and the same without
    what the first forward keeps."""
    from device_counter import DeviceCounter

    from autoplan.runtime.mesh import AxisMesh, use_mesh

    dp, ep, etp = {"here": (world, 1, 1), "split": (1, world // 2, 2)}.get(kind, (1, world, 1))
    mesh = AxisMesh([("dp", dp), ("ep", ep), ("etp", etp)], device_type="cpu")
    x, index, w, _, _ = of_tokens(6, dtype)
    first = torch.randn(EXPERTS // ep, 2 * INNER, HIDDEN).to(dtype).requires_grad_()
    down = torch.randn(EXPERTS // ep, HIDDEN, INNER).to(dtype).requires_grad_()
    kinds: dict[str, dict[str, Any]] = {
        "here": {},
        "sharded": {"axes": "ep"},
        "spread": {"dispatch": "ep"},
        "split": {"dispatch": "ep", "inner": "etp"},
    }

    def block(x: torch.Tensor) -> torch.Tensor:
        return experts(torch.tanh(x), index, w, first, down, activation="silu", gated=True, **kinds[kind])

    found = {}
    with use_mesh(mesh):
        for name, more in (("kept", {"context_fn": kept_copies}), ("not kept", {})):
            with DeviceCounter() as counter:
                checkpoint(block, x, use_reentrant=False, **more).backward(torch.ones_like(x))
            found[name] = [event.name for event in counter.syncs]
    return found


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("world", "kind"), [(2, "here"), (2, "sharded"), (2, "spread"), (4, "split")])
def test_at_most_one_wait_for_the_device(world: int, kind: str, dtype: torch.dtype) -> None:
    """Forward, backward and the forward in between. Without the kept copies there would be one more (control)."""
    one = [] if kind == "here" and dtype == torch.float32 else ["tolist"]
    assert pool(world).run(waits, kind, dtype) == [{"kept": one, "not kept": one * 2}] * world
