"""NeMo Automodel: the sections of a recipe's YAML file that a plan decides, and those of recipes before 2026."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.config.context_methods import GATHER, RING
from autoplan.config.parallel import Attention, Launch, Mode
from autoplan.config.precision import GRADIENTS_16
from autoplan.config.recompute import BY_OPERATION, FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.automodel_peft import read_peft, write_peft
from autoplan.exporters.automodel_recompute import (
    keeps_nothing,
    read_layer_checkpoints,
    stated_recompute,
    write_layer_checkpoints,
)
from autoplan.exporters.launching import srun
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    data_parallel,
    derived,
    micro_batches,
    precision_word,
    same,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Yaml
from autoplan.schedules.schedule import SCHEDULES

_D, _P, _B, _S = "distributed.", "distributed.pipeline.", "model.backend.", "step_scheduler."
_FSDP2, _MEGATRON, _DDP = "fsdp2", "megatron_fsdp", "ddp"
_STRATEGIES = {_FSDP2: _FSDP2, **dict.fromkeys((_MEGATRON, "megatron-fsdp", "mfsdp"), _MEGATRON), _DDP: _DDP}

# -- files -------------------------------------------------------------------------------------------------------------

# Sections of recipes before February 2026 (pull request 1225): managers by their class, and two sections beside them
_OLD = {
    "autopipeline.": _P,
    "parallelizer.activation_checkpointing": _D + "activation_checkpointing",
    "parallelizer.reshard_after_forward": _D + "moe.reshard_after_forward",
}
LAST_OLD = "26.01"
_MANAGERS = {"FSDP2Manager": _FSDP2, "MegatronFSDPManager": _MEGATRON, "DDPManager": _DDP}
_EXCHANGES = {True: "deepep", False: "torch"}  # enable_deepep, which dispatcher replaced


@dataclass(frozen=True)
class AutomodelYaml(Yaml):
    """YAML, read with the names since February 2026."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path."""
        out: dict[str, Any] = {}
        for path, value in super().read(text, where).items():
            old = next((each for each in _OLD if path.startswith(each)), None)
            out[path if old is None else path.replace(old, _OLD[old], 1)] = value
        manager = str(out.get(_D + "_target_", "")).rpartition(".")[2]
        if manager in _MANAGERS:
            out.setdefault(_D + "strategy", _MANAGERS[manager])
        if out.get(_B + "enable_deepep") in _EXCHANGES and _B + "dispatcher" not in out:
            out[_B + "dispatcher"] = _EXCHANGES[out[_B + "enable_deepep"]]
        return out


# -- degrees, ZeRO -----------------------------------------------------------------------------------------------------


def _plain_replicas(setup: Setup) -> bool:
    """Return True for a setup that DistributedDataParallel runs."""
    c = setup.config
    return (c.zero_stage == 0 or c.num_shards == 1) and c.dp > 1 and c.tp * c.pp * c.cp * c.ep == 1


def _write_zero(setup: Setup) -> Values:
    """Write the strategy. Not resharding after the forward is ZeRO 1, with gradients sent at once ZeRO 2.

    Gradients that are sent late leave ZeRO 3 with whole ones until the last micro-batch.
    """
    c = setup.config
    if _plain_replicas(setup):
        return {_D + "strategy": _DDP, _D + "dp_size": c.dp}
    out: dict[str, Any] = {_D + "strategy": _FSDP2, _D + "dp_size": c.dp}
    out |= {_D + "dp_replicate_size": c.zero_replicas} if c.zero_replicas > 1 else {}
    if c.zero_stage:
        late = c.zero_stage == 1 or (c.zero_stage == 3 and setup.options.reduce_once)
        out |= {_D + "reshard_after_forward": c.zero_stage == 3, _D + "defer_fsdp_grad_sync": late}
    return out


def _strategy(document: Document) -> str:
    return str(document.word(_D + "strategy", _STRATEGIES, _FSDP2))


def _reshards(document: Document, found: Values) -> bool:
    """Return True if fully_shard frees gathered parameters after the forward of a layer."""
    said = document.get(_D + "reshard_after_forward")
    of_experts = document.get(_D + "moe.reshard_after_forward")
    if said is not None:
        return bool(said)
    return bool(of_experts) if found["ep"] > 1 else found["pp"] == 1


def _read_zero(document: Document, found: Values) -> Values:
    strategy = _strategy(document)
    dp = document.get(_D + "dp_size")
    sized = {"dp": document.count(_D + "dp_size")} if isinstance(dp, int) and dp > 0 else data_parallel(document, found)
    if strategy == _DDP:
        return {**sized, "zero_stage": 0, "zero_replicas": 1}
    if strategy == _MEGATRON:
        return {**sized, "zero_stage": document.count(_D + "zero_dp_strategy", 3, (0,)), "zero_replicas": 1}
    replicas = document.count(_D + "dp_replicate_size")
    reshards, late = _reshards(document, found), document.get(_D + "defer_fsdp_grad_sync") is not False
    stage = 3 if reshards else 1 if late else 2
    one = sized.get("dp", 0) * found["cp"] == 1
    kept = late and stage == 3
    return {**sized, "zero_stage": 0 if one else stage, "zero_replicas": 1 if one else replicas, "reduce_once": kept}


def _world(document: Document, found: Values) -> str | None:
    used, devices = 1, document.task.num_devices
    for name in ("dp", "tp", "pp", "cp"):
        used *= found.get(name, 1)
    if not devices or used == devices:
        return None
    return f"pp_size x dp_size x cp_size x tp_size = {used}, but there are {devices} devices; nearest: dp_size: null"


def _replicas(document: Document, found: Values) -> str | None:
    copies, dp = document.count(_D + "dp_replicate_size"), found.get("dp", 0)
    if copies == 1 or not dp:
        return None
    if _strategy(document) != _FSDP2:
        return f"dp_replicate_size={copies} needs strategy: fsdp2; nearest: dp_replicate_size=1"
    if copies < dp and dp % copies == 0:
        return None
    near = max(n for n in range(1, dp) if dp % n == 0 and (n < copies or n == 1)) if dp > 1 else 1
    return f"dp_replicate_size={copies} must divide dp_size={dp} and be below it; nearest: {near}"


# Degrees that a strategy has no mesh for (distributed/mesh_utils.py)
_LACKS = {_MEGATRON: ("pp", "ep"), _DDP: ("tp", "pp", "cp", "ep"), _FSDP2: ()}


def _lacks(document: Document, found: Values) -> str | None:
    strategy = _strategy(document)
    above = [name for name in _LACKS[strategy] if found.get(name, 1) > 1]
    if not above:
        return None
    said = ", ".join(f"{name}_size={found[name]}" for name in above)
    return f"strategy: {strategy} has no {said}; nearest: strategy: fsdp2"


# Fields of FSDP2Config, MegatronFSDPConfig and DDPConfig (distributed/config.py); any other one is refused
_SIZES = (
    *("strategy", "tp_size", "pp_size", "cp_size", "ep_size", "dp_size", "dp_replicate_size", "pipeline", "moe"),
    *("activation_checkpointing", "_target_", "_recursive_", "_convert_"),
)
_OF_STRATEGY = {
    _FSDP2: (
        *("sequence_parallel", "tp_plan", "patch_is_packed_sequence", "mp_policy", "offload_policy", "autocast_dtype"),
        *("activation_checkpointing_scope", "defer_fsdp_grad_sync", "reshard_after_forward", "enable_compile"),
        *("enable_async_tensor_parallel", "enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth"),
        *("fsdp2_forward_prefetch_depth", "multimodal"),
    ),
    _MEGATRON: (
        *("megatron_fsdp_unit_modules", "zero_dp_strategy", "init_fsdp_with_meta_device", "grad_reduce_in_fp32"),
        *("preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"),
        *("report_nan_in_param_grad", "average_in_collective", "disable_bucketing", "calculate_per_token_loss"),
        *("keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer"),
    ),
    _DDP: (
        *("activation_checkpointing_scope", "broadcast_buffers", "find_unused_parameters", "static_graph"),
        *("bucket_cap_mb", "gradient_as_bucket_view", "autocast_dtype"),
    ),
}


def _fields(document: Document, found: Values) -> str | None:
    if document.has(_D + "_target_"):
        return None  # of an old recipe, whose managers had other fields
    strategy = _strategy(document)
    names = {path.removeprefix(_D).partition(".")[0] for path in document.values if path.startswith(_D)}
    every = {name for fields in _OF_STRATEGY.values() for name in fields}
    other = sorted(name for name in names & every if name not in _OF_STRATEGY[strategy])
    if not other:
        return None
    owner = next(name for name, fields in _OF_STRATEGY.items() if other[0] in fields)
    return f"strategy: {strategy} has no {', '.join(other)}; nearest: leave out {other[0]}, or strategy: {owner}"


# -- pipelines ---------------------------------------------------------------------------------------------------------

# Words of torch's get_schedule_class. One stage per rank of the interleaved zero-bubble schedule is ZB-H1. DualPipeV is
# not among them: stages are placed in a V for ZBVZeroBubble alone (pipelining/functional.py, split_model_into_stages).
_SCHEDULES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved1f1b",
    "ZB-H1": "interleavedzerobubble",
    "InterleavedZeroBubble": "interleavedzerobubble",
    "ZBV": "zbvzerobubble",
}
_BY_WORD = {word: name for name, word in _SCHEDULES.items()}


def _split(layers: int, chunks: int) -> tuple[int, ...]:
    """Return the layers per stage that Automodel chooses: equal, the first stages get what remains.

    Raises: PinError if there are more stages than layers.
    """
    if chunks > layers:
        raise PinError(f"{layers} layers do not fill {chunks} stages; nearest: {layers}", ("pp", "virtual_stages"))
    each, more = divmod(layers, chunks)
    return tuple(each + (k < more) for k in range(chunks))


def _parts(stages: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of every stage by their names in Hugging Face's models; rotary embeddings are everywhere."""
    out, at = [], 0
    for size in stages:
        out.append([*(f"model.layers.{k}" for k in range(at, at + size)), "model.rotary_emb"])
        at += size
    out[0].insert(0, "model.embed_tokens")
    out[-1] += ["model.norm", "lm_head"]
    return out


def _write_stages(setup: Setup) -> Values:
    c, layers = setup.config, len(setup.task.layers)
    if c.pp == 1 or c.schedule not in _SCHEDULES:
        return {}
    out: dict[str, Any] = {_P + "pp_schedule": _SCHEDULES[c.schedule], _P + "pp_microbatch_size": c.micro_batch_size}
    chunks = setup.num_chunks
    each = -(-layers // chunks)
    usual = layers >= chunks and -(-layers // each) == chunks and c.schedule != "ZB-H1"
    if setup.stages is not None and not (usual and setup.stages == _split(layers, chunks)):
        return out | {_P + "module_fqns_per_model_part": _parts(setup.stages)}
    return out | ({_P + "layers_per_stage": each} if usual else {})


def _read_stages(document: Document, found: Values) -> Values:
    pp, layers = found["pp"], len(document.task.layers)
    if pp == 1:  # Automodel ignores the section
        document.seen.add(_D + "pipeline")
        return {"schedule": "1F1B", "virtual_stages": 1, "stages": None}
    schedule = str(document.word(_P + "pp_schedule", _BY_WORD, "1F1B"))
    parts = document.get(_P + "module_fqns_per_model_part")
    if parts:
        if len(parts) % pp:
            raise PinError(f"module_fqns_per_model_part has {len(parts)} parts, no multiple of pp_size={pp}", ("pp",))
        stages = tuple(sum(re.search(r"(^|\.)layers\.\d+$", str(module)) is not None for module in p) for p in parts)
        virtual = len(parts) // pp
        single = schedule == "InterleavedZeroBubble" and virtual == 1
        return {"schedule": "ZB-H1" if single else schedule, "virtual_stages": virtual, "stages": stages}
    virtual = _virtual(document, schedule, pp, layers)
    return {"schedule": schedule, "virtual_stages": virtual, "stages": _split(layers, pp * virtual) if layers else None}


def _virtual(document: Document, schedule: str, pp: int, layers: int) -> int:
    """Return the stages per rank (pipelining/functional.py, calculate_virtual_stages)."""
    several = SCHEDULES[schedule].virtual_stages[0] > 1
    per_stage, way = document.get(_P + "layers_per_stage"), document.get(_P + "round_virtual_stages_to_pp_multiple")
    if not per_stage or not layers:
        return 2 if several else 1
    chunks = -(-layers // document.count(_P + "layers_per_stage"))
    rest = chunks % pp
    if rest and way not in ("up", "down"):
        near = f"round_virtual_stages_to_pp_multiple: up, or layers_per_stage={-(-layers // (chunks - rest + pp))}"
        raise PinError(
            f"layers_per_stage={per_stage} gives {chunks} stages, no multiple of pp_size={pp}; nearest: {near}", ("pp",)
        )
    chunks += (pp - rest if way == "up" else -rest) if rest else 0
    virtual = chunks // pp
    if virtual < 2 if several else virtual != 1:
        least = -(-layers // (pp * (2 if several else 1)))
        raise PinError(
            f"layers_per_stage={per_stage} gives {virtual} stages per rank, which schedule {schedule} does not take; "
            f"nearest: layers_per_stage={least}",
            ("virtual_stages",),
        )
    return virtual


def _write_batch(setup: Setup) -> Values:
    """All micro-batches of a pipeline run at once."""
    c = setup.config
    local = c.micro_batch_size * (c.num_micro_batches if c.pp > 1 else 1)
    return {_S + "global_batch_size": setup.global_batch_size, _S + "local_batch_size": local}


def _read_batch(document: Document, found: Values) -> Values:
    local, batch = document.count(_S + "local_batch_size"), document.count(_S + "global_batch_size", 32)
    size = document.count(_P + "pp_microbatch_size") if found["pp"] > 1 else local
    if local % size:
        raise PinError(f"local_batch_size={local} is not a multiple of pp_microbatch_size={size}; nearest: {size}")
    return {"micro_batch_size": size, "global_batch_size": batch}


def _at_once(document: Document, found: Values) -> int:
    return document.count(_S + "local_batch_size") // document.count(_P + "pp_microbatch_size")


def _fills(document: Document, found: Values) -> str | None:
    if found["pp"] == 1:
        return None
    at_once, total, size = _at_once(document, found), found.get("num_micro_batches", 0), found["micro_batch_size"]
    if at_once < found["pp"]:
        return f"local_batch_size is {at_once} micro-batches, fewer than pp_size={found['pp']}; nearest: " + (
            f"local_batch_size={found['pp'] * size}"
        )
    if not total or total % at_once == 0:
        return None
    return f"local_batch_size of {at_once} micro-batches does not divide the {total} of a rank; nearest: {total * size}"


def _drains(document: Document, found: Values) -> str | None:
    total = found.get("num_micro_batches", 0)
    if found["pp"] == 1 or not total or total % _at_once(document, found) or total == _at_once(document, found):
        return None
    return f"the pipeline fills and drains {total // _at_once(document, found)} times a step, which the price lacks"


# -- experts, recompute, kernels, precision ----------------------------------------------------------------------------


def _by_experts(value: Callable[[Setup], Values]) -> Callable[[Setup], Values]:
    return lambda setup: value(setup) if setup.config.ep > 1 else {}


_EXCHANGE = {"alltoall": "torch", "flex": "deepep"}
# HybridEP and UCCL-EP send a row once to each node, as DeepEP; Mixture-of-Kittens fuses that with the products
_BY_EXCHANGE = {"torch": "alltoall", **dict.fromkeys(("deepep", "hybridep", "uccl_ep", "mok"), "flex")}


def _read_recompute(document: Document, found: Values) -> Values:
    return {"recompute": NONE} if _strategy(document) == _MEGATRON else read_layer_checkpoints(document, found)


def _selective(document: Document, found: Values) -> str | None:
    if stated_recompute(document) != BY_OPERATION or _strategy(document) != _MEGATRON:
        return None
    return "activation_checkpointing: selective needs strategy: fsdp2 or ddp; nearest: activation_checkpointing: true"


def _skipped(document: Document, found: Values) -> str | None:
    if stated_recompute(document) != FULL or _strategy(document) != _MEGATRON:
        return None
    return "strategy: megatron_fsdp skips activation_checkpointing; nearest: strategy: fsdp2"


_ATTENTION = {Attention.FUSED: "te", Attention.FLASH2: "sdpa", Attention.UNFUSED: "eager"}
_BY_ATTENTION = {
    **{word: str(name) for name, word in _ATTENTION.items()},
    **dict.fromkeys(("torch", "flex", "flash_attention_2", "kernels-community/flash-attn2"), str(Attention.FLASH2)),
    **dict.fromkeys(("cudnn", "tilelang", "flash_attention_3", "magi"), str(Attention.FUSED)),
}


def _write_kernels(setup: Setup) -> Values:
    """Write the kernels of Automodel's own models: Transformer Engine's modules, or those of PyTorch."""
    fused = setup.mode is Mode.FUSED
    out: dict[str, Any] = {_B + "_target_": "nemo_automodel.components.models.common.BackendConfig"}
    attention = _ATTENTION.get(setup.options.attention_in(setup.mode))
    out |= {_B + "attn": attention} if attention else {}
    out |= {_B + "linear": "te" if fused else "torch", _B + "rms_norm": "te" if fused else "torch_fp32"}
    if setup.mode is Mode.COMPILED:
        out |= {"compile.enabled": True} if _plain_replicas(setup) else {_D + "enable_compile": True}
    return out


def _read_mode(document: Document, found: Values) -> Values:
    switches = (_D + "enable_compile", "compile.enabled", _B + "compile_attn")
    if any([document.get(path) for path in switches]):
        return {"mode": "compiled"}
    linear = document.get(_B + "linear")
    return {} if linear is None else {"mode": "fused" if linear == "te" else "eager"}


def _attention(document: Document) -> str | None:
    for path in (_B + "attn", "model.attn_implementation"):
        if document.get(path) is not None:
            return str(document.word(path, _BY_ATTENTION))
    return None


def _read_attention(document: Document, found: Values) -> Values:
    """Transformer Engine sends keys around (p2p), PyTorch's context parallelism gathers them."""
    kind = _attention(document)
    method = None if found["cp"] == 1 or kind is None else RING if kind == Attention.FUSED else GATHER
    return {**({} if kind is None else {"attention": kind}), "context_method": method}


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_BY_DTYPE = {
    **{form: name for name, word in _DTYPES.items() for form in (word, f"torch.{word}")},
    **{name: name for name in _DTYPES},
}
_FP8 = {"fp8": "current", "mxfp8": "mxfp8"}


def _write_precision(setup: Setup) -> Values:
    """Write the dtypes: parameters are kept in float32, which FSDP casts for products, or all states in bfloat16."""
    base = base_of(setup.precision)
    native = base == "native"
    out, word = {"model.torch_dtype": "bfloat16" if native else "float32"}, _DTYPES.get(base, "bfloat16")
    if _plain_replicas(setup):
        return {**out, **({_D + "autocast_dtype": word} if base != "fp32" and not native else {})}
    narrow = not setup.options.wide_sums if native else _narrow(setup)
    dtypes: dict[str, Any] = {"param_dtype": word, "reduce_dtype": word if narrow else "float32"}
    out |= {f"{_D}mp_policy.{name}": value for name, value in {**dtypes, "output_dtype": word}.items()}
    if base in _FP8 and setup.mode is Mode.FUSED:
        return {**out, _B + "te_fp8.recipe": _FP8[base]}
    if base == "fp8":
        return {**out, "fp8.enabled": True, "fp8.enable_fsdp_float8_all_gather": setup.options.narrow_gather}
    return out


def _narrow(setup: Setup) -> bool:
    return GRADIENTS_16 in setup.precision


def _read_precision(document: Document, found: Values) -> Values:
    strategy, base, narrow = _strategy(document), "bf16", False
    stored, plain = str(document.word("model.torch_dtype", {**_BY_DTYPE, "auto": "bf16"}, "bf16")), True
    if strategy == _DDP:
        plain = document.get(_D + "autocast_dtype") is None
        base = stored if plain else str(document.word(_D + "autocast_dtype", _BY_DTYPE))
    elif strategy == _MEGATRON:
        narrow = not document.get(_D + "grad_reduce_in_fp32")
    else:
        base = document.word(_D + "mp_policy.param_dtype", _BY_DTYPE, "bf16")
        narrow = document.word(_D + "mp_policy.reduce_dtype", _BY_DTYPE, "fp32") != "fp32" and base != "fp32"
    recipe = document.get(_B + "te_fp8.recipe")
    if recipe is not None:
        base = "mxfp8" if recipe == "mxfp8" else "fp8"
    elif document.get("fp8.enabled"):
        return {"precision": precision_word("fp8", narrow), **_gather(document)}
    elif base == stored == "bf16" and plain and strategy != _MEGATRON:  # nothing is kept in 32 bits
        return {"precision": "native"}
    return {"precision": precision_word(base, narrow)}


def _gather(document: Document) -> Values:
    return {"narrow_gather": bool(document.get("fp8.enable_fsdp_float8_all_gather"))}


def _read_sequence_parallel(document: Document, found: Values) -> Values:
    used = _strategy(document) == _FSDP2 and bool(document.get(_D + "sequence_parallel"))
    return {"sequence_parallel": used or found["tp"] == 1}


def _write_overlap(setup: Setup) -> Values:
    c, o = setup.config, setup.options
    used = c.tp > 1 and c.ep == 1 and "tp" in o.overlap and o.sequence_parallel
    return {_D + "enable_async_tensor_parallel": True} if used else {}


def _async(document: Document, found: Values) -> str | None:
    if not document.get(_D + "enable_async_tensor_parallel") or found["tp"] == 1:
        return None
    if found["ep"] > 1:
        return "enable_async_tensor_parallel is not for experts (ep_size > 1); nearest: false"
    if document.get(_D + "sequence_parallel"):
        return None
    return "enable_async_tensor_parallel needs sequence_parallel: true; nearest: sequence_parallel: true"


_POLICY = _D + "offload_policy"


def _read_offload(document: Document, found: Values) -> Values:
    used = document.has(_POLICY) and document.values.get(_POLICY, True) is not None
    return {"offload": ("parameters",) if used else ()}


def _read_graphs(document: Document, found: Values) -> Values:
    """Captured modules: attention and the router, the router alone, or nothing."""
    modules = document.get(_B + "cuda_graph.modules") or []
    router = "moe_router" in modules
    whole = "attn" in modules and (router or not document.task.num_experts)
    return {"launch": str(Launch.GRAPHS if whole else Launch.ROUTER_GRAPHS if router else Launch.ASYNC)}


def _write_length(setup: Setup) -> Values:
    return {"dataset.seq_len": setup.seq_len}


def _read_length(document: Document, found: Values) -> Values:
    packed = document.get("packed_sequence.packed_sequence_size")
    if isinstance(packed, int) and packed > 0:
        return {"seq_len": document.count("packed_sequence.packed_sequence_size")}
    for path in ("dataset.seq_len", "dataset.seq_length", _P + "pp_seq_len"):
        if document.get(path) is not None:
            return {"seq_len": document.count(path)}
    return {}


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    return srun(setup, ["-m", "nemo_automodel.cli.app", file])


_CANNOT: Mapping[str, str] = {
    "schedule": "schedules of torch.distributed.pipelining but DualPipeV, whose stages it would place in a loop",
    "reduce_once": "defer_fsdp_grad_sync without resharding is ZeRO 1, whose gradients are whole, too",
    "virtual_stages": "stages follow from the layers of each, which must divide the model's",
    "zero_stage": "fully_shard reshards (3), or not with gradients sent once (1) or at once (2); DDP (0) has only dp",
    "zero_replicas": "dp_replicate_size is below dp_size, of fully_shard",
    "etp": "experts are not split: ep_size spreads them over dp, cp and tp",
    "recompute": "one kind for all layers: none, products (activation_checkpointing: selective) or full",
    "offload": "fully_shard offloads parameters, gradients and optimizer together",
    "context_method": "follows from attention: Transformer Engine's is a ring, PyTorch's gathers",
    "attention": "model.backend.attn is te, sdpa or eager",
    "launch": "CUDA graphs are of single modules, with kernels of their own (model.backend.cuda_graph)",
    "precision": "fully_shard has param_dtype and reduce_dtype; FP8 is te_fp8, or torchao's",
    "overlap": "enable_async_tensor_parallel, which needs sequence_parallel and has no experts",
    "sequence_parallel": "strategy fsdp2 alone has it",
}

AUTOMODEL = Target(
    name="automodel",
    about="the sections distributed, step_scheduler and dataset of a recipe's YAML file, and kernels of its model",
    stack="automodel",
    files=((0.0, AutomodelYaml()),),
    fields=(
        same(_D + "tp_size", "tp", always=True),
        same(_D + "pp_size", "pp", always=True),
        same(_D + "cp_size", "cp", always=True),
        same(_D + "ep_size", "ep", always=True),
        Field(("dp", "zero_stage", "zero_replicas", "reduce_once"), _write_zero, _read_zero),
        derived(lambda d, found: {"etp": 1 if d.task.num_experts or found["ep"] > 1 else found["tp"]}, "etp"),
        Field(("micro_batch_size", "global_batch_size"), _write_batch, _read_batch),
        derived(micro_batches, "num_micro_batches"),
        Field(("schedule", "virtual_stages", "stages"), _write_stages, _read_stages),
        Field(("seq_len",), _write_length, _read_length),
        Field(("adapters",), write_peft, read_peft),
        Field(
            ("offload",),
            lambda s: (
                {_POLICY + "._target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
                if s.config.offload == ("parameters",)
                else {}
            ),
            _read_offload,
        ),
        Field(
            ("sequence_parallel",),
            lambda s: {_D + "sequence_parallel": s.options.sequence_parallel} if s.config.tp > 1 else {},
            _read_sequence_parallel,
        ),
        Field(
            ("overlap",),
            _write_overlap,
            lambda d, found: {"overlap": ["tp"] if d.get(_D + "enable_async_tensor_parallel") else []},
        ),
        Field(("mode",), _write_kernels, _read_mode),
        Field(
            ("recompute",),
            write_layer_checkpoints,
            _read_recompute,
        ),
        Field(("attention", "context_method"), lambda s: {}, _read_attention),
        Field(("precision", "narrow_gather"), _write_precision, _read_precision),
        Field(
            ("dispatcher",),
            _by_experts(lambda s: {_B + "dispatcher": _EXCHANGE.get(str(s.options.dispatcher), "deepep")}),
            lambda d, found: {"dispatcher": d.word(_B + "dispatcher", _BY_EXCHANGE)} if found["ep"] > 1 else {},
        ),
        derived(_read_graphs, "launch"),
    ),
    version_in=lambda values: LAST_OLD if _D + "_target_" in values else None,
    marks=(_D + "strategy", _D + "tp_size", _D + "dp_size", _D + "ep_size", _S + "local_batch_size"),
    launch=_launch,
    elsewhere={},
    cannot=_CANNOT,
    rules=(
        *(TargetRule(rule) for rule in (_world, _replicas, _lacks, _fields, _selective, _async, _fills)),
        *(TargetRule(rule, warns=True) for rule in (_skipped, _drains, keeps_nothing)),
    ),
)
