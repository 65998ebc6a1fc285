"""Scripts of Hugging Face's Trainer, read as TrainingArguments: command lines, Python files and YAML.

HfArgumentParser takes the arguments from a command line or a file, and a script may make them itself. Classes that
derive from them have other defaults, and scripts have arguments of their own: both are named, never assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.record import Document, Reader, Values
from autoplan.exporters.scripts import PROGRAMS, ArgumentsOf, FlagsOf
from autoplan.exporters.syntax import Yaml, flat

MARKS = ("per_device_train_batch_size",)
READERS: tuple[Reader, ...] = (
    Yaml(),
    FlagsOf("transformers", MARKS, booleans=True),
    ArgumentsOf(("TrainingArguments", "Seq2SeqTrainingArguments")),
)

# Programs, and arguments that only their scripts have, with other defaults: TRL (SFTConfig and its like recompute and
# train in bf16 unless told otherwise, trl/trainer/base_config.py) and LLaMA-Factory (which recomputes,
# src/llamafactory/model/model_utils).
_OTHER_TRAINERS = {
    **dict(zip(PROGRAMS, ("TRL", "LLaMA-Factory"), strict=True)),
    **dict.fromkeys(("use_peft", "packing", "max_length", "max_prompt_length", "dataset_text_field"), "TRL"),
    **dict.fromkeys(("finetuning_type", "cutoff_len", "template", "stage"), "LLaMA-Factory"),
}
# Arguments of scripts that change time or memory -> where they are given here, and the choice that it is
_OF_SCRIPTS = {
    **dict.fromkeys(
        ("block_size", "max_seq_length", "model_max_length", "max_length", "cutoff_len"), ("--seq-len", "seq_len")
    ),
    **dict.fromkeys(("use_peft", "use_lora", "lora_r", "lora_rank", "finetuning_type"), ("--adapters", "")),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit"), ("--adapters qlora:..., of 4 bits", "")),
    **dict.fromkeys(("attn_implementation", "flash_attn"), ("--attention", "attention")),
    **dict.fromkeys(("dtype", "torch_dtype"), ("--precision, whose parameters in 16 bits have masters in 32", "")),
}
_OFF = (None, False, 0, "none", "auto", "full", "disabled")  # values of these with which nothing changes
# What accelerate launch, or the file that it takes, says where no argument does
_OF_LAUNCH, _LAUNCHED = "the configuration of accelerate launch", (("fsdp", "deepspeed"), ("bf16", "fp16"))
# Where the values of accelerate launch stand, and the file that it names; options that are fields of a section
ACCELERATE_AT, ACCELERATE_FILE = "accelerate.", "accelerate_file"
_OF_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "fsdp_config.": ("fsdp_",),
    "deepspeed_config.": ("zero", "offload_", "deepspeed_", "gradient_"),
}
_SECTIONS = ("fsdp_config", "deepspeed", "accelerator_config", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs")


def as_arguments(values: Values) -> dict[str, Any]:
    """Return the values of a file by the fields of TrainingArguments, and of accelerate's file below `accelerate`.

    Sections may be texts of JSON; names in `fsdp_config` may begin with `fsdp_`; `accelerate launch` has the engine and
    the precision that the arguments do not name: in its options, and in the file that they name.
    """
    out: dict[str, Any] = {}
    for path, value in values.items():
        if path in _SECTIONS and isinstance(value, str) and value.lstrip().startswith("{"):
            out |= _parsed(path, value)
        elif path.startswith(f"{ACCELERATE_FILE}."):  # options count more
            out.setdefault(_accelerated(path), value)
        elif value != _OF_LAUNCH:
            out[_accelerated(path)] = value
    out = {re.sub(r"^fsdp_config\.fsdp_", "fsdp_config.", path): value for path, value in out.items()}
    for name, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("multi_gpu", "MULTI_GPU")):
        if out.pop(f"{ACCELERATE_AT}{name}", False):
            out[f"{ACCELERATE_AT}distributed_type"] = kind
    told = f"{ACCELERATE_AT}distributed_type" in out
    if out.get("launch.by") == "accelerate" and not told:
        stated = {path.removeprefix(UNKNOWN).partition(".")[0] for path in out}
        out |= {f"{UNKNOWN}{names[0]}": _OF_LAUNCH for names in _LAUNCHED if not stated.intersection(names)}
    return out


def _accelerated(path: str) -> str:
    """Return the path, below `accelerate` for an option of accelerate launch and a field of the file that it names."""
    option = path.removeprefix("launch.options.")
    if option == path:
        file = path.removeprefix(f"{ACCELERATE_FILE}.")
        return path if file == path else f"{ACCELERATE_AT}{file}"
    if option == "config_file":
        return ACCELERATE_FILE
    section = next((name for name, start in _OF_OPTIONS.items() if option.startswith(start)), "")
    return f"{ACCELERATE_AT}{section}{option}"


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PinError(f"{path} is not JSON: {error}") from None
    return flat(data, f"{path}.") or {path: {}}


def check_defaults(document: Document, *paths: str) -> None:
    """Raise PinError if none of these fields is stated, and the file is for a trainer with other defaults."""
    given = (*document.values, document.values.get("launch.by"))
    other = next((name for name in _OTHER_TRAINERS if name in given), None)
    if other is not None and not any(map(document.has, paths)):
        raise PinError(
            f"{paths[0]} is not stated, and {_OTHER_TRAINERS[other]}, which {other} is of, has another default than "
            f"TrainingArguments; nearest: {paths[0]}=true or false in the file"
        )


def of_scripts(document: Document, found: Mapping[str, Any]) -> str | None:
    """Return the arguments of a script that change time or memory, if nobody gives their choices; None without any."""
    listed = []
    for name, (flag, choice) in _OF_SCRIPTS.items():
        value = document.values.get(name)
        if value not in _OFF and (not choice or found.get(choice) is None):
            listed.append(f"{name}={value} (give {flag})")
    return f"not read, since they are the script's own: {', '.join(listed)}" if listed else None
