"""What on_gpu needs of torch 2.13 and torch 2.11 lacks, for a GPU machine whose only torch is 2.11.

    PYTHONPATH=experiments/gpu/older_torch:. AUTOPLAN_PIPELINING=FOLDER python -m experiments.on_gpu

Python imports this file by itself at its start. autoplan does not support torch 2.11 (docs/versions.md); with the three
things below all parts of on_gpu run on a CPU as with 2.13. FOLDER is `torch/distributed/pipelining` of 2.13, which
is in Python; without it pipelines fail.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _rank_map(module: Any) -> None:
    """`_local_tensor.rank_map`: a tensor from a function of the rank."""

    def rank_map(make: Callable[[int], Any]) -> Any:
        mode = module.enabled_local_tensor_mode()
        return make(module.dist.get_rank()) if mode is None else mode.rank_map(make)

    module.rank_map = rank_map


def _param_groups(module: Any) -> None:
    """`FSDPState._fsdp_param_groups`: 2.11 has one group of parameters per module."""
    one = lambda state: [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: E731
    module.FSDPState._fsdp_param_groups = property(one)


_ADDED = {
    "torch.distributed._local_tensor": _rank_map,
    "torch.distributed.fsdp._fully_shard._fsdp_state": _param_groups,
}
_PIPELINING = "torch.distributed.pipelining"


class _Finder(MetaPathFinder):
    """Adds to a module what it lacks, once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        folder = os.environ.get("AUTOPLAN_PIPELINING")
        if name == _PIPELINING and folder:
            return importlib.util.spec_from_file_location(
                name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )
        add = _ADDED.pop(name, None)  # so that the search below does not come back here
        spec = importlib.util.find_spec(name) if add is not None else None
        if add is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            add(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
