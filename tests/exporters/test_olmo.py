"""YAML files of Ai2's OLMo, and the commands that change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As configs/official-1124/OLMo2-7B-stage1.yaml
STAGE_1: dict[str, Any] = {
    "model": {"d_model": 4096, "n_heads": 32, "n_layers": 32, "flash_attention": True, "max_sequence_length": 4096},
    **{"fused_loss": True, "compile": None, "optimizer": {"name": "adamw", "learning_rate": 3e-4}},
    **{"global_train_batch_size": 1024, "device_train_microbatch_size": 2, "precision": "amp_bf16"},
    "fsdp": {"wrapping_strategy": "by_block_and_size", "precision": "mixed"},
    "device_eval_batch_size": "${device_train_microbatch_size}",
}


def read(folder: Path, **changes: Any) -> ConfigFile:
    path = folder / "OLMo.yaml"
    path.write_text(yaml.safe_dump({**STAGE_1, **changes}))
    return read_config(path, graph=load_model("olmo-2-7b"), cluster="16x8xh100-sxm5-80gb")


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read(tmp_path)
    wanted = {"dp": 128, "zero_stage": 3, "micro_batch_size": 2, "global_batch_size": 1024, "seq_len": 4096}
    wanted |= {"recompute": "none", "precision": "bf16-grad32", "fused_loss": "flash", "mode": "eager"}
    assert wanted.items() <= found.says.items() and not found.faults + found.warnings + found.foreign


@pytest.mark.parametrize(("changes", "wanted"), [
    ({"distributed_strategy": "ddp", "fsdp": None}, {"zero_stage": 0}),
    ({"fsdp": {"sharding_strategy": "HYBRID_SHARD", "precision": "mixed"}}, {"zero_stage": 3, "zero_replicas": 16}),
    ({"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "precision": "mixed"}}, {"zero_stage": 2}),
    ({"activation_checkpointing": "whole_layer", "compile": {"fullgraph": False}},
     {"recompute": "full", "mode": "compiled"}),
])  # fmt: skip
def test_a_setting_counts(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    assert wanted.items() <= read(tmp_path, **changes).says.items()


def test_layers_with_some_numbers_are_recomputed(tmp_path: Path) -> None:
    kinds = read(tmp_path, activation_checkpointing="one_in_four").says["recompute"]
    assert list(kinds)[:2] == ["model.layers.0", "model.layers.4"] and len(kinds) == 8
    with pytest.raises(PinError, match="fine_grained is not priced; nearest: whole_layer"):
        read(tmp_path, activation_checkpointing="fine_grained")


def test_what_is_priced_otherwise_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, fsdp={"precision": "pure"}, optimizer={"name": "lionw"})
    assert "the whole model is gathered at once" in found.warnings[0]
    assert not read(tmp_path, distributed_strategy="ddp", fsdp=None).warnings
    assert "optimizer.name=lionw" in found.warnings[1] and "fsdp.precision=pure" in found.warnings[1]


def test_flags_of_the_command_count_more(tmp_path: Path) -> None:
    read(tmp_path)
    script = tmp_path / "train.sh"
    flags = "--fsdp.sharding_strategy=HYBRID_SHARD --activation_checkpointing=one_in_two --compile.fullgraph=false"
    script.write_text(f"torchrun --nproc-per-node 8 scripts/train.py OLMo.yaml {flags} --save_folder=$X\n")
    says = read_config(script, graph=load_model("olmo-2-7b"), cluster="16x8xh100-sxm5-80gb").says
    assert (says["zero_replicas"], says["mode"], len(says["recompute"])) == (16, "compiled", 16)
