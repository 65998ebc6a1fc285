"""A search that may leave a share of the step unproved: it ends early, and says how much it proved."""

from __future__ import annotations

from dataclasses import replace

import enumeration
import pytest

from autoplan import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.report.screen import verdict
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.planner import PlanRequest, search_plan

AMPLE = 1 << 40
PINS = {"tp": 1, "num_micro_batches": 4}


def found(gap: float, memory: int, host: tuple[int, float] | None, top: int = 1) -> SearchResult:
    return search_plan(enumeration.request(4, memory, gap=gap, host=host, top=top, pins=PINS))


@pytest.fixture(scope="module")
def tight() -> int:
    """Memory with which some recompute is forced, or offload."""
    peak = found(0.0, AMPLE, None).plans[0].estimate.peak_memory_bytes.mid
    return int(0.55 * peak)


@pytest.mark.parametrize("host", [None, (AMPLE, 1e9)])
@pytest.mark.parametrize("ample", [True, False])
def test_the_best_plan_is_no_further_than_the_certificate_says(
    ample: bool, host: tuple[int, float] | None, tight: int
) -> None:
    memory = AMPLE if ample else tight
    best = found(0.0, memory, host).plans[0].estimate.step_time_s.mid
    open_before = 0
    for gap in (0.02, 0.2, 0.6):
        result = found(gap, memory, host)
        c, step = result.certificate, result.plans[0].estimate.step_time_s.mid
        assert c.gap <= gap and step * (1 - c.gap) <= best * (1 + 1e-9) and best <= step * (1 + 1e-9)
        assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved + c.open
        assert (c.status is Status.COMPLETE) == (c.gap == 0.0) or c.status is Status.NEAR
        assert not c.stopped_far
        open_before = max(open_before, c.open)
    assert open_before, "nothing was left open: this space shows nothing"


def test_less_is_priced_for_a_larger_gap(tight: int) -> None:
    far, near = (found(gap, tight, None).certificate for gap in (0.6, 0.0))
    assert far.solved + far.too_big < near.solved + near.too_big and far.open > near.open == 0


def test_of_several_plans_the_gap_is_that_of_the_first(tight: int) -> None:
    exact, result = (found(gap, tight, None, top=3) for gap in (0.0, 0.1))
    steps = [p.estimate.step_time_s.mid for p in result.plans]
    assert len(steps) == 3 and result.certificate.gap <= 0.1
    wanted = [p.estimate.step_time_s.mid for p in exact.plans]
    assert all(mine * (1 - 0.1) <= best * (1 + 1e-9) for mine, best in zip(steps, wanted, strict=True))


def test_what_is_proved_within_a_gap_is_not_called_proved(tight: int) -> None:
    result = found(0.6, tight, None)
    said = verdict(result.certificate, result)
    assert result.certificate.status is Status.NEAR and said.startswith("proved to be within ")
    assert verdict(found(0.0, AMPLE, None).certificate, result).startswith("proved the best of ")


def test_what_is_asked_by_default() -> None:
    """1 % of a dense model, 5 % of one with experts."""
    node = Cluster.parse("1x8xh100-sxm5-80gb")
    dense, experts = (PlanRequest(catalog.load_model(name), node, 1024, 8) for name in ("gpt2", "mixtral-8x7b"))
    assert (dense.allowed_gap, experts.allowed_gap) == (0.01, 0.05)
    with pytest.raises(PinError, match=r"gap=1.0: must be at least 0 .* and below 1"):
        search_plan(enumeration.request(2, gap=1.0))


def test_no_single_change_of_a_plan_is_faster_unless_a_gap_is_given() -> None:
    """Within its usual gap a search may end at another ZeRO stage than the fastest: it then looks at single changes."""
    asked = PlanRequest(catalog.load_model("llama-3.2-3b"), Cluster.parse("4x8xh100-sxm5-80gb"), 2048, 64)
    given, usual = (search_plan(replace(asked, gap=gap)).plans[0] for gap in (0.01, None))
    pins = {name: getattr(usual.config, name) for name in ("tp", "pp", "cp", "micro_batch_size")}
    others = (search_plan(replace(asked, pins=pins | {"zero_stage": z}, gap=0.0)).plans[0] for z in (0, 1, 2, 3))
    best_s = min(other.estimate.step_time_s.mid for other in others)
    assert usual.estimate.step_time_s.mid <= best_s * (1 + 1e-9) < given.estimate.step_time_s.mid
