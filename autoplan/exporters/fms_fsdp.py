"""fms-fsdp of IBM: the flags of its main_training_llama.py, read as the strategy of FSDP that they make.

Names and defaults are those of fms_fsdp/config/training.py of August 2026. A step is one micro-batch per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.record import Document, Values
from autoplan.exporters.scripts import FlagsOf

FMS, _MICRO, _LEN, _SHARE, _COMPILES = (
    f"own.{name}" for name in ("fms_fsdp", "batch_size", "seq_length", "checkpointed_share", "compiles")
)
_MARKS = ("fsdp_activation_checkpointing", "selective_checkpointing", "low_cpu_fsdp")
_STRATEGIES = {"fsdp": "FULL_SHARD", "hsdp": "HYBRID_SHARD", "ddp": "NO_SHARD"}
_TAKEN: Mapping[str, Any] = {  # fields that are read, with their defaults
    **{"sharding_strategy": "hsdp", "batch_size": 2, "seq_length": 4096, "mixed_precision": True},
    **{"fsdp_activation_checkpointing": False, "selective_checkpointing": 1, "use_torch_compile": True},
}
_IDLE = (  # fields that change neither time nor memory of a step
    *("model_variant", "ckpt_load_path", "ckpt_save_path", "use_dummy_dataset", "data_path", "file_type", "col_name"),
    *("tokenizer_path", "datasets", "weights", "vocab_size", "bos_token", "eos_token", "bol_token", "eol_token"),
    *("strip_tokens", "logical_shards", "num_workers", "low_cpu_fsdp", "num_steps", "training_stage", "seed"),
    *("learning_rate", "grad_clip_thresh", "resuming_dataset", "use_profiler", "profiler_rank0_only"),
    *("report_interval", "checkpoint_interval", "tracker", "tracker_dir", "tracker_project_name", "tracker_run_id"),
)


@dataclass(frozen=True)
class FmsFlags:
    """A shell script that starts main_training_llama.py, by the paths of Lightning's FSDPStrategy and below `own.`."""

    suffix: str = ".sh"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; none for a script of something else."""
        said = FlagsOf("lightning", _MARKS).read(text, where)
        if not any(mark in said or f"{UNKNOWN}{mark}" in said for mark in _MARKS):
            return {}
        unknown = next((name for name in _TAKEN if f"{UNKNOWN}{name}" in said), None)
        if unknown is not None:
            raise PinError(f"{where} does not decide {unknown}={said[f'{UNKNOWN}{unknown}']}; nearest: its value")
        given = {name: said.get(name, usual) for name, usual in _TAKEN.items()}
        # any other word is FULL_SHARD (fms_fsdp/utils/train_utils.py, get_policies)
        out: dict[str, Any] = {
            **{FMS: True, _MICRO: given["batch_size"], _LEN: given["seq_length"]},
            **{_COMPILES: _is_true(given["use_torch_compile"]), "strategy": "FSDPStrategy"},
            "strategy.sharding_strategy": _STRATEGIES.get(given["sharding_strategy"], "FULL_SHARD"),
            "precision": "bf16-mixed" if _is_true(given["mixed_precision"]) else "32-true",
        }
        checkpoints = _is_true(given["fsdp_activation_checkpointing"])
        out[_SHARE] = str(given["selective_checkpointing"]) if checkpoints else "0"
        return out | {path: value for path, value in said.items() if path not in _TAKEN and path not in _IDLE}


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1")


def is_of_fms(document: Document) -> bool:
    """Return True if a script is one of fms-fsdp."""
    return document.has(FMS)


def read_fms(document: Document, found: Values) -> Values:
    """Return what the flags make of a run; nothing for other files. PinError for a share that is none."""
    if not is_of_fms(document):
        return {}
    micro = document.count(_MICRO)
    hybrid = document.get("strategy.sharding_strategy") == "HYBRID_SHARD"
    nodes = document.task.num_nodes or document.count("launch.nnodes", 1)
    out: dict[str, Any] = {
        **{"micro_batch_size": micro, "num_micro_batches": 1, "seq_len": document.count(_LEN)},
        **{"mode": "compiled" if document.get(_COMPILES) else "eager", "recompute": _checkpointed(document)},
        "zero_replicas": max(1, nodes) if hybrid else 1,
    }
    return out | ({"global_batch_size": micro * found["dp"]} if "dp" in found else {})


def _checkpointed(document: Document) -> Any:
    """Return the recompute of a share of the layers, evenly spaced (policies/ac_handler.py)."""
    text = str(document.get(_SHARE))
    try:
        share = Fraction(text.replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        raise PinError(
            f"selective_checkpointing={text} is no share of the layers; nearest: 1/2", ("recompute",)
        ) from None
    layers = document.task.layers
    if share <= 0 or share >= 1 or not layers:
        return NONE if share <= 0 else FULL
    again, cut = {}, Fraction(1, 2)
    for k, layer in enumerate(layers, 1):
        if k * share >= cut:
            cut += 1
            again[layer] = FULL
    return again or NONE
