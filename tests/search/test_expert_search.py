"""The search over expert and context parallelism: every degree, the best by enumeration, and what cannot be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import enumeration
import models
import pytest

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.config.context_methods import neighbours_of
from autoplan.config.mesh import folds
from autoplan.config.offload import SEARCHED_OFFLOADS
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.context_pins import combinations, legal_methods
from autoplan.search.degrees import BEYOND
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import SearchResult, search_plan
from autoplan.search.request import PlanRequest
from autoplan.search.space import LEAST_PART, space

SEQ = 16


@lru_cache(maxsize=4)
def graph(kind: str = "mixtral") -> ModelGraph:
    makes = {"mixtral": models.make_mixtral, "llama": models.make_llama}
    make = {**makes, "windows": functools.partial(models.make_windowed, mixed=True)}[kind]
    return capture(make(), models.token_batch(2, SEQ))


def cluster(devices: int, memory_bytes: int = 1 << 30, latency_s: float = 1e-6) -> Cluster:
    link = Level(latency_s, 1e9, "made up")
    return Cluster(1, devices, Device("made up", 1e12, 1e9, memory_bytes, "made up"), link, "cpu")


def request(devices: int, pins: Mapping[str, Any], kind: str = "mixtral", **settings: Any) -> PlanRequest:
    return PlanRequest(
        graph(kind),
        cluster(devices, **settings),
        SEQ,
        8,
        pins,
        precision="native",
        memory_risk=0.5,
        equal_within=0.0,
        gap=0.0,
        executed=True,
    )


def enumerated(
    r: PlanRequest,
    devices: int,
    eps: Sequence[int] = (1,),
    cps: Sequence[int] = (1,),
    nums: Sequence[int] = (1, 2, 4, 8),
) -> list[tuple[float, float, tuple[int, int, int, int]]]:
    """Step time, peak memory and (tp, cp, ep, etp) of every plan without a pipeline and recompute, fastest first."""
    out = []
    for tp, ep, cp, zero, num in itertools.product((1, 2, 4), eps, cps, range(4), nums):
        dp, left = divmod(devices, tp * cp)
        if left or 8 % (dp * num) or (dp * cp == 1 and zero):
            continue
        for etp in {1, tp} if ep > 1 else {tp}:
            enough = etp > 1 and ep > 1 and 4 % (ep * etp) == 0  # whole ones of the 4 experts for as many ranks
            if devices % (ep * etp) or r.pins.get("etp", etp) != etp or (enough and "etp" not in r.pins):
                continue
            size = 8 // dp // num
            config = ParallelConfig(
                dp=dp, tp=tp, ep=ep, etp=etp, cp=cp, zero_stage=zero, micro_batch_size=size, num_micro_batches=num
            )
            for chosen in combinations(legal_methods(r.graph, cp, tp)) if cp > 1 else [None]:
                if ep > 1 and not folds(dp, cp, tp, ep, etp, neighbours_of((n for _, n in chosen or ()), cp)):
                    continue
                given = replace(config, context_method=None if chosen is None else dict(chosen))
                estimate = estimate_config(r, given).estimate
                out.append((estimate.step_time_s.mid, estimate.peak_memory_bytes.mid, (tp, cp, ep, etp)))
    return sorted(out)


def degrees_of(r: PlanRequest, devices: int) -> set[tuple[int, int, int, int]]:
    """(tp, cp, ep, etp) of all candidates."""
    found = space(r.graph, cluster(devices), 8, r.pins, seq_len=SEQ)
    return {(c.tp, c.cp, c.ep, c.expert_tp) for c in found.candidates}


@pytest.mark.parametrize("latency_s", [1e-7, 1e-4])
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_search_is_exhaustive_enumeration(devices: int, latency_s: float) -> None:
    """With all of the memory, and with as little as leaves one plan: the fastest is found, and proved."""
    r = request(devices, {"pp": 1, "recompute": "none"}, latency_s=latency_s)
    plans = enumerated(r, devices, eps=(1, 2, 4))
    degrees = {degrees for *_, degrees in plans}
    assert degrees == degrees_of(r, devices)
    assert {(2, 1, 2, 1)} <= degrees if devices == 2 else {(2, 1, 2, 1), (2, 1, 4, 1), (4, 1, 4, 1)} <= degrees
    for memory in (1 << 30, int(min(held for _, held, _ in plans)) + 1):
        result: SearchResult = search_plan(request(devices, r.pins, latency_s=latency_s, memory_bytes=memory))
        best = next(step for step, held, _ in plans if held <= memory)
        assert result.plans[0].estimate.step_time_s.mid == pytest.approx(best, rel=1e-9)
        assert result.certificate.status == "complete" and result.certificate.gap == 0.0


def test_spreading_experts_saves_their_copies() -> None:
    """Per rank half of the experts' parameters, gradients and optimizer state with ep 2, and none of what is reduced
    between data-parallel ranks of them."""
    r = request(2, {})
    one, two = (
        estimate_config(r, ParallelConfig(dp=2, ep=ep, zero_stage=0, micro_batch_size=4)).estimate.stages[0].memory
        for ep in (1, 2)
    )
    of_experts = 4.0 * sum(p.num_elements for p in graph().params.values() if ".experts." in p.name)
    assert one["parameters"].mid - two["parameters"].mid == of_experts / 2
    assert one["optimizer"].mid - two["optimizer"].mid == 2 * of_experts / 2


def test_pinned_programs_dispatch_and_type_check() -> None:
    for devices, pins, text in (
        (2, {"ep": 2, "tp": 1}, "dispatch='ep')"),
        (2, {"tp": 2, "ep": 1}, "axes='tp')"),
        (2, {"ep": 1, "tp": 1}, "gated=True)"),
        (2, {"ep": 2, "tp": 2}, "dispatch='ep')"),
        (4, {"ep": 2, "tp": 2, "etp": 2}, "dispatch='ep', inner='etp')"),
        (4, {"ep": 4, "tp": 4, "etp": 1}, "dispatch='ep')"),
        (4, {"ep": 2, "tp": 4, "etp": 1}, "dispatch='ep')"),
        (4, {"ep": 4, "cp": 2, "tp": 2, "etp": 1}, "dispatch='ep')"),
    ):
        plan, program = plan_program(graph(), cluster(devices), pins, 8, SEQ)
        wanted = {"etp": 1, **pins} if pins.get("ep") == pins.get("tp") == devices else pins
        assert all((getattr(plan.config, name) or plan.config.tp) == value for name, value in wanted.items())
        assert all(text in source for source in program.sources.values()), pins
        check_program(program.spec, program.sources, sequence=SEQ)
    assert " ep=2 " in str(plan_program(graph(), cluster(2), {"ep": 2}, 8, SEQ)[0])


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ({"ep": 3}, r"pin ep=3 does not divide the 4 experts; nearest legal: ep=2 or 4$"),
        ({"ep": 8}, r"pin ep=8 does not divide the 4 experts; nearest legal: ep=4$"),
        (
            {"ep": 4, "tp": 2, "etp": 2},
            r"pin ep=4 x etp=2 does not divide dp x cp x tp = 4, .*; nearest legal: ep=2, or etp=1$",
        ),
        ({"etp": 3}, r"pin etp=3: experts are whole.* over all of tp=1; nearest legal: etp=2 or 4$"),
        (
            {"tp": 4, "etp": 2},
            r"pin etp=2: experts are whole, or split over all of tp=4; nearest legal: etp=1 or 4, or tp=2$",
        ),
        ({"etp": 0}, r"pin etp=0: must be a whole number of at least 1; nearest legal: etp=1$"),
        ({"ep": 0}, r"pin ep=0: must be a whole number of at least 1; nearest legal: ep=1$"),
    ],
)
def test_degrees_that_cannot_be_say_why(pins: dict[str, int], why: str) -> None:
    with pytest.raises(PinError, match=why):
        search_plan(request(4, pins))


def test_a_dense_model_has_nothing_to_spread() -> None:
    r = PlanRequest(graph("llama"), cluster(4), SEQ, 8, {"ep": 2}, precision="native", executed=True)
    with pytest.raises(PinError, match=r"pin ep=2: the model has no experts; nearest legal: ep=1$"):
        search_plan(r)


def test_a_dense_model_has_nothing_to_spread_whatever_else_is_illegal() -> None:
    """Three devices divide neither the batch nor the heads; that the model has no experts is what the pin is about."""
    r = PlanRequest(graph("llama"), cluster(3), SEQ, 8, {"ep": 2}, precision="native", executed=True)
    with pytest.raises(PinError, match=r"pin ep=2: the model has no experts; nearest legal: ep=1$"):
        search_plan(r)


def test_split_experts_are_searched_where_they_are_few_or_pinned() -> None:
    """4 experts on 8 devices: 4 x 2 ranks have halves. Where 2 x 2 could have whole ones, only a pin splits them."""
    found = space(graph(), cluster(8), 8, {"tp": 2}, seq_len=SEQ).candidates
    assert {(c.ep, c.expert_tp) for c in found if c.pp == 1} == {(1, 2), (2, 1), (4, 1), (4, 2)}
    r = request(4, {"pp": 1, "recompute": "none", "etp": 2, "num_micro_batches": 1})
    plans = enumerated(r, 4, eps=(1, 2, 4), nums=(1,))
    assert {(2, 1, 1, 2), (2, 1, 2, 2)} == {degrees for *_, degrees in plans} == degrees_of(r, 4)
    assert search_plan(r).plans[0].estimate.step_time_s.mid == pytest.approx(plans[0][0], rel=1e-9)


@pytest.mark.slow
def test_search_with_experts_and_cut_sequences_is_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """cp, tp, ep and etp together, on 4 devices."""
    monkeypatch.setattr("autoplan.search.space.LEAST_PART", 4)
    pins = {"pp": 1, "recompute": "none", "num_micro_batches": 1}
    r = request(4, pins)
    plans = enumerated(r, 4, eps=(1, 2, 4), cps=(1, 2, 4), nums=(1,))
    assert degrees_of(r, 4) == {degrees for *_, degrees in plans}
    assert {(2, 2, 4, 1), (1, 4, 4, 1), (1, 2, 4, 1)} <= degrees_of(r, 4)
    for memory in (1 << 30, int(min(held for _, held, _ in plans)) + 1):
        result = search_plan(request(4, pins, memory_bytes=memory))
        best = next(step for step, held, _ in plans if held <= memory)
        assert result.plans[0].estimate.step_time_s.mid == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        pytest.param("1F1B", 1, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.slow),
        pytest.param("ZBV", 2, marks=pytest.mark.slow),
    ],
)
def test_experts_and_cut_sequences_in_a_pipeline_are_enumeration(
    schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of two ranks: tp, cp, dp, ep and etp, every ZeRO stage, cut, and what is computed again, or with the
    optimizer on the host; with all of the memory, and with less and less."""
    monkeypatch.setattr("autoplan.search.space.LEAST_PART", 4)
    pins = {"pp": 2, "schedule": schedule, "virtual_stages": virtual, "micro_batch_size": 1}
    free = replace(request(4, pins), mode=Mode.EAGER, time_limit_s=1e9)
    host = replace(free.cluster.device, host_memory_bytes=1 << 40, host_bytes_per_s=1e10)
    free = replace(free, cluster=replace(free.cluster, device=host))
    configs = [
        replace(ParallelConfig(pp=2, schedule=schedule, virtual_stages=virtual, micro_batch_size=1), **given)
        for tp, cp, dp in ((2, 1, 1), (1, 2, 1), (1, 1, 2))
        for ep in (1, 2)
        for zero in (range(4) if cp * dp > 1 else (0,))
        if not (zero == 3 and schedule == "ZBV")
        for chosen in (combinations(legal_methods(free.graph, cp, tp)) if cp > 1 else [None])
        if ep == 1 or folds(dp, cp, tp, ep, 1, neighbours_of((name for _, name in chosen or ()), cp))
        for given in [
            {"tp": tp, "cp": cp, "dp": dp, "ep": ep, "etp": tp if ep == 1 else 1, "zero_stage": zero}
            | {"num_micro_batches": 8 // dp, "context_method": None if chosen is None else dict(chosen)}
        ]
    ]
    asked = {(c.tp, c.cp, c.dp, c.ep, c.zero_stage) for c in configs}
    found = space(free.graph, free.cluster, 8, pins, seq_len=SEQ).candidates
    assert asked == {(c.tp, c.cp, c.dp, c.ep, c.zero_stage) for c in found}
    peak = search_plan(free).plans[0].estimate.peak_memory_bytes.mid
    seen = set()
    for share in (1.0, 0.8, 0.6):
        r = replace(free, cluster=free.cluster.with_(memory_gb=share * peak * (1 + 1e-9) / 1e9))
        kinds = [
            (replace(c, offload=tuple(n for n in kind if n != "activations")), "activations" in kind)
            for c, kind in itertools.product(configs, [(), *SEARCHED_OFFLOADS])
            if "parameters" not in kind or (c.zero_stage and c.dp * c.cp > 1)
        ]
        expected = min(enumeration.best_of(r, config, activations) for config, activations in kinds)
        plan = search_plan(r).plans[0]
        assert plan.estimate.step_time_s.mid == pytest.approx(expected, rel=1e-9), share
        seen.add((plan.config.tp, plan.config.cp, plan.config.ep, plan.config.offload))
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        (2, "llama"),
        pytest.param(4, "llama", marks=pytest.mark.slow),
        pytest.param(2, "windows", marks=pytest.mark.slow),
        pytest.param(4, "windows", marks=pytest.mark.exhaustive),
    ],
)
def test_the_search_over_cut_sequences_is_enumeration(devices: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method in every block, where a part of 4 tokens is long enough: with all of the memory, with the median of
    what plans need, and with as little as leaves one plan."""
    monkeypatch.setattr("autoplan.search.space.LEAST_PART", 4)
    pins = {"pp": 1, "recompute": "none"}
    r = request(devices, pins, kind)
    plans = enumerated(r, devices, cps=(1, 2, 4))
    assert degrees_of(r, devices) == {degrees for *_, degrees in plans}
    needs = sorted(held for _, held, _ in plans)
    for memory in (1 << 30, int(needs[len(needs) // 2]) + 1, int(needs[0]) + 1):
        result = search_plan(request(devices, pins, kind, memory_bytes=memory))
        best = next(step for step, held, _ in plans if held <= memory)
        assert result.plans[0].estimate.step_time_s.mid == pytest.approx(best, rel=1e-9)
        assert result.certificate.status == "complete" and result.certificate.gap == 0.0


def test_a_step_of_one_long_sequence_is_cut() -> None:
    """One sequence per step and no tensor parallelism leave only its parts to share; short ones are not looked at, but
    where nothing else is legal."""
    r = request(2, {"tp": 1, "pp": 1}, "llama")
    assert {c.cp for c in space(r.graph, r.cluster, 1, {"pp": 1}, seq_len=8 * LEAST_PART).candidates} == {1, 2}
    assert {c.cp for c in space(r.graph, r.cluster, 1, {"pp": 1}, seq_len=SEQ).candidates} == {1}
    result = search_plan(replace(r, seq_len=2 * LEAST_PART, global_batch_size=1))
    assert result.plans[0].config.cp == 2
    assert any("4,096 tokens per rank" in text for text in result.certificate.restrictions)
    short = search_plan(replace(r, global_batch_size=1))
    assert short.plans[0].config.cp == 2 and BEYOND in short.certificate.restrictions
