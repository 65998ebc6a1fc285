"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str, typer.Argument(help="Catalog name (autoplan models), a Hugging Face config.json, or package.module:factory.")
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="Nodes x devices per node x device (8x8xh100-sxm5-80gb), nodes x cloud instance (8xp5.48xlarge), local:N, "
        "or a YAML file; with overrides @nic=400,price=2.5.",
    ),
]
SeqLen = Annotated[
    str,
    typer.Option("--seq-len", "--seq", help="Tokens per sequence, in powers of 1024: 8k is 8,192, 1M is 1,048,576."),
]
TargetLen = Annotated[
    str | None,
    typer.Option(
        "--target-len",
        help="Tokens per target sequence of an encoder-decoder, read as --seq-len; without it as that.",
    ),
]
BatchSize = Annotated[
    str,
    typer.Option("--global-batch-size", "--gbs", help="Sequences per step, over all devices; 1k is 1,024."),
]
PinTexts = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Fix a choice, for example tp=8, recompute=full or stages=10,11,11; may be repeated."),
]
PrecisionName = Annotated[
    str,
    typer.Option(
        help="bf16, fp16, fp32, fp8, mxfp8, fp4, or native (the model's own dtypes); with -grad16 behind it "
        "(bf16-grad16), gradients are 16 bits."
    ),
]
ModeName = Annotated[str, typer.Option(help="How the program runs: eager, fused or compiled.")]
AttentionName = Annotated[
    str | None, typer.Option(help="Kernel of attention: unfused, flash1, flash2 or fused; left out: the mode's.")
]
LaunchName = Annotated[str, typer.Option(help="How kernels are started: async, graphs, full_graphs or blocking.")]
Overlaps = Annotated[
    str | None, typer.Option("--overlap", help="What runs beside computing, by comma: tp, ep, pp, cp.")
]
DispatcherName = Annotated[
    str, typer.Option("--dispatcher", help="How rows travel to experts: alltoall, flex or flex_fp8.")
]
FusedExperts = Annotated[
    bool, typer.Option("--fused-experts", help="One kernel for products, activation and casts of experts.")
]
NarrowGather = Annotated[
    bool, typer.Option("--narrow-gather", help="ZeRO gathers weights of 8-bit products in 8 bits.")
]
FusedLoss = Annotated[
    bool, typer.Option("--fused-loss", help="Cross entropy reads 16-bit logits and writes their gradient in place.")
]
OverlapZero = Annotated[
    bool,
    typer.Option(
        "--overlap-zero/--no-overlap-zero",
        help="What ZeRO 1 and 2 (fused kernels: 0, too) move once per step hides behind computing, or does not.",
    ),
]
OverlapGather = Annotated[
    bool,
    typer.Option(
        "--overlap-gather/--no-overlap-gather",
        help="Of that, what ZeRO 1 and 2 gather hides behind computing, or does not.",
    ),
]
ZeroByTensor = Annotated[
    bool,
    typer.Option(
        "--zero-by-tensor",
        help="ZeRO 3 gathers and reduces each parameter by itself, beside nothing (as DeepSpeed in 2021).",
    ),
]
DocumentLen = Annotated[
    str | None,
    typer.Option(
        help="Tokens of a document, read as --seq-len, where sequences are packed: attention stays within it."
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Tensor-parallel ranks may share norms and residuals, or each computes all of them.",
    ),
]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="Constants of the cost model: a file of autoplan calibrate.")
]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Measured times: a profile's name or file.")]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Tokens of the whole run, in powers of 1000 (300B is 300,000,000,000): adds days, money, energy."
    ),
]
Assumed = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Of the whole run: mtbf_device_days=2000, pue=1.1; may be repeated."),
]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file too, each when it is there.")]
Runnable = Annotated[bool, typer.Option("--runnable", help="Only what autoplan's own runtime runs today.")]
StateSlack = Annotated[
    float, typer.Option(help="Layouts may store this many times the least state, where that makes them faster.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds; then the best so far, labelled.", min=1)]

_RUN_OPTIONS: Mapping[str, tuple[object, Any]] = {  # how a run is set up: types and defaults, by fields of RunOptions
    "attention": (AttentionName, None),
    "launch": (LaunchName, "async"),
    "overlap": (Overlaps, None),
    "dispatcher": (DispatcherName, "alltoall"),
    "sequence_parallel": (SequenceParallel, True),
    "fused_experts": (FusedExperts, False),
    "narrow_gather": (NarrowGather, False),
    "fused_loss": (FusedLoss, False),
    "overlap_zero": (OverlapZero, True),
    "overlap_gather": (OverlapGather, True),
    "zero_by_tensor": (ZeroByTensor, False),
    "document_len": (DocumentLen, None),
}
RUN_OPTIONS: Mapping[str, Any] = {name: default for name, (_, default) in _RUN_OPTIONS.items()}


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """On the command line every one of `RUN_OPTIONS`, for the parameter `options` of a command: a mapping of them, as
    `read_options` takes it."""
    signature = inspect.signature(command, eval_str=True)
    given = []
    for parameter in signature.parameters.values():
        if parameter.name != "options":
            given.append(parameter)
            continue
        for name, (kind, default) in _RUN_OPTIONS.items():
            given.append(inspect.Parameter(name, parameter.kind, default=default, annotation=kind))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        command(options={name: values.pop(name) for name in _RUN_OPTIONS}, **values)

    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    return called
