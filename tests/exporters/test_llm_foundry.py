"""YAML files of MosaicML's llm-foundry, and values that refer to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config
from autoplan.exporters.syntax import ReferringYaml

# As scripts/train/yamls/pretrain/mpt-7b.yaml
MPT: dict[str, Any] = {
    "variables": {"max_seq_len": 2048},
    "max_seq_len": "${variables.max_seq_len}",
    "model": {"name": "mpt_causal_lm", "d_model": 4096, "n_heads": 32, "n_layers": 32},
    "train_loader": {"name": "text", "num_workers": 8},
    "optimizer": {"name": "decoupled_adamw", "lr": 1.2e-4},
    **{"global_train_batch_size": 1024, "device_train_microbatch_size": 8, "precision": "amp_bf16"},
    "fsdp_config": {
        **{"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE"},
        **{"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
    },
}


def read(folder: Path, data: dict[str, Any]) -> ConfigFile:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(data))
    return read_config(path, cluster="4x8xa100-sxm4-80gb")


def sharded(**changes: Any) -> dict[str, Any]:
    return {**MPT, "fsdp_config": {**MPT["fsdp_config"], **changes}}


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, MPT)
    wanted = {"dp": 32, "zero_stage": 3, "micro_batch_size": 8, "global_batch_size": 1024, "seq_len": 2048}
    wanted |= {"recompute": "full", "reruns": "needed", "precision": "bf16-grad32", "fused_loss": "flash"}
    assert wanted.items() <= found.says.items() and not found.faults and not found.foreign
    assert read(tmp_path, {"compute": {"gpus": 32}, "parameters": MPT}).says == found.says  # a file of mcli


@pytest.mark.parametrize(("data", "wanted"), [
    (sharded(sharding_strategy="HYBRID_SHARD"), {"zero_stage": 3, "zero_replicas": 4}),
    (sharded(sharding_strategy="SHARD_GRAD_OP"), {"zero_stage": 2, "zero_replicas": 1}),
    (sharded(activation_checkpointing_reentrant=True), {"reruns": "whole"}),
    ({n: v for n, v in MPT.items() if n != "fsdp_config"}, {"zero_stage": 0, "recompute": "none"}),
    ({**MPT, "model": {"name": "hf_causal_lm"}}, {"fused_loss": "torch"}),
    ({**MPT, "global_train_batch_size": 64}, {"micro_batch_size": 2}),
    ({**MPT, "model": {"name": "hf_causal_lm", "peft_config": {"r": 64, "target_modules": ["Wqkv"]}}},
     {"adapters": "lora:64:Wqkv"}),
])  # fmt: skip
def test_a_setting_is_what_composer_makes_of_it(data: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    assert wanted.items() <= read(tmp_path, data).says.items()


def test_what_is_not_priced_is_named(tmp_path: Path) -> None:
    data = {**sharded(activation_cpu_offload=True), "optimizer": {"name": "decoupled_lionw"}}
    (said,) = read(tmp_path, data).warnings
    assert "decoupled_lionw" in said and "activation_cpu_offload=True" in said
    assert "give --mbs" in read(tmp_path, {**MPT, "device_train_microbatch_size": "auto"}).faults[0]
    with pytest.raises(PinError, match=r"=0\.5 is a part of a sequence"):
        read(tmp_path, {**MPT, "device_train_microbatch_size": 0.5})


def test_references_are_followed() -> None:
    text = "a: {b: 4, c: '${a.b}'}\nd: ${a.c}\ne: n-${a.b}\nf: ${env.X}\ng: ${g}\n"
    found = ReferringYaml().read(text, "x.yaml")
    assert found == {"a.b": 4, "a.c": 4, "d": 4, "e": "n-4", "?f": "${env.X}", "?g": "${g}"}
