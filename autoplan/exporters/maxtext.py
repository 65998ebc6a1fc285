"""MaxText: values over its base.yml. Every degree is the product of one inside a node (ici) and one between (dcn)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoplan.config.context_methods import GATHER, RING, ULYSSES, read_method
from autoplan.config.parallel import Attention
from autoplan.config.recompute import FULL, NONE, OFFLOAD, SELECTIVE
from autoplan.errors import PinError
from autoplan.exporters.arguments import NamedValues
from autoplan.exporters.launching import per_node
from autoplan.exporters.predicting import MTP_RULE, mtp_field
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    constant,
    derived,
    micro_batches,
    near_multiples,
    near_parts,
    of_model,
)
from autoplan.exporters.setup import Setup, Task
from autoplan.exporters.syntax import Yaml
from autoplan.stacks.records import year_of

_GOOGLE = "Google"  # the vendor of TPUs

# From the innermost axis out: what talks most stays inside a node.
AXES = ("tensor", "context", "context_usp_ulysses", "expert", "fsdp", "data", "pipeline")


def sizes_of(setup: Setup) -> dict[str, int]:
    """Return the size of every axis of MaxText's mesh.

    The expert axis is data parallelism to all other layers, and shards their parameters as fsdp does.
    """
    c = setup.config
    ulysses = 1
    if setup.context_method is not None:
        method = read_method(setup.context_method, c.cp)
        ulysses = method.ulysses if method.is_product and _on_tpu(setup) else 1
    replicas = c.dp if c.zero_stage < 2 else c.zero_replicas
    rest = max(1, c.dp // (replicas * c.ep)) if c.zero_stage >= 2 else 1
    replicas = replicas if c.zero_stage >= 2 else max(1, c.dp // c.ep)
    sizes = {"tensor": c.tp, "context": c.cp // ulysses, "context_usp_ulysses": ulysses, "expert": c.ep}
    return {**sizes, "fsdp": rest, "data": replicas, "pipeline": c.pp}


def tiers(sizes: Mapping[str, int], devices_per_node: int) -> dict[str, tuple[int, int]]:
    """Return the size of every axis inside a node and between nodes, inner axes first."""
    left, out = devices_per_node, {}
    for axis in AXES:
        inside = math.gcd(sizes[axis], left)
        out[axis] = (inside, sizes[axis] // inside)
        left //= inside
    return out


def _inside_and_between(task: Task, slices: int = -1) -> tuple[int, int]:
    """Return how many devices ici axes join, and how many such groups dcn axes: nodes of GPUs, slices of TPUs.

    Args:
        slices: their number; -1: as few as possible.
    """
    hardware, devices = task.hardware, task.num_devices
    if hardware is None or hardware.vendor != _GOOGLE or not devices:
        return task.devices_per_node, task.num_nodes
    number = slices if slices > 0 else -(-devices // hardware.scaleup.size)
    return (devices // number, number) if devices % number == 0 else (task.devices_per_node, task.num_nodes)


def _write_axes(setup: Setup) -> Values:
    out: dict[str, Any] = {}
    for axis, (inside, between) in tiers(sizes_of(setup), max(1, _inside_and_between(setup.task)[0])).items():
        out |= {f"ici_{axis}_parallelism": inside, f"dcn_{axis}_parallelism": between}
    if setup.config.zero_stage == 1:
        out["shard_optimizer_over_data"] = True
    return out


def _read_axes(document: Document, found: Values) -> Values:
    names = (*AXES, "tensor_sequence", "fsdp_transpose")
    ends = {axis: [document.count(f"{tier}_{axis}_parallelism", 1, (-1,)) for tier in ("ici", "dcn")] for axis in names}
    for tier, total in enumerate(_inside_and_between(document.task, document.count("num_slices", -1))):
        _fill(ends, tier, total)
    if any(-1 in pair for pair in ends.values()):
        return {axis: math.prod(ends[name]) for axis, name in (("tp", "tensor"), ("pp", "pipeline"))}
    size = {axis: math.prod(pair) for axis, pair in ends.items()}
    fsdp, data, ep = size["fsdp"] * size["fsdp_transpose"], size["data"], size["expert"]
    cp = size["context"] * size["context_usp_ulysses"]
    tp = size["tensor"] * size["tensor_sequence"]
    # base.yml's logical_axis_rules shard parameters over fsdp, context and expert
    stage = 3 if fsdp * ep * cp > 1 else int(bool(document.get("shard_optimizer_over_data")))
    return {
        **{"tp": tp, "pp": size["pipeline"], "cp": cp, "ep": ep, "etp": tp},
        **{"dp": data * fsdp * ep, "zero_stage": stage, "zero_replicas": data if stage == 3 else 1},
    }


def _fill(ends: dict[str, list[int]], tier: int, total: int) -> None:
    """Put what is left of a tier's devices in place of -1. PinError if it does not divide."""
    left = [pair for pair in ends.values() if pair[tier] == -1]
    used = math.prod(pair[tier] for pair in ends.values() if pair[tier] != -1)
    if not left or not total:
        return
    if len(left) > 1 or total % used:
        where = ("ici", "dcn")[tier]
        raise PinError(f"{where} axes of {used} do not divide {total}, or several are -1; nearest: one -1 and {total}")
    left[0][tier] = total // used


def _write_batch(setup: Setup) -> Values:
    """Batches per device: a pipeline takes all micro-batches of a step at once, else they are accumulated."""
    c = setup.config
    at_once = c.micro_batch_size * c.dp * (c.num_micro_batches if c.pp > 1 else 1)
    share = at_once / c.num_devices
    out: dict[str, Any] = {"per_device_batch_size": int(share) if share == int(share) else share}
    if c.pp == 1:
        return {**out, "gradient_accumulation_steps": c.num_micro_batches}
    out |= {"gradient_accumulation_steps": 1, "num_pipeline_microbatches": c.num_micro_batches}
    layers, v = setup.task.decoder_layers, c.virtual_stages
    out["num_pipeline_repeats"] = v
    return out | (
        {"num_layers_per_pipeline_stage": layers // (c.pp * v)} if layers and layers % (c.pp * v) == 0 else {}
    )


def _read_batch(document: Document, found: Values) -> Values:
    pp = found["pp"]
    out: dict[str, Any] = {"schedule": "1F1B", "virtual_stages": 1}
    if pp > 1:
        repeats, per_stage = document.count("num_pipeline_repeats", -1), document.count("num_layers_per_pipeline_stage")
        layers = document.task.decoder_layers
        if repeats == -1:
            repeats = max(1, layers // (pp * per_stage)) if layers else 1
        out = {"schedule": "GPipe" if repeats == 1 else "Interleaved1F1B", "virtual_stages": repeats}
    if "dp" not in found:
        return out
    steps = document.count("gradient_accumulation_steps")
    devices = found["dp"] * found["tp"] * pp * found["cp"]
    share = document.get("per_device_batch_size")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
        raise PinError(f"per_device_batch_size={share!r} must be a number above 0, for example per_device_batch_size=1")
    batch = float(share) * devices * steps
    number = document.count("num_pipeline_microbatches", -1) if pp > 1 else steps
    number = pp if number == -1 else number
    if batch % (number * found["dp"]):
        raise PinError(
            f"per_device_batch_size={document.get('per_device_batch_size')} makes a batch of {batch:g}, which {number} "
            f"micro-batches of {found['dp']} ranks do not divide",
            ("global_batch_size", "micro_batch_size", "dp"),
        )
    micro = int(batch) // (number * found["dp"])
    return {**out, "global_batch_size": int(batch), "micro_batch_size": micro, "num_micro_batches": number}


_POLICIES = {NONE: "minimal", SELECTIVE: "save_dot_except_mlpwi", FULL: "full", OFFLOAD: "minimal_offloaded"}
_KNOWN_POLICIES = {
    **{word: kind for kind, word in _POLICIES.items()},
    "save_dot_with_context_except_mlp": SELECTIVE,
    "save_dot_except_mlp": SELECTIVE,
    "save_qkv_proj": FULL,
    "qkv_proj_offloaded": FULL,
    "save_out_proj": FULL,
}
# Words of MaxText before configs/types.py (RematPolicy): minimal, and the context of attention is kept
_FORMER_POLICIES = ("minimal_flash", "minimal_with_context")


def _write_recompute(setup: Setup) -> Values:
    kind = setup.any_recompute
    return {"remat_policy": _POLICIES.get(kind, "full")}


def _read_recompute(document: Document, found: Values) -> Values:
    if document.get("remat_policy") == "custom":
        raise PinError(f"remat_policy='custom' has no price; known: {', '.join(_KNOWN_POLICIES)}", ("recompute",))
    return {"recompute": document.word("remat_policy", {**_KNOWN_POLICIES, **dict.fromkeys(_FORMER_POLICIES, NONE)})}


def _former_policy(document: Document, found: Values) -> str | None:
    policy = document.get("remat_policy")
    if policy not in _FORMER_POLICIES:
        return None
    return f"remat_policy={policy} is of MaxText before its RematPolicy (configs/types.py); nearest since: minimal"


def _write_offload(setup: Setup) -> Values:
    held = setup.config.offload
    out = {"optimizer_memory_host_offload": True} if held else {}
    return out | ({"parameter_memory_host_offload": True} if "parameters" in held else {})


def _read_offload(document: Document, found: Values) -> Values:
    if document.get("parameter_memory_host_offload"):
        return {"offload": ("parameters",)}
    return {"offload": ("optimizer",) if document.get("optimizer_memory_host_offload") else ()}


_QUANTIZATION = {"fp8": "te_fp8_currentscaling", "mxfp8": "te_mxfp8", "fp4": "te_nvfp4"}


def _write_precision(setup: Setup) -> Values:
    base = base_of(setup.precision)
    out = {"dtype": {"fp32": "float32", "fp16": "float16"}.get(base, "bfloat16"), "weight_dtype": "float32"}
    return out | ({"quantization": _QUANTIZATION[base]} if base in _QUANTIZATION else {})


def _read_precision(document: Document, found: Values) -> Values:
    given = str(document.get("quantization") or "")
    if not given:
        known = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
        return {"precision": document.word("dtype", known)}
    exact = {word: name for name, word in _QUANTIZATION.items()} | {"fp4": "fp4", "te_nvfp4_no_rht": "fp4"}
    if given in exact:
        return {"precision": exact[given]}
    if "fp8" not in given:
        raise PinError(f"quantization={given!r} has no price; known: {', '.join(exact)}, fp8", ("precision",))
    return {"precision": "fp8"}


_KERNELS = {Attention.UNFUSED: "dot_product", Attention.FUSED: "cudnn_flash_te"}


def _write_attention(setup: Setup) -> Values:
    kernel = setup.options.attention_in(setup.mode)
    return {"attention": _KERNELS[kernel]} if kernel in _KERNELS else {}


def _read_attention(document: Document, found: Values) -> Values:
    known = {word: str(kernel) for kernel, word in _KERNELS.items()} | {"flash": "fused", "cudnn_flash_jax": "fused"}
    value = document.get("attention")
    return {"attention": known[value]} if value in known else {}


_STRATEGIES = {GATHER: "all_gather", RING: "ring", ULYSSES: "ulysses"}


def _write_context(setup: Setup) -> Values:
    """Write the strategy; those that exchange heads are of TPUs alone."""
    if setup.context_method is None:
        return {}
    method = read_method(setup.context_method, setup.config.cp)
    if method.is_product:
        return {"context_parallel_strategy": "usp"} if method.is_ring and _on_tpu(setup) else {}
    return {"context_parallel_strategy": _STRATEGIES[method.name]} if method.name != ULYSSES or _on_tpu(setup) else {}


_CHECKED = year_of("26.08")  # configs/types.py at e591f30 of 2026-08-22


def _of_tpus(document: Document, found: Values) -> str | None:
    name = str(document.get("context_parallel_strategy"))
    if name not in ("ulysses", "usp") or document.get("hardware") == "tpu":
        return None
    return f"context_parallel_strategy={name} needs hardware=tpu; nearest: context_parallel_strategy=all_gather"


def _packed(document: Document, found: Values) -> str | None:
    """Return what Transformer Engine needs of packed sequences, which are the default (configs/types.py)."""
    packs = document.get("packing") and document.count("max_segments_per_seq", -1) <= 0
    of_gpus = document.get("hardware") == "gpu" and document.get("attention") == "cudnn_flash_te"
    if not of_gpus or not packs or document.year < _CHECKED:
        return None
    return "cudnn_flash_te with packing needs max_segments_per_seq; nearest: packing=false"


def _read_context(document: Document, found: Values) -> Values:
    if found["cp"] == 1:
        return {"context_method": None}
    name = document.get("context_parallel_strategy")
    if name == "usp":
        u = math.prod(document.count(f"{tier}_context_usp_ulysses_parallelism") for tier in ("ici", "dcn"))
        return {"context_method": f"ulysses{u}xring{found['cp'] // u}"}
    known = {word: ours for ours, word in _STRATEGIES.items()}
    return {"context_method": document.word("context_parallel_strategy", known)}


def _world(document: Document, found: Values) -> str | None:
    devices, used = document.task.num_devices, 1
    for name in ("dp", "tp", "pp", "cp"):
        used *= found.get(name, 1)
    if not devices or "dp" not in found or used == devices:
        return None
    return f"all axes make {used} devices, but there are {devices}; nearest: ici_fsdp_parallelism=-1"


def _layers(document: Document, found: Values) -> str | None:
    """Stages, repeats and layers per stage must make all layers (configs/types.py)."""
    pp, layers, per_stage = found["pp"], document.task.decoder_layers, document.count("num_layers_per_pipeline_stage")
    repeats = document.count("num_pipeline_repeats", -1)
    made = pp * per_stage * (max(1, layers // (pp * per_stage)) if repeats == -1 else repeats)
    if pp == 1 or not layers or made == layers:
        return None
    if layers % pp:
        near = f"ici_pipeline_parallelism x dcn_pipeline_parallelism = {near_parts(layers, pp)}"
    else:
        each = layers // pp
        v = max(n for n in range(1, min(each, found["virtual_stages"]) + 1) if each % n == 0)
        near = f"num_pipeline_repeats={v} with num_layers_per_pipeline_stage={each // v}"
    return f"pipeline stages x repeats x layers per stage = {made}, but the model has {layers} layers; nearest: {near}"


def _micro_batches(document: Document, found: Values) -> str | None:
    """A circular pipeline takes as many micro-batches as stages, or a multiple (configs/types.py)."""
    pp, number = found["pp"], document.count("num_pipeline_microbatches", -1)
    if number == -1 or number % pp == 0:
        return None
    near = near_multiples(pp, number)
    return f"num_pipeline_microbatches={number} is not a multiple of the {pp} pipeline stages; nearest: {near}"


_BASE, _FILE = "base_config", "config_file"


def _with_file(values: Values) -> dict[str, Any]:
    """Return the values with those of the file that they stand over, where that is not MaxText's own base.yml."""
    out = dict(values)
    if str(out.get(_BASE, "base.yml")).rpartition("/")[2] != "base.yml":
        out[_FILE] = out.pop(_BASE)
    read = {path.removeprefix(f"{_FILE}."): path for path in values if path.startswith(f"{_FILE}.")}
    if read:
        del out[_FILE]
    for name, path in read.items():
        out.setdefault(name, out.pop(path))
    return out


def _is_found(document: Document, found: Values) -> Values:
    if document.has(_FILE):
        raise PinError(f"{_BASE}={document.get(_FILE)!r} names a file that is not found; nearest: its path from here")
    return {}


def _on_tpu(setup: Setup) -> bool:
    return setup.task.hardware is not None and setup.task.hardware.vendor == _GOOGLE


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    """Return the command; several nodes find each other by the variables of max_utils.initialize_jax_for_gpu."""
    nodes, train = setup.task.num_nodes, f"python3 -m maxtext.trainers.pre_train.train {file}"
    if _on_tpu(setup):
        return [train]
    found = f'JAX_COORDINATOR_IP="$HEAD_NODE" JAX_COORDINATOR_PORT=29500 NNODES={nodes} NODE_RANK="$SLURM_NODEID" '
    return per_node(setup, f"{found if nodes > 1 else ''}{train}")


_MARKS = (*(f"{tier}_{axis}_parallelism" for tier in ("ici", "dcn") for axis in AXES), _BASE, "remat_policy")

MAXTEXT = Target(
    name="maxtext",
    about="YAML values over MaxText's base.yml, with axes inside nodes (ici) and between them (dcn)",
    stack="maxtext",
    files=((0.0, Yaml()),),
    fields=(
        constant(_BASE, "base.yml"),
        derived(_is_found),
        constant("hardware", "gpu", lambda s: not _on_tpu(s)),
        Field(("tp", "pp", "cp", "ep", "etp", "dp", "zero_stage", "zero_replicas"), _write_axes, _read_axes),
        Field(
            ("micro_batch_size", "num_micro_batches", "global_batch_size", "schedule", "virtual_stages"),
            _write_batch,
            _read_batch,
        ),
        derived(lambda d, found: {} if "num_micro_batches" in found else micro_batches(d, found), "num_micro_batches"),
        Field(
            ("seq_len",),
            lambda s: {"max_target_length": s.seq_len},
            lambda d, found: {"seq_len": d.count("max_target_length", 2048)},
        ),
        Field(("recompute",), _write_recompute, _read_recompute),
        Field(("offload",), _write_offload, _read_offload),
        Field(("precision",), _write_precision, _read_precision),
        Field(("attention",), _write_attention, _read_attention),
        Field(("context_method",), _write_context, _read_context),
        constant("packing", False, lambda s: not _on_tpu(s)),
        mtp_field(),
    ),
    marks=_MARKS,
    also=(NamedValues("maxtext", r"(?i)maxtext[\w./]*\btrain", _BASE),),
    marks_also=_MARKS,
    named_files=(_FILE,),
    renamed=_with_file,
    launch=_launch,
    cannot={
        "zero_stage": "parameters are sharded over fsdp (3), or only the optimizer over data (1)",
        "zero_replicas": "the data axis replicates what fsdp shards",
        "etp": "experts are split over the tensor axis",
        "schedule": "all forwards of a pipeline precede its backwards (GPipe); with repeats it is circular",
        "stages": "stages have equal numbers of layers",
        "recompute": "remat_policy is for all layers; its nearest policies are not the same set of tensors",
        "precision": "gradients have the dtype of the weights",
        "attention": "attention is dot_product or cudnn_flash_te on GPUs",
        "offload": "the optimizer, or the parameters with it",
        "context_method": "context_parallel_strategy is all_gather or ring, on TPUs also ulysses or usp",
        "sequence_parallel": "XLA decides where norms are split",
    },
    rules=(
        *(TargetRule(rule) for rule in (_world, _layers, _micro_batches, _of_tpus, _packed)),
        of_model("decoder_layers", "base_num_decoder_layers"),
        of_model("hidden_size", "base_emb_dim"),
        of_model("num_heads", "base_num_query_heads"),
        *(TargetRule(_former_policy, warns=True), MTP_RULE),
    ),
)
