"""Scripts of Hugging Face's Trainer are read as TrainingArguments; what they leave to others is named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As transformers' examples/pytorch/language-modeling/README.md starts them
COMMAND = """#!/bin/bash
SIZE=${SIZE:-4}
torchrun --nnodes 2 --nproc_per_node 8 run_clm.py \\
    --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name wikitext --do_train --output_dir out \\
    --per_device_train_batch_size $SIZE --gradient_accumulation_steps 2 --block_size 4096 \\
    --bf16 True --fp16 False --torch_compile=no --gradient_checkpointing \\
    --fsdp "full_shard auto_wrap" --fsdp_config '{"fsdp_version": 2, "fsdp_reshard_after_forward": false}'
"""
SCRIPT = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def tokenize(examples):
    out = tokenizer(examples["text"])
    out["labels"] = out["input_ids"].copy()
    return out

def main():
    model = AutoModelForCausalLM.from_pretrained("m")
    model.config.use_cache = False
    arguments = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=2 * 4, bf16=True,
        deepspeed={"zero_optimization": {"stage": 3}})
    arguments.gradient_checkpointing = True
    Trainer(model=model, args=arguments).train()

main()
"""


def read(folder: Path, name: str, text: str, **more: Any) -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, **more)


def test_a_command_line_is_read_as_hf_argument_parser_reads_it(tmp_path: Path) -> None:
    found = read(tmp_path, "run.sh", COMMAND)
    says = found.says
    assert (found.target, found.faults, found.not_read) == ("transformers", (), ())
    assert (says["zero_stage"], says["recompute"], says["precision"], says["mode"]) == (2, "full", "bf16", "eager")
    assert (says["micro_batch_size"], says["num_micro_batches"], says["global_batch_size"]) == (4, 2, 128)
    assert found.warnings == ("not read, since they are the script's own: block_size=4096 (give --seq-len)",)
    assert read(tmp_path, "run.sh", COMMAND, given={"seq_len": 4096}).warnings == ()
    other = read(tmp_path, "run.sh", COMMAND.replace("--nnodes 2", "--nnodes 4").replace("--bf16 True", "--bf16 no"))
    assert other.says["precision"] == "fp32"
    assert other.faults == (
        "torchrun starts 32 processes, but the cluster has 16 devices; nearest: --nnodes 2 --nproc-per-node 8",
    )


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_arguments_of_a_command_are_those_that_transformers_parses(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shown = COMMAND.partition("run_clm.py")[2].replace("$SIZE", "4").replace("\\\n", " ")
    words = shlex.split(shown)
    for name in ("model_name_or_path", "dataset_name", "block_size"):
        at = words.index(f"--{name}")
        del words[at : at + 2]
    path = tmp_path / "fsdp.json"
    path.write_text(words[words.index("--fsdp_config") + 1])
    words[words.index("--fsdp_config") + 1] = str(path)
    words[words.index("--bf16") + 1] = "False"  # this machine has no device that computes in it
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(words)
    found = read(tmp_path, "run.sh", COMMAND).values
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "fp16", "torch_compile"):
        assert getattr(parsed, name) == found[name], name
    assert parsed.gradient_checkpointing is found["gradient_checkpointing"] is True
    version, reshards = parsed.fsdp_config["version"], parsed.fsdp_config["reshard_after_forward"]
    assert (version, reshards) == (found["fsdp_config.version"], found["fsdp_config.reshard_after_forward"])


def test_arguments_that_a_python_file_makes(tmp_path: Path) -> None:
    found = read(tmp_path, "train.py", SCRIPT)
    says = found.says
    assert (found.target, found.like, found.faults) == ("transformers", "deepspeed@26.08", ())
    assert (says["zero_stage"], says["recompute"], says["micro_batch_size"]) == (3, "full", 2)
    assert (says["num_micro_batches"], says["global_batch_size"]) == (8, 256)
    several = SCRIPT.replace("    Trainer(", "    TrainingArguments(per_device_train_batch_size=9)\n    Trainer(")
    assert read(tmp_path, "train.py", several).says["micro_batch_size"] == 2  # nothing keeps it
    several = SCRIPT.replace("    Trainer(", "    b = TrainingArguments(per_device_train_batch_size=9)\n    Trainer(")
    with pytest.raises(PinError, match="makes several TrainingArguments"):
        read(tmp_path, "train.py", several, format="transformers")
    with pytest.raises(PinError, match="nothing that transformers takes"):
        read(tmp_path, "train.py", SCRIPT.replace("TrainingArguments", "Arguments"), format="transformers")


# As accelerate config writes them
FSDP = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def launched(options: str, arguments: str = "") -> str:
    return f"accelerate launch {options} train.py --per_device_train_batch_size 2 {arguments}\n"


def test_what_accelerate_launch_takes_is_read_with_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    found = read(tmp_path, "run.sh", launched("--config_file fsdp.yaml"))
    says = found.says
    assert (says["zero_stage"], says["recompute"], says["precision"]) == (2, "full", "bf16")
    assert (says["dp"], says["global_batch_size"], found.faults, found.not_read) == (16, 32, (), ())
    more = "--config_file fsdp.yaml --fsdp_reshard_after_forward true --mixed_precision fp16 --num_processes 8"
    found = read(tmp_path, "run.sh", launched(more))  # options count more than the file
    assert (found.says["zero_stage"], found.says["precision"]) == (3, "fp16")
    assert found.faults == ("num_processes=8, but the cluster has 16 devices; nearest: num_processes=16",)
    # arguments count more than both
    own = read(
        tmp_path, "run.sh", launched("--config_file fsdp.yaml", "--fp16 --deepspeed '{\"zero_optimization\": {}}'")
    )
    assert (own.says["zero_stage"], own.says["precision"], own.like) == (0, "fp16", "deepspeed@26.08")


def test_engines_of_accelerate_launch(tmp_path: Path) -> None:
    found = read(tmp_path, "run.sh", launched("--use_deepspeed --zero_stage=3 --offload_optimizer_device cpu"))
    assert (found.says["zero_stage"], found.says["offload"], found.like) == (3, ("optimizer",), "deepspeed@26.08")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    found = read(tmp_path, "run.sh", launched("--use_deepspeed --deepspeed_config_file ds.json"))
    assert (found.says["zero_stage"], found.says["precision"]) == (1, "bf16-grad16")
    found = read(tmp_path, "run.sh", launched("--multi_gpu --mixed_precision=no"))
    assert (found.says["zero_stage"], found.says["precision"]) == (0, "fp32")


def test_what_accelerate_launch_says_elsewhere_is_not_assumed(tmp_path: Path) -> None:
    for options in ("", "--config_file missing.yaml"):
        with pytest.raises(PinError, match=r"decide fsdp=the configuration of accelerate launch; give --zero-stage"):
            read(tmp_path, "run.sh", launched(options))
    found = read(tmp_path, "run.sh", launched(""), given={"zero_stage": 3})
    assert found.open["precision"] == "bf16=the configuration of accelerate launch"
    assert read(tmp_path, "run.sh", launched("", "--fsdp full_shard --bf16")).says["zero_stage"] == 3


def test_trainers_with_other_defaults_are_named(tmp_path: Path) -> None:
    text = "per_device_train_batch_size: 2\nbf16: true\nmax_length: 2048\nuse_peft: true\nlora_r: 16\n"
    with pytest.raises(PinError, match="gradient_checkpointing is not stated, and TRL, which use_peft is of"):
        read(tmp_path, "sft.yaml", text)
    found = read(tmp_path, "sft.yaml", f"{text}gradient_checkpointing: false\n")
    assert (found.target, found.says["recompute"]) == ("transformers", "none")
    assert found.warnings == (
        "not read, since they are the script's own: max_length=2048 (give --seq-len)",
        "no engine is named: DistributedDataParallel, unless accelerate launch is told another (give --zero-stage)",
    )
    assert found.says["adapters"] == "lora:16"
    with pytest.raises(PinError, match="LLaMA-Factory"):
        read(tmp_path, "sft.yaml", "per_device_train_batch_size: 2\nbf16: true\ntemplate: llama3\n")


def test_names_of_fsdp_config_may_begin_with_fsdp(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_version": 2, "fsdp_reshard_after_forward": False}))
    text = json.dumps({"per_device_train_batch_size": 2, "fsdp": "full_shard", "fsdp_config": "fsdp.json"})
    assert read(tmp_path, "arguments.json", text).says["zero_stage"] == 2
    assert read(tmp_path, "arguments.json", text.replace("fsdp.json", "{}")).says["zero_stage"] == 3
    with pytest.raises(PinError, match="fsdp_config is not JSON"):
        read(tmp_path, "arguments.json", text.replace("fsdp.json", "{"))
