"""Megatron Bridge: overrides of a recipe in Python, with its environment variables. NeMo 2.0 is read, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.config.precision import read_precision
from autoplan.exporters import nemo_recipes
from autoplan.exporters.launching import srun
from autoplan.exporters.megatron import (
    CANNOT,
    FP8,
    MEGATRON_RULES,
    accumulation,
    allocator,
    fields_of,
    keeps_remainders,
    loss_fields,
    overlap_field,
    sequences_need_tp,
)
from autoplan.exporters.megatron_stages import write_recompute
from autoplan.exporters.nemo import LAST_NEMO_1, NemoYaml, is_nemo_1
from autoplan.exporters.record import Document, Field, Target, TargetRule, Values, precision_word
from autoplan.exporters.scripts import Name, Python
from autoplan.exporters.setup import Setup

_PRESETS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}
_FP32 = "MixedPrecisionConfig(fp32=True)"
_AWARE = "use_precision_aware_optimizer"


# `_perf_precision` of src/megatron/bridge/perf_recipes/_common.py, which also sets grad_reduce_in_fp32 to False
_OF_RECIPES = {
    f"_perf_precision('{word}')": base
    for word, base in (("bf16", "bf16"), ("fp8_cs", "fp8"), ("fp8_ds", "fp8"), ("fp8_mx", "mxfp8"), ("nvfp4", "fp4"))
}


def _write_recipe(setup: Setup) -> Values:
    parts = read_precision(setup.precision)
    base, narrow = parts.base, parts.gradients_16
    if base not in _PRESETS:
        return {"mixed_precision": Name(_FP32)}
    out: dict[str, Any] = {
        "mixed_precision": Name(f"{_PRESETS[base]}()"),
        "mixed_precision.grad_reduce_in_fp32": not narrow,
    }
    if base in FP8:
        out["mixed_precision.fp8_param_gather"] = setup.options.narrow_gather and setup.config.zero_stage > 0
    if parts.moments_16 or parts.remainders_16:
        out[f"optimizer.{_AWARE}"] = True
        if not parts.remainders_16:
            out["optimizer.store_param_remainders"] = False
    if parts.moments_16:
        out |= {f"optimizer.{name}_dtype": Name("torch.bfloat16") for name in ("exp_avg", "exp_avg_sq")}
    return out


def _read_recipe(document: Document, found: Values) -> Values:
    name = document.get("mixed_precision")
    if name is None:
        return {}
    if name == "MixedPrecisionConfig":
        return {"precision": "fp32" if document.get("mixed_precision.fp32") else "bf16"}
    known = {preset: base for base, preset in _PRESETS.items()} | {
        "bf16_with_fp8_delayed_scaling_mixed": "fp8",
        "bf16_with_fp8_subchannel_scaling_mixed": "fp8",
        **_OF_RECIPES,
    }
    base = document.word("mixed_precision", known)
    wide = document.get("mixed_precision.grad_reduce_in_fp32")
    wide = document.get("ddp.grad_reduce_in_fp32") if wide is None else wide
    wide = base != "fp16" and name not in _OF_RECIPES if wide is None else wide
    gather = document.get("mixed_precision.fp8_param_gather")
    kept = [str(document.get(f"optimizer.{name}_dtype")) for name in ("exp_avg", "exp_avg_sq")]
    moments = all("bfloat16" in dtype for dtype in kept)
    aware, stored = (bool(document.get(f"optimizer.{name}")) for name in (_AWARE, "store_param_remainders"))
    split = aware and stored and not document.get("optimizer.optimizer_cpu_offload")
    split = split and keeps_remainders(base, document.year)
    return {
        "precision": precision_word(base, not wide, moments, split),
        "narrow_gather": base in FP8 if gather is None else bool(gather),
    }


_SECTIONS = {
    "micro_batch_size": "train",
    "global_batch_size": "train",
    **dict.fromkeys(
        ("use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
        "ddp",
    ),
    "num_distributed_optimizer_instances": "ddp",
    **dict.fromkeys(
        ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_grad_reduce", "overlap_param_gather"),
        "comm_overlap",
    ),
    "optimizer_cpu_offload": "optimizer",
    "optimizer_offload_fraction": "optimizer",
    _AWARE: "optimizer",
    "ckpt_format": "checkpoint",
}


def _place(name: str) -> str:
    """Return the path of a setting in Bridge's ConfigContainer."""
    if name.startswith("env."):
        return f"env_vars.{name.removeprefix('env.')}"
    return f"{_SECTIONS.get(name, 'model')}.{name}"


def _backend(name: str) -> Name:
    return Name(f"AttnBackend.{name}")


def _bridge_head(setup: Setup, values: Values) -> tuple[list[str], str]:
    preset = str(values.get("mixed_precision", "")).partition("(")[0]
    lines = ["import torch", ""] if any("torch." in repr(v) for v in values.values()) else []
    lines += ["from megatron.bridge.training.comm_overlap import CommOverlapConfig"]
    lines += [f"from megatron.bridge.training.mixed_precision import {preset}"] if preset else []
    if "model.attention_backend" in values:
        lines.append("from megatron.core.transformer.enums import AttnBackend")
    doc = [
        '    """Change the ConfigContainer of a recipe of this model to the plan.',
        "",
        "    Yours, in train.py: pretrain(apply_plan(recipe()), forward_step), of megatron.bridge.training.pretrain.",
        '    """',
    ]
    return [*lines, "", "", "def apply_plan(cfg):", *doc], "cfg"


def _bridge_overlap() -> Field:
    """The overlap of Bridge's CommOverlapConfig: always written, since the recipe may have one of its own."""
    inner = overlap_field(_place)
    off, on = "model.no_overlap_p2p_communication", "comm_overlap.overlap_p2p_comm"

    def write(setup: Setup) -> Values:
        out = dict(inner.write(setup))
        given = {f"comm_overlap.{n}": False for n in ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather")}
        p2p = not out.pop(off, False)
        return {**given, **out, **({on: p2p} if setup.config.virtual_stages > 1 else {})}

    def read(document: Document, found: Values) -> Values:
        out = dict(inner.read(document, found))
        if document.get(on) is False:
            out["overlap"] = sorted(set(out["overlap"]) - {"pp"})
        said = {"overlap_zero": "overlap_grad_reduce", "overlap_gather": "overlap_param_gather"}
        for name, setting in said.items():  # a recipe that says nothing has those of CommOverlapConfig
            if document.get(f"comm_overlap.{setting}") is None:
                value = document.get(f"ddp.{setting}")
                out.pop(name) if value is None else out.update({name: bool(value)})
        return out

    return Field(inner.names, write, read)


def _bridge_fields() -> tuple[Field, ...]:
    precision = (Field(("precision", "narrow_gather"), _write_recipe, _read_recipe), *loss_fields(_place))
    fields = fields_of(_place, "virtual_pipeline_model_parallel_size", "ckpt_format", precision, _backend)
    allocated = allocator(_place, always=True)  # performance recipes grow segments
    added = accumulation("model.gradient_accumulation_fusion", when=True)
    length = Field((), lambda setup: {"dataset.seq_length": setup.seq_len}, lambda d, found: {})
    offload = Field((), _write_offload, lambda d, found: {})
    return tuple(_bridge_overlap() if "overlap" in f.names else f for f in (*fields, allocated, added, length, offload))


def _write_offload(setup: Setup) -> Values:
    """Turn the offload of first layers on, which their number does in Megatron-LM alone."""
    written = write_recompute(_place)(setup)
    held = {"model.cpu_offloading": True, "model.cpu_offloading_weights": False}
    return held if "model.cpu_offloading_num_layers" in written else {}


_BASE: dict[str, Any] = {
    **{f"model.{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "context")},
    **dict.fromkeys(("model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_layout"), None),
    **dict.fromkeys((f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")), None),
    **dict.fromkeys((f"model.account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")), False),
    **dict.fromkeys((f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")), None),
    **{"model.cpu_offloading": False, "model.fine_grained_activation_offloading": False},
    **{"model.mtp_num_layers": None, "model.sequence_parallel": False, "model.cross_entropy_loss_fusion": False},
    **{"model.cuda_graph_impl": "none", "model.cuda_graph_modules": [], "model.cuda_graph_scope": None},
    **{"ddp.use_distributed_optimizer": False, "ddp.use_megatron_fsdp": False},
    **{"ddp.num_distributed_optimizer_instances": 1, "optimizer.optimizer_cpu_offload": False},
}

# Functions like `set_deepseek_v3_pipeline_model_parallel_layout(cfg.model, "Et|tt|...")`
_CALLS = {"comm_overlap": "CommOverlapConfig", "env_vars": "dict.update"}
_SETTERS = {f"_{name}": name for name in ("pipeline_model_parallel_layout", "cuda_graph_modules")}


@dataclass(frozen=True)
class _BridgePython(Python):
    """Python of Megatron Bridge; recipes of NeMo 2.0, which came before it, are read with its names."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`."""
        found = nemo_recipes.read_recipe(text, where)
        return super().read(text, where) if found is None else found


def _version_in(values: Values) -> str | None:
    return nemo_recipes.month() if nemo_recipes.is_recipe(values) else LAST_NEMO_1 if is_nemo_1(values) else None


MEGATRON_BRIDGE = Target(
    name="megatron-bridge",
    about="a Python function that changes the ConfigContainer of a recipe, with its environment variables",
    stack="megatron-bridge",
    files=((0.0, _BridgePython(_bridge_head, _CALLS, _SETTERS)),),
    fields=_bridge_fields(),
    marks=("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "mixed_precision"),
    launch=lambda setup, file, year: srun(setup, ["train.py"]),
    cannot=CANNOT,
    also=(NemoYaml(),),
    version_in=_version_in,
    rules=(
        *(*MEGATRON_RULES, TargetRule(sequences_need_tp("model.sequence_parallel", "nearest: without it"))),
        *nemo_recipes.RULES,
    ),
    base=_BASE,
)
