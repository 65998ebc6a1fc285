"""Recompute that is alike in all layers: found where it pays, and named in the certificate."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import replace

import pytest

from autoplan import Cluster, ParallelConfig, PlanRequest, load_model, search_plan
from autoplan.config.recompute import FULL, NONE, SELECTIVE, kinds_in, modules_of
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.infeasible import NotFasterError
from autoplan.search.joined import joined_certificates, joined_plans
from autoplan.search.layers_alike import with_layers_alike
from autoplan.stacks.like import read_like

_WORDS = "recompute alike in all layers: "


def _request(model: str, cluster: str, like: str, **pins: object) -> PlanRequest:
    return PlanRequest(load_model(model), Cluster.parse(cluster), 4096, 64, like=read_like(like, {}), pins=pins)


_MESH = {"tp": 2, "pp": 8, "dp": 32, "ep": 16, "etp": 1}
_OTHERS = {"zero_stage": 1, "micro_batch_size": 1, "schedule": "1F1B"}
_DEEPSEEK = replace(
    _request("deepseek-v3", "64x8xh100-sxm5-80gb", "megatron-bridge@26.08", **_MESH, **_OTHERS), global_batch_size=8192
)


def _said(found: SearchResult) -> list[str]:
    return [r for r in found.certificate.restrictions if r.startswith(_WORDS)]


_UNFUSED = replace(_request("gpt3-175b", "8x8xa100-sxm4-80gb", "megatron-lm@22.05", tp=4, pp=16), seq_len=2048)


def test_scores_that_attention_keeps_are_recomputed_alone() -> None:
    """Megatron-LM of May 2022 keeps the scores of attention: recomputing them alone beats recomputing whole layers."""
    found = search_plan(_UNFUSED)
    assert found.plans[0].config.recompute == SELECTIVE
    only = {how: search_plan(replace(_UNFUSED, pins={**_UNFUSED.pins, "recompute": how})) for how in (FULL, SELECTIVE)}
    assert found.fastest_s <= only[SELECTIVE].fastest_s * (1 + _UNFUSED.allowed_gap)
    assert found.fastest_s < only[FULL].fastest_s
    c = found.certificate
    assert c.gap <= _UNFUSED.allowed_gap and c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open
    assert c.considered > only[SELECTIVE].certificate.considered
    assert f"{_WORDS}{SELECTIVE} everywhere" in "; ".join(_said(found))


def test_what_has_to_be_beaten_is_beaten_by_layers_alike() -> None:
    """A request for less than some seconds, which whole layers do not reach."""
    fastest_s = search_plan(_UNFUSED).fastest_s
    asked = replace(_UNFUSED, below_s=1.05 * fastest_s)
    assert search_plan(asked).plans[0].config.recompute == SELECTIVE
    with pytest.raises(NotFasterError, match="takes less than") as raised:
        search_plan(replace(_UNFUSED, below_s=0.9 * fastest_s))
    assert raised.value.certificate is not None and raised.value.certificate.gap <= _UNFUSED.allowed_gap
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # from rank 0 to the others


def test_several_plans_have_other_degrees() -> None:
    found = search_plan(replace(_DEEPSEEK, top=3, pins={k: v for k, v in _DEEPSEEK.pins.items() if k != "zero_stage"}))
    degrees = [p.config.but(recompute=NONE, stages=None, offload=()) for p in found.plans]
    assert modules_of(found.plans[0].config.recompute) and len({repr(d) for d in degrees}) == len(degrees) > 1


def _near(of: SearchResult, config: ParallelConfig, factor: float) -> SearchResult:
    """Return a result whose chosen plan has this configuration and a step `factor` times as long."""
    plan = of.plans[0]
    scaled = replace(plan.estimate, step_time_s=replace(plan.estimate.step_time_s, mid=factor * _mid(of)))
    return replace(of, plans=(replace(plan, config=config, estimate=scaled),), equals=())


def _mid(of: SearchResult) -> float:
    return of.plans[0].estimate.step_time_s.mid


def test_equals_of_both_searches_are_kept_and_the_simplest_is_chosen() -> None:
    base = search_plan(replace(_DEEPSEEK, pins={**_DEEPSEEK.pins, "recompute": FULL}))
    config, step_s = base.plans[0].config, _mid(base)
    one = replace(
        _near(base, config.but(recompute=FULL), 1.0), equals=((config.but(virtual_stages=2), 0.999 * step_s),)
    )
    two = _near(base, config.but(recompute="modules:moe_act"), 0.985)
    two = replace(two, equals=((config.but(virtual_stages=4), 0.988 * step_s), (config.but(pp=4), 0.97 * step_s)))
    both = joined_plans(_DEEPSEEK, one, two)
    assert both.fastest_s == pytest.approx(0.97 * step_s) and both.plans == two.plans  # the other is 3 % slower
    assert [round(s / step_s, 3) for _, s in both.equals] == [0.97, 0.988]
    wide = joined_plans(replace(_DEEPSEEK, equal_within=0.05), one, two)
    assert [round(s / step_s, 3) for _, s in wide.equals] == [0.97, 0.988, 0.999, 1.0]
    plain = _near(base, config.but(recompute=NONE), 1.0)
    assert joined_plans(replace(_DEEPSEEK, equal_within=0.05), plain, two).plans == plain.plans


@pytest.mark.parametrize(
    ("one", "two", "status", "gap"),
    [
        ((Status.COMPLETE, 0.0), (Status.COMPLETE, 0.0), Status.COMPLETE, 0.0),
        ((Status.COMPLETE, 0.0), (Status.NEAR, 0.01), Status.NEAR, 0.01),
        ((Status.NEAR, 0.008), (Status.CUTS, 0.6), Status.CUTS, 0.6),
        ((Status.CUTS, 0.06), (Status.NEAR, 0.01), Status.NEAR, 0.04),  # to a plan that is faster by a bit
        ((Status.COMPLETE, 0.0), (Status.TIME_LIMIT, 0.3), Status.TIME_LIMIT, 0.3),
        ((Status.LAYOUTS, 0.0), (Status.INTERRUPTED, 1.0), Status.INTERRUPTED, 1.0),
    ],
)
def test_certificates_of_both_searches_are_one(
    one: tuple[Status, float], two: tuple[Status, float], status: Status, gap: float
) -> None:
    some = search_plan(_UNFUSED).certificate
    first, second = (replace(some, status=status, gap=gap) for status, gap in (one, two))
    slower = 0.96 / 0.94 if one[0] is Status.CUTS else 1.0
    both = joined_certificates(first, slower, second, 1.0, 1.0, allowed_gap=0.05)
    assert both.status == status and both.gap == pytest.approx(gap) and both.considered == 2 * some.considered
    assert both.stopped == (status in (Status.TIME_LIMIT, Status.INTERRUPTED))
    assert both.illegal_by_rule == {name: 2 * n for name, n in some.illegal_by_rule.items()}


def test_an_interrupted_search_keeps_what_it_found_and_claims_no_more() -> None:
    plain = search_plan(replace(_UNFUSED, pins={**_UNFUSED.pins, "recompute": FULL}))
    better = search_plan(replace(_UNFUSED, pins={**_UNFUSED.pins, "recompute": SELECTIVE}))
    ended = replace(better, certificate=replace(better.certificate, status=Status.INTERRUPTED, gap=0.5))
    asked: list[str] = []

    def interrupted(request: PlanRequest, known: SearchResult | None) -> SearchResult:
        asked.append(str(request.pins["recompute"]))
        if known is None:
            raise KeyboardInterrupt
        return known

    for known, least_gap in ((ended, 0.5), (None, 1.0)):
        found = with_layers_alike(_UNFUSED, plain, functools.partial(interrupted, known=known), math.inf)
        assert found.certificate.status == Status.INTERRUPTED and found.certificate.gap >= least_gap
        assert found.fastest_s == (plain if known is None else known).fastest_s
    assert asked == [SELECTIVE] * 2  # nothing else after an interrupt


def test_modules_are_recomputed_at_the_degrees_of_a_plan_that_recomputes() -> None:
    found = search_plan(_DEEPSEEK)
    assert modules_of(found.plans[0].config.recompute)
    without = search_plan(replace(_DEEPSEEK, pins={**_DEEPSEEK.pins, "recompute": FULL}))
    assert found.fastest_s < without.fastest_s
    (said,) = _said(found)
    assert "modules:moe_act, " in said and said.endswith(" at the degrees of the best plan")


def test_a_faster_plan_within_the_error_is_named_as_an_equal() -> None:
    """The plan of the search stays the chosen one; what is faster by less than the error is said beside it."""
    found = search_plan(replace(_DEEPSEEK, equal_within=0.2))
    chosen, (equal, seconds) = found.plans[0], found.equals[0]
    assert not modules_of(chosen.config.recompute) and modules_of(equal.recompute)
    assert found.fastest_s == seconds < chosen.estimate.step_time_s.mid


def test_the_time_of_the_request_is_kept() -> None:
    """Where the first search takes all of it, nothing else is tried."""
    result = search_plan(_DEEPSEEK)

    def never(request: PlanRequest) -> SearchResult:
        raise RuntimeError(request)

    plain = replace(result, plans=(replace(result.plans[0], config=result.plans[0].config.but(recompute=FULL)),))
    for request in (_DEEPSEEK, _UNFUSED):
        assert with_layers_alike(request, plain, never, until_s=-math.inf) == plain


def test_nothing_is_tried_where_nothing_is_gained() -> None:
    roomy = search_plan(_request("llama-3.1-8b", "1x8xh100-sxm5-80gb", "megatron-bridge@26.08"))
    assert kinds_in(roomy.plans[0].config.recompute) <= {NONE} and not _said(roomy)
    pinned = _request("llama-3.1-8b", "1x8xa100-sxm4-40gb", "megatron-lm@22.05", recompute=FULL)
    assert not _said(search_plan(pinned))
    cannot = _request("llama-3.1-8b", "1x8xa100-sxm4-40gb", "megatron-lm@22.02")
    assert not _said(search_plan(cannot))
