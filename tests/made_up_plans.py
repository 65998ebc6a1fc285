"""Plans at made-up prices, which nothing moves, and texts that are compared with files in tests/golden."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.time.estimate import Estimate, StageEstimate
from autoplan.search.planner import Certificate, Planned, PlanRequest

GOLDEN = Path(__file__).resolve().parent / "golden"
REQUEST = PlanRequest(load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb@price=2"), 1024, 64)
CERTIFICATE = Certificate(1362, 0, 0, 1352, 10, 0, 0.0, 0.0, 1.0, (), "complete", {}, {}, {})
STOPPED = Certificate(1362, 0, 0, 0, 1, 1361, 0.25, 0.0, 1.0, (), "stopped by time limit", {}, {}, {})


def planned(config: ParallelConfig, terms: dict[str, float], memory: dict[str, float]) -> Planned:
    """A plan with a made-up price. `memory`: GB by term."""

    def exact(value: float) -> Quantity:
        return Quantity(value, value, value, Tag.ASSUMED)

    step = sum(terms.values())
    stage = StageEstimate(0, 12, 0, exact(0.1), exact(0.2), 1, {n: exact(v * 1e9) for n, v in memory.items()})
    estimate = Estimate(
        exact(step), {n: exact(v) for n, v in terms.items()}, (stage,), 65536, 65536 / step, 16384 / step, 0.04 / step,
        0.03 / step, 80e9,
    )  # fmt: skip
    return Planned(config, estimate, None)  # type: ignore[arg-type]


OWN = planned(
    ParallelConfig(dp=4, zero_stage=2, micro_batch_size=16), {"compute": 0.096, "dp_comm": 0.004}, {"activations": 20.0}
)
SPLIT = planned(
    ParallelConfig(dp=2, tp=2, zero_stage=2, micro_batch_size=32),
    {"compute": 0.090, "dp_comm": 0.002, "tp_comm": 0.03},
    {"activations": 12.0, "gathered parameters": 1.5},
)


def shown(print_it: object, width: int = 110) -> str:
    out = io.StringIO()
    print_it(Console(file=out, width=width, highlight=False, markup=False, emoji=False))  # type: ignore[operator]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(), text
