"""autoplan: automatic parallelism for PyTorch.

The public names below are loaded on first use: a what-if starts without torch, and a rank that imports
`autoplan.runtime` does not load the planner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from autoplan.versions import warn_if_not_tried

if TYPE_CHECKING:
    from autoplan.api import parallelize
    from autoplan.catalog import load_model
    from autoplan.config.parallel import ParallelConfig
    from autoplan.cost_models.hardware.cluster import Cluster
    from autoplan.cost_models.profile import Profile
    from autoplan.plan import Plan
    from autoplan.runtime.compression import PowerSGD
    from autoplan.runtime.model import ParallelModel
    from autoplan.search.planner import PlanRequest, estimate_config, search_plan
    from autoplan.sweeps.capacity import capacity
    from autoplan.sweeps.whatif import whatif

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "ParallelConfig",
    "ParallelModel",
    "Plan",
    "PlanRequest",
    "PowerSGD",
    "Profile",
    "__version__",
    "capacity",
    "estimate_config",
    "load_model",
    "parallelize",
    "search_plan",
    "whatif",
]

_HOMES = {
    "Cluster": "autoplan.cost_models.hardware.cluster",
    "ParallelConfig": "autoplan.config.parallel",
    "ParallelModel": "autoplan.runtime.model",
    "Plan": "autoplan.plan",
    "PlanRequest": "autoplan.search.planner",
    "PowerSGD": "autoplan.runtime.compression",
    "Profile": "autoplan.cost_models.profile",
    "capacity": "autoplan.sweeps.capacity",
    "estimate_config": "autoplan.search.planner",
    "load_model": "autoplan.catalog",
    "parallelize": "autoplan.api",
    "search_plan": "autoplan.search.planner",
    "whatif": "autoplan.sweeps.whatif",
}


warn_if_not_tried()


# `object` and not `Any`: with Any a type checker would accept every misspelt name.
def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
