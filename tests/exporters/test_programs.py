"""What the program of a script says: whether it trains, which one starts another, and warnings of what is beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

MEGATRON = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --seq-length 2048 --bf16"
TRAINER = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing true"
NODE = "1x8xa100-sxm4-80gb"


def read(path: Path, text: str, name: str = "run.sh") -> ConfigFile:
    (path / name).write_text(text)
    return read_config(path / name, graph=load_model("llama-2-7b"), cluster=NODE)


@pytest.mark.parametrize(
    ("program", "flags", "does"),
    [
        ("tools/run_text_generation_server.py", MEGATRON, "trains nothing"),
        ("tools/merge_mp_partitions.py", MEGATRON, "trains nothing"),
        ("hf2mcore_70b.py", MEGATRON, "trains nothing"),
        ("./tasks/main.py", MEGATRON, "other heads"),
        ("open_instruct/dpo_tune_cache.py", TRAINER, "pairs of answers"),
        ("-m verl.trainer.main_ppo", TRAINER, "rates them"),
        ("train_reward_model.py", TRAINER, "reward model"),
    ],
)
def test_programs_that_train_no_language_model_are_refused(tmp_path: Path, program: str, flags: str, does: str) -> None:
    with pytest.raises(PinError, match=does) as error:
        read(tmp_path, f"torchrun --nproc_per_node 8 {program} {flags}\n")
    assert program.removeprefix("-m ") in str(error.value)


def test_scripts_that_also_convert_are_read(tmp_path: Path) -> None:
    both = f"python tools/convert.py {MEGATRON.replace('size 2', 'size 4', 1)}\ntorchrun pretrain_gpt.py {MEGATRON}\n"
    assert read(tmp_path, both).says["tp"] == 2
    assert read(tmp_path, f"torchrun --nproc_per_node 8 generative_pretraining.py {MEGATRON}\n").says["tp"] == 2


def test_a_program_that_starts_another_one_has_it_behind_two_dashes(tmp_path: Path) -> None:
    launch = "accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed --zero_stage 2"
    found = read(tmp_path, f"python mason.py --gpus 8 --env A=1 -- {launch} finetune.py {TRAINER}\n")
    assert (found.says["zero_stage"], found.says["precision"], found.says["micro_batch_size"]) == (2, "bf16", 2)
    assert "gpus" not in found.foreign and found.like.startswith("deepspeed@")
    alone = read(tmp_path, f"{launch} -- finetune.py {TRAINER}\n")  # options end there
    assert (alone.says["zero_stage"], alone.says["precision"], alone.like) == (2, "bf16", found.like)
    with pytest.raises(PinError, match="open-instruct"):
        read(tmp_path, f"torchrun --nproc_per_node 8 olmo_core_finetune.py {TRAINER} --mixer_list a 1.0\n")


def test_precision_is_as_open_as_the_engine(tmp_path: Path) -> None:
    said = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "output_dir": "out"}
    open_, stated = (read(tmp_path, json.dumps(values), "a.json") for values in (said, {**said, "bf16": True}))
    assert any("--zero-stage, --precision" in text for text in open_.warnings)
    assert any("give --zero-stage)" in text for text in stated.warnings)


@pytest.mark.parametrize(
    ("method", "recompute"), [("uniform", "full"), ("block --activations-checkpoint-num-layers 3", (3, 3))]
)
def test_recompute_of_megatron_in_2021(tmp_path: Path, method: str, recompute: object) -> None:
    flags = f"{MEGATRON} --pipeline-model-parallel-size 2 --activations-checkpoint-method {method}"
    found = read(tmp_path, f"python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py {flags}\n")
    assert (found.says["recompute"], found.like, found.foreign) == (recompute, "megatron-lm@22.04", ())


def test_state_on_disks_is_said_to_be_priced_as_memory(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}
    values = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    found = read(tmp_path, json.dumps(values), "ds.json")
    assert any("nvme is priced as memory of the host" in text for text in found.warnings)
    zero["offload_optimizer"] = {"device": "cpu"}
    assert not read(tmp_path, json.dumps(values), "ds.json").warnings


def test_an_engine_without_a_value_is_none(tmp_path: Path) -> None:
    """`deepspeed:` in axolotl's YAML: FSDP below it was lost, and without it DeepSpeed's settings were taken."""
    lines = [
        *("base_model: x", "micro_batch_size: 4", "gradient_accumulation_steps: 2", "sequence_len: 512", "bf16: auto"),
        *("gradient_checkpointing: true", "deepspeed:", "fsdp:", "  - full_shard", "fsdp_config:"),
        *("  fsdp_offload_params: true", "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"),
    ]
    found = read(tmp_path, "\n".join(lines), "a.yml")
    assert (found.says["zero_stage"], found.says["offload"]) == (3, ("parameters",))
    plain = read(tmp_path, "\n".join([*lines[:7], "fsdp:", "fsdp_config:"]), "b.yml")
    assert plain.says["zero_stage"] == 0 and plain.like.startswith("accelerate@") and found.like == plain.like


def test_launch_arguments_inside_of_a_file_are_those_of_accelerate_launch(tmp_path: Path) -> None:
    """JSON of fms-hf-tuning, which was read as DistributedDataParallel."""
    launch = {"use_fsdp": True, "num_machines": 1, "num_processes": 8, "mixed_precision": "bf16"}
    values = {
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "output_dir": "out"},
        "accelerate_launch_args": {**launch, "fsdp_sharding_strategy": "FULL_SHARD"},
    }
    found = read(tmp_path, json.dumps(values), "a.json")
    assert (found.says["zero_stage"], found.says["precision"], found.like) == (3, "bf16", "accelerate@26.08")
    assert not found.foreign
