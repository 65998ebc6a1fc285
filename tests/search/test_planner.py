"""The search against exhaustive enumeration with `price`, its bounds, its certificate and its refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from enumeration import SEQ, brute_cut, brute_force, cluster, graph, least_memory, request, room
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import spread_out

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import MeasuredOp, Profile, Timing
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.work import BlockWork, KeptAtCut, OpWork, ParamWork, SharedValue, TiedParam, Workload
from autoplan.errors import PinError
from autoplan.ops.saved import TensorFacts
from autoplan.report import data
from autoplan.report.text import proof_text
from autoplan.search import candidates
from autoplan.search.cuts import Cutter
from autoplan.search.intra import IntraSolution, LayoutProgram, SendWish
from autoplan.search.planner import (
    NothingFits,
    PlanRequest,
    StoppedError,
    estimate_config,
    search_plan,
)

INTERLEAVED = "Interleaved1F1B"


# -- the optimum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "share", "mode"),
    spread_out(
        [
            *((2, share, Mode.COMPILED) for share in (2.0, 0.8, 0.5)),
            *(pytest.param(4, share, Mode.COMPILED, marks=pytest.mark.slow) for share in (2.0, 0.8, 0.5)),
            *((2, share, Mode.EAGER) for share in (0.8, 0.65, 0.5)),
        ],
        2,
        unpack=True,
    ),
)
def test_the_search_is_exhaustive_enumeration(devices: int, share: float, mode: Mode) -> None:
    """In eager mode with every choice of recompute."""
    r = request(devices, int(least_memory(devices) * share), mode=mode)
    expected = brute_force(r)
    if expected == math.inf:
        with pytest.raises(NothingFits):
            search_plan(r)
        return
    found = search_plan(r)
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(expected, rel=1e-9)
    assert found.certificate.gap == 0.0 and found.certificate.status == "complete"


def test_a_search_that_forgets_memory_is_seen() -> None:
    """Negative control: without the memory limit the answer is another one."""
    tight, free = request(4, int(least_memory(4) * 0.8)), request(4)
    assert search_plan(tight).plans[0].estimate.step_time_s.mid > search_plan(free).plans[0].estimate.step_time_s.mid


OPS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.floats(0, 4e6), st.floats(0, 4e6), st.floats(0, 1e6))


@st.composite
def pricers(draw: st.DrawFn) -> tuple[Pricer, float]:
    """Random layers on a random pipeline."""
    units = draw(st.integers(2, 6))
    pp = draw(st.integers(1, min(3, units)))
    m = draw(st.integers(1, 6))
    zero, dp = draw(st.sampled_from([0, 1, 2, 3])), draw(st.sampled_from([1, 2]))
    blocks, saved, kept, transients = {}, [], [], []
    for u in range(units):
        rows, columns, save, keep, transient = draw(OPS)
        x, w = TensorFacts((8 * rows, 64), "float32", True), TensorFacts((64 * columns, 64), "float32", True)
        y = TensorFacts((8 * rows, 64 * columns), "float32", True)
        op = OpWork("linear", (x, w), (y,), (), 2.0 * 8 * rows * 64 * 64 * columns, float(x.num_bytes + y.num_bytes))
        act = OpWork("silu", (y,), (y,), (), 1.0 * y.num_elements, 2.0 * y.num_bytes)
        blocks[f"b{u}"] = BlockWork(
            f"b{u}",
            (op, act, act),
            (),
            (ParamWork("w", w.num_elements, "float32", True),),
            group_ops={"attention": frozenset((1, 2)), "mlp": frozenset((draw(st.integers(0, 1)),))},
        )
        transients.append(transient)
        saved.append(save + keep)
        kept.append(keep)
    layers = tuple(draw(st.lists(st.booleans(), min_size=units, max_size=units)))
    parts = draw(st.lists(st.floats(0, 1), min_size=units, max_size=units))
    # a parameter that both ends hold is no larger than what either has
    shared = ParamWork("tied", min(blocks[f"b{u}"].params[0].num_elements for u in (0, units - 1)), "float32", True)
    tied = draw(st.booleans())
    for u in (0, units - 1) if tied else ():
        (w,) = blocks[f"b{u}"].params
        rest = replace(w, num_elements=w.num_elements - shared.num_elements)
        blocks[f"b{u}"] = replace(blocks[f"b{u}"], params=(replace(shared, again=u > 0), rest))
    passing = ()
    if draw(st.booleans()):
        made = draw(st.integers(0, units - 2))
        of = st.lists(st.integers(made, units - 1), max_size=3).map(tuple)
        last = draw(st.integers(made + 1, units - 1))
        passing = (SharedValue(made, last, draw(st.floats(0, 4e6)), draw(of), draw(of)),)
    cuts = draw(st.lists(st.floats(0, 1e6), min_size=units - 1, max_size=units - 1))
    choices = tuple(
        {"attention": k + part * (s - k), "mlp": k + other * (s - k), "attention+mlp": k + part * other * (s - k)}
        for s, k, part, other in zip(saved, kept, parts, parts[::-1], strict=True)
    )

    def some_of(unit: int, most: float) -> dict[str, float]:
        """Of what a unit keeps under every choice, a part that crosses one of its ends."""
        each = {"none": saved[unit], "selective": saved[unit], "full": kept[unit], **choices[unit]}
        return {how: draw(st.sampled_from([0.0, 1.0])) * min(most, size / 2) for how, size in each.items()}

    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    at_cuts = tuple(KeptAtCut(some_of(u, (1 - share) * c), some_of(u + 1, share * c)) for u, c in enumerate(cuts))
    work = Workload(
        model="random",
        axes=(),
        blocks=blocks,
        units=tuple((f"b{u}",) for u in range(units)),
        unit_calls=tuple((f"c{u}",) for u in range(units)),
        layers=layers,
        is_layer=tuple((layer,) for layer in layers),
        free=(),
        cut_bytes=tuple(c + sum(v.num_bytes for v in passing if v.crosses(u + 1)) for u, c in enumerate(cuts)),
        unit_saved=tuple(saved),
        unit_selective=tuple(saved),
        unit_kept=tuple(kept),
        unit_transient=tuple(transients),
        unit_recompute_transient=tuple(t + s - k for t, s, k in zip(transients, saved, kept, strict=True)),
        tied=(TiedParam(0, units - 1, shared),) if tied else (),
        free_saved=draw(st.floats(0, 1e5)),
        tokens=8.0,
        model_flops=1.0,
        micro_batch_size=1,
        seq_len=8,
        unit_choices=choices,
        shared=passing,
        kept_at_cuts=at_cuts if draw(st.booleans()) else (),
        last_spent=draw(st.floats(0, 1)) * kept[-1],
    )
    schedule = draw(st.sampled_from(["1F1B", "GPipe"]))
    config = ParallelConfig(dp=dp, pp=pp, zero_stage=zero, num_micro_batches=m, schedule=schedule)
    c = cluster(pp * dp, 1 << 40, draw(st.sampled_from([0.0, 1e-6, 1e-4])))
    if draw(st.booleans()):  # where what ZeRO moves once per step hides behind whole stages
        c = replace(c, device_type="cuda", device=replace(c.device, overlap_fraction=draw(st.sampled_from([0.0, 0.8]))))
    known = draw(st.sampled_from([None, 0.0, 1e-4, 1e-2])) if c.device_type == "cuda" else None
    profile = None if known is None else with_host(known)
    pricer = Pricer(work, config, Costs(c, profile, Mode.COMPILED), searched=draw(st.booleans()))
    return pricer, draw(st.floats(1e5, 4e7)) + pricer.memory.fixed.high


def with_host(seconds: float) -> Profile:
    """A profile that knows nothing but what the host needs: so long for everything."""
    t, x = Timing(1e-6, 1e-6, 1e-6, 1), TensorFacts((8,), "float32", True)
    host = Timing(seconds, seconds, seconds, 1)
    names = "zero_block_forward_s zero_gather_s zero_reduce_s micro_batch_s pipeline_action_s optimizer_step_s comm_s"
    record = MeasuredOp(OpWork("dropout", (x,), (x,), (), 8.0, 64.0), t, t, host, host)
    return Profile("host", "cuda", 1, 1, ops=(record,), host_overheads=dict.fromkeys(names.split(), seconds))


@settings(max_examples=80)
@given(pricers(), st.sampled_from([0.0, 0.4, 1.0, 1.5]))
def test_bounds_never_exceed_the_truth_and_the_cut_is_the_best(drawn: tuple[Pricer, float], guard: float) -> None:
    pricer, capacity = drawn
    cutter = Cutter(pricer, room(pricer, capacity, guard))
    best, _, _ = brute_cut(pricer, capacity, guard)
    bound = cutter.bound_s()
    assert bound <= best * (1 + 1e-9)
    cutter.bound_s(0.5 * bound)
    assert "windows" not in vars(cutter)  # given up, and made again
    cut = cutter.search()
    assert cut.exact and cut.step_s == pytest.approx(best, rel=1e-9)
    if cut.chunks is not None:
        assert pricer.step_s(cut.chunks, cut.recompute) == cut.step_s
        few = cutter.search(max_evaluated=1)
        assert few.bound_s <= best * (1 + 1e-9) <= few.step_s * (1 + 2e-9)


# -- the certificate and the price -------------------------------------------------------------------------------------


def test_the_certificate_adds_up() -> None:
    found = search_plan(request(4, int(least_memory(4) * 0.8), top=3, pins={"recompute": "none"}))
    c = found.certificate
    assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved and c.open == 0
    assert c.illegal == sum(c.illegal_by_rule.values()) and c.too_big == sum(c.too_big_by_term.values())
    assert min(c.too_big, c.bounded_out, c.solved) > 0 and c.restrictions and 0 <= c.intra_gap < 1e-5
    steps = [p.estimate.step_time_s.mid for p in found.plans]
    assert len(steps) == 3 and steps == sorted(steps)
    assert all(p.estimate.fits for p in found.plans)


def test_the_same_request_gives_the_same_plan() -> None:
    first, second = search_plan(request(4)), search_plan(request(4))
    assert first.plans[0].config == second.plans[0].config
    assert first.plans[0].estimate.step_time_s == second.plans[0].estimate.step_time_s


def test_a_stop_by_time_still_gives_a_plan_and_is_labelled() -> None:
    found = search_plan(replace(request(4), time_limit_s=0.0))
    c = found.certificate
    assert found.plans and c.status == "stopped by time limit" and 0.05 < c.gap < 1.0
    assert found.fastest_s * (1 - c.gap) <= search_plan(request(4)).fastest_s * (1 + 1e-9)  # a bound, though weak
    assert c.open > 0 and c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open
    assert "no bound" in proof_text(1.0, c.intra_gap) and data.plain(c)["open"] == c.open


def test_a_stop_before_anything_fits_goes_on_until_something_does() -> None:
    """What the time limit left unseen is not "nothing fits"."""
    tight = request(4, int(least_memory(4) * 0.8))
    assert search_plan(replace(tight, time_limit_s=0.0)).plans[0].estimate.fits


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_LEAST_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_stop_without_a_plan_does_not_say_that_nothing_fits() -> None:
    with pytest.raises(StoppedError, match=r"no plan was found in .* undecided, so one may still fit"):
        search_plan(replace(request(4), time_limit_s=0.0))


def test_a_layout_that_was_stopped_leaves_its_candidates_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are neither illegal nor decided, and nothing but the peak of the devices bounds them."""
    complete, inside = search_plan(request(2)), LayoutProgram.solve
    whole = complete.certificate
    asked: list[float] = []  # the limits

    def stopped_once(program: LayoutProgram, number: int, limit_s: float, *wish: SendWish) -> IntraSolution:
        asked.append(limit_s)
        if len(asked) == 2:
            raise StoppedError("no layout found")
        return inside(program, number, limit_s, *wish)

    monkeypatch.setattr(LayoutProgram, "solve", stopped_once)
    stopped = search_plan(request(2, time_limit_s=50.0))
    c = stopped.certificate
    assert len(asked) > 4 and max(asked[3:]) < 50  # after the first usual layouts, what is left of the whole search
    assert c.status == "layouts stopped by time limit" and 0.05 < c.gap < 1.0
    assert stopped.fastest_s * (1 - c.gap) <= complete.fastest_s * (1 + 1e-9)
    assert c.open > 0 and c.illegal_by_rule == whole.illegal_by_rule
    assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open


def test_an_interrupt_keeps_the_best_and_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def search(self: Cutter, *args: Any, **kw: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return known(self, *args, **kw)

    known = Cutter.search
    monkeypatch.setattr(Cutter, "search", search)
    c = search_plan(request(4, top=3, pins={"schedule": "1F1B"})).certificate
    assert c.status == "interrupted" and c.open > 0 and c.solved == 1
    assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open


def test_the_gap_in_words() -> None:
    """A gap is relative to the plan found: the best is so much shorter, not the plan so much longer."""
    assert proof_text(0.0, 0.0) == "the best of this space"
    assert proof_text(0.5, 0.0) == "the best step of this space is at most 50 % shorter"
    assert proof_text(0.0, 0.02) == "the best of this space, layouts inside layers at most 2.0 % shorter"
    assert {"open", "intra_gap"} <= set(data.plain(search_plan(request(2)).certificate))


def test_every_restriction_is_named() -> None:
    def named(**pins: Any) -> str:
        return "; ".join(search_plan(request(2, pins=pins)).certificate.restrictions)

    free = named()
    for text in ("cp = 1", "tp over neighbours", "recompute: none or full", "schedules: 1F1B with every cut"):
        assert text in free
    assert "1F1B with every cut" not in named(schedule="1F1B")
    assert "ep = 1" not in free  # it has no experts
    pinned = named(recompute="selective", zero_stage=1)
    assert "recompute: none or full" not in pinned and "recompute pinned to selective" in pinned
    assert "zero_stage pinned to 1" in pinned


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"pp": 2, "stages": [1, 3]},
        {"dp": 2, "zero_stage": 3},
        {"recompute": "full"},
        {"micro_batch_size": 1},
        {"num_micro_batches": 4, "pp": 4},
        {"pp": 2, "recompute": {"model.layers.1": "full"}},
    ],
    ids=str,
)
def test_pins_are_kept(pins: dict[str, Any]) -> None:
    config = search_plan(request(4, pins=pins)).plans[0].config
    for name, value in pins.items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)
    assert config.num_devices == 4 and config.dp * config.micro_batch_size * config.num_micro_batches == 8


def test_memory_under_a_pinned_mapping_is_that_of_its_layers() -> None:
    pins = {"pp": 1, "tp": 1, "dp": 4, "zero_stage": 0, "micro_batch_size": 2}
    none, one, full = (
        search_plan(request(4, pins={**pins, "recompute": how})).plans[0].estimate.stages[0].memory["activations"].mid
        for how in ("none", {"model.layers.1": "full"}, "full")
    )
    assert full < one < none


def test_the_breakdown_adds_up_and_intervals_are_ordered() -> None:
    for p in search_plan(request(4, top=20)).plans:
        e = p.estimate
        assert sum(q.mid for q in e.breakdown.values()) == pytest.approx(e.step_time_s.mid, rel=1e-6)
        assert 0 < e.step_time_s.low <= e.step_time_s.mid <= e.step_time_s.high
        assert e.step_time_s.tag is Tag.ASSUMED
        assert e.tokens_per_s == pytest.approx(8 * SEQ / e.step_time_s.mid)
        for stage in e.stages:
            assert all(0 <= q.low <= q.mid <= q.high for q in stage.memory.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_follows_the_zero_table(zero: int) -> None:
    config = ParallelConfig(dp=4, zero_stage=zero, num_micro_batches=2)
    terms = estimate_config(request(4), config).estimate.stages[0].memory
    params = 4.0 * graph().num_params
    shard = params / 4
    assert terms["parameters"].mid == (params if zero == 0 else shard)
    assert terms["optimizer"].mid == 2 * (params if zero == 0 else shard)
    assert ("gathered parameters" in terms) == (zero > 0)
    if zero in (1, 2):
        assert terms["gathered parameters"].mid == params
    if zero == 3:
        assert terms["gathered parameters"].mid < params
    assert terms["gradients"].mid == params if zero < 2 else shard < terms["gradients"].mid < params


def test_estimate_is_the_price_of_the_searched_plan() -> None:
    best = search_plan(request(4, int(least_memory(4) * 0.8))).plans[0]
    again = estimate_config(request(4, int(least_memory(4) * 0.8)), best.config)
    assert again.estimate.step_time_s == best.estimate.step_time_s
    assert again.estimate.stages == best.estimate.stages


# -- a catalog model, and what is priced but not searched yet ----------------------------------------------------------


def large(config: ParallelConfig, model: str = "llama-3.1-8b", batch: int = 64, **kw: Any) -> Any:
    r = PlanRequest(load_model(model), Cluster.parse("2x8xh100-sxm5-80gb"), 4096, batch, **kw)
    return estimate_config(r, config).estimate


def test_every_priced_dimension_moves_the_price_the_right_way() -> None:
    plain = large(ParallelConfig(dp=16, num_micro_batches=4))
    assert large(ParallelConfig(dp=16, num_micro_batches=4), precision="fp8").step_time_s.mid < plain.step_time_s.mid
    assert large(ParallelConfig(dp=16, num_micro_batches=4), mode=Mode.COMPILED).step_time_s.mid < plain.step_time_s.mid
    selective = large(ParallelConfig(dp=16, num_micro_batches=4, recompute="selective"))
    full = large(ParallelConfig(dp=16, num_micro_batches=4, recompute="full"))
    assert plain.step_time_s.mid < selective.step_time_s.mid < full.step_time_s.mid
    assert full.peak_memory_bytes.mid < selective.peak_memory_bytes.mid < plain.peak_memory_bytes.mid
    context = large(ParallelConfig(dp=8, cp=2, num_micro_batches=8))
    assert context.stages[0].memory["activations"].mid < 0.6 * plain.stages[0].memory["activations"].mid
    flat = large(ParallelConfig(dp=4, pp=4, num_micro_batches=16))
    interleaved = large(ParallelConfig(dp=4, pp=4, num_micro_batches=16, schedule="Interleaved1F1B", virtual_stages=2))
    assert interleaved.breakdown["bubble"].mid < flat.breakdown["bubble"].mid
    moe = [
        large(ParallelConfig(dp=16, ep=ep, num_micro_batches=4), "mixtral-8x7b").stages[0].memory["gradients"].mid
        for ep in (1, 8)
    ]
    assert moe[1] < moe[0] / 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ParallelConfig(dp=8, num_micro_batches=8),
            r"dp=8 .* = 8 devices, but the cluster has 16; nearest legal: dp=16",
        ),
        (ParallelConfig(dp=16, ep=4, num_micro_batches=4), r"has no experts; nearest legal: ep=1"),
        (ParallelConfig(dp=16, num_micro_batches=3), r"num_micro_batches=3 does not divide the global batch of 64"),
        (ParallelConfig(dp=16, num_micro_batches=4, zero_stage=4), "zero_stage=4 does not exist.*legal: zero_stage=3"),
        (ParallelConfig(dp=16, num_micro_batches=4, schedule="magic"), "magic"),
        (ParallelConfig(dp=4, pp=4, num_micro_batches=16, virtual_stages=2), "virtual_stages|1F1B"),
        (ParallelConfig(tp=16, num_micro_batches=64, micro_batch_size=0), "micro_batch_size=0"),
        (ParallelConfig(dp=16, num_micro_batches=4, etp=0), "etp=0: must be a whole number"),
        (ParallelConfig(dp=16, num_micro_batches=4, etp=2), "etp=2: the model has no experts; nearest legal: etp=1"),
        (ParallelConfig(dp=16, num_micro_batches=4, state_slack=math.nan), "state_slack=nan"),
        (ParallelConfig(dp=16, num_micro_batches=4, zero_stage=True), "zero_stage=True does not exist"),
        (ParallelConfig(dp=16, num_micro_batches=4, schedule="ZB-H1", zero_stage=3), "nearest legal: zero_stage=2"),
        (
            ParallelConfig(dp=8, pp=2, num_micro_batches=8, schedule=INTERLEAVED, virtual_stages=2, stages=(8,) * 3),
            r"has 3 entries for pp=2 x virtual_stages=2; give 4",
        ),
        (
            ParallelConfig(dp=8, pp=2, num_micro_batches=8, schedule=INTERLEAVED, virtual_stages=2, stages=(1,) * 4),
            r"4 positive numbers that add up to the model's 32 layers",
        ),
        (
            ParallelConfig(dp=4, pp=4, num_micro_batches=16, schedule=INTERLEAVED, virtual_stages=16),
            r"= 64 chunks need at least as many layers, the model has 32; nearest legal: virtual_stages=8",
        ),
        (
            ParallelConfig(dp=16, num_micro_batches=4, schedule=INTERLEAVED, virtual_stages=2),
            "virtual_stages=2 needs a pipeline",
        ),
        (ParallelConfig(dp=16, num_micro_batches=4, recompute="some"), "recompute='some' is not supported; use none"),
        (ParallelConfig(dp=16, num_micro_batches=4, recompute=(1, 2)), r"has 2 entries for 1 stages; give 1"),
        (
            ParallelConfig(dp=16, num_micro_batches=4, recompute=(999,)),
            r"stage 0 of 32 layers cannot recompute 999; .* legal: recompute=\[32\]",
        ),
        (
            ParallelConfig(dp=16, num_micro_batches=4, recompute={"model.layers.1": "mlp+some"}),
            r"recompute='mlp\+some' is not supported",
        ),
        (ParallelConfig(dp=16, num_micro_batches=4, recompute={"layer1": "full"}), "'layer1', which is not a block"),
    ],
    ids=lambda v: "" if isinstance(v, str) else str(v)[:40],
)
def test_configurations_that_cannot_be(config: ParallelConfig, message: str) -> None:
    with pytest.raises(PinError, match=message):
        large(config)


def test_expert_degrees_that_cannot_be() -> None:
    for ep, etp, message in (
        (3, 1, "ep=3 does not divide the 8 experts; nearest legal: ep=2 or 4"),
        (8, 4, r"ep=8 x etp=4 does not divide dp x cp x tp = 16, .* nearest legal: ep=4"),
        (1, 3, "etp=3 does not divide the experts' inner size of 14336; nearest legal: etp=2 or 4"),
        (1, 32, "nearest legal: etp=16"),
    ):
        with pytest.raises(PinError, match=message):
            large(ParallelConfig(dp=16, num_micro_batches=4, ep=ep, etp=etp), "mixtral-8x7b")
