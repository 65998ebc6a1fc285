"""A backward in two parts, ours and torch's: what is held between them, and how often a checkpointed layer runs.

    python -m experiments.plans.split_backward [--json FILE]

Layers of Hugging Face's Llama in one process: a forward, the first part (gradients of the inputs), the second (those of
the parameters), by `autoplan.runtime.split_backward` and by `torch.distributed.pipelining`, beside a backward in one
part. Gradients are compared with that one. Bytes of live tensors that the forward and what follows make (gradients of
parameters are there from the beginning), and how often each layer ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from autoplan.runtime.split_backward import Kept, backward_input, backward_weight
from experiments.shared.measure import describe, environment, make_console, run_command, write_json
from experiments.shared.models import Size, make_llama
from experiments.shared.storage_counter import StorageCounter

SIZE = Size(hidden=256, num_layers=4, seq=256, batch=2, num_heads=8, num_kv_heads=4)
TOLERANCE = 1e-5
Tensors = Sequence[torch.Tensor]
First = Callable[[Tensors, Tensors, Tensors, Sequence[nn.Parameter], Kept | None], Any]


class Layers(nn.Module):
    """Those of a Llama. `again`: each is dropped and computed again. `calls`: how often one ran, since it was set."""

    def __init__(self, size: Size, again: bool) -> None:
        super().__init__()
        model: Any = make_llama(size)
        self.layers, self.again, self.calls = model.model.layers, again, 0
        places = torch.arange(size.seq)[None]
        self.tables = model.model.rotary_emb(torch.zeros(1, size.seq, size.hidden), places)

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = layer(x, position_embeddings=self.tables)
        return out[0] if isinstance(out, tuple) else out  # a tuple before transformers 4.54

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, hidden]."""
        for layer in self.layers:
            x = checkpoint(self._layer, layer, x, use_reentrant=False) if self.again else self._layer(layer, x)
        return x


def _own(outputs: Tensors, grads: Tensors, inputs: Tensors, params: Sequence[nn.Parameter], kept: Kept | None) -> Any:
    # a block that is computed again has a backward in one part (autoplan.runtime.program.Block.whole_backward)
    return backward_input(outputs, grads, inputs, params, params if kept is None else (), kept)


def _torchs(outputs: Tensors, grads: Tensors, inputs: Tensors, params: Sequence[nn.Parameter], _: Kept | None) -> Any:
    found, groups = stage_backward_input(list(outputs), list(grads), list(inputs), iter(params))
    return found, (params, groups)


WAYS: dict[str, tuple[First, Callable[[Any], object]]] = {
    "own": (_own, backward_weight),
    "torch's": (_torchs, lambda rest: stage_backward_weight(iter(rest[0]), rest[1])),
}


def measure(way: str, again: bool) -> dict[str, Any]:
    """One row. ValueError if a gradient is not that of a backward in one part."""
    first, second = WAYS[way]
    layers = Layers(SIZE, again)
    params = [p for p in layers.parameters() if p.requires_grad]
    x = torch.randn(SIZE.batch, SIZE.seq, SIZE.hidden, requires_grad=True)
    gradient = torch.randn_like(x)
    torch.autograd.backward(layers(x), gradient)
    want = [p.grad.clone() for p in params if p.grad is not None]
    for p in params:
        p.grad = torch.zeros_like(p)
    layers.calls = 0
    kept = Kept() if way == "own" and not again else None
    there = [x, gradient, *layers.tables, *params, *want, *(p.grad for p in params if p.grad is not None)]
    with StorageCounter(there) as live:
        with kept.forward() if kept is not None else nullcontext():
            y = layers(x)
        sizes = {"after the forward": live.live_bytes - live.start_bytes}
        ran = [layers.calls]
        live.peak_bytes = live.live_bytes
        _, rest = first([y], [gradient], [x], params, kept)
        del y
        sizes["most in the first"] = live.peak_bytes - live.start_bytes
        sizes["between the parts"] = live.live_bytes - live.start_bytes
        ran.append(layers.calls)
        live.peak_bytes = live.live_bytes
        second(rest)
        sizes["most in the second"] = live.peak_bytes - live.start_bytes
        del rest
        ran.append(layers.calls)
    worst = max(float((p.grad - w).abs().max() / w.abs().max()) for p, w in zip(params, want, strict=True))
    if not worst < TOLERANCE:
        raise ValueError(f"{way} parts, computed again: {again}: a gradient is off by {worst:.1e}")
    parts = [b - a for a, b in zip([0, *ran], ran, strict=False)]
    runs = dict(zip(("forward", "first part", "second part"), (n / SIZE.num_layers for n in parts), strict=True))
    return {"parts": way, "computed again": again, "bytes": sizes, "runs_of_a_layer": runs, "difference": worst}


def main(json: Annotated[Path | None, typer.Option(help="store the figures here")] = None) -> None:
    """Measure both ways, without and with layers that are computed again, and print a table."""
    torch.manual_seed(0)
    rows = [measure(way, again) for again in (False, True) for way in WAYS]
    env = environment()
    table = Table(title=f"{SIZE.num_layers} layers of HF Llama, h{SIZE.hidden}; {describe(env)}")
    for name in ("parts", "layers", *(f"MB {name}" for name in rows[0]["bytes"]), "runs of a layer"):
        table.add_column(name)
    for row in rows:
        held = [f"{n / 1e6:.1f}" for n in row["bytes"].values()]
        runs = " + ".join(f"{n:g}" for n in row["runs_of_a_layer"].values())
        table.add_row(row["parts"], "computed again" if row["computed again"] else "kept", *held, runs)
    make_console().print(table)
    write_json(json, "python -m experiments.plans.split_backward", env, rows)


if __name__ == "__main__":
    run_command(main)
