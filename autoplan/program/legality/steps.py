"""Legality rules of a step: offload and recompute, the schedule, and the options of the run."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.config.choice import choices_of
from autoplan.config.offload import NEEDS_SHARDS, lacks_shards, no_host_link, offload_text
from autoplan.config.parallel import Launch, Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_obstacle as _precision_obstacle
from autoplan.config.precision import precision_of
from autoplan.config.recompute import (
    RECOMPUTE_KINDS,
    RecomputeKind,
    check_choice,
    kinds_in,
    modules_of,
    outside_graphs,
    region_groups,
)
from autoplan.names import did_you_mean
from autoplan.ops.products import NOT_EXECUTED
from autoplan.program.facts import Facts
from autoplan.program.legality.rule import Rule, Scope
from autoplan.schedules.schedule import SCHEDULES, obstacle

_MAX_LISTED = 8  # names in a message
OUTSIDE_GRAPHS = (
    "Megatron's CUDA graphs of layers exclude full recompute, recompute of experts and offloaded activations (launch "
    "async prices the step without graphs)"
)
_MASTER = "float32"  # in which trained parameters of a lower precision are stored


def _shards(c: ParallelConfig, f: Facts) -> str | None:
    if not lacks_shards(c.offload, c.zero_stage, c.num_shards):
        return None
    beside = f"zero_stage={c.zero_stage}, dp={c.dp} and cp={c.cp}"
    return f"offload={offload_text(c.offload)!r} with {beside}: {NEEDS_SHARDS}"


def _host_link(c: ParallelConfig, f: Facts) -> str | None:
    if f.host_link or not (c.offload or any(RECOMPUTE_KINDS[name].on_host for name in kinds_in(c.recompute))):
        return None
    return no_host_link(f.device_name)


def _pipeline(c: ParallelConfig, f: Facts) -> str | None:
    if c.pp > 1 or c.virtual_stages == 1:
        return None
    fewest, most = SCHEDULES[c.schedule].virtual_stages
    if fewest == most == c.virtual_stages:
        return f"schedule {c.schedule!r} needs a pipeline"
    return f"virtual_stages={c.virtual_stages} needs a pipeline"


def _split_backward(c: ParallelConfig, f: Facts) -> str | None:
    if c.zero_stage != 3 or not SCHEDULES[c.schedule].split_backward:
        return None
    return f"schedule {c.schedule!r} splits the backward, which with zero_stage=3 gives wrong gradients"


def _dimless(c: ParallelConfig, f: Facts) -> str | None:
    if c.zero_stage == 0 or c.dp * c.cp == 1 or f.model is None or not f.model.dimless:
        return None
    return (
        f"zero_stage={c.zero_stage}: parameter {f.model.dimless[0]!r} has no dim to shard over ranks; write it with "
        "one element, torch.ones(1) in place of torch.ones(())"
    )


def _mixed_dtypes(c: ParallelConfig, f: Facts) -> str | None:
    if c.zero_stage == 0 or c.dp * c.cp == 1 or f.model is None:
        return None
    computed = precision_of(f.precision).compute
    for call, trained, every in f.model.mixed:
        stored = {_MASTER if dtype == computed else dtype for dtype in trained}
        if len(stored) > 1 or (computed != _MASTER and computed in every):
            return (
                f"zero_stage={c.zero_stage}: the parameters of {call!r} are in {' and '.join(sorted(every))}, and ZeRO "
                "reduces all of a block in one buffer; give them one dtype"
            )
    return None


def _takes(c: ParallelConfig, f: Facts) -> str | None:
    return obstacle(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)


def _unknown_order(c: ParallelConfig, f: Facts) -> str | None:
    if SCHEDULES[c.schedule].torch_class is not None:
        return None
    return f"schedule {c.schedule!r} is priced (autoplan estimate), but not searched and not executed"


def _recompute_values(c: ParallelConfig, f: Facts) -> str | None:
    """Check the blocks and choices of a recompute mapping; modules are recomputed in all layers or none."""
    if isinstance(c.recompute, tuple):
        return None
    if not isinstance(c.recompute, Mapping):
        return None
    for block, how in c.recompute.items():
        check_choice(how)
        if modules_of(how):
            return f"recompute of {block!r}: modules are recomputed in all layers or in none, got {how!r}"
        if f.model is not None and block not in f.model.block_calls:
            hint = did_you_mean(block, f.model.block_calls, _MAX_LISTED)
            return f"recompute names {block!r}, which is not a block; {hint}"
    return None


def _recompute_found(c: ParallelConfig, f: Facts) -> str | None:
    if not isinstance(c.recompute, tuple):
        return None
    return (
        f"recompute={c.recompute!r}: numbers of layers per stage are searched, not pinned (autoplan estimate "
        "prices them); pin one choice for all layers, or a mapping block -> choice"
    )


def _recompute_stages(c: ParallelConfig, f: Facts) -> str | None:
    chunks, counts = c.pp * c.virtual_stages, c.recompute
    if not isinstance(counts, tuple):
        return None
    if len(counts) != chunks:
        return f"recompute={counts} has {len(counts)} entries for {chunks} stages; give {chunks}"
    for k, (count, most) in enumerate(zip(counts, c.stages or counts, strict=False)):
        if count > most:
            return f"recompute={','.join(map(str, counts))}: stage {k} of {most} layers cannot recompute {count}"
    return None


def _kinds(c: ParallelConfig) -> list[RecomputeKind]:
    return [RECOMPUTE_KINDS[name] for name in sorted(kinds_in(c.recompute))]


def _recompute_mode(c: ParallelConfig, f: Facts) -> str | None:
    for kind in _kinds(c):
        if kind.modes and f.mode not in kind.modes:
            modes = " or ".join(kind.modes)
            return f"recompute={c.recompute!r}: {kind.does}, priced with mode {modes} and not executed"
    return None


def _recompute_modules(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None:
        return None
    for name in modules_of(c.recompute):
        if name not in f.model.modules:
            there = ", ".join(f.model.modules) or "none"
            return f"recompute={c.recompute!r}: no layer of {f.model.name} has the module {name!r}; there are {there}"
    return None


def _recompute_executed(c: ParallelConfig, f: Facts) -> str | None:
    reasons = (f"recompute={c.recompute!r}: {kind.does}, priced and not executed" for kind in _kinds(c)
               if not kind.executed)  # fmt: skip
    return next(reasons, None)


def _compiled(c: ParallelConfig, f: Facts) -> str | None:
    if f.mode is not Mode.COMPILED:
        return None
    for how in c.recompute.values() if isinstance(c.recompute, Mapping) else [c.recompute]:
        if isinstance(how, str) and region_groups(how):
            return (
                f"recompute={c.recompute!r} with compiled blocks: torch.compile decides what a block keeps of its "
                "inside"
            )
    return None


def _compressed_shards(c: ParallelConfig, f: Facts) -> str | None:
    if not f.gradient_compression or c.zero_stage == 0:
        return None
    return (
        f"zero_stage={c.zero_stage} with gradient_compression: only the all-reduce of ZeRO 0 is compressed; nearest "
        "legal: zero_stage=0"
    )


def _compressed_sums(c: ParallelConfig, f: Facts) -> str | None:
    if f.gradient_compression != "PowerSGD" or precision_of(f.precision).captured != "float16":
        return None
    return (
        f"precision {f.precision!r} with PowerSGD: the compression error of one step is added to the next, whose loss "
        "scale may differ; nearest legal: precision='bf16'"
    )


def _compile(c: ParallelConfig, f: Facts) -> str | None:
    if f.compile in (True, False, "auto", *f.compile_backends):
        return None
    if not f.compile_backends:
        return f"compile={f.compile!r} is not known; use True, False or 'auto'"
    hint = did_you_mean(f.compile, f.compile_backends, _MAX_LISTED)
    return f"compile={f.compile!r} is not known; use True, False, 'auto' or a backend of torch.compile; {hint}"


def _graph_dtype(c: ParallelConfig, f: Facts) -> str | None:
    precision = precision_of(f.precision)
    computed = precision.compute
    if not f.as_given or f.model is None or None in (computed, f.model.main_dtype) or f.model.main_dtype == computed:
        return None
    if precision.autocast is not None:  # its casts are added to a graph of any dtype
        return None
    return (
        f"precision {f.precision!r} computes in {computed}, but the graph of {f.model.name} is one of "
        f"{f.model.main_dtype}; use a precision of that dtype, or give the module (package.module:factory), which is "
        "captured in the precision"
    )


def _async_tp(c: ParallelConfig, f: Facts) -> str | None:
    if f.async_tp not in (True, False, "auto"):
        return f"async_tp={f.async_tp!r} is not known; use True, False or 'auto'"
    if f.async_tp is True and f.device_type != "cuda":
        return f"async_tp=True works on CUDA only, but the cluster has {f.device_type} devices; leave it out"
    if f.async_tp is True and f.compile not in (True, "auto", "inductor"):
        return f"async_tp=True needs torch.compile, but compile={f.compile!r}; nearest legal: compile=True"
    return None


def _in_pieces(f: Facts) -> bool:
    """Return True if the run hides collectives of tp behind pieces of products, as compiled blocks can (async TP)."""
    return f.mode is Mode.COMPILED and f.options.overlap == {"tp"}


def _pieces(c: ParallelConfig, f: Facts) -> str | None:
    if not _in_pieces(f) or c.tp == 1:
        return None
    if f.device_type != "cuda":
        return f"overlap of tp with compiled blocks works on CUDA only, but the cluster has {f.device_type} devices"
    if f.peers is None or (c.tp <= f.peers and f.peers % c.tp == 0):
        return None
    least = max(n for n in range(1, min(c.tp, f.peers) + 1) if f.peers % n == 0)
    return (
        f"tp={c.tp} with overlap of tp in compiled blocks: its ranks read each other's memory, and NVLink joins "
        f"{f.peers} devices; nearest legal: tp={least}"
    )


def _precision(c: ParallelConfig, f: Facts) -> str | None:
    return _precision_obstacle(f.precision)


def _mode(c: ParallelConfig, f: Facts) -> str | None:
    return "mode fused is priced (kernels of Megatron), but not executed" if f.mode is Mode.FUSED else None


def _options(c: ParallelConfig, f: Facts) -> str | None:
    wide = precision_of(f.precision).matmul is None
    asked = {r: getattr(f.options, r.name) for r in choices_of(RunOptions) if not (wide and r.of_narrow)}
    priced = {r: value for r, value in asked.items() if not r.runs(value, f.mode)}
    if not priced:
        return None
    names = ", ".join(f"{r.name}={_text(value)}" for r, value in priced.items())
    nearest = ", ".join(f"{r.name}={_text(r.executed_in(f.mode))}" for r in priced)
    options = f"option {names} is" if len(priced) == 1 else f"options {names} are"
    return f"the {options} priced, but not executed; executed: {nearest}"


def _text(value: object) -> str:
    """Return the value of an option in words."""
    if value is None or isinstance(value, bool):
        return {None: "default", True: "yes", False: "no"}[value]
    return (",".join(sorted(value)) or "none") if isinstance(value, frozenset) else str(value)


def _graphs(c: ParallelConfig, f: Facts) -> str | None:
    graphs = f.mode is Mode.FUSED and f.options.launch in (Launch.GRAPHS, Launch.ROUTER_GRAPHS)
    return OUTSIDE_GRAPHS if graphs and outside_graphs(c.recompute) else None


def _packed(c: ParallelConfig, f: Facts) -> str | None:
    return NOT_EXECUTED if f.model is not None and f.model.packed else None


RULES: tuple[Rule, ...] = (
    Rule(NEEDS_SHARDS, ("zero_stage", "offload", "dp", "cp", "zero_replicas"), _shards),
    Rule("no host link is known", ("recompute", "offload"), _host_link),
    Rule("several stages per rank without a pipeline", ("pp", "virtual_stages", "schedule"), _pipeline),
    Rule("a split backward with ZeRO 3", ("zero_stage", "schedule"), _split_backward),
    Rule(
        "the schedule does not take that many micro-batches",
        ("num_micro_batches", "virtual_stages", "pp", "schedule"),
        _takes,
    ),
    Rule("the schedule is not executed", ("schedule",), _unknown_order, Scope.SEARCHED),
    Rule("recompute names no block", ("recompute",), _recompute_values),
    Rule("recompute per stage is pinned", ("recompute",), _recompute_found, of_pins=True),
    Rule("recompute per stage", ("recompute", "stages", "pp", "virtual_stages"), _recompute_stages),
    Rule("modules are priced with mode fused", ("recompute",), _recompute_mode),
    Rule("no layer has the module", ("recompute",), _recompute_modules),
    Rule("modules are not executed", ("recompute",), _recompute_executed, Scope.EXECUTED),
    Rule("a parameter without dims", ("zero_stage", "dp", "cp"), _dimless, Scope.EXECUTED),
    Rule("parameters of several dtypes", ("zero_stage", "dp", "cp"), _mixed_dtypes, Scope.EXECUTED),
    Rule("compiled blocks", ("recompute",), _compiled, Scope.EXECUTED),
    Rule("compressed gradients of ZeRO", ("zero_stage",), _compressed_shards, of_pins=True),
    Rule("compressed gradients in fp16", (), _compressed_sums, of_pins=True),
    Rule("no such way to compile", (), _compile, of_pins=True),
    Rule("the graph has another dtype than the precision", (), _graph_dtype, of_pins=True),
    Rule("async_tp without inductor on CUDA", (), _async_tp, of_pins=True),
    Rule("pieces of products without NVLink", ("tp",), _pieces, Scope.EXECUTED),
    Rule("the precision is not executed", (), _precision, Scope.EXECUTED),
    Rule("the mode is not executed", (), _mode, Scope.EXECUTED),
    Rule("the options are not executed", (), _options, Scope.EXECUTED),
    Rule(OUTSIDE_GRAPHS, ("recompute",), _graphs, Scope.EXECUTED),
    Rule("weights in 4 bits are not executed", (), _packed, Scope.EXECUTED, priced="weights in 4 bits"),
)
