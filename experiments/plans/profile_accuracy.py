"""How well does a profile predict? Held-out shapes, and one Llama layer as a whole against the sum of its operations.

    python -m experiments.plans.profile_accuracy [--profile NAME] [--budget-s 20] [--json FILE]

Held-out: what the profile says of its own interpolation, on shapes that are in no grid. Layer: the time that one more
layer adds to the forward and the backward of the emitted program (the slope between 2 and 6 layers, CPU time of the one
thread), against the sum of its operations, each measured by itself (`measured`) or interpolated from the general shapes
of the profile (`fitted`; operations that no general shape stands for are listed and count as nothing). It fails if a
measured sum is off by more than `--tolerance`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from autoplan.capture.export import capture
from autoplan.codegen.program import compile_program
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.kernels.operations import interpolated_s
from autoplan.cost_models.profile import MeasuredOp, Profile
from autoplan.profiler.ops import Clock, cache_bytes, measure_op
from autoplan.profiler.tasks import lowered_tasks
from autoplan.program.facts import layer_calls
from autoplan.program.lower import BlockLowering
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import Op
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model import ParallelModel
from experiments.shared.default_plans import make_plan
from experiments.shared.measure import describe, environment, limit_time, make_console, run_command, write_json
from experiments.shared.models import Size, make_llama, token_batch

SIZES = (
    Size(hidden=32, num_layers=2, seq=32),
    Size(hidden=64, num_layers=2, seq=64),
    Size(hidden=256, num_layers=2, seq=128, num_heads=8, num_kv_heads=4),
    Size(hidden=512, num_layers=2, seq=256, num_heads=8, num_kv_heads=8),
    Size(hidden=1024, num_layers=2, seq=256, num_heads=16, num_kv_heads=4),
)
PHASES = ("forward", "backward")


def held_out_table(profile: Profile) -> Table:
    table = Table(title=f"{profile.name}: relative error on held-out shapes", title_justify="left")
    for name in ("what", "shapes", "median", "p90", "max"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, e in sorted(profile.held_out.items()):
        table.add_row(name, str(e.count), f"{e.median:.1%}", f"{e.p90:.1%}", f"{e.max:.1%}")
    return table


class Whole:
    """Forward and backward of a model of several layers, as one program on one rank."""

    def __init__(self, size: Size) -> None:
        model, batch = make_llama(size), token_batch(size)
        graph = capture(model, batch)
        env = {"b": size.batch, "s": size.seq}
        _, layouts, _ = make_plan(graph, Cluster.local(1), ParallelConfig(), env)
        program = compile_program(graph, layouts)
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        buffers = {n: b.detach() for n, b in model.named_buffers()}
        self.graph, self.layouts, self.env = graph, layouts, env
        self.pm = ParallelModel(program.spec, program.sources, parameters, buffers)
        self.inputs: dict[str, torch.Tensor] = {
            **batch,
            "loss_denominator": torch.tensor(float(size.batch * size.seq)),
            "rng": torch.zeros(3, dtype=torch.int64),
        }

    def run(self) -> tuple[float, float]:
        """CPU seconds of the forward and the backward."""
        for p in self.pm.stage.parameters():
            p.grad = None
        with use_mesh(self.pm.mesh):
            start = time.thread_time()
            loss = self.pm.stage(**self.inputs)
            middle = time.thread_time()
            loss.backward()
            return middle - start, time.thread_time() - middle

    def operations(self) -> tuple[list[Any], Counter[str]]:
        """Tasks of one layer, and how often each occurs in it."""
        name = layer_calls(self.graph)[0]
        block = self.graph.blocks[next(c.block for c in self.graph.calls if c.name == name)]
        lowered = BlockLowering(self.graph, block, self.layouts.selection, self.layouts.axes).run()
        works = OpCosts(self.graph, self.layouts.axes, self.env)
        statements = [s for s in lowered.statements if isinstance(s, Op)]
        counts = Counter(works.op_work(block, s.node, s.strategy, s.bias is not None).key for s in statements)
        return lowered_tasks([lowered], works), counts


def layer_seconds(size: Size, budget_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """Per phase what one more layer takes, and the relative spread of that over repetitions."""
    few, many = Whole(replace(size, num_layers=2)), Whole(replace(size, num_layers=6))
    slopes: list[list[float]] = [[], []]
    begin = time.monotonic()
    few.run(), many.run()
    while len(slopes[0]) < 5 or time.monotonic() - begin < budget_s:
        a, b = few.run(), many.run()
        for phase in range(2):
            slopes[phase].append((b[phase] - a[phase]) / 4)
    found, spread = {}, {}
    for phase, values in zip(PHASES, slopes, strict=True):
        low, found[phase], high = statistics.quantiles(values, n=4, method="inclusive")
        spread[phase] = (high - low) / 2 / found[phase]
    return found, spread


def compare_size(size: Size, profile: Profile, budget_s: float) -> dict[str, Any]:
    """One row: the layer as a whole, the sum of its operations measured, and the sum interpolated."""
    whole, spread = layer_seconds(size, budget_s)
    made = Whole(size)
    tasks, counts = made.operations()
    clock, cache = Clock(torch.device("cpu")), cache_bytes(torch.device("cpu"))
    with use_mesh(made.pm.mesh):
        records: list[MeasuredOp] = [measure_op(t, clock, cache) for t in tasks]
    own = {r.work.key for r in records}
    general = replace(profile, ops=tuple(r for r in profile.ops if r.work.key not in own))
    case: dict[str, Any] = {"size": str(size), "whole_s": whole, "spread": spread, "measured_s": {}, "fitted_s": {}}
    for phase in PHASES:
        times = [(r, r.forward_s if phase == "forward" else r.backward_s) for r in records]
        case["measured_s"][phase] = sum(counts[r.work.key] * t.median for r, t in times if t is not None)
        fitted = [(r, interpolated_s(r.work, phase, general)) for r, t in times if t is not None]
        missing = [r.work.op for r, q in fitted if q is None]
        case["fitted_s"][phase] = sum(counts[r.work.key] * q.mid for r, q in fitted if q is not None)
        case.setdefault("not_fitted", {})[phase] = missing
    return case


def main(
    profile: Annotated[str, typer.Option(help="Name or path of a profile.")] = "cpu-2core-gloo-w2",
    budget_s: Annotated[float, typer.Option(help="Seconds of measuring whole layers, per size.")] = 8.0,
    tolerance: Annotated[float, typer.Option(help="Largest error of a measured sum.")] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after this time.")] = 540.0,
) -> None:
    """Print held-out error and the comparison of whole layers."""
    limit_time(timeout_s)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    AxisMesh([("all", 1)])
    loaded, console, env = Profile.load(profile), make_console(), environment()
    console.print(held_out_table(loaded))
    table = Table(title=f"one Llama layer against the sum of its operations ({describe(env)})", title_justify="left")
    for name in ("layer", "phase", "whole ms", "spread", "measured ms", "error", "fitted ms", "error ", "not fitted"):
        table.add_column(name, justify="left" if name in ("layer", "phase") else "right")
    cases, wrong = [], []
    for size in SIZES:
        case = compare_size(size, loaded, budget_s)
        cases.append(case)
        for phase in PHASES:
            whole, measured, fitted = (case[k][phase] for k in ("whole_s", "measured_s", "fitted_s"))
            errors = [measured / whole - 1, fitted / whole - 1]
            table.add_row(
                str(size), phase, f"{whole * 1e3:.3f}", f"{case['spread'][phase]:.0%}", f"{measured * 1e3:.3f}",
                f"{errors[0]:+.1%}", f"{fitted * 1e3:.3f}", f"{errors[1]:+.1%}",
                ", ".join(sorted(set(case["not_fitted"][phase]))) or "-",
            )  # fmt: skip
            if abs(errors[0]) > tolerance:
                wrong.append(f"{size} {phase}: {errors[0]:+.0%}")
    console.print(table)
    dist.destroy_process_group()
    write_json(json, "profile_accuracy.py", env, cases)
    if wrong:
        raise SystemExit("measured sums off by more than the tolerance: " + "; ".join(wrong))


if __name__ == "__main__":
    run_command(main)
