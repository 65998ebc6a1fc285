"""The runtime's functions together: a small program, the tensor-parallel block that a planner would emit, by hand.

With and without sequence parallelism it must give the numbers of one device, type-check, and do neither when one of its
conversions is left out.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import pool
from spmd_types import SpmdTypeError
from spmd_types.checker import typecheck
from test_runtime_ops import kept, locals_of, mesh_of, randint, randn, types_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode, rank_map
from torch.utils.checkpoint import checkpoint

from autoplan.runtime import convert
from autoplan.runtime.convert import I, P, R, V, record_collectives, typed
from autoplan.runtime.dropout import dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.loss import vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, use_mesh

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

B, SEQ, H, FF, VOCAB, DROP = 4, 6, 8, 16, 24, 0.25
PARAMS: dict[str, tuple[tuple[int, ...], int | None]] = {
    # name: shape, dim sharded over tp
    "emb": ((VOCAB, H), 0),
    "w1": ((FF, H), 0),
    "b1": ((FF,), 0),
    "w2": ((H, FF), 1),
    "b2": ((H,), None),
    "gamma": ((H,), None),
    "head": ((VOCAB, H), 0),
}
RNG = (2024, 17, 40)


def whole_params() -> dict[str, torch.Tensor]:
    return {name: randn(30 + i, *shape) * 0.5 for i, (name, (shape, _)) in enumerate(PARAMS.items())}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    ids, target = randint(50, VOCAB, B, SEQ), randint(51, VOCAB, B, SEQ)
    target[0, :2] = -100
    return ids, target


def reference() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The program on one device in plain torch."""
    p = {name: value.requires_grad_() for name, value in whole_params().items()}
    ids, target = data()
    h = F.embedding(ids, p["emb"])
    h = torch.where(kept((B, SEQ, H), DROP, RNG, 0), h / (1 - DROP), 0)
    u = F.gelu(F.linear(h, p["w1"], p["b1"]))
    u = torch.where(kept((B, SEQ, FF), DROP, RNG, 1), u / (1 - DROP), 0)
    h = h + F.linear(u, p["w2"], p["b2"])
    h = F.layer_norm(h, (H,), p["gamma"])
    loss = F.cross_entropy(F.linear(h, p["head"]).reshape(-1, VOCAB), target.reshape(-1), reduction="sum")
    loss.backward()
    grads = {name: value.grad for name, value in p.items()}
    assert all(g is not None for g in grads.values())
    return loss.detach(), grads  # type: ignore[return-value]


class Conversions:
    """The conversions, with number ``drop`` left out."""

    def __init__(self, drop: int | None = None) -> None:
        self.drop, self.count = drop, 0

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self.count += 1
            if self.count - 1 == self.drop:
                return x
            done: torch.Tensor = getattr(convert, name)(x, *args)
            return done

        return call


def program(
    c: Any, p: dict[str, torch.Tensor], ids: torch.Tensor, target: torch.Tensor, rng: torch.Tensor
) -> torch.Tensor:
    """Megatron's block: activations between the products are I on tp, the batch is V on dp."""
    b = ids.shape[0]
    for name, (_, dim) in PARAMS.items():
        # On dp a parameter is R with a P gradient, which is reduced once per step, not here.
        typed(p[name], dp=R, tp=I if dim is None else V)
    typed(ids, tp=R, dp=V), typed(target, tp=R, dp=V), typed(rng, tp=R, dp=V)
    h = vocab_parallel_embedding(ids, p["emb"], "tp")  # tp:P
    h = c.all_reduce(h, "tp", I)
    h = dropout(h, DROP, rng, 0, ((b, b, "batch"), (SEQ, SEQ, ()), (H, H, ())))
    u = F.gelu(F.linear(c.to_replicate(h, "tp"), p["w1"], p["b1"]))  # tp:S
    u = dropout(u, DROP, rng, 1, ((b, b, "batch"), (SEQ, SEQ, ()), (FF // 2, FF, ("tp",))))
    y = typed(F.linear(u, p["w2"]), tp=P) + c.to_partial(p["b2"], "tp", I)
    h = h + c.all_reduce(y, "tp", I)
    h = F.layer_norm(h, (H,), p["gamma"])
    logits = F.linear(c.to_replicate(h, "tp"), p["head"])  # tp:S
    loss = vocab_parallel_cross_entropy_sum(logits, target, "tp")
    return typed(loss, tp=I, dp=P)


def program_sp(
    c: Any, p: dict[str, torch.Tensor], ids: torch.Tensor, target: torch.Tensor, rng: torch.Tensor
) -> torch.Tensor:
    """The same with sequence parallelism: the activations between the products are shards of the sequence."""
    b = ids.shape[0]
    for name, (_, dim) in PARAMS.items():
        typed(p[name], dp=R, tp=I if dim is None else V)
    typed(ids, tp=R, dp=V), typed(target, tp=R, dp=V), typed(rng, tp=R, dp=V)
    h = vocab_parallel_embedding(ids, p["emb"], "tp")  # tp:P
    h = c.reduce_scatter(h, "tp", 1)
    h = dropout(h, DROP, rng, 0, ((b, b, "batch"), (SEQ // 2, SEQ, ("tp",)), (H, H, ())))
    u = F.gelu(F.linear(c.all_gather(h, "tp", 1, R), p["w1"], p["b1"]))  # tp:S
    u = dropout(u, DROP, rng, 1, ((b, b, "batch"), (SEQ, SEQ, ()), (FF // 2, FF, ("tp",))))
    y = typed(F.linear(u, p["w2"]), tp=P) + c.to_partial(p["b2"], "tp", I)
    h = h + c.reduce_scatter(y, "tp", 1)
    h = F.layer_norm(h, (H,), c.to_replicate(p["gamma"], "tp"))
    logits = F.linear(c.all_gather(h, "tp", 1, R), p["head"])  # tp:S
    loss = vocab_parallel_cross_entropy_sum(logits, target, "tp")
    return typed(loss, tp=I, dp=P)


Program = Callable[..., torch.Tensor]


def run_program(body: Program, drop: int | None = None) -> tuple[float, list[Any], torch.Tensor]:
    """Worst deviation of a gradient from one device, the records, and the loss, on dp 2 x tp 2."""
    loss, grads = reference()
    params = whole_params()
    ids, target = data()
    with mesh_of([("dp", 2), ("tp", 2)]) as mesh, LocalTensorMode(4) as mode:

        def cut(x: torch.Tensor, dim: int | None, axis: str, rank: int) -> torch.Tensor:
            return x.clone() if dim is None else x.chunk(2, dim)[mesh.coordinate(axis, rank)].clone()

        p = {
            name: rank_map(lambda r, x=params[name], d=dim: cut(x, d, "tp", r)).requires_grad_()
            for name, (_, dim) in PARAMS.items()
        }
        starts = [RNG[2] + 2 * mesh.coordinate("dp", r) for r in range(4)]
        rng = rank_map(lambda r: torch.tensor([RNG[0], RNG[1], starts[r]]))
        inputs = [rank_map(lambda r, x=x: cut(x, 0, "dp", r)) for x in (ids, target)]
        with record_collectives() as records:
            local = body(Conversions(drop), p, *inputs, rng)
            local.backward()
        with mode.disable():
            # P on dp: the loss and the gradients are sums over dp. Ranks are dp-major.
            got = locals_of(local.detach())
            got_loss = got[0] + got[2]
            worst = 0.0
            for name, (_, dim) in PARAMS.items():
                g = locals_of(p[name].grad)
                for tp in range(2):
                    part = grads[name] if dim is None else grads[name].chunk(2, dim)[tp]
                    worst = max(worst, ((g[tp] + g[2 + tp] - part).abs().max() / grads[name].abs().max()).item())
            return worst, records, got_loss - loss


@pytest.mark.parametrize("body", [program, program_sp])
def test_program_equals_one_device(body: Program) -> None:
    worst, records, deviation = run_program(body)
    assert worst < 1e-13 and abs(deviation.item()) < 1e-12
    tokens = B // 2 * SEQ
    activation, loss = tokens * H * 8, [("all_reduce", tokens * 8), ("all_reduce", 2 * tokens * 8)]
    forward = [(r.kind, r.bytes) for r in records if r.phase == "forward"]
    backward = [(r.kind, r.bytes) for r in records if r.phase == "backward"]
    assert {r.axis for r in records} == {"tp"}
    if body is program:
        assert forward == [("all_reduce", activation)] * 2 + loss
        assert backward == [("all_reduce", activation)] * 2
    else:
        gather, scatter = ("all_gather", activation), ("reduce_scatter", activation)
        assert forward == [scatter, gather, scatter, gather, *loss]
        # head's gather, gamma's sum, y's scatter, w1's gather, the embedding's scatter
        assert backward == [scatter, ("all_reduce", H * 8), gather, scatter, gather]


@pytest.mark.parametrize("drop", range(5))
def test_a_program_without_one_conversion_gives_other_gradients(drop: int) -> None:
    worst, _, _ = run_program(program, drop)
    assert worst > 1e-2


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("body", "conversions"), [(program, 5), (program_sp, 6)])
def test_type_checker_accepts_the_program_and_misses_no_conversion(body: Program, conversions: int, fake: bool) -> None:
    def run(drop: int | None) -> int:
        with FakeTensorMode() if fake else contextlib.nullcontext():
            p = {
                name: torch.randn([n // 2 if i == dim else n for i, n in enumerate(shape)]).requires_grad_()
                for name, (shape, dim) in PARAMS.items()
            }
            tokens = [torch.randint(VOCAB, (B // 2, SEQ)) for _ in range(2)]
            c = Conversions(drop)
            with typecheck():
                loss = body(c, p, *tokens, torch.randint(9, (3,)))
                assert types_of(loss) == {"dp": P, "tp": I}
                loss.backward()
            assert all(x.grad is not None and x.grad.shape == x.shape for x in p.values())
            return c.count

    with mesh_of([("dp", 2), ("tp", 2)]):
        assert run(None) == conversions
        for drop in range(conversions):
            # Some leave shapes that do not fit either, which torch may notice first.
            with pytest.raises((SpmdTypeError, RuntimeError, ValueError)) as error:
                run(drop)
            if body is program:
                assert isinstance(error.value, SpmdTypeError), drop


def test_a_recomputed_program_type_checks_and_repeats_its_collectives() -> None:
    with mesh_of([("dp", 2), ("tp", 2)]), record_collectives() as records, typecheck():
        p = {
            name: torch.randn([n // 2 if i == dim else n for i, n in enumerate(shape)]).requires_grad_()
            for name, (shape, dim) in PARAMS.items()
        }
        tokens = [torch.randint(VOCAB, (B // 2, SEQ)) for _ in range(2)]
        rng = typed(torch.randint(9, (3,)), R, dp=V)
        loss = checkpoint(program_sp, convert, p, *tokens, rng, use_reentrant=False)
        loss.backward()
    phases = {name: [(r.kind, r.bytes) for r in records if r.phase == name] for name in ("forward", "recompute")}
    # The recomputation stops at the last saved tensor, which comes after every collective but those of the loss.
    assert phases["recompute"] == phases["forward"][: len(phases["recompute"])] and len(phases["recompute"]) >= 4


def _on_two_processes(rank: int, world: int, sequence: bool) -> float:
    loss, grads = reference()
    mesh = AxisMesh([("dp", 1), ("tp", world)])
    params, (ids, target) = whole_params(), data()
    local = {
        name: (x if dim is None else x.chunk(world, dim)[rank]).clone().requires_grad_()
        for (name, x), (_, dim) in zip(params.items(), PARAMS.values(), strict=True)
    }
    with use_mesh(mesh), record_collectives() as records:
        got = (program_sp if sequence else program)(convert, local, ids, target, torch.tensor(RNG))
        got.backward()
    worst = abs(got.item() - loss.item())
    for name, (_, dim) in PARAMS.items():
        grad, want = local[name].grad, grads[name] if dim is None else grads[name].chunk(world, dim)[rank]
        assert grad is not None
        worst = max(worst, (grad - want).abs().max().item())
    assert len(records) == (11 if sequence else 6), records
    return worst


@pytest.mark.processes
@pytest.mark.parametrize("sequence", [False, True])
def test_program_over_gloo(sequence: bool) -> None:
    assert max(pool(2).run(_on_two_processes, sequence)) < 1e-12
