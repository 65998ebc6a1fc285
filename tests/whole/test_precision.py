"""Mixed precision on real processes, against the same by hand in plain torch (tests/mixed.py)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping

import mixed_jobs
import pytest
import torch
import torch.nn.functional as F
from harness import pool
from mixed import ByHand, by_hand, error_of, errors_of, exact_gradients, gradient_job, gradients_by_hand, largest_factor
from parity import SEQ, Case, compiled, graph_of, settled_bytes, spread_out, trained, worst
from torch import nn

import autoplan
from autoplan.api import plan_program
from autoplan.capture.passes.cast import computing_in, main_dtype
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.runtime.precision import LossScaler, MixedPrecision
from autoplan.runtime.spec import ProgramSpec, evaluate_terms
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]


# What changes nothing inside a micro-batch: its 16-bit gradients are the same bits, and what adds them is float32.
SAME_BITS = [
    Case("llama", precision="bf16", num_micro_batches=3, labels="unequal"),
    Case("gpt", precision="bf16", num_micro_batches=2, recompute="full"),
    *[Case("llama", dp=2, zero=zero, precision="bf16", num_micro_batches=3, labels="unequal") for zero in range(4)],
    Case("gpt", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=1, precision="bf16", num_micro_batches=2),
    Case("llama-tied", dp=2, zero=3, precision="bf16", num_micro_batches=2, recompute="full"),
    Case("llama-frozen", dp=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("llama-frozen", dp=2, zero=2, precision="bf16"),
    Case("llama", pp=2, precision="bf16", num_micro_batches=3, stages=(3, 1)),
    Case("gpt-untied", pp=2, dp=2, zero=1, precision="bf16", num_micro_batches=3, labels="unequal"),
    # weight gradients apart from those of inputs, by no hook of autograd
    Case("llama", pp=2, schedule="ZB-H1", precision="bf16", num_micro_batches=6),
    *[
        Case("llama", pp=2, dp=2, zero=zero, schedule="ZB-H1", precision="bf16", num_micro_batches=6, labels="unequal")
        for zero in (0, 1, 2)
    ],
    Case("llama-tied", pp=2, dp=2, zero=1, schedule="ZBV", virtual=2, precision="bf16", num_micro_batches=6),
    Case("gpt-untied", pp=2, schedule="ZB-H1", precision="fp16", num_micro_batches=6, recompute="full"),
    Case("llama", precision="bf16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=0, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=1, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=3, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", precision="fp16-grad16", num_micro_batches=3),
    Case("llama", dp=2, zero=0, precision="fp16-grad16", num_micro_batches=2, labels="unequal"),
    Case("llama", dp=2, zero=2, precision="fp16-grad16", num_micro_batches=3),
    Case("llama", precision="fp16", num_micro_batches=3, labels="unequal"),
    Case("llama", dp=2, zero=0, precision="fp16", num_micro_batches=2),
    Case("gpt-untied", dp=2, zero=3, precision="fp16", num_micro_batches=3),
    Case("llama", dp=2, zero=2, precision="fp32", num_micro_batches=3),
]


def compare(case: Case, want: ByHand) -> tuple[float, float]:
    """Largest relative differences of the first gradients and of the parameters after three steps."""
    got = trained(case, "float32")
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert got.norm == pytest.approx(want.norm, rel=1e-6)
    assert {t.dtype for t in got.gradients.values()} == {torch.float32}
    assert {got.parameters[n].dtype for n in want.parameters} == {torch.float32}
    parameters = {n: got.parameters[n] for n in want.parameters}
    return worst(got.gradients, want.gradients)[0], worst(parameters, want.parameters)[0]


@pytest.mark.parametrize("case", spread_out(SAME_BITS, 12), ids=str)
def test_training_equals_the_same_by_hand(case: Case) -> None:
    scale = 2.0**16 if case.precision.startswith("fp16") else 1.0
    gradient, parameter = compare(case, by_hand(case, scale=scale))
    assert gradient < 1e-6
    assert parameter < 1e-6


def test_sums_in_16_bits_are_seen() -> None:
    """Negative control: the same by hand, gradients of 12 micro-batches added in bf16."""
    case = Case("llama", dp=2, zero=1, precision="bf16", num_micro_batches=6)
    got = trained(case, "float32", num_steps=1)
    assert worst(got.gradients, by_hand(case, 1).gradients)[0] < 1e-6
    assert worst(got.gradients, by_hand(case, 1, accumulate=torch.bfloat16).gradients)[0] > 1e-3


# What changes the order of 16-bit sums inside a micro-batch. Over these and 5 batches each, the error against float64
# was at most 1.10 times that of one device in 16 bits, that of a single parameter at most 1.65 times; where tp changes
# what a router sees in 16 bits (Qwen3-MoE) a token may choose another expert, and a single parameter says nothing.
OTHER_ORDER = [
    Case("llama", tp=2, precision="bf16", labels="unequal"),
    Case("gpt-untied", tp=2, precision="bf16", num_micro_batches=2, prices="latency"),
    Case("llama", tp=2, precision="bf16-grad16", num_micro_batches=3),
    Case("llama", tp=2, precision="fp16", labels="unequal"),
    Case("qwen2-mixed", cp=2, zero=2, precision="bf16"),
    Case("mixtral", dp=2, ep=2, zero=0, precision="bf16", num_micro_batches=2),
    Case("mixtral", dp=2, ep=2, zero=1, precision="bf16", num_micro_batches=2),
    Case("deepseek", dp=2, zero=3, precision="bf16"),
    Case("qwen3-moe", tp=2, precision="bf16"),
    Case("llama", dp=2, tp=2, pp=2, zero=1, precision="bf16", num_micro_batches=2),
    Case("mixtral", dp=4, ep=2, zero=2, precision="bf16", num_micro_batches=3),
    Case("llama", dp=4, zero=2, zero_replicas=2, precision="bf16", num_micro_batches=3),
]
FACTOR, FACTOR_OF_ONE = 1.25, 2.0


@pytest.mark.parametrize("case", spread_out(OTHER_ORDER, 12), ids=str)
def test_no_less_exact_than_one_device(case: Case) -> None:
    """Against float64 the gradients of the parallel program are as good as those of one device in 16 bits."""
    program = compiled(case)
    got = pool(case.world).run(gradient_job, case, program.spec.to_json(), dict(program.sources), 3, timeout_s=120)[0]
    for step, gradients in enumerate(got):
        exact, alone = exact_gradients(case, step), gradients_by_hand(case, step)
        assert error_of(gradients, exact) < FACTOR * error_of(alone, exact)
        if case.family == "qwen3-moe":
            continue
        allowed = errors_of(alone, exact)
        factor, name = largest_factor(errors_of(gradients, exact), allowed)
        assert factor < FACTOR_OF_ONE, name
        lost = errors_of({n: g * 0.75 for n, g in gradients.items()}, exact)
        assert all(lost[n] > FACTOR_OF_ONE * allowed[n] for n in lost)  # control: of any one of them, a quarter missing


@pytest.mark.parametrize("precision", ["bf16", "bf16-grad16"])
def test_ledger_of_mixed_precision(precision: str) -> None:
    """Activations travel in 16 bits, what is summed once per step in the gradients' width."""
    case = Case(tp=2, num_micro_batches=2, precision=precision)
    got = trained(case, "float32", 1)
    env = {"b": 6, "s": SEQ}
    want: Counter[tuple[str, str, int, str]] = Counter()
    deferred = 0
    for e in compiled(case).spec.ledger:
        if e.per == "micro_batch":
            want[e.kind, e.axis, evaluate_terms(e.bytes, env), e.phase] += case.num_micro_batches
        else:
            deferred += evaluate_terms(e.bytes, env)
    seen = Counter(r for r in got.ledger if r[1] == "tp")
    seen.subtract([("all_reduce", "tp", settled_bytes(1), "forward")])  # of all ranks: do the batches fit?
    assert min(seen.values()) >= 0
    assert want and not want - seen
    assert deferred and sum(r[2] * n for r, n in (seen - want).items()) == deferred


# -- loss scaling -----------------------------------------------------------------------------------------------------

OVERFLOWING = [
    Case("llama", precision="fp16", num_micro_batches=2),
    Case("llama", dp=2, zero=0, precision="fp16", num_micro_batches=2),
    Case("llama", dp=2, zero=3, precision="fp16", num_micro_batches=2),
    Case("llama", pp=2, tp=2, precision="fp16", num_micro_batches=2),
    Case("mixtral", dp=2, ep=2, zero=1, precision="fp16", num_micro_batches=2),
    Case("llama-tied", pp=2, dp=2, zero=1, precision="fp16", num_micro_batches=3),
]


@pytest.mark.parametrize("case", spread_out(OVERFLOWING, 3), ids=str)
def test_an_overflow_skips_the_step_on_all_ranks(case: Case) -> None:
    """One rank alone has an infinite gradient, in one element: nobody's parameters or optimizer change, the scale is
    halved for all; then training goes on, and after two good steps the scale doubles."""
    program = compiled(case)
    args = (case, program.spec.to_json(), dict(program.sources))
    for bad_rank in {0, case.world - 1}:
        results = pool(case.world).run(mixed_jobs.overflow, *args, bad_rank, timeout_s=120)
        for found in results:
            assert found == results[0]
        assert results[0] == {
            "scales": [2.0**15, 2.0**14, 2.0**14, 2.0**15],  # good; bad; good; good (an interval of 2)
            "skipped": [False, True, False, False],
            "changed": [True, False, True, True],
            "norm_is_inf": [False, True, False, False],
            "num_skipped": 1,
        }


def test_clipping_sees_unscaled_gradients() -> None:
    """The same norm at another scale; and the first steps are those of torch.amp.GradScaler."""
    case = Case("gpt", dp=2, zero=2, precision="fp16", num_micro_batches=2)
    program = compiled(case)
    norms = pool(2).run(mixed_jobs.norms, case, program.spec.to_json(), dict(program.sources), [2.0**12, 2.0**8])
    assert norms[0] == norms[1]
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-3)  # 2^-24 is the least number of fp16


def test_the_scale_moves_as_that_of_torch() -> None:
    scaler = LossScaler(growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for bad in (0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        mine = torch.nn.Parameter(torch.ones(()))
        factor = float("nan") if bad else 1.0
        scaler.scaled(mine * factor).backward()
        theirs.scale(weight * factor).backward()
        scaler.unscale_([mine], torch.device("cpu"), 1)
        theirs.unscale_(optimizer)
        assert (mine.grad is None) == bool(bad)
        assert bad or mine.grad == weight.grad == 1.0
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert scaler.state_dict() == theirs.state_dict()
    again = LossScaler()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == scaler.state_dict()
    with pytest.raises(KeyError, match="_growth_tracker"):
        again.load_state_dict({k: v for k, v in theirs.state_dict().items() if k != "_growth_tracker"})
    with pytest.raises(ValueError, match="backoff_factor=2"):
        LossScaler(backoff_factor=2.0)


# -- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", spread_out(["bf16", "fp16"], 3))
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2}], ids=str)
def test_a_user_trains_in_16_bits(precision: str, pins: dict[str, int]) -> None:
    """Loss goes down; float32 state that loads into the model; 16 bits inside; two searches with the same prices."""
    results = pool(2).run(mixed_jobs.train, precision, pins, timeout_s=120)
    assert results[0] == results[1]
    losses, dtypes, plan = results[0]
    assert losses[-1] < losses[0] - 0.3
    assert dtypes == {
        "stored": ["torch.float32"],
        "computed": ["torch." + {"bf16": "bfloat16", "fp16": "float16"}[precision]],
    }
    assert f"precision={precision}" in plan


@pytest.mark.parametrize("precision", ["fp8", "fp4", "fp8-grad16"])
def test_what_is_only_priced_is_refused(precision: str) -> None:
    with pytest.raises(PinError, match=f"{precision!r} is priced, but not executed.*nearest: bf16"):
        plan_program(graph_of("llama", 0.0), Cluster.parse("local", 1, "cpu"), {}, 4, SEQ, precision=precision)
    with pytest.raises(PinError, match="precision 'half' is not known; use native, bf16"):
        plan_program(graph_of("llama", 0.0), Cluster.parse("local", 1, "cpu"), {}, 4, SEQ, precision="half")


def test_capture_in_another_dtype_leaves_the_model_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = {n: (id(p), p.dtype) for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), computing_in(model, torch.bfloat16):
        assert main_dtype(model) == torch.bfloat16
        assert model[1].weight is model[0].weight
        raise RuntimeError("inside")
    assert {n: (id(p), p.dtype) for n, p in model.named_parameters()} == before


def test_dtypes_of_a_program() -> None:
    spec = compiled(Case("llama", pp=2, num_micro_batches=2, precision="bf16")).spec
    assert spec == ProgramSpec.from_json(spec.to_json())
    assert {p.dtype for s in spec.stages for p in s.params} == {"bfloat16"}
    assert {c.dtype for s in spec.stages for c in s.carried_out} == {"bfloat16"}
    assert MixedPrecision.of(spec) == MixedPrecision(torch.bfloat16, torch.float32)
    assert MixedPrecision.of(compiled(Case("llama")).spec) is None
    with pytest.raises(ValueError, match=r"cannot compute in torch.float64"):
        MixedPrecision(torch.float64)
    with pytest.raises(ValueError, match=r"gradients in torch.float16 with torch.bfloat16"):
        MixedPrecision(torch.bfloat16, torch.float16)


# -- what is priced is held -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", spread_out([0, 1, 2, 3], 3))
@pytest.mark.parametrize("precision", ["bf16", "bf16-grad16", "fp32"])
def test_bytes_per_parameter(zero: int, precision: str) -> None:
    """Parameters, copies, moments and gradients after a step, as the memory model has them: to the byte."""
    case = Case("llama", dp=2, zero=zero, num_micro_batches=2, precision=precision)
    program = compiled(case)
    found = pool(2).run(mixed_jobs.held_bytes, case, program.spec.to_json(), dict(program.sources))
    request = PlanRequest(
        graph_of("llama", 0.0, precision),
        Cluster.parse("local", 2, "cpu").with_(memory_gb=1.0),
        SEQ,
        12,
        {**case.pins, "micro_batch_size": 3},
        precision=precision,
        executed=True,
    )
    planned = LayoutCache(request).pricer(
        ParallelConfig(dp=2, zero_stage=zero, micro_batch_size=3, num_micro_batches=2)
    )
    assert planned is not None
    model = planned.memory
    for rank in found:
        assert rank["stored"] == sum(model.stored) + sum(model.states)
        # the sums of ZeRO 0 and 1 are those of whole gradients, which the optimizer gets in float32: whole or its part
        wide = {0: 1.0, 1: 0.5}.get(zero, 1.0) * (2.0 if precision == "bf16-grad16" and zero < 2 else 1.0)
        assert rank["gradients"] == wide * sum(model.grads)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_model_given_in_16_bits(zero: int) -> None:
    results = pool(2).run(mixed_jobs.given_in_16_bits, zero, timeout_s=120)
    assert results[0] == results[1]
    assert results[0][0][-1] < results[0][0][0] - 0.3


def assert_as_by_hand(
    model: nn.Module,
    half: nn.Module,
    wanted: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    loss_fn: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
) -> None:
    """Compare a step of `model` under bf16 with `half`, cast by hand, whose loss is `wanted`."""
    wanted.backward()
    pm = autoplan.parallelize(
        model, example_inputs=batch, loss_fn=loss_fn, precision="bf16", pins={"recompute": "none"}
    )
    loss, got = pm.step(batch), pm.gradients()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert worst(got, {n: p.grad for n, p in half.named_parameters() if p.grad is not None})[0] < 1e-6


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", ["products", "convolutions"])
def test_inputs_are_cast_as_the_model_is(kind: str) -> None:
    """Features and images in float32, as a loader gives them; the loss reads them as they are."""
    torch.manual_seed(0)
    if kind == "products":
        model, x = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), torch.randn(4, 6)
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
        x = torch.randn(4, 3, 6, 6)
    batch = {"input": x, "targets": torch.randn(4, 3)}

    def loss_fn(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(out.float(), batch["targets"]) + batch["input"].mean() * out.float().mean()

    half = copy.deepcopy(model).bfloat16()
    assert_as_by_hand(model, half, loss_fn(half(x.bfloat16()), batch), batch, loss_fn)


class Tables(nn.Module):
    """Values in float32 beside activations; `by_hand` casts them where torch takes one dtype alone."""

    def __init__(self, kind: str, by_hand: bool = False) -> None:
        super().__init__()
        self.kind, self.by_hand = kind, by_hand
        self.tok, self.head, self.mix = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 48).view(6, 8))
        self.layer = {
            "attention": nn.Linear(8, 8),
            "module": nn.MultiheadAttention(8, 2, batch_first=True),
            "recurrent": nn.LSTM(8, 8, batch_first=True),
            "activation": nn.PReLU(),
        }[kind]

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.tok.weight.dtype) if self.by_hand else x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        if self.kind == "attention":  # rotated queries and keys
            q, k = (self.cast(f(x) * self.table[: ids.shape[1]]) for f in (self.layer, self.mix))
            x = F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None], is_causal=True)[:, 0]
        elif self.kind == "recurrent":  # its first states
            x = self.layer(x, tuple(self.cast(torch.zeros(1, ids.shape[0], 8)) for _ in range(2)))[0]
        else:  # positions
            x = self.cast(x + self.table[: ids.shape[1]])
            x = self.layer(x, x, x, need_weights=False)[0] if self.kind == "module" else self.layer(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", ["attention", "module", "recurrent", "activation"])
def test_values_in_float32_beside_16_bits_are_cast_where_torch_needs_one_dtype(kind: str) -> None:
    torch.manual_seed(0)
    model, half = Tables(kind), Tables(kind, by_hand=True)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    half.table = model.get_buffer("table").clone()
    ids = torch.randint(0, 16, (4, 6))
    batch = {"ids": ids, "targets": ids}

    def loss_fn(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1).float(), batch["targets"].flatten())

    assert_as_by_hand(model, half, loss_fn(half(ids), batch), batch, loss_fn)
