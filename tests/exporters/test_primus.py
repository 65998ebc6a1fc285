"""Experiments of AMD's Primus, for Megatron-LM and torchtitan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config


def read(folder: Path, framework: str = "megatron", config: str = "pre_trainer.yaml", model: str = "llama3.1_8B.yaml",
         given: str = "llama-3.1-8b", **overrides: Any) -> ConfigFile:  # fmt: skip
    module = {"framework": framework, "config": config, "model": model, "overrides": overrides}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({"work_group": "${PRIMUS_TEAM:amd}", "modules": {"pre_trainer": module}}))
    return read_config(path, graph=load_model(given), cluster="1x8xmi300x-192gb")


def test_an_experiment_has_the_defaults_of_its_presets(tmp_path: Path) -> None:
    found = read(tmp_path, tensor_model_parallel_size="${PRIMUS_TP:2}", overlap_grad_reduce=True)
    wanted = {"tp": 2, "dp": 4, "micro_batch_size": 2, "global_batch_size": 16, "seq_len": 1024, "zero_stage": 1}
    wanted |= {"precision": "bf16-grad32", "sequence_parallel": True, "overlap_zero": True, "recompute": "none"}
    assert found.target == "megatron-lm" and wanted.items() <= found.says.items() and not found.faults
    assert read(tmp_path, config="sft_trainer.yaml").says["zero_stage"] == 0


@pytest.mark.parametrize(("overrides", "wanted"), [
    ({"use_torch_fsdp2": True, "use_distributed_optimizer": False}, {"zero_stage": 3}),
    ({"fp8": "hybrid"}, {"precision": "fp8-grad32"}),
    ({"gradient_accumulation_fusion": False}, {"fused_accumulation": False}),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 32}, {"recompute": (32,)}),
    ({"lora": {"enabled": True, "dim": 16}}, {"adapters": "lora:16:all-linear"}),
    ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, {"fused_loss": "online"}),
])  # fmt: skip
def test_overrides_are_flags(overrides: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, **overrides)
    assert wanted.items() <= found.says.items() and not found.faults


def test_presets_of_models_spread_experts(tmp_path: Path) -> None:
    says = read(
        tmp_path, model="deepseek_v2_lite.yaml", given="mixtral-8x7b", enable_primus_turbo=True, use_turbo_deepep=True
    ).says
    assert (says["ep"], says["dispatcher"]) == (8, "flex")
    assert read(tmp_path, model="mixtral_8x7B_v0.1.yaml", given="mixtral-8x7b").says["ep"] == 1


@pytest.mark.parametrize(("overrides", "message"), [
    ({"pipeline_model_parallel_size": "${PRIMUS_PP}"}, "pipeline_model_parallel_size=.*give --pp"),
    ({"pipeline_model_parallel_size": 2, "patch_zero_bubble": True}, "patch_zero_bubble=True"),
    ({"model_type": "mamba"}, "model_type=mamba of Primus is not priced"),
])  # fmt: skip
def test_what_is_not_known_is_asked_for(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PinError, match=message):
        read(tmp_path, **overrides)


def test_experiments_for_torchtitan_have_its_fields(tmp_path: Path) -> None:
    training = {"local_batch_size": 4, "seq_len": 8192, "mock_data": False}
    found = read(tmp_path, "torchtitan", training=training, parallelism={"tensor_parallel_degree": 2})
    wanted = {"tp": 2, "dp": 4, "zero_stage": 3, "micro_batch_size": 4, "global_batch_size": 16, "seq_len": 8192}
    wanted |= {"recompute": "none", "mode": "compiled", "precision": "bf16"}
    assert (found.target, found.version) == ("torchtitan", "26.02") and not found.faults
    assert wanted.items() <= found.says.items()
    assert read(tmp_path, "torchtitan", model="llama3.1_8B-fp8.yaml", training=training).says["precision"] == "fp8"


def test_other_frameworks_of_primus_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        PinError, match="an experiment of Primus for maxtext, which is not read; nearest: megatron, torch"
    ):
        read(tmp_path, "maxtext")
