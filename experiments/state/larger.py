"""A model that is larger than the memory a process may have for it: does it start, train, and come back out of files?

    python -m experiments.state.larger [--json FILE]

Once everything is imported, the kernel gives a process no more private memory (RLIMIT_DATA of setrlimit(2): heap,
anonymous maps and everything else that is written) than a part of the model's parameters in float32. glibc keeps no
freed tensors (MALLOC_MMAP_THRESHOLD_ of mallopt(3)): with its default, `fully_shard` runs out of memory in its first
step, and with 1 MiB tensor parallelism does, whose gradients are smaller and lie between freed activations. Under this
limit four processes start from a model on the meta device and make a step of SGD: by PyTorch's `fully_shard`, and by
`parallelize` with the model's own initialisation (saved with `save_pretrained` before the step) and with these files,
under ZeRO 3, pp and tp. Controls: the same with the model built on every rank must fail for want of memory, and one
process without a limit that loads the files with `from_pretrained` must have the same loss.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from autoplan.profiler.processes import RankError, environment, run_ranks
from experiments.shared.measure import environment as machine
from experiments.shared.measure import make_console, run_command, write_json
from experiments.state.start import fully_sharded, memory_status

WORLD, NUM_STEPS, LR = 4, 1, 0.01
SHARE = 0.9  # of the model's bytes: what a process may have of private memory beside what it has before
MOST_LOSS_DIFFERENCE = 1e-5  # relative, in float32
NO_MEMORY = "can't allocate memory"  # torch's words on the CPU
PLANS: Mapping[str, Mapping[str, Any]] = {"ZeRO 3": {"dp": 4, "zero_stage": 3}, "pp": {"pp": 4}, "tp": {"tp": 4}}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # tensors from 128 KiB on are maps of their own, which are given back
TIMEOUT_S = 400.0


def make_model(device: str, num_layers: int) -> Any:
    """Return a Llama of 3.2 million parameters per layer, and 2.9 million beside them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=8)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers, vocab_size=2816))


def batch() -> dict[str, torch.Tensor]:
    """Return the global batch."""
    ids = torch.arange(WORLD * 32).mul(7).remainder(2816).view(WORLD, 32)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Run:
    """How a process went: memory in bytes (resident, of that what it had before the model; private), and its losses."""

    before: int
    peak: int
    private: int
    losses: tuple[float, ...]


def _limited(limit: int | None, train: Callable[[], list[float]]) -> Run:
    """Train in a process with at most `limit` bytes of private memory more than it has now."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import autoplan.api  # noqa: F401  # imports count for everybody

    before = memory_status("VmRSS")
    if limit is not None:
        all_of_it = memory_status("VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (all_of_it, all_of_it))
    losses = train()
    return Run(before, memory_status("VmHWM"), memory_status("VmData"), tuple(losses))


def ours(
    rank: int, world: int, limit: int, layers: int, plan: str, device: str, weights: str | None, save: str | None
) -> Run:
    """`parallelize` of a model on the CPU or the meta device; `save`: write it there before it is trained."""

    def train() -> list[float]:
        from autoplan.api import parallelize

        whole = batch()
        pm = parallelize(
            make_model(device, layers),
            "local",
            example_inputs={name: x[:1] for name, x in whole.items()},
            pins=PLANS[plan],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
            weights=weights,
            global_batch_size=WORLD,
        )
        if save is not None:
            pm.save_pretrained(save)
        part = {name: x.tensor_split(pm.data_world)[pm.data_rank] for name, x in whole.items()}
        losses = []
        for _ in range(NUM_STEPS):
            losses.append(pm.step(part).item())
            pm.optimizer.step()
        return losses

    return _limited(limit, train)


def torchs(rank: int, world: int, limit: int, layers: int) -> Run:
    """`fully_shard` from the meta device, as its tutorial does; its values are of its own random numbers."""

    def train() -> list[float]:
        model = fully_sharded(make_model("meta", layers), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        losses = []
        for _ in range(NUM_STEPS):
            loss = model(**{name: x[rank : rank + 1] for name, x in batch().items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
        return losses

    return _limited(limit, train)


def one(rank: int, world: int, folder: str) -> Run:
    """One process that has the whole model, without a limit."""

    def train() -> list[float]:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        losses = []
        for _ in range(NUM_STEPS):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return _limited(None, train)


def fails_for_want_of_memory(limit: int, layers: int, timeout_s: float) -> bool:
    """Return True if a model built on every rank cannot start under the limit."""
    try:
        run_ranks(ours, WORLD, limit, layers, "ZeRO 3", "cpu", None, None, timeout_s=timeout_s)
    except RankError as exc:
        return NO_MEMORY in str(exc) or "MemoryError" in str(exc)
    return False


def run(
    layers: Annotated[int, typer.Option(help="layers of the model")] = 48,
    timeout_s: Annotated[float, typer.Option(help="limit of each group of processes")] = TIMEOUT_S,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Start and train a model that is larger than what a process may have."""
    total = sum(p.numel() * p.element_size() for p in make_model("meta", layers).parameters())
    limit = int(SHARE * total)
    table = Table("how", "plan", "most of a rank, MB", "of rank 0, MB", "before the model, MB", "loss")
    cases: list[dict[str, Any]] = []
    wrong: list[str] = []
    console = make_console()

    def row(how: str, plan: str, found: list[Run], expected: tuple[float, ...] | None = None) -> None:
        cases.append({"how": how, "plan": plan, "ranks": [asdict(f) for f in found]})
        grown = [round((f.peak - f.before) / 1e6) for f in found]
        before = max(f.before for f in found) / 1e6
        losses = found[0].losses
        cells = (
            how,
            plan,
            f"{max(grown[1:], default=grown[0])}",
            f"{grown[0]}",
            f"{before:.0f}",
            ", ".join(f"{x:.6f}" for x in losses),
        )
        table.add_row(*cells)
        console.print(*cells, sep=" | ")  # each takes a minute or more
        for mine, theirs in zip(losses, losses if expected is None else expected, strict=True):
            if abs(mine - theirs) > MOST_LOSS_DIFFERENCE * abs(theirs):
                wrong.append(f"{how}, {plan}: a loss of {mine}, and {theirs} in one process")

    with tempfile.TemporaryDirectory() as folder, environment(AUTOPLAN_PROFILE="assumed", **MALLOC):
        row("fully_shard from meta", "ZeRO 3", run_ranks(torchs, WORLD, limit, layers, timeout_s=timeout_s))
        first = run_ranks(ours, WORLD, limit, layers, "ZeRO 3", "meta", None, folder, timeout_s=timeout_s)
        alone = run_ranks(one, 1, folder, timeout_s=timeout_s)
        expected = alone[0].losses
        row("from meta, own initialisation, saved", "ZeRO 3", first, expected)
        for plan in PLANS:
            found = run_ranks(ours, WORLD, limit, layers, plan, "meta", folder, None, timeout_s=timeout_s)
            row("from meta, these files", plan, found, expected)
        row("one process, no limit, from_pretrained", "", alone)
        size = sum(os.path.getsize(path) for path in Path(folder).glob("*.safetensors"))
        fails = fails_for_want_of_memory(limit, layers, timeout_s)
    if not fails:
        wrong.append("a model built on every rank starts under the limit, so that the limit shows nothing")
    console.print(
        f"{total / 1e6:.0f} MB of parameters ({size / 1e6:.0f} MB of files) on {WORLD} processes, each limited to "
        f"{limit / 1e6:.0f} MB of private memory for it; built on every rank it fails. Most resident memory above that "
        "before the model:"
    )
    console.print(table)
    write_json(json_path, "python -m experiments.state.larger", {**machine(), "limit": limit, "total": total}, cases)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    run_command(run)
