"""Scripts of fms-fsdp: their flags, and the strategy of FSDP that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config

# As scripts/train.sh
SCRIPT = """
MODEL_ARGS="\\
--use_dummy_dataset=False
--fsdp_activation_checkpointing=False
--selective_checkpointing=1
--sharding_strategy=hsdp
--batch_size=2
--use_torch_compile=False
--use_profiler=False
"
torchrun --nnodes=2 --nproc_per_node=8 main_training_llama.py ${MODEL_ARGS}
"""
CHECKPOINTED = SCRIPT.replace("checkpointing=False", "checkpointing=True", 1)


def read(folder: Path, text: str, cluster: str = "2x8xa100-sxm4-80gb") -> ConfigFile:
    (folder / "train.sh").write_text(text)
    return read_config(folder / "train.sh", graph=load_model("llama-3.2-1b"), cluster=cluster)


@pytest.mark.parametrize(("text", "wanted"), [
    (SCRIPT, {"dp": 16, "zero_stage": 3, "zero_replicas": 2, "micro_batch_size": 2, "global_batch_size": 32,
              "seq_len": 4096, "precision": "bf16", "mode": "eager", "recompute": "none"}),
    (SCRIPT.replace("hsdp", "fsdp"), {"zero_stage": 3, "zero_replicas": 1}),
    (SCRIPT.replace("hsdp", "ddp"), {"zero_stage": 0, "zero_replicas": 1}),
    (SCRIPT.replace("--use_torch_compile=False\n", "--seq_length=8192\n"), {"mode": "compiled", "seq_len": 8192}),
    (SCRIPT.replace("--use_profiler=False", "--mixed_precision=False"), {"precision": "fp32"}),
    (CHECKPOINTED, {"recompute": "full"}),
    (CHECKPOINTED.replace("selective_checkpointing=1", "selective_checkpointing=0"), {"recompute": "none"}),
])  # fmt: skip
def test_a_script_is_read(text: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, text)
    assert wanted.items() <= found.says.items() and found.like.startswith("torch-fsdp@")
    assert not (found.faults or found.foreign or found.not_read)


@pytest.mark.parametrize(("share", "layers"), [("1/2", [0, 2, 4]), ("1/3", [1, 4, 7]), ("2/3", [0, 2, 3])])
def test_a_share_of_the_layers_is_evenly_spaced(share: str, layers: list[int], tmp_path: Path) -> None:
    """As the docstring of apply_fsdp_checkpointing lists them."""
    again = read(tmp_path, CHECKPOINTED.replace("selective_checkpointing=1", f"selective_checkpointing={share}")).says
    assert list(again["recompute"])[:3] == [f"model.layers.{k}" for k in layers]
    with pytest.raises(PinError, match="no share"):
        read(tmp_path, CHECKPOINTED.replace("selective_checkpointing=1", "selective_checkpointing=some"))


def test_what_a_script_leaves_open_or_contradicts(tmp_path: Path) -> None:
    assert "16 processes, but the cluster has 8 devices" in read(tmp_path, SCRIPT, "1x8xa100-sxm4-80gb").faults[0]
    assert read(tmp_path, SCRIPT.replace("--use_profiler", "--use_cpu")).foreign == ("use_cpu",)
    with pytest.raises(PinError, match="batch_size"):
        read(tmp_path, SCRIPT.replace("--batch_size=2", "--batch_size=$1"))
