"""A DeepSpeed file that the input of accelerate or transformers names is read with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As accelerate's examples/deepspeed_config_templates/zero_stage3_offload_config.json has it
OWN: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
}
YAML = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: configs/ds.json
  zero3_init_flag: true
num_machines: 2
num_processes: 16
"""


def read(path: Path, lenient: bool = False) -> ConfigFile:
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, lenient=lenient)


def written(folder: Path, name: str, text: str, own: dict[str, Any] | None = None) -> Path:
    """Write a file into a folder below, and the DeepSpeed file that it names from the folder above."""
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "ds.json").write_text(json.dumps(own or OWN))
    path = folder / "configs" / name
    path.write_text(text)
    return path


def test_the_deepspeed_file_of_accelerate_decides(tmp_path: Path) -> None:
    found = read(written(tmp_path, "a.yaml", YAML))
    says = found.says
    assert (found.target, found.faults, found.like) == ("accelerate", (), "deepspeed@26.08")
    assert (says["zero_stage"], says["offload"], says["precision"]) == (3, ("optimizer",), "bf16-grad16")
    assert says["overlap_zero"] is True
    assert (says["micro_batch_size"], says["num_micro_batches"], says["global_batch_size"]) == (4, 2, 128)


def test_the_deepspeed_file_of_transformers_decides(tmp_path: Path) -> None:
    own = {**OWN, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    text = json.dumps({"deepspeed": "configs/ds.json", "per_device_train_batch_size": 2, "bf16": True})
    found = read(written(tmp_path, "args.json", text, own))
    assert (found.target, found.faults) == ("transformers", ())
    assert (found.says["zero_stage"], found.says["offload"], found.says["micro_batch_size"]) == (3, ("optimizer",), 2)
    wrong = read(written(tmp_path, "args.json", text), lenient=True)
    assert any("deepspeed.train_micro_batch_size_per_gpu=4" in fault for fault in wrong.faults)


@pytest.mark.parametrize(("text", "own", "fault"), [
    (YAML + "mixed_precision: bf16\n", OWN, "mixed_precision beside deepspeed_config_file; nearest: only what"),
    (YAML.replace("zero3_init_flag: true", "zero_stage: 3"), OWN, "deepspeed_config.zero_stage beside"),
    (YAML, {**OWN, "zero_optimization": {"stage": 9}}, "stage=9 does not exist; nearest: 3"),
    (YAML, {"bf16": {"enabled": True}}, "has no zero_optimization; nearest"),
])  # fmt: skip
def test_what_accelerate_refuses_beside_the_file(text: str, own: dict[str, Any], fault: str, tmp_path: Path) -> None:
    """DeepSpeedPlugin raises for values that the DeepSpeed file has to say (accelerate/utils/dataclasses.py)."""
    faults = read(written(tmp_path, "a.yaml", text, own), lenient=True).faults
    assert any(fault in each for each in faults), faults


def test_a_file_that_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML)
    with pytest.raises(PinError, match=r"deepspeed_config_file='configs/ds.json' is not found; nearest"):
        read(path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text("no json")
    with pytest.raises(PinError, match="is not JSON"):
        read(path)
