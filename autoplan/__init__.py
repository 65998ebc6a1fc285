"""autoplan: automatic parallelism for PyTorch.

The public names below are loaded on first use: a what-if starts without torch, and a rank that imports
`autoplan.runtime` does not load the planner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from autoplan.versions import __version__ as __version__
from autoplan.versions import warn_if_not_tried

if TYPE_CHECKING:
    from autoplan.api import parallelize as parallelize
    from autoplan.capture.frontend.experts import experts_forward as experts_forward
    from autoplan.capture.rules import rule as rule
    from autoplan.catalog import load_model as load_model
    from autoplan.config.parallel import ParallelConfig as ParallelConfig
    from autoplan.cost_models.hardware.cluster import Cluster as Cluster
    from autoplan.cost_models.profile import Profile as Profile
    from autoplan.errors import AutoplanError as AutoplanError
    from autoplan.exporters.door import read_config as read_config
    from autoplan.planning import compile as compile
    from autoplan.planning import plan as plan
    from autoplan.plans.record import Plan as Plan
    from autoplan.rehearsal.rehearse import rehearse as rehearse
    from autoplan.report.exports import export_plan as export_plan
    from autoplan.runtime.checkpoint.door import CheckpointError as CheckpointError
    from autoplan.runtime.compression import PowerSGD as PowerSGD
    from autoplan.runtime.failure import RankFailure as RankFailure
    from autoplan.runtime.model import ParallelModel as ParallelModel
    from autoplan.runtime.step_log import StepLog as StepLog
    from autoplan.search.planner import PlanRequest as PlanRequest
    from autoplan.search.planner import estimate_config as estimate_config
    from autoplan.search.planner import search_plan as search_plan
    from autoplan.sweeps.capacity import capacity as capacity
    from autoplan.sweeps.explain import explain as explain
    from autoplan.sweeps.fit import fit as fit
    from autoplan.sweeps.pools import pools as pools
    from autoplan.sweeps.size import size as size
    from autoplan.sweeps.whatif import whatif as whatif

_HOMES = {
    "AutoplanError": "autoplan.errors",
    "CheckpointError": "autoplan.runtime.checkpoint.door",
    "Cluster": "autoplan.cost_models.hardware.cluster",
    "ParallelConfig": "autoplan.config.parallel",
    "ParallelModel": "autoplan.runtime.model",
    "Plan": "autoplan.plans.record",
    "PlanRequest": "autoplan.search.planner",
    "PowerSGD": "autoplan.runtime.compression",
    "Profile": "autoplan.cost_models.profile",
    "RankFailure": "autoplan.runtime.failure",
    "StepLog": "autoplan.runtime.step_log",
    "capacity": "autoplan.sweeps.capacity",
    "compile": "autoplan.planning",
    "estimate_config": "autoplan.search.planner",
    "experts_forward": "autoplan.capture.frontend.experts",
    "explain": "autoplan.sweeps.explain",
    "export_plan": "autoplan.report.exports",
    "fit": "autoplan.sweeps.fit",
    "load_model": "autoplan.catalog",
    "parallelize": "autoplan.api",
    "plan": "autoplan.planning",
    "read_config": "autoplan.exporters.door",
    "pools": "autoplan.sweeps.pools",
    "rehearse": "autoplan.rehearsal.rehearse",
    "rule": "autoplan.capture.rules",
    "search_plan": "autoplan.search.planner",
    "size": "autoplan.sweeps.size",
    "whatif": "autoplan.sweeps.whatif",
}
__all__ = sorted(("__version__", *_HOMES))


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
