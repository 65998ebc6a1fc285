"""Megatron-LM's flags, and the overrides of a recipe of Megatron Bridge: the same settings at other places.

`at` maps the name of a setting to its path in a file of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autoplan.config.kernels import FusedLoss
from autoplan.config.parallel import Attention, Launch, Mode
from autoplan.config.precision import read_precision
from autoplan.config.recompute import outside_graphs
from autoplan.errors import PinError
from autoplan.exporters.arguments import FlagsYaml
from autoplan.exporters.launching import processes, srun
from autoplan.exporters.megatron_degrees import (
    DEEPSPEED_CONFIG,
    EXPERT_TP,
    context_degree,
    context_field,
    experts_field,
    zero_field,
)
from autoplan.exporters.megatron_stages import At, read_stages, recompute_reader, write_recompute, write_stages
from autoplan.exporters.predicting import MTP_RULE, mtp_field
from autoplan.exporters.primus import PRIMUS, PrimusYaml
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    data_parallel,
    derived,
    micro_batches,
    of_model,
    precision_word,
    renamed,
    run_number,
    same,
)
from autoplan.exporters.scripts import Flags
from autoplan.exporters.setup import Setup
from autoplan.exporters.trainer_kinds import (
    MEGATRON_KINDS,
    OWN_RULES,
    own_arguments,
    read_own_adapters,
    read_own_length,
)

_BLACKWELL = 10.0  # compute capability

# -- the other fields --------------------------------------------------------------------------------------------------

_FUSED_ACCUMULATION = 2022.14  # --no-gradient-accumulation-fusion: merged on 22 February 2022
_OWN_LOSS = 2026.42
# cross_entropy_fusion_impl
_LOSSES = {FusedLoss.COMPILED: "native", FusedLoss.ONLINE: "te"}


def overlap_field(at: At) -> Field:
    """Return the field of what overlaps with computing, under the names that `at` gives."""
    flags = {"tp": "tp_comm_overlap", "ep": "overlap_moe_expert_parallel_comm"}

    def write(setup: Setup) -> Values:
        c, o = setup.config, setup.options
        used = {"tp": c.tp > 1, "ep": c.ep > 1}
        out: dict[str, Any] = {at(flag): True for n, flag in flags.items() if used[n] and n in o.overlap}
        if c.virtual_stages > 1 and "pp" not in o.overlap:
            out[at("no_overlap_p2p_communication")] = True
        if o.overlap_zero and c.dp * c.cp > 1:
            out[at("overlap_grad_reduce")] = True
            if o.overlap_gather and c.zero_stage:
                out[at("overlap_param_gather")] = True
        return out

    def read(document: Document, found: Values) -> Values:
        usual = set(document.usual_overlap) if document.partial else {"cp", "pp"}  # a ring always overlaps
        said = {name: bool(document.get(at(flag))) for name, flag in flags.items() if document.has(at(flag))}
        if document.has(at("no_overlap_p2p_communication")):
            said["pp"] = not document.get(at("no_overlap_p2p_communication"))
        overlap = {name for name in {*usual, *said} if said.get(name, True)}
        return {
            "overlap": sorted(overlap),
            "overlap_zero": bool(document.get(at("overlap_grad_reduce"))),
            "overlap_gather": bool(document.get(at("overlap_param_gather"))),
        }

    return Field(("overlap", "overlap_zero", "overlap_gather"), write, read)


# What is captured of a layer with experts, whose row counts the host must know (cuda_graph_modules, before 26.06
# cuda_graph_scope); of other layers everything
_CAPTURED = {
    Launch.GRAPHS: ["attn", "moe_router", "moe_preprocess"],
    Launch.ROUTER_GRAPHS: ["moe_router", "moe_preprocess"],
}


_CAPTURES = ("cuda_graph_modules", "cuda_graph_scope")


def _write_launch(at: At, setup: Setup) -> Values:
    launch, experts = setup.options.launch, setup.task.num_experts > 0
    if launch is Launch.BLOCKING:
        return {at("env.CUDA_LAUNCH_BLOCKING"): 1}
    if launch is Launch.FULL_GRAPHS:
        return {at("cuda_graph_impl"): "full_iteration"}
    dense_router = launch is Launch.ROUTER_GRAPHS and not experts
    if launch not in _CAPTURED or dense_router or outside_graphs(setup.recompute):
        return {}
    return {at("cuda_graph_impl"): "transformer_engine", **({at(_CAPTURES[0]): _CAPTURED[launch]} if experts else {})}


def _read_launch(at: At, document: Document) -> Values:
    if str(document.values.get(at("env.CUDA_LAUNCH_BLOCKING"), "0")) == "1":
        return {"launch": "blocking"}
    old = any([document.get(at(name)) for name in ("enable_cuda_graph", "external_cuda_graph")])
    meaning = {"none": "graphs" if old else "async", "full_iteration": "full_graphs"}
    meaning |= dict.fromkeys(("transformer_engine", "local"), "graphs")
    launch = document.word(at("cuda_graph_impl"), meaning, "graphs" if old else "async")
    given = [document.get(at(name)) for name in _CAPTURES]
    named: Any = next((each for each in given if each), [])
    parts = [str(part) for part in (named if isinstance(named, list) else [named])]
    if launch != "graphs" or not parts:
        return {"launch": launch}
    if "full_iteration" in parts:
        return {"launch": "full_graphs"}
    return {"launch": "router_graphs" if all(part.startswith("moe_") for part in parts) else launch}


def _launch(at: At) -> Field:
    """Return the field of CUDA graphs: their implementation and what they capture."""
    return Field(
        ("launch",), lambda setup: _write_launch(at, setup), lambda document, found: _read_launch(at, document)
    )


def _kernels(at: At, member: Callable[[str], Any]) -> tuple[Field, ...]:
    attention = {"unfused": "unfused", "flash2": "flash", "fused": "fused"}

    def write_attention(setup: Setup) -> Values:
        kernel = setup.options.attention_in(setup.mode)
        return {} if kernel is Attention.FLASH1 else {at("attention_backend"): member(attention[kernel])}

    def read_attention(document: Document, found: Values) -> Values:
        given = str(document.get(at("attention_backend")) or "auto").rpartition(".")[2]
        if given == "auto" and document.get(at("use_flash_attn")):  # the option before attention_backend
            return {"attention": "flash2"}
        if given in ("auto", "local"):
            return {}
        meaning = {word: name for name, word in attention.items()}
        if given not in meaning:
            raise PinError(f"attention_backend={given!r} is not known; use {', '.join(meaning)}, auto")
        return {"attention": meaning[given]}

    def sequence(setup: Setup) -> Values:
        used = setup.options.sequence_parallel and setup.config.tp > 1
        return {at("sequence_parallel"): True} if used else {}

    return (
        _launch(at),
        Field(("attention",), write_attention, read_attention),
        Field(
            ("sequence_parallel",),
            sequence,
            lambda d, found: {"sequence_parallel": bool(d.get(at("sequence_parallel"))) or found["tp"] == 1},
        ),
    )


def loss_fields(at: At, own_since: float = math.inf) -> tuple[Field, ...]:
    """Return the fields of the loss. `own_since`: the year from which the target has Megatron's own kernels alone."""
    meaning = {word: kernels for kernels, word in _LOSSES.items()}

    def writer(words: Mapping[FusedLoss, str]) -> Callable[[Setup], Values]:
        def write(setup: Setup) -> Values:
            word = words.get(setup.options.fused_loss)
            return {at("cross_entropy_loss_fusion"): True, at("cross_entropy_fusion_impl"): word} if word else {}

        return write

    def read(document: Document, found: Values) -> Values:
        if not document.get(at("cross_entropy_loss_fusion")):
            return {"fused_loss": FusedLoss.NO}
        given = document.get(at("cross_entropy_fusion_impl")) or "native"
        if given not in meaning:
            raise PinError(f"cross_entropy_fusion_impl={given!r} is not known; use {', '.join(meaning)}")
        return {"fused_loss": meaning[given]}

    own = dict.fromkeys(_LOSSES, "native")
    return (
        Field(("fused_loss",), writer(_LOSSES), read, until=own_since),
        Field(("fused_loss",), writer(own), read, since=own_since),
    )


def _offload(at: At) -> Field:
    def write(setup: Setup) -> Values:
        if setup.config.offload != ("optimizer",):
            return {}
        aware = {at("use_precision_aware_optimizer"): True}  # validate_args: its code is that of offload
        return {at("optimizer_cpu_offload"): True, at("optimizer_offload_fraction"): 1.0, **aware}

    def read(document: Document, found: Values) -> Values:
        fraction = document.get(at("optimizer_offload_fraction"))
        held = document.get(at("optimizer_cpu_offload")) and (fraction is None or float(fraction) > 0)
        held = held or document.get(at("cpu_optimizer"))  # of Megatron-DeepSpeed
        return {"offload": ("optimizer",) if held else ()}

    return Field(("offload",), write, read)


def _environment(at: At) -> Field:
    """CUDA_DEVICE_MAX_CONNECTIONS: the order of kernels and collectives (megatron/training/arguments.py)."""

    def write(setup: Setup) -> Values:
        c, device = setup.config, setup.task.hardware
        wide = device is not None and (device.compute_capability or 0) >= _BLACKWELL
        if c.zero_stage >= 2:  # Megatron-FSDP needs more than one
            number = 8
        elif wide or ("ep" in setup.options.overlap and c.ep > 1):
            number = 32
        else:
            number = 1
        return {at("env.CUDA_DEVICE_MAX_CONNECTIONS"): number}

    return Field((), write, lambda document, found: {})


_ALLOCATOR = "env.PYTORCH_CUDA_ALLOC_CONF"


def allocator(at: At, always: bool = False) -> Field:
    """The settings of torch's allocator. `always`: also where segments do not grow."""

    def write(setup: Setup) -> Values:
        grows = setup.options.expandable_segments
        return {at(_ALLOCATOR): f"expandable_segments:{grows}"} if grows or always else {}

    def read(document: Document, found: Values) -> Values:
        settings = str(document.values.get(at(_ALLOCATOR), "")).replace(" ", "").lower().split(",")
        said = {s.partition(":")[2] == "true" for s in settings if s.startswith("expandable_segments:")}
        return {"expandable_segments": said.pop()} if len(said) == 1 else {}

    return Field(("expandable_segments",), write, read)


def accumulation(setting: str, when: bool) -> Field:
    """Return the field of who adds gradients of weights: products do where a file says `setting=when`.

    What a file does not say is as its stack has it: DeepSpeed has no buffers of gradients to add to.
    """

    def write(setup: Setup) -> Values:
        off = setup.mode is Mode.FUSED and not setup.options.fused_accumulation
        return {setting: not when} if off else {}

    def read(document: Document, found: Values) -> Values:
        return {"fused_accumulation": bool(document.get(setting)) is when} if document.has(setting) else {}

    return Field(("fused_accumulation",), write, read, since=_FUSED_ACCUMULATION)


def _read_batch(at: At, document: Document, found: Values) -> Values:
    """Return the batch: one micro-batch per rank if nothing is said (validate_args), the only one before 2020-12."""
    if document.get(at("global_batch_size")) is not None:
        return {"global_batch_size": document.count(at("global_batch_size"))}
    at_once = found.get("dp", 0) * found.get("micro_batch_size", 0)
    return {"global_batch_size": at_once} if at_once and not document.partial else {}


# Options that old flags tell the time of: model_parallel_size and batch_size are of before 2020-11 and 2020-12,
# checkpoint_activations of before 2021-07 and activations_checkpoint_method of before 2022-05 (megatron/arguments.py).
# Megatron-DeepSpeed has the first one of these to this day.
def _age(values: Values) -> str | None:
    if PRIMUS in values:
        return "26.05"  # its Megatron is of before June 2026, when losses of Transformer Engine were refused
    old = "model_parallel_size" in values or ("batch_size" in values and "micro_batch_size" not in values)
    kept = values.get("checkpoint_activations") or values.get("activations_checkpoint_method")
    return "20.06" if old else "22.04" if kept and not values.get("deepspeed") else None


def fields_of(
    at: At, virtual: str, checkpoint: str, precision: tuple[Field, ...], member: Callable[[str], Any] = str
) -> tuple[Field, ...]:
    """Return all fields of a Megatron setup.

    Args:
        at: the place of an option by its name.
        virtual: name of the option for chunks per rank.
        checkpoint: name of the option for the optimizer's checkpoint format.
        precision: fields of the dtypes and of what else differs between targets.
        member: turns the name of an enum's member into its value.
    """
    return (
        renamed(at("tensor_model_parallel_size"), at("model_parallel_size"), "tp"),
        same(at("pipeline_model_parallel_size"), "pp", always=True),
        context_degree(at),
        derived(data_parallel, "dp"),
        renamed(at("micro_batch_size"), at("batch_size"), "micro_batch_size"),
        Field(
            ("global_batch_size",),
            lambda setup: {at("global_batch_size"): setup.global_batch_size},
            lambda document, found: _read_batch(at, document, found),
        ),
        derived(micro_batches, "num_micro_batches"),
        run_number(at("seq_length"), "seq_len"),
        Field(
            ("schedule", "virtual_stages", "stages"),
            write_stages(at, virtual),
            read_stages(at, virtual),
        ),
        experts_field(at),
        mtp_field(at),
        zero_field(at, checkpoint),
        context_field(at),
        Field(("recompute",), write_recompute(at), recompute_reader(at)),
        _offload(at),
        *precision,
        overlap_field(at),
        *_kernels(at, member),
        _environment(at),
    )


# -- precision ---------------------------------------------------------------------------------------------------------


FP8 = {"fp8": ("hybrid", "tensorwise"), "mxfp8": ("e4m3", "mxfp8")}


# Megatron-Core 0.11, March 2025: megatron/core/optimizer/__init__.py passes store_param_remainders on to Transformer
# Engine, where `use_precision_aware_optimizer_no_fp8_or_ds_fp8` of optimizer_config.py holds: parameters are bfloat16.
_REMAINDERS_SINCE = 2025.2


def keeps_remainders(base: str, year: float) -> bool:
    """Return True if a precision-aware optimizer keeps of masters only what bfloat16 parameters lack."""
    return year >= _REMAINDERS_SINCE and base in ("bf16", "fp4")


def _write_flags(setup: Setup) -> Values:
    parts = read_precision(setup.precision)
    base, narrow = parts.base, parts.gradients_16
    out: dict[str, Any] = {"fp16": True} if base == "fp16" else {} if base in ("fp32", "native") else {"bf16": True}
    if base in FP8:
        out["fp8_format"], out["fp8_recipe"] = FP8[base]
    if base == "fp4":
        out |= {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}
    if base == "fp16" and not narrow:
        out["accumulate_allreduce_grads_in_fp32"] = True
    elif narrow and base != "fp16":
        out["grad_reduce_in_bf16"] = True
    if parts.remainders_16 or parts.moments_16:
        out["use_precision_aware_optimizer"] = True
    if parts.moments_16:
        out |= {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    if setup.options.narrow_gather and base in FP8 and setup.config.zero_stage and not setup.config.offload:
        out["fp8_param_gather"] = True
    return out


def _read_flags(document: Document, found: Values) -> Values:
    get = document.get
    base = "fp16" if get("fp16") else "bf16" if get("bf16") else "fp32"
    if get("fp4_format"):
        base = "fp4"
    elif get("fp8_format"):
        base = "mxfp8" if get("fp8_recipe") == "mxfp8" else "fp8"
    narrow = get("grad_reduce_in_bf16") or get("main_grads_dtype") == "bf16"
    narrow = narrow if base != "fp16" else not get("accumulate_allreduce_grads_in_fp32")
    aware = bool(get("use_precision_aware_optimizer")) and not get("optimizer_cpu_offload")  # masters there are whole
    moments, split = aware and get("exp_avg_dtype") == "bf16", aware and keeps_remainders(base, document.year)
    return {
        "precision": precision_word(base, bool(narrow), bool(moments), split),
        "narrow_gather": bool(get("fp8_param_gather")),
    }


# -- the targets -------------------------------------------------------------------------------------------------------


def _flag_launch(about: Setup) -> list[str]:
    line = '"${MODEL_ARGS[@]}"'
    return [
        "",
        "# the flags of the model, its tokenizer and its data",
        "MODEL_ARGS=()",
        *srun(about, ["pretrain_gpt.py", line, '"${PLAN_ARGS[@]}"']),
    ]


def sequences_need_tp(path: str, then: str) -> Callable[[Document, Values], str | None]:
    """Return the rule that splitting of norms along the sequence needs tensor parallelism; `then`: what happens."""

    def found(document: Document, found: Values) -> str | None:
        return None if not document.get(path) or found.get("tp", 1) > 1 else f"{path} needs tp of at least 2; {then}"

    return found


def _said_of_experts(setting: str, why: str) -> TargetRule:
    """Return the rule that a file for a model with experts gives this setting, whose default is seldom meant."""

    def found(document: Document, found: Values) -> str | None:
        said = any(document.has(path) for path in (setting, f"model.{setting}"))
        if not document.task.num_experts or said or document.partial:
            return None
        return None if setting == EXPERT_TP and found["tp"] == 1 else f"{setting} is not said: {why}"

    return TargetRule(found, warns=True)


def _offload_is_aware(document: Document, found: Values) -> str | None:
    held, aware = (document.get(name) for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"))
    if not held or aware:
        return None
    return "optimizer_cpu_offload needs use_precision_aware_optimizer; nearest: --use-precision-aware-optimizer"


def _graphs_without_full(document: Document, found: Values) -> str | None:
    """CUDA graphs of layers exclude full recompute (megatron/core/transformer/transformer_config.py)."""
    if found.get("launch") not in ("graphs", "router_graphs") or not outside_graphs(found.get("recompute")):
        return None
    return f"{CANNOT['launch']} (cuda_graph_impl); nearest: without cuda_graph_impl"


def _whole_offload(document: Document, found: Values) -> str | None:
    share = document.get("optimizer_offload_fraction")
    if not document.get("optimizer_cpu_offload") or share is None or not 0 < float(share) < 1:
        return None
    return f"optimizer_offload_fraction={share}: the whole optimizer is priced on the host"


def _loss_is_own(document: Document, found: Values) -> str | None:
    """Megatron-LM refuses Transformer Engine's loss since 3 June 2026 (megatron/training/arguments.py)."""
    if found.get("fused_loss") is not FusedLoss.ONLINE or document.year < _OWN_LOSS:
        return None
    return "cross_entropy_fusion_impl=te is refused since June 2026; nearest: cross_entropy_fusion_impl=native"


MEGATRON_RULES = (
    TargetRule(processes),
    TargetRule(_graphs_without_full),
    of_model("decoder_layers", "num_layers", "model.num_layers"),
    MTP_RULE,
    of_model("num_experts", "num_experts", "model.num_moe_experts"),
    of_model("hidden_size", "hidden_size", "model.hidden_size"),
    of_model("num_heads", "num_attention_heads", "model.num_attention_heads"),
    _said_of_experts(EXPERT_TP, "it is as tp, which is often not meant; say 1 or tp"),
    _said_of_experts("moe_token_dispatcher_type", "Megatron's default allgather has no price; alltoall is priced"),
)
CANNOT = {
    "schedule": "Megatron has 1F1B and interleaved 1F1B",
    "offload": "Megatron keeps only the optimizer on the host, or activations of the first layers",
    "context_method": "Megatron has p2p, a2a, all_gather and a2a+p2p for all layers",
    "recompute": "Megatron recomputes modules of all layers, or as many first layers of every stage; in pipelines it "
    "offloads those of layers with experts alone",
    "document_len": "a property of the data",
    "zero_by_tensor": "Megatron's buffers hold many parameters",
    "attention": "Megatron chooses among unfused, flash and fused",
    "dispatcher": "Megatron sends 16 bits",
    "fused_loss": "Megatron has its own loss, and Transformer Engine's, which Megatron-LM refuses since June 2026",
    "launch": "CUDA graphs of layers exclude full recompute, recompute of experts and offloaded activations",
}

_MARKS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "use_distributed_optimizer"),
    *("model_parallel_size", "checkpoint_activations", "expert_model_parallel_size"),
)

MEGATRON_LM = Target(
    name="megatron-lm",
    about="flags of pretrain_gpt.py in a shell script, with torchrun or srun",
    stack="megatron-lm",
    files=((0.0, Flags("megatron-lm", (*_MARKS, "micro_batch_size"), launch=_flag_launch)),),
    fields=fields_of(
        lambda name: name,
        "num_virtual_stages_per_pipeline_rank",
        "ckpt_format",
        (
            Field(("precision", "narrow_gather"), _write_flags, _read_flags),
            *loss_fields(lambda name: name, _OWN_LOSS),
            allocator(lambda name: name),
            accumulation("no_gradient_accumulation_fusion", when=False),
            derived(read_own_length, "seq_len"),
            derived(read_own_adapters, "adapters"),
        ),
    ),
    marks=_MARKS,
    also=(FlagsYaml("megatron-lm"), PrimusYaml("megatron")),
    marks_also=(*_MARKS, PRIMUS),
    renamed=lambda values: own_arguments(values, MEGATRON_KINDS),
    named_files=(DEEPSPEED_CONFIG,),
    version_in=_age,
    launch=lambda setup, file, year: [f"bash {file}"],
    cannot=CANNOT,
    stack_of=lambda document: "megatron-deepspeed" if document.get("deepspeed") else "megatron-lm",
    rules=(
        *(*MEGATRON_RULES, TargetRule(_offload_is_aware), TargetRule(_loss_is_own)),
        TargetRule(sequences_need_tp("sequence_parallel", "it is off"), warns=True),
        TargetRule(_whole_offload, warns=True),
        *OWN_RULES,
    ),
)
