"""YAML of Megatron Bridge, which overrides a recipe, and of NeMo 1, whose names are turned into those of Bridge.

NeMo 1 (nemo_launcher, examples/nlp/language_modeling) has a section `trainer`, and everything of Megatron in `model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.exporters.python_values import BY_FUNCTION, UNKNOWN
from autoplan.exporters.syntax import Yaml

LAST_NEMO_1 = "24.11"  # the last month with its recipes; NeMo 2 (25.01) has Python
_RENAMED = {
    "model.micro_batch_size": "train.micro_batch_size",
    "model.global_batch_size": "train.global_batch_size",
    "model.encoder_seq_length": "model.seq_length",
    **{f"model.activations_checkpoint_{n}": f"model.recompute_{n}" for n in ("granularity", "method", "num_layers")},
    "model.ub_tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "model.overlap_p2p_comm": "comm_overlap.overlap_p2p_comm",
    "model.optim.overlap_grad_sync": "comm_overlap.overlap_grad_reduce",
    "model.optim.overlap_param_sync": "comm_overlap.overlap_param_gather",
    "model.fp8_params": "mixed_precision.fp8_param_gather",
}
_SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")  # optimizers that shard their state


@dataclass(frozen=True)
class NemoYaml(Yaml):
    """YAML, read with the names of Megatron Bridge."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; what refers to other values (`${...}`) has a path that begins with `?`."""
        given = super().read(text, where)
        sure = {path: value for path, value in given.items() if "${" not in str(value)}
        unsure = {f"{UNKNOWN}{_RENAMED.get(p, p)}": value for p, value in given.items() if p not in sure}
        if is_nemo_1(sure):
            return {**_of_nemo_1(sure), **unsure}
        return {**sure, **unsure, f"{UNKNOWN}the recipe that it overrides": BY_FUNCTION}


def is_nemo_1(values: Mapping[str, Any]) -> bool:
    """Return True for values by path of NeMo 1."""
    return any(path.startswith("trainer.") for path in values)


def _of_nemo_1(given: Mapping[str, Any]) -> dict[str, Any]:
    out = {_RENAMED.get(path, path): value for path, value in given.items() if path != "model.fp8"}
    preset = "bf16" if "bf16" in str(given.get("trainer.precision")) else "fp16"
    preset = "bf16_with_fp8_delayed_scaling" if given.get("model.fp8") else preset
    out["mixed_precision"] = f"{preset}_mixed"
    out["mixed_precision.grad_reduce_in_fp32"] = given.get("model.optim.grad_sync_dtype") != "bf16"
    out.setdefault("mixed_precision.fp8_param_gather", False)
    if given.get("model.optim.name") in _SHARDED:
        out["ddp.use_distributed_optimizer"] = True
    return out
