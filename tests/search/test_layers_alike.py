"""Recompute that is alike in all layers: found where it pays, and named in the certificate."""

from __future__ import annotations

import math
from dataclasses import replace

from autoplan import Cluster, PlanRequest, load_model, search_plan
from autoplan.config.recompute import FULL, NONE, SELECTIVE, kinds_in, modules_of
from autoplan.search.certificate import SearchResult
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


def test_scores_that_attention_keeps_are_recomputed_alone() -> None:
    """Megatron-LM of May 2022 keeps the scores of attention: recomputing them alone beats recomputing whole layers."""
    asked = replace(_request("gpt3-175b", "8x8xa100-sxm4-80gb", "megatron-lm@22.05", tp=4, pp=16), seq_len=2048)
    found = search_plan(asked)
    assert found.plans[0].config.recompute == SELECTIVE
    pinned = {how: search_plan(replace(asked, pins={**asked.pins, "recompute": how})) for how in (FULL, SELECTIVE)}
    assert found.fastest_s <= pinned[SELECTIVE].fastest_s * (1 + asked.allowed_gap)
    assert found.fastest_s < pinned[FULL].fastest_s
    assert found.certificate.gap <= asked.allowed_gap
    assert f"{_WORDS}{SELECTIVE} everywhere" in "; ".join(_said(found))


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
    assert with_layers_alike(_DEEPSEEK, plain, never, until_s=-math.inf) == plain


def test_nothing_is_tried_where_nothing_is_gained() -> None:
    roomy = search_plan(_request("llama-3.1-8b", "1x8xh100-sxm5-80gb", "megatron-bridge@26.08"))
    assert kinds_in(roomy.plans[0].config.recompute) <= {NONE} and not _said(roomy)
    pinned = _request("llama-3.1-8b", "1x8xa100-sxm4-40gb", "megatron-lm@22.05", recompute=FULL)
    assert not _said(search_plan(pinned))
    cannot = _request("llama-3.1-8b", "1x8xa100-sxm4-40gb", "megatron-lm@22.02")
    assert not _said(search_plan(cannot))
