"""Is what a compiled block keeps for its backward predicted? Against what torch.compile's partition keeps, by block.

    python -m experiments.plans.compiled_memory [--model llama] [--tp 2] [--dtype bfloat16] [--context ring]
        [--json FILE]

Blocks are compiled by inductor's own way up to the code: decompositions, its passes over forward and backward together,
and the partition between the two; the two graphs then run op by op. Measured are the storages that autograd is given
during a block's forward, without parameters, buffers and inputs that need no gradient. Ranks of tensor parallelism are
one process whose collectives send nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.table import Table
from torch import nn

from autoplan.capture.export import capture
from autoplan.codegen.program import compile_program
from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.program.activations import activations
from autoplan.program.lower import BlockLowering
from autoplan.program.megatron_kernels import Kernels
from autoplan.runtime.compiled import compile_blocks
from autoplan.runtime.mesh import use_mesh
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.program import Block
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.measure import (
    describe,
    environment,
    limit_time,
    make_console,
    run_command,
    saved_bytes,
    write_json,
)
from experiments.shared.simulated import fake_group

_BATCH, _SEQ, _VOCAB = 2, 128, 1000
_SIZES: Mapping[str, Any] = dict(
    vocab_size=_VOCAB,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=_SEQ,
)


# by the name that transformers has for it: sizes of a model
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 32},
    "gpt2": dict(  # dropout of 0.1 but in attention
        vocab_size=_VOCAB,
        n_embd=256,
        n_layer=2,
        n_head=8,
        n_positions=_SEQ,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gemma2": {**_SIZES, "head_dim": 32, "sliding_window": 50, "attn_implementation": "eager"},
    "mixtral": {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
}
DTYPES = ("float32", "bfloat16")
# on several ranks of tp each keeps the rows of its experts, as many as random tokens happen to choose
_ROWS_BY_CHANCE = ("mixtral",)


@dataclass(frozen=True)
class Kept:
    """Bytes that one call of a block keeps.

    Attributes:
        predicted: by the planner, compiled.
        op_by_op: by the planner, without a compiler.
        measured: what autograd is given.
    """

    block: str
    predicted: int
    op_by_op: int
    measured: int


def _built(model: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return cast("nn.Module", AutoModelForCausalLM.from_config(AutoConfig.for_model(model, **MODELS[model])))


def partitioned(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph as inductor does, but leave its forward and backward as graphs: a backend of torch.compile."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_graph(part: torch.fx.GraphModule, given: Sequence[torch.Tensor], **how: Any) -> Any:
        return make_boxed_func(part.forward)

    return cast("Callable[..., Any]", compile_fx(graph, list(inputs), inner_compile=as_graph))


def kept(model: str, tp: int, dtype: str, context: str = "") -> list[Kept]:
    """Return what each kind of block keeps on rank 0 of `tp`.

    Args:
        context: the method by which two ranks see sequences that are cut over them; "": sequences are whole.
    """
    torch.manual_seed(0)
    built = _built(model).train().to(getattr(torch, dtype))
    ids = torch.randint(0, _VOCAB, (_BATCH, _SEQ), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    graph, env, cp = capture(built, batch), {"b": _BATCH, "s": _SEQ}, 2 if context else 1
    cluster = Cluster(1, tp * cp, Device("made up", 1e12, 1e9, 1 << 30, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    cut = {"cp": cp, "context_method": context, "zero_stage": 0} if context else {}
    _, layouts, _ = make_plan(graph, cluster, read_pins({"tp": tp, **cut}, tp * cp), env)
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    program = compile_program(graph, layouts)
    measured: dict[str, int] = {}
    torch._dynamo.reset()
    with fake_group(tp * cp):
        pm = ParallelModel(
            program.spec, program.sources, dict(built.named_parameters()), dict(built.named_buffers()), device="cpu"
        )
        compile_blocks(pm.stage, partitioned)
        known = [*pm.stage.parameters(), *pm.stage.buffers()]
        for block in [m for m in pm.stage.modules() if isinstance(m, Block)]:
            block.compute = _watched(block, known, measured)  # type: ignore[method-assign]
        inputs = {**batch, "loss_denominator": torch.tensor(100.0), "rng": torch.tensor([0, 0, 0])}
        with use_mesh(pm.mesh):
            pm.stage(**inputs)

    def predicted(name: str, mode: Mode) -> int:
        kernels = Kernels(mode, context=cp, method=layouts.context.get(name))
        return activations(lowered[name], {**env, "s": _SEQ // cp}, kernels=kernels).saved_bytes

    return [
        Kept(name, predicted(name, Mode.COMPILED), predicted(name, Mode.EAGER), measured[low.class_name])
        for name, low in lowered.items()
        if low.class_name in measured
    ]


def _watched(block: Block, parameters: Sequence[torch.Tensor], out: dict[str, int]) -> Callable[..., Any]:
    """Return the block's function; its first call says in `out` what it keeps."""
    compute = block.compute

    def run(*args: Any, **more: Any) -> Any:
        given = [x for x in args if isinstance(x, torch.Tensor) and not x.requires_grad]
        results: list[Any] = []
        size = saved_bytes(lambda: results.append(compute(*args, **more)), [*parameters, *given])
        out.setdefault(type(block).__name__, size)
        return results[0]

    return run


def table_of(cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the results as a table."""
    table = Table(title=f"bytes kept by one call of a block, kB: {title}")
    for heading in ("model", "tp", "dtype", "block", "op by op", "predicted", "kept", "predicted / kept"):
        table.add_column(heading, justify="left" if heading in ("model", "dtype", "block") else "right", no_wrap=True)
    for c in cases:
        sizes = (f"{c[what] / 1e3:.1f}" for what in ("op_by_op", "predicted", "measured"))
        ratio = f"{c['predicted'] / c['measured']:.3f}" if c["measured"] else "-"
        table.add_row(c["model"], str(c["tp"]), c["dtype"], c["block"], *sizes, ratio)
    return table


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODELS)}; default all")] = None,
    tp: Annotated[
        list[int] | None, typer.Option(help="ranks of tensor parallelism; default 1, 2 and 4, of Mixtral 1")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; default both")] = None,
    context: Annotated[str, typer.Option(help="cut sequences over two ranks, by this method")] = "",
    tolerance: Annotated[float, typer.Option(help="the most that a block may be off")] = 0.001,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Compare predicted with kept bytes of compiled blocks."""
    unknown = (set(model or ()) - set(MODELS)) | (set(dtype or ()) - set(DTYPES))
    if unknown:
        raise typer.BadParameter(f"unknown {sorted(unknown)[0]!r}; use {', '.join((*MODELS, *DTYPES))}")
    limit_time(timeout_s)
    warnings.filterwarnings("ignore")
    console, env, cases = make_console(), environment(), list[dict[str, Any]]()
    for name in model or MODELS:
        for ways in tp or ((1,) if name in _ROWS_BY_CHANCE else (1, 2, 4)):
            for kind in dtype or DTYPES:
                with console.status(f"{name} tp{ways} {kind}"):
                    cases += [
                        {"model": name, "tp": ways, "dtype": kind, **vars(k)} for k in kept(name, ways, kind, context)
                    ]
    console.print(table_of(cases, describe(env)))
    write_json(json, "compiled_memory", env, cases)
    off = [c for c in cases if abs(c["predicted"] - c["measured"]) > tolerance * c["measured"]]
    if off:
        console.print(f"{len(off)} blocks are more than {100 * tolerance:g} % off", table_of(off, "off"))
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
