"""Labels: a plan in one line, with the shares of its recomputed layers, and the evidence behind its price."""

from __future__ import annotations

from autoplan.config.choices import config_label
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.estimate import COMM_TERMS, Estimate
from autoplan.schedules.schedule import num_copies


def plan_label(config: ParallelConfig, estimate: Estimate | None = None) -> str:
    """Return a plan as one line: `pp2 dp8 tp4 zero1 mbs1 x128 recompute 3/32` (3 of 32 layers recomputed).

    Degrees of 1 are omitted.
    """
    held = sum(stage.num_layers for stage in estimate.stages) if estimate is not None else 0
    return config_label(config, held // num_copies(config.schedule))


def evidence_label(estimate: Estimate) -> str:
    """Return the weakest evidence of each part: `compute fitted, communication assumed, memory exact`."""
    comm = [q.tag for name, q in estimate.breakdown.items() if name in COMM_TERMS and q.mid > 0]
    memory = max((q.tag for s in estimate.stages for q in s.memory.values()), default=Tag.EXACT)
    parts = [f"compute {estimate.breakdown['compute'].tag}"] if "compute" in estimate.breakdown else []
    return ", ".join([*parts, f"communication {max(comm)}" if comm else "no communication", f"memory {memory}"])
