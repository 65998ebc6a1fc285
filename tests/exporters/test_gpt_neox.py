"""YAML files of GPT-NeoX, as EleutherAI has them, and what DeepSpeed's engine makes of precision and ZeRO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# The degrees and settings of configs/20B.yml
LARGE: dict[str, Any] = {
    **{"pipe_parallel_size": 4, "model_parallel_size": 2, "seq_length": 2048, "num_layers": 44},
    **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32, "checkpoint_activations": True},
    **{"zero_optimization": {"stage": 1, "reduce_bucket_size": 1.26e9, "overlap_comm": True}},
    **{"fp16": {"fp16": True, "enabled": True}, "bias_gelu_fusion": True},
}


def read(folder: Path, values: dict[str, Any], name: str = "neox.yml", **options: Any) -> ConfigFile:
    path = folder / name
    path.write_text(json.dumps(values))  # which is YAML, too
    return read_config(path, cluster="12x8xa100-sxm4-40gb", **options)


def test_a_file_is_read_with_the_defaults_of_its_own(tmp_path: Path) -> None:
    says = read(tmp_path, LARGE).says
    wanted = {"pp": 4, "tp": 2, "dp": 12, "micro_batch_size": 4, "global_batch_size": 1536, "seq_len": 2048}
    wanted |= {"zero_stage": 1, "zero_bucket": 1_260_000_000, "recompute": "full", "precision": "fp16-grad16"}
    wanted |= {"mode": "fused", "attention": "unfused", "sequence_parallel": False, "overlap_zero": False}
    assert wanted.items() <= says.items()  # pipelines reduce at the end, whatever overlap_comm says
    graph = load_model("llama-3.1-8b")
    assert read(tmp_path, LARGE, graph=graph).says["stages"] == (8, 8, 8, 8)  # of the model's 32 layers
    dashes = {name.replace("_", "-"): value for name, value in LARGE.items() if not isinstance(value, dict)}
    assert read(tmp_path, {**dashes, "zero_optimization": {"stage": 1}}).says["pp"] == 4


@pytest.mark.parametrize(("change", "wanted"), [
    ({"pipe_parallel_size": 0}, {"pp": 1, "overlap_zero": True}),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, {"offload": ("optimizer",)}),
    ({"attention_config": [[["flash"], 44]]}, {"attention": "flash2"}),
    ({"precision": "bfloat16", "fp16": None}, {"precision": "bf16-grad16", "zero_stage": 1, "whole_sums": False}),
    ({"precision": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}}, {"whole_sums": True, "zero_stage": 1}),
    ({"precision": "bfloat16", "zero_optimization": {"stage": 0}}, {"whole_sums": True, "zero_stage": 1}),
    ({"fp16": {"enabled": True, "type": "bfloat16"}, "zero_optimization": {"stage": 0}}, {"precision": "bf16-grad32"}),
])  # fmt: skip
def test_a_setting_is_what_the_engine_makes_of_it(
    change: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    assert wanted.items() <= read(tmp_path, {**LARGE, **change}).says.items()


@pytest.mark.parametrize(("change", "message"), [
    ({"attention_config": [[["mamba"], 44]]}, "attention_config of mamba is not priced"),
    ({"attention_config": [[["flash", "global"], 22]]}, "mixes flash, global"),
    ({"train_impl": "dpo"}, "train_impl=dpo of GPT-NeoX is more than a step of language modelling"),
    ({"zero_optimization": {"stage": 2}}, "stage=2 is not for models in a pipeline .pipe_parallel_size=4.; nearest"),
    ({"train_micro_batch_size_per_gpu": None}, "one of several that GPT-NeoX takes together"),
])  # fmt: skip
def test_what_is_not_priced_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {name: value for name, value in {**LARGE, **change}.items() if value is not None}
    with pytest.raises(PinError, match=message):
        read(tmp_path, values)


def test_what_is_priced_otherwise_is_named(tmp_path: Path) -> None:
    changes = {"partition_activations": True, "checkpoint_num_layers": 2, "optimizer": {"type": "sm3", "params": {}}}
    changes |= {"global_num_gpus": 64, "train_batch_size": 3072}
    found = read(tmp_path, {**LARGE, **changes})
    text = " ".join(found.warnings)
    for part in ("partition_activations=True", "checkpoint_num_layers=2", "optimizer.type=sm3", "global_num_gpus=64"):
        assert part in text
    assert "train_batch_size=3072 is not" in found.faults[0] and "= 1536; nearest" in found.faults[0]


def test_the_files_of_a_command_are_read_together(tmp_path: Path) -> None:
    parts = {"model.yml": ("pipe_parallel_size", "model_parallel_size", "seq_length"), "train.yml": LARGE}
    for name, kept in parts.items():
        values = {n: v for n, v in LARGE.items() if (n in parts["model.yml"][:3]) is (kept is parts["model.yml"])}
        (tmp_path / name).write_text(yaml.safe_dump(values))
    script = tmp_path / "run.sh"
    script.write_text("python ./deepy.py train.py -d . model train.yml --seq_length 4096\n")
    says = read_config(script, cluster="12x8xa100-sxm4-40gb").says
    assert (says["pp"], says["micro_batch_size"], says["seq_len"]) == (4, 4, 4096)
    script.write_text("python ./deepy.py train.py other.yml\n")
    with pytest.raises(PinError, match=r"names other\.yml, which is not found"):
        read_config(script)


@pytest.mark.parametrize(("version", "stage", "kept", "wanted"), [
    ("26.08", 0, None, {"zero_stage": 0, "precision": "bf16-grad16"}),  # Enable non-ZeRO mode (September 2025)
    ("24.06", 0, None, {"zero_stage": 1, "precision": "bf16-grad32", "whole_sums": True}),
    ("26.08", 1, "fp32", {"zero_stage": 1, "precision": "bf16-grad32", "whole_sums": True}),
    ("26.08", 2, "fp32", {"zero_stage": 2, "precision": "bf16-grad32", "whole_sums": False}),
    ("26.08", 1, None, {"zero_stage": 1, "precision": "bf16-grad16", "whole_sums": False}),
])  # fmt: skip
def test_deepspeed_of_a_version_chooses_the_optimizer(
    version: str, stage: int, kept: str | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    values: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    values |= {"data_types": {"grad_accum_dtype": kept}} if kept else {}
    found = read(tmp_path, values, "ds.json", format=f"deepspeed@{version}")
    assert wanted.items() <= found.says.items() and not found.faults


def test_deepspeed_refuses_32_bit_gradients_without_zero(tmp_path: Path) -> None:
    values = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert "needs ZeRO since January 2026" in read(tmp_path, values, "ds.json", format="deepspeed@26.08").faults[0]
    assert not read(tmp_path, values, "ds.json", format="deepspeed@25.10").faults


def test_a_degree_that_is_no_field_of_the_target_is_refused(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 1, "bf16": True, "pipeline_model_parallel_size": 4}
    with pytest.raises(
        PinError, match="pipeline_model_parallel_size=4 is a degree, which autoplan does not read from f"
    ):
        read(tmp_path, values, "train.yaml")
    assert read(tmp_path, values, "train.yaml", given={"pp": 4}).foreign == ("pipeline_model_parallel_size",)
    values["pipeline_model_parallel_size"] = 1
    values["exp_manager"] = {"model_parallel_size": 8}  # of checkpoints
    assert read(tmp_path, values, "train.yaml").says["dp"] == 96
