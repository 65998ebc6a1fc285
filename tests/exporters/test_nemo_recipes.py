"""Scripts of NeMo 2.0 are read: what a recipe says by itself, what the script changes, and what cannot be read."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As the quickstart of NeMo 2.0 starts a recipe (docs/source/nemo-2.0/quickstart.rst)
SCRIPT = """
import nemo_run as run
from nemo.collections import llm
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback


def configure_recipe(nodes: int = 1, gpus_per_node: int = 2):
    recipe = llm.llama31_8b.pretrain_recipe(
        dir="/checkpoints", name="training", num_nodes=nodes, num_gpus_per_node=gpus_per_node
    )
    recipe.trainer.val_check_interval = 100
    return recipe


def local_executor(devices: int = 2) -> run.LocalExecutor:
    executor = run.LocalExecutor(ntasks_per_node=devices, launcher="torchrun", env_vars={"NCCL_DEBUG": "WARN"})
    return executor


def run_pretraining():
    recipe = configure_recipe(nodes=2, gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    # more
    executor = local_executor(devices=recipe.trainer.devices)
    run.run(recipe, executor=executor, name="training")


if __name__ == "__main__":
    run_pretraining()
"""
PARTS = """
import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm

strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
strategy.sequence_parallel = True
recipe = run.Partial(
    llm.pretrain,
    model=llm.llama31_8b.model(),
    trainer=run.Config(nl.Trainer, num_nodes=2, devices=8, strategy=strategy,
        plugins=run.Config(nl.MegatronMixedPrecision, precision="bf16-mixed", fp8="hybrid", fp8_recipe="tensorwise")),
    data=run.Config(llm.MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=2),
    optim=llm.distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
)
run.run(recipe)
"""


def read(folder: Path, text: str, model: str = "llama-3.1-8b", **more: Any) -> ConfigFile:
    path = folder / "train.py"
    path.write_text(text)
    return read_config(path, graph=graph_of(model), cluster=CLUSTER, **more)


def changed(*lines: str) -> str:
    return SCRIPT.replace("    # more", "\n".join(f"    {line}" for line in lines))


def test_a_recipe_is_read_with_what_the_script_changes(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT)
    says = found.says
    assert (found.target, found.version, found.like) == ("megatron-bridge", "25.07", "megatron-bridge@25.07")
    assert (found.faults, found.warnings, found.not_read) == ((), (), ())
    assert (says["tp"], says["cp"], says["dp"], says["zero_stage"]) == (4, 2, 2, 1)
    assert (says["seq_len"], says["global_batch_size"], says["micro_batch_size"]) == (8192, 512, 1)
    assert (says["precision"], says["recompute"], says["overlap"]) == ("bf16-grad32", "none", ["cp"])
    assert (says["overlap_zero"], says["sequence_parallel"], says["fused_loss"]) == (True, False, "compiled")
    more = changed(
        "recipe.data.global_batch_size = 256",
        "recipe.trainer.strategy.sequence_parallel = True",
        "recipe.trainer.callbacks.append(run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True))",
        "recipe.trainer.plugins.grad_reduce_in_fp32 = False",
        "recipe.model.config.recompute_granularity = 'full'",
        "recipe.model.config.recompute_method = 'uniform'",
        "recipe.model.config.recompute_num_layers = 1",
        "fdl.build(recipe)",
    )
    says = read(tmp_path, more).says
    assert (says["global_batch_size"], says["sequence_parallel"], says["overlap"]) == (256, True, ["cp", "tp"])
    assert (says["precision"], says["recompute"]) == ("bf16-grad16", "full")


def test_modes_of_a_recipe(tmp_path: Path) -> None:
    fast = SCRIPT.replace('name="training", num', 'name="x", performance_mode=True, num')
    assert read(tmp_path, fast).says["overlap"] == ["cp"]  # overlap of tp needs sequences that are split, too
    assert read(tmp_path, fast.replace("llama31_8b", "llama3_8b")).says["precision"] == "bf16-grad16"
    tuned = SCRIPT.replace("pretrain_recipe(", "finetune_recipe(")
    found = read(tmp_path, tuned)
    assert (found.says["seq_len"], found.says["global_batch_size"], found.says["zero_stage"]) == (2048, 128, 0)
    assert found.warnings == ("peft=LoRA is not read (give --adapters): all weights are taken as trained",)
    whole = read(tmp_path, tuned.replace("name=", "peft_scheme='none', packed_sequence=True, seq_length=1024, name="))
    assert (whole.says["seq_len"], whole.says["global_batch_size"], whole.warnings) == (1024, 8, ())
    assert whole.says["zero_stage"] == 1


def test_callbacks_and_plugins_that_replace_those_of_the_recipe(tmp_path: Path) -> None:
    base = SCRIPT.replace("llama31_8b", "llama31_405b").replace("_size = 4", "_size = 8")
    fast = base.replace("name=", "performance_mode=True, name=")
    at = {"pp": 1, "cp": 2, "virtual_stages": 1, "schedule": "1F1B"}
    assert read(tmp_path, fast, given=at).says["overlap"] == ["cp", "pp", "tp"]
    gone = fast.replace("    # more", "    recipe.trainer.callbacks = [run.Config(TimingCallback)]")
    assert read(tmp_path, gone, given=at).says["overlap"] == ["cp"]
    own = gone.replace("TimingCallback)]", "TimingCallback), run.Config(MegatronCommOverlapCallback)]")
    assert read(tmp_path, own, given=at).says["overlap"] == ["cp", "pp"]
    says = read(tmp_path, changed("recipe.trainer.plugins = bf16_with_fp8_current_scaling_mixed()")).says
    assert (says["precision"], says["narrow_gather"]) == ("fp8-grad32", True)
    found = read(tmp_path, changed("recipe.trainer.plugins = mine()"))
    assert "precision" not in found.says
    assert found.open["precision"] == "mixed_precision=mine() (line 23)"
    found = read(tmp_path, changed("recipe.trainer.callbacks = mine()"))
    assert "overlap" not in found.says
    with pytest.raises(PinError, match=r"fsdp='pytorch' has no price"):
        read(tmp_path, changed("recipe.trainer.strategy.fsdp = 'pytorch'"))
    sharded = changed("recipe.trainer.strategy.fsdp = 'megatron'").replace("llama31_8b", "llama3_8b")
    assert read(tmp_path, sharded).says["zero_stage"] == 3


def test_names_of_recipes_as_scripts_import_them(tmp_path: Path) -> None:
    wanted = read(tmp_path, SCRIPT).says
    call = "llm.llama31_8b.pretrain_recipe"
    for imported, used in {
        "from nemo.collections.llm.recipes import llama31_8b": "llama31_8b.pretrain_recipe",
        "from nemo.collections.llm.recipes.llama31_8b import pretrain_recipe": "pretrain_recipe",
        "from nemo.collections.llm.recipes.llama31_8b import pretrain_recipe as made": "made",
        "import nemo.collections.llm.recipes.llama31_8b as small": "small.pretrain_recipe",
    }.items():
        if used == "made":  # another name of the function is not followed
            with pytest.raises(PinError, match="is a script of NeMo 2"):
                read(tmp_path, f"{imported}\n{SCRIPT.replace(call, used)}")
        else:
            assert read(tmp_path, f"{imported}\n{SCRIPT.replace(call, used)}").says == wanted, imported


def test_a_recipe_of_parts(tmp_path: Path) -> None:
    found = read(tmp_path, PARTS)
    says = found.says
    assert (found.target, found.faults, found.not_read) == ("megatron-bridge", (), ())
    assert (says["tp"], says["pp"], says["dp"], says["zero_stage"], says["sequence_parallel"]) == (2, 2, 4, 1, True)
    assert (says["seq_len"], says["global_batch_size"], says["micro_batch_size"]) == (4096, 64, 2)
    assert (says["precision"], says["narrow_gather"], says["overlap_zero"]) == ("fp8-grad32", False, False)
    assert read(tmp_path, PARTS.replace("num_nodes=2", "num_nodes=4")).faults == (
        "the recipe is for 4 x 8 devices, but the cluster has 16; nearest: num_nodes=2, num_gpus_per_node=8",
    )


# As NeMo's own files and copies of them (examples/llm/pretrain)
OWN = """
import nemo_run as run
import torch
from nemo import lightning as nl
from nemo.collections.llm.api import pretrain
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed

def trainer(tensor_parallelism: int = 2, context_parallelism: int = 2, num_nodes: int = 2, callbacks=None):
    strategy = run.Config(
        nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, context_parallel_size=context_parallelism,
        pipeline_dtype=torch.bfloat16, ddp=run.Config(DistributedDataParallelConfig, overlap_grad_reduce=True),
    )
    return run.Config(
        nl.Trainer, num_nodes=num_nodes, devices=8, plugins=bf16_mixed(), strategy=strategy, callbacks=callbacks
    )

def pretrain_recipe(num_nodes: int = 2, performance_mode: bool = False, fn=pretrain):
    recipe = run.Partial(
        fn,
        model=model(),
        trainer=trainer(num_nodes=num_nodes, callbacks=[run.Config(TimingCallback)]),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=128, micro_batch_size=1),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
    )
    if performance_mode:
        recipe.trainer.callbacks.append(run.Config(MegatronCommOverlapCallback))
    return recipe

def model():
    return run.Config(LlamaModel, config=run.Config(Llama31Config8B, recompute_granularity="selective"))
"""


def test_a_recipe_that_the_file_defines(tmp_path: Path) -> None:
    found = read(tmp_path, OWN)
    says = found.says
    assert (says["tp"], says["cp"], says["dp"], says["zero_stage"], says["global_batch_size"]) == (2, 2, 4, 1, 128)
    assert (says["precision"], says["recompute"]) == ("bf16-grad32", "selective")
    assert (says["overlap_zero"], says["overlap_gather"], found.faults) == (True, False, ())
    fast = read(tmp_path, OWN.replace("performance_mode: bool = False", "performance_mode: bool = True"))
    assert fast.says["overlap_gather"] is True
    with pytest.raises(PinError, match=r"nemotron_trainer\(8\) \(line 21\)"):
        read(tmp_path, OWN.replace("trainer=trainer(num_nodes=num_nodes, callbacks=[run.Config(TimingCallback)])",
            "trainer=nemotron_trainer(8)"))  # fmt: skip


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    unknown = changed("recipe.trainer.strategy.tensor_model_parallel_size = args.tp")
    with pytest.raises(PinError, match=r"model.tensor_model_parallel_size=args.tp \(line 23\); give --tp"):
        read(tmp_path, unknown)
    assert read(tmp_path, unknown, given={"tp": 2}).says["dp"] == 4
    with pytest.raises(PinError, match=r"llama31_8b.trainer\(tensor_parallelism=2\) \(line 23\).*--tp.*--zero-stage"):
        read(tmp_path, changed("recipe.trainer = llm.llama31_8b.trainer(tensor_parallelism=2)"))
    with pytest.raises(PinError, match=r"does not decide performance_mode=args.fast \(line 9\)"):
        read(tmp_path, SCRIPT.replace("name=", "performance_mode=args.fast, name="))
    with pytest.raises(PinError, match=r"tensor_model_parallel_size=set_primary_perf_configs\(...\)"):
        sets = changed("recipe = set_primary_perf_configs(recipe, 'pre_train', 2, 8)")
        read(tmp_path, sets.replace("    recipe.trainer.strategy.tensor_model_parallel_size = 4\n", ""))
    with pytest.raises(PinError, match="the recipe 'llama31_9b' of NeMo is not known; nearest: llama31_8b"):
        read(tmp_path, SCRIPT.replace("llama31_8b", "llama31_9b"))
    with pytest.raises(PinError, match="llama31_8b of NeMo has no finetune prefix; nearest: pretrain"):
        read(tmp_path, SCRIPT.replace("pretrain_recipe(", "finetune_recipe(peft_scheme='prefix', "))
    direct = "from nemo.collections import llm\nllm.pretrain(model=m, data=d, trainer=t)\n"
    with pytest.raises(PinError, match=r"llm.pretrain\(model=m, data=d, trainer=t\) \(line 2\) is not kept; nearest"):
        read(tmp_path, direct)
    speech = "from nemo.collections.asr import models\nimport lightning as L\ntrainer = L.Trainer(strategy='ddp')\n"
    assert read(tmp_path, speech).target == "lightning"  # another collection


def test_experts_and_pipelines_of_a_recipe(tmp_path: Path) -> None:
    text = "from nemo.collections import llm\nrecipe = llm.mixtral_8x7b.pretrain_recipe(num_nodes=2)\n"
    found = read(tmp_path, text, "mixtral-8x7b", given={"ep": 4})
    says = found.says
    assert (says["pp"], says["virtual_stages"], says["schedule"]) == (4, 8, "Interleaved1F1B")
    assert (says["etp"], says["dispatcher"], says["overlap"]) == (1, "alltoall", ["cp"])
    deep = read(tmp_path, f"{text}recipe.trainer.callbacks.append(run.Config(DeepEPCallback))\n", "mixtral-8x7b")
    assert deep.says["dispatcher"] == "flex"


def test_the_table_of_recipes() -> None:
    """Every value is a field of Megatron Bridge by its name there, or one that the reader knows."""
    data = json.loads(files("autoplan.profiles").joinpath("recipes", "nemo.json").read_text(encoding="utf-8"))
    assert (data["release"], data["month"]) == ("2.4.0", "25.07")
    assert len(data["recipes"]) == 60
    rows = [row for recipe in data["recipes"].values() for row in recipe.values()]
    assert all("data.global_batch_size" in row for row in rows)
    starts = ("trainer.", "data.", "model.config.", "optim.config.", "peft")
    assert all(path.startswith(starts) for row in (*rows, data["defaults"]) for path in row)
    assert not any(value == data["defaults"].get(path) for row in rows for path, value in row.items())
    # of the release: nemo/collections/llm/recipes/llama31_405b.py, mixtral_8x22b.py
    large = data["recipes"]["llama31_405b"]["pretrain"]
    sizes = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
    assert [large[f"trainer.strategy.{name}_parallel_size"] for name in sizes] == [8, 8, 2, 4]
    experts = data["recipes"]["mixtral_8x22b"]["pretrain"]
    assert experts["trainer.strategy.expert_model_parallel_size"] == 8


CONTROLS = """
trainer.strategy.tensor_model_parallel_size = 2
trainer.strategy.pipeline_model_parallel_size = 2
trainer.strategy.virtual_pipeline_model_parallel_size = None
trainer.strategy.context_parallel_size = 2
trainer.strategy.expert_model_parallel_size = 4
trainer.strategy.expert_tensor_parallel_size = 2
trainer.strategy.ddp.overlap_grad_reduce = False
trainer.strategy.ddp.overlap_param_gather = False
trainer.num_nodes = 4
trainer.devices = 4
trainer.plugins.grad_reduce_in_fp32 = False
trainer.plugins.fp8 = 'hybrid'
data.seq_length = 8192
data.micro_batch_size = 2
data.global_batch_size = 256
model.config.recompute_granularity = 'selective'
model.config.moe_token_dispatcher_type = 'flex'
model.config.cross_entropy_loss_fusion = False
model.config.attention_backend = 'flash'
optim.config.use_distributed_optimizer = False
"""


def test_every_value_that_is_changed_gives_another_setup(tmp_path: Path) -> None:
    base = "from nemo.collections import llm\nrecipe = llm.mixtral_8x7b.pretrain_recipe(num_nodes=2)\n"

    def setup(line: str) -> tuple[Any, ...]:
        found = read(tmp_path, f"{base}{line}\n", "mixtral-8x7b", lenient=True)
        return dict(found.says), found.faults

    same = [line for line in CONTROLS.split("\n")[1:-1] if setup(f"recipe.{line}") == setup("")]
    assert not same
    assert setup("recipe.trainer.max_steps = 5") == setup("")  # neither time nor memory of a step
