"""Settings in other places: YAML of flags, `name=value` of MaxText, Megatron-DeepSpeed; names that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

FLAGS = """
ENV_VARS:
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --micro-batch-size: 1
  --global-batch-size: 64
  --seq-length: 4096
  --num-layers: 61
  --hidden-size: 7168
  --num-attention-heads: 32
  --recompute-granularity: selective
  --recompute-modules: "[core_attn mlp]"
  --lr: 3.9e-6
  --finetune: false
  --bf16: true
  --new-kernels: true
"""
MAXTEXT = """
export EXECUTABLE=${1:-${EXECUTABLE:-train}}
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${CONFIGS:-${ROOT:-$PWD}/src/configs}"/models/own.yml \\
    run_name=$RUN dcn_data_parallelism=2 per_device_batch_size=4 max_target_length=4096 steps=10
"""
MEGATRON_DEEPSPEED = """
deepspeed pretrain_gpt.py --tensor-model-parallel-size 1 --ds-sequence-parallel-size 4 --micro-batch-size 1 \\
    --global-batch-size 64 --seq-length 32768 --num-layers 32 --bf16 --deepspeed --deepspeed_config=ds.json \\
    --cpu-optimizer --moe-expert-parallel-size 2 --num-experts 8
"""


def read(folder: Path, name: str, text: str, model: str = "llama-3.1-8b", **more: Any) -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, graph=graph_of(model), **{"cluster": CLUSTER, **more})


def test_flags_in_yaml_are_those_of_a_script(tmp_path: Path) -> None:
    found = read(tmp_path, "model_config.yaml", FLAGS)
    says = found.says
    assert (found.target, found.faults, says["tp"], says["zero_stage"]) == ("megatron-lm", (), 2, 1)
    assert (says["recompute"], says["expandable_segments"]) == ("modules:core_attn,mlp", True)
    open_degree = FLAGS.replace("size: 2\n", "size: ${TP}\n", 1)
    with pytest.raises(PinError, match=r"does not decide tensor_model_parallel_size=\$\{TP\}; give --tp"):
        read(tmp_path, "model_config.yaml", open_degree)


def test_sizes_of_another_model_and_unknown_names_are_said(tmp_path: Path) -> None:
    found = read(tmp_path, "model_config.yaml", FLAGS)
    assert [text for text in found.warnings if "its own are priced" in text] == [
        "num_layers=61, but llama-3.1-8b has 32; its own are priced",
        "hidden_size=7168, but llama-3.1-8b has 4096; its own are priced",
    ]
    assert found.foreign == ("new_kernels",)


def test_maxtext_is_read_from_its_command(tmp_path: Path) -> None:
    models = tmp_path / "src" / "configs" / "models"
    models.mkdir(parents=True)
    (models / "own.yml").write_text("base_config: base.yml\nremat_policy: minimal\nmax_target_length: 1\n")
    found = read(tmp_path, "16vm.sh", MAXTEXT)
    says = found.says
    assert (found.target, found.faults, found.foreign) == ("maxtext", (), ())
    assert (says["dp"], says["zero_stage"], says["zero_replicas"]) == (16, 3, 2)
    assert (says["recompute"], says["seq_len"], says["global_batch_size"]) == ("none", 4096, 64)
    with pytest.raises(PinError, match=r"base_config='src/configs/models/gone.yml' names a file that is not found"):
        read(tmp_path, "gone.sh", MAXTEXT.replace("own.yml", "gone.yml"))
    with pytest.raises(PinError, match=r"per_device_batch_size=\$SIZE; give --micro-batch-size"):
        read(tmp_path, "open.sh", MAXTEXT.replace("_size=4", "_size=$SIZE"))


def test_axes_within_a_slice_of_tpus_are_not_those_of_hosts(tmp_path: Path) -> None:
    text = "base_config: base.yml\nici_fsdp_parallelism: -1\nper_device_batch_size: 1\n"
    one = read(tmp_path, "own.yml", text, cluster="64xtpu-v5p").says
    assert (one["dp"], one["zero_replicas"]) == (64, 1)  # 16 hosts, one slice
    two = read(tmp_path, "own.yml", text, cluster="512xtpu-v5e").says
    assert (two["dp"], two["zero_replicas"]) == (512, 2)  # a slice has 256


def test_degrees_of_megatron_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}')
    says = read(tmp_path, "run.sh", MEGATRON_DEEPSPEED, "mixtral-8x7b").says
    assert (says["cp"], says["context_method"], says["dp"], says["zero_stage"]) == (4, "ulysses", 4, 1)
    assert (says["ep"], says["etp"], says["offload"]) == (2, 1, ("optimizer",))
    with pytest.raises(PinError, match=r"deepspeed_config=gone\.json is not found; nearest: its path"):
        read(tmp_path, "run.sh", MEGATRON_DEEPSPEED.replace("ds.json", "gone.json"))
    told = MEGATRON_DEEPSPEED.replace("ds.json", "gone.json --zero-stage 2")
    assert read(tmp_path, "run.sh", told).says["zero_stage"] == 2


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--use-torch-fsdp2", "zero_stage", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "zero_stage", 2),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", "zero_stage", 2),
        ("--use-flash-attn", "attention", "flash2"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "recompute", (0,)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout \"'Et*15|t*17,L'\"", "stages", (15, 17)),
    ],
)
def test_flags_that_were_read_as_something_else(tmp_path: Path, flags: str, name: str, value: Any) -> None:
    command = (
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --bf16"
    )
    assert read(tmp_path, "run.sh", f"{command} {flags}\n").says[name] == value


def test_parts_of_a_setting_that_are_priced_whole_are_said(tmp_path: Path) -> None:
    text = FLAGS + "  --optimizer-cpu-offload: true\n  --optimizer-offload-fraction: 0.2\n"
    text += "  --use-precision-aware-optimizer: true\n"
    found = read(tmp_path, "model_config.yaml", text)
    assert "optimizer_offload_fraction=0.2: the whole optimizer is priced on the host" in found.warnings
    groups = FLAGS.replace("selective", "full").replace(
        '--recompute-modules: "[core_attn mlp]"', "--recompute-num-layers: 4"
    )
    assert read(tmp_path, "model_config.yaml", groups).not_read == ("recompute_num_layers",)
