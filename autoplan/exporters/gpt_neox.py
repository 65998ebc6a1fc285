"""GPT-NeoX: its YAML file, whose values are those of NeoXArgs and, in sections, of DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoplan.config.parallel import Attention, Mode
from autoplan.config.precision import GRADIENTS_16
from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.arguments import NamedFiles
from autoplan.exporters.deepspeed import bf16_optimizer, read_batch, read_zero_offload, stated_stage, write_offload
from autoplan.exporters.record import (
    Document,
    Field,
    Recognised,
    Target,
    TargetRule,
    Values,
    base_of,
    data_parallel,
    derived,
    micro_batches,
    of_model,
    precision_word,
    run_number,
    switch,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Yaml

_Z = "zero_optimization."
_PIPE, _MODEL, _MICRO = "pipe_parallel_size", "model_parallel_size", "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_MARKS = (_PIPE, _PIPE.replace("_", "-"))
_WORDS = {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "fp32": "fp32"}


def _renamed(values: Values) -> dict[str, Any]:
    """Return the values with the names of NeoXArgs, in which `-` is `_`.

    Raises: Recognised for a part of a configuration, and for training on preferences, whose steps have more than a pass
        of language modelling.
    """
    out = {path.replace("-", "_") if "." not in path else path: value for path, value in values.items()}
    if _MICRO not in out and "train_batch_size" not in out:
        raise Recognised(
            f"the file has neither {_MICRO} nor train_batch_size: it is one of several that GPT-NeoX takes together; "
            "nearest: a script with its command, ./deepy.py train.py MODEL.yml TRAINING.yml"
        )
    how = out.get("train_impl", "normal")
    if how not in (None, "normal"):
        raise Recognised(
            f"train_impl={how} of GPT-NeoX is more than a step of language modelling, and only these are priced; "
            "nearest: train_impl=normal"
        )
    return out


def _degree(path: str, name: str) -> Field:
    """A degree of which 0 is 1: a model that is not in a PipelineModule, for `pipe_parallel_size`."""
    return Field(
        (name,),
        lambda setup: {path: getattr(setup.config, name)},
        lambda document, found: {name: max(1, document.count(path, 0 if name == "pp" else 1, also=(0,)))},
    )


def _write_zero(setup: Setup) -> Values:
    stage = setup.config.zero_stage
    out: dict[str, Any] = {_Z + "stage": stage, **write_offload(setup)}
    if setup.config.pp == 1 and stage >= 2:
        out[_PIPE] = 0  # PipelineEngine has ZeRO 0 and 1
    if stage in (1, 2):
        out[_Z + "overlap_comm"] = setup.options.overlap_zero
    bucket = setup.options.zero_bucket
    if stage == 1 and bucket is not None:
        out[_Z + "reduce_bucket_size"] = bucket
    return out


def _read_zero(document: Document, found: Values) -> Values:
    stage = stated_stage(document)
    _check_accumulation(document, stage)
    out: dict[str, Any] = {"zero_stage": stage, "zero_replicas": 1, "whole_sums": False, "all_reduced": False}
    if _base(document) == "bf16" and not found["offload"]:
        out |= bf16_optimizer(document.year, stage, _wide(document, stage), _piped(document))
    if out["zero_stage"] == 1 and not (out["whole_sums"] or out["all_reduced"]):
        out["zero_bucket"] = _elements(document, _Z + "reduce_bucket_size")
    return out


def _elements(document: Document, path: str) -> int:
    """Return a whole number that may be written as 5e8. PinError for anything else."""
    value = document.get(path)
    if isinstance(value, float) and value.is_integer() and value >= 1:
        return int(value)
    return document.count(path)


def _piped(document: Document) -> bool:
    return document.count(_PIPE, 0, also=(0,)) > 0


def _check_accumulation(document: Document, stage: int) -> None:
    if _piped(document) and stage >= 2:
        raise PinError(
            f"zero_optimization.stage={stage} is not for models in a pipeline (pipe_parallel_size="
            f"{document.get(_PIPE)}); nearest: stage 1, or pipe_parallel_size=0",
            ("zero_stage",),
        )


def _read_overlap(document: Document, found: Values) -> Values:
    # PipelineEngine reduces when the backward of all micro-batches has ended
    overlaps = bool(document.get(_Z + "overlap_comm")) and not _piped(document) and found["zero_stage"] in (1, 2)
    return {"overlap_zero": overlaps, "overlap_gather": False} if found["zero_stage"] < 3 else {}


def _base(document: Document) -> str:
    given = document.get("precision")
    if given is not None:
        return str(document.word("precision", _WORDS))
    if document.get("bf16.enabled"):
        return "bf16"
    if not document.get("fp16.enabled"):
        return "fp32"
    return "bf16" if document.get("fp16.type") == "bfloat16" else "fp16"


def _wide(document: Document, stage: int) -> bool:
    kept, base = document.get("data_types.grad_accum_dtype"), _base(document)
    return base == "fp32" or (kept == "fp32" if kept is not None else base == "bf16" and stage == 0)


def _write_precision(setup: Setup) -> Values:
    base = base_of(setup.precision)
    if base not in ("bf16", "fp16"):
        return {"precision": "fp32" if base == "fp32" else "bfloat16"}
    kept = base if GRADIENTS_16 in setup.precision else "fp32"
    word = "bfloat16" if base == "bf16" else base
    return {"precision": word, "data_types.grad_accum_dtype": kept}


def _read_precision(document: Document, found: Values) -> Values:
    wide = _wide(document, document.count(_Z + "stage", 0))
    return {"precision": precision_word(_base(document), not wide)}


def _write_recompute(setup: Setup) -> Values:
    return {"checkpoint_activations": setup.any_recompute != NONE}


def _read_recompute(document: Document, found: Values) -> Values:
    return {"recompute": FULL if document.get("checkpoint_activations") else NONE}


def _write_attention(setup: Setup) -> Values:
    kernel = setup.options.attention_in(setup.mode)
    if kernel is Attention.FUSED:
        return {"te_mha": True}
    return {"attention_config": [[["global" if kernel is Attention.UNFUSED else "flash"], "all"]]}


_KERNELS = {"global": "unfused", "flash": "flash2"}


def _read_attention(document: Document, found: Values) -> Values:
    given = document.get("attention_config")
    kinds = sorted({str(kind) for kind in _flat(given) if not isinstance(kind, int) and kind != "all"})
    other = [kind for kind in kinds if kind not in _KERNELS]
    if other:
        raise PinError(
            f"attention_config of {', '.join(other)} is not priced; nearest: {', '.join(_KERNELS)}", ("attention",)
        )
    if document.get("te_mha"):
        return {"attention": "fused"}
    if len(kinds) > 1:
        raise PinError(
            f"attention_config mixes {', '.join(kinds)}; one kernel is priced for all layers", ("attention",)
        )
    return {"attention": _KERNELS[kinds[0] if kinds else "global"]}


def _flat(value: Any) -> list[Any]:
    return [each for inner in value for each in _flat(inner)] if isinstance(value, list) else [value or "global"]


_FUSIONS = ("bias_gelu_fusion", "use_flashattn_swiglu", "te_layernorm_mlp")


def _read_mode(document: Document, found: Values) -> Values:
    return {"mode": "fused" if any([document.get(name) for name in _FUSIONS]) else "eager"}


def _read_stages(document: Document, found: Values) -> Values:
    """Return stages of as many layers; what a rest makes of them is left open."""
    layers, pp = len(document.task.layers), found["pp"]
    way = str(document.get("pipe_partition_method"))
    equal = pp > 1 and layers % pp == 0 and way.startswith(("type:", "uniform"))
    return {"schedule": "1F1B", **({"stages": (layers // pp,) * pp} if equal and layers else {})}


def _read_batch(document: Document, found: Values) -> Values:
    for path in (_MICRO, _STEPS, "train_batch_size"):
        if document.has(path):
            document.count(path)
    return read_batch(document, found)


def _batch_is_whole(document: Document, found: Values) -> str | None:
    micro, steps, batch = (document.count(path, 0) for path in (_MICRO, _STEPS, "train_batch_size"))
    at_once = micro * max(1, steps) * found.get("dp", 0)
    if not (micro and batch and at_once) or batch == at_once:
        return None
    return f"train_batch_size={batch} is not {_MICRO} x {_STEPS} x dp = {at_once}; nearest: train_batch_size={at_once}"


def _devices(document: Document, found: Values) -> str | None:
    said, devices = document.get("global_num_gpus"), document.task.num_devices
    if not said or not devices or said == devices:
        return None
    return f"global_num_gpus={said}, but there are {devices} devices; those of the cluster are priced"


_CHANGES: Mapping[
    str, tuple[str, Callable[[Any, Values], bool]]
] = {  # what changes time or memory, and is priced as if it were not there: path -> what it is
    "checkpoint_num_layers": ("groups of layers are recomputed together", lambda value, found: value != 1),
    "partition_activations": ("tensor-parallel ranks share kept inputs", lambda value, found: found["tp"] > 1),
    "checkpoint_in_cpu": ("kept inputs go to the host", lambda value, found: True),
    "use_bnb_optimizer": ("the optimizer's state is in 8 bits", lambda value, found: True),
    "moe_num_experts": ("experts are those of the model", lambda value, found: value > 1),
    "te_fp8_mha": ("attention in 8 bits", lambda value, found: True),
}


def _unpriced(document: Document, found: Values) -> str | None:
    listed = []
    for path, (what, matters) in _CHANGES.items():
        value = document.get(path)
        kept = path.startswith(("checkpoint", "partition")) and not document.get("checkpoint_activations")
        if value and not kept and matters(value, found):
            listed.append(f"{path}={value} ({what})")
    kind = document.get("optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw", "cpu_adam", "cpu_torch_adam"):
        listed.append(f"optimizer.type={kind} (the state of Adam is priced)")
    return f"not priced: {', '.join(listed)}" if listed else None


def _old_type(document: Document, found: Values) -> str | None:
    if document.get("fp16.type") != "bfloat16" or document.get("precision") is not None:
        return None
    return "fp16.type=bfloat16 is bfloat16 in GPT-NeoX of 2021 and 2022, as it is read; later ones train in float16"


GPT_NEOX = Target(
    name="gpt-neox",
    about="the YAML file of GPT-NeoX",
    stack="gpt-neox",
    files=((0.0, Yaml()),),
    fields=(
        _degree(_PIPE, "pp"),
        _degree(_MODEL, "tp"),
        derived(data_parallel, "dp"),
        switch("sequence_parallel", "sequence_parallel", lambda s: s.options.sequence_parallel and s.config.tp > 1),
        derived(read_zero_offload, "offload"),
        Field(("zero_stage", "zero_replicas", "whole_sums", "all_reduced", "zero_bucket"), _write_zero, _read_zero),
        derived(_read_overlap, "overlap_zero", "overlap_gather"),
        Field(
            ("micro_batch_size", "global_batch_size"),
            lambda s: {_MICRO: s.config.micro_batch_size, _STEPS: s.config.num_micro_batches},
            _read_batch,
        ),
        derived(micro_batches, "num_micro_batches"),
        run_number("seq_length", "seq_len"),
        Field(("precision",), _write_precision, _read_precision),
        Field(("recompute",), _write_recompute, _read_recompute),
        Field(("attention",), _write_attention, _read_attention),
        Field(("mode",), lambda s: {"bias_gelu_fusion": s.mode is Mode.FUSED}, _read_mode),
        derived(_read_stages, "schedule", "stages"),
    ),
    marks=_MARKS,
    launch=lambda setup, file, year: [f"./deepy.py train.py {file}"],
    cannot={
        "cp": "GPT-NeoX has no context parallelism",
        "ep": "experts are dropless ones of the model, spread over tp",
        "etp": "experts are dropless ones of the model, spread over tp",
        "schedule": "DeepSpeed's pipelines are 1F1B",
        "virtual_stages": "a rank holds one stage",
        "stages": "pipe_partition_method cuts stages",
        "zero_stage": "PipelineEngine has ZeRO 0 and 1; bfloat16 has BF16_Optimizer, which is ZeRO 1",
        "zero_replicas": "ZeRO shards over all of dp",
        "offload": "parameters are on the host only with ZeRO 3",
        "overlap_zero": "PipelineEngine reduces at the end of all backwards",
        "overlap_gather": "overlap_comm overlaps the gradients alone",
        "recompute": "checkpoint_activations is for all layers",
        "precision": "precision is fp16, bfloat16 or fp32",
        "mode": "kernels are fused by bias_gelu_fusion and its like, not compiled",
        "overlap": "tensor parallelism does not overlap",
        "whole_sums": "BF16_Optimizer has them, with sums in 32 bits",
    },
    rules=(
        TargetRule(_batch_is_whole),
        TargetRule(_devices, warns=True),
        TargetRule(_unpriced, warns=True),
        TargetRule(_old_type, warns=True),
        of_model("decoder_layers", "num_layers"),
        of_model("hidden_size", "hidden_size"),
        of_model("num_heads", "num_attention_heads"),
    ),
    renamed=_renamed,
    also=(NamedFiles(r"deepy\.py$", ("-d", "--conf_dir"), ".yml"),),
    marks_also=_MARKS,
)
