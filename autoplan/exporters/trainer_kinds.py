"""Trainers around Hugging Face's Trainer whose files have arguments and defaults of their own, by record.

What their own arguments say is kept below `own.`: the length of a sequence, whether examples are packed, adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.config.adapters import ALL_LINEAR, read_adapters
from autoplan.errors import PinError
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.record import Document, Recognised, TargetRule, Values

NAME, LENGTH, PACKED, ADAPTERS, PRECISION, LINEAR_LOSS, FUSED_NORMS = (
    f"own.{name}" for name in ("trainer", "length", "packed", "adapters", "precision", "linear_loss", "fused_norms")
)


@dataclass(frozen=True)
class AdapterNames:
    """Where a trainer says adapters.

    Attributes:
        kind: the field that says whether there are any; its values -> bits of the frozen weights, 0 for as they are.
        usual: the value of that field if it is not said.
        rank, targets: fields of the inner size and of the names of layers, each with its default.
        all_linear: what `targets` calls all linear layers.
        bits: field of the bits of frozen weights; true of a field that is about 4 bits.
    """

    kind: str
    values: Mapping[Any, int] = field(hash=False)
    usual: Any
    rank: tuple[str, int]
    targets: tuple[str, Any]
    all_linear: tuple[Any, ...] = (ALL_LINEAR,)
    bits: tuple[str, ...] = ()

    def said(self, values: Values) -> str | None:
        """Return the adapters as autoplan writes them; None if all weights are trained."""
        kind = values.get(self.kind, self.usual)
        if kind not in self.values:
            return None
        packed = self.values[kind] == 4 or any(values.get(name) in (4, "4", True) for name in self.bits)
        given = values.get(self.targets[0], self.targets[1])
        names = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
        listed = ALL_LINEAR if given in self.all_linear else ",".join(str(name).strip() for name in names if name)
        rank = values.get(self.rank[0], self.rank[1])
        return f"{'qlora' if packed else 'lora'}:{rank}{f':{listed}' if listed else ''}"

    def taken(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what a file says of adapters, at ADAPTERS, and take the fields that say it out of its values."""
        names = (self.kind, self.rank[0], self.targets[0], *self.bits)
        unknown = next((name for name in names if f"{UNKNOWN}{name}" in values), None)
        if unknown is not None:
            return {f"{UNKNOWN}{ADAPTERS}": f"{unknown}={values[f'{UNKNOWN}{unknown}']}"}
        said = self.said(values)
        if said is not None and not _is_read(said):  # a pattern of names
            return {f"{UNKNOWN}{ADAPTERS}": f"{self.targets[0]}={values.get(self.targets[0])}"}
        whole = values.get(self.kind) in (None, False, "", "full")  # all weights are trained
        for name in names if said is not None else names[:1] if whole else ():
            values.pop(name, None)
        return {} if said is None else {ADAPTERS: said}


def _is_read(adapters: str) -> bool:
    try:
        read_adapters(adapters)
    except PinError:
        return False
    return True


@dataclass(frozen=True)
class TrainerKind:
    """A trainer with arguments and defaults of its own.

    Attributes:
        source: where they were read.
        marks: fields that only its files have.
        programs: its commands (`launch.by`).
        when: what else is so for its files, since others have such fields, too.
        renamed: its name of a field -> that of TrainingArguments, or of a section of the file.
        defaults: fields that are something else than in TrainingArguments if they are not said.
        forced: returns fields that other ones of its decide, from the values; None for those that are left out.
        length: field of the most tokens of a sequence, with its default; None: what the model takes.
        packing: fields of which one is true if examples are packed to that length.
        shipped: field -> its names for files that the trainer brings along -> what these say.
        other: field -> words of it with which a step is more than one of language modelling, None for any word.
    """

    name: str
    source: str
    marks: tuple[str, ...]
    length: tuple[str, int | None]
    programs: tuple[str, ...] = ()
    when: Callable[[Values], bool] = lambda values: True
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    forced: Callable[[Values], Values] = lambda values: {}
    packing: tuple[str, ...] = ()
    adapters: AdapterNames | None = None
    shipped: Mapping[str, Mapping[str, Values]] = field(default_factory=dict, hash=False)
    other: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict, hash=False)

    def has_made(self, values: Values) -> bool:
        """Return True for the values of a file of this trainer."""
        told = values.get("launch.by") in self.programs or any(
            name in values or f"{UNKNOWN}{name}" in values for name in self.marks
        )
        return told and self.when(values)

    def as_arguments(self, values: Values) -> dict[str, Any]:
        """Return the values by the fields of TrainingArguments, with what the trainer's own say below `own`.

        Raises: Recognised for a step that is more than one of language modelling.
        """
        for name, words in self.other.items():
            if values.get(name) and (words is None or str(values[name]).lower() in words):
                raise Recognised(
                    f"{name}={values[name]} of {self.name} is more than a step of language modelling, and only these "
                    "are priced; nearest: the training step alone, with the batch and length of this file"
                )
        out: dict[str, Any] = {}
        for path, value in values.items():
            if path in self.other:
                continue
            known = path.removeprefix(UNKNOWN)
            new = self._renamed(known)
            out[f"{UNKNOWN}{new}" if path.startswith(UNKNOWN) else new] = value
        for name, files in self.shipped.items():
            if str(out.get(name)) in files:
                out |= files[str(out.pop(name))]
        for path, value in self.defaults.items():
            if out.get(path) is None and f"{UNKNOWN}{path}" not in out:
                out[path] = value
        forced = self.forced(out)
        out = {path: value for path, value in {**out, **forced}.items() if value is not None or path not in forced}
        out |= {NAME: self.name, PACKED: any(out.pop(name, False) for name in self.packing)}
        name, usual = self.length
        if f"{UNKNOWN}{name}" in out:
            out[f"{UNKNOWN}{LENGTH}"] = out.pop(f"{UNKNOWN}{name}")
        elif (length := out.pop(name, usual)) is not None:
            out[LENGTH] = length
        return out | self._adapters(out)

    def _renamed(self, path: str) -> str:
        first, dot, rest = path.partition(".")
        return f"{self.renamed[first]}{dot}{rest}" if first in self.renamed else path

    def _adapters(self, out: dict[str, Any]) -> dict[str, Any]:
        if self.adapters is None:
            return {}
        return self.adapters.taken(out)


TRL_ADAPTERS = AdapterNames(
    "use_peft", {True: 0}, False, ("lora_r", 16), ("lora_target_modules", None), bits=("load_in_4bit",)
)


_OF_MEGATRON = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    "use_distributed_optimizer",
)


def _llama_factory(values: Values) -> Values:
    """LLaMA-Factory has a switch of its own, which counts instead of Trainer's.

    Raises: Recognised for training in Megatron, whose arguments are in the same file.
    """
    other = next((name for name in _OF_MEGATRON if name in values), None)
    if other is not None:
        raise Recognised(
            f"{other} is an argument of Megatron, in which LLaMA-Factory trains then (USE_MCA=1, or Megatron Bridge); "
            "such files are not read; nearest: a script with these as flags, as Megatron-LM takes them"
        )
    recompute = not values.get("disable_gradient_checkpointing", False)
    precision = "fp8" if values.get("fp8") else "native" if values.get("pure_bf16") else None
    taken = dict.fromkeys(("disable_gradient_checkpointing", *(("fp8", "pure_bf16") if precision else ())))
    return {"gradient_checkpointing": recompute, PRECISION: precision, **taken}


def _axolotl_precision(values: Values) -> str:
    if values.get("fp16") in (True, "true"):
        return "fp16"
    return "bf16" if values.get("bf16") in (True, "true", "auto", "full") else "no"


# integrations/liger and integrations/cut_cross_entropy: the head's product and the loss in one, and norms
_AXOLOTL_KERNELS = {
    LINEAR_LOSS: ("liger_fused_linear_cross_entropy", "cut_cross_entropy"),
    FUSED_NORMS: ("liger_rms_norm",),
}


def _axolotl_kernels(values: Values) -> Values:
    stated = {name: any(values.get(p) in (True, "true") for p in paths) for name, paths in _AXOLOTL_KERNELS.items()}
    return stated | {path: None for paths in _AXOLOTL_KERNELS.values() for path in paths}


def _axolotl(values: Values) -> Values:
    """What axolotl tells accelerate launch, and Trainer (its utils/schemas/validation.py, core/builders/causal.py)."""
    narrow = _axolotl_precision(values)
    wide = bool(values.get("fp8"))
    out: dict[str, Any] = {"bf16": narrow == "bf16" and not wide, "fp16": narrow == "fp16" and not wide, "debug": None}
    if values.get("gradient_checkpointing") in ("offload", "offload_disk"):
        out["gradient_checkpointing"] = True
    if values.get("flash_attention"):  # before attn_implementation
        out |= {"flash_attention": None, "attn_implementation": "flash_attention_2"}
    out |= _axolotl_kernels(values)
    if values.get("deepspeed") or any(path.startswith("deepspeed.") for path in values):
        return out | ({PRECISION: "fp8"} if wide else {})
    of_fsdp = [path for path in values if path.startswith("fsdp_config.")]
    kind = "FSDP" if values.get("fsdp") or of_fsdp else "MULTI_GPU"
    told: dict[str, Any] = {"distributed_type": kind, "mixed_precision": "fp8" if wide else narrow}
    if kind == "FSDP":
        told["fsdp_config.fsdp_version"] = values.get("fsdp_version") or 1
        told |= {f"fsdp_config.fsdp_{re.sub(r'^fsdp_config.(fsdp_)?', '', path)}": values[path] for path in of_fsdp}
        told |= {f"{_MESH}{path}": values[name] for name, path in _AXOLOTL_MESH.items() if values.get(name)}
        out |= dict.fromkeys(("fsdp", "fsdp_version", *of_fsdp, *_AXOLOTL_MESH))
    return out | {f"accelerate.{path}": value for path, value in told.items()}


def _deepspeed_chat(values: Values) -> Values:
    """What get_train_ds_config makes of the arguments; the stage may be known to the caller alone."""
    stage = "deepspeed.zero_optimization.stage"
    out: dict[str, Any] = {"deepspeed": None, "torch_dtype": None, "offload": None}
    out |= {name: values.get("torch_dtype") == name for name in ("bf16", "fp16")}
    if f"{UNKNOWN}{stage}" in values:
        return out | {f"{UNKNOWN}deepspeed": values[f"{UNKNOWN}{stage}"], f"{UNKNOWN}{stage}": None}
    return out | (_HELD if values.get("offload") else {})


def _megatron_swift(values: Values) -> Values:
    wide = values.get("torch_dtype") in ("float16", "float32")
    off = values.get("recompute_granularity") == "none"
    return {**({"bf16": False, "fp16": True} if wide else {}), **({"recompute_granularity": None} if off else {})}


_MESH = "parallelism_config.parallelism_config_"
_AXOLOTL_MESH = {
    "dp_replicate_size": "dp_replicate_size",
    "dp_shard_size": "dp_shard_size",
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size",
    "sequence_parallel_degree": "cp_size",
}

_ZERO: dict[str, dict[str, Any]] = {f"zero{n}": {"deepspeed.zero_optimization.stage": n} for n in range(4)}
_HELD = {f"deepspeed.zero_optimization.{name}.device": "cpu" for name in ("offload_optimizer", "offload_param")}
_ZERO |= {"zero3_offload": _ZERO["zero3"] | _HELD}
_ZERO |= {"zero2_offload": _ZERO["zero2"] | {name: "cpu" for name in _HELD if "optimizer" in name}}
_AXOLOTL_FILES = {
    **{name: said for name, said in _ZERO.items() if "_" not in name},
    **{"zero3_bf16": _ZERO["zero3"], "zero3_bf16_cpuoffload_all": _ZERO["zero3_offload"]},
    "zero3_bf16_cpuoffload_params": _ZERO["zero3"] | {name: "cpu" for name in _HELD if "param" in name},
}
_FSDP2 = {
    **{"fsdp": "full_shard auto_wrap", "fsdp_config.version": 2, "fsdp_config.reshard_after_forward": True},
    **{"fsdp_config.activation_checkpointing": True, "gradient_checkpointing": False},
}

KINDS = (
    TrainerKind(
        "LLaMA-Factory",
        "hparams/{model,data,finetuning}_args.py, model/model_utils/checkpointing.py of August 2026",
        marks=("finetuning_type", "cutoff_len"),
        programs=("llamafactory-cli",),
        length=("cutoff_len", 2048),
        renamed={"enable_liger_kernel": "use_liger_kernel"},
        forced=_llama_factory,
        packing=("packing", "neat_packing"),
        adapters=AdapterNames(
            "finetuning_type", {"lora": 0}, "lora", ("lora_rank", 8), ("lora_target", "all"), ("all",),
            ("quantization_bit",),
        ),
        other={"stage": ("rm", "ppo", "dpo", "kto")},
    ),
    TrainerKind(
        "ms-swift",
        "swift/arguments/{sft,tuner}_args.py, trainers/arguments.py, config/ of August 2026",
        marks=("tuner_type", "train_type"),
        programs=("swift",),
        length=("max_length", None),
        renamed={"train_type": "tuner_type"},
        defaults={"gradient_checkpointing": True, "per_device_train_batch_size": 1, "bf16": True},
        forced=lambda values: (
            {"bf16": False, "fp16": True} if values.get("torch_dtype") in ("float16", "float32") else {}
        ),
        packing=("packing",),
        adapters=AdapterNames(
            "tuner_type", {"lora": 0}, "lora", ("lora_rank", 8), ("target_modules", ALL_LINEAR), bits=("quant_bits",)
        ),
        shipped={"deepspeed": _ZERO, "fsdp": {"fsdp2": _FSDP2}},
        other={"rlhf_type": None},
    ),
    TrainerKind(
        "axolotl",
        "src/axolotl/utils/schemas/{config,peft,enums}.py of July 2026",
        marks=("sequence_len",),
        programs=("axolotl",),
        when=lambda values: "base_model" in values or "micro_batch_size" in values,
        length=("sequence_len", 512),
        renamed={
            "micro_batch_size": "per_device_train_batch_size",
            "num_epochs": "num_train_epochs",
            "lr_scheduler": "lr_scheduler_type",
            "optimizer": "optim",
        },
        defaults={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "bf16": "auto"},
        forced=_axolotl,
        packing=("sample_packing",),
        adapters=AdapterNames(
            "adapter", {"lora": 0, "qlora": 4}, None, ("lora_r", 8), ("lora_target_modules", True), (True,),
            ("load_in_4bit",),
        ),
        shipped={"deepspeed": {f"deepspeed_configs/{name}.json": said for name, said in _AXOLOTL_FILES.items()}},
        other={"rl": None, "reward_model": None, "process_reward_model": None},
    ),
    TrainerKind(
        "DeepSpeed-Chat",
        "applications/DeepSpeed-Chat of DeepSpeedExamples: main.py of step 1, dschat/utils/ds_utils.py",
        marks=("zero_stage",),
        when=lambda values: values.get("deepspeed") is True,
        length=("max_seq_len", 512),
        renamed={"zero_stage": "deepspeed.zero_optimization.stage", "dtype": "torch_dtype"},
        defaults={"per_device_train_batch_size": 16, "torch_dtype": "fp16"},
        forced=_deepspeed_chat,
        other={"num_padding_at_beginning": None},
    ),
)  # fmt: skip

MEGATRON_KINDS = (
    TrainerKind(
        "ms-swift",
        "swift/megatron/arguments/megatron_args.py of August 2026",
        marks=("tuner_type", "train_type", "load_from_cache_file", "mcore_adapter"),
        programs=("megatron",),
        length=("max_length", None),
        renamed={
            "train_type": "tuner_type",
            "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
        },
        defaults={
            **{"micro_batch_size": 1, "global_batch_size": 16, "bf16": True, "use_distributed_optimizer": True},
            **{"recompute_granularity": "selective", "attention_backend": "flash", "cross_entropy_loss_fusion": True},
            **{"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "expert_tensor_parallel_size": 1},
        },
        forced=_megatron_swift,
        packing=("packing",),
        adapters=AdapterNames("tuner_type", {"lora": 0}, "full", ("lora_rank", 8), ("target_modules", ALL_LINEAR)),
        other={"rlhf_type": None},
    ),
)


def own_arguments(values: Values, kinds: Sequence[TrainerKind]) -> dict[str, Any]:
    """Return the values of a file of one of these trainers as those of a target; all others as they are."""
    kind = None if NAME in values else next((each for each in kinds if each.has_made(values)), None)
    return dict(values) if kind is None else kind.as_arguments(values)


def read_own_length(document: Document, found: Values) -> Values:
    """Return the most tokens of a sequence, where the trainer has a field for them."""
    return {"seq_len": document.count(LENGTH)} if document.has(LENGTH) else {}


def read_own_adapters(document: Document, found: Values) -> Values:
    """Return the adapters, where the trainer has fields for them."""
    given = document.get(ADAPTERS)
    return {} if given is None else {"adapters": str(read_adapters(given))}


def _is_bound(document: Document, found: Values) -> str | None:
    length = document.get(LENGTH)
    if length is None or found.get("seq_len") != length:
        return None
    if not document.get(PACKED):
        return f"{length} tokens are the most that a sequence has, since packing is off (give --seq-len)"
    if found.get("document_len") is not None:
        return None
    return "attention stays within packed examples; give --document-len, their length"


OWN_RULES = (TargetRule(_is_bound, warns=True),)
