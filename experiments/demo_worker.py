"""What each process of `make demo` runs, under torchrun: one plan, trained on bytes of Python source.

    python -m torch.distributed.run --standalone --nproc-per-node 4 experiments/demo_worker.py PLAN FOLDER

The model and the data are here too, so that demo.py's single process uses the very same.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import autoplan

NUM_PROCESSES = 4
NUM_STEPS = 40
CHECKED_STEPS = 3  # compared with the single process, step by step
BATCH = 16  # sequences in a global batch
MICRO_BATCH = 4  # sequences in a micro-batch of one data-parallel rank
SEQUENCE = 128
VOCABULARY = 256  # bytes
CORPUS_BYTES = 4_000_000


@dataclass(frozen=True)
class DemoPlan:
    """One of the plans that the demo runs."""

    name: str
    what: str
    pins: dict[str, Any]


PLANS = {
    plan.name: plan
    for plan in (
        DemoPlan(
            "dp2_tp2",
            "2 data-parallel x 2 tensor-parallel ranks, ZeRO 3",
            {"dp": 2, "tp": 2, "zero_stage": 3, "num_micro_batches": BATCH // (2 * MICRO_BATCH)},
        ),
        DemoPlan(
            "pp2_tp2",
            "2 pipeline stages x 2 tensor-parallel ranks, 1F1B",
            {"pp": 2, "tp": 2, "num_micro_batches": BATCH // MICRO_BATCH},
        ),
    )
}

make_optimizer = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)


def make_model() -> nn.Module:
    """A small Llama with random weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


@functools.cache
def corpus() -> torch.Tensor:
    """Bytes of the Python standard library's own sources, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    read: list[bytes] = []
    for path in sorted(folder.glob("*.py")):
        read.append(path.read_bytes())
        if sum(map(len, read)) > CORPUS_BYTES:
            break
    text = b"".join(read)
    if len(text) < 100 * SEQUENCE:
        raise SystemExit(f"the demo trains on the standard library's sources, but {folder} has hardly any .py files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """The batch of one step, the same for every plan: random places of the corpus. (The model shifts the labels.)"""
    text = corpus()
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
    ids = torch.stack([text[i : i + SEQUENCE] for i in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids.clone()}


def main(plan: DemoPlan, folder: Path) -> None:
    """Train; rank 0 shows the progress and leaves losses and the gradients of the first step in `folder`."""
    torch.set_num_threads(1)
    part = BATCH // plan.pins.get("dp", 1)
    pm = autoplan.parallelize(
        make_model(),
        "local",
        example_inputs={name: tensor[:part] for name, tensor in global_batch(0).items()},
        pins=plan.pins,
        optimizer=make_optimizer,
        folder=folder,
    )
    assert pm.optimizer is not None
    lead = dist.get_rank() == 0
    rows = slice(pm.data_rank * part, (pm.data_rank + 1) * part)
    losses: list[float] = []
    first_gradients: dict[str, torch.Tensor] = {}
    progress = Progress(
        TextColumn("  training"),
        BarColumn(40),
        TextColumn("step {task.completed}/{task.total}  loss [bold]{task.fields[loss]}[/bold]"),
        TimeElapsedColumn(),
        console=Console(highlight=False),
        disable=not lead,
    )
    with progress:
        task = progress.add_task("", total=NUM_STEPS, loss="-")
        for step in range(NUM_STEPS):
            loss = pm.step({name: tensor[rows] for name, tensor in global_batch(step).items()})
            if step == 0:
                first_gradients = pm.gradients()  # a collective: every rank takes part
            pm.clip_grad_norm_(1.0)
            pm.optimizer.step()
            losses.append(float(loss))
            progress.update(task, advance=1, loss=f"{losses[-1]:.3f}")
    if lead:
        result = {"losses": losses, "gradients": first_gradients, "plan": str(pm.plan)}
        torch.save(result, folder / "result.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(PLANS[sys.argv[1]], Path(sys.argv[2]))
