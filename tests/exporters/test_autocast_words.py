"""Mixed precision of files that DistributedDataParallel runs: torch.autocast around float32 parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import CLUSTER, graph_of, request

from autoplan.config.parallel import ParallelConfig
from autoplan.exporters.door import export_setup, read_config
from autoplan.exporters.setup import Setup

REPLICAS = ParallelConfig(dp=16, zero_stage=0, num_micro_batches=4)
TARGETS = ("accelerate", "transformers", "lightning")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("precision", ["bf16-autocast", "fp16-autocast"])
def test_autocast_is_written_as_mixed_precision_and_read_back(to: str, precision: str, tmp_path: Path) -> None:
    asked = request("llama-3.1-8b", to, precision=precision)
    whole, shards = (export_setup(Setup.of(asked, c), to) for c in (REPLICAS, REPLICAS.but(zero_stage=3)))
    path = tmp_path / Path(whole.file).name
    path.write_text(whole.text)
    assert not [line for line in whole.not_said if line.startswith("precision")]
    found = read_config(path, to, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)
    assert (found.says["zero_stage"], found.says["precision"]) == (0, precision)
    # FSDP makes 16-bit copies, which is another precision
    assert [line.partition(":")[0] for line in shards.not_said if "precision" in line] == [f"precision={precision}"]


FILES = {
    "accelerate": ("a.yaml", "distributed_type: {}\nnum_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n"),
    "transformers": ("a.json", '{{"output_dir": "x", "per_device_train_batch_size": 1, "bf16": true{}}}'),
    "lightning": (
        "a.py",
        "import lightning as L\nt = L.Trainer(num_nodes=2, devices=8, precision='bf16-mixed', strategy='{}')\n",
    ),
}


@pytest.mark.parametrize(
    ("of", "word", "model", "precision"),
    [
        ("accelerate", "MULTI_GPU", "llama-3.1-8b", "bf16-autocast"),
        ("accelerate", "FSDP", "llama-3.1-8b", "bf16"),
        ("accelerate", "MULTI_GPU", "mixtral-8x7b", "bf16"),  # the casts of experts are not known
        ("transformers", "", "llama-3.1-8b", "bf16-autocast"),
        ("transformers", ', "fsdp": "full_shard"', "llama-3.1-8b", "bf16"),
        ("transformers", ', "deepspeed": {"zero_optimization": {"stage": 0}}', "llama-3.1-8b", "bf16"),
        ("lightning", "ddp", "llama-3.1-8b", "bf16-autocast"),
        ("lightning", "auto", "llama-3.1-8b", "bf16-autocast"),
        ("lightning", "fsdp", "llama-3.1-8b", "bf16"),
        ("lightning", "deepspeed_stage_1", "llama-3.1-8b", "bf16"),
    ],
)
def test_engines_decide_what_mixed_precision_is(of: str, word: str, model: str, precision: str, tmp_path: Path) -> None:
    name, text = FILES[of]
    path = tmp_path / name
    path.write_text(text.format(word))
    assert read_config(path, of, graph=graph_of(model), cluster=CLUSTER).says["precision"] == precision
