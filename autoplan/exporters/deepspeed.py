"""DeepSpeed: the JSON file of `deepspeed.initialize` and of transformers' Trainer."""

from __future__ import annotations

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
    for name, path in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        held = name in c.offload or (name == "optimizer" and "parameters" in c.offload)
        if held and (name == "optimizer" or c.zero_stage == 3):
            out |= {f"{_Z}{path}.device": "cpu", f"{_Z}{path}.pin_memory": True}
    return out


def read_zero(document: Document, found: Values) -> Values:
    """Return the ZeRO stage and its replicas. PinError for a stage that does not exist."""
    stage = document.count(_Z + "stage", 0)
    if stage not in (0, 1, 2, 3):
        raise PinError(
            f"zero_optimization.stage={stage} does not exist; nearest: {min(3, max(0, stage))}", ("zero_stage",)
        )
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
    held = [document.get(f"{_Z}{path}.device") in ("cpu", "nvme") for path in ("offload_param", "offload_optimizer")]
    return {"offload": ("parameters",) if held[0] else ("optimizer",) if held[1] else ()}


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
    narrow = GRADIENTS_16 in setup.precision
    return {f"{base}.enabled": True, "data_types.grad_accum_dtype": base if narrow else "fp32"}


def read_precision_of(document: Document, found: Values) -> Values:
    """Return the precision, with gradients as ZeRO keeps them."""
    base = next((name for name in ("bf16", "fp16") if document.get(f"{name}.enabled") in (True, "auto")), "fp32")
    kept = document.get("data_types.grad_accum_dtype")
    if kept is None:
        return {"precision": precision_word(base, found["zero_stage"] > 0 or base == "fp16")}
    return {"precision": precision_word(base, kept != "fp32")}


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
        Field(("zero_stage", "zero_replicas"), write_zero, read_zero),
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
    },
    rules=(TargetRule(_triple),),
)
