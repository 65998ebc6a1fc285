"""Does the cost of capture and of the intra-op ILP grow with depth? Llama at its published sizes, without its memory.

    python -m experiments.plans.capture_scaling [--model 405B --depth 2 --depth 126] [--tp 2] [--json FILE]

Parameters are fake tensors (bf16). Captured in turn as usual (identical layers traced once) and with that switched off
(every layer traced, `every` in the table); both must give the same blocks, or it fails. Each case is a process of its
own, so that its peak memory is its own.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from autoplan.profiler.processes import run_ranks
from autoplan.runtime.host_memory import peak_resident_bytes
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

NUM_DEVICES = 8
SEQ = 4096


@dataclass(frozen=True)
class Published:
    """A Llama 3.1 architecture."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    vocab: int = 128256


MODELS = {
    "8B": Published(4096, 14336, 32, 32),
    "70B": Published(8192, 28672, 80, 64),
    "405B": Published(16384, 53248, 126, 128),
}
DEPTHS = {"8B": (32,), "70B": (80,), "405B": (2, 8, 32, 80, 126)}


def make_model(shape: Published, depth: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a Llama of fake bf16 parameters and an example batch, neither with any storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=depth,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=2 * SEQ,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: nn.Module = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        ids = torch.zeros(2, SEQ, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids.clone()}


def _capture(shape: Published, depth: int, merge: bool) -> tuple[Any, tuple[float, float]]:
    """ModelGraph, and seconds of processor time (one thread) and of wall time.

    Not `capture` itself: only the part inside lets layers be traced one by one.
    """
    from autoplan.capture import export
    from autoplan.ops.factors import infer_factors

    model, batch = make_model(shape, depth)
    cpu, wall = time.process_time(), time.perf_counter()
    found = export._capture(model, batch, None, merge=merge)
    if found is None:
        raise RuntimeError(f"the layers could not be delimited (merge={merge})")
    graph = infer_factors(found)
    return graph, (time.process_time() - cpu, time.perf_counter() - wall)


def measure_case(rank: int, world: int, shape: Published, depth: int, tps: list[int], repeats: int) -> dict[str, Any]:
    """One model at one depth, in a process of its own."""
    warnings.filterwarnings("ignore")
    _capture(Published(64, 128, 2, 8), 2, True)  # imports and first-call costs
    before = peak_resident_bytes()
    start = time.perf_counter()
    make_model(shape, depth)
    build_s = time.perf_counter() - start
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    peaks: dict[bool, int] = {}
    graphs: dict[bool, Any] = {}
    for i in range(repeats):
        for merge in (True, False) if i % 2 == 0 else (False, True):
            graphs[merge], seconds = _capture(shape, depth, merge)
            times[merge].append(seconds)
            peaks.setdefault(merge, peak_resident_bytes())
    sizes = {m: [(n, len(b.nodes)) for n, b in g.blocks.items()] for m, g in graphs.items()}
    if sizes[True] != sizes[False] or len(graphs[True].calls) != len(graphs[False].calls):
        raise RuntimeError(f"the two ways of capture disagree: {sizes}")
    graph = graphs[True]
    return {
        "model_build_s": build_s,
        "capture_cpu_s": statistics.median(cpu for cpu, _ in times[True]),
        "capture_wall_s": statistics.median(wall for _, wall in times[True]),
        "every_layer_cpu_s": statistics.median(cpu for cpu, _ in times[False]),
        "every_layer_wall_s": statistics.median(wall for _, wall in times[False]),
        "cpu_ratio": statistics.median(b[0] / a[0] for a, b in zip(times[True], times[False], strict=True)),
        "num_nodes": sum(len(b.nodes) for b in graph.blocks.values()),
        "num_blocks": len(graph.blocks),
        "num_calls": len(graph.calls),
        "graph_json_bytes": len(graph.to_json()),
        "peak_rss_before_bytes": before,
        "peak_rss_bytes": peaks[True],
        "peak_rss_all_layers_bytes": peaks[False],
        "ilp": [_ilp(graph, tp) for tp in tps],
    }


def _ilp(graph: Any, tp: int) -> dict[str, Any]:
    """Plan the layout inside for one tensor-parallel degree."""
    from autoplan.cost_models.hardware.cluster import Cluster
    from experiments.shared.default_plans import make_plan, read_pins

    start = time.perf_counter()
    config = read_pins({"tp": tp}, NUM_DEVICES)
    _, _, solution = make_plan(graph, Cluster.local(NUM_DEVICES, "cuda"), config, {"b": 1, "s": SEQ})
    total = time.perf_counter() - start
    return {
        "tp": tp,
        "num_variables": solution.num_variables,
        "build_s": total - solution.solve_time_s,
        "solve_s": solution.solve_time_s,
        "status": solution.status,
        "gap": solution.gap,
    }


def tables_of(cases: list[dict[str, Any]], title: str) -> list[Table]:
    """Return the results as two tables."""
    first = Table(title=f"capture of HF Llama, fake bf16 parameters: {title}")
    for heading in (
        "model",
        "layers",
        "once: cpu s (wall)",
        "every: cpu s (wall)",
        "every/once",
        "nodes",
        "calls",
        "kB",
        "MB",
        "every MB",
    ):
        first.add_column(heading, justify="right", no_wrap=True)
    second = Table(title=f"intra-op ILP, b=1 s={SEQ}, {NUM_DEVICES} devices (assumed figures)")
    for heading in ("model", "layers", "tp", "variables", "build s", "solve s", "status", "gap"):
        second.add_column(heading, justify="right", no_wrap=True)
    for c in cases:
        first.add_row(
            c["model"],
            str(c["depth"]),
            f"{c['capture_cpu_s']:.2f} ({c['capture_wall_s']:.2f})",
            f"{c['every_layer_cpu_s']:.2f} ({c['every_layer_wall_s']:.2f})",
            f"{c['cpu_ratio']:.1f}",
            str(c["num_nodes"]),
            str(c["num_calls"]),
            f"{c['graph_json_bytes'] / 1e3:.0f}",
            f"{c['peak_rss_bytes'] / 1e6:.0f}",
            f"{c['peak_rss_all_layers_bytes'] / 1e6:.0f}",
        )
        for r in c["ilp"]:
            second.add_row(
                c["model"],
                str(c["depth"]),
                str(r["tp"]),
                str(r["num_variables"]),
                f"{r['build_s']:.2f}",
                f"{r['solve_s']:.2f}",
                r["status"],
                f"{r['gap']:.1e}",
            )
    return [first, second]


def main(
    model: Annotated[list[str] | None, typer.Option(help="8B, 70B, 405B; default all")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="number of layers; default: the published ones")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="degrees of the ILP; default 2, 4, 8")] = None,
    repeats: Annotated[int, typer.Option(help="captures of each kind")] = 2,
    timeout_s: Annotated[float, typer.Option(help="give up on a case after this long")] = 400.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time capture and the intra-op ILP against depth."""
    names = model or list(MODELS)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"unknown model {name!r}; use {', '.join(MODELS)}")
    env = {**environment(), "threads": 1}
    console = make_console()
    cases = []
    for name in names:
        for layers in depth or DEPTHS[name]:
            with console.status(f"Llama {name}, {layers} layers"):
                args = (MODELS[name], layers, tp or [2, 4, 8], repeats)
                result = run_ranks(measure_case, 1, *args, timeout_s=timeout_s)[0]
            cases.append({"model": name, "depth": layers, "shape": asdict(MODELS[name]), **result})
    for table in tables_of(cases, describe(env)):
        console.print(table)
    write_json(json, "capture_scaling", env, cases)


if __name__ == "__main__":
    run_command(main)
