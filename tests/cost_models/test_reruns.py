"""Full recompute ends with the last tensor that the backward needs, or runs whole forwards: its price."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, Reruns, RunOptions
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.blocks import op_times
from autoplan.cost_models.work import BlockWork, Workload
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.request import PlanRequest
from autoplan.stacks.records import stack

NODE = Cluster.parse("1x8xh100-sxm5-80gb")


def priced(model: str, config: ParallelConfig, mode: Mode = Mode.EAGER, **options: Any) -> Planned:
    request = PlanRequest(load_model(model), NODE, 8192, 16, precision="bf16", mode=mode, options=RunOptions(**options))
    return estimate_config(request, config)


def layer_of(work: Workload) -> BlockWork:
    return next(work.blocks[unit[marked.index(True)]] for unit, marked in zip(work.units, work.is_layer, strict=True))


def rerun(block: BlockWork) -> tuple[int, int, set[str]]:
    """Return how many products of a layer there are, how many a recompute repeats, and the collectives it repeats."""
    assert block.needed is not None
    products = [k for k, op in enumerate(block.ops) if op.op == "linear"]
    return len(products), len(block.needed.ops.intersection(products)), {c.kind for c in block.needed.comms}


FULL = ParallelConfig(dp=4, tp=2, zero_stage=1, num_micro_batches=4, recompute="full")


@pytest.mark.parametrize(
    ("model", "products", "repeated"),
    [
        ("llama-3.2-1b", 7, 6),  # all but the last one
        ("gemma-2-2b", 7, 7),  # a norm after it needs its result
    ],
)
def test_the_last_product_runs_again_where_something_reads_its_result(model: str, products: int, repeated: int) -> None:
    work = priced(model, FULL).point.workload
    layer = layer_of(work)
    assert rerun(layer)[:2] == (products, repeated)
    assert layer.needed is not None
    forward = [c for c in layer.comms if c.phase == "forward" and c.per == "micro_batch"]
    # without the product, nothing reduces it
    assert len(forward) - len(layer.needed.comms) == products - repeated
    assert all(c in forward for c in layer.needed.comms)


def test_the_price_of_what_is_not_repeated() -> None:
    needed, whole = (priced("llama-3.2-1b", FULL, reruns=how) for how in Reruns)
    costs = Costs(NODE, None, Mode.EAGER)
    layer = layer_of(needed.point.workload)
    times = op_times(needed.point.workload, costs)[layer.name]
    assert layer.needed is not None
    last = max(set(k for k, op in enumerate(layer.ops) if op.op == "linear"))
    left_out = [costs.forward_s(op).mid for k, op in enumerate(layer.ops) if k not in layer.needed.ops]
    assert costs.forward_s(layer.ops[last]).mid in left_out
    assert times.forward.mid - times.again.mid == pytest.approx(sum(left_out))
    saved = whole.estimate.breakdown["recompute"].mid - needed.estimate.breakdown["recompute"].mid
    computed = 16 * FULL.num_micro_batches * sum(left_out)
    assert computed < saved < 2.5 * computed  # and the reduce-scatter after it
    assert whole.estimate.step_time_s.mid - needed.estimate.step_time_s.mid == pytest.approx(saved, rel=0.02)


def test_what_is_usual_in_a_mode() -> None:
    for mode, usual in ((Mode.EAGER, Reruns.NEEDED), (Mode.COMPILED, Reruns.WHOLE), (Mode.FUSED, Reruns.WHOLE)):
        found = {how: priced("llama-3.2-1b", FULL, mode, reruns=how).estimate.step_time_s for how in (None, *Reruns)}
        assert found[None] == found[usual] and found[Reruns.NEEDED].mid < found[Reruns.WHOLE].mid, mode


def test_layers_that_are_kept_cost_the_same() -> None:
    kept = FULL.but(recompute="none")
    needed, whole = (priced("llama-3.2-1b", kept, reruns=how).estimate.step_time_s for how in Reruns)
    assert needed == whole


@pytest.mark.parametrize(
    ("name", "year", "mode", "how"),
    [
        ("torchtitan", 2026.6, Mode.COMPILED, Reruns.NEEDED),
        ("maxtext", 2026.6, Mode.COMPILED, Reruns.NEEDED),
        ("deepspeed", 2026.6, Mode.EAGER, Reruns.WHOLE),
        ("megatron-lm", 2026.6, Mode.FUSED, Reruns.WHOLE),
        ("accelerate", 2023.5, Mode.EAGER, Reruns.WHOLE),  # torch 2.1 was released in October 2023
        ("accelerate", 2024.0, Mode.EAGER, Reruns.NEEDED),
    ],
)
def test_what_is_usual_in_a_stack(name: str, year: float, mode: Mode, how: Reruns) -> None:
    assert stack(name).options_at(year, "H100", "BF16").reruns_in(mode) is how
