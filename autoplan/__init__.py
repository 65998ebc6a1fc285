"""autoplan: automatic parallelism for PyTorch.

The public names below are loaded on first use, so that a what-if starts without torch and a rank that imports
``autoplan.runtime`` does not load the planner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoplan.api import parallelize
    from autoplan.capacity import whatif
    from autoplan.cost_models.cluster import Cluster
    from autoplan.plan import Plan
    from autoplan.runtime.model import ParallelModel

__version__ = "0.1.0"

__all__ = ["Cluster", "ParallelModel", "Plan", "__version__", "parallelize", "whatif"]

_HOMES = {
    "Cluster": "autoplan.cost_models.cluster",
    "ParallelModel": "autoplan.runtime.model",
    "Plan": "autoplan.plan",
    "parallelize": "autoplan.api",
    "whatif": "autoplan.capacity",
}


# `object` and not `Any`: with Any a type checker would accept every misspelt name.
def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
