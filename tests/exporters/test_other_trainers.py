"""Trainers with arguments and defaults of their own: LLaMA-Factory, axolotl, ms-swift, DeepSpeed-Chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

FACTORY = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
lora_target: all
template: llama3
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1e-4
bf16: true
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
gradient_checkpointing: true
attn_implementation: flash_attention_2
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
"""
MESH = """
base_model: Qwen/Qwen3-8B
dp_shard_size: 4
context_parallel_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: false, offload_params: false}
sequence_len: 8192
micro_batch_size: 1
"""
SWIFT = """
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type lora --lora_rank 16 --max_length 2048 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --deepspeed zero2_offload
"""
MEGATRON = """
megatron sft --model Qwen/Qwen3-8B --load_from_cache_file true --tensor_model_parallel_size 2 \\
    --sequence_parallel true --max_length 4096 --packing true --micro_batch_size 2 \\
    --global_batch_size 64 --recompute_granularity none
"""
CHAT = """
deepspeed main.py --per_device_train_batch_size 4 --max_seq_len 512 --gradient_accumulation_steps 2 \\
    --zero_stage $STAGE --offload --dtype bf16 --gradient_checkpointing --deepspeed
"""


def read(folder: Path, name: str, text: str, **more: Any) -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, **more)


def test_llama_factory_has_its_own_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, "sft.yaml", FACTORY)
    says = found.says
    assert (found.target, found.faults, found.foreign) == ("transformers", (), ())
    assert (says["recompute"], says["precision"], says["seq_len"]) == ("full", "bf16", 2048)
    assert (says["adapters"], says["global_batch_size"]) == ("lora:8:all-linear", 128)
    assert found.warnings == ("2048 tokens are the most that a sequence has, since packing is off (give --seq-len)",)
    kept = read(tmp_path, "sft.yaml", FACTORY + "disable_gradient_checkpointing: true\ngradient_checkpointing: true\n")
    assert kept.says["recompute"] == "none"
    assert "adapters" not in read(tmp_path, "sft.yaml", FACTORY.replace(": lora\n", ": full\n", 1)).says
    with pytest.raises(PinError, match="stage=dpo of LLaMA-Factory is more than a step of language modelling"):
        read(tmp_path, "dpo.yaml", FACTORY.replace("stage: sft", "stage: dpo"))


@pytest.mark.parametrize(("name", "text", "more", "norms"), [
    ("sft.yaml", FACTORY, "enable_liger_kernel: true\n", True),
    ("qlora.yml", AXOLOTL, "liger_fused_linear_cross_entropy: true\nliger_rms_norm: true\nliger_rope: true\n", True),
    ("qlora.yml", AXOLOTL, "cut_cross_entropy: true\n", False),
])  # fmt: skip
def test_losses_in_one_with_the_head_are_read(name: str, text: str, more: str, norms: bool, tmp_path: Path) -> None:
    found = read(tmp_path, name, text + more)
    assert (found.says["fused_loss"], found.says.get("fused_norms", False), found.not_read) == ("linear", norms, ())
    assert "fused_loss" not in read(tmp_path, name, text).says
    assert "fused_loss" not in read(tmp_path, name, text + more.replace("true", "false")).says


def test_axolotl_is_what_it_tells_accelerate(tmp_path: Path) -> None:
    found = read(tmp_path, "qlora.yml", AXOLOTL)
    says = found.says
    assert (found.target, found.faults, found.not_read) == ("transformers", (), ())
    assert (says["zero_stage"], says["offload"], says["recompute"]) == (3, ("parameters",), "full")
    assert (says["adapters"], says["precision"], says["attention"]) == ("qlora:32:all-linear", "bf16", "flash2")
    assert (says["micro_batch_size"], says["global_batch_size"], says["seq_len"]) == (2, 128, 4096)
    assert found.warnings == ("attention stays within packed examples; give --document-len, their length",)
    mesh = read(tmp_path, "mesh.yml", MESH).says
    assert (mesh["tp"], mesh["cp"], mesh["dp"], mesh["zero_stage"], mesh["recompute"]) == (2, 2, 4, 2, "none")
    zero = read(
        tmp_path, "zero.yml", "base_model: m\nsequence_len: 512\ndeepspeed: deepspeed_configs/zero3_bf16.json\n"
    )
    assert (zero.like.partition("@")[0], zero.says["zero_stage"], zero.says["micro_batch_size"]) == ("deepspeed", 3, 1)
    pattern = AXOLOTL.replace("lora_target_linear: true", "lora_target_modules: 'layers.[0-9]+.(up|down)_proj'")
    with pytest.raises(PinError, match=r"adapters=lora_target_modules=layers.*; give --adapters"):
        read(tmp_path, "pattern.yml", pattern)
    with pytest.raises(PinError, match="rl=dpo of axolotl is more than a step"):
        read(tmp_path, "dpo.yml", AXOLOTL + "rl: dpo\n")


def test_adapters_of_a_file_are_priced_unless_typed(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(FACTORY)
    words = ("estimate", "llama-3.1-8b", "--cluster", CLUSTER, "--from", str(path), "--json")
    assert json.loads(run(*words).stdout)["request"]["adapters"] == "lora:8:all-linear"
    assert json.loads(run(*words, "--adapters", "lora:64").stdout)["request"]["adapters"] == "lora:64"


def test_ms_swift_has_its_own_defaults_and_files(tmp_path: Path) -> None:
    found = read(tmp_path, "sft.sh", SWIFT)
    says = found.says
    assert (found.target, found.faults, says["adapters"]) == ("transformers", (), "lora:16:all-linear")
    assert (says["zero_stage"], says["offload"], says["recompute"]) == (2, ("optimizer",), "full")
    assert (says["precision"], says["seq_len"], says["global_batch_size"]) == ("bf16", 2048, 128)
    megatron = read(tmp_path, "megatron.sh", MEGATRON)
    says = megatron.says
    assert (megatron.target, megatron.faults, says["tp"], says["zero_stage"]) == ("megatron-lm", (), 2, 1)
    assert (says["precision"], says["seq_len"], says["recompute"]) == ("bf16-grad32", 4096, "none")
    assert says["attention"] == "flash2" and "adapters" not in says


def test_deepspeed_chat_makes_its_configuration_from_arguments(tmp_path: Path) -> None:
    found = read(tmp_path, "chat.sh", CHAT.replace("$STAGE", "3"))
    says = found.says
    assert (found.target, found.faults, says["zero_stage"], says["offload"]) == ("transformers", (), 3, ("parameters",))
    assert (says["precision"], says["seq_len"], says["recompute"]) == ("bf16", 512, "full")
    with pytest.raises(PinError, match=r"does not decide deepspeed=\$STAGE; give --zero-stage"):
        read(tmp_path, "chat.sh", CHAT)
    other = CHAT.replace("--zero_stage $STAGE", "")
    with pytest.raises(PinError, match="the configuration that the script makes for DeepSpeed; give --zero-stage"):
        read(tmp_path, "other.sh", other)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')
    named = read(tmp_path, "other.sh", other.replace("--deepspeed", "--deepspeed --bf16 --deepspeed_config ds.json"))
    assert (named.faults, named.says["zero_stage"], named.says["precision"]) == ((), 1, "bf16")


@pytest.mark.parametrize(("line", "precision"), [("fp8: true", "fp8"), ("pure_bf16: true", "native")])
def test_a_precision_of_the_trainer_counts_more_than_that_of_its_arguments(
    line: str, precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "factory.yaml"
    path.write_text(f"{FACTORY}{line}\n")
    found = read_config(path, cluster=CLUSTER)
    assert found.says["precision"] == precision and not found.foreign
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        f"{AXOLOTL.replace('fsdp: [full_shard, auto_wrap]', 'deepspeed: deepspeed_configs/zero1.json')}fp8: true"
    )
    assert read_config(path, cluster=CLUSTER).says["precision"] == "fp8"


def test_training_in_megatron_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mca.yaml"
    path.write_text(f"{FACTORY}pipeline_model_parallel_size: 1\n")
    with pytest.raises(
        PinError, match="pipeline_model_parallel_size is an argument of Megatron, in which LLaMA-Factory"
    ):
        read_config(path, cluster=CLUSTER)
