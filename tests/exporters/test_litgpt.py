"""YAML files of litgpt: what each of its commands makes of one device and of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As config_hub/pretrain/tinyllama.yaml and config_hub/finetune/llama-2-7b
SHARED: dict[str, Any] = {
    "out_dir": "out",
    "eval": {"interval": 100, "max_iters": 100, "max_new_tokens": None},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 4e-4, "betas": [0.9, 0.95]}},
    **{"logger_name": "csv", "seed": 42, "num_nodes": 1},
}
PRETRAIN: dict[str, Any] = {
    **SHARED,
    **{"model_name": "tiny-llama-1.1b", "model_config": None, "precision": "bf16-mixed", "devices": "auto"},
    **{"data": "TinyLlama", "tokenizer_dir": "x", "initial_checkpoint_dir": None},
    "train": {"global_batch_size": 512, "micro_batch_size": 4, "max_seq_length": 2048, "max_tokens": 3e12},
}
FULL: dict[str, Any] = {
    **SHARED,
    **{"checkpoint_dir": "checkpoints/x", "precision": "bf16-true", "devices": 8},
    "data": {"class_path": "litgpt.data.Alpaca2k", "init_args": {"seed": 42}},
    "train": {"global_batch_size": 64, "micro_batch_size": 4, "max_seq_length": 512, "epochs": 1},
}
LORA: dict[str, Any] = {**FULL, "quantize": None, "lora_r": 32, "lora_mlp": True, "lora_query": False}


def read(folder: Path, data: dict[str, Any], cluster: str = "1x8xa100-sxm4-80gb") -> ConfigFile:
    (folder / "config.yaml").write_text(yaml.safe_dump(data))
    return read_config(folder / "config.yaml", graph=load_model("llama-2-7b"), cluster=cluster)


@pytest.mark.parametrize(("data", "wanted"), [
    (PRETRAIN, {"zero_stage": 3, "recompute": "none", "mode": "compiled", "precision": "bf16", "seq_len": 2048,
                "micro_batch_size": 4, "num_micro_batches": 16, "reduce_once": True}),
    (FULL, {"zero_stage": 3, "recompute": "full", "mode": "eager", "precision": "native", "num_micro_batches": 2}),
    (LORA, {"zero_stage": 3, "recompute": "full", "adapters": "lora:32:v_proj,gate_proj,up_proj,down_proj"}),
    ({**FULL, "train": {"micro_batch_size": 1}}, {"global_batch_size": 16}),
    ({**FULL, "precision": None}, {"precision": "bf16"}),
])  # fmt: skip
def test_a_file_is_what_its_command_makes_of_it(data: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, data)
    assert wanted.items() <= found.says.items() and found.says["dp"] == 8 and found.target == "lightning"
    assert not (found.faults or found.foreign or found.not_read)


def test_one_device_has_neither_shards_nor_checkpoints(tmp_path: Path) -> None:
    alone = {**LORA, "devices": 1, "quantize": "bnb.nf4"}
    found = read(tmp_path, alone, "1x1xa100-sxm4-80gb")
    assert (found.says["zero_stage"], found.says["recompute"], found.says["num_micro_batches"]) == (0, "none", 16)
    assert str(found.says["adapters"]).startswith("qlora:32") and not found.faults
    assert "the cluster has 8 devices" in read(tmp_path, alone).faults[0]
    usual = {name: value for name, value in LORA.items() if name != "devices"}  # 1 in fine-tuning
    assert read(tmp_path, usual, "1x1xa100-sxm4-80gb").says["zero_stage"] == 0


def test_pre_training_on_nodes_replicates_shards(tmp_path: Path) -> None:
    found = read(tmp_path, {**PRETRAIN, "num_nodes": 2}, "2x8xa100-sxm4-80gb")
    assert (found.says["dp"], found.says["zero_replicas"], found.faults) == (16, 2, ())
    assert "the cluster has 16 devices" in read(tmp_path, {**PRETRAIN, "devices": 8}, "2x8xa100-sxm4-80gb").faults[0]


def test_batches_are_whole_micro_batches_of_every_device(tmp_path: Path) -> None:
    found = read(tmp_path, {**FULL, "train": {"global_batch_size": 100, "micro_batch_size": 4}})
    assert found.says["global_batch_size"] == 96 and any("100 is 96" in text for text in found.warnings)
    assert (
        "nearest: 32" in read(tmp_path, {**FULL, "train": {"global_batch_size": 16, "micro_batch_size": 4}}).faults[0]
    )


def test_what_is_not_priced_is_refused_or_named(tmp_path: Path) -> None:
    with pytest.raises(PinError, match="finetune_adapter"):
        read(tmp_path, {**FULL, "quantize": None})
    with pytest.raises(PinError, match="int8-training"):
        read(tmp_path, {**LORA, "quantize": "bnb.int8-training"})
    other = {**LORA, "lora_head": True, "optimizer": {"class_path": "torch.optim.SGD"}}
    said = " ".join(read(tmp_path, other).warnings)
    assert "optimizer SGD" in said and "lora_head" in said
    assert read(tmp_path, {**FULL, "lora_rank": 8}).foreign == ("lora_rank",)
