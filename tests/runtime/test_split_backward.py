"""A backward in two parts: equal to one in one part, whatever the graph is, and nothing computed twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import Case, spread_out
from parity_matrix import check
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autoplan.runtime.program import Block
from autoplan.runtime.split_backward import Deferred, Kept, backward_input, backward_weight

DIM = 8


class Stage(nn.Module):
    """Two inputs, of which the second passes through; one parameter used twice, one that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, DIM)
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.shared = nn.Parameter(torch.randn(DIM, DIM))
        self.aside = nn.Linear(DIM, DIM)  # between the table and an output
        self.unused = nn.Linear(DIM, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.calls = 0

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(F.silu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x + self.mlp(x) @ self.shared
        h = self.frozen(h) + (h * y) @ self.shared
        return h.sin(), y, self.aside(self.table(ids)), h.detach()


def given() -> tuple[Stage, list[torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(3)
    inputs = [torch.randn(4, DIM, requires_grad=True), torch.randn(4, DIM, requires_grad=True)]
    gradients: list[torch.Tensor | None] = [torch.randn(4, DIM) for _ in range(3)]
    return Stage(), [*inputs, torch.tensor([0, 3, 3, 1])], [*gradients, None]


def in_one(stage: Stage, inputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    outputs = stage(*inputs)
    torch.autograd.backward(outputs[:3], gradients[:3])
    found = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs[:2]) if x.grad is not None}
    stage.zero_grad()
    for x in inputs:
        x.grad = None
    return found


def in_two(
    stage: Stage,
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    between: Callable[[list[Deferred]], object] = lambda _: None,
) -> dict[str, torch.Tensor]:
    found, deferred = backward_input(stage(*inputs), gradients, inputs, stage.parameters())
    between(deferred)
    backward_weight(deferred)
    out = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    return out | {f"input {i}": x for i, x in enumerate(found) if x is not None}


def test_equal_to_a_backward_in_one_part() -> None:
    stage, inputs, gradients = given()
    want = in_one(stage, inputs, gradients)
    seen: list[str] = []

    def between(deferred: list[Deferred]) -> None:
        names = {id(p): n for n, p in stage.named_parameters()}
        seen.extend(n for n, p in stage.named_parameters() if p.grad is not None)
        assert {names[id(p)] for d in deferred for p in d.params} == {
            "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"
        }  # fmt: skip

    got = in_two(stage, inputs, gradients, between)
    assert set(got) == set(want) and "unused.weight" not in got and "frozen.weight" not in got
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
    assert seen == ["shared", "table.weight", "aside.weight", "aside.bias"]  # these cannot wait


def test_a_penalty_on_parameters() -> None:
    """Its operations lead to parameters that can wait and to one that cannot; what they saved is freed once."""
    torch.manual_seed(3)
    first, second, elsewhere = (nn.Linear(DIM, DIM) for _ in range(3))
    params = [p for module in (first, second, elsewhere) for p in module.parameters()]
    x = torch.randn(4, DIM, requires_grad=True)

    def loss() -> torch.Tensor:
        penalty = torch.stack([p.square().sum() for p in params]).sum().exp()
        return second(first(x) + first(x.sin())).sin().sum() + 0.1 * penalty

    want = torch.autograd.grad(loss(), [x, *params])
    kept = Kept()
    with kept.forward():
        made = loss()
    (got,), deferred = backward_input([made], None, [x], params, kept=kept)
    backward_weight(deferred)
    for one, other in zip((got, *(p.grad for p in params)), want, strict=True):
        torch.testing.assert_close(one, other)


def test_torchs_own_parts_fail_on_this_stage() -> None:
    """Why there are parts of our own: what no input leads to is lost, or a part of the graph is used twice."""
    stage, inputs, gradients = given()
    want = in_one(stage, inputs, gradients)
    outputs = [t for t in stage(*inputs) if t.requires_grad]
    _, groups = stage_backward_input(outputs[::2], gradients[0:3:2], inputs, stage.parameters())
    try:
        stage_backward_weight(stage.parameters(), groups)
    except RuntimeError as error:
        assert "second time" in str(error)
    else:
        got = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
        assert not all(n in got and torch.allclose(got[n], want[n]) for n, _ in stage.named_parameters() if n in want)


def test_gradients_add_up_and_hooks_follow() -> None:
    stage, inputs, gradients = given()
    want = in_one(stage, inputs, gradients)
    called: list[torch.Tensor] = []
    stage.up.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    stage.shared.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    in_two(stage, inputs, gradients)
    got = in_two(stage, inputs, gradients)
    torch.testing.assert_close(got["up.weight"], 2 * want["up.weight"])
    torch.testing.assert_close(got["table.weight"], 2 * want["table.weight"])
    assert len(called) == 4
    torch.testing.assert_close(called[1], want["up.weight"])


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_computed_again_is_so_once(at_once: bool) -> None:
    """Left to itself, autograd computes a checkpointed function again for every product in it."""
    stage, inputs, gradients = given()
    want = in_one(stage, inputs, gradients)
    plain, stage.calls = stage.mlp, 0
    stage.mlp = lambda x: checkpoint(plain, x, use_reentrant=False)  # type: ignore[method-assign,assignment]
    outputs = stage(*inputs)
    params = list(stage.parameters()) if at_once else []
    _, deferred = backward_input(outputs, gradients, inputs, stage.parameters(), params)
    backward_weight(deferred)
    assert stage.calls == (2 if at_once else 5)  # forward; both parts, the second of three places
    for name, p in stage.named_parameters():
        if name in want:
            torch.testing.assert_close(p.grad, want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lets_go", [False, True])
def test_between_the_parts_nothing_is_held_that_only_the_first_needs(lets_go: bool) -> None:
    stage, inputs, gradients = given()
    want = in_one(stage, inputs, gradients)
    made: dict[str, StorageWeakRef] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            made[name] = StorageWeakRef(output.untyped_storage())
            made[f"into {name}"] = StorageWeakRef(given[0].untyped_storage())

        return hook

    for name in ("up", "down"):
        getattr(stage, name).register_forward_hook(watch(name))
    kept = Kept() if lets_go else None
    with kept.forward() if kept is not None else contextlib.nullcontext():
        outputs = stage(*inputs)
    during: list[bool] = []
    first = next(x for x in inputs if x.requires_grad)
    watching = first.register_hook(lambda _: during.append(made["up"].expired()))
    _, deferred = backward_input(outputs, gradients, inputs, stage.parameters(), kept=kept)
    watching.remove()
    del outputs
    assert during == [lets_go]  # silu's backward, which ran long before the inputs' gradients
    assert made["up"].expired() == lets_go
    assert not made["into up"].expired() and not made["into down"].expired()  # of the weights
    backward_weight(deferred)
    assert made["into up"].expired() and made["into down"].expired()
    for name, p in stage.named_parameters():
        if name in want:
            torch.testing.assert_close(p.grad, want[name], rtol=1e-6, atol=1e-6)


def test_which_blocks_have_a_whole_backward() -> None:
    assert not Block().whole_backward
    assert all(Block(recompute=how).whole_backward for how in ("full", "selective", "mlp+norms", "offload"))
    block = Block()
    block.compiled = True
    assert block.whole_backward


# Several tensors between stages, blocks computed again, compiled blocks.
CASES = [
    Case("t5", pp=2, schedule="ZB-H1", num_micro_batches=6),
    Case("t5", pp=2, dp=2, zero=2, schedule="ZBV", virtual=2, num_micro_batches=6, labels="unequal"),
    Case("bart", pp=2, tp=2, schedule="InterleavedZeroBubble", virtual=2, num_micro_batches=6),
    Case("skips", pp=2, stages=(3, 2), schedule="ZB-H1", num_micro_batches=6, recompute="full"),
    Case("encdec", pp=2, tp=2, schedule="DualPipeV", virtual=2, num_micro_batches=6),
    Case("llama", pp=2, dp=2, zero=1, schedule="ZB-H1", num_micro_batches=6, recompute="attention+mlp+norms"),
    Case("llama", pp=2, schedule="ZB-H1", num_micro_batches=6, recompute="offload"),
    Case("llama", pp=2, schedule="ZBV", virtual=2, num_micro_batches=6, compile="aot_eager"),
]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize("case", spread_out(CASES, 3), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    result = check(case)
    assert result.equal, result
