"""OLMo of Ai2 (the trainer of OLMo 1 and 2 7B and 13B): its YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoplan.config.parallel import FusedLoss, Mode
from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.arguments import NamedFiles
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
    of_model,
    precision_word,
    run_number,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.sharding_words import SHARDING_CANNOT, read_hybrid, read_strategy, strategy_word
from autoplan.exporters.syntax import ReferringYaml

_F, _MICRO, _BATCH = "fsdp.", "device_train_microbatch_size", "global_train_batch_size"
_STRATEGY, _REPLICAS, _AC = (
    f"{_F}sharding_strategy",
    f"{_F}hybrid_sharding_num_model_replicas",
    "activation_checkpointing",
)
_WORDS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"}


_MARKS = ("distributed_strategy", f"{_F}wrapping_strategy", "softmax_auxiliary_loss", f"{_F}precision")


def _write_sharding(setup: Setup) -> Values:
    c = setup.config
    if c.zero_stage == 0:
        return {"distributed_strategy": "ddp", "ddp.grad_sync_mode": "batch"}
    out: dict[str, Any] = {_STRATEGY: strategy_word(setup), f"{_F}wrapping_strategy": "by_block"}
    out |= {"distributed_strategy": "fsdp", f"{_F}precision": "mixed"}
    return out | ({_REPLICAS: c.zero_replicas} if c.zero_replicas > 1 else {})


def _read_sharding(document: Document, found: Values) -> Values:
    kind = document.word("distributed_strategy", {"fsdp": "FULL_SHARD", "ddp": "NO_SHARD", "single": "NO_SHARD"})
    return {"zero_stage": 0} if kind == "NO_SHARD" else read_strategy(document, _STRATEGY)


def _read_batch(document: Document, found: Values) -> Values:
    return {"micro_batch_size": document.count(_MICRO), "global_batch_size": document.count(_BATCH)}


def _some_layers(layers: Sequence[str], number: int) -> dict[str, str]:
    return {name: FULL for k, name in enumerate(layers) if k % number == 0}


def _write_recompute(setup: Setup) -> Values:
    given = setup.recompute
    if isinstance(given, str):
        return {_AC: None if given == NONE else "whole_layer"}
    again = {name: FULL for name, how in zip(setup.task.layers, given, strict=True) if how != NONE}
    word = next((word for word, n in _PARTS.items() if _some_layers(setup.task.layers, n) == again), "whole_layer")
    return {_AC: word}


_PARTS = {"one_in_two": 2, "one_in_three": 3, "one_in_four": 4, "one_in_eight": 8}


def _read_recompute(document: Document, found: Values) -> Values:
    """Layers with these numbers are recomputed (`should_checkpoint_block` of olmo/model.py)."""
    given, layers = document.get(_AC), document.task.layers
    if given in (None, False):
        return {"recompute": NONE}
    if given in (True, "whole_layer"):
        return {"recompute": FULL}
    if given not in _PARTS:
        raise PinError(f"{_AC}={given} is not priced; nearest: whole_layer, {', '.join(_PARTS)}", ("recompute",))
    return {"recompute": _some_layers(layers, _PARTS[given])} if layers else {}


def _read_precision(document: Document, found: Values) -> Values:
    return {"precision": precision_word(document.word("precision", _WORDS, "fp32"), False)}


def _biased(document: Document) -> bool:
    return bool(document.get("model.alibi")) and not document.get("model.flash_attention")


def _is_compiled(document: Document) -> bool:
    return document.has("compile") and document.values.get("compile", True) is not None


def _whole_model(document: Document, found: Values) -> str | None:
    sharded = document.get("distributed_strategy") == "fsdp" and found["zero_stage"] == 3
    if not sharded or document.get(f"{_F}wrapping_strategy") is not None:
        return None
    return "fsdp.wrapping_strategy is not stated: the whole model is gathered at once, and is priced block by block"


def _unpriced(document: Document, found: Values) -> str | None:
    kind, kept = document.get("optimizer.name"), document.get(f"{_F}precision")
    listed = [] if kind in (None, "adamw") else [f"optimizer.name={kind} (the state of AdamW is priced)"]
    listed += (
        ["fsdp.precision=pure (gradients are reduced in 32 bits)"] if kept == "pure" and found["zero_stage"] else []
    )
    return f"not priced: {', '.join(listed)}" if listed else None


OLMO = Target(
    name="olmo",
    about="values of the YAML file of OLMo's scripts/train.py",
    stack="olmo",
    files=((0.0, ReferringYaml()),),
    fields=(
        derived(data_parallel, "dp"),
        Field(("zero_stage",), _write_sharding, _read_sharding),
        derived(lambda d, found: read_hybrid(d, found, _STRATEGY, _REPLICAS), "zero_replicas"),
        derived(lambda d, found: {"offload": ()}, "offload"),
        Field(
            ("micro_batch_size", "global_batch_size"),
            lambda s: {_BATCH: s.global_batch_size, _MICRO: s.config.micro_batch_size},
            _read_batch,
        ),
        derived(micro_batches, "num_micro_batches"),
        run_number("model.max_sequence_length", "seq_len"),
        Field(
            ("recompute",),
            _write_recompute,
            _read_recompute,
        ),
        Field(
            ("precision",),
            lambda s: {"precision": {b: word for word, b in _WORDS.items()}.get(base_of(s.precision), "amp_bf16")},
            _read_precision,
        ),
        # without flash_attention it is PyTorch's scaled_dot_product_attention, which has no bias but ALiBi's
        derived(lambda d, found: {"attention": "unfused" if _biased(d) else "flash2"}, "attention"),
        Field(
            ("fused_loss",),
            lambda s: {"fused_loss": s.options.fused_loss is not FusedLoss.TORCH},
            lambda d, found: {"fused_loss": str(FusedLoss.FLASH if d.get("fused_loss") else FusedLoss.TORCH)},
        ),
        Field(
            ("mode",),
            lambda s: {"compile.fullgraph": False} if s.mode is Mode.COMPILED else {},
            lambda d, found: {"mode": "compiled" if _is_compiled(d) else "eager"},
        ),
    ),
    marks=_MARKS,
    also=(NamedFiles(r"scripts/train\.py$", (), ".yaml"),),
    marks_also=_MARKS,
    launch=lambda setup, file, year: srun(setup, ["scripts/train.py", file]),
    cannot={
        **SHARDING_CANNOT,
        "offload": "it keeps everything on the device",
        "attention": "flash-attention, or PyTorch's kernel",
        "fused_loss": "fused_loss is on or off, with flash-attention's kernel",
    },
    rules=(
        TargetRule(_whole_model, warns=True),
        TargetRule(_unpriced, warns=True),
        of_model("decoder_layers", "model.n_layers"),
        of_model("hidden_size", "model.d_model"),
        of_model("num_heads", "model.n_heads"),
    ),
)
