"""Hugging Face transformers: the JSON file of TrainingArguments (`HfArgumentParser.parse_json_file`).

Scripts that have the arguments are read, too (`trainer_scripts`), and TRL's SFTConfig (`trl`). The engine is part of
the file: `fsdp` with `fsdp_config`, DeepSpeed's own JSON under `deepspeed`, or neither.
"""

from __future__ import annotations

from autoplan.config.kernels import FusedLoss
from autoplan.config.parallel import Mode
from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters import accelerate, trainer_kinds, trl
from autoplan.exporters.accelerate import ACCELERATE, engine
from autoplan.exporters.deepspeed import DEEPSPEED, on_disk, read_overlap, read_zero, read_zero_offload, write_zero
from autoplan.exporters.launching import processes, srun
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    data_parallel,
    derived,
    micro_batches,
    of_replicas,
    section,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Json
from autoplan.exporters.trainer_scripts import (
    ACCELERATE_AT,
    ACCELERATE_FILE,
    MARKS,
    READERS,
    as_arguments,
    check_defaults,
    of_scripts,
)

_D, _F = "deepspeed.", "fsdp_config."
_SYNC = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
_BATCH = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}


def _deepspeed(document: Document) -> bool:
    """Return True if DeepSpeed runs the file. PinError for a named file that is not here."""
    name = document.get("deepspeed")
    if isinstance(name, str) and not any(path.startswith(_D) for path in document.values):
        raise PinError(f"deepspeed={name!r} names a file that is not found; nearest: its path from here")
    return document.has("deepspeed")


def _launched(document: Document) -> Document | None:
    """Return what accelerate launch says, as it reads it; None without it, and where the arguments name an engine."""
    if not document.has(f"{ACCELERATE_AT}distributed_type") or document.has("deepspeed") or _strategies(document):
        return None
    return section(document, ACCELERATE_AT, ACCELERATE.schema)


def _strategies(document: Document) -> list[str]:
    """Return the words of `fsdp`: `full_shard auto_wrap`, as a text or a list; true is full_shard."""
    given = document.get("fsdp")
    if isinstance(given, bool) or not given:
        return ["full_shard"] if given else []
    return [str(word).lower() for word in (given.split() if isinstance(given, str) else given)]


def _write_engine(setup: Setup) -> Values:
    c = setup.config
    if engine(setup) == "DEEPSPEED":
        out = {_D + path: value for path, value in write_zero(setup).items()}
        out |= {_D + path: "auto" for path in (*_BATCH, "gradient_clipping")}
        return out | (
            {_D + f"{base}.enabled": "auto"} if (base := base_of(setup.precision)) in ("bf16", "fp16") else {}
        )
    if engine(setup) != "FSDP":
        return {}
    out = {"fsdp": True, _F + "version": 2, _F + "reshard_after_forward": c.zero_stage == 3}
    out |= {_F + "activation_checkpointing": setup.any_recompute != NONE}
    return out | ({_F + "cpu_offload": True} if c.offload == ("parameters",) else {})


def _write_sync(setup: Setup) -> Values:
    c = setup.config
    each = engine(setup) == "FSDP" and c.zero_stage >= 2 and c.num_micro_batches > 1 and not setup.options.reduce_once
    return {_SYNC: True} if each else {}


def _read_sync(document: Document, found: Values) -> Values:
    """FSDP sends gradients with the last micro-batch, or with each (GradientAccumulationPlugin of accelerate)."""
    given = document.get(_SYNC)
    return {} if given is None or document.has("deepspeed") else {"reduce_once": not given}


def _read_mesh(document: Document, found: Values) -> Values:
    launched = _launched(document)
    if launched is not None:
        return accelerate.read_mesh(launched, found)
    return {"tp": 1, "cp": 1, "context_method": None, **data_parallel(document, {})}


def _read_engine(document: Document, found: Values) -> Values:
    launched = _launched(document)
    if launched is not None:
        return accelerate.read_engine(launched, found)
    if _deepspeed(document):
        inner = section(document, _D, DEEPSPEED.schema)
        zero = read_zero(inner, found)
        return {**zero, **read_zero_offload(inner, found), **read_overlap(inner, {**found, **zero})}
    words = _strategies(document)
    if not words:
        return {"zero_stage": 0, "zero_replicas": 1, "offload": ()}
    unknown = [word for word in words if word not in (*_STRATEGIES, "auto_wrap", "offload")]
    if unknown:
        raise PinError(f"fsdp={unknown[0]!r} is not known; use true, {', '.join(_STRATEGIES)}, auto_wrap or offload")
    word = next((word for word in words if word in _STRATEGIES), "full_shard")
    resharded = document.get(_F + "reshard_after_forward")
    if document.count(_F + "version", 2) == 1:
        word = str(resharded).lower() if str(resharded).lower() in _STRATEGIES else word
        stage = _STRATEGIES[word]
    elif word.startswith("hybrid") or word == "no_shard":
        raise PinError(f"fsdp={word!r} is of FSDP 1; nearest: fsdp_config.version=1, or full_shard", ("zero_stage",))
    else:
        stage = _STRATEGIES[word] if resharded is None else 3 if resharded in (True, "true", "True") else 2
    copies = document.task.num_nodes if word.startswith("hybrid") else 1
    held = "offload" in words or document.get(_F + "cpu_offload") is True
    return {"zero_stage": stage, "zero_replicas": max(1, copies), "offload": ("parameters",) if held else ()}


def _write_batch(setup: Setup) -> Values:
    c = setup.config
    return {"per_device_train_batch_size": c.micro_batch_size, "gradient_accumulation_steps": c.num_micro_batches}


def _read_batch(document: Document, found: Values) -> Values:
    trl.check_yaml_of_command(document)
    size, steps = (document.count(path) for path in _BATCH.values())
    batch = {"global_batch_size": size * steps * found["dp"]} if "dp" in found else {}
    return {"micro_batch_size": size, **batch}


def _write_recompute(setup: Setup) -> Values:
    return {} if engine(setup) == "FSDP" or setup.any_recompute == NONE else {"gradient_checkpointing": True}


def _read_recompute(document: Document, found: Values) -> Values:
    new, old = "activation_checkpointing", "gradient_checkpointing"  # the old name counts where the new one is not set
    check_defaults(document, old, new)
    own = document.get(new)
    given = [bool(trl.value_of(document, old) if own is None else own)]
    if _strategies(document):
        given.append(bool(document.get(_F + new)))
    launched = _launched(document)
    by_launch = {} if launched is None else accelerate.read_checkpointing(launched, found)
    return {"recompute": FULL if any(given) else by_launch.get("recompute", NONE)}


def _write_precision(setup: Setup) -> Values:
    base = base_of(setup.precision)
    return {} if base == "fp32" else {base if base in ("bf16", "fp16") else "bf16": True}


def _read_precision(document: Document, found: Values) -> Values:
    if document.has(trainer_kinds.PRECISION):
        return {"precision": document.get(trainer_kinds.PRECISION)}
    check_defaults(document, "bf16", "fp16")
    stated, launched = [name for name in ("bf16", "fp16") if trl.value_of(document, name)], _launched(document)
    if not stated:
        return {"precision": "fp32"} if launched is None else accelerate.read_mixed_precision(launched, found)
    # trainers of others may load the model in 16 bits
    engines = document.has(trainer_kinds.NAME) or _deepspeed(document) or bool(_strategies(document))
    replicas = not engines and (launched is None or accelerate.runs_replicas(launched))
    return {"precision": of_replicas(stated[0], document, replicas)}


def _write_mode(setup: Setup) -> Values:
    return {"torch_compile": True} if setup.mode is Mode.COMPILED else {}


def _read_mode(document: Document, found: Values) -> Values:
    given = [document.get(f"torch_compile{end}") for end in ("", "_backend", "_mode")]
    return {"mode": "compiled" if any(given) else "eager"}


_LIGER = "use_liger_kernel"


def _write_kernels(setup: Setup) -> Values:
    return {_LIGER: True} if setup.options.fused_loss is FusedLoss.LINEAR else {}


def _read_kernels(document: Document, found: Values) -> Values:
    """Liger's kernels: those of norms, and that of the loss with the head, which axolotl switches one by one."""
    whole = trl.value_of(document, _LIGER)
    loss = {"fused_loss": str(FusedLoss.LINEAR)} if whole or document.get(trainer_kinds.LINEAR_LOSS) else {}
    return loss | ({"fused_norms": True} if whole or document.get(trainer_kinds.FUSED_NORMS) else {})


def _one_precision(document: Document, found: Values) -> str | None:
    both = document.get("bf16") and document.get("fp16")
    return "bf16 and fp16 exclude each other; nearest: bf16 alone" if both else None


def _one_engine(document: Document, found: Values) -> str | None:
    both = document.has("deepspeed") and _strategies(document)
    return "fsdp and deepspeed exclude each other; nearest: one of them" if both else None


def _taken_by_deepspeed(document: Document, found: Values) -> str | None:
    """The section has DeepSpeed's own fields, and the batch of the arguments beside it."""
    inner = section(document, _D, DEEPSPEED.schema)
    faults = [f"deepspeed: {text}" for text in DEEPSPEED.schema.faults(inner.values, document.year)]
    for path, name in _BATCH.items():
        given, own = inner.get(path), document.get(name)
        if given not in (None, "auto", own):
            faults.append(f'deepspeed.{path}={given}, but {name}={own}; nearest: "auto"')
    return "; ".join(faults) or None


def _no_engine(document: Document, found: Values) -> str | None:
    """A file that names no engine, and nobody says how it is launched: accelerate's configuration may name one."""
    told = document.has("launch.by") or document.has(trainer_kinds.NAME) or _launched(document) is not None
    if told or document.has("deepspeed") or _strategies(document) or found["zero_stage"] or found.get("dp", 1) == 1:
        return None
    stated = any(document.has(name) for name in ("bf16", "fp16"))
    give, what = ("--zero-stage", "") if stated else ("--zero-stage, --precision", f" and {found['precision']}")
    return f"no engine is named: DistributedDataParallel{what}, unless accelerate launch is told another (give {give})"


def _of_accelerate(rule: TargetRule) -> TargetRule:
    """Return a rule of accelerate's file for the one that accelerate launch takes."""

    def broken(document: Document, found: Values) -> str | None:
        launched = _launched(document)
        return None if launched is None else rule.broken(launched, found)

    return TargetRule(broken, rule.warns)


def _stack(document: Document) -> str:
    launched = _launched(document)
    if launched is not None and ACCELERATE.stack_of is not None:
        return ACCELERATE.stack_of(launched)
    return "deepspeed" if document.has("deepspeed") else "accelerate"


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    return srun(setup, ["train.py", file])


TRANSFORMERS = Target(
    name="transformers",
    about="the JSON file of TrainingArguments, with fsdp_config or DeepSpeed's JSON in it",
    stack="accelerate",
    files=((0.0, Json()),),
    fields=(
        derived(_read_mesh, "tp", "cp", "context_method", "dp", "zero_replicas"),
        Field(
            ("zero_stage", "zero_replicas", "offload", "overlap_zero", "overlap_gather"), _write_engine, _read_engine
        ),
        Field(("reduce_once",), _write_sync, _read_sync),
        Field(("micro_batch_size", "global_batch_size"), _write_batch, _read_batch),
        derived(micro_batches, "num_micro_batches"),
        Field(("recompute",), _write_recompute, _read_recompute),
        Field(("precision",), _write_precision, _read_precision),
        Field(("mode",), _write_mode, _read_mode),
        Field(("fused_loss", "fused_norms"), _write_kernels, _read_kernels),
        derived(trl.read_length, "seq_len"),
        derived(trainer_kinds.read_own_length, "seq_len"),
        derived(trainer_kinds.read_own_adapters, "adapters"),
        derived(trl.read_attention, "attention"),
    ),
    marks=("per_device_train_batch_size", "gradient_checkpointing", "activation_checkpointing", "fsdp", "output_dir"),
    launch=_launch,
    elsewhere={"seq_len": "the data", "attention": "the model (attn_implementation)"},
    cannot={
        "pp": "Trainer has no pipelines",
        "schedule": "Trainer has no pipelines",
        "virtual_stages": "Trainer has no pipelines",
        "tp": "parallelism_config is an object of Python; accelerate's YAML has it",
        "cp": "parallelism_config is an object of Python; accelerate's YAML has it",
        "ep": "Trainer has no expert parallelism",
        "etp": "Trainer has no expert parallelism",
        "zero_stage": "FSDP shards parameters (3) or gathers them once (2), DeepSpeed has 1 to 3",
        "zero_replicas": "FSDP 2 replicates by parallelism_config; MiCS of DeepSpeed is of ZeRO 3",
        "offload": "FSDP offloads everything, DeepSpeed the optimizer, and parameters with ZeRO 3",
        "precision": "TrainingArguments have bf16 and fp16, and do not say how gradients are kept",
        "recompute": "a layer is checkpointed whole or not at all",
        "overlap_gather": "overlap_comm of DeepSpeed overlaps the gradients alone",
        "sequence_parallel": "a property of the model's plan of tensor parallelism",
    },
    stack_of=_stack,
    named_files=(
        trl.CONFIG,
        ACCELERATE_FILE,
        f"{ACCELERATE_AT}{accelerate.DEEPSPEED_FILE}",
        "deepspeed",
        "fsdp_config",
    ),
    also=READERS,
    marks_also=MARKS,
    renamed=as_arguments,
    rules=(
        *(TargetRule(broken) for broken in (_one_precision, _one_engine, _taken_by_deepspeed, processes)),
        *map(_of_accelerate, ACCELERATE.rules),
        *trl.RULES,
        *trainer_kinds.OWN_RULES,
        TargetRule(of_scripts, warns=True),
        TargetRule(on_disk, warns=True),
        TargetRule(_no_engine, warns=True),
    ),
)
