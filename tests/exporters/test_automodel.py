"""NeMo Automodel's recipes: what its own code refuses, what it runs, and recipes before 2026.

The faults are those of nemo_automodel at 36044ad3d (recipes/_dist_utils.py, distributed/mesh_utils.py and
pipelining/functional.py, recipes/llm/train_ft.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from configurations import BATCH, CLUSTER, graph_of, request

from autoplan.config.adapters import read_adapters
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, export_setup, read_config
from autoplan.exporters.setup import Setup
from autoplan.program.adapters import with_adapters

# As examples/llm_benchmark/qwen/qwen3_moe_235b_te_deepep.yaml has them, on fewer devices
PUBLIC: dict[str, Any] = {
    "recipe": "BenchmarkingRecipeForNextTokenPrediction",
    "distributed": {
        "strategy": "fsdp2",
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": 2,
        "ep_size": 8,
        "sequence_parallel": False,
        "activation_checkpointing": True,
        "pipeline": {
            "pp_schedule": "interleaved1f1b",
            "pp_microbatch_size": 1,
            "round_virtual_stages_to_pp_multiple": "up",
            "layers_per_stage": 3,
        },
        "moe": {"reshard_after_forward": False, "wrap_outer_model": False},
    },
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 8},
    "model": {"backend": {"attn": "te", "linear": "te", "experts": "gmm", "dispatcher": "deepep"}},
    "dataset": {"seq_len": 4096},
}


def read(data: dict[str, Any], folder: Path, model: str = "mixtral-8x7b") -> ConfigFile:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return read_config(path, graph=graph_of(model), cluster=CLUSTER, lenient=True)


def changed(**distributed: Any) -> dict[str, Any]:
    """A dense recipe without a pipeline, with other values in its section `distributed`."""
    return {
        "distributed": {"strategy": "fsdp2", "tp_size": 1, **distributed},
        "step_scheduler": {"global_batch_size": 64, "local_batch_size": 4},
    }


def test_a_public_recipe_is_read(tmp_path: Path) -> None:
    """32 layers by 3 are 11 stages, rounded up to 12; gathered parameters stay, as in ZeRO 1."""
    found = read(PUBLIC, tmp_path)
    says = found.says
    assert (found.target, found.faults, found.like) == ("automodel", (), "automodel@26.08")
    assert (says["dp"], says["pp"], says["ep"], says["etp"], says["virtual_stages"]) == (8, 2, 8, 1, 6)
    assert says["stages"] == (3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2) and says["schedule"] == "Interleaved1F1B"
    assert (says["zero_stage"], says["recompute"], says["dispatcher"], says["mode"]) == (1, "full", "flex", "fused")
    assert found.warnings == () and found.not_read == ("model.backend.experts",)


def test_a_recipe_before_2026_is_read(tmp_path: Path) -> None:
    new = PUBLIC["distributed"]
    names = ("tp_size", "cp_size", "pp_size", "ep_size")
    old = {
        **PUBLIC,
        "distributed": {"_target_": "nemo_automodel.components.distributed.fsdp2.FSDP2Manager"}
        | {name: new[name] for name in names},
        "autopipeline": new["pipeline"],
        "parallelizer": {"activation_checkpointing": True, "reshard_after_forward": False},
        "model": {"backend": {"attn": "te", "linear": "te", "enable_deepep": True}},
    }
    found = read(old, tmp_path)
    assert (found.target, found.version, found.faults) == ("automodel", "26.01", ())
    assert found.says == read(PUBLIC, tmp_path).says


@pytest.mark.parametrize(("given", "model", "fault"), [
    ({"reshard_after_forward": True, "strategy": "ddp"}, "llama-3.1-8b", "no reshard_after_forward; nearest: leave"),
    ({"tp_size": 2, "strategy": "ddp"}, "llama-3.1-8b", "ddp has no tp_size=2; nearest: strategy: fsdp2"),
    ({"ep_size": 2, "strategy": "mfsdp"}, "mixtral-8x7b", "megatron_fsdp has no ep_size=2"),
    ({"dp_replicate_size": 16}, "llama-3.1-8b", "must divide dp_size=16 and be below it; nearest: 8"),
    ({"dp_replicate_size": 3}, "llama-3.1-8b", "must divide dp_size=16 and be below it; nearest: 2"),
    ({"dp_size": 4}, "llama-3.1-8b", "= 4, but there are 16 devices; nearest: dp_size: null"),
    ({"tp_size": 2, "enable_async_tensor_parallel": True}, "llama-3.1-8b", "nearest: sequence_parallel: true"),
    ({"activation_checkpointing": "selective", "strategy": "megatron_fsdp"}, "llama-3.1-8b", "needs strategy: fsdp2"),
    ({"pp_size": 8, "pipeline": {"pp_schedule": "1f1b"}}, "llama-3.1-8b", "fewer than pp_size=8; nearest: local_batch"),
    ({"pp_size": 2, "pipeline": {"layers_per_stage": 11}}, "llama-3.1-8b", "nearest: round_virtual_stages_to_pp_mul"),
    ({"pp_size": 2, "pipeline": {"layers_per_stage": 4}}, "llama-3.1-8b", "nearest: layers_per_stage=16"),
    ({"pp_size": 2, "pipeline": {"pp_schedule": "DualPipeV"}}, "llama-3.1-8b", "'dualpipev' is not known"),
    ({"tensor_parallel": 2}, "llama-3.1-8b", "distributed.tensor_parallel is not a field of automodel"),
])  # fmt: skip
def test_what_automodel_refuses(given: dict[str, Any], model: str, fault: str, tmp_path: Path) -> None:
    faults = read(changed(**given), tmp_path, model).faults
    assert any(fault in text for text in faults), faults


@pytest.mark.parametrize(("linear", "kind"), [("torch", "products"), ("te", "full")])
def test_selective_recompute_is_by_operation(linear: str, kind: str, tmp_path: Path) -> None:
    """distributed/activation_checkpointing.py: attention and every second product are kept, as in torchtitan."""
    recipe = {**changed(activation_checkpointing="selective"), "model": {"backend": {"linear": linear, "attn": "sdpa"}}}
    found = read(recipe, tmp_path, "llama-3.1-8b")
    assert found.says["recompute"] == kind
    assert any("priced as full recompute" in text for text in found.warnings) is (kind == "full")


@pytest.mark.parametrize(("given", "stage"), [
    ({}, 3), ({"reshard_after_forward": False}, 1), ({"pp_size": 2}, 1),
    ({"reshard_after_forward": False, "defer_fsdp_grad_sync": False}, 2),
    ({"pp_size": 2, "reshard_after_forward": True}, 3), ({"strategy": "ddp"}, 0),
    ({"strategy": "megatron_fsdp", "zero_dp_strategy": 2}, 2),
])  # fmt: skip
def test_zero_follows_from_what_stays_gathered(given: dict[str, Any], stage: int, tmp_path: Path) -> None:
    assert read(changed(**given), tmp_path, "llama-3.1-8b").says["zero_stage"] == stage


def test_gradients_that_stay_whole_are_priced(tmp_path: Path) -> None:
    data = changed()
    data["step_scheduler"]["local_batch_size"] = 1
    assert read(data, tmp_path, "llama-3.1-8b").says["reduce_once"] is True
    data["distributed"]["defer_fsdp_grad_sync"] = False
    assert read(data, tmp_path, "llama-3.1-8b").says["reduce_once"] is False


def test_stages_are_written_by_number_where_automodel_cuts_them_so() -> None:
    plain = ParallelConfig(dp=4, pp=4, zero_stage=1, num_micro_batches=16)
    setups = {stages: Setup.of(request("llama-3.1-8b", "automodel"), plain.but(stages=stages)) for stages in STAGES}
    texts = {stages: export_setup(setup, "automodel").text for stages, setup in setups.items()}
    equal, unequal = STAGES
    assert "layers_per_stage: 8" in texts[equal] and "local_batch_size: 16" in texts[equal]
    parts = yaml.safe_load(texts[unequal])["distributed"]["pipeline"]["module_fqns_per_model_part"]
    assert parts[0][:2] == ["model.embed_tokens", "model.layers.0"] and parts[-1][-2:] == ["model.norm", "lm_head"]
    assert [sum(".layers." in module for module in part) for part in parts] == list(unequal)


STAGES = ((8, 8, 8, 8), (9, 8, 8, 7))


@pytest.mark.parametrize(("given", "choice"), [
    ({"pp": 4, "dp": 4, "schedule": "DualPipeV", "virtual_stages": 2, "num_micro_batches": 16}, "schedule"),
    ({"tp": 2, "dp": 8, "zero_stage": 0, "num_micro_batches": 8}, "zero_stage"),
    ({"pp": 2, "dp": 8, "zero_replicas": 8, "num_micro_batches": 8}, "dp_replicate_size=8"),
    ({"offload": ("optimizer",)}, "offload"),
])  # fmt: skip
def test_what_it_cannot_say_is_refused_by_name(given: dict[str, Any], choice: str) -> None:
    config = ParallelConfig(dp=16, zero_stage=1, num_micro_batches=4).but(**given)
    with pytest.raises(PinError, match=choice):
        export_setup(Setup.of(request("llama-3.1-8b", "automodel"), config), "automodel")


def test_adapters_are_read(tmp_path: Path) -> None:
    recipe = {**changed(), "peft": {"dim": 16, "target_modules": "*_proj"}}
    found = read(recipe, tmp_path, "llama-3.1-8b")
    assert (found.says["adapters"], found.not_read, found.faults) == ("lora:16:all-linear", (), ())
    recipe["peft"] = {"target_modules": ["*.q_proj", "v_proj"], "match_all_linear": False}
    recipe["quantization"] = {"load_in_4bit": True}
    assert read(recipe, tmp_path, "llama-3.1-8b").says["adapters"] == "qlora:8:q_proj,v_proj"
    recipe["peft"] = {"target_modules": ["*layers.[0-9]*"]}
    assert "give --adapters lora:8:all-linear" in read(recipe, tmp_path, "llama-3.1-8b").faults[0]


@pytest.mark.parametrize("adapters", ["lora:16:all-linear", "qlora:8:q_proj,v_proj", "lora:8"])
def test_adapters_are_written_where_they_name_layers(adapters: str) -> None:
    made = request("llama-3.1-8b", "automodel")
    setup = Setup.of(
        replace(made, graph=with_adapters(made.graph, read_adapters(adapters)), adapters=adapters),
        ParallelConfig(dp=16, zero_stage=3, num_micro_batches=BATCH // 16),
    )
    export = export_setup(setup, "automodel")
    elsewhere = (f"adapters={adapters}: the model, or its PEFT settings",) if adapters == "lora:8" else ()
    assert export.elsewhere == elsewhere and ("peft:" in export.text) is (not elsewhere)
