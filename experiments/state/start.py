"""How much memory does a rank take until it can train? A model built on every rank, and one that is never whole.

    python -m experiments.state.start [--json FILE]

Four processes get their parts of a Llama of 346 MB (float32) under one plan: from a model that each of them builds,
from one on the meta device with the model's own initialisation, and from a folder of its weights; and by PyTorch's own
`fully_shard` from the meta device. Peak resident memory of each process, as the kernel counts it, beside what the
process has before it makes the model (Python, torch, transformers, autoplan). Rank 0 also captures and plans; the
comparison of the captured graph with the module, which it makes once per model and remembers, is left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoplan.profiler.processes import environment, run_ranks
from experiments.shared.measure import environment as machine
from experiments.shared.measure import make_console, run_command, write_json

WORLD = 4
PLANS: Mapping[str, Mapping[str, Any]] = {"ZeRO 3": {"dp": 4, "zero_stage": 3}, "tp": {"tp": 4}}
TIMEOUT_S = 300.0


def make_model(device: str) -> nn.Module:
    """Return a Llama of 86.5 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=11, num_attention_heads=12)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=12, vocab_size=5632))
    return model


@dataclass(frozen=True)
class Peak:
    """Resident memory of a process in bytes: before the model is made, and at most until it could train."""

    before: int
    peak: int


def memory_status(field: str) -> int:
    """Return VmRSS (resident now), VmHWM (at most) or VmData (private) of this process (proc(5)), in bytes.

    Not getrusage's maximum: that begins with the resident memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def _measured(make: Callable[[], Any]) -> Peak:
    make_model("meta")  # what importing transformers takes is not counted
    dist.barrier()
    before = memory_status("VmRSS")
    kept = make()
    out = Peak(before, memory_status("VmHWM"))
    dist.barrier()
    del kept
    return out


def ours(rank: int, world: int, plan: str, device: str, weights: str | None) -> Peak:
    """`parallelize` of a model on the CPU or the meta device."""
    from autoplan.api import parallelize  # what importing the planner takes is not counted either

    ids = torch.zeros(1, 64, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}

    def make() -> Any:
        model = make_model(device)
        return parallelize(model, "local", example_inputs=example, pins=PLANS[plan], weights=weights, verify=False)

    return _measured(make)


def fully_sharded(model: Any, world: int) -> Any:
    """Shard a Llama on the meta device with `fully_shard`, as its tutorial does, and initialise what is then there."""
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.initialize_weights()
    return model


def torchs(rank: int, world: int) -> Peak:
    """`fully_shard` from the meta device, and the model's own initialisation of what is then there."""

    def make() -> Any:
        return fully_sharded(make_model("meta"), world)

    return _measured(make)


def run(
    timeout_s: Annotated[float, typer.Option(help="limit of each group of processes")] = TIMEOUT_S,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure every way of starting."""
    total = sum(p.numel() * p.element_size() for p in make_model("meta").parameters())
    table = Table("how", "plan", "most of a rank, MB", "of rank 0, MB", "before the model, MB")
    cases: list[dict[str, Any]] = []

    def row(how: str, plan: str, found: list[Peak]) -> None:
        cases.append({"how": how, "plan": plan, "ranks": [asdict(f) for f in found]})
        grown = [(f.peak - f.before) / 1e6 for f in found]
        before = max(f.before for f in found) / 1e6
        table.add_row(how, plan, f"{max(grown[1:]):.0f}", f"{grown[0]:.0f}", f"{before:.0f}")

    with tempfile.TemporaryDirectory() as folder, environment(AUTOPLAN_PROFILE="assumed"):
        made: Any = make_model("cpu")
        made.save_pretrained(folder)
        del made
        row("fully_shard from meta", "ZeRO 3", run_ranks(torchs, WORLD, timeout_s=timeout_s))
        for plan in PLANS:
            for how, device, weights in (
                ("built on every rank", "cpu", None),
                ("from meta, own initialisation", "meta", None),
                ("from meta, weights in files", "meta", folder),
            ):
                row(how, plan, run_ranks(ours, WORLD, plan, device, weights, timeout_s=timeout_s))
    console = make_console()
    console.print(f"{total / 1e6:.0f} MB of parameters on {WORLD} ranks; memory above what the process had before")
    console.print(table)
    write_json(json_path, "python -m experiments.state.start", machine(), cases)


if __name__ == "__main__":
    run_command(run)
