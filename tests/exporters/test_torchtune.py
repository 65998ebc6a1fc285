"""YAML files of torchtune's recipes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, export_setup, read_config
from autoplan.exporters.setup import Setup
from autoplan.search.request import PlanRequest

# As recipes/configs/llama3_3/70B_full_multinode.yaml has them
FULL: dict[str, Any] = {
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 1024},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": True},
    "model": {"_component_": "torchtune.models.llama3_3.llama3_3_70b"},
    **{"tensor_parallel_dim": 8, "data_parallel_shard_dim": -1, "data_parallel_replicate_dim": 1},
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
    **{"batch_size": 4, "gradient_accumulation_steps": 2, "dtype": "bf16", "compile": True},
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "enable_activation_checkpointing": True,
}
LORA = {"_component_": "torchtune.models.llama3_1.qlora_llama3_1_8b", "lora_attn_modules": ["q_proj", "output_proj"]}


def read(folder: Path, **changes: Any) -> ConfigFile:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**FULL, **changes}))
    return read_config(path, cluster="4x8xh100-sxm5-80gb")


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    found = read(tmp_path)
    wanted = {"tp": 8, "dp": 4, "cp": 1, "zero_stage": 3, "micro_batch_size": 4, "global_batch_size": 32}
    wanted |= {"seq_len": 1024, "precision": "native", "recompute": "full", "mode": "compiled", "offload": ()}
    wanted["fused_loss"] = "chunked"
    assert wanted.items() <= found.says.items() and not found.faults and "adapters" not in found.says
    assert "attention stays within packed" in found.warnings[0]
    assert read(tmp_path, loss={"_component_": "torch.nn.CrossEntropyLoss"}).says["fused_loss"] == "torch"


@pytest.mark.parametrize(("changes", "wanted"), [
    ({"fsdp_reshard_after_forward": False, "fsdp_cpu_offload": True}, {"zero_stage": 2, "offload": ("parameters",)}),
    ({"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 2}, {"dp": 4, "zero_replicas": 2}),
    ({"tensor_parallel_dim": 1, "context_parallel_dim": 4}, {"cp": 4, "dp": 8, "context_method": "gather"}),
    ({"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": "op"}, {"recompute": "products"}),
    ({"model": {**LORA, "lora_rank": 16, "apply_lora_to_mlp": True}},
     {"adapters": "qlora:16:q_proj,o_proj,gate_proj,up_proj,down_proj"}),
])  # fmt: skip
def test_a_setting_of_a_recipe_counts(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    assert wanted.items() <= read(tmp_path, **changes).says.items()


@pytest.mark.parametrize(("changes", "message"), [
    ({"teacher_model": {"_component_": "a.b"}}, "distillation of torchtune is more than a step"),
    ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "training with DPOLoss of torchtune"),
    ({"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": 2}, "ac_option=2 is not priced"),
    ({"model": {**LORA, "lora_attn_modules": ["qkv"]}}, "lora_attn_modules has 'qkv'; use q_proj"),
])  # fmt: skip
def test_what_is_not_priced_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PinError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"data_parallel_shard_dim": 8}, "dp x cp x tp = 64, but there are 32 devices"),
    ({"tensor_parallel_plan": None}, "tensor_parallel_dim=8 needs tensor_parallel_plan"),
    ({"data_parallel_replicate_dim": 4}, "leaves nothing to shard"),
])  # fmt: skip
def test_what_torchtune_refuses_is_a_fault(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({n: v for n, v in {**FULL, **changes}.items() if v is not None}))
    found = read_config(path, cluster="4x8xh100-sxm5-80gb")
    assert any(message in fault for fault in found.faults)


def test_adapters_of_a_plan_are_written(tmp_path: Path) -> None:
    asked = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("2x8xh100-sxm5-80gb"), 4096, 64, like="torchtune")
    made = Setup.of(asked, ParallelConfig(dp=16, zero_stage=3, num_micro_batches=4))
    setup = dataclasses.replace(made, left=(("adapters=lora:8:v_proj,up_proj", "the model"),))
    export = export_setup(setup, "torchtune")
    path = tmp_path / "plan.yaml"
    path.write_text(export.text)
    assert "lora_finetune_distributed" in export.launch[-1]
    assert (
        read_config(path, cluster="2x8xh100-sxm5-80gb").says["adapters"] == "lora:8:v_proj,gate_proj,up_proj,down_proj"
    )
