"""Scripts of Hugging Face's Trainer, read as TrainingArguments: command lines, Python files and YAML.

HfArgumentParser takes the arguments from a command line or a file, and a script may make them itself. Classes that
derive from them have other defaults: those of TRL's SFTConfig are known (`trl`), others and arguments of the scripts
themselves are named, never assumed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters import trl
from autoplan.exporters.python_expressions import path_of
from autoplan.exporters.python_file import read_made
from autoplan.exporters.python_values import UNKNOWN, maker_of
from autoplan.exporters.record import Document, Reader, Values
from autoplan.exporters.scripts import FlagsOf
from autoplan.exporters.syntax import Yaml, flat
from autoplan.exporters.trainer_kinds import ADAPTERS, KINDS, TRL_ADAPTERS, own_arguments

_CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments")


@dataclass(frozen=True)
class TrainerPython:
    """A Python file that is read: the arguments of the object of a class of Trainer's that it makes."""

    suffix: str = ".py"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not known begins with `?`.

        Raises: Recognised for a file that makes the arguments of another trainer of TRL, or none.
        """
        classes = (*_CLASSES, trl.SFT_CLASS)
        made_by, out = read_made(text, where, classes)
        calls = list(_calls(ast.parse(text)))
        names = {name for name, _ in calls}
        if not out and not names.intersection(classes):
            _check_made(calls, where)
            return out
        if maker_of(made_by) == trl.SFT_CLASS or (not made_by and trl.SFT_CLASS in names):
            out[trl.COMMAND] = trl.SFT
        return out | {trl.BESIDE[name]: f"{name}, line {node.lineno}" for name, node in calls if name in trl.BESIDE}


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a file with the last name of what they call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield (path_of(node.func) or "").rpartition(".")[2], node


def _check_made(calls: list[tuple[str, ast.Call]], where: str) -> None:
    """Raise Recognised for a file that makes other arguments, or takes them from a command line."""
    for name, node in calls:
        inside = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)] if name in trl.PARSERS else [name]
        refused = next((each for each in inside if each in trl.REFUSED_CLASSES), None)
        if refused is not None:
            raise trl.refused_class(refused, node.lineno, where)
        if {*_CLASSES, trl.SFT_CLASS}.intersection(inside):
            raise trl.parsed_elsewhere(node.lineno, where)


MARKS = ("per_device_train_batch_size", trl.COMMAND, "sequence_len")
READERS: tuple[Reader, ...] = (
    Yaml(),
    FlagsOf("transformers", MARKS[:1], booleans=True, command_of=(trl.COMMAND, trl.command_of)),
    TrainerPython(),
)

# Programs, and arguments that only their scripts have, with other defaults: TRL, where it is not told what it trains,
# and LLaMA-Factory (which recomputes, src/llamafactory/model/model_utils).
_OTHER_TRAINERS = {
    **{trl.PROGRAM: "TRL", "llamafactory-cli": "LLaMA-Factory"},
    **dict.fromkeys(("use_peft", "max_length"), "TRL"),
    **dict.fromkeys(("finetuning_type", "cutoff_len", "template", "stage"), "LLaMA-Factory"),
    # open_instruct/finetune.py takes its precision from accelerate launch, olmo_core_finetune.py has bfloat16
    **dict.fromkeys(("mixer_list", "dataset_mixer_list"), "open-instruct"),
}
# Arguments of scripts that change time or memory -> where they are given here, and the choice that it is
_OF_SCRIPTS = {
    **dict.fromkeys(
        ("block_size", "max_seq_length", "model_max_length", "max_length", "cutoff_len"), ("--seq-len", "seq_len")
    ),
    **dict.fromkeys(
        ("use_peft", "use_lora", "lora_r", "lora_rank", "lora_target_modules", "finetuning_type"),
        ("--adapters", "adapters"),
    ),
    "peft_config": ("--adapters", "adapters"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_config"),
        ("--adapters qlora:..., of 4 bits", "adapters"),
    ),
    **dict.fromkeys(("sequence_parallel_size", "context_parallel_size"), ("--cp", "")),
    **dict.fromkeys(("attn_implementation", "flash_attn", "attn_impl"), ("--attention", "attention")),
    **dict.fromkeys(("dtype", "torch_dtype"), ("--precision, whose parameters in 16 bits have masters in 32", "")),
}
_OFF = (None, False, 0, "none", "auto", "full", "disabled")  # values of these with which nothing changes
_BY_SCRIPT = "the configuration that the script makes for DeepSpeed"
# What accelerate launch, or the file that it takes, says where no argument does
_OF_LAUNCH, _LAUNCHED = "the configuration of accelerate launch", (("fsdp", "deepspeed"), ("bf16", "fp16"))
# Where the values of accelerate launch stand, and the file that it names; options that are fields of a section
ACCELERATE_AT, ACCELERATE_FILE = "accelerate.", "accelerate_file"
_OPTION, _LAUNCH_ARGS = "launch.options.", "accelerate_launch_args."  # the second: in JSON of fms-hf-tuning
_OF_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "fsdp_config.": ("fsdp_",),
    "deepspeed_config.": ("zero", "offload_", "deepspeed_", "gradient_"),
}
_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
_SECTIONS = ("fsdp_config", "deepspeed", "accelerator_config", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs")


def as_arguments(values: Values) -> dict[str, Any]:
    """Return the values of a file by the fields of TrainingArguments, and of accelerate's file below `accelerate`.

    Sections may be texts of JSON; names in `fsdp_config` may begin with `fsdp_`; `accelerate launch` has the engine and
    the precision that the arguments do not name: in its options, and in the file that they name.
    """
    values = _with_launch(values)
    trl.refuse_others(values)
    values = trl.as_sft(values) if trl.is_sft(values) else own_arguments(values, KINDS)
    if ADAPTERS not in values:
        values |= TRL_ADAPTERS.taken(dict(values))
    values = _made_by_script(values)
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
    if out.get("launch.by") in ("accelerate", trl.PROGRAM) and not told:
        stated = {path.removeprefix(UNKNOWN).partition(".")[0] for path in out}
        out |= {f"{UNKNOWN}{names[0]}": _OF_LAUNCH for names in _LAUNCHED if not stated.intersection(names)}
    return out


def _with_launch(values: Values) -> dict[str, Any]:
    """Return the values without engines whose key has no value (`deepspeed:`), and arguments of a launch as options."""
    empty: tuple[Any, ...] = (None, "", {}, [])
    out = {path: value for path, value in values.items() if path not in _ENGINES or value not in empty}
    if any(path.startswith(_LAUNCH_ARGS) for path in out):
        out = {path.replace(_LAUNCH_ARGS, _OPTION, 1): value for path, value in out.items()}
        out |= {"launch.by": "accelerate"}
    return out


def _made_by_script(values: Values) -> dict[str, Any]:
    """Return the values with the configuration that `--deepspeed` without a file leaves to another argument, or to the
    script (`deepspeed.add_config_arguments`)."""
    out = dict(values)
    if out.get("deepspeed") is True:
        file = out.pop("deepspeed_config", None)
        out |= {"deepspeed": file} if file is not None else {}
        if file is None:
            del out["deepspeed"]
            out |= dict.fromkeys((f"{UNKNOWN}{name}" for name in ("deepspeed", "bf16", "fp16")), _BY_SCRIPT)
    return out


def _accelerated(path: str) -> str:
    """Return the path, below `accelerate` for an option of accelerate launch and a field of the file that it names."""
    option = path.removeprefix(_OPTION)
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
    if trl.is_sft(document.values):  # whose defaults are known
        return
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
        if document.has(name) and value not in _OFF and (not choice or found.get(choice) is None):
            listed.append(f"{name}={value} (give {flag})")
    return f"not read, since they are the script's own: {', '.join(listed)}" if listed else None
