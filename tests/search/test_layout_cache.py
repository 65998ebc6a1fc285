"""What candidates share is what each would have made for itself."""

from __future__ import annotations

import pytest

from autoplan import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest


@pytest.mark.parametrize("model", ["llama-3.2-1b", "mixtral-8x7b"])
def test_workloads_of_other_context_methods_share_blocks_and_are_the_same(model: str) -> None:
    r = PlanRequest(catalog.load_model(model), Cluster.parse("1x8xh100-sxm5-80gb"), 32_768, 64)
    points, (tp, size, cp) = LayoutCache(r), (2, 1, 2)
    assert len(points.methods_of(tp, size, cp)) > 1
    found = {key: point.workload for key, point in points._for_device.items()}
    assert len({methods for *_, methods in found}) > 1
    for key, work in found.items():
        alone = LayoutCache(r).get(tp, size, cp, methods=key[-1])
        assert alone is not None and alone.workload == work
    first, *others = found.values()
    same = [any(work.blocks[name] is block for work in others) for name, block in first.blocks.items()]
    assert any(same) and not all(same)
