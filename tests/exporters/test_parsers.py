"""Exports are read by the targets' own parsers, where these are installed: accelerate, deepspeed, lightning."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from configurations import request

from autoplan.config.parallel import ParallelConfig
from autoplan.exporters.door import Export, export_setup
from autoplan.exporters.setup import Setup

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = ParallelConfig(dp=16, zero_stage=3, num_micro_batches=4)


def exported(to: str, config: ParallelConfig, **given: Any) -> Export:
    return export_setup(Setup.of(request("llama-3.1-8b", to, **given), config), to)


ACCELERATE = {
    "FSDP": PLAIN.but(recompute="full"),
    "FSDP2": PLAIN.but(zero_stage=2, offload=("parameters",)),
    "mesh": ParallelConfig(
        dp=4, tp=2, cp=2, zero_stage=3, num_micro_batches=16, context_method="ring", zero_replicas=2
    ),
    "DEEPSPEED": PLAIN.but(zero_stage=1),
    "ulysses": ParallelConfig(dp=8, cp=2, zero_stage=3, num_micro_batches=8, context_method="ulysses"),
    "MULTI_GPU": PLAIN.but(zero_stage=0),
}


@pytest.mark.parametrize("name", ACCELERATE)
@pytest.mark.parametrize("to", ["accelerate"])
def test_accelerate_reads_its_yaml(name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    config = ACCELERATE[name]
    file = tmp_path / "plan.yaml"
    file.write_text(exported(to, config).text)
    read = load_config_from_file(str(file))
    assert read.num_processes == 16 and read.num_machines == 2 and str(read.mixed_precision) == "bf16"
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in read.parallelism_config.items()}
    if mesh:
        sizes = {key: value for key, value in mesh.items() if key.endswith("_size")}
        made = ParallelismConfig(**sizes)
        if name == "mesh":
            assert (made.total_size, made.dp_replicate_size, made.dp_shard_size) == (16, 2, 2)
            assert (made.tp_size, made.cp_size) == (2, 2)
    if name == "DEEPSPEED":
        assert read.deepspeed_config["zero_stage"] == 1 and read.deepspeed_config["gradient_accumulation_steps"] == 4
    if name.startswith("FSDP"):
        assert read.fsdp_config["fsdp_reshard_after_forward"] is (config.zero_stage == 3)
        assert read.fsdp_config["fsdp_activation_checkpointing"] is (config.recompute == "full")
        assert read.fsdp_config["fsdp_offload_params"] is (config.offload == ("parameters",))


@pytest.mark.parametrize("name", ["FSDP", "FSDP2"])
def test_the_plugin_of_fsdp_takes_what_accelerate_launch_passes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` turns the file into variables of the environment, which the plugin reads."""
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = ACCELERATE[name]
    file = tmp_path / "plan.yaml"
    file.write_text(exported("accelerate", config).text)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    for key, value in prepare_multi_gpu_env(arguments).items():
        if key.startswith(("FSDP", "ACCELERATE", "PARALLELISM")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is (config.zero_stage == 3)
    assert plugin.activation_checkpointing is (config.recompute == "full")
    policy = "CPUOffloadPolicy" if config.offload == ("parameters",) else "OffloadPolicy"
    assert type(plugin.cpu_offload).__name__ == policy


DEEPSPEED = {
    "zero 0": PLAIN.but(zero_stage=0),
    "zero 1": PLAIN.but(zero_stage=1, micro_batch_size=2, num_micro_batches=2),
    "zero 2": PLAIN.but(zero_stage=2, offload=("optimizer",)),
    "zero 3": PLAIN.but(offload=("parameters",)),
    "tp": ParallelConfig(dp=8, tp=2, zero_stage=1, num_micro_batches=8),
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_reads_its_json(name: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        """What tells DeepSpeed its data-parallel ranks."""

        @staticmethod
        def get_data_parallel_world_size() -> int:
            return 1

    config = DEEPSPEED[name]
    data = json.loads(exported("deepspeed", config).text)
    data.pop("train_batch_size", None)  # one process reads it here
    read = DeepSpeedConfig(data, mpu=Ranks())
    assert read.zero_config.stage == config.zero_stage
    assert read.train_micro_batch_size_per_gpu == config.micro_batch_size
    assert read.gradient_accumulation_steps == config.num_micro_batches
    assert read.tensor_parallel_config.autotp_size in (config.tp, 0) and read.bfloat16_config.enabled
    held = (read.zero_config.offload_optimizer, read.zero_config.offload_param)
    assert [bool(each) for each in held] == [bool(config.offload), config.offload == ("parameters",)]


TRANSFORMERS = {
    "ddp": PLAIN.but(zero_stage=0, recompute="full"),
    "zero 1": PLAIN.but(zero_stage=1, micro_batch_size=2, num_micro_batches=2, recompute="full"),
    "zero 2": PLAIN.but(zero_stage=2),
    "zero 3": PLAIN.but(offload=("parameters",), recompute="full"),
    "host": PLAIN.but(offload=("optimizer",)),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_reads_its_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HfArgumentParser reads the file; what it makes of the engine is what the plan says."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    if name in ("zero 1", "host"):
        pytest.importorskip("deepspeed")
    from transformers import HfArgumentParser, TrainingArguments

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # it sets this by itself
    config, file = TRANSFORMERS[name], tmp_path / "args.json"
    data = json.loads(exported("transformers", config).text)
    file.write_text(json.dumps({**data, "output_dir": str(tmp_path), "use_cpu": True}))
    (read,) = HfArgumentParser(TrainingArguments).parse_json_file(str(file))
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (
        config.micro_batch_size,
        config.num_micro_batches,
    )
    assert read.bf16 and not read.fp16
    deepspeed, fsdp = read.deepspeed_plugin, read.fsdp_plugin_args
    assert (deepspeed is not None) == (name in ("zero 1", "host"))
    if fsdp is not None:
        assert fsdp["fsdp_version"] == 2 and fsdp["reshard_after_forward"] == (config.zero_stage == 3)
        assert fsdp["activation_checkpointing"] == (config.recompute == "full")
        assert fsdp.get("cpu_offload", False) is (config.offload == ("parameters",))
    elif deepspeed is not None:
        assert read.hf_deepspeed_config.get_value("zero_optimization.stage") == config.zero_stage
        batch = read.hf_deepspeed_config.get_value("train_micro_batch_size_per_gpu")
        assert batch == config.micro_batch_size  # "auto" became the argument's
        assert read.hf_deepspeed_config.is_offload() is (name == "host")
        assert read.gradient_checkpointing is (config.recompute == "full")
    else:
        assert config.zero_stage == 0 and read.gradient_checkpointing


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bf16": True, "fp16": True}, "exclude each other; nearest: bf16 alone"),
        ({"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 1}}}, "nearest: one of them"),
        ({"deepspeed": {"gradient_accumulation_steps": 2}}, 'gradient_accumulation_steps=1; nearest: "auto"'),
        ({"deepspeed": {"zero_optimization": {"stge": 1}}}, "did you mean 'zero_optimization.stage'?"),
        ({"deepspeed": "ds.json"}, "names a file that is not found; nearest: its path"),
        ({"fsdp": "hybrid_shard"}, "is of FSDP 1; nearest: fsdp_config.version=1"),
    ],
)
def test_arguments_that_transformers_refuses_are_faults(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    from autoplan.exporters.door import read_config

    file = tmp_path / "args.json"
    file.write_text(json.dumps({"per_device_train_batch_size": 1, **values}))
    read = read_config(file, cluster="2x8xh100-sxm5-80gb", lenient=True)
    assert read.target == "transformers" and any(message in fault for fault in read.faults), read.faults


@pytest.mark.parametrize(
    ("fsdp", "config", "zero", "offload"),
    [
        ("full_shard auto_wrap", {}, 3, ()),
        (True, {"reshard_after_forward": False}, 2, ()),
        (["shard_grad_op", "offload"], {}, 2, ("parameters",)),
        ("full_shard", {"version": 1, "reshard_after_forward": "shard_grad_op"}, 2, ()),
        ("", {"reshard_after_forward": True}, 0, ()),
    ],
)
def test_all_ways_to_write_fsdp_are_read(
    fsdp: Any, config: dict[str, Any], zero: int, offload: tuple[str, ...], tmp_path: Path
) -> None:
    from autoplan.exporters.door import read_config

    file = tmp_path / "args.json"
    file.write_text(json.dumps({"per_device_train_batch_size": 1, "fsdp": fsdp, "fsdp_config": config}))
    read = read_config(file, cluster="2x8xh100-sxm5-80gb")
    assert (read.says["zero_stage"], read.says["offload"]) == (zero, offload)


def test_trainings_arguments_of_transformers_read_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    from transformers import HfArgumentParser, TrainingArguments

    file = tmp_path / "ds.json"
    file.write_text(exported("deepspeed", PLAIN.but(recompute="full")).text)
    given = {
        "output_dir": str(tmp_path),
        "deepspeed": str(file),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 1.0,
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": True,
    }
    (read,) = HfArgumentParser(TrainingArguments).parse_dict(given)
    assert read.hf_deepspeed_config.is_zero3() and read.gradient_checkpointing
    # its own check that the file and the arguments agree, but for the batch of all devices, of which one is here
    data = {**read.hf_deepspeed_config.config}
    assert data["train_micro_batch_size_per_gpu"] == read.per_device_train_batch_size
    assert data["gradient_accumulation_steps"] == read.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("DDPStrategy", PLAIN.but(zero_stage=0)),
        ("FSDPStrategy", PLAIN),
        ("FSDPStrategy", PLAIN.but(zero_replicas=2)),
        ("ModelParallelStrategy", ParallelConfig(dp=8, tp=2, num_micro_batches=8, zero_stage=3)),
    ],
)
def test_lightning_makes_the_strategy(name: str, config: ParallelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is run with Trainer's own strategy classes; the trainer itself needs the devices."""
    lightning = pytest.importorskip("lightning.pytorch")
    import inspect

    from torch import nn

    given: dict[str, Any] = {}

    def trainer(**settings: Any) -> str:
        inspect.signature(lightning.Trainer.__init__).bind(None, **settings)
        given.update(settings)
        return "trainer"

    text = exported("lightning", config).text
    names: dict[str, Any] = {}
    monkeypatch.setattr(lightning, "Trainer", trainer)
    exec(compile(text, "plan.py", "exec"), names)
    assert names["trainer"](nn.Linear, max_steps=10) == "trainer"  # the layer that FSDP wraps
    assert type(given["strategy"]).__name__ == name
    assert (given["num_nodes"], given["devices"], given["precision"]) == (2, 8, "bf16-mixed")
    if name == "FSDPStrategy":
        wanted = "HYBRID_SHARD" if config.zero_replicas > 1 else "FULL_SHARD"
        assert given["strategy"].sharding_strategy.name == wanted


def test_a_wrong_file_is_refused_by_the_target_too(tmp_path: Path) -> None:
    """The negative control: the parsers do look at the names."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "plan.yaml"
    file.write_text(exported("accelerate", PLAIN).text.replace("num_machines", "num_machine"))
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))


def test_the_python_of_exports_compiles() -> None:
    for to in ("torchtitan", "megatron-bridge", "lightning"):
        config = PLAIN if to != "megatron-bridge" else PLAIN.but(zero_stage=1)
        compile(exported(to, config).text, "plan.py", "exec")
    assert sys.version_info >= (3, 11)
