"""Hugging Face accelerate: the YAML file of `accelerate launch`, with FSDP, DeepSpeed or DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.config.context_methods import GATHER
from autoplan.config.parallel import Mode
from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.deepspeed import (
    DEEPSPEED,
    on_disk,
    read_batch,
    read_overlap,
    read_precision_of,
    read_zero,
    read_zero_offload,
)
from autoplan.exporters.launching import per_node
from autoplan.exporters.record import (
    METHODS_BY_ROTATE,
    ROTATE_METHODS,
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    constant,
    derived,
    micro_batches,
    of_replicas,
    section,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Yaml
from autoplan.stacks.records import year_of

FSDP2 = year_of("25.04")  # fsdp_version, release 1.6.0
MESH = year_of("25.08")  # parallelism_config, release 1.10.0
_F, _D, _M = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_"
_NEW: Mapping[str, Any] = {"since": MESH}


DEEPSPEED_FILE = _D + "deepspeed_config_file"


def _named(document: Document) -> Document | None:
    """Return the DeepSpeed file that the YAML names, as it is read; None without one. PinError if it is not here."""
    name = document.get(DEEPSPEED_FILE)
    if name is None or str(document.get("distributed_type")).upper() != "DEEPSPEED":
        return None
    if not any(path.startswith(f"{DEEPSPEED_FILE}.") for path in document.values):
        raise PinError(f"deepspeed_config_file={name!r} is not found; nearest: its path from here", ("zero_stage",))
    return section(document, f"{DEEPSPEED_FILE}.", DEEPSPEED.schema)


def engine(setup: Setup) -> str:
    """Return the engine that runs a setup: MULTI_GPU (DistributedDataParallel), FSDP or DEEPSPEED."""
    c = setup.config
    if c.zero_stage == 1 or c.offload == ("optimizer",) or setup.context_method == "ulysses":
        return "DEEPSPEED"
    if c.zero_stage >= 2 or c.tp * c.cp > 1:
        return "FSDP"
    return "MULTI_GPU" if c.dp > 1 else "NO"


def _on(name: str, setup: Setup) -> bool:
    return engine(setup) == name


def _write_mesh(setup: Setup) -> Values:
    c = setup.config
    if _on("DEEPSPEED", setup):
        if c.cp == 1:
            return {}
        return {_M + "sp_size": c.cp, _M + "sp_backend": "deepspeed", _M + "sp_seq_length": setup.seq_len}
    if not _on("FSDP", setup) or c.tp * c.cp * c.zero_replicas == 1:
        return {}
    out: dict[str, Any] = {_M + "dp_replicate_size": c.zero_replicas, _M + "dp_shard_size": c.dp // c.zero_replicas}
    out |= {_M + "tp_size": c.tp, _M + "cp_size": c.cp}
    method = ROTATE_METHODS.get(setup.context_method or "")
    return out | ({_M + "cp_comm_strategy": method} if method else {})


def read_mesh(document: Document, found: Values) -> Values:
    """Return the degrees of `parallelism_config`, and what they leave to data parallelism."""
    tp, cp, sp = (document.count(_M + f"{name}_size") for name in ("tp", "cp", "sp"))
    devices = document.count("num_processes", 0) or document.task.num_devices
    out: dict[str, Any] = {"tp": tp, "cp": cp * sp}
    method = document.word(_M + "cp_comm_strategy", METHODS_BY_ROTATE, GATHER) if cp > 1 else None
    out["context_method"] = "ulysses" if sp > 1 else method
    replicas, shards = (document.count(_M + f"dp_{name}_size") for name in ("replicate", "shard"))
    if document.has(_M + "dp_shard_size") or document.has(_M + "dp_replicate_size"):
        return {**out, "dp": replicas * shards, "zero_replicas": replicas}
    if not devices:
        return out
    if devices % (tp * cp * sp):
        raise PinError(f"tp x cp = {tp * cp * sp} does not divide the {devices} processes", ("tp", "cp", "dp"))
    return {**out, "dp": devices // (tp * cp * sp), "zero_replicas": 1}


def _no_mesh(document: Document, found: Values) -> Values:
    devices = document.count("num_processes", 0) or document.task.num_devices
    return {"tp": 1, "cp": 1, "context_method": None, **({"dp": devices} if devices else {})}


def _write_zero(setup: Setup) -> Values:
    c = setup.config
    if _on("DEEPSPEED", setup):
        out: dict[str, Any] = {_D + "zero_stage": c.zero_stage, _D + "zero3_init_flag": c.zero_stage == 3}
        held = "cpu" if c.offload else "none"
        out[_D + "offload_optimizer_device"] = held
        out[_D + "offload_param_device"] = held if "parameters" in c.offload and c.zero_stage == 3 else "none"
        return out | {_D + "gradient_accumulation_steps": c.num_micro_batches}
    return {_F + "offload_params": c.offload == ("parameters",)} if _on("FSDP", setup) else {}


def _write_version2(setup: Setup) -> Values:
    if not _on("FSDP", setup):
        return {}
    return {_F + "version": 2, _F + "reshard_after_forward": setup.config.zero_stage == 3}


def _write_version1(setup: Setup) -> Values:
    if not _on("FSDP", setup):
        return {}
    c = setup.config
    name = "FULL_SHARD" if c.zero_stage == 3 else "SHARD_GRAD_OP"
    hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}  # a copy of the state on every node
    whole_nodes = c.zero_replicas == setup.task.num_nodes > 1
    return {_F + "sharding_strategy": hybrid[name] if whole_nodes else name}


_STRATEGIES = {
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "HYBRID_SHARD_ZERO2": 2,
    "NO_SHARD": 0,
}


def read_engine(document: Document, found: Values) -> Values:
    """Return the ZeRO stage, its replicas, and what is on the host."""
    kind = str(document.get("distributed_type")).upper()
    named = _named(document)
    if named is not None:
        zero = read_zero(named, {"cp": 1, **found})
        return {**zero, **read_zero_offload(named, found), **read_overlap(named, found)}
    if kind == "DEEPSPEED":
        held = [document.get(_D + f"offload_{n}_device") not in (None, "none") for n in ("param", "optimizer")]
        offload: tuple[str, ...] = ("parameters",) if held[0] else ("optimizer",) if held[1] else ()
        return {"zero_stage": document.count(_D + "zero_stage", 2, (0,)), "zero_replicas": 1, "offload": offload}
    if kind != "FSDP":
        return {"zero_stage": 0, "zero_replicas": 1, "offload": ()}
    out: dict[str, Any] = {"offload": ("parameters",) if document.get(_F + "offload_params") else ()}
    if document.count(_F + "version") >= 2:
        return {**out, "zero_stage": 2 if document.get(_F + "reshard_after_forward") is False else 3}
    stages: dict[Any, int] = {**_STRATEGIES, **{k + 1: v for k, v in enumerate((3, 2, 0, 3, 2))}}
    strategy = document.get(_F + "sharding_strategy") or "FULL_SHARD"
    stage = stages.get(int(strategy) if str(strategy).isdigit() else str(strategy))
    if stage is None:
        raise PinError(
            f"fsdp_sharding_strategy={strategy!r} is not known; use {', '.join(_STRATEGIES)}", ("zero_stage",)
        )
    copies = document.count("num_machines") if str(strategy).startswith("HYBRID") else 1
    return {**out, "zero_stage": stage, "zero_replicas": copies}


def _read_steps(document: Document, found: Values) -> Values:
    named = _named(document)
    if named is not None:
        return read_batch(named, found)
    steps = document.get(_D + "gradient_accumulation_steps")
    if steps in (None, "auto"):
        return {}
    out = {"num_micro_batches": int(steps)}
    if "dp" in found and "micro_batch_size" in found:
        out["global_batch_size"] = int(steps) * found["dp"] * found["micro_batch_size"]
    return out


def _write_recompute(setup: Setup) -> Values:
    return {_F + "activation_checkpointing": setup.any_recompute != NONE} if _on("FSDP", setup) else {}


def read_checkpointing(document: Document, found: Values) -> Values:
    """Return the recompute of FSDP; nothing if another engine runs the file."""
    if str(document.get("distributed_type")).upper() != "FSDP":
        return {}
    return {"recompute": FULL if document.get(_F + "activation_checkpointing") else NONE}


def _write_precision(setup: Setup) -> Values:
    base = base_of(setup.precision)
    return {"mixed_precision": base if base in ("bf16", "fp16", "fp8") else "no" if base == "fp32" else "bf16"}


def runs_replicas(document: Document) -> bool:
    """Return True if a file names no engine: DistributedDataParallel, or a single process."""
    return str(document.get("distributed_type")).upper() in ("NO", "FALSE", "MULTI_GPU")  # YAML reads `no` as false


def read_mixed_precision(document: Document, found: Values) -> Values:
    """Return the precision."""
    named = _named(document)
    if named is not None:
        return read_precision_of(named, found)
    known = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", False: "fp32"}  # YAML reads `no` as false
    said = str(document.word("mixed_precision", known, "fp32"))
    return {"precision": of_replicas(said, document, runs_replicas(document))}


def _product(document: Document, found: Values) -> str | None:
    processes = document.count("num_processes", 0) or document.task.num_devices
    used = found.get("dp", 1) * found.get("tp", 1) * found.get("cp", 1)
    if not processes or "dp" not in found or used == processes:
        return None
    near = max(1, processes // (found.get("tp", 1) * found.get("cp", 1)))
    return (
        f"dp_replicate x dp_shard x cp x sp x tp = {used}, but num_processes is {processes}; nearest: "
        f"dp_replicate_size x dp_shard_size = {near}"
    )


def _processes(document: Document, found: Values) -> str | None:
    processes, devices = document.count("num_processes", 0), document.task.num_devices
    if not processes or not devices or processes == devices:
        return None
    return f"num_processes={processes}, but the cluster has {devices} devices; nearest: num_processes={devices}"


def _pure_replicas(document: Document, found: Values) -> str | None:
    replicas, shards = (document.count(_M + f"dp_{name}_size") for name in ("replicate", "shard"))
    if replicas == 1 or shards > 1:
        return None
    return (
        f"dp_replicate_size={replicas} with dp_shard_size=1 is refused by ParallelismConfig; nearest: "
        f"dp_replicate_size=1 with dp_shard_size={replicas}, or no parallelism_config with distributed_type MULTI_GPU"
    )


def _one_kind(document: Document, found: Values) -> str | None:
    cp, sp = (document.count(_M + f"{name}_size") for name in ("cp", "sp"))
    return None if cp == 1 or sp == 1 else f"cp_size={cp} and sp_size={sp} exclude each other; nearest: one of them"


# What a DeepSpeed file has to say itself (DeepSpeedPlugin._deepspeed_config_checks)
_OF_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)


def _beside_file(document: Document, found: Values) -> str | None:
    named = _named(document)
    if named is None:
        return None
    beside = [path for path in (*(_D + name for name in _OF_FILE), "mixed_precision") if path in document.values]
    faults = [f"deepspeed_config_file: {text}" for text in DEEPSPEED.schema.faults(named.values, document.year)]
    if beside:
        faults.append(f"{', '.join(beside)} beside deepspeed_config_file; nearest: only what the DeepSpeed file says")
    if not any(path.startswith("zero_optimization") for path in named.values):
        faults.append("the DeepSpeed file has no zero_optimization; nearest: zero_optimization.stage=2")
    return "; ".join(faults) or None


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    where = ' --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD_NODE" --main_process_port 29500'
    where = where if setup.task.num_nodes > 1 else ""
    return per_node(setup, f"accelerate launch --config_file {file}{where} train.py")


ACCELERATE = Target(
    name="accelerate",
    about="the YAML file of accelerate launch: FSDP, DeepSpeed or DistributedDataParallel",
    stack="accelerate",
    files=((0.0, Yaml()),),
    fields=(
        constant("compute_environment", "LOCAL_MACHINE"),
        Field((), lambda s: {"distributed_type": engine(s)}, lambda d, found: {}),
        Field(
            (),
            lambda s: {
                "num_machines": max(1, s.task.num_nodes),
                "num_processes": s.config.num_devices,
                "machine_rank": 0,
            },
            lambda d, found: {},
        ),
        Field(("tp", "cp", "dp", "zero_replicas", "context_method"), _write_mesh, read_mesh, **_NEW),
        Field(("tp", "cp", "dp"), lambda s: {}, _no_mesh, until=MESH),
        Field(("zero_stage", "zero_replicas", "offload", "overlap_zero", "overlap_gather"), _write_zero, read_engine),
        Field((), _write_version2, lambda d, found: {}, since=FSDP2),
        Field((), _write_version1, lambda d, found: {}, until=FSDP2),
        constant(_F + "auto_wrap_policy", "TRANSFORMER_BASED_WRAP", lambda s: _on("FSDP", s)),
        constant(_F + "state_dict_type", "SHARDED_STATE_DICT", lambda s: _on("FSDP", s)),
        Field(("num_micro_batches", "micro_batch_size", "global_batch_size"), lambda s: {}, _read_steps),
        derived(micro_batches, "num_micro_batches"),
        Field(("recompute",), _write_recompute, read_checkpointing),
        Field(("precision",), _write_precision, read_mixed_precision),
        Field(
            ("mode",),
            lambda s: {"dynamo_config.dynamo_backend": "INDUCTOR"} if s.mode is Mode.COMPILED else {},
            lambda d, found: {
                "mode": "eager" if str(d.get("dynamo_config.dynamo_backend") or "NO") == "NO" else "compiled"
            },
        ),
    ),
    marks=("distributed_type",),
    launch=_launch,
    elsewhere={
        "micro_batch_size": "the training script (TrainingArguments.per_device_train_batch_size)",
        "num_micro_batches": "the training script (TrainingArguments.gradient_accumulation_steps)",
        "global_batch_size": "the training script (per_device_train_batch_size x gradient_accumulation_steps x dp)",
        "recompute": "the training script (TrainingArguments.gradient_checkpointing)",
        "seq_len": "the data",
        "attention": "the model (attn_implementation)",
    },
    cannot={
        "pp": "accelerate has no pipelines but those of Megatron-LM",
        "schedule": "accelerate has no pipelines but those of Megatron-LM",
        "virtual_stages": "accelerate has no pipelines but those of Megatron-LM",
        "tp": "parallelism_config is beside FSDP (ZeRO 2 and 3) since 1.10 (25.08); ZeRO 1 is DeepSpeed",
        "cp": "parallelism_config is beside FSDP (ZeRO 2 and 3) since 1.10 (25.08), its sp_size since 1.12 (25.11)",
        "ep": "accelerate has no expert parallelism",
        "zero_stage": "FSDP shards parameters (3) or gathers them once (2), DeepSpeed has 1 to 3",
        "zero_replicas": "parallelism_config replicates shards of FSDP; DeepSpeed's MiCS is in its own JSON",
        "offload": "FSDP offloads everything, DeepSpeed the optimizer, and parameters with ZeRO 3",
        "precision": "accelerate has no, fp16, bf16 and fp8, and does not say how gradients are kept",
        "recompute": "a layer is checkpointed whole or not at all",
        "context_method": "FSDP gathers keys or rotates them (cp_comm_strategy), DeepSpeed has Ulysses (sp_size)",
        "reduce_once": "a setting of the script: GradientAccumulationPlugin(sync_each_batch=True); transformers has it",
        "overlap_zero": "overlap_comm of DeepSpeed is in its own JSON",
        "sequence_parallel": "a property of the model's plan of tensor parallelism",
    },
    stack_of=lambda d: "deepspeed" if str(d.get("distributed_type")).upper() == "DEEPSPEED" else "accelerate",
    rules=(
        TargetRule(_processes),
        TargetRule(_product),
        TargetRule(_pure_replicas),
        TargetRule(_one_kind),
        TargetRule(_beside_file),
        TargetRule(on_disk, warns=True),
    ),
    named_files=(DEEPSPEED_FILE,),
)
