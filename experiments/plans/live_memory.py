"""Is the planner's activation memory right? Predicted against measured bytes of forward and backward, in one process.

    python -m experiments.plans.live_memory [--family llama] [--family gpt] [--recompute full] [--json FILE]

`saved` is what stays between forward and backward, `peak` the most that is alive at once in either, parameters, their
gradients and the batch not counted. Measured are the storages that PyTorch's operations return; what a kernel allocates
inside itself is not seen. The step before has left its gradients, as every micro-batch but the first finds them.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.shared.measure import environment, limit_time, make_console, run_command, write_json


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside the context while they are alive.

        with LiveBytes() as live:
            loss = model(batch)
            kept = live.current_bytes
            loss.backward()
        print(live.peak_bytes, live.at_peak[:5])

    Attributes:
        current_bytes: made inside and alive now.
        peak_bytes: the most since the start or `reset_peak`.
        at_peak: (bytes, operation, shape) of what was alive at the peak, largest first; only with `explain`.
    """

    def __init__(self, *, explain: bool = False) -> None:
        super().__init__()
        self.current_bytes = self.peak_bytes = 0
        self._explain = explain
        self._alive: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        self._known: set[int] = set()
        self._at_peak: list[tuple[int, str, tuple[int, ...]]] = []

    @property
    def at_peak(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """What was alive at the peak."""
        return sorted(self._at_peak, reverse=True)

    def alive(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Return what is alive now, largest first."""
        return sorted(self._alive.values(), reverse=True)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.current_bytes

    def _forget(self, key: int) -> None:
        self._known.discard(key)
        size, _, _ = self._alive.pop(key, (0, "", ()))
        self.current_bytes -= size

    def _see(self, values: Any, made_by: str | None) -> None:
        for t in tree_leaves(values):
            if not isinstance(t, torch.Tensor):
                continue
            storage = t.untyped_storage()
            key = id(storage)  # torch keeps the Python object of a storage as long as the storage
            if key in self._known:
                continue
            self._known.add(key)
            weakref.finalize(storage, self._forget, key)
            if made_by is not None and storage.nbytes():
                self._alive[key] = (storage.nbytes(), made_by, tuple(t.shape))
                self.current_bytes += storage.nbytes()
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            if self._explain:
                self._at_peak = list(self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it took and what it returned."""
        kwargs = kwargs or {}
        self._see((args, kwargs), None)  # made before the context
        out = func(*args, **kwargs)
        self._see(out, str(func))
        return out


@dataclass(frozen=True)
class Measured:
    """Bytes of one forward and backward; `at_peak` as in LiveBytes."""

    saved_bytes: int
    peak_bytes: int
    at_peak: list[tuple[int, str, tuple[int, ...]]]


def measure_step(stage: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Measured:
    """Run forward and backward of a stage that returns its loss; gradients of an earlier step exist already."""
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    with LiveBytes(explain=True) as live:
        loss = stage(**inputs)
        saved = live.current_bytes - loss.untyped_storage().nbytes()
        torch.autograd.backward(loss)
        del loss
    return Measured(saved, live.peak_bytes, live.at_peak)


def run_case(family: str, size: Any, recompute: str) -> dict[str, Any]:
    """Predict and measure one model at one micro-batch size."""
    from autoplan.capture.export import capture
    from autoplan.codegen.program import compile_program
    from autoplan.cost_models.hardware.cluster import Cluster
    from autoplan.program.activation_bytes import peak_bytes_of
    from autoplan.program.activations import activations
    from autoplan.program.lower import BlockLowering
    from autoplan.runtime.mesh import use_mesh
    from autoplan.runtime.model import ParallelModel
    from autoplan.units import DTYPE_BYTES
    from experiments.shared.default_plans import make_plan, read_pins
    from experiments.shared.models import gpt_loss, make_gpt, make_llama, token_batch

    batch = token_batch(size)
    model: nn.Module = make_llama(size) if family == "llama" else make_gpt(size)
    graph = capture(model, batch, None if family == "llama" else gpt_loss)
    env = {"b": size.batch, "s": size.seq}
    _, layouts, _ = make_plan(graph, Cluster.parse("local", 1, "cpu"), read_pins({"recompute": recompute}, 1), env)
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    blocks = {n: activations(low, env) for n, low in lowered.items()}
    full = {name for name, how in layouts.recompute.items() if how == "full"}
    saved = sum(blocks[c.block].kept_bytes if c.name in full else blocks[c.block].saved_bytes for c in graph.calls)
    gradients = {n: p.num_elements * DTYPE_BYTES[p.dtype] for n, p in graph.params.items() if p.trainable}
    peak = peak_bytes_of(graph.calls, blocks, full, gradients)

    program = compile_program(graph, layouts)
    pm = ParallelModel(
        program.spec, program.sources, dict(model.named_parameters()), dict(model.named_buffers()), device="cpu"
    )
    inputs = {**batch, "loss_denominator": torch.tensor(float(size.batch * size.seq)), "rng": torch.tensor([0, 0, 0])}
    with use_mesh(pm.mesh):
        measured = measure_step(pm.stage, {k: v for k, v in inputs.items() if k in _arguments(pm.stage)})
    return {
        "family": family,
        "size": asdict(size),
        "name": f"{family} {size}{' recompute' * bool(full)}",
        "predicted": {"saved_bytes": saved, "peak_bytes": peak},
        "measured": {"saved_bytes": measured.saved_bytes, "peak_bytes": measured.peak_bytes},
        "at_peak": [list(entry) for entry in measured.at_peak[:8]],
    }


def _arguments(stage: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(stage.forward).parameters)


def table_of(cases: list[dict[str, Any]], title: str) -> Table:
    """Return the results as a table."""
    table = Table(title=f"activation memory, predicted / measured, MB: {title}")
    for heading in ("model", "saved", "ratio", "peak", "ratio"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for c in cases:
        row = [c["name"]]
        for what in ("saved_bytes", "peak_bytes"):
            mine, theirs = c["predicted"][what], c["measured"][what]
            row += [f"{mine / 1e6:.2f} / {theirs / 1e6:.2f}", f"{mine / theirs:.3f}"]
        table.add_row(*row)
    return table


def main(
    family: Annotated[list[str] | None, typer.Option(help="llama, gpt; default both")] = None,
    recompute: Annotated[list[str] | None, typer.Option(help="none, full; default both")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="micro-batch sizes; default 1 and 4")] = None,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Compare predicted with measured activation memory of the emitted program at one rank."""
    from experiments.shared.models import Size

    families = family or ["llama", "gpt"]
    unknown = (set(families) - {"llama", "gpt"}) | (set(recompute or ()) - {"none", "full"})
    if unknown:
        raise typer.BadParameter(f"unknown {sorted(unknown)[0]!r}; use llama or gpt, none or full")
    limit_time(timeout_s)
    warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    console, env, cases = make_console(), environment(), []
    for name in families:
        for how in recompute or ["none", "full"]:
            for size in batch or [1, 4]:
                for shape in (
                    Size(hidden=128, num_layers=4, seq=64, batch=size),
                    Size(hidden=256, num_layers=4, seq=256, batch=size, vocab=4096),
                ):
                    with console.status(f"{name} {shape} {how}"):
                        cases.append(run_case(name, shape, how))
    console.print(table_of(cases, f"torch {env['torch']}"))
    write_json(json, "live_memory", env, cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
