"""TRL's SFTConfig and `trl sft` are read with their own defaults; its other trainers are refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters import trl
from autoplan.exporters.door import ConfigFile, read_config

# As the documentation of TRL makes them (docs/source/sft_trainer.md)
SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

training_args = SFTConfig(
    output_dir="out", max_length=4096, packing=True, per_device_train_batch_size=2, gradient_accumulation_steps=4,
    model_init_kwargs={"attn_implementation": "flash_attention_2"}, deepspeed={"zero_optimization": {"stage": 3}},
)
trainer = SFTTrainer("m", args=training_args, train_dataset=load_dataset("d"), peft_config=None)
trainer.train()
"""
YAML = """
model_name_or_path: meta-llama/Llama-3.1-8B
dataset_name: d
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
packing: true
packing_strategy: wrapped
max_length: 2048
env: {NCCL_DEBUG: WARN}
accelerate_config: zero3
"""


def read(folder: Path, name: str, text: str, **more: Any) -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, **more)


def test_an_sft_config_has_its_own_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, "train.py", SCRIPT)
    says = found.says
    assert (found.target, found.like, found.faults) == ("transformers", "deepspeed@26.08", ())
    assert (says["zero_stage"], says["micro_batch_size"], says["global_batch_size"]) == (3, 2, 128)
    assert (says["seq_len"], says["recompute"], says["precision"], says["attention"]) == (
        4096, "full", "bf16", "flash2",
    )  # fmt: skip
    assert found.warnings == (
        "attention stays within packed examples (packing_strategy=bfd); give --document-len, their length",
    )
    other = SCRIPT.replace("max_length=4096, packing=True, ", "").replace("SFTConfig", "TrainingArguments")
    other_says = read(tmp_path, "train.py", other).says
    assert (other_says["recompute"], other_says["precision"], "seq_len" in other_says) == ("none", "fp32", False)
    newer = SCRIPT.replace("packing", "activation_checkpointing=False, packing")  # counts more than the old name
    assert read(tmp_path, "train.py", newer).says["recompute"] == "none"
    stated = read(tmp_path, "train.py", SCRIPT.replace("packing", "fp16=True, gradient_checkpointing=False, packing"))
    assert (stated.says["recompute"], stated.says["precision"]) == ("none", "fp16")


def test_defaults_are_those_of_the_release(tmp_path: Path) -> None:
    old = {
        month: read(tmp_path, "train.py", SCRIPT, format=f"transformers@{month}").says for month in ("25.05", "25.06")
    }
    assert [old[month]["precision"] for month in old] == ["fp32", "bf16"]  # 0.18 and 0.19
    assert {says["recompute"] for says in old.values()} == {"none"}  # before 0.22
    named = SCRIPT.replace("max_length", "max_seq_length")
    assert read(tmp_path, "train.py", named, format="transformers@25.06").faults == ()
    assert read(tmp_path, "train.py", named).faults == (
        "max_seq_length is a field of SFTConfig only before 25.07; nearest: max_length=4096",
    )


def test_lengths_without_packing_are_bounds(tmp_path: Path) -> None:
    plain = SCRIPT.replace("packing=True", "packing=False")
    found = read(tmp_path, "train.py", plain)
    assert found.warnings == (
        "4096 tokens (max_length) are the most that a sequence has, since packing is off (give --seq-len)",
    )
    assert read(tmp_path, "train.py", plain, given={"seq_len": 900}).warnings == ()
    assert read(tmp_path, "train.py", plain.replace("max_length=4096, ", "")).says["seq_len"] == 1024
    assert "seq_len" not in read(tmp_path, "train.py", plain.replace("4096", "None")).says
    none = read(tmp_path, "train.py", SCRIPT.replace("4096", "None"))
    assert none.faults == ("packing needs a length, but max_length is None; nearest: max_length=1024",)


def test_adapters_are_named(tmp_path: Path) -> None:
    found = read(tmp_path, "train.py", SCRIPT.replace("peft_config=None", "peft_config=LoraConfig(r=8)"))
    assert "peft_config=LoraConfig, line 10 (give --adapters)" in found.warnings[-1]


def test_a_command_takes_its_file_and_the_options_of_accelerate(tmp_path: Path) -> None:
    found = read(tmp_path, "sft.yaml", YAML)  # whose 8 processes are those of TRL's zero3.yaml
    assert (found.says["zero_stage"], found.says["seq_len"], found.like) == (3, 2048, "deepspeed@26.08")
    assert found.faults == ("num_processes=8, but the cluster has 16 devices; nearest: num_processes=16",)
    more = "--max_length 8192 --num_processes 16 --num_machines=2"
    found = read(tmp_path, "run.sh", f"trl sft --config sft.yaml {more}\n")  # arguments count more than the file
    says = says_of_command = found.says
    assert (says["zero_stage"], says["seq_len"], says["global_batch_size"], found.faults) == (3, 8192, 128, ())
    assert (says["precision"], says["recompute"], found.warnings) == ("bf16", "full", ())
    script = f"accelerate launch --num_processes 16 trl/scripts/sft.py --config sft.yaml {more[:17]}\n"
    for line in (script, script.replace("trl/scripts/sft.py", "-m trl.scripts.sft")):
        says = read(tmp_path, "run.sh", line, given={"zero_stage": 3}).says
        assert (says["seq_len"], says["recompute"]) == (8192, "full")
    served = f"trl vllm-serve --model m &\ntrl sft --config sft.yaml {more}\n"  # another command, which trains nothing
    assert read(tmp_path, "run.sh", served).says == says_of_command
    with pytest.raises(PinError, match=r"config='none\.yaml' names a file that is not found"):
        read(tmp_path, "run.sh", "trl sft --config none.yaml --accelerate_config zero2")


def test_engines_of_trl(tmp_path: Path) -> None:
    command = "trl sft --per_device_train_batch_size 2 --num_processes 16"
    with pytest.raises(PinError, match=r"fsdp=the configuration of accelerate launch; give --zero-stage"):
        read(tmp_path, "run.sh", command)
    wanted = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp1": 3, "fsdp2": 3, "multi_gpu": 0}
    for name, stage in wanted.items():
        found = read(tmp_path, "run.sh", f"{command} --accelerate_config {name}")
        assert (found.says["zero_stage"], found.faults) == (stage, ()), name
        assert found.like.startswith("deepspeed" if name.startswith("zero") else "accelerate"), name
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n")
    found = read(tmp_path, "run.sh", f"{command} --accelerate_config mine.yaml")
    assert (found.says["zero_stage"], found.says["dp"]) == (3, 16)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.sh", "trl grpo --config x.yaml", "trl grpo generates answers"),
        ("run.sh", "trl dpo --per_device_train_batch_size 1 --bf16", "trl dpo compares pairs"),
        ("run.sh", "accelerate launch examples/scripts/kto.py --per_device_train_batch_size 1", "trl kto compares"),
        ("x.yaml", "per_device_train_batch_size: 1\nnum_generations: 8\n", "num_generations=8 is of a trainer"),
        ("x.yaml", "per_device_train_batch_size: 1\nbeta: 0.1\nuse_peft: true\n", "beta=0.1 is of a trainer"),
        ("x.py", "from trl import GRPOConfig\na = GRPOConfig(num_generations=8)\n", r"GRPOConfig \(line 2\) generates"),
        ("x.py", "import trl\na = trl.DPOConfig('o', beta=0.1)\n", r"DPOConfig \(line 2\) compares"),
        ("x.py", "p = TrlParser((Script, RewardConfig))\n", r"RewardConfig \(line 1\) trains a reward model"),
        ("x.py", "\np = TrlParser((Script, SFTConfig))\n", r"from the command line \(line 2\).*run.sh"),
        ("x.py", "p = HfArgumentParser(TrainingArguments)\n", r"from the command line \(line 1\)"),
    ],
)  # fmt: skip
def test_other_trainers_are_refused_by_name(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(PinError, match=why):
        read(tmp_path, name, text)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_trl_parses_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", ["sft.py"])
    (tmp_path / "sft.yaml").write_text(YAML.replace("accelerate_config: zero3", "use_cpu: true"))
    arguments = ["--config", str(tmp_path / "sft.yaml"), "--max_length", "8192", "--output_dir", str(tmp_path)]
    parser = module.TrlParser((module.SFTConfig, module.ModelConfig))
    parsed, _, _ = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    found = read(tmp_path, "run.sh", f"trl sft {' '.join(arguments)} --accelerate_config zero3 --num_processes 16")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "packing", "packing_strategy"):
        assert getattr(parsed, name) == found.values[name], name
    assert parsed.max_length == found.says["seq_len"]
    assert (parsed.bf16, parsed.gradient_checkpointing) == (True, True)
    assert (found.says["precision"], found.says["recompute"]) == ("bf16", "full")


def test_the_tables_are_those_of_trl() -> None:
    """Fields and configurations of accelerate that the installed TRL has."""
    module = pytest.importorskip("trl")
    import yaml

    fields = module.SFTConfig.__dataclass_fields__
    assert {*trl._OF_SFT} <= {*fields}
    assert not {*trl._FIELDS} & {*fields, *module.ModelConfig.__dataclass_fields__}
    assert (fields["max_length"].default, fields["gradient_checkpointing"].default) == (trl._LENGTH, True)
    folder = Path(module.__file__).parent / "accelerate_configs"
    for name, values in trl._ACCELERATE_CONFIGS.items():
        data = yaml.safe_load((folder / f"{name}.yaml").read_text())
        for path, value in values.items():
            section, _, inner = path.rpartition(".")
            assert (data[section] if section else data)[inner] == value, (name, path)
    assert {path.stem for path in folder.glob("*.yaml")} == {*trl._ACCELERATE_CONFIGS}
