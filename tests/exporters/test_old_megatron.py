"""Scripts of Megatron-LM's first years: their names, and the stack of their time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from configurations import CLUSTER, graph_of

from autoplan.exporters.door import read_config
from autoplan.stacks.like import read_like

# As megatron/arguments.py of September 2020 takes them
OF_2020 = """
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 2 pretrain_gpt2.py \\
    --model-parallel-size 2 --num-layers 32 --batch-size 4 --seq-length 1024 --checkpoint-activations --fp16
"""
OF_2021 = OF_2020.replace("--model-parallel-size 2", "--tensor-model-parallel-size 2").replace(
    "--batch-size 4", "--micro-batch-size 4 --global-batch-size 64"
)


def test_flags_of_2020_are_read(tmp_path: Path) -> None:
    """A batch is a micro-batch per rank, since nothing was accumulated."""
    path = tmp_path / "pretrain.sh"
    path.write_text(OF_2020)
    found = read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)
    says = found.says
    assert (found.like, found.faults, says["tp"], says["dp"], says["recompute"]) == (
        *("megatron-lm@20.06", (), 2, 8, "full"),
    )
    assert (says["micro_batch_size"], says["global_batch_size"], says["num_micro_batches"]) == (4, 32, 1)
    assert (says["precision"], found.not_read) == ("fp16-grad16", ())
    result = run("estimate", "llama-3.1-8b", "--cluster", CLUSTER, "--from", str(path), "--json")
    plan = json.loads(result.stdout)["plan"]
    assert (plan["tp"], plan["dp"], plan["micro_batch_size"], plan["recompute"]) == (2, 8, 4, "full")


def test_checkpointed_activations_tell_the_years_before_2022(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(OF_2021)
    assert read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER).like == "megatron-lm@22.04"
    path.write_text(OF_2021.replace("--checkpoint-activations", "--recompute-activations"))
    assert read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER).like == "megatron-lm@26.08"


@pytest.mark.parametrize(("version", "degrees", "zero", "sequence"), [
    ("20.06", "dp tp", 0, False), ("20.12", "dp tp pp", 0, False), ("21.12", "dp tp pp", 0, False),
    ("22.03", "dp tp pp", 1, False), ("22.07", "dp tp pp", 1, True), ("23.12", "dp tp pp cp ep", 1, True),
    ("25.06", "dp tp pp cp ep etp", 3, True),
])  # fmt: skip
def test_the_years_of_megatron(version: str, degrees: str, zero: int, sequence: bool) -> None:
    like = read_like(f"megatron-lm@{version}", {"precision": "fp16"})
    assert like.can.degrees == tuple(degrees.split()) and max(like.can.zero_stages) == zero
    assert like.options("a100-sxm4-80gb").sequence_parallel is sequence


def test_who_adds_gradients_is_read_where_it_is_said(tmp_path: Path) -> None:
    """DeepSpeed's engine adds none in its products, whether a script says so or not."""
    path, bare = tmp_path / "pretrain.sh", OF_2021.replace("--checkpoint-activations --fp16", "--bf16")

    def adds(text: str) -> object:
        path.write_text(text)
        found = read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)
        assert not (found.faults or found.not_read)
        options = read_like(found.like).options("a100-sxm4-80gb")
        return found.says.get("fused_accumulation", options.fused_accumulation)

    off = bare.replace("--bf16", "--bf16 --no-gradient-accumulation-fusion")
    assert (adds(bare), adds(off)) == (True, False)
    engine = bare.replace("--bf16", "--bf16 --deepspeed --zero-stage 1")
    assert (adds(engine), adds(engine + " --no-gradient-accumulation-fusion")) == (False, False)
