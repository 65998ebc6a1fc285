"""TRL: SFTConfig, which is TrainingArguments with other defaults, and `trl sft`, which starts its script by accelerate.

Read in trl 1.16.0 (trainer/base_config.py, sft_config.py, model_config.py, sft_trainer.py, cli, accelerate_configs) and
in its releases since 0.13. Its other trainers are known by name and refused: a step of theirs is more than a forward
and a backward of one model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config.parallel import Attention
from autoplan.errors import PinError
from autoplan.exporters.record import Document, Recognised, TargetRule, Values
from autoplan.exporters.trainer_kinds import NAME
from autoplan.stacks.records import year_of

COMMAND = "trl.command"  # path: what TRL is told to train, `sft` for an SFTConfig
PROGRAM, SFT, SFT_CLASS = "trl", "sft", "SFTConfig"
CONFIG = "trl.config"  # path: the YAML file that TrlParser takes beside arguments (`--config`), which count more
PARSERS = ("TrlParser", "HfArgumentParser")
# What a file makes beside its arguments -> path. Both change what is trained, and neither is an argument.
BESIDE = {"LoraConfig": "peft_config", "BitsAndBytesConfig": "quantization_config"}

# Trainers by what a step of theirs has beside a forward and a backward of one model: the stems of their classes
# (DPOConfig, DPOTrainer) and subcommands, and fields that only they have
_OTHERS: Mapping[str, tuple[str, str]] = {
    "compares pairs of answers, most often with a second model": (
        "DPO KTO ORPO CPO BCO TPO",
        "precompute_ref_log_probs ref_model_mixup_alpha desirable_weight undesirable_weight cpo_alpha rpo_alpha beta",
    ),
    "generates answers and rates them": (
        "GRPO RLOO PPO PPOv2 OnlineDPO NashMD XPO GMPO A2PO AsyncGRPO GRPOWithReplayBuffer AlignProp DDPO",
        "num_generations max_completion_length max_prompt_length use_vllm vllm_mode reward_weights num_ppo_epochs",
    ),
    "trains a reward model on pairs of answers": ("Reward PRM", "center_rewards_coefficient"),
    "has a teacher": (
        "GKD GOLD MiniLLM Distillation ServerDistillation AsyncDistillation SDFT SDPO SSD IWOPD",
        "lmbda teacher_model_name_or_path teacher_model_init_kwargs",
    ),
}
REFUSED_CLASSES: Mapping[str, str] = {
    f"{stem}Config": why for why, (stems, _) in _OTHERS.items() for stem in stems.split()
}
_COMMANDS = {stem.lower(): why for why, (stems, _) in _OTHERS.items() for stem in stems.split()}
_FIELDS = {name: why for why, (_, names) in _OTHERS.items() for name in names.split()}
# Fields that SFTConfig has and no other configuration of Trainer's
_OF_SFT = "packing_strategy eval_packing dataset_text_field completion_only_loss assistant_only_loss packing".split()
_NOT_SFT = "finetuning_type cutoff_len template stage".split()  # of LLaMA-Factory, which has `packing`, too
_SCRIPT = re.compile(r"^(?:trl\.scripts\.|(?:.*/)?(?:trl/scripts|examples/scripts)/)(\w+?)(?:\.py)?$")

# Defaults that TrainingArguments do not have: path -> (since, value); bf16 yields to fp16 (`_BaseConfig.__post_init__`)
_DEFAULTS = {
    "gradient_checkpointing": (year_of("25.08"), True),  # 0.22.0, 29 August 2025
    "bf16": (year_of("25.06"), True),  # 0.19.0, 20 June 2025
}
_LENGTHS, _LENGTH = ("max_length", "max_seq_length"), 1024
_RENAMED = year_of("25.07")  # 0.20.0, 28 July 2025, has only the first of these names

# What accelerate is told by a file of trl/accelerate_configs, all of which are for the 8 devices of one node
_BF16 = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 8}
_DEEPSPEED, _FSDP = {**_BF16, "distributed_type": "DEEPSPEED"}, {**_BF16, "distributed_type": "FSDP"}
_ACCELERATE_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {**_BF16, "distributed_type": "NO"},
    "multi_gpu": {**_BF16, "distributed_type": "MULTI_GPU"},
    **{f"zero{stage}": {**_DEEPSPEED, "deepspeed_config.zero_stage": stage} for stage in (1, 2, 3)},
    **{f"fsdp{version}": {**_FSDP, "fsdp_config.fsdp_version": version} for version in (1, 2)},
}
ACCELERATE_CONFIG = "accelerate_config"
# Options of accelerate launch that `trl` passes on, from its command line and from its YAML
_PASSED = re.compile(
    r"config_file$|num_processes$|num_machines$|mixed_precision$|use_fsdp$|use_deepspeed$|multi_gpu$|zero_stage$|"
    r"offload_(optimizer|param)_device$|deepspeed_config_file$|"
    r"fsdp_(version|reshard_after_forward|sharding_strategy|offload_params|activation_checkpointing)$"
)
_ATTENTION = ("attn_implementation", "attn_impl", "flash_attn")  # of TRL and axolotl, ms-swift, LLaMA-Factory
_KERNELS = {
    "eager": Attention.UNFUSED,
    "sdpa": Attention.FLASH2,
    **dict.fromkeys(("flash_attention_2", "kernels-community/flash-attn2", "fa2", "flash_attn"), Attention.FLASH2),
    **dict.fromkeys(("kernels-community/flash-attn", "kernels-community/flash-attn3"), Attention.FUSED),
    **dict.fromkeys(("flash_attention_3", "kernels-community/vllm-flash-attn3"), Attention.FUSED),
}


def command_of(before: Sequence[str], after: Sequence[str]) -> str | None:
    """Return what TRL trains by a command: `sft` of `trl sft ...` and `python trl/scripts/sft.py`; None if not TRL.

    Args:
        before: the words up to the program, or the script.
        after: its arguments.
    """
    program, known = before[-1] if before else "", (SFT, *_COMMANDS)
    if program == PROGRAM:
        return next((word for word in after if word in known), None)
    script = _SCRIPT.match(program)
    return script[1].lower() if script is not None and script[1].lower() in known else None


def refuse_others(values: Values) -> None:
    """Raise Recognised if the values are those of a trainer of TRL whose step is another one."""
    command = values.get(COMMAND)
    if command in _COMMANDS:
        raise Recognised(_why_not(f"trl {command}", _COMMANDS[command]))
    told = [name for name in _FIELDS if name in values]
    if told and not any(name in values for name in _NOT_SFT):
        raise Recognised(_why_not(f"{told[0]}={values[told[0]]!r} is of a trainer of TRL that", _FIELDS[told[0]]))


def refused_class(name: str, line: int, where: str) -> Recognised:
    """Return the error of a file that makes the arguments of another trainer."""
    return Recognised(f"{where}: {_why_not(f'{name} (line {line})', REFUSED_CLASSES[name])}")


def parsed_elsewhere(line: int, where: str) -> Recognised:
    """Return the error of a file whose arguments come from a command line."""
    return Recognised(
        f"{where} takes its arguments from the command line (line {line}), and so does not state them; nearest: a "
        "script with the command (run.sh), or the YAML file of --config"
    )


def _why_not(subject: str, why: str) -> str:
    return (
        f"{subject} {why}, and only steps of language modelling are priced; nearest: the training step alone, with "
        f"{SFT_CLASS} or TrainingArguments of its batch and length"
    )


def is_sft(values: Values) -> bool:
    """Return True for values of SFTConfig: by its class or command, or by fields that only it has."""
    if COMMAND in values:
        return bool(values[COMMAND] == SFT)
    return any(name in values for name in _OF_SFT) and not any(name in values for name in _NOT_SFT)


def as_sft(values: Values) -> dict[str, Any]:
    """Return the values of SFTConfig with those of its YAML file and of its model, and what accelerate launch is told.

    Options of accelerate have the paths of a command line, `launch.options.NAME`, and what a file of TRL's own
    (`--accelerate_config zero3`) says those of the file, `accelerate_file.NAME`.
    """
    out = {path: value for path, value in values.items() if not path.startswith(f"{CONFIG}.")}
    for path, value in values.items():
        name = path.removeprefix(f"{CONFIG}.")
        if name != path:
            out.setdefault(name, value)
    if any(path.startswith(f"{CONFIG}.") for path in values):
        del out[CONFIG]
    if COMMAND in out and "config" in out:
        out[CONFIG] = out.pop("config")
    out |= {path.removeprefix("model_init_kwargs."): v for path, v in out.items() if path.startswith("model_init_kw")}
    given = out.pop(ACCELERATE_CONFIG, None)
    shipped = _ACCELERATE_CONFIGS.get(str(given))
    if shipped is not None:
        out |= {f"accelerate_file.{path}": value for path, value in shipped.items()}
    elif given is not None:
        out["config_file"] = given
    passed = [path for path in out if _PASSED.match(path)]
    return {**out, **{f"launch.options.{path}": out.pop(path) for path in passed}}


def check_yaml_of_command(document: Document) -> None:
    """Raise PinError if the command names a YAML file that is not here."""
    name = document.values.get(CONFIG)
    if COMMAND in document.values and isinstance(name, str):
        raise PinError(f"config={name!r} names a file that is not found; nearest: its path from here")


def value_of(document: Document, path: str) -> Any:
    """Return the value of a file at a path; else the default of SFTConfig if the file is of it."""
    stated = document.values.get(path)
    if stated is None and path in _DEFAULTS and is_sft(document.values) and path not in document.unknown:
        since, default = _DEFAULTS[path]
        if document.year >= since:
            return default and not (path == "bf16" and document.get("fp16"))
    return document.get(path)


def read_length(document: Document, found: Values) -> Values:
    """Return the length of a sequence: that of packed ones, and the most of others."""
    if not is_sft(document.values):
        return {}
    path = next((each for each in _LENGTHS if document.has(each)), _LENGTHS[0])
    if path in document.values and document.values[path] is None:
        return {}
    return {"seq_len": document.count(path, _LENGTH)}


def read_attention(document: Document, found: Values) -> Values:
    """Return the kernel of attention that an argument of a known trainer names; nothing if it is not known."""
    path = next((each for each in _ATTENTION if document.has(each)), _ATTENTION[0])
    known = is_sft(document.values) or NAME in document.values
    kernel = _KERNELS.get(str(document.get(path)).partition("@")[0]) if known else None
    return {} if kernel is None else {"attention": kernel.value}


def _packs_without_length(document: Document, found: Values) -> str | None:
    if not is_sft(document.values) or not document.get("packing"):
        return None
    none = [path for path in _LENGTHS if path in document.values and document.values[path] is None]
    return f"packing needs a length, but {none[0]} is None; nearest: {none[0]}={_LENGTH}" if none else None


def _old_name(document: Document, found: Values) -> str | None:
    old, new = _LENGTHS[1], _LENGTHS[0]
    if not is_sft(document.values) or old not in document.values or document.year < _RENAMED:
        return None
    return f"{old} is a field of {SFT_CLASS} only before 25.07; nearest: {new}={document.values[old]}"


def _is_bound(document: Document, found: Values) -> str | None:
    """Without packing, a batch is as long as its longest example."""
    if not is_sft(document.values) or document.get("packing") or "seq_len" not in read_length(document, found):
        return None
    length = read_length(document, found)["seq_len"]
    if found.get("seq_len") != length:
        return None
    return f"{length} tokens (max_length) are the most that a sequence has, since packing is off (give --seq-len)"


def _documents(document: Document, found: Values) -> str | None:
    """Packed examples do not see each other, but in blocks that are cut anywhere (`wrapped`)."""
    if not is_sft(document.values) or not document.get("packing") or found.get("document_len") is not None:
        return None
    strategy = document.get("packing_strategy")
    if strategy == "wrapped":
        return None
    return f"attention stays within packed examples (packing_strategy={strategy}); give --document-len, their length"


RULES = (
    *map(TargetRule, (_packs_without_length, _old_name)),
    *(TargetRule(warned, warns=True) for warned in (_is_bound, _documents)),
)
