"""Embedding, loss, dropout, attention: one at a time, against plain torch and under the type checker."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import SpmdTypeError
from spmd_types.checker import typecheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
from torch.utils.checkpoint import checkpoint

from autoplan.runtime import convert
from autoplan.runtime.attention import attention
from autoplan.runtime.convert import I, P, R, V, record_collectives, typed
from autoplan.runtime.dropout import dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, use_mesh

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

f64 = torch.float64


@contextlib.contextmanager
def mesh_of(axes: list[tuple[str, int]], groups: dict[str, tuple[str, ...]] | None = None) -> Iterator[AxisMesh]:
    """A mesh over the fake process group."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(size for _, size in axes))
    try:
        mesh = AxisMesh(axes, groups or {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()
        spmd_types._mesh_axis._reset()


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(seed))


def randint(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def locals_of(x: torch.Tensor | None) -> list[torch.Tensor]:
    assert isinstance(x, LocalTensor)
    return [x._local_tensors[r] for r in sorted(x._local_tensors)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


SHARDINGS: dict[str, tuple[list[tuple[str, int]], dict[str, tuple[str, ...]], Any]] = {
    "2": ([("tp", 2)], {}, "tp"),
    "4": ([("tp", 4)], {}, "tp"),
    "dp2xtp2": ([("dp", 2), ("tp", 2)], {}, "tp"),
    "group": ([("tp0", 2), ("tp1", 2)], {"tp": ("tp0", "tp1")}, "tp"),
    "tuple": ([("tp0", 2), ("tp1", 2)], {}, ("tp0", "tp1")),
    "reversed": ([("tp0", 2), ("tp1", 2)], {}, ("tp1", "tp0")),
    "one": ([("tp", 1)], {}, "tp"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Embedding


@pytest.mark.parametrize("padding_idx", [None, 5, -1])
@pytest.mark.parametrize("name", SHARDINGS)
def test_embedding(name: str, padding_idx: int | None) -> None:
    axes, groups, axis = SHARDINGS[name]
    table, ids, grad = randn(0, 16, 6), randint(1, 16, 4, 5), randn(2, 4, 5, 6)
    ids[0, :3] = torch.tensor([5, 15, 5])
    whole = table.clone().requires_grad_()
    want = F.embedding(ids, whole, padding_idx=padding_idx)
    want.backward(grad)
    assert whole.grad is not None
    with mesh_of(axes, groups) as mesh, LocalTensorMode(mesh.world_size) as mode:
        size = mesh.size(axis)
        weight = rank_map(lambda r: table.chunk(size)[mesh.coordinate(axis, r)].clone()).requires_grad_()
        with record_collectives() as records:
            out = vocab_parallel_embedding(rank_map(lambda r: ids.clone()), weight, axis, padding_idx)
            out.backward(rank_map(lambda r: grad.clone()))
        assert records == []
        with mode.disable():
            groups_of_axis = mesh.world_size // size
            close(torch.stack(locals_of(out.detach())).sum(0) / groups_of_axis, want.detach())
            for rank, got in enumerate(locals_of(weight.grad)):
                close(got, whole.grad.chunk(size)[mesh.coordinate(axis, rank)])


def test_embedding_types_and_errors() -> None:
    with mesh_of([("dp", 2), ("tp", 2)]):
        ids, weight = torch.zeros(2, 3, dtype=torch.int64), torch.randn(4, 5)
        with pytest.raises(ValueError, match="float32"):
            vocab_parallel_embedding(ids.float(), weight, "tp")
        with pytest.raises(ValueError, match="9"):
            vocab_parallel_embedding(ids, weight, "tp", padding_idx=9)
        with pytest.raises(ValueError, match="2 dims"):
            vocab_parallel_embedding(ids, weight[0], "tp")
        for ids_tp, ids_dp, weight_tp, weight_dp, out_dp in [
            (R, V, V, R, V),
            (I, R, V, I, I),
            (I, I, V, R, R),
            (V, V, V, R, None),  # every rank needs all ids
            (R, V, R, R, None),  # a whole table is not this function's
            (R, P, V, R, None),
        ]:
            with typecheck():
                given = typed(torch.randint(8, (2, 3)), tp=ids_tp, dp=ids_dp)
                table = typed(torch.randn(4, 5).requires_grad_(), tp=weight_tp, dp=weight_dp)
                if out_dp is None:
                    with pytest.raises(SpmdTypeError):
                        vocab_parallel_embedding(given, table, "tp")
                else:
                    out = vocab_parallel_embedding(given, table, "tp")
                    assert types_of(out) == {"tp": P, "dp": out_dp}


def types_of(x: torch.Tensor) -> dict[str, Any]:
    mesh = convert.current_mesh()
    have = spmd_types.get_local_type(x)
    return {name: have[mesh.type_axes(name)[0]] for name, size in mesh.axes.items() if size > 1}


# ---------------------------------------------------------------------------------------------------------------------
# Loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", SHARDINGS)
def test_vocab_parallel_loss(name: str, smoothing: float) -> None:
    axes, groups, axis = SHARDINGS[name]
    logits, target = randn(3, 3, 7, 16) * 4, randint(4, 16, 3, 7)
    target[0, :2] = -1
    target[1] = randint(5, 4, 7)  # no target of this row lies in the last shards
    logits[2, 0, 3] = -math.inf if smoothing == 0 else -1e4
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(
        whole.reshape(-1, 16), target.reshape(-1), ignore_index=-1, reduction="sum", label_smoothing=smoothing
    )
    (want * 0.37).backward()
    assert whole.grad is not None
    with mesh_of(axes, groups) as mesh, LocalTensorMode(mesh.world_size) as mode:
        size = mesh.size(axis)
        part = rank_map(lambda r: logits.chunk(size, -1)[mesh.coordinate(axis, r)].clone()).requires_grad_()
        with record_collectives() as records:
            loss = vocab_parallel_cross_entropy_sum(part, rank_map(lambda r: target.clone()), axis, -1, smoothing)
            (loss * 0.37).backward()
        tokens, sums = 21 * 8, 3 if smoothing else 2
        spans = len(mesh.groups_of(axis))
        assert [(r.kind, r.bytes, r.phase) for r in records] == [("all_reduce", tokens, "forward")] * spans + [
            ("all_reduce", sums * tokens, "forward")
        ] * spans
        with mode.disable():
            for rank, (got, got_grad) in enumerate(zip(locals_of(loss.detach()), locals_of(part.grad), strict=True)):
                close(got, want.detach())
                close(got_grad, whole.grad.chunk(size, -1)[mesh.coordinate(axis, rank)])


def test_vocab_parallel_loss_of_ignored_tokens_is_zero() -> None:
    with mesh_of([("tp", 2)]), LocalTensorMode(2) as mode:
        bad = torch.full((4, 8), math.nan, dtype=f64)
        logits = rank_map(lambda r: bad.clone()).requires_grad_()
        loss = vocab_parallel_cross_entropy_sum(logits, rank_map(lambda r: torch.full((4,), -100)), "tp")
        loss.backward()
        with mode.disable():
            assert all(x.item() == 0 for x in locals_of(loss.detach()))
            assert all((x == 0).all() for x in locals_of(logits.grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, f64])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_dtypes(dtype: torch.dtype, smoothing: float) -> None:
    logits, target = (randn(6, 30, 16) * 3).to(dtype), randint(7, 16, 30)
    target[::7] = -100
    exact = logits.double().clone().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="sum", label_smoothing=smoothing)
    want.backward()
    eps = torch.finfo(dtype).eps
    with mesh_of([("tp", 1)]):
        for function in (
            lambda x: cross_entropy_sum(x, target, label_smoothing=smoothing),
            lambda x: vocab_parallel_cross_entropy_sum(x, target, "tp", label_smoothing=smoothing),
        ):
            x = logits.clone().requires_grad_()
            loss = function(x)
            loss.backward()
            assert loss.dtype == (torch.float32 if eps > 1e-5 else dtype)
            assert x.grad is not None and x.grad.dtype == dtype and exact.grad is not None
            torch.testing.assert_close(loss.double(), want.detach(), rtol=4 * eps, atol=0)
            torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0, atol=4 * eps)


def test_loss_is_torch_cross_entropy() -> None:
    logits, target = randn(8, 5, 9, 4), randint(9, 9, 5, 4)
    target[0, 1] = 3
    want = F.cross_entropy(logits, target, ignore_index=3, reduction="sum", label_smoothing=0.3)
    assert torch.equal(cross_entropy_sum(logits, target, 3, 0.3), want)
    assert cross_entropy_sum(logits, torch.full_like(target, -100)).item() == 0


def test_loss_types_and_errors() -> None:
    with mesh_of([("dp", 2), ("tp", 2)]):
        logits, target = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"\(5,\)"):
            vocab_parallel_cross_entropy_sum(logits, target[:5], "tp")
        with pytest.raises(ValueError, match=r"2\.0"):
            vocab_parallel_cross_entropy_sum(logits, target, "tp", label_smoothing=2.0)
        for logits_tp, logits_dp, target_tp, target_dp, out_dp in [
            (V, V, R, V, V),
            (V, I, I, R, I),
            (I, V, I, V, None),  # whole logits are not this function's
            (V, V, V, V, None),  # every rank needs all the targets
            (P, V, R, V, None),
        ]:
            with typecheck():
                x = typed(torch.randn(6, 4).requires_grad_(), tp=logits_tp, dp=logits_dp)
                t = typed(torch.randint(8, (6,)), tp=target_tp, dp=target_dp)
                if out_dp is None:
                    with pytest.raises(SpmdTypeError):
                        vocab_parallel_cross_entropy_sum(x, t, "tp")
                else:
                    loss = vocab_parallel_cross_entropy_sum(x, t, "tp")
                    assert types_of(loss) == {"tp": I, "dp": out_dp}


def test_the_loss_in_one_kernel_has_the_types_of_torch() -> None:
    """`meta` stands for a GPU, where it is a function of ours; on the CPU the checker knows torch's."""

    def found(device: str, logits_tp: Any, target_tp: Any) -> Any:
        with typecheck():
            x = typed(torch.randn(4, 6, device=device).requires_grad_(), tp=logits_tp, dp=V)
            t = typed(torch.randint(6, (4,), device=device), tp=target_tp, dp=V)
            try:
                return types_of(cross_entropy_sum(x, t))
            except SpmdTypeError:
                return None

    with mesh_of([("dp", 2), ("tp", 2)]):
        results = {(a, b): found("cpu", a, b) for a in (R, I, V, P) for b in (R, I, V)}
        assert results == {(a, b): found("meta", a, b) for a, b in results}
        assert None in results.values() and len([x for x in results.values() if x]) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def splitmix_keeps(seed: int, step: int, site: int, position: int, p: float) -> bool:
    """The generator again in Python integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z &= mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    state = mix(seed + golden)
    state = mix(state + (step + 1) * golden)
    state = mix(state + (site + 1) * golden)
    return (mix(state + (position + 1) * golden) >> 11) < round((1 - p) * 2**53)


def kept(shape: tuple[int, ...], p: float, rng: tuple[int, int, int], site: int) -> torch.Tensor:
    """The mask of a whole [batch, ...] value."""
    first = rng[2] * math.prod(shape[1:])
    flat = [splitmix_keeps(rng[0], rng[1], site, first + i, p) for i in range(math.prod(shape))]
    return torch.tensor(flat).reshape(shape)


def test_dropout_is_the_published_generator() -> None:
    with mesh_of([("tp", 1)]):
        for seed, step, first, site, p in [
            (0, 0, 0, 0, 0.5),
            (-(2**62), 10**6, 10**5, 77, 0.1),
            (2**63 - 1, 3, 1, 2, 0.9),
        ]:
            x = randn(10, 3, 5, 7).requires_grad_()
            index = ((3, 3, "batch"), (5, 5, ()), (7, 7, ()))
            out = dropout(x, p, torch.tensor([seed, step, first]), site, index)
            mask = kept((3, 5, 7), p, (seed, step, first), site)
            close(out, torch.where(mask, x / (1 - p), 0), 1e-14)
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(x))
            close(grad, mask.double() / (1 - p), 1e-14)


def test_dropout_mask_does_not_depend_on_the_layout() -> None:
    shape, p, site = (4, 6, 8), 0.4, 5
    want = kept(shape, p, (123, 9, 0), site)
    with mesh_of([("dp", 2), ("tp", 2), ("cp", 2)]) as mesh, LocalTensorMode(8) as mode:

        def run(cut: Callable[[torch.Tensor, int], torch.Tensor], index: tuple[Any, ...], first: int, dp: bool) -> None:
            with mode.disable():
                ones = torch.ones(shape)
                start = [first + (2 * mesh.coordinate("dp", r) if dp else 0) for r in range(8)]
            x = rank_map(lambda r: cut(ones, r).clone()).requires_grad_()
            rng = rank_map(lambda r: torch.tensor([123, 9, start[r]]))
            out = checkpoint(lambda x: dropout(x * 1.0, p, rng, site, index), x, use_reentrant=False)
            out.sum().backward()
            with mode.disable():
                for rank, (got, grad) in enumerate(zip(locals_of(out.detach()), locals_of(x.grad), strict=True)):
                    assert torch.equal(got != 0, cut(want, rank)), (index, rank)
                    assert torch.equal(grad, got)

        def at(axis: Any, rank: int) -> int:
            return mesh.coordinate(axis, rank)

        b, s, h = (4, 4, "batch"), (6, 6, ()), (8, 8, ())
        run(lambda t, r: t, (b, s, h), 0, False)
        run(lambda t, r: t.chunk(2, 1)[at("tp", r)], (b, (3, 6, ("tp",)), h), 0, False)
        run(lambda t, r: t.chunk(2, 2)[at("tp", r)], (b, s, (4, 8, ("tp",))), 0, False)
        run(lambda t, r: t.chunk(4, 2)[at(("tp", "cp"), r)], (b, s, (2, 8, ("tp", "cp"))), 0, False)
        run(lambda t, r: t.chunk(4, 2)[at(("cp", "tp"), r)], (b, s, (2, 8, ("cp", "tp"))), 0, False)
        run(
            lambda t, r: t.chunk(2, 0)[at("dp", r)].chunk(2, 1)[at("cp", r)].chunk(2, 2)[at("tp", r)],
            ((2, 4, "batch"), (3, 6, ("cp",)), (4, 8, ("tp",))),
            0,
            True,
        )
        # Micro-batches: one sample at a time; and the second half of the batch alone.
        for sample in range(4):
            run(lambda t, r, i=sample: t[i : i + 1], ((1, 1, "batch"), s, h), sample, False)
        run(lambda t, r: t[2:], ((2, 2, "batch"), s, h), 2, False)
        # Finer factors than the dims of the tensor.
        run(lambda t, r: t, (b, (2, 2, ()), (3, 3, ()), h), 0, False)

    # The batch is the most significant digit wherever it stands.
    with mesh_of([("tp", 1)]):
        x = torch.ones(6, 4, 8)
        out = dropout(x, p, torch.tensor([123, 9, 0]), site, ((6, 6, ()), (4, 4, "batch"), (8, 8, ())))
        assert torch.equal(out.transpose(0, 1) != 0, want)


def test_dropout_statistics() -> None:
    n, p = 1 << 18, 0.1
    index = ((n, n, ()),)
    with mesh_of([("tp", 1)]):
        masks = [
            dropout(torch.ones(n), p, torch.tensor([seed, step, 0]), site, index) != 0
            for seed, step, site in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
        ]
        sigma = math.sqrt(p * (1 - p) / n)
        for i, a in enumerate(masks):
            assert abs(a.double().mean().item() - (1 - p)) < 5 * sigma
            # Neighbours, and the masks of other sites, steps and seeds, agree as often as independent ones do.
            others = [*masks[:i], a.roll(1), a.roll(8), a.roll(4096)]
            for b in others:
                both = (a & b).double().mean().item()
                assert abs(both - (1 - p) ** 2) < 5 * math.sqrt((1 - p) ** 2 * (1 - (1 - p) ** 2) / n) * 1.5


def test_dropout_identity_dtypes_and_errors() -> None:
    rng, index = torch.tensor([1, 2, 3]), ((4, 4, "batch"), (6, 6, ()))
    with mesh_of([("tp", 2)]):
        x = torch.randn(4, 6)
        assert dropout(x, 0.0, rng, 0, index) is x
        assert dropout(x, 0.5, rng, 0, index, training=False) is x
        assert (dropout(x, 1.0, rng, 0, index) == 0).all()
        half = dropout(x.bfloat16(), 0.5, rng, 0, index)
        assert half.dtype == torch.bfloat16 and torch.equal(half != 0, dropout(x, 0.5, rng, 0, index) != 0)
        assert torch.equal(dropout(x.t(), 0.5, rng, 0, ((6, 6, ()), (4, 4, "batch"))).t() != 0, half != 0)
        for bad, words in [
            (lambda: dropout(x, 1.5, rng, 0, index), "1.5"),
            (lambda: dropout(x, 0.5, rng, 0, ((4, 4, "batch"),)), "24 elements"),
            (lambda: dropout(x, 0.5, rng, 0, ((4, 4, "batch"), (6, 6, "batch"))), "more than one"),
            (lambda: dropout(x, 0.5, rng, 0, ((4, 4, "batch"), (6, 6, ("tp",)))), "cannot shard 6"),
        ]:
            with pytest.raises(ValueError) as error:
                bad()
            assert words in str(error.value)
        with pytest.raises(TypeError, match="int64"):
            dropout(x, 0.5, rng.double(), 0, index)
        with FakeTensorMode():
            fake = torch.empty(4, 6, dtype=torch.bfloat16, requires_grad=True)
            out = dropout(fake, 0.5, torch.zeros(3, dtype=torch.int64), 0, index)
            out.sum().backward()
            assert out.shape == (4, 6) and fake.grad is not None and fake.grad.dtype == torch.bfloat16


def test_dropouttypes_of() -> None:
    whole, cut = ((4, 4, "batch"), (6, 6, ())), ((4, 4, "batch"), (6, 12, ("tp",)))
    with mesh_of([("dp", 2), ("tp", 2)]):
        for kind, index, rng_tp, ok in [
            (I, whole, R, True),
            (R, whole, I, True),
            (P, whole, R, True),
            (V, cut, R, True),
            (I, cut, R, False),  # the mask would differ between ranks that must agree
            (I, whole, V, False),
        ]:
            with typecheck():
                x = typed(torch.randn(4, 6).requires_grad_(), tp=kind, dp=V)
                rng = typed(torch.randint(9, (3,)), tp=rng_tp, dp=V)
                if ok:
                    assert types_of(dropout(x, 0.5, rng, 0, index)) == {"tp": kind, "dp": V}
                else:
                    with pytest.raises(SpmdTypeError):
                        dropout(x, 0.5, rng, 0, index)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_attention(causal: bool, mask_kind: str, kv: int) -> None:
    q, k, v = randn(20, 2, 4, 5, 8), randn(21, 2, kv, 5, 8), randn(22, 2, kv, 5, 8)
    mask = None
    if mask_kind == "bool":
        mask = (randn(23, 2, 1, 5, 5) > -0.5) | torch.eye(5, dtype=torch.bool)
    elif mask_kind == "additive":
        mask = randn(24, 5, 5)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    again = [t.clone().requires_grad_() for t in (q, k, v)]
    want = naive_attention(*again, causal, 0.3, mask)
    got = attention(*leaves, causal=causal, scale=0.3, mask=mask)
    close(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(leaves, again, strict=True):
        assert a.grad is not None and b.grad is not None
        close(a.grad, b.grad)
    if kv < 2:
        return
    with mesh_of([("tp", 2)]), LocalTensorMode(2) as mode:
        parts = [rank_map(lambda r, t=t: t.chunk(2, 1)[r].clone()) for t in (q, k, v)]
        whole = None if mask is None else rank_map(lambda r: mask.clone())
        out = attention(*parts, causal=causal, scale=0.3, mask=whole)
        with mode.disable():
            close(torch.cat(locals_of(out), 1), want.detach())


def test_attention_types_and_errors() -> None:
    def tensor(kind: Any, *shape: int) -> torch.Tensor:
        return typed(torch.randn(shape or (1, 2, 3, 4)).requires_grad_(), tp=kind)

    with mesh_of([("tp", 2)]), typecheck():
        for kind in (V, R, I):
            out = attention(tensor(kind), tensor(kind), tensor(kind), causal=True, scale=None)
            assert types_of(out) == {"tp": kind}
            mask = typed(torch.ones(3, 3, dtype=torch.bool), tp=R)
            out = attention(tensor(kind), tensor(kind), tensor(kind), causal=True, scale=None, mask=mask)
            assert types_of(out) == {"tp": kind}
        for kinds in [(P, P, P), (I, V, V), (V, V, P)]:
            q, k, v = (tensor(kind) for kind in kinds)
            with pytest.raises(SpmdTypeError):
                attention(q, k, v, causal=False, scale=None)
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 3, 3, 8)
    with pytest.raises(ValueError, match="4 query heads must be a multiple of the 3 key heads"):
        attention(q, k, k, causal=True, scale=None)
    with pytest.raises(ValueError, match="4 dims"):
        attention(q[0], q, q, causal=True, scale=None)
