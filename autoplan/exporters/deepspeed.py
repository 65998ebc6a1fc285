"""DeepSpeed: the JSON file of `deepspeed.initialize` and of transformers' Trainer."""

from __future__ import annotations

import re
from typing import Any

from autoplan.config.precision import GRADIENTS_16
from autoplan.errors import PinError
from autoplan.exporters.launching import srun
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    constant,
    data_parallel,
    derived,
    micro_batches,
    near_parts,
    precision_word,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Json
from autoplan.stacks.records import year_of

_Z = "zero_optimization."


def write_zero(setup: Setup) -> Values:
    """Return the section zero_optimization of a setup."""
    c = setup.config
    out: dict[str, Any] = {_Z + "stage": c.zero_stage}
    if c.zero_replicas > 1 and c.zero_stage == 3:
        out[_Z + "mics_shard_size"] = c.num_shards
    if c.zero_stage in (1, 2):
        out[_Z + "overlap_comm"] = setup.options.overlap_zero
    return {**out, **write_offload(setup)}


def write_offload(setup: Setup) -> Values:
    """Return the fields of what is kept on the host."""
    c, out = setup.config, dict[str, Any]()
    for name, path in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        held = name in c.offload or (name == "optimizer" and "parameters" in c.offload)
        if held and (name == "optimizer" or c.zero_stage == 3):
            out |= {f"{_Z}{path}.device": "cpu", f"{_Z}{path}.pin_memory": True}
    return out


def stated_stage(document: Document) -> int:
    """Return the ZeRO stage that a file states. PinError for one that does not exist."""
    stage = document.count(_Z + "stage", 0)
    if stage not in (0, 1, 2, 3):
        raise PinError(
            f"zero_optimization.stage={stage} does not exist; nearest: {min(3, max(0, stage))}", ("zero_stage",)
        )
    return stage


def read_zero(document: Document, found: Values) -> Values:
    """Return the ZeRO stage and its replicas. PinError for a stage that does not exist."""
    stage = stated_stage(document)
    shards, out = document.count(_Z + "mics_shard_size", -1), {"zero_stage": stage, "zero_replicas": 1}
    if shards > 0 and "dp" in found:
        ranks = found["dp"] * found["cp"]
        if ranks % shards:
            raise PinError(
                f"mics_shard_size={shards} does not divide the {ranks} data-parallel ranks; nearest: "
                f"{near_parts(ranks, shards)}",
                ("zero_replicas",),
            )
        out["zero_replicas"] = ranks // shards
    return out


def read_zero_offload(document: Document, found: Values) -> Values:
    """Return the kinds of state that are kept on the host."""
    held = [
        document.get(f"{_Z}{path}.device") in ("cpu", "nvme") or document.get(_Z + old) is True
        for path, old in (("offload_param", "cpu_offload_param"), ("offload_optimizer", "cpu_offload"))
    ]
    return {"offload": ("parameters",) if held[0] else ("optimizer",) if held[1] else ()}


_ON_DISK = re.compile(r"offload_(optimizer|param)[._]device$")


def on_disk(document: Document, found: Values) -> str | None:
    """Return the warning for state on disks, which are priced as the host's memory."""
    there = [path for path, value in document.values.items() if value == "nvme" and _ON_DISK.search(path)]
    if not there:
        return None
    return f"{there[0]}=nvme is priced as memory of the host: reading and writing disks takes longer, and is not priced"


_BF16_OPTIMIZER, _WITHOUT_ZERO, _ONE_DTYPE = (year_of(version) for version in ("23.01", "25.09", "26.02"))


def bf16_optimizer(year: float, stage: int, wide: bool, piped: bool = False) -> Values:
    """Return what BF16_Optimizer does to the stage that a file states; nothing where DeepSpeed takes another one.

    It shards the state over dp, and all-reduces whole gradients (`_do_optimizer_sanity_check` of runtime/engine.py).

    Args:
        year: its version. Since September 2025 ZeRO 0 is without it, outside of pipelines.
        wide: True if gradients are summed in 32 bits.
        piped: True in a PipelineModule.
    """
    at_0 = piped or (wide and year < _WITHOUT_ZERO)
    if not (at_0 if stage == 0 else stage == 1 and wide and year >= _BF16_OPTIMIZER):
        return {}
    return {"zero_stage": 1, "whole_sums": wide, "all_reduced": not wide}


def _is_wide(document: Document, stage: int) -> bool:
    """Return True if the gradients of bfloat16 parameters are kept in 32 bits."""
    kept = document.get("data_types.grad_accum_dtype")
    return kept == "fp32" if kept is not None else stage == 0 and document.year < _WITHOUT_ZERO


def _read_zero(document: Document, found: Values) -> Values:
    out = {**read_zero(document, found), "whole_sums": False, "all_reduced": False}
    stage = out["zero_stage"]
    if _base(document) != "bf16" or read_zero_offload(document, found)["offload"]:
        return out
    return {**out, **bf16_optimizer(document.year, stage, _is_wide(document, stage))}


def _one_dtype(document: Document, found: Values) -> str | None:
    without = document.count(_Z + "stage", 0) == 0
    if not without or document.year < _ONE_DTYPE or _base(document) != "bf16" or not _is_wide(document, 0):
        return None
    return "data_types.grad_accum_dtype=fp32 of bf16 needs ZeRO since January 2026; nearest: zero_optimization.stage=1"


def read_overlap(document: Document, found: Values) -> Values:
    """Return the overlap of ZeRO's traffic, if the file says it."""
    # overlap_comm reduces gradients during the backward; the gather after the step is not overlapped
    given = document.get(_Z + "overlap_comm")
    return {"overlap_zero": bool(given), "overlap_gather": False} if given is not None else {}


def _write_batch(setup: Setup) -> Values:
    c = setup.config
    out = {"train_micro_batch_size_per_gpu": c.micro_batch_size, "gradient_accumulation_steps": c.num_micro_batches}
    # DeepSpeed checks it against all devices, those of tensor parallelism included
    return {"train_batch_size": setup.global_batch_size, **out} if c.tp == 1 else out


def read_batch(document: Document, found: Values) -> Values:
    """Return the micro-batch and the batch, as far as the file says them or they follow."""
    micro, steps, batch = (
        document.count(path, 0)
        for path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    dp = found.get("dp", 0)
    if not micro and batch and dp:
        micro = max(1, batch // (dp * max(1, steps)))
    if not micro:
        return {"global_batch_size": batch} if batch else {}
    if not batch and dp and steps:
        batch = micro * steps * dp
    return {"micro_batch_size": micro, **({"global_batch_size": batch} if batch else {})}


def _triple(document: Document, found: Values) -> str | None:
    steps, micro, batch = (
        document.count(path, 0)
        for path in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    dp = found.get("dp", 0)
    if not (steps and micro and batch and dp) or batch == steps * micro * dp:
        return None
    return (
        f"train_batch_size={batch} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp = "
        f"{micro} x {steps} x {dp} = {micro * steps * dp}; nearest: train_batch_size={micro * steps * dp}"
    )


def _context(setup: Setup) -> Values:
    c = setup.config
    return {"sequence_parallel_size": c.cp, "data_parallel_size": c.dp} if c.cp > 1 else {}


def _write_experts(setup: Setup) -> Values:
    c, e = setup.config, "expert_parallel."
    if c.ep == 1:
        return {}
    return {e + "enabled": True, e + "autoep_size": c.ep, e + "expert_tensor_parallel_size": c.expert_tp}


def _read_experts(document: Document, found: Values) -> Values:
    e = "expert_parallel."
    if not document.get(e + "enabled"):
        return {"ep": 1, "etp": found["tp"]}
    return {"ep": document.count(e + "autoep_size"), "etp": document.count(e + "expert_tensor_parallel_size")}


def _write_precision(setup: Setup) -> Values:
    base = base_of(setup.precision)
    if base not in ("bf16", "fp16"):
        return {} if base == "fp32" else {"bf16.enabled": True}
    wide = GRADIENTS_16 not in setup.precision
    if wide and setup.config.zero_stage == 0:  # which it refuses
        return {f"{base}.enabled": True}
    return {f"{base}.enabled": True, "data_types.grad_accum_dtype": "fp32" if wide else base}


def _base(document: Document) -> str:
    return next((name for name in ("bf16", "fp16") if document.get(f"{name}.enabled") in (True, "auto")), "fp32")


def read_precision_of(document: Document, found: Values) -> Values:
    """Return the precision, with gradients as the engine keeps them."""
    base, kept = _base(document), document.get("data_types.grad_accum_dtype")
    narrow = (
        kept != "fp32"
        if kept is not None
        else base == "fp16" or not _is_wide(document, document.count(_Z + "stage", 0))
    )
    return {"precision": precision_word(base, narrow)}


DEEPSPEED = Target(
    name="deepspeed",
    about="the JSON file of DeepSpeed",
    stack="deepspeed",
    files=((0.0, Json()),),
    fields=(
        Field(
            ("tp",),
            lambda s: {"tensor_parallel.autotp_size": s.config.tp} if s.config.tp > 1 else {},
            lambda d, found: {"tp": max(1, d.count("tensor_parallel.autotp_size", 0))},
            since=year_of("25.03"),
        ),
        Field((), lambda s: {}, lambda d, found: {} if "tp" in found else {"tp": 1}),
        Field(("cp",), _context, lambda d, found: {"cp": d.count("sequence_parallel_size")}),
        derived(
            lambda d, found: {"context_method": "ulysses" if found["cp"] > 1 else None},
            "context_method",
        ),
        derived(data_parallel, "dp"),
        Field(("zero_stage", "zero_replicas", "whole_sums", "all_reduced"), write_zero, _read_zero),
        derived(read_zero_offload, "offload"),
        derived(read_overlap, "overlap_zero", "overlap_gather"),
        Field(("micro_batch_size", "global_batch_size"), _write_batch, read_batch),
        derived(micro_batches, "num_micro_batches"),
        Field(("ep", "etp"), _write_experts, _read_experts, since=year_of("26.04")),
        Field(("precision",), _write_precision, read_precision_of),
        constant("gradient_clipping", 1.0),
    ),
    marks=("zero_optimization.stage", "train_micro_batch_size_per_gpu", "train_batch_size"),
    launch=lambda setup, file, year: srun(setup, ["train.py", "--deepspeed_config", file]),
    elsewhere={
        "recompute": "the model or the training script (TrainingArguments.gradient_checkpointing)",
        "seq_len": "the data",
        "mode": "the training script (torch.compile; transformers: TrainingArguments.torch_compile)",
        "attention": "the model (transformers: attn_implementation)",
    },
    cannot={
        "mode": "fused kernels are in the code of the model; torch.compile makes others",
        "pp": "pipelines of DeepSpeed are PipelineModule in the code of the model",
        "schedule": "pipelines of DeepSpeed are PipelineModule in the code of the model",
        "virtual_stages": "pipelines of DeepSpeed are PipelineModule in the code of the model",
        "context_method": "sequence_parallel_size is Ulysses",
        "zero_replicas": "only ZeRO 3 shards over fewer ranks (mics_shard_size)",
        "offload": "parameters are on the host only with ZeRO 3",
        "overlap_gather": "overlap_comm overlaps the gradients alone",
        "tp": "autotp_size exists since March 2025",
        "ep": "expert_parallel exists since 2026; before, experts are MoE layers in the code of the model",
        "etp": "expert_tensor_parallel_size is a setting of AutoEP, with ep",
        "overlap": "a setting of the model's code",
        "whole_sums": "bf16 with gradients in 32 bits and ZeRO 1 is its BF16_Optimizer, which has them",
        "precision": "gradients have the dtype of the model without ZeRO",
    },
    rules=(TargetRule(_triple), TargetRule(_one_dtype), TargetRule(on_disk, warns=True)),
)
