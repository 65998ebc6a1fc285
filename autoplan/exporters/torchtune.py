"""torchtune: the YAML file of a recipe, of fine-tuning on all weights or with adapters."""

from __future__ import annotations

from typing import Any

from autoplan.config.adapters import ALL_LINEAR, Adapters, read_adapters
from autoplan.config.context_methods import GATHER
from autoplan.config.kernels import FusedLoss
from autoplan.config.parallel import Mode
from autoplan.config.recompute import BY_OPERATION, FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.launching import srun
from autoplan.exporters.record import (
    METHODS_BY_ROTATE,
    ROTATE_METHODS,
    Document,
    Field,
    Recognised,
    Target,
    TargetRule,
    Values,
    data_parallel,
    derived,
    micro_batches,
    near_multiples,
    near_parts,
    run_number,
    same,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import ReferringYaml

_SHARD, _REPLICATE = "data_parallel_shard_dim", "data_parallel_replicate_dim"
_CHECKPOINTS, _MODEL = "enable_activation_checkpointing", "model._component_"
# Sections of recipes whose steps are more than one of language modelling, and of those that do not train
_OTHER = {
    **dict.fromkeys(("teacher_model", "kd_loss"), "distillation"),
    **dict.fromkeys(
        ("policy_model", "reward_and_value_model", "grpo_samples", "orchestration"), "training with rewards"
    ),
    **dict.fromkeys(("ref_checkpointer", "reference_checkpointer"), "training on pairs of answers"),
}
_NO_TRAINING = ("tasks", "max_new_tokens", "quantizer")


def _renamed(values: Values) -> dict[str, Any]:
    """Return the values. Raises: Recognised for a recipe that is not one of language modelling."""
    sections = {path.partition(".")[0] for path in values}
    loss = str(values.get("loss._component_", ""))
    kind = next((kind for name, kind in _OTHER.items() if name in sections), None)
    if kind is None and ".rlhf." in loss:
        kind = f"training with {loss.rpartition('.')[2]}"
    if kind is not None:
        raise Recognised(
            f"{kind} of torchtune is more than a step of language modelling, and only these are priced; nearest: a "
            "recipe of full_finetune_distributed or lora_finetune_distributed"
        )
    other = next((name for name in _NO_TRAINING if name in sections), None)
    if other is not None and "optimizer" not in sections:
        raise Recognised(f"a file of torchtune with {other} trains nothing; nearest: a recipe of fine-tuning")
    return dict(values)


def _write_mesh(setup: Setup) -> Values:
    c = setup.config
    return {_SHARD: c.dp // c.zero_replicas, _REPLICATE: c.zero_replicas}


def _read_mesh(document: Document, found: Values) -> Values:
    """dp is what the devices leave, or what the file states; `fully_shard` shards over the rest of dp, and cp."""
    copies = document.count(_REPLICATE)
    shards = document.count(_SHARD, -1)
    given = {"dp": copies * shards} if shards > 0 else data_parallel(document, found)
    dp = given.get("dp", 0)
    if dp and dp % copies:
        raise PinError(f"{_REPLICATE}={copies} does not divide dp={dp}; nearest: {near_parts(dp, copies)}", ("dp",))
    one = bool(dp) and dp * found["cp"] == 1
    reshards = document.get("fsdp_reshard_after_forward") is not False
    return {**given, "zero_stage": 0 if one else 3 if reshards else 2, "zero_replicas": copies}


def _write_zero(setup: Setup) -> Values:
    return {"fsdp_reshard_after_forward": False} if setup.config.zero_stage == 2 else {}


def _world(document: Document, found: Values) -> str | None:
    used, devices = found.get("dp", 0) * found["cp"] * found["tp"], document.task.num_devices
    if not used or not devices or used == devices:
        return None
    near = near_multiples(found["tp"] * found["cp"], devices)
    return f"dp x cp x tp = {used}, but there are {devices} devices; nearest: {_SHARD}=-1, on {near} devices"


def _is_sharded(document: Document, found: Values) -> str | None:
    copies, dp = document.count(_REPLICATE), found.get("dp", 0)
    if copies == 1 or dp != copies or found["cp"] > 1:
        return None
    return f"{_REPLICATE}={copies} leaves nothing to shard, and gradients are not summed; nearest: {_REPLICATE}=1"


def _plan_is_given(document: Document, found: Values) -> str | None:
    stated = document.has("tensor_parallel_plan")
    if found["tp"] == 1 or stated or not document.has(_MODEL):  # a file of a plan has no model
        return None
    given = f"tensor_parallel_dim={found['tp']} needs tensor_parallel_plan"
    return f"{given}; nearest: _component_: torchtune.models.llama3.base_llama_tp_plan"


_DTYPES = {"bf16": "native", "fp32": "fp32"}


def _write_dtype(setup: Setup) -> Values:
    return {"dtype": "fp32" if setup.precision == "fp32" else "bf16"}


def _read_dtype(document: Document, found: Values) -> Values:
    return {"precision": document.word("dtype", _DTYPES, "fp32")}


_AC_MODE, _AC_OPTION = "ac_mode", "ac_option"


def _write_recompute(setup: Setup) -> Values:
    if setup.any_recompute == BY_OPERATION:
        return {_CHECKPOINTS: False, _AC_MODE: "selective", _AC_OPTION: "op"}
    return {_CHECKPOINTS: setup.any_recompute != NONE}


def _read_recompute(document: Document, found: Values) -> Values:
    whole, mode = bool(document.get(_CHECKPOINTS)), document.get(_AC_MODE)
    if mode in (None, "none", "full") or whole:
        if whole and mode is not None:
            return {"recompute": NONE}  # each of both excludes the other
        return {"recompute": FULL if whole or mode == "full" else NONE}
    option = document.get(_AC_OPTION)
    if option == "op":
        return {"recompute": BY_OPERATION}
    if option in (1, "1"):
        return {"recompute": FULL}
    raise PinError(
        f"ac_mode={mode!r} with ac_option={option!r} is not priced; nearest: ac_option=op, or {_CHECKPOINTS}=true",
        ("recompute",),
    )


def _write_adapters(setup: Setup) -> Values:
    if setup.adapters is None:
        return {}
    made = read_adapters(setup.adapters)
    names = made.targets if made.targets != (ALL_LINEAR,) else tuple(_ATTENTION.values())
    known = {name: word for word, name in _ATTENTION.items()}
    return {
        "model.lora_rank": made.rank,
        "model.lora_attn_modules": [known[name] for name in names if name in known],
        "model.apply_lora_to_mlp": made.targets == (ALL_LINEAR,) or any(name in _MLP for name in names),
    }


_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")


def _read_adapters(document: Document, found: Values) -> Values:
    builder = str(document.get(_MODEL) or "").rpartition(".")[2]
    packed = builder.startswith("qlora") or bool(document.get("model.quantize_base"))
    if not document.has("model.lora_rank") and not builder.startswith(("lora", "qlora")):
        return {}
    listed = document.get("model.lora_attn_modules")
    strange = [name for name in listed or () if name not in _ATTENTION] if isinstance(listed, list | None) else [listed]
    if strange:
        raise PinError(f"model.lora_attn_modules has {strange[0]!r}; use {', '.join(_ATTENTION)}", ("adapters",))
    names = [_ATTENTION[name] for name in listed or ()]
    names += list(_MLP) if document.get("model.apply_lora_to_mlp") else []
    return {"adapters": str(Adapters(document.count("model.lora_rank", 8), tuple(names), packed))}


def _write_offload(setup: Setup) -> Values:
    return {"fsdp_cpu_offload": True} if setup.config.offload else {}


def _read_offload(document: Document, found: Values) -> Values:
    return {"offload": ("parameters",) if document.get("fsdp_cpu_offload") else ()}


def _write_rotation(setup: Setup) -> Values:
    word = ROTATE_METHODS.get(setup.context_method or "")
    return {"context_parallel_rotate_method": word} if word is not None else {}


def _read_rotation(document: Document, found: Values) -> Values:
    if found["cp"] == 1:
        return {"context_method": None}
    return {"context_method": document.word("context_parallel_rotate_method", METHODS_BY_ROTATE, GATHER)}


def _read_batch(document: Document, found: Values) -> Values:
    micro, steps = document.count("batch_size"), document.count("gradient_accumulation_steps")
    batch = {"global_batch_size": micro * steps * found["dp"]} if "dp" in found else {}
    return {"micro_batch_size": micro, **batch}


def _unpriced(document: Document, found: Values) -> str | None:
    kind = str(document.get("optimizer._component_") or "").rpartition(".")[2]
    listed = [f"optimizer {kind} (the state of AdamW is priced)"] if kind not in ("", "AdamW", "Adam") else []
    words = {
        "optimizer_in_bwd": "gradients do not stay",
        "enable_activation_offloading": "kept inputs go to the host",
        "enable_fp8_training": "products in 8 bits",
        "quantizer._component_": "weights are rounded in each step",
        "model.use_dora": "magnitudes of DoRA",
        "model.apply_lora_to_output": "an adapter of the head",
    }
    listed += [f"{path}={document.get(path)} ({why})" for path, why in words.items() if document.get(path)]
    return f"not priced: {', '.join(listed)}" if listed else None


_LOSS = "loss._component_"
_LOSSES = {
    "torchtune.modules.loss.LinearCrossEntropyLoss": str(FusedLoss.CHUNKED),
    "torchtune.modules.loss.CEWithChunkedOutputLoss": str(FusedLoss.CHUNKED),
    "torch.nn.CrossEntropyLoss": str(FusedLoss.TORCH),
}


def _write_loss(setup: Setup) -> Values:
    path = next((path for path, word in _LOSSES.items() if word == setup.options.fused_loss), None)
    return {} if path is None else {_LOSS: path}


def _read_loss(document: Document, found: Values) -> Values:
    word = _LOSSES.get(str(document.get(_LOSS)))
    return {} if word is None else {"fused_loss": word}


def _is_bound(document: Document, found: Values) -> str | None:
    length = document.get("tokenizer.max_seq_len")
    if length is None or found.get("seq_len") != length or not document.has("dataset"):
        return None
    if not document.get("dataset.packed"):
        return f"{length} tokens are the most that a sequence has, since dataset.packed is off (give --seq-len)"
    return "attention stays within packed examples; give --document-len, their length"


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    recipe = "full_finetune_distributed" if setup.adapters is None else "lora_finetune_distributed"
    *head, line = srun(setup, [recipe, "--config", file])
    return [*head, line.replace("torchrun", "tune run", 1)]  # whose options before the recipe are torchrun's


TORCHTUNE = Target(
    name="torchtune",
    about="values of the YAML file of a recipe, full_finetune_distributed or lora_finetune_distributed",
    stack="torchtune",
    files=((0.0, ReferringYaml()),),
    fields=(
        same("tensor_parallel_dim", "tp"),
        same("context_parallel_dim", "cp"),
        Field(("dp", "zero_stage", "zero_replicas"), _write_mesh, _read_mesh),
        Field((), _write_zero, lambda document, found: {}),
        Field(("context_method",), _write_rotation, _read_rotation),
        Field(("offload",), _write_offload, _read_offload),
        Field(
            ("micro_batch_size", "global_batch_size"),
            lambda s: {
                "batch_size": s.config.micro_batch_size,
                "gradient_accumulation_steps": s.config.num_micro_batches,
            },
            _read_batch,
        ),
        derived(micro_batches, "num_micro_batches"),
        run_number("tokenizer.max_seq_len", "seq_len"),
        Field(("precision",), _write_dtype, _read_dtype),
        Field(("recompute",), _write_recompute, _read_recompute),
        Field(("adapters",), _write_adapters, _read_adapters),
        Field(("fused_loss",), _write_loss, _read_loss),
        Field(
            ("mode",),
            lambda s: {"compile": s.mode is Mode.COMPILED},
            lambda document, found: {"mode": "compiled" if document.get("compile") else "eager"},
        ),
    ),
    marks=(_CHECKPOINTS, "tokenizer._component_"),
    launch=_launch,
    elsewhere={"attention": "PyTorch's scaled_dot_product_attention, or flex_attention for packed sequences"},
    cannot={
        "pp": "torchtune has no pipelines",
        "schedule": "torchtune has no pipelines",
        "virtual_stages": "torchtune has no pipelines",
        "ep": "torchtune has no expert parallelism",
        "etp": "experts are split by tensor_parallel_plan",
        "zero_stage": "fully_shard keeps gathered parameters (2) or frees them (3)",
        "context_method": "context_parallel_rotate_method is allgather or alltoall",
        "offload": "fully_shard offloads parameters, gradients and optimizer together",
        "precision": "dtype is bf16 or fp32, of parameters, gradients and moments",
        "recompute": "one kind for all layers: none, full, or ac_mode selective with ac_option op",
        "fused_loss": "a loss over chunks of the logits, or PyTorch's",
        "mode": "torchtune runs PyTorch's modules, or compiles each layer",
        "sequence_parallel": "a property of tensor_parallel_plan",
        "overlap": "tensor parallelism does not overlap",
    },
    rules=(
        TargetRule(_world),
        TargetRule(_is_sharded),
        TargetRule(_plan_is_given),
        TargetRule(_unpriced, warns=True),
        TargetRule(_is_bound, warns=True),
    ),
    renamed=_renamed,
)
